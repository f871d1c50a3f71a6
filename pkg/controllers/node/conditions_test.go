package node_test

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	talosReady  = node.ConditionTalosReady
	maintenance = corev1.NodeMaintenanceInProgress
	shutdown    = corev1.NodeGracefulNodeShutdownInProgress
)

// laterClock is ahead of the system clock.
type laterClock struct {
	clock.RealClock

	ahead atomic.Int64
}

func (c *laterClock) Now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

// leader is a node controller that a test stops and replaces.
type leader struct {
	ctest.Suite
	*ctest.Transport

	inventory *inventory.Inventory
	clock     *laterClock
	omit      *atomic.Bool
	resync    func()
	stop      func()
}

// lead starts a leader with an empty inventory.
func lead(s ctest.Suite) *leader {
	s.Helper()

	config := s.Kube.Config()
	l := &leader{Suite: s, Transport: ctest.NewTransport(config), clock: &laterClock{}, omit: &atomic.Bool{}}

	i, err := ctest.NewInstance(context.Background(), config, ctest.Dial(s.Talos))
	require.NoError(s, err)

	controller, err := node.New(node.Config{
		Client: i.Client, Nodes: i.Nodes, Inventory: i.Inventory, Recorder: i.Recorder, Clock: l.clock, Workers: 10, HasNodes: func() bool { return true },
		Options: func() nodespec.Options { return nodespec.Options{OmitConditions: l.omit.Load()} }, IsRecorded: func(*corev1.Node) bool { return true },
	})
	require.NoError(s, err)
	require.NoError(s, i.Reflector.FollowNodes(i.Nodes))

	i.Start(i.Reflector.Run, controller.Run)
	s.Cleanup(i.Stop)

	l.inventory, l.resync, l.stop = i.Inventory, controller.Resync, i.Stop

	return l
}

// state returns "status reason" of a condition; "-" if the Node does not have it.
func state(n *corev1.Node, kind corev1.NodeConditionType) string {
	if c := nodespec.Condition(n, kind); c != nil {
		return fmt.Sprintf("%s %s", c.Status, c.Reason)
	}

	return "-"
}

func (l *leader) await(nodename string, kind corev1.NodeConditionType, want string) *corev1.Node {
	l.Helper()

	return l.AwaitNode(nodename, func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal(want, state(n, kind), kind) })
}

// awaitSync waits until the controller has synced everything that has happened before: it has added TalosReady to a
// Node that did not exist.
func (l *leader) awaitSync(marker string) {
	l.Helper()
	l.Join(talostest.MachineSpec{Nodename: marker})
	l.await(marker, talosReady, "True TalosMachineRunning")
}

func (l *leader) setStage(m *talostest.Machine, stage runtime.MachineStage) {
	l.Helper()
	require.NoError(l, m.SetStage(l.Context(), stage))
}

func TestConditions(t *testing.T) {
	t.Parallel()

	s := ctest.Start(t, kube.Options{ControllerManager: kube.ControllerManager{Absent: true}})

	for name, test := range map[string]func(*leader, *talostest.Machine){
		"reboot": conditionsFollowReboot, "shutdown": conditionsSurviveLeaders, "admin": conditionsOfAdminStay, "silent": conditionsOfSilentMachine, "omitted": conditionsAreOmitted,
	} {
		if !t.Run(name, func(t *testing.T) {
			own := s
			own.TB = t
			l := lead(own)

			l.Join(talostest.MachineSpec{Nodename: name + "-peer", Platform: runtime.PlatformMetadataSpec{ExternalDNS: name + ".example.com"}})
			m := l.Join(talostest.MachineSpec{Nodename: name})
			l.SetReady(name, corev1.ConditionTrue)

			n := l.await(name, talosReady, "True TalosMachineRunning")
			assert.Equal(t, "-", state(n, maintenance))
			assert.Equal(t, "-", state(n, shutdown))
			l.await(name+"-peer", talosReady, "True TalosMachineRunning")
			l.AwaitNode(name+"-peer", ctest.Schedulable)
			assert.Equal(t, 3, l.Writes(name+"-peer"), "writes of metadata, status and spec")

			test(l, m)
			l.stop()
		}) {
			break
		}
	}
}

func conditionsFollowReboot(l *leader, m *talostest.Machine) {
	start := time.Now()

	l.setStage(m, runtime.MachineStageRebooting)
	n := l.await("reboot", maintenance, "True TalosMachineRebooting")
	l.Logf("%s after %s", maintenance, time.Since(start))
	assert.Equal(l, "False TalosMachineRebooting", state(n, talosReady))
	assert.Equal(l, "-", state(n, shutdown), "a reboot can be forced")

	require.NoError(l, m.Reboot(l.Context()))
	l.setStage(m, runtime.MachineStageBooting)
	n = l.await("reboot", talosReady, "False TalosMachineNotRunning")
	assert.Equal(l, "True TalosMachineRebooting", state(n, maintenance))

	l.SetReady("reboot", corev1.ConditionFalse)
	l.setStage(m, runtime.MachineStageRunning)
	n = l.await("reboot", talosReady, "True TalosMachineRunning")
	assert.Equal(l, "True TalosMachineRebooting", state(n, maintenance), "the Node is not ready")

	start = time.Now()

	l.SetReady("reboot", corev1.ConditionTrue)
	l.await("reboot", maintenance, "-")
	l.Logf("removed %s after %s", maintenance, time.Since(start))

	writes := l.Writes("reboot")

	for i := range 3 {
		l.PatchNode("reboot", "toucher", fmt.Sprintf(`{"metadata":{"annotations":{"test/touched":"%d"}}}`, i))
		l.resync()
	}

	l.awaitSync("reboot-marker")
	assert.Equal(l, writes, l.Writes("reboot"), "wrote an unchanged Node")

	require.NoError(l, m.SetUnmetConditions(l.Context(), runtime.UnmetCondition{Name: "services", Reason: "etcd not healthy"}))
	n = l.await("reboot", talosReady, "False TalosMachineUnmetConditions")
	assert.Contains(l, nodespec.Condition(n, talosReady).Message, "services: etcd not healthy")
}

// conditionsSurviveLeaders replaces the leader while the machine shuts down, and after that.
func conditionsSurviveLeaders(l *leader, m *talostest.Machine) {
	l.setStage(m, runtime.MachineStageShuttingDown)
	l.await("shutdown", maintenance, "True TalosMachineShuttingDown")
	l.await("shutdown", shutdown, "True TalosMachineShuttingDown")

	l.stop()
	require.NoError(l, m.Stop(l.Context()))

	// This leader has never reached the machine.
	second := lead(l.Suite)
	n := second.await("shutdown", shutdown, "Unknown TalosMachineUnreachable")
	second.awaitSync("shutdown-marker")
	second.stop()
	assert.Equal(l, n.ResourceVersion, second.Node("shutdown").ResourceVersion)
	assert.Equal(l, "True TalosMachineShuttingDown", state(n, maintenance))
	assert.Equal(l, "False TalosMachineShuttingDown", state(n, talosReady))

	third := lead(l.Suite)
	third.clock.ahead.Store(int64(time.Hour))
	third.resync()
	third.await("shutdown", maintenance, "Unknown TalosMachineOverdue")

	m.Start()
	third.setStage(m, runtime.MachineStageRunning)
	n = third.await("shutdown", maintenance, "-")
	assert.Equal(l, "-", state(n, shutdown))
	assert.Equal(l, "True TalosMachineRunning", state(n, talosReady))
	third.stop()
}

// conditionsOfAdminStay sets conditions after the controller has read a Node and before it writes.
func conditionsOfAdminStay(l *leader, m *talostest.Machine) {
	wait := l.Overtake(l, http.MethodPatch, "admin", 1, func() {
		l.SetCondition("admin", "admin", `{"type":"MaintenanceInProgress","status":"True","reason":"AdminRequested"}`)
	})
	l.setStage(m, runtime.MachineStageRebooting)
	wait()

	n := l.await("admin", talosReady, "False TalosMachineRebooting")
	assert.Equal(l, "True AdminRequested", state(n, maintenance))

	l.setStage(m, runtime.MachineStageRunning)
	n = l.await("admin", talosReady, "True TalosMachineRunning")
	assert.Equal(l, "True AdminRequested", state(n, maintenance))

	// The first write to this Node applies labels, and the next one contains an address and conditions.
	wait = l.Overtake(l, http.MethodPatch, "admin-new", 1, func() {
		l.SetCondition("admin-new", "admin", `{"type":"TalosReady","status":"Unknown","reason":"AdminRequested"}`)
	})
	l.Join(talostest.MachineSpec{Nodename: "admin-new", Platform: runtime.PlatformMetadataSpec{ExternalDNS: "new.example.com"}})
	wait()

	n = l.AwaitNode("admin-new", ctest.Schedulable)
	assert.Contains(l, n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeExternalDNS, Address: "new.example.com"})
	assert.Equal(l, "Unknown AdminRequested", state(n, talosReady))
}

// conditionsOfSilentMachine cuts the machine off. The inventory notices that, and the clock of the controller is ahead.
// The Node cannot be initialized again while the machine is silent, and its conditions still change.
func conditionsOfSilentMachine(l *leader, m *talostest.Machine) {
	require.NoError(l, m.Stop(l.Context()))
	ctest.Eventually(l, "machine is unreachable", func() bool { return l.inventory.Get("silent").Condition == inventory.Unreachable })

	l.awaitSync("silent-marker")
	assert.Equal(l, "True TalosMachineRunning", state(l.Node("silent"), talosReady))

	l.PatchNode("silent", "admin", fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`, cloudproviderapi.TaintExternalCloudProvider))

	l.clock.ahead.Store(int64(40 * time.Second))
	l.resync()
	l.await("silent", talosReady, "Unknown TalosMachineUnreachable")

	m.Start()

	n := l.await("silent", talosReady, "True TalosMachineRunning")
	assert.Equal(l, "-", state(n, maintenance), "the machine did not announce anything")
}

func conditionsAreOmitted(l *leader, m *talostest.Machine) {
	l.SetCondition("omitted", "admin", `{"type":"GracefulNodeShutdownInProgress","status":"False","reason":"AdminRequested"}`)
	l.setStage(m, runtime.MachineStageShuttingDown)
	l.await("omitted", maintenance, "True TalosMachineShuttingDown")

	l.omit.Store(true)
	l.resync()

	n := l.await("omitted", maintenance, "-")
	assert.Equal(l, "-", state(n, talosReady))
	assert.Equal(l, "False AdminRequested", state(n, shutdown))
}
