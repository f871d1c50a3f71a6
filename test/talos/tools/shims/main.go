//go:build linux && amd64

// Command shims contains several commands of the test bed. Its name or its first argument selects one:
//
//   - machine is PID 1 of a machine, and executes Talos's init.
//   - runc removes from containers what root may lack privileges for in a container, and executes the real runc.
//   - kubelet prevents the kubelet from changing sysctls of the host, and executes the kubelet.
//   - mount and umount mount and unmount volumes of the kubelet.
//   - pause is the pause container of pods.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

func main() {
	shims := map[string]func(args []string) error{
		"machine": machine, "runc": runc, "kubelet": kubelet, "mount": mount, "umount": unmount, "pause": pause,
	}

	args := os.Args
	if shims[filepath.Base(args[0])] == nil && len(args) > 1 {
		args = args[1:]
	}

	name := filepath.Base(args[0])

	shim := shims[name]
	if shim == nil {
		shim = func([]string) error { return fmt.Errorf("no such shim in %q", os.Args) }
	}

	if err := shim(args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(125)
	}
}

// become executes a program. It returns only errors.
func become(program string, argv ...string) error {
	return fmt.Errorf("execute %s: %w", program, syscall.Exec(program, argv, os.Environ()))
}

// pause waits for SIGTERM or SIGINT.
func pause([]string) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)

	<-stop

	return nil
}
