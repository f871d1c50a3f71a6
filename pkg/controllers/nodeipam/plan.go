package nodeipam

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// poolCluster and poolMachine are the names, in metrics, of what is no configured pool: the cluster CIDRs, and the machines' own prefixes.
const (
	poolCluster = "cluster"
	poolMachine = "machine"
)

// request is what a Node needs of one family: a block of the first of the pools that has one.
type request struct {
	family family
	// pool is the name of where the block comes from, for metrics and people.
	pool  string
	pools []cidrset.Pool
}

// demand is all that decides where a Node's blocks come from.
type demand struct {
	node         *corev1.Node
	entry        inventory.Entry
	clusterCIDRs []netip.Prefix
	claim        *rules.Selector
	pools        []Pool
	options      Options
}

// facts are what the machine itself says.
func (d demand) facts() rules.Facts {
	return nodespec.NewInput(d.node, d.entry.Machine, nodespec.Options{}).Facts()
}

// claimed tells whether the Node is ours to write, or why that cannot be said.
func (d demand) claimed() (bool, *finding) {
	if d.claim == nil {
		return true, nil
	}

	if problem := d.unknown(); problem != nil {
		return false, problem
	}

	return d.claim.Matches(d.facts()), nil
}

// requests says what the Node needs, the first family first, or why that cannot be said yet. podCIDRs cannot be changed, so nothing is guessed, and
// nothing is put in the place of what is missing.
func (d demand) requests() ([]request, *finding) {
	pool, problem := d.pool()
	if problem != nil {
		return nil, problem
	}

	families := d.families(pool)
	if len(families) == 0 {
		return nil, &finding{reason: ReasonClusterCIDRMissing, message: "There are no cluster CIDRs: neither --cluster-cidr nor Talos names any"}
	}

	var requests []request

	for _, f := range families {
		r, problem := d.request(pool, f)
		if problem != nil {
			return nil, problem
		}

		requests = append(requests, r)
	}

	return requests, nil
}

// pool is the first that selects the Node; the zero Pool if none does. A Node's labels are complete only when it is initialized, all else is so before.
func (d demand) pool() (Pool, *finding) {
	if slices.ContainsFunc(d.pools, func(p Pool) bool { return p.Selector != nil }) {
		if problem := d.unknown(); problem != nil {
			return Pool{}, problem
		}
	}

	if slices.ContainsFunc(d.pools, func(p Pool) bool { return p.Selector.ReadsLabels() }) && nodespec.IsUninitialized(d.node) {
		return Pool{}, &finding{reason: ReasonNotInitialized, message: "Pools are selected by labels, which are complete once the Node is initialized"}
	}

	facts := d.facts()
	facts.NodeLabels = d.node.Labels

	i := slices.IndexFunc(d.pools, func(p Pool) bool { return p.Selector.Matches(facts) })
	if i < 0 {
		return Pool{}, nil
	}

	return d.pools[i], nil
}

// unknown is the reason why nothing can be said of the machine now; nil if there is none.
func (d demand) unknown() *finding {
	if d.entry.Condition == inventory.Current {
		return nil
	}

	message := "Waiting for the Talos API of the machine: " + d.entry.Condition.String()
	if d.entry.Reason != "" {
		message += ": " + d.entry.Reason
	}

	return &finding{reason: ReasonMachineUnknown, message: message}
}

// families are those of the cluster CIDRs, and those that the pool adds.
func (d demand) families(pool Pool) []family {
	var families []family

	for _, cidr := range slices.Concat(d.clusterCIDRs, pool.CIDRs) {
		if f := familyOf(cidr.Addr()); !slices.Contains(families, f) {
			families = append(families, f)
		}
	}

	return families
}

func (d demand) request(pool Pool, f family) (request, *finding) {
	switch {
	case pool.has(f):
		return d.fromPool(pool, f)
	case f == ipv6 && d.options.Allocator == CloudAllocator:
		return d.fromMachine(d.options.maskSize(pool, ipv6))
	default:
		pool.Name, pool.CIDRs = poolCluster, d.clusterCIDRs

		return d.fromPool(pool, f)
	}
}

func (p Pool) has(f family) bool {
	return slices.ContainsFunc(p.CIDRs, func(cidr netip.Prefix) bool { return familyOf(cidr.Addr()) == f })
}

func (d demand) fromPool(pool Pool, f family) (request, *finding) {
	size := d.options.maskSize(pool, f)

	if pool.BlockSizeAuto && f == ipv4 {
		var known bool
		if size, known = maskSizeFor(d.node); !known {
			return request{}, &finding{reason: ReasonMaxPodsUnknown, message: fmt.Sprintf("Waiting for the kubelet to say how many pods it runs, up to %d", maxPods)}
		}
	}

	r := request{family: f, pool: pool.Name}

	for _, cidr := range pool.CIDRs {
		if familyOf(cidr.Addr()) != f {
			continue
		}

		cut, err := cidrset.NewPool(cidr, size)
		if err != nil {
			return request{}, &finding{reason: ReasonPrefixTooSmall, message: fmt.Sprintf("Pool %s: %v", pool.Name, err)}
		}

		r.pools = append(r.pools, cut)
	}

	return r, nil
}

// maxPods is more than any kubelet runs. What it says decides how much it gets, and it must not be all there is.
const maxPods = 4096

// maskSizeFor is that of the smallest IPv4 block with two addresses for each pod that the kubelet would run, so that the address of a pod that ended
// is not at once another's (the rule that GKE has: 110 pods, a /24); not known if the kubelet has not said it, or what no kubelet runs.
func maskSizeFor(node *corev1.Node) (size int, known bool) {
	pods := node.Status.Allocatable.Pods()
	if pods.IsZero() {
		pods = node.Status.Capacity.Pods()
	}

	count := pods.Value()
	if count < 1 || count > maxPods {
		return 0, false
	}

	return 32 - bits.Len64(uint64(2*count-1)), true //nolint:gosec // is positive
}
