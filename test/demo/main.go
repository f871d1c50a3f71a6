// Command demo shows talos-ccm at work on one computer: a real Kubernetes control plane, simulated Talos machines of several platforms,
// and the real talos-ccm in a process of its own, which initializes the machines' Nodes from what the machines say, gives them pod CIDRs, and
// approves the certificates that their kubelets ask for, but not those that are another's.
//
// It checks every Node and every certificate against the machine and ends with status 0 only if all of them are right. It never touches a cluster that it did
// not start, listens on nothing but loopback, and leaves neither processes nor files.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	defaultNodes = 20
	maxNodes     = 5000

	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	// While everything is being stopped, a second signal ends the process, and the kernel its children.
	context.AfterFunc(ctx, stop)

	os.Exit(exitCode(ctx, run(ctx, os.Args[1:])))
}

func run(ctx context.Context, args []string) error {
	nodes, err := parseArgs(args, os.Stderr)
	if err != nil {
		return err
	}

	if err := checkOpenFiles(nodes); err != nil {
		return err
	}

	return newDemo(nodes, newScreen(os.Stdout)).run(ctx)
}

// usageError says what is wrong with the command line.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// parseArgs returns the number of nodes.
func parseArgs(args []string, usage io.Writer) (int, error) {
	var nodes int

	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // errors are shown once, by exitCode
	flags.IntVar(&nodes, "nodes", defaultNodes, fmt.Sprintf("number of simulated Talos machines, 1 to %d", maxNodes))

	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		flags.SetOutput(usage)
		flags.Usage()

		return 0, err
	case err != nil:
		return 0, usageError{fmt.Errorf("%w (-nodes must be a number from 1 to %d)", err, maxNodes)}
	case flags.NArg() > 0:
		return 0, usageError{fmt.Errorf("unexpected argument %q: the only flag is -nodes", flags.Arg(0))}
	case nodes < 1 || nodes > maxNodes:
		return 0, usageError{fmt.Errorf("-nodes %d: must be from 1 to %d", nodes, maxNodes)}
	}

	return nodes, nil
}

// checkOpenFiles fails if this process may not open as many files as the machines need: a listener and a connection each. The Go runtime
// has raised the soft limit to the hard one.
func checkOpenFiles(nodes int) error {
	const others = 200

	var limit unix.Rlimit

	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("get RLIMIT_NOFILE: %w", err)
	}

	if needed := uint64(2*nodes + others); limit.Max < needed {
		return fmt.Errorf("%d nodes require %d open files, but the limit is %d: raise it (ulimit -Hn) or use fewer nodes",
			nodes, needed, limit.Max)
	}

	return nil
}

// exitCode tells a human what err was, if anything.
func exitCode(ctx context.Context, err error) int {
	var usage usageError

	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.As(err, &usage):
		fmt.Fprintln(os.Stderr, "demo:", err)

		return exitUsage
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "Interrupted; all processes stopped and files removed.")

		return exitInterrupted
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)

		return exitFailed
	}
}
