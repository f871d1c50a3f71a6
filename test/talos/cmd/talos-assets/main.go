// Command talos-assets builds what the Talos test bed needs, unless the cache has it, and prints the folder on its last line. It
// never starts a machine.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	dir, err := talos.Assets(ctx, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "talos-assets:", err)
		os.Exit(1) //nolint:gocritic // what stop would restore ends with the process
	}

	fmt.Println(dir)
}
