package kube_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

// TestCluster_IsControlPlane runs its subtests in order, on one cluster. The tests of the product use the other features:
// kubeconfigs, serving certificates, restarts, and new CAs.
func TestCluster_IsControlPlane(t *testing.T) {
	temporary := t.TempDir()
	t.Setenv("TMPDIR", temporary)
	t.Setenv("KUBEBUILDER_ASSETS", "") // whose kubelets have no container runtime inside

	cluster := start(t, kube.Options{})

	for _, subtest := range []struct {
		name string
		run  func(*testing.T, *kube.Cluster)
	}{
		{"a user has the rights of that user", testUser},
		{"a node is registered as a kubelet of Talos does", testRegisteredNode},
		{"requests are counted by kind", testRequests},
		{"a kubelet leaves the sysctls of this machine alone", testKubelet},
	} {
		t.Run(subtest.name, func(t *testing.T) { subtest.run(t, cluster) })
	}

	t.Run("stop leaves no process and no file", func(t *testing.T) {
		pids := cluster.PIDs()
		assert.Len(t, pids, 3)
		require.NoError(t, cluster.Stop())

		for name, pid := range pids {
			assert.False(t, alive(pid), "%s still runs as process %d", name, pid)
		}

		assertEmpty(t, temporary)
	})
}

func testUser(t *testing.T, cluster *kube.Cluster) {
	unprivileged, err := cluster.UserConfig("unprivileged")
	require.NoError(t, err)

	_, err = client(t, unprivileged).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	assert.True(t, apierrors.IsForbidden(err), "unprivileged user lists nodes: got %v, want Forbidden", err)

	register(t, cluster, kube.NodeSpec{Name: "mine"})
	register(t, cluster, kube.NodeSpec{Name: "theirs"})

	kubelet, err := cluster.UserConfig("system:node:mine", "system:nodes")
	require.NoError(t, err)

	patch := func(node string) error {
		_, err := client(t, kubelet).CoreV1().Nodes().
			Patch(t.Context(), node, types.MergePatchType, []byte(`{"metadata":{"annotations":{"touched":"yes"}}}`), metav1.PatchOptions{})

		return err
	}

	require.NoError(t, patch("mine"))
	err = patch("theirs")
	assert.True(t, apierrors.IsForbidden(err), "a kubelet patches another's node: got %v, want Forbidden", err)
}

func testRegisteredNode(t *testing.T, cluster *kube.Cluster) {
	node := register(t, cluster, kube.NodeSpec{
		Name:    "talos-a",
		NodeIPs: []netip.Addr{netip.MustParseAddr("10.5.0.7"), netip.MustParseAddr("fd00::7")},
		Labels:  map[string]string{"example.com/rack": "r1"},
		Taints:  []corev1.Taint{{Key: "example.com/new", Effect: corev1.TaintEffectNoExecute}},
	})

	assert.Equal(t, []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: "10.5.0.7"},
		{Type: corev1.NodeInternalIP, Address: "fd00::7"},
		{Type: corev1.NodeHostName, Address: "talos-a"},
	}, node.Status.Addresses)
	assert.Equal(t, "10.5.0.7,fd00::7", node.Annotations["alpha.kubernetes.io/provided-node-ip"])
	assert.Equal(t, "talos-a", node.Labels[corev1.LabelHostname])
	assert.Equal(t, "r1", node.Labels["example.com/rack"])
	assert.Subset(t, taintKeys(node), []string{uninitialized, "example.com/new"})
	assert.Equal(t, kube.DefaultOSImage, node.Status.NodeInfo.OSImage)
	require.NotEmpty(t, node.ManagedFields)
	assert.Equal(t, "kubelet", node.ManagedFields[0].Manager)

	controlPlane := register(t, cluster, kube.NodeSpec{Name: "control-plane", ControlPlane: true})
	assert.Contains(t, controlPlane.Labels, "node-role.kubernetes.io/control-plane")

	foreign := register(t, cluster, kube.NodeSpec{Name: "foreign", OSImage: "Debian GNU/Linux 13 (trixie)", WithoutCloudProvider: true})
	assert.NotContains(t, taintKeys(foreign), uninitialized)
}

func testRequests(t *testing.T, cluster *kube.Cluster) {
	count := func(want kube.Request) int {
		sum, err := cluster.CountRequests(t.Context(), func(request kube.Request) bool {
			for label, value := range want {
				if request[label] != value {
					return false
				}
			}

			return true
		})
		require.NoError(t, err)

		return sum
	}
	core := client(t, cluster.Config()).CoreV1()

	register(t, cluster, kube.NodeSpec{Name: "counted-1"})

	for name, test := range map[string]struct {
		kind kube.Request
		send func() error
	}{
		"resource": {kube.Request{"verb": "POST", "group": "", "resource": "nodes", "subresource": "", "code": "201"}, func() error {
			register(t, cluster, kube.NodeSpec{Name: "counted-2"})
			register(t, cluster, kube.NodeSpec{Name: "counted-3"})

			return nil
		}},
		"subresource": {kube.Request{"verb": "PATCH", "resource": "nodes", "subresource": "status", "code": "200"}, func() error {
			_, err := core.Nodes().PatchStatus(t.Context(), "counted-1", []byte(`{}`))
			_, again := core.Nodes().PatchStatus(t.Context(), "counted-1", []byte(`{}`))

			return errors.Join(err, again)
		}},
		"of two scopes": {kube.Request{"verb": "LIST", "resource": "podtemplates", "code": "200"}, func() error {
			_, err := core.PodTemplates(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
			_, all := core.PodTemplates(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})

			return errors.Join(err, all)
		}},
	} {
		before := count(test.kind)
		require.NoError(t, test.send(), name)
		assert.Equal(t, before+2, count(test.kind), name)
	}
}

func TestCluster_CleansUpAfterFailedStart(t *testing.T) {
	for component, options := range map[string]kube.Options{
		"kube-apiserver":          {APIServerFlags: []string{"--no-such-flag"}},
		"kube-controller-manager": {ControllerManager: kube.ControllerManager{Flags: []string{"--no-such-flag"}}},
	} {
		t.Run(component, func(t *testing.T) {
			temporary := t.TempDir()
			t.Setenv("TMPDIR", temporary)

			options.Progress = os.Stderr

			_, err := kube.Start(t.Context(), options)
			require.ErrorContains(t, err, "unknown flag: --no-such-flag")
			assert.ErrorContains(t, err, component+".log")
			assertEmpty(t, temporary)
		})
	}
}

func testKubelet(t *testing.T, cluster *kube.Cluster) {
	sysctls := readSysctls(t)

	kubelet, err := cluster.StartKubelet(t.Context(), kube.KubeletSpec{NodeName: "real"})
	require.NoError(t, err)
	assert.Equal(t, kubelet.PID(), cluster.PIDs()["kubelet-real"])
	assert.Equal(t, sysctls, readSysctls(t))

	kubelet.Stop(t.Context())
	assert.False(t, alive(kubelet.PID()), "a stopped kubelet runs")
}

// readSysctls reads those that a kubelet sets at its start.
func readSysctls(t *testing.T) (all string) {
	t.Helper()

	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"} {
		content, err := os.ReadFile("/proc/sys/" + name)
		require.NoError(t, err)

		all += string(content)
	}

	return all
}

const uninitialized = "node.cloudprovider.kubernetes.io/uninitialized"

func start(t *testing.T, options kube.Options) *kube.Cluster {
	t.Helper()

	options.Progress = os.Stderr

	cluster, err := kube.Start(t.Context(), options)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, cluster.Stop()) })

	return cluster
}

func register(t *testing.T, cluster *kube.Cluster, spec kube.NodeSpec) *corev1.Node {
	t.Helper()

	node, err := cluster.RegisterNode(t.Context(), spec)
	require.NoError(t, err)

	return node
}

func client(t *testing.T, config *rest.Config) kubernetes.Interface {
	t.Helper()

	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)

	return client
}

func taintKeys(node *corev1.Node) (keys []string) {
	for _, taint := range node.Spec.Taints {
		keys = append(keys, taint.Key)
	}

	return keys
}

// alive reports whether a process runs. One that has ended but was not reaped, which is up to its new parent, does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}

	// The state follows the name, which is in parentheses and may contain some.
	_, after, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')'):]), ") ")

	return !strings.HasPrefix(after, "Z") && !strings.HasPrefix(after, "X")
}

func assertEmpty(t *testing.T, directory string) {
	t.Helper()

	left, err := os.ReadDir(directory)
	require.NoError(t, err)
	assert.Empty(t, left)
}
