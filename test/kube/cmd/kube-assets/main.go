// Command kube-assets builds the Kubernetes components of the test bed, unless they are cached, and prints their directory on the last line
// of its output. It does nothing else.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	directory, err := kube.AssetsOf(ctx, kube.KubernetesVersion, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kube-assets:", err)
		os.Exit(1) //nolint:gocritic // what stop would restore ends with the process
	}

	fmt.Println(directory)
}
