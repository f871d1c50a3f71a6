package csrapproval_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/kubernetes"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// shiftedClock is the system clock plus an offset.
type shiftedClock struct {
	clock.RealClock

	offset atomic.Int64
}

func (c *shiftedClock) Now() time.Time { return time.Now().Add(time.Duration(c.offset.Load())) }

func (c *shiftedClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

func (c *shiftedClock) shift(d time.Duration) { c.offset.Add(int64(d)) }

// takeAddress makes the attacker's machine report the address, and its Node list it.
func (s suite) takeAddress(attacker worker, addr netip.Addr) {
	s.Helper()
	s.report(attacker, "eth1", addr)
	s.list(attacker, addr)
	s.awaitMachine(attacker.name, "to have the address", func(m machine.Machine) bool { return m.HasAddress(addr) })
}

// patchStatus patches the status of a Node as its kubelet can.
func (s suite) patchStatus(nodename, patch string) {
	s.Helper()

	_, err := s.Client.CoreV1().Nodes().Patch(s.Context(), nodename, types.StrategicMergePatchType, []byte(`{"status":`+patch+`}`), metav1.PatchOptions{}, "status")
	require.NoError(s, err)
}

// The administrator deletes the Node of a machine that still runs, and whose kubelet registers only when it restarts.
func TestController_KeepsAddressesOfDeletedNode(t *testing.T) {
	s := parallel(t)

	unlisted := s.plan().addr
	victim, attacker := s.known(on("eth1", unlisted, 32)), s.known()

	var names []string

	for _, addr := range []netip.Addr{victim.addr, unlisted} {
		s.takeAddress(attacker, addr)
		names = append(names, s.post(attacker, request{ips: []netip.Addr{addr}}))
		s.awaitDeferred(names[len(names)-1], csrpolicy.CodeOwnedByOthers)
	}

	s.Remove(victim.name)
	s.awaitCondition(victim.name, inventory.Unknown)

	names = append(names, s.post(attacker, request{ips: []netip.Addr{victim.addr}}))
	for _, name := range names {
		s.assertPending(name)
	}

	s.AwaitEvent(names[2], csrapproval.ReasonDeferred, fmt.Sprintf("Node %q, which was deleted", victim.name))
}

func TestController_ApprovesReregisteredNode(t *testing.T) {
	s := parallel(t)

	w := s.known()
	s.Remove(w.name)
	s.awaitCondition(w.name, inventory.Unknown)
	s.register(w)
	s.awaitIssued(s.post(w, request{}))
}

// A bootstrap token registers a Node under the name of a deleted one, whose machine still runs.
func TestController_KeepsAddressesOfReregisteredNode(t *testing.T) {
	s := parallel(t)

	victim, attacker := s.known(), s.boot(s.plan())
	require.NoError(t, attacker.machine.SetNodename(s.Context(), victim.name))
	s.report(attacker, "eth1", victim.addr)

	s.Remove(victim.name)
	s.awaitCondition(victim.name, inventory.Unknown)

	attacker.name = victim.name
	s.register(attacker)
	s.list(attacker, victim.addr)
	s.awaitMachine(victim.name, "as the attacker's", func(m machine.Machine) bool { return m.HasAddress(attacker.addr) })

	name := s.post(attacker, request{ips: []netip.Addr{victim.addr}})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
	s.assertPending(name)
}

// record records a worker's machine with the addresses of both IP families, as the leader does.
func (s suite) record(w worker, other netip.Addr) {
	s.Helper()

	m := s.main.Inventory.Get(w.name).Machine
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": noderecord.Record{
		NodeID: noderecord.Fingerprint(m.NodeID), Volume: noderecord.ID([]byte(m.EphemeralID)), Address: w.addr, OtherAddress: other,
	}.ByLeader()}})
	require.NoError(s, err)
	s.PatchNode(w.name, noderecord.FieldManager, string(patch))
}

// With the credentials of the kubelet, which a bootstrap token obtains, an attacker removes what the Node of a machine that
// is down lists, and maybe has another machine answer for it. The next leader has not seen the machine.
func TestController_KeepsRecordedAddressesOfMachineThatIsDown(t *testing.T) {
	for name, test := range map[string]struct {
		join     func(suite) worker
		answered bool
	}{
		"control plane":                {suite.secondControlPlane, false},
		"worker":                       {func(s suite) worker { return s.known() }, false},
		"worker, and another responds": {func(s suite) worker { return s.known() }, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := alone(t)
			victim, attacker := test.join(s), s.known()
			other := netip.AddrFrom16([16]byte{0: 0xfd, 14: victim.addr.As4()[2], 15: victim.addr.As4()[3]})
			s.format(victim, "volume of "+victim.name)
			s.report(victim, "eth0", other)
			require.NoError(t, victim.machine.SetNodeIPs(t.Context(), victim.addr, other)) // the leader would remove it from the record
			s.restart()                                                                    // it reads the volume
			s.awaitMachine(victim.name, "with its volume", func(m machine.Machine) bool { return m.EphemeralID != "" && m.HasAddress(other) })
			s.record(victim, other)
			require.NoError(t, victim.machine.Stop(t.Context()))

			impostor := s.boot(s.plan())
			require.NoError(t, impostor.machine.SetNodename(t.Context(), victim.name))
			s.restart()

			if test.answered {
				s.move(victim, impostor.addr)
				s.awaitCondition(victim.name, inventory.Current)
			} else {
				s.awaitCondition(victim.name, inventory.Unreachable)
			}

			s.unlist(victim)

			for _, addr := range []netip.Addr{victim.addr, other} {
				s.takeAddress(attacker, addr)
				name := s.post(attacker, request{ips: []netip.Addr{addr}})
				s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
				s.assertPending(name)
			}
		})
	}
}

// A worker that is off keeps its address until its Node is deleted. A new worker gets the DHCP lease: its Node lists the
// node IP, but its kubelet gets no certificate for it before.
func TestController_InitializesMachineAtRecordedAddressOfAnother(t *testing.T) {
	s := alone(t)

	old, next := s.known(), s.plan()
	require.NoError(t, old.machine.Stop(t.Context()))
	s.record(worker{name: old.name, addr: next.addr}, netip.Addr{})

	next = s.boot(next)
	s.register(next)
	s.AwaitNode(next.name, ctest.Initialized)

	name := s.post(next, request{})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
	s.unlist(old)
	s.restart()
	s.assertPending(name)
	assert.Contains(t, s.Node(next.name).Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: next.addr.String()})

	s.Remove(old.name)
	s.restart()
	s.awaitIssued(name)
}

// unlist removes all addresses from a Node, as its kubelet can.
func (s suite) unlist(w worker) {
	s.Helper()

	kubelet, err := kubernetes.NewForConfig(s.Kube.KubeletConfig(w.name))
	require.NoError(s, err)

	empty := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}},"status":{"addresses":null}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr)

	var patched *corev1.Node

	for _, subresources := range [][]string{nil, {"status"}} {
		patched, err = kubelet.CoreV1().Nodes().Patch(s.Context(), w.name, types.MergePatchType, empty, metav1.PatchOptions{}, subresources...)
		require.NoError(s, err)
	}

	require.Len(s, claims.ListedBy(patched), 1, "the Node's name")

	// The leader may have listed the addresses of a machine that responds again.
	s.eventually("the cache has the Node without addresses, or a newer version", func() bool {
		node, err := s.main.Nodes.Lister().Get(w.name)
		if err != nil {
			return false
		}

		order, err := resourceversion.CompareResourceVersion(node.ResourceVersion, patched.ResourceVersion)

		return err == nil && order >= 0
	})
}

// An autoscaler gives the address of a deleted instance to a new one. Whether the old machine still runs does not
// matter.
func TestController_ReleasesAddressOfDeletedNode(t *testing.T) {
	s := alone(t)

	clk := &shiftedClock{}
	leader, old, next := s.another(clk), s.known(), s.known()
	s.takeAddress(next, old.addr)
	s.eventually("the leader knows both machines", func() bool {
		return leader.machineIs(old.name, inventory.Current) && leader.Inventory.Get(next.name).Machine.HasAddress(old.addr)
	})

	name := s.post(next, request{ips: []netip.Addr{old.addr}})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
	s.Remove(old.name)
	s.eventually("the leader has forgotten the machine", func() bool { return leader.machineIs(old.name, inventory.Unknown) })

	clk.shift(14 * time.Minute)
	leader.controller.Resync()
	s.assertPending(name)

	clk.shift(time.Minute)
	s.awaitIssued(name)
}

// The API server does not say which Nodes were deleted before.
func TestController_NewLeaderReleasesAddressesOfDeletedNode(t *testing.T) {
	s := alone(t)

	old, next := s.known(), s.known()
	s.takeAddress(next, old.addr)

	name := s.post(next, request{ips: []netip.Addr{old.addr}})
	s.Remove(old.name)
	s.awaitCondition(old.name, inventory.Unknown)
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
	s.assertPending(name)

	s.restart()
	s.awaitIssued(name)
}

// The machine of the deleted Node responds under its new name. The identity and the address are the same, which a
// different machine could report, too.
func TestController_ApprovesRenamedMachineAfterOldNodeWasDeleted(t *testing.T) {
	s := alone(t)

	clk := &shiftedClock{}
	leader, old := s.another(clk), s.known()
	require.NoError(t, old.machine.Stop(s.Context()))

	renamed := s.plan()
	renamed.addr = old.addr
	renamed = s.boot(renamed)
	s.register(renamed)
	s.eventually("the leader knows the machine by its new name", func() bool {
		return leader.machineIs(renamed.name, inventory.Current) && leader.Inventory.Get(old.name).Responding == renamed.name
	})

	name := s.post(renamed, request{})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
	s.Remove(old.name)
	s.assertPending(name)

	clk.shift(16 * time.Minute)
	leader.controller.Resync()
	s.awaitIssued(name)
}

// A kubelet can write anything into the status and the annotations of its Node.
func TestController_IgnoresClaimsThatMachineContradicts(t *testing.T) {
	for name, osImage := range map[string]string{"as another system": "Ubuntu 24.04 LTS", "as Talos": kube.DefaultOSImage} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)

			attacker := s.known()
			victims := []worker{s.known(), s.known(), s.known()}

			var addresses []string
			for _, victim := range victims {
				addresses = append(addresses, fmt.Sprintf(`{"type":"InternalIP","address":%q}`, victim.addr), fmt.Sprintf(`{"type":"Hostname","address":%q}`, victim.name))
			}

			s.list(attacker, victims[0].addr)
			s.patchStatus(attacker.name, fmt.Sprintf(`{"nodeInfo":{"osImage":%q},"addresses":[{"$patch":"replace"},%s]}`, osImage, strings.Join(addresses, ",")))
			s.awaitCached(attacker.name, osImage, victims[0].addr.String()) // the status may have been corrected already

			for _, victim := range victims {
				s.awaitIssued(s.post(victim, request{}))
			}
		})
	}
}

// The machine still responds to talos-ccm, so the operating system that its kubelet reports is wrong.
func TestController_ChecksNodeThatStopsReportingTalos(t *testing.T) {
	s := parallel(t)

	w := s.known()
	s.patchStatus(w.name, `{"nodeInfo":{"osImage":"Ubuntu 24.04 LTS"}}`)
	s.awaitCached(w.name, "Ubuntu 24.04 LTS")
	s.awaitDenied(s.post(w, request{names: []string{"kubernetes"}}))
}
