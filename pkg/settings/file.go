package settings

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

// filePeriod is how often a file is looked at: it works wherever a file can be. What is there counts once it has been read twice, for whoever
// writes a file in place may have written a part of it.
const filePeriod = 250 * time.Millisecond

// File follows a file, for use outside Talos.
type File struct {
	Path  string
	Clock clock.Clock
}

// Follow implements Source.
func (f File) Follow(ctx context.Context, deliver func(Document, error), _ func()) {
	var last, delivered *reading

	for ctx.Err() == nil {
		now := f.read()

		if now.equal(last) && !now.equal(delivered) {
			deliver(Document{Name: f.Path, Config: now.data}, now.err)

			delivered = now
		}

		last = now

		select {
		case <-ctx.Done():
		case <-f.Clock.After(filePeriod):
		}
	}
}

// reading is what a file had in it at one time, or why it could not be read.
type reading struct {
	data []byte
	err  error
}

func (r *reading) equal(other *reading) bool {
	return other != nil && bytes.Equal(r.data, other.data) && fmt.Sprint(r.err) == fmt.Sprint(other.err)
}

// read reads one byte more than a configuration may have, and leaves it to the parser to refuse that.
func (f File) read() *reading {
	file, err := os.Open(f.Path)
	if err != nil {
		return &reading{err: fmt.Errorf("read the configuration: %w", err)}
	}
	defer file.Close() //nolint:errcheck // nothing was written

	data, err := io.ReadAll(io.LimitReader(file, config.MaxSize+1))
	if err != nil {
		return &reading{err: fmt.Errorf("read the configuration: %w", err)}
	}

	return &reading{data: data, err: config.CheckNotEmpty(f.Path, data)}
}

// Defaults is the source without any configuration.
type Defaults struct{}

// Follow implements Source.
func (Defaults) Follow(ctx context.Context, deliver func(Document, error), _ func()) {
	deliver(Document{}, nil)
	<-ctx.Done()
}
