package controlplane

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// addressesMaxAge limits how often the addresses are read. A control-plane machine that has just joined is dialed again
// after a backoff.
const addressesMaxAge = 5 * time.Second

// EtcdMembers returns the addresses of the members of etcd.
type EtcdMembers func(ctx context.Context) ([]netip.Addr, error)

// Addresses are the addresses of the control-plane machines by sources that no kubelet can write: the endpoints of the
// API server and the members of etcd. Use NewAddresses. They are safe for concurrent use.
type Addresses struct {
	client      kubernetes.Interface
	nodes       corelisters.NodeLister
	etcdMembers EtcdMembers
	clock       clock.PassiveClock

	mu   sync.Mutex
	last answers
}

type answers struct {
	readAt    time.Time
	endpoints []netip.AddrPort
	members   []netip.Addr
	// err is why a source could not be read the last time.
	err error
}

// NewAddresses returns Addresses that have read nothing yet. etcdMembers is nil outside Talos.
func NewAddresses(client kubernetes.Interface, nodes corelisters.NodeLister, etcdMembers EtcdMembers, clk clock.PassiveClock) *Addresses {
	return &Addresses{client: client, nodes: nodes, etcdMembers: etcdMembers, clock: clk}
}

// Guard returns a DialFunc that dials the machine of a control-plane Node only at one of these addresses, as a
// talosapi.ControlPlane. The machine of a deleted Node is dialed at any address: its answers do not count for the cluster.
// The DialFunc blocks while it reads the addresses.
func (a *Addresses) Guard(dial talosapi.DialFunc) talosapi.DialFunc {
	return func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		node, err := a.nodes.Get(nodename) // fails only if there is none
		if err != nil || !nodespec.IsControlPlane(node) {
			return dial(ctx, nodename, addr)
		}

		if err := a.confirm(ctx, nodename, addr); err != nil {
			return nil, err
		}

		st, err := dial(ctx, nodename, addr)
		if err != nil {
			return nil, err
		}

		return talosapi.ControlPlane{State: st}, nil
	}
}

// confirm returns an error if addr is not known to be the address of a control-plane machine. It reads the addresses
// without a lock: a source that does not respond must not delay callers for which the last answer is recent enough.
func (a *Addresses) confirm(ctx context.Context, nodename string, addr netip.Addr) error {
	a.mu.Lock()
	known := a.last
	a.mu.Unlock()

	if known.readAt.IsZero() || a.clock.Since(known.readAt) > addressesMaxAge {
		known = a.read(ctx, known)

		if err := ctx.Err(); err != nil {
			return fmt.Errorf("read the addresses of control-plane machines: %w", err)
		}

		a.mu.Lock()

		if known.readAt.After(a.last.readAt) {
			a.last = known
		}

		a.mu.Unlock()
	}

	isEndpoint := func(endpoint netip.AddrPort) bool { return endpoint.Addr() == addr }
	if slices.ContainsFunc(known.endpoints, isEndpoint) || slices.Contains(known.members, addr) {
		return nil
	}

	err := fmt.Errorf("address %s of control-plane node %q is neither an endpoint of default/kubernetes nor an etcd member's", addr, nodename)
	if known.err != nil {
		err = fmt.Errorf("%w; %w", err, known.err)
	}

	return err
}

// read reads both sources. It keeps the last answer of a source that cannot be read.
func (a *Addresses) read(ctx context.Context, last answers) answers {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	// Before reading, so that the answer is not taken for younger than it is.
	last.readAt = a.clock.Now()

	endpoints, endpointsErr := readEndpoints(ctx, a.client)
	if endpointsErr == nil {
		last.endpoints = endpoints
	}

	var membersErr error

	if a.etcdMembers != nil {
		var members []netip.Addr
		if members, membersErr = a.etcdMembers(ctx); membersErr == nil {
			last.members = members
		}
	}

	last.err = utilerrors.NewAggregate([]error{endpointsErr, membersErr})

	return last
}
