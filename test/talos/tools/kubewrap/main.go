// Command kubewrap is the entry point of the test bed's kubelet image. The kubelet insists on setting sysctls that belong to
// the whole kernel and not to a container; kubewrap puts private files over them, within the container's own mount namespace,
// and becomes the kubelet. It never writes a sysctl.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// components holds every Kubernetes component; the first argument chooses one.
const components = "/usr/local/bin/kube-components"

// sysctls are what the kubelet's container manager expects to read back.
var sysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "kubewrap:", err)
		os.Exit(1)
	}
}

func run() error {
	for name, value := range sysctls {
		if err := cover(name, value); err != nil {
			return err
		}
	}

	if err := syscall.Exec(components, append([]string{components, "kubelet"}, os.Args[1:]...), os.Environ()); err != nil {
		return fmt.Errorf("execute %s: %w", components, err)
	}

	return nil
}

func cover(name, value string) error {
	file := filepath.Join(os.TempDir(), "sysctl."+strings.ReplaceAll(name, "/", "."))
	if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
		return fmt.Errorf("write stand-in for sysctl %s: %w", name, err)
	}

	if err := syscall.Mount(file, filepath.Join("/proc/sys", name), "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("cover sysctl %s: %w", name, err)
	}

	return nil
}
