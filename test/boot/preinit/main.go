// Command preinit is /init of the initramfs: it loads modules that are built into Talos's kernel, and executes Talos's init.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

func main() {
	modules, _ := filepath.Glob("/preinit/*") // sorted
	for _, path := range modules {
		if err := load(path); err != nil {
			fmt.Fprintf(os.Stderr, "preinit: load %s: %v\n", path, err)
		}
	}

	fmt.Fprintln(os.Stderr, "preinit:", unix.Exec("/talos-init", []string{"/init"}, os.Environ()))
}

func load(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // only read

	return unix.FinitModule(int(file.Fd()), "", 0)
}
