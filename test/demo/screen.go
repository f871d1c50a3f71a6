package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	barWidth = 30
	// redrawEvery is how often a status is drawn on a terminal, plainEvery how often a line is written elsewhere, if it has changed.
	redrawEvery = 100 * time.Millisecond
	plainEvery  = time.Second

	green = "\x1b[32m"
	red   = "\x1b[31m"
	bold  = "\x1b[1m"
	plain = "\x1b[0m"
)

// screen is where people read. On a terminal a status is drawn in place, below what was printed; elsewhere it is a line now and then.
// It is for one goroutine at a time.
type screen struct {
	file     *os.File
	terminal bool
	color    bool

	drawn  int    // lines of the status that stand on the terminal
	latest string // status that was last written elsewhere
}

func newScreen(file *os.File) *screen {
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	terminal := err == nil && os.Getenv("TERM") != "dumb"

	return &screen{file: file, terminal: terminal, color: terminal && os.Getenv("NO_COLOR") == ""}
}

// printf prints a line to stay.
func (s *screen) printf(format string, args ...any) {
	s.erase()
	fmt.Fprintf(s.file, format+"\n", args...)
}

// progress says how far something is, in a few short lines.
type progress func(*screen) []string

// during shows the progress of work until work has ended. It says nothing of what is done at once.
func (s *screen) during(state progress, work func() error) error {
	done := make(chan error, 1)

	go func() { done <- work() }()

	every, show := plainEvery, s.write
	if s.terminal {
		every, show = redrawEvery, s.draw
	}

	ticker := time.NewTicker(every)
	defer ticker.Stop()

	s.latest = ""

	for {
		select {
		case err := <-done:
			if s.latest != "" {
				show(state(s))
			}

			s.erase()

			return err
		case <-ticker.C:
			show(state(s))
		}
	}
}

// write shows a status as a line, if it is news.
func (s *screen) write(lines []string) {
	if text := strings.Join(lines, "; "); text != s.latest {
		s.latest = text
		s.printf("%s", text)
	}
}

// draw shows a status in place of the one before.
func (s *screen) draw(lines []string) {
	var (
		text  strings.Builder
		width = s.width()
	)

	for _, line := range lines {
		text.WriteString(truncate(line, width) + "\n")
	}

	s.erase()
	fmt.Fprint(s.file, text.String())

	s.drawn = len(lines)
}

// erase removes the status from the terminal.
func (s *screen) erase() {
	if s.drawn > 0 {
		fmt.Fprintf(s.file, "\x1b[%dA\r\x1b[J", s.drawn)
	}

	s.drawn = 0
}

// width of the terminal: a longer line would wrap.
func (s *screen) width() int {
	const fallback = 80

	size, err := unix.IoctlGetWinsize(int(s.file.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 {
		return fallback
	}

	return int(size.Col)
}

// truncate shortens a line without colors.
func truncate(line string, width int) string {
	runes := []rune(line)
	if len(runes) <= width {
		return line
	}

	return string(runes[:width-1]) + "…"
}

// label introduces a line of a status; on a terminal, where the lines are one below the other, all labels take the same space.
func (s *screen) label(text string) string {
	if s.terminal {
		return fmt.Sprintf("%-22s", text)
	}

	return text + " "
}

// bar is a count of a total, with a bar on a terminal.
func (s *screen) bar(count, total int) string {
	text := fmt.Sprintf("%d/%d", count, total)
	if !s.terminal {
		return text
	}

	full := barWidth * count / max(1, total)

	return fmt.Sprintf("[%s%s] %s", strings.Repeat("#", full), strings.Repeat(".", barWidth-full), text)
}

// in colors a text, where that is wanted.
func (s *screen) in(color, text string) string {
	if !s.color {
		return text
	}

	return color + text + plain
}
