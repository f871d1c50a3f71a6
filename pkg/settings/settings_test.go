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

// delivery is a source that delivers what the test tells it to.
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

// follow starts a Store on a source that has not delivered anything yet.
func follow(t *testing.T, check func([]string) error) (*settings.Store, *delivery) {
	t.Helper()

	return followWith(t, settings.LastKnownGood{}, check)
}

func followWith(t *testing.T, memory settings.LastKnownGood, check func([]string) error) (*settings.Store, *delivery) {
	t.Helper()

	d := &delivery{ready: make(chan struct{})}
	k := settings.New(d, memory, check)

	go k.Run(t.Context())
	<-d.ready

	return k, d
}

func anything([]string) error { return nil }

func document(content string) settings.Document {
	return settings.Document{Name: "config.yaml", Config: []byte(content)}
}

func TestNothingIsInForceBeforeTheFirstGoodDocument(t *testing.T) {
	k, d := follow(t, anything)

	d.deliver(document("nonsense: true"), nil)

	if k.Current() != nil {
		t.Error("a document that is not valid is in force")
	}

	if err := k.Problem(); err == nil || !strings.Contains(err.Error(), "config.yaml:1") {
		t.Errorf("the problem does not name the place: %v", err)
	}

	d.deliver(document(""), nil)

	if k.Current() == nil || k.Problem() != nil {
		t.Errorf("an empty document is not in force: %v", k.Problem())
	}
}

func TestTheLastGoodDocumentStaysInForce(t *testing.T) {
	k, d := follow(t, func(environment []string) error {
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

	for what, deliver := range map[string]func(){
		"not valid":          func() { d.deliver(document("global: {clusterName: [}"), nil) },
		"cannot be read":     func() { d.deliver(document("global: {clusterName: other}"), errors.New("cannot be read")) },
		"with a bad setting": func() { d.deliver(tooMany, nil) },
	} {
		deliver()

		if k.Problem() == nil {
			t.Errorf("%s: no problem", what)
		}

		if k.Current().ClusterName != "good" || len(k.Environment()) != 1 {
			t.Errorf("%s: in force are %q and %v", what, k.Current().ClusterName, k.Environment())
		}
	}
}

func TestTheLastGoodDocumentOutlivesTheProcess(t *testing.T) {
	memory := settings.LastKnownGood{Dir: t.TempDir()}
	bad := document("nonsense: true")

	_, before := followWith(t, memory, anything)
	before.deliver(document("global: {clusterName: first}"), nil)
	before.deliver(document("global: {clusterName: good}"), nil)
	before.deliver(bad, nil)

	k, after := followWith(t, memory, anything)
	if k.Current() != nil {
		t.Error("something is in force before anything was delivered: it may have been taken back")
	}

	after.deliver(bad, nil)

	if k.Current() == nil || k.Current().ClusterName != "good" {
		t.Errorf("the last good document is not in force: %v", k.Current())
	}

	if k.Problem() == nil || !k.Await(t.Context()) {
		t.Error("there is no problem, or no configuration")
	}

	after.deliver(document(""), nil)

	third, last := followWith(t, memory, anything)
	last.deliver(bad, nil)

	if k.Current().ClusterName != "" || third.Current().ClusterName != "" {
		t.Errorf("the good document since then is not in force: %v, %v", k.Current(), third.Current())
	}
}

func TestWithoutAGoodDocumentFromBeforeNothingIsInForce(t *testing.T) {
	dir := t.TempDir()

	for what, memory := range map[string]settings.LastKnownGood{"empty": {Dir: dir}, "none": {}, "gone": {Dir: filepath.Join(dir, "absent")}} {
		k, d := followWith(t, memory, anything)
		d.deliver(document("nonsense: true"), nil)

		if k.Current() != nil {
			t.Errorf("%s: something is in force", what)
		}

		d.deliver(document(""), nil) // even if it cannot be kept

		if k.Current() == nil {
			t.Errorf("%s: a good document is not in force", what)
		}
	}

	// Not all of it was written.
	if err := os.WriteFile(filepath.Join(dir, "last-good.yaml"), []byte("global: {"), 0o600); err != nil {
		t.Fatal(err)
	}

	k, d := followWith(t, settings.LastKnownGood{Dir: dir}, anything)
	d.deliver(document("nonsense: true"), nil)

	if k.Current() != nil {
		t.Error("half a document is in force")
	}
}

func TestEverySubscriberHearsOfEveryDelivery(t *testing.T) {
	k, d := follow(t, anything)

	var first, second atomic.Int32

	unsubscribe := k.Subscribe(func() { first.Add(1) })
	k.Subscribe(func() { second.Add(1) })

	d.deliver(document(""), nil)
	d.deliver(document("nonsense: true"), nil)
	unsubscribe()
	d.deliver(document(""), nil)

	if first.Load() != 2 || second.Load() != 3 {
		t.Errorf("heard %d and %d times, want 2 and 3", first.Load(), second.Load())
	}
}

func TestAwaitWaitsForADocumentThatIsCurrent(t *testing.T) {
	k, d := follow(t, anything)
	d.deliver(document(""), nil)
	d.lost()

	awaited := make(chan bool)

	go func() { awaited <- k.Await(t.Context()) }()

	select {
	case <-awaited:
		t.Fatal("did not wait, though changes cannot be told")
	default:
	}

	d.deliver(document(""), nil)

	if !<-awaited {
		t.Error("gave up")
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d.lost()

	if k.Await(ctx) {
		t.Error("did not end with its context")
	}
}
