//go:build linux

// Package privilege drops the privileges with which Talos starts an extension service.
//
// Talos starts every extension service as root with all but two capabilities. The service spec cannot request fewer,
// so the process drops them itself at startup.
package privilege

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"golang.org/x/sys/unix"
)

// UID is the owner of machine.sock. The mode of the socket is 0755, so besides root only its owner may connect.
const UID = constants.ApidUserID

// maxOpenFiles allows for one connection per machine with a wide margin. Talos up to 1.12 starts extension services
// with a limit of 1024.
const maxOpenFiles = 1 << 20

// oomScore is above the OOM scores of Talos's services, of which the kubelet has the highest, and below those of most
// pods.
const oomScore = constants.KubeletOOMScoreAdj + 50

// RaiseOOMScore raises the OOM score adjustment, which Talos sets to -600: if memory runs out, the kernel must not kill
// the kubelet or containerd because of this process. A higher value remains. Call it before Drop, after which the file
// belongs to root.
func RaiseOOMScore() error {
	const path = "/proc/self/oom_score_adj"

	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("get OOM score: %w", err)
	}

	if score, err := strconv.Atoi(strings.TrimSpace(string(data))); err != nil || score >= oomScore {
		return err
	}

	if err := os.WriteFile(path, []byte(strconv.Itoa(oomScore)), 0o600); err != nil {
		return fmt.Errorf("raise OOM score to %d: %w", oomScore, err)
	}

	return nil
}

// RaiseOpenFiles raises RLIMIT_NOFILE above the hard limit, which requires CAP_SYS_RESOURCE. The Go runtime has
// already raised it up to the hard limit.
func RaiseOpenFiles() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("get RLIMIT_NOFILE: %w", err)
	}

	if limit.Cur >= maxOpenFiles {
		return nil
	}

	wanted := unix.Rlimit{Cur: maxOpenFiles, Max: max(maxOpenFiles, limit.Max)}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &wanted); err != nil {
		return fmt.Errorf("raise RLIMIT_NOFILE from %d to %d: %w", limit.Cur, wanted.Cur, err)
	}

	return nil
}

// Drop creates dirs, gives them to UID, and switches the process to UID without supplementary groups and
// capabilities. This cannot be undone. If the process already runs as UID, because it has replaced itself, Drop only
// verifies that it has no capabilities.
func Drop(dirs ...string) error {
	if os.Geteuid() == UID {
		return checkNoCapabilities()
	}

	if os.Geteuid() != 0 {
		return errors.New("drop privileges: not running as root")
	}

	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("drop privileges: %w", err)
		}

		if err := os.Chown(dir, UID, UID); err != nil {
			return fmt.Errorf("drop privileges: %w", err)
		}
	}

	// Unlike those of x/sys, these functions of package syscall apply to all threads. The kernel clears all effective
	// and permitted capabilities with the last one.
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(UID), syscall.Setuid(UID)); err != nil {
		return fmt.Errorf("drop privileges: %w", err)
	}

	return checkNoCapabilities()
}

// checkNoCapabilities guards against unexpected kernels and securebits.
func checkNoCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}

	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("get capabilities: %w", err)
	}

	if data[0].Effective|data[1].Effective|data[0].Permitted|data[1].Permitted != 0 {
		return errors.New("drop privileges: process still has capabilities")
	}

	return nil
}
