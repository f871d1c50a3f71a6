//go:build linux && amd64

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	childFlag = "-filtered"
	// channelFD is where the filtered child finds the socket over which it hands its listener to the parent.
	channelFD = 3
	notifiers = 4
)

// The request numbers of the kernel's seccomp listener (include/uapi/linux/seccomp.h), which x/sys does not name.
const (
	ioctlReceive = 0xc0502100
	ioctlSend    = 0xc0182101
	ioctlAddFD   = 0x40182103
	addFDAndSend = 1 << 1
)

// Layouts of struct seccomp_notif, seccomp_notif_resp and seccomp_notif_addfd.
type (
	notification struct {
		id      uint64
		pid     uint32
		flags   uint32
		syscall int32
		arch    uint32
		pointer uint64
		args    [6]uint64
	}

	response struct {
		id    uint64
		value int64
		errno int32
		flags uint32
	}

	descriptor struct {
		id       uint64
		flags    uint32
		source   uint32
		target   uint32
		newFlags uint32
	}
)

var scoreFile = regexp.MustCompile(`^/proc/(self|thread-self|[0-9]+)(/task/[0-9]+)?/oom_score_adj$`)

// oom runs a command whose writes to /proc/PID/oom_score_adj have no effect. A seccomp filter hands every open for writing to
// this process, which answers with /dev/null for that one file and lets the kernel continue for all others. It is not a
// security boundary.
func oom(args []string) error {
	if len(args) > 1 && args[0] == childFlag {
		return becomeFiltered(args[1:])
	}

	code, err := supervise(args)
	if err == nil {
		os.Exit(code)
	}

	return err
}

// becomeFiltered installs the filter on itself, hands its listener to the parent, and becomes the command.
func becomeFiltered(argv []string) error {
	runtime.LockOSThread()

	listener, err := installFilter()
	if err != nil {
		return err
	}

	if err := unix.Sendmsg(channelFD, []byte{0}, unix.UnixRights(listener), nil, 0); err != nil {
		return fmt.Errorf("hand over seccomp listener: %w", err)
	}

	for _, fd := range []int{channelFD, listener} {
		if err := unix.Close(fd); err != nil {
			return fmt.Errorf("close descriptor %d: %w", fd, err)
		}
	}

	return become(argv[0], argv...)
}

func installFilter() (int, error) {
	const (
		load     = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal    = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		anyBit   = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		result   = unix.BPF_RET | unix.BPF_K
		number   = 0 // offsets in struct seccomp_data
		arch     = 4
		argument = 16
		writing  = unix.O_WRONLY | unix.O_RDWR
	)

	filter := []unix.SockFilter{
		{Code: load, K: arch},
		{Code: equal, K: unix.AUDIT_ARCH_X86_64, Jf: 7}, // → allow
		{Code: load, K: number},
		{Code: equal, K: unix.SYS_OPENAT, Jt: 1},
		{Code: equal, K: unix.SYS_OPEN, Jt: 2, Jf: 4},  // else → allow
		{Code: load, K: argument + 8*2},                // flags of openat
		{Code: anyBit, K: writing, Jt: 3, Jf: 2},       // → notify, allow
		{Code: load, K: argument + 8*1},                // flags of open
		{Code: anyBit, K: writing, Jt: 1},              // → notify
		{Code: result, K: unix.SECCOMP_RET_ALLOW},      //
		{Code: result, K: unix.SECCOMP_RET_USER_NOTIF}, //
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}

	listener, _, errno := syscall.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return 0, fmt.Errorf("install seccomp filter: %w", errno)
	}

	return int(listener), nil
}

// supervise runs the command under the filter and answers its notifications until it ends.
func supervise(argv []string) (int, error) {
	// The child dies with the thread that started it.
	runtime.LockOSThread()

	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("make socket pair: %w", err)
	}

	theirs := os.NewFile(uintptr(pair[1]), "listener channel")

	cmd := exec.Command("/proc/self/exe", append([]string{"oom", childFlag}, argv...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}

	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start filtered child: %w", err)
	}

	if err := theirs.Close(); err != nil {
		return 0, fmt.Errorf("close listener channel: %w", err)
	}

	listener, err := receiveListener(pair[0])
	if err != nil {
		return 0, err
	}

	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", os.DevNull, err)
	}

	for range notifiers {
		go answer(listener, null)
	}

	go forwardSignals(cmd.Process)

	return exitCode(cmd.Wait())
}

func receiveListener(channel int) (int, error) {
	control := make([]byte, unix.CmsgSpace(4))

	_, n, _, _, err := unix.Recvmsg(channel, make([]byte, 1), control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("receive seccomp listener: %w", err)
	}

	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) == 0 {
		return 0, fmt.Errorf("receive seccomp listener: child sent none (%w)", err)
	}

	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return 0, fmt.Errorf("receive seccomp listener: %w", err)
	}

	return fds[0], nil
}

func forwardSignals(process *os.Process) {
	signals := make(chan os.Signal, notifiers)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)

	for s := range signals {
		_ = process.Signal(s) // the child may be gone already
	}
}

func exitCode(err error) (int, error) {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return 0, err
	}

	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal()), nil
	}

	return exit.ExitCode(), nil
}

// answer serves notifications until no process is left under the filter.
func answer(listener, null int) {
	for {
		var n notification

		switch errno := ioctl(listener, ioctlReceive, unsafe.Pointer(&n)); errno {
		case 0:
			reply(listener, null, n)
		case unix.EINTR, unix.ENOENT:
			// The thread that asked is gone.
		default:
			return
		}
	}
}

// reply ignores errors: the only possible one is that the requesting thread was killed.
func reply(listener, null int, n notification) {
	if scoreFile.Match(path(n)) {
		_ = ioctl(listener, ioctlAddFD, unsafe.Pointer(&descriptor{
			id: n.id, flags: addFDAndSend, source: uint32(null), newFlags: unix.O_CLOEXEC,
		}))

		return
	}

	_ = ioctl(listener, ioctlSend, unsafe.Pointer(&response{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}))
}

// path reads the file name from the memory of the thread that opens it; nil if it cannot be read.
func path(n notification) []byte {
	pointer := n.args[1]
	if n.syscall == unix.SYS_OPEN {
		pointer = n.args[0]
	}

	memory, err := unix.Open("/proc/"+strconv.Itoa(int(n.pid))+"/mem", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(memory) //nolint:errcheck // read only

	name := make([]byte, 64)

	read, _ := unix.Pread(memory, name, int64(pointer))
	if end := bytes.IndexByte(name[:max(read, 0)], 0); end >= 0 {
		return name[:end]
	}

	return nil
}

func ioctl(fd int, request uintptr, argument unsafe.Pointer) syscall.Errno {
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(argument))

	return errno
}
