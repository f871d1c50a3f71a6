package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/test/process"
)

const (
	kubelet = "kubelet"

	kubeletAttempts = 3

	// enclosed is the kubelet's folder as it sees it itself: the path that it has built in, and one short enough for its
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

// Kubelet is a running kubelet.
type Kubelet struct {
	cluster *Cluster
	process *process.Process
	folder  string
}

// StartKubelet starts a real kubelet with --cloud-provider=external, whose containers are only pretended by a runtime
// inside the same process, and returns when its Node exists. It asks for its serving certificate by a
// CertificateSigningRequest (serverTLSBootstrap).
//
// It needs this package's own kubelet, and user namespaces: as plain root a kubelet would change sysctls of this machine,
// so it runs where /proc/sys is read-only, and where /var/lib and /var/log are its own. The cache and the temporary
// folder must therefore be elsewhere. [Cluster.Stop] stops it.
func (c *Cluster) StartKubelet(ctx context.Context, spec KubeletSpec) (*Kubelet, error) {
	if _, err := os.Stat(filepath.Join(c.assets, multiCall)); err != nil {
		return nil, fmt.Errorf("start the kubelet of %s: it must be this package's own, with a container runtime inside: %w (unset %s)",
			spec.NodeName, err, assetsEnv)
	}

	// Unlike the other components, a kubelet cannot listen on a port that is reserved, so it may be taken.
	for attempt := 1; ; attempt++ {
		k := &Kubelet{cluster: c, folder: c.folder.path(kubelet + "-" + spec.NodeName)}

		err := k.start(ctx, spec)
		if err == nil {
			return k, nil
		}

		err = errors.Join(fmt.Errorf("start the kubelet of %s: %w", spec.NodeName, err), k.Stop())
		if attempt == kubeletAttempts || !strings.Contains(err.Error(), "address already in use") {
			return nil, err
		}
	}
}

// PID is the process id of the kubelet.
func (k *Kubelet) PID() int { return k.process.PID() }

// Stop ends the kubelet and removes its files. Its Node stays, as that of a machine that was switched off. It
// does nothing if the kubelet has ended.
func (k *Kubelet) Stop() error {
	k.cluster.mu.Lock()
	k.cluster.kubelets = slices.DeleteFunc(k.cluster.kubelets, func(other *Kubelet) bool { return other == k })
	k.cluster.mu.Unlock()

	return k.end()
}

// end is Stop for callers that keep the cluster's list of kubelets themselves.
func (k *Kubelet) end() error {
	k.process.Stop(context.Background())

	if err := os.RemoveAll(k.folder); err != nil {
		return fmt.Errorf("remove the kubelet's folder: %w", err)
	}

	return nil
}

func (k *Kubelet) start(ctx context.Context, spec KubeletSpec) error {
	if err := k.prepare(spec); err != nil {
		return err
	}

	name := kubelet + "-" + spec.NodeName
	args := append([]string{
		"-c", enclosure, "sh", k.folder, filepath.Join(k.cluster.assets, kubelet),
		"--config=" + enclosed + "/config.json",
		"--kubeconfig=" + enclosed + "/kubeconfig",
		"--bootstrap-kubeconfig=" + enclosed + "/bootstrap-kubeconfig",
		"--root-dir=" + enclosed,
		"--cert-dir=" + enclosed + "/pki",
		"--hostname-override=" + spec.NodeName,
		"--cloud-provider=external",
		"--v=2",
	}, spec.Flags...)

	var err error

	k.process, err = process.Start(process.Command{
		Name: name, Path: "/bin/sh", Args: args, Env: []string{"FAKE_CRI=" + runtimeEndpoint},
		Log: filepath.Join(k.cluster.folder.logs, name+".log"), Namespaces: true,
	})
	if err != nil {
		return err
	}

	k.cluster.mu.Lock()
	k.cluster.kubelets = append(k.cluster.kubelets, k)
	client, err := k.cluster.adminClient()
	k.cluster.mu.Unlock()

	if err != nil {
		return err
	}

	return k.process.WaitReady(ctx, func(ctx context.Context) error {
		_, err := client.CoreV1().Nodes().Get(ctx, spec.NodeName, metav1.GetOptions{})

		return err
	})
}

// prepare makes the kubelet's folder, its credentials and its configuration.
func (k *Kubelet) prepare(spec KubeletSpec) error {
	// The parent is missing once the cluster was stopped.
	if err := os.Mkdir(k.folder, 0o700); err != nil {
		return err
	}

	port, err := ReservePort()
	if err != nil {
		return err
	}

	port.Release()

	config, err := json.MarshalIndent(k.configuration(spec, port.Number()), "", "  ")
	if err != nil {
		return err
	}

	// With a kubeconfig, the kubelet ignores the bootstrap kubeconfig.
	name, user := "bootstrap-kubeconfig", k.cluster.TokenConfig(spec.BootstrapToken)
	if spec.BootstrapToken == "" {
		name = "kubeconfig"

		if user, err = k.cluster.UserConfig(userNode+spec.NodeName, groupNodes); err != nil {
			return err
		}
	}

	return errors.Join(writeFile(filepath.Join(k.folder, "config.json"), config), writeFile(filepath.Join(k.folder, name), Kubeconfig(user)))
}

// configuration is a KubeletConfiguration. Its type is not imported, as no product code needs that module.
func (k *Kubelet) configuration(spec KubeletSpec, port int) map[string]any {
	return map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",

		"address":      "127.0.0.1",
		"port":         port,
		"readOnlyPort": 0,
		"healthzPort":  0,
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": k.cluster.folder.path(clientCAFile)},
		},
		"authorization":      map[string]any{"mode": "Webhook"},
		"serverTLSBootstrap": true,
		"rotateCertificates": spec.RotateCertificates,

		"containerRuntimeEndpoint": runtimeEndpoint,
		"podLogsDir":               enclosed + "/pod-logs",
		"volumePluginDir":          enclosed + "/volume-plugins",

		// What a kubelet may not or need not do in a user namespace, whatever cgroups the machine has.
		"featureGates":                  map[string]any{"KubeletInUserNamespace": true},
		"cgroupDriver":                  "cgroupfs",
		"cgroupsPerQOS":                 false,
		"enforceNodeAllocatable":        []string{},
		"failCgroupV1":                  false,
		"failSwapOn":                    false,
		"makeIPTablesUtilChains":        false,
		"localStorageCapacityIsolation": false,
		"resolvConf":                    "",
		"nodeLeaseDurationSeconds":      40,
		"nodeStatusUpdateFrequency":     "10s",
	}
}
