package rules_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func compile(t testing.TB, list ...rules.Rule) *rules.Set {
	t.Helper()

	compiled, errs := rules.Compile(list, nil)
	if len(errs) > 0 {
		t.Fatal(errs)
	}

	return compiled
}

// compileError returns the only mistake in the rules.
func compileError(t *testing.T, list ...rules.Rule) *field.Error {
	t.Helper()

	compiled, errs := rules.Compile(list, nil)
	if len(errs) != 1 {
		t.Fatalf("got %d errors, want 1: %v", len(errs), errs)
	}

	if compiled != nil {
		t.Error("Compile returned a Set with an error")
	}

	return errs[0]
}

const key = "example.org/key"

func annotate(template string) rules.Rule {
	return rules.Rule{Annotations: map[string]string{key: template}}
}

func render(t *testing.T, template string, facts rules.Facts) string {
	t.Helper()

	result := compile(t, annotate(template)).Apply(facts)
	if len(result.Problems) > 0 {
		t.Fatal(result.Problems)
	}

	return result.Annotations[key].Value
}

// renderError returns the error of a template that compiles but cannot be rendered.
func renderError(t *testing.T, template string, facts rules.Facts) string {
	t.Helper()

	result := compile(t, annotate(template)).Apply(facts)
	if len(result.Problems) != 1 {
		t.Fatalf("got %d problems, want 1: %v; rendered %.80q", len(result.Problems), result.Problems, result.Annotations[key].Value)
	}

	return result.Problems[0].Why
}

func values(of map[string]rules.Value) map[string]string {
	plain := map[string]string{}
	for k, v := range of {
		plain[k] = v.Value
	}

	return plain
}

func dell() rules.Facts {
	return rules.Facts{Machine: machine.Machine{System: hardware.SystemInformationSpec{Manufacturer: "Dell & Co <x>"}}}
}

func TestSet_NilChangesNothing(t *testing.T) {
	facts := everything()

	result := (*rules.Set)(nil).Apply(facts)
	if diff := cmp.Diff(facts.Machine.Platform, result.Platform); diff != "" {
		t.Error(diff)
	}

	if len(result.Labels)+len(result.Annotations)+len(result.Taints)+len(result.Problems)+len(result.Replaced) > 0 || result.PublicIPDiscovery != nil {
		t.Errorf("%+v", result)
	}
}

func TestApply_DoesNotEscapeHTML(t *testing.T) {
	if got, want := render(t, "{{ .Manufacturer }}", dell()), "Dell & Co <x>"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestApply_RendersTaints(t *testing.T) {
	compiled := compile(t, rules.Rule{Name: "spot", Enforce: true, Taints: map[string]string{key: "{{ .Zone }}:{{ if .Spot }}NoExecute{{ else }}NoSchedule{{ end }}"}})

	want := []rules.Taint{{Taint: corev1.Taint{Key: key, Value: "Zone", Effect: corev1.TaintEffectNoExecute}, Rule: "spot", Enforce: true}}
	if diff := cmp.Diff(want, compiled.Apply(everything()).Taints); diff != "" {
		t.Error(diff)
	}
}

func TestCompile_RejectsInvalidRegularExpressions(t *testing.T) {
	for name, rule := range map[string]rules.Rule{
		"in a selector":                {NodeSelector: one("hostname", rules.Regexp, "web-[")},
		"in a template":                annotate(`{{ regexFind "web-[" .Hostname }}`),
		"in a branch of a template":    annotate(`{{ if .Spot }}{{ range .Tags }}{{ . | regexReplaceAll "web-[" . }}{{ end }}{{ end }}`),
		"in an argument of a function": annotate(`{{ upper (regexFindString "web-[" .Hostname 1) }}`),
	} {
		t.Run(name, func(t *testing.T) {
			if err := compileError(t, rule); !strings.HasPrefix(err.Field, "[0].") || !strings.Contains(err.Error(), "missing closing ]") {
				t.Error(err)
			}
		})
	}

	facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Zone: "("}}}
	if got := renderError(t, `{{ regexFind .Zone "x" }}`, facts); !strings.Contains(got, "missing closing") {
		t.Errorf("got error %q for an invalid expression that the machine reports", got)
	}
}

func TestApply_LaterRulesReadReplacedMetadata(t *testing.T) {
	compiled := compile(t,
		rules.Rule{
			Name: "first", Labels: map[string]string{"first": "{{ .Zone }}"},
			PlatformMetadata: map[string]string{"zone": " {{ .Region }}a ", "Region": "north-{{ .Zone }}", "spot": "false"},
		},
		rules.Rule{Name: "unselected", NodeSelector: one("zone", rules.In, "Zone"), Labels: map[string]string{"unselected": ""}},
		rules.Rule{Name: "second", NodeSelector: one("zone", rules.In, "Regiona"), PlatformMetadata: map[string]string{"Zone": "{{ .Zone }}-{{ .Spot }}"}},
		rules.Rule{Name: "third", Labels: map[string]string{"third": "{{ .Zone }}", "region": "{{ .Region }}"}},
	)

	facts := everything()
	result := compiled.Apply(facts)

	want := map[string]string{"first": "Zone", "third": "Regiona-false", "region": "north-Zone"}
	if diff := cmp.Diff(want, values(result.Labels)); diff != "" {
		t.Error(diff)
	}

	if diff := cmp.Diff(map[string]string{"Zone": "second", "Region": "first", "Spot": "first"}, result.Replaced); diff != "" {
		t.Error(diff)
	}

	facts.Machine.Platform.Zone, facts.Machine.Platform.Region, facts.Machine.Platform.Spot = "Regiona-false", "north-Zone", false
	if diff := cmp.Diff(facts.Machine.Platform, result.Platform); diff != "" {
		t.Error(diff)
	}
}

func TestSelector_NotInMatchesAbsentFact(t *testing.T) {
	for _, key := range []string{"zone", "tags.absent", "extensions.absent", "uuid"} {
		if !selector(t, one(key, rules.NotIn, "a")).Matches(rules.Facts{}) {
			t.Errorf("%s NotIn [a] does not match", key)
		}
	}
}

func TestApply_SkipsOnlyInvalidValues(t *testing.T) {
	compiled := compile(t, rules.Rule{
		Name:             "bad",
		Labels:           map[string]string{"a": "{{ .Manufacturer }}", "b": "{{ .Zone }}", "c": `{{ fail "no" }}`},
		Annotations:      map[string]string{"a": `{{ index (splitList "." .Hostname) 5 }}`, "b": "{{ .Manufacturer }}", "c": `{{ b64dec "/w==" }}`},
		Taints:           map[string]string{"a": "{{ .Zone }}", "b": "NoExecute"},
		PlatformMetadata: map[string]string{"Spot": "{{ .Zone }}", "ProviderID": `{{ fail "no" }}`, "Region": "r"},
	})

	facts := everything()
	facts.Machine.System.Manufacturer = "Dell & Co"
	result := compiled.Apply(facts)

	if diff := cmp.Diff(map[string]string{"b": "Zone"}, values(result.Labels)); diff != "" {
		t.Error(diff)
	}

	if diff := cmp.Diff(map[string]string{"b": "Dell & Co"}, values(result.Annotations)); diff != "" {
		t.Error(diff)
	}

	if len(result.Taints) != 1 || result.Taints[0].Key != "b" {
		t.Errorf("%+v", result.Taints)
	}

	platform := everything().Machine.Platform
	platform.Region = "r"

	if diff := cmp.Diff(platform, result.Platform); diff != "" {
		t.Error(diff)
	}

	var got []string

	for _, p := range result.Problems {
		got = append(got, fmt.Sprintf("%s %s %q %t", p.Rule, p.Key, p.Value, p.Identity))
		checkMessage(t, p)
	}

	want := []string{
		`bad labels[a] "Dell & Co" false`, `bad labels[c] "" false`, `bad annotations[a] "" false`, `bad annotations[c] "" false`,
		`bad taints[a] "Zone" false`, `bad platformMetadata[ProviderID] "" true`, `bad platformMetadata[Spot] "Zone" false`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// checkMessage fails the test if the message of a problem is empty or mentions internals of the template.
func checkMessage(t *testing.T, p rules.Problem) {
	t.Helper()

	if p.Why == "" || strings.Contains(p.Why, "template:") || strings.Contains(p.Why, "$") {
		t.Errorf("%s: unhelpful message %q", p.Key, p.Why)
	}
}

func TestGetValue_AcceptsMissingAndRepeatedEqualsSigns(t *testing.T) {
	for _, test := range [][3]string{
		{"ds=nocloud;i=1234", "i", "1234"},
		{"ds=nocloud;i=1234", "ds", "nocloud"},
		{"ds=nocloud;i=1234", "x", ""},
		{"ds;i=a=b==;j=", "i", "a=b=="},
		{"ds;i", "ds", ""},
		{"i=;i=2", "i", ""},
		{"", "i", ""},
		{"=x", "", "x"},
	} {
		if got := render(t, fmt.Sprintf("{{ getValue %q %q }}", test[0], test[1]), rules.Facts{}); got != test[2] {
			t.Errorf("getValue %q %q: got %q, want %q", test[0], test[1], got, test[2])
		}
	}
}

func TestApply_LaterRulesOverrideByKey(t *testing.T) {
	yes, no := true, false
	compiled := compile(t,
		rules.Rule{
			Name: "first", Labels: map[string]string{"a": "1", "b": "1"}, Annotations: map[string]string{"a": "1", "b": "1"},
			Taints: map[string]string{"a": "1:NoSchedule", "b": "1:NoSchedule"}, Features: rules.Features{PublicIPDiscovery: &yes},
		},
		rules.Rule{Labels: map[string]string{"b": "2"}, Annotations: map[string]string{"b": "2"}, Taints: map[string]string{"b": "2:NoExecute"}},
		rules.Rule{Enforce: true, Taints: map[string]string{"a": "NoSchedule"}, Features: rules.Features{PublicIPDiscovery: &no}},
		rules.Rule{},
	)

	result := compiled.Apply(rules.Facts{})

	both := map[string]rules.Value{"a": {Value: "1", Rule: "first"}, "b": {Value: "2", Rule: "#2"}}
	if diff := cmp.Diff(both, result.Labels); diff != "" {
		t.Error(diff)
	}

	if diff := cmp.Diff(both, result.Annotations); diff != "" {
		t.Error(diff)
	}

	// Kubernetes identifies taints by key and effect.
	want := []rules.Taint{
		{Taint: corev1.Taint{Key: "a", Effect: corev1.TaintEffectNoSchedule}, Rule: "#3", Enforce: true},
		{Taint: corev1.Taint{Key: "b", Value: "2", Effect: corev1.TaintEffectNoExecute}, Rule: "#2"},
		{Taint: corev1.Taint{Key: "b", Value: "1", Effect: corev1.TaintEffectNoSchedule}, Rule: "first"},
	}
	if diff := cmp.Diff(want, result.Taints); diff != "" {
		t.Error(diff)
	}

	if result.PublicIPDiscovery == nil || *result.PublicIPDiscovery {
		t.Errorf("PublicIPDiscovery is %v, want false from the last rule that sets it", result.PublicIPDiscovery)
	}
}

func TestApply_SetsEmptyLabels(t *testing.T) {
	const role = "node-role.kubernetes.io/web"

	result := compile(t, rules.Rule{Labels: map[string]string{role: "", "zone": "{{ .Zone }}"}}).Apply(rules.Facts{})
	if diff := cmp.Diff(map[string]string{role: "", "zone": ""}, values(result.Labels)); diff != "" {
		t.Error(diff)
	}
}

func TestApply_LimitsSizeOfAnnotations(t *testing.T) {
	rule := rules.Rule{Name: "large", Annotations: map[string]string{}}
	for i := range 5 {
		rule.Annotations[fmt.Sprint(i)] = strings.Repeat("x", 60<<10)
	}

	result := compile(t, rule).Apply(rules.Facts{})
	if len(result.Annotations) != 3 || len(result.Problems) != 2 || result.Problems[0].Rule != "large" || result.Problems[0].Key != "annotations[3]" {
		t.Errorf("got %d annotations, want 3; problems: %+v", len(result.Annotations), result.Problems)
	}
}

func TestApply_DoesNotModifyFacts(t *testing.T) {
	facts, before := everything(), everything()

	compile(t, rules.Rule{PlatformMetadata: map[string]string{"Zone": "x"}, Labels: map[string]string{"keys": `{{ keys .Tags | join "." }}`}}).Apply(facts)

	if !reflect.DeepEqual(facts, before) {
		t.Errorf("got %+v, want %+v", facts, before)
	}
}

// The example in docs/config.md of the upstream Talos CCM, without the arrows that explain it and with single quotes around the two annotations
// that contain double quotes: as printed there it is not valid YAML.
func TestApply_UpstreamExample(t *testing.T) {
	yes := true
	compiled := compile(t,
		rules.Rule{
			Name:         "nocloud-nodes",
			NodeSelector: one("platform", rules.In, "nocloud"),
			Labels:       map[string]string{"pvc-storage-class/name": "my-storage-class"},
		},
		rules.Rule{
			Name: "web-nodes",
			NodeSelector: []rules.SelectorTerm{
				{MatchExpressions: []rules.Expression{
					{Key: "platform", Operator: rules.In, Values: []string{"metal"}},
					{Key: "hostname", Operator: rules.Regexp, Values: []string{`^web-[\w]+$`}},
				}},
				{MatchExpressions: []rules.Expression{{Key: "hostname", Operator: rules.Regexp, Values: []string{`^web-cloud-.+$`}}}},
			},
			Annotations: map[string]string{
				"custom-annotation/instance-id": "id-{{ .InstanceID }}",
				"custom-annotation/cloud-id":    `{{ regexFindString "^web-([a-z0-9]+)-(.*)$" .Hostname 1 }}`,
			},
			Labels: map[string]string{
				"node-role.kubernetes.io/web":           "",
				"node-role.kubernetes.io/capacity-type": "{{ if .Spot }}spot{{ else }}on-demand{{ end }}",
			},
			Taints: map[string]string{"node.cloudprovider.kubernetes.io/storage-type": "ceph:NoSchedule"},
			PlatformMetadata: map[string]string{
				"Region": "{{ .Region }}-on-metal", "Zone": "us-west-1f", "InstanceType": "{{ .SKUNumber }}", "ProviderID": "someproviderID:///{{ .UUID }}",
			},
			Features: rules.Features{PublicIPDiscovery: &yes},
		},
	)

	const uuid = "e8e8c388-5812-4db0-87e2-ad1fee51a1c1"

	result := compiled.Apply(rules.Facts{Machine: machine.Machine{
		Platform: runtime.PlatformMetadataSpec{Platform: "metal", Hostname: "web-1", Region: "us-west-1", InstanceID: uuid},
		System:   hardware.SystemInformationSpec{UUID: uuid, SKUNumber: "t2.micro"},
	}})

	rule := func(value string) rules.Value { return rules.Value{Value: value, Rule: "web-nodes"} }
	want := rules.Result{
		Platform: runtime.PlatformMetadataSpec{
			Platform: "metal", Hostname: "web-1", Region: "us-west-1-on-metal", Zone: "us-west-1f", InstanceType: "t2.micro", InstanceID: uuid,
			ProviderID: "someproviderID:///" + uuid,
		},
		Labels:      map[string]rules.Value{"node-role.kubernetes.io/web": rule(""), "node-role.kubernetes.io/capacity-type": rule("on-demand")},
		Annotations: map[string]rules.Value{"custom-annotation/instance-id": rule("id-" + uuid), "custom-annotation/cloud-id": rule("")},
		Taints: []rules.Taint{
			{Taint: corev1.Taint{Key: "node.cloudprovider.kubernetes.io/storage-type", Value: "ceph", Effect: corev1.TaintEffectNoSchedule}, Rule: "web-nodes"},
		},
		PublicIPDiscovery: &yes,
		Replaced:          map[string]string{"Region": "web-nodes", "Zone": "web-nodes", "InstanceType": "web-nodes", "ProviderID": "web-nodes"},
	}

	if diff := cmp.Diff(want, result); diff != "" {
		t.Error(diff)
	}

	cloud := compiled.Apply(rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Platform: "aws", Hostname: "web-cloud-7"}}})
	if got := cloud.Annotations["custom-annotation/cloud-id"].Value; got != "cloud" {
		t.Errorf("got cloud-id %q of web-cloud-7, want %q", got, "cloud")
	}
}
