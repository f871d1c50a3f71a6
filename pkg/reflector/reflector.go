// Package reflector keeps the inventory true: one task per Node dials the Node's machine, checks that it is that machine, and
// watches it.
//
// It reads Talos and writes the inventory. It never writes to Kubernetes and never decides what a Node should look like.
package reflector

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// Inventory is where the views go.
type Inventory interface {
	Replace(nodename string, m machine.Machine)
	MarkUnreachable(nodename, reason string)
	MarkMismatch(nodename, reason string)
	Forget(nodename string)
}

// maxConnecting bounds how many machines are being connected to at once: a TLS handshake costs both sides.
const maxConnecting = 128

// Reflector runs one task per tracked Node. Use New.
type Reflector struct {
	inventory  Inventory
	dial       talosapi.DialFunc
	clock      clock.Clock
	connecting chan struct{}

	mu    sync.Mutex
	ctx   context.Context //nolint:containedctx // set while Run runs: tasks are started by Track, whose callers have no context
	tasks map[string]*running
	wg    sync.WaitGroup
}

type running struct {
	addresses []netip.Addr
	stop      context.CancelFunc
	done      chan struct{}
}

// New makes a Reflector that tracks nothing yet.
func New(inventory Inventory, dial talosapi.DialFunc, clk clock.Clock) *Reflector {
	return &Reflector{
		inventory:  inventory,
		dial:       dial,
		clock:      clk,
		connecting: make(chan struct{}, maxConnecting),
		tasks:      map[string]*running{},
	}
}

// Run starts the tasks of all tracked Nodes, of those tracked before too, and returns when ctx has ended and all tasks with it.
func (r *Reflector) Run(ctx context.Context) {
	r.mu.Lock()
	r.ctx = ctx

	for nodename, task := range r.tasks {
		r.tasks[nodename] = r.start(nodename, task.addresses, nil)
	}
	r.mu.Unlock()

	<-ctx.Done()

	// Who tracks a Node from now on is heard but starts nothing: the tasks that are to be waited for are all there.
	r.mu.Lock()
	r.ctx = nil
	r.mu.Unlock()

	r.wg.Wait()
}

// Track watches nodename's machine, to be found at one of addresses. Tracking it again with the same addresses does nothing; with
// others it starts over.
func (r *Reflector) Track(nodename string, addresses []netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()

	old := r.tasks[nodename]
	if old != nil && slices.Equal(old.addresses, addresses) {
		return
	}

	r.tasks[nodename] = r.start(nodename, slices.Clone(addresses), old)
}

// Untrack stops watching nodename's machine and has the inventory forget it.
func (r *Reflector) Untrack(nodename string) {
	r.mu.Lock()
	old := r.tasks[nodename]
	delete(r.tasks, nodename)
	r.mu.Unlock()

	if old == nil {
		return
	}

	if old.stop != nil {
		old.stop()
		<-old.done
	}

	r.inventory.Forget(nodename)
}

// start starts a task, after its predecessor has ended; before and after Run it only takes note. r.mu is held.
func (r *Reflector) start(nodename string, addresses []netip.Addr, old *running) *running {
	next := &running{addresses: addresses, done: make(chan struct{})}

	if r.ctx == nil {
		return next
	}

	ctx, stop := context.WithCancel(r.ctx)
	next.stop = stop

	t := &task{
		Reflector: r,
		nodename:  nodename,
		addresses: slices.Clone(addresses),
		backoff:   newBackoff(),
	}

	r.wg.Go(func() {
		defer close(next.done)
		defer stop()

		if old != nil && old.stop != nil {
			old.stop()
			<-old.done
		}

		t.run(klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "node", nodename)))
	})

	return next
}

const (
	backoffFirst = time.Second
	backoffMax   = time.Minute
)

func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: backoffFirst, Factor: 2, Jitter: 0.3, Steps: 10, Cap: backoffMax}
}
