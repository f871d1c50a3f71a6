package ccm_test

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// churn is the minimum duration for which TestSharing_LeavesNodesOfAnotherCloudControllerManager changes Nodes.
var churn = flag.Duration("churn", 0, "minimum duration of changes in a shared cluster")

// minChanges is the minimum number of changes that TestSharing_LeavesNodesOfAnotherCloudControllerManager makes.
const minChanges = 300

// theirPlatform is the platform whose Nodes talos-ccm does not initialize in a shared cluster.
const theirPlatform = "openstack"

// theirs adds a worker of the platform that another cloud controller manager is responsible for.
func (s *suite) theirs(name string) *talostest.Machine {
	s.Helper()

	platform := identified(s.prefix + name)
	platform.Platform = theirPlatform

	return s.machine(talostest.MachineSpec{Nodename: name, Platform: platform})
}

// sharedCluster adds a control-plane machine that runs talos-ccm with node IPAM, for all platforms but one.
func (s *suite) sharedCluster() {
	s.Helper()

	self := s.controlPlane("cp", func(spec *talostest.MachineSpec) { spec.Controllers = []string{"-" + nodeipam.Name} })
	s.configure(self, "nodes: {selector: [{matchExpressions: [{key: platform, operator: NotIn, values: ["+theirPlatform+"]}]}]}\n")
	s.register(self)
	s.labelControlPlane(self)

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{"*", nodeipam.Name}
	options.Framework.KubeCloudShared.AllocateNodeCIDRs = true
	s.start(options)
	s.awaitInitialized(self)
}

// labelControlPlane labels the machine's Node as Talos does.
func (s *suite) labelControlPlane(m *talostest.Machine) {
	s.Helper()

	s.PatchNode(m.Nodename(), "machined", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)
}

// requestCertificate makes the machine's kubelet request a serving certificate for its name and the given addresses. The
// default addresses of simulated machines are loopback addresses, which are never approved.
func (s *suite) requestCertificate(m *talostest.Machine, addresses ...string) (name string) {
	s.Helper()

	csr, err := s.Kube.RequestServingCertificate(s.Context(), m.Nodename(), "", append(addresses, m.Nodename())...)
	require.NoError(s, err)

	return csr.Name
}

func (s *suite) awaitApproved(csr string) {
	s.Helper()

	ctest.Eventually(s, fmt.Sprintf("request %s is approved", csr), func() bool {
		got := s.csr(csr)

		return len(got.Status.Conditions) > 0 && got.Status.Conditions[0].Type == certificatesv1.CertificateApproved
	})
}

// TestPools_BelongToNoKubelet: kubelets get no address in --cluster-cidr or in a pool without containsMachines.
func TestPools_BelongToNoKubelet(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")

	var addresses []talostest.Address
	for _, address := range []string{"10.250.0.7/24", "10.251.0.7/24", "10.252.0.7/24"} {
		addresses = append(addresses, talostest.Address{Link: "eth1", Prefix: netip.MustParsePrefix(address)})
	}

	worker := s.machine(talostest.MachineSpec{Nodename: "worker", Addresses: addresses})
	s.register(self, worker)
	s.labelControlPlane(self)
	s.configure(self, `{ipam: {pools: [{name: own, cidrs: [10.250.0.0/16]}, {name: shared, cidrs: [10.252.0.0/16], containsMachines: true}]}}`)

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{"*", nodeipam.Name}
	options.Framework.KubeCloudShared.AllocateNodeCIDRs = true
	options.Framework.KubeCloudShared.ClusterCIDR = "10.251.0.0/16"
	s.start(options)

	s.awaitApproved(s.requestCertificate(worker, "10.252.0.7"))

	for address, reserved := range map[string]string{"10.250.0.7": "10.250.0.0/16", "10.251.0.7": "10.251.0.0/16"} {
		s.AwaitEvent(s.requestCertificate(worker, address), "CSRDeferred", reserved, "the configuration of talos-ccm")
	}
}

func writtenByNodeController(n *corev1.Node) bool {
	return slices.ContainsFunc(n.ManagedFields, func(m metav1.ManagedFieldsEntry) bool { return m.Manager == nodecontroller.FieldManager })
}

// TestHosted_ReservesStatedFacts: without control-plane Nodes, only the flags contain the identity of the cluster.
func TestHosted_ReservesStatedFacts(t *testing.T) {
	s := newSuite(t)

	var addresses []talostest.Address
	for _, address := range []string{"10.250.0.7/24", "10.251.0.7/24", "10.252.0.7/24", "10.253.0.7/24"} {
		addresses = append(addresses, talostest.Address{Link: "eth1", Prefix: netip.MustParsePrefix(address)})
	}

	worker := s.machine(talostest.MachineSpec{Nodename: "worker", Addresses: addresses})
	s.register(worker)

	options := s.outside(worker)
	options.Framework.KubeCloudShared.ClusterCIDR, options.ServiceCIDRs = "10.251.0.0/16", "10.252.0.0/16"
	options.HostedControlPlane = "api.example.org,10.253.0.7,10.253.0.9"
	s.start(options)

	s.awaitApproved(s.requestCertificate(worker, "10.250.0.7"))

	// The machine has all addresses but the last.
	for address, reserved := range map[string]string{
		"10.251.0.7": "10.251.0.0/16", "10.252.0.7": "10.252.0.0/16", "10.253.0.7": "belongs to the API server", "10.253.0.9": "belongs to the API server",
	} {
		s.AwaitEvent(s.requestCertificate(worker, address), "CSRDeferred", reserved, "the flags about the hosted control plane")
	}
}

func TestSharing_ServesNodesThatAnotherProviderInitializes(t *testing.T) {
	s := newSuite(t)
	s.sharedCluster()

	theirs := s.theirs("theirs")
	s.register(theirs)
	s.awaitApproved(s.requestCertificate(theirs))

	n := s.AwaitNode(theirs.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.NotEmpty(n.Spec.PodCIDR) })
	s.assertUninitialized(theirs)
	assert.False(t, writtenByNodeController(n), n.ManagedFields)
}

// cloud is the cloud controller manager of another provider.
type cloud struct {
	suite *suite
	file  string // lists the nodenames of its instances
}

// startCloud starts test/cloud as a separate process, with its node controller and its lifecycle controller.
func (s *suite) startCloud() *cloud {
	s.Helper()

	p := s.newProcess()
	c := &cloud{suite: s, file: filepath.Join(p.root, "instances")}
	executable, kubeconfig := filepath.Join(p.root, "cloud"), filepath.Join(p.root, "kubeconfig")

	require.NoError(s, builder.Executable("github.com/talos-ccm/talos-ccm/test/cloud", executable))
	c.set()
	require.NoError(s, os.WriteFile(kubeconfig, s.Kube.Kubeconfig(), 0o600))
	p.start("another provider", exec.Command(executable,
		"--kubeconfig="+kubeconfig, "--cloud-provider=fake", "--cloud-config="+c.file, "--allow-untagged-cloud", "--secure-port=0", "--leader-elect=false",
		"--controllers=cloud-node-controller,cloud-node-lifecycle-controller", "--node-monitor-period=200ms", "--node-status-update-frequency=200ms"))

	return c
}

// set replaces the instances of the provider.
func (c *cloud) set(machines ...*talostest.Machine) {
	c.suite.Helper()

	var names []string
	for _, m := range machines {
		names = append(names, m.Nodename())
	}

	require.NoError(c.suite, os.WriteFile(c.file+".new", []byte(strings.Join(names, "\n")), 0o600))
	require.NoError(c.suite, os.Rename(c.file+".new", c.file))
}

// awaitTheirs waits until the other provider has initialized the Nodes.
func (s *suite) awaitTheirs(machines ...*talostest.Machine) {
	s.Helper()

	for _, m := range machines {
		n := s.AwaitNode(m.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) {
			ctest.Initialized(n, asrt)
			asrt.NotEmpty(n.Spec.PodCIDR)
		})
		assert.Equal(s, "fake://"+m.Nodename(), n.Spec.ProviderID)
		assert.Equal(s, "fake-zone", n.Labels[corev1.LabelTopologyZone])
	}
}

// observe watches all Nodes until the test ends, and fails the test if the node controller writes a Node of the other
// provider, if a quiet Node changes, or if a Node of talos-ccm is deleted.
func (s *suite) observe(theirs, quiet []*talostest.Machine) (stop func()) {
	s.Helper()

	list := ctest.Ask(s, func(ctx context.Context) (*corev1.NodeList, error) {
		return s.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	})

	ctx, cancel := context.WithCancel(s.Context())
	w, err := s.Client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	require.NoError(s, err)

	var group sync.WaitGroup

	isAny := func(machines []*talostest.Machine, n *corev1.Node) bool {
		return slices.ContainsFunc(machines, func(m *talostest.Machine) bool { return m.Nodename() == n.Name })
	}

	group.Go(func() {
		for event := range w.ResultChan() {
			n, isNode := event.Object.(*corev1.Node)

			switch {
			case !isNode: // the error with which the watch ends
			case isAny(theirs, n) && writtenByNodeController(n):
				s.Errorf("node %s of the other provider was written: %v", n.Name, n.ManagedFields)
			case isAny(quiet, n), event.Type == watch.Deleted && !isAny(theirs, n):
				s.Errorf("node %s: %s: %+v", n.Name, event.Type, n)
			}
		}

		assert.NotNil(s, ctx.Err())
	})

	return func() {
		cancel()
		w.Stop()
		group.Wait()
	}
}

// nodeWrites returns the number of writes to Nodes that the API server has served.
func (s *suite) nodeWrites() int {
	s.Helper()

	writes, err := s.Kube.CountRequests(s.Context(), func(r kube.Request) bool {
		return r["resource"] == "nodes" && slices.Contains([]string{"PUT", "PATCH", "APPLY"}, r["verb"])
	})
	require.NoError(s, err)

	return writes
}

// Both controller managers run as documented in docs/guides/coexistence.md.
func TestSharing_LeavesNodesOfAnotherCloudControllerManager(t *testing.T) {
	const each = 4

	s := newSuite(t)
	s.sharedCluster()

	other := s.startCloud()

	var ours, theirs []*talostest.Machine

	for i := range each {
		ours = append(ours, s.worker(fmt.Sprintf("ours-%d", i)))
		theirs = append(theirs, s.theirs(fmt.Sprintf("theirs-%d", i)))
	}

	other.set(theirs...)
	s.register(slices.Concat(ours, theirs)...)
	s.awaitInitialized(ours...)
	s.awaitTheirs(theirs...)

	for _, m := range ours {
		s.AwaitNode(m.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.NotEmpty(n.Spec.PodCIDR) })
	}

	stop := s.observe(theirs, []*talostest.Machine{ours[0], theirs[0]})
	defer stop()

	// All Nodes are NotReady, so the other lifecycle controller asks its provider whether they exist.
	require.NoError(s, ours[each-1].Stop(t.Context()))

	began, writes, changes := time.Now(), s.nodeWrites(), 0
	for ; changes < minChanges || time.Since(began) < *churn; changes++ {
		s.changeShared(changes, other, ours, theirs)
	}

	for _, m := range ours[1 : each-1] {
		s.move(m, "final")
	}

	made := s.nodeWrites() - writes
	t.Logf("%d changes in %s caused %d writes of Nodes", changes, time.Since(began), made)

	// A change is one write by the test or at most two by a controller: labels and addresses.
	assert.LessOrEqual(t, made, 2*changes+each)
}

// changeShared makes one change to a Node, a machine or an instance. The first Node of each provider stays unchanged.
func (s *suite) changeShared(n int, other *cloud, ours, theirs []*talostest.Machine) {
	s.Helper()

	i := 1 + n/5%(len(ours)-1)
	value := fmt.Sprint(n)
	patch := fmt.Sprintf(`{"metadata":{"annotations":{"example.com/changed":%q}}}`, value)

	switch n % 5 {
	case 0:
		require.NoError(s, ours[i].UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType = value }))
	case 1:
		require.NoError(s, theirs[i].UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType, spec.Zone = value, value }))
	case 2, 3:
		m := [][]*talostest.Machine{ours, theirs}[n%2][i]
		s.PatchNode(m.Nodename(), "other", patch)
	case 4:
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{203, 0, 112, byte(i)}), 24)
		if n/15%2 == 0 {
			require.NoError(s, ours[i].AddAddress(s.Context(), "eth1", prefix))
		} else {
			require.NoError(s, ours[i].RemoveAddress(s.Context(), "eth1", prefix))
		}
	}

	if n%50 == 49 {
		s.replaceInstance(other, theirs)
	}
}

// replaceInstance removes the last instance of the other provider, whose lifecycle controller then deletes the Node,
// and adds it again.
func (s *suite) replaceInstance(other *cloud, theirs []*talostest.Machine) {
	s.Helper()

	m := theirs[len(theirs)-1]
	other.set(theirs[:len(theirs)-1]...)
	ctest.Eventually(s, "node of a removed instance is deleted", func() bool {
		_, err := s.Client.CoreV1().Nodes().Get(s.Context(), m.Nodename(), metav1.GetOptions{})

		return apierrors.IsNotFound(err)
	})
	other.set(theirs...)

	_, err := s.Kube.RegisterNode(s.Context(), kube.NodeSpec{Name: m.Nodename(), NodeIPs: []netip.Addr{m.Address()}})
	require.NoError(s, err)
	s.awaitTheirs(m)
}
