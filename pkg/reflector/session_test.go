package reflector_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

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

func modify[R resource.Resource](empty R, change func(R)) func(context.Context, *talostest.Machine) error {
	return func(ctx context.Context, m *talostest.Machine) error {
		created, ok := empty.DeepCopy().(R) // tests run in parallel
		if !ok {
			return fmt.Errorf("copy of %T has another type", empty)
		}

		return safe.StateModify(ctx, m.State(), created, func(r R) error {
			change(r)

			return nil
		})
	}
}

func setZone(ctx context.Context, m *talostest.Machine) error {
	return m.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "zone-2" })
}

func addAddress(ctx context.Context, m *talostest.Machine) error {
	return m.AddAddress(ctx, "eth1", publicPrefix)
}

func removeAddress(ctx context.Context, m *talostest.Machine) error {
	return m.RemoveAddress(ctx, "eth1", publicPrefix)
}

func setNodeIP(ctx context.Context, m *talostest.Machine) error {
	return m.SetNodeIPs(ctx, publicPrefix.Addr())
}

func formatVolume(ctx context.Context, m *talostest.Machine) error {
	return m.FormatVolume(ctx, constants.EphemeralPartitionLabel, "f-1")
}

func hasAddress(m machine.Machine) bool { return m.HasAddress(publicPrefix.Addr()) }

func lacksAddress(m machine.Machine) bool { return !hasAddress(m) }

func hasNodeIP(m machine.Machine) bool {
	return slices.Equal(m.NodeIPs, []netip.Addr{publicPrefix.Addr()})
}

func TestSession_PublishesWatchedChangeImmediately(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	changes := map[resource.Type][]change{
		runtime.PlatformMetadataType: {{setZone, inZone("zone-2")}},
		network.AddressStatusType:    {{addAddress, hasAddress}, {removeAddress, lacksAddress}},
		runtime.MachineStatusType: {{
			func(ctx context.Context, m *talostest.Machine) error {
				return m.SetStage(ctx, runtime.MachineStageUpgrading)
			},
			func(m machine.Machine) bool { return m.Stage == runtime.MachineStageUpgrading },
		}},
		k8s.NodenameType: {}, // see TestSession_MarksRenamedMachineAsMismatch
	}

	for _, kind := range machine.BaseKinds().Watched {
		assert.Contains(t, changes, kind.Type(), "the kind is watched, but no test changes it")

		for _, c := range changes[kind.Type()] {
			require.NoError(t, c.make(t.Context(), worker))
			s.awaitChange(worker, c.seen) // the clock advances too little for a poll or a new session
		}
	}
}

func TestSession_PublishesPolledChangeAtNextPoll(t *testing.T) {
	const uuid = "4c4c4544-0042-4410-8034-b1c04f333432"

	kinds := machine.BaseKinds()
	changes := map[resource.Type]change{
		hardware.SystemInformationType: {
			modify(hardware.NewSystemInformation(hardware.SystemInformationID), func(r *hardware.SystemInformation) { r.TypedSpec().UUID = uuid }),
			func(m machine.Machine) bool { return m.UUID() == uuid },
		},
		network.PlatformConfigType: {
			modify(network.NewPlatformConfig(network.NamespaceName, network.PlatformConfigActiveID), func(*network.PlatformConfig) {}),
			func(m machine.Machine) bool { return m.PlatformPublished },
		},
		cluster.InfoType: {
			modify(cluster.NewInfo(), func(r *cluster.Info) { r.TypedSpec().ClusterName = "renamed" }),
			func(m machine.Machine) bool { return m.ClusterName == "renamed" },
		},
		config.MachineTypeType: {
			modify(config.NewMachineType(), func(r *config.MachineType) { r.SetMachineType(talosmachine.TypeControlPlane) }),
			func(m machine.Machine) bool { return m.Type == talosmachine.TypeControlPlane },
		},
		// Without a new version of the nodename, which would cause a poll at once.
		network.HostnameStatusType: {
			modify(network.NewHostnameStatus(network.NamespaceName, network.HostnameID), func(r *network.HostnameStatus) { r.TypedSpec().Domainname = "example.org" }),
			func(m machine.Machine) bool { return m.Domainname == "example.org" },
		},
		cluster.IdentityType: {
			modify(cluster.NewIdentity(cluster.NamespaceName, cluster.LocalIdentity), func(r *cluster.Identity) { r.TypedSpec().NodeID = "reinstalled" }),
			func(m machine.Machine) bool { return m.NodeID == "reinstalled" },
		},
		k8s.NodeIPType: {setNodeIP, hasNodeIP},
		k8s.NodeIPConfigType: {
			modify(k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), func(r *k8s.NodeIPConfig) { r.TypedSpec().ExcludeSubnets = []string{publicPrefix.String()} }),
			func(m machine.Machine) bool {
				return slices.Equal(m.ExcludedSubnets, []netip.Prefix{publicPrefix.Masked()})
			},
		},
		block.DiscoveredVolumeType: {formatVolume, func(m machine.Machine) bool { return m.EphemeralID == "f-1" }},
	}

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

			s := newTimedSuite(t)
			worker := s.machine("worker-1")
			require.NoError(t, worker.SetStage(t.Context(), test.stage))
			s.settle(worker)

			for _, kind := range test.kinds {
				require.Contains(t, changes, kind.Type(), "the kind is polled, but no test changes it")
				require.NoError(t, changes[kind.Type()].make(t.Context(), worker))
			}

			s.clock.Step(test.poll)

			for _, kind := range test.kinds {
				s.awaitView(worker, changes[kind.Type()].seen)
			}
		})
	}
}

// The polled resources change with the watched ones, and the next regular poll would be late.
func TestSession_PollsAfterWatchedChange(t *testing.T) {
	for name, test := range map[string]struct {
		change
		within time.Duration
	}{
		"platform metadata": {change{setZone, inZone("zone-2")}, 0},
		"address":           {change{addAddress, hasAddress}, firstPoll},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s, worker := watching(t)
			require.NoError(t, setNodeIP(t.Context(), worker))
			require.NoError(t, test.make(t.Context(), worker))
			s.awaitChange(worker, test.seen)
			s.clock.Step(test.within)
			s.awaitView(worker, hasNodeIP)
		})
	}
}

func TestSession_PollIntervalGrows(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker := s.machine("worker-1")
	cached := network.NewPlatformConfig(network.NamespaceName, network.PlatformConfigCachedID)
	require.NoError(t, worker.State().Create(t.Context(), cached)) // the metadata service does not respond
	s.settle(worker)

	// The sum stays below the shortest session.
	for polls, interval := range []time.Duration{10, 20, 40, 80, 160, 320, 600} {
		interval *= time.Second //nolint:durationcheck // the list is of seconds

		s.clock.Step(interval - time.Millisecond)
		require.Equal(t, polls+1, lists(worker)[k8s.NodeIPType], "before %s had passed", interval)
		require.Equal(t, watchingTimers, s.clock.Waiters(), "before %s had passed", interval)
		s.stepToNextPoll(worker, interval/5+time.Millisecond) // the jitter
	}
}

// stepToNextPoll waits until a machine has been polled after a step.
func (s *suite) stepToNextPoll(m *talostest.Machine, step time.Duration) {
	s.Helper()

	views := len(s.views(m))

	s.clock.Step(step)
	s.eventually("the machine is polled again", func() bool { return len(s.views(m)) > views })
	s.awaitIdle()
}

// Polled resources that determine the Node must be current: nocloud without metadata waits for the stage.
func TestSession_PollIntervalStaysShortDuringBoot(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker := s.booting()
	s.settle(worker)

	for range 4 {
		s.stepToNextPoll(worker, 13*time.Second)
	}

	// Constant resources are then read again, since some may have been published late.
	require.NoError(t, formatVolume(t.Context(), worker))
	require.NoError(t, worker.SetStage(t.Context(), runtime.MachineStageRunning))
	s.awaitChange(worker, func(m machine.Machine) bool { return m.Stage == runtime.MachineStageRunning && m.EphemeralID == "f-1" })
}

// A machine that is being reset wipes the volume by which it is recognized, which takes minutes.
func TestSession_KeepsVolumeOfMachineThatIsReset(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker := s.machine("worker-1")
	require.NoError(t, formatVolume(t.Context(), worker))
	s.settle(worker)
	require.NoError(t, worker.SetStage(t.Context(), runtime.MachineStageResetting))
	require.NoError(t, worker.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, ""))
	s.awaitChange(worker, func(m machine.Machine) bool { return m.Stage == runtime.MachineStageResetting })

	for range 2 {
		s.stepToNextPoll(worker, nextPoll)
		require.Equal(t, "f-1", s.get(worker).Machine.EphemeralID)
	}
}

func TestSession_ExpiresAndReadsEverythingOverNewConnection(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	calls := len(worker.Calls())

	s.clock.Step(longestSession)
	s.stepUntil("the machine is read again", func() bool { return len(worker.Calls()) >= 2*calls })
	s.settle(worker)

	// The machine detects with a delay that the previous connection was closed.
	s.eventually("exactly one connection is open", func() bool { return worker.Connections() == 1 })
	assert.Len(t, s.dials(), 2)
	assert.Empty(t, s.inventory.unreachableMarks())
}

func TestSession_MarksFrozenMachineUnreachable(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	worker.Freeze()
	s.setZone(worker, "zone-b")

	calls := len(worker.Calls())

	s.clock.Step(nextPoll)
	s.eventually("the machine is polled", func() bool { return len(worker.Calls()) > calls })
	s.clock.Step(answerTimeout)
	s.awaitSession()
	s.clock.Step(answerTimeout)
	assert.Contains(t, s.await(worker.Nodename(), inventory.Unreachable).Reason, "did not answer")

	worker.Thaw()
	s.stepUntilCurrent(worker, inZone("zone-b"))
}

func TestProbe_MarksMachineWithoutPowerUnreachable(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	require.NoError(t, worker.BlackHole())

	start := time.Now()

	s.reflector.Probe(worker.Nodename())
	assert.Contains(t, s.await(worker.Nodename(), inventory.Unreachable).Reason, "i/o timeout")
	t.Logf("marked unreachable after %s", time.Since(start))

	worker.Reconnect()
	s.stepUntilCurrent(worker, anything)
}

func TestProbe_KeepsSessionOfMachineThatResponds(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	s.reflector.Probe(worker.Nodename())
	s.setZone(worker, "zone-b")
	s.awaitChange(worker, inZone("zone-b"))
	assert.Len(t, s.dials(), 1)
	assert.Empty(t, s.inventory.unreachableMarks())
}

// Talos publishes metadata and addresses separately, and they arrive over different watches.
func TestSession_DebouncesChanges(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	before := len(s.views(worker))

	s.setZone(worker, "zone-2")
	s.eventually("the change is pending", func() bool { return s.clock.Waiters() == watchingTimers+1 })
	assert.Len(t, s.views(worker), before, "before the debounce time has passed")

	s.clock.Step(2 * debounce)
	s.awaitView(worker, inZone("zone-2"))
}

func TestSession_MarksRenamedMachineAsMismatch(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	require.NoError(t, worker.SetNodename(t.Context(), "renamed"))
	s.stepDebounce("the machine is known to be renamed", func() bool { return s.get(worker).Condition == inventory.Mismatch })
	assert.Zero(t, s.get(worker).ObservedAt, "the view is removed")

	require.NoError(t, worker.SetNodename(t.Context(), worker.Nodename()))
	s.stepUntilCurrent(worker, anything)
}

func TestSession_RejectsNodenameThatIsTooLong(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	require.NoError(t, worker.SetNodename(t.Context(), strings.Repeat("x", 254)))
	s.stepDebounce("the session has ended", func() bool { return s.clock.Waiters() < watchingTimers })
	s.stepUntil("the machine is unreachable", func() bool { return s.get(worker).Condition == inventory.Unreachable })
	assert.Contains(t, s.get(worker).Reason, "nodename of 254 bytes")
}

func TestSession_PollsHostnameWhenItChanges(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)

	for _, domain := range []string{"example.org", "example.net"} {
		require.NoError(t, worker.SetHostname(t.Context(), "renamed", domain))
		s.awaitChange(worker, func(m machine.Machine) bool { return m.FQDN() == "renamed."+domain })
	}
}

func TestSession_PublishesAnnouncementOfMachineThatEndsWithinDebounce(t *testing.T) {
	t.Parallel()

	s, worker := watching(t) // the clock is not advanced, so the debounce never ends
	require.NoError(t, worker.SetStage(t.Context(), runtime.MachineStageResetting))
	s.eventually("the change is pending", func() bool { return s.clock.Waiters() == watchingTimers+1 })
	require.NoError(t, worker.Stop(t.Context()))

	s.eventually("the machine is unreachable, and its announcement known", func() bool {
		if s.clock.Waiters() <= watchingTimers { // the debounce and the next attempt
			s.clock.Step(time.Second)
		}

		entry := s.get(worker)

		return entry.Condition == inventory.Unreachable && entry.Machine.Stage == runtime.MachineStageResetting
	})
}

func TestSession_SendsAllRequestsConcurrently(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker := s.machine("worker-1")
	worker.Freeze()
	s.track(worker)

	// The machine answers none, so the latencies of a slow machine do not add up.
	all := len(machine.BaseKinds().All())
	s.eventually("all requests are sent", func() bool { return len(worker.Calls()) == all })

	worker.Thaw()
	s.await(worker.Nodename(), inventory.Current)
	assert.Empty(t, s.inventory.unreachableMarks())
}

func TestSession_ListsNoKindThatNothingUses(t *testing.T) {
	t.Parallel()

	_, worker := watching(t)
	kinds := machine.BaseKinds()
	assert.Len(t, lists(worker), len(kinds.Polled)+len(kinds.Constant))
}

func TestSession_PublishesFactsInFirstView(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	s.reflector.Kinds = s.reflector.Kinds.WithFacts(machine.AllFacts)

	worker := s.machine("worker-1")
	s.settle(worker)
	assert.NotNil(t, s.views(worker)[0].Facts)

	for _, call := range worker.Calls() {
		assert.Equal(t, codes.OK, call.Code, "%s %s with the role os:reader", call.Method, call.ResourceType)
	}
}

// Facts that stay the same until a reboot are listed once, but not while the machine is still discovering its devices.
func TestSession_ListsConstantFactsUntilMachineRuns(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	s.reflector.Kinds = s.reflector.Kinds.WithFacts(machine.FactKindsOf("PCIDevices") | machine.FactKindsOf("Gateways"))

	worker := s.booting()
	s.settle(worker)

	device := hardware.NewPCIDeviceInfo("0000:01:00.0")
	device.TypedSpec().VendorID = "0x10de"

	require.NoError(t, worker.State().Create(t.Context(), device))
	require.NoError(t, worker.SetStage(t.Context(), runtime.MachineStageRunning))
	s.awaitChange(worker, func(m machine.Machine) bool {
		return m.Stage == runtime.MachineStageRunning && len(m.Facts.PCIDevices) == 1
	})
	s.awaitIdle()

	for polls := 3; polls <= 4; polls++ {
		s.clock.Step(nextPoll)
		s.eventually("the machine is polled", func() bool { return lists(worker)[k8s.NodeIPType] == polls })
		s.eventually("the poll has ended", func() bool { return s.get(worker).ObservedAt.Equal(s.clock.Now()) })
		s.awaitIdle()
		assert.Equal(t, 2, lists(worker)[hardware.PCIDeviceType], "after %d polls", polls)
		assert.Equal(t, polls, lists(worker)[network.RouteStatusType])
	}
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

// watchOverride is a State with another watch of one kind.
type watchOverride struct {
	talosapi.State

	kind  resource.Type
	watch func(ctx context.Context, watch func() error, ch chan<- state.Event) error
}

func (s watchOverride) WatchKind(ctx context.Context, kind resource.Kind, ch chan<- state.Event, opts ...state.WatchKindOption) error {
	watch := func() error { return s.State.WatchKind(ctx, kind, ch, opts...) }
	if kind.Type() == s.kind {
		return s.watch(ctx, watch, ch)
	}

	return watch()
}

// runWithWatch starts a reflector with a watchOverride.
func (s *suite) runWithWatch(clk clock.Clock, kind resource.Type, watch func(ctx context.Context, watch func() error, ch chan<- state.Event) error) {
	s.Helper()
	s.run(func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		st, err := s.dial(ctx, nodename, addr)

		return watchOverride{st, kind, watch}, err
	}, clk)
}

func TestSession_PublishesNoViewBeforeAllWatchesBootstrapped(t *testing.T) {
	for _, kind := range machine.BaseKinds().Watched {
		t.Run(kind.Type(), func(t *testing.T) {
			t.Parallel()

			clk := &countingClock{FakeClock: clocktesting.NewFakeClock(time.Now())}
			s := newSuite(t, clk)
			worker := s.add(talostest.MachineSpec{Nodename: "worker-1", Platform: runtime.PlatformMetadataSpec{Platform: "aws", InstanceID: "i-1"}})
			require.NoError(t, worker.SetStage(t.Context(), runtime.MachineStageBooting)) // is polled often

			release := make(chan struct{})
			s.runWithWatch(clk, kind.Type(), func(ctx context.Context, watch func() error, _ chan<- state.Event) error {
				select {
				case <-release:
					return watch()
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			s.track(worker)

			others := len(machine.BaseKinds().Watched) - 1
			s.eventually("the other watches are open", func() bool { return worker.OpenStreams() == others })

			// This step reaches the second poll but not the deadline of the watches. Each poll resets the poll timer.
			s.eventually("the machine is polled", func() bool { return clk.resets.Load() == 1 })
			clk.Step(firstPoll)
			s.eventually("the machine is polled again", func() bool { return clk.resets.Load() == 2 && worker.OpenStreams() == others })
			assert.Empty(t, s.views(worker))

			close(release)
			s.await(worker.Nodename(), inventory.Current)

			view := s.views(worker)[0]
			assert.NotEmpty(t, view.Nodename)
			assert.NotEmpty(t, view.Hostname)
			assert.Equal(t, "i-1", view.Platform.InstanceID)
			assert.True(t, view.HasAddress(worker.Address()))
		})
	}
}

// sending returns a watch that sends the given events.
func sending(events ...state.Event) func(context.Context, func() error, chan<- state.Event) error {
	return func(ctx context.Context, _ func() error, ch chan<- state.Event) error {
		go func() {
			for _, event := range events {
				select {
				case ch <- event:
				case <-ctx.Done():
					return
				}
			}
		}()

		return nil
	}
}

func TestSession_FailsOnInvalidEvents(t *testing.T) {
	for name, test := range map[string]struct {
		events []state.Event
		reason string
	}{
		"created without a resource":   {[]state.Event{{Type: state.Created}}, "without a resource"},
		"updated without a resource":   {[]state.Event{{Type: state.Updated}}, "without a resource"},
		"destroyed without a resource": {[]state.Event{{Type: state.Destroyed}}, "without a resource"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s := newTimedSuite(t)
			s.runWithWatch(s.clock, network.AddressStatusType, sending(test.events...))

			worker := s.machine("worker-1")
			s.track(worker)
			assert.Contains(t, s.await(worker.Nodename(), inventory.Unreachable).Reason, test.reason)
		})
	}
}

func TestSession_TimesOutIfWatchNeverBootstrapsDespitePolls(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	s.runWithWatch(s.clock, network.AddressStatusType, sending())

	worker := s.booting()
	s.track(worker)
	s.eventually("the machine is unreachable", func() bool {
		s.clock.Step(time.Second)

		return s.get(worker).Condition == inventory.Unreachable
	})
}
