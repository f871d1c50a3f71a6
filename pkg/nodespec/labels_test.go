package nodespec_test

import (
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

func TestDesired_Labels(t *testing.T) {
	const (
		region, zone, instanceType             = "topology.kubernetes.io/region", "topology.kubernetes.io/zone", "node.kubernetes.io/instance-type"
		betaRegion, betaZone, betaInstanceType = "failure-domain.beta.kubernetes.io/region", "failure-domain.beta.kubernetes.io/zone", "beta.kubernetes.io/instance-type"
		lifecycle, clusterName                 = "node.cloudprovider.kubernetes.io/lifecycle", "node.cloudprovider.kubernetes.io/clustername"
	)

	type labels = map[string]string

	tooLong := strings.Repeat("a", 64)

	for _, test := range []struct {
		name                       string
		metadata                   runtime.PlatformMetadataSpec
		clusterName, configuration string
		// want are the labels besides the platform.
		want     labels
		problems []string
	}{
		{name: "platform only", want: labels{}},
		{
			name: "region, zone and instance type with beta labels", metadata: runtime.PlatformMetadataSpec{Region: "eu-1", Zone: "eu-1a", InstanceType: "m5.large"},
			want: labels{region: "eu-1", betaRegion: "eu-1", zone: "eu-1a", betaZone: "eu-1a", instanceType: "m5.large", betaInstanceType: "m5.large"},
		},
		{name: "spot instance", metadata: runtime.PlatformMetadataSpec{Spot: true}, want: labels{lifecycle: "spot"}},
		{name: "cluster name of Talos", clusterName: "prod", want: labels{clusterName: "prod"}},
		{name: "configured cluster name", clusterName: "prod", configuration: "shop", want: labels{clusterName: "shop"}},
		{name: "invalid region", metadata: runtime.PlatformMetadataSpec{Region: "eu/1", Zone: "eu-1a"}, want: labels{zone: "eu-1a", betaZone: "eu-1a"}, problems: []string{region}},
		{
			name: "zone too long", metadata: runtime.PlatformMetadataSpec{Zone: tooLong, InstanceType: tooLong[1:]},
			want: labels{instanceType: tooLong[1:], betaInstanceType: tooLong[1:]}, problems: []string{zone},
		},
		{name: "invalid instance type", metadata: runtime.PlatformMetadataSpec{InstanceType: "Small Instance"}, want: labels{}, problems: []string{instanceType}},
		{name: "invalid cluster name", clusterName: "Prod (Frankfurt)", want: labels{}, problems: []string{clusterName}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := on(test.metadata)
			in.Machine.Platform.Platform, in.Machine.Platform.InstanceID, in.Machine.Platform.ProviderID = "aws", "i-1", "aws:///eu-1a/i-1"
			in.Machine.ClusterName, in.Options.ClusterName = test.clusterName, test.configuration

			test.want["node.cloudprovider.kubernetes.io/platform"] = "aws"
			assert.Equal(t, test.want, specOf(t, in).Labels)
			assert.Equal(t, test.problems, problemKeys(t, in))
		})
	}
}

func TestProblem_String(t *testing.T) {
	in := running()
	in.Machine.Platform.Zone = "rack 7"

	_, problems := desired(t, in)
	require.NotEmpty(t, problems)

	for _, part := range []string{"topology.kubernetes.io/zone", `"rack 7"`, "alphanumeric"} {
		assert.Contains(t, problems[0].String(), part)
	}

	long := nodespec.Problem{Key: "labels[a]", Value: strings.Repeat("ä", 100), Why: "too long", Rule: "r"}
	assert.Equal(t, `rule "r": labels[a]="`+strings.Repeat("ä", 80)+`" omitted: too long`, long.String())
}
