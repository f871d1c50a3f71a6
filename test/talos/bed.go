package talos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/api/machine"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/config/bundle"
	"github.com/siderolabs/talos/pkg/machinery/config/configpatcher"
	machinetype "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/netns"
)

// bedPrefix is the prefix of the names of bed directories.
const bedPrefix = "bed-"

// dialTimeout limits the attempt to connect to one of several API servers.
const dialTimeout = time.Second

// ErrNotRoot is returned by Up if the process does not run as root.
var ErrNotRoot = errors.New("the Talos test bed creates namespaces, mounts and cgroups: it must run as root (for instance with sudo)")

// Options configures a bed.
type Options struct {
	// Extension is the absolute path of an unpacked extension image, which is installed on every machine. It contains
	// manifest.yaml, and rootfs with a service specification in usr/local/etc/containers and its files in
	// usr/local/lib/containers. If it is empty, no extension is installed.
	Extension string
	// ControlPlanes and Workers are the numbers of machines. At least one control-plane machine is required.
	ControlPlanes, Workers int
	// WithoutCloudProvider leaves the external cloud provider disabled, as in a cluster without a cloud controller manager.
	WithoutCloudProvider bool
	// ControllerManagerArgs are arguments of kube-controller-manager, by the names of its flags.
	ControllerManagerArgs map[string]string
	// LogDir is the directory for the console logs of the machines. If it is empty, the logs are removed with the bed.
	LogDir string
}

// endpoint returns the cluster endpoint. The address of a single control-plane machine is available earlier than a virtual
// address.
func (o Options) endpoint() netip.AddrPort {
	if o.ControlPlanes > 1 {
		return netip.AddrPortFrom(virtualAddress, constants.DefaultControlPlanePort)
	}

	return netip.AddrPortFrom(firstAddress, constants.DefaultControlPlanePort)
}

// Bed is a cluster of Talos machines.
type Bed struct {
	// ControlPlanes and Workers are the machines. Etcd is bootstrapped on the first control-plane machine.
	ControlPlanes, Workers []*Machine

	options Options
	source  source
	dir     string
	assets  assets
	// kubernetes is the directory with the Kubernetes binaries.
	kubernetes string
	bridge     *netns.Namespace
	configs    *bundle.Bundle
	kubeconfig []byte
	client     kubernetes.Interface
	// created contains the numbers of machines that were created, by the prefix of their names.
	created map[string]int
	// cleanups are called by Down in reverse order.
	cleanups []func() error
}

// step is a part of bringing up a bed.
type step struct {
	name string
	do   func(context.Context) error
}

// Up builds what is not in the cache, boots all machines, and returns when all Nodes are registered. If another process
// has a bed, Up first waits for its end. ctx limits Up, not the lifetime of the bed. The caller must call Down, unless Up
// fails.
func Up(ctx context.Context, options Options) (*Bed, error) {
	b := &Bed{options: options, created: map[string]int{}}

	return b, b.up(ctx, []step{
		{"prepare", b.prepare},
		{"build", b.build},
		{"set up network, images and machines", b.assemble},
		{"boot machines", b.boot},
		{"bootstrap etcd", b.bootstrap},
		{"start Kubernetes", b.connectKubernetes},
		{"register Nodes", b.awaitNodes},
	})
}

func (b *Bed) up(ctx context.Context, steps []step) error {
	for _, step := range steps {
		fmt.Printf("Talos test bed: %s ...\n", step.name)

		start := time.Now()

		if err := step.do(ctx); err != nil {
			return errors.Join(fmt.Errorf("bring up Talos test bed: %s: %w", step.name, err), b.Down())
		}

		fmt.Printf("Talos test bed: %s: %.1f s\n", step.name, time.Since(start).Seconds())
	}

	return nil
}

// ID returns the unique name of the bed, which is part of the names of its directory and cgroups.
func (b *Bed) ID() string { return filepath.Base(b.dir) }

// Dir returns the bed's directory.
func (b *Bed) Dir() string { return b.dir }

// Release returns the Talos and Kubernetes versions of the machines.
func (b *Bed) Release() Release { return b.source.Release }

// Machines returns all machines of the bed.
func (b *Bed) Machines() []*Machine { return slices.Concat(b.ControlPlanes, b.Workers) }

// Kubeconfig returns an admin kubeconfig. It works only in the network namespace of the bridge.
func (b *Bed) Kubeconfig() []byte { return b.kubeconfig }

// DialContext connects from the network namespace of the bridge. The address must be an IP address and a port.
func (b *Bed) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return b.bridge.Dial(ctx, network, address)
}

// RESTConfig returns an admin configuration that connects from the network namespace of the bridge, and to any of the API
// servers. Their certificates are valid for the cluster endpoint.
func (b *Bed) RESTConfig() (*rest.Config, error) { return b.RESTConfigFrom(0) }

// RESTConfigFrom is RESTConfig with the index of the control-plane machine to which it connects if that responds.
func (b *Bed) RESTConfigFrom(first int) (*rest.Config, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(b.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}

	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		return b.dialAPIServer(ctx, first%len(b.ControlPlanes), network, address)
	}
	config.QPS = -1

	return config, nil
}

// dialAPIServer connects to an API server at the cluster endpoint's address, and to any other address directly.
func (b *Bed) dialAPIServer(ctx context.Context, first int, network, address string) (conn net.Conn, err error) {
	if address != b.options.endpoint().String() {
		return b.DialContext(ctx, network, address)
	}

	for _, m := range slices.Concat(b.ControlPlanes[first:], b.ControlPlanes[:first]) {
		// A machine without power or link does not refuse a connection.
		limited, cancel := context.WithTimeout(ctx, dialTimeout)
		conn, err = b.DialContext(limited, network, netip.AddrPortFrom(m.address, constants.DefaultControlPlanePort).String())

		cancel()

		if err == nil {
			return conn, nil
		}
	}

	return nil, err
}

// Kubernetes returns a client for RESTConfig.
func (b *Bed) Kubernetes() kubernetes.Interface { return b.client }

// talosconfig returns the path of the admin talosconfig. The file is written once, because processes of earlier scripts may
// read it.
func (b *Bed) talosconfig() string { return filepath.Join(b.dir, "talosconfig") }

// Shell runs a shell script in the network namespace of the bridge, with talosctl in PATH and an admin talosconfig, and
// returns its output.
func (b *Bed) Shell(ctx context.Context, script string) (out []byte, err error) {
	cmd := exec.CommandContext(ctx, "sh", "-c", script)
	cmd.Env = append(os.Environ(),
		"PATH="+b.assets.bin()+string(os.PathListSeparator)+os.Getenv("PATH"),
		"TALOSCONFIG="+b.talosconfig(),
		"TALOS_HOME="+b.dir, // the directory for files of talosctl
	)

	err = b.bridge.Inside(func() error {
		out, err = builder.Output(cmd)

		return err
	})
	if err != nil {
		return nil, fmt.Errorf("run %q: %w", script, err)
	}

	return out, nil
}

func (b *Bed) prepare(ctx context.Context) error {
	var err error
	if b.source, err = selectSource(""); err != nil {
		return err
	}

	if os.Geteuid() != 0 {
		return ErrNotRoot
	}

	base, err := builder.CacheDir("beds")
	if err != nil {
		return err
	}

	// Two beds at a time would be too slow for the deadlines of the tests.
	turn, err := builder.Lock(ctx, filepath.Join(base, "lock"), os.Stdout)
	if err != nil {
		return err
	}

	b.cleanup(turn.Close)

	if err := Sweep(); err != nil {
		return err
	}

	if b.dir, err = os.MkdirTemp(base, bedPrefix); err != nil {
		return fmt.Errorf("create directory for bed: %w", err)
	}

	// The kernel releases the lock when this process ends.
	owner, err := lock(b.dir, unix.LOCK_EX)
	if err != nil {
		return err
	}

	b.cleanup(func() error { return errors.Join(os.RemoveAll(b.dir), owner.Close()) })

	if b.options.LogDir == "" {
		b.options.LogDir = b.dir
	}

	fmt.Println("Talos test bed: directory", b.dir)

	return os.MkdirAll(b.options.LogDir, 0o755)
}

// lock locks a bed directory until the returned file is closed.
func lock(dir string, how int) (*os.File, error) {
	file, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open directory of bed: %w", err)
	}

	if err := unix.Flock(int(file.Fd()), how); err != nil {
		return nil, fmt.Errorf("lock directory of bed: %w", errors.Join(err, file.Close()))
	}

	return file, nil
}

// Sweep removes directories and cgroups of beds whose process was killed. Up calls it.
func Sweep() error {
	base, err := builder.CacheDir("beds")
	if err != nil {
		return err
	}

	dirs, err := filepath.Glob(filepath.Join(base, bedPrefix+"*"))
	if err != nil {
		return fmt.Errorf("list beds: %w", err)
	}

	for _, dir := range dirs {
		owner, err := lock(dir, unix.LOCK_EX|unix.LOCK_NB)
		if err != nil {
			continue // the bed is running
		}

		pattern, err := cgroupOf(filepath.Base(dir), "*")
		groups, invalid := filepath.Glob(string(pattern))
		err = errors.Join(err, invalid)

		for _, group := range groups {
			err = errors.Join(err, cgroup(group).remove())
		}

		if err := errors.Join(err, os.RemoveAll(dir), owner.Close()); err != nil {
			return fmt.Errorf("sweep bed %s: %w", dir, err)
		}
	}

	return nil
}

func (b *Bed) build(ctx context.Context) error {
	var err error
	if b.assets, b.kubernetes, err = b.source.prepare(ctx, os.Stdout); err != nil {
		return err
	}

	if b.configs, err = configure(b.source.Release, b.options); err != nil {
		return err
	}

	return b.configs.TalosConfig().Save(b.talosconfig())
}

func (b *Bed) assemble(ctx context.Context) error {
	if err := b.newBridge(ctx); err != nil {
		return err
	}

	components, err := newComponentImage(b.kubernetes, b.assets.shims(), filepath.Join(b.dir, "components"))
	if err != nil {
		return err
	}

	if err := errors.Join(b.serveRegistry(ctx), b.Push(ctx, componentImage, components)); err != nil {
		return err
	}

	for range b.options.ControlPlanes {
		if err := b.addMachine(ctx, &b.ControlPlanes, "talos-cp", machinetype.TypeControlPlane); err != nil {
			return err
		}
	}

	for range b.options.Workers {
		if err := b.addMachine(ctx, &b.Workers, "talos-wk", machinetype.TypeWorker); err != nil {
			return err
		}
	}

	return nil
}

// addMachine adds a machine that is switched off to a list of machines of the bed. Machines and Nodes have the same names.
// No machine gets the name or the address of one that was removed.
func (b *Bed) addMachine(ctx context.Context, list *[]*Machine, prefix string, kind machinetype.Type) error {
	address := firstAddress

	for _, count := range b.created {
		for range count {
			address = address.Next()
		}
	}

	b.created[prefix]++

	m, err := b.newMachine(ctx, fmt.Sprintf("%s-%d", prefix, b.created[prefix]), address, kind)
	if err == nil {
		*list = append(*list, m)
	}

	return err
}

// AddWorker adds a worker to the cluster, and does not wait for its boot.
func (b *Bed) AddWorker(ctx context.Context) (*Machine, error) {
	if err := b.addMachine(ctx, &b.Workers, "talos-wk", machinetype.TypeWorker); err != nil {
		return nil, err
	}

	m := b.Workers[len(b.Workers)-1]

	return m, m.PowerOn()
}

// RemoveWorker switches a worker off and removes its disk, which is in memory. Its Node stays.
func (b *Bed) RemoveWorker(ctx context.Context, m *Machine) error {
	b.Workers = slices.DeleteFunc(b.Workers, func(other *Machine) bool { return other == m })

	return m.Wipe(ctx)
}

// Patch patches the configuration of machines that are added later.
func (b *Bed) Patch(patch string) error {
	patches, err := configpatcher.LoadPatches([]string{patch})
	if err == nil {
		err = b.configs.ApplyPatches(patches, true, true)
	}

	if err != nil {
		return fmt.Errorf("patch configuration of new machines: %w", err)
	}

	return nil
}

// boot switches the machines on and waits until apid of the first control-plane machine responds.
func (b *Bed) boot(ctx context.Context) error {
	for _, m := range b.Machines() {
		if err := m.PowerOn(); err != nil {
			return err
		}
	}

	return b.ControlPlanes[0].eventually(ctx, "wait for apid", func(ctx context.Context, c *client.Client) error {
		_, err := c.Version(ctx)

		return err
	})
}

func (b *Bed) bootstrap(ctx context.Context) error {
	return b.ControlPlanes[0].eventually(ctx, "bootstrap etcd", func(ctx context.Context, c *client.Client) error {
		err := c.Bootstrap(ctx, &machine.BootstrapRequest{})
		if client.StatusCode(err) == codes.AlreadyExists {
			return nil
		}

		return err
	})
}

// connectKubernetes creates the client and waits until the API server is ready.
func (b *Bed) connectKubernetes(ctx context.Context) error {
	err := b.ControlPlanes[0].eventually(ctx, "get kubeconfig", func(ctx context.Context, c *client.Client) (err error) {
		b.kubeconfig, err = c.Kubeconfig(ctx)

		return err
	})
	if err != nil {
		return err
	}

	config, err := b.RESTConfig()
	if err != nil {
		return err
	}

	if b.client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}

	return eventually(ctx, "wait for the API server", func(ctx context.Context) error {
		return b.client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// awaitNodes waits until all Nodes are registered.
func (b *Bed) awaitNodes(ctx context.Context) error {
	return eventually(ctx, "wait for Nodes", func(ctx context.Context) error {
		for _, m := range b.Machines() {
			if _, err := b.client.CoreV1().Nodes().Get(ctx, m.name, metav1.GetOptions{}); err != nil {
				return err
			}
		}

		return nil
	})
}

// eventually retries call until it succeeds, ctx is done or the machine stops.
func (m *Machine) eventually(ctx context.Context, attempt string, call func(context.Context, *client.Client) error) error {
	c, err := m.TalosClient(ctx)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // all calls have ended

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	go func() {
		if m.awaitOff(ctx) == nil {
			cancel(fmt.Errorf("machine %s stopped; its console:\n%s", m.name, m.Console()))
		}
	}()

	return eventually(ctx, attempt, func(ctx context.Context) error { return call(ctx, c) })
}

// eventually retries try until it succeeds or ctx is done. The returned error wraps the last error of try.
func eventually(ctx context.Context, attempt string, try func(context.Context) error) error {
	const timeout = 10 * time.Second

	var last error

	err := wait.PollUntilContextCancel(ctx, 5*pollInterval, true, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()

		last = try(ctx)

		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w (last error: %w)", attempt, context.Cause(ctx), last)
	}

	return nil
}

// cleanup registers a function for Down.
func (b *Bed) cleanup(do func() error) { b.cleanups = append(b.cleanups, do) }

// Down stops the machines and removes the networks, cgroups and files of the bed. It can be called more than once.
func (b *Bed) Down() error {
	var errs []error

	for _, do := range slices.Backward(b.cleanups) {
		errs = append(errs, do())
	}

	b.cleanups = nil

	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take down Talos test bed: %w", err)
	}

	return nil
}
