// Package preview shows what talos-ccm would write to the Node of a machine. Parse reads machines from the output of talosctl, Render computes a
// Report per machine, and Write formats the reports. The package accesses neither machines nor clusters.
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

// Kubelet holds what the kubelet of a machine would report.
type Kubelet struct {
	// NodeIPs are the addresses of --node-ip; empty for those that Talos passes to the kubelet.
	NodeIPs []netip.Addr
	// Architecture is the Node's architecture, such as "amd64".
	Architecture string
	// KubernetesVersion is the version of the kubelet, such as "v1.36.2".
	KubernetesVersion string
}

// Report describes what talos-ccm would write to the Node of one machine. Programs read it as JSON or YAML; keep the format stable.
type Report struct {
	// Node is the name or address by which the machine was read, as in talosctl --nodes.
	Node string `json:"node,omitempty"`
	// Name is the name of the Node object.
	Name string `json:"name"`
	// Unmanaged is true if nodes.selector of the configuration does not select the machine. Nothing is written to its Node.
	Unmanaged bool `json:"unmanaged,omitempty"`
	// Pending is the reason why the Node would stay uninitialized, or empty. If it is set, only Problems is set beside it.
	Pending string `json:"pending,omitempty"`
	// Unknown lists the fields of addresses, name and providerID that cannot be determined from the resources that were read. If the name is unknown,
	// Name is the host name.
	Unknown     []string  `json:"unknown,omitempty"`
	ProviderID  *Text     `json:"providerID,omitempty"`
	Addresses   []Address `json:"addresses,omitempty"`
	Labels      []Entry   `json:"labels,omitempty"`
	Annotations []Entry   `json:"annotations,omitempty"`
	Taints      []Taint   `json:"taints,omitempty"`
	// Problems are the values that would be omitted.
	Problems []Problem `json:"problems,omitempty"`
}

// Text is a value and the rule that sets it.
type Text struct {
	Value string `json:"value"`
	// Rule is empty for a value of the machine itself.
	Rule string `json:"rule,omitempty"`
}

// Address is an element of status.addresses.
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

// Taint is a taint. A taint that is not enforced is set only when the Node is initialized.
type Taint struct {
	Key     string `json:"key"`
	Value   string `json:"value,omitempty"`
	Effect  string `json:"effect"`
	Rule    string `json:"rule,omitempty"`
	Enforce bool   `json:"enforce,omitempty"`
}

// Problem is a value that would be omitted, and the reason.
type Problem struct {
	Rule  string `json:"rule,omitempty"`
	Key   string `json:"key"`
	Value string `json:"value,omitempty"`
	Why   string `json:"why"`
}

// Render returns a report per machine. Duplicate SMBIOS UUIDs, names and providerIDs are detected among the given machines only.
func Render(machines []Machine, kubelet Kubelet, options nodespec.Options) []Report {
	uuids, owners := map[string]int{}, map[string][]string{}

	for _, m := range machines {
		uuids[m.Machine.UUID()]++

		for _, name := range m.Machine.ReportedNames() {
			owners[name] = append(owners[name], m.Machine.Nodename)
		}
	}

	reports := make([]Report, 0, len(machines))

	for _, m := range machines {
		reports = append(reports, newReport(m, nodespec.Input{
			Machine:           m.Machine,
			ProvidedNodeIPs:   kubelet.NodeIPs,
			Architecture:      kubelet.Architecture,
			KubernetesVersion: kubelet.KubernetesVersion,
			SharedUUID:        uuids[m.Machine.UUID()] > 1,
			OwnersOf: func(name string) []string {
				return slices.DeleteFunc(slices.Clone(owners[name]), func(owner string) bool { return owner == m.Machine.Nodename })
			},
			Options: options,
		}))
	}

	reportDuplicates(reports)

	return reports
}

func newReport(m Machine, in nodespec.Input) Report {
	report := Report{Node: m.Node, Name: in.Machine.Nodename, Unmanaged: !nodespec.Managed(in)}

	var (
		spec     nodespec.Spec
		problems []nodespec.Problem
	)

	if m.isPartial(in.ProvidedNodeIPs) {
		spec, problems = nodespec.FromMetadata(in)
		report.Unknown = []string{"addresses"}

		if report.Name == "" {
			report.Name, report.Unknown = cmp.Or(in.Machine.Platform.Hostname, m.Node), append(report.Unknown, "name")
		}

		if spec.ProviderID == "" {
			report.Unknown = append(report.Unknown, "providerID")
		}
	} else {
		spec, problems, report.Pending = nodespec.Desired(in)
	}

	for _, p := range problems {
		report.Problems = append(report.Problems, Problem{Rule: p.Rule, Key: p.Key, Value: p.Value, Why: p.Why})
	}

	if report.Pending != "" {
		return report
	}

	replaced := spec.Transformed.Replaced

	if spec.ProviderID != "" {
		report.ProviderID = &Text{Value: spec.ProviderID, Rule: replaced["InstanceID"]}
	}

	if spec.ProviderID == spec.Transformed.Platform.ProviderID && spec.ProviderID != "" {
		report.ProviderID.Rule = replaced["ProviderID"]
	}

	for _, a := range spec.Addresses {
		report.Addresses = append(report.Addresses, Address{Type: string(a.Type), Address: a.Address, Rule: replaced[addressFields[a.Type]]})
	}

	report.Labels = entries(spec.Labels, func(key string) string {
		return cmp.Or(spec.Transformed.Labels[key].Rule, replaced[labelFields[key]])
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

// Labels and addresses with the field of the platform metadata that they are derived from. A rule may replace the field.
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

// reportDuplicates adds a problem to each report whose providerID is already that of an earlier report.
func reportDuplicates(reports []Report) {
	owners := map[string]string{}

	for i := range reports {
		r := &reports[i]
		if r.ProviderID == nil || r.Unmanaged {
			continue
		}

		id := *r.ProviderID
		if owner, taken := owners[id.Value]; taken {
			r.Problems = append(r.Problems, Problem{Rule: id.Rule, Key: "providerID", Value: id.Value, Why: fmt.Sprintf("providerID is already in use by node %s", owner)})
		} else {
			owners[id.Value] = r.Name
		}
	}
}
