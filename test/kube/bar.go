package kube

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	barWidth = 30
	// redraw is how often a bar on a terminal is drawn, plainLine how often a line is written elsewhere.
	redraw    = 200 * time.Millisecond
	plainLine = 10 * time.Second
)

// bar shows how far something long is: a line that is drawn again and again on a terminal, now and then a new line elsewhere.
type bar struct {
	w        io.Writer
	title    string
	terminal bool
	began    time.Time
	done     chan struct{}
	drawn    sync.WaitGroup

	mu    sync.Mutex
	steps int
	total int
	what  string
}

func newBar(w io.Writer, title string) *bar {
	b := &bar{w: w, title: title, terminal: isTerminal(w), began: time.Now(), done: make(chan struct{}), what: "looking"}
	if w != nil {
		b.drawn.Go(b.draw)
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

// finish draws the last state and ends the line.
func (b *bar) finish() {
	close(b.done)
	b.drawn.Wait()
}

func (b *bar) draw() {
	every, before, after := plainLine, "", "\n"
	if b.terminal {
		every, before, after = redraw, "\r\x1b[K", ""
	}

	ticker := time.NewTicker(every)
	defer ticker.Stop()

	for {
		fmt.Fprint(b.w, before+b.line()+after)

		select {
		case <-ticker.C:
		case <-b.done:
			fmt.Fprint(b.w, before+b.line()+"\n")

			return
		}
	}
}

func (b *bar) line() string {
	b.mu.Lock()
	defer b.mu.Unlock()

	elapsed := time.Since(b.began).Round(time.Second)
	if b.total == 0 {
		return fmt.Sprintf("%s: %s, %s", b.title, b.what, elapsed)
	}

	steps := min(b.steps, b.total)
	line := fmt.Sprintf("%s: %d/%d packages, %s", b.title, steps, b.total, elapsed)

	// The last package is the program, and the steps are of packages begun.
	if steps >= b.total-1 {
		line += ", linking"
	}

	if b.terminal {
		full := barWidth * steps / b.total
		line = fmt.Sprintf("%s [%s%s]", line, strings.Repeat("#", full), strings.Repeat(".", barWidth-full))
	}

	return line
}

func isTerminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	if !ok {
		return false
	}

	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)

	return err == nil
}
