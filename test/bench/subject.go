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

	"github.com/prometheus/procfs"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/process"
	"github.com/talos-ccm/talos-ccm/test/product"
)

// talosCCM is the name of the subject that the others are compared with.
const talosCCM = "talos-ccm"

// grace is how long a process has to exit after SIGTERM.
const grace = 20 * time.Second

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

// usage is what a process needs of the machine.
type usage struct {
	resident       int           // bytes
	cpu            time.Duration // used so far
	sockets, files int           // open
}

func (r *running) usage() (u usage, err error) {
	proc, err := procfs.NewProc(r.PID())
	if err != nil {
		return u, err
	}

	stat, statErr := proc.Stat()
	targets, err := proc.FileDescriptorTargets()

	for _, target := range targets {
		if strings.HasPrefix(target, "socket:") {
			u.sockets++
		}
	}

	u.resident, u.cpu, u.files = stat.ResidentMemory(), time.Duration(stat.CPUTime()*float64(time.Second)), len(targets)-u.sockets

	return u, errors.Join(statErr, err)
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

// awaitMetric waits until a metric has a value, and returns how long that took.
func (r *running) awaitMetric(ctx context.Context, name string, wanted func(float64) bool) (time.Duration, error) {
	start := time.Now()

	err := wait.PollUntilContextCancel(ctx, 500*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		value, err := r.metric(ctx, name)

		return wanted(value), err
	})
	if err != nil {
		err = fmt.Errorf("wait for metric %s: %w", name, err)
	}

	return time.Since(start), err
}

// profile writes a profile to a file of a folder. Without a name of a folder it is discarded: the heap profile makes the
// subject collect garbage.
func (r *running) profile(ctx context.Context, folder, file, name string, parameters ...string) error {
	data, err := r.get(ctx, "/debug/pprof/"+name, parameters...)
	if err != nil {
		return fmt.Errorf("profile %s: %w", name, err)
	}

	if data == nil || folder == "" {
		return nil
	}

	return os.WriteFile(filepath.Join(folder, file), data, 0o600)
}

// talosSubject returns talos-ccm with its default flags, and with some controllers if any are named.
func talosSubject(executable string, environment ...string) subject {
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

// startProduct starts talos-ccm on a control-plane machine.
func startProduct(b *bed, executable string, machine int, environment ...string) (*running, error) {
	port, err := kube.ReservePort()
	if err != nil {
		return nil, err
	}

	service := product.Service{
		Executable: executable, Folder: filepath.Join(b.folder, "talos-ccm-"+strconv.Itoa(machine)), Socket: b.machines[machine].Socket,
		Args: []string{
			fmt.Sprintf("--secure-port=%d", port.Number()), "--permit-port-sharing",
			"--authorization-always-allow-paths=/healthz,/livez,/readyz,/metrics,/debug/*",
		},
		// The service sets the same memory limit.
		Env: append([]string{"TMPDIR=" + b.folder, "GOMEMLIMIT=" + cmp.Or(os.Getenv("GOMEMLIMIT"), "1GiB")}, environment...),
	}

	child, err := service.Start()
	if err != nil {
		return nil, err
	}

	return &running{child, port, service.Certs()}, nil
}

// allocating is the environment of talos-ccm with pod CIDRs.
func allocating(controllers string) []string {
	return []string{
		"TALOS_CCM_CONTROLLERS=" + controllers, "TALOS_CCM_ALLOCATE_NODE_CIDRS=true", "TALOS_CCM_NODE_CIDR_MASK_SIZE_IPV6=64",
		fmt.Sprintf("TALOS_CCM_CLUSTER_CIDR=%s,%s", podCIDRs[0], podCIDRs[1]),
	}
}

// awaitLeader waits until the lease has a holder other than a former one, and returns the holder.
func awaitLeader(ctx context.Context, client kubernetes.Interface, former string) (holder string, err error) {
	err = wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var err error

		holder, err = product.Leader(ctx, client)

		return err == nil && holder != former, nil
	})

	return holder, err
}

// command returns a subject that runs a command with the environment variables KUBECONFIG and TALOSCONFIG.
func command(name string, approves bool, args ...string) subject {
	return subject{name, approves, func(_ context.Context, b *bed) (*running, error) {
		child, err := process.Start(process.Command{
			Name: name, Path: args[0], Args: args[1:], Log: filepath.Join(b.folder, "subject.log"), Grace: grace,
			Env: append(os.Environ(), "KUBECONFIG="+b.kubeconfig(), "TALOSCONFIG="+b.talosconfig()),
		})

		return &running{Process: child}, err
	}}
}
