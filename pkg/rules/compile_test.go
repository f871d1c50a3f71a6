package rules_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func TestCompile_ReportsAllErrorsWithPaths(t *testing.T) {
	compiled, errs := rules.Compile([]rules.Rule{
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
	}, nil, field.NewPath("transformations"))
	assert.Nil(t, compiled)

	var got []string

	for _, err := range errs {
		got = append(got, err.Field)
		assert.NotEmpty(t, err.Detail, err)
	}

	assert.Equal(t, []string{
		"transformations[1].name",
		"transformations[1].nodeSelector[1].matchExpressions[0].key",
		"transformations[1].nodeSelector[1].matchExpressions[0].values",
		"transformations[1].labels[-]", // the key
		"transformations[1].labels[-]", // the template
		"transformations[1].labels[a]",
		"transformations[1].labels[b]",
		"transformations[1].annotations[a b]",
		"transformations[1].taints[a]",
		"transformations[1].platformMetadata[Spot]",
		"transformations[1].platformMetadata[zoned]",
		"transformations[2].annotations[b]",
	}, got)
}

func TestCompile_Errors(t *testing.T) {
	label := func(key, value string) rules.Rule { return rules.Rule{Labels: map[string]string{key: value}} }
	taint := func(key, value string) rules.Rule { return rules.Rule{Taints: map[string]string{key: value}} }
	replace := func(field, value string) rules.Rule {
		return rules.Rule{PlatformMetadata: map[string]string{field: value}}
	}

	address := func(typ, value string, cidrs ...string) rules.Rule {
		return rules.Rule{Addresses: map[string]string{typ: value}, AddressCIDRs: cidrs}
	}

	for _, test := range []struct {
		name string
		rule rules.Rule
		want string
	}{
		{"unknown type of addresses", address("Hostname", "{{ .Zone }}", "203.0.113.0/24"), "supported types: ExternalIP, InternalIP"},
		{"addresses without CIDRs", address("ExternalIP", "{{ .Zone }}"), "must contain the rule's addresses"},
		{"all addresses allowed", address("ExternalIP", "{{ .Zone }}", "0.0.0.0/0"), "must not contain all addresses"},
		{"CIDR with host bits", address("ExternalIP", "{{ .Zone }}", "203.0.113.1/24"), "did you mean 203.0.113.0/24"},
		{"address outside the CIDRs", address("ExternalIP", "198.51.100.1", "203.0.113.0/24"), `"198.51.100.1" is in none of the rule's addressCIDRs`},
		{"one of two addresses outside the CIDRs", address("InternalIP", "203.0.113.1, 198.51.100.1", "203.0.113.0/24"), `"198.51.100.1" is in none`},
		{"no address", address("ExternalIP", " ", "203.0.113.0/24"), "must be 1 to 16"},
		{"name as address", address("ExternalIP", "example.org", "203.0.113.0/24"), `"example.org" is not a unicast IP address`},
		{"link-local address", address("InternalIP", "169.254.0.1", "169.254.0.0/16"), "is not a unicast IP address"},
		{"invalid label key", label("a/b/c", ""), "a/b/c"},
		{"invalid label value", label("a", "b c"), `"b c": a valid label`},
		{"invalid label value with a comment", label("a", "b{{/**/}} c"), "alphanumeric"},
		{"label value too long", label("a", strings.Repeat("a", 64)), "63"},
		{"empty annotation key", rules.Rule{Annotations: map[string]string{"": ""}}, "name part must be non-empty"},
		{"annotation owned by Talos", rules.Rule{Annotations: map[string]string{"talos.dev/owned-labels": ""}}, "Talos stores its own records"},
		{"label owned by Talos", label("talos.dev/owned-taints", ""), "Talos stores its own records"},
		{"node IPs of the kubelet", rules.Rule{Annotations: map[string]string{"alpha.kubernetes.io/provided-node-ip": ""}}, "kubelet"},
		{"control-plane role", label("node-role.kubernetes.io/control-plane", ""), "Talos sets it"},
		{"label owned by talos-ccm", label("talos-ccm.node-restriction.kubernetes.io/a", ""), "talos-ccm stores its own records"},
		{"invalid taint key", taint("a b", "NoSchedule"), "a b"},
		{"unknown taint effect", taint("a", "b:PleaseSchedule"), "b:PleaseSchedule"},
		{"taint effect in lower case", taint("a", "noschedule"), "noschedule"},
		{"taint with too many parts", taint("a", "b:c:NoSchedule"), "b:c:NoSchedule"},
		{"invalid taint value", taint("a", "b c:NoSchedule"), "alphanumeric"},
		{"taint without effect", taint("a", ""), "NoExecute"},
		{"taint of a Kubernetes controller", taint("node.kubernetes.io/not-ready", "NoSchedule"), "cannot be set"},
		{"unknown field", replace("Color", "a"), "supported fields: ExternalDNS"},
		{"hostname", replace("hostName", "a"), "hostName cannot be replaced"},
		{"platform", replace("Platform", "a"), "Platform cannot be replaced"},
		{"tags", replace("tags", "a"), "tags"},
		{"spot", replace("spot", "yes"), "neither true nor false"},
		{"providerID without a provider's name", replace("providerId", "://a"), `"://a" does not identify an instance`},
		{"providerID without a scheme", replace("ProviderID", "a"), "<provider>://<ID>"},
		{"providerID without an instance", replace("ProviderID", "a:///"), "<provider>://<ID>"},
		{"duplicate field", rules.Rule{PlatformMetadata: map[string]string{"Zone": "a", "zone": "b"}}, "zone"},
		{"invalid zone", replace("zone", "rack 7"), `"rack 7": a valid label`},
		{"invalid region", replace("Region", "eu/de"), `"eu/de": a valid label`},
		{"invalid instance type", replace("instanceType", "m5."), `"m5.": a valid label`},
		{"invalid internal name", replace("InternalDNS", "a b.example.org"), `"a b.example.org": is not a valid DNS name`},
		{"invalid external name", replace("externalDNS", "-.example.org"), `"-.example.org": is not a valid DNS name`},
		{"empty providerID", replace("ProviderID", ""), "<provider>://<ID>"},
	} {
		t.Run(test.name, func(t *testing.T) { assert.Contains(t, compileError(t, test.rule).Error(), test.want) })
	}
}

func TestCompile_RejectsLabelsFromTags(t *testing.T) {
	for _, test := range []struct {
		source      rules.LabelsFromTags
		field, want string
	}{
		{rules.LabelsFromTags{Match: "^team/("}, "match", "missing closing )"},
		{rules.LabelsFromTags{Prefix: "kubernetes.io/"}, "prefix", "its domain is reserved by Kubernetes"},
		{rules.LabelsFromTags{Prefix: "node-restriction.kubernetes.io/"}, "prefix", "its domain is reserved by Kubernetes"},
		{rules.LabelsFromTags{Prefix: "kubelet.k8s.io/a-"}, "prefix", "its domain is reserved by Kubernetes"},
		{rules.LabelsFromTags{Prefix: "Example.org/"}, "prefix", `invalid key "Example.org/name": prefix part`},
		{rules.LabelsFromTags{Prefix: "a/b/"}, "prefix", "invalid key"},
		{rules.LabelsFromTags{Prefix: "-"}, "prefix", "invalid key"},
	} {
		err := compileError(t, rules.Rule{LabelsFromTags: &test.source})
		assert.Equal(t, "[0].labelsFromTags."+test.field, err.Field)
		assert.Contains(t, err.Detail, test.want)
	}
}

func TestCompile_RejectsTaintsOfControllers(t *testing.T) {
	for _, key := range []string{
		"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/memory-pressure", "node.kubernetes.io/disk-pressure",
		"node.kubernetes.io/network-unavailable", "node.kubernetes.io/pid-pressure", "node.cloudprovider.kubernetes.io/uninitialized", "node.cloudprovider.kubernetes.io/shutdown",
	} {
		_ = compileError(t, rules.Rule{Taints: map[string]string{key: "{{ .Zone }}"}})
	}
}

func TestCompile_AcceptsKubernetesKeys(t *testing.T) {
	compile(t, rules.Rule{
		Labels: map[string]string{
			"node-role.kubernetes.io/web": "", "node.kubernetes.io/exclude-from-external-load-balancers": "true", "karpenter.sh/capacity-type": "spot",
			"talos.dev/zone": "a", "node-role.kubernetes.io/control-plane-test": "",
		},
		Annotations: map[string]string{"node.alpha.kubernetes.io/ttl": "0"},
		Taints:      map[string]string{"node.kubernetes.io/out-of-service": "nodeshutdown:NoExecute", "a": ":NoSchedule"},
	})
}

func TestCompile_AcceptsYAMLFieldNames(t *testing.T) {
	result := compile(t, rules.Rule{PlatformMetadata: map[string]string{
		"providerId": "p://p", "instanceId": "i", "instanceType": "t", "internalDNS": "in", "externalDNS": "ex", "region": "r", "zone": "z", "spot": " true ",
	}}).Apply(rules.Facts{})

	want := everything().Machine.Platform
	want.Platform, want.Hostname, want.Tags = "", "", nil
	want.ProviderID, want.InstanceID, want.InstanceType, want.InternalDNS, want.ExternalDNS, want.Region, want.Zone = "p://p", "i", "t", "in", "ex", "r", "z"
	assert.Equal(t, want, result.Platform)
}

// Otherwise the name of a rule in an Event would be ambiguous.
func TestCompile_RejectsOnlyNamesThatArePositionsOfOtherRules(t *testing.T) {
	_ = compileError(t, rules.Rule{}, rules.Rule{Name: "#1"})
	_ = compileError(t, rules.Rule{Name: "#2"}, rules.Rule{})
	compile(t, rules.Rule{Name: "#1"})
	compile(t, rules.Rule{}, rules.Rule{})
}
