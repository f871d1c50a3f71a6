// Package election acquires a lease as soon as its holder releases it or it expires.
package election

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// Candidate acquires and renews a lease with client-go's elector. While another instance holds the lease, the elector
// only polls, every two to four seconds by default. Therefore a Candidate restarts it whenever the lease has changed
// or should have expired, and the elector tries immediately.
type Candidate struct {
	elector *leaderelection.LeaderElector
	// expiry is how long after an attempt has begun a lease has expired that has not changed since.
	expiry  time.Duration
	changed chan struct{}
	// holder is who held the lease when the elector last read it.
	holder string
	// renewed is when the last successful write of the lease began; nil if the candidate does not hold it.
	renewed atomic.Pointer[time.Time]

	// mu is held during a write of the lease, so that no attempt is interrupted in the moment of its success.
	mu      sync.Mutex
	leading chan struct{}
	lead    func() // closes leading
}

// expiryMargin is the time that the elector gets to read the lease after it has changed.
const expiryMargin = time.Second

// New returns a Candidate for the lock of the configuration, whose callbacks are ignored.
func New(config leaderelection.LeaderElectionConfig) (c *Candidate, err error) {
	c = &Candidate{expiry: config.LeaseDuration + expiryMargin, changed: make(chan struct{}, 1), leading: make(chan struct{})}
	c.lead = sync.OnceFunc(func() { close(c.leading) })

	config.Lock = lock{config.Lock, c}
	// The elector calls OnStartedLeading in a goroutine of its own, possibly after it has stopped leading.
	config.Callbacks = leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}}

	if c.elector, err = leaderelection.NewLeaderElector(config); err != nil {
		return nil, fmt.Errorf("create leader elector: %w", err)
	}

	return c, nil
}

// Retry makes the candidate try again now, unless it leads.
func (c *Candidate) Retry() {
	select {
	case c.changed <- struct{}{}:
	default: // it has not tried yet since the last call
	}
}

// Leading returns a channel that is closed when the candidate has acquired the lease.
func (c *Candidate) Leading() <-chan struct{} { return c.leading }

// Check returns an error if the candidate leads and has not renewed the lease for longer than the lease duration and
// excess, which may be negative.
func (c *Candidate) Check(excess time.Duration) error { return c.elector.Check(excess) }

// errLeaseExpired is returned by clients of a candidate that may not hold the lease any more.
var errLeaseExpired = errors.New("lease was not renewed in time")

// Guard returns a RoundTripper that fails unless the candidate has renewed the lease within validity, which must be
// shorter than the lease duration. A process that was stopped continues in the middle of a write, before it notices that
// another instance leads.
func (c *Candidate) Guard(validity time.Duration, next http.RoundTripper) http.RoundTripper {
	return guard{next, func() bool {
		renewed := c.renewed.Load()

		return renewed != nil && time.Since(*renewed) < validity
	}}
}

type guard struct {
	next  http.RoundTripper
	valid func() bool
}

// RoundTrip implements http.RoundTripper.
func (g guard) RoundTrip(request *http.Request) (*http.Response, error) {
	if g.valid() {
		return g.next.RoundTrip(request)
	}

	if request.Body != nil {
		_ = request.Body.Close()
	}

	return nil, errLeaseExpired
}

// Run returns when the candidate has lost the lease, or when ctx has ended and the lease is released. Call it once.
func (c *Candidate) Run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	logger.Info("Attempting to acquire leader lease")

	// The elector logs each attempt.
	for attempts := klog.NewContext(ctx, logger.V(4)); ctx.Err() == nil && !c.isLeading(); {
		c.attempt(attempts)
	}
}

// attempt runs the elector until the candidate has lost the lease, the lease has changed or expired, or ctx ends.
func (c *Candidate) attempt(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)

	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()

	group.Go(func() {
		timer := time.NewTimer(c.expiry)
		defer timer.Stop()

		select {
		case <-ctx.Done():
		case <-c.changed:
		case <-timer.C:
		}

		if !c.isLeading() {
			cancel()
		}
	})

	c.elector.Run(ctx)
}

// isLeading reports whether the candidate has acquired the lease. It never becomes false again.
func (c *Candidate) isLeading() bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	select {
	case <-c.leading:
		return true
	default:
		return false
	}
}

// lock is the lock of a candidate.
type lock struct {
	resourcelock.Interface

	candidate *Candidate
}

// Get implements resourcelock.Interface. It finishes even if the attempt is interrupted, because the elector would log an
// error. The client bounds it.
func (l lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(context.WithoutCancel(ctx))
	if err == nil {
		l.candidate.holder = record.HolderIdentity
	}

	return record, raw, err
}

// Create implements resourcelock.Interface.
func (l lock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Create)
}

// Update implements resourcelock.Interface.
func (l lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	if record.HolderIdentity == "" && l.candidate.holder != l.Identity() {
		return fmt.Errorf("release lease: it is held by %q", l.candidate.holder)
	}

	return l.write(ctx, record, l.Interface.Update)
}

func (l lock) write(
	ctx context.Context, record resourcelock.LeaderElectionRecord, write func(context.Context, resourcelock.LeaderElectionRecord) error,
) error {
	l.candidate.mu.Lock()
	defer l.candidate.mu.Unlock()

	began := time.Now()

	err := write(ctx, record)

	switch {
	case err != nil:
	case record.HolderIdentity == "":
		l.candidate.renewed.Store(nil)
	default:
		l.candidate.renewed.Store(&began)
		l.candidate.lead()
	}

	return err
}
