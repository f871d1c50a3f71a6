//go:build e2e

package boot_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/process"
)

// interruptPoll is shorter than the installer's write.
const interruptPoll = 50 * time.Millisecond

// installer builds an installer image with the extension in an OCI layout, and returns the name that the machine pulls.
func (m *vm) installer(extension, tag string) string {
	m.t.Helper()

	image, err := tarball.ImageFromPath(imager(m.t, "installer", "installer-amd64.tar", extension), nil)
	require.NoError(m.t, err)

	return m.push(image, "installer:"+tag)
}

func TestInstaller_UpgradesRollsBackAndResets(t *testing.T) {
	current, next := extension(t, ""), extension(t, "next")
	m := newVM(t, "")
	installer, nextInstaller := m.installer(current, "current"), m.installer(next, "next")

	// Installation, on an empty disk.
	assets, err := assets()
	require.NoError(t, err)

	m.powerOn("-kernel", filepath.Join(assets, "vmlinuz"), "-initrd", filepath.Join(assets, "initramfs"),
		"-append", "talos.platform=metal slab_nomerge pti=on selinux=1 "+strings.Join(kernelArguments, " "))
	m.awaitConsole(maintenance)
	m.configure("--install-image", installer)
	m.awaitConsole("installation of")
	m.awaitConsole(running)
	m.enable()
	m.awaitExtension(version(t, current))

	upgrade := []string{"upgrade", "--image", nextInstaller, "--drain=false", "--wait=false"}

	m.awaitTalosctl("Running", "service", "cri") // it pulls the image
	m.talosctl(upgrade...)
	m.awaitExtension(version(t, next))

	m.talosctl("rollback")
	m.awaitExtension(version(t, current))

	// QEMU is killed while the installer writes the next version to the disk again.
	m.awaitTalosctl("Running", "service", "cri")

	interrupted, err := process.Start(process.Command{
		Name: "talosctl", Path: m.talosctlPath(), Args: upgrade, Env: m.talosctlEnv(), Log: filepath.Join(logDir(t), t.Name()+".upgrade.log"),
	})
	require.NoError(t, err)

	for !strings.Contains(interrupted.LogTail(), "copying /usr/install/amd64/vmlinuz.efi") {
		require.NoError(t, interrupted.Ended(), interrupted.LogTail())
		time.Sleep(interruptPoll)
	}

	m.powerOff()
	interrupted.Stop(t.Context())

	m.powerOn()
	m.awaitExtension(version(t, current))

	m.talosctl("config", "new", "reader.yaml", "--roles", "os:reader")
	m.talosctl("reset", "--graceful=false", "--reboot", "--wait=false",
		"--system-labels-to-wipe", constants.StatePartitionLabel, "--system-labels-to-wipe", constants.EphemeralPartitionLabel)
	m.awaitConsole(maintenance)
	m.awaitDeletion()
}
