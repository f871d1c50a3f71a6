//go:build linux && amd64

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

func init() {
	// Only the main thread has PR_SET_PDEATHSIG, so it must execute init.
	runtime.LockOSThread()
}

// spec describes a boot of a machine. The test bed sends it as JSON.
type spec struct {
	// Name is the host name until Talos sets its own.
	Name string
	// Dir is the directory of the machine. Its content survives reboots.
	Dir string
	// Layers are the directories of the root file system, topmost first. At least two are required.
	Layers []string
	// UserData is the machine configuration, in base64.
	UserData string
	// Platform is Talos's platform, and Serial is the serial number in SMBIOS. A container has the SMBIOS of its host.
	Platform, Serial string
}

// volumes are the directories that survive reboots: the volumes of Talos's container image. subdirectories are directories
// in volumes that Talos requires.
var (
	volumes        = []string{"system/state", "var", "opt", "etc/cni", "etc/kubernetes", "usr/libexec/kubernetes"}
	subdirectories = []string{"opt/cni/bin", "opt/containerd/bin", "opt/containerd/lib", "etc/cni/net.d", "etc/kubernetes/manifests"}
)

// maskedSysctls are sysctls that are not namespaced. Talos reads and writes private copies of them.
var maskedSysctls = []string{
	"kernel/panic", "kernel/pid_max", "vm/overcommit_memory", "fs/inotify/max_user_instances", "fs/aio-max-nr",
}

// mounts are the mounts of a machine in its root file system. Only sysctls of its network namespace are writable.
var mounts = []mountPoint{
	{"tmpfs", "run", "tmpfs", 0, "mode=0755"},
	{"tmpfs", "system", "tmpfs", 0, "mode=0755"},
	{"tmpfs", "tmp", "tmpfs", 0, "mode=1777"},
	{"tmpfs", "dev", "tmpfs", unix.MS_NOSUID, "mode=0755"},
	{"tmpfs", "dev/shm", "tmpfs", 0, "mode=1777"},
	{"devpts", "dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620"},
	{"mqueue", "dev/mqueue", "mqueue", 0, ""},
	{"sysfs", "sys", "sysfs", unix.MS_RDONLY, ""},
	{"cgroup2", "sys/fs/cgroup", "cgroup2", 0, ""},
	{"proc", "proc", "proc", 0, ""},
	{"proc/sys", "proc/sys", "", unix.MS_BIND, ""},
	{"", "proc/sys", "", unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY, ""},
	{"proc/sys/net", "proc/sys/net", "", unix.MS_BIND, ""},
	{"", "proc/sys/net", "", unix.MS_BIND | unix.MS_REMOUNT, ""},
}

// mountPoint contains the arguments of mount(2). Relative paths are in the root file system.
type mountPoint struct {
	source, target, kind string
	flags                uintptr
	options              string
}

func (m mountPoint) mount() error {
	_ = os.MkdirAll(m.target, 0o755) // fails for files, which exist

	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.options); err != nil {
		return fmt.Errorf("mount %s%s on %s: %w", m.kind, m.source, m.target, err)
	}

	return nil
}

// machine sets up the mounts of a machine and executes Talos's init. It must be PID 1.
func machine([]string) error {
	var s spec
	if err := json.NewDecoder(os.Stdin).Decode(&s); err != nil {
		return fmt.Errorf("read spec of machine: %w", err)
	}

	root := filepath.Join(s.Dir, "root")
	overlay := mountPoint{"overlay", root, "overlay", unix.MS_RDONLY, "lowerdir=" + strings.Join(s.Layers, ":")}

	if err := errors.Join(unix.Sethostname([]byte(s.Name)), overlay.mount(), os.Chdir(root)); err != nil {
		return err
	}

	for _, name := range append(volumes, subdirectories...) {
		if err := os.MkdirAll(filepath.Join(s.Dir, "disk", name), 0o755); err != nil {
			return fmt.Errorf("create directory on disk: %w", err)
		}
	}

	for _, name := range volumes {
		mounts = append(mounts, mountPoint{filepath.Join(s.Dir, "disk", name), name, "", unix.MS_BIND, ""})
	}

	for _, m := range mounts {
		if err := m.mount(); err != nil {
			return err
		}
	}

	if err := errors.Join(maskProc(s.Dir), createDevices()); err != nil {
		return err
	}

	if s.Platform != "container" {
		if err := writeSMBIOS(s.Serial); err != nil {
			return fmt.Errorf("write SMBIOS: %w", err)
		}
	}

	// See pivot_root(2) for a root that needs no directory for the old one.
	if err := errors.Join(unix.PivotRoot(".", "."), unix.Unmount(".", unix.MNT_DETACH), os.Chdir("/")); err != nil {
		return fmt.Errorf("change root to %s: %w", root, err)
	}

	return fmt.Errorf("execute init: %w", syscall.Exec("/sbin/init", []string{"/sbin/init"}, []string{
		"PLATFORM=" + s.Platform, "USERDATA=" + s.UserData, "TALOSSKU=2CPU-2048RAM", "TERM=linux",
	}))
}

// maskProc mounts private files of the machine over files in /proc.
func maskProc(dir string) error {
	masks := map[string][]byte{
		// In a user namespace, Talos ignores failures to lower OOM scores, which requires CAP_SYS_RESOURCE.
		"proc/1/uid_map": []byte("0 0 1\n"),
		// Magic SysRq.
		"proc/sysrq-trigger": nil,
	}

	for _, name := range maskedSysctls {
		value, err := os.ReadFile(filepath.Join("/proc/sys", name))
		if err != nil {
			return fmt.Errorf("read sysctl: %w", err)
		}

		masks[filepath.Join("proc/sys", name)] = value
	}

	for name, content := range masks {
		if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
			continue // CONFIG_MAGIC_SYSRQ is optional
		}

		private := filepath.Join(dir, "masks", name)

		if err := errors.Join(os.MkdirAll(filepath.Dir(private), 0o755), os.WriteFile(private, content, 0o644),
			mountPoint{private, name, "", unix.MS_BIND, ""}.mount()); err != nil {
			return err
		}
	}

	return nil
}

// createDevices creates the device nodes and links in /dev.
func createDevices() error {
	defer syscall.Umask(syscall.Umask(0))

	for _, device := range []struct {
		name         string
		mode         uint32
		major, minor uint32
	}{
		{"null", 0o666, 1, 3},
		{"zero", 0o666, 1, 5},
		{"full", 0o666, 1, 7},
		{"random", 0o666, 1, 8},
		{"urandom", 0o666, 1, 9},
		{"kmsg", 0o644, 1, 11},
		{"tty", 0o666, 5, 0},
	} {
		if err := unix.Mknod("dev/"+device.name, unix.S_IFCHR|device.mode, int(unix.Mkdev(device.major, device.minor))); err != nil {
			return fmt.Errorf("create device %s: %w", device.name, err)
		}
	}

	for name, target := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2",
	} {
		if err := os.Symlink(target, filepath.Join("dev", name)); err != nil {
			return fmt.Errorf("link device: %w", err)
		}
	}

	return nil
}
