package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// publicAddresses are those that machines get and lose. No other address of a machine is in this range.
var publicAddresses = netip.MustParsePrefix("198.18.0.0/15")

// auditor checks each version of each Node that its informer sees.
type auditor struct {
	mu         sync.Mutex
	expected   map[string]*expectation // by nodename; other Nodes are not managed
	public     netip.Addr              // last one that a machine got
	nodes      map[string]*corev1.Node // last versions
	versions   int
	violations []string
}

// expectation is what the Node of a machine may have.
type expectation struct {
	addresses []netip.Addr // present and former
	public    netip.Addr   // the present address among publicAddresses, if any
}

func newAuditor() *auditor {
	return &auditor{expected: map[string]*expectation{}, public: publicAddresses.Addr(), nodes: map[string]*corev1.Node{}}
}

// replacePublic chooses a public address for a machine in place of the former one.
func (a *auditor) replacePublic(nodename string) (former, public netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()

	want := a.expected[nodename]
	a.public = a.public.Next()
	former, want.public = want.public, a.public
	want.addresses = append(want.addresses, a.public)

	return former, a.public
}

func (a *auditor) handler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    a.observe,
		UpdateFunc: func(_, obj any) { a.observe(obj) },
		DeleteFunc: func(obj any) {
			if name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
				a.mu.Lock()
				delete(a.nodes, name)
				a.mu.Unlock()
			}
		},
	}
}

func (a *auditor) observe(obj any) {
	node, _ := obj.(*corev1.Node)

	a.mu.Lock()
	defer a.mu.Unlock()

	a.versions++

	check := a.checkManaged
	if a.expected[node.Name] == nil {
		check = a.checkUnmanaged
	}

	check(node, func(format string, args ...any) {
		violation := fmt.Sprintf(format, args...)
		a.violations = append(a.violations,
			fmt.Sprintf("%s: Node %s, version %s: %s", time.Now().Format(time.TimeOnly), node.Name, node.ResourceVersion, violation))
	})

	a.nodes[node.Name] = node
}

func (a *auditor) checkUnmanaged(node *corev1.Node, report func(format string, args ...any)) {
	for _, entry := range node.ManagedFields {
		if strings.HasPrefix(entry.Manager, talosCCM) {
			report("is not managed, but was written by %s", entry.Manager)
		}
	}
}

func (a *auditor) checkManaged(node *corev1.Node, report func(format string, args ...any)) {
	if id := node.Spec.ProviderID; id != "" && id != providerID(node.Name) {
		report("has the providerID %s", id)
	}

	for _, addr := range nodeAddresses(node) {
		if !slices.Contains(a.expected[node.Name].addresses, addr) {
			report("lists %s, which its machine never had", addr)
		}
	}

	for name, missing := range map[string]bool{
		"label " + corev1.LabelTopologyRegion:     node.Labels[corev1.LabelTopologyRegion] != region,
		"label " + corev1.LabelTopologyZone:       node.Labels[corev1.LabelTopologyZone] != zone,
		"label " + corev1.LabelInstanceTypeStable: node.Labels[corev1.LabelInstanceTypeStable] != instanceType,
		"providerID": node.Spec.ProviderID == "",
		"addresses":  len(nodeAddresses(node)) == 0,
	} {
		if missing && !nodespec.IsUninitialized(node) {
			report("was initialized without %s", name)
		}
	}

	a.checkConstants(node, report)
}

// checkConstants checks what never changes.
func (a *auditor) checkConstants(node *corev1.Node, report func(format string, args ...any)) {
	old := a.nodes[node.Name]
	if old == nil || old.UID != node.UID {
		old = &corev1.Node{}
	}

	if old.Spec.ProviderID != "" && old.Spec.ProviderID != node.Spec.ProviderID {
		report("has changed its providerID from %s", old.Spec.ProviderID)
	}

	if len(old.Spec.PodCIDRs) == 0 {
		a.checkOverlaps(node, report)
	} else if !slices.Equal(old.Spec.PodCIDRs, node.Spec.PodCIDRs) {
		report("has changed its pod CIDRs from %v", old.Spec.PodCIDRs)
	}
}

// checkOverlaps checks that no pod CIDR belongs to another Node, too.
func (a *auditor) checkOverlaps(node *corev1.Node, report func(format string, args ...any)) {
	for _, other := range a.nodes {
		for _, taken := range other.Spec.PodCIDRs {
			overlaps := func(own string) bool { return netip.MustParsePrefix(own).Overlaps(netip.MustParsePrefix(taken)) }
			if other.Name != node.Name && slices.ContainsFunc(node.Spec.PodCIDRs, overlaps) {
				report("shares pod CIDR %s with Node %s", taken, other.Name)
			}
		}
	}
}

func nodeAddresses(node *corev1.Node) (addrs []netip.Addr) {
	for _, address := range node.Status.Addresses {
		if addr, err := netip.ParseAddr(address.Address); err == nil {
			addrs = append(addrs, addr)
		}
	}

	return addrs
}

// outdated returns the machines whose Nodes do not exist, are not initialized, lack a pod CIDR or the present public
// address, or list a former one.
func (a *auditor) outdated(machines []machine, nodes map[string]*corev1.Node) (nodenames []string) {
	a.mu.Lock()
	defer a.mu.Unlock()

	for _, m := range machines {
		node := nodes[m.Nodename()]

		if node == nil || nodespec.IsUninitialized(node) || len(node.Spec.PodCIDRs) != len(podCIDRs) || !a.expected[node.Name].listed(node) {
			nodenames = append(nodenames, m.Nodename())
		}
	}

	return nodenames
}

// listed reports whether the public addresses of a Node are the present one of its machine.
func (e *expectation) listed(node *corev1.Node) bool {
	listed := slices.DeleteFunc(nodeAddresses(node), func(addr netip.Addr) bool { return !publicAddresses.Contains(addr) })
	if !e.public.IsValid() {
		return len(listed) == 0
	}

	return slices.Equal(listed, []netip.Addr{e.public})
}

// seen returns the last versions that the auditor has seen.
func (a *auditor) seen() map[string]*corev1.Node {
	a.mu.Lock()
	defer a.mu.Unlock()

	return maps.Clone(a.nodes)
}

// verdict returns how many versions were checked and how many violations were found, and an error with the first ones.
func (a *auditor) verdict() (versions, wrong int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()

	const shown = 10

	if wrong = len(a.violations); wrong > 0 {
		err = fmt.Errorf("%d violations:\n%s", wrong, strings.Join(a.violations[:min(shown, wrong)], "\n"))
	}

	return a.versions, wrong, err
}
