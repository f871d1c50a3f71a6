// Command talos-assets builds what the Talos test bed needs, unless the cache has it, and prints the directory on its
// last line. With -imager, it builds only Talos's imager, and prints its path. It never starts a machine.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	imager := flag.String("imager", "", "Directory to build Talos's imager into, instead of the test bed.")
	flag.Parse()

	build := talos.Assets
	if *imager != "" {
		build = func(ctx context.Context, out io.Writer) (string, error) { return talos.Imager(ctx, *imager, out) }
	}

	path, err := build(ctx, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "talos-assets:", err)
		os.Exit(1) //nolint:gocritic // what stop would restore ends with the process
	}

	fmt.Println(path)
}
