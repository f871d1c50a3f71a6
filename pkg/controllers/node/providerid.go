package node

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// providerID returns the providerID of the Node, and a problem to report. A Node without a providerID gets the desired
// one if it is free. If the problem is ReasonProviderIDInUse, the Node must not be written.
//
// A renamed machine leaves behind its old Node, which has the providerID. The new Node is written without a providerID,
// and gets it after the old Node is deleted.
func (c *Controller) providerID(node *corev1.Node, entry inventory.Entry, desired string) (string, *events.Problem) {
	if actual := node.Spec.ProviderID; actual != "" {
		c.release(node.Name, actual)

		if rivals := c.config.Inventory.Rivals(node.Name); len(rivals) > 0 {
			return actual, &events.Problem{Reason: ReasonProviderIDMismatch, Subject: "hostname", Message: fmt.Sprintf("Two machines have the hostname of "+
				"node %s, at %s and %s, and its providerID is %s; change the hostname of one of them", node.Name, rivals[0], rivals[1], actual)}
		}

		if entry.Condition == inventory.Current && differentInstances(actual, desired) {
			return actual, &events.Problem{Reason: ReasonProviderIDMismatch, Message: fmt.Sprintf("Node has providerID %s, but its machine is %s now; "+
				"drain and delete the node, and then reboot the machine, so that it registers again", actual, desired)}
		}

		return actual, nil
	}

	owner := c.reserve(desired, node.Name)

	switch {
	case owner == "":
		return desired, nil
	case c.config.Inventory.RenamedTo(owner) == node.Name, c.config.Inventory.Get(owner).Condition == inventory.Mismatch:
		return "", &events.Problem{Reason: ReasonRenamed, Message: fmt.Sprintf("ProviderID %s is not set yet: it is used by node %s, "+
			"probably the former name of this machine; the lifecycle controller deletes that node after its grace period if it has seen the "+
			"renaming, or delete it yourself", desired, owner)}
	default:
		return "", &events.Problem{Reason: ReasonProviderIDInUse, Message: fmt.Sprintf(
			"ProviderID %s is already used by node %s; delete that node if its machine no longer exists", desired, owner)}
	}
}

// reserve reserves the providerID for the Node, in place of an earlier reservation. If another Node has the providerID
// or has reserved it, reserve changes nothing and returns the name of that Node.
func (c *Controller) reserve(providerID, nodename string) (owner string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	objs, _ := c.indexer.ByIndex(indexProviderID, providerID) // fails for an unknown index only

	for _, obj := range objs {
		if other, isNode := obj.(*corev1.Node); isNode && other.Name != nodename {
			return other.Name
		}
	}

	for other, reserved := range c.reservations {
		if reserved == providerID && other != nodename {
			return other
		}
	}

	if reserved := c.reservations[nodename]; reserved != "" && reserved != providerID {
		c.queueWaiting()
	}

	c.reservations[nodename] = providerID

	return ""
}

// release ends the reservation of a Node that has the given providerID in the cache, or none.
func (c *Controller) release(nodename, providerID string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if reserved := c.reservations[nodename]; reserved != "" && reserved != providerID {
		c.queueWaiting()
	}

	delete(c.reservations, nodename)
}

// queueWaiting queues the given Nodes and those without a providerID, each once and in the order of their names: they may
// be waiting for a providerID that has become free.
func (c *Controller) queueWaiting(nodenames ...string) {
	waiting := nodenames

	for _, obj := range c.indexer.List() {
		if node, isNode := obj.(*corev1.Node); isNode && node.Spec.ProviderID == "" {
			waiting = append(waiting, node.Name)
		}
	}

	slices.Sort(waiting)

	for _, nodename := range slices.Compact(waiting) {
		c.queue.Add(nodename)
	}
}

// differentInstances reports whether two providerIDs certainly name two instances. It compares only providerIDs of one
// form: the upstream Talos CCM and --provider-id-fallback=node-ip name the same machine in different ways, such as
// talos://metal/10.0.0.1 and talos://metal/<UUID>. Addresses do not identify instances.
func differentInstances(a, b string) bool {
	prefixA, idA := splitProviderID(a)
	prefixB, idB := splitProviderID(b)

	if strings.Count(prefixA, "/") != strings.Count(prefixB, "/") || scheme(prefixA) != scheme(prefixB) || strings.EqualFold(idA, idB) {
		return false
	}

	return !isAddress(idA) && !isAddress(idB) && isUUID(idA) == isUUID(idB)
}

// splitProviderID returns the providerID up to its last slash, and the rest, which identifies the instance.
func splitProviderID(providerID string) (prefix, id string) {
	i := strings.LastIndex(providerID, "/") + 1

	return providerID[:i], providerID[i:]
}

// scheme returns the scheme, with the platform of a providerID of this program.
func scheme(prefix string) string {
	if strings.HasPrefix(prefix, "talos://") {
		return prefix
	}

	name, _, _ := strings.Cut(prefix, "://")

	return name
}

func isAddress(id string) bool {
	_, err := netip.ParseAddr(id)

	return err == nil
}

func isUUID(id string) bool {
	const length = 36

	return len(id) == length && strings.Count(id, "-") == 4
}
