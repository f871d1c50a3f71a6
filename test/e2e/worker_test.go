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
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
)

// lifecycleConfig has the shortest grace period, config.MinGracePeriod.
const lifecycleConfig = "lifecycle: {gracePeriod: 1m, outOfServiceTaint: true}\n"

// newName is what the worker is renamed to.
const newName = "talos-renamed"

const renamePatch = "apiVersion: v1alpha1\nkind: HostnameConfig\nauto: \"off\"\nhostname: " + newName + "\n"

// TestNodes_FollowLifeOfWorker are stories of one worker, each of which begins where the one before ends. At the end, the
// bed is as before.
func TestNodes_FollowLifeOfWorker(t *testing.T) {
	eventually(t, bothInitialized)
	applyConfig(t, lifecycleConfig)

	_ = t.Run("rebooted and shut down", rebootAndShutdown) &&
		t.Run("renamed", rename) &&
		t.Run("reset", reset) &&
		t.Run("installed", reinstall)
}

// rebootAndShutdown sees that the Node is never deleted: it stays the same object for more than a grace period after the
// reboot, and through a shutdown of more than a grace period.
func rebootAndShutdown(t *testing.T) {
	before := nodeOf(t, bed.Worker)

	require.NoError(t, bed.Worker.Reboot(t.Context()))

	// It is watched again, over a new connection: else it could announce nothing.
	prefix := netip.MustParsePrefix("203.0.113.40/32")
	addAddress(t, bed.Worker, prefix)
	removeAddress(t, bed.Worker, prefix)

	start := time.Now()

	require.NoError(t, bed.Worker.Shutdown(t.Context()))

	for _, key := range []string{cloudproviderapi.TaintNodeShutdown, corev1.TaintNodeOutOfService} {
		eventually(t, tainted(key, present))
		t.Logf("the Node had the taint %s %s after the shutdown", key, time.Since(start).Round(time.Second))
	}

	assert.GreaterOrEqual(t, time.Since(start), config.MinGracePeriod, "the Node had the taint before the grace period had passed")

	start = time.Now()

	require.NoError(t, bed.Worker.PowerOn())

	for _, key := range []string{cloudproviderapi.TaintNodeShutdown, corev1.TaintNodeOutOfService} {
		eventually(t, tainted(key, absent))
	}

	t.Logf("the Node had none of the taints %s after the machine was switched on", time.Since(start).Round(time.Second))
	eventually(t, bothInitialized)
	assert.Equal(t, before.UID, nodeOf(t, bed.Worker).UID, "the Node was deleted")
}

// tainted returns an error unless the worker's Node has, or does not have, a taint.
func tainted(key string, want presence) func(context.Context) error {
	return func(ctx context.Context) error {
		node, err := getNode(ctx, bed.Worker.Name())
		if err != nil {
			return err
		}

		there := slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == key })

		return want.check(presences[there], "taint %s of %s (%v)", key, node.Name, node.Spec.Taints)
	}
}

// rename sees that the new Node is complete, except for what it can have only when the old one is gone.
func rename(t *testing.T) {
	start := time.Now()

	patchMachine(t, bed.Worker, "no-reboot", renamePatch)
	eventually(t, func(ctx context.Context) error { return initializedAs(ctx, bed.Worker, newName, "") })
	t.Logf("the new Node had everything but the providerID %s after the renaming", time.Since(start).Round(100*time.Millisecond))

	isDeleted(t, bed.Worker.Name(), fmt.Sprintf("responds with nodename %q now", newName), start)

	eventually(t, func(ctx context.Context) error {
		return initializedAs(ctx, bed.Worker, newName, providerID(bed.Worker))
	})
	t.Logf("the new Node had the providerID %s after the renaming", time.Since(start).Round(time.Second))
	eventually(t, certified(newName, bed.Worker.Address()))
	t.Logf("its kubelet had a serving certificate %s after the renaming", time.Since(start).Round(time.Second))
}

// isDeleted waits until talos-ccm has deleted a Node, and sees that it did so with the proof and after the grace period.
func isDeleted(t *testing.T, name, proof string, start time.Time) {
	t.Helper()

	eventually(t, func(ctx context.Context) error {
		node, err := getNode(ctx, name)
		if apierrors.IsNotFound(err) {
			return nil
		}

		return fmt.Errorf("%s is still there (%v): %v", name, err, node) //nolint:errorlint // may be nil
	})

	took := time.Since(start)
	t.Logf("%s was deleted after %s", name, took.Round(time.Second))

	assert.GreaterOrEqual(t, took, config.MinGracePeriod, "%s was deleted before the grace period had passed", name)

	events, err := client.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{
		FieldSelector: fields.Set{"reason": lifecycle.ReasonDeleting, "involvedObject.name": name}.String(),
	})
	require.NoError(t, err)

	require.Len(t, events.Items, 1, "the deletion of %s is recorded once", name)
	assert.Contains(t, events.Items[0].Message, proof)
}

func reset(t *testing.T) {
	forgetDeletion(t)

	start := time.Now()

	require.NoError(t, bed.Worker.Reset(t.Context()))

	isDeleted(t, newName, "announced that it is being reset", start)
}

// forgetDeletion has a leader take over that does not know of the last deletion: of so few Nodes, only one is deleted in
// ten minutes.
func forgetDeletion(t *testing.T) {
	t.Helper()

	deletions := metav1.ListOptions{FieldSelector: "reason=" + lifecycle.ReasonDeleting}
	require.NoError(t, client.CoreV1().Events(metav1.NamespaceDefault).DeleteCollection(t.Context(), metav1.DeleteOptions{}, deletions))

	// Not by a restart through the API: Talos in a container would mount the configuration file, and never writes it.
	require.NoError(t, bed.ControlPlane.CrashService(t.Context(), service))

	eventually(t, working)
	eventually(t, bothCurrent)
}

// reinstall installs the worker after a reset: the disk is empty, and its configuration has the first hostname again.
func reinstall(t *testing.T) {
	start := time.Now()

	install(t)
	eventually(t, bothInitialized)
	t.Logf("the Node was initialized %s after the installation", time.Since(start).Round(time.Second))
}

// install has the worker boot with an empty disk.
func install(t *testing.T) {
	t.Helper()

	require.NoError(t, bed.Worker.Wipe(t.Context()))

	require.NoError(t, bed.Worker.PowerOn())
}
