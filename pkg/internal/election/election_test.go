package election_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/election"
)

// sharedLease is a lease in memory.
type sharedLease struct {
	mu      sync.Mutex
	record  *resourcelock.LeaderElectionRecord
	version int
	// watches are called some time after a change by another candidate.
	watches map[string]func()
}

// watch calls changed after changes by other candidates than identity.
func (l *sharedLease) watch(identity string, changed func()) (stop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.watches == nil {
		l.watches = map[string]func(){}
	}

	l.watches[identity] = changed

	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()

		delete(l.watches, identity)
	}
}

// notify is called with the mutex held.
func (l *sharedLease) notify() {
	for identity, changed := range l.watches {
		if identity != l.record.HolderIdentity {
			time.AfterFunc(rand.N(5*time.Millisecond), changed)
		}
	}
}

// memoryLock is the lock of one candidate on a sharedLease. Requests take a moment and fail with the context, before or
// after they have taken effect.
type memoryLock struct {
	lease    *sharedLease
	identity string
	version  int // that was read
	acting   atomic.Bool
	t        *testing.T
}

func (l *memoryLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	pause(time.Millisecond)

	l.lease.mu.Lock()
	defer l.lease.mu.Unlock()

	if l.lease.record == nil {
		return nil, nil, apierrors.NewNotFound(schema.GroupResource{}, "lease")
	}

	l.version = l.lease.version
	record := *l.lease.record
	raw, err := json.Marshal(record)

	return &record, raw, errors.Join(err, ctx.Err())
}

func (l *memoryLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	l.lease.mu.Lock()
	missing := l.lease.record == nil
	l.lease.mu.Unlock()

	if !missing {
		return apierrors.NewAlreadyExists(schema.GroupResource{}, "lease")
	}

	return l.Update(ctx, record)
}

func (l *memoryLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	pause(time.Millisecond)

	if err := ctx.Err(); err != nil {
		return err
	}

	l.lease.mu.Lock()
	conflict := l.version != l.lease.version

	if !conflict {
		if record.HolderIdentity != l.identity && l.acting.Load() {
			l.t.Errorf("%s released the lease while it was acting", l.identity)
		}

		l.lease.version++
		l.version = l.lease.version
		l.lease.record = &record
		l.lease.notify()
	}

	l.lease.mu.Unlock()

	if conflict {
		return apierrors.NewConflict(schema.GroupResource{}, "lease", errors.New("changed"))
	}

	pause(time.Millisecond)

	return ctx.Err()
}

func (*memoryLock) RecordEvent(string) {}
func (l *memoryLock) Identity() string { return l.identity }
func (l *memoryLock) Describe() string { return "memory" }

func pause(limit time.Duration) { time.Sleep(rand.N(limit)) }

// Changes of the lease interrupt attempts at any time. Neither expiry nor polling compensates for a missed change.
func TestCandidate_OnlyHolderActs(t *testing.T) {
	const (
		candidates = 3
		terms      = 50
	)

	var (
		lease  = &sharedLease{}
		acting atomic.Int64
		group  sync.WaitGroup
	)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	for i := range candidates {
		group.Go(func() {
			for term := 0; term < terms && !t.Failed(); term++ {
				runTerm(ctx, t, lease, fmt.Sprintf("candidate %d, term %d", i, term), &acting)
			}
		})
	}

	group.Wait()
}

// runTerm runs a candidate until it has led and released the lease.
func runTerm(ctx context.Context, t *testing.T, lease *sharedLease, identity string, acting *atomic.Int64) {
	t.Helper()

	lock := &memoryLock{t: t, lease: lease, identity: identity}

	c, err := election.New(leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: time.Hour, RenewDeadline: 50 * time.Minute, RetryPeriod: 10 * time.Minute, ReleaseOnCancel: true, Name: "test",
	})
	if err != nil {
		t.Error(err)

		return
	}

	defer lease.watch(identity, c.Retry)()

	ctx, release := context.WithCancel(ctx)
	stopped := make(chan struct{})

	go func() {
		defer close(stopped)

		c.Run(ctx)
	}()

	select {
	case <-c.Leading():
		lock.acting.Store(true)

		if n := acting.Add(1); n > 1 {
			t.Errorf("%d candidates act", n)
		}

		pause(20 * time.Millisecond)
		acting.Add(-1)
		lock.acting.Store(false)
	case <-ctx.Done():
		t.Errorf("%s did not lead", identity)
	}

	release()
	<-stopped
}
