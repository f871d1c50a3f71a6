package reflector_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

func inZone(zone string) func(machine.Machine) bool {
	return func(m machine.Machine) bool { return m.Platform.Zone == zone }
}

func setZone(t *testing.T, m *talostest.Machine, zone string) {
	t.Helper()
	must(t, m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone = zone }))
}

func requireContains(t *testing.T, text string, parts ...string) {
	t.Helper()

	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%q does not contain %q", text, part)
		}
	}
}

func TestReflector_MarksStoppedMachineUnreachableAndRecovers(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.addWorker(t)
	s.follow(t, worker)

	before := s.inventory.Get(worker.Nodename())

	must(t, worker.Stop(t.Context()))

	entry := s.await(t, worker.Nodename(), inventory.Unreachable)
	requireContains(t, entry.Reason, worker.Address().String())

	if !entry.Machine.Equal(before.Machine) || entry.ObservedAt.IsZero() {
		t.Errorf("last view was not kept: %+v", entry)
	}

	setZone(t, worker, "zone-b")
	worker.Start()
	s.awaitView(t, worker.Nodename(), inZone("zone-b"))
}

func TestReflector_LogsLastingOutageOnce(t *testing.T) {
	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	awaitFailures := func(count int) {
		eventually(t, fmt.Sprintf("%d attempts have failed", count), func() bool {
			if len(s.inventory.unreachableMarks()) >= count {
				return true
			}

			if clk.Waiters() == 1 { // the next attempt
				clk.Step(time.Second)
			}

			return false
		})
	}

	must(t, worker.Stop(t.Context()))
	awaitFailures(2) // within a few seconds

	if got := s.visible(); len(got) != 0 {
		t.Errorf("logged %q at the default level after two attempts", got)
	}

	awaitFailures(10)
	worker.Start()
	stepUntil(t, clk, "the machine is watched", func() bool { return s.inventory.Get(worker.Nodename()).Condition == inventory.Current })

	if got, want := s.visible(), []string{"Machine is unreachable", "Watching machine"}; !slices.Equal(got, want) {
		t.Errorf("logged %q at the default level, want %q", got, want)
	}
}

func TestReflector_DeliversChangesMadeWhileDisconnected(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.addWorker(t)
	s.follow(t, worker)

	worker.CutOff()
	setZone(t, worker, "zone-b")
	worker.Reconnect()
	s.awaitView(t, worker.Nodename(), inZone("zone-b"))
}

func TestReflector_RereadsMachineAfterReboot(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.addWorker(t)
	must(t, worker.AddAddress(t.Context(), "eth1", publicPrefix))
	s.follow(t, worker)

	must(t, worker.Stop(t.Context()))
	must(t, worker.RemoveAddress(t.Context(), "eth1", publicPrefix))
	worker.Start()

	s.awaitView(t, worker.Nodename(), func(m machine.Machine) bool { return !m.HasAddress(publicPrefix.Addr()) })
	setZone(t, worker, "zone-c")
	s.awaitView(t, worker.Nodename(), inZone("zone-c"))
}

func TestReflector_RestartsBrokenWatchesImmediately(t *testing.T) {
	for name, breakWatches := range map[string]func(*talostest.Machine){
		"streams end":                        (*talostest.Machine).BreakStreams,
		"watches older than fifteen minutes": (*talostest.Machine).ExpireWatches,
		"connections are reset":              (*talostest.Machine).BreakConnections,
	} {
		t.Run(name, func(t *testing.T) {
			s, clk := newTimedSuite(t)
			worker := s.addWorker(t)
			s.track(worker)
			s.settle(t, clk, worker.Nodename())

			before := restarts(t)

			breakWatches(worker)
			eventually(t, "the watches have ended", func() bool { return restarts(t) > before })
			setZone(t, worker, "zone-c")

			eventually(t, "the next attempt is scheduled", func() bool { return clk.Waiters() == 1 })
			clk.Step(immediately)
			s.awaitView(t, worker.Nodename(), inZone("zone-c"))

			if got := s.inventory.unreachableMarks(); len(got) != 0 {
				t.Errorf("unexpected unreachable marks: %q", got)
			}

			if got := restarts(t) - before; got != 1 {
				t.Errorf("got %v restarts, want 1", got)
			}
		})
	}
}

// restarts returns the value of the metric for watch restarts.
func restarts(t *testing.T) float64 {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	must(t, err)

	for _, family := range families {
		if family.GetName() == "talosccm_watch_restarts_total" {
			return family.GetMetric()[0].GetCounter().GetValue()
		}
	}

	t.Fatal("metric talosccm_watch_restarts_total not found")

	return 0
}

func TestReflector_ConnectsWhileManyMachinesDropPackets(t *testing.T) {
	t.Parallel()

	s, _ := newTimedSuite(t)
	worker, gone := s.addWorker(t), s.add(t, talostest.MachineSpec{Nodename: "gone"})
	must(t, gone.BlackHole())

	const places = 128 // for machines that connect at the same time

	for i := range 2 * places {
		s.reflector.Track(fmt.Sprintf("gone-%d", i), []netip.Addr{gone.Address()})
	}

	eventually(t, "machines that drop packets are dialed", func() bool { return len(s.dials()) >= places })
	s.follow(t, worker)

	if got := s.inventory.unreachableMarks(); len(got) != 0 {
		t.Errorf("the machine was watched after %d attempts with others had timed out", len(got))
	}
}

func TestSession_SendsAllRequestsConcurrently(t *testing.T) {
	t.Parallel()

	s, _ := newTimedSuite(t)
	worker := s.addWorker(t)
	worker.SlowDown(2 * time.Second)
	worker.Freeze()
	s.track(worker)

	// All requests are sent before the first answer; otherwise the delays would add up.
	all := len(machine.KindsOf(nil).All())
	eventually(t, "all requests are sent", func() bool { return len(worker.Calls()) == all })

	worker.Thaw()
	s.await(t, worker.Nodename(), inventory.Current)

	if got := s.inventory.unreachableMarks(); len(got) != 0 {
		t.Errorf("unexpected unreachable marks: %q", got)
	}
}

func TestReflector_ReportsExpiredServerCertificateUntilRenewal(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.addWorker(t)
	s.follow(t, worker)

	worker.ExpireCertificate()
	worker.BreakConnections()
	requireContains(t, s.await(t, worker.Nodename(), inventory.Unreachable).Reason, "certificate has expired")

	worker.RenewCertificate()
	s.await(t, worker.Nodename(), inventory.Current)
}
