//go:build linux && amd64

// Command shims is several programs of the test bed, by its name or its first argument:
//
//   - machine is the first process of a machine, and executes Talos's init.
//   - runc runs the containers of a machine: root in a container may lack rights without which the real runc refuses them.
//   - kubelet is the entry point of the kubelet's image: the kubelet sets sysctls of the whole kernel.
//   - mount and umount are for the kubelet, whose image has no others.
//   - pause is the container that holds the namespaces of a pod.
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

// become executes a program, and returns only if that fails.
func become(program string, argv ...string) error {
	return fmt.Errorf("execute %s: %w", program, syscall.Exec(program, argv, os.Environ()))
}

func pause([]string) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)

	<-stop

	return nil
}
