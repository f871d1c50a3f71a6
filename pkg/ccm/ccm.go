// Package ccm runs talos-ccm: it obtains credentials, takes part in leader election, and runs the reflector and the
// controllers while it is the leader.
//
// It uses the flags and the secure port of k8s.io/cloud-provider, but neither its controllers nor app.Run: that cannot
// release the lease, exits if the API server is not available yet, and keeps the list of disabled controllers in a
// package variable.
package ccm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	cloudconfig "k8s.io/cloud-provider/app/config"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

// App runs talos-ccm. Use New.
type App struct {
	options *Options
	clock   clock.Clock
	// socket is nil outside Talos.
	socket *talosapi.Socket
	// settings outlive the connections to Kubernetes, so that the last-known-good configuration stays in force.
	settings *settings.Store
	// identity is the holder of the lease where the machine has no better one. It outlives the connections to
	// Kubernetes, so that a lease that could not be released can be renewed.
	identity string
}

// New returns an App. The options must be valid.
func New(options *Options) (*App, error) {
	hostname, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("get hostname: %w", err)
	}

	a := &App{options: options, clock: options.Clock, identity: hostname + "_" + string(uuid.NewUUID())}

	var source settings.Source = settings.Defaults{}

	if path := options.Framework.KubeCloudShared.CloudProvider.CloudConfigFile; path != "" {
		source = settings.File{Path: path, Clock: a.clock}
	}

	if options.MachineSocket != "" {
		if a.socket, err = talosapi.OpenSocket(options.MachineSocket); err != nil {
			return nil, err
		}

		source = settings.Extension{Admin: a.socket.Admin, Name: extension.Name, Clock: a.clock}
	}

	a.settings = settings.New(source, settings.LastKnownGood{Dir: options.StateDir}, options.CheckDocument)

	return a, nil
}

// Run runs until ctx ends; it then releases the lease and returns nil, within ten seconds. It idles while the local
// machine is a worker, in maintenance mode, or going down. It returns a *RestartError if the process must be
// replaced. After any other error, such as a lost lease, a supervisor should restart the process.
func (a *App) Run(ctx context.Context) error {
	if a.socket != nil {
		defer a.socket.Close() //nolint:errcheck // no call is in flight
	}

	var group sync.WaitGroup
	defer group.Wait()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	a.settings.Subscribe(func() {
		if restart := a.restart(); restart != nil && a.socket != nil {
			cancel(restart)
		}
	})

	group.Go(func() { a.settings.Run(ctx) })

	run := a.reconnect

	if a.socket != nil {
		changes := make(chan localState)

		group.Go(func() { a.watchLocalState(ctx, changes) })

		run = func(ctx context.Context) error { return a.runOnControlPlane(ctx, changes) }
	}

	err := run(ctx)

	if restart := (*RestartError)(nil); err == nil && errors.As(context.Cause(ctx), &restart) {
		return restart
	}

	return err
}

// runOnControlPlane connects while the state of the local machine allows it, and idles otherwise.
func (a *App) runOnControlPlane(ctx context.Context, changes <-chan localState) error {
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

			go func(done chan<- error) { done <- a.connect(connectCtx) }(done)
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

// reconnect connects until ctx ends.
func (a *App) reconnect(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := a.connect(ctx); err != nil {
			return err
		}
	}

	return nil
}

// connect obtains credentials and runs the controller manager until ctx ends or its clients must be recreated.
func (a *App) connect(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()

	creds, kubeconfig := a.credentials(ctx, &group, cancel)
	if ctx.Err() != nil {
		return nil
	}

	config, err := a.frameworkConfig(ctx, kubeconfig)
	if err != nil || config == nil {
		return err
	}

	// With its default, the recorder would keep 4,096 Events in each of three caches: one for each CSR, and for each Node
	// that was ever registered.
	config.EventBroadcaster.Shutdown()
	config.EventBroadcaster = record.NewBroadcaster(record.WithContext(ctx), record.WithCorrelatorOptions(record.CorrelatorOptions{LRUCacheSize: 1024}))

	m := controllerManager{
		app:      a,
		creds:    creds,
		config:   config,
		recorder: config.EventBroadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component}),
		checks:   controllerhealthz.NewMutableHealthzHandler(),
		reconnect: sync.OnceFunc(func() {
			klog.FromContext(ctx).Info("Configuration uses facts that were not read from machines; reconnecting")
			cancel()
		}),
	}

	return m.run(ctx)
}

// credentials waits for credentials and returns the Talos credentials and the path of the kubeconfig, empty for the
// in-cluster configuration. The renewal runs in group. It calls replaced if the API server endpoint or CA changes.
func (a *App) credentials(ctx context.Context, group *sync.WaitGroup, replaced func()) (talosapi.Credentials, string) {
	kubeconfig := a.options.Framework.Generic.ClientConnection.Kubeconfig

	if a.socket == nil {
		return talosapi.Talosconfig{Path: a.options.Talosconfig}, kubeconfig
	}

	// await starts run and returns when run has called ready, or when ctx ends.
	await := func(run func(ctx context.Context, ready func())) {
		readyCtx, ready := context.WithCancel(ctx)

		group.Go(func() { run(ctx, ready) })
		<-readyCtx.Done()
	}

	creds := talosapi.NewIssuedCredentials(a.socket.Admin, a.clock)

	await(creds.Run)

	if kubeconfig == "" {
		b := bootstrap.New(a.socket.Admin, a.options.RunDir, a.options.needsRBAC, a.clock)
		kubeconfig = b.Kubeconfig()

		await(func(ctx context.Context, ready func()) {
			b.Run(ctx, ready)
			replaced()
		})
	}

	return creds, kubeconfig
}

// frameworkConfig builds the configuration of the framework and opens the secure port, retrying until the API server
// answers and the port is free. It returns nil if ctx ends first.
func (a *App) frameworkConfig(ctx context.Context, kubeconfig string) (config *cloudconfig.CompletedConfig, err error) {
	if kubeconfig == "" {
		if _, err := rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("load in-cluster configuration, since --kubeconfig is not set: %w", err)
		}
	} else if _, err := os.Stat(kubeconfig); err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}

	_ = backoff.Retry(ctx, "API server or secure port not available; retrying", func(ctx context.Context) error {
		// A failed attempt changes the options, for example it sets the secure port to 0 if the port is in use.
		framework := a.options.frameworkFor(kubeconfig)

		c, err := framework.Config(a.options.knownControllers(), nil, controllerAliases(), nil, nil)
		if err == nil {
			c.Kubeconfig.UserAgent = version.UserAgent()
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
