package election_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/election"
)

// partitionedLock loses its connection: requests hang until the client's timeout or until the connection is back.
type partitionedLock struct {
	mu     sync.Mutex
	record resourcelock.LeaderElectionRecord
	up     chan struct{} // closed while connected
}

func (l *partitionedLock) wait() error {
	l.mu.Lock()
	up := l.up
	l.mu.Unlock()

	select {
	case <-up:
		return nil
	case <-time.After(time.Second): // client timeout
		return errors.New("timeout")
	}
}

func (l *partitionedLock) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	if err := l.wait(); err != nil {
		return nil, nil, err
	}

	l.mu.Lock()
	defer l.mu.Unlock()

	record := l.record
	raw, err := json.Marshal(record)

	return &record, raw, err
}

func (l *partitionedLock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.Update(ctx, r)
}

// Update has the resourceVersion of the last Get, so a release succeeds. A renewal that was in flight when b acquired
// the lease fails.
func (l *partitionedLock) Update(_ context.Context, r resourcelock.LeaderElectionRecord) error {
	if err := l.wait(); err != nil {
		return err
	}

	l.mu.Lock()
	defer l.mu.Unlock()

	if l.record.HolderIdentity == "b" && r.HolderIdentity == l.Identity() {
		return errors.New("conflict")
	}

	l.record = r

	return nil
}

func (*partitionedLock) RecordEvent(string) {}
func (*partitionedLock) Identity() string   { return "a" }
func (*partitionedLock) Describe() string   { return "memory" }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

func TestCandidate_LeavesTheLeaseToAnother(t *testing.T) {
	up := make(chan struct{})
	close(up)
	lock := &partitionedLock{up: up}

	c, err := election.New(leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: 3 * time.Second, RenewDeadline: 2 * time.Second, RetryPeriod: 400 * time.Millisecond, ReleaseOnCancel: true, Name: "test",
	})
	require.NoError(t, err)

	sent := 0
	guarded := c.Guard(2500*time.Millisecond, roundTripper(func(*http.Request) (*http.Response, error) {
		sent++

		return &http.Response{}, nil
	}))

	send := func() error {
		_, err := guarded.RoundTrip(&http.Request{Body: http.NoBody}) //nolint:bodyclose // responses have no body

		return err
	}

	assert.Error(t, send(), "the candidate does not run")

	done := make(chan struct{})
	go func() {
		defer close(done)

		c.Run(t.Context())
	}()

	<-c.Leading()

	assert.NoError(t, send())

	back := make(chan struct{})
	lock.mu.Lock()
	lock.up = back
	lock.mu.Unlock()
	time.Sleep(3100 * time.Millisecond) // until the lease has expired

	assert.Error(t, send(), "the lease has expired")
	assert.Equal(t, 1, sent)

	lock.mu.Lock()
	lock.record = resourcelock.LeaderElectionRecord{HolderIdentity: "b"}
	lock.mu.Unlock()
	close(back)
	<-done

	assert.Equal(t, "b", lock.record.HolderIdentity)
}
