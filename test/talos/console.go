package talos

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// pollInterval is the interval for checking local conditions.
const pollInterval = 50 * time.Millisecond

// line is a line of a machine's console.
type line struct {
	// since is the time since the machine was switched on.
	since time.Duration
	text  string
}

func (l line) String() string { return fmt.Sprintf("[%9.3fs] %s", l.since.Seconds(), l.text) }

// console records the output of a machine. It works without the machine's network.
type console struct {
	log io.Writer

	mu      sync.Mutex
	partial []byte
	lines   []line
	// boot is the number of lines before the current boot, and on the start of the boot.
	boot int
	on   time.Time
}

// powerOn records the start of a boot.
func (c *console) powerOn() {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.partial, c.boot, c.on = nil, len(c.lines), time.Now()
	fmt.Fprintln(c.log, "power on at", c.on)
}

// Write appends output of the machine.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.partial = append(c.partial, p...)

	for {
		text, rest, found := bytes.Cut(c.partial, []byte("\n"))
		if !found {
			return len(p), nil
		}

		l := line{time.Since(c.on), string(bytes.TrimRight(text, "\r"))}
		c.lines, c.partial = append(c.lines, l), rest
		fmt.Fprintln(c.log, l)
	}
}

// after returns the lines after the first n.
func (c *console) after(n int) []line {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.lines[n:]
}

// wait waits for a line after the first n lines that contains a text, and returns it.
func (c *console) wait(ctx context.Context, n int, text string) (found line, err error) {
	err = wait.PollUntilContextCancel(ctx, pollInterval, true, func(context.Context) (bool, error) {
		for _, found = range c.after(n) {
			if strings.Contains(found.text, text) {
				return true, nil
			}
		}

		return false, nil
	})
	if err != nil {
		return found, fmt.Errorf("wait for %q on console: %w", text, err)
	}

	return found, nil
}
