package kube

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/talos-ccm/talos-ccm/test/screen"
)

// plainLine is how often progress is written where there is no terminal.
const plainLine = 10 * time.Second

// bar shows the progress of a build.
type bar struct {
	w     io.Writer
	title string
	began time.Time
	done  chan struct{}
	drawn sync.WaitGroup

	mu    sync.Mutex
	steps int
	total int
	what  string
}

// newBar starts to show the progress. A nil writer is silence.
func newBar(w io.Writer, title string) *bar {
	b := &bar{w: w, title: title, began: time.Now(), done: make(chan struct{}), what: "looking"}
	if w != nil {
		b.drawn.Go(func() { screen.Show(b.done, w, plainLine, b.lines) })
	}

	return b
}

// note says what is done before the total is known.
func (b *bar) note(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()

	b.what = what
}

func (b *bar) setTotal(total int) {
	b.mu.Lock()
	defer b.mu.Unlock()

	b.total = total
}

func (b *bar) step() {
	b.mu.Lock()
	defer b.mu.Unlock()

	b.steps++
}

// finish draws the last state.
func (b *bar) finish() {
	close(b.done)
	b.drawn.Wait()
}

func (b *bar) lines() []string {
	b.mu.Lock()
	defer b.mu.Unlock()

	state := b.title + ": " + b.what
	if b.total > 0 {
		state = screen.Bar(b.w, b.title, b.steps, b.total) + " packages"
	}

	return []string{fmt.Sprintf("%s, %s", state, time.Since(b.began).Round(time.Second))}
}
