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

// sysctls are the values that the kubelet's container manager sets. They belong to the whole kernel.
var sysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// kubelet mounts private files over the sysctls, in the container's own mount namespace, and executes the kubelet,
// which may be one of several programs in a binary.
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

// mount mounts the kubelet's volumes with secrets, which are in memory.
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

func unmount(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want a target, got %q", args)
	}

	return syscall.Unmount(args[0], 0)
}
