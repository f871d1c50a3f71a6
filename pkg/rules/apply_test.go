package rules_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func compile(t testing.TB, list ...rules.Rule) *rules.Set {
	t.Helper()

	compiled, errs := rules.Compile(list, nil)
	require.Empty(t, errs)

	return compiled
}

// compileError returns the only mistake in the rules.
func compileError(t *testing.T, list ...rules.Rule) *field.Error {
	t.Helper()

	compiled, errs := rules.Compile(list, nil)
	require.Len(t, errs, 1)
	assert.Nil(t, compiled)

	return errs[0]
}

const key = "example.org/key"

func annotate(template string) rules.Rule {
	return rules.Rule{Annotations: map[string]string{key: template}}
}

func render(t *testing.T, template string, facts rules.Facts) string {
	t.Helper()

	result := compile(t, annotate(template)).Apply(facts)
	require.Empty(t, result.Problems)

	return result.Annotations[key].Value
}

// renderError returns the error of a template that compiles but cannot be rendered.
func renderError(t *testing.T, template string, facts rules.Facts) string {
	t.Helper()

	result := compile(t, annotate(template)).Apply(facts)
	require.Len(t, result.Problems, 1, result.Annotations[key].Value)

	return result.Problems[0].Why
}

func values(of map[string]rules.Value) map[string]string {
	plain := map[string]string{}
	for k, v := range of {
		plain[k] = v.Value
	}

	return plain
}

func TestSet_NilChangesNothing(t *testing.T) {
	facts, none := everything(), map[string]rules.Value{}
	want := rules.Result{Platform: facts.Machine.Platform, Labels: none, Annotations: none, Replaced: map[string]string{}}
	assert.Equal(t, want, (*rules.Set)(nil).Apply(facts))
}

func TestApply_DoesNotEscapeHTML(t *testing.T) {
	facts := rules.Facts{Machine: machine.Machine{System: hardware.SystemInformationSpec{Manufacturer: "Dell & Co <x>"}}}
	assert.Equal(t, "Dell & Co <x>", render(t, "{{ .Manufacturer }}", facts))
}

func TestApply_RendersTaints(t *testing.T) {
	compiled := compile(t, rules.Rule{Name: "spot", Enforce: true, Taints: map[string]string{key: "{{ .Zone }}:{{ if .Spot }}NoExecute{{ else }}NoSchedule{{ end }}"}})

	want := []rules.Taint{{Taint: corev1.Taint{Key: key, Value: "Zone", Effect: corev1.TaintEffectNoExecute}, Rule: "spot", Enforce: true}}
	assert.Equal(t, want, compiled.Apply(everything()).Taints)
}

func TestCompile_RejectsInvalidRegularExpressions(t *testing.T) {
	for name, rule := range map[string]rules.Rule{
		"in a selector":                {NodeSelector: one("hostname", rules.Regexp, "web-[")},
		"in a template":                annotate(`{{ regexFind "web-[" .Hostname }}`),
		"in a branch of a template":    annotate(`{{ if .Spot }}{{ range .Tags }}{{ . | regexReplaceAll "web-[" . }}{{ end }}{{ end }}`),
		"in an argument of a function": annotate(`{{ upper (regexFindString "web-[" .Hostname 1) }}`),
	} {
		t.Run(name, func(t *testing.T) {
			err := compileError(t, rule)
			assert.True(t, strings.HasPrefix(err.Field, "[0]."))
			assert.Contains(t, err.Error(), "missing closing ]")
		})
	}

	facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Zone: "("}}}
	assert.Contains(t, renderError(t, `{{ regexFind .Zone "x" }}`, facts), "missing closing")
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
	assert.Equal(t, want, values(result.Labels))
	assert.Equal(t, map[string]string{"Zone": "second", "Region": "first", "Spot": "first"}, result.Replaced)

	facts.Machine.Platform.Zone, facts.Machine.Platform.Region, facts.Machine.Platform.Spot = "Regiona-false", "north-Zone", false
	assert.Equal(t, facts.Machine.Platform, result.Platform)
}

func TestExplain(t *testing.T) {
	compiled := compile(t,
		rules.Rule{Name: "all", PlatformMetadata: map[string]string{"Zone": "a"}},
		rules.Rule{Name: "replaced", NodeSelector: one("zone", rules.In, "Zone", "b")},
		rules.Rule{Name: "absent", NodeSelector: one("tags.rack", rules.Exists)},
		rules.Rule{Name: "terms", NodeSelector: append(
			[]rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "zone", Operator: rules.Exists}, {Key: "Region", Operator: rules.DoesNotExist}}}, {}},
			one("region", rules.NotIn, "Region")...,
		)},
	)

	assert.Equal(t, []rules.Match{
		{Rule: "all"},
		{Rule: "replaced", Mismatch: `does not apply: zone In Zone, b, but it is "a"`},
		{Rule: "absent", Mismatch: "does not apply: tags.rack Exists, but the machine does not report it"},
		{Rule: "terms", Mismatch: `does not apply: Region DoesNotExist, but it is "Region"; a term without expressions matches nothing; region NotIn Region, but it is "Region"`},
	}, compiled.Explain(everything()))
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
	assert.Equal(t, map[string]string{"b": "Zone"}, values(result.Labels))
	assert.Equal(t, map[string]string{"b": "Dell & Co"}, values(result.Annotations))
	require.Len(t, result.Taints, 1)
	assert.Equal(t, "b", result.Taints[0].Key)

	platform := everything().Machine.Platform
	platform.Region = "r"
	assert.Equal(t, platform, result.Platform)

	var got []string

	for _, p := range result.Problems {
		got = append(got, fmt.Sprintf("%s %s %q %t", p.Rule, p.Key, p.Value, p.Identity))
		assert.NotEmpty(t, p.Why)
		assert.NotContains(t, p.Why, "template:")
		assert.NotContains(t, p.Why, "$")
	}

	assert.Equal(t, []string{
		`bad labels[a] "Dell & Co" false`, `bad labels[c] "" false`, `bad annotations[a] "" false`, `bad annotations[c] "" false`,
		`bad taints[a] "Zone" false`, `bad platformMetadata[ProviderID] "" true`, `bad platformMetadata[Spot] "Zone" false`,
	}, got)
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
		assert.Equal(t, test[2], render(t, fmt.Sprintf("{{ getValue %q %q }}", test[0], test[1]), rules.Facts{}), "getValue %q %q", test[0], test[1])
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
	assert.Equal(t, both, result.Labels)
	assert.Equal(t, both, result.Annotations)

	// Kubernetes identifies taints by key and effect.
	want := []rules.Taint{
		{Taint: corev1.Taint{Key: "a", Effect: corev1.TaintEffectNoSchedule}, Rule: "#3", Enforce: true},
		{Taint: corev1.Taint{Key: "b", Value: "2", Effect: corev1.TaintEffectNoExecute}, Rule: "#2"},
		{Taint: corev1.Taint{Key: "b", Value: "1", Effect: corev1.TaintEffectNoSchedule}, Rule: "first"},
	}
	assert.Equal(t, want, result.Taints)

	assert.Equal(t, &no, result.PublicIPDiscovery)
}

func TestApply_SetsEmptyLabels(t *testing.T) {
	const role = "node-role.kubernetes.io/web"

	result := compile(t, rules.Rule{Labels: map[string]string{role: "", "zone": "{{ .Zone }}"}}).Apply(rules.Facts{})
	assert.Equal(t, map[string]string{role: "", "zone": ""}, values(result.Labels))
}

func TestApply_DoesNotModifyFacts(t *testing.T) {
	facts, before := everything(), everything()

	compile(t, rules.Rule{PlatformMetadata: map[string]string{"Zone": "x"}, Labels: map[string]string{"keys": `{{ keys .Tags | join "." }}`}}).Apply(facts)
	assert.Equal(t, before, facts)
}

// The example in docs/config.md of the upstream Talos CCM, without its arrows, and with single quotes around the two
// annotations that contain double quotes. The original is not valid YAML.
func TestApply_UpstreamExample(t *testing.T) {
	yes := true
	compiled := compile(t,
		rules.Rule{Name: "nocloud-nodes", NodeSelector: one("platform", rules.In, "nocloud"), Labels: map[string]string{"pvc-storage-class/name": "my-storage-class"}},
		rules.Rule{
			Name: "web-nodes",
			NodeSelector: []rules.SelectorTerm{
				{MatchExpressions: []rules.Expression{{Key: "platform", Operator: rules.In, Values: []string{"metal"}}, {Key: "hostname", Operator: rules.Regexp, Values: []string{`^web-[\w]+$`}}}},
				{MatchExpressions: []rules.Expression{{Key: "hostname", Operator: rules.Regexp, Values: []string{`^web-cloud-.+$`}}}},
			},
			Annotations:      map[string]string{"custom-annotation/instance-id": "id-{{ .InstanceID }}", "custom-annotation/cloud-id": `{{ regexFindString "^web-([a-z0-9]+)-(.*)$" .Hostname 1 }}`},
			Labels:           map[string]string{"node-role.kubernetes.io/web": "", "node-role.kubernetes.io/capacity-type": "{{ if .Spot }}spot{{ else }}on-demand{{ end }}"},
			Taints:           map[string]string{"node.cloudprovider.kubernetes.io/storage-type": "ceph:NoSchedule"},
			PlatformMetadata: map[string]string{"Region": "{{ .Region }}-on-metal", "Zone": "us-west-1f", "InstanceType": "{{ .SKUNumber }}", "ProviderID": "someproviderID:///{{ .UUID }}"},
			Features:         rules.Features{PublicIPDiscovery: &yes},
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
		Labels:            map[string]rules.Value{"node-role.kubernetes.io/web": rule(""), "node-role.kubernetes.io/capacity-type": rule("on-demand")},
		Annotations:       map[string]rules.Value{"custom-annotation/instance-id": rule("id-" + uuid), "custom-annotation/cloud-id": rule("")},
		Taints:            []rules.Taint{{Taint: corev1.Taint{Key: "node.cloudprovider.kubernetes.io/storage-type", Value: "ceph", Effect: corev1.TaintEffectNoSchedule}, Rule: "web-nodes"}},
		PublicIPDiscovery: &yes,
		Replaced:          map[string]string{"Region": "web-nodes", "Zone": "web-nodes", "InstanceType": "web-nodes", "ProviderID": "web-nodes"},
	}

	assert.Equal(t, want, result)

	cloud := compiled.Apply(rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Platform: "aws", Hostname: "web-cloud-7"}}})
	assert.Equal(t, "cloud", cloud.Annotations["custom-annotation/cloud-id"].Value)
}
