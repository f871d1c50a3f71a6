// Package reflector fills the inventory: for each tracked Node it connects to the Node's machine, verifies the machine's
// nodename and watches the machine's resources.
//
// It reads the Talos API and Node objects, and writes only to the inventory.
//
// # Sessions
//
// A session is one connection to the apid of one machine. The proxy of the local apid is not used, because its memory and
// files are limited. A session watches the resources whose changes must reach the Node immediately. It polls all others,
// because watches cost memory on both sides: every 10 s while the machine boots, then every 1 to 10 minutes, and soon
// after a change that probably affects them. Resources that do not change before a reboot are no longer read once the
// machine runs. A resource kind that a Talos version does not have is empty.
//
// The first view is published when every watch has sent its initial resources and every poll has completed once. Later
// changes are published together after a short time, since Talos makes related changes one after the other.
//
// A session with a verified control-plane machine also reads what the machine knows about the whole cluster: with every
// poll, at least every 30 s, and every few seconds until all is known. What is absent, refused or too large keeps its
// last value, in the next sessions, too. Control-plane machines are tried again sooner than others. The local machine is
// read over its socket, also before it has a Node.
//
// A session expires after 30 to 45 minutes, and the next session reads everything again. If a session fails, its last
// view stays current until a connection attempt fails. From then on, the inventory keeps the view as the view of an
// unreachable machine.
//
// A machine that sends more than package talosapi allows is unreachable, too. If only facts exceed the limits, the facts
// are omitted, and the machine stays reachable. Machines of Nodes that are not known (nodespec.IsKnown) have lower limits,
// and slots of their own.
package reflector

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// maxConnecting limits the machines that are read for the first time at once, from the TLS handshake to the first
	// view. More at once need more memory and save no time. Machines of control-plane Nodes, other known Nodes and others
	// have separate limits, and so have steady and unsteady machines. A machine that stalls delays others for at most
	// slotTime. A machine that drops packets delays none, because the limits do not include TCP connection attempts.
	maxConnecting = 32
	slotTime      = time.Second

	// maxPerAddress limits the sessions at one address, for each Trust. A machine reports one nodename, so of several Nodes
	// with one address only one keeps its session, unless the machine lies. The others fail after addressTime.
	maxPerAddress = 4
	addressTime   = 10 * time.Second

	// A machine is unsteady after a session that was shorter than shortSession, or failed to begin.
	shortSession = time.Minute

	// ownShare is what the machine of a Node that is not known may always send in a session, in bytes. All of these machines
	// together may send commonShare beyond it. A small new machine needs about a tenth of its own.
	ownShare    = 128 << 10
	commonShare = 64 << 20

	backoffFirst = time.Second
	backoffMax   = time.Minute

	// A session that was established is renewed after reconnectDelay. Its jitter spreads the reconnects of many machines.
	reconnectDelay  = 50 * time.Millisecond
	reconnectJitter = 5.0
)

// localAddress stands in for the address of the local machine.
var localAddress = netip.AddrFrom4([4]byte{127, 0, 0, 1})

var restarts = metric.NewCounter("talosccm_watch_restarts_total",
	"Number of times that the watches of a machine ended unexpectedly and were restarted.")

// Inventory receives the machine views.
type Inventory interface {
	Get(nodename string) inventory.Entry
	Replace(nodename string, m machine.Machine)
	MarkUnreachable(nodename, reason string)
	MarkMismatch(nodename, responding, reason string)
	Forget(nodename string)
}

// Reflector runs one task per tracked Node. Create it with New. All methods are safe for concurrent use.
type Reflector struct {
	inventory Inventory
	dial      talosapi.DialFunc
	clock     clock.Clock
	budget    talosapi.Budget

	// Kinds are read from every machine: BaseKinds, unless the configuration uses facts. Do not change them while Run runs.
	Kinds machine.Kinds
	// ReadsMembers reports whether the members of the cluster are read from control-plane machines. Nil means never. Do not
	// change it while Run runs.
	ReadsMembers func() bool

	mu    sync.Mutex
	ctx   context.Context //nolint:containedctx // set while Run runs: Track starts tasks, and its callers have no context
	tasks map[string]*task
	slots map[slot]chan struct{} // semaphores in use
	wg    sync.WaitGroup

	// What the next started tasks get:
	local     string // nodename of the local machine
	dialLocal func() (talosapi.State, error)
}

// task is the goroutine that follows the machine of one Node.
type task struct {
	addresses []netip.Addr
	dialLocal func() (talosapi.State, error) // nil unless the machine is the local one
	cancel    context.CancelFunc             // nil if the task was not started
	done      chan struct{}
	outage    backoff.Outage // only the goroutine uses it
	unsteady  bool           // only the goroutine uses it
	// controlPlane has the facts that the last session published; only the goroutine uses it.
	controlPlane *machine.ControlPlane
	failed       atomic.Bool // whether the last attempt to connect to the first address failed

	// Under Reflector.mu:
	trust Trust
	node  bool            // the machine has a Node
	share *talosapi.Share // of the session whose view the inventory keeps; nil if there is none
	probe func()          // of the established session, if any
}

// slot is what a semaphore limits: the sessions at an address, or the machines that are read for the first time.
type slot struct {
	addr     netip.Addr // zero for the machines that are read for the first time
	trust    Trust
	unsteady bool // as in task
}

// New returns a Reflector that tracks no Node yet.
func New(inventory Inventory, dial talosapi.DialFunc, clk clock.Clock) *Reflector {
	return &Reflector{
		inventory: inventory,
		dial:      dial,
		clock:     clk,
		budget:    talosapi.Budget{Own: ownShare, Common: commonShare},
		tasks:     map[string]*task{},
		slots:     map[slot]chan struct{}{},
		Kinds:     machine.BaseKinds(),
	}
}

// Run starts the tasks of all tracked Nodes, including those tracked before the call. It returns when ctx is done and all tasks have ended.
func (r *Reflector) Run(ctx context.Context) {
	r.mu.Lock()
	r.ctx = ctx

	for nodename, t := range r.tasks {
		r.start(nodename, t.addresses)
	}
	r.mu.Unlock()

	<-ctx.Done()

	// From here on Track starts no tasks, so that the wait group does not grow during Wait.
	r.mu.Lock()
	r.ctx = nil
	r.mu.Unlock()

	r.wg.Wait()
}

// FollowNodes tracks every Node that reports Talos as its operating system until the Node is deleted.
func (r *Reflector) FollowNodes(informer coreinformers.NodeInformer) error {
	_, err := nodes.Watch(informer, func(before, after *corev1.Node) {
		if after == nil {
			r.Untrack(before.Name)

			return
		}

		if before != nil {
			r.nodeUpdated(before, after)
		}

		if nodespec.IsTalos(after) {
			r.Track(after.Name, nodespec.DialAddresses(after), trustIn(after))
		}
	})

	return err
}

// Trust is how well a Node is known, from what no kubelet can write.
type Trust int

const (
	// Unknown means that a bootstrap token suffices to register the Node. The zero value.
	Unknown Trust = iota
	// Known is as nodespec.IsKnown.
	Known
	// ControlPlane means that the Node has the label of the control plane.
	ControlPlane
)

func trustIn(node *corev1.Node) Trust {
	switch {
	case nodespec.IsControlPlane(node):
		return ControlPlane
	case nodespec.IsKnown(node):
		return Known
	default:
		return Unknown
	}
}

// nodeUpdated reconnects if the role of the Node has changed, or if it became ready and the last attempt to connect
// failed.
func (r *Reflector) nodeUpdated(before, after *corev1.Node) {
	switch {
	case nodespec.IsControlPlane(before) != nodespec.IsControlPlane(after):
		r.renew(before.Name, func(*task) bool { return true }) // the role decides how the machine is dialed
	case !nodespec.IsReady(before) && nodespec.IsReady(after):
		r.renew(before.Name, func(t *task) bool { return t.failed.Load() }) // the machine is back
	}
}

// Track follows the machine of the Node nodename at one of addresses. If the Node is already tracked, Track restarts the
// task for other addresses only. Machines of Unknown Nodes share a talosapi.Budget.
func (r *Reflector) Track(nodename string, addresses []netip.Addr, trust Trust) {
	r.mu.Lock()
	defer r.mu.Unlock()

	t := r.tasks[nodename]
	if t == nil || !slices.Equal(t.addresses, addresses) {
		t = r.start(nodename, slices.Clone(addresses))
	}

	t.trust, t.node = trust, true
	t.keep(t.share)
}

// TrackLocal follows the machine that this process runs on, also before it has a Node. dial connects to it, whatever the
// addresses of its Node.
func (r *Reflector) TrackLocal(nodename string, dial func() (talosapi.State, error)) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.local, r.dialLocal = nodename, dial

	var addresses []netip.Addr

	if old := r.tasks[nodename]; old != nil {
		addresses = old.addresses
	}

	r.start(nodename, addresses)
}

// Local returns the nodename of the local machine; an empty string before TrackLocal.
func (r *Reflector) Local() string {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.local
}

// renew dials the machine of a tracked Node again, if needed. Its entry in the inventory stays until then.
func (r *Reflector) renew(nodename string, needed func(*task) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if t := r.tasks[nodename]; t != nil && needed(t) {
		r.start(nodename, t.addresses)
	}
}

// Probe marks the machine of the Node nodename as unreachable within a few seconds if it accepts no further connection. A
// session with a machine that has lost power would last for two minutes. Probe does nothing without an established
// session, and does not block.
func (r *Reflector) Probe(nodename string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if t := r.tasks[nodename]; t != nil && t.probe != nil {
		go t.probe()
	}
}

// Untrack stops following the machine of the Node nodename and removes it from the inventory. It follows the local machine
// without a Node.
func (r *Reflector) Untrack(nodename string) {
	r.mu.Lock()
	old := r.tasks[nodename]
	delete(r.tasks, nodename)
	r.mu.Unlock()

	if old == nil {
		return
	}

	old.stop()
	r.inventory.Forget(nodename)
	old.share.Release()

	r.mu.Lock()
	defer r.mu.Unlock()

	if nodename == r.local && r.tasks[nodename] == nil {
		r.start(nodename, nil)
	}
}

// start replaces the task of a Node, if any, by one that begins after it has ended. Outside of Run it does not start the
// task. The caller holds r.mu.
func (r *Reflector) start(nodename string, addresses []netip.Addr) *task {
	old, t := r.tasks[nodename], &task{addresses: addresses, done: make(chan struct{})}
	r.tasks[nodename] = t

	if old != nil {
		t.trust, t.node = old.trust, old.node
	}

	if nodename == r.local {
		t.dialLocal = r.dialLocal
	}

	if r.ctx == nil {
		return t
	}

	ctx, cancel := context.WithCancel(r.ctx)
	t.cancel = cancel

	r.wg.Go(func() {
		defer close(t.done)
		defer cancel()

		old.stop()

		if old != nil {
			t.outage, t.unsteady, t.controlPlane = old.outage, old.unsteady, old.controlPlane
			t.failed.Store(old.failed.Load())

			r.mu.Lock()
			t.keep(old.share)
			r.mu.Unlock()

			// Otherwise a kubelet that changes its addresses fast enough could keep the outcome open.
			if len(old.addresses) > 0 && !slices.Equal(old.addresses, t.addresses) && r.inventory.Get(nodename).Condition == inventory.Unknown {
				r.inventory.MarkUnreachable(nodename, "the addresses of the Node changed before its machine responded")
			}
		}

		r.follow(klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "node", nodename)), nodename, t)
	})

	return t
}

// stop ends the task and waits for it. It does nothing for a task that is nil or was not started.
func (t *task) stop() {
	if t != nil && t.cancel != nil {
		t.cancel()
		<-t.done
	}
}

// follow connects to the machine at one of its addresses, and reconnects until ctx is done.
func (r *Reflector) follow(ctx context.Context, nodename string, t *task) {
	delays := backoff.New(backoffFirst, backoffMax)

	for ctx.Err() == nil {
		started := r.clock.Now()
		t.outage.Try(started)

		established, err := r.watchAny(ctx, nodename, t)
		if ctx.Err() != nil {
			return
		}

		wasUnsteady := t.unsteady
		if t.unsteady = !established || r.clock.Since(started) < shortSession; !t.unsteady {
			delays = backoff.New(backoffFirst, backoffMax)
		}

		var delay time.Duration

		// A machine that exceeds a limit would do so again soon.
		if established && status.Code(err) != codes.ResourceExhausted {
			// The last view stays current until a reconnect fails.
			if !errors.Is(err, errSessionExpired) {
				restarts.Inc()
			}

			klog.FromContext(ctx).V(2).Info("Watches of machine ended; reconnecting", "err", textOf(err))

			delay = wait.Jitter(reconnectDelay, reconnectJitter)
			if t.unsteady && wasUnsteady {
				delay = min(delays.Step(), r.maxDelay(t))
			}
		} else {
			r.report(t.outage.Failed(klog.FromContext(ctx), r.clock.Now()), nodename, t, err)

			t.failed.Store(true)

			delay = min(delays.Step(), r.maxDelay(t))
		}

		backoff.Sleep(ctx, r.clock, delay)
	}
}

// maxDelay limits the delay after a failed attempt. The whole cluster depends on the facts of control-plane machines.
func (r *Reflector) maxDelay(t *task) time.Duration {
	switch {
	case r.trustOf(t) != ControlPlane:
		return math.MaxInt64
	case t.controlPlane.IsComplete():
		return factsInterval
	default:
		return factsRetryMax
	}
}

// watchAny tries the addresses in order until a session was established at one of them. It returns when that session ends.
func (r *Reflector) watchAny(ctx context.Context, nodename string, t *task) (established bool, err error) {
	addresses := t.addresses
	if t.dialLocal != nil {
		addresses = []netip.Addr{localAddress}
	}

	if len(addresses) == 0 {
		return false, errors.New("node has no address to connect to")
	}

	var errs []error

	for _, addr := range addresses {
		established, err := r.watch(ctx, nodename, addr, t)
		if established || ctx.Err() != nil {
			return established, err
		}

		errs = append(errs, err)
	}

	return false, errors.Join(errs...)
}

func (r *Reflector) watch(ctx context.Context, nodename string, addr netip.Addr, t *task) (established bool, err error) {
	trust := r.trustOf(t)

	var share *talosapi.Share
	if trust == Unknown {
		share = r.budget.NewShare()
	}

	defer func() {
		if !established {
			share.Release()
		}
	}()

	st, err := r.connect(talosapi.WithShare(ctx, share), nodename, addr, t)
	if err != nil {
		return false, err
	}

	defer st.Close() //nolint:errcheck // no call is in flight

	release, leave, err := r.enter(ctx, slot{addr, trust, t.unsteady})
	if err != nil {
		return false, err
	}
	defer leave()

	ctx, cancel := context.WithCancel(ctx)

	defer func() {
		cancel()
		r.mu.Lock()
		defer r.mu.Unlock()

		t.probe = nil
	}()

	s := r.newSession(nodename, addr, t, st)
	s.release = release
	s.connected = func() {
		t.failed.Store(t.dialLocal == nil && addr != t.addresses[0])
		t.outage.Succeeded(klog.FromContext(ctx)).Info("Watching machine", "address", addr)

		r.mu.Lock()
		defer r.mu.Unlock()

		t.keep(share)

		if !s.isLocal() {
			t.probe = func() { s.probe(ctx) }
		}
	}

	established, err = s.run(ctx)
	if established || s.controlPlane == nil { // else the facts may be of another machine
		t.controlPlane = s.controlPlane
	}

	// An established session that has used up its share by polling is renewed.
	if exceeded := share.Err(); exceeded != nil && established {
		err = errSessionExpired
	} else if exceeded != nil {
		err = exceeded
	}

	return established, err
}

func (r *Reflector) connect(ctx context.Context, nodename string, addr netip.Addr, t *task) (talosapi.State, error) {
	if t.dialLocal == nil {
		return r.dial(ctx, nodename, addr)
	}

	st, err := t.dialLocal()

	return talosapi.ControlPlane{State: st, Local: true}, err
}

// newSession returns a session that has not begun. A session with a control-plane machine has the last facts.
func (r *Reflector) newSession(nodename string, addr netip.Addr, t *task, st talosapi.State) *session {
	s := &session{
		inventory:    r.inventory,
		clock:        r.clock,
		nodename:     nodename,
		addr:         addr,
		addresses:    t.addresses,
		state:        st,
		kinds:        r.Kinds,
		view:         machine.View{Facts: r.Kinds.Facts},
		interval:     pollFirst,
		readsMembers: r.ReadsMembers,
		retries:      backoff.New(factsRetryFirst, factsRetryMax),
	}

	if dialed, ok := st.(talosapi.ControlPlane); ok {
		last := ptr.Deref(t.controlPlane, machine.ControlPlane{})
		last.Local = dialed.Local
		s.controlPlane = &last
	}

	return s
}

func (r *Reflector) trustOf(t *task) Trust {
	r.mu.Lock()
	defer r.mu.Unlock()

	if t.dialLocal != nil {
		return ControlPlane
	}

	return t.trust
}

// keep releases the share of the view that the inventory no longer has. Nodes that are known need none. The caller holds
// Reflector.mu.
func (t *task) keep(share *talosapi.Share) {
	if t.share != share {
		t.share.Release()
	}

	if t.share = share; t.trust != Unknown {
		share.Release()
	}
}

// enter waits until a session may begin. release lets another machine be read for the first time, and leave ends the
// session.
func (r *Reflector) enter(ctx context.Context, key slot) (release, leave func(), err error) {
	expired := r.clock.NewTimer(addressTime)
	defer expired.Stop()

	free, err := r.acquire(ctx, slot{addr: key.addr, trust: key.trust}, maxPerAddress, expired.C())
	if err != nil {
		return nil, nil, err
	}

	release, err = r.acquire(ctx, slot{trust: key.trust, unsteady: key.unsteady}, maxConnecting, nil)
	if err != nil {
		free()

		return nil, nil, err
	}

	return release, func() { release(); free() }, nil
}

// acquire waits for one of n places, at most until expired. release does nothing when it is called again.
func (r *Reflector) acquire(ctx context.Context, key slot, n int, expired <-chan time.Time) (release func(), err error) {
	r.mu.Lock()

	places := r.slots[key]
	if places == nil {
		places = make(chan struct{}, n)
		r.slots[key] = places
	}

	r.mu.Unlock()

	select {
	case places <- struct{}{}:
	case <-expired:
		return nil, fmt.Errorf("%d other Nodes have the address %s", n, key.addr)
	case <-ctx.Done():
		return nil, ctx.Err()
	}

	return sync.OnceFunc(func() {
		r.mu.Lock()
		defer r.mu.Unlock()

		<-places

		if len(places) == 0 && r.slots[key] == places {
			delete(r.slots, key) // a goroutine that waits for a place keeps its semaphore
		}
	}), nil
}

// report records in the inventory why the machine could not be followed.
func (r *Reflector) report(logger klog.Logger, nodename string, t *task, err error) {
	r.mu.Lock()
	hasNode := t.node
	r.mu.Unlock()

	if mismatch := (*mismatchError)(nil); errors.As(err, &mismatch) {
		logger.Info("Machine at the Node's address reports another nodename", "address", mismatch.addr, "nodename", mismatch.nodename)

		if !hasNode { // a renamed local machine: without a Node, no deletion would ever end the entry
			r.inventory.Forget(nodename)

			return
		}

		r.inventory.MarkMismatch(nodename, mismatch.nodename, mismatch.Error())

		return
	}

	logger.Info("Machine is unreachable", "err", textOf(err))
	r.inventory.MarkUnreachable(nodename, textOf(err))
}

// textOf returns the text of an error, of which a machine may have written any part.
func textOf(err error) string { return events.Truncate(strings.ReplaceAll(err.Error(), "\n", "; ")) }
