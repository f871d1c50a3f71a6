package talos

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/talos-ccm/talos-ccm/test/screen"
)

// plainRefresh is how often progress is written where there is no terminal.
const plainRefresh = 10 * time.Second

// progress shows the progress of a build.
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

// show draws a line until ctx is done, and then once more.
func (p *progress) show(ctx context.Context) {
	screen.Show(ctx.Done(), p.out, plainRefresh, func() []string {
		bar := screen.Bar(p.out, p.title, int(p.done.Load()), p.total)

		return []string{fmt.Sprintf("%s packages at most, %s", bar, time.Since(p.started).Round(time.Second))}
	})
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
