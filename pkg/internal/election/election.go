// Package election protects the leader election of client-go against processes that are stopped and continued.
//
// client-go's elector acquires and renews the lease. Package ccm runs the elector: the controllers start when it leads,
// and they stop before the lease is released. But a process that was stopped, for example by SIGSTOP, continues in the
// middle of its work, before the elector notices that the lease has expired. Therefore a Lock records when the lease was
// renewed, and the clients of the controllers check that before each request.
package election

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// Lock is the lock of an elector, which must not release it. It records when the lease was renewed.
type Lock struct {
	resourcelock.Interface

	// renewed is when the last successful write of the lease began; nil before the first one and after the release.
	renewed atomic.Pointer[time.Time]
}

// Create implements resourcelock.Interface.
func (l *Lock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Create)
}

// Update implements resourcelock.Interface.
func (l *Lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Update)
}

func (l *Lock) write(
	ctx context.Context, record resourcelock.LeaderElectionRecord, write func(context.Context, resourcelock.LeaderElectionRecord) error,
) error {
	began := time.Now()

	err := write(ctx, record)
	if err == nil {
		l.renewed.Store(&began)
	}

	return err
}

// Release releases the lease. It does nothing if a different instance holds the lease: client-go's elector does not
// compare the holder. Call Release after the elector has stopped. Requests through Guard fail from then on.
func (l *Lock) Release(ctx context.Context) error {
	l.renewed.Store(nil)

	record, _, err := l.Get(ctx)

	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("get lease: %w", err)
	case record.HolderIdentity != l.Identity():
		return nil
	}

	now := metav1.Now()
	released := resourcelock.LeaderElectionRecord{
		LeaderTransitions: record.LeaderTransitions, LeaseDurationSeconds: 1, RenewTime: now, AcquireTime: now,
	}

	if err := l.Interface.Update(ctx, released); err != nil {
		return fmt.Errorf("release lease: %w", err)
	}

	return nil
}

// errLeaseExpired is returned by clients that may not hold the lease any more.
var errLeaseExpired = errors.New("lease was not renewed in time")

// Guard returns a RoundTripper that fails unless the lease was renewed within validity, which must be shorter than the
// lease duration.
func (l *Lock) Guard(validity time.Duration, next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		if renewed := l.renewed.Load(); renewed != nil && time.Since(*renewed) < validity {
			return next.RoundTrip(request)
		}

		if request.Body != nil {
			_ = request.Body.Close()
		}

		return nil, errLeaseExpired
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }
