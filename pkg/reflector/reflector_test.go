package reflector_test

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

var publicPrefix = netip.MustParsePrefix("203.0.113.7/24")

// change is a change of a machine and the check whether a view shows it.
type change struct {
	make func(ctx context.Context, m *talostest.Machine) error
	seen func(machine.Machine) bool
}

func watchedChanges() map[resource.Type][]change {
	return map[resource.Type][]change{
		runtime.PlatformMetadataType: {{
			make: func(ctx context.Context, m *talostest.Machine) error {
				return m.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "zone-2" })
			},
			seen: func(m machine.Machine) bool { return m.Platform.Zone == "zone-2" },
		}},
		network.AddressStatusType: {{
			make: func(ctx context.Context, m *talostest.Machine) error { return m.AddAddress(ctx, "eth1", publicPrefix) },
			seen: func(m machine.Machine) bool { return m.HasAddress(publicPrefix.Addr()) },
		}, {
			make: func(ctx context.Context, m *talostest.Machine) error {
				return m.RemoveAddress(ctx, "eth1", publicPrefix)
			},
			seen: func(m machine.Machine) bool { return !m.HasAddress(publicPrefix.Addr()) },
		}},
		runtime.MachineStatusType: {{
			make: func(ctx context.Context, m *talostest.Machine) error {
				return m.SetStage(ctx, runtime.MachineStageUpgrading)
			},
			seen: func(m machine.Machine) bool { return m.Stage == runtime.MachineStageUpgrading },
		}},
		k8s.NodenameType: {}, // see TestSession_MarksRenamedMachineAsMismatch
	}
}

func TestSession_PublishesWatchedChangeImmediately(t *testing.T) {
	// The clock advances too little for a poll or a new session.
	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	changes := watchedChanges()

	for _, kind := range machine.KindsOf(nil).Watched {
		cases, known := changes[kind.Type()]
		if !known {
			t.Errorf("%s is watched, but no test changes it", kind.Type())
		}

		for _, c := range cases {
			must(t, c.make(t.Context(), worker))
			s.awaitChange(t, clk, worker.Nodename(), c.seen)
		}
	}
}

func TestReflector_MarksMachineWithAnotherNodenameAsMismatch(t *testing.T) {
	s := newRealSuite(t)
	worker := s.addWorker(t)

	s.reflector.Track("other", []netip.Addr{worker.Address()})

	entry := s.await(t, "other", inventory.Mismatch)
	requireContains(t, entry.Reason, worker.Nodename(), worker.Address().String())

	if !entry.ObservedAt.IsZero() || len(s.inventory.viewsOf("other")) != 0 {
		t.Errorf("inventory has a view of another machine: %+v", entry)
	}

	must(t, worker.SetNodename(t.Context(), "other"))
	s.await(t, "other", inventory.Current)
}

func TestSession_MarksRenamedMachineAsMismatch(t *testing.T) {
	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	must(t, worker.SetNodename(t.Context(), "renamed"))

	eventually(t, "the view is removed", func() bool {
		entry := s.inventory.Get(worker.Nodename())

		return entry.Condition == inventory.Mismatch && entry.ObservedAt.IsZero()
	})

	must(t, worker.SetNodename(t.Context(), worker.Nodename()))
	stepUntil(t, clk, "the machine is watched", func() bool { return s.inventory.Get(worker.Nodename()).Condition == inventory.Current })
}

func TestSession_RejectsNodenameThatIsTooLong(t *testing.T) {
	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	must(t, worker.SetNodename(t.Context(), strings.Repeat("x", 254)))

	stepUntil(t, clk, "the machine is unreachable", func() bool {
		entry := s.inventory.Get(worker.Nodename())

		return entry.Condition == inventory.Unreachable && strings.Contains(entry.Reason, "nodename of 254 bytes")
	})
}

func TestSession_PollsHostnameWhenItChanges(t *testing.T) {
	// The clock stands still: there is no other poll.
	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	for _, domain := range []string{"example.org", "example.net"} {
		must(t, worker.SetHostname(t.Context(), "renamed", domain))
		s.awaitView(t, worker.Nodename(), func(m machine.Machine) bool { return m.FQDN() == "renamed."+domain })
	}
}

func TestSession_PublishesAnnouncementOfMachineThatEndsWithinDebounce(t *testing.T) {
	// The clock stands still: the debounce never ends.
	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	must(t, worker.SetStage(t.Context(), runtime.MachineStageResetting))
	eventually(t, "the change is pending", func() bool { return clk.Waiters() == watchingTimers+1 })
	must(t, worker.Stop(t.Context()))

	eventually(t, "the machine is unreachable, and its announcement known", func() bool {
		if clk.Waiters() <= watchingTimers { // the debounce and the next attempt
			clk.Step(time.Second)
		}

		entry := s.inventory.Get(worker.Nodename())

		return entry.Condition == inventory.Unreachable && entry.Machine.Stage == runtime.MachineStageResetting
	})
}

func TestReflector_TriesNextAddressIfFirstIsDown(t *testing.T) {
	s := newRealSuite(t)
	worker := s.addWorker(t)
	dead := s.add(t, talostest.MachineSpec{Nodename: "dead"})
	must(t, dead.Stop(t.Context()))

	s.reflector.Track(worker.Nodename(), []netip.Addr{dead.Address(), worker.Address()})
	s.await(t, worker.Nodename(), inventory.Current)
}

func TestReflector_TriesNextAddressIfFirstIsAnotherMachine(t *testing.T) {
	s := newRealSuite(t)
	worker := s.addWorker(t)
	another := s.add(t, talostest.MachineSpec{Nodename: "another"})

	s.reflector.Track(worker.Nodename(), []netip.Addr{another.Address(), worker.Address()})
	s.await(t, worker.Nodename(), inventory.Current)
}

func TestReflector_MarksNodeWithoutAddressUnreachable(t *testing.T) {
	s := newRealSuite(t)
	s.reflector.Track("no-address", nil)

	requireContains(t, s.await(t, "no-address", inventory.Unreachable).Reason, "no address")
}

func TestTrack_FollowsChangedAddress(t *testing.T) {
	s := newRealSuite(t)
	old := s.addWorker(t)
	s.follow(t, old)

	replacement := s.add(t, talostest.MachineSpec{Nodename: "spare", Platform: runtime.PlatformMetadataSpec{Platform: "aws"}})
	must(t, replacement.SetNodename(t.Context(), old.Nodename()))

	s.reflector.Track(old.Nodename(), []netip.Addr{replacement.Address()})
	s.awaitView(t, old.Nodename(), func(m machine.Machine) bool { return m.Platform.Platform == "aws" })
	requireNoConnections(t, old)
}

func TestTrack_IgnoresUnchangedAddresses(t *testing.T) {
	// The clock stands still, so that the machine is not polled.
	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	calls := len(worker.Calls())

	s.track(worker)

	// A change that arrives shows that the session is still the first.
	must(t, worker.AddAddress(t.Context(), "eth0", publicPrefix))
	s.awaitChange(t, clk, worker.Nodename(), func(m machine.Machine) bool { return m.HasAddress(publicPrefix.Addr()) })

	if got := len(worker.Calls()); got != calls {
		t.Errorf("got %d additional calls", got-calls)
	}
}

func TestUntrack_RemovesInventoryEntry(t *testing.T) {
	s := newRealSuite(t)
	worker := s.addWorker(t)
	s.follow(t, worker)

	s.reflector.Untrack(worker.Nodename())

	if entry := s.inventory.Get(worker.Nodename()); entry.Condition != inventory.Unknown {
		t.Errorf("inventory still has %+v", entry)
	}

	requireNoConnections(t, worker)

	s.follow(t, worker)
}

func TestUntrack_ReturnsWhileMachineIsUnresponsive(t *testing.T) {
	// The clock stands still, so that the answer timeout never expires.
	s, _ := newTimedSuite(t)
	worker := s.addWorker(t)
	worker.Freeze()
	s.track(worker)
	eventually(t, "the machine is called", func() bool { return len(worker.Calls()) > 0 })

	untracked := make(chan struct{})

	go func() {
		defer close(untracked)

		s.reflector.Untrack(worker.Nodename())
	}()

	select {
	case <-untracked:
	case <-time.After(timeout):
		t.Errorf("Untrack did not return within %s", timeout)
	}

	worker.Thaw()
	requireNoConnections(t, worker)
}

func TestReflector_AcceptsOlderTalosWithoutPolledKinds(t *testing.T) {
	s := newRealSuite(t)
	kinds := machine.KindsOf(nil)

	var unsupported []resource.Type
	for _, kind := range slices.Concat(kinds.Polled, kinds.Constant) {
		unsupported = append(unsupported, kind.Type())
	}

	old := s.add(t, talostest.MachineSpec{Nodename: "old", UnsupportedTypes: unsupported})
	s.follow(t, old)

	if view := s.inventory.Get("old").Machine; view.Nodename != "old" || len(view.NodeIPs) != 0 {
		t.Errorf("got %+v", view)
	}
}

func requireNoConnections(t *testing.T, m *talostest.Machine) {
	t.Helper()
	eventually(t, "no connection to "+m.Nodename()+" is open", func() bool { return m.Connections() == 0 && m.OpenStreams() == 0 })
}

// A kubelet writes the addresses of its Node, and the local machine is not dialed at any.
func TestReflector_LocalMachineRespondsAtItsOwnAddressesOnly(t *testing.T) {
	s := newRealSuite(t)
	local, other := s.add(t, talostest.MachineSpec{Nodename: "local", ServeSocket: true}), s.addWorker(t)

	s.run(t, func(context.Context, string, netip.Addr) (talosapi.State, error) {
		st, err := talosapi.DialSocket(local.Socket())

		return talosapi.ControlPlane{State: st, Local: true}, err
	}, clock.RealClock{})

	for _, listed := range []*talostest.Machine{other, local} {
		s.reflector.Track(local.Nodename(), []netip.Addr{listed.Address()})

		want := netip.Addr{}
		if listed == local {
			want = local.Address()
		}

		s.awaitView(t, local.Nodename(), func(m machine.Machine) bool { return m.ControlPlane && m.Endpoint == want })
	}
}
