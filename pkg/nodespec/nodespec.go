// Package nodespec computes the desired labels, annotations, taints, addresses and providerID of a Talos machine's
// Node.
//
// It is part of the pure core: a Machine in, a Spec out. From the Node it reads only the kubelet's reports about the
// machine (node.go). It does not decide who owns a field, and never writes.
//
// A providerID cannot be changed once it is set, so Desired returns none too early. Until the metadata service of a
// platform responds, Talos publishes PlatformMetadata with the name of the platform only:
//   - On a platform with instance IDs, a machine without one is pending. nocloud and vmware can lack metadata
//     permanently. Desired accepts that once Talos has finished reading it.
//   - Metadata that Talos cached in an earlier boot counts after the platform has confirmed it in this boot.
//   - metal and container have no instance IDs. The SMBIOS UUID replaces them if it is valid and unique.
//   - A rule can replace the providerID or the instance ID after the platform has published its metadata. If the rule
//     fails, a Node without a providerID is pending. A Node with a providerID keeps it, and the rest is updated.
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
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Labels that the upstream Talos CCM sets, too. The topology and instance-type labels are defined by Kubernetes.
const (
	// LabelPlatform is the platform, such as `metal` or `aws`.
	LabelPlatform = "node.cloudprovider.kubernetes.io/platform"
	// LabelClusterName is `global.clusterName` of the configuration, or the cluster name in the machine configuration.
	LabelClusterName = "node.cloudprovider.kubernetes.io/clustername"
	// LabelLifecycle is `spot` on spot instances.
	LabelLifecycle = "node.cloudprovider.kubernetes.io/lifecycle"

	lifecycleSpot = "spot"
)

// Options are cluster-wide settings. The zero value is the default.
type Options struct {
	// ClusterName overrides the cluster name of Talos; empty means no override.
	ClusterName string
	// PreferIPv6 lists IPv6 addresses before IPv4 addresses.
	PreferIPv6 bool
	// ProviderIDFromNodeIP makes `talos://<platform>/<node IP>` the providerID wherever the platform publishes none, as
	// in the upstream Talos CCM, instead of one with the instance ID or the SMBIOS UUID.
	ProviderIDFromNodeIP bool
	// FollowTopology changes the region and zone labels of initialized Nodes.
	FollowTopology bool
	// OneExternalIPPerFamily lists only the first ExternalIP of each IP family, as the upstream Talos CCM does.
	OneExternalIPPerFamily bool
	// OmitConditions keeps the state of machines out of the conditions of Nodes.
	OmitConditions bool
	// Rules are the configured rules; nil means none.
	Rules *rules.Set
	// Selector selects the machines whose Nodes are managed; nil selects all.
	Selector *rules.Selector
	// Domains are the domains of cluster DNS besides the default, as far as they are known.
	Domains []string
	// ClusterAddress returns which source says that an address is of the cluster itself; empty if none does. isKnown is false
	// while that is not known. Nil means that no address is.
	ClusterAddress func(ip netip.Addr) (source string, isKnown bool)
}

// Input is the complete input of Desired.
type Input struct {
	Machine machine.Machine
	// ProviderID is the Node's spec.providerID; empty if it is not set.
	ProviderID string
	// ProvidedNodeIPs are the node IPs of the kubelet's command line, as the kubelet reports them. Desired uses those
	// that the machine has.
	ProvidedNodeIPs []netip.Addr
	// Architecture of the Node, for rules; empty if the kubelet has not reported it.
	Architecture string
	// KubernetesVersion of the kubelet, for rules; empty if it has not reported it.
	KubernetesVersion string
	// AwaitsFacts makes a Node without a providerID wait while its machine boots, if a rule for its providerID reads facts.
	AwaitsFacts bool
	// SharedUUID are other Nodes whose machines report the same SMBIOS UUID, and that have a providerID with it.
	SharedUUID []string
	// SharedAddresses are addresses that the platform's metadata lists for this machine and for those of the given Nodes.
	// They are omitted unless the Node may keep them, because its kubelet could not get a certificate for them.
	SharedAddresses map[netip.Addr][]string
	// ExternalIPs are those that the Node lists.
	ExternalIPs []netip.Addr
	// OwnersOf returns the other Nodes whose machines report a canonical name; nil means that there are none. No
	// kubelet gets a certificate for such a name.
	OwnersOf func(name string) []string
	// RuleAddresses are those that rules set before, as the Node's labels record.
	RuleAddresses []netip.Addr
	// ReserveAddress reserves an address that a rule sets, or returns another Node that has it. Nil means that none has.
	ReserveAddress func(ip netip.Addr) (owner string)
	Options        Options
}

// NewInput returns the Input for a Node and its machine. It suffices for Facts and Managed; Desired also needs WithPeers.
func NewInput(node *corev1.Node, m machine.Machine, options Options) Input {
	return Input{
		Machine:           m,
		ProviderID:        node.Spec.ProviderID,
		ProvidedNodeIPs:   ProvidedNodeIPs(node),
		ExternalIPs:       listedIPs(node, corev1.NodeExternalIP),
		RuleAddresses:     noderecord.RuleAddresses(node),
		Architecture:      node.Status.NodeInfo.Architecture,
		KubernetesVersion: node.Status.NodeInfo.KubeletVersion,
		Options:           options,
	}
}

// Peers knows all machines of the cluster. *inventory.Inventory implements it.
type Peers interface {
	SharedUUID(uuid, nodename string) []string
	SharedAddresses(nodename string) map[netip.Addr][]string
	SharedName(name, nodename string) []string
}

// WithPeers returns the Input with the UUID, addresses and names that nodename's machine shares with other machines. The
// UUID that a machine reports counts only if its Node, which node returns, was initialized with it: otherwise that machine
// could change the providerID of a new Node. A kubelet can register a providerID, but not LabelPlatform.
func (in Input) WithPeers(peers Peers, nodename string, node func(nodename string) (*corev1.Node, error)) Input {
	uuid := in.Machine.UUID()
	in.SharedUUID = slices.DeleteFunc(peers.SharedUUID(uuid, nodename), func(other string) bool {
		n, err := node(other)

		return err != nil || n.Labels[LabelPlatform] == "" || !strings.EqualFold(n.Spec.ProviderID, providerURI(in.Machine.Platform.Platform, uuid))
	})
	in.SharedAddresses = peers.SharedAddresses(nodename)
	in.OwnersOf = func(name string) []string { return peers.SharedName(name, nodename) }

	return in
}

// FactsOf returns the input of selectors for a Node and its machine.
func FactsOf(node *corev1.Node, m machine.Machine) rules.Facts {
	return NewInput(node, m, Options{}).Facts()
}

// Facts returns the input of rules and selectors.
func (in Input) Facts() rules.Facts {
	return rules.Facts{Machine: in.Machine, Architecture: in.Architecture, KubernetesVersion: in.KubernetesVersion}
}

// ruleFacts returns the input of rules. As in the upstream Talos CCM, rules read the providerID that the Node has without
// them.
func (in Input) ruleFacts(untransformed string) rules.Facts {
	facts := in.Facts()
	facts.Machine.Platform.ProviderID = untransformed

	return facts
}

// Explain returns for each rule whether it applies to the machine.
func Explain(in Input) []rules.Match {
	nodeIP := netip.Addr{}
	if nodeIPs := internalIPs(in, providedIPs(in)); len(nodeIPs) > 0 {
		nodeIP = nodeIPs[0]
	}

	return in.Options.Rules.Explain(in.ruleFacts(providerID(in, nodeIP)))
}

// Selected reports whether the configuration selects the Node of the machine. Rules do not change the result.
func Selected(in Input) bool { return in.Options.Selector.Matches(in.Facts()) }

// Spec is the desired state of a Node.
type Spec struct {
	// ProviderID is never empty. It cannot be changed once it is written.
	ProviderID  string
	Labels      map[string]string
	Annotations map[string]string
	// FollowTopology means that the region and zone labels also apply to a Node that has others.
	FollowTopology bool
	// Taints are set at initialization, and enforced taints at any time.
	Taints []rules.Taint
	// Transformed is the result of the rules. It names the rule behind each value.
	Transformed rules.Result
	// Addresses are in the order of status.addresses.
	Addresses []corev1.NodeAddress
	// AwaitsAddress is true if Addresses lack one that a rule sets: another Node has it, or the cluster may have it.
	AwaitsAddress bool
}

// Problem is a value that the Spec omits because it is invalid. Its rule is empty if the machine reported the value.
type Problem = rules.Problem

// Desired returns the desired state of the Node, with the values that it omits as problems. If the state is not known
// yet, pending explains why, and the Spec is empty.
func Desired(in Input) (spec Spec, problems []Problem, pending string) {
	provided := providedIPs(in)

	nodeIPs := internalIPs(in, provided)
	if len(nodeIPs) == 0 {
		return Spec{}, nil, "the machine has none of the kubelet's node IPs"
	}

	// Check before applying rules: an ID must not be computed from metadata that is still missing.
	if pending := cmp.Or(pendingMetadata(in), pendingFacts(in)); pending != "" {
		return Spec{}, nil, pending
	}

	id := providerID(in, nodeIPs[0])

	// While the machine boots, it may have the addresses of one IP family only.
	if isFromNodeIP := providerID(in, netip.Addr{}) == ""; isFromNodeIP && in.ProviderID == "" && nodeIPs[0] != provided[0] {
		return Spec{}, nil, fmt.Sprintf("the machine does not have the kubelet's node IP %s yet, which is needed for the providerID", provided[0])
	}

	spec, problems = fromMetadata(in, id)

	if spec.ProviderID == id && sharesUUID(in, id) {
		problems = append(problems, Problem{Key: "SMBIOS UUID", Value: in.Machine.UUID(), Why: fmt.Sprintf(
			"the machine of node %q reports it, too; the providerID contains the node IP instead", slices.Min(in.SharedUUID))})
	}

	if invalid := identityProblem(in, spec.Transformed); invalid != nil {
		if in.ProviderID == "" || pendingSMBIOS(in) {
			return Spec{}, spec.Transformed.Problems, fmt.Sprintf("rule %q cannot set %s: %s", invalid.Rule, invalid.Key, invalid.Why)
		}

		if spec.ProviderID = in.ProviderID; !slices.Contains(problems, *invalid) {
			problems = append(problems, *invalid)
		}
	}

	var addressProblems []Problem

	spec.Addresses, addressProblems = addresses(in, spec.Transformed, nodeIPs)
	ruleProblems := spec.addRuleAddresses(in)

	return spec, slices.Concat(problems, addressProblems, ruleProblems, deniedSubjects(in, nodeIPs)), ""
}

// sharesUUID reports whether a new Node gets the providerID id because another machine reports its SMBIOS UUID.
func sharesUUID(in Input, id string) bool {
	alone := in
	alone.SharedUUID = nil
	withUUID := providerID(alone, netip.Addr{})

	return in.ProviderID == "" && withUUID != "" && withUUID != id
}

// FromMetadata returns the part of the Spec that does not depend on the machine's addresses and on its name: labels,
// annotations and taints, and the providerID if the platform or a rule identifies the instance.
func FromMetadata(in Input) (Spec, []Problem) {
	spec, problems := fromMetadata(in, providerID(in, netip.Addr{}))
	if identityProblem(in, spec.Transformed) != nil {
		spec.ProviderID = ""
	}

	return spec, problems
}

// fromMetadata returns the Spec without addresses. untransformed is the providerID of a Node without rules.
func fromMetadata(in Input, untransformed string) (Spec, []Problem) {
	transformed := in.Options.Rules.Apply(in.ruleFacts(untransformed))
	providerID := providerIDOfRules(in, transformed, untransformed)

	in.Machine.Platform = transformed.Platform
	labels, problems := labels(in, transformed)

	return Spec{
		ProviderID:     providerID,
		Labels:         labels,
		Annotations:    values(transformed.Annotations),
		FollowTopology: in.Options.FollowTopology,
		Taints:         transformed.Taints,
		Transformed:    transformed,
	}, slices.Concat(transformed.Problems, problems)
}

func values(rendered map[string]rules.Value) map[string]string {
	result := make(map[string]string, len(rendered))

	for key, v := range rendered {
		result[key] = v.Value
	}

	return result
}

// labels returns the labels of the platform and of the rules, which take precedence.
func labels(in Input, transformed rules.Result) (map[string]string, []Problem) {
	meta := in.Machine.Platform
	result := values(transformed.Labels)
	problems := matchDeprecated(result, transformed)

	lifecycle := ""
	if meta.Spot {
		lifecycle = lifecycleSpot
	}

	platformLabels := []struct{ key, field, value string }{
		{corev1.LabelTopologyRegion, "Region", meta.Region},
		{corev1.LabelTopologyZone, "Zone", meta.Zone},
		{corev1.LabelInstanceTypeStable, "InstanceType", meta.InstanceType},
		{LabelPlatform, "", meta.Platform},
		{LabelClusterName, "", cmp.Or(in.Options.ClusterName, in.Machine.ClusterName)},
		{LabelLifecycle, "", lifecycle},
	}

	for _, l := range platformLabels {
		if _, ruled := result[l.key]; ruled || l.value == "" {
			continue
		}

		if why := validation.IsValidLabelValue(l.value); len(why) > 0 {
			problems = append(problems, invalidMetadata(transformed, l.field, l.key, l.value, strings.Join(why, "; ")))

			continue
		}

		result[l.key] = l.value
	}

	for _, pair := range deprecatedLabels {
		if value, isSet := result[pair[0]]; isSet {
			result[pair[1]] = value
		}
	}

	return result, problems
}

// invalidMetadata returns the problem of a value that Kubernetes does not accept, with the rule that set the field of the
// metadata, or else the key under which Nodes have the value.
func invalidMetadata(transformed rules.Result, field, key, value, why string) Problem {
	rule := transformed.Replaced[field]
	if rule != "" {
		key = "platformMetadata[" + field + "]"
	}

	return Problem{Rule: rule, Key: key, Value: value, Why: why}
}

// deprecatedLabels are pairs of a stable label and the deprecated one that has the same value. The node controller of
// k8s.io/cloud-provider keeps them equal, too.
var deprecatedLabels = [][2]string{
	{corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaRegion},
	{corev1.LabelTopologyZone, corev1.LabelFailureDomainBetaZone},
	{corev1.LabelInstanceTypeStable, corev1.LabelInstanceType},
}

// matchDeprecated gives a stable label the value of the deprecated one if rules set only that. A deprecated label always
// gets the value of the stable one. A rule that sets a different value is reported.
func matchDeprecated(labels map[string]string, transformed rules.Result) (problems []Problem) {
	for _, pair := range deprecatedLabels {
		stable, isSet := labels[pair[0]]
		deprecated, isDeprecatedSet := labels[pair[1]]

		switch {
		case isDeprecatedSet && !isSet:
			labels[pair[0]] = deprecated
		case isDeprecatedSet && deprecated != stable:
			problems = append(problems, Problem{
				Rule: transformed.Labels[pair[1]].Rule, Key: "labels[" + pair[1] + "]", Value: deprecated, Why: fmt.Sprintf("the label must equal %s=%s", pair[0], stable),
			})
		}
	}

	return problems
}
