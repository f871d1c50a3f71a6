//go:build linux

package privilege_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/talos-ccm/talos-ccm/pkg/privilege"
)

// Privileges are given up for a whole process and for good, so every test does it in a child: this binary again, which runs the
// named function instead of the tests.
const (
	variable = "PRIVILEGE_TEST_CHILD"
	argument = "PRIVILEGE_TEST_PATH"

	enough = 1 << 20
)

func children() map[string]func(path string) error {
	return map[string]func(path string) error{
		"drop":              drop,
		"drop without root": dropWithoutRoot,
		"drop below a file": dropBelowAFile,
		"connect":           connect,
		"raise":             raise,
		"raise in vain":     raiseInVain,
	}
}

func TestMain(m *testing.M) {
	name := os.Getenv(variable)
	if name == "" {
		os.Exit(m.Run())
	}

	child, known := children()[name]
	if !known {
		child = func(string) error { return fmt.Errorf("there is no child %q", name) }
	}

	if err := child(os.Getenv(argument)); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}

	fmt.Println("ok")
}

// requireRoot fails: a test of what only root can do must not pass by being left out.
func requireRoot(t *testing.T) {
	t.Helper()

	if os.Geteuid() != 0 {
		t.Fatal("this test gives up root's privileges, so root must run it")
	}
}

// requireChild runs a child, which does its own checking, with attributes that may be nil.
func requireChild(t *testing.T, name, path string, attributes *syscall.SysProcAttr) {
	t.Helper()

	// Another user may not be able to reach the binary by its path.
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	// The race detector waits for a second before a process ends, unless told not to.
	cmd.Env = []string{variable + "=" + name, argument + "=" + path, "GORACE=atexit_sleep_ms=0"}
	cmd.SysProcAttr = attributes

	var stdout, stderr bytes.Buffer

	cmd.Stdout, cmd.Stderr = &stdout, &stderr

	if err := cmd.Run(); err != nil || stdout.String() != "ok\n" {
		t.Errorf("%s: %v\n%s%s", name, err, stdout.String(), stderr.String())
	}
}

// ordinaryUser makes a child some user that may do nothing in particular. Without root, that is who we are.
func ordinaryUser() *syscall.SysProcAttr {
	if os.Geteuid() != 0 {
		return nil
	}

	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
}

// openFolder is a folder that every user can reach.
func openFolder(t *testing.T) string {
	t.Helper()

	dir := t.TempDir()

	// The folder above it is the test's too, and its owner's alone.
	for _, path := range []string{filepath.Dir(dir), dir} {
		if err := os.Chmod(path, 0o755); err != nil { //nolint:gosec // that is the point
			t.Fatal(err)
		}
	}

	return dir
}

func TestDrop_CannotBeUndone(t *testing.T) {
	requireRoot(t)

	dir := filepath.Join(openFolder(t), "run", "talos-ccm")
	// Directories above the last are root's, and whoever uses them must be able to pass.
	if err := os.Mkdir(filepath.Dir(dir), 0o755); err != nil { //nolint:gosec // see above
		t.Fatal(err)
	}

	requireChild(t, "drop", dir, nil)
	requireOwner(t, dir)
}

func TestDrop_TakesOverExistingDirectory(t *testing.T) {
	requireRoot(t)

	dir := filepath.Join(openFolder(t), "talos-ccm")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}

	requireChild(t, "drop", dir, nil)
	requireOwner(t, dir)
}

func requireOwner(t *testing.T, dir string) {
	t.Helper()

	var stat unix.Stat_t
	if err := unix.Stat(dir, &stat); err != nil {
		t.Fatalf("stat %s: %v", dir, err)
	}

	if stat.Uid != 50 || stat.Gid != 50 || stat.Mode&0o777 != 0o700 {
		t.Errorf("%s belongs to %d:%d and has mode %o", dir, stat.Uid, stat.Gid, stat.Mode&0o777)
	}
}

// drop does what an extension service does, and then tries every way back.
func drop(dir string) error {
	release := manyThreads()
	defer release()

	if err := syscall.Setgroups([]int{0, 4}); err != nil {
		return fmt.Errorf("set groups: %w", err)
	}

	if err := privilege.Drop(dir); err != nil {
		return err
	}

	return errors.Join(checkThreads(), checkNoWayBack(), checkOwnFolder(dir), checkOthersFiles())
}

// manyThreads has the process run on several threads: credentials belong to threads, and one that is left behind would be root.
func manyThreads() (release func()) {
	done := make(chan struct{})

	var started, ended sync.WaitGroup

	for range 4 {
		started.Add(1)
		ended.Go(func() {
			runtime.LockOSThread()
			started.Done()
			<-done
		})
	}

	started.Wait()

	return func() {
		close(done)
		ended.Wait()
	}
}

// checkThreads reads what the kernel says of every thread.
func checkThreads() error {
	statuses, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(statuses) < 4 {
		return fmt.Errorf("list the threads: found %d: %w", len(statuses), err)
	}

	var errs []error

	for _, path := range statuses {
		status, err := os.ReadFile(path)
		if errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrNotExist) {
			continue // it has ended
		}

		errs = append(errs, err)

		for key, want := range map[string]string{
			"Uid": "50 50 50 50", "Gid": "50 50 50 50", "Groups": "", "CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapAmb": "0000000000000000",
		} {
			if got := field(string(status), key); got != want {
				errs = append(errs, fmt.Errorf("%s: %s is %q, want %q", path, key, got, want))
			}
		}
	}

	return errors.Join(errs...)
}

func field(status, key string) string {
	for line := range strings.Lines(status) {
		if value, found := strings.CutPrefix(line, key+":"); found {
			return strings.Join(strings.Fields(value), " ")
		}
	}

	return "missing"
}

func checkNoWayBack() error {
	var errs []error

	for way, attempt := range map[string]func() error{
		"setuid 0":    func() error { return syscall.Setuid(0) },
		"setresuid 0": func() error { return syscall.Setresuid(0, 0, 0) },
		"setgid 0":    func() error { return syscall.Setgid(0) },
		"setgroups 0": func() error { return syscall.Setgroups([]int{0}) },
		"capset": func() error {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			wanted := [2]unix.CapUserData{{Effective: 1 << unix.CAP_SETUID, Permitted: 1 << unix.CAP_SETUID}}

			return unix.Capset(&header, &wanted[0])
		},
	} {
		if err := attempt(); !errors.Is(err, unix.EPERM) {
			errs = append(errs, fmt.Errorf("%s: got %w, want EPERM", way, err))
		}
	}

	return errors.Join(errs...)
}

func checkOwnFolder(dir string) error {
	return os.WriteFile(filepath.Join(dir, "kubeconfig"), []byte("x"), 0o600)
}

func checkOthersFiles() error {
	f, err := os.Open("/etc/shadow")
	if err == nil {
		return errors.Join(errors.New("/etc/shadow can still be read"), f.Close())
	}

	if errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist) {
		return nil
	}

	return err
}

// The socket is 0755 and its owner's: neither another user nor root without capabilities can connect (talos: machined.sock).
func TestDrop_KeepsAccessToMachineSocket(t *testing.T) {
	requireRoot(t)

	dir := openFolder(t)
	path := filepath.Join(dir, "machine.sock")

	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close() //nolint:errcheck // nothing was written

	if err := errors.Join(os.Chmod(path, 0o755), os.Chown(path, 50, 50), os.Chmod(dir, 0o771)); err != nil { //nolint:gosec // as Talos does
		t.Fatal(err)
	}

	requireChild(t, "connect", path, nil)
}

// connect has its own folder next to the socket.
func connect(path string) error {
	if err := privilege.Drop(path + ".run"); err != nil {
		return err
	}

	conn, err := net.Dial("unix", path)
	if err != nil {
		return err
	}

	return conn.Close()
}

func TestDrop_RequiresRoot(t *testing.T) {
	requireChild(t, "drop without root", filepath.Join(openFolder(t), "run"), ordinaryUser())
}

func dropWithoutRoot(dir string) error {
	err := privilege.Drop(dir)
	if err == nil || !strings.Contains(err.Error(), "drop privileges") || !strings.Contains(err.Error(), "root") {
		return fmt.Errorf("drop: got %w", err)
	}

	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the folder was made all the same: %w", err)
	}

	return nil
}

func TestDrop_ReportsDirectoryThatCannotBeCreated(t *testing.T) {
	requireRoot(t)

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	requireChild(t, "drop below a file", filepath.Join(file, "run"), nil)
}

func dropBelowAFile(dir string) error {
	err := privilege.Drop(dir)
	if err == nil || !strings.Contains(err.Error(), "drop privileges") || !strings.Contains(err.Error(), filepath.Dir(dir)) {
		return fmt.Errorf("drop: got %w", err)
	}

	if os.Geteuid() != 0 {
		return errors.New("privileges were dropped all the same")
	}

	return nil
}

// What happens at the hard limit depends on CAP_SYS_RESOURCE, which Talos leaves to extension services and many a container takes from
// root. Either way there is something to hold the code to; the log says which.
func TestRaiseOpenFiles_ExceedsHardLimit(t *testing.T) {
	mayRaise, err := hasCapability(unix.CAP_SYS_RESOURCE)
	if err != nil {
		t.Fatal(err)
	}

	name := "raise in vain"
	if mayRaise {
		name = "raise"
	}

	t.Logf("CAP_SYS_RESOURCE: %v, so the child is %q", mayRaise, name)
	requireChild(t, name, "", nil)
}

func TestRaiseOpenFiles_FailsForUnprivilegedUser(t *testing.T) {
	requireChild(t, "raise in vain", "", ordinaryUser())
}

func hasCapability(capability uint) (bool, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}

	var data [2]unix.CapUserData

	err := unix.Capget(&header, &data[0])

	return data[capability/32].Effective&(1<<(capability%32)) != 0, err
}

// raise starts as Talos up to 1.12 starts extension services, and raises twice: the second has nothing to do.
func raise(string) error {
	if err := setLimit(1024); err != nil {
		return err
	}

	return errors.Join(privilege.RaiseOpenFiles(), checkLimit(enough), privilege.RaiseOpenFiles(), checkLimit(enough))
}

func raiseInVain(string) error {
	if err := setLimit(512); err != nil {
		return err
	}

	err := privilege.RaiseOpenFiles()
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "RLIMIT_NOFILE") || !strings.Contains(err.Error(), "512") {
		return fmt.Errorf("raise: got %w", err)
	}

	return checkLimit(512)
}

// setLimit sets the soft and the hard limit.
func setLimit(limit uint64) error {
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: limit, Max: limit})
}

func checkLimit(want uint64) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}

	if limit.Cur != want || limit.Max < limit.Cur {
		return fmt.Errorf("the limit of open files is %d of %d, want %d", limit.Cur, limit.Max, want)
	}

	return nil
}
