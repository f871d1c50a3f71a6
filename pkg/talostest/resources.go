package talostest

import (
	"crypto/rand"
	"net/netip"
	"slices"
	"strings"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/gen/xslices"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	clusterres "github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
)

// Properties of every machine.
const (
	talosVersion  = "v1.14.1"
	extensionName = "talos-ccm"
)

// seed returns the resources of a booted machine.
func (c *Cluster) seed(spec MachineSpec) []resource.Resource {
	resources := slices.Concat(identityResources(c, spec), runtimeResources(spec), addressResources(spec), c.kubernetesResources(spec))

	if spec.Type.IsControlPlane() {
		resources = append(resources, c.controllerManagerResources(spec)...)
	}

	if spec.Type.IsControlPlane() && spec.LocalhostAdminKubeconfig != "" {
		certs := secrets.NewKubernetes()
		certs.TypedSpec().LocalhostAdminKubeconfig = spec.LocalhostAdminKubeconfig

		resources = append(resources, certs)
	}

	return append(resources, spec.Resources...)
}

func identityResources(c *Cluster, spec MachineSpec) []resource.Resource {
	machineType := config.NewMachineType()
	machineType.SetMachineType(spec.Type)

	info := clusterres.NewInfo()
	info.TypedSpec().ClusterID = c.id
	info.TypedSpec().ClusterName = c.options.Name

	identity := clusterres.NewIdentity(clusterres.NamespaceName, clusterres.LocalIdentity)
	identity.TypedSpec().NodeID = rand.Text()

	hostname := network.NewHostnameStatus(network.NamespaceName, network.HostnameID)
	hostname.TypedSpec().Hostname = spec.Nodename

	nodename := k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID)
	nodename.TypedSpec().Nodename = spec.Nodename
	nodename.TypedSpec().HostnameVersion = "1"

	return []resource.Resource{machineType, info, identity, hostname, nodename}
}

func runtimeResources(spec MachineSpec) []resource.Resource {
	metadata := runtime.NewPlatformMetadataSpec(runtime.NamespaceName, runtime.PlatformMetadataID)
	*metadata.TypedSpec() = spec.Platform

	// Talos publishes nothing else until the platform's metadata service has answered.
	if spec.PlatformPending {
		*metadata.TypedSpec() = runtime.PlatformMetadataSpec{Platform: spec.Platform.Platform}
	}

	status := runtime.NewMachineStatus()
	status.TypedSpec().Stage = runtime.MachineStageRunning
	status.TypedSpec().Status.Ready = true

	version := runtime.NewVersion()
	version.TypedSpec().Name = "Talos"
	version.TypedSpec().Version = talosVersion

	extension := runtime.NewExtensionStatus(runtime.NamespaceName, "000."+extensionName)
	extension.TypedSpec().Image = "000." + extensionName + ".sqsh"
	extension.TypedSpec().Metadata.Name = extensionName
	extension.TypedSpec().Metadata.Version = "v0.0.0"

	resources := []resource.Resource{metadata, status, version, extension}

	if spec.SystemInformation != nil {
		information := hardware.NewSystemInformation(hardware.SystemInformationID)
		*information.TypedSpec() = *spec.SystemInformation

		resources = append(resources, information)
	}

	return resources
}

// addressResources returns the addresses of the loopback device and of apid, and the machine's other addresses.
func addressResources(spec MachineSpec) []resource.Resource {
	resources := []resource.Resource{
		Address{Link: "lo", Prefix: netip.MustParsePrefix("127.0.0.1/8"), Scope: nethelpers.ScopeHost}.status(),
		Address{Link: "eth0", Prefix: netip.PrefixFrom(spec.Address, spec.Address.BitLen())}.status(),
	}

	for _, address := range spec.Addresses {
		resources = append(resources, address.status())
	}

	return resources
}

func (c *Cluster) kubernetesResources(spec MachineSpec) []resource.Resource {
	nodeIP := k8s.NewNodeIP(k8s.NamespaceName, k8s.KubeletID)
	nodeIP.TypedSpec().Addresses = slices.Clone(spec.NodeIPs)

	nodeIPConfig := k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID)
	nodeIPConfig.TypedSpec().ValidSubnets = []string{"0.0.0.0/0"}
	nodeIPConfig.TypedSpec().ExcludeSubnets = append(xslices.Map(c.options.PodCIDRs, netip.Prefix.String), constants.DefaultIPv4ServiceCIDR)

	return []resource.Resource{nodeIP, nodeIPConfig}
}

// controllerManagerResources returns the resources that describe kube-controller-manager.
func (c *Cluster) controllerManagerResources(spec MachineSpec) []resource.Resource {
	config := k8s.NewControllerManagerConfig(k8s.ControllerManagerConfigID)
	*config.TypedSpec() = k8s.ControllerManagerConfigSpec{
		Enabled: true, CloudProvider: "external",
		PodCIDRs: xslices.Map(c.options.PodCIDRs, netip.Prefix.String), ServiceCIDRs: []string{constants.DefaultIPv4ServiceCIDR},
	}

	if len(spec.Controllers) > 0 {
		config.TypedSpec().ExtraArgs = map[string]k8s.ArgValues{"controllers": {Values: slices.Clone(spec.Controllers)}}
	}

	// The arguments that talos-ccm reads of those of Talos v1.13.5 (k8s.ControlPlaneStaticPodController, manageControllerManager). Talos
	// appends the `controllers` of the machine configuration to its own.
	command := []any{
		"/usr/local/bin/kube-controller-manager",
		"--use-service-account-credentials",
		"--allocate-node-cidrs=true",
		"--cluster-cidr=" + strings.Join(config.TypedSpec().PodCIDRs, ","),
		"--controllers=" + strings.Join(append([]string{"*", "tokencleaner"}, spec.Controllers...), ","),
		"--service-cluster-ip-range=" + constants.DefaultIPv4ServiceCIDR,
	}

	pod := k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID)
	pod.TypedSpec().Pod = map[string]any{
		"apiVersion": "v1",
		"kind":       "Pod",
		"metadata":   map[string]any{"name": k8s.ControllerManagerID, "namespace": "kube-system"},
		"spec":       map[string]any{"containers": []any{map[string]any{"name": k8s.ControllerManagerID, "command": command}}},
	}

	return []resource.Resource{config, pod}
}
