package simulation_test

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	talosruntime "github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// names of the Nodes.
var names = []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}

const (
	// excess is the number of Nodes for which there are no blocks. In the end, these are deleted, and none may leak.
	excess = 2

	// Instance types: the selector excludes the first, and a rule has a taint for the second.
	typeUnmanaged = "unmanaged"
	typeGPU       = "gpu"

	labelZone  = "example.com/zone"  // of a rule
	taintGPU   = "example.com/gpu"   // enforced by a rule
	taintOther = "example.com/other" // of users
)

// configure sets the options of the node controller and of the IPAM controller.
func (s *simulation) configure() {
	isGPU := []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "instanceType", Operator: rules.In, Values: []string{typeGPU}}}}}
	isManaged := []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "instanceType", Operator: rules.NotIn, Values: []string{typeUnmanaged}}}}}

	set, errs := rules.Compile([]rules.Rule{
		{Name: "zone", Labels: map[string]string{labelZone: "{{ .Zone }}"}},
		{Name: "gpu", NodeSelector: isGPU, Taints: map[string]string{taintGPU: "NoSchedule"}, Enforce: true},
	}, nil, nil)
	require.NoError(s.t, errs.ToAggregate())

	selector, errs := rules.CompileSelector(isManaged, nil)
	require.NoError(s.t, errs.ToAggregate())

	options := nodespec.Options{Rules: set, Selector: selector, FollowTopology: s.IntN(2) == 0}
	s.options = func() nodespec.Options { return options }
}

// machineState is the machine at the address of a Node.
type machineState struct {
	machine.Machine

	off bool
}

func (s *simulation) newMachine(name string) *machineState {
	id := s.count("machines")
	address := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + slices.Index(names, name))}), 24)

	return &machineState{Machine: machine.Machine{
		Nodename: name, NodeID: fmt.Sprintf("id-%d", id), Stage: talosruntime.MachineStageRunning, PlatformPublished: true,
		Platform: talosruntime.PlatformMetadataSpec{
			Platform: "example", InstanceID: fmt.Sprint(id), ProviderID: fmt.Sprintf("example://%d", id), Region: s.some("r"), Zone: s.some("z"),
			InstanceType: []string{"small", "large", typeGPU, typeUnmanaged}[s.IntN(4)],
		},
		Addresses: []machine.Address{{Prefix: address, Link: "eth0", Scope: nethelpers.ScopeGlobal}}, NodeIPs: []netip.Addr{address.Addr()},
	}}
}

func (s *simulation) some(prefix string) string { return fmt.Sprint(prefix, s.IntN(3)) }

// observe updates the leader's inventory from the machine of a Node, as the reflector does, and reports changes.
func (s *simulation) observe(name string) (changed bool) {
	if s.leader == nil || s.leader.informer.get(name) == nil {
		return false
	}

	inv, m := s.leader.inventory, s.machines[name]
	before := inv.Get(name)

	switch {
	case m.off:
		inv.MarkUnreachable(name, "off")
	case m.Nodename != name:
		inv.MarkMismatch(name, m.Nodename, "another machine")
	default:
		inv.Replace(name, m.Machine)
	}

	after := inv.Get(name)
	if changed = after.Condition != before.Condition || !after.Machine.Equal(before.Machine); changed {
		s.note("observe %s %v", name, after.Condition)
	}

	return changed
}

// changeMachine changes the machine at the address of a Node.
func (s *simulation) changeMachine(name string) {
	m := *s.machines[name]
	s.machines[name] = &m
	other := names[s.IntN(len(names))]

	kind := s.IntN(15)
	s.note("machine %s: %d, other %s", name, kind, other)

	switch kind {
	case 0, 1:
		m.off = !m.off
	case 2:
		m.Platform.Region, m.Platform.Zone = s.some("r"), s.some("z")
	case 3:
		m.Platform.Zone = s.some("z")
	case 4, 5:
		m.Platform.InstanceType = []string{"small", typeGPU, typeUnmanaged}[s.IntN(3)]
	case 6: // another address, of the platform
		m.Addresses = append(m.Addresses[:1:1], machine.Address{Prefix: netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/32", s.IntN(4))), Link: machine.LinkExternal})
	case 7: // booting
		m.Platform = talosruntime.PlatformMetadataSpec{Platform: m.Platform.Platform}
	case 8: // after a reboot; a clone if the metadata service identifies another machine
		if m.Platform = s.newMachine(name).Platform; s.IntN(2) == 0 {
			m.Platform.ProviderID, m.Platform.InstanceID = s.machines[other].Platform.ProviderID, s.machines[other].Platform.InstanceID
		}
	case 12, 13, 14:
		m.Stage = talosruntime.MachineStage(s.IntN(len(talosruntime.MachineStageValues())))
	case 9: // renamed; the kubelet registers the other Node, if there is none
		m.Nodename = other
		s.machines[other] = &m
	default:
		*s.machines[name] = *s.newMachine(name)
	}
}

// register has a kubelet register a Node.
func (s *simulation) register(name string) {
	if s.server.nodes[name] != nil {
		return
	}

	osImage := "Talos (v1.13.5)"
	if s.IntN(8) == 0 {
		osImage = "Ubuntu 26.04"
	}

	s.create(name, osImage)
}

func (s *simulation) create(name, osImage string) {
	s.note("create %s, %s", name, osImage)
	s.server.create("kubelet", &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(fmt.Sprint("uid-", s.count("Nodes"))), CreationTimestamp: metav1.Now()},
		Spec:       corev1.NodeSpec{Taints: []corev1.Taint{{Key: cloudproviderapi.TaintExternalCloudProvider, Effect: corev1.TaintEffectNoSchedule}}},
		Status:     corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{OSImage: osImage}},
	})
}

func (s *simulation) delete(name string) {
	s.note("delete %s", name)
	s.server.delete(name)
}

// changeNode lets a kubelet or a user change a Node.
func (s *simulation) changeNode(name string) {
	kind := s.IntN(11)

	switch {
	case kind == 0:
		s.delete(name)

		return
	case kind == 1:
		s.delete(name)
		s.count("re-created")

		fallthrough
	case s.server.nodes[name] == nil:
		s.register(name)

		return
	}

	manager, subresource := "kubectl", ""
	if kind < 5 {
		manager, subresource = "kubelet", "status"
	} else if kind == 10 {
		subresource = "status"
	}

	s.note("%s changes %s: %d", manager, name, kind)
	_, err := s.server.update(manager, subresource, name, func(node *corev1.Node) { s.edit(node, kind) })
	require.NoError(s.t, err)
}

func (s *simulation) edit(node *corev1.Node, kind int) {
	isOther := func(taint corev1.Taint) bool { return taint.Key == taintOther }

	switch kind {
	case 2, 3:
		setCondition(node, corev1.NodeCondition{Type: corev1.NodeReady, Status: []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionFalse}[kind-2]})
	case 4:
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: node.Name}}
	case 5:
		metav1.SetMetaDataLabel(&node.ObjectMeta, corev1.LabelTopologyZone, s.some("z"))
	case 6:
		metav1.SetMetaDataLabel(&node.ObjectMeta, labelZone, s.some("z"))
	case 7:
		if !nodespec.IsUninitialized(node) {
			delete(node.Labels, []string{labelZone, corev1.LabelTopologyRegion, corev1.LabelTopologyZone}[s.IntN(3)])
		}
	case 8:
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, isOther)
	case 10:
		setCondition(node, corev1.NodeCondition{Type: corev1.NodeMaintenanceInProgress, Status: corev1.ConditionTrue, Reason: "AdminRequested"})
	default:
		if !slices.ContainsFunc(node.Spec.Taints, isOther) {
			node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: taintOther, Effect: corev1.TaintEffectNoSchedule})
		}
	}
}

// setCondition adds or replaces a condition of a Node.
func setCondition(node *corev1.Node, condition corev1.NodeCondition) {
	condition.LastHeartbeatTime = metav1.Now().Rfc3339Copy() // as the API server stores it
	node.Status.Conditions = append(slices.DeleteFunc(slices.Clone(node.Status.Conditions), func(c corev1.NodeCondition) bool { return c.Type == condition.Type }), condition)
}

// clones returns the number of machines with each providerID. If clones kept their identity, a Node could get it from a
// view of the other machine that is not updated yet.
func (s *simulation) clones() map[string]int {
	clones := map[string]int{}
	for _, m := range s.machines {
		clones[m.Platform.ProviderID]++
	}

	return clones
}

// heal ends all faults, and deletes the excess Nodes. Every other Node is a Talos Node, its machine responds, is managed
// and has a unique identity.
func (s *simulation) heal() {
	s.note("heal")

	random := s.Perm(len(names))
	for _, n := range random[:excess] {
		s.delete(names[n])
	}

	used := map[string]string{}
	for _, node := range s.server.nodes {
		used[node.Spec.ProviderID] = node.Name
	}

	clones := s.clones()

	for _, n := range random[excess:] {
		name := names[n]
		if node := s.server.nodes[name]; node == nil || !nodespec.IsTalos(node) {
			s.delete(name)
			s.create(name, "Talos (v1.13.5)")
		}

		m := *s.machines[name]

		id := m.Platform.ProviderID
		if owner, isUsed := used[id]; m.Nodename != name || m.Platform.InstanceID == "" || isUsed && owner != name || clones[id] > 1 {
			m = *s.newMachine(name)
		}

		_, err := s.server.update("kubelet", "status", name, func(node *corev1.Node) { s.edit(node, 2) })
		require.NoError(s.t, err)

		m.Stage = talosruntime.MachineStageRunning

		if m.off = false; m.Platform.InstanceType == typeUnmanaged {
			m.Platform.InstanceType = "small"
		}

		used[m.Platform.ProviderID] = name
		s.machines[name] = &m
	}
}
