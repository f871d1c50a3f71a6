//go:build e2e

package boot_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/process"
)

// installer makes an installer image with the extension in an OCI layout, and returns the name that the machine pulls.
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

	m.upgrade(nextInstaller)
	m.awaitConsole(running)
	m.awaitExtension(version(t, next))

	m.talosctl("rollback")
	m.awaitConsole(running)
	m.awaitExtension(version(t, current))

	// The power is cut while the installer writes the next version to the disk again.
	interrupted := m.upgrade(nextInstaller)
	m.eventually("installer writes", func() error {
		tail := interrupted.LogTail()
		if strings.Contains(tail, "copying /usr/install/amd64/vmlinuz.efi") {
			return nil
		}

		require.NoError(t, interrupted.Ended(), tail)

		return errors.New(tail)
	})
	m.powerOff()
	interrupted.Stop(t.Context())

	m.powerOn()
	m.awaitConsole(running)
	m.awaitExtension(version(t, current))

	m.talosctl("config", "new", "reader.yaml", "--roles", "os:reader")
	m.talosctl("reset", "--graceful=false", "--reboot", "--wait=false",
		"--system-labels-to-wipe", constants.StatePartitionLabel, "--system-labels-to-wipe", constants.EphemeralPartitionLabel)
	m.awaitConsole(maintenance)
	m.awaitDeletion()
}

// upgrade starts an upgrade to an installer image, and returns the process of talosctl.
func (m *vm) upgrade(installer string) *process.Process {
	m.t.Helper()

	m.awaitTalosctl("Running", "service", "cri") // it pulls the image

	upgrade, err := process.Start(process.Command{
		Name: "talosctl", Path: m.talosctlPath(), Args: []string{"upgrade", "--image", installer, "--drain=false", "--wait=false"},
		Env: m.talosctlEnv(), Log: filepath.Join(m.t.TempDir(), "upgrade.log"),
	})
	require.NoError(m.t, err)

	return upgrade
}
