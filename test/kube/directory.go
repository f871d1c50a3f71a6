package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// directory is a cluster's temporary directory.
type directory struct {
	root    string
	remover *exec.Cmd
	stdin   io.Closer
}

func newDirectory() (*directory, error) {
	root, err := os.MkdirTemp("", "talos-ccm-kube-")
	if err != nil {
		return nil, fmt.Errorf("create the cluster's directory: %w", err)
	}

	// This shell removes the directory when its standard input is closed by remove, or by the kernel if this process is
	// killed. It retries, because components may still write then.
	remover := exec.CommandContext(context.Background(), "/bin/sh", "-c", `cat; until rm -rf "$0"; do sleep 0.1; done`, root)
	remover.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C does not reach it

	stdin, err := remover.StdinPipe()
	if err == nil {
		err = remover.Start()
	}

	if err != nil {
		return nil, errors.Join(fmt.Errorf("create the cluster's directory: %w", err), os.Remove(root))
	}

	return &directory{root, remover, stdin}, nil
}

func (d *directory) path(name string) string { return filepath.Join(d.root, name) }

// write creates a file that only this user can read.
func (d *directory) write(name string, content []byte) error {
	return os.WriteFile(d.path(name), content, 0o600)
}

// remove deletes the directory. It does nothing for a nil or removed directory.
func (d *directory) remove() error {
	if d == nil || d.remover.ProcessState != nil {
		return nil
	}

	_ = d.stdin.Close()

	if err := d.remover.Wait(); err != nil {
		return fmt.Errorf("remove the cluster's directory: %w", err)
	}

	return nil
}
