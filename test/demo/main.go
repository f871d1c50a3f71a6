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
	keep := flag.Bool("keep", false, "keep the cluster until Ctrl-C, and print a kubeconfig")
	flag.Parse()

	if flag.NArg() > 0 || *nodes < 1 || *nodes > maxNodes {
		fmt.Fprintf(flag.CommandLine.Output(), "-nodes must be from 1 to %d, and there are no arguments\n", maxNodes)
		flag.Usage()
		os.Exit(exitUsage)
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	// While everything is being stopped, a second signal ends the process, and the kernel its children.
	context.AfterFunc(ctx, stop)

	d := newDemo(*nodes, newScreen(os.Stdout))
	d.keep = *keep

	os.Exit(exitCode(ctx, d.run(ctx)))
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
