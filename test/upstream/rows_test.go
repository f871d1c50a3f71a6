package upstream_test

import (
	"html"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// row is a row of the table of differences in docs/reference/upstream-differences.md.
type row struct {
	// name is the first cell.
	name     string
	explains func(r record, d difference) bool
}

// isRuled reports whether rules determine the field of a difference.
func isRuled(d difference) bool {
	return strings.HasPrefix(d.field, "labels ") || strings.HasPrefix(d.field, "annotations ") ||
		slices.Contains([]string{"taints", "providerID", "InternalDNS", "ExternalDNS", "error"}, d.field)
}

// ours explains that talos-ccm refuses a file or waits, if its error matches one of the patterns.
func ours(patterns ...string) func(record, difference) bool {
	return func(_ record, d difference) bool {
		return d.field == "error" && d.ours != "" && regexp.MustCompile(strings.Join(patterns, "|")).MatchString(d.ours)
	}
}

func upstream(pattern string) func(record, difference) bool {
	return func(_ record, d difference) bool {
		return d.field == "error" && d.upstream != "" && regexp.MustCompile(pattern).MatchString(d.upstream)
	}
}

func either(list ...func(record, difference) bool) func(record, difference) bool {
	return func(r record, d difference) bool {
		return slices.ContainsFunc(list, func(explains func(record, difference) bool) bool { return explains(r, d) })
	}
}

// rulesOf returns the rules of the file, which may be one that talos-ccm refuses.
func (r record) rulesOf() []rules.Rule {
	var file struct {
		Transformations []rules.Rule `json:"transformations"`
	}

	if err := yaml.Unmarshal([]byte(r.Config), &file); err != nil {
		return nil
	}

	return file.Transformations
}

// chains reports whether a rule reads a field that an earlier rule replaces.
func (r record) chains() bool {
	replaced := map[string]bool{}

	for _, rule := range r.rulesOf() {
		for _, term := range rule.NodeSelector {
			for _, e := range term.MatchExpressions {
				if replaced[strings.ToLower(e.Key)] {
					return true
				}
			}
		}

		for _, templates := range []map[string]string{rule.Labels, rule.Annotations, rule.Taints, rule.PlatformMetadata} {
			for _, source := range templates {
				for name := range replaced {
					if regexp.MustCompile(`(?i)\.` + name + `\b`).MatchString(source) {
						return true
					}
				}
			}
		}

		for name := range rule.PlatformMetadata {
			replaced[strings.ToLower(name)] = true
		}
	}

	return false
}

// misses reports whether a NotIn expression reads a fact that the metadata lacks.
func (r record) misses() bool {
	present := map[string]string{
		"hostname": r.Platform.Hostname + r.Node, "region": r.Platform.Region, "zone": r.Platform.Zone, "instancetype": r.Platform.InstanceType,
		"instanceid": r.Platform.InstanceID, "internaldns": r.Platform.InternalDNS, "platform": r.Platform.Platform, "providerid": "always", "spot": "always",
	}

	return r.expression(func(e rules.Expression) bool {
		return e.Operator == rules.NotIn && present[strings.ToLower(e.Key)] == ""
	})
}

// expression reports whether an expression of the file has the property.
func (r record) expression(has func(rules.Expression) bool) bool {
	for _, rule := range r.rulesOf() {
		for _, term := range rule.NodeSelector {
			if slices.ContainsFunc(term.MatchExpressions, has) {
				return true
			}
		}
	}

	return false
}

// rule reports whether a rule of the file has the property.
func (r record) rule(has func(rules.Rule) bool) bool { return slices.ContainsFunc(r.rulesOf(), has) }

// hasUnusual reports whether the machine has an address that belongs to no network of the machine, or not to it alone.
func (r record) hasUnusual() bool {
	return slices.ContainsFunc(r.Addresses, func(a address) bool {
		ordinary := slices.ContainsFunc([]string{"eth", "bond", "wan", "external"}, func(link string) bool { return strings.HasPrefix(a.Link, link) })
		special := slices.ContainsFunc([]string{"100.64.", "198.18.", "64:ff9b:"}, func(prefix string) bool { return strings.HasPrefix(a.Prefix.String(), prefix) })

		return !ordinary || special || a.Flags&uint32(nethelpers.AddressTemporary|nethelpers.AddressDeprecated) != 0
	})
}

func isField(fields ...string) func(record, difference) bool {
	return func(_ record, d difference) bool { return slices.Contains(fields, d.field) }
}

func both(a, b func(record, difference) bool) func(record, difference) bool {
	return func(r record, d difference) bool { return a(r, d) && b(r, d) }
}

func where(has func(record) bool) func(record, difference) bool {
	return func(r record, _ difference) bool { return has(r) }
}

var standardLabels = regexp.MustCompile(`^labels .*(kubernetes\.io/(region|zone|instance-type))$`)

var (
	upstreamDiscovers = []string{"nocloud", "metal", "openstack", "oracle"}
	oursDiscovers     = []string{"container", "opennebula", "vmware"}
	seedEntry         = regexp.MustCompile(`(^|;)[^=;]*($|;)|=[^;]*=`)
)

// rows explain the differences with the settings for users of the upstream. The first row that matches counts.
var rows = []row{
	{"unknown keys", ours(`unknown (key|field)`)},
	{"`yes`, `on`", ours(`preferIPv6`)},
	{"`Hostname`, `Platform` in `platformMetadata`", ours(`cannot be replaced`)},
	{"duplicate rule names", ours(`duplicate name`)},
	{"`define`, `block`, `{{ . }}`", ours(`cannot (define|execute) other templates|name of a variable is missing`)},
	{"reserved labels and annotations", ours(`key "\S+" cannot be set`)},
	{"invalid selectors, templates and constants", ours(
		`error parsing regexp`, `unknown variable`, `function "\w+" not defined`, `wrong number of args`, `unclosed action`, `exactly one value`, `takes no values`,
		`at least one value`, `a valid label`, `invalid key`, `is not "value:Effect"`, `taint "\S+" cannot be set`, `neither true nor false`)},
	{"metadata that is not published yet", ours(`has not published`)},
	{"node IPs that the machine does not have", either(ours(`none of the kubelet's node IPs`), both(isField("error"), where(func(r record) bool { return r.NodeIPs == "10.0.0.254" })))},
	{"no node IPs of the kubelet", both(isField("error"), where(func(r record) bool { return r.NodeIPs == "" }))},
	{"`Gt`, `Lt` on text", upstream(`failed to parse value \S+ as int`)},
	{"`getValue`", func(r record, d difference) bool {
		return isRuled(d) && strings.Contains(r.Config, "getValue") && seedEntry.MatchString(r.System.SerialNumber)
	}},
	{"a missing tag as an argument", either(upstream(`invalid value; expected string`), func(r record, d difference) bool {
		return isRuled(d) && strings.Contains(r.Config, `{{ eq .Tags.nope "" }}`)
	})},
	{"a missing tag that is printed", func(_ record, d difference) bool { return isRuled(d) && strings.Contains(d.upstream, "&lt;nil&gt;") }},
	{"`{{ 'a' }}`", ours(`'a' is a character`)},
	{"`{{ default \"none\" }}`", upstream(`error calling default: runtime error`)},
	{"`b64dec` to invalid UTF-8", func(_ record, d difference) bool { return isRuled(d) && strings.Contains(d.upstream, "\uFFFD") }},
	{"one invalid value", upstream(`error transforming node: (invalid|failed to transformer)`)},
	{"template output", func(_ record, d difference) bool {
		return isRuled(d) && d.field != "error" && html.UnescapeString(d.upstream) == d.ours
	}},
	{"taints", func(_ record, d difference) bool { return d.field == "taints" && strings.Contains(d.upstream, "{{") }},
	{"taints of several rules with one key", func(_ record, d difference) bool {
		return d.field == "taints" && d.upstream != "" && strings.Count(d.ours, " ") == 1 && slices.Contains(strings.Fields(d.ours), d.upstream)
	}},
	{"rules for zone, region and instance type", func(r record, d difference) bool {
		return standardLabels.MatchString(d.field) && r.rule(func(rule rules.Rule) bool {
			return slices.ContainsFunc(slices.Collect(maps.Keys(rule.Labels)), func(key string) bool { return standardLabels.MatchString("labels " + key) })
		})
	}},
	{"metadata that earlier rules replaced", func(r record, d difference) bool { return (isRuled(d) || d.field == "ExternalIP") && r.chains() }},
	{"`NotIn` on a missing value", func(r record, d difference) bool { return (isRuled(d) || d.field == "ExternalIP") && r.misses() }},
	{"`Spot` with other values than `true` and `false`", func(r record, d difference) bool {
		return d.field == "labels node.cloudprovider.kubernetes.io/lifecycle" && strings.Contains(r.Config, "Spot: ' true '")
	}},
	{"rules that set no valid providerID", ours(`cannot set platformMetadata\[`)},
	{"upper case in an Azure resource group", func(r record, d difference) bool {
		return isRuled(d) && r.Platform.Platform == "azure" && strings.EqualFold(d.upstream, d.ours)
	}},
	{"`PreferIPv6`", func(r record, d difference) bool {
		return strings.Contains(r.Config, "PreferIPv6: true") && (isRuled(d) || d.field == "InternalIP" || d.field == "ExternalIP")
	}},
	{"order of InternalIPs with `preferIPv6`", func(r record, d difference) bool {
		first, second, _ := strings.Cut(d.ours, ",")

		return strings.Contains(r.Config, "preferIPv6: true") && d.field == "InternalIP" && d.upstream == second+","+first
	}},
	{"`InternalDNS`, `ExternalDNS` of the platform or a rule", func(r record, d difference) bool {
		replaces := r.rule(func(rule rules.Rule) bool { return rule.PlatformMetadata["InternalDNS"] != "" })

		return d.field == "ExternalDNS" && d.upstream == "" || d.field == "InternalDNS" && (replaces || r.Platform.InternalDNS != "")
	}},
	{"DNS names that no certificate could contain", func(_ record, d difference) bool { return d.field == "InternalDNS" && d.ours == "" }},
	{"upper case in DNS names", func(_ record, d difference) bool {
		return d.field == "InternalDNS" && strings.EqualFold(d.upstream, d.ours)
	}},
	{"`publicIPDiscovery`", func(r record, d difference) bool {
		return d.field == "ExternalIP" && strings.Contains(r.Config, "publicIPDiscovery")
	}},
	{"ExternalIPs on container, opennebula, vmware", func(r record, d difference) bool {
		return d.field == "ExternalIP" && slices.Contains(oursDiscovers, r.Platform.Platform)
	}},
	{"ExternalIPs of overlays and virtual links, special or temporary ones", func(r record, d difference) bool { return d.field == "ExternalIP" && r.hasUnusual() }},
	{"private addresses that the platform reports", func(r record, d difference) bool {
		return d.field == "ExternalIP" && slices.Contains(upstreamDiscovers, r.Platform.Platform) && strings.Contains(d.ours, "ExternalIP 10.")
	}},
}

// Rows of the differences between the settings for users of the upstream and the defaults.
const (
	rowFallback    = "providerID where the platform publishes none"
	rowExternalIPs = "further ExternalIPs"
)
