package talos

import (
	"encoding/base64"
	"fmt"
	"strings"
	"time"

	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/siderolabs/talos/pkg/machinery/config"
	"github.com/siderolabs/talos/pkg/machinery/config/configpatcher"
	"github.com/siderolabs/talos/pkg/machinery/config/encoder"
	"github.com/siderolabs/talos/pkg/machinery/config/generate"
	"github.com/siderolabs/talos/pkg/machinery/config/generate/secrets"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
)

const (
	clusterName = "talos-ccm-bed"
	// pauseImage is a constant inside Talos (pkg/images), and not part of its machinery. It comes from where Kubernetes comes from.
	pauseImage = "/pause"
)

// basePatch is what every machine of a bed has in its configuration: a cloud provider that is not there yet, serving
// certificates that want approval, images from the bed's registry, and as little else as a cluster can do without.
//
// The kubelet and the container runtime stay away from cgroups: the bed may run where there are no controllers to delegate. The
// kubelet gets its static pods from Talos over HTTP, and would look for them only every 20 seconds.
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

// controlPlanePatch disables what requires a pod network, and shortens the API server's wait for open watches, which
// would delay a shutdown.
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

// configs are the machine configurations and the talosconfig.
type configs struct {
	controlPlane, worker config.Provider
	talosconfig          *clientconfig.Config
}

func generateConfigs(release Release, options Options) (configs, error) {
	contract, err := config.ParseContractFromVersion(release.Talos)
	if err != nil {
		return configs{}, fmt.Errorf("parse version contract: %w", err)
	}

	bundle, err := secrets.NewBundle(secrets.NewFixedClock(time.Now()), contract)
	if err != nil {
		return configs{}, fmt.Errorf("generate secrets: %w", err)
	}

	input, err := generate.NewInput(clusterName, "https://"+apiServerAddress, strings.TrimPrefix(release.Kubernetes, "v"),
		generate.WithVersionContract(contract),
		generate.WithSecretsBundle(bundle),
		generate.WithEndpointList([]string{controlAddress.String()}),
	)
	if err != nil {
		return configs{}, fmt.Errorf("prepare machine configuration: %w", err)
	}

	base := []string{fmt.Sprintf(basePatch, registryAddress)}

	controlPlane, err := machineConfig(input, machine.TypeControlPlane, base, []string{controlPlanePatch}, options.ControlPlanePatches)
	if err != nil {
		return configs{}, err
	}

	worker, err := machineConfig(input, machine.TypeWorker, base)
	if err != nil {
		return configs{}, err
	}

	talosconfig, err := input.Talosconfig()
	if err != nil {
		return configs{}, fmt.Errorf("generate talosconfig: %w", err)
	}

	return configs{controlPlane: controlPlane, worker: worker, talosconfig: talosconfig}, nil
}

func machineConfig(input *generate.Input, kind machine.Type, patchLists ...[]string) (config.Provider, error) {
	provider, err := input.Config(kind)
	if err != nil {
		return nil, fmt.Errorf("generate machine configuration of %s: %w", kind, err)
	}

	for _, list := range patchLists {
		patches, err := configpatcher.LoadPatches(list)
		if err != nil {
			return nil, fmt.Errorf("load configuration patch for %s: %w", kind, err)
		}

		patched, err := configpatcher.Apply(configpatcher.WithConfig(provider), patches)
		if err != nil {
			return nil, fmt.Errorf("patch machine configuration of %s: %w", kind, err)
		}

		if provider, err = patched.Config(); err != nil {
			return nil, fmt.Errorf("decode patched machine configuration of %s: %w", kind, err)
		}
	}

	return provider, nil
}

// userData is how a machine configuration reaches Talos in a container.
func userData(provider config.Provider) (string, error) {
	raw, err := provider.EncodeBytes(encoder.WithComments(encoder.CommentsDisabled))
	if err != nil {
		return "", fmt.Errorf("encode machine configuration: %w", err)
	}

	return base64.StdEncoding.EncodeToString(raw), nil
}

func imageReferences(provider config.Provider) references {
	cluster := provider.Cluster()
	registry, _, _ := strings.Cut(cluster.APIServer().Image(), "/")

	return references{
		etcd:              cluster.Etcd().Image(),
		apiServer:         cluster.APIServer().Image(),
		controllerManager: cluster.ControllerManager().Image(),
		scheduler:         cluster.Scheduler().Image(),
		kubelet:           provider.Machine().Kubelet().Image(),
		pause:             registry + pauseImage,
	}
}
