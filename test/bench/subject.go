package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/process"
)

// leaseName is the name of the lease of talos-ccm, in kube-system.
const leaseName = "cloud-controller-manager-talos"

// talosCCM is the name of the subject that the others are compared with.
const talosCCM = "talos-ccm"

// subject is a controller that is measured.
type subject struct {
	name string
	// approves is true if the controller approves CSRs.
	approves bool
	start    func(ctx context.Context, b *bed) (*running, error)
}

// running is a process of a subject.
type running struct {
	*process.Process

	port  *kube.Port // for metrics; nil if unknown
	certs string
}

// start starts a command whose output goes to a file.
func (b *bed) start(name, path string, args, environment []string) (*running, error) {
	child, err := process.Start(process.Command{Name: name, Path: path, Args: args, Env: environment, Log: filepath.Join(b.folder, name+".log"), Grace: grace})

	return &running{Process: child}, err
}

// signal sends a signal.
func (r *running) signal(signal syscall.Signal) error { return syscall.Kill(r.PID(), signal) }

// stop ends the process, and returns an error with the end of its log if it had ended before.
func (r *running) stop(signal syscall.Signal) error {
	if err := r.Ended(); err != nil {
		return fmt.Errorf("%w\n%s", err, r.LogTail())
	}

	if err := r.signal(signal); err != nil {
		return err
	}

	select {
	case <-r.Done():
		return nil
	case <-time.After(grace):
		err := r.signal(syscall.SIGKILL)
		<-r.Done()

		return errors.Join(fmt.Errorf("process %d did not exit within %s", r.PID(), grace), err)
	}
}

// resident returns the resident memory in bytes.
func (r *running) resident() (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.PID()))
	if err != nil {
		return 0, err
	}

	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	line, _, _ := strings.Cut(rest, "kB")
	kib, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)

	return kib << 10, err
}

// cpu returns the CPU time that the process has used.
func (r *running) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.PID()))
	if err != nil {
		return 0, err
	}

	_, rest, _ := strings.Cut(string(text), ") ") // the name of the command
	fields := strings.Fields(rest)

	var ticks int64

	for _, field := range fields[11:13] { // utime and stime
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("CPU time of process %d: %w", r.PID(), err)
		}

		ticks += n
	}

	return time.Duration(ticks) * time.Second / 100, nil // USER_HZ
}

// get reads a path of the secure port; nil if the subject has none.
func (r *running) get(ctx context.Context, path string, parameters ...string) ([]byte, error) {
	if r.port == nil {
		return nil, nil
	}

	client, err := discovery.NewDiscoveryClientForConfig(&rest.Config{
		Host:            "https://" + r.port.Address(),
		TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(r.certs, "cloud-controller-manager.crt")},
	})
	if err != nil {
		return nil, err
	}

	request := client.RESTClient().Get().AbsPath(path)
	for i := 0; i < len(parameters); i += 2 {
		request = request.Param(parameters[i], parameters[i+1])
	}

	return request.DoRaw(ctx)
}

// metric returns a metric; zero if it is unknown.
func (r *running) metric(ctx context.Context, name string) (float64, error) {
	metrics, err := r.get(ctx, "/metrics")
	if err != nil || metrics == nil {
		return 0, err
	}

	_, rest, found := strings.Cut(string(metrics), "\n"+name+" ")
	if !found {
		return 0, nil
	}

	line, _, _ := strings.Cut(rest, "\n")

	return strconv.ParseFloat(line, 64)
}

// awaitMachines waits until talos-ccm watches the machines.
func (r *running) awaitMachines(ctx context.Context, machines int) error {
	return wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		current, err := r.metric(ctx, `talosccm_machines{condition="Current"}`)

		return int(current) == machines, err
	})
}

// profile writes a profile to a file unless the subject has none.
func (r *running) profile(ctx context.Context, file, name string, parameters ...string) error {
	if r.port == nil {
		return nil
	}

	data, err := r.get(ctx, "/debug/pprof/"+name, parameters...)
	if err != nil {
		return fmt.Errorf("profile %s: %w", name, err)
	}

	return os.WriteFile(file, data, 0o600)
}

// product returns talos-ccm with its default flags, and with some controllers if any are named.
func product(executable string, environment ...string) subject {
	return subject{talosCCM, true, func(ctx context.Context, b *bed) (*running, error) {
		r, err := startProduct(b, executable, 0, environment...)
		if err != nil {
			return nil, err
		}

		if _, err := awaitLeader(ctx, b.client, ""); err != nil {
			return nil, errors.Join(err, r.stop(syscall.SIGTERM))
		}

		return r, nil
	}}
}

// startProduct starts talos-ccm as the extension service of a control-plane machine.
func startProduct(b *bed, executable string, machine int, environment ...string) (*running, error) {
	name := "talos-ccm-" + strconv.Itoa(machine)
	certs, run := filepath.Join(b.folder, name, "certs"), filepath.Join(b.folder, name, "run")

	if err := errors.Join(os.MkdirAll(certs, 0o700), os.MkdirAll(run, 0o700)); err != nil {
		return nil, err
	}

	port, err := kube.ReservePort()
	if err != nil {
		return nil, err
	}

	args := []string{
		"--machine-socket=" + b.machines[machine].Socket, "--run-dir=" + run, "--cert-dir=" + certs,
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", port.Number()), "--permit-port-sharing",
		"--authorization-always-allow-paths=/healthz,/livez,/readyz,/metrics,/debug/*",
	}
	// The service sets the same memory limit.
	environment = append([]string{"TMPDIR=" + b.folder, "GOMEMLIMIT=" + cmp.Or(os.Getenv("GOMEMLIMIT"), "1GiB")}, environment...)

	r, err := b.start(name, executable, args, environment)
	if err != nil {
		return nil, err
	}

	r.port, r.certs = port, certs

	return r, nil
}

// awaitLeader waits until the lease has a holder other than a former one, and returns the holder.
func awaitLeader(ctx context.Context, client kubernetes.Interface, former string) (holder string, err error) {
	err = wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		lease, err := client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, leaseName, metav1.GetOptions{})
		if err != nil {
			return false, nil //nolint:nilerr // until it exists
		}

		holder = ptr.Deref(lease.Spec.HolderIdentity, "")

		return holder != "" && holder != former, nil
	})

	return holder, err
}

// command returns a subject that runs a command with the environment variables KUBECONFIG and TALOSCONFIG.
func command(name string, args ...string) subject {
	return subject{name, false, func(_ context.Context, b *bed) (*running, error) {
		return b.start("subject", args[0], args[1:], append(os.Environ(), "KUBECONFIG="+b.kubeconfig(), "TALOSCONFIG="+b.talosconfig()))
	}}
}
