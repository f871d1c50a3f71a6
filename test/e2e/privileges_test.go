//go:build e2e

package e2e_test

import (
	"context"
	"encoding/pem"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

func TestExtension_RunsUnprivileged(t *testing.T) {
	const grace = 10 * time.Second // a process may have privileges while it starts

	for _, m := range bed.Machines() {
		seen := map[int]time.Time{}

		eventually(t, func(context.Context) error {
			pids, err := processes(m)
			if err != nil {
				return err
			}

			for _, pid := range pids {
				if seen[pid].IsZero() {
					seen[pid] = time.Now()
				}

				if err := checkUnprivileged(pid); err != nil {
					require.Less(t, time.Since(seen[pid]), grace, "%s: pid %d: %v", m.Name(), pid, err)

					return fmt.Errorf("%s: pid %d: %w", m.Name(), pid, err)
				}

				t.Logf("%s: pid %d has no privileges", m.Name(), pid)
			}

			return nil
		})
	}
}

// checkUnprivileged returns an error unless the process has no privileges.
func checkUnprivileged(pid int) error {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return err
	}

	var lines []string
	for line := range strings.Lines(string(status)) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}

	for _, want := range []string{
		"Uid: 50 50 50 50", "Gid: 50 50 50 50", "Groups:", "CapEff: 0000000000000000", "CapPrm: 0000000000000000",
		"CapAmb: 0000000000000000", "NoNewPrivs: 1",
	} {
		if !slices.Contains(lines, want) {
			return fmt.Errorf("process status lacks line %q:\n%s", want, status)
		}
	}

	return nil
}

// calls matches machined's log lines of completed calls. The groups are the method and the roles of the caller.
var calls = regexp.MustCompile(`\[(/[^]]+)\] .*talos-role=([^;)]*)`)

// checkStated returns an error unless the control-plane machine has stated its kubelet's client certificate.
func checkStated(ctx context.Context) error {
	file, err := bed.Shell(ctx, fmt.Sprintf("talosctl -n %s read %s/kubelet-client-current.pem", controlPlane.Address(), constants.KubeletPKIDir))
	if err != nil {
		return err
	}

	node, err := getNode(ctx, controlPlane.Name())
	if err != nil {
		return err
	}

	block, _ := pem.Decode(file)
	if block == nil || noderecord.Of(node).Stated != noderecord.ID(block.Bytes) {
		return fmt.Errorf("%s has another client certificate than the labels %v", node.Name, node.Labels)
	}

	return nil
}

func TestExtension_UsesAdminRoleOnlyForDocumentedCalls(t *testing.T) {
	eventually(t, checkNodesInitialized)
	t.Logf("the kubelet's certificate was stated after %s", eventually(t, checkStated).Round(time.Millisecond))

	log, err := controlPlane.Logs(t.Context(), "machined")
	require.NoError(t, err)

	counts := map[string]int{}

	for line := range strings.Lines(log) {
		match := calls.FindStringSubmatch(line)
		if match == nil || strings.Contains(line, "+proxy") {
			continue // not a call, or forwarded by apid, such as those of this test
		}

		counts[match[2]+" "+match[1]]++
	}

	for _, call := range slices.Sorted(maps.Keys(counts)) {
		t.Logf("%5d %s", counts[call], call)

		switch call {
		case "os:reader /cosi.resource.State/Get", "os:reader /cosi.resource.State/List", "os:reader /cosi.resource.State/Watch":
		case "os:admin /machine.MachineService/GenerateClientConfiguration", // issue the os:reader certificate
			"os:admin /cosi.resource.State/Get",     // get LocalhostAdminKubeconfig
			"os:admin /cosi.resource.State/Watch",   // watch LocalhostAdminKubeconfig
			"os:admin /machine.MachineService/Read": // read the kubelet's client certificate
		default:
			t.Errorf("talos-ccm made the undocumented call %s", call)
		}
	}

	for _, call := range []string{
		"os:admin /machine.MachineService/GenerateClientConfiguration", "os:admin /cosi.resource.State/Get", "os:admin /machine.MachineService/Read",
	} {
		assert.Contains(t, counts, call)
	}
}
