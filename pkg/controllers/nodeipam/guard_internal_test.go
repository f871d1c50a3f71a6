package nodeipam

import (
	"strings"
	"testing"
)

func TestAllocates(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name string
		args string
		want bool
	}{
		{name: "Talos 1.10 to 1.13 as it is", args: "/usr/local/bin/kube-controller-manager --use-service-account-credentials --allocate-node-cidrs=true --controllers=*,tokencleaner", want: true},
		{name: "Talos 1.14 as it is", args: "/usr/local/bin/kube-controller-manager --use-service-account-credentials --allocate-node-cidrs=true --controllers=*", want: true},
		{name: "with what we advise, merged by Talos 1.13", args: "--allocate-node-cidrs=true --controllers=*,tokencleaner,-node-ipam-controller"},
		{name: "with what we advise, merged by Talos 1.14", args: "--allocate-node-cidrs=true --controllers=*,-node-ipam-controller"},
		{name: "the controller off by its old name", args: "--allocate-node-cidrs=true --controllers=*,-nodeipam"},
		{name: "the controller off in a flag of its own", args: "--allocate-node-cidrs=true --controllers=* --controllers=-node-ipam-controller"},
		{name: "the first word on a controller counts", args: "--allocate-node-cidrs=true --controllers=node-ipam-controller,-node-ipam-controller", want: true},
		{name: "only other controllers", args: "--allocate-node-cidrs=true --controllers=tokencleaner"},
		{name: "the controller by name", args: "--allocate-node-cidrs --controllers=tokencleaner,node-ipam-controller", want: true},
		{name: "the controller by its old name", args: "--allocate-node-cidrs --controllers=nodeipam", want: true},
		{name: "all controllers if none is named", args: "--allocate-node-cidrs=true", want: true},
		{name: "no allocation", args: "--allocate-node-cidrs=false --controllers=*"},
		{name: "no allocation is the default", args: "--controllers=*"},
		{name: "the last word on allocation counts", args: "--allocate-node-cidrs=true --allocate-node-cidrs=false"},
		{name: "a value that kube-controller-manager would refuse", args: "--allocate-node-cidrs=perhaps", want: true},
		{name: "nothing"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			if got := allocates(strings.Fields(test.args)); got != test.want {
				t.Errorf("allocates %t, want %t", got, test.want)
			}
		})
	}
}

func TestArgumentsOfTheContainerThatMatters(t *testing.T) {
	t.Parallel()

	container := func(name string, command, args any) map[string]any {
		return map[string]any{"name": name, "command": command, "args": args}
	}
	pod := map[string]any{"spec": map[string]any{"containers": []any{
		container("sidecar", []any{"--allocate-node-cidrs=true"}, nil),
		container(kubeControllerManager, []any{"kube-controller-manager"}, []any{"--controllers=*"}),
	}}}

	if args, err := arguments(pod); err != nil || strings.Join(args, " ") != "kube-controller-manager --controllers=*" {
		t.Errorf("arguments %q, %v", args, err)
	}

	for name, broken := range map[string]map[string]any{
		"no pod":             nil,
		"no such container":  {"spec": map[string]any{"containers": []any{container("sidecar", nil, nil)}}},
		"containers a text":  {"spec": map[string]any{"containers": "x"}},
		"arguments a number": {"spec": map[string]any{"containers": []any{container(kubeControllerManager, nil, 5)}}},
	} {
		if args, err := arguments(broken); err == nil {
			t.Errorf("%s: arguments %q, want an error", name, args)
		}
	}
}
