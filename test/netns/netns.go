// Package netns creates network namespaces for tests, and runs functions in them. It requires root and ip(8) of iproute2.
package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Link is the name of the interface in a namespace that Connect creates.
const Link = "eth0"

// Namespace is an unnamed network namespace. It exists until it is closed and no process runs in it, so the kernel removes
// it and its interfaces even if this process is killed. Use New or Connect to create one.
type Namespace struct {
	file *os.File
}

// New creates a namespace with only the loopback interface.
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

// Connect creates a namespace and a veth pair that connects the new interface link of n with the interface Link of the new
// namespace, which gets the address.
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

// onOwnThread runs f on an OS thread that ends afterwards, so f can change the state of the thread.
func onOwnThread(f func() error) error {
	result := make(chan error)

	go func() {
		runtime.LockOSThread() // without unlocking, so that the thread ends with the goroutine

		result <- f()
	}()

	return <-result
}

// path returns a path to the namespace for other processes. It is valid until Close.
func (n *Namespace) path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd())
}

// Close releases the namespace. The kernel removes it when no process or socket uses it.
func (n *Namespace) Close() error { return n.file.Close() }

// Enter moves the calling thread into the namespace. The goroutine must be locked to the thread, and must not unlock it.
func (n *Namespace) Enter() error {
	if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}

	return nil
}

// Inside runs f in the namespace, on a thread of its own. Sockets that f opens and processes that it starts stay there.
func (n *Namespace) Inside(f func() error) error {
	return onOwnThread(func() error {
		if err := n.Enter(); err != nil {
			return err
		}

		return f()
	})
}

// IP runs ip(8) in the namespace, once for each command. Arguments must not contain spaces.
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

// Dial connects from the namespace. The address must be an IP address and a port, because the namespace has no DNS.
func (n *Namespace) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = n.Inside(func() error {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)

		return err
	})

	return conn, err
}

// Listen listens on a TCP address in the namespace.
func (n *Namespace) Listen(ctx context.Context, address string) (listener net.Listener, err error) {
	err = n.Inside(func() error {
		listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", address)

		return err
	})

	return listener, err
}

// Forward makes a TCP address of the calling thread's namespace reachable in n, at the same address, until the listener is
// closed.
func (n *Namespace) Forward(ctx context.Context, address string) (net.Listener, error) {
	listener, err := n.Listen(ctx, address)
	if err == nil {
		go forward(listener, address)
	}

	return listener, err
}

// forward forwards connections from a listener to an address.
func forward(listener net.Listener, address string) {
	for {
		near, err := listener.Accept()
		if err != nil {
			return
		}

		go func() {
			defer near.Close() //nolint:errcheck // both sides end

			far, err := net.Dial("tcp", address)
			if err != nil {
				return
			}
			defer far.Close() //nolint:errcheck // both sides end

			go func() { _, _ = io.Copy(far, near) }()

			_, _ = io.Copy(near, far)
		}()
	}
}
