package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	command = "github.com/talos-ccm/talos-ccm/cmd/talos-ccm"

	// leaseName is that of talos-ccm's election.
	leaseName = "cloud-controller-manager-talos"

	buildGrace   = 10 * time.Second
	productGrace = 12 * time.Second // it promises to end within ten
	logTailLines = 40
)

// build is one build of talos-ccm.
type build struct {
	folder string
	began  time.Time
	output bytes.Buffer
}

// executable is where the build goes.
func (b *build) executable() string { return filepath.Join(b.folder, "talos-ccm") }

// run compiles the source that this command was compiled from.
func (b *build) run(ctx context.Context) error {
	prepare := func(cmd *exec.Cmd) {
		cmd.Dir = sourceFolder()
		cmd.Stdout, cmd.Stderr = &b.output, &b.output
		// A go command that is interrupted early leaves its temporary files; here they go with all others.
		cmd.Env = append(os.Environ(), "GOTMPDIR="+b.folder)
	}

	// Compiled as this command was, so that what both have in common is compiled once; linked without debug information, which takes time.
	p, err := startProcess(ctx, ending{signal: syscall.SIGINT, grace: buildGrace}, prepare,
		"go", "build", "-ldflags=-s -w", "-o", b.executable(), command)
	if err != nil {
		return fmt.Errorf("build talos-ccm: %w", err)
	}

	<-p.done

	if p.err != nil {
		return fmt.Errorf("build talos-ccm: %w\n%s", p.err, b.output.String())
	}

	return nil
}

// sourceFolder is in the module, unless this command was built with -trimpath: then it must run there.
func sourceFolder() string {
	_, file, _, known := runtime.Caller(0)
	if !known || !filepath.IsAbs(file) {
		return "."
	}

	return filepath.Dir(file)
}

func (b *build) progress(s *screen) []string {
	if !s.terminal {
		return []string{"Building talos-ccm"} // once: a log has no use for a line per second
	}

	return []string{fmt.Sprintf("Building talos-ccm: %.0f s", time.Since(b.began).Seconds())}
}

// product is the running talos-ccm.
type product struct {
	process *process
	cancel  context.CancelFunc // asks it to end
	log     string
	port    *kube.Port
	certs   string
}

// startProduct starts an executable of talos-ccm as the extension service of the machine whose machine.sock is given, with the environment of
// its document, as Talos does once it has loaded that. Its files go to folder. It runs until it is stopped.
func startProduct(ctx context.Context, executable, socket string, environment []string, folder string) (*product, error) {
	p := &product{log: filepath.Join(folder, "talos-ccm.log"), certs: filepath.Join(folder, "serving")}
	run := filepath.Join(folder, "run")

	for _, dir := range []string{run, p.certs} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, fmt.Errorf("prepare talos-ccm: %w", err)
		}
	}

	log, err := os.Create(p.log)
	if err != nil {
		return nil, fmt.Errorf("prepare talos-ccm: %w", err)
	}
	defer log.Close() //nolint:errcheck // the child has its own descriptor

	if p.port, err = kube.ReservePort(); err != nil {
		return nil, err
	}

	prepare := func(cmd *exec.Cmd) {
		cmd.Stdout, cmd.Stderr = log, log
		// As on Talos, it gets no settings from outside: neither ours, whose names begin as its own do, nor a proxy. With another environment
		// than the document's it would replace itself, and the kernel would no longer kill it when this process dies.
		cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + folder}, environment...)
	}

	ctx, p.cancel = context.WithCancel(context.WithoutCancel(ctx))

	p.process, err = startProcess(ctx, ending{signal: syscall.SIGTERM, grace: productGrace}, prepare, executable,
		"--machine-socket="+socket,
		"--run-dir="+run,
		"--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", p.port.Number()),
		"--permit-port-sharing",
		"--cert-dir="+p.certs,
		"--authorization-always-allow-paths=/healthz,/livez,/readyz,/metrics",
		// A lease that is lost ends the process; a computer that has much else to do must not be what loses it.
		"--leader-elect-lease-duration=600s",
		"--leader-elect-renew-deadline=500s",
		"-v=2",
	)
	if err != nil {
		p.cancel()
		p.port.Release()

		return nil, err
	}

	return p, nil
}

// errProductEnded is of a talos-ccm that ended without having been asked to.
var errProductEnded = errors.New("talos-ccm exited unexpectedly")

// awaitLeading returns when talos-ccm holds its lease: from then on its controllers run.
func (p *product) awaitLeading(ctx context.Context, client kubernetes.Interface) error {
	err := wait.PollUntilContextCancel(ctx, poll, true, func(ctx context.Context) (bool, error) {
		if err := p.ended(); err != nil {
			return false, err
		}

		// Whatever the error is, the lease has not been seen.
		lease, err := client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, leaseName, metav1.GetOptions{})

		return err == nil && ptr.Deref(lease.Spec.HolderIdentity, "") != "", nil
	})
	if err != nil {
		return fmt.Errorf("wait for talos-ccm to lead: %w", err)
	}

	return nil
}

// ended is an error if talos-ccm no longer runs.
func (p *product) ended() error {
	select {
	case <-p.process.done:
		return errors.Join(errProductEnded, p.process.err)
	default:
		return nil
	}
}

// metrics asks talos-ccm for its metrics, and trusts the certificate that it has made for itself.
func (p *product) metrics(ctx context.Context) (samples, error) {
	client, err := discovery.NewDiscoveryClientForConfig(&rest.Config{
		Host:            "https://" + p.port.Address(),
		TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(p.certs, "cloud-controller-manager.crt")},
	})
	if err != nil {
		return "", fmt.Errorf("read talos-ccm's metrics: %w", err)
	}

	body, err := client.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return "", fmt.Errorf("read talos-ccm's metrics: %w", err)
	}

	return samples(body), nil
}

// errProductKilled is of a talos-ccm that did not end in time after SIGTERM.
var errProductKilled = fmt.Errorf("talos-ccm did not exit within %s of SIGTERM and was killed", productGrace)

// stop ends talos-ccm as Talos does. A nil product is fine.
func (p *product) stop() error {
	if p == nil {
		return nil
	}

	defer p.port.Release()
	defer p.cancel()

	if p.ended() != nil {
		return nil // already reported where it was needed
	}

	p.cancel()
	<-p.process.done

	if p.process.killed() {
		return errProductKilled
	}

	return nil
}
