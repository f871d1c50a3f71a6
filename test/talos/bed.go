package talos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/api/machine"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// The names of the machines, which are the names of their Nodes.
const (
	ControlPlaneName = "talos-cp"
	WorkerName       = "talos-wk"
)

const (
	apiServerAddress = "10.77.0.2:6443"
	folderMessage    = "Talos test bed: folder"
)

// Options configures a bed.
type Options struct {
	// Extension is the folder of an unpacked extension image, which is installed on every machine: manifest.yaml, and rootfs with a service
	// specification in usr/local/etc/containers and its files below usr/local/lib/containers.
	Extension string
	// ControlPlanePatches are applied to the configuration of the control plane: YAML in the form of talosctl's strategic merge
	// patches, also with several documents.
	ControlPlanePatches []string
	// LogDir keeps the consoles of the machines. Empty: they are removed with the bed.
	LogDir string
	// Progress receives progress messages; nil discards them.
	Progress io.Writer
}

// Phase is a part of bringing up a bed, and the time it took.
type Phase struct {
	Name string
	Took time.Duration
}

// Bed is a cluster of two Talos machines.
type Bed struct {
	// ControlPlane and Worker are the machines.
	ControlPlane, Worker *Machine

	options    Options
	source     source
	id         string
	dir        string
	owner      *os.File
	assets     *assets
	bridge     *bridge
	registry   *registry
	configs    configs
	images     []image
	machines   []*Machine
	phases     []Phase
	kubeconfig []byte
}

// Up builds what is not in the cache, boots both machines, and returns when both Nodes are registered. The context ends the
// attempt, not the bed. The caller calls Down; Up itself does when it fails.
func Up(ctx context.Context, options Options) (*Bed, error) {
	if options.Progress == nil {
		options.Progress = io.Discard
	}

	b := &Bed{options: options}

	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"prepare", b.prepare},
		{"build", b.build},
		{"set up network, images and machines", b.assemble},
		{"boot machines", b.boot},
		{"bootstrap etcd", b.bootstrap},
		{"start Kubernetes", b.reachKubernetes},
		{"register Nodes", b.registerNodes},
	} {
		if err := b.phase(ctx, step.name, step.do); err != nil {
			return nil, errors.Join(fmt.Errorf("bring up Talos test bed: %s: %w", step.name, err), b.Down())
		}
	}

	return b, nil
}

func (b *Bed) phase(ctx context.Context, name string, do func(context.Context) error) error {
	fmt.Fprintf(b.options.Progress, "Talos test bed: %s ...\n", name)

	start := time.Now()
	err := do(ctx)
	took := time.Since(start)

	b.phases = append(b.phases, Phase{Name: name, Took: took})

	if err == nil {
		fmt.Fprintf(b.options.Progress, "Talos test bed: %s: %.1f s\n", name, took.Seconds())
	}

	return err
}

// ID is in the name of everything that the bed makes outside of its own namespaces: its folder, its cgroups, the command lines
// of its processes.
func (b *Bed) ID() string { return b.id }

// Dir is the bed's folder.
func (b *Bed) Dir() string { return b.dir }

// Phases returns the duration of each step of Up.
func (b *Bed) Phases() []Phase { return b.phases }

// Release returns the Talos and Kubernetes versions of the machines.
func (b *Bed) Release() Release { return b.source.Release }

// Machines are all machines of the bed.
func (b *Bed) Machines() []*Machine { return b.machines }

// Kubeconfig returns an admin kubeconfig. It works only from the network of the bridge.
func (b *Bed) Kubeconfig() []byte { return b.kubeconfig }

// DialContext connects from the bridge, which is where a neighbor of the machines would be. Addresses are literals.
func (b *Bed) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return b.bridge.Dial(ctx, network, address)
}

// RESTConfig returns an admin configuration that dials from the bridge, so it works in this process.
func (b *Bed) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(b.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}

	config.Dial = b.DialContext
	config.QPS = -1

	return config, nil
}

// Kubernetes is a client for RESTConfig.
func (b *Bed) Kubernetes() (kubernetes.Interface, error) {
	config, err := b.RESTConfig()
	if err != nil {
		return nil, err
	}

	return kubernetes.NewForConfig(config)
}

func (b *Bed) prepare(ctx context.Context) error {
	var err error
	if b.source, err = selectSource(); err != nil {
		return err
	}

	if err := requireRoot(); err != nil {
		return err
	}

	if err := install(ctx, b.options.Progress, runRequirements()); err != nil {
		return err
	}

	base, err := builder.CacheDir("beds")
	if err != nil {
		return err
	}

	if err := sweep(ctx, base); err != nil {
		return err
	}

	if b.dir, b.owner, err = claim(base); err != nil {
		return err
	}

	b.id = filepath.Base(b.dir)
	fmt.Fprintln(b.options.Progress, folderMessage, b.dir)

	return nil
}

func (b *Bed) build(ctx context.Context) error {
	var err error
	if b.assets, err = prepare(ctx, b.source, b.options.Progress); err != nil {
		return err
	}

	components, err := kube.AssetsOf(ctx, b.source.Kubernetes, b.options.Progress)
	if err != nil {
		return fmt.Errorf("build Kubernetes: %w", err)
	}

	if b.configs, err = generateConfigs(b.source.Release, b.options); err != nil {
		return err
	}

	if err := b.configs.talosconfig.Save(b.talosconfig()); err != nil {
		return fmt.Errorf("write talosconfig: %w", err)
	}

	b.images, err = componentImages(imageReferences(b.configs.controlPlane), components, b.assets, b.dir)

	return err
}

func (b *Bed) assemble(ctx context.Context) error {
	var err error
	if b.bridge, err = newBridge(ctx); err != nil {
		return err
	}

	listener, err := b.bridge.Listen(ctx, registryAddress.String())
	if err != nil {
		return err
	}

	b.registry = serveRegistry(listener, b.images)

	controlPlane, err := userData(b.configs.controlPlane)
	if err != nil {
		return err
	}

	worker, err := userData(b.configs.worker)
	if err != nil {
		return err
	}

	if b.ControlPlane, err = b.newMachine(ctx, b.plan(ControlPlaneName, controlAddress, controlPlane)); err != nil {
		return fmt.Errorf("build machine %s: %w", ControlPlaneName, err)
	}

	if b.Worker, err = b.newMachine(ctx, b.plan(WorkerName, workerAddress, worker)); err != nil {
		return fmt.Errorf("build machine %s: %w", WorkerName, err)
	}

	return nil
}

func (b *Bed) plan(name string, address netip.Addr, config string) machinePlan {
	return machinePlan{
		name:      name,
		address:   address,
		userData:  config,
		extension: b.options.Extension,
		limits:    limits{noOOMScore: !holds(unix.CAP_SYS_RESOURCE)},
	}
}

// boot switches the machines on and waits until the control plane's apid answers.
func (b *Bed) boot(ctx context.Context) error {
	for _, m := range b.machines {
		if err := m.PowerOn(ctx); err != nil {
			return err
		}
	}

	return b.ControlPlane.eventually(ctx, "wait for apid", func(ctx context.Context, c *client.Client) error {
		_, err := c.Version(ctx)

		return err
	})
}

func (b *Bed) bootstrap(ctx context.Context) error {
	return b.ControlPlane.eventually(ctx, "bootstrap etcd", func(ctx context.Context, c *client.Client) error {
		err := c.Bootstrap(ctx, &machine.BootstrapRequest{})
		if client.StatusCode(err) == codes.AlreadyExists {
			return nil
		}

		return err
	})
}

func (b *Bed) reachKubernetes(ctx context.Context) error {
	err := b.ControlPlane.eventually(ctx, "get kubeconfig", func(ctx context.Context, c *client.Client) error {
		var err error

		b.kubeconfig, err = c.Kubeconfig(ctx)

		return err
	})
	if err != nil {
		return err
	}

	kubernetes, err := b.Kubernetes()
	if err != nil {
		return err
	}

	return eventually(ctx, "wait for the API server", func(ctx context.Context) error {
		return kubernetes.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

func (b *Bed) registerNodes(ctx context.Context) error {
	kubernetes, err := b.Kubernetes()
	if err != nil {
		return err
	}

	for _, m := range b.machines {
		if err := eventually(ctx, "wait for Node "+m.name, func(ctx context.Context) error {
			_, err := kubernetes.CoreV1().Nodes().Get(ctx, m.name, metav1.GetOptions{})

			return err
		}); err != nil {
			return err
		}
	}

	return nil
}

// eventually calls apid until it agrees.
func (m *Machine) eventually(ctx context.Context, attempt string, call func(context.Context, *client.Client) error) error {
	c, err := m.TalosClient(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing is lost

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	// A machine that has gone down will never answer.
	go func() {
		if m.chassis.wait(ctx, func(p power) bool { return p.pid == 0 }) == nil {
			cancel(m.downError())
		}
	}()

	return eventually(ctx, attempt, func(ctx context.Context) error { return call(ctx, c) })
}

func (m *Machine) downError() error {
	const tail = 20

	lines := m.console.Lines(m.console.PowerOn())

	var said strings.Builder
	for _, line := range lines[max(0, len(lines)-tail):] {
		fmt.Fprintf(&said, "\n\t%s", line)
	}

	return fmt.Errorf("machine %s has gone down, its console ends with:%s", m.name, said.String())
}

// eventually repeats try until it succeeds or ctx ends; the error then contains the last one.
func eventually(ctx context.Context, attempt string, try func(context.Context) error) error {
	const patience = 10 * time.Second

	var last error

	err := wait.PollUntilContextCancel(ctx, 5*pollInterval, true, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()

		last = try(ctx)

		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w (last answer: %w)", attempt, context.Cause(ctx), last)
	}

	return nil
}

// Down removes the bed: machines, networks, cgroups, files. It can be called more than once.
func (b *Bed) Down() error {
	var errs []error

	for _, m := range b.machines {
		errs = append(errs, m.close(context.Background()))
	}

	b.machines = nil

	if b.registry != nil {
		errs = append(errs, b.registry.close())
		b.registry = nil
	}

	if b.bridge != nil {
		errs = append(errs, b.bridge.Close())
		b.bridge = nil
	}

	if b.owner != nil {
		errs = append(errs, os.RemoveAll(b.dir), b.owner.Close())
		b.owner = nil
	}

	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take down Talos test bed: %w", err)
	}

	return nil
}
