//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

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

	if err := bed.Worker.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}

	// It is watched again, over a new connection: else it could announce nothing.
	prefix := netip.MustParsePrefix("203.0.113.40/32")
	addAddress(t, bed.Worker, prefix)
	removeAddress(t, bed.Worker, prefix)

	start := time.Now()

	if err := bed.Worker.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}

	for _, key := range []string{cloudproviderapi.TaintNodeShutdown, corev1.TaintNodeOutOfService} {
		eventually(t, tainted(key, present))
		t.Logf("the Node had the taint %s %s after the shutdown", key, time.Since(start).Round(time.Second))
	}

	if off := time.Since(start); off < config.MinGracePeriod {
		t.Errorf("the Node had the taint %s after %s, before the grace period had passed", corev1.TaintNodeOutOfService, off)
	}

	start = time.Now()

	if err := bed.Worker.PowerOn(t.Context()); err != nil {
		t.Fatal(err)
	}

	for _, key := range []string{cloudproviderapi.TaintNodeShutdown, corev1.TaintNodeOutOfService} {
		eventually(t, tainted(key, absent))
	}

	t.Logf("the Node had none of the taints %s after the machine was switched on", time.Since(start).Round(time.Second))
	eventually(t, bothInitialized)

	if after := nodeOf(t, bed.Worker); after.UID != before.UID {
		t.Errorf("the Node was deleted: its UID is %s, not %s", after.UID, before.UID)
	}
}

// tainted says whether the worker's Node does not have, or has, a taint.
func tainted(key string, want presence) func(context.Context) string {
	return func(ctx context.Context) string {
		node, err := client.CoreV1().Nodes().Get(ctx, bed.Worker.Name(), metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}

		got := absent
		if slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == key }) {
			got = present
		}

		if got != want {
			return fmt.Sprintf("%s has the taints %v", node.Name, node.Spec.Taints)
		}

		return ""
	}
}

// rename sees that the new Node is complete, except for what it can have only when the old one is gone.
func rename(t *testing.T) {
	start := time.Now()

	patchMachine(t, bed.Worker, "no-reboot", renamePatch)
	eventually(t, func(ctx context.Context) string { return initializedAs(ctx, bed.Worker, newName, "") })
	t.Logf("the new Node had everything but the providerID %s after the renaming", time.Since(start).Round(100*time.Millisecond))

	isDeleted(t, bed.Worker.Name(), fmt.Sprintf("responds with nodename %q now", newName), start)

	eventually(t, func(ctx context.Context) string {
		return initializedAs(ctx, bed.Worker, newName, providerID(bed.Worker))
	})
	t.Logf("the new Node had the providerID %s after the renaming", time.Since(start).Round(time.Second))
	eventually(t, func(ctx context.Context) string {
		_, missing := issued(ctx, newName, bed.Worker.Address())

		return missing
	})
	t.Logf("its kubelet had a serving certificate %s after the renaming", time.Since(start).Round(time.Second))
}

// isDeleted waits until talos-ccm has deleted a Node, and sees that it did so with the proof and after the grace period.
func isDeleted(t *testing.T, name, proof string, start time.Time) {
	t.Helper()

	eventually(t, func(ctx context.Context) string {
		node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})

		switch {
		case apierrors.IsNotFound(err):
			return ""
		case err != nil:
			return err.Error()
		}

		return fmt.Sprintf("%s is still there: %v", name, node.Status.Conditions)
	})

	took := time.Since(start)
	t.Logf("%s was deleted after %s", name, took.Round(time.Second))

	if took < config.MinGracePeriod {
		t.Errorf("%s was deleted after %s, before the grace period had passed", name, took)
	}

	events, err := client.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{
		FieldSelector: fields.Set{"reason": lifecycle.ReasonDeleting, "involvedObject.name": name}.String(),
	})
	if err != nil {
		t.Fatal(err)
	}

	if len(events.Items) != 1 || !strings.Contains(events.Items[0].Message, proof) {
		t.Errorf("the deletion of %s is to be recorded once, with %q: %v", name, proof, events.Items)
	}
}

func reset(t *testing.T) {
	forgetDeletion(t)

	start := time.Now()

	if err := bed.Worker.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}

	isDeleted(t, newName, "announced that it is being reset", start)
}

// forgetDeletion has a leader take over that does not know of the last deletion: of so few Nodes, only one is deleted in
// ten minutes.
func forgetDeletion(t *testing.T) {
	t.Helper()

	deletions := metav1.ListOptions{FieldSelector: "reason=" + lifecycle.ReasonDeleting}
	if err := client.CoreV1().Events(metav1.NamespaceDefault).DeleteCollection(t.Context(), metav1.DeleteOptions{}, deletions); err != nil {
		t.Fatal(err)
	}

	// Not by a restart through the API: Talos in a container would mount the configuration file, and never writes it.
	mark := bed.ControlPlane.Console().Now()

	if err := bed.ControlPlane.KillService(service); err != nil {
		t.Fatal(err)
	}

	if err := bed.ControlPlane.ServiceRunningAgain(t.Context(), service, mark); err != nil {
		t.Fatal(err)
	}

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

	if err := bed.Worker.Wipe(t.Context()); err != nil {
		t.Fatal(err)
	}

	if err := bed.Worker.PowerOn(t.Context()); err != nil {
		t.Fatal(err)
	}
}
