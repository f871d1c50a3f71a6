package talos

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/config"
	"github.com/siderolabs/talos/pkg/machinery/config/bundle"
	"github.com/siderolabs/talos/pkg/machinery/config/configpatcher"
	"github.com/siderolabs/talos/pkg/machinery/config/generate"

	"github.com/talos-ccm/talos-ccm/test/netns"
)

// virtualAddressPatch is the patch for control-plane machines that assigns a virtual address to one of them.
const virtualAddressPatch = `
apiVersion: v1alpha1
kind: Layer2VIPConfig
name: %s
link: %s
`

// cloudProviderPatch enables the external cloud provider.
const cloudProviderPatch = "cluster: {externalCloudProvider: {enabled: true}}"

// basePatch is the patch for all machines. It uses images from the bed's registry.
const basePatch = `
apiVersion: v1alpha1
kind: RegistryMirrorConfig
name: "*"
endpoints:
  - url: http://%s
skipFallback: true
`

// machinePatch enables serving certificates that require approval, and disables discovery.
//
// The kubelet does not use cgroups, because the host may have no controllers to delegate. It gets its static pods from Talos
// over HTTP; httpCheckFrequency replaces its default interval of 20 s.
const machinePatch = `
machine:
  kubelet:
    extraArgs:
      rotate-server-certificates: "true"
    extraConfig:
      cgroupsPerQOS: false
      enforceNodeAllocatable: [none]
      failSwapOn: false
      httpCheckFrequency: 1s
cluster:
  discovery:
    enabled: false
`

// controlPlanePatch disables components that require a pod network, and shortens the API server's grace period for open
// watches, which delays a shutdown.
const controlPlanePatch = `
cluster:
  apiServer:
    extraArgs:
      shutdown-watch-termination-grace-period: 1s
  network:
    cni:
      name: none
  proxy:
    disabled: true
  coreDNS:
    disabled: true
`

// machineDocuments is machinePatch for the documents of Talos 1.14.
const machineDocuments = `
apiVersion: v1alpha1
kind: KubeletConfig
config:
  serverTLSBootstrap: true
  cgroupsPerQOS: false
  enforceNodeAllocatable: [none]
  failSwapOn: false
  httpCheckFrequency: 1s
---
apiVersion: v1alpha1
kind: DiscoveryServiceConfig
name: default
$patch: delete
`

// controlPlaneDocuments is controlPlanePatch for the documents of Talos 1.14.
const controlPlaneDocuments = `
apiVersion: v1alpha1
kind: KubeAPIServerConfig
extraArgs:
  shutdown-watch-termination-grace-period: 1s
---
apiVersion: v1alpha1
kind: KubeFlannelCNIConfig
$patch: delete
---
apiVersion: v1alpha1
kind: KubeProxyConfig
enabled: false
---
apiVersion: v1alpha1
kind: KubeCoreDNSConfig
enabled: false
`

// criConfig disables cgroups in CRI, as machinePatch does in the kubelet. In Talos 1.14, a part of CRI's configuration in the
// machine configuration restarts CRI in every boot. CRI may then wait permanently for its volumes, although Talos 1.14.1
// contains https://github.com/siderolabs/talos/pull/13826.
const criConfig = `
[plugins."io.containerd.cri.v1.runtime"]
  disable_cgroup = true
`

// ControllerManagerPatch returns a configuration patch that sets arguments of kube-controller-manager by the names of its
// flags.
func ControllerManagerPatch(release Release, args map[string]string) string {
	format := "cluster: {controllerManager: {extraArgs: %s}}"
	if contract, err := config.ParseContractFromVersion(release.Talos); err == nil && contract.MultidocKubernetesConfigSupported() {
		format = "{apiVersion: v1alpha1, kind: KubeControllerManagerConfig, extraArgs: %s}"
	}

	encoded, _ := json.Marshal(args) //nolint:errchkjson // strings

	return fmt.Sprintf(format, encoded)
}

// configure generates the machine configurations and the talosconfig.
func configure(release Release, options Options) (*bundle.Bundle, error) {
	contract, err := config.ParseContractFromVersion(release.Talos)
	if err != nil {
		return nil, fmt.Errorf("parse version contract: %w", err)
	}

	machinePatch, controlPlanePatch := machinePatch, controlPlanePatch
	if contract.MultidocKubernetesConfigSupported() {
		machinePatch, controlPlanePatch = machineDocuments, controlPlaneDocuments
	}

	patches := []string{fmt.Sprintf(basePatch, registryAddress), machinePatch}
	if !options.WithoutCloudProvider {
		patches = append(patches, cloudProviderPatch)
	}

	base, err := configpatcher.LoadPatches(patches)
	if err != nil {
		return nil, fmt.Errorf("load configuration patches: %w", err)
	}

	patches = []string{controlPlanePatch, ControllerManagerPatch(release, options.ControllerManagerArgs)}
	if options.endpoint().Addr() == virtualAddress {
		patches = append(patches, fmt.Sprintf(virtualAddressPatch, virtualAddress, netns.Link))
	}

	controlPlane, err := configpatcher.LoadPatches(patches)
	if err != nil {
		return nil, fmt.Errorf("load configuration patch of the control plane: %w", err)
	}

	var endpoints []string
	for address := firstAddress; len(endpoints) < options.ControlPlanes; address = address.Next() {
		endpoints = append(endpoints, address.String())
	}

	return bundle.NewBundle(
		bundle.WithVerbose(false), bundle.WithPatch(base), bundle.WithPatchControlPlane(controlPlane),
		bundle.WithInputOptions(&bundle.InputOptions{
			ClusterName: "talos-ccm-bed",
			Endpoint:    "https://" + options.endpoint().String(),
			KubeVersion: strings.TrimPrefix(release.Kubernetes, "v"),
			GenOptions:  []generate.Option{generate.WithVersionContract(contract), generate.WithEndpointList(endpoints)},
		}),
	)
}
