//go:build e2e && ha

package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/api/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// otherVariable is the difference of the document on one machine. With the other documents, blocks have a /24.
const otherVariable = "TALOS_CCM_NODE_CIDR_MASK_SIZE_IPV4=26"

// TestHA_DifferentDocument adds a variable to the document of one machine, which then becomes the leader's. Both leaders
// report the difference, and continue. New Nodes get what the leader's document says, and existing ones stay.
func TestHA_DifferentDocument(t *testing.T) {
	s := begin(t)

	leader := s.leader()
	other, third := others(leader)[0], others(leader)[1]
	inStatus := func(want presence) goal {
		return goal{"status", func(ctx context.Context) error { return checkReported(ctx, other, recorder.ReasonConfigDiffers, want) }}
	}
	start := time.Now()

	patchMachine(t, other, "no-reboot", documentHead+"environment:\n  - "+otherVariable+"\n")
	s.measure(other.Name()+" has another document", inStatus(present))
	s.addWorkerWithBlock("/24")
	s.measure("leader "+leader.Name(), goal{"Event of " + other.Name(), checkEventOf(other, recorder.ReasonConfigDiffers, start)})
	require.Equal(t, leader, s.leader(), "the leader has changed")
	s.status()

	start = time.Now()

	controlService(t, leader, "stop")
	controlService(t, third, "stop")
	s.measure(other.Name()+" is the only instance", isLedByOther(t, leader), inStatus(present))
	require.Equal(t, other, s.leader())
	controlService(t, leader, "start")
	controlService(t, third, "start")
	s.addWorkerWithBlock("/26")
	s.measure("leader "+other.Name(), goal{"Event of " + leader.Name(), checkEventOf(leader, recorder.ReasonConfigDiffers, start)},
		goal{"Event of " + third.Name(), checkEventOf(third, recorder.ReasonConfigDiffers, start)})
	s.status()

	removeVariable(t, other, otherVariable)
	s.measure("same document", isLedByOther(t, other), inStatus(absent), goal{"healthy", checkHealthy})
	s.addWorkerWithBlock("/24")
	s.status()
	s.end()
}

// addWorkerWithBlock adds a worker, requires that its block has a size, and removes it.
func (s *story) addWorkerWithBlock(size string) {
	s.Helper()

	added, err := bed.AddWorker(s.Context())
	require.NoError(s, err)

	s.measure("new worker", append(joined(added), goal{"block " + size, func(ctx context.Context) error {
		node, err := getNode(ctx, added.Name())
		if err == nil && len(node.Spec.PodCIDRs) == 0 {
			err = fmt.Errorf("%s has no podCIDRs", node.Name)
		}

		if err == nil {
			require.True(s, strings.HasSuffix(node.Spec.PodCIDR, size), "podCIDR %s", node.Spec.PodCIDR)
		}

		return err
	}})...)
	s.remove(added)
}

// removeVariable removes a variable from the document on m, as with talosctl edit: a patch cannot.
func removeVariable(t *testing.T, m *talos.Machine, variable string) {
	t.Helper()

	active, err := resource[*config.MachineConfig](t.Context(), m, config.ActiveID)
	require.NoError(t, err)

	text, err := active.Container().Bytes()
	require.NoError(t, err)

	lines := slices.DeleteFunc(strings.SplitAfter(string(text), "\n"), func(line string) bool { return strings.Contains(line, variable) })

	api, err := m.TalosClient(t.Context())
	require.NoError(t, err)
	defer api.Close() //nolint:errcheck // all calls have ended

	_, err = api.ApplyConfiguration(t.Context(), &machine.ApplyConfigurationRequest{
		Data: []byte(strings.Join(lines, "")), Mode: machine.ApplyConfigurationRequest_NO_REBOOT,
	})
	require.NoError(t, err)
}
