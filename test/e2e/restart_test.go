//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/v1alpha1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

func TestExtension_RestartsAfterKill(t *testing.T) {
	eventually(t, bothInitialized)

	for _, m := range bed.Machines() {
		before := task(t, m)
		require.NoError(t, m.CrashService(t.Context(), service))

		assert.NotEqual(t, before, task(t, m), "%s: the killed process is still there", m.Name())
	}

	eventually(t, working)
	eventually(t, bothInitialized)
	reachesTheNode(t, bed.Worker, netip.MustParsePrefix("203.0.113.8/32"))
}

// task returns the processes of talos-ccm on m, once there are any.
func task(t *testing.T, m *talos.Machine) (pids []int) {
	t.Helper()

	eventually(t, func(context.Context) (err error) {
		pids, err = processes(m)

		return err
	})

	return pids
}

// processes returns the processes of talos-ccm on m, at least one.
func processes(m *talos.Machine) ([]int, error) {
	pids, err := m.ServicePIDs(service)
	if err == nil && len(pids) == 0 {
		err = fmt.Errorf("%s has no process of %s", m.Name(), service)
	}

	return pids, err
}

func TestNodes_SurviveWorkerReboot(t *testing.T) {
	eventually(t, bothInitialized)

	require.NoError(t, bed.Worker.Reboot(t.Context()))

	apiAnswers(t, bed.Worker)
	eventually(t, bothInitialized)

	// It is watched again, over a new connection. What is not gone from the Node before the next reboot, its kubelet would ask a certificate for.
	prefix := netip.MustParsePrefix("203.0.113.9/32")
	addAddress(t, bed.Worker, prefix)
	removeAddress(t, bed.Worker, prefix)
}

// apiAnswers waits until m's apid does.
func apiAnswers(t *testing.T, m *talos.Machine) {
	t.Helper()

	eventually(t, func(ctx context.Context) error {
		_, err := resource[*v1alpha1.Service](ctx, m, service)

		return err
	})
}

func TestExtension_RunsWithoutNetwork(t *testing.T) {
	const limit = 5 * time.Second // a service that waits for the network never makes it

	eventually(t, bothInitialized)
	promptly(t, limit, func() time.Duration {
		after := bootOffline(t, bed.Worker)
		t.Logf("%s was Running %s after machined, with its link down", service, after.Round(time.Millisecond))

		return after
	})
	require.NoError(t, bed.Worker.SetLink(t.Context(), "up"))

	apiAnswers(t, bed.Worker)
	eventually(t, bothInitialized)
}

// bootOffline switches m off, and on with its link down, and returns how long after machined our service came to run.
func bootOffline(t *testing.T, m *talos.Machine) time.Duration {
	t.Helper()

	require.NoError(t, m.PowerOff(t.Context()))

	require.NoError(t, m.SetLink(t.Context(), "down"))

	require.NoError(t, m.PowerOn())

	after, err := m.ServiceRunning(t.Context(), service)
	require.NoError(t, err)

	return after
}
