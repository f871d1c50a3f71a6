package ccm

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	v1core "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/transport"
	cloudconfig "k8s.io/cloud-provider/app/config"
	genericcontrollermanager "k8s.io/controller-manager/app"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// stopTimeout bounds how long the controllers take to stop, and then how long the release of the lease takes.
	// Talos sends SIGKILL ten seconds after SIGTERM.
	stopTimeout = 4 * time.Second

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
	// guard stops the requests of the controllers when the lease may have expired; nil without leader election.
	guard transport.WrapperFunc
	// reconnect closes the connection and opens a new one.
	reconnect func()
	// facts are the names of the optional facts that the reflector reads, and served is the last configuration that
	// needs no others.
	facts  []string
	served atomic.Pointer[config.Compiled]
}

// run serves until ctx ends. Once a configuration is in force it runs the controllers, with leader election if enabled.
func (m *controllerManager) run(ctx context.Context) error {
	// Events have a client of their own, so that they do not compete with the controllers for the rate limit.
	client, err := m.newClient(nil)
	if err != nil {
		return err
	}

	m.config.EventBroadcaster.StartStructuredLogging(4)
	m.config.EventBroadcaster.StartRecordingToSink(&v1core.EventSinkImpl{Interface: client.CoreV1().Events("")})

	defer m.config.EventBroadcaster.Shutdown()

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

// settings returns the configuration in force. If it needs facts of machines that the reflector does not read, settings
// reconnects, which reads all machines again, and returns the configuration before: a fact that was not read must not be
// taken for one that the machine does not have.
func (m *controllerManager) settings() *config.Compiled {
	current := m.app.settings.Current()
	isMissing := func(fact string) bool { return !slices.Contains(m.facts, fact) }

	if slices.ContainsFunc(current.Facts, isMissing) {
		m.reconnect()

		return m.served.Load()
	}

	m.served.Store(current)

	return current
}

// within waits for done to be closed, at most for d.
func within(d time.Duration, clk clock.Clock, done <-chan struct{}) {
	select {
	case <-done:
	case <-clk.After(d):
	}
}
