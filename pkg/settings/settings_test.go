package settings_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// delivery is a source under the control of the test.
type delivery struct {
	deliver func(settings.Document, error)
	ready   chan struct{}
}

func (d *delivery) Follow(ctx context.Context, deliver func(settings.Document, error)) {
	d.deliver = deliver
	close(d.ready)
	<-ctx.Done()
}

// follow runs a Store on a source that has not delivered a document.
func follow(t *testing.T, stateDir string, check func([]string) error) (*settings.Store, *delivery) {
	t.Helper()

	d := &delivery{ready: make(chan struct{})}
	s := settings.New(d, stateDir, check)

	go s.Run(t.Context())
	<-d.ready

	return s, d
}

func anyEnvironment([]string) error { return nil }

func document(content string) settings.Document {
	return settings.Document{Name: "config.yaml", Config: []byte(content)}
}

func TestStore_NothingIsInForceBeforeFirstValidDocument(t *testing.T) {
	s, d := follow(t, "", anyEnvironment)

	d.deliver(document("nonsense: true"), nil)
	assert.Nil(t, s.Current())
	assert.ErrorContains(t, s.Problem(), "config.yaml:1")

	d.deliver(document(""), nil)
	assert.NotNil(t, s.Current())
	assert.NoError(t, s.Problem())
}

func TestStore_KeepsLastValidDocument(t *testing.T) {
	s, d := follow(t, "", func(environment []string) error {
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
		assert.Error(t, s.Problem(), name)
		assert.Equal(t, "good", s.Current().ClusterName)
		assert.Len(t, s.Environment(), 1)
	}
}

func TestLastKnownGood_SurvivesRestart(t *testing.T) {
	stateDir := t.TempDir()
	bad := document("nonsense: true")

	_, before := follow(t, stateDir, anyEnvironment)
	before.deliver(document("global: {clusterName: first}"), nil)
	before.deliver(document("global: {clusterName: good}"), nil)
	before.deliver(bad, nil)

	s, after := follow(t, stateDir, anyEnvironment)
	assert.Nil(t, s.Current())

	after.deliver(bad, nil)
	require.NotNil(t, s.Current(), "the last-known-good document is not in force")
	assert.Equal(t, "good", s.Current().ClusterName)
	assert.Error(t, s.Problem())
	assert.True(t, s.Await(t.Context()))

	after.deliver(document(""), nil)

	third, last := follow(t, stateDir, anyEnvironment)
	last.deliver(bad, nil)
	assert.Empty(t, s.Current().ClusterName)
	assert.Empty(t, third.Current().ClusterName)
}

func TestLastKnownGood_MissingOrInvalid(t *testing.T) {
	dir := t.TempDir()

	for name, stateDir := range map[string]string{
		"empty directory": dir, "no directory": "", "missing directory": filepath.Join(dir, "absent"),
	} {
		s, d := follow(t, stateDir, anyEnvironment)
		d.deliver(document("nonsense: true"), nil)
		assert.Nil(t, s.Current(), name)

		d.deliver(document(""), nil) // even if it cannot be persisted
		assert.NotNil(t, s.Current(), name)
	}

	// A truncated file.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "last-good.yaml"), []byte("global: {"), 0o600))

	s, d := follow(t, dir, anyEnvironment)
	d.deliver(document("nonsense: true"), nil)
	assert.Nil(t, s.Current())
}

func TestStore_NotifiesSubscribersOfEveryDelivery(t *testing.T) {
	s, d := follow(t, "", anyEnvironment)

	var first, second atomic.Int32

	unsubscribe := s.Subscribe(func() { first.Add(1) })
	s.Subscribe(func() { second.Add(1) })

	d.deliver(document(""), nil)
	d.deliver(document("nonsense: true"), nil)
	unsubscribe()
	d.deliver(document(""), nil)
	assert.EqualValues(t, 2, first.Load())
	assert.EqualValues(t, 3, second.Load())
}

func TestStore_AwaitBlocksUntilFirstValidDocument(t *testing.T) {
	s, d := follow(t, "", anyEnvironment)
	awaited := make(chan bool)

	go func() { awaited <- s.Await(t.Context()) }()

	d.deliver(document("nonsense: true"), nil)

	select {
	case <-awaited:
		t.Fatal("Await returned without a configuration in force")
	default:
	}

	d.deliver(document(""), nil)
	assert.True(t, <-awaited, "got false after a delivery")

	s, _ = follow(t, "", anyEnvironment)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.False(t, s.Await(ctx), "got true after ctx ended")
}

func TestStore_HashesLatestDocumentThatCouldBeRead(t *testing.T) {
	s, d := follow(t, "", anyEnvironment)
	assert.Empty(t, s.Hash())

	seen := map[string]bool{}

	for _, doc := range []settings.Document{
		document(""), document("global: {clusterName: a}"), document("nonsense: true"),
		{Environment: []string{"A=1"}},
		{Environment: []string{"A=1", "B=2"}},
		{Environment: []string{"A=1,B=2"}},
	} {
		d.deliver(doc, nil)
		assert.Len(t, s.Hash(), 16)
		assert.False(t, seen[s.Hash()], "%v", doc)
		seen[s.Hash()] = true

		before := s.Hash()
		d.deliver(document("other"), errors.New("unreadable"))
		assert.Equal(t, before, s.Hash())
	}

	// Neither its name nor an empty environment make a difference.
	d.deliver(settings.Document{Name: "other", Environment: []string{}}, nil)
	d.deliver(document(""), nil)
	assert.Equal(t, settings.Document{}.Hash(), s.Hash())
}
