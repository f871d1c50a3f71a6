// Package settings keeps the configuration in force: it follows a source, validates its documents, and falls
// back to the last-known-good configuration.
//
// The source on Talos is the ExtensionServiceConfig document as a resource, not the mounted file: Talos mounts the file
// and sets the environment only when it starts the service, and at boot that is before it has loaded the document.
// Talos restarts the service when the document changes or is deleted, but not when it appears, and never in container
// mode (ExtensionServiceController). Therefore the last-known-good configuration is kept in a directory in the machine's
// /run, which outlives the process but not a reboot. If the document sets variables that the process was not started
// with, package ccm validates them as flags, and the process replaces itself by exec, so that Talos still supervises it.
//
// A missing document is valid. Before its first valid configuration, an instance is not a candidate for the leader
// election.
package settings

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
)

var info = metric.NewGaugeVec("talosccm_config_info",
	"Always 1. The label is the hash of the latest configuration and environment, valid or not, which should be the same on all control-plane machines.", "hash")

var valid = metric.NewGauge("talosccm_config_valid",
	"1 if the latest configuration is valid and in force, 0 if it is invalid and the last-known-good one, if any, is in force.")

// Document is a configuration as a Source delivers it. The zero value gives the defaults.
type Document struct {
	// Name of the document in errors and logs.
	Name string
	// Config is the content of the configuration file.
	Config []byte
	// Environment holds variables of the process, as NAME=value.
	Environment []string
}

// Hash returns the first 16 hexadecimal digits of the SHA-256 hash of the configuration and the environment.
func (d Document) Hash() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q", d.Config, d.Environment))

	return hex.EncodeToString(sum[:8])
}

// Store holds the configuration in force. Use New. It is safe for concurrent use.
type Store struct {
	source Source
	// lastGood is the path of the last-known-good configuration; empty if it does not survive a restart.
	lastGood         string
	checkEnvironment func(environment []string) error

	mu          sync.Mutex
	current     *config.Compiled
	environment []string
	hash        string
	problem     error
	handlers    map[*func()]struct{}
}

// New returns a Store. The last-known-good configuration is kept in stateDir, which should outlive the process; if
// stateDir is empty, it does not survive a restart. A document is invalid if its environment does not pass the check.
func New(source Source, stateDir string, checkEnvironment func(environment []string) error) *Store {
	s := &Store{source: source, checkEnvironment: checkEnvironment, handlers: map[*func()]struct{}{}}

	if stateDir != "" {
		s.lastGood = filepath.Join(stateDir, "last-good.yaml")
	}

	return s
}

// Run follows the source until ctx ends. It puts each document in force, or the last-known-good configuration if the
// document is invalid.
func (s *Store) Run(ctx context.Context) {
	logger := klog.FromContext(ctx)

	s.source.Follow(ctx, func(doc Document, err error) {
		var compiled *config.Compiled

		isRead := err == nil
		if isRead {
			compiled, err = config.Parse(doc.Name, doc.Config)
		}

		if err == nil {
			err = s.checkEnvironment(doc.Environment)
		}

		if err != nil {
			valid.Set(0)
			logger.Error(err, "Invalid configuration; keeping the last-known-good one", "source", doc.Name)

			if compiled = s.Current(); compiled == nil {
				compiled = s.load(logger)
			}
		} else {
			valid.Set(1)
			logger.Info("Applied configuration", "source", doc.Name)

			s.save(logger, doc.Config)
		}

		s.mu.Lock()

		s.problem, s.current = err, compiled

		if isRead {
			s.hash = doc.Hash()

			info.Reset()
			info.WithLabelValues(s.hash).Set(1)
		}

		if err == nil {
			s.environment = doc.Environment
		}

		handlers := slices.Collect(maps.Keys(s.handlers))

		s.mu.Unlock()

		for _, handle := range handlers {
			(*handle)()
		}
	})
}

// Subscribe calls handler after every delivery until the returned function is called. The handler must not block.
func (s *Store) Subscribe(handler func()) (unsubscribe func()) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.handlers[&handler] = struct{}{}

	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()

		delete(s.handlers, &handler)
	}
}

// Current returns the configuration in force. It is nil until there is a valid one; nothing must be written until
// then.
func (s *Store) Current() *config.Compiled {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.current
}

// Environment returns the environment of the latest valid document.
func (s *Store) Environment() []string {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.environment
}

// Hash returns the hash of the latest document that could be read, valid or not; empty before the first.
func (s *Store) Hash() string {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.hash
}

// Problem returns why the latest document is invalid; nil if it is in force.
func (s *Store) Problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.problem
}

// Await blocks until a configuration is in force. It returns false if ctx ends before that.
func (s *Store) Await(ctx context.Context) bool {
	delivered := make(chan struct{}, 1)

	defer s.Subscribe(func() {
		select {
		case delivered <- struct{}{}:
		default:
		}
	})()

	for s.Current() == nil {
		select {
		case <-delivered:
		case <-ctx.Done():
			return false
		}
	}

	return true
}

func (s *Store) save(logger klog.Logger, data []byte) {
	if s.lastGood == "" {
		return
	}

	next := s.lastGood + ".next"

	err := os.WriteFile(next, data, 0o600)
	if err == nil {
		err = os.Rename(next, s.lastGood)
	}

	if err != nil {
		logger.Error(err, "Failed to persist last-known-good configuration")
	}
}

// load returns nil if there is no valid configuration. A later version may refuse what an earlier one accepted.
func (s *Store) load(logger klog.Logger) *config.Compiled {
	data, err := os.ReadFile(s.lastGood)
	if err != nil {
		logger.Info("No last-known-good configuration", "err", err)

		return nil
	}

	compiled, err := config.Parse(s.lastGood, data)
	if err != nil {
		logger.Info("Last-known-good configuration is no longer valid", "err", err)
	}

	return compiled
}
