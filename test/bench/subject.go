package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
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
	cmd   *exec.Cmd
	done  chan struct{} // closed after the process has ended and err is set
	err   error
	port  *kube.Port // for metrics; nil if unknown
	certs string
	log   string
}

// startProcess starts a command whose output goes to a file.
func startProcess(b *bed, name string, cmd *exec.Cmd) (*running, error) {
	r := &running{cmd: cmd, done: make(chan struct{}), log: filepath.Join(b.folder, name+".log")}

	log, err := os.Create(r.log)
	if err != nil {
		return nil, err
	}

	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = childAttributes()
	err = errors.Join(cmd.Start(), log.Close()) // the child has its own descriptor

	go func() {
		r.err = cmd.Wait()
		close(r.done)
	}()

	return r, err
}

// stop ends the process, and returns an error with the end of its log if it had ended before.
func (r *running) stop(signal syscall.Signal) error {
	select {
	case <-r.done:
		log, readErr := os.ReadFile(r.log)

		return errors.Join(fmt.Errorf("exited: %w\n%s", r.err, log[max(0, len(log)-4000):]), readErr)
	default:
	}

	if err := r.cmd.Process.Signal(signal); err != nil {
		return err
	}

	select {
	case <-r.done:
		return nil
	case <-time.After(grace):
		err := r.cmd.Process.Kill()
		<-r.done

		return errors.Join(fmt.Errorf("process %d did not exit within %s", r.cmd.Process.Pid, grace), err)
	}
}

// resident returns the resident memory in bytes.
func (r *running) resident() (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
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
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}

	_, rest, _ := strings.Cut(string(text), ") ") // the name of the command
	fields := strings.Fields(rest)

	var ticks int64

	for _, field := range fields[11:13] { // utime and stime
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("CPU time of process %d: %w", r.cmd.Process.Pid, err)
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

	cmd := exec.Command(executable,
		"--machine-socket="+b.machines[machine].Socket, "--run-dir="+run, "--cert-dir="+certs,
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", port.Number()), "--permit-port-sharing",
		"--authorization-always-allow-paths=/healthz,/livez,/readyz,/metrics,/debug/*",
	)
	// The memory limit is that of the service.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + b.folder, "GOMEMLIMIT=" + cmp.Or(os.Getenv("GOMEMLIMIT"), "1GiB")}, environment...)

	r, err := startProcess(b, name, cmd)
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
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+b.kubeconfig(), "TALOSCONFIG="+b.talosconfig())

		return startProcess(b, "subject", cmd)
	}}
}
