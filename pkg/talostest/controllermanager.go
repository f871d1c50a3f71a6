package talostest

import (
	"path"
	"slices"
	"strings"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
)

// controllerManagerResources returns the resources that describe kube-controller-manager.
func (c *Cluster) controllerManagerResources(spec MachineSpec) []resource.Resource {
	manager := k8s.NewControllerManagerConfig()
	*manager.TypedSpec() = k8s.ControllerManagerConfigSpec{
		Enabled:       true,
		Image:         "registry.k8s.io/kube-controller-manager:" + kubernetesVersion,
		CloudProvider: "external",
		PodCIDRs:      texts(c.podCIDRs),
		ServiceCIDRs:  texts(c.serviceCIDRs),
	}

	if len(spec.Controllers) > 0 {
		manager.TypedSpec().ExtraArgs = map[string]k8s.ArgValues{"controllers": {Values: slices.Clone(spec.Controllers)}}
	}

	pod := k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID)
	pod.TypedSpec().Pod = controllerManagerPod(manager.TypedSpec())

	return []resource.Resource{manager, pod}
}

// controllerManagerPod returns the part of the static pod that shows the arguments of kube-controller-manager.
func controllerManagerPod(spec *k8s.ControllerManagerConfigSpec) map[string]any {
	var command []any
	for _, arg := range controllerManagerCommand(spec) {
		command = append(command, arg)
	}

	return map[string]any{
		"apiVersion": "v1",
		"kind":       "Pod",
		"metadata":   map[string]any{"name": k8s.ControllerManagerID, "namespace": "kube-system"},
		"spec": map[string]any{
			"containers":  []any{map[string]any{"name": k8s.ControllerManagerID, "image": spec.Image, "command": command}},
			"hostNetwork": true,
		},
	}
}

// controllerManagerCommand returns the command of Talos v1.13.5 (k8s.ControlPlaneStaticPodController, manageControllerManager). Talos appends
// the `controllers` of the machine configuration to its own.
func controllerManagerCommand(spec *k8s.ControllerManagerConfigSpec) []string {
	secret := func(name string) string { return path.Join(constants.KubernetesControllerManagerSecretsDir, name) }
	controllers := append([]string{"*", "tokencleaner"}, spec.ExtraArgs["controllers"].Values...)

	return []string{
		"/usr/local/bin/kube-controller-manager",
		"--use-service-account-credentials",
		"--allocate-node-cidrs=true",
		"--authentication-kubeconfig=" + secret("kubeconfig"),
		"--authorization-kubeconfig=" + secret("kubeconfig"),
		"--bind-address=127.0.0.1",
		"--cluster-cidr=" + strings.Join(spec.PodCIDRs, ","),
		"--cluster-signing-cert-file=" + secret("ca.crt"),
		"--cluster-signing-key-file=" + secret("ca.key"),
		"--configure-cloud-routes=false",
		"--controllers=" + strings.Join(controllers, ","),
		"--kubeconfig=" + secret("kubeconfig"),
		"--leader-elect=true",
		"--profiling=false",
		"--root-ca-file=" + secret("ca.crt"),
		"--service-account-private-key-file=" + secret("service-account.key"),
		"--service-cluster-ip-range=" + strings.Join(spec.ServiceCIDRs, ","),
		"--tls-min-version=VersionTLS13",
	}
}
