//go:build linux

// Package privilege gives up what an extension service starts with.
//
// Talos starts every extension service as root with all capabilities but two, and its service spec has no field to ask for less, so
// the process does it by itself, before it does anything else.
package privilege

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"golang.org/x/sys/unix"
)

// UID is the only user but root that may connect to machine.sock: the socket is 0755 and belongs to it.
const UID = constants.ApidUserID

// maxOpenFiles is one per machine and some to spare; Talos up to 1.12 starts extension services with 1024.
const maxOpenFiles = 1 << 20

// RaiseOpenFiles raises the limit of open files beyond the hard limit, which takes CAP_SYS_RESOURCE; up to there the Go runtime has
// raised it already.
func RaiseOpenFiles() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}

	if limit.Cur >= maxOpenFiles {
		return nil
	}

	wanted := unix.Rlimit{Cur: maxOpenFiles, Max: max(maxOpenFiles, limit.Max)}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &wanted); err != nil {
		return fmt.Errorf("raise the limit of open files from %d to %d: %w", limit.Cur, wanted.Cur, err)
	}

	return nil
}

// Drop makes the process UID, without groups and capabilities, and dirs, which it creates, its own. There is no way back. A process that is
// UID already has been here before and has replaced itself; it is only checked.
func Drop(dirs ...string) error {
	if os.Geteuid() == UID {
		return checkNoCapabilities()
	}

	if os.Geteuid() != 0 {
		return errors.New("drop privileges: only root can")
	}

	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("drop privileges: %w", err)
		}

		if err := os.Chown(dir, UID, UID); err != nil {
			return fmt.Errorf("drop privileges: %w", err)
		}
	}

	// In package syscall, unlike x/sys, these reach all threads. The kernel clears all effective and permitted
	// capabilities with the last of them.
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(UID), syscall.Setuid(UID)); err != nil {
		return fmt.Errorf("drop privileges: %w", err)
	}

	return checkNoCapabilities()
}

// checkNoCapabilities is there for kernels and securebits that we did not think of.
func checkNoCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}

	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}

	if data[0].Effective|data[1].Effective|data[0].Permitted|data[1].Permitted != 0 {
		return errors.New("drop privileges: capabilities are left")
	}

	return nil
}
