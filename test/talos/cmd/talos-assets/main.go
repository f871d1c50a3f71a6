// Command talos-assets builds the assets of the Talos test bed, unless they are in the cache, and prints their directory on
// the last line. With -imager, it builds only Talos's imager and prints its path.
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

	build := talos.BedAssets
	if *imager != "" {
		build = func(ctx context.Context, out io.Writer) (string, error) { return talos.Imager(ctx, "", *imager, out) }
	}

	path, err := build(ctx, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "talos-assets:", err)
		os.Exit(1) //nolint:gocritic // the process ends, so stop is not needed
	}

	fmt.Println(path)
}
