// Package ccm puts talos-ccm together: credentials, leadership, reflector and controllers.
//
// It uses the parts of the framework's shell (k8s.io/cloud-provider/app): its flags, its serving, its controllers. It does not use
// app.Run, which cannot release the lease, ends the process when the API server is late, and takes the list of
// controllers that are off from a package variable.
package ccm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	cloudconfig "k8s.io/cloud-provider/app/config"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

// errLeaseLost ends a run: another instance leads, or may.
var errLeaseLost = errors.New("the leader's lease was lost")

// App is one run of talos-ccm. Use New.
type App struct {
	options *Options
	clock   clock.Clock
	socket  *talosapi.Socket // nil outside Talos
	// settings outlive the connections: the last good configuration stays in force.
	settings *settings.Store
	// identity is who we are in the lease, unless the machine has a better name for us. It stays when the connections are made anew, so
	// that a lease that could not be released is taken up again at once.
	identity string
}

// New makes an App. The options must be valid.
func New(options *Options) (*App, error) {
	hostname, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("name this instance: %w", err)
	}

	a := &App{options: options, clock: options.Clock, identity: hostname + "_" + string(uuid.NewUUID())}

	if a.clock == nil {
		a.clock = clock.RealClock{}
	}

	if options.MachineSocket != "" {
		socket, err := talosapi.OpenSocket(options.MachineSocket)
		if err != nil {
			return nil, err
		}

		a.socket = socket
	}

	a.settings = settings.New(a.source(), settings.LastKnownGood{Dir: options.StateDir}, a.checkEnvironment)

	return a, nil
}

// Run works until ctx ends, and then returns nil after it has released the lease, within ten seconds. On a worker, in maintenance mode
// and while the machine is going down it idles. It returns a *RestartError if the process is to be replaced, and any other error if the lease was
// lost, and whoever supervises the process should start it again.
func (a *App) Run(ctx context.Context) error {
	if a.socket != nil {
		defer a.socket.Close() //nolint:errcheck // nothing is in flight
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

	err := a.run(ctx, &group)

	if restart := (*RestartError)(nil); err == nil && errors.As(context.Cause(ctx), &restart) {
		return restart
	}

	return err
}

func (a *App) run(ctx context.Context, group *sync.WaitGroup) error {
	if a.socket == nil {
		return a.work(ctx)
	}

	changes := make(chan standing)

	group.Go(func() { watchStanding(ctx, a.socket.Reader, a.clock, changes) })

	return a.workWhileServing(ctx, changes)
}

// workWhileServing works while this machine's standing allows it.
func (a *App) workWhileServing(ctx context.Context, changes <-chan standing) error {
	var (
		logger = klog.FromContext(ctx)
		stop   = func() {}
		done   chan error // nil while idle
		now    standing
	)

	logger.Info("Waiting for this machine to be a control-plane machine")

	for {
		if now.serves() && done == nil {
			logger.Info("This machine is a control-plane machine, starting", "stage", now.stage)

			var working context.Context

			working, stop = context.WithCancel(ctx)
			done = make(chan error, 1)

			go func(done chan<- error) { done <- a.work(working) }(done)
		}

		select {
		case now = <-changes:
			if !now.serves() {
				logger.Info("Idle", "controlPlane", now.controlPlane, "stage", now.stage)
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

// work runs the whole chain until ctx ends, or until its connections to Kubernetes have to be made anew.
func (a *App) work(ctx context.Context) error {
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
	if err != nil || ctx.Err() != nil {
		return err
	}

	return newLeader(a, creds, config).run(ctx)
}

// credentials returns those for Talos and the path of those for Kubernetes, empty for a pod's own, once both are there, or when ctx ends. It calls
// replaced when those for Kubernetes can no longer be kept fresh in place.
func (a *App) credentials(ctx context.Context, group *sync.WaitGroup, replaced func()) (talosapi.Credentials, string) {
	var creds talosapi.Credentials = talosapi.Talosconfig{Path: a.options.Talosconfig}

	if a.socket != nil {
		minted := talosapi.NewIssuedCredentials(a.socket.Admin, a.clock)
		creds = minted

		keepFresh(ctx, group, minted.Run)
	}

	kubeconfig := a.options.Framework.Generic.ClientConnection.Kubeconfig

	if kubeconfig == "" && a.socket != nil {
		b := bootstrap.New(a.socket.Admin, a.options.RunDir, a.clock)
		kubeconfig = b.Kubeconfig()

		keepFresh(ctx, group, func(ctx context.Context, ready func()) {
			b.Run(ctx, ready)
			replaced()
		})
	}

	return creds, kubeconfig
}

// keepFresh starts run and returns when it has called ready, or when ctx ends.
func keepFresh(ctx context.Context, group *sync.WaitGroup, run func(ctx context.Context, ready func())) {
	ready := make(chan struct{})

	group.Go(func() { run(ctx, sync.OnceFunc(func() { close(ready) })) })

	select {
	case <-ready:
	case <-ctx.Done():
	}
}

// frameworkConfig asks the API server for what it needs to serve, so it may have to wait for it.
func (a *App) frameworkConfig(ctx context.Context, kubeconfig string) (*cloudconfig.CompletedConfig, error) {
	if err := checkKubeconfig(kubeconfig); err != nil {
		return nil, err
	}

	for backoff := newBackoff(); ; {
		// Anew for each attempt: one that fails leaves its marks, such as no port to serve on if that was taken.
		framework := a.options.frameworkFor(kubeconfig)

		config, err := framework.Config(controllerNames(), disabledByDefault().List(), controllerAliases(), nil, nil)
		if err == nil {
			config.Kubeconfig.UserAgent = version.UserAgent()

			return config.Complete(), nil
		}

		klog.FromContext(ctx).Info("Not ready to serve yet, trying again", "err", err)

		if listener := framework.SecureServing.Listener; listener != nil {
			listener.Close() //nolint:errcheck // nobody has connected
		}

		select {
		case <-ctx.Done():
			return nil, nil
		case <-a.clock.After(backoff.Step()):
		}
	}
}

// checkKubeconfig says why there is no use in waiting for the API server. Without a kubeconfig the credentials are a pod's.
func checkKubeconfig(path string) error {
	if path == "" {
		if _, err := rest.InClusterConfig(); err != nil {
			return fmt.Errorf("connect to Kubernetes as a pod, for want of --kubeconfig: %w", err)
		}

		return nil
	}

	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("read kubeconfig: %w", err)
	}

	return nil
}

// within returns when done is closed, or after d.
func within(d time.Duration, clk clock.Clock, done <-chan struct{}) {
	select {
	case <-done:
	case <-clk.After(d):
	}
}
