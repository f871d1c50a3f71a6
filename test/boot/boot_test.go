//go:build e2e

package boot_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	service = "ext-talos-ccm"
	// Texts on the console.
	firmware = "BdsDxe: starting"
	running  = "service[" + service + "](Running)"
	// cgroup is the directory of the service's control group.
	cgroup = "/sys/fs/cgroup/" + constants.CgroupExtensions + "/talos-ccm/"
)

// patch configures the registry and the NTP server of the host.
const patch = `
apiVersion: v1alpha1
kind: RegistryMirrorConfig
name: "*"
endpoints:
  - url: http://%[1]s:%[2]d
skipFallback: true
---
apiVersion: v1alpha1
kind: TimeSyncConfig
ntp:
  servers: [%[1]s]
`

// configure applies the machine configuration of a control plane to a machine in maintenance mode. The options are for talosctl
// gen config.
func (m *vm) configure(booted release, options ...string) {
	m.t.Helper()

	m.writeSecrets("secrets.yaml")
	require.NoError(m.t, os.WriteFile(filepath.Join(m.dir, "patch.yaml"), fmt.Appendf(nil, patch, hostAddress, m.registry.Port()), 0o644))

	m.talosctl(append([]string{
		"gen", "config", "boot", m.endpoint(), "--with-secrets", "secrets.yaml",
		"--talos-version", booted.talos.Talos, "--kubernetes-version", strings.TrimPrefix(booted.talos.Kubernetes, "v"),
		"--with-cluster-discovery=false", "--with-docs=false", "--with-examples=false", "--additional-sans", m.address.String(),
		"--install-disk", "/dev/vda", "--config-patch", "@patch.yaml",
	}, options...)...)
	m.talosctl("config", "endpoint", m.address.String())
	m.talosctl("config", "node", machineAddress.String())
	m.awaitTalosctl("", "apply-config", "--insecure", "--nodes", m.address.String(), "--file", "controlplane.yaml")
}

// enable enables the extension on the running machine with the patches of the guide.
func (m *vm) enable() {
	m.t.Helper()

	guide, err := os.ReadFile("../../docs/guides/install.md")
	require.NoError(m.t, err)

	for _, file := range []string{"cloud-provider.yaml", "talos-ccm.yaml"} {
		_, patch, _ := strings.Cut(string(guide), "\n# "+file+"\n")
		patch, _, found := strings.Cut(patch, "```")
		require.True(m.t, found, file)

		m.awaitTalosctl("", "patch", "machineconfig", "--patch", patch)
	}
}

// awaitExtension waits until the machine runs a release, and checks that the extension initializes a Node.
func (m *vm) awaitExtension(booted release) {
	m.t.Helper()

	version := booted.version(m.t)

	m.awaitTalosctl(version, "get", "extensionstatuses")
	m.awaitTalosctl("VERSION_ID="+booted.talos.Talos+"\n", "read", "/etc/os-release")
	m.awaitTalosctl("true", "get", "service", service, "--output", "jsonpath={.spec.running}")
	m.checkNode(version)
}

func TestDiskImage_RunsExtension(t *testing.T) {
	m := newVM(t, current.build(t, "image", "metal-amd64.raw"))

	// The clock is wrong until NTP steps it, after the extension has started. Parallel tests start NTP later.
	m.powerOn("-rtc", "base=2001-02-03T04:05:06")
	m.awaitConsole("setting system clock to 2001-02-03")
	m.awaitConsole(running)
	m.configure(current)
	m.awaitConsole(`task startAllServices (1/1): service "etcd" to be up`) // etcd waits for the time; containerd and cri are up
	require.NoError(t, startNTPServer())
	m.awaitLease()

	log := m.awaitTalosctl("", "logs", service)
	assert.Contains(t, log, "I0203 04:")
	assert.Equal(t, 1, strings.Count(log, "Starting talos-ccm"))

	m.enable()
	m.awaitExtension(current)
	m.checkProcess()

	m.exceedMemory()
	m.awaitExtension(current)

	m.fillDisk()
	m.talosctl("service", service, "restart")
	m.awaitConsole("/var/log/" + service + ".log: no space left on device") // Talos stops writing the log to disk
	m.awaitExtension(current)
	m.checkServingCertificate()
	m.checkLogs()
}

// exceedMemory makes the kernel kill the process of the service, because its control group exceeds a memory limit. The
// limit ends with the control group.
func (m *vm) exceedMemory() {
	m.t.Helper()

	m.debug("echo 1M >" + cgroup + "memory.max")
	m.awaitConsole("Memory cgroup out of memory: Killed process")
	m.awaitConsole(running)
	m.awaitTalosctl("max", "read", cgroup+"memory.max")
}

// fillDisk fills the file system of /var.
func (m *vm) fillDisk() {
	m.t.Helper()

	const full = "No space left on device"

	assert.Contains(m.t, m.debug("/busybox dd if=/dev/zero of=/host/var/full bs=1M 2>&1 || true"), full)
	assert.Contains(m.t, m.debug("/busybox dd if=/dev/zero of=/host/var/more bs=512 2>&1 || true"), full)
}

// debug runs a shell script in a privileged container, with the host's root file system in /host.
func (m *vm) debug(script string) string {
	m.t.Helper()

	img, err := singleLayer(filepath.Join(current.assets(m.t), "debug.tar"))
	require.NoError(m.t, err)

	return m.talosctl("debug", m.push(img, "debug:latest"), "--args", "/busybox", "--args", "sh", "--args", "-c", "--args", script)
}

func TestDiskImage_DoesNotStartWithEnforcingSELinux(t *testing.T) {
	t.Parallel()

	m := newVM(t, current.build(t, "image", "metal-amd64.raw", "enforcing=1"))

	m.powerOn()
	m.awaitTalosctl("selinuxState: enabled, enforcing", "get", "securitystate", "--insecure", "--nodes", m.address.String(), "--output", "yaml")
	m.awaitConsole(`exec: "./talos-ccm": permission denied`) // README.md
}

// checkProcess checks what the kernel says about the process of the service.
func (m *vm) checkProcess() {
	m.t.Helper()

	process := "/proc/" + strings.TrimSpace(m.awaitTalosctl("", "read", cgroup+"cgroup.procs"))
	status := m.awaitTalosctl("Uid:", "read", process+"/status")
	m.t.Log(status)

	// The extension switches to UID 50 without capabilities, on a socket that only this user and root can use.
	assert.Regexp(m.t, `(?m)^Uid:\s50\s50\s50\s50$`, status)
	assert.Regexp(m.t, `(?m)^CapEff:\s0+$`, status)
	assert.Regexp(m.t, `(?m)^CapPrm:\s0+$`, status)
	assert.Regexp(m.t, `(?m)^NoNewPrivs:\s1$`, status)
	assert.Regexp(m.t, `(?m)^Seccomp:\s2$`, status)

	security := m.awaitTalosctl("", "get", "securitystate", "--output", "yaml")
	assert.Contains(m.t, security, "selinuxState: enabled, permissive")
	assert.Contains(m.t, security, "bootedWithUKI: true")
	assert.Contains(m.t, m.awaitTalosctl("", "read", process+"/attr/current"), ":unconfined_container_t:")

	// docs/reference/service.md
	assert.Equal(m.t, "-400", strings.TrimSpace(m.awaitTalosctl("", "read", process+"/oom_score_adj")))
	assert.Equal(m.t, "max", strings.TrimSpace(m.awaitTalosctl("", "read", cgroup+"memory.max")))

	for _, file := range []string{"memory.current", "memory.peak"} {
		m.t.Log(file, m.awaitTalosctl("", "read", cgroup+file))
	}
}

// checkLogs checks that the log of a process that has failed can be read.
func (m *vm) checkLogs() {
	m.t.Helper()

	const variable = "TALOS_CCM_UNKNOWN"

	m.talosctl("patch", "machineconfig", "--patch",
		"{apiVersion: v1alpha1, kind: ExtensionServiceConfig, name: talos-ccm, environment: ["+variable+"=1]}")
	m.awaitConsole("failed: exit code 1 (")
	m.awaitTalosctl(variable, "logs", service)
}
