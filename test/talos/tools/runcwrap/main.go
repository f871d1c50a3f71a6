// Command runcwrap stands in for runc where root has fewer rights than on a Talos machine: it removes from the OCI bundle what
// this kernel would refuse (the OOM score, capabilities outside our own bounding set, limits of cgroup controllers that are not
// there) and becomes runc.real. It adds nothing to a bundle, and is not used where root has everything.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// controllerOf names the cgroup v2 controller behind each kind of limit in a bundle.
var controllerOf = map[string]string{
	"cpu":            "cpu",
	"memory":         "memory",
	"pids":           "pids",
	"blockIO":        "io",
	"hugepageLimits": "hugetlb",
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "runcwrap:", err)
		os.Exit(1)
	}
}

func run() error {
	if bundle := bundleOf(os.Args); bundle != "" {
		if err := trim(filepath.Join(bundle, "config.json")); err != nil {
			return err
		}
	}

	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own path: %w", err)
	}

	real := filepath.Join(filepath.Dir(self), "runc.real")
	if err := syscall.Exec(real, append([]string{"runc"}, os.Args[1:]...), os.Environ()); err != nil {
		return fmt.Errorf("execute %s: %w", real, err)
	}

	return nil
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

	trimProcess(object(spec, "process"))
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

func trimProcess(process map[string]any) {
	bounding := boundingSet()
	allowed := func(capability any) bool {
		name, _ := capability.(string)
		number, known := capabilities[name]

		return !known || bounding&(1<<number) != 0
	}

	if bounding&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		delete(process, "oomScoreAdj")
	}

	sets := object(process, "capabilities")
	for name, set := range sets {
		list, _ := set.([]any)
		sets[name] = slices.DeleteFunc(list, func(capability any) bool { return !allowed(capability) })
	}
}

func boundingSet() uint64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}

	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "CapBnd:"); ok {
			set, _ := strconv.ParseUint(strings.TrimSpace(value), 16, 64)

			return set
		}
	}

	return 0
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

// capabilities that a container of Talos or of Kubernetes may ask for.
var capabilities = map[string]uint{
	"CAP_CHOWN":              unix.CAP_CHOWN,
	"CAP_DAC_OVERRIDE":       unix.CAP_DAC_OVERRIDE,
	"CAP_DAC_READ_SEARCH":    unix.CAP_DAC_READ_SEARCH,
	"CAP_FOWNER":             unix.CAP_FOWNER,
	"CAP_FSETID":             unix.CAP_FSETID,
	"CAP_KILL":               unix.CAP_KILL,
	"CAP_SETGID":             unix.CAP_SETGID,
	"CAP_SETUID":             unix.CAP_SETUID,
	"CAP_SETPCAP":            unix.CAP_SETPCAP,
	"CAP_LINUX_IMMUTABLE":    unix.CAP_LINUX_IMMUTABLE,
	"CAP_NET_BIND_SERVICE":   unix.CAP_NET_BIND_SERVICE,
	"CAP_NET_BROADCAST":      unix.CAP_NET_BROADCAST,
	"CAP_NET_ADMIN":          unix.CAP_NET_ADMIN,
	"CAP_NET_RAW":            unix.CAP_NET_RAW,
	"CAP_IPC_LOCK":           unix.CAP_IPC_LOCK,
	"CAP_IPC_OWNER":          unix.CAP_IPC_OWNER,
	"CAP_SYS_MODULE":         unix.CAP_SYS_MODULE,
	"CAP_SYS_RAWIO":          unix.CAP_SYS_RAWIO,
	"CAP_SYS_CHROOT":         unix.CAP_SYS_CHROOT,
	"CAP_SYS_PTRACE":         unix.CAP_SYS_PTRACE,
	"CAP_SYS_PACCT":          unix.CAP_SYS_PACCT,
	"CAP_SYS_ADMIN":          unix.CAP_SYS_ADMIN,
	"CAP_SYS_BOOT":           unix.CAP_SYS_BOOT,
	"CAP_SYS_NICE":           unix.CAP_SYS_NICE,
	"CAP_SYS_RESOURCE":       unix.CAP_SYS_RESOURCE,
	"CAP_SYS_TIME":           unix.CAP_SYS_TIME,
	"CAP_SYS_TTY_CONFIG":     unix.CAP_SYS_TTY_CONFIG,
	"CAP_MKNOD":              unix.CAP_MKNOD,
	"CAP_LEASE":              unix.CAP_LEASE,
	"CAP_AUDIT_WRITE":        unix.CAP_AUDIT_WRITE,
	"CAP_AUDIT_CONTROL":      unix.CAP_AUDIT_CONTROL,
	"CAP_SETFCAP":            unix.CAP_SETFCAP,
	"CAP_MAC_OVERRIDE":       unix.CAP_MAC_OVERRIDE,
	"CAP_MAC_ADMIN":          unix.CAP_MAC_ADMIN,
	"CAP_SYSLOG":             unix.CAP_SYSLOG,
	"CAP_WAKE_ALARM":         unix.CAP_WAKE_ALARM,
	"CAP_BLOCK_SUSPEND":      unix.CAP_BLOCK_SUSPEND,
	"CAP_AUDIT_READ":         unix.CAP_AUDIT_READ,
	"CAP_PERFMON":            unix.CAP_PERFMON,
	"CAP_BPF":                unix.CAP_BPF,
	"CAP_CHECKPOINT_RESTORE": unix.CAP_CHECKPOINT_RESTORE,
}
