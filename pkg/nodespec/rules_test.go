package nodespec_test

import (
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// withRules returns the input with rules.
func withRules(t *testing.T, in nodespec.Input, list ...rules.Rule) nodespec.Input {
	t.Helper()

	compiled, errs := rules.Compile(list, nil, nil)
	require.Empty(t, errs)

	in.Options.Rules = compiled

	return in
}

func replacing(field, template string) rules.Rule {
	return rules.Rule{Name: "r", PlatformMetadata: map[string]string{field: template}}
}

// cloud returns the input for a machine on aws.
func cloud() nodespec.Input {
	return on(runtime.PlatformMetadataSpec{Platform: "aws", Region: "eu", Zone: "eu-1a", InstanceID: "i-1", ProviderID: "aws:///eu-1a/i-1"})
}

func TestDesired_LabelsOfRulesTakePrecedence(t *testing.T) {
	in := withRules(t, cloud(), rules.Rule{Labels: map[string]string{corev1.LabelTopologyZone: "mine", "team": "{{ .Region }}"}})
	assert.Subset(t, specOf(t, in).Labels, map[string]string{
		corev1.LabelTopologyZone: "mine", corev1.LabelFailureDomainBetaZone: "mine", corev1.LabelTopologyRegion: "eu", "team": "eu",
	})
}

func TestDesired_UsesReplacedMetadata(t *testing.T) {
	in := withRules(t, cloud(), rules.Rule{Name: "r", PlatformMetadata: map[string]string{"Zone": "{{ .Region }}-x", "Spot": "true", "ExternalDNS": "vm.example.com"}})
	assert.Subset(t, specOf(t, in).Labels, map[string]string{corev1.LabelTopologyZone: "eu-x", nodespec.LabelLifecycle: "spot"})
	requireAddresses(t, corev1.NodeExternalDNS, in, "vm.example.com")
}

func TestDesired_NamesOfRulesNeedNoThreeLabels(t *testing.T) {
	in := withRules(t, cloud(), rules.Rule{Name: "r", PlatformMetadata: map[string]string{"InternalDNS": "vm.example", "ExternalDNS": "vm.default.svc"}})
	requireAddresses(t, corev1.NodeInternalDNS, in, "vm.example")
	requireAddresses(t, corev1.NodeExternalDNS, in)
	assert.Equal(t, []string{"platformMetadata[ExternalDNS]"}, problemKeys(t, in))

	in = withRules(t, cloud(), replacing("InternalDNS", ""))
	in.Machine.Platform.Hostname = "worker.novalocal"
	requireAddresses(t, corev1.NodeInternalDNS, in)
	assert.Equal(t, []string{"InternalDNS"}, problemKeys(t, in), "the host name is not the rule's")
}

func TestDesired_ProviderIDOfRules(t *testing.T) {
	booting := cloud()
	booting.Machine.Stage, booting.Machine.System = runtime.MachineStageBooting, hardware.SystemInformationSpec{}

	unpublished := on(runtime.PlatformMetadataSpec{Platform: "aws"})
	failing := rules.Rule{Name: "first", PlatformMetadata: map[string]string{"Region": `{{ fail "no" }}`}}
	set := func(field, template string) []rules.Rule { return []rules.Rule{replacing(field, template)} }

	for _, test := range []struct {
		name          string
		in            nodespec.Input
		rules         []rules.Rule
		want, pending string
	}{
		{"rule sets the providerID", cloud(), set("ProviderID", "x:///{{ .InstanceID }}"), "x:///i-1", ""},
		{"rule sets the instance ID on metal", running(), set("InstanceID", "rack-7"), "talos://metal/rack-7", ""},
		{"rule sets another field", cloud(), set("Zone", "z"), "aws:///eu-1a/i-1", ""},
		{"metadata not published", unpublished, set("ProviderID", "x:///{{ .UUID }}"), "", "has not published an instance ID"},
		{"template fails", cloud(), set("ProviderID", `{{ fail "no" }}`), "", `rule "r" cannot set platformMetadata[ProviderID]`},
		{"incomplete providerID", cloud(), set("ProviderID", "x:///{{ .Tags.serial }}"), "", "does not identify an instance"},
		{"providerID without a scheme", cloud(), set("ProviderID", "{{ .InstanceID }}"), "", "does not identify an instance"},
		{"providerID without a provider", cloud(), set("ProviderID", "{{ .Tags.none }}://1"), "", "does not identify an instance"},
		{"providerID with spaces", cloud(), set("ProviderID", "x:///a b"), "", "contains spaces"},
		{"an earlier rule fails", cloud(), []rules.Rule{failing, replacing("ProviderID", "x:///{{ .Region }}/1")}, "", `rule "first" cannot set platformMetadata[Region]`},
		{"SMBIOS information not read", booting, set("ProviderID", "x:///vm-{{ .UUID }}"), "", "has not been read yet"},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec, _, pending := nodespec.Desired(withRules(t, test.in, test.rules...))
			assert.Equal(t, test.want, spec.ProviderID)
			assert.Equal(t, test.pending == "", pending == "", pending)
			assert.Contains(t, pending, test.pending)
		})
	}
}

// A rule whose selector lacks a fact does not set the providerID, which cannot be corrected later.
func TestDesired_AwaitsFactsOfIdentityRules(t *testing.T) {
	rule := replacing("ProviderID", "x:///1")
	rule.NodeSelector = []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "links", Operator: rules.In, Values: []string{"bond0"}}}}}

	for _, test := range []struct {
		name   string
		change func(*nodespec.Input)
		want   string // empty if the Node waits
	}{
		{"booting", func(*nodespec.Input) {}, ""},
		{"running", func(in *nodespec.Input) { in.Machine.Stage = runtime.MachineStageRunning }, "aws:///eu-1a/i-1"},
		{"has waited", func(in *nodespec.Input) { in.AwaitsFacts = false }, "aws:///eu-1a/i-1"},
		{"identified", func(in *nodespec.Input) { in.ProviderID = "x:///1" }, "aws:///eu-1a/i-1"},
		{"rule without facts", func(in *nodespec.Input) { *in = withRules(t, *in, replacing("ProviderID", "x:///2")) }, "x:///2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := withRules(t, cloud(), rule)
			in.AwaitsFacts, in.Machine.Stage = true, runtime.MachineStageBooting
			test.change(&in)

			if test.want == "" {
				requirePending(t, in, "a rule for the providerID reads facts")
			} else {
				assert.Equal(t, test.want, specOf(t, in).ProviderID)
			}
		})
	}
}

// If the Node has a providerID and the facts are known, a rule that fails to set it does not make the Node pending.
func TestDesired_ReportsFailedIdentityOfIdentifiedNode(t *testing.T) {
	for name, test := range map[string]struct{ field, template, why string }{
		"template fails":         {"ProviderID", `{{ fail "no" }}`, "no"},
		"empty":                  {"ProviderID", "{{ .Tags.serial }}", "does not identify an instance"},
		"incomplete":             {"ProviderID", "x:///{{ .Tags.serial }}", "does not identify an instance"},
		"without a scheme":       {"ProviderID", "{{ .InstanceID }}", "does not identify an instance"},
		"invalid":                {"ProviderID", "x:///a b", "contains spaces"},
		"empty instance ID":      {"InstanceID", "{{ .Tags.serial }}", "does not identify an instance"},
		"instance ID with space": {"InstanceID", "a b", "contains spaces"},
	} {
		t.Run(name, func(t *testing.T) {
			in := withRules(t, cloud(), rules.Rule{Labels: map[string]string{"site": "lyon"}}, replacing(test.field, test.template))
			in.ProviderID = "aws:///eu-1a/i-1"

			spec, problems := desired(t, in)
			assert.Equal(t, in.ProviderID, spec.ProviderID)
			assert.Equal(t, "lyon", spec.Labels["site"])
			require.Len(t, problems, 1)
			assert.Equal(t, "platformMetadata["+test.field+"]", problems[0].Key)
			assert.Contains(t, problems[0].Why, test.why)

			in.Machine.System, in.Machine.Stage = hardware.SystemInformationSpec{}, runtime.MachineStageBooting
			_, _, pending := nodespec.Desired(in)
			assert.Contains(t, pending, test.field)
		})
	}
}

// Rules read the providerID that the Node would have without them.
func TestDesired_RulesReadTheProviderIDBeforeTheyReplaceIt(t *testing.T) {
	nocloud, incomplete := runtime.PlatformMetadataSpec{Platform: "nocloud", InstanceID: "vm-100"}, runtime.PlatformMetadataSpec{Platform: "nocloud", InstanceID: "vm-100", ProviderID: "proxmox://"}
	fromIP := on(nocloud)
	fromIP.Options.ProviderIDFromNodeIP = true

	for _, test := range []struct {
		name string
		in   nodespec.Input
		want string
	}{
		{"platform's", cloud(), "aws:///eu-1a/i-1"},
		{"UUID", running(), "talos://metal/" + uuid},
		{"instance ID", on(nocloud), "talos://nocloud/vm-100"},
		{"incomplete", on(incomplete), "talos://nocloud/vm-100"},
		{"node IP", fromIP, "talos://nocloud/" + nodeIP},
	} {
		t.Run(test.name, func(t *testing.T) {
			exists := rules.Rule{Labels: map[string]string{"exists": "true"}}
			exists.NodeSelector = []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "providerID", Operator: rules.Exists}}}}
			in := withRules(t, test.in, exists, rules.Rule{Name: "r", PlatformMetadata: map[string]string{"ProviderID": "{{ .ProviderID }}", "InstanceType": "t"}})
			assert.Equal(t, test.want, specOf(t, in).ProviderID)
			assert.Equal(t, "true", specOf(t, in).Labels["exists"])
		})
	}

	in := withRules(t, fromIP, replacing("InstanceID", "rack-7"))
	assert.Equal(t, "talos://nocloud/"+nodeIP, specOf(t, in).ProviderID, "fallback node-ip with the instance ID of a rule")
}

// The file is an example of the upstream Talos CCM, hack/ccm-config.yaml.
func TestDesired_RuleKeepsTheProviderIDWithoutSerialNumber(t *testing.T) {
	rule := rules.Rule{Name: "r", PlatformMetadata: map[string]string{
		"InstanceType": "{{ coalesce .InstanceType .SKUNumber }}",
		"ProviderID":   `{{ if .SerialNumber }}proxmox://region-1/{{ getValue .SerialNumber "i" }}{{ else }}{{ .ProviderID }}{{ end }}`,
	}}

	for serial, want := range map[string]string{"i=100": "proxmox://region-1/100", "": "talos://nocloud/" + uuid} {
		in := withRules(t, on(runtime.PlatformMetadataSpec{Platform: "nocloud"}), rule)
		in.Machine.System.SerialNumber = serial
		assert.Equal(t, want, specOf(t, in).ProviderID, "serial number %q", serial)
	}
}

func TestDesired_DeprecatedLabelsEqualTheStableOnes(t *testing.T) {
	for _, pair := range [][2]string{
		{corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaRegion},
		{corev1.LabelTopologyZone, corev1.LabelFailureDomainBetaZone},
		{corev1.LabelInstanceTypeStable, corev1.LabelInstanceType},
	} {
		stable, beta := pair[0], pair[1]

		for _, test := range []struct {
			labels   map[string]string
			want     string
			problems []string
		}{
			{map[string]string{stable: "a"}, "a", nil},
			{map[string]string{stable: "a", beta: "a"}, "a", nil},
			{map[string]string{stable: "a", beta: "b"}, "a", []string{"labels[" + beta + "]"}},
			{map[string]string{beta: "b"}, "b", nil},
		} {
			in := withRules(t, cloud(), rules.Rule{Name: "r", Labels: test.labels})
			in.Machine.Platform.InstanceType = "m5"
			assert.Subset(t, specOf(t, in).Labels, map[string]string{stable: test.want, beta: test.want})
			assert.Equal(t, test.problems, problemKeys(t, in))
		}
	}
}

func TestDesired_PublicIPDiscovery(t *testing.T) {
	on, off := true, false
	in := cloud()
	in.Machine.Addresses = append(in.Machine.Addresses, external("203.0.113.1"), onLink("eth0", "203.0.113.2/24"))

	for _, test := range []struct {
		name, platform string
		discovery      *bool
		want           []string
	}{
		{"default on a platform that reports addresses", "aws", nil, []string{"203.0.113.1"}},
		{"enabled on a platform that reports addresses", "aws", &on, []string{"203.0.113.1", "203.0.113.2"}},
		{"default on another platform", "metal", nil, []string{"203.0.113.1", "203.0.113.2"}},
		{"disabled on another platform", "metal", &off, []string{"203.0.113.1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in.Machine.Platform.Platform = test.platform
			in := withRules(t, in, rules.Rule{Features: rules.Features{PublicIPDiscovery: test.discovery}})
			requireAddresses(t, corev1.NodeExternalIP, in, test.want...)
		})
	}
}

func TestDesired_ProblemsHaveKindAndRule(t *testing.T) {
	in := withRules(t, cloud(), rules.Rule{Name: "site", Labels: map[string]string{"a": "{{ .Region }} !"}})
	in.Machine.Platform.InstanceType = "not a label"

	_, problems := desired(t, in)
	require.Len(t, problems, 2)
	assert.Equal(t, []string{"labels", "site", "machine", ""}, []string{problems[0].Kind(), problems[0].Rule, problems[1].Kind(), problems[1].Rule})
}

func TestDesired_NamesRuleAndKeyOfInvalidMetadata(t *testing.T) {
	in := withRules(t, cloud(), rules.Rule{Name: "site", PlatformMetadata: map[string]string{
		"zone": "{{ .Region }} 7", "InstanceType": "{{ .Region }} !", "internalDNS": "{{ .Region }} b.example.org", "ExternalDNS": "*.{{ .Region }}.example.org",
	}})

	_, problems := desired(t, in)

	var got []string
	for _, p := range problems {
		got = append(got, p.Rule+" "+p.Kind()+" "+p.Key)
	}

	assert.Equal(t, []string{
		"site platformMetadata platformMetadata[Zone]", "site platformMetadata platformMetadata[InstanceType]",
		"site platformMetadata platformMetadata[InternalDNS]", "site platformMetadata platformMetadata[ExternalDNS]",
	}, got)
}

func TestManaged_IgnoresRules(t *testing.T) {
	selector, errs := rules.CompileSelector([]rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "zone", Operator: rules.In, Values: []string{"eu-1a"}}}}}, nil)
	require.Empty(t, errs)

	in := withRules(t, cloud(), replacing("Zone", "elsewhere"))
	in.Options.Selector = selector
	assert.True(t, nodespec.Selected(in), "machine in the selected zone is not managed")

	in.Machine = machine.Machine{}
	assert.False(t, nodespec.Selected(in), "machine that has published nothing is managed")
}
