//go:build e2e

package e2e_test

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestServiceRunsWithoutPrivileges(t *testing.T) {
	for _, m := range bed.Machines() {
		pids, err := m.ServiceTask(service)
		if err != nil {
			t.Fatal(err)
		}

		if len(pids) == 0 {
			t.Fatalf("%s: no process of %s", m.Name(), service)
		}

		for _, pid := range pids {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			if err != nil {
				t.Fatal(err)
			}

			fields := parseStatus(string(status))
			t.Logf("%s: pid %d: Uid %s, Gid %s, Groups %q, CapEff %s, CapPrm %s", m.Name(), pid, fields["Uid"], fields["Gid"], fields["Groups"], fields["CapEff"], fields["CapPrm"])

			for field, want := range map[string]string{
				"Uid": "50 50 50 50", "Gid": "50 50 50 50", "Groups": "", "CapEff": "0000000000000000", "CapPrm": "0000000000000000",
				"CapAmb": "0000000000000000", "NoNewPrivs": "1",
			} {
				if fields[field] != want {
					t.Errorf("%s: pid %d: %s is %q, not %q", m.Name(), pid, field, fields[field], want)
				}
			}
		}
	}
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

func TestAdminIsAskedForInTheNamedCallsAlone(t *testing.T) {
	eventually(t, patience, bothInitialised)

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
