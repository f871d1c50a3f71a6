package rules_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// everything returns Facts in which every field is set. The value of a string is the name of its field.
func everything() rules.Facts {
	return rules.Facts{
		Machine: machine.Machine{
			Nodename:    "Nodename",
			Hostname:    "OwnHostname",
			ClusterName: "ClusterName",
			Type:        talosmachine.TypeWorker,
			Platform: runtime.PlatformMetadataSpec{
				Platform: "Platform", Hostname: "Hostname", Region: "Region", Zone: "Zone", InstanceType: "InstanceType", InstanceID: "InstanceID",
				ProviderID: "ProviderID", Spot: true, InternalDNS: "InternalDNS", ExternalDNS: "ExternalDNS",
				Tags: map[string]string{"Team": "web", "team": "lower", "Owner": "me", "empty": ""},
			},
			System: hardware.SystemInformationSpec{
				Manufacturer: "Manufacturer", ProductName: "ProductName", Version: "Version", SerialNumber: "SerialNumber", UUID: "UUID",
				WakeUpType: "WakeUpType", SKUNumber: "SKUNumber", BIOSVersion: "BIOSVersion",
			},
			Facts: &machine.Facts{TalosVersion: "TalosVersion", Schematic: "Schematic", Extensions: map[string]string{"schematic": "Schematic", "qemu-guest-agent": "9.0"}},
		},
		Architecture: "Architecture",
		NodeLabels:   map[string]string{"example.org/Disk": "ssd", "node-role.kubernetes.io/control-plane": ""},
	}
}

func one(key string, operator rules.Operator, values ...string) []rules.SelectorTerm {
	return []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: key, Operator: operator, Values: values}}}}
}

func selector(t *testing.T, terms []rules.SelectorTerm) *rules.Selector {
	t.Helper()

	s, errs := rules.CompileNodeSelector(terms, nil)
	require.Empty(t, errs)

	return s
}

func TestSelector_Operators(t *testing.T) {
	list := func(elements ...string) rules.Facts {
		return rules.Facts{Machine: machine.Machine{Facts: &machine.Facts{Addresses: elements}}}
	}
	text := func(value string) rules.Facts {
		return rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Zone: value}}}
	}
	absent := rules.Facts{}

	for _, test := range []struct {
		name     string
		facts    rules.Facts
		operator rules.Operator
		values   []string
		want     bool
	}{
		{"In matches one of the values", text("b"), rules.In, []string{"a", "b"}, true},
		{"In does not match another value", text("c"), rules.In, []string{"a", "b"}, false},
		{"In is case-sensitive", text("A"), rules.In, []string{"a"}, false},
		{"In does not match an absent fact", absent, rules.In, []string{"a"}, false},
		{"In with an empty value does not match an absent fact", absent, rules.In, []string{""}, false},
		{"NotIn matches another value", text("c"), rules.NotIn, []string{"a", "b"}, true},
		{"NotIn does not match one of the values", text("b"), rules.NotIn, []string{"a", "b"}, false},
		{"NotIn matches an absent fact", absent, rules.NotIn, []string{"a"}, true},
		{"Exists matches a fact", text("a"), rules.Exists, nil, true},
		{"Exists does not match an absent fact", absent, rules.Exists, nil, false},
		{"DoesNotExist matches an absent fact", absent, rules.DoesNotExist, nil, true},
		{"DoesNotExist does not match a fact", text("a"), rules.DoesNotExist, nil, false},
		{"Gt matches a greater integer", text("11"), rules.Gt, []string{"10"}, true},
		{"Gt does not match an equal integer", text("10"), rules.Gt, []string{"10"}, false},
		{"Gt compares integers, not strings", text("9"), rules.Gt, []string{"10"}, false},
		{"Gt does not match a fraction", text("11.5"), rules.Gt, []string{"10"}, false},
		{"Gt does not match an absent fact", absent, rules.Gt, []string{"-10"}, false},
		{"Lt matches a smaller integer", text("-11"), rules.Lt, []string{"-10"}, true},
		{"Lt does not match an equal integer", text("10"), rules.Lt, []string{"10"}, false},
		{"Lt does not match text", text("much"), rules.Lt, []string{"10"}, false},
		{"Lt does not match an absent fact", absent, rules.Lt, []string{"10"}, false},
		{"Regexp matches anywhere", text("web-12"), rules.Regexp, []string{`\d`}, true},
		{"Regexp does not match without a match", text("web-12"), rules.Regexp, []string{`^\d`}, false},
		{"Regexp does not match an absent fact", absent, rules.Regexp, []string{`.*`}, false},

		{"In matches one of the elements", list("10.0.0.1", "fd00::1"), rules.In, []string{"fd00::1"}, true},
		{"NotIn does not match if In does", list("10.0.0.1", "fd00::1"), rules.NotIn, []string{"fd00::1"}, false},
		{"NotIn matches other elements", list("10.0.0.1"), rules.NotIn, []string{"fd00::1"}, true},
		{"NotIn matches an empty list", list(), rules.NotIn, []string{"fd00::1"}, true},
		{"Exists matches a list", list("10.0.0.1"), rules.Exists, nil, true},
		{"Exists does not match an empty list", list(), rules.Exists, nil, false},
		{"DoesNotExist matches an empty list", list(), rules.DoesNotExist, nil, true},
		{"Regexp matches one of the elements", list("10.0.0.1", "fd00::1"), rules.Regexp, []string{"^fd"}, true},
		{"Gt matches one of the elements", list("x", "7"), rules.Gt, []string{"6"}, true},
		{"InCIDR matches one of the elements", list("10.0.0.1", "192.0.2.7"), rules.InCIDR, []string{"172.16.0.0/12", "192.0.2.0/24"}, true},
		{"InCIDR does not match another address", list("10.0.1.1"), rules.InCIDR, []string{"10.0.0.0/24"}, false},
		{"InCIDR does not match the other IP family", list("10.0.0.1"), rules.InCIDR, []string{"::/0"}, false},
		{"InCIDR matches an IPv6 address", list("fd00::1"), rules.InCIDR, []string{"fd00::/8"}, true},
		{"InCIDR matches a subnet of the CIDR", list("10.0.1.0/24"), rules.InCIDR, []string{"10.0.0.0/16"}, true},
		{"InCIDR does not match a subnet that contains the CIDR", list("10.0.0.0/8"), rules.InCIDR, []string{"10.0.0.0/16"}, false},
		{"InCIDR does not match text", list("eth0"), rules.InCIDR, []string{"0.0.0.0/0"}, false},
		{"InCIDR does not match an empty list", list(), rules.InCIDR, []string{"0.0.0.0/0"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			key := "zone"
			if test.facts.Machine.Facts != nil {
				key = "addresses"
			}

			assert.Equal(t, test.want, selector(t, one(key, test.operator, test.values...)).Matches(test.facts))
		})
	}
}

func TestSelector_ComparesVersions(t *testing.T) {
	for _, test := range []struct {
		version  string
		operator rules.Operator
		limit    string
		want     bool
	}{
		{"v1.13.5", rules.Gt, "1.13", true},
		{"v1.13.0", rules.Gt, "1.13", false},
		{"v1.9.5", rules.Gt, "1.13", false},
		{"v1.9.5", rules.Lt, "1.13", true},
		{"v1.13.0", rules.Lt, "1.13", false},
		{"v1.13.10", rules.Gt, "v1.13.9", true},
		{"v1.13.9", rules.Gt, "v1.13.9", false},
		{"v2.0.0", rules.Lt, "1.13.9", false},
		{"v1.14.0-beta.1", rules.Lt, "1.14.0", true},
		{"v1.14.0-beta.10", rules.Gt, "v1.14.0-beta.9", true},
		{"v1.14.0-beta.1", rules.Lt, "1.14", false},
		{"v1.14.0-beta.1", rules.Gt, "1.14", false},
		{"v1.14.1+k3s1", rules.Gt, "1.14.0", true},
		{"v1.13.0-12-g0a1b2c3d", rules.Gt, "1.12", true},
		{"", rules.Lt, "1.13", false},
		{"latest", rules.Gt, "1.13", false},
		{"latest", rules.Lt, "1.13.0", false},
	} {
		facts := rules.Facts{KubernetesVersion: test.version, Machine: machine.Machine{Facts: &machine.Facts{TalosVersion: test.version}}}

		for _, key := range []string{"talosVersion", "KubernetesVersion"} {
			assert.Equal(t, test.want, selector(t, one(key, test.operator, test.limit)).Matches(facts), "%s: %s %s %s", key, test.version, test.operator, test.limit)
		}
	}
}

func TestFactKinds_OfSelectorsAndTemplates(t *testing.T) {
	cpus, gateways, kernelArgs := machine.FactKindsOf("CPUs"), machine.FactKindsOf("Gateways"), machine.FactKindsOf("KernelArgs")
	selects := slices.Concat(one("zone", rules.Exists), one("CPUs", rules.Gt, "8"), one("region", rules.Exists))
	assert.Equal(t, cpus, selector(t, selects).FactKinds(), "facts among others")
	assert.Equal(t, machine.FactKindsOf("Meta"), selector(t, one("meta.0x0C", rules.Exists)).FactKinds(), "entry of a fact")
	assert.Zero(t, selector(t, one("zone", rules.Exists)).FactKinds(), "platform metadata")
	assert.Zero(t, (*rules.Selector)(nil).FactKinds(), "no selector")

	for _, test := range []struct {
		name  string
		rules []rules.Rule
		want  machine.FactKinds
	}{
		{"selector", []rules.Rule{{}, {NodeSelector: selects}}, cpus},
		{"template", []rules.Rule{{Labels: map[string]string{"a": "{{ .Zone }}", "b": "{{ with .Region }}{{ first $.Gateways }}{{ end }}"}}}, gateways},
		{"metadata", []rules.Rule{{PlatformMetadata: map[string]string{"Zone": `{{ if eq .KernelArgs.rack "7" }}a{{ end }}`}}, {NodeSelector: selects}}, kernelArgs | cpus},
		{"none", []rules.Rule{{NodeSelector: one("zone", rules.Exists), Labels: map[string]string{"a": "{{ .Zone }}"}}}, 0},
	} {
		assert.Equal(t, test.want, compile(t, test.rules...).FactKinds(), test.name)
	}

	assert.Zero(t, (*rules.Set)(nil).FactKinds(), "no rules")
}

func TestIdentityFacts(t *testing.T) {
	links, gateways, cpus := machine.FactKindsOf("Links"), machine.FactKindsOf("Gateways"), machine.FactKindsOf("CPUs")
	selects := one("links", rules.Exists)

	for _, test := range []struct {
		name  string
		rules []rules.Rule
		want  machine.FactKinds
	}{
		{"template of a providerID", []rules.Rule{{PlatformMetadata: map[string]string{"providerID": "x://{{ first .Gateways }}"}}}, gateways},
		{"selector of an instance ID", []rules.Rule{{NodeSelector: selects, PlatformMetadata: map[string]string{"InstanceID": "a"}}}, links},
		{"metadata that it reads", []rules.Rule{{NodeSelector: selects, PlatformMetadata: map[string]string{"Zone": "a"}}, {PlatformMetadata: map[string]string{"ProviderID": "x://{{ .Zone }}"}}}, links},
		{"another rule", []rules.Rule{{Labels: map[string]string{"a": "{{ .CPUs }}"}}, {PlatformMetadata: map[string]string{"ProviderID": "x://a"}}}, 0},
		{"a later rule", []rules.Rule{{PlatformMetadata: map[string]string{"ProviderID": "x://{{ .CPUs }}"}}, {NodeSelector: selects, PlatformMetadata: map[string]string{"Zone": "a"}}}, cpus},
		{"no identity", []rules.Rule{{NodeSelector: selects, PlatformMetadata: map[string]string{"Zone": "a"}}}, 0},
	} {
		assert.Equal(t, test.want, compile(t, test.rules...).IdentityFacts(), test.name)
	}

	assert.Zero(t, (*rules.Set)(nil).IdentityFacts(), "no rules")
}

// Selector keys and template variables have the same names.
func TestSelector_OptionalFacts(t *testing.T) {
	facts := rules.Facts{KubernetesVersion: "v1.36.2", Machine: machine.Machine{Facts: &machine.Facts{
		Addresses: []string{"10.0.0.1"}, Subnets: []string{"10.0.0.0/24"}, Links: []string{"bond0"}, Gateways: []string{"10.0.0.254"},
		CPUModel: "EPYC", CPUs: "64", MemoryMiB: "1024", PCIDevices: []string{"0302:10de:2236"}, SecureBoot: true,
		KernelArgs: map[string]string{"console": "tty0"}, Meta: map[string]string{"0x0c": "rack=7"},
	}}}

	for key, template := range map[string]string{
		"addresses": "{{ first .Addresses }}", "subnets": "{{ first .Subnets }}", "links": "{{ first .Links }}", "gateways": "{{ first .Gateways }}",
		"cpuModel": "{{ .CPUModel }}", "cpus": "{{ .CPUs }}", "memoryMiB": "{{ .MemoryMiB }}", "pciDevices": "{{ first .PCIDevices }}",
		"secureBoot": "{{ .SecureBoot }}", "kernelArgs.console": "{{ .KernelArgs.console }}", "meta.0x0C": `{{ get .Meta "0x0c" }}`,
		"kubernetesVersion": "{{ .KubernetesVersion }}",
	} {
		value := render(t, template, facts)
		assert.NotEmpty(t, value)
		assert.True(t, selector(t, one(key, rules.In, value)).Matches(facts))
		assert.Contains(t, []string{"", "false"}, render(t, template, rules.Facts{}), template)
	}
}

func TestSelector_TermsAndExpressions(t *testing.T) {
	yes := rules.Expression{Key: "zone", Operator: rules.Exists}
	no := rules.Expression{Key: "zone", Operator: rules.DoesNotExist}
	facts := everything()

	for _, test := range []struct {
		name  string
		terms []rules.SelectorTerm
		want  bool
	}{
		{"no terms match", nil, true},
		{"a term without expressions does not match", []rules.SelectorTerm{{}}, false},
		{"all expressions of a term must match", []rules.SelectorTerm{{MatchExpressions: []rules.Expression{yes, no}}}, false},
		{"one term must match", []rules.SelectorTerm{{MatchExpressions: []rules.Expression{no}}, {}, {MatchExpressions: []rules.Expression{yes, yes}}}, true},
	} {
		t.Run(test.name, func(t *testing.T) { assert.Equal(t, test.want, selector(t, test.terms).Matches(facts)) })
	}

	assert.True(t, (*rules.Selector)(nil).Matches(rules.Facts{}), "the nil Selector does not match")
}

// Every field of the two resources is selected by its names in Go and in YAML.
func TestSelector_EveryFieldInAnyCase(t *testing.T) {
	facts := everything()

	names := map[string]string{
		"nodename": "Nodename", "clusterName": "ClusterName", "talosVersion": "TalosVersion", "schematic": "Schematic", "machineType": "worker",
		"arch": "Architecture", "architecture": "Architecture", "extensions.qemu-guest-agent": "9.0", "tags.Owner": "me", "tags.owner": "me",
		"tags.Team": "web", "tags.team": "lower", "TAGS.Team": "web",
	}

	for _, resource := range []any{facts.Machine.Platform, facts.Machine.System} {
		for field, value := range reflect.ValueOf(resource).Fields() {
			yaml, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")

			switch value.Kind() {
			case reflect.Map:
			case reflect.Bool:
				names[field.Name], names[yaml] = "true", "true"
			default:
				names[field.Name], names[yaml] = field.Name, field.Name
			}
		}
	}

	for name, value := range names {
		for _, key := range []string{name, strings.ToLower(name[:1]) + name[1:], strings.ToUpper(name[:1]) + name[1:]} {
			assert.True(t, selector(t, one(key, rules.In, value)).Matches(facts), "%s In [%s] does not match", key, value)
		}
	}
}

func TestSelector_AbsentAndDerivedFacts(t *testing.T) {
	of := func(typ talosmachine.Type) rules.Facts { return rules.Facts{Machine: machine.Machine{Type: typ}} }
	unnamed := everything()
	unnamed.Machine.Platform.Hostname = ""
	assert.Equal(t, "Nodename", render(t, "{{ .Hostname }}", unnamed))

	for _, test := range []struct {
		facts rules.Facts
		terms []rules.SelectorTerm
	}{
		{unnamed, one("hostname", rules.In, "Nodename")},
		{of(talosmachine.TypeInit), one("machineType", rules.In, "controlplane")},
		{of(talosmachine.TypeControlPlane), one("machineType", rules.In, "controlplane")},
		{of(talosmachine.TypeWorker), one("machineType", rules.In, "worker")},
		{rules.Facts{}, one("machinetype", rules.DoesNotExist)},
		{rules.Facts{}, one("spot", rules.In, "false")},
		{rules.Facts{}, one("zone", rules.NotIn, "a")},
		{rules.Facts{}, one("tags.absent", rules.NotIn, "a")},
		{rules.Facts{}, one("extensions.absent", rules.NotIn, "a")},
		{rules.Facts{}, one("uuid", rules.NotIn, "a")},
	} {
		assert.True(t, selector(t, test.terms).Matches(test.facts), test.terms)
	}
}

// As in Kubernetes node selectors: labels such as node roles have an empty value.
func TestSelector_EmptyMapEntriesExist(t *testing.T) {
	facts := everything()
	facts.Machine.Facts.Extensions = map[string]string{"bare": ""}

	for _, key := range []string{"labels.node-role.kubernetes.io/control-plane", "tags.empty", "tags.EMPTY", "extensions.bare"} {
		for _, terms := range [][]rules.SelectorTerm{one(key, rules.Exists), one(key, rules.In, "", "x")} {
			assert.True(t, selector(t, terms).Matches(facts), "%s does not match %v", key, terms)
		}

		assert.False(t, selector(t, one(key+"x", rules.Exists)).Matches(facts), "%sx exists", key)
	}
}

func TestSelector_NodeLabels(t *testing.T) {
	facts := everything()
	assert.True(t, selector(t, one("Labels.example.org/Disk", rules.In, "ssd")).Matches(facts), "the label does not match")
	assert.False(t, selector(t, one("labels.example.org/disk", rules.Exists)).Matches(facts), "a label matches in another case")

	_, errs := rules.CompileSelector(one("labels.example.org/Disk", rules.Exists), nil)
	assert.Len(t, errs, 1)

	for key, want := range map[string]bool{"labels.a": true, "LABELS.a": true, "zone": false} {
		assert.Equal(t, want, selector(t, one(key, rules.Exists)).ReadsLabels(), "ReadsLabels of %s", key)
	}
}

func TestCompileSelector_Errors(t *testing.T) {
	for _, test := range []struct {
		name       string
		expression rules.Expression
		path       string
		want       string
	}{
		{"unknown key", rules.Expression{Key: "zones", Operator: rules.Exists}, "key", `unknown key "zones"; supported keys: addresses, `},
		{"empty key", rules.Expression{Operator: rules.Exists}, "key", "unknown key"},
		{"missing name of a tag", rules.Expression{Key: "tags.", Operator: rules.Exists}, "key", ", spot, subnets, tags.<name>, talosversion, "},
		{"label of the Node", rules.Expression{Key: "labels.rack", Operator: rules.Exists}, "key", "labels can be selected in ipam.pools only"},
		{"unknown operator", rules.Expression{Key: "zone", Operator: "in"}, "operator", `"In", "NotIn", "Exists"`},
		{"In without values", rules.Expression{Key: "zone", Operator: rules.In}, "values", "at least one"},
		{"NotIn without values", rules.Expression{Key: "zone", Operator: rules.NotIn}, "values", "at least one"},
		{"Exists with values", rules.Expression{Key: "zone", Operator: rules.Exists, Values: []string{"a"}}, "values", "takes no values"},
		{"DoesNotExist with values", rules.Expression{Key: "zone", Operator: rules.DoesNotExist, Values: []string{"a"}}, "values", "takes no values"},
		{"Gt with two values", rules.Expression{Key: "zone", Operator: rules.Gt, Values: []string{"1", "2"}}, "values", "exactly one"},
		{"Lt with a fraction", rules.Expression{Key: "zone", Operator: rules.Lt, Values: []string{"1.5"}}, "values", "1.5"},
		{"Gt with text", rules.Expression{Key: "cpus", Operator: rules.Gt, Values: []string{"many"}}, "values", `"many" is not an integer`},
		{"Gt with a major version", rules.Expression{Key: "talosVersion", Operator: rules.Gt, Values: []string{"1"}}, "values", `"1" is not a version such as 1.13`},
		{"Lt with text after a version", rules.Expression{Key: "kubernetesVersion", Operator: rules.Lt, Values: []string{"1.13.x"}}, "values", `"1.13.x" is not a version`},
		{"Lt with an empty version", rules.Expression{Key: "talosVersion", Operator: rules.Lt, Values: []string{""}}, "values", `"" is not a version`},
		{"InCIDR without values", rules.Expression{Key: "addresses", Operator: rules.InCIDR}, "values", "at least one"},
		{"InCIDR with an address", rules.Expression{Key: "addresses", Operator: rules.InCIDR, Values: []string{"10.0.0.0/8", "10.1.2.3"}}, "values", "10.1.2.3"},
		{"InCIDR with host bits", rules.Expression{Key: "addresses", Operator: rules.InCIDR, Values: []string{"10.1.2.3/8"}}, "values", "10.0.0.0/8"},
		{"entry of a list", rules.Expression{Key: "addresses.eth0", Operator: rules.Exists}, "key", "unknown key"},
		{"map without the name of an entry", rules.Expression{Key: "meta", Operator: rules.Exists}, "key", "unknown key"},
		{"Regexp without values", rules.Expression{Key: "zone", Operator: rules.Regexp}, "values", "exactly one"},
		{"invalid Regexp", rules.Expression{Key: "zone", Operator: rules.Regexp, Values: []string{"("}}, "values", "missing closing"},
		{"Regexp over the limit of package regexp", rules.Expression{Key: "zone", Operator: rules.Regexp, Values: []string{"(a{1000}){1000}"}}, "values", "invalid repeat count"},
	} {
		t.Run(test.name, func(t *testing.T) {
			good := rules.Expression{Key: "zone", Operator: rules.Exists}

			_, errs := rules.CompileSelector([]rules.SelectorTerm{{}, {MatchExpressions: []rules.Expression{good, test.expression}}}, nil)
			require.Len(t, errs, 1)
			assert.Equal(t, "[1].matchExpressions[1]."+test.path, errs[0].Field)
			assert.Contains(t, errs[0].Detail, test.want)
		})
	}
}
