//go:build e2e

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

const (
	// versionLabel is the label that Talos sets on the Nodes of machines with this extension.
	versionLabel = constants.K8sExtensionPrefix + extension.Name
	// upgradeKey is the key of the label, the annotation and the taint in upgradeRules.
	upgradeKey = "example.org/kept"
)

const upgradeRules = `transformations:
- name: kept
  labels:
    example.org/kept: "yes"
  annotations:
    example.org/kept: "on {{ .Platform }}"
  taints:
    example.org/kept: yes:PreferNoSchedule
  enforce: true
`

// upgradeEnvironment enables talos-ccm's node-ipam-controller.
const upgradeEnvironment = `environment:
  - TALOS_CCM_CONTROLLERS=*,node-ipam-controller
  - TALOS_CCM_ALLOCATE_NODE_CIDRS=true
  - TALOS_CCM_CLUSTER_CIDR=10.244.0.0/16
`

// TestUpgrade upgrades both machines to the next version, and rolls them back.
func TestUpgrade(t *testing.T) {
	if t.Run("upgrade", upgrade) {
		t.Run("rollback", rollback)
	}
}

// upgrade installs the next version of the extension on one machine after the other, and reboots it, as an upgrade with
// talosctl does. In the meantime, another instance holds the lease, as in a cluster with several control-plane machines.
func upgrade(t *testing.T) {
	configureAll(t)

	for _, m := range bed.Machines() {
		eventually(t, checkVersion(m, version))
	}

	o := observe(t)
	other := startInstance(t)
	start := time.Now()

	replaceExtension(t, controlPlane, extensionDir(nextVersion), (*talos.Machine).Reboot)
	eventually(t, checkLeaseRenewed)
	// The observer reconnects later than the instances. Wait until it has seen the other instance before that one stops.
	eventually(t, o.checkHeldByOther)
	t.Logf("the other instance held the lease after %s", time.Since(start).Round(time.Second))
	eventually(t, checkWaitsForLease)
	other.stop(t)
	eventually(t, checkVersion(controlPlane, nextVersion))
	t.Logf("%s worked after %s", nextVersion, time.Since(start).Round(time.Second))

	replaceExtension(t, worker, extensionDir(nextVersion), (*talos.Machine).Reboot)
	eventually(t, checkVersion(worker, nextVersion))

	o.finish(t, "extension, no instance, other instance, no instance, extension",
		"extension, other instance, no instance, extension") // the API server stopped before the watch received the first release
	requireReconciled(t)
}

// checkWaitsForLease returns an error unless the extension on the control plane has tried to acquire the lease since the
// last boot.
func checkWaitsForLease(ctx context.Context) error {
	log, err := controlPlane.Logs(ctx, service)
	if err == nil && !strings.Contains(log, "leader lease") {
		err = fmt.Errorf("the extension is not waiting for the lease:\n%s", log)
	}

	return err
}

// rollback installs the first version again and crashes the control plane. The extension does not release the lease,
// but acquires it again immediately.
func rollback(t *testing.T) {
	configureAll(t)

	o := observe(t)
	start := time.Now()

	replaceExtension(t, controlPlane, extensionDir(version), (*talos.Machine).PowerCycle)
	eventually(t, checkVersion(controlPlane, version))
	t.Logf("%s worked after %s", version, time.Since(start).Round(time.Second))

	replaceExtension(t, worker, extensionDir(version), (*talos.Machine).Reboot)
	eventually(t, checkVersion(worker, version))

	o.finish(t, "extension")
	requireReconciled(t)
}

// configureAll enables all features of talos-ccm that change Nodes, until the test ends.
func configureAll(t *testing.T) {
	t.Helper()

	const variable = "TALOS_CCM_ALLOCATE_NODE_CIDRS=true"

	t.Cleanup(func() { removeDocument(t) })
	// An earlier test may have removed the document, which restarts talos-ccm. It then removes what the rules have set.
	eventually(t, checkEnvironment(variable, absent))
	eventually(t, func(ctx context.Context) error {
		for _, m := range bed.Machines() {
			node, err := getNode(ctx, m.Name())
			if err != nil {
				return err
			}

			if node.Labels[upgradeKey] != "" || node.Annotations[upgradeKey] != "" {
				return fmt.Errorf("%s has labels %v, annotations %v of removed rules", node.Name, node.Labels, node.Annotations)
			}
		}

		return nil
	})
	patchDocument(t, upgradeEnvironment)
	eventually(t, checkEnvironment(variable, present))
	eventually(t, checkLeaseRenewed)
	setConfig(t, upgradeRules)
	eventually(t, func(ctx context.Context) error {
		for _, m := range bed.Machines() {
			node, err := getNode(ctx, m.Name())

			switch {
			case err != nil:
				return err
			case !hasUpgradeRules(node) || len(node.Spec.PodCIDRs) == 0 || node.Labels[noderecord.LabelCredential] == "":
				return fmt.Errorf("%s has labels %v, annotations %v, %+v", node.Name, node.Labels, node.Annotations, node.Spec)
			}
		}

		return checkNodesInitialized(ctx)
	})
}

// hasUpgradeRules reports whether talos-ccm has applied upgradeRules to a Node.
func hasUpgradeRules(node *corev1.Node) bool {
	return node.Labels[upgradeKey] != "" && node.Annotations[upgradeKey] != "" &&
		slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == upgradeKey })
}

// replaceExtension installs the extension in a directory on m, and restarts m.
func replaceExtension(t *testing.T, m *talos.Machine, dir string, restart func(*talos.Machine, context.Context) error) {
	t.Helper()

	require.NoError(t, m.Install(dir))
	require.NoError(t, restart(m, t.Context()))
}

// requireReconciled requires that the current leader reconciles the Nodes, and has not initialized any of them again.
func requireReconciled(t *testing.T) {
	t.Helper()

	assert.NoError(t, checkMetric(t.Context(), "talosccm_node_initialization_duration_seconds_count", "0"))
	requireWithin(t, maxConfigDelay, func() time.Duration {
		for _, m := range bed.Machines() {
			patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:null}}}`, upgradeKey)
			_, err := client.CoreV1().Nodes().Patch(t.Context(), m.Name(), types.MergePatchType, patch, metav1.PatchOptions{})
			require.NoError(t, err)
		}

		took := eventually(t, checkLabel(upgradeKey, "yes"))
		t.Logf("a removed label was restored after %s", took.Round(time.Millisecond))

		return took
	})
}

// checkVersion returns a condition: m runs the version of talos-ccm, and, on the control plane, the lease is renewed.
func checkVersion(m *talos.Machine, want string) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := checkInstalled(ctx, m, want); err != nil || m == worker {
			return err
		}

		info := fmt.Sprintf("talosccm_build_info{go_version=%q,version=%q}", runtime.Version(), want)

		return errors.Join(checkMetric(ctx, info, "1"), checkLeaseRenewed(ctx))
	}
}

// checkInstalled returns an error unless m runs the version of talos-ccm.
func checkInstalled(ctx context.Context, m *talos.Machine, want string) error {
	for source, version := range versions(ctx, m) {
		if got, err := version(); err != nil || got != want {
			return fmt.Errorf("%s: %s: %q, want %q (%v)", m.Name(), source, got, want, err) //nolint:errorlint // may be nil
		}
	}

	return nil
}

// versions returns functions that return the version of talos-ccm on m, by its source.
func versions(ctx context.Context, m *talos.Machine) map[string]func() (string, error) {
	return map[string]func() (string, error){
		"talosctl get extensions": func() (string, error) {
			out, err := bed.Shell(ctx, fmt.Sprintf("talosctl -n %s get extensions -o jsonpath={.spec.metadata.version}", m.Address()))

			return "v" + strings.TrimSpace(string(out)), err
		},
		"the Node's label": func() (string, error) {
			node, err := getNode(ctx, m.Name())
			if err != nil {
				return "", err
			}

			return "v" + node.Labels[versionLabel], nil
		},
		"talos-ccm --version": func() (string, error) {
			pids, err := processes(m)
			if err != nil {
				return "", err
			}

			// The running binary, which may not be the installed one.
			out, err := bed.Shell(ctx, fmt.Sprintf("/proc/%d/exe --version", pids[0]))

			return strings.TrimPrefix(strings.TrimSpace(string(out)), extension.Name+" "), err
		},
	}
}
