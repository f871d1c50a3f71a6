//go:build e2e

package boot_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/process"
)

const (
	// interruptPoll is shorter than the installer's write.
	interruptPoll = 50 * time.Millisecond
	// efiPartition is the offset of the EFI partition, and fat32State the offset of the state in its boot sector.
	efiPartition, fat32State = 1 << 20, 0x41
)

// installer builds an installer, and returns the name that the machine pulls.
func (m *vm) installer(r release) string {
	m.t.Helper()

	img, err := tarball.ImageFromPath(r.build(m.t, "installer", "installer-amd64.tar"), nil)
	require.NoError(m.t, err)

	return m.push(img, "installer:"+r.version(m.t))
}

func TestInstaller_InstallsAndResets(t *testing.T) {
	t.Parallel()
	require.NoError(t, startNTPServer())

	m := newVM(t, "")
	installer, assets := m.installer(current), current.assets(t)

	m.powerOn("-kernel", filepath.Join(assets, "vmlinuz"), "-initrd", filepath.Join(assets, "initramfs"),
		"-append", "talos.platform=metal slab_nomerge pti=on selinux=1 "+strings.Join(kernelArguments, " "))
	m.configure(current, "--install-image", installer)
	m.awaitConsole("installation of")
	m.awaitConsole(running)
	m.enable()
	m.awaitExtension(current)

	// QEMU no longer boots the kernel of the installation.
	m.powerOff()
	m.powerOn()
	m.awaitExtension(current)

	m.talosctl("config", "new", "reader.yaml", "--roles", "os:reader")
	m.talosctl("reset", "--graceful=false", "--reboot", "--wait=false")
	m.awaitConsole("wiping system disk")
	m.awaitConsole("BdsDxe: failed to load") // nothing to boot
	m.awaitDeletion()
}

func TestInstaller_UpgradesAndRollsBack(t *testing.T) {
	t.Parallel()
	require.NoError(t, startNTPServer())

	m := newVM(t, previous.build(t, "image", "metal-amd64.raw"))
	upgrade := []string{"upgrade", "--image", m.installer(next), "--drain=false", "--wait=false"}

	m.powerOn()
	m.awaitConsole(firmware)
	m.configure(previous)
	m.enable()
	m.awaitExtension(previous)

	m.awaitCRI()
	m.talosctl(upgrade...)
	m.awaitExtension(next)

	m.talosctl("rollback")
	m.awaitExtension(previous)

	m.awaitCRI()
	m.interrupt(upgrade)
	m.powerOn()
	m.awaitConsole(firmware) // the upgrade and the rollback used kexec
	m.awaitExtension(previous)

	m.awaitCRI()
	m.talosctl(append(upgrade, "--reboot-mode", "powercycle")...)
	m.awaitConsole(firmware)
	m.awaitExtension(next)
}

// interrupt upgrades the machine, and kills QEMU after the installer has begun to copy the next release to the EFI partition.
// The copy may only be in the machine's page cache.
func (m *vm) interrupt(upgrade []string) {
	m.t.Helper()
	require.False(m.t, m.isDirty())

	interrupted, err := process.Start(process.Command{
		Name: "talosctl", Path: m.talosctlPath, Args: upgrade, Env: m.talosctlEnv(), Log: filepath.Join(m.dir, "upgrade.log"),
	})
	require.NoError(m.t, err)

	for start := time.Now(); !strings.Contains(interrupted.LogTail(), "copying /usr/install/amd64/vmlinuz.efi"); time.Sleep(interruptPoll) {
		require.NoError(m.t, interrupted.Ended(), interrupted.LogTail())
		require.Less(m.t, time.Since(start), deadline, interrupted.LogTail())
	}

	m.powerOff()
	interrupted.Stop(m.t.Context())
	require.NotContains(m.t, interrupted.LogTail(), "updating EFI variables", "the installer was faster")
	require.True(m.t, m.isDirty())
}

// isDirty returns true if the EFI partition is mounted for writing, or was when the machine was switched off.
func (m *vm) isDirty() bool {
	m.t.Helper()

	disk, err := os.Open(m.disk())
	require.NoError(m.t, err)

	defer disk.Close() //nolint:errcheck // only read

	state := make([]byte, 1)
	_, err = disk.ReadAt(state, efiPartition+fat32State)
	require.NoError(m.t, err)

	return state[0] == 1
}

// awaitCRI waits until the containerd that pulls images is healthy.
func (m *vm) awaitCRI() {
	m.t.Helper()

	m.awaitTalosctl("true", "get", "service", "cri", "--output", "jsonpath={.spec.healthy}")
}
