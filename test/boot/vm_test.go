//go:build e2e

package boot_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/process"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

const (
	// deadline is for a boot or an installation. They take up to six minutes on an idle host. Talos reboots a machine
	// whose kubelet has not started after 70 minutes.
	deadline = 20 * time.Minute
	// callTimeout is for one of several attempts. A connection stays open while the machine reboots.
	callTimeout = 2 * time.Minute
	// poll is the interval for checking conditions.
	poll = time.Second
	// ovmf is the directory of Debian's package.
	ovmf = "/usr/share/OVMF/"
)

var (
	// hostAddress is an address of the machine's network that QEMU forwards to the host's loopback interface. The API server of
	// test/kube has a certificate for it.
	hostAddress    = netip.MustParseAddr("10.0.0.1")
	machineAddress = netip.MustParseAddr("10.0.0.2")
	// machines is the number of machines.
	machines atomic.Uint32
)

// vm is a virtual machine with one disk and one network interface, the registry that it uses, and the control plane of its
// cluster.
type vm struct {
	t *testing.T
	// dir contains the disk, the variables of the firmware, and the talosconfig.
	dir string
	// console is the file with the output of the serial console. read is the offset from which awaitConsole searches.
	console string
	read    int
	process *process.Process
	cluster *kube.Cluster
	client  kubernetes.Interface
	// address is a loopback address of the host, from which QEMU forwards the port of Talos's API to the machine.
	address netip.Addr
	// talosctlPath is the path of the newest release's talosctl.
	talosctlPath string
	// registry is the address of the registry on the host.
	registry netip.AddrPort
	// nodename is set by checkNode.
	nodename string
}

// newVM creates a machine that is switched off, with a copy of an image as its disk. Without an image the disk is empty.
func newVM(t *testing.T, image string) *vm {
	t.Helper()

	bed, err := talos.Assets(t.Context(), current.talos.Minor, os.Stdout)
	require.NoError(t, err)

	m := &vm{
		t: t, dir: t.TempDir(), console: filepath.Join(logDir(t), t.Name()+".console.log"),
		talosctlPath: filepath.Join(bed, "bin/talosctl"), address: netip.AddrFrom4([4]byte{127, 77, 0, byte(machines.Add(1))}),
	}
	require.NoError(t, os.WriteFile(m.console, nil, 0o644))

	if image != "" {
		run(t, "cp", "--sparse=always", image, m.disk())
	} else {
		run(t, "truncate", "--size=10G", m.disk())
	}

	run(t, "cp", ovmf+"OVMF_VARS_4M.fd", m.variables())
	m.startCluster()
	m.startRegistry()

	return m
}

func (m *vm) disk() string { return filepath.Join(m.dir, "disk.raw") }

func (m *vm) variables() string { return filepath.Join(m.dir, "variables.fd") }

// powerOn switches the machine on. The machine ends with this process. The options are for QEMU. With two
// processors, the kernel has panicked ("Oops: int3"), probably because QEMU executes instructions that another processor patches.
func (m *vm) powerOn(options ...string) {
	m.t.Helper()

	var err error

	m.process, err = process.Start(process.Command{Name: "qemu", Path: "nice", Log: m.console, Args: append([]string{
		"-n", "5", "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "3072",
		"-nodefaults", "-display", "none", "-serial", "stdio", "-device", "virtio-rng-pci", "-device", "virtio-net-pci,netdev=net",
		"-netdev", fmt.Sprintf("user,id=net,ipv6=off,net=%[1]s/24,host=%[1]s,hostfwd=tcp:%[2]s:%[3]d-%[4]s:%[3]d",
			hostAddress, m.address, constants.ApidPort, machineAddress),
		"-drive", "if=pflash,format=raw,readonly=on,file=" + ovmf + "OVMF_CODE_4M.fd",
		"-drive", "if=pflash,format=raw,file=" + m.variables(),
		"-drive", "if=virtio,format=raw,file=" + m.disk(),
	}, options...)})
	require.NoError(m.t, err)
	m.t.Cleanup(m.powerOff)
}

// powerOff kills the machine. It may be off.
func (m *vm) powerOff() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // no time to end by itself
	m.process.Stop(ctx)
}

// startNTPServer starts an NTP server (RFC 5905) for all machines, which ends with this process. Talos supports no other port
// than 123. Until its time is synchronized, Talos has no credentials for Kubernetes.
var startNTPServer = sync.OnceValue(func() error {
	const size, transmitTime, secondsTo1970 = 48, 40, 2_208_988_800

	conn, err := net.ListenPacket("udp", "127.0.0.1:123")
	if err != nil {
		return err
	}

	go func() {
		for {
			request, response := make([]byte, size), make([]byte, size)

			_, client, err := conn.ReadFrom(request)
			if err != nil {
				return
			}

			now := time.Now()
			timestamp := uint64(now.Unix()+secondsTo1970)<<32 | uint64(now.Nanosecond())<<32/uint64(time.Second)

			response[0], response[1] = 4<<3|4, 1 // server, version 4; stratum
			copy(response[24:], request[transmitTime:])

			for _, offset := range []int{16, 32, transmitTime} { // set, received, transmitted
				binary.BigEndian.PutUint64(response[offset:], timestamp)
			}

			_, _ = conn.WriteTo(response, client) // UDP: the client repeats its request
		}
	}()

	return nil
})

// awaitConsole waits until the console shows a text, after the text of the last call.
func (m *vm) awaitConsole(text string) {
	m.t.Helper()

	m.eventually(fmt.Sprintf("console shows %q", text), func() error {
		content, err := os.ReadFile(m.console)
		if err != nil {
			return err
		}

		index := bytes.Index(content[m.read:], []byte(text))
		if index < 0 {
			return errors.New(m.process.LogTail())
		}

		m.read += index + len(text)

		return nil
	})
}

// eventually retries until try succeeds. It fails the test at the deadline, or if the machine has ended.
func (m *vm) eventually(what string, try func() error) {
	m.t.Helper()

	var err error

	start := time.Now()

	for err = try(); err != nil; err = try() {
		if m.process.Ended() != nil || time.Since(start) > deadline {
			require.NoError(m.t, errors.Join(err, m.process.Ended()), what)
		}

		time.Sleep(poll)
	}

	m.t.Logf("%4.0f s until %s", time.Since(start).Seconds(), what)
}

func (m *vm) talosctlEnv() []string {
	return append(os.Environ(), "TALOSCONFIG="+filepath.Join(m.dir, "talosconfig"), "TALOS_HOME="+m.dir, "HOME="+m.dir)
}

// runTalosctl runs talosctl on the host.
func (m *vm) runTalosctl(timeout time.Duration, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(m.t.Context(), timeout)
	defer cancel()

	cmd := exec.CommandContext(ctx, m.talosctlPath, args...)
	cmd.Env, cmd.Dir = m.talosctlEnv(), m.dir

	output, err := builder.Output(cmd)

	return string(output), err
}

// talosctl runs talosctl, which must succeed, and returns its output.
func (m *vm) talosctl(args ...string) string {
	m.t.Helper()

	output, err := m.runTalosctl(deadline, args...)
	require.NoError(m.t, err)

	return output
}

// awaitTalosctl runs talosctl until it succeeds and its output contains a text, and returns the output.
func (m *vm) awaitTalosctl(text string, args ...string) (output string) {
	m.t.Helper()

	m.eventually(fmt.Sprintf("talosctl %s shows %q", strings.Join(args, " "), text), func() (err error) {
		output, err = m.runTalosctl(callTimeout, args...)
		if err == nil && !strings.Contains(output, text) {
			err = errors.New(output)
		}

		return err
	})

	return output
}

// run runs a command on the host.
func run(t *testing.T, program string, args ...string) {
	t.Helper()

	output, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
	require.NoError(t, err, "%s %s\n%s", program, strings.Join(args, " "), output)
}

// getenv returns a required environment variable, which make boot-test sets.
func getenv(t *testing.T, key string) string {
	t.Helper()

	value := os.Getenv(key)
	require.NotEmpty(t, value, "%s is not set; run make boot-test", key)

	return value
}

// logDir returns the directory for consoles.
func logDir(t *testing.T) string {
	t.Helper()

	dir := os.Getenv("TALOS_CCM_LOGS")
	if dir == "" {
		return t.TempDir()
	}

	require.NoError(t, os.MkdirAll(dir, 0o755))

	return dir
}
