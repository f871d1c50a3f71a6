//go:build linux && amd64

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/capability"
)

// controllerOf names the cgroup v2 controller behind each kind of limit in a bundle.
var controllerOf = map[string]string{
	"cpu":            "cpu",
	"memory":         "memory",
	"pids":           "pids",
	"blockIO":        "io",
	"hugepageLimits": "hugetlb",
}

// runc removes from an OCI bundle what this kernel would refuse (the OOM score, capabilities outside the bounding set, limits of
// missing cgroup controllers), and becomes the real runc.
func runc(args []string) error {
	if bundle := bundleOf(args); bundle != "" {
		if err := trim(filepath.Join(bundle, "config.json")); err != nil {
			return err
		}
	}

	self, err := os.Executable()
	if err != nil {
		return err
	}

	return become(filepath.Join(filepath.Dir(self), "runc.real"), append([]string{"runc"}, args...)...)
}

// bundleOf returns the bundle that a create or run is about to start, or "" for every other command.
func bundleOf(args []string) string {
	if !slices.Contains(args, "create") && !slices.Contains(args, "run") {
		return ""
	}

	for i, arg := range args[:len(args)-1] {
		if arg == "--bundle" || arg == "-b" {
			return args[i+1]
		}
	}

	return ""
}

func trim(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read bundle: %w", err)
	}

	var spec map[string]any

	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber() // 64 bit numbers must survive

	if err := decoder.Decode(&spec); err != nil {
		return fmt.Errorf("decode bundle %s: %w", path, err)
	}

	if err := trimProcess(object(spec, "process")); err != nil {
		return err
	}

	trimResources(object(object(spec, "linux"), "resources"))

	raw, err = json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encode bundle %s: %w", path, err)
	}

	if err := os.WriteFile(path, raw, 0o644); err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}

	return nil
}

func object(parent map[string]any, key string) map[string]any {
	child, _ := parent[key].(map[string]any)

	return child
}

func trimProcess(process map[string]any) error {
	bounding, err := capability.NewPid2(0)
	if err == nil {
		err = bounding.Load()
	}

	if err != nil {
		return fmt.Errorf("read own capabilities: %w", err)
	}

	lacking := map[string]bool{}
	for _, known := range capability.ListKnown() {
		lacking["CAP_"+strings.ToUpper(known.String())] = !bounding.Get(capability.BOUNDING, known)
	}

	if lacking["CAP_SYS_RESOURCE"] {
		delete(process, "oomScoreAdj")
	}

	sets := object(process, "capabilities")
	for name, set := range sets {
		list, _ := set.([]any)
		sets[name] = slices.DeleteFunc(list, func(capability any) bool { return lacking[fmt.Sprint(capability)] })
	}

	return nil
}

func trimResources(resources map[string]any) {
	list, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil {
		return
	}

	present := strings.Fields(string(list))

	for kind, controller := range controllerOf {
		if !slices.Contains(present, controller) {
			delete(resources, kind)
		}
	}

	// Settings by file name, such as memory.oom.group.
	unified := object(resources, "unified")
	for file := range unified {
		if controller, _, _ := strings.Cut(file, "."); !slices.Contains(present, controller) {
			delete(unified, file)
		}
	}
}
