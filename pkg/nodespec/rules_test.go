package nodespec_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// withRules returns the input with rules.
func withRules(t *testing.T, in nodespec.Input, list ...rules.Rule) nodespec.Input {
	t.Helper()

	compiled, errs := rules.Compile(list, nil)
	if len(errs) > 0 {
		t.Fatalf("compile rules: %v", errs)
	}

	in.Options.Rules = compiled

	return in
}

func replacing(fields map[string]string) rules.Rule {
	return rules.Rule{Name: "r", PlatformMetadata: fields}
}

// cloud returns the input for a machine on aws.
func cloud() nodespec.Input {
	in := running()
	in.Machine.Platform = runtime.PlatformMetadataSpec{Platform: "aws", Region: "eu", Zone: "eu-1a", InstanceID: "i-1", ProviderID: "aws:///eu-1a/i-1"}

	return in
}

func TestDesired_LabelsOfRulesTakePrecedence(t *testing.T) {
	in := withRules(t, cloud(), rules.Rule{Labels: map[string]string{corev1.LabelTopologyZone: "mine", "team": "{{ .Region }}"}})

	spec, _ := desired(t, in)
	for key, want := range map[string]string{
		corev1.LabelTopologyZone: "mine", corev1.LabelFailureDomainBetaZone: "mine", corev1.LabelTopologyRegion: "eu", "team": "eu",
	} {
		if got := spec.Labels[key]; got != want {
			t.Errorf("label %s: got %q, want %q", key, got, want)
		}
	}
}

func TestDesired_UsesReplacedMetadata(t *testing.T) {
	in := withRules(t, cloud(), replacing(map[string]string{"Zone": "{{ .Region }}-x", "Spot": "true", "ExternalDNS": "vm.example.com"}))

	spec, _ := desired(t, in)
	if spec.Labels[corev1.LabelTopologyZone] != "eu-x" || spec.Labels[nodespec.LabelLifecycle] != "spot" {
		t.Errorf("labels: %v", spec.Labels)
	}

	requireAddresses(t, corev1.NodeExternalDNS, spec, "vm.example.com")
}

func TestDesired_NamesOfRulesNeedNoThreeLabels(t *testing.T) {
	in := withRules(t, cloud(), replacing(map[string]string{"InternalDNS": "vm.example", "ExternalDNS": "vm.default.svc"}))

	spec, problems := desired(t, in)
	requireAddresses(t, corev1.NodeInternalDNS, spec, "vm.example")
	requireAddresses(t, corev1.NodeExternalDNS, spec)

	if got := keys(problems); !slices.Equal(got, []string{"ExternalDNS"}) {
		t.Errorf("problems: %v", problems)
	}

	in = withRules(t, cloud(), replacing(map[string]string{"InternalDNS": ""}))
	in.Machine.Platform.Hostname = "worker.novalocal"

	spec, _ = desired(t, in)
	requireAddresses(t, corev1.NodeInternalDNS, spec)
}

func TestDesired_ProviderIDOfRules(t *testing.T) {
	booting := cloud()
	booting.Machine.Stage = runtime.MachineStageBooting
	booting.Machine.System = hardware.SystemInformationSpec{}

	unpublished := cloud()
	unpublished.Machine.Platform = runtime.PlatformMetadataSpec{Platform: "aws"}

	for _, test := range []struct {
		name          string
		in            nodespec.Input
		rules         []rules.Rule
		want, pending string
	}{
		{"rule sets the providerID", cloud(), []rules.Rule{replacing(map[string]string{"ProviderID": "x:///{{ .InstanceID }}"})}, "x:///i-1", ""},
		{
			"rule sets the instance ID on metal",
			running(),
			[]rules.Rule{replacing(map[string]string{"InstanceID": "rack-7"})},
			"talos://metal/rack-7", "",
		},
		{"rule sets another field", cloud(), []rules.Rule{replacing(map[string]string{"Zone": "z"})}, "aws:///eu-1a/i-1", ""},
		{
			"metadata not published",
			unpublished,
			[]rules.Rule{replacing(map[string]string{"ProviderID": "x:///{{ .UUID }}"})},
			"", "has not published an instance ID",
		},
		{
			"template fails",
			cloud(),
			[]rules.Rule{replacing(map[string]string{"ProviderID": `{{ fail "no" }}`})},
			"", `rule "r" cannot set platformMetadata[ProviderID]`,
		},
		{"incomplete providerID", cloud(), []rules.Rule{replacing(map[string]string{"ProviderID": "x:///{{ .Tags.serial }}"})}, "", "does not identify an instance"},
		{"providerID without a scheme", cloud(), []rules.Rule{replacing(map[string]string{"ProviderID": "{{ .InstanceID }}"})}, "", "does not identify an instance"},
		{"providerID without a provider", cloud(), []rules.Rule{replacing(map[string]string{"ProviderID": "{{ .Tags.none }}://1"})}, "", "does not identify an instance"},
		{"providerID with spaces", cloud(), []rules.Rule{replacing(map[string]string{"ProviderID": "x:///a b"})}, "", "contains spaces"},
		{
			"depends on a field that an earlier rule failed to set",
			cloud(),
			[]rules.Rule{
				{Name: "first", PlatformMetadata: map[string]string{"Region": `{{ fail "no" }}`}},
				replacing(map[string]string{"ProviderID": "x:///{{ .Region }}/1"}),
			},
			"", `rule "first" cannot set platformMetadata[Region]`,
		},
		{
			"SMBIOS information not read",
			booting,
			[]rules.Rule{replacing(map[string]string{"ProviderID": "x:///vm-{{ .UUID }}"})},
			"", "has not been read yet",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec, _, pending := nodespec.Desired(withRules(t, test.in, test.rules...))
			if spec.ProviderID != test.want || (pending == "") != (test.pending == "") || !strings.Contains(pending, test.pending) {
				t.Errorf("got %q, pending %q; want %q, pending %q", spec.ProviderID, pending, test.want, test.pending)
			}
		})
	}
}

// Without a providerID to compute, a rule that fails to do so stops nothing.
func TestDesired_ReportsFailedIdentityOfIdentifiedNode(t *testing.T) {
	const key = "platformMetadata[ProviderID]"

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
			in := withRules(t, cloud(), rules.Rule{Labels: map[string]string{"site": "lyon"}}, replacing(map[string]string{test.field: test.template}))
			in.ProviderID = "aws:///eu-1a/i-1"

			spec, problems := desired(t, in)
			if spec.ProviderID != in.ProviderID || spec.Labels["site"] != "lyon" {
				t.Errorf("got providerID %q and labels %v", spec.ProviderID, spec.Labels)
			}

			if len(problems) != 1 || problems[0].Key != strings.ReplaceAll(key, "ProviderID", test.field) || !strings.Contains(problems[0].Why, test.why) {
				t.Errorf("got problems %v", problems)
			}

			in.Machine.System, in.Machine.Stage = hardware.SystemInformationSpec{}, runtime.MachineStageBooting
			if _, _, pending := nodespec.Desired(in); !strings.Contains(pending, test.field) {
				t.Errorf("SMBIOS information not read: pending is %q", pending)
			}
		})
	}
}

// Rules read the providerID that the Node would have without them.
func TestDesired_RulesReadTheProviderIDBeforeTheyReplaceIt(t *testing.T) {
	nocloud := running()
	nocloud.Machine.Platform = runtime.PlatformMetadataSpec{Platform: "nocloud", InstanceID: "vm-100"}

	fromIP := nocloud
	fromIP.Options.ProviderIDFromNodeIP = true

	incomplete := nocloud
	incomplete.Machine.Platform.ProviderID = "proxmox://"

	for _, test := range []struct {
		name string
		in   nodespec.Input
		want string
	}{
		{"platform's", cloud(), "aws:///eu-1a/i-1"},
		{"UUID", running(), "talos://metal/" + uuid},
		{"instance ID", nocloud, "talos://nocloud/vm-100"},
		{"incomplete", incomplete, "talos://nocloud/vm-100"},
		{"node IP", fromIP, "talos://nocloud/" + nodeIP},
	} {
		t.Run(test.name, func(t *testing.T) {
			exists := rules.Rule{Labels: map[string]string{"exists": "true"}}
			exists.NodeSelector = []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "providerID", Operator: rules.Exists}}}}
			in := withRules(t, test.in, exists, replacing(map[string]string{"ProviderID": "{{ .ProviderID }}", "InstanceType": "t"}))

			spec, _ := desired(t, in)
			if spec.ProviderID != test.want || spec.Labels["exists"] != "true" {
				t.Errorf("got %q with labels %v, want %q", spec.ProviderID, spec.Labels, test.want)
			}
		})
	}

	in := withRules(t, fromIP, replacing(map[string]string{"InstanceID": "rack-7"}))
	if spec, _ := desired(t, in); spec.ProviderID != "talos://nocloud/"+nodeIP {
		t.Errorf("fallback node-ip with the instance ID of a rule: got %q", spec.ProviderID)
	}
}

// The file is an example of the upstream Talos CCM, hack/ccm-config.yaml.
func TestDesired_RuleKeepsTheProviderIDWithoutSerialNumber(t *testing.T) {
	rule := replacing(map[string]string{
		"InstanceType": "{{ coalesce .InstanceType .SKUNumber }}",
		"ProviderID":   `{{ if .SerialNumber }}proxmox://region-1/{{ getValue .SerialNumber "i" }}{{ else }}{{ .ProviderID }}{{ end }}`,
	})

	for serial, want := range map[string]string{"i=100": "proxmox://region-1/100", "": "talos://nocloud/" + uuid} {
		in := withRules(t, running(), rule)
		in.Machine.Platform = runtime.PlatformMetadataSpec{Platform: "nocloud"}
		in.Machine.System.SerialNumber = serial

		if spec, _ := desired(t, in); spec.ProviderID != want {
			t.Errorf("serial number %q: got %q, want %q", serial, spec.ProviderID, want)
		}
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
			in := cloud()
			in.Machine.Platform.InstanceType = "m5"
			spec, problems := desired(t, withRules(t, in, rules.Rule{Name: "r", Labels: test.labels}))

			if got := keys(problems); spec.Labels[stable] != test.want || spec.Labels[beta] != test.want || !slices.Equal(got, test.problems) {
				t.Errorf("%v: got %v and problems %v", test.labels, spec.Labels, problems)
			}
		}
	}
}

func TestDesired_PublicIPDiscovery(t *testing.T) {
	on, off := true, false
	in := cloud()
	in.Machine.Addresses = append(in.Machine.Addresses, external("203.0.113.1"), onLink("eth0", "203.0.113.2/24"))

	for _, test := range []struct {
		name      string
		platform  string
		discovery *bool
		want      []string
	}{
		{"default on a platform that reports addresses", "aws", nil, []string{"203.0.113.1"}},
		{"enabled on a platform that reports addresses", "aws", &on, []string{"203.0.113.1", "203.0.113.2"}},
		{"default on another platform", "metal", nil, []string{"203.0.113.1", "203.0.113.2"}},
		{"disabled on another platform", "metal", &off, []string{"203.0.113.1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in.Machine.Platform.Platform = test.platform

			spec, _ := desired(t, withRules(t, in, rules.Rule{Features: rules.Features{PublicIPDiscovery: test.discovery}}))
			requireAddresses(t, corev1.NodeExternalIP, spec, test.want...)
		})
	}
}

func TestDesired_ProblemsHaveKindAndRule(t *testing.T) {
	in := withRules(t, cloud(), rules.Rule{Name: "site", Labels: map[string]string{"a": "{{ .Region }} !"}})
	in.Machine.Platform.InstanceType = "not a label"

	_, problems := desired(t, in)

	var kinds, rules []string
	for _, p := range problems {
		kinds, rules = append(kinds, p.Kind()), append(rules, p.Rule)
	}

	if got := strings.Join(kinds, " ") + "/" + strings.Join(rules, " "); got != "labels machine/site " {
		t.Errorf("got %q: %v", got, problems)
	}
}

func TestManaged_IgnoresRules(t *testing.T) {
	selector, errs := rules.CompileSelector([]rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "zone", Operator: rules.In, Values: []string{"eu-1a"}}}}}, nil)
	if len(errs) > 0 {
		t.Fatal(errs)
	}

	in := withRules(t, cloud(), replacing(map[string]string{"Zone": "elsewhere"}))
	in.Options.Selector = selector

	if !nodespec.Managed(in) {
		t.Error("machine in the selected zone is not managed")
	}

	in.Machine = machine.Machine{}
	if nodespec.Managed(in) {
		t.Error("machine that has published nothing is managed")
	}
}
