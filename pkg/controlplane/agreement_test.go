package controlplane_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// setPodCIDRs sets the pod CIDRs that a machine reports.
func (s *suite) setPodCIDRs(m *talostest.Machine, cidrs ...string) {
	s.Helper()

	s.require(safe.StateModify(s.Context(), m.State(), k8s.NewControllerManagerConfig(), func(config *k8s.ControllerManagerConfig) error {
		config.TypedSpec().PodCIDRs = cidrs

		return nil
	}))
}

func TestReader_NeedsMostMachines(t *testing.T) {
	s := newSuite(t, cluster.Config())

	var machines []*talostest.Machine

	for _, nodename := range []string{"cp-1", "cp-2", "cp-3"} {
		m := s.add(nodename, talosmachine.TypeControlPlane)
		m.CutOff()
		s.label(nodename)

		machines = append(machines, m)
	}

	machines[0].Reconnect()
	s.await("one machine has answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.PodCIDRs) > 0 })
	s.refresh()

	if s.identity().Known {
		t.Errorf("identity is known from one machine of three: %+v", s.identity())
	}

	machines[1].Reconnect()
	s.await("the identity is known", known)
}

func TestReader_TrustsTheLocalMachine(t *testing.T) {
	s := newSuite(t, cluster.Config(), func(s *suite, cfg *controlplane.Config) {
		local, err := s.talos.AddMachine(talostest.MachineSpec{Nodename: "local", Type: talosmachine.TypeControlPlane})
		s.require(err)

		cfg.LocalState = local.State()

		// A kubelet can have its Node list any address.
		s.register("local", netip.MustParseAddr("192.0.2.1"))
		s.label("local")
		s.setPodCIDRs(local, "10.245.0.0/16")
	})

	for _, nodename := range []string{"cp-1", "cp-2"} {
		s.add(nodename, talosmachine.TypeControlPlane).CutOff()
		s.label(nodename)
	}

	id := s.await("the identity is known", known)
	if local := netip.MustParsePrefix("10.245.0.0/16"); !slices.Contains(id.PodCIDRs, local) || slices.Contains(id.Unconfirmed.CIDRs, local) {
		t.Errorf("got %+v", id)
	}
}

func TestReader_MinorityIsUnconfirmed(t *testing.T) {
	s := newSuite(t, cluster.Config())

	old, changed := netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.245.0.0/16")

	var machines []*talostest.Machine
	for _, nodename := range []string{"cp-1", "cp-2", "cp-3"} {
		machines = append(machines, s.add(nodename, talosmachine.TypeControlPlane))
		s.label(nodename)
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
	s := newSuite(t, cluster.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)
	s.register("worker", netip.MustParseAddr("172.30.7.7"))
	s.label("cp-1")
	s.setPodCIDRs(m, "10.0.0.0/8", "172.30.0.0/16", "64.0.0.0/7", "fd00::/15")

	id := s.await("the identity is known", known)

	want := []netip.Prefix{netip.MustParsePrefix("64.0.0.0/7"), netip.MustParsePrefix("172.30.0.0/16"), netip.MustParsePrefix("fd00::/15")}
	if !slices.Equal(id.Unconfirmed.CIDRs, want) {
		t.Errorf("unconfirmed CIDRs are %v, want %v", id.Unconfirmed.CIDRs, want)
	}

	wantAll(t, "pod CIDRs", id.PodCIDRs, want...)

	for _, text := range []string{"172.30.0.0/16 contains the address 172.30.7.7 of Node worker", "64.0.0.0/7 is shorter than /8", "fd00::/15 is shorter than /16"} {
		event := <-s.recorder.Events
		if !strings.Contains(event, controlplane.ReasonImplausibleCIDR) || !strings.Contains(event, text) {
			t.Errorf("got Event %q, want %q", event, text)
		}
	}

	s.refresh()

	if len(s.recorder.Events) > 0 {
		t.Errorf("reported again: %q", <-s.recorder.Events)
	}
}

// An upgrade must not deny the requests of machines in a CIDR that pod CIDRs have always been allocated from.
func TestReader_ChecksCIDRsOfPodCIDRs(t *testing.T) {
	plausible, containing := netip.MustParsePrefix("10.250.0.0/16"), netip.MustParsePrefix("172.30.0.0/16")
	s := newSuite(t, cluster.Config(), func(_ *suite, cfg *controlplane.Config) {
		cfg.PodCIDRs = func() []netip.Prefix { return []netip.Prefix{plausible, containing} }
	})
	s.add("cp-1", talosmachine.TypeControlPlane)
	s.register("worker", netip.MustParseAddr("172.30.7.7"))
	s.label("cp-1")

	id := s.await("the identity is known", known)
	wantAll(t, "pod CIDRs", id.PodCIDRs, plausible, containing)
	wantAll(t, "unconfirmed CIDRs", id.Unconfirmed.CIDRs, containing)

	if slices.Contains(id.Unconfirmed.CIDRs, plausible) {
		t.Errorf("unconfirmed CIDRs are %v", id.Unconfirmed.CIDRs)
	}

	if event := <-s.recorder.Events; !strings.Contains(event, "172.30.0.0/16, from which pod CIDRs are allocated, contains the address 172.30.7.7 of Node worker") {
		t.Errorf("got Event %q", event)
	}
}
