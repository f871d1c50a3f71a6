// Command components is some of the Kubernetes components that the test bed starts, in one binary, because they share most of
// their code: etcd, kube-apiserver and kube-controller-manager, or, with the build tag node, kube-scheduler, kubelet and
// kube-proxy.
//
// The component is the base name of the link that the program was started by.
//
// With FAKE_CRI=unix:///path.sock in its environment, a kubelet serves a container runtime that runs nothing on that socket, and so needs
// no other runtime. The command adds nothing else to the components: their flags, defaults and behavior are upstream's.
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	_ "k8s.io/component-base/logs/json/register"          // Talos gives its kubelets logging.format: json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // registers the metrics of client-go, as upstream's mains do
	_ "k8s.io/component-base/metrics/prometheus/version"  // registers kubernetes_build_info, as upstream's mains do
)

func main() {
	run, ok := components[filepath.Base(os.Args[0])]
	if !ok {
		fmt.Fprintf(os.Stderr, "%s is not a link named %s\n", os.Args[0], strings.Join(slices.Sorted(maps.Keys(components)), ", "))
		os.Exit(2)
	}

	os.Exit(run())
}
