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
	"github.com/siderolabs/talos/pkg/machinery/role"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/process"
	"github.com/talos-ccm/talos-ccm/test/product"
)

// Names of subjects. The others are compared with the first.
const (
	talosCCM              = "talos-ccm"
	kubeControllerManager = "kube-controller-manager"
)

const mib = 1 << 20

// subject is a controller that is measured.
type subject struct {
	name string
	// approves is true if the controller approves CSRs, and follows if it watches machines.
	approves, follows bool
	start             func(b *bed) (*running, error)
}

// running is a process of a subject. After an error of the bed, metric and usage return zero.
type running struct {
	*process.Process

	bed    *bed
	port   *kube.Port // for metrics; nil if unknown
	starts int        // of its service, if any
}

// run starts a subject, which ends with the bed.
func (b *bed) run(s subject) *running {
	if b.process = value(b, func() (*running, error) { return s.start(b) }); b.process != nil {
		return b.process
	}

	return &running{bed: b}
}

func (r *running) signal(signal syscall.Signal) error { return syscall.Kill(r.PID(), signal) }

// stop ends the process. It returns an error if it had ended before, with the end of its log, or if it ignores SIGTERM.
func (r *running) stop() error {
	if err := r.Ended(); err != nil {
		return fmt.Errorf("%w\n%s", err, r.LogTail())
	}

	r.Stop(context.Background())

	if err := r.Ended(); strings.HasSuffix(err.Error(), "signal: killed") {
		return fmt.Errorf("%w: did not exit within %s", err, product.Grace)
	}

	return nil
}

// usage is the resource usage of a process.
type usage struct {
	resident       float64 // MiB
	cpu            float64 // seconds used so far
	sockets, files float64 // open
}

func (r *running) usage() (u usage) {
	r.bed.try(func() error {
		proc, err := procfs.NewProc(r.PID())
		if err != nil {
			return err
		}

		stat, statErr := proc.Stat()
		targets, err := proc.FileDescriptorTargets()

		for _, target := range targets {
			if strings.HasPrefix(target, "socket:") {
				u.sockets++
			} else {
				u.files++
			}
		}

		u.resident, u.cpu = float64(stat.ResidentMemory())/mib, stat.CPUTime()

		return errors.Join(statErr, err)
	})

	return u
}

// get reads a path of the secure port; nil if the subject has none.
func (r *running) get(path string) ([]byte, error) {
	if r.port == nil {
		return nil, nil
	}

	client, err := discovery.NewDiscoveryClientForConfig(&rest.Config{
		Host:            "https://" + r.port.Address(),
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}, // talos-ccm signs its certificate itself
	})
	if err != nil {
		return nil, err
	}

	return client.RESTClient().Get().RequestURI(path).DoRaw(r.bed.ctx)
}

// metric returns a metric; zero if it is unknown.
func (r *running) metric(name string) (value float64) {
	r.bed.try(func() error {
		metrics, err := r.get("/metrics")

		if _, text, found := strings.Cut(string(metrics), "\n"+name+" "); found {
			_, err = fmt.Sscan(text, &value)
		}

		return err
	})

	return value
}

// awaitMetric waits until a metric has at least a value.
func (r *running) awaitMetric(name string, least int) {
	r.bed.await(fmt.Sprintf("%s is at least %d", name, least), 500*time.Millisecond, func() bool { return int(r.metric(name)) >= least })
}

// profile writes a profile to a file of a directory, if there is one.
func (r *running) profile(dir, file, name string) error {
	data, err := r.get("/debug/pprof/" + name)
	if err != nil || data == nil || dir == "" {
		return err
	}

	return os.WriteFile(filepath.Join(dir, file), data, 0o600)
}

// heap returns the MiB in use after a garbage collection, and writes the profile of the heap.
func (r *running) heap(dir, file string) float64 {
	r.bed.try(func() error { return r.profile(dir, file, "heap?gc=1") })

	return r.metric("go_memstats_heap_alloc_bytes") / mib
}

// talosSubject returns talos-ccm with its default flags, which leads when it has started.
func talosSubject(executable string, environment ...string) subject {
	return subject{name: talosCCM, approves: true, follows: true, start: func(b *bed) (*running, error) {
		return b.startProduct(executable, 0, environment...)
	}}
}

// startProduct starts talos-ccm on a control-plane machine.
func (b *bed) startProduct(executable string, machine int, environment ...string) (*running, error) {
	port, err := kube.ReservePort()
	if err != nil {
		return nil, err
	}

	service := product.Service{
		Executable: executable, Dir: b.file("talos-ccm-" + strconv.Itoa(machine)), Socket: b.machines[machine].Socket(),
		Args: []string{
			fmt.Sprintf("--secure-port=%d", port.Number()), "--permit-port-sharing",
			"--authorization-always-allow-paths=/healthz,/livez,/readyz,/metrics,/debug/*",
		},
		// The service sets the same memory limit.
		Env: append([]string{"GOMEMLIMIT=" + cmp.Or(os.Getenv("GOMEMLIMIT"), "1GiB")}, environment...),
	}

	child, err := service.Start()
	if err != nil {
		return nil, err
	}

	return &running{Process: child, bed: b, port: port}, nil
}

// allocating is the environment of talos-ccm with pod CIDRs.
func allocating(controllers string) []string {
	return []string{
		"TALOS_CCM_CONTROLLERS=" + controllers, "TALOS_CCM_ALLOCATE_NODE_CIDRS=true", "TALOS_CCM_NODE_CIDR_MASK_SIZE_IPV6=64",
		fmt.Sprintf("TALOS_CCM_CLUSTER_CIDR=%s,%s", podCIDRs[0], podCIDRs[1]),
	}
}

// command returns the subject with a command that has the environment variables KUBECONFIG and TALOSCONFIG.
func command(s subject, args ...string) subject {
	s.start = func(b *bed) (*running, error) {
		talosconfig, err := b.talos.Talosconfig(string(role.Reader))
		if err != nil {
			return nil, err
		}

		err = errors.Join(talosconfig.Save(b.file("talosconfig")), os.WriteFile(b.file("kubeconfig"), b.cluster.Kubeconfig(), 0o600))
		if err != nil {
			return nil, err
		}

		child, err := process.Start(process.Command{
			Name: s.name, Path: args[0], Args: args[1:], Log: b.file("subject.log"), Grace: product.Grace,
			Env: append(os.Environ(), "KUBECONFIG="+b.file("kubeconfig"), "TALOSCONFIG="+b.file("talosconfig")),
		})
		if err != nil {
			return nil, err
		}

		return &running{Process: child, bed: b}, nil
	}

	return s
}
