// Package settings keeps the user's configuration in force: it reads it where it is delivered, follows its changes, and holds on to the last
// good one.
//
// It never decides what a configuration means (config does), and never acts on one.
package settings

import (
	"context"
	"maps"
	"slices"
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

var valid = metrics.NewGauge(&metrics.GaugeOpts{
	Name:           "talosccm_config_valid",
	Help:           "1 if the configuration that was delivered last is in force, 0 if it is not valid and the one before is (or none at all).",
	StabilityLevel: metrics.ALPHA,
})

func init() { legacyregistry.MustRegister(valid) }

// Document is a configuration as it is delivered. The zero value is a valid one: all defaults.
type Document struct {
	// Name is the place, for errors.
	Name string
	// Config is the file's content.
	Config []byte
	// Environment has the settings that a start takes, as NAME=value.
	Environment []string
}

// Source is where configurations are delivered.
type Source interface {
	// Follow calls deliver with the present document, at once and after every change, and with an error if there is something that
	// cannot be read. It calls lost when it can no longer tell changes, until the next delivery. It returns when ctx ends.
	Follow(ctx context.Context, deliver func(Document, error), lost func())
}

// Store is safe for concurrent use. Use New and Run.
type Store struct {
	source Source
	memory LastKnownGood
	check  func(environment []string) error

	mu       sync.Mutex
	current  *config.Compiled
	env      []string
	problem  error
	inStep   bool
	changed  chan struct{} // closed and replaced after every change
	handlers map[*func()]struct{}
}

// New makes a Store. A document whose environment does not pass check is not valid.
func New(source Source, memory LastKnownGood, check func(environment []string) error) *Store {
	return &Store{source: source, memory: memory, check: check, changed: make(chan struct{}), handlers: map[*func()]struct{}{}}
}

// Run follows the source until ctx ends.
func (k *Store) Run(ctx context.Context) {
	k.source.Follow(ctx, func(doc Document, err error) { k.take(ctx, doc, err) }, k.lost)
}

// Subscribe has handler called after every delivery that changed something, on the source's goroutine: it must not block. The handlers stay
// until the returned function is called.
func (k *Store) Subscribe(handler func()) (unsubscribe func()) {
	k.mu.Lock()
	defer k.mu.Unlock()

	k.handlers[&handler] = struct{}{}

	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()

		delete(k.handlers, &handler)
	}
}

// Current is the configuration in force; nil before the first good one, when nothing must be written.
func (k *Store) Current() *config.Compiled {
	k.mu.Lock()
	defer k.mu.Unlock()

	return k.current
}

// Environment is that of the document in force.
func (k *Store) Environment() []string {
	k.mu.Lock()
	defer k.mu.Unlock()

	return k.env
}

// Problem says what is wrong with the document that was delivered last; nil if it is in force.
func (k *Store) Problem() error {
	k.mu.Lock()
	defer k.mu.Unlock()

	return k.problem
}

// Await returns true once a configuration is in force and the source can tell changes of it, and false if ctx ends before.
func (k *Store) Await(ctx context.Context) bool {
	for {
		k.mu.Lock()
		ready, changed := k.current != nil && k.inStep, k.changed
		k.mu.Unlock()

		if ready {
			return true
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

func (k *Store) lost() {
	k.mu.Lock()
	defer k.mu.Unlock()

	k.inStep = false
}

func (k *Store) take(ctx context.Context, doc Document, err error) {
	compiled, err := k.compile(doc, err)
	logger := klog.FromContext(ctx)

	if err != nil {
		valid.Set(0)
		logger.Error(err, "The configuration is not valid", "source", doc.Name)

		compiled = k.lastGood(ctx)
	} else {
		valid.Set(1)
		logger.Info("The configuration is in force", "source", doc.Name)

		if err := k.memory.remember(doc.Config); err != nil {
			logger.Error(err, "After a restart there would be nothing to fall back on")
		}
	}

	k.mu.Lock()

	k.problem, k.inStep, k.current = err, true, compiled

	if err == nil {
		k.env = doc.Environment
	}

	close(k.changed)
	k.changed = make(chan struct{})
	handlers := slices.Collect(maps.Keys(k.handlers))

	k.mu.Unlock()

	for _, handle := range handlers {
		(*handle)()
	}
}

// lastGood is the configuration in force, or at the start the one that was when the process ended before; nil if there is none.
func (k *Store) lastGood(ctx context.Context) *config.Compiled {
	if current := k.Current(); current != nil {
		return current
	}

	data, err := k.memory.recall()
	if err != nil {
		klog.FromContext(ctx).Info("There is no good configuration to fall back on", "err", err)

		return nil
	}

	compiled, err := config.Parse(k.memory.path(), data)
	if err != nil { // by a stricter version, or not all of it was written
		klog.FromContext(ctx).Info("The last good configuration is not valid any more", "err", err)

		return nil
	}

	return compiled
}

func (k *Store) compile(doc Document, err error) (*config.Compiled, error) {
	if err != nil {
		return nil, err
	}

	compiled, err := config.Parse(doc.Name, doc.Config)
	if err != nil {
		return nil, err
	}

	return compiled, k.check(doc.Environment)
}
