package config_test

import (
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// upstream is a file with every key of the upstream Talos CCM, as spelled in its docs and in its code.
const upstream = `
global:
  # endpoints: [192.0.2.1]
  clusterName: prod
  PreferIPv6: true
transformations:
  - name: office
    nodeSelector:
      - name: virtual machines
        matchExpressions:
          - key: platform
            operator: In
            values:
              - nocloud
          - key: hostname
            operator: Regexp
            values:
              - ^db-\w+$
      - matchExpressions:
          - key: instanceid
            operator: Exists
          - key: ZONE
            operator: DoesNotExist
    annotations:
      example.org/cloud-id: '{{ regexFindString "^db-([a-z]+)(.*)$" .Hostname 1 }}'
      example.org/empty:
    labels:
      node-role.kubernetes.io/db: ""
      example.org/capacity: "{{ if .Spot }}spot{{ else }}on-demand{{ end }}"
      example.org/cores: 8
    taints:
      node.cloudprovider.kubernetes.io/storage-type: "ceph:NoSchedule"
    platformMetadata:
      region: "{{ .Region }}-office"
      Zone: rack-1
      InstanceType: "{{ coalesce .InstanceType .SKUNumber }}"
      providerId: 'proxmox://office/{{ getValue .SerialNumber "i" }}'
    features:
      publicIPDiscovery: true
  - annotations: {}
`

func TestParse_AcceptsUpstreamFile(t *testing.T) {
	compiled, err := config.Parse("ccm-config.yaml", []byte(upstream))
	require.NoError(t, err)
	assert.Equal(t, "prod", compiled.ClusterName)
	assert.True(t, compiled.PreferIPv6)

	result := compiled.Rules.Apply(rules.Facts{Machine: machine.Machine{
		Platform: runtime.PlatformMetadataSpec{Platform: "nocloud", Hostname: "db-blue7", Region: "eu"},
		System:   hardware.SystemInformationSpec{SKUNumber: "X10", SerialNumber: "ds=nocloud;i=107"},
	}})
	assert.Equal(t, new(true), result.PublicIPDiscovery)
	requireResult(t, rendered{
		Labels:      map[string]string{"node-role.kubernetes.io/db": "", "example.org/capacity": "on-demand", "example.org/cores": "8"},
		Annotations: map[string]string{"example.org/cloud-id": "blue", "example.org/empty": ""},
		Taints:      []string{"node.cloudprovider.kubernetes.io/storage-type=ceph:NoSchedule"},
		PlatformMetadata: &runtime.PlatformMetadataSpec{
			Platform: "nocloud", Hostname: "db-blue7", Region: "eu-office", Zone: "rack-1", InstanceType: "X10", ProviderID: "proxmox://office/107",
		},
	}, result)
}

// TestParse_RefusesKeysThatUpstreamIgnores refuses a file whose keys have never had an effect.
func TestParse_RefusesKeysThatUpstreamIgnores(t *testing.T) {
	assertProblems(t, `
global:
  endpoints: [192.0.2.1]
transformations:
  - name: web
    nodeSelector:
      - matchExpressions:
          - {key: platform, operator: In, values: [metal]}
        labels:
          node-role.kubernetes.io/web: ""
    features:
      publicIPPredict: true
    platformMetadata:
      hostname: web-1
`, ":3:3: global.endpoints: unknown key", `:9:9: transformations[0].nodeSelector[0].labels (rule "web"): unknown key; expected name, matchExpressions`,
		`:12:7: transformations[0].features.publicIPPredict (rule "web"): unknown key`, `:14:7: transformations[0].platformMetadata[hostname] (rule "web"): `)
}
