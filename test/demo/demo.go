package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/process"
	"github.com/talos-ccm/talos-ccm/test/product"
)

const (
	// parallel is the number of Nodes that register at the same time.
	parallel = 16

	// baseLimit and limitPerNode bound the time from the registration of the first Node.
	baseLimit    = 6 * time.Minute
	limitPerNode = 100 * time.Millisecond

	// poll is the interval of checks of a condition.
	poll = 50 * time.Millisecond

	// labelCapacity is set by a rule of the document.
	labelCapacity = "example.org/capacity"
)

// document is the document that the operator adds to the machine configuration of the control plane.
//
//go:embed document.yaml
var document []byte

// podCIDR is large enough for the largest fleet; the default of Talos is not.
var podCIDR = netip.MustParsePrefix("10.192.0.0/11")

// demo is one run.
type demo struct {
	members    []*member
	executable string // of talos-ccm
	keep       bool   // until interrupted

	dir         string // in the directory of the cluster, which removes it
	cluster     *kube.Cluster
	client      kubernetes.Interface
	talos       *talostest.Cluster
	environment []string         // of talos-ccm
	product     *process.Process // talos-ccm
	watcher     *watcher
	fail        func(error) // ends the demo, unless the error is nil
}

func printf(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// run runs the demo, and always stops its processes and removes its files.
func (d *demo) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, d.stop()) }()

	printf("talos-ccm demo: %d simulated Talos machines, a real Kubernetes control plane and a real talos-ccm\n", len(d.members))

	for _, step := range []func(context.Context) error{d.startKubernetes, d.startMachines, d.startProduct, d.show, d.hold} {
		if err := step(ctx); err != nil {
			if ctx.Err() == nil && d.product != nil {
				err = fmt.Errorf("%w\n%s", err, d.product.LogTail())
			}

			return err
		}
	}

	return nil
}

// stop stops clients before their servers.
func (d *demo) stop() error {
	d.product.Stop(context.Background())

	if d.talos != nil {
		d.talos.Close()
	}

	if d.cluster != nil {
		return d.cluster.Stop()
	}

	return nil
}

func (d *demo) startKubernetes(ctx context.Context) (err error) {
	options := kube.Options{Progress: os.Stdout}
	// By default it makes 20 requests per second, which would delay certificates.
	options.ControllerManager.Flags = []string{"--kube-api-qps=1000", "--kube-api-burst=1000"}

	if d.cluster, err = kube.Start(ctx, options); err != nil {
		return err
	}

	if d.client, err = kubernetes.NewForConfig(d.cluster.Config()); err != nil {
		return fmt.Errorf("create client: %w", err)
	}

	d.dir = filepath.Join(d.cluster.LogDir(), "demo")

	return os.Mkdir(d.dir, 0o700)
}

func (d *demo) startMachines(ctx context.Context) (err error) {
	if d.talos, err = talostest.New(talostest.Options{Name: "demo", Dir: d.dir, PodCIDRs: []netip.Prefix{podCIDR}}); err != nil {
		return err
	}

	for i, m := range d.members {
		if err := errors.Join(ctx.Err(), m.boot(ctx, d.talos, i, d.cluster.Kubeconfig())); err != nil {
			return err
		}
	}

	printf("%d Talos machines up", len(d.members))

	controlPlane := d.members[controlPlaneIndex]
	printf("Machine configuration document of %s:\n\n  %s\n", controlPlane.name, strings.ReplaceAll(strings.TrimSpace(string(document)), "\n", "\n  "))

	return d.configure(ctx, controlPlane)
}

// configure publishes the document as Talos does.
func (d *demo) configure(ctx context.Context, m *member) error {
	loaded, err := configloader.NewFromBytes(document)
	if err != nil {
		return fmt.Errorf("read document: %w", err)
	}

	service := loaded.ExtensionServiceConfigs()[0]
	d.environment = service.Environment()
	spec := runtime.ExtensionServiceConfigSpec{Environment: d.environment}

	for _, file := range service.ConfigFiles() {
		spec.Files = append(spec.Files, runtime.ExtensionServiceConfigFile{Content: file.Content(), MountPath: file.MountPath()})
	}

	return m.machine.SetExtensionServiceDocument(ctx, service.Name(), spec)
}

// startProduct starts talos-ccm as Talos starts the extension service after it has loaded the document.
func (d *demo) startProduct(ctx context.Context) (err error) {
	service := product.Service{
		Executable: d.executable, Dir: filepath.Join(d.dir, "talos-ccm"), Socket: d.members[controlPlaneIndex].machine.Socket(),
		// The process exits when it loses its lease. Load of the computer must not cause this.
		Args: []string{"--secure-port=0", "-v=2", "--leader-elect-lease-duration=600s", "--leader-elect-renew-deadline=500s"},
		// In another environment, talos-ccm would replace its process, and the kernel would no longer kill it when this
		// process ends.
		Env: d.environment,
	}
	began := time.Now()

	if d.product, err = service.Start(); err != nil {
		return err
	}

	printf("Log of talos-ccm, removed when the demo ends: %s", d.product.Log)

	err = d.product.WaitReady(ctx, func(ctx context.Context) error {
		_, err := product.Leader(ctx, d.client)

		return err
	})
	if err != nil {
		return err
	}

	printf("talos-ccm (process %d) became leader after %s", d.product.PID(), since(began))

	return nil
}

// show registers the Nodes and shows what talos-ccm does. It fails if talos-ccm exits.
func (d *demo) show(ctx context.Context) error {
	limit := baseLimit + time.Duration(len(d.members))*limitPerNode

	ctx, stop := context.WithTimeoutCause(ctx, limit, fmt.Errorf("timed out after %s", limit))
	defer stop()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	d.fail = func(err error) {
		if err != nil {
			cancel(err)
		}
	}

	go func() {
		select {
		case <-d.product.Done():
			d.fail(d.product.Ended())
		case <-ctx.Done():
		}
	}()

	ask := func(nodename, csr string, subjects []string) {
		_, err := d.cluster.RequestServingCertificate(ctx, nodename, csr, subjects...)
		d.fail(err)
	}

	var err error
	if d.watcher, err = watch(ctx, d.client, d.members, ask); err != nil {
		return err
	}

	for _, step := range []func(context.Context) error{d.initialize, d.change, d.requestForeignName, d.expose, d.reset} {
		if err == nil {
			err = step(ctx)
		}
	}

	// After an interruption, the table is not printed.
	if !errors.Is(context.Cause(ctx), context.Canceled) {
		printTable(d.watcher.list(d.members))
	}

	return errors.Join(err, context.Cause(ctx))
}

// hold prints how to use the cluster and keeps it until an interruption.
func (d *demo) hold(ctx context.Context) error {
	if !d.keep {
		return nil
	}

	if err := d.settle(ctx); err != nil {
		return err
	}

	talosconfig, err := d.talos.Talosconfig(string(role.Reader))
	if err != nil {
		return fmt.Errorf("create talosconfig: %w", err)
	}

	file := func(name string) string { return filepath.Join(d.dir, name) }

	err = errors.Join(
		os.WriteFile(file("kubeconfig"), d.cluster.Kubeconfig(), 0o600), talosconfig.Save(file("talosconfig")),
		os.WriteFile(file("document.yaml"), document, 0o600),
	)
	if err != nil {
		return fmt.Errorf("write configuration of clients: %w", err)
	}

	printf("\nThe cluster runs until you press Ctrl-C:\n\n  export KUBECONFIG=%s TALOSCONFIG=%s\n  kubectl get nodes", file("kubeconfig"), file("talosconfig"))
	printf("  %s diff --config %s", d.executable, file("document.yaml"))
	printf("  %s render --config %s --node %s", d.executable, file("document.yaml"), d.members[controlPlaneIndex].name)

	select {
	case <-ctx.Done():
		return nil
	case <-d.product.Done():
		return d.product.Ended()
	}
}

// await returns when the condition holds.
func await(ctx context.Context, what string, condition func() bool) error {
	err := wait.PollUntilContextCancel(ctx, poll, true, func(context.Context) (bool, error) { return condition(), nil })
	if err != nil {
		return fmt.Errorf("wait for %s: %w", what, err)
	}

	return nil
}

// since returns the time since began, in milliseconds.
func since(began time.Time) time.Duration { return time.Since(began).Round(time.Millisecond) }
