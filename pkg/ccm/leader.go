package ccm

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	v1core "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"
	cloudconfig "k8s.io/cloud-provider/app/config"
	genericcontrollermanager "k8s.io/controller-manager/app"
	controllerhealthz "k8s.io/controller-manager/pkg/healthz"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// Of the ten seconds between SIGTERM and SIGKILL, this much is for the controllers to finish, and as much for the lease.
	stopTimeout = 4 * time.Second

	electionHealthTimeout = 20 * time.Second

	// localTimeout bounds what the other machines wait for an answer of this one.
	localTimeout = 3 * time.Second

	component = "talos-ccm"
)

// leader serves health and metrics, stands for election and runs the controllers while it leads.
type leader struct {
	options  *Options
	identity string
	clock    clock.Clock
	socket   *talosapi.Socket
	creds    talosapi.Credentials
	settings *settings.Store
	config   *cloudconfig.CompletedConfig
	recorder record.EventRecorder
	checks   *controllerhealthz.MutableHealthzHandler
	watchdog *leaderelection.HealthzAdaptor
}

func newLeader(a *App, creds talosapi.Credentials, config *cloudconfig.CompletedConfig) *leader {
	l := &leader{
		options:  a.options,
		identity: a.identity,
		clock:    a.clock,
		socket:   a.socket,
		creds:    creds,
		settings: a.settings,
		config:   config,
		recorder: config.EventBroadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component}),
		watchdog: leaderelection.NewLeaderHealthzAdaptor(electionHealthTimeout),
	}

	l.checks = controllerhealthz.NewMutableHealthzHandler(l.electionCheck()...)

	return l
}

func (l *leader) electionCheck() []healthz.HealthChecker {
	if !l.config.ComponentConfig.Generic.LeaderElection.LeaderElect {
		return nil
	}

	return []healthz.HealthChecker{l.watchdog}
}

func (l *leader) run(ctx context.Context) error {
	// A client of their own, so that Events do not queue behind the writes they tell of.
	events, err := kubernetes.NewForConfig(l.config.Kubeconfig)
	if err != nil {
		return fmt.Errorf("connect to Kubernetes: %w", err)
	}

	l.config.EventBroadcaster.StartStructuredLogging(4)
	l.config.EventBroadcaster.StartRecordingToSink(&v1core.EventSinkImpl{Interface: events.CoreV1().Events("")})

	defer l.config.EventBroadcaster.Shutdown()

	stopped, err := l.serve(ctx)
	if err != nil {
		return err
	}

	var group sync.WaitGroup
	defer group.Wait()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	group.Go(func() { l.reportConfiguration(ctx) })

	err = l.lead(ctx)

	if ctx.Err() != nil && stopped != nil {
		within(stopTimeout, l.clock, stopped)
	}

	return err
}

// lead runs the controllers, by election if that is on. Without a configuration it leaves that to others.
func (l *leader) lead(ctx context.Context) error {
	switch {
	case !l.settings.Await(ctx):
		return nil
	case l.config.ComponentConfig.Generic.LeaderElection.LeaderElect:
		return l.elect(ctx)
	default:
		return l.control(ctx)
	}
}

// serve starts the secure port, if there is one. The channel closes when it has stopped, after ctx.
func (l *leader) serve(ctx context.Context) (<-chan struct{}, error) {
	if l.config.SecureServing == nil {
		return nil, nil
	}

	mux := genericcontrollermanager.NewBaseHandler(&l.config.ComponentConfig.Generic.Debugging, l.checks)
	handler := genericcontrollermanager.BuildHandlerChain(mux, &l.config.Authorization, &l.config.Authentication)

	stopped, _, err := l.config.SecureServing.Serve(handler, 0, ctx.Done())
	if err != nil {
		return nil, fmt.Errorf("serve health and metrics: %w", err)
	}

	return stopped, nil
}

// elect runs the controllers while it holds the lease. When ctx ends the controllers stop first, and then the lease is released, so
// that no two instances act at once.
func (l *leader) elect(ctx context.Context) error {
	electing, release := context.WithCancel(context.WithoutCancel(ctx))
	defer release()

	leading, stop := context.WithCancel(ctx)
	defer stop()

	var (
		controllers sync.WaitGroup
		leads       = make(chan struct{})
		failed      = make(chan error, 1)
	)

	elector, err := l.elector(ctx, leaderelection.LeaderCallbacks{
		OnStartedLeading: func(context.Context) { close(leads) },
		OnStoppedLeading: stop,
	})
	if err != nil {
		return err
	}

	// Not from the callback: that is on a goroutine of its own, and may come when they are no longer waited for.
	controllers.Go(func() {
		select {
		case <-leads:
			if leading.Err() != nil {
				return
			}

			if err := l.control(leading); err != nil {
				failed <- err
			}
		case <-leading.Done():
		}
	})

	finished := make(chan struct{})

	go func() {
		defer close(finished)

		elector.Run(electing)
	}()

	var result error

	select {
	case <-finished:
		result = errLeaseLost
	case <-l.expiring(leading, elector):
		result = errLeaseLost
	case result = <-failed:
	case <-ctx.Done():
	}

	stop()
	within(stopTimeout, l.clock, done(&controllers))
	release()
	within(stopTimeout, l.clock, finished)

	return result
}

// expiring is closed when the lease we hold is about to expire; not after ctx. The elector gives up earlier, but tells only after it has tried
// to release the lease, and a server that does not answer makes that take until after the lease has expired.
func (l *leader) expiring(ctx context.Context, elector *leaderelection.LeaderElector) <-chan struct{} {
	election := l.config.ComponentConfig.Generic.LeaderElection
	// Half of what is left when the elector gives up is for the controllers to stop.
	margin := (election.LeaseDuration.Duration - election.RenewDeadline.Duration) / 2

	ch := make(chan struct{})

	go func() {
		for elector.Check(-margin) == nil {
			select {
			case <-ctx.Done():
				return
			case <-time.After(margin / 4):
			}
		}

		close(ch)
	}()

	return ch
}

func done(group *sync.WaitGroup) <-chan struct{} {
	ch := make(chan struct{})

	go func() {
		group.Wait()
		close(ch)
	}()

	return ch
}

// instance is who we are in the lease. On Talos it is the machine: Talos runs one of us there and starts it again when it has ended, so that
// nobody else can hold the lease of one that was killed, and it is taken up again without waiting for it to expire.
func (l *leader) instance(ctx context.Context) string {
	if l.socket == nil {
		return l.identity
	}

	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()

	node, err := safe.StateGetByID[*cluster.Identity](ctx, l.socket.Reader, cluster.LocalIdentity)
	if err != nil || node.TypedSpec().NodeID == "" {
		klog.FromContext(ctx).V(2).Info("This machine's node ID is not known, standing for election under a name of its own", "err", err)

		return l.identity
	}

	return component + "_" + node.TypedSpec().NodeID
}

func (l *leader) elector(ctx context.Context, callbacks leaderelection.LeaderCallbacks) (*leaderelection.LeaderElector, error) {
	election := l.config.ComponentConfig.Generic.LeaderElection

	lock, err := resourcelock.NewFromKubeconfig(election.ResourceLock, election.ResourceNamespace, election.ResourceName,
		resourcelock.ResourceLockConfig{Identity: l.instance(ctx), EventRecorder: l.recorder},
		l.config.Kubeconfig, election.RenewDeadline.Duration)
	if err != nil {
		return nil, fmt.Errorf("prepare lease %s/%s: %w", election.ResourceNamespace, election.ResourceName, err)
	}

	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:            lock,
		LeaseDuration:   election.LeaseDuration.Duration,
		RenewDeadline:   election.RenewDeadline.Duration,
		RetryPeriod:     election.RetryPeriod.Duration,
		Callbacks:       callbacks,
		WatchDog:        l.watchdog,
		ReleaseOnCancel: true,
		Name:            election.ResourceName,
	})
	if err != nil {
		return nil, fmt.Errorf("stand for election: %w", err)
	}

	return elector, nil
}

// dialer dials machines over the network, and this one over machine.sock.
func (l *leader) dialer(ctx context.Context) talosapi.DialFunc {
	local := l.localNodename(ctx)

	return func(nodename string, addr netip.Addr) (talosapi.State, error) {
		if local != "" && nodename == local {
			return talosapi.DialSocket(l.options.MachineSocket)
		}

		return talosapi.Dial(l.creds, addr)
	}
}

// localNodename is empty if it is not known.
func (l *leader) localNodename(ctx context.Context) string {
	if l.socket == nil {
		return ""
	}

	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()

	nodename, err := safe.StateGetByID[*k8s.Nodename](ctx, l.socket.Reader, k8s.NodenameID)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("This machine's nodename is not known", "err", err)

		return ""
	}

	return nodename.TypedSpec().Nodename
}
