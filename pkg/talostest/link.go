package talostest

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// link simulates the network between a machine and its clients. It is a listener of the cluster's server, resets connections while the
// machine is down, and blocks them while the machine is cut off.
type link struct {
	net.Listener

	machine   *Machine
	transport Transport

	flow gate // shut while the machine is cut off

	mu    sync.Mutex
	down  bool
	conns map[*conn]struct{}
}

func newLink(m *Machine, transport Transport, listener net.Listener) *link {
	return &link{Listener: listener, machine: m, transport: transport, conns: make(map[*conn]struct{})}
}

// Accept implements net.Listener.
func (l *link) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err //nolint:wrapcheck // net.Listener's contract
		}

		if admitted := l.admit(raw); admitted != nil {
			return admitted, nil
		}
	}
}

// admit returns nil if the machine is down.
func (l *link) admit(raw net.Conn) *conn {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.down {
		l.discard(raw, reset)

		return nil
	}

	admitted := &conn{Conn: raw, link: l, done: make(chan struct{})}
	l.conns[admitted] = struct{}{}

	return admitted
}

// discard closes a raw connection, or resets it once the link is no longer cut, so that its client does not notice before.
func (l *link) discard(raw net.Conn, end func(net.Conn)) {
	if !l.flow.isShut() {
		end(raw)

		return
	}

	// Wake a pending read without closing the connection.
	_ = raw.SetReadDeadline(time.Unix(1, 0))

	go func() {
		l.flow.wait(nil)
		reset(raw)
	}()
}

// filter attaches or detaches a filter of the listener and all open connections that accepts no byte of a packet. The
// kernel then drops packets, those of connection attempts and keepalive probes included.
func (l *link) filter(option int) error {
	err := setFilter(l.Listener, option)

	for _, open := range l.open() {
		if connErr := setFilter(open.Conn, option); !errors.Is(connErr, net.ErrClosed) {
			err = errors.Join(err, connErr)
		}
	}

	return err
}

// setFilter sets the option of a listener or a connection.
func setFilter(of any, option int) error {
	socket, ok := of.(syscall.Conn)
	if !ok {
		return fmt.Errorf("set filter: %T is no socket", of)
	}

	raw, err := socket.SyscallConn()
	if err != nil {
		return fmt.Errorf("set filter: %w", err)
	}

	dropAll := unix.SockFprog{Len: 1, Filter: &unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}}

	var filterErr error

	err = raw.Control(func(fd uintptr) { filterErr = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, option, &dropAll) })

	return errors.Join(err, filterErr)
}

// takeDown resets all connections, and new ones until bringUp.
func (l *link) takeDown() {
	l.mu.Lock()
	l.down = true
	l.mu.Unlock()

	l.dropAll()
}

func (l *link) isDown() bool {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.down
}

func (l *link) bringUp() {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.down = false
}

// dropAll resets all open connections.
func (l *link) dropAll() {
	for _, open := range l.open() {
		open.end(reset)
	}
}

func (l *link) open() []*conn {
	l.mu.Lock()
	defer l.mu.Unlock()

	return slices.Collect(maps.Keys(l.conns))
}

func (l *link) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()

	return len(l.conns)
}

// close closes the listener and all connections.
func (l *link) close() {
	_ = l.Listener.Close()

	l.flow.open()
	l.takeDown()
}

// finish closes a connection after its pending data.
func finish(raw net.Conn) { _ = raw.Close() }

// reset closes a connection with a TCP reset, as after a crash.
func reset(raw net.Conn) {
	if tcp, ok := raw.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}

	_ = raw.Close()
}

// conn is a server-side connection that the link can block.
type conn struct {
	net.Conn

	link *link
	done chan struct{}
	once sync.Once
}

// Read checks the gate after reading, because the link may have been cut during a pending read.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)

	if !c.link.flow.wait(c.done) {
		return 0, net.ErrClosed
	}

	return n, err //nolint:wrapcheck // net.Conn's contract: callers compare these errors
}

func (c *conn) Write(p []byte) (int, error) {
	if !c.link.flow.wait(c.done) {
		return 0, net.ErrClosed
	}

	return c.Conn.Write(p) //nolint:wrapcheck // net.Conn's contract
}

func (c *conn) Close() error {
	c.end(finish)

	return nil
}

func (c *conn) end(how func(net.Conn)) {
	c.once.Do(func() {
		close(c.done)

		c.link.mu.Lock()
		defer c.link.mu.Unlock()

		delete(c.link.conns, c)
		c.link.discard(c.Conn, how)
	})
}
