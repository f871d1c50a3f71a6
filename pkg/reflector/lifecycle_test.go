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

// followers counts the goroutines that follow machines, which are those created by the reflector or the gRPC and COSI clients.
// Tests that call it must not run in parallel.
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

func TestUntrack_LeaksNoGoroutine(t *testing.T) {
	s := newRealSuite(t)

	var machines []*talostest.Machine

	for i := range 5 {
		m := s.add(t, talostest.MachineSpec{Nodename: fmt.Sprintf("worker-%d", i)})
		s.follow(t, m)
		machines = append(machines, m)
	}

	if got := followers(t); got < len(machines) {
		t.Fatalf("found %d goroutines for %d machines; the test does not recognize them", got, len(machines))
	}

	for _, m := range machines {
		s.reflector.Untrack(m.Nodename())
	}

	eventually(t, "no goroutine follows a machine", func() bool { return followers(t) == 0 })
}

func TestRun_StartsNodesTrackedBefore(t *testing.T) {
	s := newRealSuite(t)
	worker, gone := s.addWorker(t), s.add(t, talostest.MachineSpec{Nodename: "gone"})
	late := reflector.New(s.inventory, s.dial, clock.RealClock{})

	late.Track(worker.Nodename(), []netip.Addr{worker.Address()})
	late.Track(gone.Nodename(), []netip.Addr{gone.Address()})
	late.Untrack(gone.Nodename())

	go late.Run(t.Context())

	s.await(t, worker.Nodename(), inventory.Current)

	if got := gone.Calls(); len(got) != 0 {
		t.Errorf("untracked machine was called: %v", got)
	}
}

func TestRun_WaitsForTasksAndTrackAfterwardsStartsNone(t *testing.T) {
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

func TestReflector_ConnectsTo300Machines(t *testing.T) {
	const count = 300

	// The clock stands still while machines are being connected to, so that retries cannot hide failures.
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

		if pending := count - current; pending > 0 && clk.Waiters() == watchingTimers*current+pending {
			clk.Step(time.Second) // all others wait for their next attempt
		}

		return current == count
	})
	t.Logf("%d machines became current within %s", count, time.Since(began).Round(10*time.Millisecond))

	if got := slices.DeleteFunc(s.inventory.unreachableMarks(), isHandshakeTimeout); len(got) != 0 {
		t.Errorf("unexpected unreachable marks: %q", got)
	}

	for _, m := range s.cluster.Machines() {
		for _, view := range s.inventory.viewsOf(m.Nodename()) {
			if view.Nodename != m.Nodename() || !view.HasAddress(m.Address()) {
				t.Errorf("wrong view of %s: %+v", m.Nodename(), view)
			}
		}
	}

	// Changes of all machines arrive.
	for _, m := range s.cluster.Machines() {
		setZone(t, m, "zone-2")
	}

	for _, m := range s.cluster.Machines() {
		eventually(t, m.Nodename()+" is in its new zone", func() bool {
			clk.Step(time.Millisecond) // debounce

			return inZone("zone-2")(s.inventory.Get(m.Nodename()).Machine)
		})
	}
}

// isHandshakeTimeout reports whether gRPC gave up a handshake after 20 seconds of system time, which a busy host can exceed with a hundred
// concurrent handshakes.
func isHandshakeTimeout(mark string) bool {
	return strings.Contains(mark, "authentication handshake failed: context deadline exceeded") ||
		(strings.Contains(mark, "error reading server preface") && strings.Contains(mark, "use of closed network connection"))
}
