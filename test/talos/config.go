package talos

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/config"
	"github.com/siderolabs/talos/pkg/machinery/config/bundle"
	"github.com/siderolabs/talos/pkg/machinery/config/configpatcher"
	"github.com/siderolabs/talos/pkg/machinery/config/generate"
	"github.com/siderolabs/talos/pkg/machinery/constants"
)

// basePatch is the patch for all machines. It enables the external cloud provider and serving certificates that require
// approval, uses images from the bed's registry, and disables discovery.
//
// The kubelet and the container runtime do not use cgroups, because the host may have no controllers to delegate. The
// kubelet gets its static pods from Talos over HTTP; httpCheckFrequency replaces its default interval of 20 s.
const basePatch = `
machine:
  kubelet:
    extraArgs:
      rotate-server-certificates: "true"
    extraConfig:
      cgroupsPerQOS: false
      enforceNodeAllocatable: [none]
      failSwapOn: false
      httpCheckFrequency: 1s
  files:
    - path: /etc/cri/conf.d/20-customization.part
      op: create
      content: |
        [plugins."io.containerd.cri.v1.runtime"]
          disable_cgroup = true
cluster:
  externalCloudProvider:
    enabled: true
  discovery:
    enabled: false
---
apiVersion: v1alpha1
kind: RegistryMirrorConfig
name: "*"
endpoints:
  - url: http://%s
skipFallback: true
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

// configure generates the machine configurations and the talosconfig.
func configure(release Release, controlPlanePatches []string) (*bundle.Bundle, error) {
	contract, err := config.ParseContractFromVersion(release.Talos)
	if err != nil {
		return nil, fmt.Errorf("parse version contract: %w", err)
	}

	base, err := configpatcher.LoadPatches([]string{fmt.Sprintf(basePatch, registryAddress)})
	if err != nil {
		return nil, fmt.Errorf("load configuration patch: %w", err)
	}

	controlPlane, err := configpatcher.LoadPatches(append([]string{controlPlanePatch}, controlPlanePatches...))
	if err != nil {
		return nil, fmt.Errorf("load configuration patches of the control plane: %w", err)
	}

	return bundle.NewBundle(
		bundle.WithVerbose(false), bundle.WithPatch(base), bundle.WithPatchControlPlane(controlPlane),
		bundle.WithInputOptions(&bundle.InputOptions{
			ClusterName: "talos-ccm-bed",
			Endpoint:    "https://" + netip.AddrPortFrom(controlAddress, constants.DefaultControlPlanePort).String(),
			KubeVersion: strings.TrimPrefix(release.Kubernetes, "v"),
			GenOptions:  []generate.Option{generate.WithVersionContract(contract), generate.WithEndpointList([]string{controlAddress.String()})},
		}),
	)
}
