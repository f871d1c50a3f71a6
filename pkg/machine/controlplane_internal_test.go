package machine

import (
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
)

func TestKCMConfig_AllocatesNodeCIDRs(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name string
		args string
		want bool
	}{
		{
			name: "the defaults of Talos 1.10 to 1.13", want: true,
			args: "/usr/local/bin/kube-controller-manager --use-service-account-credentials --allocate-node-cidrs=true --controllers=*,tokencleaner",
		},
		{
			name: "the defaults of Talos 1.14", want: true,
			args: "/usr/local/bin/kube-controller-manager --use-service-account-credentials --allocate-node-cidrs=true --controllers=*",
		},
		{name: "the documented setting, merged by Talos 1.13", args: "--allocate-node-cidrs=true --controllers=*,tokencleaner,-node-ipam-controller"},
		{name: "the documented setting, merged by Talos 1.14", args: "--allocate-node-cidrs=true --controllers=*,-node-ipam-controller"},
		{name: "the controller disabled by its former name", args: "--allocate-node-cidrs=true --controllers=*,-nodeipam"},
		{name: "the controller disabled by a second flag", args: "--allocate-node-cidrs=true --controllers=* --controllers=-node-ipam-controller"},
		{name: "the first mention of a controller wins", args: "--allocate-node-cidrs=true --controllers=node-ipam-controller,-node-ipam-controller", want: true},
		{name: "only other controllers", args: "--allocate-node-cidrs=true --controllers=tokencleaner"},
		{name: "the controller enabled by name", args: "--allocate-node-cidrs --controllers=tokencleaner,node-ipam-controller", want: true},
		{name: "the controller enabled by its former name", args: "--allocate-node-cidrs --controllers=nodeipam", want: true},
		{name: "a value in an argument of its own", args: "--allocate-node-cidrs --controllers *", want: true},
		{name: "all controllers by default", args: "--allocate-node-cidrs=true", want: true},
		{name: "allocation disabled", args: "--allocate-node-cidrs=false --controllers=*"},
		{name: "allocation is disabled by default", args: "--controllers=*"},
		{name: "the last --allocate-node-cidrs wins", args: "--allocate-node-cidrs=true --allocate-node-cidrs=false"},
		{name: "a value that kube-controller-manager would reject", args: "--allocate-node-cidrs=perhaps", want: true},
		{name: "no arguments"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			var config KCMConfig
			if config.setArguments(strings.Fields(test.args)); config.AllocatesNodeCIDRs != test.want {
				t.Errorf("got %t, want %t", config.AllocatesNodeCIDRs, test.want)
			}
		})
	}
}

func TestArguments_ReadsTheKubeControllerManagerContainer(t *testing.T) {
	t.Parallel()

	container := func(name string, command, args any) map[string]any {
		return map[string]any{"name": name, "command": command, "args": args}
	}
	pod := map[string]any{"spec": map[string]any{"containers": []any{
		container("sidecar", []any{"--allocate-node-cidrs=true"}, nil),
		container(kubeControllerManager, []any{"kube-controller-manager"}, []any{"--controllers=*"}),
	}}}

	if args, err := arguments(pod); err != nil || strings.Join(args, " ") != "kube-controller-manager --controllers=*" {
		t.Errorf("got %q, %v", args, err)
	}

	for name, broken := range map[string]map[string]any{
		"no pod":                 nil,
		"no such container":      {"spec": map[string]any{"containers": []any{container("sidecar", nil, nil)}}},
		"containers is a string": {"spec": map[string]any{"containers": "x"}},
		"args is a number":       {"spec": map[string]any{"containers": []any{container(kubeControllerManager, nil, 5)}}},
	} {
		if args, err := arguments(broken); err == nil {
			t.Errorf("%s: got %q, want an error", name, args)
		}
	}
}

func TestSubnetBound(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		spec k8s.BootstrapManifestsConfigSpec
		want []string
	}{
		"the defaults of Talos": {
			spec: k8s.BootstrapManifestsConfigSpec{FlannelEnabled: true, ProxyEnabled: true, ProxyArgs: []string{"--cluster-cidr=10.244.0.0/16"}},
			want: []string{"Flannel", "kube-proxy"},
		},
		"another CNI, no kube-proxy": {},
		"another CNI":                {spec: k8s.BootstrapManifestsConfigSpec{ProxyEnabled: true}, want: []string{"kube-proxy"}},
		"another CNI, and kube-proxy with its argument": {
			spec: k8s.BootstrapManifestsConfigSpec{ProxyEnabled: true, ProxyArgs: []string{"--detect-local-mode=NodeCIDR"}},
		},
		"another CNI, and kube-proxy with its file": {
			spec: k8s.BootstrapManifestsConfigSpec{ProxyEnabled: true, ProxyConfig: map[string]any{"detectLocalMode": "NodeCIDR"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			if got := subnetBound(&test.spec); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}
