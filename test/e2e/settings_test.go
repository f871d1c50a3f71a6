//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/stretchr/testify/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// maxConfigDelay is the documented maximum time until a change of the configuration reaches the Nodes.
const maxConfigDelay = time.Second

// configValid is the name of the metric that is 1 if the configuration is valid.
const configValid = "talosccm_config_valid"

// documentHead is the beginning of talos-ccm's ExtensionServiceConfig document.
const documentHead = "apiVersion: v1alpha1\nkind: ExtensionServiceConfig\nname: talos-ccm\n"

// patchDocument patches talos-ccm's ExtensionServiceConfig document on the control plane.
func patchDocument(t *testing.T, body string) {
	t.Helper()
	patchMachine(t, controlPlane, "no-reboot", documentHead+body)
}

// applyConfig sets the content of talos-ccm's configuration file until the test ends.
func applyConfig(t *testing.T, config string) {
	t.Helper()

	t.Cleanup(func() { removeDocument(t) })
	setConfig(t, config)
}

// setConfig sets the content of talos-ccm's configuration file.
func setConfig(t *testing.T, config string) {
	t.Helper()

	indented := "      " + strings.ReplaceAll(config, "\n", "\n      ")
	patchDocument(t, fmt.Sprintf("configFiles:\n  - mountPath: %s\n    content: |\n%s\n", settings.MountPath, indented))
}

// removeDocument deletes talos-ccm's ExtensionServiceConfig document, if it exists. It checks that in the machine
// configuration, because Talos updates the ExtensionServiceConfig resource later, and talosctl v1.13.5 cannot delete a
// document that does not exist.
func removeDocument(t *testing.T) {
	t.Helper()

	if len(activeConfig(t).Config().ExtensionServiceConfigs()) > 0 {
		patchDocument(t, "$patch: delete\n")
	}
}

// activeConfig returns the active machine configuration of the control plane.
func activeConfig(t *testing.T) (active *config.MachineConfig) {
	t.Helper()

	eventually(t, func(ctx context.Context) (err error) {
		active, err = resource[*config.MachineConfig](ctx, controlPlane, config.ActiveID)

		return err
	})

	return active
}

// checkLabel returns a condition: all Nodes have the label with the value or, if the value is empty, lack the label.
func checkLabel(key, value string) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, m := range bed.Machines() {
			node, err := getNode(ctx, m.Name())
			if err != nil {
				return err
			}

			if node.Labels[key] != value {
				return fmt.Errorf("%s has the label %s=%q", m.Name(), key, node.Labels[key])
			}
		}

		return nil
	}
}

// checkEvent returns a condition: the control plane's Node has an Event with the reason since a time.
func checkEvent(reason string, since time.Time) func(context.Context) error {
	return checkEventOf(controlPlane, reason, since)
}

// checkEventOf returns a condition: the Node of m has an Event with the reason since a time.
func checkEventOf(m *talos.Machine, reason string, since time.Time) func(context.Context) error {
	return func(ctx context.Context) error {
		events, err := client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "reason=" + reason})
		if err != nil {
			return err
		}

		for _, e := range events.Items {
			if e.InvolvedObject.Name == m.Name() && !e.LastTimestamp.Time.Before(since.Truncate(time.Second)) {
				return nil
			}
		}

		return fmt.Errorf("%s has no Event %s", m.Name(), reason)
	}
}

// metric returns the value of a metric of the instance on the control plane, as text.
func metric(ctx context.Context, name string) (string, error) {
	config, err := bed.RESTConfig()
	if err != nil {
		return "", err
	}

	// The metrics port listens on the loopback interface, with a self-signed certificate.
	config.Host = "https://127.0.0.1:10459"
	config.Dial = controlPlane.DialContext
	config.CAData, config.Insecure = nil, true

	admin, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}

	text, err := admin.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return "", err
	}

	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, name+" "); found {
			return strings.TrimSpace(value), nil
		}
	}

	return "", fmt.Errorf("metric %s not found", name)
}

// checkMetric returns an error unless a metric of the instance on the control plane has the value.
func checkMetric(ctx context.Context, name, want string) error {
	got, err := metric(ctx, name)
	if err == nil && got != want {
		err = fmt.Errorf("metric %s is %q, want %q", name, got, want)
	}

	return err
}

// labelRule returns a configuration that sets the label example.org/e2e of all Nodes.
func labelRule(value string) string {
	return "transformations:\n- name: test\n  labels:\n    example.org/e2e: " + value + "\n"
}

func TestConfiguration_AppliesWithoutRestart(t *testing.T) {
	const label = "example.org/e2e"

	eventually(t, checkNodesInitialized)
	eventually(t, checkLeaseRenewed)

	before := awaitProcesses(t, controlPlane)

	t.Cleanup(func() { removeDocument(t) })
	requireWithin(t, maxConfigDelay, func() time.Duration {
		setConfig(t, labelRule("one"))

		added := eventually(t, checkLabel(label, "one"))

		setConfig(t, labelRule("two"))

		changed := eventually(t, checkLabel(label, "two"))

		removeDocument(t)

		removed := eventually(t, checkLabel(label, ""))
		t.Logf("the label of both Nodes was added after %s, changed after %s, and removed after %s",
			added.Round(time.Millisecond), changed.Round(time.Millisecond), removed.Round(time.Millisecond))

		return max(added, changed, removed)
	})
	requireWithin(t, maxConfigDelay, func() time.Duration { return correctInvalidConfig(t, label) })

	assert.Equal(t, before, awaitProcesses(t, controlPlane), "PIDs of talos-ccm")
}

// correctInvalidConfig requires that talos-ccm reports an invalid configuration and keeps the last valid one. It then
// corrects the configuration, and returns the time until both Nodes have the new label.
func correctInvalidConfig(t *testing.T, label string) time.Duration {
	t.Helper()

	setConfig(t, labelRule("good"))
	eventually(t, checkLabel(label, "good"))

	start := time.Now()

	setConfig(t, labelRule("'{{ .Nothing }}'"))
	t.Logf("the invalid configuration was reported after %s", eventually(t, checkEvent(ccm.ReasonConfigInvalid, start)).Round(time.Millisecond))
	eventually(t, func(ctx context.Context) error { return checkMetric(ctx, configValid, "0") })

	for _, m := range bed.Machines() {
		assert.Equal(t, "good", nodeOf(t, m).Labels[label], "%s: label of the last valid configuration", m.Name())
	}

	start = time.Now()

	setConfig(t, labelRule("better"))

	took := eventually(t, checkLabel(label, "better"))
	t.Logf("both Nodes had the label of the corrected configuration after %s", took.Round(time.Millisecond))
	eventually(t, checkEvent(ccm.ReasonConfigValid, start))
	eventually(t, func(ctx context.Context) error { return checkMetric(ctx, configValid, "1") })

	return took
}

func TestEnvironment_ReplacesProcess(t *testing.T) {
	eventually(t, checkNodesInitialized)
	eventually(t, checkLeaseRenewed)
	t.Cleanup(func() { removeDocument(t) })

	before := awaitProcesses(t, controlPlane)

	patchDocument(t, "environment:\n  - TALOS_CCM_V=4\n")
	t.Logf("the process had the variable after %s", eventually(t, checkEnvironment("TALOS_CCM_V=4", present)).Round(time.Millisecond))
	t.Logf("it held the lease %s later", eventually(t, checkLeaseRenewed).Round(time.Millisecond))

	assert.Equal(t, before, awaitProcesses(t, controlPlane), "PIDs of talos-ccm")

	start := time.Now()

	patchDocument(t, "environment:\n  - TALOS_CCM_NO_SUCH_FLAG=1\n")
	eventually(t, checkEvent(ccm.ReasonConfigInvalid, start))
	eventually(t, checkEnvironment("TALOS_CCM_V=4", present))

	removeDocument(t)
	eventually(t, checkEnvironment("TALOS_CCM_V=4", absent))
	eventually(t, checkLeaseRenewed)
	eventually(t, checkNodesInitialized)
}

// checkEnvironment returns a condition: the environment of talos-ccm on the control plane has, or lacks, a variable.
func checkEnvironment(variable string, want presence) func(context.Context) error {
	return func(context.Context) error {
		pids, err := processes(controlPlane)
		if err != nil {
			return err
		}

		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pids[0]))
		if err != nil {
			return err
		}

		return want.check(presence(slices.Contains(strings.Split(string(environ), "\x00"), variable)), "variable %s", variable)
	}
}
