package talostest

import (
	"crypto/rand"
	"fmt"
	"net/netip"
	"net/url"
	"slices"

	"github.com/cosi-project/runtime/pkg/resource"
	coreconfig "github.com/siderolabs/talos/pkg/machinery/config"
	"github.com/siderolabs/talos/pkg/machinery/config/container"
	"github.com/siderolabs/talos/pkg/machinery/config/encoder"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/config/types/v1alpha1"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	clusterres "github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
)

// What every machine of a cluster has in common.
const (
	podCIDR           = "10.244.0.0/16"
	serviceCIDR       = "10.96.0.0/12"
	kubernetesVersion = "v1.36.2"
	defaultVersion    = "v1.13.5"
	extensionName     = "talos-ccm"
)

func clusterCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(podCIDR), netip.MustParsePrefix(serviceCIDR)}
}

// asResources widens typed resources.
func asResources[R resource.Resource](typed ...R) []resource.Resource {
	resources := make([]resource.Resource, 0, len(typed))
	for _, res := range typed {
		resources = append(resources, res)
	}

	return resources
}

// seed returns what a booted machine publishes.
func (c *Cluster) seed(spec MachineSpec) ([]resource.Resource, error) {
	config, err := c.machineConfig(spec.Type)
	if err != nil {
		return nil, err
	}

	return slices.Concat(
		identityResources(c, spec),
		runtimeResources(spec),
		addressResources(spec),
		kubernetesResources(spec),
		asResources(config),
		asResources(c.osRoot(spec.Type)),
		controlPlaneResources(spec),
	), nil
}

func identityResources(c *Cluster, spec MachineSpec) []resource.Resource {
	machineType := config.NewMachineType()
	machineType.SetMachineType(spec.Type)

	info := clusterres.NewInfo()
	info.TypedSpec().ClusterID = c.id
	info.TypedSpec().ClusterName = c.name

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

	// This is all that Talos publishes until the platform's metadata service has answered.
	if spec.PlatformPending {
		*metadata.TypedSpec() = runtime.PlatformMetadataSpec{Platform: spec.Platform.Platform}
	}

	status := runtime.NewMachineStatus()
	status.TypedSpec().Stage = runtime.MachineStageRunning
	status.TypedSpec().Status.Ready = true

	version := runtime.NewVersion()
	version.TypedSpec().Name = "Talos"
	version.TypedSpec().Version = spec.TalosVersion

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

// addressResources publishes the loopback device, the address of apid, and the machine's other addresses.
func addressResources(spec MachineSpec) []resource.Resource {
	api := netip.PrefixFrom(spec.Address, spec.Address.BitLen())

	statuses := []*network.AddressStatus{
		Address{Link: "lo", Prefix: netip.MustParsePrefix("127.0.0.1/8"), Scope: nethelpers.ScopeHost}.status(1),
		Address{Link: linkAPI, Prefix: api}.status(2),
	}

	links := []string{"", "lo", linkAPI}

	for _, address := range spec.Addresses {
		if !slices.Contains(links, address.Link) {
			links = append(links, address.Link)
		}

		statuses = append(statuses, address.status(uint32(slices.Index(links, address.Link)))) //nolint:gosec // a few links
	}

	return append(asResources(statuses...), newNodeAddress(network.NodeAddressDefaultID, []netip.Prefix{api}))
}

func kubernetesResources(spec MachineSpec) []resource.Resource {
	nodeIP := k8s.NewNodeIP(k8s.NamespaceName, k8s.KubeletID)
	nodeIP.TypedSpec().Addresses = slices.Clone(spec.NodeIPs)

	nodeIPConfig := k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID)
	nodeIPConfig.TypedSpec().ValidSubnets = []string{"0.0.0.0/0"}
	nodeIPConfig.TypedSpec().ExcludeSubnets = []string{podCIDR, serviceCIDR}

	return []resource.Resource{nodeIP, nodeIPConfig}
}

func controlPlaneResources(spec MachineSpec) []resource.Resource {
	if !spec.Type.IsControlPlane() {
		return nil
	}

	manager := k8s.NewControllerManagerConfig()
	manager.TypedSpec().Enabled = true
	manager.TypedSpec().Image = "kube-controller-manager:" + kubernetesVersion
	manager.TypedSpec().CloudProvider = "external"
	manager.TypedSpec().PodCIDRs = []string{podCIDR}
	manager.TypedSpec().ServiceCIDRs = []string{serviceCIDR}

	pod := k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID)
	pod.TypedSpec().Pod = controllerManagerPod(manager.TypedSpec())

	resources := []resource.Resource{manager, pod}

	if spec.LocalhostAdminKubeconfig != "" {
		resources = append(resources, newKubernetesSecrets(spec.LocalhostAdminKubeconfig))
	}

	return resources
}

// controllerManagerPod is the part of the static pod by which one can tell how kube-controller-manager runs.
func controllerManagerPod(spec *k8s.ControllerManagerConfigSpec) map[string]any {
	return map[string]any{
		"apiVersion": "v1",
		"kind":       "Pod",
		"metadata":   map[string]any{"name": k8s.ControllerManagerID, "namespace": "kube-system"},
		"spec": map[string]any{
			"containers": []any{map[string]any{
				"name":  k8s.ControllerManagerID,
				"image": spec.Image,
				"command": []any{
					"/usr/local/bin/kube-controller-manager",
					"--use-service-account-credentials",
					"--allocate-node-cidrs=true",
					"--bind-address=127.0.0.1",
					"--cluster-cidr=" + podCIDR,
					"--configure-cloud-routes=false",
					"--controllers=*,tokencleaner",
					"--leader-elect=true",
					"--service-cluster-ip-range=" + serviceCIDR,
				},
			}},
			"hostNetwork": true,
		},
	}
}

func newKubernetesSecrets(localhostAdminKubeconfig string) *secrets.Kubernetes {
	res := secrets.NewKubernetes()
	res.TypedSpec().LocalhostAdminKubeconfig = localhostAdminKubeconfig

	return res
}

// osRoot is the Talos CA as a machine holds it: the issuing key is on control planes only, and the issuing CA is the last of the
// accepted ones.
func (c *Cluster) osRoot(machineType machine.Type) *secrets.OSRoot {
	issuing, accepted := c.authority.current()
	slices.Reverse(accepted)

	res := secrets.NewOSRoot(secrets.OSRootID)
	res.TypedSpec().AcceptedCAs = accepted
	res.TypedSpec().Token = c.token

	if machineType.IsControlPlane() {
		res.TypedSpec().IssuingCA = issuing
	}

	return res
}

// configKey is what the machine configuration depends on.
type configKey struct {
	machineType machine.Type
	generation  int // of the CA
}

// machineConfig returns the machine configuration. Machines of one type share it: to marshal it takes longer than all else that a
// machine needs.
func (c *Cluster) machineConfig(machineType machine.Type) (*config.MachineConfig, error) {
	c.configMu.Lock()
	defer c.configMu.Unlock()

	key := configKey{machineType: machineType, generation: c.authority.currentGeneration()}

	provider, ok := c.configs[key]
	if !ok {
		var err error

		if provider, err = c.newMachineConfig(machineType); err != nil {
			return nil, err
		}

		c.configs[key] = provider
	}

	return config.NewMachineConfig(provider), nil
}

// newMachineConfig makes a small but valid machine configuration.
func (c *Cluster) newMachineConfig(machineType machine.Type) (coreconfig.Provider, error) {
	issuing, _ := c.authority.current()
	if !machineType.IsControlPlane() {
		issuing.Key = nil
	}

	external := true

	document := &v1alpha1.Config{
		ConfigVersion: "v1alpha1",
		MachineConfig: &v1alpha1.MachineConfig{
			MachineType:  machineType.String(),
			MachineToken: c.token,
			MachineCA:    issuing,
		},
		ClusterConfig: &v1alpha1.ClusterConfig{
			ClusterID:   c.id,
			ClusterName: c.name,
			ControlPlane: &v1alpha1.ControlPlaneConfig{
				Endpoint: &v1alpha1.Endpoint{URL: &url.URL{Scheme: "https", Host: "127.0.0.1:6443"}},
			},
			ClusterNetwork: &v1alpha1.ClusterNetworkConfig{
				DNSDomain: "cluster.local", PodSubnet: []string{podCIDR}, ServiceSubnet: []string{serviceCIDR},
			},
			ExternalCloudProviderConfig: &v1alpha1.ExternalCloudProviderConfig{ExternalEnabled: &external},
		},
	}

	written, err := container.NewV1Alpha1(document).EncodeBytes(encoder.WithComments(encoder.CommentsDisabled))
	if err != nil {
		return nil, fmt.Errorf("marshal the machine configuration: %w", err)
	}

	provider, err := container.NewReadonly(written, document)
	if err != nil {
		return nil, fmt.Errorf("build the machine configuration: %w", err)
	}

	return provider, nil
}
