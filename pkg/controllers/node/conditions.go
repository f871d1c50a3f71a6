package node

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// ConditionTalosReady is the condition with the readiness of the machine.
const ConditionTalosReady corev1.NodeConditionType = "TalosReady"

// reasonPrefix begins the reasons of this controller's conditions. A condition with any other reason belongs to another
// writer and is never changed. managedFields cannot tell: they name each field's last writer, but several clients may
// set a condition to the same status, and the API server merges the entries of clients if there are more than ten.
const reasonPrefix = "TalosMachine"

func isOwn(c corev1.NodeCondition) bool { return strings.HasPrefix(c.Reason, reasonPrefix) }

// Reasons of conditions, besides those of announcements.
const (
	reasonRunning         = "TalosMachineRunning"
	reasonNotRunning      = "TalosMachineNotRunning"
	reasonUnmetConditions = "TalosMachineUnmetConditions"
	reasonUnreachable     = "TalosMachineUnreachable"
	reasonOverdue         = "TalosMachineOverdue"
)

// announcements are the reasons for the stages in which a machine is, or soon will be, out of service.
var announcements = map[runtime.MachineStage]string{
	runtime.MachineStageRebooting:    "TalosMachineRebooting",
	runtime.MachineStageUpgrading:    "TalosMachineUpgrading",
	runtime.MachineStageShuttingDown: "TalosMachineShuttingDown",
	runtime.MachineStageResetting:    "TalosMachineResetting",
	runtime.MachineStageMaintenance:  "TalosMachineMaintenance",
}

const (
	// unresponsivePeriod is how long a machine does not respond before its readiness is unknown.
	unresponsivePeriod = 40 * time.Second
	// maintenancePeriod is how long a maintenance that a machine has announced may last after that.
	maintenancePeriod = time.Hour
	// recheckInterval is the time between syncs while a condition can change because time passes.
	recheckInterval = 10 * time.Second
)

type observation struct {
	entry inventory.Entry
	// responds is true if the machine does.
	responds bool
	// isReady is true if the Node is.
	isReady bool
	// mostRespond reports whether at least half of all machines do. It counts all Nodes.
	mostRespond func() bool
	now         time.Time
}

// conditions are all conditions of the controller. state returns what one must state; without a status, the Node must not
// have the condition.
var conditions = []struct {
	kind  corev1.NodeConditionType
	state func(o observation, present corev1.NodeCondition) corev1.NodeCondition
}{
	{ConditionTalosReady, observation.talosReady},
	{corev1.NodeMaintenanceInProgress, observation.maintenance},
	{corev1.NodeGracefulNodeShutdownInProgress, observation.gracefulShutdown},
}

var (
	unreachable = corev1.NodeCondition{Status: corev1.ConditionUnknown, Reason: reasonUnreachable, Message: "Talos API does not respond"}
	overdue     = corev1.NodeCondition{
		Status: corev1.ConditionUnknown, Reason: reasonOverdue,
		Message: "Maintenance began an hour ago, and the machine is not running or its node is not ready",
	}
)

// stage returns a condition with the last view of the machine as message.
func (o observation) stage(status corev1.ConditionStatus, reason string) corev1.NodeCondition {
	message := fmt.Sprintf("Machine is in stage %q", o.entry.Machine.Stage)
	for _, unmet := range o.entry.Machine.UnmetConditions {
		if len(message) < events.MaxMessage {
			message += fmt.Sprintf("; %s: %s", unmet.Name, unmet.Reason)
		}
	}

	return corev1.NodeCondition{Status: status, Reason: reason, Message: events.Truncate(strings.ToValidUTF8(message, ""))}
}

// talosReady is unknown after unresponsivePeriod, but not if this process has never reached the machine, or cannot reach
// most machines.
func (o observation) talosReady(present corev1.NodeCondition) corev1.NodeCondition {
	isRunning := o.entry.Machine.Stage == runtime.MachineStageRunning

	switch {
	case o.responds && isRunning && len(o.entry.Machine.UnmetConditions) == 0:
		return o.stage(corev1.ConditionTrue, reasonRunning)
	case o.responds && isRunning:
		return o.stage(corev1.ConditionFalse, reasonUnmetConditions)
	case o.responds:
		return o.stage(corev1.ConditionFalse, cmp.Or(announcements[o.entry.Machine.Stage], reasonNotRunning))
	case present.Status == "", o.entry.UnresponsiveSince.IsZero(), o.now.Sub(o.entry.UnresponsiveSince) < unresponsivePeriod, !o.mostRespond():
		return present
	default:
		return unreachable
	}
}

// maintenance begins with an announcement, even if the machine has already stopped responding. It ends when the machine
// runs and its Node is ready. It is unknown if that takes too long, also for the next leader, which knows only the
// condition.
func (o observation) maintenance(present corev1.NodeCondition) corev1.NodeCondition {
	switch reason := announcements[o.entry.Machine.Stage]; {
	case reason != "" && (o.responds || present.Status == ""):
		return o.stage(corev1.ConditionTrue, reason)
	case o.responds && o.entry.Machine.Stage == runtime.MachineStageRunning && o.isReady:
		return corev1.NodeCondition{}
	case present.Status == corev1.ConditionTrue && o.now.Sub(present.LastTransitionTime.Time) >= maintenancePeriod:
		return overdue
	default:
		return present
	}
}

// gracefulShutdown is true only in the stage shutting down: Talos then always has the kubelet terminate the pods. In
// other stages, it may not: a reboot can be forced, or follow a fatal error.
func (o observation) gracefulShutdown(present corev1.NodeCondition) corev1.NodeCondition {
	isShuttingDown := o.entry.Machine.Stage == runtime.MachineStageShuttingDown

	switch {
	case o.responds && isShuttingDown:
		return o.stage(corev1.ConditionTrue, announcements[runtime.MachineStageShuttingDown])
	case o.responds, present.Status == "" && !isShuttingDown:
		return corev1.NodeCondition{}
	case o.entry.Condition == inventory.Unknown:
		return present
	default:
		return unreachable
	}
}

// expires reports whether a condition may change because time passes.
func (o observation) expires(kind corev1.NodeConditionType, status corev1.ConditionStatus) bool {
	return status != "" && status != corev1.ConditionUnknown && (!o.responds || kind == corev1.NodeMaintenanceInProgress)
}

// isEqual compares conditions without their times and types.
func isEqual(a, b corev1.NodeCondition) bool {
	return a.Status == b.Status && a.Reason == b.Reason && a.Message == b.Message
}

// mostRespond reports whether at least half of the machines respond. Otherwise, the network of this process may be the
// cause. Nodes that anyone with the bootstrap token can register do not count.
func (p planner) mostRespond() bool {
	nodes, _ := p.nodes.List(labels.Everything()) // a list from the cache cannot fail
	unreachable, responding := 0, 0

	for _, node := range nodes {
		switch condition := p.inventory.Get(node.Name).Condition; {
		case condition == inventory.Current, condition == inventory.Mismatch:
			responding++
		case condition == inventory.Unreachable && p.counts(node):
			unreachable++
		}
	}

	return unreachable <= responding
}

// syncConditions returns the conditions to write to a Node, and the time after which they can change because time passes. A
// condition without status must be removed. mostRespond reports whether at least half of all machines respond.
func syncConditions(s state, mostRespond func() bool, now time.Time) (changes []corev1.NodeCondition, again time.Duration) {
	if !nodespec.IsTalos(s.node) || s.node.DeletionTimestamp != nil {
		return nil, 0
	}

	o := observation{
		entry: s.entry, responds: s.entry.Condition == inventory.Current, isReady: nodespec.IsReady(s.node), mostRespond: mostRespond, now: now,
	}

	for _, c := range conditions {
		var present, want corev1.NodeCondition
		if found := nodespec.Condition(s.node, c.kind); found != nil {
			present = *found
		}

		if present.Type != "" && !isOwn(present) {
			continue
		}

		if s.managed && !s.input.Options.OmitConditions {
			want = c.state(o, present)
		}

		if o.expires(c.kind, want.Status) {
			again = recheckInterval
		}

		if isEqual(want, present) {
			continue
		}

		want.Type, want.LastHeartbeatTime, want.LastTransitionTime = c.kind, metav1.NewTime(o.now), metav1.NewTime(o.now)
		if want.Status == present.Status {
			want.LastTransitionTime = present.LastTransitionTime
		}

		changes = append(changes, want)
	}

	return changes, again
}
