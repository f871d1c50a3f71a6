package talos

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// powerOnMarker is the first line that a chassis prints at each boot.
const powerOnMarker = "chassis: power on"

// Line is a line of a machine's console.
type Line struct {
	// Since is the time that had passed since the machine was switched on.
	Since time.Duration
	Text  string
}

func (l Line) String() string { return fmt.Sprintf("[%9.3fs] %s", l.Since.Seconds(), l.Text) }

// Mark is a position in the console output.
type Mark int

// Console is the output of a machine. It is available even if the network of the machine is down.
type Console struct {
	out io.Writer

	mu      sync.Mutex
	lines   []Line
	boots   int
	boot    Mark
	on      time.Time
	changed chan struct{}
}

func newConsole(out io.Writer) *Console {
	return &Console{out: out, on: time.Now(), changed: make(chan struct{})}
}

// read takes lines until there are no more.
func (c *Console) read(input io.Reader) {
	reader := bufio.NewReader(input)

	for {
		text, err := reader.ReadString('\n')
		if text != "" {
			c.add(strings.TrimRight(text, "\r\n"))
		}

		if err != nil {
			return
		}
	}
}

func (c *Console) add(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if text == powerOnMarker {
		c.boots, c.boot, c.on = c.boots+1, Mark(len(c.lines)), time.Now()
	}

	line := Line{Since: time.Since(c.on), Text: text}
	c.lines = append(c.lines, line)
	fmt.Fprintln(c.out, line)

	close(c.changed)
	c.changed = make(chan struct{})
}

// PowerOn returns the position where the current boot starts.
func (c *Console) PowerOn() Mark {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.boot
}

// booted waits until the console shows that many boots.
func (c *Console) booted(ctx context.Context, boots int) error {
	for {
		c.mu.Lock()
		seen, changed := c.boots, c.changed
		c.mu.Unlock()

		if seen >= boots {
			return nil
		}

		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for console to show boot %d: %w", boots, context.Cause(ctx))
		}
	}
}

// Now returns the position after the last line.
func (c *Console) Now() Mark {
	c.mu.Lock()
	defer c.mu.Unlock()

	return Mark(len(c.lines))
}

// Lines returns what was printed after a mark.
func (c *Console) Lines(from Mark) []Line {
	lines, _ := c.after(from)

	return lines
}

func (c *Console) after(from Mark) ([]Line, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()

	return slices.Clone(c.lines[min(int(from), len(c.lines)):]), c.changed
}

// Wait returns the first line after a mark that matches, as soon as there is one.
func (c *Console) Wait(ctx context.Context, from Mark, pattern *regexp.Regexp) (Line, error) {
	for {
		lines, changed := c.after(from)

		for _, line := range lines {
			if pattern.MatchString(line.Text) {
				return line, nil
			}
		}

		from += Mark(len(lines))

		select {
		case <-changed:
		case <-ctx.Done():
			return Line{}, fmt.Errorf("wait for console to say %q: %w", pattern, context.Cause(ctx))
		}
	}
}
