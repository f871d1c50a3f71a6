package reflector_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	clusterres "github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

const (
	// factsInterval is longer than the time between two reads of the facts, and factsRetry than the time until they are
	// read again while one is unknown.
	factsInterval = 31 * time.Second
	factsRetry    = 7 * time.Second
)

var (
	kcmConfig    = k8s.NewControllerManagerConfig(k8s.ControllerManagerConfigID)
	nodeIPConfig = k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID)
)

// newControlPlaneSuite uses a fake clock, and dials all machines as control-plane machines.
func newControlPlaneSuite(t *testing.T) *suite {
	t.Helper()

	s := newTimedSuite(t)
	s.run(func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		st, err := s.dial(ctx, nodename, addr)

		return talosapi.ControlPlane{State: st}, err
	}, s.clock)

	return s
}

// controlPlane adds a control-plane machine.
func (s *suite) controlPlane(nodename string, unsupported ...resource.Type) *talostest.Machine {
	s.Helper()

	return s.add(talostest.MachineSpec{Nodename: nodename, Type: talosmachine.TypeControlPlane, UnsupportedTypes: unsupported})
}

// settleControlPlane is settle for a control-plane machine.
func (s *suite) settleControlPlane(m *talostest.Machine) {
	s.Helper()
	s.reflector.Track(m.Nodename(), []netip.Addr{m.Address()}, reflector.ControlPlane)
	s.await(m.Nodename(), inventory.Current)
	s.awaitFacts()
}

func (s *suite) awaitFacts() {
	s.Helper()
	s.eventually("the session is idle", func() bool { return s.clock.Waiters() == watchingTimers })
}

// readFacts has the facts read again.
func (s *suite) readFacts(m *talostest.Machine) machine.ControlPlane {
	s.Helper()

	return s.readFactsAfter(m, factsInterval)
}

func (s *suite) readFactsAfter(m *talostest.Machine, pause time.Duration) machine.ControlPlane {
	s.Helper()
	s.clock.Step(pause)
	s.eventually("the facts were read", func() bool { return s.clock.Since(s.get(m).ObservedAt) == 0 })
	s.awaitFacts()

	return *s.get(m).Machine.ControlPlane
}

// setPodCIDRs sets the pod CIDRs of kube-controller-manager.
func (s *suite) setPodCIDRs(m *talostest.Machine, cidrs ...string) {
	s.Helper()
	require.NoError(s, safe.StateModify(s.Context(), m.State(), kcmConfig, func(config *k8s.ControllerManagerConfig) error {
		config.TypedSpec().PodCIDRs = cidrs

		return nil
	}))
}

func TestSession_ReadsFactsOfControlPlane(t *testing.T) {
	t.Parallel()

	s := newControlPlaneSuite(t)
	m := s.controlPlane("cp-1")
	s.settleControlPlane(m)

	first := s.views(m)[0].ControlPlane
	assert.True(t, first.IsComplete())
	assert.True(t, first.KCM.AllocatesNodeCIDRs, "the default of Talos")
	assert.Nil(t, first.Members)

	s.setPodCIDRs(m, "10.7.0.0/16")

	changed := s.readFacts(m)
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")}, changed.KCM.ClusterCIDRs)
	assert.Equal(t, changed.KCM.ClusterCIDRs, changed.Subjects.PodCIDRs)
	assert.Empty(t, changed.Problem)
	assert.Len(t, s.dials(), 1)
}

func TestSession_AsksOnlyControlPlaneForFacts(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	m := s.controlPlane("cp-1") // whose Node is not labeled
	s.settle(m)
	assert.Nil(t, s.get(m).Machine.ControlPlane)
	assert.Zero(t, gets(m, k8s.ControllerManagerConfigType))
}

func TestSession_ReadsMembersOnlyIfNeeded(t *testing.T) {
	t.Parallel()

	s := newControlPlaneSuite(t)
	needed := false
	s.reflector.ReadsMembers = func() bool { return needed }

	m := s.controlPlane("cp-1")
	member := clusterres.NewMember(clusterres.NamespaceName, "w-1")
	member.TypedSpec().NodeID = "1"
	require.NoError(t, m.State().Create(t.Context(), member))
	s.settleControlPlane(m)
	assert.Zero(t, listsOf(m, clusterres.MemberType))

	needed = true
	assert.Equal(t, map[string]machine.Member{"w-1": {NodeID: "1"}}, s.readFacts(m).Members)

	// Those of an earlier poll do not count.
	s.finalize(m, member.Metadata(), 101)

	facts := s.readFacts(m)
	assert.Nil(t, facts.Members)
	assert.Contains(t, facts.Problem, "list members of the cluster")

	needed = false
	assert.Empty(t, s.readFacts(m).Problem)
}

// An empty configuration would mean that kube-controller-manager does not assign pod CIDRs.
func TestSession_FactsThatAreNotReadAreUnknown(t *testing.T) {
	for name, add := range map[string]func(*suite) *talostest.Machine{
		"refused": func(s *suite) *talostest.Machine { return s.controlPlane("cp-1", k8s.ControllerManagerConfigType) },
		"absent":  func(s *suite) *talostest.Machine { return s.machine("cp-1") },
		"too large": func(s *suite) *talostest.Machine {
			m := s.controlPlane("cp-1")
			s.finalize(m, kcmConfig.Metadata(), 101)

			return m
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s := newControlPlaneSuite(t)
			m := add(s)
			s.settleControlPlane(m)

			facts := s.get(m).Machine.ControlPlane
			assert.Nil(t, facts.KCM)
			assert.Nil(t, facts.Subjects)
			assert.Contains(t, facts.Problem, "read configuration of kube-controller-manager: ")

			// They are needed, so they are read again soon.
			for range 4 {
				before := gets(m, k8s.ControllerManagerConfigType)

				s.readFactsAfter(m, factsRetry)
				assert.Greater(t, gets(m, k8s.ControllerManagerConfigType), before)
			}
		})
	}
}

// The whole cluster depends on what machines of the control plane report.
func TestSession_ControlPlaneKeepsWhatWasNotReadAgain(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(*suite, *talostest.Machine)
		problem string
	}{
		"too large": {func(s *suite, m *talostest.Machine) {
			s.finalize(m, kcmConfig.Metadata(), 101)
		}, "read configuration of kube-controller-manager: "},
		"absent": {func(s *suite, m *talostest.Machine) {
			require.NoError(s, m.State().Destroy(s.Context(), kcmConfig.Metadata()))
		}, "read configuration of kube-controller-manager: "},
		"invalid":                   {func(s *suite, m *talostest.Machine) { s.setPodCIDRs(m, "x") }, "parse cluster CIDRs of kube-controller-manager: "},
		"virtual IPs are too large": {func(s *suite, m *talostest.Machine) { s.finalize(m, nodeIPConfig.Metadata(), 101) }, "read subnets excluded from node IPs: "},
		"absent static pod": {func(s *suite, m *talostest.Machine) {
			require.NoError(s, m.State().Destroy(s.Context(), k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID).Metadata()))
		}, "read static pod of kube-controller-manager: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s := newControlPlaneSuite(t)
			m := s.controlPlane("cp-1")
			s.settleControlPlane(m)

			before := *s.get(m).Machine.ControlPlane
			require.True(t, before.IsComplete())

			keeps := func(after machine.ControlPlane) {
				t.Helper()
				assert.Contains(t, after.Problem, test.problem)

				after.Problem = ""
				assert.Equal(t, before, after)
			}

			test.change(s, m)
			keeps(s.readFacts(m))

			// The next session keeps them, too.
			m.BreakConnections()
			s.stepUntil("the machine was dialed again", func() bool { return len(s.dials()) > 1 })

			if name != "virtual IPs are too large" { // which every view needs
				s.stepUntilCurrent(m, func(machine.Machine) bool { return len(s.views(m)) > 2 })
			}

			keeps(*s.get(m).Machine.ControlPlane)
		})
	}
}

// The whole cluster depends on what machines of the control plane report.
func TestSession_ControlPlaneKeepsWhatDidNotExceedLimits(t *testing.T) {
	t.Parallel()

	s := newControlPlaneSuite(t)
	s.reflector.Kinds = s.reflector.Kinds.WithFacts(machine.FactKindsOf("Links"))

	m := s.controlPlane("cp-1")
	m.Lie(withLinks(1))
	s.settleControlPlane(m)

	before := s.get(m).Machine
	require.NotEmpty(t, before.ExcludedSubnets)

	m.Lie(withLinks(10_000))
	s.finalize(m, nodeIPConfig.Metadata(), 101)
	s.clock.Step(nextPoll)
	s.awaitView(m, func(m machine.Machine) bool { return len(m.Ignored) == 2 })

	after := s.get(m).Machine
	assert.Contains(t, after.ControlPlane.Problem, "read subnets excluded from node IPs")

	after.Ignored, after.ControlPlane = nil, before.ControlPlane
	assert.Equal(t, before, after)
	assert.Len(t, s.dials(), 1, "the session goes on")
}

// A watch that exceeds its limit ends the session, and every later one.
func TestSession_ControlPlaneKeepsFactsWithoutSession(t *testing.T) {
	t.Parallel()

	s := newControlPlaneSuite(t)
	m := s.controlPlane("cp-1")
	s.settleControlPlane(m)

	before := *s.get(m).Machine.ControlPlane

	s.finalize(m, runtime.NewMachineStatus().Metadata(), 101)
	s.await(m.Nodename(), inventory.Unreachable)
	assert.Equal(t, before, *s.get(m).Last.ControlPlane)

	s.stepUntil("the machine was dialed again", func() bool { return len(s.dials()) == 4 })
	assert.Equal(t, before, *s.get(m).Last.ControlPlane)
}

// What another machine reports must not become a fact of the Node's machine.
func TestSession_ForgetsFactsOfOtherMachine(t *testing.T) {
	t.Parallel()

	s := newControlPlaneSuite(t)
	other := s.controlPlane("cp-2")
	refusing := s.controlPlane("cp-1", k8s.ControllerManagerConfigType)

	s.reflector.Track("cp-1", []netip.Addr{other.Address(), refusing.Address()}, reflector.ControlPlane)
	s.await("cp-1", inventory.Current)
	assert.NotZero(t, gets(other, k8s.ControllerManagerConfigType))
	assert.Nil(t, s.get(refusing).Machine.ControlPlane.KCM)
}

func TestReflector_RetriesControlPlaneSoon(t *testing.T) {
	t.Parallel()

	s := newControlPlaneSuite(t)
	m := s.controlPlane("cp-1")
	require.NoError(t, m.Stop(t.Context()))
	s.reflector.Track(m.Nodename(), []netip.Addr{m.Address()}, reflector.ControlPlane)

	// pauses returns how long the reflector waits between two attempts, after n.
	pauses := func(n int) time.Duration {
		s.stepUntil("the machine was dialed", func() bool { return len(s.dials()) >= n })

		began := s.clock.Now()
		s.stepUntil("the machine was dialed again", func() bool { return len(s.dials()) > n })

		return s.clock.Since(began)
	}

	assert.LessOrEqual(t, pauses(10), factsRetry)

	m.Start()
	s.stepUntilCurrent(m, anything)
	require.NoError(t, m.Stop(t.Context()))

	// Its last facts suffice.
	count := len(s.dials())
	pause := pauses(count + 10)
	assert.Greater(t, pause, factsRetry)
	assert.LessOrEqual(t, pause, factsInterval)
}

// No deletion of a Node would end the entry.
func TestReflector_ForgetsLocalMachineThatIsRenamedWithoutNode(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	local := s.add(talostest.MachineSpec{Nodename: "local", Type: talosmachine.TypeControlPlane, ServeSocket: true})
	s.reflector.TrackLocal("local", func() (talosapi.State, error) { return talosapi.DialSocket(local.Socket()) })
	s.await("local", inventory.Current)
	require.NoError(t, safe.StateModify(t.Context(), local.State(), k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID), func(r *k8s.Nodename) error {
		r.TypedSpec().Nodename = "renamed"

		return nil
	}))
	s.eventually("the machine is forgotten", func() bool {
		s.clock.Step(debounce)

		return s.inventory.Get("local").Condition == inventory.Unknown
	})

	// With a Node, it stays.
	s.track(local)
	s.stepUntil("the mismatch is known", func() bool { return s.inventory.Get("local").Condition == inventory.Mismatch })
}

// listsOf returns how often a machine was asked for all resources of a type.
func listsOf(m *talostest.Machine, typ resource.Type) int { return lists(m)[typ] }

// gets returns how often a machine was asked for one resource of a type.
func gets(m *talostest.Machine, typ resource.Type) (count int) {
	for _, call := range m.Calls() {
		if call.Method == "/cosi.resource.State/Get" && call.ResourceType == typ {
			count++
		}
	}

	return count
}
