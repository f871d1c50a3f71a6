package kube

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/test/process"
)

const (
	kubelet = "kubelet"
	// kubeletPort is outside the ephemeral port range.
	kubeletPort = 20250

	// enclosed is the kubelet's directory as it sees it itself: the path that it has built in, and one short enough for its
	// sockets.
	enclosed        = "/var/lib/kubelet"
	runtimeEndpoint = "unix://" + enclosed + "/cri.sock"

	// enclosure shields the machine from a kubelet that runs as root of a new user and mount namespace, and then becomes
	// the kubelet. Root keeps its uid in there, and with it the right to write sysctls, which are of the whole machine.
	enclosure = `set -e
mount --make-rprivate /
mount --rbind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /var/log
mkdir /var/lib/kubelet
mount --bind "$1" /var/lib/kubelet
shift
exec "$@"`
)

// KubeletSpec describes a real kubelet.
type KubeletSpec struct {
	// NodeName is the name of the Node it registers.
	NodeName string
	// BootstrapToken, if set, is what the kubelet obtains its client certificate with. Otherwise it has one from the
	// start.
	BootstrapToken string
	// RotateCertificates makes the kubelet replace its client certificate: one that it has not obtained itself right after
	// its start.
	RotateCertificates bool
	// Flags are appended to the flags, where a later flag overrides an earlier one. --node-ip must not be a loopback
	// address; without it the kubelet knows no address, and asks for a serving certificate only once a cloud controller
	// manager has set some.
	Flags []string
}

// Kubelet is a running kubelet. Its Node stays when it is stopped, as that of a machine that was switched off.
type Kubelet struct {
	*process.Process

	// Address is where it serves.
	Address netip.AddrPort
}

// StartKubelet starts a real kubelet with --cloud-provider=external, whose containers are only pretended by a runtime
// inside the same process, and returns when its Node exists. It asks for its serving certificate by a
// CertificateSigningRequest (serverTLSBootstrap).
//
// It needs this package's own kubelet, and user namespaces: as plain root a kubelet would change sysctls of this machine,
// so it runs where /proc/sys is read-only, and where /var/lib and /var/log are its own. The cache and the temporary
// directory must therefore be elsewhere. [Cluster.Stop] stops it.
func (c *Cluster) StartKubelet(ctx context.Context, spec KubeletSpec) (*Kubelet, error) {
	if os.Getenv(assetsEnv) != "" {
		return nil, fmt.Errorf("start the kubelet of %s: it must be this package's own: unset %s", spec.NodeName, assetsEnv)
	}

	assets, err := NodeAssetsOf(ctx, KubernetesVersion, c.options.Progress)
	if err != nil {
		return nil, err
	}

	random := make([]byte, 3)
	_, _ = rand.Read(random) // never fails (crypto/rand)

	k := &Kubelet{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, random[0], random[1], random[2]}), kubeletPort)}

	directory, err := c.prepareKubelet(spec, k.Address)
	if err != nil {
		return nil, fmt.Errorf("start the kubelet of %s: %w", spec.NodeName, err)
	}

	command := c.command(kubelet+"-"+spec.NodeName, append([]string{
		"-c", enclosure, "sh", directory, filepath.Join(assets, kubelet),
		"--config=" + enclosed + "/config.json",
		"--kubeconfig=" + enclosed + "/kubeconfig",
		"--bootstrap-kubeconfig=" + enclosed + "/bootstrap-kubeconfig",
		"--hostname-override=" + spec.NodeName,
		"--cloud-provider=external",
		"--v=2",
	}, spec.Flags...))
	command.Path, command.Env, command.Namespaces = "/bin/sh", []string{"FAKE_CRI=" + runtimeEndpoint}, true

	nodes := kubernetes.NewForConfigOrDie(c.Config()).CoreV1().Nodes()

	k.Process, err = startReady(ctx, command, func(ctx context.Context) error {
		_, err := nodes.Get(ctx, spec.NodeName, metav1.GetOptions{})

		return err
	})
	if err != nil {
		return nil, err
	}

	c.mu.Lock()
	c.kubelets = append(c.kubelets, k.Process)
	c.mu.Unlock()

	return k, nil
}

// prepareKubelet creates the kubelet's directory, its credentials and its configuration.
func (c *Cluster) prepareKubelet(spec KubeletSpec, address netip.AddrPort) (string, error) {
	// The parent does not exist once the cluster was stopped.
	directory, err := os.MkdirTemp(c.directory.root, kubelet)
	if err != nil {
		return "", err
	}

	config, err := json.MarshalIndent(c.kubeletConfiguration(spec, address), "", "  ")
	if err != nil {
		return "", err
	}

	// With a kubeconfig, the kubelet ignores the bootstrap kubeconfig.
	name, user := "bootstrap-kubeconfig", c.TokenConfig(spec.BootstrapToken)
	if spec.BootstrapToken == "" {
		name = "kubeconfig"

		if user, err = c.UserConfig(userNode+spec.NodeName, groupNodes); err != nil {
			return "", err
		}
	}

	return directory, errors.Join(
		os.WriteFile(filepath.Join(directory, "config.json"), config, 0o600),
		os.WriteFile(filepath.Join(directory, name), Kubeconfig(user), 0o600),
	)
}

// kubeletConfiguration is a KubeletConfiguration. Its type is not imported, as no product code needs that module.
func (c *Cluster) kubeletConfiguration(spec KubeletSpec, address netip.AddrPort) map[string]any {
	return map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",

		"address":            address.Addr().String(),
		"port":               address.Port(),
		"healthzPort":        0,
		"authentication":     map[string]any{"x509": map[string]any{"clientCAFile": c.directory.path(clientCAFile)}},
		"serverTLSBootstrap": true,
		"rotateCertificates": spec.RotateCertificates,

		"containerRuntimeEndpoint": runtimeEndpoint,
		"volumePluginDir":          enclosed + "/volume-plugins",

		// What a kubelet may not or need not do in a user namespace, whatever cgroups the machine has.
		"featureGates":                  map[string]any{"KubeletInUserNamespace": true},
		"cgroupsPerQOS":                 false,
		"enforceNodeAllocatable":        []string{},
		"failCgroupV1":                  false,
		"failSwapOn":                    false,
		"makeIPTablesUtilChains":        false,
		"localStorageCapacityIsolation": false,
		"resolvConf":                    "",
	}
}
