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
	kubernetesVersion = "v1.36.2"
	defaultVersion    = "v1.13.5"
	extensionName     = "talos-ccm"
)

// Defaults of Talos for podSubnets and serviceSubnets (constants.DefaultIPv4PodNet, DefaultIPv4ServiceNet).
func defaultPodCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(constants.DefaultIPv4PodNet)}
}

func defaultServiceCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(constants.DefaultIPv4ServiceNet)}
}

// clusterCIDRs returns the pod and service CIDRs, which contain no address of a machine.
func (c *Cluster) clusterCIDRs() []netip.Prefix { return slices.Concat(c.podCIDRs, c.serviceCIDRs) }

func texts(prefixes []netip.Prefix) []string {
	list := make([]string, len(prefixes))
	for i, prefix := range prefixes {
		list[i] = prefix.String()
	}

	return list
}

// asResources converts typed resources to a list of the interface type.
func asResources[R resource.Resource](typed ...R) []resource.Resource {
	resources := make([]resource.Resource, 0, len(typed))
	for _, res := range typed {
		resources = append(resources, res)
	}

	return resources
}

// seed returns the resources of a booted machine.
func (c *Cluster) seed(spec MachineSpec) ([]resource.Resource, error) {
	config, err := c.machineConfig(spec.Type)
	if err != nil {
		return nil, err
	}

	return slices.Concat(
		identityResources(c, spec),
		runtimeResources(spec),
		addressResources(spec),
		c.kubernetesResources(spec),
		asResources(config),
		asResources(c.osRoot(spec.Type)),
		c.controlPlaneResources(spec),
		spec.Resources,
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

	// Talos publishes nothing else until the platform's metadata service has answered.
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

// addressResources returns the addresses of the loopback device and of apid, and the machine's other addresses.
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

func (c *Cluster) kubernetesResources(spec MachineSpec) []resource.Resource {
	nodeIP := k8s.NewNodeIP(k8s.NamespaceName, k8s.KubeletID)
	nodeIP.TypedSpec().Addresses = slices.Clone(spec.NodeIPs)

	nodeIPConfig := k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID)
	nodeIPConfig.TypedSpec().ValidSubnets = []string{"0.0.0.0/0"}
	nodeIPConfig.TypedSpec().ExcludeSubnets = texts(slices.Concat(c.clusterCIDRs(), spec.ExcludedSubnets))

	return []resource.Resource{nodeIP, nodeIPConfig}
}

func (c *Cluster) controlPlaneResources(spec MachineSpec) []resource.Resource {
	if !spec.Type.IsControlPlane() {
		return nil
	}

	resources := c.controllerManagerResources(spec)

	if spec.LocalhostAdminKubeconfig != "" {
		resources = append(resources, newKubernetesSecrets(spec.LocalhostAdminKubeconfig))
	}

	return resources
}

func newKubernetesSecrets(localhostAdminKubeconfig string) *secrets.Kubernetes {
	res := secrets.NewKubernetes()
	res.TypedSpec().LocalhostAdminKubeconfig = localhostAdminKubeconfig

	return res
}

// osRoot returns the resource with the Talos CA. Only control-plane machines have the issuing key. The issuing CA is the last accepted CA.
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

// configKey identifies a machine configuration.
type configKey struct {
	machineType machine.Type
	generation  int // of the CA
}

// machineConfig returns the machine configuration. Machines of one type share it, because marshaling is the slowest part of adding a machine.
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

// newMachineConfig returns a minimal valid machine configuration.
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
				DNSDomain: "cluster.local", PodSubnet: texts(c.podCIDRs), ServiceSubnet: texts(c.serviceCIDRs),
			},
			ExternalCloudProviderConfig: &v1alpha1.ExternalCloudProviderConfig{ExternalEnabled: &external},
		},
	}

	written, err := container.NewV1Alpha1(document).EncodeBytes(encoder.WithComments(encoder.CommentsDisabled))
	if err != nil {
		return nil, fmt.Errorf("marshal machine configuration: %w", err)
	}

	provider, err := container.NewReadonly(written, document)
	if err != nil {
		return nil, fmt.Errorf("build machine configuration: %w", err)
	}

	return provider, nil
}
