// Command kube-components is every Kubernetes component that the test bed starts, in one binary: etcd, kube-apiserver,
// kube-controller-manager, kube-scheduler, kubelet and kube-proxy. They share almost all of their code, so that compiling and linking them once
// saves most of the time, the disk and the cache that six binaries would cost.
//
// The component is the base name the program was started by (a link named kube-apiserver is an API server), else its first argument.
//
// With FAKE_CRI=unix:///path.sock in its environment, a kubelet serves a container runtime that runs nothing on that socket, and so needs
// no other runtime. The command adds nothing else to the components: their flags, defaults and behavior are upstream's.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // Talos gives its kubelets logging.format: json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // registers the metrics of client-go, as upstream's mains do
	_ "k8s.io/component-base/metrics/prometheus/version"  // registers kubernetes_build_info, as upstream's mains do
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-client/pkg/fake"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// fakeRuntimeEnv names the variable with the endpoint at which a kubelet serves the fake container runtime.
const fakeRuntimeEnv = "FAKE_CRI"

// components maps a component's name to its main, which returns the exit code and finds its arguments in os.Args.
var components = map[string]func() int{
	"etcd":                    runEtcd,
	"kube-apiserver":          func() int { return cli.Run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return cli.Run(controllermanager.NewControllerManagerCommand()) },
	"kube-scheduler":          func() int { return cli.Run(scheduler.NewSchedulerCommand()) },
	"kube-proxy":              func() int { return cli.Run(proxy.NewProxyCommand()) },
	"kubelet":                 runKubelet,
}

func main() {
	run, args := choose(os.Args)
	if run == nil {
		fmt.Fprintf(os.Stderr, "usage: kube-components COMPONENT [flags], where COMPONENT is one of %s\n", strings.Join(names(), ", "))
		os.Exit(2)
	}

	os.Args = args
	os.Exit(run())
}

// choose returns the component's main and the argument list it expects, or nil if args name no component.
func choose(args []string) (func() int, []string) {
	if len(args) > 0 {
		name := filepath.Base(args[0])
		if run, ok := components[name]; ok {
			return run, append([]string{name}, args[1:]...)
		}
	}

	if len(args) > 1 {
		return components[args[1]], args[1:]
	}

	return nil, nil
}

func names() []string {
	all := make([]string, 0, len(components))
	for name := range components {
		all = append(all, name)
	}

	slices.Sort(all)

	return all
}

// runEtcd returns only when etcd was asked to end; on an error etcd ends the process itself.
func runEtcd() int {
	etcdmain.Main(os.Args)

	return 0
}

func runKubelet() int {
	if endpoint := os.Getenv(fakeRuntimeEnv); endpoint != "" {
		if err := serveFakeRuntime(endpoint); err != nil {
			fmt.Fprintln(os.Stderr, err)

			return 1
		}
	}

	return cli.Run(kubelet.NewKubeletCommand(context.Background()))
}

// serveFakeRuntime serves a container runtime in which containers are only remembered: the kubelet registers its Node and reports Ready.
func serveFakeRuntime(endpoint string) error {
	remote := fake.NewFakeRemoteRuntime()
	// A kubelet asks the runtime for its cgroup driver; the zero value means systemd, which a test machine need not run.
	remote.RuntimeService.FakeLinuxConfiguration = &runtimeapi.LinuxRuntimeConfiguration{
		CgroupDriver: runtimeapi.CgroupDriver_CGROUPFS,
	}

	if err := remote.Start(endpoint); err != nil {
		return fmt.Errorf("serve the fake container runtime at %s: %w", endpoint, err)
	}

	return nil
}
