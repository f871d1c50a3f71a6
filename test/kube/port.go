package kube

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Port is a free TCP port of 127.0.0.1 that stays ours until it is released: a socket that is bound but never listens
// keeps others from getting it, while a process that sets SO_REUSEPORT (--permit-port-sharing) may listen on it. So no
// other process can take a port between its choice and its use, nor while the process that used it is stopped.
type Port struct {
	number int
	socket int
}

// ReservePort reserves a free port.
func ReservePort() (*Port, error) {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("reserve a port: %w", err)
	}

	p := &Port{socket: socket}
	if err := p.bind(); err != nil {
		p.Release()

		return nil, fmt.Errorf("reserve a port: %w", err)
	}

	return p, nil
}

func (p *Port) bind() error {
	if err := unix.SetsockoptInt(p.socket, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return err
	}

	if err := unix.Bind(p.socket, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return err
	}

	address, err := unix.Getsockname(p.socket)
	if v4, ok := address.(*unix.SockaddrInet4); ok {
		p.number = v4.Port
	}

	return err
}

// Release gives the port back. It does nothing for a nil or released port.
func (p *Port) Release() {
	if p != nil && p.socket >= 0 {
		_ = unix.Close(p.socket)
		p.socket = -1
	}
}

// Number is the port's number.
func (p *Port) Number() int { return p.number }

// Address is host and port, as a URL has them.
func (p *Port) Address() string { return fmt.Sprintf("127.0.0.1:%d", p.number) }
