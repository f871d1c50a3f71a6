// Package nodespec says what a Node of a Talos machine should look like.
//
// It is part of the pure core: a Machine in, a Spec out. Of the Node it reads only what the kubelet says
// of the machine (node.go). It never decides who owns a field, and never writes.
package nodespec

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Labels as the upstream Talos CCM names them; the topology and instance-type labels are those of Kubernetes.
const (
	LabelPlatform    = "node.cloudprovider.kubernetes.io/platform"
	LabelClusterName = "node.cloudprovider.kubernetes.io/clustername"
	LabelLifecycle   = "node.cloudprovider.kubernetes.io/lifecycle"

	lifecycleSpot = "spot"
)

// Options are the cluster-wide choices. The zero value is the default.
type Options struct {
	// ClusterName replaces the name that Talos knows; empty: use Talos's.
	ClusterName string
	// PreferIPv6 puts IPv6 addresses before IPv4 ones.
	PreferIPv6 bool
	// ProviderIDFromNodeIP makes `talos://<platform>/<node IP>` the fallback instead of the SMBIOS UUID: what the
	// upstream Talos CCM writes.
	ProviderIDFromNodeIP bool
	// Rules are the user's; nil: none.
	Rules *rules.Set
	// Claim selects the machines whose Nodes are ours to write; nil: all.
	Selector *rules.Selector
}

// Input is all that Desired looks at.
type Input struct {
	Machine machine.Machine
	// ProvidedNodeIPs are those the kubelet says it was started with, in its order. They are believed only where the
	// machine has them.
	ProvidedNodeIPs []netip.Addr
	// Architecture is the Node's, for rules; empty if the kubelet has not said it.
	Architecture string
	// SharedUUID is true if another machine has the same SMBIOS UUID.
	SharedUUID bool
	// SharedAddresses are addresses of the platform's metadata that other machines have, too: a load balancer's. They lead to no machine in particular, and
	// no kubelet can have a certificate for them.
	SharedAddresses []netip.Addr
	Options         Options
}

// NewInput puts together what is known of the Node's machine and what the Node's kubelet says.
func NewInput(node *corev1.Node, m machine.Machine, options Options) Input {
	return Input{Machine: m, ProvidedNodeIPs: ProvidedNodeIPs(node), Architecture: node.Status.NodeInfo.Architecture, Options: options}
}

// Facts are what rules and selectors look at.
func (in Input) Facts() rules.Facts {
	return rules.Facts{Machine: in.Machine, Architecture: in.Architecture}
}

// Managed tells whether the machine's Node is ours to write. It is decided by what the machine itself says, before any rule.
func Managed(in Input) bool { return in.Options.Selector.Matches(in.Facts()) }

// Spec is what the Node should carry.
type Spec struct {
	// ProviderID is never empty. Kubernetes never lets it change.
	ProviderID  string
	Labels      map[string]string
	Annotations map[string]string
	// Taints are to be there after initialization; those that are enforced, at any time.
	Taints []rules.Taint
	// Transformed is what the rules said: where the values are from.
	Transformed rules.Result
	// Addresses in the order in which the Node lists them.
	Addresses []corev1.NodeAddress
}

// Problem is one value that cannot be put on the Node. All others are.
type Problem struct {
	Key, Value, Why string
	// Rule names the rule that the value is from; empty if it is the machine's own.
	Rule string
}

// Kind is what the value was for: the field of the rule ("labels", "annotations", "taints", "platformMetadata"), or "machine".
func (p Problem) Kind() string {
	if p.Rule == "" {
		return "machine"
	}

	kind, _, _ := strings.Cut(p.Key, "[")

	return kind
}

// String is the problem in a sentence.
func (p Problem) String() string {
	rule := ""
	if p.Rule != "" {
		rule = fmt.Sprintf("rule %q: ", p.Rule)
	}

	return fmt.Sprintf("%s%s=%q left out: %s", rule, p.Key, Abridged(p.Value), p.Why)
}

// Abridged keeps an Event readable: a value may be as long as a metadata service, or whoever writes an annotation, likes.
func Abridged(value string) string {
	const enough = 80

	if len(value) <= enough {
		return value
	}

	return value[:enough] + "…"
}

// Desired returns what the Node should carry, or in pending why that cannot be said yet. Problems are values that were
// left out.
func Desired(in Input) (spec Spec, problems []Problem, pending string) {
	nodeIPs := internalIPs(in)
	if len(nodeIPs) == 0 {
		return Spec{}, nil, "the machine has none of the node IPs that its kubelet was started with"
	}

	// Before any rule: what rules make of metadata that is not there yet must not identify the machine.
	if pending := premature(in); pending != "" {
		return Spec{}, nil, pending
	}

	transformed := in.Options.Rules.Apply(in.Facts())
	problems = ruleProblems(transformed)

	providerID, pending := providerID(in, transformed, nodeIPs[0])
	if pending != "" {
		return Spec{}, problems, pending
	}

	in.Machine.Platform = transformed.Platform
	labels, labelProblems := labels(in, transformed)
	addresses, addressProblems := addresses(in, transformed, nodeIPs)

	spec = Spec{
		ProviderID:  providerID,
		Labels:      labels,
		Annotations: values(transformed.Annotations),
		Taints:      transformed.Taints,
		Transformed: transformed,
		Addresses:   addresses,
	}

	return spec, slices.Concat(problems, labelProblems, addressProblems), ""
}

func ruleProblems(transformed rules.Result) []Problem {
	var problems []Problem

	for _, p := range transformed.Problems {
		problems = append(problems, Problem{Rule: p.Rule, Key: p.Key, Value: p.Value, Why: p.Why})
	}

	return problems
}

func values(rendered map[string]rules.Value) map[string]string {
	result := make(map[string]string, len(rendered))

	for key, v := range rendered {
		result[key] = v.Value
	}

	return result
}

// labels are those of the platform, and those of the rules, which win.
func labels(in Input, transformed rules.Result) (map[string]string, []Problem) {
	meta := in.Machine.Platform
	result := values(transformed.Labels)

	lifecycle := ""
	if meta.Spot {
		lifecycle = lifecycleSpot
	}

	wanted := []struct{ key, value string }{
		{corev1.LabelTopologyRegion, meta.Region},
		{corev1.LabelFailureDomainBetaRegion, meta.Region},
		{corev1.LabelTopologyZone, meta.Zone},
		{corev1.LabelFailureDomainBetaZone, meta.Zone},
		{corev1.LabelInstanceTypeStable, meta.InstanceType},
		{corev1.LabelInstanceType, meta.InstanceType},
		{LabelPlatform, meta.Platform},
		{LabelClusterName, cmp.Or(in.Options.ClusterName, in.Machine.ClusterName)},
		{LabelLifecycle, lifecycle},
	}

	var problems []Problem

	for _, l := range wanted {
		if _, ruled := result[l.key]; ruled || l.value == "" {
			continue
		}

		if why := validation.IsValidLabelValue(l.value); len(why) > 0 {
			problems = append(problems, Problem{Key: l.key, Value: l.value, Why: strings.Join(why, "; ")})

			continue
		}

		result[l.key] = l.value
	}

	return result, problems
}
