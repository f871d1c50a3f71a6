package node

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

var noon = time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)

// present returns a condition of the controller that began some time before noon.
func present(kind corev1.NodeConditionType, status corev1.ConditionStatus, age time.Duration) corev1.NodeCondition {
	return corev1.NodeCondition{Type: kind, Status: status, Reason: reasonPrefix + "Before", Message: "before", LastTransitionTime: metav1.NewTime(noon.Add(-age))}
}

// after returns "status reason" of a condition after the changes; "-" if the Node does not have it.
func after(before []corev1.NodeCondition, changes []corev1.NodeCondition, kind corev1.NodeConditionType) string {
	states := map[corev1.NodeConditionType]string{}

	for _, list := range [][]corev1.NodeCondition{before, changes} {
		for _, c := range list {
			states[c.Type] = fmt.Sprintf("%s %s", c.Status, strings.TrimPrefix(c.Reason, reasonPrefix))
		}
	}

	if s := strings.TrimSpace(states[kind]); s != "" {
		return s
	}

	return "-"
}

func nodeWith(conditions ...corev1.NodeCondition) *corev1.Node {
	return &corev1.Node{Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{OSImage: "Talos (v1.14.1)"}, Conditions: conditions}}
}

// ready returns the condition of the kubelet.
func ready(status corev1.ConditionStatus) corev1.NodeCondition {
	return corev1.NodeCondition{Type: corev1.NodeReady, Status: status}
}

// situation is what conditions depend on besides the Node.
type situation struct {
	entry                inventory.Entry
	publish, mostRespond bool
	now                  time.Time
}

// sync syncs the conditions of a Node.
func (o situation) sync(n *corev1.Node) (changes []corev1.NodeCondition, again time.Duration) {
	return syncConditions(state{node: n, entry: o.entry, managed: o.publish}, func() bool { return o.mostRespond }, o.now)
}

func omitted(o situation) situation {
	o.publish = false

	return o
}

func current(talos machine.Machine) inventory.Entry {
	return inventory.Entry{Condition: inventory.Current, Machine: talos}
}

const (
	maintenance = corev1.NodeMaintenanceInProgress
	shutdown    = corev1.NodeGracefulNodeShutdownInProgress
)

func TestConditions_OfRespondingMachines(t *testing.T) {
	t.Parallel()

	// What becomes of a condition that is absent, true or unknown before.
	type states struct{ absent, isTrue, unknown string }

	const keepTrue, keepUnknown = "True Before", "Unknown Before"

	always := func(s string) states { return states{s, s, s} }
	kept := states{"-", keepTrue, keepUnknown}

	seen := map[runtime.MachineStage]bool{}

	for _, row := range []struct {
		stage                                   runtime.MachineStage
		talosReady                              string
		maintenanceNotReady, maintenanceIfReady states
		shutdown                                states
	}{
		{runtime.MachineStageUnknown, "False NotRunning", kept, kept, always("-")},
		{runtime.MachineStageBooting, "False NotRunning", kept, kept, always("-")},
		{runtime.MachineStageInstalling, "False NotRunning", kept, kept, always("-")},
		{runtime.MachineStageRunning, "True Running", kept, always("-"), always("-")},
		{runtime.MachineStageMaintenance, "False Maintenance", always("True Maintenance"), always("True Maintenance"), always("-")},
		{runtime.MachineStageRebooting, "False Rebooting", always("True Rebooting"), always("True Rebooting"), always("-")},
		{runtime.MachineStageUpgrading, "False Upgrading", always("True Upgrading"), always("True Upgrading"), always("-")},
		{runtime.MachineStageResetting, "False Resetting", always("True Resetting"), always("True Resetting"), always("-")},
		{runtime.MachineStageShuttingDown, "False ShuttingDown", always("True ShuttingDown"), always("True ShuttingDown"), always("True ShuttingDown")},
		{runtime.MachineStage(99), "False NotRunning", kept, kept, always("-")}, // of a later version
	} {
		seen[row.stage] = true

		for _, isReady := range []corev1.ConditionStatus{corev1.ConditionFalse, corev1.ConditionTrue} {
			o := situation{publish: true, entry: current(machine.Machine{Stage: row.stage}), now: noon}

			want := row.maintenanceNotReady
			if isReady == corev1.ConditionTrue {
				want = row.maintenanceIfReady
			}

			for _, test := range []struct {
				before                        []corev1.NodeCondition
				wantMaintenance, wantShutdown string
			}{
				{nil, want.absent, row.shutdown.absent},
				{[]corev1.NodeCondition{present(maintenance, corev1.ConditionTrue, time.Minute), present(shutdown, corev1.ConditionTrue, time.Minute)}, want.isTrue, row.shutdown.isTrue},
				{[]corev1.NodeCondition{present(maintenance, corev1.ConditionUnknown, time.Minute), present(shutdown, corev1.ConditionUnknown, time.Minute)}, want.unknown, row.shutdown.unknown},
			} {
				what := fmt.Sprintf("stage %s, ready %v, before %v", row.stage, isReady, test.before)
				changes, _ := o.sync(nodeWith(append(test.before, ready(isReady))...))

				assert.Equal(t, row.talosReady, after(test.before, changes, ConditionTalosReady), what)
				assert.Equal(t, test.wantMaintenance, after(test.before, changes, maintenance), what)
				assert.Equal(t, test.wantShutdown, after(test.before, changes, shutdown), what)
			}
		}
	}

	for _, stage := range runtime.MachineStageValues() {
		assert.True(t, seen[stage], "no row for stage %s", stage)
	}
}

func TestConditions_OfSilentMachines(t *testing.T) {
	t.Parallel()

	const noAnswer = "Unknown Unreachable"

	talos := machine.Machine{Stage: runtime.MachineStageRunning} // the last view
	gone := inventory.Unreachable
	ago := func(d time.Duration) time.Time { return noon.Add(-d) }

	for _, test := range []struct {
		name     string
		entry    inventory.Entry
		isolated bool
		age      time.Duration // of the present conditions
		// Absent conditions stay absent. The others are true before.
		talosReady, maintenance, shutdown string
		recheck                           bool
	}{
		{"not contacted by this leader", inventory.Entry{}, false, time.Minute, "True Before", "True Before", "True Before", true},
		{"never reached by this leader", inventory.Entry{Condition: gone}, false, time.Minute, "True Before", "True Before", noAnswer, true},
		{"39 s", inventory.Entry{Condition: gone, Machine: talos, UnresponsiveSince: ago(39 * time.Second)}, false, time.Minute, "True Before", "True Before", noAnswer, true},
		{"40 s", inventory.Entry{Condition: gone, Machine: talos, UnresponsiveSince: ago(40 * time.Second)}, false, time.Minute, noAnswer, "True Before", noAnswer, true},
		{"40 s, like most", inventory.Entry{Condition: gone, Machine: talos, UnresponsiveSince: ago(40 * time.Second)}, true, time.Minute, "True Before", "True Before", noAnswer, true},
		{"another machine at its address", inventory.Entry{Condition: inventory.Mismatch, UnresponsiveSince: ago(40 * time.Second)}, false, time.Minute, noAnswer, "True Before", noAnswer, true},
		{"never came back", inventory.Entry{Condition: gone, Machine: talos, UnresponsiveSince: ago(time.Hour)}, false, time.Hour, noAnswer, "Unknown Overdue", noAnswer, false},
		{"never came back, another leader", inventory.Entry{}, false, time.Hour, "True Before", "Unknown Overdue", "True Before", true},
	} {
		for _, isReady := range []corev1.ConditionStatus{corev1.ConditionFalse, corev1.ConditionTrue} {
			o := situation{publish: true, entry: test.entry, mostRespond: !test.isolated, now: noon}

			changes, again := o.sync(nodeWith(ready(isReady)))
			assert.Empty(t, changes, test.name)
			assert.Zero(t, again, test.name)

			var before []corev1.NodeCondition
			for _, c := range conditions {
				before = append(before, present(c.kind, corev1.ConditionTrue, test.age))
			}

			changes, again = o.sync(nodeWith(append(before, ready(isReady))...))
			assert.Equal(t, test.talosReady, after(before, changes, ConditionTalosReady), test.name)
			assert.Equal(t, test.maintenance, after(before, changes, maintenance), test.name)
			assert.Equal(t, test.shutdown, after(before, changes, shutdown), test.name)
			assert.Equal(t, test.recheck, again == recheckInterval, test.name)
		}
	}
}

func TestConditions_MostMachinesRespondUnlessMoreThanHalfAreUnreachable(t *testing.T) {
	t.Parallel()

	unreachable := func(i *inventory.Inventory, name string) { i.MarkUnreachable(name, "gone") }
	current := func(i *inventory.Inventory, name string) { i.Replace(name, machine.Machine{Nodename: name}) }
	lost := func(i *inventory.Inventory, name string) { current(i, name); unreachable(i, name) }
	mismatch := func(i *inventory.Inventory, name string) { i.MarkMismatch(name, "other", "no") }

	type states []func(*inventory.Inventory, string)

	for _, test := range []struct {
		// known are Nodes that a kubelet cannot register, and unknown the others.
		known, unknown states
		want           bool
	}{
		{nil, nil, true},
		{states{unreachable}, nil, false},
		{states{unreachable, current}, nil, true},
		{states{unreachable, unreachable, current}, nil, false},
		{states{unreachable, unreachable, current, mismatch}, nil, true},
		{states{unreachable, current}, states{unreachable, unreachable}, true},
		{states{current}, states{lost, lost}, false},
	} {
		c := newController(t)

		for i, state := range slices.Concat(test.known, test.unknown) {
			n := identified(fmt.Sprintf("n-%d", i), "")
			if i >= len(test.known) {
				n.Labels = nil
			}

			require.NoError(t, c.indexer.Add(n))
			state(c.config.Inventory, n.Name)
		}

		assert.Equal(t, test.want, c.planner.mostRespond(), "%d known, %d unknown", len(test.known), len(test.unknown))
	}
}

func TestConditions_CountAnnouncementsOfMachinesThatStoppedResponding(t *testing.T) {
	t.Parallel()

	o := situation{publish: true, entry: current(machine.Machine{Stage: runtime.MachineStageShuttingDown}), mostRespond: true, now: noon}
	o.entry.Condition, o.entry.UnresponsiveSince = inventory.Unreachable, noon

	changes, _ := o.sync(nodeWith())
	assert.Equal(t, "-", after(nil, changes, ConditionTalosReady))
	assert.Equal(t, "True ShuttingDown", after(nil, changes, maintenance))
	assert.Equal(t, "Unknown Unreachable", after(nil, changes, shutdown))

	again, _ := o.sync(nodeWith(changes...))
	assert.Empty(t, again)

	o.now = noon.Add(time.Hour)
	overdue, _ := o.sync(nodeWith(changes...))
	assert.Equal(t, "Unknown Overdue", after(changes, overdue, maintenance))

	again, _ = o.sync(nodeWith(overdue[0], changes[1]))
	assert.Empty(t, again)
}

func TestConditions_OverdueIfTheNodeIsNotReady(t *testing.T) {
	t.Parallel()

	for _, stage := range []runtime.MachineStage{runtime.MachineStageRunning, runtime.MachineStageBooting} {
		before := []corev1.NodeCondition{present(maintenance, corev1.ConditionTrue, time.Hour)}
		o := situation{publish: true, entry: current(machine.Machine{Stage: stage}), now: noon}

		changes, _ := o.sync(nodeWith(before...))
		assert.Equal(t, "Unknown Overdue", after(before, changes, maintenance), stage.String())
	}
}

func TestConditions_ListUnmetConditions(t *testing.T) {
	t.Parallel()

	talos := machine.Machine{Stage: runtime.MachineStageRunning, UnmetConditions: []runtime.UnmetCondition{
		{Name: "services", Reason: "etcd not healthy"}, {Name: "time", Reason: "time is not synced"},
	}}
	o := situation{publish: true, entry: current(talos), now: noon}

	changes, _ := o.sync(nodeWith())
	assert.Equal(t, "False UnmetConditions", after(nil, changes, ConditionTalosReady))
	assert.Equal(t, `Machine is in stage "running"; services: etcd not healthy; time: time is not synced`, changes[0].Message)

	o.entry.Machine.UnmetConditions[0].Reason = strings.Repeat("\xffx", 1<<20)
	changes, _ = o.sync(nodeWith())
	assert.LessOrEqual(t, len(changes[0].Message), events.MaxMessage)
}

func TestConditions_TransitionTimeChangesOnlyWithStatus(t *testing.T) {
	t.Parallel()

	before := present(maintenance, corev1.ConditionTrue, time.Minute)
	o := situation{publish: true, entry: current(machine.Machine{Stage: runtime.MachineStageRebooting}), now: noon}

	changes, _ := o.sync(nodeWith(before))
	require.Len(t, changes, 2)
	assert.Equal(t, noon, changes[0].LastTransitionTime.Time, "a new condition")
	assert.Equal(t, before.LastTransitionTime, changes[1].LastTransitionTime, "a new reason")
	assert.Equal(t, noon, changes[1].LastHeartbeatTime.Time)

	changes, _ = o.sync(nodeWith(changes...))
	assert.Empty(t, changes, "nothing has changed")

	running := situation{publish: true, entry: current(machine.Machine{Stage: runtime.MachineStageRunning}), now: noon}
	_, again := running.sync(nodeWith(before, ready(corev1.ConditionTrue)))
	assert.Zero(t, again, "conditions of a running machine do not depend on the time")
}

func TestConditions_OfOtherWritersAreNotChanged(t *testing.T) {
	t.Parallel()

	for _, stage := range runtime.MachineStageValues() {
		for _, publish := range []bool{false, true} {
			var foreign []corev1.NodeCondition
			for i, c := range conditions {
				foreign = append(foreign, corev1.NodeCondition{Type: c.kind, Status: corev1.ConditionTrue, Reason: []string{"AdminRequested", "", "MaintenanceWindow"}[i]})
			}

			o := situation{publish: true, entry: current(machine.Machine{Stage: stage}), now: noon}
			o.publish = publish

			changes, _ := o.sync(nodeWith(append(foreign, ready(corev1.ConditionTrue))...))
			assert.Empty(t, changes, stage.String())
		}
	}
}

func TestConditions_AreRemovedIfNotPublished(t *testing.T) {
	t.Parallel()

	o := situation{publish: true, entry: current(machine.Machine{Stage: runtime.MachineStageShuttingDown}), now: noon}

	changes, _ := omitted(o).sync(nodeWith())
	assert.Empty(t, changes)

	published, _ := o.sync(nodeWith())
	require.Len(t, published, len(conditions))

	changes, _ = omitted(o).sync(nodeWith(published...))
	removed := map[corev1.NodeConditionType]corev1.ConditionStatus{}

	for _, c := range changes {
		removed[c.Type] = c.Status
	}

	assert.Equal(t, map[corev1.NodeConditionType]corev1.ConditionStatus{ConditionTalosReady: "", maintenance: "", shutdown: ""}, removed)
}

func TestConditions_ReasonsBelongToTheController(t *testing.T) {
	t.Parallel()

	reasons := []string{reasonRunning, reasonNotRunning, reasonUnmetConditions, reasonUnreachable, reasonOverdue}
	for _, reason := range slices.AppendSeq(reasons, maps.Values(announcements)) {
		assert.True(t, strings.HasPrefix(reason, reasonPrefix), reason)
	}
}
