package csrapproval_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// controlPlanePair returns a second control-plane machine with its Node, and its impostor.
func (s suite) controlPlanePair() (victim, impostor worker) {
	s.Helper()

	victim, impostor = s.bootPair()
	s.register(victim)
	s.PatchNode(victim.name, "", labeledControlPlane)

	return victim, impostor
}

// bootPair returns a second control-plane machine, and an impostor: a machine of the cluster that reports the same nodename and
// role, and the address of the cluster endpoint.
func (s suite) bootPair() (victim, impostor worker) {
	s.Helper()

	victim = s.bootAs(s.plan(), talostest.MachineSpec{Type: talosmachine.TypeControlPlane})
	impostor = s.bootAs(s.plan(), talostest.MachineSpec{Type: talosmachine.TypeControlPlane, Addresses: []talostest.Address{on("eth1", endpointIP, 32)}})
	require.NoError(s, impostor.machine.SetNodename(s.Context(), victim.name))

	s.Talos.SetEtcdMembers(controlPlaneIP, victim.addr)
	s.Cleanup(func() { s.Talos.SetEtcdMembers(controlPlaneIP) })

	return victim, impostor
}

// move makes the kubelet of a Node list another address.
func (s suite) move(w worker, addr netip.Addr) {
	s.Helper()

	kubelet, err := kubernetes.NewForConfig(s.Kube.KubeletConfig(w.name))
	require.NoError(s, err)

	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%s"}}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr, addr)
	_, err = kubelet.CoreV1().Nodes().Patch(s.Context(), w.name, types.MergePatchType, patch, metav1.PatchOptions{})
	require.NoError(s, err)
}

// The kubelet's credentials of a control-plane Node must not suffice for a certificate of the cluster endpoint.
func TestController_DeniesRequestOfControlPlaneImpostor(t *testing.T) {
	s := alone(t)

	victim, impostor := s.controlPlanePair()
	s.awaitCondition(victim.name, inventory.Current)
	s.move(victim, impostor.addr)
	s.restart()

	// The Node's status still lists the real machine, which does not have the address of the cluster endpoint.
	s.awaitDenied(s.post(victim, request{names: []string{victim.name}, ips: []netip.Addr{impostor.addr, endpointIP}}))
	assert.Empty(t, impostor.machine.Calls())

	s.move(victim, victim.addr)
	s.awaitIssued(s.post(victim, request{}))
}

// A Node may be registered with a bootstrap token before its control-plane machine joins and Talos labels the Node. A
// request that was posted before is reviewed when the Node gets the label, maybe before its machine is dialed again.
func TestController_DropsImpostorOnceNodeIsLabeled(t *testing.T) {
	for _, followLast := range []bool{true, false} { // the last one is for later tests, too
		t.Run(fmt.Sprintf("controller before reflector: %t", followLast), func(t *testing.T) {
			s := alone(t)
			s.followLast = followLast
			s.restart()

			victim, impostor := s.bootPair()
			s.register(worker{name: victim.name, addr: impostor.addr})
			s.awaitMachine(victim.name, "as a worker", func(m machine.Machine) bool { return m.HasAddress(impostor.addr) })

			wanted := request{names: []string{victim.name}, ips: []netip.Addr{impostor.addr, endpointIP}}
			before := s.post(victim, wanted)
			s.awaitDeferred(before, csrpolicy.CodeControlPlaneUnclear)
			s.PatchNode(victim.name, "", labeledControlPlane)

			// They are pending until the real machine has been read. A review after that denies them.
			for _, name := range []string{before, s.post(victim, wanted)} {
				ctest.Eventually(s, "request is reviewed without the impostor", func() bool {
					csr := s.get(name)
					require.False(s, approved(csr), name)

					return denied(csr) || strings.Contains(fmt.Sprint(ctest.Messages(s.Events(name, csrapproval.ReasonDeferred))), csrpolicy.CodeMachineUnknown)
				})
			}
		})
	}
}

// An impostor must not cause the denial of the requests of all kubelets.
func TestController_IgnoresPodCIDRsOfControlPlaneImpostor(t *testing.T) {
	s := alone(t)

	victim, impostor := s.controlPlanePair()

	config := k8s.NewControllerManagerConfig(k8s.ControllerManagerConfigID)
	require.NoError(t, safe.StateModify(s.Context(), impostor.machine.State(), config, func(config *k8s.ControllerManagerConfig) error {
		config.TypedSpec().PodCIDRs = []string{"0.0.0.0/1", "128.0.0.0/1"}

		return nil
	}))

	s.move(victim, impostor.addr)
	s.restart() // every control-plane machine is read at the start

	for range 3 {
		s.awaitIssued(s.post(s.join(), request{}))
	}

	for _, report := range s.main.controlPlane.Identity().Current().Reported {
		assert.NotContains(t, report.PodCIDRs, netip.MustParsePrefix("0.0.0.0/1"))
	}
}
