// Package preview shows what talos-ccm would write to Nodes. Parse reads machines from the output of talosctl, Render
// reports what a new Node of each machine would get, and Compare reports what would change on the Nodes of a cluster.
// The package accesses neither machines nor clusters.
package preview

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
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

// Report describes what talos-ccm would write to one Node. Programs read it as JSON or YAML; keep the format stable.
type Report struct {
	// Node is the name or address by which Render's machine was read, as in talosctl --nodes.
	Node string `json:"node,omitempty"`
	// Name is the name of the Node object.
	Name string `json:"name"`
	// Unmanaged is true if nodes.selector of the configuration does not select the machine, or if the Node does not run
	// Talos. Nothing is written to the Node.
	Unmanaged bool `json:"unmanaged,omitempty"`
	// Pending is true if talos-ccm would not write the Node, since its machine cannot be read or lacks metadata. The
	// problems say why.
	Pending bool `json:"pending,omitempty"`
	// Unknown lists the fields of addresses, name and providerID that cannot be determined from the resources that were
	// read. If the name is unknown, Name is the host name.
	Unknown []string `json:"unknown,omitempty"`
	// ProviderID is set if the Node keeps another providerID than a new Node of its machine would get.
	ProviderID *ProviderIDs `json:"providerID,omitempty"`
	Changes    []Change     `json:"changes,omitempty"`
	// Rules has an entry for each rule of the configuration: whether it applies to the machine.
	Rules []rules.Match `json:"rules,omitempty"`
	// Upstream are the fields that the upstream Talos CCM owns.
	Upstream []nodecontroller.UpstreamField `json:"upstream,omitempty"`
	// Problems are what talos-ccm would report as Events.
	Problems []events.Problem `json:"problems,omitempty"`
}

// ProviderIDs are the providerID of a Node and of a new Node of its machine.
type ProviderIDs struct {
	Current string `json:"current"`
	New     string `json:"new"`
}

// Render returns a report of a new Node per machine. Duplicate SMBIOS UUIDs, names, addresses and providerIDs are
// detected among the given machines only.
func Render(machines []Machine, kubelet Kubelet, options nodespec.Options) []Report {
	peers := inventory.New(time.Now)
	for _, m := range machines {
		peers.Replace(m.name(), m.Machine)
	}

	reports := make([]Report, 0, len(machines))
	owners := map[string]string{} // of providerIDs

	for _, m := range machines {
		r := newReport(m, nodespec.Input{
			Machine:           m.Machine,
			ProvidedNodeIPs:   kubelet.NodeIPs,
			Architecture:      kubelet.Architecture,
			KubernetesVersion: kubelet.KubernetesVersion,
			Options:           options,
		}.WithPeers(peers, m.name(), func(string) (*corev1.Node, error) { return &corev1.Node{}, nil }))

		if i := slices.IndexFunc(r.Changes, func(c Change) bool { return c.Field == fieldProviderID }); i >= 0 && !r.Unmanaged {
			id := *r.Changes[i].After

			if owner, isUsed := owners[id]; isUsed {
				r.problem(nodecontroller.ReasonProviderIDInUse, fmt.Sprintf("providerID %s is already in use by node %s", id, owner))
			} else {
				owners[id] = r.Name
			}
		}

		reports = append(reports, r)
	}

	return reports
}

// name returns the name of the machine's Node or, if it is unknown, a name to show instead.
func (m Machine) name() string {
	return cmp.Or(m.Machine.Nodename, m.Machine.Platform.Hostname, m.Node)
}

func (r *Report) problem(reason, message string) {
	r.Problems = append(r.Problems, events.Problem{Reason: reason, Message: message})
}

func newReport(m Machine, in nodespec.Input) Report {
	report := Report{Node: m.Node, Name: m.name(), Unmanaged: !nodespec.Managed(in), Rules: nodespec.Explain(in)}

	var (
		spec     nodespec.Spec
		problems []nodespec.Problem
		pending  string
	)

	if m.isPartial(in.ProvidedNodeIPs) {
		spec, problems = nodespec.FromMetadata(in)
		report.Unknown = []string{"addresses"}

		if in.Machine.Nodename == "" {
			report.Unknown = append(report.Unknown, "name")
		}

		if spec.ProviderID == "" {
			report.Unknown = append(report.Unknown, "providerID")
		}
	} else {
		spec, problems, pending = nodespec.Desired(in)
	}

	for _, p := range problems {
		report.problem(nodecontroller.ReasonInvalidValue, p.String())
	}

	if pending != "" {
		report.Pending = !report.Unmanaged
		report.problem(nodecontroller.ReasonMetadataPending, "Node cannot be initialized yet: "+pending)

		return report
	}

	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Labels: spec.Labels, Annotations: spec.Annotations},
		Spec:       corev1.NodeSpec{ProviderID: spec.ProviderID},
		Status:     corev1.NodeStatus{Addresses: spec.Addresses},
	}

	for _, t := range spec.Taints {
		node.Spec.Taints = append(node.Spec.Taints, t.Taint)
	}

	report.Changes = changes(new(corev1.Node), node, spec)

	return report
}
