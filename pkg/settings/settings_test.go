package settings_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// delivery is a source under the control of the test.
type delivery struct {
	deliver func(settings.Document, error)
	lost    func()
	ready   chan struct{}
}

func (d *delivery) Follow(ctx context.Context, deliver func(settings.Document, error), lost func()) {
	d.deliver, d.lost = deliver, lost
	close(d.ready)
	<-ctx.Done()
}

// follow runs a Store on a source that has not delivered a document.
func follow(t *testing.T, check func([]string) error) (*settings.Store, *delivery) {
	t.Helper()

	return followWith(t, settings.LastKnownGood{}, check)
}

func followWith(t *testing.T, lastKnownGood settings.LastKnownGood, check func([]string) error) (*settings.Store, *delivery) {
	t.Helper()

	d := &delivery{ready: make(chan struct{})}
	s := settings.New(d, lastKnownGood, check)

	go s.Run(t.Context())
	<-d.ready

	return s, d
}

func anyEnvironment([]string) error { return nil }

func document(content string) settings.Document {
	return settings.Document{Name: "config.yaml", Config: []byte(content)}
}

func TestStore_NothingIsInForceBeforeFirstValidDocument(t *testing.T) {
	s, d := follow(t, anyEnvironment)

	d.deliver(document("nonsense: true"), nil)

	if s.Current() != nil {
		t.Error("an invalid document is in force")
	}

	if err := s.Problem(); err == nil || !strings.Contains(err.Error(), "config.yaml:1") {
		t.Errorf("the problem does not include the position: %v", err)
	}

	d.deliver(document(""), nil)

	if s.Current() == nil || s.Problem() != nil {
		t.Errorf("an empty document is not in force: %v", s.Problem())
	}
}

func TestStore_KeepsLastValidDocument(t *testing.T) {
	s, d := follow(t, func(environment []string) error {
		if len(environment) > 1 {
			return errors.New("too many variables")
		}

		return nil
	})

	good := document("global: {clusterName: good}")
	good.Environment = []string{"A=1"}
	d.deliver(good, nil)

	tooMany := document("global: {clusterName: other}")
	tooMany.Environment = []string{"A=1", "B=2"}

	for name, deliver := range map[string]func(){
		"invalid document":    func() { d.deliver(document("global: {clusterName: [}"), nil) },
		"unreadable document": func() { d.deliver(document("global: {clusterName: other}"), errors.New("unreadable")) },
		"invalid environment": func() { d.deliver(tooMany, nil) },
	} {
		deliver()

		if s.Problem() == nil {
			t.Errorf("%s: no problem", name)
		}

		if s.Current().ClusterName != "good" || len(s.Environment()) != 1 {
			t.Errorf("%s: got %q and %v", name, s.Current().ClusterName, s.Environment())
		}
	}
}

func TestLastKnownGood_SurvivesRestart(t *testing.T) {
	lastKnownGood := settings.LastKnownGood{Dir: t.TempDir()}
	bad := document("nonsense: true")

	_, before := followWith(t, lastKnownGood, anyEnvironment)
	before.deliver(document("global: {clusterName: first}"), nil)
	before.deliver(document("global: {clusterName: good}"), nil)
	before.deliver(bad, nil)

	s, after := followWith(t, lastKnownGood, anyEnvironment)
	if s.Current() != nil {
		t.Error("a configuration is in force before the first delivery")
	}

	after.deliver(bad, nil)

	if s.Current() == nil || s.Current().ClusterName != "good" {
		t.Errorf("the last-known-good document is not in force: %v", s.Current())
	}

	if s.Problem() == nil || !s.Await(t.Context()) {
		t.Error("got no problem or no configuration")
	}

	after.deliver(document(""), nil)

	third, last := followWith(t, lastKnownGood, anyEnvironment)
	last.deliver(bad, nil)

	if s.Current().ClusterName != "" || third.Current().ClusterName != "" {
		t.Errorf("the latest valid document is not in force: %v, %v", s.Current(), third.Current())
	}
}

func TestLastKnownGood_MissingOrInvalid(t *testing.T) {
	dir := t.TempDir()

	for name, lastKnownGood := range map[string]settings.LastKnownGood{
		"empty directory": {Dir: dir}, "no directory": {}, "missing directory": {Dir: filepath.Join(dir, "absent")},
	} {
		s, d := followWith(t, lastKnownGood, anyEnvironment)
		d.deliver(document("nonsense: true"), nil)

		if s.Current() != nil {
			t.Errorf("%s: a configuration is in force", name)
		}

		d.deliver(document(""), nil) // even if it cannot be persisted

		if s.Current() == nil {
			t.Errorf("%s: a valid document is not in force", name)
		}
	}

	// A truncated file.
	if err := os.WriteFile(filepath.Join(dir, "last-good.yaml"), []byte("global: {"), 0o600); err != nil {
		t.Fatal(err)
	}

	s, d := followWith(t, settings.LastKnownGood{Dir: dir}, anyEnvironment)
	d.deliver(document("nonsense: true"), nil)

	if s.Current() != nil {
		t.Error("a truncated document is in force")
	}
}

func TestStore_NotifiesSubscribersOfEveryDelivery(t *testing.T) {
	s, d := follow(t, anyEnvironment)

	var first, second atomic.Int32

	unsubscribe := s.Subscribe(func() { first.Add(1) })
	s.Subscribe(func() { second.Add(1) })

	d.deliver(document(""), nil)
	d.deliver(document("nonsense: true"), nil)
	unsubscribe()
	d.deliver(document(""), nil)

	if first.Load() != 2 || second.Load() != 3 {
		t.Errorf("got %d and %d calls, want 2 and 3", first.Load(), second.Load())
	}
}

func TestStore_AwaitBlocksUntilSynced(t *testing.T) {
	s, d := follow(t, anyEnvironment)
	d.deliver(document(""), nil)
	d.lost()

	awaited := make(chan bool)

	go func() { awaited <- s.Await(t.Context()) }()

	select {
	case <-awaited:
		t.Fatal("Await returned while the source sees no changes")
	default:
	}

	d.deliver(document(""), nil)

	if !<-awaited {
		t.Error("got false after a delivery")
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d.lost()

	if s.Await(ctx) {
		t.Error("got true after ctx ended")
	}
}
