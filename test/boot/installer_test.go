//go:build e2e

package boot_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/process"
)

// interruptPoll is shorter than the installer's write.
const interruptPoll = 50 * time.Millisecond

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
	m.reboot(next)

	m.talosctl("rollback")
	m.awaitExtension(previous)
	m.reboot(previous)

	// QEMU is killed while the installer writes the next version to the disk again.
	m.awaitCRI()

	interrupted, err := process.Start(process.Command{
		Name: "talosctl", Path: m.talosctlPath, Args: upgrade, Env: m.talosctlEnv(), Log: filepath.Join(m.dir, "upgrade.log"),
	})
	require.NoError(t, err)

	for start := time.Now(); !strings.Contains(interrupted.LogTail(), "copying /usr/install/amd64/vmlinuz.efi"); time.Sleep(interruptPoll) {
		require.NoError(t, interrupted.Ended(), interrupted.LogTail())
		require.Less(t, time.Since(start), deadline, interrupted.LogTail())
	}

	m.powerOff()
	interrupted.Stop(t.Context())
	require.NotContains(t, interrupted.LogTail(), "updating EFI variables", "the installer was faster")

	m.powerOn()
	m.awaitExtension(previous)
}

// reboot boots a release from the firmware. After an upgrade or a rollback, Talos uses kexec: until systemd-boot runs, the
// installer takes the release before for the booted one, and removes the other.
func (m *vm) reboot(r release) {
	m.t.Helper()

	m.talosctl("reboot", "--mode", "powercycle", "--wait=false")
	m.awaitConsole(firmware)
	m.awaitExtension(r)
}

// awaitCRI waits until the containerd that pulls images is healthy.
func (m *vm) awaitCRI() {
	m.t.Helper()

	m.awaitTalosctl("true", "get", "service", "cri", "--output", "jsonpath={.spec.healthy}")
}
