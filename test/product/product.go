// Package product starts talos-ccm as the extension service of a simulated control-plane machine.
package product

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/test/process"
)

const (
	// grace is more than the ten seconds in which talos-ccm exits.
	grace     = 20 * time.Second
	leaseName = "cloud-controller-manager-talos"
)

// Service is an instance of talos-ccm.
type Service struct {
	// Executable is talos-ccm.
	Executable string
	// Folder is made for the files of the instance. Its name is the name of the process and of its log beside it.
	Folder string
	// Socket is the machine.sock of the machine.
	Socket    string
	Args, Env []string
}

// Certs is the folder with the certificate of the secure port.
func (s Service) Certs() string { return filepath.Join(s.Folder, "certs") }

// Start starts the instance.
func (s Service) Start() (*process.Process, error) {
	run := filepath.Join(s.Folder, "run")

	if err := errors.Join(os.MkdirAll(s.Certs(), 0o700), os.MkdirAll(run, 0o700)); err != nil {
		return nil, err
	}

	return process.Start(process.Command{
		Name: filepath.Base(s.Folder), Path: s.Executable, Log: s.Folder + ".log", Grace: grace, Env: s.Env,
		Args: append([]string{"--machine-socket=" + s.Socket, "--run-dir=" + run, "--cert-dir=" + s.Certs(), "--bind-address=127.0.0.1"}, s.Args...),
	})
}

// Leader returns the holder of the lease of talos-ccm.
func Leader(ctx context.Context, client kubernetes.Interface) (string, error) {
	lease, err := client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, leaseName, metav1.GetOptions{})
	if err != nil {
		return "", err
	}

	holder := ptr.Deref(lease.Spec.HolderIdentity, "")
	if holder == "" {
		return "", errors.New("lease has no holder")
	}

	return holder, nil
}
