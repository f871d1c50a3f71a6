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
	"github.com/talos-ccm/talos-ccm/test/talos"
)

const (
	// versionLabel is Talos's label on Nodes whose machines have this extension.
	versionLabel = constants.K8sExtensionPrefix + extension.Name
	// keptKey names what keptRules give to every Node.
	keptKey = "example.org/kept"
)

const keptRules = `transformations:
- name: kept
  labels:
    example.org/kept: "yes"
  annotations:
    example.org/kept: "on {{ .Platform }}"
  taints:
    example.org/kept: yes:PreferNoSchedule
  enforce: true
`

// keptEnvironment gives every Node a pod CIDR, unless it has one.
const keptEnvironment = `environment:
  - TALOS_CCM_CONTROLLERS=*,node-ipam-controller
  - TALOS_CCM_ALLOCATE_NODE_CIDRS=true
  - TALOS_CCM_CLUSTER_CIDR=10.244.0.0/16
`

// TestUpgrade goes to the next version and back.
func TestUpgrade(t *testing.T) {
	if t.Run("upgrade", upgrade) {
		t.Run("rollback", rollback)
	}
}

// upgrade is what talosctl does: another version of the extension is installed on one machine after the other, and the machine rebooted. The lease
// moves to another instance for that time, as in a cluster with several control-plane machines, and back.
func upgrade(t *testing.T) {
	configure(t)

	for _, m := range bed.Machines() {
		eventually(t, shows(m, version))
	}

	seen := observe(t)
	other := startInstance(t)
	start := time.Now()

	replace(t, bed.ControlPlane, unpacked(nextVersion), (*talos.Machine).Reboot)
	eventually(t, working)
	// The observation goes on later than the API server: it must see this before the lease goes on.
	eventually(t, seen.otherInstanceWorks)
	t.Logf("the other instance went on after %s", time.Since(start).Round(time.Second))
	eventually(t, waitsForLease)
	other.stop(t)
	eventually(t, shows(bed.ControlPlane, nextVersion))
	t.Logf("%s did its work after %s", nextVersion, time.Since(start).Round(time.Second))

	replace(t, bed.Worker, unpacked(nextVersion), (*talos.Machine).Reboot)
	eventually(t, shows(bed.Worker, nextVersion))

	seen.judge(t, "extension, no instance, other instance, no instance, extension",
		"extension, other instance, no instance, extension") // the API server stopped before it reported the first release
	worksOn(t)
}

// waitsForLease says whether the extension on the control plane is not a candidate since the last boot.
func waitsForLease(ctx context.Context) error {
	log, err := bed.ControlPlane.Logs(ctx, service)
	if err == nil && !strings.Contains(log, "leader lease") {
		err = fmt.Errorf("the extension does not wait for the lease:\n%s", log)
	}

	return err
}

// rollback goes back to the first version after a crash of the control plane: the lease is not released, and taken up again at once.
func rollback(t *testing.T) {
	configure(t)

	seen := observe(t)
	start := time.Now()

	replace(t, bed.ControlPlane, unpacked(version), (*talos.Machine).PowerCycle)
	eventually(t, shows(bed.ControlPlane, version))
	t.Logf("%s did its work after %s", version, time.Since(start).Round(time.Second))

	replace(t, bed.Worker, unpacked(version), (*talos.Machine).Reboot)
	eventually(t, shows(bed.Worker, version))

	seen.judge(t, "extension")
	worksOn(t)
}

// configure has talos-ccm do all that it can do to Nodes, until the test ends.
func configure(t *testing.T) {
	t.Helper()

	const variable = "TALOS_CCM_ALLOCATE_NODE_CIDRS=true"

	t.Cleanup(func() { removeDocument(t) })
	// Another process may be on its way, because a test before this one has taken the variable away.
	eventually(t, environment(variable, absent))
	patchDocument(t, keptEnvironment)
	eventually(t, environment(variable, present))
	eventually(t, working)
	changeConfig(t, keptRules)
	eventually(t, func(ctx context.Context) error {
		for _, m := range bed.Machines() {
			node, err := getNode(ctx, m.Name())

			switch {
			case err != nil:
				return err
			case !isKept(node) || len(node.Spec.PodCIDRs) == 0:
				return fmt.Errorf("%s has labels %v, annotations %v, %+v", node.Name, node.Labels, node.Annotations, node.Spec)
			}
		}

		return bothInitialized(ctx)
	})
}

// isKept says whether keptRules are in force on a Node.
func isKept(node *corev1.Node) bool {
	return node.Labels[keptKey] != "" && node.Annotations[keptKey] != "" &&
		slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == keptKey })
}

// replace installs another version of the extension on m, and restarts it.
func replace(t *testing.T, m *talos.Machine, dir string, restart func(*talos.Machine, context.Context) error) {
	t.Helper()

	require.NoError(t, m.Install(dir))
	require.NoError(t, restart(m, t.Context()))
}

// worksOn checks that the Nodes are still reconciled, and that none of them was initialized again.
func worksOn(t *testing.T) {
	t.Helper()

	assert.NoError(t, metricIs(t.Context(), "talosccm_node_initialization_duration_seconds_count", "0"))
	promptly(t, atOnce, func() time.Duration {
		for _, m := range bed.Machines() {
			gone := fmt.Appendf(nil, `{"metadata":{"labels":{%q:null}}}`, keptKey)
			_, err := client.CoreV1().Nodes().Patch(t.Context(), m.Name(), types.MergePatchType, gone, metav1.PatchOptions{})
			require.NoError(t, err)
		}

		took := eventually(t, labeled(keptKey, "yes"))
		t.Logf("a label of the configuration that was taken away was back after %s", took.Round(time.Millisecond))

		return took
	})
}

// shows says where want is not to be seen as the version of talos-ccm on m, or that it does not work there.
func shows(m *talos.Machine, want string) func(context.Context) error {
	return func(ctx context.Context) error {
		for place, version := range versions(ctx, m) {
			if got, err := version(); err != nil || got != want {
				return fmt.Errorf("%s: %s: %q, not %q (%v)", m.Name(), place, got, want, err) //nolint:errorlint // may be nil
			}
		}

		if m == bed.Worker {
			return nil
		}

		info := fmt.Sprintf("talosccm_build_info{go_version=%q,version=%q}", runtime.Version(), want)

		return errors.Join(metricIs(ctx, info, "1"), working(ctx))
	}
}

// versions are the places where the version of talos-ccm can be seen of every machine.
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

			// What runs, whatever is installed.
			out, err := bed.Shell(ctx, fmt.Sprintf("/proc/%d/exe --version", pids[0]))

			return strings.TrimPrefix(strings.TrimSpace(string(out)), extension.Name+" "), err
		},
	}
}
