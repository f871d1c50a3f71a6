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

// kubelet is the program, and name how it is called: it may be one of several in a binary that goes by its name.
const (
	kubelet = "/usr/local/bin/kubelet.real"
	name    = "/usr/local/bin/kubelet"
)

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
	for sysctl, value := range sysctls {
		if err := cover(sysctl, value); err != nil {
			return err
		}
	}

	if err := syscall.Exec(kubelet, append([]string{name}, os.Args[1:]...), os.Environ()); err != nil {
		return fmt.Errorf("execute %s: %w", kubelet, err)
	}

	return nil
}

func cover(sysctl, value string) error {
	file := filepath.Join(os.TempDir(), "sysctl."+strings.ReplaceAll(sysctl, "/", "."))
	if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
		return fmt.Errorf("write stand-in for sysctl %s: %w", sysctl, err)
	}

	if err := syscall.Mount(file, filepath.Join("/proc/sys", sysctl), "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("cover sysctl %s: %w", sysctl, err)
	}

	return nil
}
