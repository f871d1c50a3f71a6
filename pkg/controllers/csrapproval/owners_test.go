package csrapproval_test

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
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

// deleteNode deletes a Node as an administrator.
func (s suite) deleteNode(nodename string) {
	s.Helper()

	s.require(s.client.CoreV1().Nodes().Delete(s.Context(), nodename, metav1.DeleteOptions{}))
}

// takeAddress makes the attacker's machine report the address, and its Node list it.
func (s suite) takeAddress(attacker worker, addr netip.Addr) {
	s.Helper()

	s.require(attacker.machine.AddAddress(s.Context(), "eth1", netip.PrefixFrom(addr, 24)))
	s.list(attacker, addr)
	s.eventually("the attacker reports the address", func() bool { return s.main.inventory.Get(attacker.name).Machine.HasAddress(addr) })
}

// patchStatus patches the status of a Node as its kubelet can.
func (s suite) patchStatus(nodename, patch string) {
	s.Helper()

	_, err := s.client.CoreV1().Nodes().Patch(s.Context(), nodename, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	s.require(err)
}

// The administrator deletes the Node of a machine that still runs, and whose kubelet registers only when it restarts.
func TestController_KeepsAddressesOfDeletedNode(t *testing.T) {
	s := parallel(t)

	unlisted := netip.AddrFrom4([4]byte{172, 31, 140, byte(s.last.Add(1))})
	victim := s.known(talostest.Address{Link: "eth1", Prefix: netip.PrefixFrom(unlisted, 32)})
	attacker := s.known()

	var names []string

	for _, addr := range []netip.Addr{victim.addr, unlisted} {
		s.takeAddress(attacker, addr)
		name := s.post(attacker, request{ips: []netip.Addr{addr}})
		s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
		names = append(names, name)
	}

	s.deleteNode(victim.name)

	names = append(names, s.post(attacker, request{ips: []netip.Addr{victim.addr}}))
	for _, name := range names {
		s.wantPending(name)
	}

	s.eventually("the Event names the deleted Node", func() bool {
		return strings.Contains(strings.Join(s.messages(names[2], csrapproval.ReasonDeferred), ";"), fmt.Sprintf("Node %q, which was deleted", victim.name))
	})
}

func TestController_ApprovesReregisteredNode(t *testing.T) {
	s := parallel(t)

	w := s.known()
	s.deleteNode(w.name)
	s.eventually("the Node is forgotten", func() bool { return s.main.inventory.Get(w.name).Condition == inventory.Unknown })
	s.register(w)
	s.awaitIssued(s.post(w, request{}))
}

// A bootstrap token registers a Node under the name of a deleted one, whose machine still runs.
func TestController_KeepsAddressesOfReregisteredNode(t *testing.T) {
	s := parallel(t)

	victim, attacker := s.known(), s.boot(s.plan())
	s.require(attacker.machine.SetNodename(s.Context(), victim.name))
	s.require(attacker.machine.AddAddress(s.Context(), "eth1", netip.PrefixFrom(victim.addr, 24)))

	s.deleteNode(victim.name)
	s.eventually("the Node is forgotten", func() bool { return s.main.inventory.Get(victim.name).Condition == inventory.Unknown })

	attacker.name = victim.name
	s.register(attacker)
	s.list(attacker, victim.addr)
	s.eventually("the attacker's machine responds", func() bool {
		return s.main.inventory.Get(victim.name).Machine.HasAddress(attacker.addr)
	})

	name := s.post(attacker, request{ips: []netip.Addr{victim.addr}})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
	s.wantPending(name)
}

// An autoscaler gives the address of a deleted instance to another one.
func TestController_ReleasesAddressOfSilentDeletedNode(t *testing.T) {
	s := alone(t)

	clk := &shiftedClock{}
	leader, err := s.startAt(s.Context(), clk)
	s.require(err)
	t.Cleanup(leader.stop)

	former, next := s.known(), s.known()
	s.takeAddress(next, former.addr)
	s.eventually("the leader knows both machines", func() bool {
		return leader.inventory.Get(former.name).Condition == inventory.Current && leader.inventory.Get(next.name).Machine.HasAddress(former.addr)
	})

	name := s.post(next, request{ips: []netip.Addr{former.addr}})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
	s.deleteNode(former.name)
	s.eventually("its machine is watched by the name of the deleted Node", func() bool {
		return csrapproval.FormerCondition(leader.controller, former.name) == inventory.Current
	})

	// It still responds.
	clk.shift(16 * time.Minute)
	leader.controller.Resync()
	s.wantPending(name)

	s.require(former.machine.Stop(context.WithoutCancel(s.Context())))

	// At most twice: the first time, the leader may not have noticed yet that the machine is silent.
	err = wait.PollUntilContextTimeout(s.Context(), timeout/4, timeout, true, func(context.Context) (bool, error) {
		clk.shift(16 * time.Minute)

		return s.issuedWithin(name, timeout/4), nil
	})
	s.require(err)
}

func (s suite) issuedWithin(name string, limit time.Duration) bool {
	s.Helper()

	return wait.PollUntilContextTimeout(s.Context(), interval, limit, true, func(context.Context) (bool, error) {
		return len(s.get(name).Status.Certificate) > 0, nil
	}) == nil
}

// The machine of the deleted Node responds under its new name: the identity and the address are the same.
func TestController_ApprovesRenamedMachineOnceOldNodeIsDeleted(t *testing.T) {
	for name, test := range map[string]struct {
		uuid    string
		pending bool
	}{
		"the same machine": {uuid: "4c4c4544-0036-5410-8051-b8c04f573300"},
		"another machine":  {uuid: "4c4c4544-0036-5410-8051-b8c04f573301", pending: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)

			const uuid = "4c4c4544-0036-5410-8051-b8c04f573300"

			old := s.boot(s.plan())
			nodeID := "node-id-of-" + old.name

			s.require(old.machine.SetIdentity(s.Context(), nodeID, uuid))
			s.register(old)
			s.eventually("the machine is known", func() bool { return s.main.inventory.Get(old.name).Machine.NodeID == nodeID })
			s.patchStatus(old.name, `{"status":{"conditions":[{"type":"Ready","status":"Unknown"}]}}`)
			s.require(old.machine.Stop(s.Context()))

			renamed := s.plan()
			renamed.addr = old.addr
			renamed = s.boot(renamed)
			s.require(renamed.machine.SetIdentity(s.Context(), nodeID, test.uuid))
			s.register(renamed)
			s.eventually("the new name is known", func() bool {
				return s.main.inventory.Get(renamed.name).Machine.UUID() == test.uuid && s.main.inventory.Get(old.name).Responding == renamed.name
			})

			name := s.post(renamed, request{})
			s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
			s.deleteNode(old.name)

			if test.pending {
				s.wantPending(name)
			} else {
				s.awaitIssued(name)
			}
		})
	}
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
			s.patchStatus(attacker.name, fmt.Sprintf(`{"status":{"nodeInfo":{"osImage":%q},"addresses":[{"$patch":"replace"},%s]}}`, osImage, strings.Join(addresses, ",")))
			s.eventually("the claims are in the cache", func() bool {
				node, err := s.main.nodes.Get(attacker.name)

				return err == nil && node.Status.NodeInfo.OSImage == osImage && strings.Contains(fmt.Sprint(node.Annotations), victims[0].addr.String())
			})

			for _, victim := range victims {
				s.awaitIssued(s.post(victim, request{}))
			}
		})
	}
}

// The machine still responds to talos-ccm, so what its kubelet says about the operating system is not true.
func TestController_ChecksNodeThatStopsReportingTalos(t *testing.T) {
	s := parallel(t)

	w := s.known()
	s.patchStatus(w.name, `{"status":{"nodeInfo":{"osImage":"Ubuntu 24.04 LTS"}}}`)
	s.eventually("the system is in the cache", func() bool {
		node, err := s.main.nodes.Get(w.name)

		return err == nil && node.Status.NodeInfo.OSImage == "Ubuntu 24.04 LTS"
	})

	s.await(s.post(w, request{names: []string{"kubernetes"}}), "denied", denied)
}
