package settings_test

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	testingclock "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// look has the file looked at once more, and returns when that is done.
func look(t *testing.T, clk *testingclock.FakeClock) {
	t.Helper()

	clk.Step(time.Minute)

	for !clk.HasWaiters() {
		if t.Context().Err() != nil {
			t.Fatal("the file is no longer looked at")
		}

		runtime.Gosched() // the clock cannot be waited for
	}
}

func TestAFileCountsOnceItHasBeenReadTwice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	clk := testingclock.NewFakeClock(time.Now())
	keeper := settings.New(settings.File{Path: path, Clock: clk}, settings.LastKnownGood{}, anything)

	write := func(content string) {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	write("global: {clusterName: first}")

	go keeper.Run(t.Context())

	look(t, clk)
	look(t, clk)

	for _, step := range []struct {
		what, content, want string
		looks               int
	}{
		{"what has just been written may be a part", "", "first", 1},
		{"what comes of it counts", "global: {clusterName: second}", "second", 2},
		{"a bad one does not", "global: {", "second", 2},
		{"an empty one does not, however long it stays", " \n", "second", 2},
		{"that stands for the defaults does", "{}", "", 2},
	} {
		write(step.content)

		for range step.looks {
			look(t, clk)
		}

		if current := keeper.Current(); current == nil || current.ClusterName != step.want {
			t.Errorf("%s: in force is %v, want %q", step.what, current, step.want)
		}
	}
}
