//go:build linux && amd64

package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// sysctls are the sysctls that the kubelet's container manager sets, with its values. They are not namespaced.
var sysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// kubelet mounts files over the sysctls in the container's mount namespace, and executes the kubelet. The name selects the
// kubelet in a binary with several components.
func kubelet(args []string) error {
	for sysctl, value := range sysctls {
		file := filepath.Join(os.TempDir(), "sysctl."+strings.ReplaceAll(sysctl, "/", "."))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}

		if err := syscall.Mount(file, filepath.Join("/proc/sys", sysctl), "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("mask sysctl %s: %w", sysctl, err)
		}
	}

	return become("/usr/local/bin/kubelet.real", append([]string{"/usr/local/bin/kubelet"}, args...)...)
}

// mount mounts a file system, such as the kubelet's tmpfs volumes for Secrets.
func mount(args []string) error {
	flags := flag.NewFlagSet("mount", flag.ContinueOnError)
	kind := flags.String("t", "", "type of file system")
	options := flags.String("o", "", "options of the file system")

	if err := flags.Parse(args); err != nil {
		return err
	}

	if flags.NArg() != 2 {
		return fmt.Errorf("want source and target, got %q", args)
	}

	return syscall.Mount(flags.Arg(0), flags.Arg(1), *kind, 0, *options)
}

// unmount unmounts a file system.
func unmount(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want a target, got %q", args)
	}

	return syscall.Unmount(args[0], 0)
}
