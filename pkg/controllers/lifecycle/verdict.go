package lifecycle

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// Proof is the kind of proof that a machine is gone.
type Proof string

// The proofs, as metrics name them.
const (
	// ProofReset means that the machine announced a reset before it stopped responding.
	ProofReset Proof = "reset"
	// ProofScaledDown means that the machine does not respond and Cluster Autoscaler has marked its Node for deletion.
	ProofScaledDown Proof = "scaled-down"
	// ProofRenamed means that the machine responds under a new nodename.
	ProofRenamed Proof = "renamed"
	// ProofDiscovery means that the machine does not respond and is not a discovered member of the cluster.
	ProofDiscovery Proof = "discovery"
)

// evidence describes a Node and its machine at one moment.
type evidence struct {
	ready bool
	// reports is true if the kubelet reports its state, ready or not.
	reports bool
	entry   inventory.Entry
	// booted is true if the kubelet has reported another boot ID since the machine stopped responding. Then the stage that
	// the machine announced last is over.
	booted bool
	// recorded is true if an earlier leader recorded the reset of its own machine, which has not booted since.
	recorded bool
	// scaledDown is true if Cluster Autoscaler has marked the Node for deletion.
	scaledDown bool
	// renamedTo is the new nodename of the machine, which responds at the Node's address; empty if it was not renamed.
	renamedTo string
	// doubt explains why the stage that the machine announced last does not count, and renameDoubt why the new nodename does
	// not; each is empty if it counts.
	doubt, renameDoubt string
	// restricted names a label or taint of the Node that a machine must not be able to remove; empty if there is none.
	restricted string
	// absent explains which control-plane machines do not see the machine as a member; empty if it may be a member.
	absent string
}

// verdict is the conclusion from the evidence. With the zero value, the Node stays as it is.
type verdict struct {
	// shutdown is true if the machine announced a shutdown and stopped responding, has not booted since, and its kubelet
	// does not report.
	shutdown bool
	// back is true if the Node is ready, or if the machine responds and is not shutting down.
	back bool
	// proof is empty unless the machine is gone. The Node is deleted when the proof has held for period without
	// interruption.
	proof   Proof
	message string
	period  time.Duration
	// doubt is why the Node is not tainted although a machine announced a shutdown; empty if no machine did.
	doubt string
	// weakness is why the proof does not suffice: only a machine reports that it is gone. Empty if it suffices.
	weakness string
}

// decide returns the verdict. A machine is not gone while it responds under its nodename, whatever stage it announces, or
// while its kubelet reports.
func decide(e evidence, s config.CompiledLifecycle) verdict {
	last, responds := e.entry.Last, e.entry.Condition == inventory.Current

	switch {
	case e.ready, responds && last.Stage != runtime.MachineStageShuttingDown:
		return verdict{back: true}
	case responds, e.reports:
		return verdict{}
	}

	v := e.announced()
	v.period = s.GracePeriod

	if last.Stage == runtime.MachineStageShuttingDown && !e.booted {
		v.shutdown, v.doubt = e.doubt == "", e.doubt
	}

	if (v.proof == "" || v.weakness != "") && s.Discovery && e.absent != "" && e.entry.Condition != inventory.Unknown {
		v.proof, v.period, v.weakness = ProofDiscovery, s.AbsentPeriod, ""
		v.message = "machine does not respond and is not a discovered member of the cluster: " + e.absent
	}

	return v
}

// announced returns the proof that the machine, or Cluster Autoscaler, has given.
func (e evidence) announced() (v verdict) {
	last := e.entry.Last
	if e.recorded { // the leader on that machine recorded it
		e.doubt = ""
	}

	switch {
	case e.scaledDown && e.entry.Condition != inventory.Unknown:
		v.proof, v.message = ProofScaledDown, "machine does not respond, and Cluster Autoscaler has marked the node for deletion"
	case last.Stage == runtime.MachineStageResetting && !e.booted, e.recorded && last.Nodename == "" && e.entry.Condition != inventory.Unknown:
		v.proof, v.weakness = ProofReset, cmp.Or(e.doubt, e.restricted)
		v.message = fmt.Sprintf("machine (%s) announced that it is being reset and no longer responds", last.Identity())
	case e.renamedTo != "":
		v.proof, v.weakness = ProofRenamed, cmp.Or(e.renameDoubt, e.restricted)
		v.message = fmt.Sprintf("machine (%s) responds with nodename %q now", last.Identity(), e.renamedTo)
	}

	return v
}

// ownValue marks the taints that this controller has set.
const ownValue = "talos-ccm"

// taints returns the taints that a Node with the given taints should have. shutdownFor is how long the verdict has been
// a shutdown. When v.back is true, taints removes every shutdown taint, whichever client added it. It removes an
// out-of-service taint only if the value is ownValue, and in a dry run both taints only with this value.
func (v verdict) taints(taints []corev1.Taint, s config.CompiledLifecycle, shutdownFor time.Duration) []corev1.Taint {
	shutdown := corev1.Taint{Key: cloudproviderapi.TaintNodeShutdown, Value: ownValue, Effect: corev1.TaintEffectNoSchedule}
	outOfService := corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: ownValue, Effect: corev1.TaintEffectNoExecute}
	taints = slices.Clone(taints)

	switch {
	case v.back, s.DryRun:
		return slices.DeleteFunc(taints, func(t corev1.Taint) bool {
			isOwn := t.Value == ownValue && (t.MatchTaint(&shutdown) || t.MatchTaint(&outOfService))

			return isOwn || t.Key == shutdown.Key && !s.DryRun
		})
	case v.shutdown:
		taints = addTaint(taints, shutdown)

		if s.OutOfServiceTaint && shutdownFor >= s.GracePeriod {
			taints = addTaint(taints, outOfService)
		}
	}

	return taints
}

// addTaint adds a taint unless the list has a taint with the same key and effect.
func addTaint(taints []corev1.Taint, added corev1.Taint) []corev1.Taint {
	if slices.ContainsFunc(taints, func(t corev1.Taint) bool { return t.MatchTaint(&added) }) {
		return taints
	}

	return append(taints, added)
}
