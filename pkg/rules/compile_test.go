package rules_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func TestAllMistakesAreReportedAtOnceWithTheirPlaces(t *testing.T) {
	compiled, mistakes := rules.Compile([]rules.Rule{
		{Name: "good"},
		{
			Name:             "good",
			NodeSelector:     []rules.SelectorTerm{{}, one("zones", rules.Gt, "x")[0]},
			Labels:           map[string]string{"-": "{{", "a": "{{ .Zone }} {{ .Zones }} {{ .Regions }}", "b": "not a label's value"},
			Annotations:      map[string]string{"a b": ""},
			Taints:           map[string]string{"a": "NoWay"},
			PlatformMetadata: map[string]string{"zoned": "", "Spot": "maybe"},
		},
		{Annotations: map[string]string{"b": "{{ end }}"}},
	})

	if compiled != nil {
		t.Error("there are rules in spite of the mistakes")
	}

	var got []string

	for _, m := range mistakes {
		got = append(got, m.Rule+": "+strings.ReplaceAll(strings.Trim(fmt.Sprintf("%q", m.Path), "[]"), `"`, ""))

		if m.Err == nil || !errors.Is(m, m.Err) || !strings.Contains(m.Error(), m.Rule) {
			t.Errorf("%v", m)
		}
	}

	at := func(path ...any) string {
		return strings.ReplaceAll(strings.Trim(fmt.Sprintf("%q", path), "[]"), `"`, "")
	}

	want := []string{
		"good: " + at(1, "name"),
		"good: " + at(1, "nodeSelector", 1, "matchExpressions", 0, "key"),
		"good: " + at(1, "nodeSelector", 1, "matchExpressions", 0, "values"),
		"good: " + at(1, "labels", "-"), // the key
		"good: " + at(1, "labels", "-"), // the template
		"good: " + at(1, "labels", "a"),
		"good: " + at(1, "labels", "b"),
		"good: " + at(1, "annotations", "a b"),
		"good: " + at(1, "taints", "a"),
		"good: " + at(1, "platformMetadata", "zoned"),
		"good: " + at(1, "platformMetadata", "Spot"),
		"#3: " + at(2, "annotations", "b"),
	}

	if diff := cmp.Diff(want, got, cmp.Transformer("set", func(list []string) map[string]int {
		set := map[string]int{}
		for _, item := range list {
			set[item]++
		}

		return set
	})); diff != "" {
		t.Error(diff)
	}
}

func TestMistakesInRules(t *testing.T) {
	label := func(key, value string) rules.Rule { return rules.Rule{Labels: map[string]string{key: value}} }
	taint := func(key, value string) rules.Rule { return rules.Rule{Taints: map[string]string{key: value}} }
	replace := func(field, value string) rules.Rule {
		return rules.Rule{PlatformMetadata: map[string]string{field: value}}
	}

	for _, test := range []struct {
		name string
		rule rules.Rule
		want string
	}{
		{"a label's key", label("a/b/c", ""), "a/b/c"},
		{"a label's value", label("a", "b c"), "alphanumeric"},
		{"a label's value with a comment", label("a", "b{{/**/}} c"), "alphanumeric"},
		{"a label's value that is too long", label("a", strings.Repeat("a", 64)), "63"},
		{"an annotation's key", rules.Rule{Annotations: map[string]string{"": ""}}, "name part must be non-empty"},
		{"an annotation of Talos's", rules.Rule{Annotations: map[string]string{"talos.dev/owned-labels": ""}}, "Talos keeps its own records"},
		{"a label of Talos's", label("talos.dev/owned-taints", ""), "Talos keeps its own records"},
		{"the kubelet's node IPs", rules.Rule{Annotations: map[string]string{"alpha.kubernetes.io/provided-node-ip": ""}}, "kubelet"},
		{"the role that Talos sets", label("node-role.kubernetes.io/control-plane", ""), "Talos sets it"},
		{"a label of our own", label("talos-ccm.node-restriction.kubernetes.io/a", ""), "talos-ccm keeps its own records"},
		{"a taint's key", taint("a b", "NoSchedule"), "a b"},
		{"a taint's effect", taint("a", "b:PleaseSchedule"), "b:PleaseSchedule"},
		{"a taint's effect in lower case", taint("a", "noschedule"), "noschedule"},
		{"a taint with too many parts", taint("a", "b:c:NoSchedule"), "b:c:NoSchedule"},
		{"a taint's value", taint("a", "b c:NoSchedule"), "alphanumeric"},
		{"a taint without effect", taint("a", ""), "NoExecute"},
		{"a taint of Kubernetes's", taint("node.kubernetes.io/not-ready", "NoSchedule"), "cannot be set"},
		{"a field that is not there", replace("Sone", "a"), "Zone"},
		{"the hostname", replace("hostName", "a"), "hostName cannot be replaced"},
		{"the platform", replace("Platform", "a"), "Platform cannot be replaced"},
		{"tags", replace("tags", "a"), "tags"},
		{"Spot", replace("spot", "yes"), "neither true nor false"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if m := mistake(t, test.rule); !strings.Contains(m.Error(), test.want) {
				t.Errorf("%q does not say %q", m, test.want)
			}
		})
	}
}

func TestTaintsOfControllersAreProhibited(t *testing.T) {
	for _, key := range []string{
		"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/memory-pressure", "node.kubernetes.io/disk-pressure",
		"node.kubernetes.io/network-unavailable", "node.kubernetes.io/pid-pressure", "node.cloudprovider.kubernetes.io/uninitialized", "node.cloudprovider.kubernetes.io/shutdown",
	} {
		_ = mistake(t, rules.Rule{Taints: map[string]string{key: "{{ .Zone }}"}})
	}
}

func TestKeysOfKubernetesAreAllowed(t *testing.T) {
	compile(t, rules.Rule{
		Labels: map[string]string{
			"node-role.kubernetes.io/web": "", "kubernetes.io/os": "linux", "karpenter.sh/capacity-type": "spot",
			"talos.dev/zone": "a", "node-role.kubernetes.io/control-plane-test": "",
		},
		Annotations: map[string]string{"node.alpha.kubernetes.io/ttl": "0"},
		Taints:      map[string]string{"node.kubernetes.io/out-of-service": "nodeshutdown:NoExecute", "a": ":NoSchedule"},
	})
}

func TestAFieldCanBeReplacedOnceInARule(t *testing.T) {
	_ = mistake(t, rules.Rule{PlatformMetadata: map[string]string{"Zone": "a", "zone": "b"}})
}

func TestFieldsByTheirNamesInYAML(t *testing.T) {
	result := compile(t, rules.Rule{PlatformMetadata: map[string]string{
		"providerId": "p", "instanceId": "i", "instanceType": "t", "internalDNS": "in", "externalDNS": "ex", "region": "r", "zone": "z", "spot": " true ",
	}}).Apply(rules.Facts{})

	want := everything().Machine.Platform
	want.Platform, want.Hostname, want.Tags = "", "", nil
	want.ProviderID, want.InstanceID, want.InstanceType, want.InternalDNS, want.ExternalDNS, want.Region, want.Zone = "p", "i", "t", "in", "ex", "r", "z"

	if diff := cmp.Diff(want, result.Platform); diff != "" {
		t.Error(diff)
	}
}

func TestNamesNeedNotBeGiven(t *testing.T) {
	compile(t, rules.Rule{}, rules.Rule{})
}

// Otherwise nobody could tell which is meant.
func TestANameIsNotTheNumberOfAnotherRule(t *testing.T) {
	_ = mistake(t, rules.Rule{}, rules.Rule{Name: "#1"})
	_ = mistake(t, rules.Rule{Name: "#2"}, rules.Rule{})
	compile(t, rules.Rule{Name: "#1"})
}
