package reflector_test

import (
	"context"
	"fmt"
	"net/netip"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// followers counts the goroutines that follow machines: those that began in the packages under test, or in the gRPC and COSI clients.
// It must not run beside other tests.
func followers(t *testing.T) int {
	t.Helper()

	var stacks strings.Builder

	must(t, pprof.Lookup("goroutine").WriteTo(&stacks, 2))

	count := 0

	for stack := range strings.SplitSeq(stacks.String(), "\n\n") {
		_, origin, _ := strings.Cut(stack, "created by ")

		for _, client := range []string{"talos-ccm/pkg/reflector.", "pkg/state/protobuf/client.", "grpc.newClientStream", "transport.NewHTTP2Client"} {
			if strings.Contains(origin, client) {
				count++
			}
		}
	}

	return count
}

func TestUntrackLeavesNoGoroutine(t *testing.T) {
	s := newRealSuite(t)

	var machines []*talostest.Machine

	for i := range 5 {
		m := s.add(t, talostest.MachineSpec{Nodename: fmt.Sprintf("worker-%d", i)})
		s.follow(t, m)
		machines = append(machines, m)
	}

	if got := followers(t); got < len(machines) {
		t.Fatalf("%d goroutines follow %d machines: the test does not see them", got, len(machines))
	}

	for _, m := range machines {
		s.reflector.Untrack(m.Nodename())
	}

	eventually(t, "nothing follows any machine", func() bool { return followers(t) == 0 })
}

func TestWhatWasTrackedBeforeRunIsFollowed(t *testing.T) {
	s := newRealSuite(t)
	worker, gone := s.addWorker(t), s.add(t, talostest.MachineSpec{Nodename: "gone"})
	late := reflector.New(s.inventory, s.dial, clock.RealClock{})

	late.Track(worker.Nodename(), []netip.Addr{worker.Address()})
	late.Track(gone.Nodename(), []netip.Addr{gone.Address()})
	late.Untrack(gone.Nodename())

	go late.Run(t.Context())

	s.await(t, worker.Nodename(), inventory.Current)

	if got := gone.Calls(); len(got) != 0 {
		t.Errorf("a machine that is not tracked was asked: %v", got)
	}
}

func TestRunEndsWithAllTasksAndTrackingGoesOnToDoNothing(t *testing.T) {
	s := newRealSuite(t)
	worker := s.addWorker(t)

	for range 20 {
		refl := reflector.New(s.inventory, s.dial, clock.RealClock{})
		ctx, cancel := context.WithCancel(t.Context())

		var group sync.WaitGroup

		group.Go(func() { refl.Run(ctx) })
		group.Go(func() {
			for i := range 100 {
				refl.Track(fmt.Sprintf("node-%d", i), []netip.Addr{worker.Address()})

				if i == 50 {
					cancel()
				}
			}
		})
		group.Wait()

		refl.Track(worker.Nodename(), []netip.Addr{worker.Address()})
		refl.Untrack(worker.Nodename())
	}

	requireNoConnections(t, worker)
}

func TestThreeHundredMachinesSettle(t *testing.T) {
	const count = 300

	// No time passes while any machine is being connected to: that they settle must not be a matter of trying again.
	s, clk := newTimedSuite(t)

	for i := range count {
		s.add(t, talostest.MachineSpec{Nodename: fmt.Sprintf("node-%03d", i)})
	}

	began := time.Now()

	for _, m := range s.cluster.Machines() {
		s.track(m)
	}

	eventually(t, "all machines are current", func() bool {
		current := s.inventory.Count(inventory.Current)

		if waiting := count - current; waiting > 0 && clk.Waiters() == watchingTimers*current+waiting {
			clk.Step(time.Second) // all others wait for their next attempt
		}

		return current == count
	})
	t.Logf("%d machines settled within %s", count, time.Since(began).Round(10*time.Millisecond))

	if got := slices.DeleteFunc(s.inventory.complaints(), cutShort); len(got) != 0 {
		t.Errorf("all machines were up, and still: %q", got)
	}

	for _, m := range s.cluster.Machines() {
		for _, view := range s.inventory.viewsOf(m.Nodename()) {
			if view.Nodename != m.Nodename() || !view.HasAddress(m.Address()) {
				t.Errorf("a view of %s is %+v", m.Nodename(), view)
			}
		}
	}

	// They all hear of changes, too.
	for _, m := range s.cluster.Machines() {
		setZone(t, m, "zone-2")
	}

	for _, m := range s.cluster.Machines() {
		eventually(t, m.Nodename()+" is seen in its new zone", func() bool {
			clk.Step(time.Millisecond) // what came together is published together, a moment later

			return inZone("zone-2")(s.inventory.Get(m.Nodename()).Machine)
		})
	}
}

// cutShort tells whether a connection was given up by gRPC, which gives a handshake 20 seconds by the system's clock: where others work too, a
// hundred at once can take longer.
func cutShort(complaint string) bool {
	return strings.Contains(complaint, "authentication handshake failed: context deadline exceeded") ||
		(strings.Contains(complaint, "error reading server preface") && strings.Contains(complaint, "use of closed network connection"))
}
