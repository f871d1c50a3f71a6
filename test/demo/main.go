// Command demo shows talos-ccm at work on one computer: a real Kubernetes control plane, simulated Talos machines of several platforms,
// and the real talos-ccm in a process of its own, which initializes the machines' Nodes from what the machines say, gives them pod CIDRs, and
// approves the certificates that their kubelets ask for, but not those that are another's. It gives a Service the addresses of Nodes, and
// deletes the Nodes of machines that were reset or renamed.
//
// It checks every Node and every certificate against the machine and ends with status 0 only if all of them are right. It never touches a cluster that it did
// not start, listens on nothing but loopback, and leaves neither processes nor files.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

const (
	defaultNodes = 20
	maxNodes     = 5000

	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() {
	nodes := flag.Int("nodes", defaultNodes, fmt.Sprintf("number of simulated Talos machines, 1 to %d", maxNodes))
	flag.Parse()

	if flag.NArg() > 0 || *nodes < 1 || *nodes > maxNodes {
		fmt.Fprintf(flag.CommandLine.Output(), "the only flag is -nodes, from 1 to %d\n", maxNodes)
		flag.Usage()
		os.Exit(exitUsage)
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	// While everything is being stopped, a second signal ends the process, and the kernel its children.
	context.AfterFunc(ctx, stop)

	os.Exit(exitCode(ctx, newDemo(*nodes, newScreen(os.Stdout)).run(ctx)))
}

// exitCode tells a human what err was, if anything.
func exitCode(ctx context.Context, err error) int {
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "Interrupted; all processes stopped and files removed.")

		return exitInterrupted
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)

		return exitFailed
	}
}
