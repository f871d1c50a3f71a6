// Command kubemount is what the kubelet of the test bed calls mount and umount: it has volumes with secrets in memory, and runs those commands for
// them. It knows no more of them than that takes.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

func main() {
	if err := run(filepath.Base(os.Args[0])); err != nil {
		fmt.Fprintln(os.Stderr, "kubemount:", err)
		os.Exit(1)
	}
}

func run(command string) error {
	kind := flag.String("t", "", "type of file system")
	options := flag.String("o", "", "options of the file system")
	flag.Parse()

	switch args := flag.Args(); {
	case command == "mount" && len(args) == 2:
		return mount(args[0], args[1], *kind, *options)
	case command == "umount" && len(args) == 1:
		return unmount(args[0])
	default:
		return fmt.Errorf("%s %q: not understood", command, os.Args[1:])
	}
}

func mount(source, target, kind, options string) error {
	if err := syscall.Mount(source, target, kind, 0, options); err != nil {
		return fmt.Errorf("mount %s at %s: %w", kind, target, err)
	}

	return nil
}

func unmount(target string) error {
	if err := syscall.Unmount(target, 0); err != nil {
		return fmt.Errorf("unmount %s: %w", target, err)
	}

	return nil
}
