//go:build !linux

// Package privilege drops the privileges with which Talos starts an extension service. Only Talos starts one, so on other
// operating systems, which run the other commands, its functions fail.
package privilege

import "errors"

var errNotLinux = errors.New("requires Linux")

// RaiseOOMScore returns an error: it is not supported on this platform.
func RaiseOOMScore() error { return errNotLinux }

// RaiseOpenFiles returns an error: it is not supported on this platform.
func RaiseOpenFiles() error { return errNotLinux }

// Drop returns an error: it is not supported on this platform.
func Drop(...string) error { return errNotLinux }
