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
	nodes      map[string]*corev1.Node // last versions
	versions   int
	violations []string
}

// expectation is what the Node of a machine may have.
type expectation struct {
	providerID string
	addresses  []netip.Addr // present and former
	public     netip.Addr   // the present address among publicAddresses, if any
}

func newAuditor(machines []Machine) *auditor {
	a := &auditor{expected: map[string]*expectation{}, nodes: map[string]*corev1.Node{}}

	for _, m := range machines {
		a.expected[m.Nodename] = &expectation{providerID: m.providerID(), addresses: m.nodeIPs()}
	}

	return a
}

func (a *auditor) handler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { a.observe(obj) },
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
	node, ok := obj.(*corev1.Node)
	if !ok {
		return
	}

	a.mu.Lock()
	defer a.mu.Unlock()

	a.versions++

	for _, violation := range a.check(node) {
		a.violations = append(a.violations,
			fmt.Sprintf("%s: Node %s, version %s: %s", time.Now().Format(time.TimeOnly), node.Name, node.ResourceVersion, violation))
	}

	a.nodes[node.Name] = node
}

// check returns what is wrong with a version of a Node.
func (a *auditor) check(node *corev1.Node) (violations []string) {
	want, managed := a.expected[node.Name]
	if !managed {
		for _, entry := range node.ManagedFields {
			if strings.HasPrefix(entry.Manager, talosCCM) {
				violations = append(violations, "is not managed, but was written by "+entry.Manager)
			}
		}

		return violations
	}

	if id := node.Spec.ProviderID; id != "" && id != want.providerID {
		violations = append(violations, "has the providerID "+id)
	}

	for _, addr := range nodeAddresses(node) {
		if !slices.Contains(want.addresses, addr) {
			violations = append(violations, fmt.Sprintf("lists %s, which its machine never had", addr))
		}
	}

	if missing := missingForInitialization(node); !nodespec.IsUninitialized(node) && len(missing) > 0 {
		violations = append(violations, "was initialized without "+strings.Join(missing, ", "))
	}

	return append(violations, a.checkConstants(node)...)
}

// checkConstants checks what never changes, and that each pod CIDR belongs to one Node.
func (a *auditor) checkConstants(node *corev1.Node) (violations []string) {
	old := a.nodes[node.Name]
	if old == nil || old.UID != node.UID {
		return a.overlaps(node)
	}

	if old.Spec.ProviderID != "" && old.Spec.ProviderID != node.Spec.ProviderID {
		violations = append(violations, "has changed its providerID from "+old.Spec.ProviderID)
	}

	switch {
	case len(old.Spec.PodCIDRs) == 0:
		violations = append(violations, a.overlaps(node)...)
	case !slices.Equal(old.Spec.PodCIDRs, node.Spec.PodCIDRs):
		violations = append(violations, fmt.Sprintf("has changed its pod CIDRs from %v", old.Spec.PodCIDRs))
	}

	return violations
}

func (a *auditor) overlaps(node *corev1.Node) (violations []string) {
	blocks := podCIDRsOf(node)

	for _, other := range a.nodes {
		for _, taken := range podCIDRsOf(other) {
			if other.Name != node.Name && slices.ContainsFunc(blocks, taken.Overlaps) {
				violations = append(violations, fmt.Sprintf("shares pod CIDR %s with Node %s", taken, other.Name))
			}
		}
	}

	return violations
}

func podCIDRsOf(node *corev1.Node) (blocks []netip.Prefix) {
	for _, text := range node.Spec.PodCIDRs {
		if block, err := netip.ParsePrefix(text); err == nil {
			blocks = append(blocks, block)
		}
	}

	return blocks
}

func nodeAddresses(node *corev1.Node) (addrs []netip.Addr) {
	for _, address := range node.Status.Addresses {
		if addr, err := netip.ParseAddr(address.Address); err == nil {
			addrs = append(addrs, addr)
		}
	}

	return addrs
}

// missingForInitialization returns what a Node needs before the uninitialized taint is removed.
func missingForInitialization(node *corev1.Node) (missing []string) {
	for label, value := range map[string]string{
		corev1.LabelTopologyRegion: region, corev1.LabelTopologyZone: zone, corev1.LabelInstanceTypeStable: instanceType,
	} {
		if node.Labels[label] != value {
			missing = append(missing, "label "+label)
		}
	}

	if node.Spec.ProviderID == "" {
		missing = append(missing, "providerID")
	}

	if len(nodeAddresses(node)) == 0 {
		missing = append(missing, "addresses")
	}

	return missing
}

// allow expects that a machine gets a public address in place of its present one.
func (a *auditor) allow(nodename string, public netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()

	want := a.expected[nodename]
	want.public = public
	want.addresses = append(want.addresses, public)
}

// outdated returns the machines whose Nodes do not exist, are not initialized, lack a pod CIDR or the present public
// address, or list a former one.
func (a *auditor) outdated(machines []Machine, nodes map[string]*corev1.Node) (nodenames []string) {
	a.mu.Lock()
	defer a.mu.Unlock()

	for _, m := range machines {
		node, want := nodes[m.Nodename], a.expected[m.Nodename]

		if node == nil || nodespec.IsUninitialized(node) || len(node.Spec.PodCIDRs) != len(podCIDRs) || !want.listed(node) {
			nodenames = append(nodenames, m.Nodename)
		}
	}

	return nodenames
}

// listed reports whether the public addresses of a Node are the present one of its machine.
func (e *expectation) listed(node *corev1.Node) bool {
	var listed []netip.Addr

	for _, addr := range nodeAddresses(node) {
		if publicAddresses.Contains(addr) {
			listed = append(listed, addr)
		}
	}

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

// verdict returns how many versions were checked and how many of them were wrong, and an error with the first violations.
func (a *auditor) verdict() (versions, wrong int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()

	const shown = 10

	if wrong = len(a.violations); wrong > 0 {
		err = fmt.Errorf("%d violations:\n%s", wrong, strings.Join(a.violations[:min(shown, wrong)], "\n"))
	}

	return a.versions, wrong, err
}
