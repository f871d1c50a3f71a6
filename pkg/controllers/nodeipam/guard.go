package nodeipam

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	corev1 "k8s.io/api/core/v1"
	genericcontrollermanager "k8s.io/controller-manager/app"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	kubeControllerManager = "kube-controller-manager"
	// nodeIPAM and nodeIPAMAlias are what kube-controller-manager calls its allocator.
	nodeIPAM      = "node-ipam-controller"
	nodeIPAMAlias = "nodeipam"
)

// remedy turns kube-controller-manager's allocator off. Talos adds `controllers` to its own, `*,tokencleaner` or `*`
// (k8s/ControlPlaneStaticPodController: MergeAdditive; since Talos 1.14 ControlPlaneFinalController). A cluster that was made with Talos 1.14 has a document
// in the place of the field, and Talos refuses both.
const remedy = `cluster: {controllerManager: {extraArgs: {controllers: "-` + nodeIPAM + `"}}}; ` +
	`the same extraArgs in the document KubeControllerManagerConfig if there is one (Talos 1.14)`

// manager is what a control-plane machine's kube-controller-manager does with pod CIDRs.
type manager struct {
	allocates                  bool
	clusterCIDRs, serviceCIDRs []netip.Prefix
}

// readManager reads it of the machine. An error means that it cannot be told.
func readManager(ctx context.Context, machine talosapi.State) (manager, error) {
	core := state.WrapCore(machine)

	// Of its fields the CIDRs have the same numbers in all versions of Talos, and the arguments have not: those are read from the pod.
	config, err := safe.StateGetByID[*k8s.ControllerManagerConfig](ctx, core, k8s.ControllerManagerConfigID)
	if err != nil {
		return manager{}, fmt.Errorf("read the configuration of %s: %w", kubeControllerManager, err)
	}

	var m manager

	if m.clusterCIDRs, err = parsePrefixes(config.TypedSpec().PodCIDRs); err != nil {
		return manager{}, fmt.Errorf("read the pod CIDRs of %s: %w", kubeControllerManager, err)
	}

	if m.serviceCIDRs, err = parsePrefixes(config.TypedSpec().ServiceCIDRs); err != nil {
		return manager{}, fmt.Errorf("read the service CIDRs of %s: %w", kubeControllerManager, err)
	}

	if !config.TypedSpec().Enabled {
		return m, nil
	}

	pod, err := safe.StateGetByID[*k8s.StaticPod](ctx, core, k8s.ControllerManagerID)
	if err != nil {
		return manager{}, fmt.Errorf("read the static pod of %s: %w", kubeControllerManager, err)
	}

	args, err := arguments(pod.TypedSpec().Pod)
	if err != nil {
		return manager{}, fmt.Errorf("read the static pod of %s: %w", kubeControllerManager, err)
	}

	m.allocates = allocates(args)

	return m, nil
}

func parsePrefixes(texts []string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix

	for _, text := range texts {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return nil, err
		}

		prefixes = append(prefixes, prefix.Masked())
	}

	return prefixes, nil
}

// arguments are those of the container named kube-controller-manager.
func arguments(object map[string]any) ([]string, error) {
	data, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}

	var pod corev1.Pod
	if err := json.Unmarshal(data, &pod); err != nil {
		return nil, err
	}

	i := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == kubeControllerManager })
	if i < 0 {
		return nil, fmt.Errorf("no container %s", kubeControllerManager)
	}

	return slices.Concat(pod.Spec.Containers[i].Command, pod.Spec.Containers[i].Args), nil
}

// allocates tells whether kube-controller-manager with these arguments gives Nodes podCIDRs: --allocate-node-cidrs, which is off by default, and the
// controller, which is on.
func allocates(args []string) bool {
	var (
		allocate    = false
		controllers []string
	)

	for _, arg := range args {
		name, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")

		switch name {
		case "allocate-node-cidrs":
			on, err := strconv.ParseBool(value)
			allocate = !hasValue || err != nil || on
		case "controllers":
			controllers = append(controllers, strings.Split(strings.ReplaceAll(value, nodeIPAMAlias, nodeIPAM), ",")...)
		}
	}

	if controllers == nil {
		controllers = []string{"*"}
	}

	return allocate && genericcontrollermanager.IsControllerEnabled(nodeIPAM, nil, controllers)
}
