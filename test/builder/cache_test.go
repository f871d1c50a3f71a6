package builder_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/test/builder"
)

func TestCached_BuildsOnce(t *testing.T) {
	t.Setenv("TALOS_CCM_CACHE", t.TempDir())

	var (
		group  sync.WaitGroup
		builds atomic.Int32
	)

	for range 4 {
		group.Go(func() {
			dir, err := builder.Cached(t.Context(), "kind", "key", io.Discard, func(dir string) error {
				builds.Add(1)

				return os.WriteFile(filepath.Join(dir, "file"), nil, 0o600)
			})
			assert.NoError(t, err)
			assert.FileExists(t, filepath.Join(dir, "file"))
		})
	}

	group.Wait()
	assert.EqualValues(t, 1, builds.Load())
}

func TestCached_KeepsRecentBuilds(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("TALOS_CCM_CACHE", cache)

	failure := errors.New("failed")
	_, err := builder.Cached(t.Context(), "kind", "failed", nil, func(string) error { return failure })
	require.ErrorIs(t, err, failure)

	require.NoError(t, os.Mkdir(filepath.Join(cache, "kind", "unfinished-1"), 0o700))

	old := time.Now().Add(-48 * time.Hour)

	for _, key := range []string{"old", "former", "recent", "latest"} {
		dir, err := builder.Cached(t.Context(), "kind", key, nil, func(string) error { return nil })
		require.NoError(t, err)

		if key != "recent" {
			require.NoError(t, os.Chtimes(dir, old, old))
		}
	}

	left, err := filepath.Glob(filepath.Join(cache, "kind", "*"))
	require.NoError(t, err)

	kind := filepath.Join(cache, "kind")
	assert.Equal(t, []string{filepath.Join(kind, "latest"), filepath.Join(kind, "lock"), filepath.Join(kind, "recent")}, left)
}

func TestLock_WaitsAndNamesHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")

	first, err := builder.Lock(t.Context(), path, nil)
	require.NoError(t, err)

	reader, writer := io.Pipe()
	locked := make(chan error)

	go func() {
		second, err := builder.Lock(t.Context(), path, writer)
		locked <- errors.Join(err, second.Close())
	}()

	message, err := bufio.NewReader(reader).ReadString('\n')
	require.NoError(t, err)
	assert.Contains(t, message, fmt.Sprintf("%s: process %d since 20", path, os.Getpid()))

	require.NoError(t, first.Close())
	assert.NoError(t, <-locked)

	third, err := builder.Lock(t.Context(), path, nil)
	require.NoError(t, err)

	defer third.Close()

	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	_, err = builder.Lock(ctx, path, nil)
	assert.ErrorIs(t, err, context.Canceled)
}
