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
)

// atOnce is what the product promises for a change of the configuration.
const atOnce = time.Second

// configValid is the metric of a valid configuration.
const configValid = "talosccm_config_valid"

// documentHead begins the ExtensionServiceConfig document of talos-ccm.
const documentHead = "apiVersion: v1alpha1\nkind: ExtensionServiceConfig\nname: talos-ccm\n"

// patchDocument patches the ExtensionServiceConfig document of talos-ccm on the control plane.
func patchDocument(t *testing.T, body string) {
	t.Helper()
	patchMachine(t, bed.ControlPlane, "no-reboot", documentHead+body)
}

// applyConfig makes config the configuration file of talos-ccm, until the test ends.
func applyConfig(t *testing.T, config string) {
	t.Helper()

	t.Cleanup(func() { removeDocument(t) })
	changeConfig(t, config)
}

func changeConfig(t *testing.T, config string) {
	t.Helper()

	indented := "      " + strings.ReplaceAll(config, "\n", "\n      ")
	patchDocument(t, fmt.Sprintf("configFiles:\n  - mountPath: %s\n    content: |\n%s\n", settings.MountPath, indented))
}

// removeDocument takes the document away, if there is one: talosctl v1.13.5 cannot do that to one that is not there. The machine configuration tells, and
// not the resource that Talos makes of the document a moment later.
func removeDocument(t *testing.T) {
	t.Helper()

	if len(activeConfig(t).Config().ExtensionServiceConfigs()) > 0 {
		patchDocument(t, "$patch: delete\n")
	}
}

// activeConfig is the control plane's machine configuration.
func activeConfig(t *testing.T) (active *config.MachineConfig) {
	t.Helper()

	eventually(t, func(ctx context.Context) (err error) {
		active, err = resource[*config.MachineConfig](ctx, bed.ControlPlane, config.ActiveID)

		return err
	})

	return active
}

// labeled says which Node does not have the label with the value; empty value: which Node has it.
func labeled(key, value string) func(context.Context) error {
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

// eventOf says whether the control plane's Node has no Event with the reason since a time.
func eventOf(reason string, since time.Time) func(context.Context) error {
	return func(ctx context.Context) error {
		events, err := client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "reason=" + reason})
		if err != nil {
			return err
		}

		for _, e := range events.Items {
			if e.InvolvedObject.Name == bed.ControlPlane.Name() && !e.LastTimestamp.Time.Before(since.Truncate(time.Second)) {
				return nil
			}
		}

		return fmt.Errorf("%s has no Event %s", bed.ControlPlane.Name(), reason)
	}
}

// metric is the value of one of the control plane's metrics, as text.
func metric(ctx context.Context, name string) (string, error) {
	config, err := bed.RESTConfig()
	if err != nil {
		return "", err
	}

	// The port is on the machine's loopback alone, and its certificate is the process's own.
	config.Host = "https://127.0.0.1:10459"
	config.Dial = bed.ControlPlane.DialContext
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

	return "", fmt.Errorf("there is no metric %s", name)
}

// metricIs returns an error unless a metric of the control plane has the value.
func metricIs(ctx context.Context, name, want string) error {
	got, err := metric(ctx, name)
	if err == nil && got != want {
		err = fmt.Errorf("%s is %q, not %q", name, got, want)
	}

	return err
}

func rule(value string) string {
	return "transformations:\n- name: test\n  labels:\n    example.org/e2e: " + value + "\n"
}

func TestConfiguration_AppliesWithoutRestart(t *testing.T) {
	const label = "example.org/e2e"

	eventually(t, bothInitialized)
	eventually(t, working)

	before := task(t, bed.ControlPlane)

	t.Cleanup(func() { removeDocument(t) })
	promptly(t, atOnce, func() time.Duration {
		changeConfig(t, rule("one"))

		added := eventually(t, labeled(label, "one"))

		changeConfig(t, rule("two"))

		changed := eventually(t, labeled(label, "two"))

		removeDocument(t)

		removed := eventually(t, labeled(label, ""))
		t.Logf("both Nodes had the label %s after it was added, %s after it was changed, and not %s after it was removed",
			added.Round(time.Millisecond), changed.Round(time.Millisecond), removed.Round(time.Millisecond))

		return max(added, changed, removed)
	})
	promptly(t, atOnce, func() time.Duration { return mistaken(t, label) })

	assert.Equal(t, before, task(t, bed.ControlPlane), "the process is another")
}

// mistaken sees that a mistake changes nothing and is reported, and returns how long it took for its correction to be in force.
func mistaken(t *testing.T, label string) time.Duration {
	t.Helper()

	changeConfig(t, rule("good"))
	eventually(t, labeled(label, "good"))

	start := time.Now()

	changeConfig(t, rule("'{{ .Nothing }}'"))
	t.Logf("mistaken: an Event said so %s later", eventually(t, eventOf(ccm.ReasonConfigInvalid, start)).Round(time.Millisecond))
	eventually(t, func(ctx context.Context) error { return metricIs(ctx, configValid, "0") })

	for _, m := range bed.Machines() {
		assert.Equal(t, "good", nodeOf(t, m).Labels[label], "%s: the last good configuration does not stay", m.Name())
	}

	start = time.Now()

	changeConfig(t, rule("better"))

	took := eventually(t, labeled(label, "better"))
	t.Logf("corrected: both Nodes had the label %s later", took.Round(time.Millisecond))
	eventually(t, eventOf(ccm.ReasonConfigValid, start))
	eventually(t, func(ctx context.Context) error { return metricIs(ctx, configValid, "1") })

	return took
}

func TestEnvironment_ReplacesProcess(t *testing.T) {
	eventually(t, bothInitialized)
	eventually(t, working)
	t.Cleanup(func() { removeDocument(t) })

	before := task(t, bed.ControlPlane)

	patchDocument(t, "environment:\n  - TALOS_CCM_V=4\n")
	t.Logf("the process had the variable %s later", eventually(t, environment("TALOS_CCM_V=4", present)).Round(time.Millisecond))
	t.Logf("and held the lease %s later", eventually(t, working).Round(time.Millisecond))

	assert.Equal(t, before, task(t, bed.ControlPlane), "Talos supervises another process")

	mistaken := time.Now()

	patchDocument(t, "environment:\n  - TALOS_CCM_NO_SUCH_FLAG=1\n")
	eventually(t, eventOf(ccm.ReasonConfigInvalid, mistaken))
	eventually(t, environment("TALOS_CCM_V=4", present))

	removeDocument(t)
	eventually(t, environment("TALOS_CCM_V=4", absent))
	eventually(t, working)
	eventually(t, bothInitialized)
}

// environment says whether variable is not as wanted in the environment of the control plane's process.
func environment(variable string, want presence) func(context.Context) error {
	return func(context.Context) error {
		pids, err := processes(bed.ControlPlane)
		if err != nil {
			return err
		}

		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pids[0]))
		if err != nil {
			return err
		}

		return want.check(presences[slices.Contains(strings.Split(string(environ), "\x00"), variable)], "variable %s", variable)
	}
}
