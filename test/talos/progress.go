package talos

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	terminalRefresh = 200 * time.Millisecond
	plainRefresh    = 10 * time.Second
)

// progress tells a human how far a long piece of work is: one line that is redrawn on a terminal, a plain line every ten
// seconds elsewhere.
type progress struct {
	out     io.Writer
	title   string
	total   int
	done    atomic.Int64
	started time.Time
}

func newProgress(out io.Writer, title string, total int) *progress {
	return &progress{out: out, title: title, total: total, started: time.Now()}
}

func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok {
		return false
	}

	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)

	return err == nil
}

func (p *progress) line() string {
	return fmt.Sprintf("%s: %d of at most %d packages, %s", p.title, p.done.Load(), p.total, time.Since(p.started).Round(time.Second))
}

// show redraws the line until ctx is done, and then says that the work has ended.
func (p *progress) show(ctx context.Context) {
	refresh, prefix, suffix := plainRefresh, "", "\n"
	if isTerminal(p.out) {
		refresh, prefix, suffix = terminalRefresh, "\r\x1b[K", ""
	}

	ticker := time.NewTicker(refresh)
	defer ticker.Stop()

	for {
		select {
		case <-ticker.C:
			fmt.Fprint(p.out, prefix+p.line()+suffix)
		case <-ctx.Done():
			fmt.Fprint(p.out, prefix+p.line()+"\n")

			return
		}
	}
}

// count reads what `go build -v` prints, one package per line, and keeps what is not a package name for an error message.
func (p *progress) count(output io.Reader, other io.Writer) {
	scanner := bufio.NewScanner(output)
	for scanner.Scan() {
		if isPackage(scanner.Text()) {
			p.done.Add(1)
		} else {
			fmt.Fprintln(other, scanner.Text())
		}
	}
}

func isPackage(line string) bool {
	for _, r := range line {
		if r == ' ' || r == ':' || r == '\t' {
			return false
		}
	}

	return line != "" && line[0] != '#'
}
