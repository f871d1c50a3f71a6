// Command preinit is /init of the initramfs: it loads modules that are built into Talos's kernel, and executes Talos's init.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	modules, _ := filepath.Glob("/preinit/*") // sorted
	for _, path := range modules {
		if err := load(path); err != nil {
			fmt.Fprintf(os.Stderr, "preinit: load %s: %v\n", path, err)
		}
	}

	// The kernel may not yet have closed the files that it has unpacked.
	for range 100 {
		if err := unix.Exec("/talos-init", []string{"/init"}, os.Environ()); !errors.Is(err, unix.ETXTBSY) {
			fmt.Fprintln(os.Stderr, "preinit:", err)

			return
		}

		time.Sleep(100 * time.Millisecond)
	}
}

func load(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // only read

	return unix.FinitModule(int(file.Fd()), "", 0)
}
