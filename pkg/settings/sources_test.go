package settings_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	talosruntime "github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/utils/clock"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// poll makes the source read the file again, and returns when it has.
func poll(t *testing.T, clk *testingclock.FakeClock) {
	t.Helper()

	clk.Step(time.Minute)

	for !clk.HasWaiters() {
		require.Nil(t, t.Context().Err(), "the file is not polled")

		runtime.Gosched() // the clock cannot be waited for
	}
}

func TestDefaults_DeliversNamedDocument(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())

	settings.Defaults{}.Follow(ctx, func(doc settings.Document, err error) {
		assert.Equal(t, "defaults", doc.Name)
		assert.Nil(t, doc.Config)
		assert.NoError(t, err)

		cancel()
	})
}

func TestFile_DeliversContentThatWasReadTwice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	clk := testingclock.NewFakeClock(time.Now())
	store := settings.New(settings.File{Path: path, Clock: clk}, "", anyEnvironment)

	write := func(content string) {
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	}

	write("global: {clusterName: first}")

	go store.Run(t.Context())

	poll(t, clk)
	poll(t, clk)

	for _, step := range []struct {
		name, content, want string
		polls               int
	}{
		{"content that was read once is ignored", "", "first", 1},
		{"content that was read twice is in force", "global: {clusterName: second}", "second", 2},
		{"invalid content is ignored", "global: {", "second", 2},
		{"blank content is ignored", " \n", "second", 2},
		{"an empty mapping gives the defaults", "{}", "", 2},
	} {
		write(step.content)

		for range step.polls {
			poll(t, clk)
		}

		current := store.Current()
		require.NotNil(t, current, step.name)
		assert.Equal(t, step.want, current.ClusterName, step.name)
	}
}

// watcher is an Admin. Each watch gets the next list of events and fails at its end.
type watcher struct{ watches [][]state.Event }

func (w *watcher) WatchServiceConfig(ctx context.Context, _ string, ch chan<- state.Event) error {
	if len(w.watches) == 0 {
		return errors.New("unavailable")
	}

	events := append(slices.Clone(w.watches[0]), state.Event{Type: state.Errored, Error: errors.New("closed")})
	w.watches = w.watches[1:]

	go func() {
		for _, event := range events {
			select {
			case ch <- event:
			case <-ctx.Done():
			}
		}
	}()

	return nil
}

func TestExtension_DeliversFileAndEnvironment(t *testing.T) {
	event := func(kind state.EventType, files ...talosruntime.ExtensionServiceConfigFile) state.Event {
		resource := talosruntime.NewExtensionServiceConfigSpec(talosruntime.NamespaceName, "talos-ccm")
		resource.TypedSpec().Files = files
		resource.TypedSpec().Environment = []string{"A=1"}

		return state.Event{Type: kind, Resource: resource}
	}
	file := func(path, content string) talosruntime.ExtensionServiceConfigFile {
		return talosruntime.ExtensionServiceConfigFile{MountPath: path, Content: content}
	}

	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		source := settings.Extension{Name: "talos-ccm", Clock: clock.RealClock{}, Admin: &watcher{watches: [][]state.Event{
			{event(state.Created, file(settings.MountPath, "a")), event(state.Updated, file("/etc/other.yaml", "b")), {Type: state.Bootstrapped}},
			{event(state.Updated), event(state.Destroyed)},
		}}}

		var got []string

		go source.Follow(ctx, func(doc settings.Document, err error) {
			got = append(got, fmt.Sprintf("%s %s %v %v", doc.Name, doc.Config, doc.Environment, err != nil))
		})

		time.Sleep(10 * time.Second)
		cancel()
		synctest.Wait()

		const name = "ExtensionServiceConfig talos-ccm"

		want := []string{
			name + " " + settings.MountPath + " a [A=1] false", name + " " + settings.MountPath + "  [A=1] true",
			name + " " + settings.MountPath + "  [A=1] false", name + "  [] false",
		}
		assert.Equal(t, want, got[:min(len(got), len(want))], got)
	})
}
