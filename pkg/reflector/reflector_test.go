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

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func TestReflector_MarksMachineWithAnotherNodenameAsMismatch(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.machine("worker-1")

	s.reflector.Track("other", []netip.Addr{worker.Address()}, reflector.Unknown)

	entry := s.await("other", inventory.Mismatch)
	assert.Contains(t, entry.Reason, worker.Nodename())
	assert.Contains(t, entry.Reason, worker.Address().String())
	assert.Zero(t, entry.ObservedAt, "inventory has a view of another machine")
	assert.Empty(t, s.inventory.viewsOf("other"))

	require.NoError(t, worker.SetNodename(t.Context(), "other"))
	s.await("other", inventory.Current)
}

func TestReflector_TriesNextAddress(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	dead, another := s.machine("dead"), s.machine("another")
	require.NoError(t, dead.Stop(t.Context()))

	for name, first := range map[string]*talostest.Machine{"first-is-down": dead, "first-is-another-machine": another} {
		worker := s.machine(name)
		s.track(worker, first.Address(), worker.Address())
		s.await(name, inventory.Current)
	}
}

// The first address of a Node may be the recorded one: a machine at another address must not replace the machine there.
func TestReflector_ReturnsToFirstAddress(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker, silent := s.machine("worker-1"), s.machine("silent")
	silent.CutOff()

	s.track(worker, silent.Address(), worker.Address())
	s.awaitSession()
	s.clock.Step(answerTimeout)
	s.await(worker.Nodename(), inventory.Current)
	s.awaitIdle()

	before := len(s.dials())

	worker.BreakStreams()
	s.stepUntil("an address is dialed", func() bool { return len(s.dials()) > before })
	assert.Equal(t, silent.Address(), s.dials()[before])
}

func TestReflector_MarksNodeWithoutAddressUnreachable(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	s.reflector.Track("no-address", nil, reflector.Unknown)
	assert.Contains(t, s.await("no-address", inventory.Unreachable).Reason, "no address")
}

func TestTrack_FollowsChangedAddress(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	old := s.machine("worker-1")
	s.follow(old)

	replacement := s.add(talostest.MachineSpec{Nodename: "spare", Platform: runtime.PlatformMetadataSpec{Platform: "aws"}})
	require.NoError(t, replacement.SetNodename(t.Context(), old.Nodename()))

	s.track(old, replacement.Address())
	s.awaitView(old, func(m machine.Machine) bool { return m.Platform.Platform == "aws" })
	s.awaitNoConnections(old)
}

func TestTrack_IgnoresUnchangedAddresses(t *testing.T) {
	t.Parallel()

	s, worker := watching(t) // the clock is not advanced, so the machine is not polled
	calls := len(worker.Calls())

	s.track(worker)

	// A change that arrives shows that the session is still the first.
	require.NoError(t, addAddress(t.Context(), worker))
	s.awaitChange(worker, hasAddress)
	assert.Len(t, worker.Calls(), calls)
}

func TestUntrack_RemovesInventoryEntry(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.machine("worker-1")
	s.follow(worker)
	s.reflector.Untrack(worker.Nodename())
	assert.Equal(t, inventory.Unknown, s.get(worker).Condition)
	s.awaitNoConnections(worker)
	s.follow(worker)
}

func TestUntrack_ReturnsWhileMachineIsUnresponsive(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t) // the clock is not advanced, so the answer timeout never expires
	worker := s.machine("worker-1")
	worker.Freeze()
	s.track(worker)
	s.eventually("the machine is called", func() bool { return len(worker.Calls()) > 0 })

	untracked := make(chan struct{})

	go func() {
		defer close(untracked)

		s.reflector.Untrack(worker.Nodename())
	}()

	ctest.Receive(t, untracked, "Untrack has returned")
	worker.Thaw()
	s.awaitNoConnections(worker)
}

func TestReflector_AcceptsOlderTalosWithoutPolledKinds(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	kinds := machine.BaseKinds()

	var unsupported []resource.Type

	for _, kind := range slices.Concat(kinds.Polled, kinds.Constant) {
		unsupported = append(unsupported, kind.Type())
	}

	old := s.add(talostest.MachineSpec{Nodename: "old", UnsupportedTypes: unsupported})
	s.follow(old)
	assert.Equal(t, "old", s.get(old).Machine.Nodename)
	assert.Empty(t, s.get(old).Machine.NodeIPs)
}

// A kubelet writes the addresses of its Node. The local machine is reached over its socket, not at an address.
func TestReflector_LocalMachineRespondsAtItsOwnAddressesOnly(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	local, other := s.add(talostest.MachineSpec{Nodename: "local", ServeSocket: true}), s.machine("worker-1")

	s.reflector.TrackLocal(local.Nodename(), func() (talosapi.State, error) { return talosapi.DialSocket(local.Socket()) })
	s.awaitView(local, func(m machine.Machine) bool { return m.ControlPlane.Local }) // without a Node
	s.track(local)
	s.awaitView(local, func(m machine.Machine) bool { return m.Endpoint == local.Address() })
	s.track(local, other.Address())
	s.awaitView(local, func(m machine.Machine) bool { return m.ControlPlane.Local && m.Endpoint == netip.Addr{} })
	assert.Empty(t, s.dials())

	calls := len(local.Calls())

	s.reflector.Untrack(local.Nodename())
	s.awaitView(local, func(m machine.Machine) bool { return m.ControlPlane.Local && len(local.Calls()) > calls })
}

// The timeout is of a request, so it takes real time.
func TestReflector_ReadsTheRestOfMachineWhoseMembersHang(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	s.reflector.ReadsMembers = func() bool { return true }
	local := s.add(talostest.MachineSpec{Nodename: "hanging", ServeSocket: true})
	local.Lie(func(request proto.Message, stream grpc.ServerStream, honest func() error) error {
		if list, ok := request.(*v1alpha1.ListRequest); ok && list.GetType() == cluster.MemberType {
			<-stream.Context().Done()
		}

		return honest()
	})

	s.reflector.TrackLocal(local.Nodename(), func() (talosapi.State, error) { return talosapi.DialSocket(local.Socket()) })
	s.awaitView(local, func(m machine.Machine) bool { return m.ControlPlane.Problem != "" && m.ControlPlane.Members == nil })
}

func TestReflector_MarksDisconnectedMachineUnreachableUntilItReconnects(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker := s.machine("worker-1")
	worker.CutOff()
	s.track(worker)

	s.awaitSession()
	s.clock.Step(answerTimeout)

	reason := s.await(worker.Nodename(), inventory.Unreachable).Reason
	assert.Contains(t, reason, worker.Address().String())
	assert.Contains(t, reason, "did not answer")

	worker.Reconnect()
	s.stepUntilCurrent(worker, anything)
}

func TestReflector_MarksStoppedMachineUnreachableAndRecovers(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.machine("worker-1")
	s.follow(worker)

	before := s.get(worker)

	require.NoError(t, worker.Stop(t.Context()))

	entry := s.await(worker.Nodename(), inventory.Unreachable)
	assert.Contains(t, entry.Reason, worker.Address().String())
	assert.Equal(t, before.Machine, entry.Machine, "the last view")
	assert.NotZero(t, entry.ObservedAt)

	s.setZone(worker, "zone-b")
	worker.Start()
	s.awaitView(worker, inZone("zone-b"))
}

func TestReflector_LogsLastingOutageOnce(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)
	awaitFailures := func(count int) {
		s.stepUntil(fmt.Sprintf("%d attempts have failed", count), func() bool { return len(s.inventory.unreachableMarks()) >= count })
	}

	require.NoError(t, worker.Stop(t.Context()))
	awaitFailures(2) // within a few seconds
	assert.Empty(t, s.visible())

	awaitFailures(10)
	worker.Start()
	s.stepUntilCurrent(worker, anything)
	assert.Equal(t, []string{"Machine is unreachable", "Watching machine"}, s.visible())
}

func TestReflector_ReconnectsAtOnceWhenNodeIsReadyAgain(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker := s.machine("worker-1")
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: worker.Nodename()},
		Status: corev1.NodeStatus{
			NodeInfo:   corev1.NodeSystemInfo{OSImage: "Talos (v1.13.0)"},
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: worker.Address().String()}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}},
		},
	}
	client := fake.NewClientset(node)
	factory := informers.NewSharedInformerFactory(client, 0)
	require.NoError(t, worker.Stop(t.Context()))
	require.NoError(t, s.reflector.FollowNodes(factory.Core().V1().Nodes()))
	factory.Start(t.Context().Done())
	factory.WaitForCacheSync(t.Context().Done())

	s.stepUntil("five attempts have failed", func() bool { return len(s.inventory.unreachableMarks()) >= 5 })
	worker.Start()

	node.Status.Conditions[0].Status = corev1.ConditionTrue
	_, err := client.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	require.NoError(t, err)
	s.eventually("the machine is dialed without a step of the clock", func() bool { return worker.OpenStreams() > 0 })
}

func TestReflector_DeliversChangesMadeWhileDisconnected(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.machine("worker-1")
	s.follow(worker)

	worker.CutOff()
	s.setZone(worker, "zone-b")
	worker.Reconnect()
	s.awaitView(worker, inZone("zone-b"))
}

func TestReflector_RereadsMachineAfterReboot(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.machine("worker-1")
	require.NoError(t, addAddress(t.Context(), worker))
	s.follow(worker)

	require.NoError(t, worker.Stop(t.Context()))
	require.NoError(t, removeAddress(t.Context(), worker))
	worker.Start()

	s.awaitView(worker, lacksAddress)
	s.setZone(worker, "zone-c")
	s.awaitView(worker, inZone("zone-c"))
}

// Not parallel, because of the metric.
func TestReflector_RestartsBrokenWatchesImmediately(t *testing.T) {
	restarts := func() float64 { return ctest.Metrics(t)["talosccm_watch_restarts_total"] }

	for name, breakWatches := range map[string]func(*talostest.Machine){
		"streams end":                        (*talostest.Machine).BreakStreams,
		"watches older than fifteen minutes": (*talostest.Machine).ExpireWatches,
		"connections are reset":              (*talostest.Machine).BreakConnections,
	} {
		t.Run(name, func(t *testing.T) {
			s, worker := watching(t)
			before := restarts()

			breakWatches(worker)
			s.eventually("the watches have ended", func() bool { return restarts() > before })
			s.setZone(worker, "zone-c")

			s.eventually("the next attempt is scheduled", func() bool { return s.clock.Waiters() == 1 })
			s.clock.Step(time.Second)
			s.awaitView(worker, inZone("zone-c"))
			assert.Empty(t, s.inventory.unreachableMarks())
			assert.Equal(t, before+1, restarts())
		})
	}
}

func TestReflector_ConnectsWhileManyMachinesDropPackets(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker, gone := s.machine("worker-1"), s.machine("gone")
	require.NoError(t, gone.BlackHole())

	for i := range 2 * places {
		s.reflector.Track(fmt.Sprintf("gone-%d", i), []netip.Addr{gone.Address()}, reflector.Unknown)
	}

	s.eventually("machines that drop packets are dialed", func() bool { return len(s.dials()) >= places })
	s.follow(worker)
	assert.Empty(t, s.inventory.unreachableMarks(), "attempts with others had timed out")
}

func TestReflector_ConnectsWhileManyMachinesStall(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)

	var stalling []*talostest.Machine

	for i := range 2 * places {
		stalling = append(stalling, s.machine(fmt.Sprintf("stalled-%d", i)))
		stalling[i].Freeze()
		s.track(stalling[i])
	}

	worker := s.machine("worker-1")

	for _, connected := range []int{places, 2 * places} {
		s.eventually("all places are taken", func() bool {
			called := slices.DeleteFunc(slices.Clone(stalling), func(m *talostest.Machine) bool { return len(m.Calls()) == 0 })

			return len(called) == connected
		})
		s.clock.Step(time.Second)
	}

	s.follow(worker)
	assert.Empty(t, s.inventory.unreachableMarks(), "attempts with others had timed out")
}

// A client with the credentials of kubelets can let many Nodes have one address, at which nothing completes a handshake.
func TestReflector_ConnectsWhileManyNodesStallAtOneAddress(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker, stalling := s.machine("worker-1"), s.machine("stalling")
	stalling.CutOff()

	for i := range 2 * places {
		s.reflector.Track(fmt.Sprintf("stalled-%d", i), []netip.Addr{stalling.Address()}, reflector.Unknown)
	}

	s.eventually("all connections are open", func() bool { return stalling.Connections() == 2*places })
	s.follow(worker)
	assert.Empty(t, s.inventory.unreachableMarks(), "attempts with others had timed out")
}

// A bootstrap token can register any number of Nodes whose machines stall.
func TestReflector_ConnectsToKnownNodesWhileMachinesOfOthersStall(t *testing.T) {
	connectWhileOthersStall(t, reflector.Known, reflector.Unknown)
}

// The whole cluster depends on the facts of control-plane machines.
func TestReflector_ConnectsToControlPlaneWhileKnownMachinesStall(t *testing.T) {
	connectWhileOthersStall(t, reflector.ControlPlane, reflector.Known)
}

func connectWhileOthersStall(t *testing.T, trust, others reflector.Trust) {
	t.Helper()
	t.Parallel()

	s := newTimedSuite(t)
	worker, late := s.machine("worker-1"), s.machine("worker-2")

	var stalling []*talostest.Machine

	for i := range 2 * places {
		stalling = append(stalling, s.machine(fmt.Sprintf("stalled-%d", i)))
		stalling[i].Freeze()
		s.reflector.Track(stalling[i].Nodename(), []netip.Addr{stalling[i].Address()}, others)
	}

	called := func() int {
		return len(slices.DeleteFunc(slices.Clone(stalling), func(m *talostest.Machine) bool { return len(m.Calls()) == 0 }))
	}

	s.eventually("all places are taken", func() bool { return called() == places })
	s.reflector.Track(worker.Nodename(), []netip.Addr{worker.Address()}, trust)
	s.await(worker.Nodename(), inventory.Current)
	assert.Equal(t, places, called(), "without waiting for a place")

	// Those that have failed delay no new machine.
	s.clock.Step(time.Second)
	s.eventually("all machines have been called", func() bool { return called() == 2*places })
	s.clock.Step(answerTimeout)
	s.eventually("all attempts have failed", func() bool { return len(s.inventory.unreachableMarks()) == 2*places })
	s.eventually("all are dialed again", func() bool {
		s.clock.Step(100 * time.Millisecond) // some may not wait yet

		return len(s.dials()) == 4*places+1
	})
	s.reflector.Track(late.Nodename(), []netip.Addr{late.Address()}, others)
	s.await(late.Nodename(), inventory.Current)
}

func TestReflector_LimitsSessionsAtOneAddress(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker, stalling := s.machine("worker-1"), s.machine("stalling")
	stalling.Lie(func(_ proto.Message, stream grpc.ServerStream, _ func() error) error {
		<-stream.Context().Done()

		return stream.Context().Err()
	})

	for i := range perAddress {
		s.reflector.Track(fmt.Sprintf("stalled-%d", i), []netip.Addr{stalling.Address()}, reflector.Unknown)
	}

	s.eventually("all sessions have started", func() bool { return sessions(stalling) == perAddress })
	s.reflector.Track("late", []netip.Addr{stalling.Address()}, reflector.Unknown)
	s.eventually("its connection is open", func() bool { return stalling.Connections() == perAddress+1 })
	s.eventually("it waits for a place", func() bool { return s.clock.Waiters() == perAddress*startingTimers+1 })
	s.clock.Step(addressTime)

	assert.Equal(t, "4 other Nodes have the address "+stalling.Address().String(), s.await("late", inventory.Unreachable).Reason)
	assert.Equal(t, perAddress, sessions(stalling))
	s.follow(worker)

	// Nodes that are known do not wait for others.
	s.reflector.Track("known", []netip.Addr{stalling.Address()}, reflector.Known)
	s.eventually("a session has started", func() bool { return sessions(stalling) == perAddress+1 })
}

// One attacker can respond for many Nodes.
func TestReflector_LimitsWhatMachinesOfUnknownNodesSend(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)

	// track returns the entry of a machine with 9,000 addresses once it is current or unreachable.
	track := func(m *talostest.Machine, trust reflector.Trust) (entry inventory.Entry) {
		m.Lie(withAddresses(9_000))
		s.reflector.Track(m.Nodename(), []netip.Addr{m.Address()}, trust)
		s.eventually("the machine has responded", func() bool {
			entry = s.get(m)

			return entry.Condition != inventory.Unknown
		})

		return entry
	}

	var accepted []*talostest.Machine

	refused := s.machine("large-0")
	for ; track(refused, reflector.Unknown).Condition == inventory.Current; refused = s.machine(fmt.Sprintf("large-%d", len(accepted))) {
		accepted = append(accepted, refused)
		require.Less(t, len(accepted), 20)
	}

	assert.Greater(t, len(accepted), 8)
	assert.Equal(t, inventory.Unreachable, s.get(refused).Condition)
	assert.Contains(t, s.get(refused).Reason, "machine sent more than 128 KiB, and machines of Nodes without labels of talos-ccm use all of 64 MiB")
	s.reflector.Untrack(refused.Nodename())

	s.follow(s.machine("worker-1"))
	assert.Equal(t, inventory.Current, track(s.machine("known"), reflector.Known).Condition, "no limit")

	// A Node that becomes known, or is deleted, makes room for another.
	s.reflector.Track(accepted[0].Nodename(), []netip.Addr{accepted[0].Address()}, reflector.Known)
	assert.Equal(t, inventory.Current, track(s.machine("next-0"), reflector.Unknown).Condition)
	assert.Equal(t, inventory.Unreachable, track(s.machine("next-1"), reflector.Unknown).Condition)
	s.reflector.Untrack("next-1")

	s.reflector.Untrack(accepted[1].Nodename())
	assert.Equal(t, inventory.Current, track(s.machine("next-2"), reflector.Unknown).Condition)

	// So does one whose machine is read again.
	accepted[2].Lie(nil)
	accepted[2].BreakConnections()
	s.eventually("the machine was read again", func() bool {
		s.clock.Step(debounce)

		return len(s.views(accepted[2])) == 2
	})
	assert.Equal(t, inventory.Current, track(s.machine("next-3"), reflector.Unknown).Condition)
}

func TestReflector_RenewsSessionThatUsesItsShareForPolls(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	s.reflector.LimitShares(24<<10, 0)

	worker := s.booting() // which is polled often
	s.settle(worker)
	s.eventually("there is another session", func() bool {
		if n := s.clock.Waiters(); n == 1 || n == watchingTimers { // until the next attempt or poll
			s.clock.Step(firstPoll)
		}

		return len(s.dials()) == 2
	})
	s.stepUntil("the machine is read again", func() bool { return sessions(worker) == 2 })
	assert.Empty(t, s.inventory.unreachableMarks())
}

// A handshake costs more than breaking a connection.
func TestReflector_DialsMachineWithShortSessionsLessOften(t *testing.T) {
	t.Parallel()

	s, worker := watching(t)

	// reconnect breaks the connections and returns how long the next session takes to begin.
	reconnect := func() time.Duration {
		start, before := s.clock.Now(), len(s.views(worker))

		worker.BreakConnections()
		s.stepUntil("the machine is read again", func() bool { return len(s.views(worker)) > before })
		s.awaitIdle()

		return s.clock.Since(start)
	}

	for range 4 {
		reconnect()
	}

	assert.GreaterOrEqual(t, reconnect(), 8*time.Second)
	assert.Empty(t, s.inventory.unreachableMarks(), "the last view stays current")

	// One long session is enough.
	s.clock.Step(time.Minute)
	s.awaitIdle()

	before := len(s.views(worker))

	worker.BreakConnections()
	s.eventually("the next attempt is scheduled", func() bool { return s.clock.Waiters() == 1 })
	s.clock.Step(time.Second)
	s.eventually("the machine is read again", func() bool { return len(s.views(worker)) > before })
}

func TestReflector_ReportsExpiredServerCertificateUntilRenewal(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.machine("worker-1")
	s.follow(worker)

	worker.ExpireCertificate()
	worker.BreakConnections()
	assert.Contains(t, s.await(worker.Nodename(), inventory.Unreachable).Reason, "certificate has expired")

	worker.RenewCertificate()
	s.await(worker.Nodename(), inventory.Current)
}

// followers counts the goroutines that follow machines: those created by the reflector or the gRPC and COSI clients.
func followers(t *testing.T) int {
	t.Helper()

	var stacks strings.Builder

	require.NoError(t, pprof.Lookup("goroutine").WriteTo(&stacks, 2))

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

// Not parallel, because it counts the goroutines of the process.
func TestUntrack_LeaksNoGoroutine(t *testing.T) {
	s := newRealSuite(t)

	var machines []*talostest.Machine

	for i := range 5 {
		m := s.machine(fmt.Sprintf("worker-%d", i))
		s.follow(m)
		machines = append(machines, m)
	}

	require.GreaterOrEqual(t, followers(t), len(machines), "the test does not recognize the goroutines")

	for _, m := range machines {
		s.reflector.Untrack(m.Nodename())
	}

	s.eventually("no goroutine follows a machine", func() bool { return followers(t) == 0 })
}

func TestRun_StartsNodesTrackedBefore(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker, gone := s.machine("worker-1"), s.machine("gone")
	late := reflector.New(s.inventory, s.dial, clock.RealClock{})

	late.Track(worker.Nodename(), []netip.Addr{worker.Address()}, reflector.Unknown)
	late.Track(gone.Nodename(), []netip.Addr{gone.Address()}, reflector.Unknown)
	late.Untrack(gone.Nodename())

	go late.Run(t.Context())

	s.await(worker.Nodename(), inventory.Current)
	assert.Empty(t, gone.Calls())
}

func TestRun_WaitsForTasksAndTrackAfterwardsStartsNone(t *testing.T) {
	t.Parallel()

	s := newRealSuite(t)
	worker := s.machine("worker-1")

	for range 20 {
		refl := reflector.New(s.inventory, s.dial, clock.RealClock{})
		ctx, cancel := context.WithCancel(t.Context())

		var group sync.WaitGroup

		group.Go(func() { refl.Run(ctx) })
		group.Go(func() {
			for i := range 100 {
				refl.Track(fmt.Sprintf("node-%d", i), []netip.Addr{worker.Address()}, reflector.Unknown)

				if i == 50 {
					cancel()
				}
			}
		})
		group.Wait()

		refl.Track(worker.Nodename(), []netip.Addr{worker.Address()}, reflector.Unknown)
		refl.Untrack(worker.Nodename())
	}

	s.awaitNoConnections(worker)
}

// Not parallel, because others would slow down its handshakes.
func TestReflector_ConnectsTo300Machines(t *testing.T) {
	const count = 300

	// The clock is not advanced while the reflector connects to machines, so retries cannot hide failures.
	s := newTimedSuite(t)
	for i := range count {
		s.track(s.machine(fmt.Sprintf("node-%03d", i)))
	}

	s.eventually("all machines are current", func() bool {
		current := s.inventory.Count(inventory.Current)

		if pending := count - current; pending > 0 && s.clock.Waiters() == watchingTimers*current+pending {
			s.clock.Step(time.Second) // all others wait for their next attempt
		}

		return current == count
	})
	assert.Empty(t, slices.DeleteFunc(s.inventory.unreachableMarks(), isHandshakeTimeout))

	for _, m := range s.talos.Machines() {
		for _, view := range s.views(m) {
			assert.Equal(t, m.Nodename(), view.Nodename)
			assert.True(t, view.HasAddress(m.Address()), "%+v", view)
		}
	}

	// Changes of all machines arrive.
	for _, m := range s.talos.Machines() {
		s.setZone(m, "zone-2")
	}

	s.eventually("all machines are in their new zone", func() bool {
		s.clock.Step(debounce / 5)

		return !slices.ContainsFunc(s.talos.Machines(), func(m *talostest.Machine) bool { return s.get(m).Machine.Platform.Zone != "zone-2" })
	})
}

// isHandshakeTimeout reports whether a handshake of gRPC timed out after 20 seconds of system time. A busy host can
// exceed these with a hundred concurrent handshakes.
func isHandshakeTimeout(mark string) bool {
	return strings.Contains(mark, "authentication handshake failed: context deadline exceeded") ||
		(strings.Contains(mark, "error reading server preface") && strings.Contains(mark, "use of closed network connection"))
}
