// Package screen shows the progress of long operations: in place on a terminal, and as lines elsewhere.
package screen

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

const (
	barWidth = 30
	redraw   = 100 * time.Millisecond
)

// Show writes the lines that state returns until done is closed, and once after that. On a terminal they replace
// each other; elsewhere they are one line, written at most every interval if it has changed.
func Show(done <-chan struct{}, out io.Writer, interval time.Duration, state func() []string) {
	width := widthOf(out)
	if width > 0 {
		interval = redraw
	}

	ticker := time.NewTicker(interval)
	defer ticker.Stop()

	var (
		drawn int
		last  string
	)

	for ended := false; !ended; {
		select {
		case <-ticker.C:
		case <-done:
			ended = true
		}

		lines := state()

		if width > 0 {
			fmt.Fprint(out, draw(lines, drawn, width))
			drawn = len(lines)
		} else if line := strings.Join(lines, "; "); line != last {
			fmt.Fprintln(out, line)
			last = line
		}
	}
}

// draw returns the lines, after control characters that erase the lines drawn before.
func draw(lines []string, drawn, width int) string {
	var text strings.Builder

	if drawn > 0 {
		fmt.Fprintf(&text, "\x1b[%dA\r\x1b[J", drawn)
	}

	for _, line := range lines {
		// A longer line would wrap into more lines than are erased.
		if runes := []rune(line); len(runes) >= width {
			line = string(runes[:width-2]) + "…"
		}

		text.WriteString(line + "\n")
	}

	return text.String()
}

// Bar returns a title and a count of a total, with a bar on a terminal.
func Bar(out io.Writer, title string, count, total int) string {
	if widthOf(out) == 0 {
		return fmt.Sprintf("%s %d/%d", title, count, total)
	}

	full := barWidth * min(count, total) / max(1, total)

	return fmt.Sprintf("%-20s [%s%s] %d/%d", title, strings.Repeat("#", full), strings.Repeat(".", barWidth-full), count, total)
}

// widthOf returns the width of the terminal, or zero if out is not a terminal.
func widthOf(out io.Writer) int {
	file, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return 0
	}

	width, _, _ := term.GetSize(int(file.Fd()))

	return max(0, width)
}
