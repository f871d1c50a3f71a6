package csrapproval_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// controlPlanePair returns a second control-plane machine with its Node, and an impostor: a machine of the cluster that
// reports the same nodename and role, and the address of the cluster endpoint.
func (s suite) controlPlanePair() (victim, impostor worker) {
	s.Helper()

	victim, impostor = s.plan(), s.plan()

	for _, w := range []*worker{&victim, &impostor} {
		var addresses []talostest.Address
		if w == &impostor {
			addresses = []talostest.Address{{Link: "eth1", Prefix: netip.MustParsePrefix(endpointIP + "/32")}}
		}

		m, err := s.addMachine(talostest.MachineSpec{Nodename: w.name, Type: talosmachine.TypeControlPlane, Addresses: addresses}, w.addr)
		s.require(err)

		w.machine = m
	}

	s.require(impostor.machine.SetNodename(s.Context(), victim.name))
	s.talos.SetEtcdMembers(netip.MustParseAddr(controlPlaneIP), victim.addr)
	s.Cleanup(func() { s.talos.SetEtcdMembers(netip.MustParseAddr(controlPlaneIP)) })
	s.register(victim)
	s.require(s.labelControlPlane(s.Context(), victim.name))

	return victim, impostor
}

// move makes the kubelet of a Node list another address.
func (s suite) move(w worker, addr netip.Addr) {
	s.Helper()

	kubelet, err := kubernetes.NewForConfig(s.kube.KubeletConfig(w.name))
	s.require(err)

	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%s"}}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr, addr)
	_, err = kubelet.CoreV1().Nodes().Patch(s.Context(), w.name, types.MergePatchType, patch, metav1.PatchOptions{})
	s.require(err)
}

// awaitCondition waits until the inventory has the machine of a Node in a condition.
func (s suite) awaitCondition(nodename string, condition inventory.Condition) {
	s.Helper()
	s.eventually(nodename+" is "+condition.String(), func() bool { return s.main.inventory.Get(nodename).Condition == condition })
}

// The kubelet's credentials of a control-plane Node must not suffice for a certificate of the cluster endpoint.
func TestController_DeniesRequestOfControlPlaneImpostor(t *testing.T) {
	s := alone(t)

	victim, impostor := s.controlPlanePair()
	s.awaitCondition(victim.name, inventory.Current)
	s.move(victim, impostor.addr)
	s.restart()

	// The Node's status still lists the real machine, which does not have the address of the cluster endpoint.
	name := s.post(victim, request{names: []string{victim.name}, ips: []netip.Addr{impostor.addr, netip.MustParseAddr(endpointIP)}})
	s.await(name, "denied", denied)

	if calls := impostor.machine.Calls(); len(calls) > 0 {
		t.Errorf("the impostor was read: %v", calls)
	}

	s.move(victim, victim.addr)
	s.awaitIssued(s.post(victim, request{}))
}

// A Node may be registered with a bootstrap token before its control-plane machine joins and Talos labels the Node. A
// request that was posted before is reviewed when the Node gets the label, maybe before its machine is dialed again.
func TestController_DropsImpostorOnceNodeIsLabeled(t *testing.T) {
	for order, followFirst := range map[string]bool{"reflector before controller": true, "controller before reflector": false} {
		t.Run(order, func(t *testing.T) {
			s := alone(t)
			s.followFirst = followFirst
			s.restart()

			victim, impostor := s.controlPlanePair()
			s.require(s.unlabelControlPlane(s.Context(), victim.name))
			s.move(victim, impostor.addr)
			s.eventually("the impostor is taken for a worker", func() bool {
				return s.main.inventory.Get(victim.name).Machine.HasAddress(impostor.addr)
			})

			wanted := request{names: []string{victim.name}, ips: []netip.Addr{impostor.addr, netip.MustParseAddr(endpointIP)}}
			before := s.post(victim, wanted)
			s.awaitDeferred(before, csrpolicy.CodeControlPlaneUnclear)
			s.require(s.labelControlPlane(s.Context(), victim.name))

			for _, name := range []string{before, s.post(victim, wanted)} {
				s.eventually("request "+name+" is deferred because the machine is unknown", func() bool {
					if approved(s.get(name)) {
						s.Fatalf("request %s was approved", name)
					}

					return slices.ContainsFunc(s.messages(name, csrapproval.ReasonDeferred), func(message string) bool {
						return strings.Contains(message, csrpolicy.CodeMachineUnknown)
					})
				})
			}
		})
	}
}

// An impostor must not be able to have the requests of all kubelets denied.
func TestController_IgnoresPodCIDRsOfControlPlaneImpostor(t *testing.T) {
	s := alone(t)

	victim, impostor := s.controlPlanePair()

	config := k8s.NewControllerManagerConfig()
	s.require(safe.StateModify(s.Context(), impostor.machine.State(), config, func(config *k8s.ControllerManagerConfig) error {
		config.TypedSpec().PodCIDRs = []string{"0.0.0.0/1", "128.0.0.0/1"}

		return nil
	}))

	s.move(victim, impostor.addr)
	s.restart() // every control-plane machine is read at the start

	for range 3 {
		s.awaitIssued(s.post(s.join(), request{}))
	}

	if id := s.main.controlPlane.Identity().Current(); slices.Contains(id.PodCIDRs, netip.MustParsePrefix("0.0.0.0/1")) {
		t.Errorf("the identity has the pod CIDRs of the impostor: %+v", id)
	}
}
