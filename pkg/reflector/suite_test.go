package reflector_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/require"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

const (
	// debounce is the product's, and answerTimeout is slightly longer than the product's.
	debounce      = 15 * time.Millisecond
	answerTimeout = 31 * time.Second

	// firstPoll, nextPoll and longestSession are upper bounds that include jitter. The first is for a machine that is booting.
	firstPoll      = 12 * time.Second
	nextPoll       = 12 * time.Minute
	longestSession = 46 * time.Minute

	// places is how many machines can connect at the same time, and perAddress how many at one address. Others wait for
	// addressTime there.
	places      = 32
	perAddress  = 4
	addressTime = 10 * time.Second

	// startingTimers and watchingTimers are the numbers of timers of a session that waits for the first answer and of an
	// idle one: next poll and expiry.
	startingTimers = 4
	watchingTimers = 2
)

// suite is a simulated cluster and a running reflector with its inventory.
type suite struct {
	*testing.T

	talos     *talostest.Cluster
	reader    talosapi.DialFunc
	clock     *clocktesting.FakeClock // nil if the reflector uses the system's
	inventory *recorder
	reflector *reflector.Reflector
	log       klog.Logger // buffered

	mu     sync.Mutex
	dialed []netip.Addr
}

// newSuite starts a reflector with the given clock. It stops with the test.
func newSuite(t *testing.T, clk clock.Clock) *suite {
	t.Helper()

	s := &suite{
		T:         t,
		talos:     ctest.NewTalos(t, talostest.Options{}),
		inventory: &recorder{Inventory: inventory.New(clk.Now), views: map[string][]machine.Machine{}},
		log:       ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true))),
	}
	s.reader = ctest.Dial(s.talos)
	s.run(s.dial, clk)

	return s
}

// run starts a reflector that replaces the suite's.
func (s *suite) run(dial talosapi.DialFunc, clk clock.Clock) {
	s.Helper()

	refl := reflector.New(s.inventory, dial, clk)
	s.reflector = refl

	done := make(chan struct{})

	go func() {
		defer close(done)

		refl.Run(klog.NewContext(s.Context(), s.log))
	}()

	s.Cleanup(func() { ctest.Receive(s, done, "the reflector has stopped with its context") })
}

// newRealSuite uses the system clock.
func newRealSuite(t *testing.T) *suite {
	t.Helper()

	return newSuite(t, clock.RealClock{})
}

// newTimedSuite uses a fake clock.
func newTimedSuite(t *testing.T) *suite {
	t.Helper()

	clk := clocktesting.NewFakeClock(time.Now())
	s := newSuite(t, clk)
	s.clock = clk

	return s
}

// watching returns a suite with a fake clock, and a machine whose session is idle.
func watching(t *testing.T) (*suite, *talostest.Machine) {
	t.Helper()

	s := newTimedSuite(t)
	m := s.machine("worker-1")
	s.settle(m)

	return s, m
}

func (s *suite) dial(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
	s.mu.Lock()
	s.dialed = append(s.dialed, addr)
	s.mu.Unlock()

	return s.reader(ctx, nodename, addr)
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

// logged returns the values of all messages that the reflector has logged.
func (s *suite) logged() (values []string) {
	sink, _ := s.log.GetSink().(ktesting.Underlier)

	for _, entry := range sink.GetBuffer().Data() {
		values = append(values, fmt.Sprint(entry.ParameterKVList...))
	}

	return values
}

func (s *suite) add(spec talostest.MachineSpec) *talostest.Machine {
	s.Helper()

	m, err := s.talos.AddMachine(spec)
	require.NoError(s, err)

	return m
}

func (s *suite) machine(nodename string) *talostest.Machine {
	s.Helper()

	return s.add(talostest.MachineSpec{Nodename: nodename})
}

func (s *suite) booting() *talostest.Machine {
	s.Helper()

	m := s.machine("worker-1")
	require.NoError(s, m.SetStage(s.Context(), runtime.MachineStageBooting))

	return m
}

func (s *suite) setZone(m *talostest.Machine, zone string) {
	s.Helper()
	require.NoError(s, m.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone = zone }))
}

func inZone(zone string) func(machine.Machine) bool {
	return func(m machine.Machine) bool { return m.Platform.Zone == zone }
}

// track tracks a machine under its own nodename, at its own address or those given.
func (s *suite) track(m *talostest.Machine, addresses ...netip.Addr) {
	if len(addresses) == 0 {
		addresses = []netip.Addr{m.Address()}
	}

	s.reflector.Track(m.Nodename(), addresses, reflector.Unknown)
}

// follow tracks a machine and waits until it is watched.
func (s *suite) follow(m *talostest.Machine) {
	s.Helper()
	s.track(m)
	s.await(m.Nodename(), inventory.Current)
}

// settle tracks a machine and waits until it is watched and its session is idle.
func (s *suite) settle(m *talostest.Machine) {
	s.Helper()
	s.follow(m)
	s.awaitIdle()
}

func (s *suite) awaitIdle() {
	s.Helper()
	s.eventually("the session is idle", func() bool { return s.clock.Waiters() == watchingTimers })
}

func (s *suite) get(m *talostest.Machine) inventory.Entry { return s.inventory.Get(m.Nodename()) }

// views returns all published views of a machine.
func (s *suite) views(m *talostest.Machine) []machine.Machine {
	return s.inventory.viewsOf(m.Nodename())
}

// await waits until a machine has the wanted condition and returns its inventory entry.
func (s *suite) await(nodename string, want inventory.Condition) (entry inventory.Entry) {
	s.Helper()
	s.eventually(nodename+" is "+want.String(), func() bool {
		entry = s.inventory.Get(nodename)

		return entry.Condition == want
	})

	return entry
}

// awaitView waits until the current view of a machine satisfies want.
func (s *suite) awaitView(m *talostest.Machine, want func(machine.Machine) bool) {
	s.Helper()
	s.eventually("the view of "+m.Nodename()+" has changed", func() bool {
		entry := s.get(m)

		return entry.Condition == inventory.Current && want(entry.Machine)
	})
}

// awaitChange is awaitView for a change that is published soon. It steps the clock too little for the next poll.
func (s *suite) awaitChange(m *talostest.Machine, want func(machine.Machine) bool) {
	s.Helper()
	s.stepDebounce("the view of "+m.Nodename()+" has changed", func() bool {
		entry := s.get(m)

		return entry.Condition == inventory.Current && want(entry.Machine)
	})
}

// stepDebounce advances the clock by the debounce while changes are pending, until condition holds.
func (s *suite) stepDebounce(what string, condition func() bool) {
	s.Helper()
	s.eventually(what, func() bool {
		if s.clock.Waiters() > watchingTimers {
			s.clock.Step(debounce)
		}

		return condition()
	})
}

// stepUntil advances the clock in steps of a second while a task only waits for its next attempt, until condition holds.
func (s *suite) stepUntil(what string, condition func() bool) {
	s.Helper()
	s.eventually(what, func() bool {
		if condition() {
			return true
		}

		if s.clock.Waiters() == 1 {
			s.clock.Step(time.Second)
		}

		return false
	})
}

// stepUntilCurrent is stepUntil for a machine that is watched again.
func (s *suite) stepUntilCurrent(m *talostest.Machine, want func(machine.Machine) bool) {
	s.Helper()
	s.stepUntil("the machine is watched", func() bool {
		entry := s.get(m)

		return entry.Condition == inventory.Current && want(entry.Machine)
	})
}

func anything(machine.Machine) bool { return true }

// awaitSession waits until a session has started, which its timers show.
func (s *suite) awaitSession() {
	s.Helper()
	s.stepUntil("a session has started", func() bool { return s.clock.Waiters() > watchingTimers })
}

func (s *suite) awaitNoConnections(m *talostest.Machine) {
	s.Helper()
	s.eventually("no connection to "+m.Nodename()+" is open", func() bool { return m.Connections() == 0 && m.OpenStreams() == 0 })
}

// eventually checks a condition often, because conditions step the clock.
func (s *suite) eventually(what string, condition func() bool) {
	s.Helper()
	require.Eventually(s, condition, ctest.Timeout, 2*time.Millisecond, what)
}

// lists counts the List calls by resource type.
func lists(m *talostest.Machine) map[resource.Type]int {
	counts := map[resource.Type]int{}

	for _, call := range m.Calls() {
		if call.Method == "/cosi.resource.State/List" {
			counts[call.ResourceType]++
		}
	}

	return counts
}

// sessions returns the number of sessions that a machine was asked for.
func sessions(m *talostest.Machine) (count int) {
	for _, call := range m.Calls() {
		if call.ResourceType == runtime.MachineStatusType {
			count++
		}
	}

	return count
}

// recorder is an inventory that records calls.
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
