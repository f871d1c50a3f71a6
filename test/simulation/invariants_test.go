package simulation_test

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// checkAttempt checks a request that the API server has refused. A controller must not attempt to change a field that
// cannot be changed.
func (s *simulation) checkAttempt(c *call, before *corev1.Node, err error) {
	if before == nil || c.planned.node == nil || before.UID != c.planned.node.UID || !apierrors.IsInvalid(err) {
		return
	}

	for _, path := range []string{providerIDField, podCIDRsField} {
		if strings.Contains(err.Error(), path) {
			s.violate("%v: attempt to change %s of node %s", c, path, c.name)
		}
	}
}

// check checks a write that the API server has accepted.
func (s *simulation) check(c *call, before, after *corev1.Node) {
	s.checkConditions(c, before, after)
	s.checkPlanned(c, before, after)

	if nodespec.IsUninitialized(before) && !nodespec.IsUninitialized(after) {
		s.count("initialized")
		s.checkInitialized(c, after)
	}

	if len(before.Spec.PodCIDRs) == 0 && len(after.Spec.PodCIDRs) > 0 {
		s.count("podCIDRs")
	}

	for _, name := range slices.Sorted(maps.Keys(s.server.nodes)) {
		if other := s.server.nodes[name]; name != after.Name {
			s.checkUnique(c, after, other)
		}
	}
}

func equalConditions(a, b corev1.NodeCondition) bool { return equality.Semantic.DeepEqual(a, b) }

// isOurs reports whether the node controller owns a condition.
func isOurs(c corev1.NodeCondition) bool { return strings.HasPrefix(c.Reason, "TalosMachine") }

// checkConditions checks that a write changes neither conditions of other writers nor Nodes of other systems.
func (s *simulation) checkConditions(c *call, before, after *corev1.Node) {
	kept := func(n *corev1.Node) []corev1.NodeCondition {
		return slices.DeleteFunc(slices.Clone(n.Status.Conditions), isOurs)
	}

	switch {
	case slices.EqualFunc(before.Status.Conditions, after.Status.Conditions, equalConditions):
	case !slices.EqualFunc(kept(before), kept(after), equalConditions):
		s.violate("%v: changed conditions of other writers: %v", c, kept(before))
	case !nodespec.IsTalos(before):
		s.violate("%v: wrote conditions of a Node that does not run Talos", c)
	default:
		s.count("conditions")
	}
}

// checkPlanned checks that a write was planned for this Node. Only conditions may be written to Nodes that are not managed.
func (s *simulation) checkPlanned(c *call, before, after *corev1.Node) {
	onlyConditions := !slices.EqualFunc(before.Status.Conditions, after.Status.Conditions, equalConditions) &&
		slices.Equal(before.Status.Addresses, after.Status.Addresses)

	// An uninitialized Node gets its first conditions with its addresses.
	if !onlyConditions || nodespec.IsUninitialized(before) && !slices.ContainsFunc(before.Status.Conditions, isOurs) {
		s.checkOurs(c, before)
	} else if c.planned.node == nil || c.planned.node.UID != before.UID {
		s.violate("%v: wrote conditions of another Node", c)
	}
}

// checkOurs checks that a write was planned for this Node, and that the Node is managed.
func (s *simulation) checkOurs(c *call, before *corev1.Node) {
	planned := c.planned

	switch {
	case planned.node == nil:
		s.violate("%v: the cache has no Node of that name", c)
	case before.UID != planned.node.UID:
		s.violate("%v: wrote Node %s, planned for %s", c, before.UID, planned.node.UID)
	case !nodespec.IsTalos(before):
		s.violate("%v: the Node does not run Talos", c)
	case planned.entry.ObservedAt.IsZero(), planned.entry.Condition == inventory.Mismatch:
		s.violate("%v: no view of the Node's machine: %v", c, planned.entry.Condition)
	case !planned.managed:
		s.violate("%v: the Node is not selected", c)
	case c.controller == nodeipam.Alias && planned.entry.Condition != inventory.Current:
		s.violate("%v: the machine is %v", c, planned.entry.Condition)
	}
}

// checkInitialized checks that a Node without uninitialized taint has everything else of the plan.
func (s *simulation) checkInitialized(c *call, after *corev1.Node) {
	planned := c.planned

	switch {
	case planned.entry.Condition != inventory.Current || planned.pending != "":
		s.violate("%v: initialized while the machine is %v: %s", c, planned.entry.Condition, planned.pending)
	case after.Spec.ProviderID == "" && !planned.renamed:
		s.violate("%v: initialized without providerID", c)
	case after.Spec.ProviderID != "" && after.Spec.ProviderID != planned.spec.ProviderID && planned.node.Spec.ProviderID == "":
		s.violate("%v: initialized with providerID %s, want %s", c, after.Spec.ProviderID, planned.spec.ProviderID)
	}

	s.checkState(c, after, planned.spec, func(n *corev1.Node, label string) bool {
		return !planned.spec.FollowTopology && followsStable(n, label)
	})
}

// checkState checks the addresses, labels and taints of a Node.
func (s *simulation) checkState(what any, n *corev1.Node, spec nodespec.Spec, isKept func(n *corev1.Node, label string) bool) {
	if !slices.Equal(n.Status.Addresses, spec.Addresses) {
		s.violate("%v: node %s has addresses %v, want %v", what, n.Name, n.Status.Addresses, spec.Addresses)
	}

	for key, want := range spec.Labels {
		got := n.Labels[key]
		isForeign := slices.ContainsFunc(n.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool {
			return entry.Manager != node.FieldManager && strings.Contains(string(entry.FieldsV1.GetRawBytes()), `"f:`+key+`"`)
		})

		if got != want && !isForeign && !isKept(n, key) {
			s.violate("%v: node %s has label %s=%q, want %q", what, n.Name, key, got, want)
		}
	}

	for _, taint := range spec.Taints {
		if !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&taint.Taint) }) {
			s.violate("%v: node %s does not have taint %s", what, n.Name, taint.Key)
		}
	}
}

func isTopology(label string) bool {
	return label == corev1.LabelTopologyRegion || label == corev1.LabelTopologyZone
}

// followsStable reports whether a deprecated topology label has the value of the stable one.
func followsStable(n *corev1.Node, label string) bool {
	stable := map[string]string{
		corev1.LabelFailureDomainBetaRegion: corev1.LabelTopologyRegion, corev1.LabelFailureDomainBetaZone: corev1.LabelTopologyZone,
	}[label]

	return stable != "" && n.Labels[label] == n.Labels[stable]
}

// checkUnique checks that two Nodes have neither blocks nor a providerID in common.
func (s *simulation) checkUnique(what any, a, b *corev1.Node) {
	if a.Spec.ProviderID != "" && a.Spec.ProviderID == b.Spec.ProviderID {
		s.violate("%v: nodes %s and %s have providerID %s", what, a.Name, b.Name, a.Spec.ProviderID)
	}

	for _, block := range a.Spec.PodCIDRs {
		if slices.ContainsFunc(b.Spec.PodCIDRs, func(other string) bool { return netip.MustParsePrefix(block).Overlaps(netip.MustParsePrefix(other)) }) {
			s.violate("%v: podCIDRs %v of node %s overlap %v of node %s", what, a.Spec.PodCIDRs, a.Name, b.Spec.PodCIDRs, b.Name)
		}
	}
}

// checkConverged checks that every Node has its desired state.
func (s *simulation) checkConverged() {
	const what = "converged"

	for _, name := range slices.Sorted(maps.Keys(s.server.nodes)) {
		n, planned := s.server.nodes[name], s.leader.view(s.leader.informer.get(name))

		switch {
		case planned.pending != "" || planned.entry.Condition != inventory.Current:
			s.violate("%s: machine of node %s is %v: %s", what, name, planned.entry.Condition, planned.pending)
		case nodespec.IsUninitialized(n) || n.Spec.ProviderID == "":
			s.violate("%s: node %s is not initialized, providerID %q", what, name, n.Spec.ProviderID)
		case len(n.Spec.PodCIDRs) != len(clusterCIDRs):
			s.violate("%s: node %s has podCIDRs %v", what, name, n.Spec.PodCIDRs)
		}

		s.checkWorking(what, n)
		s.checkState(what, n, planned.spec, func(n *corev1.Node, label string) bool {
			return !planned.spec.FollowTopology && (followsStable(n, label) || isTopology(label) && n.Labels[label] != "")
		})

		if isGPU := s.machines[name].Platform.InstanceType == typeGPU; !isGPU && slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == taintGPU }) {
			s.violate("%s: node %s still has taint %s", what, name, taintGPU)
		}
	}
}

// checkWorking checks the conditions of a Node that is ready, and of its machine, which runs.
func (s *simulation) checkWorking(what any, n *corev1.Node) {
	for _, condition := range n.Status.Conditions {
		if isOurs(condition) && condition.Type != node.ConditionTalosReady {
			s.violate("%v: node %s has condition %v", what, n.Name, condition)
		}
	}

	if ready := nodespec.Condition(n, node.ConditionTalosReady); ready == nil || ready.Status != corev1.ConditionTrue {
		s.violate("%v: node %s has condition %v", what, n.Name, ready)
	}
}
