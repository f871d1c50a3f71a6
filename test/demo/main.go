// Command demo shows talos-ccm on one computer: a real Kubernetes control plane, simulated Talos machines of several
// platforms, and the real talos-ccm in its own process. It initializes Nodes, allocates pod CIDRs, approves the CSRs of
// kubelets and denies one for the name of another Node, follows changes of a machine, gives a Service the addresses of
// Nodes, and deletes the Node of a machine that was reset.
//
// It exits with status 0 only if all of this happens. It listens only on loopback addresses and leaves neither processes
// nor files.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

const maxNodes = 5000

func main() {
	nodes := flag.Int("nodes", 20, fmt.Sprintf("number of simulated Talos machines, 1 to %d", maxNodes))
	keep := flag.Bool("keep", false, "keep the cluster until Ctrl-C, and print how to use it")
	executable := flag.String("talos-ccm", filepath.Join(filepath.Dir(os.Args[0]), "talos-ccm"), "executable of talos-ccm")
	flag.Parse()

	if flag.NArg() > 0 || *nodes < 1 || *nodes > maxNodes {
		fmt.Fprintf(flag.CommandLine.Output(), "-nodes must be from 1 to %d, and there are no arguments\n", maxNodes)
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	// During the cleanup, a second signal ends the process, and the kernel its children.
	context.AfterFunc(ctx, stop)

	d := &demo{members: newFleet(*nodes), executable: *executable, keep: *keep}

	switch err := d.run(ctx); {
	case err == nil:
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "Interrupted; all processes stopped and files removed.")
		os.Exit(130) // as shells report SIGINT
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}
