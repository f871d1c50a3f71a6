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
	eventually(t, checkNodesInitialized)

	for _, m := range bed.Machines() {
		before := awaitProcesses(t, m)
		require.NoError(t, m.CrashService(t.Context(), service))

		assert.NotEqual(t, before, awaitProcesses(t, m), "%s: PIDs of talos-ccm", m.Name())
	}

	eventually(t, checkLeaseRenewed)
	eventually(t, checkNodesInitialized)
	requireAddressUpdates(t, worker, netip.MustParsePrefix("203.0.113.8/32"))
}

// awaitProcesses waits until talos-ccm is running on m, and returns its PIDs.
func awaitProcesses(t *testing.T, m *talos.Machine) (pids []int) {
	t.Helper()

	eventually(t, func(context.Context) (err error) {
		pids, err = processes(m)

		return err
	})

	return pids
}

// processes returns the PIDs of talos-ccm on m, or an error if it is not running.
func processes(m *talos.Machine) ([]int, error) {
	pids, err := m.ServicePIDs(service)
	if err == nil && len(pids) == 0 {
		err = fmt.Errorf("%s is not running on %s", service, m.Name())
	}

	return pids, err
}

func TestNodes_SurviveWorkerReboot(t *testing.T) {
	eventually(t, checkNodesInitialized)

	require.NoError(t, worker.Reboot(t.Context()))

	awaitTalosAPI(t, worker)
	eventually(t, checkNodesInitialized)

	// The Node follows only if talos-ccm has connected to the machine again. Wait for the removal: after the next reboot, the
	// kubelet would request a certificate for an address that is still on the Node.
	prefix := netip.MustParsePrefix("203.0.113.9/32")
	addAddress(t, worker, prefix)
	removeAddress(t, worker, prefix)
}

// awaitTalosAPI waits until m's apid responds.
func awaitTalosAPI(t *testing.T, m *talos.Machine) {
	t.Helper()

	eventually(t, func(ctx context.Context) error {
		_, err := resource[*v1alpha1.Service](ctx, m, service)

		return err
	})
}

func TestExtension_RunsWithoutNetwork(t *testing.T) {
	const limit = 5 * time.Second // a service that depends on the network would never start

	eventually(t, checkNodesInitialized)
	requireWithin(t, limit, func() time.Duration {
		after := bootWithLinkDown(t, worker)
		t.Logf("%s was running %s after machined", service, after.Round(time.Millisecond))

		return after
	})
	require.NoError(t, worker.SetLink(t.Context(), "up"))

	awaitTalosAPI(t, worker)
	eventually(t, checkNodesInitialized)
}

// bootWithLinkDown boots m with its link down, and returns the time from the start of machined to that of talos-ccm.
func bootWithLinkDown(t *testing.T, m *talos.Machine) time.Duration {
	t.Helper()

	require.NoError(t, m.PowerOff(t.Context()))

	require.NoError(t, m.SetLink(t.Context(), "down"))

	require.NoError(t, m.PowerOn())

	after, err := m.ServiceRunning(t.Context(), service)
	require.NoError(t, err)

	return after
}
