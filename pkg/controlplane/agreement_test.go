package controlplane_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// setPodCIDRs sets the pod CIDRs that a machine reports.
func (s *suite) setPodCIDRs(m *talostest.Machine, cidrs ...string) {
	s.Helper()

	require.NoError(s, safe.StateModify(s.Context(), m.State(), k8s.NewControllerManagerConfig(k8s.ControllerManagerConfigID), func(config *k8s.ControllerManagerConfig) error {
		config.TypedSpec().PodCIDRs = cidrs

		return nil
	}))
}

func TestReader_NeedsOnlyTheLocalMachine(t *testing.T) {
	s := newSuite(t, bed.Kube.Config(), func(s *suite, _ *controlplane.Config) {
		s.local = s.Machine(talostest.MachineSpec{Nodename: "local", Type: talosmachine.TypeControlPlane, ServeSocket: true})

		// A kubelet can have its Node list any address.
		register(s.Suite, "local", "192.0.2.1")
		label(s.Suite, "local")
		s.setPodCIDRs(s.local, "10.245.0.0/16")
	})

	var others []*talostest.Machine

	for _, nodename := range []string{"cp-1", "cp-2"} {
		m := s.add(nodename, talosmachine.TypeControlPlane)
		require.NoError(s, m.Stop(s.Context()))
		label(s.Suite, nodename)

		others = append(others, m)
	}

	id := s.await("the identity is known", known)
	require.Len(t, id.Reported, 1)
	assert.Equal(t, `machine "local"`, id.Reported[0].Source)
	wantAll(t, "pod CIDRs", id.Reported[0].PodCIDRs, netip.MustParsePrefix("10.245.0.0/16"))

	// The network of most machines is needed soon.
	s.reader.Network().Subscribe(func() {})
	s.refresh()
	others[0].Start()
	ctest.Eventually(s, "most machines are read", func() bool {
		s.step()

		return len(s.reader.Network().Current().KCMConfigs) == 2
	})
}

func TestReader_NamesTheMachineOfEachReport(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())

	for i, nodename := range []string{"cp-1", "cp-2", "cp-3"} {
		s.setPodCIDRs(s.add(nodename, talosmachine.TypeControlPlane), fmt.Sprintf("10.%d.0.0/16", 100+i))
		label(s.Suite, nodename)
	}

	id := s.await("all machines have answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.Reported) == 3 })

	for i, report := range id.Reported {
		assert.Equal(t, fmt.Sprintf("machine %q", fmt.Sprintf("cp-%d", i+1)), report.Source)
		assert.Equal(t, []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/16", 100+i))}, report.PodCIDRs)
	}

	assert.Empty(t, id.Stated.PodCIDRs)
}

// TestReader_ServiceCIDRThatContainsNodesIsNotStated: the requests of these Nodes' kubelets must not be denied.
func TestReader_ServiceCIDRThatContainsNodesIsNotStated(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())
	s.addControlPlane("cp-1")

	services := netip.MustParsePrefix("10.0.0.0/16") // of the API server
	id := s.await("the identity is known", known)
	wantAll(t, "service CIDRs", id.Stated.ServiceCIDRs, services)

	register(s.Suite, "worker", "10.0.7.7")

	id = s.await("the Node is known", func(id csrpolicy.ClusterIdentity) bool { return len(id.Stated.ServiceCIDRs) == 0 })
	assert.True(t, id.Known)
	assert.Equal(t, csrpolicy.Report{
		Source: "a ServiceCIDR that contains addresses of Nodes", ClusterSubjects: csrpolicy.ClusterSubjects{ServiceCIDRs: []netip.Prefix{services}},
	}, id.Reported[0])
}
