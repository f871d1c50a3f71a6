// Package netns creates network namespaces for tests, and runs parts of a test in them. It requires root, and the command
// ip of iproute2.
package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Link is the interface in a namespace that Connect creates.
const Link = "eth0"

// Namespace is a network namespace without a name. It exists as long as this process holds it open or anything runs in
// it, so the kernel removes it and its interfaces however this process ends. Use New.
type Namespace struct {
	file *os.File
}

// New creates a namespace with no interface but the loopback interface.
func New(ctx context.Context) (*Namespace, error) {
	n := &Namespace{}

	err := onOwnThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			n.file, err = os.Open("/proc/thread-self/ns/net")
		}

		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create network namespace: %w", err)
	}

	if err := n.IP(ctx, "link set lo up"); err != nil {
		return nil, errors.Join(err, n.Close())
	}

	return n, nil
}

// Connect creates a namespace whose interface Link has an address, and is connected with a new interface of n.
func (n *Namespace) Connect(ctx context.Context, link string, address netip.Prefix) (*Namespace, error) {
	other, err := New(ctx)
	if err != nil {
		return nil, err
	}

	err = n.IP(ctx, "link add "+link+" type veth peer name "+Link+" netns "+other.path(), "link set "+link+" up")
	if err == nil {
		err = other.IP(ctx, "link set "+Link+" up", "address add "+address.String()+" dev "+Link)
	}

	if err != nil {
		return nil, errors.Join(err, other.Close())
	}

	return other, nil
}

// onOwnThread runs f on a thread that ends afterwards, so that f may change the thread as it likes.
func onOwnThread(f func() error) error {
	result := make(chan error)

	go func() {
		runtime.LockOSThread() // and never unlock: that is what ends the thread

		result <- f()
	}()

	return <-result
}

// path names the namespace for other processes, as long as this one holds it.
func (n *Namespace) path() string {
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
	return onOwnThread(func() error {
		if err := n.Enter(); err != nil {
			return err
		}

		return f()
	})
}

// IP runs ip(8) in the namespace, once for each command.
func (n *Namespace) IP(ctx context.Context, commands ...string) error {
	return n.Inside(func() error {
		for _, command := range commands {
			if out, err := exec.CommandContext(ctx, "ip", strings.Fields(command)...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %s: %w: %s", command, err, bytes.TrimSpace(out))
			}
		}

		return nil
	})
}

// Dial connects from within the namespace. The address must be a literal: there is no name service.
func (n *Namespace) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = n.Inside(func() error {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)

		return err
	})

	return conn, err
}

// Listen listens on a TCP address within the namespace.
func (n *Namespace) Listen(ctx context.Context, address string) (listener net.Listener, err error) {
	err = n.Inside(func() error {
		listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", address)

		return err
	})

	return listener, err
}
