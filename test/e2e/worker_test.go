//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// lifecycleConfig has the shortest grace period, config.MinGracePeriod.
const lifecycleConfig = "lifecycle: {gracePeriod: 1m, outOfServiceTaint: true}\n"

// newName is the host name of the worker after the subtest that renames it.
const newName = "talos-renamed"

const renamePatch = "apiVersion: v1alpha1\nkind: HostnameConfig\nauto: \"off\"\nhostname: " + newName + "\n"

// TestNodes_FollowLifeOfWorker runs subtests that depend on each other. The last one restores the worker.
func TestNodes_FollowLifeOfWorker(t *testing.T) {
	eventually(t, checkNodesInitialized)
	applyConfig(t, lifecycleConfig)

	_ = t.Run("rebooted and shut down", rebootAndShutdown) &&
		t.Run("renamed", rename) &&
		t.Run("reset", reset) &&
		t.Run("installed", reinstall)
}

// rebootAndShutdown requires that talos-ccm does not delete the Node of a machine that reboots, or that is off for more than
// the grace period.
func rebootAndShutdown(t *testing.T) {
	before := nodeOf(t, worker)

	eventually(t, endMaintenance) // of earlier tests

	reboot := make(chan error, 1)
	go func() { reboot <- worker.Reboot(t.Context()) }()

	start := time.Now()

	eventually(t, checkCondition(corev1.NodeMaintenanceInProgress, corev1.ConditionTrue))
	t.Logf("MaintenanceInProgress was set %s after the request to reboot", time.Since(start).Round(100*time.Millisecond))
	require.NoError(t, <-reboot)
	eventually(t, endMaintenance)
	t.Logf("MaintenanceInProgress was removed %s after the request to reboot", time.Since(start).Round(time.Second))

	// The Node follows only if talos-ccm has connected to the machine again. A machine without a connection cannot announce
	// its shutdown.
	prefix := netip.MustParsePrefix("203.0.113.40/32")
	addAddress(t, worker, prefix)
	removeAddress(t, worker, prefix)

	start = time.Now()

	require.NoError(t, worker.Shutdown(t.Context()))
	eventually(t, checkCondition(corev1.NodeMaintenanceInProgress, corev1.ConditionTrue))
	eventually(t, checkCondition(corev1.NodeGracefulNodeShutdownInProgress, corev1.ConditionUnknown)) // it no longer responds
	eventually(t, checkCondition(node.ConditionTalosReady, corev1.ConditionUnknown))
	t.Logf("TalosReady was unknown %s after the shutdown", time.Since(start).Round(time.Second))

	for _, key := range []string{cloudproviderapi.TaintNodeShutdown, corev1.TaintNodeOutOfService} {
		eventually(t, checkTaint(key, present))
		t.Logf("taint %s was added %s after the shutdown", key, time.Since(start).Round(time.Second))
	}

	assert.GreaterOrEqual(t, time.Since(start), config.MinGracePeriod, "the last taint was added before the grace period ended")

	crashLeader(t)
	addAddress(t, controlPlane, netip.MustParsePrefix("203.0.113.41/32")) // shows that the next leader works
	removeAddress(t, controlPlane, netip.MustParsePrefix("203.0.113.41/32"))

	for kind, want := range map[corev1.NodeConditionType]corev1.ConditionStatus{
		corev1.NodeMaintenanceInProgress: corev1.ConditionTrue, corev1.NodeGracefulNodeShutdownInProgress: corev1.ConditionUnknown,
		node.ConditionTalosReady: corev1.ConditionUnknown,
	} {
		assert.NoError(t, checkCondition(kind, want)(t.Context()), "after a change of the leader")
	}

	start = time.Now()

	require.NoError(t, worker.PowerOn())

	for _, key := range []string{cloudproviderapi.TaintNodeShutdown, corev1.TaintNodeOutOfService} {
		eventually(t, checkTaint(key, absent))
	}

	t.Logf("the taints were removed %s after the machine was switched on", time.Since(start).Round(time.Second))
	eventually(t, endMaintenance)
	eventually(t, checkCondition(corev1.NodeGracefulNodeShutdownInProgress, ""))
	eventually(t, checkNodesInitialized)
	assert.Equal(t, before.UID, nodeOf(t, worker).UID, "the Node was deleted")
}

// endMaintenance makes the worker's Node ready and returns nil when it has no MaintenanceInProgress condition. The bed has
// no CNI, so the kubelet is not ready, and reverts this within seconds.
func endMaintenance(ctx context.Context) error {
	patch := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
	if _, err := client.CoreV1().Nodes().Patch(ctx, worker.Name(), types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		return err
	}

	return checkCondition(corev1.NodeMaintenanceInProgress, "")(ctx)
}

// checkTaint returns a condition: the worker's Node has, or lacks, a taint.
func checkTaint(key string, want presence) func(context.Context) error {
	return func(ctx context.Context) error {
		node, err := getNode(ctx, worker.Name())
		if err != nil {
			return err
		}

		tainted := slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == key })

		return want.check(presence(tainted), "taint %s of %s (%v)", key, node.Name, node.Spec.Taints)
	}
}

// checkCondition returns a condition: the worker's Node has a condition with the status, or without a status, does not have
// it.
func checkCondition(kind corev1.NodeConditionType, want corev1.ConditionStatus) func(context.Context) error {
	return func(ctx context.Context) error {
		n, err := getNode(ctx, worker.Name())
		if err != nil {
			return err
		}

		got := corev1.ConditionStatus("")
		if c := nodespec.Condition(n, kind); c != nil {
			got = c.Status
		}

		if got != want {
			return fmt.Errorf("condition %s of %s is %q, want %q: %v", kind, n.Name, got, want, n.Status.Conditions)
		}

		return nil
	}
}

// rename requires that the new Node is initialized before the old one is deleted, and gets its providerID afterwards. Its
// kubelet gets a serving certificate when the address is no longer reserved for the old Node.
func rename(t *testing.T) {
	start := time.Now()

	patchMachine(t, worker, "no-reboot", renamePatch)
	eventually(t, func(ctx context.Context) error { return checkInitializedAs(ctx, worker, newName, "") })
	t.Logf("the new Node was initialized except for its providerID %s after the renaming", time.Since(start).Round(100*time.Millisecond))

	awaitDeletion(t, worker.Name(), fmt.Sprintf("responds with nodename %q now", newName), start)

	eventually(t, func(ctx context.Context) error {
		return checkInitializedAs(ctx, worker, newName, providerID(worker))
	})
	t.Logf("the new Node had the providerID %s after the renaming", time.Since(start).Round(time.Second))
	forgetDeletions(t)
	eventually(t, checkServingCertificate(newName, worker.Address()))
	t.Logf("a serving certificate was issued for it %s after the renaming", time.Since(start).Round(time.Second))
}

// awaitDeletion waits until a Node is deleted, and requires that talos-ccm reported the proof in an Event and waited for the
// grace period since start.
func awaitDeletion(t *testing.T, name, proof string, start time.Time) {
	t.Helper()

	eventually(t, func(ctx context.Context) error {
		node, err := getNode(ctx, name)
		if apierrors.IsNotFound(err) {
			return nil
		}

		return fmt.Errorf("node %s is not deleted (%v): %v", name, err, node) //nolint:errorlint // may be nil
	})

	took := time.Since(start)
	t.Logf("%s was deleted after %s", name, took.Round(time.Second))

	assert.GreaterOrEqual(t, took, config.MinGracePeriod, "%s was deleted before the grace period ended", name)
	requireProof(t, name, proof)
}

// requireProof requires that one Event reports the deletion of a Node, with the proof.
func requireProof(t *testing.T, name, proof string) {
	t.Helper()

	events, err := client.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{
		FieldSelector: fields.Set{"reason": lifecycle.ReasonDeleting, "involvedObject.name": name}.String(),
	})
	require.NoError(t, err)

	require.Len(t, events.Items, 1, "Events for the deletion of %s", name)
	assert.Contains(t, events.Items[0].Message, proof)
}

// reset requires that talos-ccm deletes the Node of a machine that is reset.
func reset(t *testing.T) {
	start := time.Now()

	require.NoError(t, worker.Reset(t.Context()))

	awaitDeletion(t, newName, "announced that it is being reset", start)
}

// forgetDeletions deletes the Events of earlier deletions and restarts the leader. The next leader does not count these
// deletions: in a cluster this small, talos-ccm deletes only one Node in ten minutes. It reserves nothing for the deleted
// Nodes either, which the leader before does for 15 minutes.
func forgetDeletions(t *testing.T) {
	t.Helper()

	deletions := metav1.ListOptions{FieldSelector: "reason=" + lifecycle.ReasonDeleting}
	require.NoError(t, client.CoreV1().Events(metav1.NamespaceDefault).DeleteCollection(t.Context(), metav1.DeleteOptions{}, deletions))

	crashLeader(t)
	eventually(t, checkMachinesCurrent)
}

// crashLeader kills talos-ccm, and waits until the next leader has renewed the lease.
func crashLeader(t *testing.T) {
	t.Helper()

	// After a restart through the API, Talos in a container would mount the configuration file, which it never writes.
	require.NoError(t, controlPlane.CrashService(t.Context(), service))

	eventually(t, checkLeaseRenewed)
}

// reinstall installs the worker after the reset. Its initial configuration has the first host name.
func reinstall(t *testing.T) {
	start := time.Now()

	install(t)
	eventually(t, checkNodesInitialized)
	t.Logf("the Node was initialized %s after the installation", time.Since(start).Round(time.Second))
}

// install wipes the worker's disk and boots it.
func install(t *testing.T) {
	t.Helper()

	require.NoError(t, worker.Wipe(t.Context()))

	require.NoError(t, worker.PowerOn())
}
