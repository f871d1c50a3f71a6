package kube_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/talos-ccm/talos-ccm/test/kube"
)

// TestControlPlane runs its subtests in order, on one cluster.
func TestControlPlane(t *testing.T) {
	temporary := t.TempDir()
	t.Setenv("TMPDIR", temporary)

	cluster := start(t, kube.Options{})

	for _, subtest := range []struct {
		name string
		run  func(*testing.T, *kube.Cluster)
	}{
		{"the administrator's kubeconfig is ready to use", testKubeconfig},
		{"a user has the rights of that user", testUser},
		{"a node is registered as a kubelet of Talos does", testRegisteredNode},
		{"requests are counted by kind", testRequests},
		{"an approved serving certificate is issued", testServingCertificate},
		{"the API server restarts with its port and its data", testRestart},
		{"the serving authority is replaced and clients stay valid", testRotation},
	} {
		t.Run(subtest.name, func(t *testing.T) { subtest.run(t, cluster) })
	}

	t.Run("stop leaves no process and no file", func(t *testing.T) {
		pids := cluster.PIDs()
		if len(pids) != 3 {
			t.Errorf("the cluster has processes %v, want etcd, kube-apiserver and kube-controller-manager", pids)
		}

		if err := cluster.Stop(); err != nil {
			t.Fatal(err)
		}

		for name, pid := range pids {
			if alive(pid) {
				t.Errorf("%s still runs as process %d", name, pid)
			}
		}

		wantEmpty(t, temporary)
	})
}

func testKubeconfig(t *testing.T, cluster *kube.Cluster) {
	config, err := clientcmd.RESTConfigFromKubeConfig(cluster.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}

	if _, err := client(t, config).CoreV1().Namespaces().Get(t.Context(), metav1.NamespaceSystem, metav1.GetOptions{}); err != nil {
		t.Error(err)
	}

	version, err := client(t, config).Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}

	if os.Getenv("KUBEBUILDER_ASSETS") == "" && version.GitVersion != kube.KubernetesVersion {
		t.Errorf("the API server is of version %s, want %s", version.GitVersion, kube.KubernetesVersion)
	}
}

func testUser(t *testing.T, cluster *kube.Cluster) {
	unprivileged, err := cluster.UserConfig("unprivileged")
	if err != nil {
		t.Fatal(err)
	}

	if _, err := client(t, unprivileged).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("unprivileged user lists nodes: got %v, want Forbidden", err)
	}

	register(t, cluster, kube.NodeSpec{Name: "mine"})
	register(t, cluster, kube.NodeSpec{Name: "theirs"})

	patch := []byte(`{"metadata":{"annotations":{"touched":"yes"}}}`)
	nodes := client(t, kubeletConfig(t, cluster, "mine")).CoreV1().Nodes()

	if _, err := nodes.Patch(t.Context(), "mine", "application/merge-patch+json", patch, metav1.PatchOptions{}); err != nil {
		t.Errorf("a kubelet patches its own node: %v", err)
	}

	_, err = nodes.Patch(t.Context(), "theirs", "application/merge-patch+json", patch, metav1.PatchOptions{})
	if !apierrors.IsForbidden(err) {
		t.Errorf("a kubelet patches another's node: got %v, want Forbidden", err)
	}
}

func testRegisteredNode(t *testing.T, cluster *kube.Cluster) {
	node := register(t, cluster, kube.NodeSpec{
		Name:    "talos-a",
		NodeIPs: []netip.Addr{netip.MustParseAddr("10.5.0.7"), netip.MustParseAddr("fd00::7")},
		Labels:  map[string]string{"example.com/rack": "r1"},
		Taints:  []corev1.Taint{{Key: "example.com/new", Effect: corev1.TaintEffectNoExecute}},
	})

	wantAddresses := []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: "10.5.0.7"},
		{Type: corev1.NodeInternalIP, Address: "fd00::7"},
		{Type: corev1.NodeHostName, Address: "talos-a"},
	}
	if !slices.Equal(node.Status.Addresses, wantAddresses) {
		t.Errorf("addresses are %v, want %v", node.Status.Addresses, wantAddresses)
	}

	if got := node.Annotations["alpha.kubernetes.io/provided-node-ip"]; got != "10.5.0.7,fd00::7" {
		t.Errorf("provided-node-ip is %q", got)
	}

	if node.Labels[corev1.LabelHostname] != "talos-a" || node.Labels["example.com/rack"] != "r1" {
		t.Errorf("labels are %v", node.Labels)
	}

	if got := taintKeys(node); !slices.Contains(got, uninitialized) || !slices.Contains(got, "example.com/new") {
		t.Errorf("taints are %v", got)
	}

	if node.Status.NodeInfo.OSImage != kube.DefaultOSImage {
		t.Errorf("OS image is %q, want %q", node.Status.NodeInfo.OSImage, kube.DefaultOSImage)
	}

	if len(node.ManagedFields) == 0 || node.ManagedFields[0].Manager != "kubelet" {
		t.Errorf("field managers are %v, want kubelet", node.ManagedFields)
	}

	foreign := register(t, cluster, kube.NodeSpec{Name: "foreign", OSImage: "Debian GNU/Linux 13 (trixie)", WithoutCloudProvider: true})
	if slices.Contains(taintKeys(foreign), uninitialized) {
		t.Error("a node without cloud provider is tainted as uninitialized")
	}
}

func testRequests(t *testing.T, cluster *kube.Cluster) {
	before := requests(t, cluster)

	for i := range 5 {
		register(t, cluster, kube.NodeSpec{Name: fmt.Sprintf("counted-%d", i)})
	}

	since := requests(t, cluster).Since(before)
	if got := since[kube.RequestKind{Verb: "POST", Resource: "nodes", Code: 201}]; got != 5 {
		t.Errorf("5 nodes registered by %d requests; all: %v", got, since)
	}
}

func testRestart(t *testing.T, cluster *kube.Cluster) {
	register(t, cluster, kube.NodeSpec{Name: "lasting"})

	endpoint, pids := cluster.Endpoint(), cluster.PIDs()
	before := client(t, cluster.Config())

	cluster.StopAPIServer(t.Context())

	if _, err := before.CoreV1().Nodes().Get(t.Context(), "lasting", metav1.GetOptions{}); err == nil {
		t.Error("a stopped API server answers")
	}

	if err := cluster.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}

	if _, err := before.CoreV1().Nodes().Get(t.Context(), "lasting", metav1.GetOptions{}); err != nil {
		t.Errorf("a client from before the restart reads what was written before: %v", err)
	}

	if cluster.Endpoint() != endpoint {
		t.Errorf("the endpoint changed from %s to %s", endpoint, cluster.Endpoint())
	}

	if after := cluster.PIDs(); after["etcd"] != pids["etcd"] || after["kube-apiserver"] == pids["kube-apiserver"] {
		t.Errorf("processes were %v and are %v, want another kube-apiserver only", pids, after)
	}
}

func testRotation(t *testing.T, cluster *kube.Cluster) {
	old := cluster.Config()

	if err := cluster.RotateServingCA(t.Context()); err != nil {
		t.Fatal(err)
	}

	if _, err := client(t, old).Discovery().ServerVersion(); err == nil || !strings.Contains(err.Error(), "x509") {
		t.Errorf("client that knows only the old CA: got %v, want a certificate error", err)
	}

	old.CAData = cluster.CA()

	if _, err := client(t, old).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("an old client certificate with the new authority: %v", err)
	}

	if _, err := client(t, cluster.Config()).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Error(err)
	}

	testServingCertificate(t, cluster)
}

func TestCluster_CleansUpAfterFailedStart(t *testing.T) {
	for _, test := range []struct {
		name    string
		options kube.Options
		want    string
	}{
		{
			"an API server that refuses a flag tells why",
			kube.Options{APIServerFlags: []string{"--no-such-flag"}},
			"unknown flag: --no-such-flag",
		},
		{
			"a controller manager that refuses a flag tells why",
			kube.Options{ControllerManager: kube.ControllerManager{Flags: []string{"--no-such-flag"}}},
			"unknown flag: --no-such-flag",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			temporary := t.TempDir()
			t.Setenv("TMPDIR", temporary)

			test.options.Progress = os.Stderr

			if _, err := kube.Start(t.Context(), test.options); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}

			wantEmpty(t, temporary)
		})
	}
}

func TestPodCIDRs(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())

	cluster := start(t, kube.Options{ControllerManager: kube.ControllerManager{
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
	}})
	register(t, cluster, kube.NodeSpec{Name: "a"})

	eventually(t, "the node has a pod CIDR", func(ctx context.Context) error {
		node, err := client(t, cluster.Config()).CoreV1().Nodes().Get(ctx, "a", metav1.GetOptions{})
		if err == nil && node.Spec.PodCIDR == "" {
			return fmt.Errorf("spec is %+v", node.Spec)
		}

		return err
	})
}

func TestCluster_ExitsWhenParentIsKilled(t *testing.T) {
	temporary := t.TempDir()
	t.Setenv("TMPDIR", temporary)
	t.Setenv("KUBEBUILDER_ASSETS", "") // the victim starts a kubelet

	pids := killVictim(t)
	if len(pids) != 4 {
		t.Errorf("the victim had %v, want four components", pids)
	}

	eventually(t, "no component outlives its parent", func(context.Context) error {
		for name, pid := range pids {
			if alive(pid) {
				return fmt.Errorf("%s still runs as process %d", name, pid)
			}
		}

		return nil
	})

	left, err := os.ReadDir(temporary)
	if err != nil || len(left) != 1 {
		t.Errorf("a killed process leaves %v (%v), want its folder", left, err)
	}

	// Any start removes what is left, also one that fails.
	if _, err := kube.Start(t.Context(), kube.Options{APIServerFlags: []string{"--no-such-flag"}}); err == nil {
		t.Error("an API server with an unknown flag starts")
	}

	wantEmpty(t, temporary)
}

// killVictim starts this binary as a victim, kills it once it has a cluster, and returns what its cluster's process ids were.
func killVictim(t *testing.T) map[string]int {
	t.Helper()

	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}

	victim := exec.CommandContext(t.Context(), executable)
	victim.Env = append(os.Environ(), victimEnv+"=yes")
	victim.Stderr = os.Stderr

	stdout, err := victim.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}

	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}

	var pids map[string]int

	decodeErr := json.NewDecoder(stdout).Decode(&pids)

	if err := victim.Process.Kill(); err != nil {
		t.Error(err)
	}

	if _, err := io.Copy(io.Discard, stdout); err != nil {
		t.Error(err)
	}

	_ = victim.Wait() // it was killed

	if decodeErr != nil {
		t.Fatal(decodeErr)
	}

	return pids
}

const uninitialized = "node.cloudprovider.kubernetes.io/uninitialized"

func start(t *testing.T, options kube.Options) *kube.Cluster {
	t.Helper()

	options.Progress = os.Stderr

	cluster, err := kube.Start(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := cluster.Stop(); err != nil {
			t.Error(err)
		}
	})

	return cluster
}

func register(t *testing.T, cluster *kube.Cluster, spec kube.NodeSpec) *corev1.Node {
	t.Helper()

	node, err := cluster.RegisterNode(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}

	return node
}

func requests(t *testing.T, cluster *kube.Cluster) kube.Requests {
	t.Helper()

	counted, err := cluster.APIServerRequests(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	return counted
}

func client(t *testing.T, config *rest.Config) kubernetes.Interface {
	t.Helper()

	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}

	return client
}

func kubeletConfig(t *testing.T, cluster *kube.Cluster, node string) *rest.Config {
	t.Helper()

	config, err := cluster.UserConfig("system:node:"+node, "system:nodes")
	if err != nil {
		t.Fatal(err)
	}

	return config
}

func taintKeys(node *corev1.Node) []string {
	var keys []string

	for _, taint := range node.Spec.Taints {
		keys = append(keys, taint.Key)
	}

	return keys
}

// patience bounds the wait for what takes a kubelet ten seconds, and everything else none, on a computer that has nothing else to do.
const patience = 2 * time.Minute

// eventually fails the test unless check succeeds in time.
func eventually(t *testing.T, what string, check func(context.Context) error) {
	t.Helper()

	var last error

	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		last = check(ctx)

		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("%s: %v: %v", what, err, last)
	}
}

// alive tells whether a process runs. One that has ended but was not reaped, which is up to its new parent, does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(pid), "stat"))
	if err != nil {
		return false
	}

	// The state follows the name, which is in parentheses and may contain some.
	_, after, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')'):]), ") ")

	return !strings.HasPrefix(after, "Z") && !strings.HasPrefix(after, "X")
}

func wantEmpty(t *testing.T, folder string) {
	t.Helper()

	left, err := os.ReadDir(folder)
	if err != nil || len(left) > 0 {
		t.Errorf("%s holds %v (%v), want nothing", folder, left, err)
	}
}
