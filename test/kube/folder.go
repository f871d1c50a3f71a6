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

// folder is a cluster's temporary folder.
type folder struct {
	root, logs string

	remover *exec.Cmd
	stdin   io.Closer
}

// newFolder makes the folder. An empty logDir means a folder inside.
func newFolder(logDir string) (*folder, error) {
	root, err := os.MkdirTemp("", "talos-ccm-kube-")
	if err != nil {
		return nil, fmt.Errorf("make the cluster's folder: %w", err)
	}

	f := &folder{root: root, logs: logDir}
	if f.logs == "" {
		f.logs = f.path("logs")
	}

	// This shell removes the folder when its standard input is closed: by remove, or by the kernel when this process was
	// killed. Then, the components may still write.
	f.remover = exec.CommandContext(context.Background(), "/bin/sh", "-c", `cat; until rm -rf "$0"; do sleep 0.1; done`, root)
	f.remover.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C does not reach it

	if f.stdin, err = f.remover.StdinPipe(); err == nil {
		err = f.remover.Start()
	}

	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the cluster's folder: %w", err), os.Remove(root))
	}

	return f, os.MkdirAll(f.logs, 0o700)
}

func (f *folder) path(name string) string { return filepath.Join(f.root, name) }

// remove deletes the folder. It does nothing for a nil or removed folder.
func (f *folder) remove() error {
	if f == nil || f.remover.ProcessState != nil {
		return nil
	}

	_ = f.stdin.Close()

	if err := f.remover.Wait(); err != nil {
		return fmt.Errorf("remove the cluster's folder: %w", err)
	}

	return nil
}
