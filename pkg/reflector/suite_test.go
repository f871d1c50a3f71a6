package reflector_test

import (
	"context"
	"crypto/tls"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/role"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

const (
	// timeout limits every wait. It is generous because a passing test does not use it up.
	timeout = 2 * time.Minute

	// immediately is the longest time, by the product's clock, until a watched change is published.
	immediately = time.Second
)

// suite is a simulated cluster and a running reflector with its inventory.
type suite struct {
	cluster   *talostest.Cluster
	reader    reader
	inventory *recorder
	reflector *reflector.Reflector
	log       klog.Logger // buffered

	mu     sync.Mutex
	dialed []netip.Addr
}

// newSuite starts a reflector with the given clock. It stops with the test.
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
		log:       ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true))),
	}
	s.run(t, s.dial, clk)

	return s
}

// run starts a reflector that replaces the suite's.
func (s *suite) run(t *testing.T, dial talosapi.DialFunc, clk clock.Clock, facts ...string) {
	t.Helper()

	refl := reflector.New(s.inventory, dial, clk, facts...)
	s.reflector = refl

	done := make(chan struct{})

	go func() {
		defer close(done)

		refl.Run(klog.NewContext(t.Context(), s.log))
	}()

	t.Cleanup(func() {
		select {
		case <-done:
		case <-time.After(timeout):
			t.Error("reflector did not stop with its context")
		}
	})
}

// newRealSuite uses the system clock.
func newRealSuite(t *testing.T) *suite {
	t.Helper()

	return newSuite(t, clock.RealClock{})
}

// newTimedSuite uses a fake clock.
func newTimedSuite(t *testing.T) (*suite, *clocktesting.FakeClock) {
	t.Helper()

	clk := clocktesting.NewFakeClock(time.Now())

	return newSuite(t, clk), clk
}

func (s *suite) dial(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
	s.mu.Lock()
	s.dialed = append(s.dialed, addr)
	s.mu.Unlock()

	return talosapi.Dial(ctx, s.reader, addr)
}

// dials returns the dialed addresses in order.
func (s *suite) dials() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()

	return slices.Clone(s.dialed)
}

// visible returns the messages that the reflector has logged at the default level.
func (s *suite) visible() (messages []string) {
	sink, _ := s.log.GetSink().(ktesting.Underlier)

	for _, entry := range sink.GetBuffer().Data() {
		if entry.Verbosity == 0 {
			messages = append(messages, entry.Message)
		}
	}

	return messages
}

// countingClock counts timer resets.
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

// reader is a talosapi.Credentials with the role os:reader.
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

// track tracks a machine under its own nodename and address.
func (s *suite) track(m *talostest.Machine) {
	s.reflector.Track(m.Nodename(), []netip.Addr{m.Address()})
}

// follow tracks a machine and waits until it is watched.
func (s *suite) follow(t *testing.T, m *talostest.Machine) {
	t.Helper()

	s.track(m)
	s.await(t, m.Nodename(), inventory.Current)
}

// await waits until a machine has the wanted condition and returns its inventory entry.
func (s *suite) await(t *testing.T, nodename string, want inventory.Condition) inventory.Entry {
	t.Helper()

	var entry inventory.Entry

	eventually(t, nodename+" is "+want.String(), func() bool {
		entry = s.inventory.Get(nodename)

		return entry.Condition == want
	})

	return entry
}

// awaitView waits until the current view of a machine satisfies want.
func (s *suite) awaitView(t *testing.T, nodename string, want func(machine.Machine) bool) {
	t.Helper()

	eventually(t, "the view of "+nodename+" has changed", func() bool {
		entry := s.inventory.Get(nodename)

		return entry.Condition == inventory.Current && want(entry.Machine)
	})
}

// awaitChange is awaitView for a change that is published soon. It steps the clock too little for the next poll.
func (s *suite) awaitChange(t *testing.T, clk *clocktesting.FakeClock, nodename string, want func(machine.Machine) bool) {
	t.Helper()

	s.awaitView(t, nodename, func(m machine.Machine) bool {
		clk.Step(time.Millisecond)

		return want(m)
	})
}

// eventually polls until condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()

	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()

	deadline := time.After(timeout)

	for !condition() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("timed out after %s waiting until %s", timeout, what)
		}
	}
}

// must fails the test if err is not nil.
func must(t *testing.T, err error) {
	t.Helper()

	if err != nil {
		t.Fatal(err)
	}
}

// recorder is an inventory that records all calls.
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

// viewsOf returns all published views of a machine.
func (r *recorder) viewsOf(nodename string) []machine.Machine {
	r.mu.Lock()
	defer r.mu.Unlock()

	return slices.Clone(r.views[nodename])
}

// unreachableMarks returns the arguments of all MarkUnreachable calls in order.
func (r *recorder) unreachableMarks() []string {
	r.mu.Lock()
	defer r.mu.Unlock()

	return slices.Clone(r.unreachable)
}
