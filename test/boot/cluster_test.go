//go:build e2e

package boot_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/process"
)

// startCluster starts the Kubernetes control plane. It runs on the host, because it would take too long to start on an
// emulated processor. The machine has addresses in the default service CIDR of test/kube.
func (m *vm) startCluster() {
	m.t.Helper()

	cluster, err := kube.Start(m.t.Context(), kube.Options{
		Progress: os.Stdout, APIServerFlags: []string{"--service-cluster-ip-range=10.96.0.0/12"},
		// Without a kubelet, the Node becomes unreachable, as that of a machine that is off.
		ControllerManager: kube.ControllerManager{Flags: []string{"--controllers=node-lifecycle-controller"}},
	})
	require.NoError(m.t, err)
	m.t.Cleanup(func() { assert.NoError(m.t, cluster.Stop()) })

	m.cluster, m.client = cluster, kubernetes.NewForConfigOrDie(cluster.Config())
}

// endpoint returns the URL of the API server on the machine's network.
func (m *vm) endpoint() string {
	return strings.Replace(m.cluster.Endpoint(), "127.0.0.1", hostAddress.String(), 1)
}

// writeSecrets writes a secrets bundle with the CAs of the control plane, so that Talos issues Kubernetes credentials that
// it accepts.
func (m *vm) writeSecrets(file string) {
	m.t.Helper()

	path := filepath.Join(m.dir, file)
	m.talosctl("gen", "secrets", "--output-file", path)

	content, err := os.ReadFile(path)
	require.NoError(m.t, err)

	var secrets map[string]any
	require.NoError(m.t, yaml.Unmarshal(content, &secrets))

	key, err := os.ReadFile(filepath.Join(m.cluster.LogDir(), "client-ca.key"))
	require.NoError(m.t, err)

	// The first certificate signs, the machine trusts both.
	crt := slices.Concat(m.cluster.ClientCA(), m.cluster.CA())
	certs, isMap := secrets["certs"].(map[string]any)
	require.True(m.t, isMap, "certs")

	certs["k8s"] = map[string][]byte{"crt": crt, "key": key}

	content, err = yaml.Marshal(secrets)
	require.NoError(m.t, err)
	require.NoError(m.t, os.WriteFile(path, content, 0o600))
}

// checkNode registers the machine's Node, as its kubelet does, or removes the label of the guide's rule from it. It waits
// until Talos and the extension have labeled it: with the version of the extension, with the platform, and as the rule says.
func (m *vm) checkNode(version string) {
	m.t.Helper()

	nodes := m.client.CoreV1().Nodes()

	if m.nodename == "" {
		m.nodename = strings.TrimSpace(m.awaitTalosctl("", "get", "nodename", "--output", "jsonpath={.spec.nodename}"))

		_, err := m.cluster.RegisterNode(m.t.Context(), kube.NodeSpec{Name: m.nodename, NodeIPs: []netip.Addr{machineAddress}})
		require.NoError(m.t, err)
	} else {
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:null}}}`, corev1.LabelTopologyRegion)
		_, err := nodes.Patch(m.t.Context(), m.nodename, types.MergePatchType, patch, metav1.PatchOptions{})
		require.NoError(m.t, err)
	}

	var node *corev1.Node

	m.eventually("Node is initialized and labeled", func() (err error) {
		node, err = nodes.Get(m.t.Context(), m.nodename, metav1.GetOptions{})
		if err != nil {
			return err
		}

		tainted := slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool {
			return taint.Key == cloudproviderapi.TaintExternalCloudProvider
		})
		if tainted || node.Labels[nodespec.LabelPlatform] != "metal" || node.Labels[corev1.LabelTopologyRegion] != "home" ||
			node.Labels["extensions.talos.dev/talos-ccm"] != version {
			return fmt.Errorf("taints %v, labels %v", node.Spec.Taints, node.Labels)
		}

		return nil
	})

	assert.NotEmpty(m.t, node.Spec.ProviderID)
	assert.Contains(m.t, node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: machineAddress.String()})
	m.awaitLease()
}

// awaitLease waits until the extension acquires or renews its lease.
func (m *vm) awaitLease() {
	m.t.Helper()

	identity := strings.TrimSpace(m.awaitTalosctl("", "get", "identity", "--output", "jsonpath={.spec.nodeId}"))

	var first *metav1.MicroTime

	m.eventually("extension renews its lease", func() error {
		lease, err := m.client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(m.t.Context(), "cloud-controller-manager-talos", metav1.GetOptions{})
		if err != nil {
			return err
		}

		holder, renewed := ptr.Deref(lease.Spec.HolderIdentity, ""), lease.Spec.RenewTime
		if first == nil {
			first = renewed
		}

		if holder != "talos-ccm_"+identity || renewed.Equal(first) {
			return fmt.Errorf("lease of %q was renewed at %s", holder, renewed)
		}

		return nil
	})
}

// checkServingCertificate checks that the extension approves the serving certificate of the machine's kubelet.
func (m *vm) checkServingCertificate() {
	m.t.Helper()

	csr, err := m.cluster.RequestServingCertificate(m.t.Context(), m.nodename, "", m.nodename, machineAddress.String())
	require.NoError(m.t, err)

	m.eventually("certificate is issued", func() error {
		found, err := m.client.CertificatesV1().CertificateSigningRequests().Get(m.t.Context(), csr.Name, metav1.GetOptions{})
		if err == nil && len(found.Status.Certificate) == 0 {
			err = fmt.Errorf("conditions: %v", found.Status.Conditions)
		}

		return err
	})
}

// awaitDeletion starts talos-ccm on the host, as on another control-plane machine, and waits until it has deleted the Node of
// the machine, which was reset.
func (m *vm) awaitDeletion() {
	m.t.Helper()

	kubeconfig, config := filepath.Join(m.dir, "kubeconfig"), filepath.Join(m.dir, "config.yaml")
	require.NoError(m.t, os.WriteFile(kubeconfig, m.cluster.Kubeconfig(), 0o600))
	require.NoError(m.t, os.WriteFile(config, []byte("lifecycle: {gracePeriod: 1m}"), 0o600))

	instance, err := process.Start(process.Command{
		Name: "talos-ccm", Path: filepath.Join(getenv(m.t, "TALOS_CCM_ARTIFACTS"), "talos-ccm-linux-amd64"), Log: filepath.Join(m.dir, "talos-ccm.log"),
		Args: []string{"--talosconfig=" + filepath.Join(m.dir, "reader.yaml"), "--kubeconfig=" + kubeconfig, "--cloud-config=" + config, "--secure-port=0"},
	})
	require.NoError(m.t, err)

	defer instance.Stop(m.t.Context())

	m.eventually("Node is deleted", func() error {
		_, err := m.client.CoreV1().Nodes().Get(m.t.Context(), m.nodename, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}

		return errors.Join(err, instance.Ended(), errors.New(instance.LogTail()))
	})

	events, err := m.client.CoreV1().Events(metav1.NamespaceDefault).List(m.t.Context(), metav1.ListOptions{FieldSelector: "reason=" + lifecycle.ReasonDeleting})
	require.NoError(m.t, err)
	require.Len(m.t, events.Items, 1)
	assert.Contains(m.t, events.Items[0].Message, "announced that it is being reset")
}
