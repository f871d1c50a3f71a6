package ccm

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/internal/election"
)

// errLeaseLost ends a run: a different instance leads, or is about to.
var errLeaseLost = errors.New("leader election lost")

// elect runs the controllers while it holds the lease. When ctx ends it stops the controllers first and then releases
// the lease, so that two instances never act at the same time.
func (m *Manager) elect(ctx context.Context, conn connection) error {
	lock, err := m.newLock(ctx, conn)
	if err != nil {
		return err
	}

	options := conn.config.ComponentConfig.Generic.LeaderElection
	// The controllers stop after the renew deadline. If they stop too late, their requests fail before the lease expires.
	validity := (options.RenewDeadline.Duration + options.LeaseDuration.Duration) / 2
	conn.guard = func(next http.RoundTripper) http.RoundTripper { return lock.Guard(validity, next) }

	leading := make(chan struct{})

	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:          lock,
		LeaseDuration: options.LeaseDuration.Duration,
		RenewDeadline: options.RenewDeadline.Duration,
		RetryPeriod:   options.RetryPeriod.Duration,
		Name:          options.ResourceName,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { close(leading) },
			OnStoppedLeading: func() {},
			OnNewLeader:      func(string) { conn.candidate.Store(true) },
		},
	})
	if err != nil {
		return fmt.Errorf("create leader elector: %w", err)
	}

	electionCtx, stopElector := context.WithCancel(context.WithoutCancel(ctx))
	defer stopElector()

	electorStopped := make(chan struct{})

	go func() {
		defer close(electorStopped)

		elector.Run(electionCtx)
	}()

	select {
	case <-leading:
		err = m.lead(ctx, conn, electorStopped)
	case <-electorStopped:
		err = errLeaseLost
	case <-ctx.Done():
	}

	stopElector()
	<-electorStopped

	releaseCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()

	if err := lock.Release(releaseCtx); err != nil {
		klog.FromContext(ctx).Info("Failed to release lease", "err", err)
	}

	return err
}

// lead runs the controllers until ctx ends, lost is closed, they fail or use too much memory. It returns when they have
// stopped, or after stopTimeout.
func (m *Manager) lead(ctx context.Context, conn connection, lost <-chan struct{}) (err error) {
	controlCtx, stop := context.WithCancel(ctx)
	defer stop()

	done, exceeded := make(chan error, 1), make(chan error, 1)

	go func() { done <- m.control(controlCtx, conn, exceeded) }()

	select {
	case err = <-done:
		return err
	case err = <-exceeded:
	case <-lost:
		err = errLeaseLost
	case <-ctx.Done():
	}

	stop()
	within(stopTimeout, m.clock, done)

	return err
}

// newLock returns the lock on the lease. Its requests time out after half of the renew deadline. On Talos the identity is
// derived from the machine: Talos runs one instance per machine and restarts it, so the holder of a lease that names this
// machine was an earlier process, and the lease can be renewed without waiting for it to expire.
func (m *Manager) newLock(ctx context.Context, conn connection) (*election.Lock, error) {
	options, identity := conn.config.ComponentConfig.Generic.LeaderElection, m.processID

	if node := localResource[*cluster.Identity](ctx, m, cluster.LocalIdentity); node != nil && node.TypedSpec().NodeID != "" {
		identity = Component + "_" + node.TypedSpec().NodeID
	}

	lock, err := resourcelock.NewFromKubeconfig(options.ResourceLock, options.ResourceNamespace, options.ResourceName,
		resourcelock.ResourceLockConfig{Identity: identity, EventRecorder: conn.recorder}, conn.config.Kubeconfig, options.RenewDeadline.Duration)
	if err != nil {
		return nil, fmt.Errorf("create lock on lease %s/%s: %w", options.ResourceNamespace, options.ResourceName, err)
	}

	return &election.Lock{Interface: lock}, nil
}
