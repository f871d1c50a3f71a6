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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/talos-ccm/talos-ccm/pkg/privilege"
)

// Privileges are dropped for the whole process and cannot be regained. Every test therefore runs this binary as a
// child process, which calls the named function instead of the tests.
const (
	variable = "PRIVILEGE_TEST_CHILD"
	argument = "PRIVILEGE_TEST_PATH"

	enough = 1 << 20
)

var children = map[string]func(path string){
	"drop":                     drop,
	"drop without root":        dropWithoutRoot,
	"drop below a file":        dropBelowAFile,
	"connect":                  connect,
	"raise":                    raise,
	"raise without capability": raiseWithoutCapability,
	"raise OOM score":          raiseOOMScore,
}

// child fails the child process.
type child struct{}

func (child) Errorf(format string, args ...any) { fmt.Printf(format, args...) }

func (child) FailNow() { os.Exit(1) }

func TestMain(m *testing.M) {
	name := os.Getenv(variable)
	if name == "" {
		os.Exit(m.Run())
	}

	require.Contains(child{}, children, name)
	children[name](os.Getenv(argument))
	fmt.Println("ok")
}

// requireRoot fails the test instead of skipping it, so that it is never silently omitted.
func requireRoot(t *testing.T) {
	t.Helper()
	require.Equal(t, 0, os.Geteuid(), "this test must run as root")
}

// requireChild runs a child, which checks the result itself. attributes may be nil.
func requireChild(t *testing.T, name, path string, attributes *syscall.SysProcAttr) {
	t.Helper()

	// Another user may not have access to the path of the binary.
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	// By default the race detector delays the exit by a second.
	cmd.Env = []string{variable + "=" + name, argument + "=" + path, "GORACE=atexit_sleep_ms=0"}
	cmd.SysProcAttr = attributes

	var stdout, stderr bytes.Buffer

	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	assert.NoError(t, cmd.Run(), stderr.String())
	assert.Equal(t, "ok\n", stdout.String())
}

// ordinaryUser returns attributes that run a child as an unprivileged user. It returns nil if the tests already run
// as one.
func ordinaryUser() *syscall.SysProcAttr {
	if os.Geteuid() != 0 {
		return nil
	}

	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
}

// openDir returns a directory that every user can access.
func openDir(t *testing.T) string {
	t.Helper()

	dir := t.TempDir()

	// The parent directory also belongs to the test and is private by default.
	for _, path := range []string{filepath.Dir(dir), dir} {
		require.NoError(t, os.Chmod(path, 0o755))
	}

	return dir
}

func TestDrop_CannotBeUndone(t *testing.T) {
	requireRoot(t)

	for name, existing := range map[string]bool{"new directory": false, "existing directory": true} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(openDir(t), "run", "talos-ccm")
			// The parent directories belong to root and must be accessible.
			require.NoError(t, os.Mkdir(filepath.Dir(dir), 0o755))

			if existing {
				require.NoError(t, os.Mkdir(dir, 0o700))
			}

			requireChild(t, "drop", dir, nil)

			var stat unix.Stat_t
			require.NoError(t, unix.Stat(dir, &stat))
			assert.Equal(t, []uint32{50, 50, 0o700}, []uint32{stat.Uid, stat.Gid, stat.Mode & 0o777})
		})
	}
}

// drop drops the privileges as the extension service does, and then tries to regain them.
func drop(dir string) {
	release := manyThreads()
	defer release()

	require.NoError(child{}, syscall.Setgroups([]int{0, 4}))
	require.NoError(child{}, privilege.Drop(dir))
	checkThreads()
	checkNoWayBack()
	require.NoError(child{}, os.WriteFile(filepath.Join(dir, "kubeconfig"), []byte("x"), 0o600))

	_, err := os.Open("/etc/shadow")
	require.True(child{}, errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist), err)
}

// manyThreads starts several threads. Credentials belong to threads, and a thread that is missed would still run as
// root.
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

// checkThreads checks the credentials of every thread.
func checkThreads() {
	statuses, err := filepath.Glob("/proc/self/task/*/status")
	require.NoError(child{}, err)
	require.GreaterOrEqual(child{}, len(statuses), 4)

	for _, path := range statuses {
		status, err := os.ReadFile(path)
		if errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrNotExist) {
			continue // the thread has exited
		}

		require.NoError(child{}, err)

		for key, want := range map[string]string{
			"Uid": "50 50 50 50", "Gid": "50 50 50 50", "Groups": "", "CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapAmb": "0000000000000000",
		} {
			require.Equal(child{}, want, field(string(status), key), "%s: %s", path, key)
		}
	}
}

func field(status, key string) string {
	for line := range strings.Lines(status) {
		if value, found := strings.CutPrefix(line, key+":"); found {
			return strings.Join(strings.Fields(value), " ")
		}
	}

	return "missing"
}

func checkNoWayBack() {
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
		require.ErrorIs(child{}, attempt(), unix.EPERM, way)
	}
}

// The mode of the socket is 0755, so neither another user nor root without capabilities can connect (Talos:
// machined.sock).
func TestDrop_KeepsAccessToMachineSocket(t *testing.T) {
	requireRoot(t)

	dir := openDir(t)
	path := filepath.Join(dir, "machine.sock")

	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	require.NoError(t, err)
	defer listener.Close() //nolint:errcheck // nothing was written
	require.NoError(t, errors.Join(os.Chmod(path, 0o755), os.Chown(path, 50, 50), os.Chmod(dir, 0o771)))

	requireChild(t, "connect", path, nil)
}

// connect drops the privileges, with a directory next to the socket, and connects.
func connect(path string) {
	require.NoError(child{}, privilege.Drop(path+".run"))

	conn, err := net.Dial("unix", path)
	require.NoError(child{}, err)
	require.NoError(child{}, conn.Close())
}

func TestDrop_RequiresRoot(t *testing.T) {
	requireChild(t, "drop without root", filepath.Join(openDir(t), "run"), ordinaryUser())
}

func dropWithoutRoot(dir string) {
	err := privilege.Drop(dir)
	require.ErrorContains(child{}, err, "drop privileges")
	require.ErrorContains(child{}, err, "root")
	require.NoDirExists(child{}, dir)
}

func TestDrop_ReportsDirectoryThatCannotBeCreated(t *testing.T) {
	requireRoot(t)

	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))

	requireChild(t, "drop below a file", filepath.Join(file, "run"), nil)
}

func dropBelowAFile(dir string) {
	err := privilege.Drop(dir)
	require.ErrorContains(child{}, err, "drop privileges")
	require.ErrorContains(child{}, err, filepath.Dir(dir))
	require.Equal(child{}, 0, os.Geteuid(), "privileges were dropped")
}

// Raising the hard limit requires CAP_SYS_RESOURCE, which Talos grants to extension services, but many containers do
// not have. The test covers whichever case applies, and logs it.
func TestRaiseOpenFiles_ExceedsHardLimit(t *testing.T) {
	mayRaise, err := hasCapability(unix.CAP_SYS_RESOURCE)
	require.NoError(t, err)

	name := "raise without capability"
	if mayRaise {
		name = "raise"
	}

	t.Logf("CAP_SYS_RESOURCE is %v, running child %q", mayRaise, name)
	requireChild(t, name, "", nil)
}

func TestRaiseOOMScore_OnlyRaises(t *testing.T) {
	requireRoot(t)

	for before, after := range map[string]string{"-600": "-400", "-401": "-400", "-399": "-399", "0": "0", "500": "500"} {
		t.Run("from "+before, func(t *testing.T) {
			requireChild(t, "raise OOM score", before+" "+after, &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS})
		})
	}
}

const oomScore = "/proc/self/oom_score_adj"

// raiseOOMScore raises the score twice, as the service does after it has replaced itself.
func raiseOOMScore(scores string) {
	before, after, _ := strings.Cut(scores, " ")
	setOOMScore(before)

	for range 2 {
		require.NoError(child{}, privilege.RaiseOOMScore())

		score, err := os.ReadFile(oomScore)
		require.NoError(child{}, err)
		require.Equal(child{}, after, strings.TrimSpace(string(score)))
	}
}

// setOOMScore sets the score of this process. The kernel lets only CAP_SYS_RESOURCE of the initial user namespace lower a
// score. Elsewhere a file with the score is mounted in its place.
func setOOMScore(score string) {
	err := os.WriteFile(oomScore, []byte(score), 0o600)
	if err == nil {
		return
	}

	require.ErrorIs(child{}, err, unix.EACCES)

	file, err := os.CreateTemp("", "")
	require.NoError(child{}, err)
	defer os.Remove(file.Name()) //nolint:errcheck // the mount remains

	_, err = file.WriteString(score)
	require.NoError(child{}, errors.Join(err, file.Close(), unix.Mount(file.Name(), oomScore, "", unix.MS_BIND, "")))
}

func TestRaiseOpenFiles_FailsForUnprivilegedUser(t *testing.T) {
	requireChild(t, "raise without capability", "", ordinaryUser())
}

func hasCapability(capability uint) (bool, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}

	var data [2]unix.CapUserData

	err := unix.Capget(&header, &data[0])

	return data[capability/32].Effective&(1<<(capability%32)) != 0, err
}

// raise starts with the limit of Talos up to 1.12, and raises it twice. The second call changes nothing.
func raise(string) {
	setLimit(1024)

	for range 2 {
		require.NoError(child{}, privilege.RaiseOpenFiles())
		checkLimit(enough)
	}
}

func raiseWithoutCapability(string) {
	setLimit(512)

	err := privilege.RaiseOpenFiles()
	require.ErrorIs(child{}, err, unix.EPERM)
	require.ErrorContains(child{}, err, "RLIMIT_NOFILE")
	require.ErrorContains(child{}, err, "512")
	checkLimit(512)
}

// setLimit sets the soft and the hard limit.
func setLimit(limit uint64) {
	require.NoError(child{}, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: limit, Max: limit}))
}

func checkLimit(want uint64) {
	var limit unix.Rlimit
	require.NoError(child{}, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	require.Equal(child{}, want, limit.Cur)
	require.GreaterOrEqual(child{}, limit.Max, limit.Cur)
}
