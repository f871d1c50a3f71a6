package reflector_test

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

const (
	// answerTimeout is slightly longer than the product's.
	answerTimeout = 31 * time.Second

	// firstPoll, nextPoll and longestSession are upper bounds that include jitter. The first is for a machine that is booting.
	firstPoll      = 12 * time.Second
	nextPoll       = 12 * time.Minute
	longestSession = 46 * time.Minute

	// watchingTimers is the number of timers of an idle session: next poll and expiry.
	watchingTimers = 2
)

// settle waits until the machine is watched and its session is idle.
func (s *suite) settle(t *testing.T, clk *clocktesting.FakeClock, nodename string) {
	t.Helper()
	s.await(t, nodename, inventory.Current)
	eventually(t, "the session of "+nodename+" is idle", func() bool { return clk.Waiters() == watchingTimers })
}

func modify[R resource.Resource](ctx context.Context, m *talostest.Machine, empty R, change func(R)) error {
	return safe.StateModify(ctx, m.State(), empty, func(r R) error {
		change(r)

		return nil
	})
}

func polledChanges() map[resource.Type]change {
	return map[resource.Type]change{
		hardware.SystemInformationType: {
			make: func(ctx context.Context, m *talostest.Machine) error {
				return modify(ctx, m, hardware.NewSystemInformation(hardware.SystemInformationID), func(r *hardware.SystemInformation) {
					r.TypedSpec().UUID = "4c4c4544-0042-4410-8034-b1c04f333432"
				})
			},
			seen: func(m machine.Machine) bool { return m.UUID() == "4c4c4544-0042-4410-8034-b1c04f333432" },
		},
		network.PlatformConfigType: {
			make: func(ctx context.Context, m *talostest.Machine) error {
				return m.State().Create(ctx, network.NewPlatformConfig(network.NamespaceName, network.PlatformConfigActiveID))
			},
			seen: func(m machine.Machine) bool { return m.PlatformPublished },
		},
		cluster.InfoType: {
			make: func(ctx context.Context, m *talostest.Machine) error {
				return modify(ctx, m, cluster.NewInfo(), func(r *cluster.Info) { r.TypedSpec().ClusterName = "renamed" })
			},
			seen: func(m machine.Machine) bool { return m.ClusterName == "renamed" },
		},
		config.MachineTypeType: {
			make: func(ctx context.Context, m *talostest.Machine) error {
				return modify(ctx, m, config.NewMachineType(), func(r *config.MachineType) { r.SetMachineType(talosmachine.TypeControlPlane) })
			},
			seen: func(m machine.Machine) bool { return m.Type == talosmachine.TypeControlPlane },
		},
		// Without a new version of the nodename, which would cause a poll at once.
		network.HostnameStatusType: {
			make: func(ctx context.Context, m *talostest.Machine) error {
				status := network.NewHostnameStatus(network.NamespaceName, network.HostnameID)

				return modify(ctx, m, status, func(r *network.HostnameStatus) { r.TypedSpec().Domainname = "example.org" })
			},
			seen: func(m machine.Machine) bool { return m.Domainname == "example.org" },
		},
		cluster.IdentityType: {
			make: func(ctx context.Context, m *talostest.Machine) error {
				identity := cluster.NewIdentity(cluster.NamespaceName, cluster.LocalIdentity)

				return modify(ctx, m, identity, func(r *cluster.Identity) { r.TypedSpec().NodeID = "reinstalled" })
			},
			seen: func(m machine.Machine) bool { return m.NodeID == "reinstalled" },
		},
		k8s.NodeIPType: {
			make: func(ctx context.Context, m *talostest.Machine) error { return m.SetNodeIPs(ctx, publicPrefix.Addr()) },
			seen: func(m machine.Machine) bool { return len(m.NodeIPs) == 1 && m.NodeIPs[0] == publicPrefix.Addr() },
		},
		k8s.NodeIPConfigType: {
			make: func(ctx context.Context, m *talostest.Machine) error {
				return modify(ctx, m, k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), func(r *k8s.NodeIPConfig) {
					r.TypedSpec().ExcludeSubnets = []string{publicPrefix.String()}
				})
			},
			seen: func(m machine.Machine) bool {
				return len(m.ExcludedSubnets) == 1 && m.ExcludedSubnets[0] == publicPrefix.Masked()
			},
		},
		block.DiscoveredVolumeType: {
			make: func(ctx context.Context, m *talostest.Machine) error {
				return m.FormatVolume(ctx, constants.EphemeralPartitionLabel, "f-1")
			},
			seen: func(m machine.Machine) bool { return m.EphemeralID == "f-1" },
		},
	}
}

func TestSession_PublishesPolledChangeAtNextPoll(t *testing.T) {
	kinds := machine.KindsOf(nil)

	for _, test := range []struct {
		stage runtime.MachineStage
		kinds []resource.Kind
		poll  time.Duration
	}{
		{runtime.MachineStageBooting, slices.Concat(kinds.Polled, kinds.Constant), firstPoll},
		{runtime.MachineStageRunning, kinds.Polled, nextPoll},
	} {
		t.Run(test.stage.String(), func(t *testing.T) {
			t.Parallel()

			s, clk := newTimedSuite(t)
			worker := s.addWorker(t)
			must(t, worker.SetStage(t.Context(), test.stage))
			s.track(worker)
			s.settle(t, clk, worker.Nodename())

			changes := polledChanges()

			for _, kind := range test.kinds {
				c, known := changes[kind.Type()]
				if !known {
					t.Fatalf("%s is polled, but no test changes it", kind.Type())
				}

				must(t, c.make(t.Context(), worker))
			}

			clk.Step(test.poll)

			for _, kind := range test.kinds {
				s.awaitView(t, worker.Nodename(), changes[kind.Type()].seen)
			}
		})
	}
}

// The polled resources change with them, and the next poll would be late.
func TestSession_PollsAfterWatchedChange(t *testing.T) {
	for name, test := range map[string]struct {
		change func(ctx context.Context, m *talostest.Machine) error
		seen   func(machine.Machine) bool
		within time.Duration
	}{
		"platform metadata": {func(ctx context.Context, m *talostest.Machine) error {
			return m.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "zone-2" })
		}, inZone("zone-2"), 0},
		"address": {func(ctx context.Context, m *talostest.Machine) error {
			return m.AddAddress(ctx, "eth0", publicPrefix)
		}, func(m machine.Machine) bool { return m.HasAddress(publicPrefix.Addr()) }, firstPoll},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s, clk := newTimedSuite(t)
			worker := s.addWorker(t)
			s.track(worker)
			s.settle(t, clk, worker.Nodename())

			must(t, worker.SetNodeIPs(t.Context(), publicPrefix.Addr()))
			must(t, test.change(t.Context(), worker))
			s.awaitChange(t, clk, worker.Nodename(), test.seen)
			clk.Step(test.within)

			s.awaitView(t, worker.Nodename(), func(m machine.Machine) bool {
				return len(m.NodeIPs) == 1 && m.NodeIPs[0] == publicPrefix.Addr()
			})
		})
	}
}

func TestSession_PollIntervalGrows(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	cached := network.NewPlatformConfig(network.NamespaceName, network.PlatformConfigCachedID)
	must(t, worker.State().Create(t.Context(), cached)) // the metadata service does not respond
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	// The sum stays below the shortest session.
	for polls, interval := range []time.Duration{10, 20, 40, 80, 160, 320, 600} {
		interval *= time.Second //nolint:durationcheck // the list is of seconds

		clk.Step(interval - time.Millisecond)

		if got := lists(worker)[k8s.NodeIPType]; got != polls+1 || clk.Waiters() != watchingTimers {
			t.Fatalf("%d polls before %s had passed, want %d", got, interval, polls+1)
		}

		views := len(s.inventory.viewsOf(worker.Nodename()))

		clk.Step(interval/5 + time.Millisecond) // the jitter
		eventually(t, "the machine is polled after "+interval.String(), func() bool {
			return len(s.inventory.viewsOf(worker.Nodename())) > views
		})
		s.settle(t, clk, worker.Nodename())
	}
}

// Polled resources must not be outdated when they decide about the Node: nocloud without metadata waits for the stage.
func TestSession_PollIntervalStaysShortDuringBoot(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	must(t, worker.SetStage(t.Context(), runtime.MachineStageBooting))
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	for range 4 {
		views := len(s.inventory.viewsOf(worker.Nodename()))

		clk.Step(13 * time.Second)
		eventually(t, "the machine is polled again", func() bool { return len(s.inventory.viewsOf(worker.Nodename())) > views })
		s.settle(t, clk, worker.Nodename())
	}

	// Then constant resources are read once more, since some may have been published late.
	must(t, worker.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, "f-1"))
	must(t, worker.SetStage(t.Context(), runtime.MachineStageRunning))
	s.awaitChange(t, clk, worker.Nodename(), func(m machine.Machine) bool {
		return m.Stage == runtime.MachineStageRunning && m.EphemeralID == "f-1"
	})
}

func TestSession_ExpiresAndReadsEverythingOverNewConnection(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	calls := len(worker.Calls())

	clk.Step(longestSession)
	stepUntil(t, clk, "the machine is read again", func() bool { return len(worker.Calls()) >= 2*calls })
	s.settle(t, clk, worker.Nodename())

	// The machine notices with a delay that the previous connection was closed.
	eventually(t, "exactly one connection is open", func() bool { return worker.Connections() == 1 })

	if got := len(s.dials()); got != 2 {
		t.Errorf("the machine was dialed %d times, want twice", got)
	}

	if got := s.inventory.unreachableMarks(); len(got) != 0 {
		t.Errorf("unexpected unreachable marks: %q", got)
	}
}

func TestReflector_MarksDisconnectedMachineUnreachableUntilItReconnects(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	worker.CutOff()
	s.track(worker)

	awaitSession(t, clk)
	clk.Step(answerTimeout)
	requireContains(t, s.await(t, worker.Nodename(), inventory.Unreachable).Reason, worker.Address().String(), "did not answer")

	worker.Reconnect()
	stepUntil(t, clk, "the machine is watched", func() bool { return s.inventory.Get(worker.Nodename()).Condition == inventory.Current })
}

// stepUntil advances the clock in steps of a second while a task only waits for its next attempt, until condition holds.
func stepUntil(t *testing.T, clk *clocktesting.FakeClock, what string, condition func() bool) {
	t.Helper()
	eventually(t, what, func() bool {
		if condition() {
			return true
		}

		if clk.Waiters() <= 1 {
			clk.Step(time.Second)
		}

		return false
	})
}

// awaitSession waits until a session has started, which its timers show.
func awaitSession(t *testing.T, clk *clocktesting.FakeClock) {
	t.Helper()
	stepUntil(t, clk, "a session has started", func() bool { return clk.Waiters() > watchingTimers })
}

func TestSession_MarksFrozenMachineUnreachable(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	worker.Freeze()
	setZone(t, worker, "zone-b")

	calls := len(worker.Calls())

	clk.Step(nextPoll)
	eventually(t, "the machine is polled", func() bool { return len(worker.Calls()) > calls })
	clk.Step(answerTimeout)
	awaitSession(t, clk)
	clk.Step(answerTimeout)
	requireContains(t, s.await(t, worker.Nodename(), inventory.Unreachable).Reason, "did not answer")

	worker.Thaw()
	stepUntil(t, clk, "the machine is watched", func() bool { return inZone("zone-b")(s.inventory.Get(worker.Nodename()).Machine) })
}

func TestReflector_TriesLastGoodAddressFirst(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	silent := s.add(t, talostest.MachineSpec{Nodename: "silent"})
	silent.CutOff()

	s.reflector.Track(worker.Nodename(), []netip.Addr{silent.Address(), worker.Address()})
	awaitSession(t, clk)
	clk.Step(answerTimeout)
	s.settle(t, clk, worker.Nodename())

	before := len(s.dials())

	worker.BreakStreams()
	stepUntil(t, clk, "an address is dialed", func() bool { return len(s.dials()) > before })

	if got := s.dials()[before]; got != worker.Address() {
		t.Errorf("%s was dialed first, want %s", got, worker.Address())
	}
}

// Talos publishes metadata and addresses one after the other, and they arrive over different watches.
func TestSession_DebouncesChanges(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	before := len(s.inventory.viewsOf(worker.Nodename()))

	must(t, worker.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "zone-2" }))
	eventually(t, "the change is pending", func() bool { return clk.Waiters() == watchingTimers+1 })

	if got := len(s.inventory.viewsOf(worker.Nodename())); got != before {
		t.Errorf("%d views were published before the debounce time had passed", got-before)
	}

	clk.Step(100 * time.Millisecond)
	s.awaitView(t, worker.Nodename(), func(m machine.Machine) bool { return m.Platform.Zone == "zone-2" })
}

// Only the initialization needs everything at once.
func TestSession_PublishesFirstChangeOfInitializedNodeAtOnce(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)

	nodes := informers.NewSharedInformerFactory(nil, 0).Core().V1().Nodes()
	must(t, nodes.Informer().GetIndexer().Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: worker.Nodename()}}))
	must(t, s.reflector.FollowNodes(nodes))

	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	for range 2 {
		zone := func(m machine.Machine) string { return m.Platform.Zone }
		before := zone(s.inventory.Get(worker.Nodename()).Machine)

		setZone(t, worker, before+"-a")
		s.awaitView(t, worker.Nodename(), func(m machine.Machine) bool { return zone(m) == before+"-a" })

		setZone(t, worker, before+"-b")
		clk.Step(100 * time.Millisecond)
		s.awaitView(t, worker.Nodename(), func(m machine.Machine) bool { return zone(m) == before+"-b" })

		clk.Step(100 * time.Millisecond)
		s.settle(t, clk, worker.Nodename())
	}
}
