package nodespec_test

import (
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// ruled is the machine under rules.
func ruled(t *testing.T, in nodespec.Input, list ...rules.Rule) nodespec.Input {
	t.Helper()

	compiled, errs := rules.Compile(list)
	if len(errs) > 0 {
		t.Fatalf("compile rules: %v", errs)
	}

	in.Options.Rules = compiled

	return in
}

func replacing(fields map[string]string) rules.Rule {
	return rules.Rule{Name: "r", PlatformMetadata: fields}
}

// cloud is a machine whose platform says all there is.
func cloud() nodespec.Input {
	in := running()
	in.Machine.Platform = runtime.PlatformMetadataSpec{Platform: "aws", Region: "eu", Zone: "eu-1a", InstanceID: "i-1", ProviderID: "aws:///eu-1a/i-1"}

	return in
}

func TestLabelsOfRulesWinOverThoseOfThePlatform(t *testing.T) {
	in := ruled(t, cloud(), rules.Rule{Labels: map[string]string{corev1.LabelTopologyZone: "mine", "team": "{{ .Region }}"}})

	spec, _ := desired(t, in)
	for key, want := range map[string]string{
		corev1.LabelTopologyZone: "mine", corev1.LabelFailureDomainBetaZone: "eu-1a", corev1.LabelTopologyRegion: "eu", "team": "eu",
	} {
		if got := spec.Labels[key]; got != want {
			t.Errorf("label %s: got %q, want %q", key, got, want)
		}
	}
}

func TestReplacedMetadataIsWhatTheNodeGets(t *testing.T) {
	in := ruled(t, cloud(), replacing(map[string]string{"Zone": "{{ .Region }}-x", "Spot": "true", "ExternalDNS": "vm.example.com"}))

	spec, _ := desired(t, in)
	if spec.Labels[corev1.LabelTopologyZone] != "eu-x" || spec.Labels[nodespec.LabelLifecycle] != "spot" {
		t.Errorf("labels: %v", spec.Labels)
	}

	requireAddresses(t, corev1.NodeExternalDNS, spec, "vm.example.com")
}

func TestProviderIDUnderRules(t *testing.T) {
	booting := cloud()
	booting.Machine.Stage = runtime.MachineStageBooting
	booting.Machine.System = hardware.SystemInformationSpec{}

	unpublished := cloud()
	unpublished.Machine.Platform = runtime.PlatformMetadataSpec{Platform: "aws"}

	for _, test := range []struct {
		rule          string
		in            nodespec.Input
		rules         []rules.Rule
		want, pending string
	}{
		{"a rule's comes first", cloud(), []rules.Rule{replacing(map[string]string{"ProviderID": "x:///{{ .InstanceID }}"})}, "x:///i-1", ""},
		{
			"a rule's instance makes one where the platform gives none",
			running(),
			[]rules.Rule{replacing(map[string]string{"InstanceID": "rack-7"})},
			"talos://metal/rack-7", "",
		},
		{"other fields do not matter", cloud(), []rules.Rule{replacing(map[string]string{"Zone": "z"})}, "aws:///eu-1a/i-1", ""},
		{
			"what has not been published cannot be replaced",
			unpublished,
			[]rules.Rule{replacing(map[string]string{"ProviderID": "x:///{{ .UUID }}"})},
			"", "has not published an instance ID",
		},
		{
			"one that fails is not made up for by the platform's",
			cloud(),
			[]rules.Rule{replacing(map[string]string{"ProviderID": `{{ fail "no" }}`})},
			"", `rule "r" cannot set platformMetadata[ProviderID]`,
		},
		{"nor is one that names no instance", cloud(), []rules.Rule{replacing(map[string]string{"ProviderID": "x:///{{ .Tags.serial }}"})}, "", "names no instance"},
		{"nor one with spaces", cloud(), []rules.Rule{replacing(map[string]string{"ProviderID": "x:///a b"})}, "", "cannot be right"},
		{
			"one that is made of what an earlier rule failed to replace is not believed",
			cloud(),
			[]rules.Rule{
				{Name: "first", PlatformMetadata: map[string]string{"Region": `{{ fail "no" }}`}},
				replacing(map[string]string{"ProviderID": "x:///{{ .Region }}/1"}),
			},
			"", `rule "first" cannot set platformMetadata[Region]`,
		},
		{
			"SMBIOS is waited for: it may be what the rule reads",
			booting,
			[]rules.Rule{replacing(map[string]string{"ProviderID": "x:///vm-{{ .UUID }}"})},
			"", "yet to be read",
		},
	} {
		t.Run(test.rule, func(t *testing.T) {
			spec, _, pending := nodespec.Desired(ruled(t, test.in, test.rules...))
			if spec.ProviderID != test.want || (pending == "") != (test.pending == "") || !strings.Contains(pending, test.pending) {
				t.Errorf("got %q, pending %q; want %q, pending %q", spec.ProviderID, pending, test.want, test.pending)
			}
		})
	}
}

func TestPublicIPDiscoveryIsTheRules(t *testing.T) {
	on, off := true, false
	in := cloud()
	in.Machine.Addresses = append(in.Machine.Addresses, external("203.0.113.1"), onLink("eth0", "203.0.113.2/24"))

	for _, test := range []struct {
		rule      string
		platform  string
		discovery *bool
		want      []string
	}{
		{"by default a platform that reports addresses is believed", "aws", nil, []string{"203.0.113.1"}},
		{"on, the links are looked at, too", "aws", &on, []string{"203.0.113.2", "203.0.113.1"}},
		{"by default the links of other platforms are looked at", "metal", nil, []string{"203.0.113.2", "203.0.113.1"}},
		{"off, they are not", "metal", &off, []string{"203.0.113.1"}},
	} {
		t.Run(test.rule, func(t *testing.T) {
			in.Machine.Platform.Platform = test.platform

			spec, _ := desired(t, ruled(t, in, rules.Rule{Features: rules.Features{PublicIPDiscovery: test.discovery}}))
			requireAddresses(t, corev1.NodeExternalIP, spec, test.want...)
		})
	}
}

func TestProblemsNameTheirRule(t *testing.T) {
	in := ruled(t, cloud(), rules.Rule{Name: "site", Labels: map[string]string{"a": "{{ .Region }} !"}})
	in.Machine.Platform.InstanceType = "not a label"

	_, problems := desired(t, in)

	var kinds, rules []string
	for _, p := range problems {
		kinds, rules = append(kinds, p.Kind()), append(rules, p.Rule)
	}

	if got := strings.Join(kinds, " ") + "/" + strings.Join(rules, " "); got != "labels machine machine/site  " {
		t.Errorf("got %q: %v", got, problems)
	}
}

func TestTheClaimIsDecidedBeforeAnyRule(t *testing.T) {
	claim, errs := rules.CompileSelector([]rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "zone", Operator: rules.In, Values: []string{"eu-1a"}}}}})
	if len(errs) > 0 {
		t.Fatal(errs)
	}

	in := ruled(t, cloud(), replacing(map[string]string{"Zone": "elsewhere"}))
	in.Options.Selector = claim

	if !nodespec.Managed(in) {
		t.Error("not claimed, though the machine itself says it is in the zone")
	}

	in.Machine = machine.Machine{}
	if nodespec.Managed(in) {
		t.Error("a machine that has said nothing is claimed")
	}
}
