package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// disk are the folders that survive a boot: those that Talos's container image declares as volumes.
var disk = []string{"system/state", "var", "opt", "etc/cni", "etc/kubernetes", "usr/libexec/kubernetes"}

// furniture are folders that Talos expects on the disk.
var furniture = []string{"opt/cni/bin", "opt/containerd/bin", "opt/containerd/lib", "etc/cni/net.d", "etc/kubernetes/manifests"}

// shielded are sysctls that belong to the whole kernel: Talos reads and writes private copies of them.
var shielded = []string{
	"kernel/panic", "kernel/pid_max", "vm/overcommit_memory", "fs/inotify/max_user_instances", "fs/aio-max-nr",
}

type mount struct {
	source, target, kind string
	flags                uintptr
	options              string
}

func (m mount) do() error {
	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.options); err != nil {
		return fmt.Errorf("mount %s%s on %s: %w", m.kind, m.source, m.target, err)
	}

	return nil
}

func do(mounts ...mount) error {
	for _, m := range mounts {
		if err := m.do(); err != nil {
			return err
		}
	}

	return nil
}

// boot builds the machine's view of the world and becomes Talos's init. It only returns when that did not work.
func boot(spec Spec) error {
	root := filepath.Join(spec.Dir, "root")

	steps := []func() error{
		func() error { return settle(spec) },
		func() error { return writeEtc(spec) },
		func() error { return mountRoot(spec, root) },
		func() error { return mountDisk(spec, root) },
		func() error { return mountProc(spec, root) },
		func() error { return mountSys(root) },
		func() error { return mountDev(root) },
		func() error { return enter(root) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}

	if err := syscall.Exec("/sbin/init", []string{"/sbin/init"}, []string{
		"PLATFORM=container", "USERDATA=" + spec.UserData, "TALOSSKU=2CPU-2048RAM", "TERM=linux",
	}); err != nil {
		return fmt.Errorf("execute init of %s: %w", spec.Name, err)
	}

	return nil
}

// settle finishes the namespaces: the cgroup namespace must be made by a process that is in the machine's cgroup already.
func settle(spec Spec) error {
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("unshare cgroup namespace: %w", err)
	}

	if err := unix.Sethostname([]byte(spec.Name)); err != nil {
		return fmt.Errorf("set host name %s: %w", spec.Name, err)
	}

	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}

	return nil
}

func mountRoot(spec Spec, root string) error {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return fmt.Errorf("make root folder: %w", err)
	}

	layers := append([]string{engineLayer(spec)}, spec.Layers...)
	if err := do(mount{"overlay", root, "overlay", unix.MS_RDONLY, "lowerdir=" + strings.Join(layers, ":")}); err != nil {
		return err
	}

	for name, mode := range map[string]string{"run": "0755", "system": "0755", "tmp": "1777"} {
		if err := do(mount{"tmpfs", filepath.Join(root, name), "tmpfs", 0, "mode=" + mode}); err != nil {
			return err
		}
	}

	return os.MkdirAll(filepath.Join(root, "system/state"), 0o755)
}

func mountDisk(spec Spec, root string) error {
	stored := filepath.Join(spec.Dir, "disk")

	for _, name := range append(disk, furniture...) {
		if err := os.MkdirAll(filepath.Join(stored, name), 0o755); err != nil {
			return fmt.Errorf("make folder on disk: %w", err)
		}
	}

	for _, name := range disk {
		if err := do(mount{filepath.Join(stored, name), filepath.Join(root, name), "", unix.MS_BIND, ""}); err != nil {
			return err
		}
	}

	return nil
}

// mountProc mounts /proc with every sysctl read-only, except for the sysctls of the machine's own network namespace.
func mountProc(spec Spec, root string) error {
	const freeze = unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY

	proc := filepath.Join(root, "proc")
	sysctls := filepath.Join(proc, "sys")
	network := filepath.Join(sysctls, "net")

	if err := do(
		mount{"proc", proc, "proc", 0, ""},
		mount{sysctls, sysctls, "", unix.MS_BIND, ""},
		mount{"", sysctls, "", freeze, ""},
		mount{network, network, "", unix.MS_BIND, ""},
		mount{"", network, "", unix.MS_BIND | unix.MS_REMOUNT, ""},
	); err != nil {
		return err
	}

	if err := coverSysRq(filepath.Join(proc, "sysrq-trigger")); err != nil {
		return err
	}

	copies := filepath.Join(spec.Dir, "sysctl")
	if err := os.MkdirAll(copies, 0o755); err != nil {
		return fmt.Errorf("make folder for sysctls: %w", err)
	}

	for _, name := range shielded {
		if err := shield(filepath.Join(copies, strings.ReplaceAll(name, "/", ".")), filepath.Join(sysctls, name)); err != nil {
			return err
		}
	}

	return nil
}

// coverSysRq keeps the machine away from the kernel's emergency keys, where the kernel has them.
func coverSysRq(trigger string) error {
	if _, err := os.Stat(trigger); errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	return do(mount{os.DevNull, trigger, "", unix.MS_BIND, ""})
}

func shield(private, sysctl string) error {
	value, err := os.ReadFile(sysctl)
	if err != nil {
		return fmt.Errorf("read sysctl: %w", err)
	}

	if err := os.WriteFile(private, value, 0o644); err != nil {
		return fmt.Errorf("write private sysctl: %w", err)
	}

	return do(mount{private, sysctl, "", unix.MS_BIND, ""})
}

func mountSys(root string) error {
	sys := filepath.Join(root, "sys")

	return do(
		mount{"sysfs", sys, "sysfs", unix.MS_RDONLY, ""},
		mount{"cgroup2", filepath.Join(sys, "fs/cgroup"), "cgroup2", 0, ""},
	)
}

func mountDev(root string) error {
	dev := filepath.Join(root, "dev")

	if err := do(mount{"tmpfs", dev, "tmpfs", unix.MS_NOSUID, "mode=0755"}); err != nil {
		return err
	}

	for _, name := range []string{"pts", "shm", "mqueue"} {
		if err := os.Mkdir(filepath.Join(dev, name), 0o755); err != nil {
			return fmt.Errorf("make device folder: %w", err)
		}
	}

	if err := do(
		mount{"devpts", filepath.Join(dev, "pts"), "devpts", 0, "newinstance,ptmxmode=0666,mode=0620"},
		mount{"tmpfs", filepath.Join(dev, "shm"), "tmpfs", 0, "mode=1777"},
		mount{"mqueue", filepath.Join(dev, "mqueue"), "mqueue", 0, ""},
	); err != nil {
		return err
	}

	if err := makeNodes(dev); err != nil {
		return err
	}

	for name, target := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2",
	} {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil {
			return fmt.Errorf("link device: %w", err)
		}
	}

	return nil
}

func makeNodes(dev string) error {
	nodes := []struct {
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
	}
	for _, node := range nodes {
		path := filepath.Join(dev, node.name)

		if err := unix.Mknod(path, unix.S_IFCHR|node.mode, int(unix.Mkdev(node.major, node.minor))); err != nil {
			return fmt.Errorf("make device %s: %w", node.name, err)
		}

		if err := os.Chmod(path, os.FileMode(node.mode)); err != nil {
			return fmt.Errorf("open up device %s: %w", node.name, err)
		}
	}

	return nil
}

// writeEtc writes the files that a container engine would provide, into a layer of the root: Talos 1.14 puts an overlay over
// /etc, which hides mounts there.
func writeEtc(spec Spec) error {
	etc := filepath.Join(engineLayer(spec), "etc")
	if err := os.MkdirAll(etc, 0o755); err != nil {
		return fmt.Errorf("make folder for /etc: %w", err)
	}

	for name, content := range map[string]string{
		"hostname":    spec.Name + "\n",
		"hosts":       "127.0.0.1 localhost\n",
		"resolv.conf": "nameserver " + spec.Nameserver + "\n",
	} {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(content), 0o644); err != nil {
			return fmt.Errorf("write /etc/%s: %w", name, err)
		}
	}

	return nil
}

func engineLayer(spec Spec) string { return filepath.Join(spec.Dir, "engine") }

// enter makes root the root, and lets go of the old one.
func enter(root string) error {
	old := filepath.Join(root, "tmp/old")

	if err := os.Mkdir(old, 0o700); err != nil {
		return fmt.Errorf("make folder for the old root: %w", err)
	}

	if err := unix.PivotRoot(root, old); err != nil {
		return fmt.Errorf("change root to %s: %w", root, err)
	}

	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("change folder to the new root: %w", err)
	}

	if err := unix.Unmount("/tmp/old", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount old root: %w", err)
	}

	return os.Remove("/tmp/old")
}
