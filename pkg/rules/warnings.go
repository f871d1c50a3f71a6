package rules

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/platforms"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Warning is a part of a rule or a selector that is valid, but has no effect or is probably a mistake.
type Warning struct {
	Path *field.Path
	Msg  string
}

// effectOfTemplate finds the effect after the last action of a taint's template.
var effectOfTemplate = regexp.MustCompile(`}}[^{}]*:([^{}:]*)$`)

// Warnings returns the warnings of rules and of their selectors. The path is the field path of the rules.
func Warnings(rules []Rule, path *field.Path) (warnings []Warning) {
	for i, r := range rules {
		at := path.Index(i)
		warnings = append(warnings, SelectorWarnings(r.NodeSelector, at.Child("nodeSelector"))...)

		if r.setsNothing() {
			warnings = append(warnings, Warning{at, "the rule sets nothing"})
		}

		if len(r.Addresses) == 0 && len(r.AddressCIDRs) > 0 {
			warnings = append(warnings, Warning{at.Child("addressCIDRs"), "has no effect without addresses"})
		}

		for _, key := range slices.Sorted(maps.Keys(r.Taints)) {
			effect := effectOfTemplate.FindStringSubmatch(r.Taints[key])
			if effect != nil && !slices.Contains(taintEffects, strings.TrimSpace(effect[1])) {
				warnings = append(warnings, Warning{at.Child("taints").Key(key), fmt.Sprintf("%q is not an effect of taints: the taint is never set", effect[1])})
			}
		}

		for _, key := range slices.Sorted(maps.Keys(r.PlatformMetadata)) {
			if isIdentity(key) && len(r.NodeSelector) == 0 && !strings.Contains(r.PlatformMetadata[key], "{{") {
				warnings = append(warnings, Warning{at.Child("platformMetadata").Key(key), "is the same for all machines, but identifies one; use a template, or select a machine"})
			}
		}
	}

	return warnings
}

func (r Rule) setsNothing() bool {
	values := len(r.Labels) + len(r.Annotations) + len(r.Taints) + len(r.PlatformMetadata) + len(r.Addresses)

	return values == 0 && r.LabelsFromTags == nil && r.Features == (Features{})
}

// form is the form of the values of a variable, or of the names of the entries of a map.
type form struct {
	pattern *regexp.Regexp
	// hint says how to write a value.
	hint string
}

func oneOf(values ...string) form {
	return form{regexp.MustCompile("^(" + strings.Join(values, "|") + ")$"), "known values: " + strings.Join(values, ", ")}
}

func like(pattern, example string) form {
	return form{regexp.MustCompile("^" + pattern + "$"), "write it as in " + example}
}

// forms are the forms of variables that are neither free text nor integers.
var forms = func() map[string]form {
	platform := []string{"metal", "container"}
	version, address := like(`v\d+\.\d+\.\d+.*`, "v1.14.1"), like(`[0-9a-f.:]+`, "10.1.2.3")

	for _, p := range platforms.CloudPlatforms() {
		platform = append(platform, p.Name)
	}

	return map[string]form{
		"Platform":          oneOf(platform...),
		"Architecture":      oneOf(platforms.ArchAmd64, platforms.ArchArm64),
		"Spot":              oneOf("true", "false"),
		"SecureBoot":        oneOf("true", "false"),
		"TalosVersion":      version,
		"KubernetesVersion": version,
		"PCIDevices":        like(`[0-9a-f]{4}(:[0-9a-f]{4}){2}`, "0302:10de:2236"),
		"Addresses":         address,
		"Gateways":          address,
		"Subnets":           like(`[0-9a-f.:]+/\d+`, "10.1.2.0/24"),
		"Meta":              like(`0[xX][0-9a-fA-F]{2}`, "meta.0x0d"),
		"Extensions":        like(`[^/]+`, "extensions.qemu-guest-agent"),
	}
}()

// freeText is the form of all other variables.
var freeText = form{regexp.MustCompile(`^[^*]*$`), "In and NotIn compare the whole value; use Regexp for a pattern"}

// SelectorWarnings returns the warnings of a selector. The path is the field path of the terms.
func SelectorWarnings(terms []SelectorTerm, path *field.Path) (warnings []Warning) {
	for i, term := range terms {
		if len(term.MatchExpressions) == 0 {
			warnings = append(warnings, Warning{path.Index(i), "a term without expressions matches nothing"})
		}

		for j, e := range term.MatchExpressions {
			warnings = append(warnings, e.warnings(path.Index(i).Child("matchExpressions").Index(j))...)
		}
	}

	return warnings
}

// warnings returns why no machine can match the expression or, with NotIn, why it excludes none.
func (e Expression) warnings(at *field.Path) (warnings []Warning) {
	variable := variableOf(e.Key)
	f, hasForm := forms[variable]
	_, entry, isEntry := strings.Cut(e.Key, ".")

	if !hasForm {
		f = freeText
	}

	switch {
	case isEntry && hasForm && !f.pattern.MatchString(entry):
		return []Warning{{at.Child("key"), fmt.Sprintf("no machine has %s; %s", e.Key, f.hint)}}
	case isEntry:
		return nil
	case hasForm && slices.Contains([]Operator{Gt, Lt}, e.Operator) && !slices.Contains(versions, variable):
		return []Warning{{at.Child("operator"), fmt.Sprintf("%s is not an integer, and %s compares nothing else; use Regexp", e.Key, e.Operator)}}
	case !slices.Contains([]Operator{In, NotIn}, e.Operator):
		return nil
	}

	for _, value := range e.Values {
		if !f.pattern.MatchString(value) {
			warnings = append(warnings, Warning{at.Child("values"), fmt.Sprintf("no machine has %s %q; %s", e.Key, value, f.hint)})
		}
	}

	return warnings
}
