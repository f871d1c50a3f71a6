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
	// Grace exceeds the ten seconds within which talos-ccm exits.
	Grace     = 20 * time.Second
	leaseName = "cloud-controller-manager-talos"
)

// Service is an instance of talos-ccm.
type Service struct {
	// Executable is talos-ccm.
	Executable string
	// Dir is created for the files of the instance. Its base name names the process and its log.
	Dir string
	// Socket is the machine.sock of the machine.
	Socket    string
	Args, Env []string
}

// Start starts the instance.
func (s Service) Start() (*process.Process, error) {
	run, certs := filepath.Join(s.Dir, "run"), filepath.Join(s.Dir, "certs")

	if err := errors.Join(os.MkdirAll(certs, 0o700), os.MkdirAll(run, 0o700)); err != nil {
		return nil, err
	}

	return process.Start(process.Command{
		Name: filepath.Base(s.Dir), Path: s.Executable, Log: s.Dir + ".log", Grace: Grace, Env: s.Env,
		Args: append([]string{"--machine-socket=" + s.Socket, "--run-dir=" + run, "--cert-dir=" + certs, "--bind-address=127.0.0.1"}, s.Args...),
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
