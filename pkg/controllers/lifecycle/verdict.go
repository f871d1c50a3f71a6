package lifecycle

import (
	"fmt"
	"slices"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// Proof is why a machine is known to be gone.
type Proof string

// The proofs, as metrics name them.
const (
	// ProofReset means that the machine announced a reset before it went silent.
	ProofReset Proof = "reset"
	// ProofRenamed means that the machine responds under another nodename now.
	ProofRenamed Proof = "renamed"
	// ProofReplaced means that another machine has the address, and that the former one responds under no nodename.
	ProofReplaced Proof = "replaced"
	// ProofDiscovery means that the machine is unreachable and no member of the cluster.
	ProofDiscovery Proof = "discovery"
)

// evidence is what is known about a Node and its machine at one moment.
type evidence struct {
	ready bool
	// reports is true if the kubelet reports its state, ready or not.
	reports bool
	entry   inventory.Entry
	// outdated is true if the kubelet has worked since the machine went silent, so that what the machine announced
	// before is over.
	outdated bool
	// renamedTo and replacedBy are nodenames from the inventory, or empty. Their machines respond at the Node's address.
	renamedTo, replacedBy string
	// absent explains which control-plane machines do not see the machine as a member; empty if it may be one.
	absent string
}

// verdict is what the evidence means for the Node. The zero value means that the Node stays as it is.
type verdict struct {
	// shutdown is true if the machine announced a shutdown and went silent.
	shutdown bool
	// back is true if the machine or its kubelet works again, so that a former shutdown is over.
	back bool
	// proof is empty unless the machine is gone. The Node is deleted when proof has been observed for period without
	// interruption.
	proof   Proof
	message string
	period  time.Duration
}

// judge returns the verdict. It needs no history: the inventory keeps the last proven view of each machine. A machine
// that responds under its nodename is never gone, whatever it announces, and neither is one whose kubelet reports.
func judge(e evidence, s config.CompiledLifecycle) verdict {
	responds := e.entry.Condition == inventory.Current

	switch {
	case e.ready, responds && e.entry.Last.Stage != runtime.MachineStageShuttingDown:
		return verdict{back: true}
	case responds, e.reports:
		return verdict{}
	default:
		return e.gone(s)
	}
}

// gone returns the verdict on a Node whose kubelet does not report and whose machine does not respond.
func (e evidence) gone(s config.CompiledLifecycle) verdict {
	last := e.entry.Last

	// What the machine has announced counts until it publishes another stage.
	v := verdict{shutdown: last.Stage == runtime.MachineStageShuttingDown && !e.outdated, period: s.GracePeriod}

	switch {
	case last.Stage == runtime.MachineStageResetting && !e.outdated:
		v.proof = ProofReset
		v.message = fmt.Sprintf("machine (%s) announced that it is being reset and no longer responds", last.Identity())
	case e.renamedTo != "":
		v.proof = ProofRenamed
		v.message = fmt.Sprintf("machine (%s) responds with nodename %q now", last.Identity(), e.renamedTo)
	case s.Replaced && e.replacedBy != "":
		v.proof = ProofReplaced
		v.message = fmt.Sprintf("another machine, %q, responds at the address of this node, and its own machine (%s) does not respond",
			e.replacedBy, last.Identity())
	case s.Discovery && e.absent != "" && e.entry.Condition == inventory.Unreachable:
		v.proof, v.period = ProofDiscovery, s.AbsentPeriod
		v.message = "machine does not respond and is not a discovered member of the cluster: " + e.absent
	}

	return v
}

// taintValue marks the out-of-service taints that this controller has set.
const taintValue = "talos-ccm"

func shutdownTaint() corev1.Taint {
	return corev1.Taint{Key: cloudproviderapi.TaintNodeShutdown, Effect: corev1.TaintEffectNoSchedule}
}

func outOfServiceTaint() corev1.Taint {
	return corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: taintValue, Effect: corev1.TaintEffectNoExecute}
}

// taints returns the taints that a Node with the given taints should have. shutdownFor is how long the verdict has been
// a shutdown. A shutdown taint is removed from a Node that is back even if this controller has not set it: another
// instance of it may have. An out-of-service taint is removed only if its value says so.
func (v verdict) taints(taints []corev1.Taint, s config.CompiledLifecycle, shutdownFor time.Duration) []corev1.Taint {
	shutdown, outOfService := shutdownTaint(), outOfServiceTaint()
	taints = slices.Clone(taints)

	switch {
	case v.back:
		return slices.DeleteFunc(taints, func(t corev1.Taint) bool {
			return t.Key == shutdown.Key || (t.MatchTaint(&outOfService) && t.Value == taintValue)
		})
	case v.shutdown:
		taints = addTaint(taints, shutdown)

		if s.OutOfServiceTaint && shutdownFor >= s.GracePeriod {
			taints = addTaint(taints, outOfService)
		}
	}

	return taints
}

// addTaint adds a taint unless there is one with its key and effect.
func addTaint(taints []corev1.Taint, added corev1.Taint) []corev1.Taint {
	if slices.ContainsFunc(taints, func(t corev1.Taint) bool { return t.MatchTaint(&added) }) {
		return taints
	}

	return append(taints, added)
}
