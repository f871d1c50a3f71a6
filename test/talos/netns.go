package talos

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

// namespace is a network namespace without a name. It exists as long as this process holds it open or anything runs in it, so
// the kernel removes it, and every interface in it, however this process ends.
type namespace struct {
	file *os.File
}

func newNamespace() (*namespace, error) {
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

	return &namespace{file: file}, nil
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

// path names the namespace for other processes, as long as this one holds it.
func (n *namespace) path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd())
}

func (n *namespace) close() error { return n.file.Close() }

// enter moves the calling thread, which must be locked and must not be used for anything else afterwards.
func (n *namespace) enter() error {
	if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}

	return nil
}

// inside runs f on a thread in the namespace. Sockets that f opens, and processes that it starts, stay there.
func (n *namespace) inside(f func() error) error {
	var err error

	onOwnThread(func() {
		if err = n.enter(); err == nil {
			err = f()
		}
	})

	return err
}

// ip runs the command of that name in the namespace.
func (n *namespace) ip(ctx context.Context, arguments ...string) error {
	return n.inside(func() error {
		if out, err := exec.CommandContext(ctx, "ip", arguments...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(arguments, " "), err, bytes.TrimSpace(out))
		}

		return nil
	})
}

// dial connects from within the namespace. The address must be a literal: there is no name service.
func (n *namespace) dial(ctx context.Context, network, address string) (net.Conn, error) {
	var conn net.Conn

	err := n.inside(func() error {
		var err error

		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)

		return err
	})
	if err != nil {
		return nil, fmt.Errorf("dial from within network namespace: %w", err)
	}

	return conn, nil
}

func (n *namespace) dialTCP(ctx context.Context, address string) (net.Conn, error) {
	return n.dial(ctx, "tcp", address)
}

func (n *namespace) listen(ctx context.Context, address string) (net.Listener, error) {
	var listener net.Listener

	err := n.inside(func() error {
		var err error

		listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", address)

		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s within network namespace: %w", address, err)
	}

	return listener, nil
}
