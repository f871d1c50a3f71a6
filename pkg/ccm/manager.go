package ccm

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"
	v1core "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"
	cloudconfig "k8s.io/cloud-provider/app/config"
	genericcontrollermanager "k8s.io/controller-manager/app"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// stopTimeout bounds how long the controllers take to stop, and then how long the release of the lease takes.
	// Talos sends SIGKILL ten seconds after SIGTERM.
	stopTimeout = 4 * time.Second

	// electionHealthTimeout is how long after the lease has expired /healthz fails.
	electionHealthTimeout = 20 * time.Second

	component = "talos-ccm"
)

// controllerManager serves health and metrics, and runs the controllers while it leads. It lives as long as its
// connection to Kubernetes; what outlives the connection belongs to app.
type controllerManager struct {
	app      *App
	creds    talosapi.Credentials
	config   *cloudconfig.CompletedConfig
	recorder record.EventRecorder
	checks   *controllerhealthz.MutableHealthzHandler
	watchdog *leaderelection.HealthzAdaptor
}

// run serves until ctx ends. Once a configuration is in force it runs the controllers, with leader election if enabled.
func (m *controllerManager) run(ctx context.Context) error {
	// Events have a client of their own, so that they do not compete with the controllers for the rate limit.
	client, err := kubernetes.NewForConfig(m.config.Kubeconfig)
	if err != nil {
		return fmt.Errorf("create Kubernetes client: %w", err)
	}

	m.config.EventBroadcaster.StartStructuredLogging(4)
	m.config.EventBroadcaster.StartRecordingToSink(&v1core.EventSinkImpl{Interface: client.CoreV1().Events("")})

	defer m.config.EventBroadcaster.Shutdown()

	if m.config.ComponentConfig.Generic.LeaderElection.LeaderElect {
		m.checks.AddHealthChecker(m.watchdog)
	}

	var stopped <-chan struct{} // closed when the server has stopped after ctx ended

	if m.config.SecureServing != nil {
		mux := genericcontrollermanager.NewBaseHandler(&m.config.ComponentConfig.Generic.Debugging, m.checks)
		handler := genericcontrollermanager.BuildHandlerChain(mux, &m.config.Authorization, &m.config.Authentication)

		if stopped, _, err = m.config.SecureServing.Serve(handler, 0, ctx.Done()); err != nil {
			return fmt.Errorf("serve health and metrics: %w", err)
		}
	}

	var group sync.WaitGroup
	defer group.Wait()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	group.Go(func() { m.reportConfiguration(ctx) })

	switch {
	case ctx.Err() != nil || !m.app.settings.Await(ctx):
	case m.config.ComponentConfig.Generic.LeaderElection.LeaderElect:
		err = m.elect(ctx)
	default:
		err = m.control(ctx)
	}

	if ctx.Err() != nil && stopped != nil {
		within(stopTimeout, m.app.clock, stopped)
	}

	return err
}

// elect runs the controllers while it holds the lease. When ctx ends it stops the controllers first and then releases
// the lease, so that two instances never act at the same time.
func (m *controllerManager) elect(ctx context.Context) error {
	electionCtx, release := context.WithCancel(context.WithoutCancel(ctx))
	defer release()

	leadingCtx, stop := context.WithCancel(ctx)
	defer stop()

	var (
		started            = make(chan struct{})
		controllersStopped = make(chan struct{})
		electorStopped     = make(chan struct{})
		failed             = make(chan error, 3) // one per goroutine below
	)

	elector, err := m.newElector(ctx, leaderelection.LeaderCallbacks{
		OnStartedLeading: func(context.Context) { close(started) },
		OnStoppedLeading: stop,
	})
	if err != nil {
		return err
	}

	// The elector calls OnStartedLeading in a goroutine of its own, possibly after leadingCtx has ended and the wait
	// for the controllers is over. Therefore the controllers do not run in the callback.
	go func() {
		defer close(controllersStopped)

		select {
		case <-started:
		case <-leadingCtx.Done():
		}

		if leadingCtx.Err() == nil {
			if err := m.control(leadingCtx); err != nil {
				failed <- err
			}
		}
	}()

	go func() {
		defer close(electorStopped)

		elector.Run(electionCtx)

		failed <- errLeaseLost
	}()

	go func() {
		if m.leaseExpires(leadingCtx, elector) {
			failed <- errLeaseLost
		}
	}()

	select {
	case err = <-failed:
	case <-ctx.Done():
	}

	stop()
	within(stopTimeout, m.app.clock, controllersStopped)
	release()
	within(stopTimeout, m.app.clock, electorStopped)

	return err
}

// leaseExpires returns true shortly before the held lease expires, or false when ctx ends. The elector gives up
// earlier, but returns only after it has tried to release the lease. If the API server does not respond, that takes
// longer than the lease lasts.
func (m *controllerManager) leaseExpires(ctx context.Context, elector *leaderelection.LeaderElector) bool {
	election := m.config.ComponentConfig.Generic.LeaderElection
	// Half of the time between the renew deadline and the expiry of the lease is for the controllers to stop.
	margin := (election.LeaseDuration.Duration - election.RenewDeadline.Duration) / 2

	for elector.Check(-margin) == nil {
		if !backoff.Sleep(ctx, clock.RealClock{}, margin/4) {
			return false
		}
	}

	return true
}

func (m *controllerManager) newElector(ctx context.Context, callbacks leaderelection.LeaderCallbacks) (*leaderelection.LeaderElector, error) {
	election := m.config.ComponentConfig.Generic.LeaderElection

	lock, err := resourcelock.NewFromKubeconfig(election.ResourceLock, election.ResourceNamespace, election.ResourceName,
		resourcelock.ResourceLockConfig{Identity: m.app.leaseIdentity(ctx), EventRecorder: m.recorder},
		m.config.Kubeconfig, election.RenewDeadline.Duration)
	if err != nil {
		return nil, fmt.Errorf("create lock on lease %s/%s: %w", election.ResourceNamespace, election.ResourceName, err)
	}

	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:            lock,
		LeaseDuration:   election.LeaseDuration.Duration,
		RenewDeadline:   election.RenewDeadline.Duration,
		RetryPeriod:     election.RetryPeriod.Duration,
		Callbacks:       callbacks,
		WatchDog:        m.watchdog,
		ReleaseOnCancel: true,
		Name:            election.ResourceName,
	})
	if err != nil {
		return nil, fmt.Errorf("create leader elector: %w", err)
	}

	return elector, nil
}

// within waits for done to be closed, at most for d.
func within(d time.Duration, clk clock.Clock, done <-chan struct{}) {
	select {
	case <-done:
	case <-clk.After(d):
	}
}
