package rules_test

import (
	"fmt"
	"net/netip"
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

// tables are those of templates in tests.
var tables = rules.Tables{"racks": {"SerialNumber": "r12", "a": "r7", "": "none"}, "empty": nil}

func compile(t testing.TB, list ...rules.Rule) *rules.Set {
	t.Helper()

	compiled, errs := rules.Compile(list, tables, nil)
	require.Empty(t, errs)

	return compiled
}

// compileError returns the only mistake in the rules.
func compileError(t *testing.T, list ...rules.Rule) *field.Error {
	t.Helper()

	compiled, errs := rules.Compile(list, tables, nil)
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

func TestApply_RendersAddressesWithinCIDRs(t *testing.T) {
	const cidrs = "203.0.113.0/24 198.51.100.0/24 2001:db8::/32 fe80::/10"

	last := "203.0.113.9"

	for value, want := range map[string]string{
		"203.0.113.5":                           "203.0.113.5",
		"203.0.113.5,2001:db8::5":               "203.0.113.5 2001:db8::5",
		" 203.0.113.5\n198.51.100.5, ":          "203.0.113.5 198.51.100.5",
		"::ffff:203.0.113.5":                    "203.0.113.5",
		strings.Repeat("203.0.113.5 ", 16):      strings.TrimSpace(strings.Repeat("203.0.113.5 ", 16)),
		"":                                      "must be 1 to 16 IP addresses",
		strings.Repeat("203.0.113.5 ", 17):      "must be 1 to 16 IP addresses",
		"203.0.113.5/32":                        `"203.0.113.5/32" is not a unicast IP address`,
		"203.0.113.5 192.0.2.1":                 `"192.0.2.1" is in none of the rule's addressCIDRs`,
		"::ffff:192.0.2.1":                      `"::ffff:192.0.2.1" is in none of the rule's addressCIDRs`,
		"2001:db8::5%eth0":                      `"2001:db8::5%eth0" is in none of the rule's addressCIDRs`,
		"fe80::1":                               `"fe80::1" is not a unicast IP address`,
		strings.Repeat("x", 100):                `"` + strings.Repeat("x", 80) + `" is not a unicast IP address`,
		"{{ .Zone }} is not rendered in values": `"{{" is not a unicast IP address`,
	} {
		set := compile(
			t,
			rules.Rule{Name: "first", Addresses: map[string]string{"ExternalIP": last}, AddressCIDRs: []string{"203.0.113.0/24"}},
			rules.Rule{Name: "second", Addresses: map[string]string{"ExternalIP": "{{ .Meta.value }}"}, AddressCIDRs: strings.Fields(cidrs)},
		)
		result := set.Apply(rules.Facts{Machine: machine.Machine{Facts: &machine.Facts{Meta: map[string]string{"value": value}}}})

		if len(result.Problems) > 0 {
			assert.Equal(t, rules.Problem{Rule: "second", Key: "addresses[ExternalIP]", Value: value, Why: want}, result.Problems[0])
			assert.Equal(t, []rules.Address{{Type: corev1.NodeExternalIP, IP: netip.MustParseAddr(last), Rule: "first"}}, result.Addresses, value)

			continue
		}

		var got []string

		for _, a := range result.Addresses {
			assert.Equal(t, rules.Address{Type: corev1.NodeExternalIP, IP: a.IP, Rule: "second"}, a)
			got = append(got, a.IP.String())
		}

		assert.Equal(t, want, strings.Join(got, " "), value)
	}
}

func TestApply_KeepsAddressesOfOtherTypes(t *testing.T) {
	cidrs := []string{"10.8.0.0/16"}
	result := compile(
		t,
		rules.Rule{Name: "both", Addresses: map[string]string{"ExternalIP": "10.8.0.1", "InternalIP": "10.8.0.2"}, AddressCIDRs: cidrs},
		rules.Rule{Name: "one", Addresses: map[string]string{"ExternalIP": "10.8.0.3"}, AddressCIDRs: cidrs},
	).Apply(rules.Facts{})

	assert.Equal(t, []rules.Address{
		{Type: corev1.NodeInternalIP, IP: netip.MustParseAddr("10.8.0.2"), Rule: "both"},
		{Type: corev1.NodeExternalIP, IP: netip.MustParseAddr("10.8.0.3"), Rule: "one"},
	}, result.Addresses)
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

func TestApply_SetsLabelsFromTags(t *testing.T) {
	tags := map[string]string{
		"team/owner": "web", "team/cost center": "7", "team/note": "not a label", "team/": "x", "Stage": "prod", "empty": "",
		"raw:node-restriction.kubernetes.io/tier": "a", "raw:kubernetes.io/os": "a", "raw:node.k8s.io/a": "a", "raw:kubernetes.io": "a", "raw:my.org/a": "a", "raw:xk8s.io/a": "a",
		"raw:talos.dev/owned-labels": "a", "x": strings.Repeat("x", 64), "same.a": "", "same.b": "not a label", "same.c": "c", "same.d": "d",
	}

	for _, test := range []struct {
		match, prefix string
		want          map[string]string
		problems      []string
	}{
		{"^team/o", "example.org/o", map[string]string{"example.org/owner": "web"}, nil},
		{"^team/", "example.org/", map[string]string{"example.org/owner": "web"}, []string{
			`labelsFromTags["team/"]="x" omitted: invalid key "example.org/": name part`,
			`labelsFromTags["team/cost center"]="7" omitted: invalid key "example.org/cost center": name part`,
			`labelsFromTags["team/note"]="not a label" omitted: a valid label`,
		}},
		{"^(Stage|empty)$", "", map[string]string{"Stage": "prod", "empty": ""}, nil},
		{"^Stage$", "example.org/stage", map[string]string{"example.org/stage": "prod"}, nil},
		{"^raw:", "", map[string]string{"my.org/a": "a", "xk8s.io/a": "a"}, []string{
			`labelsFromTags["raw:kubernetes.io"]="a" omitted: key "kubernetes.io" cannot be set from tags: its domain is reserved by Kubernetes`,
			`labelsFromTags["raw:kubernetes.io/os"]="a" omitted: key "kubernetes.io/os" cannot be set from tags`,
			`labelsFromTags["raw:node-restriction.kubernetes.io/tier"]="a" omitted: key "node-restriction.kubernetes.io/tier" cannot be set from tags`,
			`labelsFromTags["raw:node.k8s.io/a"]="a" omitted: key "node.k8s.io/a" cannot be set from tags: its domain is`,
			`labelsFromTags["raw:talos.dev/owned-labels"]="a" omitted: key "talos.dev/owned-labels" cannot be set: Talos stores`,
		}},
		{"^raw:node", "node", nil, []string{
			`labelsFromTags["raw:node-restriction.kubernetes.io/tier"]="a" omitted: key "node-restriction.kubernetes.io/tier" cannot be set`,
			`labelsFromTags["raw:node.k8s.io/a"]="a" omitted: key "node.k8s.io/a" cannot be set`,
		}},
		{"^x", "", map[string]string{}, []string{`labelsFromTags["x"]="` + strings.Repeat("x", 64) + `" omitted: invalid key "": name part`}},
		{"^same[.][b-d]", "same", map[string]string{"same": "c"}, []string{
			`labelsFromTags["same.b"]="not a label" omitted: a valid label`,
			`labelsFromTags["same.d"]="d" omitted: tag "same.c" sets the same label`,
		}},
		{"^same[.][ad]", "same", map[string]string{"same": ""}, []string{`labelsFromTags["same.d"]="d" omitted: tag "same.a" sets the same label`}},
		{"absent", "", nil, nil},
	} {
		facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Tags: tags}}}
		result := compile(t, rules.Rule{Name: "tags", LabelsFromTags: &rules.LabelsFromTags{Match: test.match, Prefix: test.prefix}}).Apply(facts)
		assert.Len(t, result.Labels, len(test.want), test.match)

		for key, value := range test.want {
			assert.Equal(t, rules.Value{Value: value, Rule: "tags"}, result.Labels[key], test.match)
		}

		require.Len(t, result.Problems, len(test.problems), result.Problems)

		for i, p := range result.Problems {
			assert.Equal(t, "labelsFromTags", p.Kind())
			assert.Contains(t, p.String(), `rule "tags": `+test.problems[i])
		}
	}
}

func TestApply_LabelsTakePrecedenceOverTagsOfRule(t *testing.T) {
	fromTags := &rules.LabelsFromTags{Match: "^Owner$", Prefix: "owner"}
	labels := map[string]string{"owner": "rule"}

	for _, test := range []struct {
		rules []rules.Rule
		want  string
	}{
		{[]rules.Rule{{Labels: labels, LabelsFromTags: fromTags}}, "rule"},
		{[]rules.Rule{{LabelsFromTags: fromTags}, {Labels: labels}}, "rule"},
		{[]rules.Rule{{Labels: labels}, {LabelsFromTags: fromTags}}, "me"},
		{[]rules.Rule{{Labels: labels}, {LabelsFromTags: fromTags, NodeSelector: one("zone", rules.In, "another")}}, "rule"},
	} {
		assert.Equal(t, map[string]string{"owner": test.want}, values(compile(t, test.rules...).Apply(everything()).Labels))
	}
}

func TestApply_BoundsLabelsFromTags(t *testing.T) {
	tags := map[string]string{}
	for i := range 4000 {
		tags[fmt.Sprintf("good-%04d", i)], tags[fmt.Sprintf("bad-%04d%s", i, strings.Repeat("x", 4000))] = "a", "not a label"
	}

	facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Tags: tags}}}
	good, bad := rules.Rule{LabelsFromTags: &rules.LabelsFromTags{Match: "^good-"}}, rules.Rule{LabelsFromTags: &rules.LabelsFromTags{Match: "^bad-"}}

	result := compile(t, good, bad).Apply(facts)
	assert.Len(t, result.Labels, 64)
	assert.Contains(t, result.Labels, "0063")
	require.Len(t, result.Problems, 1)
	assert.Equal(t, `rule "#1": labelsFromTags["good-0064"]="a" omitted: rules set labels from at most 64 tags of a machine, and ignore all further ones`, result.Problems[0].String())

	result = compile(t, bad, good).Apply(facts)
	assert.Empty(t, result.Labels)
	require.Len(t, result.Problems, 65)

	for _, p := range result.Problems {
		assert.Less(t, len(p.String()), 1000)
	}
}

func TestApply_LooksUpTables(t *testing.T) {
	rule := func(template string) rules.Rule {
		return rules.Rule{Name: "racks", Labels: map[string]string{"rack": template}, Annotations: map[string]string{"other": "x"}}
	}

	for _, test := range []struct{ template, want, missing string }{
		{`{{ lookup "racks" .SerialNumber }}`, "r12", ""},
		{`{{ .SerialNumber | lookup "racks" | upper }}`, "R12", ""},
		{`{{ lookup "racks" "" }}`, "none", ""},
		{`{{ lookup "racks" .UUID }}`, "", `labels[rack]: table "racks" has no key "UUID"`},
		{`{{ lookup "racks" .UUID | default "unknown" }}`, "unknown", `labels[rack]: table "racks" has no key "UUID"`},
		{`{{ lookup "racks" "serialnumber" }}{{ lookup "racks" .UUID }}`, "", `labels[rack]: table "racks" has no key "serialnumber"`},
		{`{{ lookup "empty" "a" }}`, "", `labels[rack]: table "empty" has no key "a"`},
		{`{{ lookup "racks" (printf "%0100d" 0) }}`, "", `labels[rack]: table "racks" has no key "` + strings.Repeat("0", 80) + `"`},
		{`{{ if false }}{{ lookup "racks" .UUID }}{{ end }}`, "", ""},
	} {
		compiled := compile(t, rule(test.template))
		result := compiled.Apply(everything())
		assert.Equal(t, map[string]string{"rack": test.want}, values(result.Labels), test.template)
		assert.Empty(t, result.Problems)

		want := rules.Match{Rule: "racks"}
		if test.missing != "" {
			want.Missing = []string{test.missing}
		}

		assert.Equal(t, []rules.Match{want}, compiled.Explain(everything()), test.template)
	}
}

func TestCompile_RejectsUnknownTables(t *testing.T) {
	for template, want := range map[string]string{
		`{{ lookup "rack" .UUID }}`:                                  `unknown table "rack"; tables of the configuration: empty, racks`,
		`{{ if .Spot }}{{ .UUID | lookup "rack" | upper }}{{ end }}`: `unknown table "rack"`,
		`{{ upper (lookup "rack" .UUID) }}`:                          `unknown table "rack"`,
		`{{ lookup .Zone .UUID }}`:                                   "the table of lookup must be a string literal",
		`{{ lookup (lower "RACKS") .UUID }}`:                         "the table of lookup must be a string literal",
		`{{ lookup "racks" }}`:                                       "wrong number of args for lookup: want 2 got 1",
		`{{ lookup "racks" "a" "b" }}`:                               "wrong number of args for lookup: want 2 got 3",
	} {
		err := compileError(t, rules.Rule{Labels: map[string]string{"rack": template}})
		assert.Equal(t, "[0].labels[rack]", err.Field)
		assert.Contains(t, err.Detail, want, template)
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
