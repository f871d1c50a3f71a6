package preview

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Kubelet is what the kubelet of a machine would say, as far as it counts. The zero value: nothing, so that its node IPs are those that Talos
// gives it.
type Kubelet struct {
	// NodeIPs are those of its --node-ip.
	NodeIPs []netip.Addr
	// Architecture is such as "amd64".
	Architecture string
}

// Report says what the Node of one machine would get. Its form in JSON and YAML is for programs, and stays.
type Report struct {
	// Node is what the machine was asked as: talosctl's --nodes.
	Node string `json:"node,omitempty"`
	// Name is the Node's.
	Name string `json:"name"`
	// Unclaimed is true if the configuration's nodes.nodeSelector leaves the machine to others: its Node would get nothing of this.
	Unclaimed bool `json:"unclaimed,omitempty"`
	// Pending says why nothing can be said yet: the Node would keep its uninitialized taint. All else but problems is then empty.
	Pending     string    `json:"pending,omitempty"`
	ProviderID  *Text     `json:"providerID,omitempty"`
	Addresses   []Address `json:"addresses,omitempty"`
	Labels      []Entry   `json:"labels,omitempty"`
	Annotations []Entry   `json:"annotations,omitempty"`
	Taints      []Taint   `json:"taints,omitempty"`
	// Problems are values that would be left out.
	Problems []Problem `json:"problems,omitempty"`
}

// Text is a value and the rule that it is from.
type Text struct {
	Value string `json:"value"`
	// Rule is empty if the machine itself says so.
	Rule string `json:"rule,omitempty"`
}

// Address is one of status.addresses, which are in this order.
type Address struct {
	Type    string `json:"type"`
	Address string `json:"address"`
	Rule    string `json:"rule,omitempty"`
}

// Entry is a label or an annotation.
type Entry struct {
	Key   string `json:"key"`
	Value string `json:"value"`
	Rule  string `json:"rule,omitempty"`
}

// Taint is one taint. One that is not enforced is set when the Node is initialized, and never again.
type Taint struct {
	Key     string `json:"key"`
	Value   string `json:"value,omitempty"`
	Effect  string `json:"effect"`
	Rule    string `json:"rule,omitempty"`
	Enforce bool   `json:"enforce,omitempty"`
}

// Problem is a value that would be left out, and why.
type Problem struct {
	Rule  string `json:"rule,omitempty"`
	Key   string `json:"key"`
	Value string `json:"value,omitempty"`
	Why   string `json:"why"`
}

// Render says what the Nodes of machines would get. That two of them have the same identity is seen among these machines alone.
func Render(machines []Machine, kubelet Kubelet, options nodespec.Options) []Report {
	uuids := map[string]int{}
	for _, m := range machines {
		uuids[m.Machine.UUID()]++
	}

	reports := make([]Report, 0, len(machines))

	for _, m := range machines {
		reports = append(reports, render(m.Node, nodespec.Input{
			Machine:         m.Machine,
			ProvidedNodeIPs: kubelet.NodeIPs,
			Architecture:    kubelet.Architecture,
			SharedUUID:      uuids[m.Machine.UUID()] > 1,
			Options:         options,
		}))
	}

	reportTwins(reports)

	return reports
}

func render(node string, in nodespec.Input) Report {
	spec, problems, pending := nodespec.Desired(in)

	report := Report{Node: node, Name: in.Machine.Nodename, Unclaimed: !nodespec.Managed(in), Pending: pending}
	for _, p := range problems {
		report.Problems = append(report.Problems, Problem{Rule: p.Rule, Key: p.Key, Value: p.Value, Why: p.Why})
	}

	if pending != "" {
		return report
	}

	report.ProviderID = &Text{Value: spec.ProviderID, Rule: identifiedBy(spec)}

	for _, a := range spec.Addresses {
		report.Addresses = append(report.Addresses, Address{Type: string(a.Type), Address: a.Address, Rule: spec.Transformed.Replaced[addressFields[a.Type]]})
	}

	report.Labels = entries(spec.Labels, func(key string) string {
		return cmp.Or(spec.Transformed.Labels[key].Rule, spec.Transformed.Replaced[labelFields[key]])
	})
	report.Annotations = entries(spec.Annotations, func(key string) string { return spec.Transformed.Annotations[key].Rule })

	for _, t := range spec.Taints {
		report.Taints = append(report.Taints, Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect), Rule: t.Rule, Enforce: t.Enforce})
	}

	return report
}

func entries(values map[string]string, rule func(key string) string) []Entry {
	var list []Entry

	for _, key := range slices.Sorted(maps.Keys(values)) {
		list = append(list, Entry{Key: key, Value: values[key], Rule: rule(key)})
	}

	return list
}

// What of a Node shows a field of the platform's metadata, which a rule may have replaced.
var (
	labelFields = map[string]string{
		corev1.LabelTopologyRegion:          "Region",
		corev1.LabelFailureDomainBetaRegion: "Region",
		corev1.LabelTopologyZone:            "Zone",
		corev1.LabelFailureDomainBetaZone:   "Zone",
		corev1.LabelInstanceTypeStable:      "InstanceType",
		corev1.LabelInstanceType:            "InstanceType",
		nodespec.LabelLifecycle:             "Spot",
	}

	addressFields = map[corev1.NodeAddressType]string{
		corev1.NodeInternalDNS: "InternalDNS",
		corev1.NodeExternalDNS: "ExternalDNS",
	}
)

// identifiedBy is the rule that the providerID is from, or empty.
func identifiedBy(spec nodespec.Spec) string {
	replaced := spec.Transformed.Replaced

	if spec.ProviderID == spec.Transformed.Platform.ProviderID {
		return replaced["ProviderID"]
	}

	return replaced["InstanceID"]
}

// reportTwins reports a providerID that several of the machines would get: the second of them would not get it.
func reportTwins(reports []Report) {
	holders := map[string]string{}

	for i := range reports {
		r := &reports[i]
		if r.ProviderID == nil || r.Unclaimed {
			continue
		}

		id := *r.ProviderID
		if holder, taken := holders[id.Value]; taken {
			r.Problems = append(r.Problems, Problem{Rule: id.Rule, Key: "providerID", Value: id.Value, Why: fmt.Sprintf("the Node %s would have it, too", holder)})
		} else {
			holders[id.Value] = r.Name
		}
	}
}
