package ccm

import (
	"context"
	"fmt"
	"net/http"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coordinationinformers "k8s.io/client-go/informers/coordination/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/internal/election"
)

// elect runs the controllers while it holds the lease. When ctx ends it stops the controllers first and then releases
// the lease, so that two instances never act at the same time.
func (m *controllerManager) elect(ctx context.Context) error {
	electionCtx, release := context.WithCancel(context.WithoutCancel(ctx))
	defer release()

	leadingCtx, stop := context.WithCancel(ctx)
	defer stop()

	var (
		controllersStopped = make(chan struct{})
		electorStopped     = make(chan struct{})
		failed             = make(chan error, 3) // one per goroutine below
	)

	c, err := m.newCandidate(electionCtx)
	if err != nil {
		return err
	}

	validity := m.config.ComponentConfig.Generic.LeaderElection.LeaseDuration.Duration - m.leaseMargin()
	m.guard = func(next http.RoundTripper) http.RoundTripper { return c.Guard(validity, next) }

	go func() {
		defer close(controllersStopped)

		select {
		case <-c.Leading():
		case <-leadingCtx.Done():
		}

		if leadingCtx.Err() == nil {
			klog.FromContext(ctx).Info("Successfully acquired lease")

			if err := m.control(leadingCtx); err != nil {
				failed <- err
			}
		}
	}()

	go func() {
		defer close(electorStopped)
		defer stop()

		c.Run(electionCtx)

		failed <- errLeaseLost
	}()

	go func() {
		if m.leaseExpires(leadingCtx, c) {
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
func (m *controllerManager) leaseExpires(ctx context.Context, c *election.Candidate) bool {
	margin := m.leaseMargin()

	for c.Check(-margin) == nil {
		if !backoff.Sleep(ctx, clock.RealClock{}, margin/4) {
			return false
		}
	}

	return true
}

// leaseMargin returns half of the time between the renew deadline and the expiry of the lease. It is for the controllers
// to stop.
func (m *controllerManager) leaseMargin() time.Duration {
	options := m.config.ComponentConfig.Generic.LeaderElection

	return (options.LeaseDuration.Duration - options.RenewDeadline.Duration) / 2
}

// newCandidate returns a candidate that watches the lease until ctx ends.
func (m *controllerManager) newCandidate(ctx context.Context) (*election.Candidate, error) {
	options := m.config.ComponentConfig.Generic.LeaderElection
	identity := m.app.leaseIdentity(ctx)

	lock, err := resourcelock.NewFromKubeconfig(options.ResourceLock, options.ResourceNamespace, options.ResourceName,
		resourcelock.ResourceLockConfig{Identity: identity, EventRecorder: m.recorder}, m.config.Kubeconfig, options.RenewDeadline.Duration)
	if err != nil {
		return nil, fmt.Errorf("create lock on lease %s/%s: %w", options.ResourceNamespace, options.ResourceName, err)
	}

	client, err := m.newClient(nil)
	if err != nil {
		return nil, err
	}

	c, err := election.New(leaderelection.LeaderElectionConfig{
		Lock:            lock,
		LeaseDuration:   options.LeaseDuration.Duration,
		RenewDeadline:   options.RenewDeadline.Duration,
		RetryPeriod:     options.RetryPeriod.Duration,
		ReleaseOnCancel: true,
		Name:            options.ResourceName,
	})
	if err != nil {
		return nil, err
	}

	informer := coordinationinformers.NewFilteredLeaseInformer(client, options.ResourceNamespace, 0, nil, func(list *metav1.ListOptions) {
		list.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, options.ResourceName).String()
	})

	changed := func(obj any) {
		if lease, ok := obj.(*coordinationv1.Lease); !ok || ptr.Deref(lease.Spec.HolderIdentity, "") != identity {
			c.Retry()
		}
	}

	_, err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: changed, UpdateFunc: func(_, obj any) { changed(obj) }, DeleteFunc: changed,
	})
	if err != nil {
		return nil, fmt.Errorf("watch lease %s/%s: %w", options.ResourceNamespace, options.ResourceName, err)
	}

	go informer.RunWithContext(ctx)

	return c, nil
}
