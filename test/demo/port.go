package main

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// port is a free TCP port of 127.0.0.1, reserved until it is released: a socket that is bound but never listens keeps others from getting
// it, while a process that sets SO_REUSEPORT may listen on it.
type port struct {
	number int
	socket int
}

func reservePort() (port, error) {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return port{}, fmt.Errorf("reserve a port: %w", err)
	}

	number, err := bindAnyPort(socket)
	if err != nil {
		_ = unix.Close(socket)

		return port{}, fmt.Errorf("reserve a port: %w", err)
	}

	return port{number: number, socket: socket}, nil
}

func bindAnyPort(socket int) (int, error) {
	if err := unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return 0, err
	}

	if err := unix.Bind(socket, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, err
	}

	address, err := unix.Getsockname(socket)
	if err != nil {
		return 0, err
	}

	v4, ok := address.(*unix.SockaddrInet4)
	if !ok {
		return 0, fmt.Errorf("unexpected address %v", address)
	}

	return v4.Port, nil
}

func (p port) release() { _ = unix.Close(p.socket) }
