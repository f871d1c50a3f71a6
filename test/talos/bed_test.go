//go:build e2e

package talos_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

const (
	service          = "ext-talos-ccm"
	uninitialized    = "node.cloudprovider.kubernetes.io/uninitialized"
	patience         = 4 * time.Minute
	attempt          = 30 * time.Second
	firmStart        = 5 * time.Second
	boots            = 3
	environmentValue = "from the machine configuration"
)

// probeConfig reaches the probe's environment.
const probeConfig = `
apiVersion: v1alpha1
kind: ExtensionServiceConfig
name: talos-ccm
environment:
  - PROBE=` + environmentValue + `
`

// eventually waits until condition returns nil, and returns how long that took.
func eventually(t *testing.T, condition func(context.Context) error) time.Duration {
	t.Helper()

	start := time.Now()

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	var last error

	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		// A call to an API server that goes down may hang.
		ctx, cancel := context.WithTimeout(ctx, attempt)
		defer cancel()

		last = condition(ctx)

		return last == nil, nil
	})
	require.NoError(t, err, "last error: %v", last)

	return time.Since(start)
}

// nodeOf reads m's Node.
func nodeOf(t *testing.T, m *talos.Machine) (node *corev1.Node) {
	t.Helper()

	kubernetes, err := bed.Kubernetes()
	require.NoError(t, err)

	eventually(t, func(ctx context.Context) (err error) {
		node, err = kubernetes.CoreV1().Nodes().Get(ctx, m.Name(), metav1.GetOptions{})

		return err
	})

	return node
}

func TestBed_NodesWaitForCloudProvider(t *testing.T) {
	for _, m := range bed.Machines() {
		node := nodeOf(t, m)

		assert.True(t, slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == uninitialized }), node.Name)
		assert.Equal(t, bed.Release().Kubernetes, node.Status.NodeInfo.KubeletVersion, node.Name)
		assert.Equal(t, "Talos ("+bed.Release().Talos+")", node.Status.NodeInfo.OSImage, node.Name)
	}
}

func TestBed_ServingCertificatesArePending(t *testing.T) {
	kubernetes, err := bed.Kubernetes()
	require.NoError(t, err)

	for _, m := range bed.Machines() {
		took := eventually(t, func(ctx context.Context) error {
			requests, err := kubernetes.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}

			for _, r := range requests.Items {
				if r.Spec.SignerName == certificatesv1.KubeletServingSignerName && r.Spec.Username == "system:node:"+m.Name() &&
					len(r.Status.Conditions) == 0 {
					return nil
				}
			}

			return fmt.Errorf("Node %s has no pending request for a serving certificate", m.Name())
		})

		t.Logf("%s asked for a serving certificate %.1f s after the bed was up", m.Name(), took.Seconds())
	}
}

// The machine that runs this test may be busy for a while; an extension that waits for something is late at every boot.
func TestBed_ExtensionStartsSoonAfterTalos(t *testing.T) {
	for _, m := range bed.Machines() {
		took, err := m.ServiceRunning(t.Context(), service)
		require.NoError(t, err)

		for boot := 1; took > firmStart && boot < boots; boot++ {
			require.NoError(t, m.PowerCycle(t.Context()))

			took, err = m.ServiceRunning(t.Context(), service)
			require.NoError(t, err)
		}

		require.LessOrEqual(t, took, firmStart, "%s: %s ran after machined", m.Name(), service)
		eventually(t, func(ctx context.Context) error {
			state, err := m.ServiceState(ctx, service)
			if err == nil && (state.State != talos.StateRunning || len(state.Events) == 0) {
				err = fmt.Errorf("%s: state of %s: %+v", m.Name(), service, state)
			}

			return err
		})
	}
}

// report is the last report of the probe.
type report struct{ Version, MachineType, Platform, Environment string }

func reported(ctx context.Context, m *talos.Machine) (last report, err error) {
	logs, err := m.Logs(ctx, service)
	if err != nil {
		return last, err
	}

	err = fmt.Errorf("%s: the probe has not reported: %s", m.Name(), logs)

	for line := range strings.Lines(logs) {
		if _, object, ok := strings.Cut(line, "{"); ok {
			err = json.Unmarshal([]byte("{"+object), &last)
		}
	}

	return last, err
}

func TestBed_ExtensionReachesMachineSocket(t *testing.T) {
	for _, m := range bed.Machines() {
		var got report

		eventually(t, func(ctx context.Context) (err error) {
			got, err = reported(ctx, m)

			return err
		})

		// What only the configuration tells, Talos may know later than the probe asks.
		assert.Equal(t, bed.Release().Talos, got.Version, m.Name())
		assert.Equal(t, "container", got.Platform, m.Name())
	}
}

func TestBed_RestartedExtensionSeesConfiguration(t *testing.T) {
	for m, machineType := range map[*talos.Machine]string{bed.ControlPlane: "controlplane", bed.Worker: "worker"} {
		require.NoError(t, m.RestartService(t.Context(), service))

		want := report{Version: bed.Release().Talos, MachineType: machineType, Platform: "container", Environment: environmentValue}

		eventually(t, func(ctx context.Context) error {
			got, err := reported(ctx, m)
			if err == nil && got != want {
				err = fmt.Errorf("%s: the probe reported %+v", m.Name(), got)
			}

			return err
		})
	}
}

func dial(ctx context.Context, m *talos.Machine) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()

	conn, err := bed.DialContext(ctx, "tcp", netip.AddrPortFrom(m.Address(), 50000).String())
	if err != nil {
		return err
	}

	return conn.Close()
}

func TestBed_CableDisconnectsMachine(t *testing.T) {
	eventually(t, func(ctx context.Context) error { return dial(ctx, bed.Worker) })
	require.NoError(t, bed.Worker.SetLink(t.Context(), talos.LinkDown))

	assert.Error(t, dial(t.Context(), bed.Worker), "the worker can be reached without its cable")

	// From within, the machine goes on.
	eventually(t, func(ctx context.Context) error {
		_, err := bed.Worker.ServiceState(ctx, service)

		return err
	})

	require.NoError(t, bed.Worker.SetLink(t.Context(), talos.LinkUp))
	eventually(t, func(ctx context.Context) error { return dial(ctx, bed.Worker) })
}
