// Package netns makes network namespaces for tests, and runs parts of a test in them. It requires root, and the command
// ip of iproute2.
package netns

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace without a name. It exists as long as this process holds it open or anything runs in
// it, so the kernel removes it and its interfaces however this process ends. Use New.
type Namespace struct {
	file *os.File
}

// New makes an empty namespace, in which not even the loopback interface is up.
func New() (*Namespace, error) {
	var (
		file *os.File
		err  error
	)

	onOwnThread(func() {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("make network namespace: %w", err)

			return
		}

		if file, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			err = fmt.Errorf("open network namespace: %w", err)
		}
	})

	if err != nil {
		return nil, err
	}

	return &Namespace{file: file}, nil
}

// onOwnThread runs f on a thread that ends afterwards, so that f may change the thread as it likes.
func onOwnThread(f func()) {
	done := make(chan struct{})

	go func() {
		defer close(done)

		runtime.LockOSThread() // and never unlock: that is what ends the thread

		f()
	}()

	<-done
}

// Path names the namespace for other processes, as long as this one holds it.
func (n *Namespace) Path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd())
}

// Close releases the namespace.
func (n *Namespace) Close() error { return n.file.Close() }

// Enter moves the calling thread, which must be locked and must not be used for anything else afterwards.
func (n *Namespace) Enter() error {
	if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}

	return nil
}

// Inside runs f on a thread in the namespace. Sockets that f opens, and processes that it starts, stay there.
func (n *Namespace) Inside(f func() error) error {
	var err error

	onOwnThread(func() {
		if err = n.Enter(); err == nil {
			err = f()
		}
	})

	return err
}

// IP runs the command ip in the namespace, once for each list of arguments.
func (n *Namespace) IP(ctx context.Context, commands ...[]string) error {
	return n.Inside(func() error {
		for _, arguments := range commands {
			if out, err := exec.CommandContext(ctx, "ip", arguments...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", strings.Join(arguments, " "), err, bytes.TrimSpace(out))
			}
		}

		return nil
	})
}

// Dial connects from within the namespace. The address must be a literal: there is no name service.
func (n *Namespace) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var conn net.Conn

	err := n.Inside(func() error {
		var err error

		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)

		return err
	})
	if err != nil {
		return nil, fmt.Errorf("dial from within network namespace: %w", err)
	}

	return conn, nil
}

// Listen listens on a TCP address within the namespace.
func (n *Namespace) Listen(ctx context.Context, address string) (net.Listener, error) {
	var listener net.Listener

	err := n.Inside(func() error {
		var err error

		listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", address)

		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s within network namespace: %w", address, err)
	}

	return listener, nil
}
