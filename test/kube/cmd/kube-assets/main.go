// Command kube-assets builds the control plane of the test bed, with -node also kubelet, kube-scheduler and kube-proxy, unless they are
// cached, and prints their directory on the last line of its output. It does nothing else.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	withNode := flag.Bool("node", false, "also build kubelet, kube-scheduler and kube-proxy")
	flag.Parse()

	assetsOf := kube.AssetsOf
	if *withNode {
		assetsOf = kube.NodeAssetsOf
	}

	directory, err := assetsOf(ctx, kube.KubernetesVersion, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kube-assets:", err)
		os.Exit(1) //nolint:gocritic // what stop would restore ends with the process
	}

	fmt.Println(directory)
}
