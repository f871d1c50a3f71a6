package reflector_test

import (
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
			t.Errorf("%q does not say %q", text, part)
		}
	}
}

func TestStoppedMachineIsUnreachableAndThenCurrentAgain(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.addWorker(t)
	s.follow(t, worker)

	before := s.inventory.Get(worker.Nodename())

	must(t, worker.Stop(t.Context()))

	entry := s.await(t, worker.Nodename(), inventory.Unreachable)
	requireContains(t, entry.Reason, worker.Address().String())

	if !entry.Machine.Equal(before.Machine) || entry.ObservedAt.IsZero() {
		t.Errorf("the last view was not kept: %+v", entry)
	}

	setZone(t, worker, "meanwhile")
	worker.Start()
	s.awaitView(t, worker.Nodename(), inZone("meanwhile"))
}

func TestChangesWhileCutOffArriveLater(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.addWorker(t)
	s.follow(t, worker)

	worker.CutOff()
	setZone(t, worker, "meanwhile")
	worker.Reconnect()
	s.awaitView(t, worker.Nodename(), inZone("meanwhile"))
}

func TestMachineThatRebootsIsReadAnew(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.addWorker(t)
	must(t, worker.AddAddress(t.Context(), "eth1", publicPrefix))
	s.follow(t, worker)

	must(t, worker.Stop(t.Context()))
	must(t, worker.RemoveAddress(t.Context(), "eth1", publicPrefix))
	worker.Start()

	s.awaitView(t, worker.Nodename(), func(m machine.Machine) bool { return !m.HasAddress(publicPrefix.Addr()) })
	setZone(t, worker, "afterwards")
	s.awaitView(t, worker.Nodename(), inZone("afterwards"))
}

func TestWatchesThatBreakAreTakenUpAtOnce(t *testing.T) {
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
			setZone(t, worker, "afterwards")

			eventually(t, "the next attempt is planned", func() bool { return clk.Waiters() == 1 })
			clk.Step(atOnce)
			s.awaitView(t, worker.Nodename(), inZone("afterwards"))

			if got := s.inventory.complaints(); len(got) != 0 {
				t.Errorf("the machine was up, and still: %q", got)
			}

			if got := restarts(t) - before; got != 1 {
				t.Errorf("%v restarts were counted, want 1", got)
			}
		})
	}
}

// restarts is the metric that counts watches started over.
func restarts(t *testing.T) float64 {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	must(t, err)

	for _, family := range families {
		if family.GetName() == "talosccm_watch_restarts_total" {
			return family.GetMetric()[0].GetCounter().GetValue()
		}
	}

	t.Fatal("there is no metric of watch restarts")

	return 0
}

func TestSlowMachineGetsThere(t *testing.T) {
	t.Parallel()

	s, _ := newTimedSuite(t)
	worker := s.addWorker(t)
	worker.SlowDown(2 * time.Second)
	worker.Freeze()
	s.track(worker)

	// All is asked for before anything is answered: else the delays would add up.
	all := len(machine.WatchedKinds()) + len(machine.PolledKinds())
	eventually(t, "all is asked for at once", func() bool { return len(worker.Calls()) == all })

	worker.Thaw()
	s.await(t, worker.Nodename(), inventory.Current)

	if got := s.inventory.complaints(); len(got) != 0 {
		t.Errorf("it was only slow, and still: %q", got)
	}
}

func TestExpiredServerCertificateIsTheReasonUntilItIsRenewed(t *testing.T) {
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
