package simulation_test

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	talosruntime "github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	ticks = 250
	tick  = 10 * time.Second // the interval of the lifecycle controller
	grace = 5 * time.Minute
)

// installation is Talos on some hardware. It exists until it is wiped, on or off.
type installation struct {
	name, nodeID, uuid string
	address            int
	bootID             string
	stage              talosruntime.MachineStage
	on                 bool
	split              bool // from the controller
	mute               bool // its kubelet cannot reach the API server
	moved              bool // to another address
	then               []func()
}

// shutdown is the announcement of a shutdown by the recorded machine of a Node, which a leader has seen.
type shutdown struct {
	leader  *instance
	machine *installation
	// moved is true if the machine responded at another address before.
	moved bool
	// off counts the ticks since it is known that the machine is off.
	off int
}

// cluster has the installations and Nodes that exist, independently of what the lifecycle controller observes.
type cluster struct {
	*simulation

	installations []*installation
	address       map[string]int       // of Nodes
	heartbeat     map[string]time.Time // of Nodes
	bootID        map[string]string    // of Nodes
	working       map[string]bool      // Nodes that were ready a tick ago, and whose machines ran
	forged        map[string]int       // for how many more ticks an attacker reports that the Nodes are ready
	shutdowns     map[string]*shutdown // by Node, as far as the leader knows
	jumped        atomic.Int64         // of the clock of the controller
	// monitorGrace is the time after which Kubernetes marks the Node of a kubelet that does not report.
	monitorGrace time.Duration
	deleted      []time.Time
}

// The cluster decides by the installations that exist, not by the view of the controller. Discovery is disabled: it
// deletes the Nodes of machines that exist, but have been off for an hour.
func TestLifecycle_RandomHistories(t *testing.T) {
	deleted, lost, working, moved := 0, 0, 0, 0

	for seed := *first; seed < *first+*histories && !t.Failed(); seed++ {
		s := run(t, seed, func(s *simulation) {
			c := &cluster{
				simulation: s, address: map[string]int{}, heartbeat: map[string]time.Time{}, bootID: map[string]string{}, working: map[string]bool{},
				forged: map[string]int{}, shutdowns: map[string]*shutdown{},
			}
			s.reliable, s.checkWrite = node.Alias, s.checkConditions
			s.controllers, s.deleting = c.controllers, c.checkDeletion
			c.play()
			deleted += len(c.deleted)
		})
		s.report(t, seed)
		lost += s.counts["lost"]
		working += s.counts["working"]
		moved += s.counts["moved"]
	}

	t.Logf("%d histories with %d deletions, %d checks of conditions, %d of machines that moved and were shut down", *histories, deleted, working, moved)

	if *histories >= 20 && (deleted < int(*histories)/2 || lost == 0 || moved == 0) && !t.Failed() {
		t.Errorf("got only %d deletions, %d lost replies, and %d checks of machines that moved", deleted, lost, moved)
	}
}

// controllers returns the Run methods of a lifecycle controller and a node controller. They read the cache without waiting.
func (c *cluster) controllers(i *instance) []func(context.Context) {
	nodeController, err := node.New(node.Config{
		Client: newClient(i, node.Alias).kubernetes, Nodes: i.informer.nodes(nil), Inventory: i.inventory, Recorder: &record.FakeRecorder{}, Clock: jumpingClock{cluster: c},
		Options: func() nodespec.Options { return c.options() }, HasNodes: func() bool { return true },
		IsRecorded: func(*corev1.Node) bool { return true }, Workers: 1,
	})
	require.NoError(c.t, err)

	controller, err := lifecycle.New(lifecycle.Config{
		Client: newClient(i, lifecycle.Alias).kubernetes, Nodes: i.informer.nodes(nil), Inventory: i.inventory, Recorder: &record.FakeRecorder{}, Clock: jumpingClock{cluster: c},
		Settings: func() config.CompiledLifecycle {
			return config.CompiledLifecycle{GracePeriod: grace, OutOfServiceTaint: true}
		},
		Selected:  func(*corev1.Node, machine.Machine) bool { return true },
		Spec:      func(*corev1.Node, machine.Machine) nodespec.Spec { return nodespec.Spec{} },
		Members:   func() map[string]netip.Addr { return nil },
		Resetting: func(context.Context) string { return "" },
	})
	require.NoError(c.t, err)

	return []func(context.Context){controller.Run, nodeController.Run}
}

type jumpingClock struct {
	clock.RealClock

	cluster *cluster
}

func (j jumpingClock) Now() time.Time { return time.Now().Add(time.Duration(j.cluster.jumped.Load())) }

// play simulates some time, in which the controller processes everything before and after each change.
func (c *cluster) play() {
	c.monitorGrace = []time.Duration{40 * time.Second, 3 * time.Minute, 10 * time.Minute}[c.IntN(3)]

	for range 4 + c.IntN(12) {
		c.install(c.newName(), c.hardwareID(), c.freeAddress())
	}

	for c.lead(); c.moves < ticks && c.violation == nil; c.moves++ {
		c.pass(tick)
		c.succeed()
		c.settle()
		c.change()
		c.kubelets()
		c.detect()
		c.settle()
		c.checkMaintenance()
		c.checkShutdowns()
	}
}

// checkMaintenance checks that no condition says maintenance ten seconds after the leader has seen that a machine runs, and
// that its Node is ready.
func (c *cluster) checkMaintenance() {
	before := c.working
	c.working = map[string]bool{}

	for _, i := range c.installations {
		n := c.server.nodes[i.name]
		if n == nil || c.leader == nil || !i.on || !nodespec.IsReady(n) || nodespec.IsUninitialized(n) {
			continue
		}

		if e := c.leader.inventory.Get(i.name); e.Condition != inventory.Current || e.Machine.Stage != talosruntime.MachineStageRunning {
			continue
		}

		if c.working[i.name] = true; before[i.name] {
			c.count("working")
			c.checkWorking("running for ten seconds", n)
		}
	}
}

// checkShutdowns checks that a Node has the taint for a shutdown once its leader knows that the machine is off.
func (c *cluster) checkShutdowns() {
	for name, s := range c.shutdowns {
		n := c.server.nodes[name]
		if n == nil || s.leader != c.leader || s.machine.name != name || s.machine.stage != talosruntime.MachineStageShuttingDown {
			delete(c.shutdowns, name)

			continue
		}

		s.off++
		if s.machine.on || c.leader.inventory.Get(name).Condition == inventory.Current || nodespec.ReadyCondition(n).Status != corev1.ConditionUnknown {
			s.off = 0
		}

		if s.off >= 3 {
			c.checkShutdown(n, s)
		}
	}
}

func (c *cluster) checkShutdown(n *corev1.Node, s *shutdown) {
	if !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintNodeShutdown }) {
		c.violate("node %s has no taint although its machine at %d was shut down (moved: %v)", n.Name, s.machine.address, s.moved)
	}

	if s.moved {
		c.count("moved")
	}
}

func (c *cluster) settle() {
	for range 10_000 {
		c.pass(0)

		if len(c.calls) > 0 {
			c.faults = true
			c.proceed()
		} else if c.faults = false; !c.deliver() {
			return
		}
	}

	c.violate("the controller does not become idle: %v", c.calls)
}

func (c *cluster) newName() string { return fmt.Sprint("n-", c.count("names")) }

func (c *cluster) hardwareID() string {
	if c.IntN(8) == 0 { // a vendor that uses one UUID several times
		return "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
	}

	return fmt.Sprintf("%08x-0000-0000-0000-%012x", c.Uint32(), c.Uint64()&0xffffffffffff)
}

func (c *cluster) freeAddress() int {
	for {
		address := c.IntN(1000)
		if !slices.ContainsFunc(c.installations, func(i *installation) bool { return i.address == address }) {
			return address
		}
	}
}

// at returns the installation that is on at an address.
func (c *cluster) at(address int) *installation {
	for _, i := range c.installations {
		if i.address == address && i.on {
			return i
		}
	}

	return nil
}

func (c *cluster) install(name, uuid string, address int) *installation {
	i := &installation{name: name, nodeID: fmt.Sprint("id-", c.Uint64()), uuid: uuid, address: address}
	c.installations = append(c.installations, i)
	c.boot(i)

	return i
}

func (c *cluster) wipe(i *installation) {
	i.on, i.then = false, nil
	c.installations = slices.DeleteFunc(c.installations, func(other *installation) bool { return other == i })
}

// boot switches on an installation. It is delayed while another machine has the address.
func (c *cluster) boot(i *installation) {
	if other := c.at(i.address); other != nil && other != i {
		i.after(1, func() { c.boot(i) })

		return
	}

	i.on, i.stage, i.bootID = true, talosruntime.MachineStageBooting, fmt.Sprint("boot-", c.count("boots"))
	i.after(2, func() { i.stage = talosruntime.MachineStageRunning })
}

// after calls do after n more ticks than the next.
func (i *installation) after(n int, do func()) {
	i.then = append(slices.Repeat([]func(){func() {}}, n), do)
}

// off announces a stage, and switches the installation off later.
func (c *cluster) off(i *installation, stage talosruntime.MachineStage, after func()) {
	i.stage = stage
	i.after(1+c.IntN(4), func() { i.on = false; after() })
}

// bootWithin boots an installation within n ticks.
func (c *cluster) bootWithin(n int, i *installation) { i.after(c.IntN(n), func() { c.boot(i) }) }

// change applies the changes of one tick.
func (c *cluster) change() {
	if c.IntN(4) == 0 && len(c.installations) > 0 {
		i, other := c.installations[c.IntN(len(c.installations))], c.installations[c.IntN(len(c.installations))]

		if i.on && !i.mute && i.stage == talosruntime.MachineStageRunning {
			kind := c.IntN(17)
			c.note("%d: %s at %d (other %s)", kind, i.name, i.address, other.name)
			c.power(kind, i)
			c.identify(kind, i, other)
		}
	}

	c.disturb()

	for _, i := range slices.Clone(c.installations) {
		if len(i.then) > 0 {
			next := i.then[0]
			i.then = i.then[1:]
			next()
		}
	}
}

// disturb may apply a crash of the controller, a jump of the clock, a network split, or the deletion of a Node by an
// administrator.
func (c *cluster) disturb() {
	switch c.IntN(400) {
	case 0:
		c.crash()
	case 1:
		c.note("clock jump")
		c.jumped.Add(int64(24 * time.Hour))
	case 2:
		c.note("split")

		for _, i := range c.installations {
			i.split = c.IntN(2) == 0
		}
	case 3, 4:
		for _, i := range c.installations {
			i.split = false
		}
	case 5:
		if all := slices.Sorted(maps.Keys(c.server.nodes)); len(all) > 0 {
			c.delete(all[c.IntN(len(all))])
		}
	}
}

// power applies an event that switches an installation off.
func (c *cluster) power(kind int, i *installation) {
	switch kind {
	case 0: // crash, and perhaps a start
		if i.on = false; c.IntN(3) > 0 {
			c.bootWithin(100, i)
		}
	case 1:
		c.off(i, talosruntime.MachineStageRebooting, func() { c.bootWithin(100, i) })
	case 2:
		c.off(i, talosruntime.MachineStageUpgrading, func() { c.bootWithin(100, i) })
	case 3:
		c.off(i, talosruntime.MachineStageShuttingDown, func() { c.bootWithin(200, i) })
	case 4: // reset
		c.off(i, talosruntime.MachineStageResetting, func() { c.wipe(i) })
	case 5: // reset of some partitions: the machine is back before the grace period ends
		c.off(i, talosruntime.MachineStageResetting, func() { c.bootWithin(15, i) })
	case 6: // reset, and installed again
		name := []string{i.name, c.newName()}[c.IntN(2)]
		c.off(i, talosruntime.MachineStageResetting, func() {
			c.wipe(i)
			c.install(name, i.uuid, i.address)
		})
	}
}

// identify applies an event that changes names, addresses or identities.
func (c *cluster) identify(kind int, i, other *installation) {
	switch kind {
	case 7, 8: // rename
		i.name = c.newName()
	case 9: // swap of two addresses; one of the kubelets may be unable to report it for a while
		if other != i && other.on && other.stage == talosruntime.MachineStageRunning {
			i.address, other.address = other.address, i.address
			i.mute = c.IntN(2) == 0
			i.after(c.IntN(100), func() { i.mute = false })
		}
	case 10: // re-created under its name
		c.wipe(i)
		c.install(i.name, c.hardwareID(), i.address)
	case 11: // another machine has its address
		c.wipe(i)
		c.install(c.newName(), c.hardwareID(), i.address)
	case 12: // clone of the disk of a machine, which stays off for a while, on other hardware
		i.on = false
		c.install(c.newName(), fmt.Sprintf("cccccccc-0000-0000-0000-%012x", c.Uint64()&0xffffffffffff), c.freeAddress()).nodeID = i.nodeID
		c.bootWithin(100, i)
	case 13: // more of the same hardware
		c.install(c.newName(), i.uuid, c.freeAddress())
	case 14, 15: // another address by DHCP, which the kubelet reports
		i.address, i.moved = c.freeAddress(), true
	case 16: // an attacker reports that the Node is ready
		c.forged[i.name] = c.IntN(60)
	}
}

// kubelets registers and updates Nodes as kubelets do, and marks those that do not respond as Kubernetes does.
func (c *cluster) kubelets() {
	for _, i := range c.installations {
		if !i.on || i.mute || i.stage != talosruntime.MachineStageRunning {
			continue
		}

		if c.server.nodes[i.name] == nil {
			c.create(i.name, "Talos (v1.13.5)")
		}

		c.heartbeat[i.name], c.address[i.name], c.bootID[i.name] = time.Now(), i.address, i.bootID
	}

	for _, name := range slices.Sorted(maps.Keys(c.server.nodes)) {
		status := corev1.ConditionTrue
		if c.forged[name]--; c.forged[name] < 0 && time.Since(c.heartbeat[name]) > c.monitorGrace {
			status = corev1.ConditionUnknown
		}

		node := c.server.nodes[name]
		if ready := nodespec.ReadyCondition(node); ready != nil && ready.Status == status && node.Status.NodeInfo.BootID == c.bootID[name] {
			continue
		}

		_, err := c.server.update("kubelet", "status", name, func(node *corev1.Node) {
			node.Status.NodeInfo.BootID = c.bootID[name]
			setCondition(node, corev1.NodeCondition{Type: corev1.NodeReady, Status: status})
		})
		require.NoError(c.t, err)
	}
}

// detect updates the leader's inventory as the reflector does. It may detect late that a machine no longer responds.
func (c *cluster) detect() {
	for _, name := range slices.Sorted(maps.Keys(c.server.nodes)) {
		if c.leader == nil || c.leader.informer.get(name) == nil {
			continue
		}

		n := c.address[name]
		address := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(n / 256), byte(n)}), 16)

		switch i := c.at(n); {
		case i == nil || i.split:
			if c.IntN(2) == 0 {
				c.leader.inventory.MarkUnreachable(name, "no answer")
			}
		case i.name == name:
			m := machine.Machine{
				Nodename: name, NodeID: i.nodeID, EphemeralID: "volume of " + i.nodeID, Endpoint: address.Addr(), Stage: i.stage, System: hardware.SystemInformationSpec{UUID: i.uuid}, PlatformPublished: true,
				Platform:  talosruntime.PlatformMetadataSpec{Platform: "metal"},
				Addresses: []machine.Address{{Prefix: address, Link: "eth0", Scope: nethelpers.ScopeGlobal}}, NodeIPs: []netip.Addr{address.Addr()},
			}
			c.leader.inventory.Replace(name, m)
			c.record(name, m)
			c.observeShutdown(name, i, m)
		default:
			c.leader.inventory.MarkMismatch(name, i.name, "another machine")
		}
	}
}

// observeShutdown keeps the announcement of a shutdown by the recorded machine at its recorded address.
func (c *cluster) observeShutdown(name string, i *installation, m machine.Machine) {
	r := noderecord.Of(c.server.nodes[name])
	if i.stage != talosruntime.MachineStageShuttingDown || !r.Identifies(m) || !r.IsAt(m) {
		delete(c.shutdowns, name)
	} else if s := c.shutdowns[name]; s == nil || s.leader != c.leader || s.machine != i {
		c.shutdowns[name] = &shutdown{leader: c.leader, machine: i, moved: i.moved}
	}
}

// record records a machine as the leader does: the record follows the volume, and at the recorded address a CSR.
func (c *cluster) record(name string, m machine.Machine) {
	record := noderecord.Of(c.server.nodes[name])
	if record != (noderecord.Record{}) && !record.Identifies(m) && !record.IsAt(m) {
		return
	}

	next := noderecord.Record{Address: m.Endpoint, NodeID: noderecord.Fingerprint(m.NodeID), Volume: noderecord.ID([]byte(m.EphemeralID)), IsWorker: true}
	if next.Expires = record.Expires; next == record {
		return
	}

	_, err := c.server.update(noderecord.FieldManager, "", name, func(node *corev1.Node) {
		if node.Labels == nil {
			node.Labels = map[string]string{}
		}

		for key, value := range next.ByLeader() {
			if text, isText := value.(string); isText {
				node.Labels[key] = text
			} else {
				delete(node.Labels, key)
			}
		}
	})
	require.NoError(c.t, err)
}

// ends are the stages with which machines announce their end. That they do not respond then does not pause deletions.
var ends = []talosruntime.MachineStage{talosruntime.MachineStageShuttingDown, talosruntime.MachineStageResetting}

// checkDeletion compares a deletion by the controller with the ground truth.
func (c *cluster) checkDeletion(name string) {
	for _, i := range c.installations {
		if i.name == name {
			c.violate("node %s was deleted, but its machine exists (on: %v, at %d)", name, i.on, i.address)
		}
	}

	responding, unexplained, total := 0, 0, len(c.server.nodes)

	for other := range c.server.nodes {
		if i := c.at(c.address[other]); i != nil && i.name == other {
			responding++
		} else if c.leader != nil && !slices.Contains(ends, c.leader.inventory.Get(other).Last.Stage) {
			unexplained++
		}
	}

	// The controller still counts machines that have just stopped.
	if tolerated := total/4 + 1; 2*(responding+tolerated) < total && unexplained > 0 {
		c.violate("node %s was deleted while %d of %d machines respond", name, responding, total)
	}

	c.deleted = append(c.deleted, time.Now())

	// A jump of the clock counts as a few seconds.
	recent := slices.DeleteFunc(slices.Clone(c.deleted), func(at time.Time) bool { return time.Since(at) >= 9*time.Minute })
	// The cache of the controller may still show the Nodes that it has just deleted.
	if limit := max(1, (total+len(recent)-1)/10); len(recent) > limit {
		c.violate("%d of %d nodes were deleted in ten minutes", len(recent), total)
	}
}
