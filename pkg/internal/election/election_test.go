package election_test

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/election"
)

// memoryLock is the lock of "a" on a lease in memory. Writes fail if the lease has changed since it was read.
type memoryLock struct {
	record *resourcelock.LeaderElectionRecord
	read   *resourcelock.LeaderElectionRecord
}

func (l *memoryLock) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	if l.record == nil {
		return nil, nil, apierrors.NewNotFound(schema.GroupResource{}, "lease")
	}

	l.read = l.record
	raw, err := json.Marshal(l.record)

	return l.record, raw, err
}

func (l *memoryLock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.Update(ctx, r)
}

func (l *memoryLock) Update(_ context.Context, r resourcelock.LeaderElectionRecord) error {
	if l.read != l.record {
		return apierrors.NewConflict(schema.GroupResource{}, "lease", nil)
	}

	l.record = &r
	l.read = l.record

	return nil
}

func (*memoryLock) RecordEvent(string) {}
func (*memoryLock) Identity() string   { return "a" }
func (*memoryLock) Describe() string   { return "memory" }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// guarded returns a function that reports whether a request passes the guard of the lock.
func guarded(lock *election.Lock, validity time.Duration) func() bool {
	sent := 0
	guard := lock.Guard(validity, roundTripper(func(*http.Request) (*http.Response, error) {
		sent++

		return &http.Response{}, nil
	}))

	return func() bool {
		before := sent
		_, err := guard.RoundTrip(&http.Request{Body: http.NoBody}) //nolint:bodyclose // responses have no body

		return err == nil && sent > before
	}
}

func TestLock_GuardsRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := &memoryLock{}
		lock := &election.Lock{Interface: memory}
		passes := guarded(lock, 12*time.Second)
		held := resourcelock.LeaderElectionRecord{HolderIdentity: "a"}

		assert.False(t, passes(), "the lease was never acquired")

		require.NoError(t, lock.Create(t.Context(), held))
		assert.True(t, passes(), "the lease is held")

		time.Sleep(11 * time.Second)
		require.NoError(t, lock.Update(t.Context(), held))
		time.Sleep(11 * time.Second)
		assert.True(t, passes(), "the lease was renewed")

		memory.record = &resourcelock.LeaderElectionRecord{HolderIdentity: "b"}
		require.Error(t, lock.Update(t.Context(), held))
		time.Sleep(time.Second)
		assert.False(t, passes(), "the lease was not renewed in time")
	})
}

func TestLock_ReleasesOwnLease(t *testing.T) {
	for _, test := range []struct {
		name         string
		record       *resourcelock.LeaderElectionRecord
		want         string
		wantDuration int
	}{
		{"held by itself", &resourcelock.LeaderElectionRecord{HolderIdentity: "a", LeaseDurationSeconds: 15}, "", 1},
		{"held by another instance", &resourcelock.LeaderElectionRecord{HolderIdentity: "b", LeaseDurationSeconds: 15}, "b", 15},
		{"missing", nil, "", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			memory := &memoryLock{}
			lock := &election.Lock{Interface: memory}
			passes := guarded(lock, time.Hour)

			require.NoError(t, lock.Create(t.Context(), resourcelock.LeaderElectionRecord{HolderIdentity: "a"}))

			memory.record = test.record

			require.NoError(t, lock.Release(t.Context()))
			assert.False(t, passes(), "the lease is released")

			if test.record == nil {
				assert.Nil(t, memory.record)
			} else {
				assert.Equal(t, test.want, memory.record.HolderIdentity)
				assert.Equal(t, test.wantDuration, memory.record.LeaseDurationSeconds)
			}
		})
	}
}
