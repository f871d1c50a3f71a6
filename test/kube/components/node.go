//go:build node

package main

import (
	"context"
	"fmt"
	"os"

	"k8s.io/component-base/cli"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-client/pkg/fake"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// fakeRuntimeEnv names the variable with the endpoint at which a kubelet serves the fake container runtime.
const fakeRuntimeEnv = "FAKE_CRI"

// components maps a component's name to its main, which returns the exit code and finds its arguments in os.Args.
var components = map[string]func() int{
	"kube-scheduler": func() int { return cli.Run(scheduler.NewSchedulerCommand()) },
	"kube-proxy":     func() int { return cli.Run(proxy.NewProxyCommand()) },
	"kubelet":        runKubelet,
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
