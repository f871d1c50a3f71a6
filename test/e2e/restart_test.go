//go:build e2e

package e2e_test

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

func TestExtension_RestartsAfterKill(t *testing.T) {
	eventually(t, bothInitialized)

	for _, m := range bed.Machines() {
		before := task(t, m)
		mark := m.Console().Now()

		if err := m.KillService(service); err != nil {
			t.Fatal(err)
		}

		if err := m.ServiceRunningAgain(t.Context(), service, mark); err != nil {
			t.Fatal(err)
		}

		if slices.Equal(before, task(t, m)) {
			t.Errorf("%s: the killed process is still there", m.Name())
		}
	}

	eventually(t, working)
	eventually(t, bothInitialized)
	reachesTheNode(t, bed.Worker, netip.MustParsePrefix("203.0.113.8/32"))
}

// task are the processes of our service on m, at least one.
func task(t *testing.T, m *talos.Machine) (pids []int) {
	t.Helper()

	eventually(t, func(context.Context) string {
		var err error
		if pids, err = m.ServiceTask(service); err != nil {
			return err.Error()
		}

		if len(pids) == 0 {
			return m.Name() + " has no process of " + service
		}

		return ""
	})

	return pids
}

func TestNodes_SurviveWorkerReboot(t *testing.T) {
	eventually(t, bothInitialized)

	if err := bed.Worker.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}

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

	eventually(t, func(ctx context.Context) string {
		if _, err := m.ServiceState(ctx, service); err != nil {
			return err.Error()
		}

		return ""
	})
}

func TestExtension_RunsWithoutNetwork(t *testing.T) {
	const (
		limit = 5 * time.Second
		// The machine that runs this test may be busy with something else for a while; a service that waits for the network
		// never makes it.
		boots = 3
	)

	eventually(t, bothInitialized)

	for boot := 1; ; boot++ {
		after := bootOffline(t, bed.Worker)
		t.Logf("%s was Running %s after machined, with the cable out", service, after.Round(time.Millisecond))

		if after <= limit {
			break
		}

		if boot == boots {
			t.Fatalf("%s takes longer than %s to come to run without network", service, limit)
		}
	}

	if err := bed.Worker.SetLink(t.Context(), talos.LinkUp); err != nil {
		t.Fatal(err)
	}

	apiAnswers(t, bed.Worker)
	eventually(t, bothInitialized)
}

// bootOffline switches m off and on with its cable out, and returns how long after machined our service came to run.
func bootOffline(t *testing.T, m *talos.Machine) time.Duration {
	t.Helper()

	if err := m.PowerOff(t.Context()); err != nil {
		t.Fatal(err)
	}

	if err := m.SetLink(t.Context(), talos.LinkDown); err != nil {
		t.Fatal(err)
	}

	if err := m.PowerOn(t.Context()); err != nil {
		t.Fatal(err)
	}

	after, err := m.ServiceRunning(t.Context(), service)
	if err != nil {
		t.Fatal(err)
	}

	return after
}
