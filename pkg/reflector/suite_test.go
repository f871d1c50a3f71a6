package reflector_test

import (
	"crypto/tls"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/role"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

const (
	// patience bounds every wait for something that must happen. It costs nothing when all is well.
	patience = 2 * time.Minute

	// atOnce is what the product promises for a change that is watched, by the product's clock: how long a busy machine takes over it says
	// nothing of the product.
	atOnce = time.Second
)

// suite is a cluster of machines and a running reflector with its inventory.
type suite struct {
	cluster   *talostest.Cluster
	reader    reader
	inventory *recorder
	reflector *reflector.Reflector

	mu     sync.Mutex
	dialed []netip.Addr
}

// newSuite starts a reflector on a clock. It has ended when the test has.
func newSuite(t *testing.T, clk clock.Clock) *suite {
	t.Helper()

	cluster, err := talostest.New(talostest.Options{})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(cluster.Close)

	config, err := cluster.ClientTLS(string(role.Reader))
	if err != nil {
		t.Fatal(err)
	}

	s := &suite{
		cluster:   cluster,
		reader:    reader{config},
		inventory: &recorder{Inventory: inventory.New(clk.Now), views: map[string][]machine.Machine{}},
	}
	s.run(t, s.dial, clk)

	return s
}

// run starts a reflector that takes the place of the suite's.
func (s *suite) run(t *testing.T, dial talosapi.DialFunc, clk clock.Clock) {
	t.Helper()

	refl := reflector.New(s.inventory, dial, clk)
	s.reflector = refl

	done := make(chan struct{})

	go func() {
		defer close(done)

		refl.Run(t.Context())
	}()

	t.Cleanup(func() {
		select {
		case <-done:
		case <-time.After(patience):
			t.Error("the reflector did not end with its context")
		}
	})
}

// newRealSuite runs on the system's clock.
func newRealSuite(t *testing.T) *suite {
	t.Helper()

	return newSuite(t, clock.RealClock{})
}

// newTimedSuite runs on a clock that stands still until it is stepped.
func newTimedSuite(t *testing.T) (*suite, *clocktesting.FakeClock) {
	t.Helper()

	clk := clocktesting.NewFakeClock(time.Now())

	return newSuite(t, clk), clk
}

func (s *suite) dial(_ string, addr netip.Addr) (talosapi.State, error) {
	s.mu.Lock()
	s.dialed = append(s.dialed, addr)
	s.mu.Unlock()

	return talosapi.Dial(s.reader, addr)
}

// dials are the addresses that were dialed, in order.
func (s *suite) dials() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()

	return slices.Clone(s.dialed)
}

// countingClock counts how often a timer of its was set anew.
type countingClock struct {
	*clocktesting.FakeClock

	resets atomic.Int64
}

func (c *countingClock) NewTimer(d time.Duration) clock.Timer {
	return countingTimer{c.FakeClock.NewTimer(d), &c.resets}
}

type countingTimer struct {
	clock.Timer

	resets *atomic.Int64
}

func (t countingTimer) Reset(d time.Duration) bool {
	defer t.resets.Add(1)

	return t.Timer.Reset(d)
}

// reader are credentials for os:reader.
type reader struct{ config *tls.Config }

func (r reader) TLSConfig() (*tls.Config, error) { return r.config.Clone(), nil }

func (s *suite) add(t *testing.T, spec talostest.MachineSpec) *talostest.Machine {
	t.Helper()

	m, err := s.cluster.AddMachine(spec)
	if err != nil {
		t.Fatal(err)
	}

	return m
}

func (s *suite) addWorker(t *testing.T) *talostest.Machine {
	t.Helper()

	return s.add(t, talostest.MachineSpec{Nodename: "worker-1"})
}

// track tracks a machine under its own name and address.
func (s *suite) track(m *talostest.Machine) {
	s.reflector.Track(m.Nodename(), []netip.Addr{m.Address()})
}

// follow tracks a machine and waits until it is being watched.
func (s *suite) follow(t *testing.T, m *talostest.Machine) {
	t.Helper()

	s.track(m)
	s.await(t, m.Nodename(), inventory.Current)
}

// await waits for the condition of a machine, and returns the entry that has it.
func (s *suite) await(t *testing.T, nodename string, want inventory.Condition) inventory.Entry {
	t.Helper()

	var entry inventory.Entry

	eventually(t, nodename+" is "+want.String(), func() bool {
		entry = s.inventory.Get(nodename)

		return entry.Condition == want
	})

	return entry
}

// awaitView waits until the current view of a machine is as wanted.
func (s *suite) awaitView(t *testing.T, nodename string, want func(machine.Machine) bool) {
	t.Helper()

	eventually(t, "the view of "+nodename+" is as wanted", func() bool {
		entry := s.inventory.Get(nodename)

		return entry.Condition == inventory.Current && want(entry.Machine)
	})
}

// awaitChange waits until the session has heard of one change, and lets no more time pass than the product has to tell of it.
func awaitChange(t *testing.T, clk *clocktesting.FakeClock) {
	t.Helper()
	eventually(t, "the change is waiting for others", func() bool { return clk.Waiters() == watchingTimers+1 })
	clk.Step(atOnce)
}

// eventually waits for a condition that no channel announces.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()

	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()

	deadline := time.After(patience)

	for !condition() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("waited %s in vain until %s", patience, what)
		}
	}
}

// must ends the test if a change of a machine fails.
func must(t *testing.T, err error) {
	t.Helper()

	if err != nil {
		t.Fatal(err)
	}
}

// recorder is an inventory that remembers all it was told.
type recorder struct {
	*inventory.Inventory

	mu          sync.Mutex
	views       map[string][]machine.Machine
	unreachable []string
}

func (r *recorder) Replace(nodename string, m machine.Machine) {
	r.mu.Lock()
	r.views[nodename] = append(r.views[nodename], m)
	r.mu.Unlock()

	r.Inventory.Replace(nodename, m)
}

func (r *recorder) MarkUnreachable(nodename, reason string) {
	r.mu.Lock()
	r.unreachable = append(r.unreachable, nodename+": "+reason)
	r.mu.Unlock()

	r.Inventory.MarkUnreachable(nodename, reason)
}

// viewsOf are all views of a machine that were ever published.
func (r *recorder) viewsOf(nodename string) []machine.Machine {
	r.mu.Lock()
	defer r.mu.Unlock()

	return slices.Clone(r.views[nodename])
}

// complaints are all marks of unreachability, in order.
func (r *recorder) complaints() []string {
	r.mu.Lock()
	defer r.mu.Unlock()

	return slices.Clone(r.unreachable)
}
