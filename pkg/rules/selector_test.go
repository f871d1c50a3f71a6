package rules_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// everything is a machine of which all is known. Each text is the name of its field.
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
				WakeUpType: "WakeUpType", SKUNumber: "SKUNumber",
			},
			TalosVersion: "TalosVersion",
			Extensions:   map[string]string{"schematic": "Schematic", "qemu-guest-agent": "9.0"},
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

	s, mistakes := rules.CompileNodeSelector(terms)
	if len(mistakes) > 0 {
		t.Fatal(mistakes)
	}

	return s
}

func TestOperators(t *testing.T) {
	const absent = ""

	for _, test := range []struct {
		name     string
		value    string
		operator rules.Operator
		values   []string
		want     bool
	}{
		{"In holds for one of the values", "b", rules.In, []string{"a", "b"}, true},
		{"In does not hold for others", "c", rules.In, []string{"a", "b"}, false},
		{"In tells case apart", "A", rules.In, []string{"a"}, false},
		{"In does not hold for what is absent", absent, rules.In, []string{"a"}, false},
		{"In does not hold for what is absent, not even with an empty value", absent, rules.In, []string{""}, false},
		{"NotIn holds for others", "c", rules.NotIn, []string{"a", "b"}, true},
		{"NotIn does not hold for one of the values", "b", rules.NotIn, []string{"a", "b"}, false},
		{"NotIn holds for what is absent", absent, rules.NotIn, []string{"a"}, true},
		{"Exists holds for what is there", "a", rules.Exists, nil, true},
		{"Exists does not hold for what is absent", absent, rules.Exists, nil, false},
		{"DoesNotExist holds for what is absent", absent, rules.DoesNotExist, nil, true},
		{"DoesNotExist does not hold for what is there", "a", rules.DoesNotExist, nil, false},
		{"Gt holds for more", "11", rules.Gt, []string{"10"}, true},
		{"Gt does not hold for as much", "10", rules.Gt, []string{"10"}, false},
		{"Gt compares numbers, not texts", "9", rules.Gt, []string{"10"}, false},
		{"Gt does not hold for what is no integer", "11.5", rules.Gt, []string{"10"}, false},
		{"Gt does not hold for what is absent", absent, rules.Gt, []string{"-10"}, false},
		{"Lt holds for less", "-11", rules.Lt, []string{"-10"}, true},
		{"Lt does not hold for as much", "10", rules.Lt, []string{"10"}, false},
		{"Lt does not hold for what is no integer", "much", rules.Lt, []string{"10"}, false},
		{"Lt does not hold for what is absent", absent, rules.Lt, []string{"10"}, false},
		{"Regexp holds for a match anywhere", "web-12", rules.Regexp, []string{`\d`}, true},
		{"Regexp does not hold without a match", "web-12", rules.Regexp, []string{`^\d`}, false},
		{"Regexp does not hold for what is longer than any text may be", strings.Repeat("a", 64<<10+1), rules.Regexp, []string{`a`}, false},
		{"Regexp does not hold for what is absent", absent, rules.Regexp, []string{`.*`}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			facts := rules.Facts{Machine: machine.Machine{Platform: runtime.PlatformMetadataSpec{Zone: test.value}}}

			if got := selector(t, one("zone", test.operator, test.values...)).Matches(facts); got != test.want {
				t.Errorf("got %t", got)
			}
		})
	}
}

func TestTermsAreAlternativesAndExpressionsAddUp(t *testing.T) {
	yes := rules.Expression{Key: "zone", Operator: rules.Exists}
	no := rules.Expression{Key: "zone", Operator: rules.DoesNotExist}
	facts := everything()

	for _, test := range []struct {
		name  string
		terms []rules.SelectorTerm
		want  bool
	}{
		{"no terms hold", nil, true},
		{"a term without expressions does not", []rules.SelectorTerm{{}}, false},
		{"all expressions of a term must hold", []rules.SelectorTerm{{MatchExpressions: []rules.Expression{yes, no}}}, false},
		{"one term must hold", []rules.SelectorTerm{{MatchExpressions: []rules.Expression{no}}, {}, {MatchExpressions: []rules.Expression{yes, yes}}}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := selector(t, test.terms).Matches(facts); got != test.want {
				t.Errorf("got %t", got)
			}
		})
	}

	if !(*rules.Selector)(nil).Matches(rules.Facts{}) {
		t.Error("the nil Selector does not match")
	}
}

// Every field of the two resources, by its names in Go and in YAML.
func TestR6EveryFieldCanBeSelectedInAnyCase(t *testing.T) {
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
			if !selector(t, one(key, rules.In, value)).Matches(facts) {
				t.Errorf("%s is not %q", key, value)
			}
		}
	}
}

func TestHostnameIsTheMachinesOwnWhereThePlatformGivesNone(t *testing.T) {
	facts := everything()
	facts.Machine.Platform.Hostname = ""

	if !selector(t, one("hostname", rules.In, "OwnHostname")).Matches(facts) {
		t.Error("it is not")
	}

	if got := render(t, "{{ .Hostname }}", facts); got != "OwnHostname" {
		t.Errorf("in a template it is %q", got)
	}
}

func TestMachineTypes(t *testing.T) {
	for typ, want := range map[talosmachine.Type]string{
		talosmachine.TypeInit: "controlplane", talosmachine.TypeControlPlane: "controlplane", talosmachine.TypeWorker: "worker",
	} {
		facts := rules.Facts{Machine: machine.Machine{Type: typ}}
		if !selector(t, one("machineType", rules.In, want)).Matches(facts) {
			t.Errorf("%s is not called %s", typ, want)
		}
	}

	if !selector(t, one("machinetype", rules.DoesNotExist)).Matches(rules.Facts{}) {
		t.Error("a machine that has not said its type has one")
	}
}

func TestSpotIsAlwaysThere(t *testing.T) {
	if !selector(t, one("spot", rules.In, "false")).Matches(rules.Facts{}) {
		t.Error("it is not")
	}
}

// As with Node selectors of Kubernetes: labels such as those of roles have no value.
func TestWhatHasAnEmptyValueInAMapExists(t *testing.T) {
	facts := everything()
	facts.Machine.Extensions["bare"] = ""

	for _, key := range []string{"labels.node-role.kubernetes.io/control-plane", "tags.empty", "tags.EMPTY", "extensions.bare"} {
		for _, terms := range [][]rules.SelectorTerm{one(key, rules.Exists), one(key, rules.In, "", "x")} {
			if !selector(t, terms).Matches(facts) {
				t.Errorf("%s does not match %v", key, terms)
			}
		}

		if selector(t, one(key+"x", rules.Exists)).Matches(facts) {
			t.Errorf("%sx exists", key)
		}
	}
}

func TestLabelsAreSelectedByTheirExactKeyAndOnlyWhereTheyMayBe(t *testing.T) {
	facts := everything()

	if !selector(t, one("Labels.example.org/Disk", rules.In, "ssd")).Matches(facts) {
		t.Error("the label is not found")
	}

	if selector(t, one("labels.example.org/disk", rules.Exists)).Matches(facts) {
		t.Error("a label is found in another case")
	}

	_, mistakes := rules.CompileSelector(one("labels.example.org/Disk", rules.Exists))
	if len(mistakes) != 1 {
		t.Errorf("a rule may depend on labels: %v", mistakes)
	}
}

func TestMistakesInSelectors(t *testing.T) {
	for _, test := range []struct {
		name       string
		expression rules.Expression
		path       string
		want       string
	}{
		{"unknown key", rules.Expression{Key: "zones", Operator: rules.Exists}, "key", "zone"},
		{"empty key", rules.Expression{Operator: rules.Exists}, "key", "unknown key"},
		{"no name of a tag", rules.Expression{Key: "tags.", Operator: rules.Exists}, "key", "unknown key"},
		{"unknown operator", rules.Expression{Key: "zone", Operator: "in"}, "operator", "In"},
		{"In without values", rules.Expression{Key: "zone", Operator: rules.In}, "values", "at least one"},
		{"NotIn without values", rules.Expression{Key: "zone", Operator: rules.NotIn}, "values", "at least one"},
		{"Exists with values", rules.Expression{Key: "zone", Operator: rules.Exists, Values: []string{"a"}}, "values", "no values"},
		{"DoesNotExist with values", rules.Expression{Key: "zone", Operator: rules.DoesNotExist, Values: []string{"a"}}, "values", "no values"},
		{"Gt with two values", rules.Expression{Key: "zone", Operator: rules.Gt, Values: []string{"1", "2"}}, "values", "exactly one"},
		{"Lt with a fraction", rules.Expression{Key: "zone", Operator: rules.Lt, Values: []string{"1.5"}}, "values", "1.5"},
		{"Regexp without values", rules.Expression{Key: "zone", Operator: rules.Regexp}, "values", "exactly one"},
		{"Regexp that is none", rules.Expression{Key: "zone", Operator: rules.Regexp, Values: []string{"("}}, "values", "missing closing"},
		{"Regexp that is huge", rules.Expression{Key: "zone", Operator: rules.Regexp, Values: []string{"(abcdefghijklmnop){1000}"}}, "values", "too large"},
	} {
		t.Run(test.name, func(t *testing.T) {
			good := rules.Expression{Key: "zone", Operator: rules.Exists}

			_, mistakes := rules.CompileSelector([]rules.SelectorTerm{{}, {MatchExpressions: []rules.Expression{good, test.expression}}})
			if len(mistakes) != 1 {
				t.Fatalf("%d mistakes: %v", len(mistakes), mistakes)
			}

			if path := fmt.Sprint(mistakes[0].Path...); path != fmt.Sprint(1, "matchExpressions", 1, test.path) {
				t.Errorf("the path is %v", mistakes[0].Path)
			}

			if !strings.Contains(mistakes[0].Err.Error(), test.want) {
				t.Errorf("%q does not say %q", mistakes[0].Err, test.want)
			}
		})
	}
}
