package preview_test

import (
	"cmp"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// compile returns the compiled rules.
func compile(t testing.TB, list ...rules.Rule) *rules.Set {
	t.Helper()

	compiled, errs := rules.Compile(list, nil, nil)
	require.Empty(t, errs)

	return compiled
}

// renderOne returns the report of one machine with rules.
func renderOne(t *testing.T, m machine.Machine, list ...rules.Rule) preview.Report {
	t.Helper()

	return preview.Render(m, preview.Kubelet{}, nodespec.Options{Rules: compile(t, list...)})
}

// everyKind is a rule that sets one value of each kind and has one invalid value.
func everyKind() rules.Rule {
	return rules.Rule{
		Name:             "web",
		Labels:           map[string]string{"example.org/role": "web", "bad": "{{ .SerialNumber }} is none"},
		Annotations:      map[string]string{"example.org/serial": "{{ .SerialNumber }}"},
		Taints:           map[string]string{"dedicated": "web:NoSchedule"},
		PlatformMetadata: map[string]string{"Zone": "a"},
		Addresses:        map[string]string{"ExternalIP": "198.51.100.5"},
		AddressCIDRs:     []string{"198.51.100.0/24"},
	}
}

// flat converts a Report to a nodespec.Spec.
func flat(r preview.Report) nodespec.Spec {
	spec := nodespec.Spec{Labels: map[string]string{}, Annotations: map[string]string{}}

	for _, c := range r.Changes {
		switch c.Field {
		case "providerID":
			spec.ProviderID = *c.After
		case "address":
			spec.Addresses = append(spec.Addresses, corev1.NodeAddress{Type: corev1.NodeAddressType(c.Key), Address: *c.After})
		case "label":
			spec.Labels[c.Key] = *c.After
		case "annotation":
			spec.Annotations[c.Key] = *c.After
		case "taint":
			key, effect, _ := strings.Cut(c.Key, ":")
			rule, when, _ := strings.Cut(strings.TrimPrefix(c.From, "rule "), ", ")
			spec.Taints = append(spec.Taints, rules.Taint{
				Taint: corev1.Taint{Key: key, Value: *c.After, Effect: corev1.TaintEffect(effect)}, Rule: rule, Enforce: when == "enforced",
			})
		}
	}

	return spec
}

// TestRender_EqualsDesiredSpec compares reports with the Spec that the node controller uses.
func TestRender_EqualsDesiredSpec(t *testing.T) {
	for name, options := range map[string]nodespec.Options{
		"without rules": {},
		"IPv6, node IP": {PreferIPv6: true, ProviderIDFromNodeIP: true, ClusterName: "mine"},
		"with a rule":   {Rules: compile(t, everyKind())},
	} {
		for _, platform := range []string{"aws", "hcloud", "metal", "container", "nocloud", "openstack"} {
			t.Run(name+"/"+platform, func(t *testing.T) {
				m := running("worker-1", "10.0.0.1")
				m.Platform.Platform, m.Platform.Spot, m.Platform.Tags = platform, true, map[string]string{"team": "red"}
				m.Addresses = append(m.Addresses,
					machine.Address{Link: "eth0", Prefix: netip.MustParsePrefix("2001:db8::1/64")},
					machine.Address{Link: machine.LinkExternal, Prefix: netip.MustParsePrefix("203.0.113.1/32")})

				report := preview.Render(m, preview.Kubelet{Architecture: "arm64"}, options)

				registered := &corev1.Node{Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{Architecture: "arm64"}}}
				want, problems, pending := nodespec.Desired(nodespec.NewInput(registered, m, options))
				want.Transformed = rules.Result{}

				assert.Equal(t, want, flat(report))
				assert.Empty(t, pending)
				assert.False(t, report.Pending)
				require.Len(t, report.Problems, len(problems))
			})
		}
	}
}

// running returns a running machine with complete metadata.
func running(name, ip string) machine.Machine {
	return machine.Machine{
		Nodename: name,
		Stage:    runtime.MachineStageRunning,
		Platform: runtime.PlatformMetadataSpec{
			Platform: "aws", Region: "eu", Zone: "eu-1", InstanceType: "large", ProviderID: "aws:///eu-1/" + name, InstanceID: name, InternalDNS: name + ".ec2.internal",
		},
		PlatformPublished: true,
		System:            hardware.SystemInformationSpec{SerialNumber: "0123"},
		Addresses:         []machine.Address{{Prefix: netip.MustParsePrefix(ip + "/24"), Link: "eth0", Scope: nethelpers.ScopeGlobal}},
		NodeIPs:           []netip.Addr{netip.MustParseAddr(ip)},
	}
}

// sources returns the origins of all values of a report.
func sources(r preview.Report) map[string]string {
	origins := map[string]string{}

	for _, c := range r.Changes {
		origins[cmp.Or(c.Key, c.Field)] = c.From
	}

	return origins
}

func TestRender_NamesRuleOfEveryValue(t *testing.T) {
	for _, test := range []struct {
		name string
		list []rules.Rule
		want map[string]string // differences from a report without rules
	}{
		{"none", nil, nil},
		{
			"each kind",
			[]rules.Rule{everyKind()},
			map[string]string{
				"example.org/role": "rule web", "example.org/serial": "rule web", "dedicated:NoSchedule": "rule web, at initialization",
				corev1.LabelTopologyZone: "rule web", corev1.LabelFailureDomainBetaZone: "rule web",
				"ExternalIP": "rule web", "talos-ccm.node-restriction.kubernetes.io/address-198.51.100.5": "rule web",
			},
		},
		{
			"all metadata",
			[]rules.Rule{{Name: "meta", PlatformMetadata: map[string]string{
				"Region": "r", "Zone": "z", "InstanceType": "t", "Spot": "true", "ProviderID": "aws:///r/i", "InternalDNS": "a.b", "ExternalDNS": "c.d",
			}}},
			map[string]string{
				"providerID": "rule meta", "InternalDNS": "rule meta", "ExternalDNS": "rule meta", nodespec.LabelLifecycle: "rule meta",
				corev1.LabelTopologyRegion: "rule meta", corev1.LabelFailureDomainBetaRegion: "rule meta", corev1.LabelTopologyZone: "rule meta",
				corev1.LabelFailureDomainBetaZone: "rule meta", corev1.LabelInstanceTypeStable: "rule meta", corev1.LabelInstanceType: "rule meta",
			},
		},
		{
			"the last of two rules",
			[]rules.Rule{
				{Name: "one", Labels: map[string]string{"a": "1", "b": "1"}, PlatformMetadata: map[string]string{"Zone": "1"}},
				{Name: "two", Labels: map[string]string{"b": "2"}, PlatformMetadata: map[string]string{"Zone": "2"}},
			},
			map[string]string{"a": "rule one", "b": "rule two", corev1.LabelTopologyZone: "rule two", corev1.LabelFailureDomainBetaZone: "rule two"},
		},
		{
			"a label takes precedence over metadata",
			[]rules.Rule{{Name: "label", Labels: map[string]string{corev1.LabelTopologyZone: "mine"}}, {Name: "meta", PlatformMetadata: map[string]string{"Zone": "2"}}},
			map[string]string{corev1.LabelTopologyZone: "rule label", corev1.LabelFailureDomainBetaZone: "rule meta"},
		},
		{"enforced taints", []rules.Rule{{Name: "t", Taints: map[string]string{"a": "NoExecute"}, Enforce: true}}, map[string]string{"a:NoExecute": "rule t, enforced"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			want := sources(renderOne(t, running("worker-1", "10.0.0.1")))
			maps.Copy(want, test.want)
			assert.Equal(t, want, sources(renderOne(t, running("worker-1", "10.0.0.1"), test.list...)))
		})
	}
}

func TestRender_ProviderIDNamesRuleOfInstanceID(t *testing.T) {
	m := running("worker-1", "10.0.0.1")
	m.Platform.ProviderID = ""

	got := renderOne(t, m, rules.Rule{Name: "id", PlatformMetadata: map[string]string{"InstanceID": "mine"}}).Changes[0]
	assert.Equal(t, preview.Change{Field: "providerID", After: new("talos://aws/mine"), From: "rule id"}, got)
}

func TestRender_ReportsProblems(t *testing.T) {
	got := renderOne(t, running("worker-1", "10.0.0.1"), everyKind()).Problems
	require.Len(t, got, 1)
	assert.Equal(t, node.ReasonInvalidValue, got[0].Reason)
	assert.Contains(t, got[0].Message, `rule "web": labels[bad]="0123 is none" omitted: `)
}

func TestRender_PendingWithoutIdentity(t *testing.T) {
	m := running("worker-1", "10.0.0.1")
	m.Platform = runtime.PlatformMetadataSpec{Platform: "aws"}

	got := renderOne(t, m)
	assert.True(t, got.Pending)
	assert.Equal(t, node.ReasonMetadataPending, got.Problems[0].Reason)
	assert.Empty(t, got.Changes)
}

func TestRender_MarksUnmanagedMachine(t *testing.T) {
	selector, errs := rules.CompileSelector([]rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "platform", Operator: rules.In, Values: []string{"metal"}}}}}, nil)
	require.Empty(t, errs)

	got := preview.Render(running("worker-1", "10.0.0.1"), preview.Kubelet{}, nodespec.Options{Selector: selector})
	assert.True(t, got.Unmanaged)
	assert.NotEmpty(t, flat(got).ProviderID)
}

func TestRender_UsesKubeletNodeIPsAndArchitecture(t *testing.T) {
	m := running("worker-1", "10.0.0.1")
	m.Addresses = append(m.Addresses, machine.Address{Prefix: netip.MustParsePrefix("10.0.0.9/24"), Link: "eth0", Scope: nethelpers.ScopeGlobal})

	compiled := compile(t, rules.Rule{Name: "arch", Labels: map[string]string{"arch": "{{ .Architecture }}"}})
	kubelet := preview.Kubelet{NodeIPs: []netip.Addr{netip.MustParseAddr("10.0.0.9")}, Architecture: "arm64"}

	got := preview.Render(m, kubelet, nodespec.Options{Rules: compiled})
	assert.Contains(t, got.Changes, preview.Change{Field: "address", Key: "InternalIP", After: new("10.0.0.9"), From: "machine"})
	assert.Contains(t, got.Changes, preview.Change{Field: "label", Key: "arch", After: new("arm64"), From: "rule arch"})
}
