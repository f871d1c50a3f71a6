//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestExtension_RunsUnprivileged(t *testing.T) {
	const start = 10 * time.Second // until then a process may have them

	for _, m := range bed.Machines() {
		seen := map[int]time.Time{}

		eventually(t, func(context.Context) string {
			pids, err := m.ServiceTask(service)
			if err != nil || len(pids) == 0 {
				return fmt.Sprintf("%s: no process of %s (%v)", m.Name(), service, err)
			}

			for _, pid := range pids {
				if seen[pid].IsZero() {
					seen[pid] = time.Now()
				}

				held := privileges(pid)
				if held != "" && time.Since(seen[pid]) > start {
					t.Fatalf("%s: pid %d: %s", m.Name(), pid, held)
				}

				if held != "" {
					return fmt.Sprintf("%s: pid %d: %s", m.Name(), pid, held)
				}

				t.Logf("%s: pid %d has no privileges", m.Name(), pid)
			}

			return ""
		})
	}
}

// privileges says what of a process is not as it should be.
func privileges(pid int) string {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return err.Error()
	}

	fields := parseStatus(string(status))

	for field, want := range map[string]string{
		"Uid": "50 50 50 50", "Gid": "50 50 50 50", "Groups": "", "CapEff": "0000000000000000", "CapPrm": "0000000000000000",
		"CapAmb": "0000000000000000", "NoNewPrivs": "1",
	} {
		if fields[field] != want {
			return fmt.Sprintf("%s is %q, not %q", field, fields[field], want)
		}
	}

	return ""
}

// parseStatus reads /proc/PID/status, with the white space of each value folded.
func parseStatus(status string) map[string]string {
	fields := map[string]string{}

	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.Join(strings.Fields(value), " ")
	}

	return fields
}

// calls matches what machined logs of a call that it has answered: the method and the roles the caller named.
var calls = regexp.MustCompile(`\[(/[^]]+)\] .*talos-role=([^;)]*)`)

func TestExtension_UsesAdminRoleOnlyForDocumentedCalls(t *testing.T) {
	eventually(t, bothInitialized)

	log, err := bed.ControlPlane.Logs(t.Context(), "machined")
	if err != nil {
		t.Fatal(err)
	}

	counts := map[string]int{}

	for line := range strings.Lines(log) {
		match := calls.FindStringSubmatch(line)
		if match == nil || strings.Contains(line, "+proxy") {
			continue // no call, or one that apid forwards, such as this test's own
		}

		counts[match[2]+" "+match[1]]++
	}

	for _, call := range slices.Sorted(maps.Keys(counts)) {
		t.Logf("%5d %s", counts[call], call)

		switch call {
		case "os:reader /cosi.resource.State/Get", "os:reader /cosi.resource.State/List", "os:reader /cosi.resource.State/Watch":
		case "os:admin /machine.MachineService/GenerateClientConfiguration", // mint the os:reader certificate
			"os:admin /cosi.resource.State/Get",   // read LocalhostAdminKubeconfig
			"os:admin /cosi.resource.State/Watch": // hear of a new one
		default:
			t.Errorf("talos-ccm made the call %s", call)
		}
	}

	for _, call := range []string{"os:admin /machine.MachineService/GenerateClientConfiguration", "os:admin /cosi.resource.State/Get"} {
		if counts[call] == 0 {
			t.Errorf("machined has not logged %s", call)
		}
	}
}
