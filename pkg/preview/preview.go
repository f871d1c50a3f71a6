// Package preview shows what talos-ccm would write to Nodes. Render reports what a new Node of a machine would get, and
// Compare reports what would change on the Nodes of a cluster. WriteMachine and ReadMachine keep a machine in a file. The
// package accesses neither machines nor clusters.
package preview

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
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
	// Name is the name of the Node object.
	Name string `json:"name"`
	// Unmanaged is true if nodes.selector of the configuration does not select the machine, or if the Node does not run
	// Talos. Nothing is written to the Node.
	Unmanaged bool `json:"unmanaged,omitempty"`
	// Pending is true if talos-ccm would not write the Node, since its machine cannot be read or lacks metadata. The
	// problems say why.
	Pending bool `json:"pending,omitempty"`
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

// Render returns the report of a new Node of the machine. Names, addresses and IDs that another machine has, too, are not
// detected; see Compare.
func Render(m machine.Machine, kubelet Kubelet, options nodespec.Options) Report {
	in := nodespec.Input{
		Machine:           m,
		ProvidedNodeIPs:   kubelet.NodeIPs,
		Architecture:      kubelet.Architecture,
		KubernetesVersion: kubelet.KubernetesVersion,
		Options:           options,
	}
	report := Report{Name: m.Nodename, Unmanaged: !nodespec.Selected(in), Rules: nodespec.Explain(in)}

	spec, problems, pending := nodespec.Desired(in)
	for _, p := range problems {
		report.Problems = append(report.Problems, events.Problem{Reason: nodecontroller.ReasonInvalidValue, Message: p.String()})
	}

	if pending != "" {
		report.Pending = !report.Unmanaged
		report.Problems = append(report.Problems, events.Problem{Reason: nodecontroller.ReasonMetadataPending, Message: "Node cannot be initialized yet: " + pending})

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
