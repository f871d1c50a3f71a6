// Package ccm runs talos-ccm: it obtains credentials, takes part in leader election, and runs the reflector and the
// controllers while it leads. The table in wiring.go lists the controllers.
//
// Framework: flags, secure port, health and metrics come from k8s.io/cloud-provider. app.Run does not: it cannot release
// the lease, it exits if the API server is not available yet, and it keeps the list of disabled controllers in a package
// variable. The controllers are talos-ccm's own, under the names of the framework. The framework's Node controller polls
// and does not own labels. Its lifecycle controller deletes a Node without proof as soon as the provider does not know
// it. Its service controller ignores Services with a load balancer class.
//
// Boot: Talos waits for every extension service, and reboots after 70 minutes if one never starts. So the process waits
// for everything itself, and never exits because something is missing. It idles on workers, in maintenance mode and while
// the machine goes down.
//
// Leadership: the lease is the one of the upstream Talos CCM, so only one of both acts. Only the leader watches machines.
// On SIGTERM, and when the machine goes down, the controllers stop first, and then the lease is released. Each step takes
// at most four of the ten seconds that Talos allows. The lease identity is the machine's node ID: an instance that
// replaces a killed one has the same identity and need not wait for the lease to expire. Every controller has a client of
// its own, so that a rate limit of the user applies to each.
//
// Coexistence: a Node is managed if its kubelet reports Talos and nodes.selector selects its machine. CSR approval and
// IPAM have selectors of their own, which default to all Talos Nodes: in a cluster with several providers, every Node
// needs an approver and a pod CIDR, whichever controller initializes it.
//
// Pods: the program is the same, and only the sources differ. Without machine.sock it reads --talosconfig for each
// connection and --cloud-config, and uses its ServiceAccount or --kubeconfig with RBAC that the operator applies. Only the
// socket provides the stage and the node ID of the machine and the environment of the document. So a pod releases the
// lease only on SIGTERM, its lease identity is unique per process, and its flags come from the manifest.
package ccm

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/client-go/kubernetes/scheme"
	v1core "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/transport"
	cloudconfig "k8s.io/cloud-provider/app/config"
	genericcontrollermanager "k8s.io/controller-manager/app"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

// stopTimeout bounds how long the controllers take to stop, and then how long the release of the lease takes. Talos sends
// SIGKILL ten seconds after SIGTERM.
const stopTimeout = 4 * time.Second

// Component is the source of Events, and the start of the lease identity of the extension.
const Component = "talos-ccm"

// Manager runs talos-ccm. Use New.
type Manager struct {
	options *Options
	clock   clock.Clock
	// socket is nil outside Talos.
	socket *talosapi.Socket
	// store outlives the connections to Kubernetes, so that the last-known-good configuration stays in force.
	store *settings.Store
	// processID is the lease identity where the machine has no node ID. It outlives the connections to
	// Kubernetes, so that a lease that could not be released can be renewed.
	processID string
	mu        sync.Mutex
	// factKinds are the facts that machines are read with, and applied is the last configuration that uses no others. If
	// readsIdentity is true, the node controller knows the cluster identity, for the addresses of rules.
	factKinds     machine.FactKinds
	readsIdentity bool
	applied       *config.Compiled
}

// connection is a connection to Kubernetes and the other machines. It ends when its clients must be recreated.
type connection struct {
	creds    talosapi.Credentials
	config   *cloudconfig.CompletedConfig
	recorder record.EventRecorder
	checks   *controllerhealthz.MutableHealthzHandler
	// candidate is true once a configuration is in force and the lease was read, so that the instance can lead.
	candidate *atomic.Bool
	// guard stops the requests of the controllers when the lease may have expired; nil before the election and without one.
	guard transport.WrapperFunc
}

// New returns a Manager. The options must be valid.
func New(options *Options) (*Manager, error) {
	hostname, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("get hostname: %w", err)
	}

	m := &Manager{options: options, clock: options.Clock, processID: hostname + "_" + string(uuid.NewUUID())}

	var source settings.Source = settings.Defaults{}

	if path := options.Framework.KubeCloudShared.CloudProvider.CloudConfigFile; path != "" {
		source = settings.File{Path: path, Clock: m.clock}
	}

	if options.MachineSocket != "" {
		if m.socket, err = talosapi.OpenSocket(options.MachineSocket); err != nil {
			return nil, err
		}

		source = settings.Extension{Admin: m.socket.Admin, Name: extension.Name, Clock: m.clock}
	}

	m.store = settings.New(source, options.StateDir, options.CheckDocument)

	return m, nil
}

// Run runs until ctx ends; it then releases the lease and returns nil, within ten seconds. It idles while the local
// machine is a worker, in maintenance mode, or going down. It returns a *RestartError if the process must be
// replaced, such as after a lost lease. After any other error, a supervisor should restart the process.
func (m *Manager) Run(ctx context.Context) (err error) {
	if m.socket != nil {
		defer m.socket.Close() //nolint:errcheck // no call is in flight
	}

	var group sync.WaitGroup
	defer group.Wait()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	m.store.Subscribe(func() {
		if restart := m.restart(); restart != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Info("Replacing the process", "reason", "document changes the environment")
			cancel(restart)
		}
	})

	group.Go(func() { m.store.Run(ctx) })

	if m.socket != nil {
		changes := make(chan localState)

		group.Go(func() { m.watchLocalState(ctx, changes) })

		err = m.runOnControlPlane(ctx, changes)
	} else {
		for ctx.Err() == nil && err == nil {
			err = m.connect(ctx)
		}
	}

	switch restart := (*RestartError)(nil); {
	case err == nil && errors.As(context.Cause(ctx), &restart):
		return restart
	case errors.Is(err, errLeaseLost) && m.socket != nil && ctx.Err() == nil: // Talos would restart the process only after five seconds
		klog.FromContext(ctx).Error(err, "Replacing the process")

		return &RestartError{Environment: m.options.Environment}
	}

	return err
}

// runOnControlPlane connects while the state of the local machine allows it, and idles otherwise.
func (m *Manager) runOnControlPlane(ctx context.Context, changes <-chan localState) error {
	var (
		logger = klog.FromContext(ctx)
		stop   = func() {}
		done   chan error // nil while idle
		state  localState
	)

	logger.Info("Waiting for the local machine to become a control-plane machine")

	for {
		if state.serves() && done == nil {
			logger.Info("Local machine is a control-plane machine; starting", "stage", state.stage)

			var connectCtx context.Context

			connectCtx, stop = context.WithCancel(ctx)
			done = make(chan error, 1)

			go func(done chan<- error) { done <- m.connect(connectCtx) }(done)
		}

		select {
		case state = <-changes:
			if !state.serves() {
				logger.Info("Local machine is not an active control-plane machine; idling", "controlPlane", state.controlPlane, "stage", state.stage)
				stop()
			}
		case err := <-done:
			stop()

			if err != nil {
				return err
			}

			done = nil
		case <-ctx.Done():
			stop()

			if done == nil {
				return nil
			}

			return <-done
		}
	}
}

// connect obtains credentials and serves until ctx ends or the clients must be recreated.
func (m *Manager) connect(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()

	creds, kubeconfig, preferLocal := m.credentials(ctx, &group, cancel)
	if ctx.Err() != nil {
		return nil
	}

	config, err := m.frameworkConfig(ctx, kubeconfig, preferLocal)
	if err != nil || config == nil {
		return err
	}

	// With its default, the recorder would keep 4,096 Events in each of three caches: one for each CSR, and for each Node
	// that was ever registered.
	config.EventBroadcaster.Shutdown()
	config.EventBroadcaster = record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{LRUCacheSize: 1024}))

	recorder := config.EventBroadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: Component})

	return m.serve(ctx, connection{creds: creds, config: config, recorder: recorder, checks: controllerhealthz.NewMutableHealthzHandler(), candidate: new(atomic.Bool)})
}

// credentials waits for credentials and returns the Talos credentials and the path of the kubeconfig, empty for the
// in-cluster configuration. preferLocal prefers the API server of the local machine; it may be nil. The renewal runs in
// group. It calls replaced if the API server endpoint or CA changes.
func (m *Manager) credentials(
	ctx context.Context, group *sync.WaitGroup, replaced func(),
) (_ talosapi.Credentials, kubeconfig string, preferLocal transport.WrapperFunc) {
	kubeconfig = m.options.Framework.Generic.ClientConnection.Kubeconfig

	if m.socket == nil {
		return talosapi.Talosconfig{Path: m.options.Talosconfig}, kubeconfig, nil
	}

	// await starts run and returns when run has called ready, or when ctx ends.
	await := func(run func(ctx context.Context, ready func())) {
		readyCtx, ready := context.WithCancel(ctx)

		group.Go(func() { run(ctx, ready) })
		<-readyCtx.Done()
	}

	creds := talosapi.NewIssuedCredentials(m.socket.Admin, m.clock)

	await(creds.Run)

	if kubeconfig == "" {
		b := bootstrap.New(m.socket.Admin, m.options.RunDir, m.options.needsRBAC, m.clock)
		b.LocalAPIServer = m.localAPIServer
		kubeconfig, preferLocal = b.Kubeconfig(), b.PreferLocal

		await(func(ctx context.Context, ready func()) {
			b.Run(ctx, ready)
			replaced()
		})
	}

	return creds, kubeconfig, preferLocal
}

// frameworkConfig builds the configuration of the framework, retrying until the API server answers. In a pod, whose probes
// use the secure port, it also opens that port and retries until the port is free. It returns nil if ctx ends first.
func (m *Manager) frameworkConfig(ctx context.Context, kubeconfig string, preferLocal transport.WrapperFunc) (config *cloudconfig.CompletedConfig, err error) {
	if kubeconfig == "" {
		if _, err := rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("load in-cluster configuration, since --kubeconfig is not set: %w", err)
		}
	} else if _, err := os.Stat(kubeconfig); err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}

	_ = backoff.Retry(ctx, "API server or secure port not available; retrying", func(context.Context) error {
		// A failed attempt changes the options, for example it sets the secure port to 0 if the port is in use.
		framework := m.options.frameworkFor(kubeconfig)
		framework.Authentication.WithCustomRoundTripper(preferLocal)
		framework.Authorization.WithCustomRoundTripper(preferLocal)

		c, err := framework.Config(m.options.entryNames(), nil, nil, nil, nil)
		if err == nil {
			c.Kubeconfig.UserAgent = version.UserAgent()
			c.Kubeconfig.Wrap(preferLocal)

			config = c.Complete()

			return nil
		}

		if listener := framework.SecureServing.Listener; listener != nil {
			listener.Close() //nolint:errcheck // no client has connected
		}

		return err
	})

	return config, nil
}

// serve serves health and metrics until ctx ends. Once a configuration is in force it runs the controllers, with leader
// election if enabled.
func (m *Manager) serve(ctx context.Context, conn connection) error {
	// Events have a client of their own, so that they do not compete with the controllers for the rate limit.
	client, err := conn.newClient()
	if err != nil {
		return err
	}

	conn.config.EventBroadcaster.StartStructuredLogging(4)
	conn.config.EventBroadcaster.StartRecordingToSink(&v1core.EventSinkImpl{Interface: client.CoreV1().Events("")})

	defer conn.config.EventBroadcaster.Shutdown()

	var (
		stopped <-chan struct{} // closed when the server of a pod has stopped after ctx ended
		group   sync.WaitGroup
	)

	defer group.Wait()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	if conn.config.SecureServing != nil {
		mux := genericcontrollermanager.NewBaseHandler(&conn.config.ComponentConfig.Generic.Debugging, conn.checks)
		healthz.InstallReadyzHandler(mux, healthz.NamedCheck("leader-election", func(*http.Request) error {
			if !conn.candidate.Load() {
				return errors.New("no configuration is in force, or the API server was not reached")
			}

			return nil
		}))

		handler := genericcontrollermanager.BuildHandlerChain(mux, &conn.config.Authorization, &conn.config.Authentication)

		if m.socket != nil {
			group.Go(func() { m.serveLater(ctx, conn, handler) })
		} else if stopped, _, err = conn.config.SecureServing.Serve(handler, 0, ctx.Done()); err != nil {
			return fmt.Errorf("serve health and metrics: %w", err)
		}
	}

	group.Go(func() { m.reportConfiguration(ctx, conn.recorder) })
	group.Go(func() { m.stateCertificate(ctx, conn) })

	switch {
	case ctx.Err() != nil || !m.store.Await(ctx):
	case conn.config.ComponentConfig.Generic.LeaderElection.LeaderElect:
		err = m.elect(ctx, conn)
	default:
		conn.candidate.Store(true)

		err = m.lead(ctx, conn, nil)
	}

	if ctx.Err() != nil && stopped != nil {
		within(stopTimeout, m.clock, stopped)
	}

	return err
}

// serveLater opens the extension's secure port and serves health and metrics until ctx ends. Any pod in the host network
// can listen on the port before the extension does, so nothing waits for the port.
func (m *Manager) serveLater(ctx context.Context, conn connection, handler http.Handler) {
	var (
		stopped    <-chan struct{}
		isReported bool
	)

	_ = backoff.Retry(ctx, "Failed to serve health and metrics; retrying", func(ctx context.Context) error {
		var opened *server.SecureServingInfo

		serving := *m.options.Framework.SecureServing.SecureServingOptions

		err := serving.ApplyTo(&opened)
		if err == nil {
			conn.config.SecureServing.Listener = serving.Listener
			stopped, _, err = conn.config.SecureServing.Serve(handler, 0, ctx.Done())
		}

		if err == nil {
			return nil
		}

		if serving.Listener != nil {
			serving.Listener.Close() //nolint:errcheck // no client has connected
		}

		if name := m.localNodename(ctx); name != "" && !isReported {
			conn.recorder.Event(nodeReference(name), corev1.EventTypeWarning, ReasonSecurePortUnavailable,
				events.Truncate("Health and metrics are not served until the secure port can be opened: "+err.Error()))

			isReported = true
		}

		return err
	})

	if stopped != nil {
		within(stopTimeout, m.clock, stopped)
	}
}

// settings returns the configuration that applies: the last one that uses only facts that are read. A fact that was not read
// must not be taken for a fact that the machine or the cluster does not have.
func (m *Manager) settings() *config.Compiled {
	m.mu.Lock()
	defer m.mu.Unlock()

	if current := m.store.Current(); current.FactKinds&^m.factKinds == 0 && (m.readsIdentity || !current.Rules.SetAddresses()) {
		m.applied = current
	}

	return m.applied
}

// needFacts applies the configuration in force, and returns the facts that machines must be read with.
func (m *Manager) needFacts() machine.FactKinds {
	m.mu.Lock()
	defer m.mu.Unlock()

	m.applied = m.store.Current()
	m.factKinds |= m.applied.FactKinds
	m.readsIdentity = m.readsIdentity || m.applied.Rules.SetAddresses()

	return m.factKinds
}

// within waits for done, at most for d.
func within[T any](d time.Duration, clk clock.Clock, done <-chan T) {
	select {
	case <-done:
	case <-clk.After(d):
	}
}
