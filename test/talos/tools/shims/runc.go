//go:build linux && amd64

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/capability"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// runc removes from an OCI bundle what the kernel would reject (the OOM score, capabilities outside the bounding set, and
// limits without cgroup controllers), and executes the real runc.
func runc(args []string) error {
	if slices.Contains(args, "create") || slices.Contains(args, "run") {
		bundle := slices.Index(args, "--bundle")
		if err := restrict(filepath.Join(args[bundle+1], "config.json")); err != nil {
			return fmt.Errorf("restrict bundle: %w", err)
		}
	}

	return become("/usr/bin/runc.real", append([]string{"runc"}, args...)...)
}

// restrict rewrites the configuration of an OCI bundle.
func restrict(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}

	var spec specs.Spec
	if err := json.Unmarshal(raw, &spec); err != nil {
		return err
	}

	removeCapabilities(spec.Process)

	controllers, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil {
		return err
	}

	available := strings.Fields(string(controllers))
	missing := func(controller string) bool { return !slices.Contains(available, controller) }

	if limits := spec.Linux.Resources; limits != nil && slices.ContainsFunc([]string{"cpu", "memory", "pids"}, missing) {
		*limits = specs.LinuxResources{Devices: limits.Devices}
	}

	if raw, err = json.Marshal(spec); err != nil {
		return err
	}

	return os.WriteFile(path, raw, 0o644)
}

// removeCapabilities removes capabilities outside the bounding set, and the OOM score if CAP_SYS_RESOURCE is one of them.
func removeCapabilities(process *specs.Process) {
	var missing []string

	for _, known := range capability.ListKnown() {
		if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(known), 0, 0, 0); err != nil || has == 0 {
			missing = append(missing, "CAP_"+strings.ToUpper(known.String()))
		}
	}

	if slices.Contains(missing, "CAP_SYS_RESOURCE") {
		process.OOMScoreAdj = nil
	}

	if sets := process.Capabilities; sets != nil {
		for _, set := range []*[]string{&sets.Bounding, &sets.Effective, &sets.Inheritable, &sets.Permitted, &sets.Ambient} {
			*set = slices.DeleteFunc(*set, func(capability string) bool { return slices.Contains(missing, capability) })
		}
	}
}
