package controlplane_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// setPodCIDRs sets the pod CIDRs that a machine reports.
func (s *suite) setPodCIDRs(m *talostest.Machine, cidrs ...string) {
	s.Helper()

	require.NoError(s, safe.StateModify(s.Context(), m.State(), k8s.NewControllerManagerConfig(), func(config *k8s.ControllerManagerConfig) error {
		config.TypedSpec().PodCIDRs = cidrs

		return nil
	}))
}

func TestReader_NeedsMostMachines(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())

	var machines []*talostest.Machine

	for _, nodename := range []string{"cp-1", "cp-2", "cp-3"} {
		m := s.add(nodename, talosmachine.TypeControlPlane)
		require.NoError(s, m.Stop(s.Context()))
		label(s.Suite, nodename)

		machines = append(machines, m)
	}

	machines[0].Start()
	s.await("one machine has answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.PodCIDRs) > 0 })
	s.refresh()

	assert.False(t, s.identity().Known, "identity is known from one machine of three: %+v", s.identity())

	machines[1].Start()
	s.await("the identity is known", known)
}

func TestReader_TrustsTheLocalMachine(t *testing.T) {
	s := newSuite(t, bed.Kube.Config(), func(s *suite, cfg *controlplane.Config) {
		local := s.Machine(talostest.MachineSpec{Nodename: "local", Type: talosmachine.TypeControlPlane})

		cfg.LocalState = local.State()

		// A kubelet can have its Node list any address.
		register(s.Suite, "local", "192.0.2.1")
		label(s.Suite, "local")
		s.setPodCIDRs(local, "10.245.0.0/16")
	})

	for _, nodename := range []string{"cp-1", "cp-2"} {
		require.NoError(s, s.add(nodename, talosmachine.TypeControlPlane).Stop(s.Context()))
		label(s.Suite, nodename)
	}

	id := s.await("the identity is known", known)
	if local := netip.MustParsePrefix("10.245.0.0/16"); !slices.Contains(id.PodCIDRs, local) || slices.Contains(id.Unconfirmed.CIDRs, local) {
		t.Errorf("got %+v", id)
	}
}

func TestReader_MinorityIsUnconfirmed(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())

	old, changed := netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.245.0.0/16")

	var machines []*talostest.Machine
	for _, nodename := range []string{"cp-1", "cp-2", "cp-3"} {
		machines = append(machines, s.add(nodename, talosmachine.TypeControlPlane))
		label(s.Suite, nodename)
	}

	s.exclude(machines[0], "203.0.113.2")
	s.setPodCIDRs(machines[0], changed.String(), changed.String()) // twice by one machine

	id := s.await("all machines have answered", func(id csrpolicy.ClusterIdentity) bool {
		return id.Known && slices.Contains(id.PodCIDRs, changed) && !slices.Contains(id.Unconfirmed.CIDRs, old)
	})
	wantAll(t, "unconfirmed CIDRs", id.Unconfirmed.CIDRs, changed)
	wantAll(t, "unconfirmed addresses", id.Unconfirmed.IPs, netip.MustParseAddr("203.0.113.2"))

	// The rollout continues.
	s.setPodCIDRs(machines[1], changed.String())

	id = s.await("the change is confirmed", func(id csrpolicy.ClusterIdentity) bool { return !slices.Contains(id.Unconfirmed.CIDRs, changed) })
	wantAll(t, "pod CIDRs", id.PodCIDRs, old, changed)
	wantAll(t, "unconfirmed CIDRs", id.Unconfirmed.CIDRs, old)
}

func TestReader_ReportsImplausibleCIDRs(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)
	register(s.Suite, "worker", "172.30.7.7")
	label(s.Suite, "cp-1")
	s.setPodCIDRs(m, "10.0.0.0/8", "172.30.0.0/16", "64.0.0.0/7", "fd00::/15")

	id := s.await("the identity is known", known)

	want := []netip.Prefix{netip.MustParsePrefix("64.0.0.0/7"), netip.MustParsePrefix("172.30.0.0/16"), netip.MustParsePrefix("fd00::/15")}
	assert.Equal(t, want, id.Unconfirmed.CIDRs)

	wantAll(t, "pod CIDRs", id.PodCIDRs, want...)

	for _, text := range []string{"172.30.0.0/16 contains the address 172.30.7.7 of Node worker", "64.0.0.0/7 is shorter than /8", "fd00::/15 is shorter than /16"} {
		event := <-s.recorder.Events
		assert.Contains(t, event, controlplane.ReasonImplausibleCIDR)
		assert.Contains(t, event, text)
	}

	s.refresh()

	assert.Empty(t, s.recorder.Events)
}

// An upgrade must not deny the requests of machines in a CIDR that pod CIDRs have always been allocated from.
func TestReader_ChecksCIDRsOfPodCIDRs(t *testing.T) {
	plausible, containing := netip.MustParsePrefix("10.250.0.0/16"), netip.MustParsePrefix("172.30.0.0/16")
	s := newSuite(t, bed.Kube.Config(), func(_ *suite, cfg *controlplane.Config) {
		cfg.PodCIDRs = func() []netip.Prefix { return []netip.Prefix{plausible, containing} }
	})
	s.add("cp-1", talosmachine.TypeControlPlane)
	register(s.Suite, "worker", "172.30.7.7")
	label(s.Suite, "cp-1")

	id := s.await("the identity is known", known)
	wantAll(t, "pod CIDRs", id.PodCIDRs, plausible, containing)
	wantAll(t, "unconfirmed CIDRs", id.Unconfirmed.CIDRs, containing)

	assert.False(t, slices.Contains(id.Unconfirmed.CIDRs, plausible), "unconfirmed CIDRs are %v", id.Unconfirmed.CIDRs)

	assert.Contains(t, <-s.recorder.Events, "172.30.0.0/16, from which pod CIDRs are allocated, contains the address 172.30.7.7 of Node worker")
}
