package csrapproval_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcertificatesv1 "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// controlPlane is the control-plane machine that always exists.
	controlPlane = "cp-1"

	// labeledControlPlane is a patch of a Node: Talos sets the label on Nodes of control-plane machines.
	labeledControlPlane = `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`
)

var (
	controlPlaneIP = netip.MustParseAddr("172.31.0.1")
	// virtualIP is the control plane's virtual IP, which its machine has on eth0.
	virtualIP = netip.MustParseAddr("172.31.255.1")
	// endpointIP is the address of the cluster endpoint, which no machine has.
	endpointIP = netip.MustParseAddr("172.31.254.1")
)

// environment is shared by all tests: a control-plane machine, the credentials of the product, and an instance of it.
type environment struct {
	bed ctest.Bed
	// product is the service account's configuration, created by the product's bootstrap.
	product *rest.Config
	machine *talostest.Machine // cp-1's
	socket  *talosapi.Socket   // cp-1's
	token   string             // the bootstrap token

	// routes maps the machines' addresses to loopback addresses, where apid listens and which no certificate can
	// contain.
	routes sync.Map // netip.Addr → netip.Addr
	held   sync.Map // nodename → <-chan struct{}; until it is closed, the machine is not dialed
	last   atomic.Int32

	// followLast makes the controller receive changes of Nodes before the reflector does, unlike the product.
	followLast bool

	main *instance
}

var shared environment

func TestMain(m *testing.M) {
	shared.bed.Main(m, kube.Options{}, shared.open)
}

// open adds the control-plane machine, and starts the product's bootstrap and an instance.
func (e *environment) open() (stop func(), err error) {
	ctx, cancel := context.WithCancel(context.Background())

	var group sync.WaitGroup

	stop = func() {
		e.main.Stop()
		cancel()
		group.Wait()
	}

	if e.token, err = e.bed.Kube.BootstrapToken(ctx); err != nil {
		return stop, err
	}

	if err := e.addControlPlane(ctx); err != nil {
		return stop, err
	}

	if err := e.bootstrap(ctx, &group); err != nil {
		return stop, err
	}

	e.main, err = e.start(clock.RealClock{})

	return stop, err
}

// addControlPlane adds a control-plane machine and its Node, labeled as Talos does.
func (e *environment) addControlPlane(ctx context.Context) (err error) {
	endpoint := k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID)
	endpoint.TypedSpec().Addresses = []netip.Addr{endpointIP}

	e.machine, err = e.addMachine(talostest.MachineSpec{
		Nodename: controlPlane, Type: talosmachine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(e.bed.Kube.Kubeconfig()),
		Addresses: []talostest.Address{on("eth0", virtualIP, 32)}, Resources: []resource.Resource{endpoint},
	}, controlPlaneIP)
	if err != nil {
		return err
	}

	// As Talos does: without a prefix length, in the subnets excluded from node IPs.
	err = safe.StateModify(ctx, e.machine.State(), k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), func(config *k8s.NodeIPConfig) error {
		config.TypedSpec().ExcludeSubnets = append(config.TypedSpec().ExcludeSubnets, virtualIP.String())

		return nil
	})
	if err != nil {
		return err
	}

	e.bed.Talos.SetEtcdMembers(controlPlaneIP)

	if _, err = e.bed.Kube.RegisterNode(ctx, kube.NodeSpec{Name: controlPlane, NodeIPs: []netip.Addr{controlPlaneIP}}); err != nil {
		return err
	}

	_, err = e.bed.Client.CoreV1().Nodes().Patch(ctx, controlPlane, types.MergePatchType, []byte(labeledControlPlane), metav1.PatchOptions{})

	return err
}

// on returns an address of a machine.
func on(link string, addr netip.Addr, bits int) talostest.Address {
	return talostest.Address{Link: link, Prefix: netip.PrefixFrom(addr, bits)}
}

// addMachine adds a machine with the given address on eth0 and as node IP.
func (e *environment) addMachine(spec talostest.MachineSpec, addr netip.Addr) (*talostest.Machine, error) {
	spec.Addresses = append(spec.Addresses, on("eth0", addr, 24))
	spec.NodeIPs = []netip.Addr{addr}

	m, err := e.bed.Talos.AddMachine(spec)
	if err == nil {
		e.routes.Store(addr, m.Address())
	}

	return m, err
}

// bootstrap runs the product's bootstrap, which applies the RBAC objects and writes the kubeconfig, until ctx is
// canceled.
func (e *environment) bootstrap(ctx context.Context, group *sync.WaitGroup) (err error) {
	if e.socket, err = talosapi.OpenSocket(e.machine.Socket()); err != nil {
		return err
	}

	dir, err := os.MkdirTemp("", "csrapproval")
	if err != nil {
		return err
	}

	booted := bootstrap.New(e.socket.Admin, dir, func(string) bool { return false }, clock.RealClock{})
	ready := make(chan struct{})

	group.Go(func() {
		booted.Run(ctx, sync.OnceFunc(func() { close(ready) }))
		e.socket.Close()
		os.RemoveAll(dir)
	})

	select {
	case <-ready:
	case <-time.After(ctest.Timeout):
		return errors.New("bootstrap timed out")
	}

	if e.product, err = clientcmd.BuildConfigFromFlags("", booted.Kubeconfig()); err != nil {
		return err
	}

	e.product.QPS, e.product.Burst = 1000, 1000

	return nil
}

// instance is everything that a leader runs.
type instance struct {
	*ctest.Instance

	controlPlane *controlplane.Reader
	controller   *csrapproval.Controller
	// freeze stops the watch of Nodes.
	freeze func()

	// The operator's configuration, by the name of the Node.
	unmanaged, policies sync.Map
}

// policy is the instance's csrapproval.Config.Policy.
func (i *instance) policy(node *corev1.Node, _ machine.Machine) csrpolicy.Policy {
	found, _ := i.policies.Load(node.Name)
	policy, _ := found.(csrpolicy.Policy)

	return policy
}

func (i *instance) allow(nodename string, policy csrpolicy.Policy) {
	i.policies.Store(nodename, policy)
	i.controller.Resync()
}

func (i *instance) machineIs(nodename string, condition inventory.Condition) bool {
	return i.Inventory.Get(nodename).Condition == condition
}

// start starts the controllers wired as in the product, with its service account but without leader election.
func (e *environment) start(clk clock.WithTicker) (*instance, error) {
	base, err := ctest.NewInstance(context.Background(), e.product, nil)
	if err != nil {
		return nil, err
	}

	watching, freeze := context.WithCancel(context.Background())
	stop := base.Stop
	i := &instance{Instance: base, freeze: func() { freeze(); base.Factory.Shutdown() }}
	i.Stop = func() { freeze(); stop() }
	i.Inventory = inventory.New(clk.Now)

	direct := ctest.Dial(e.bed.Talos)
	dial := controlplane.NewAddresses(i.Client, i.Nodes.Lister(), e.socket.EtcdMembers, clock.RealClock{}).Guard(
		func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
			if held, ok := e.held.Load(nodename); ok {
				until, _ := held.(chan struct{})

				select {
				case <-until:
				case <-ctx.Done():
				}
			}

			if routed, ok := e.routes.Load(addr); ok {
				addr, _ = routed.(netip.Addr)
			}

			return direct(ctx, nodename, addr)
		})

	i.Reflector = reflector.New(i.Inventory, dial, clock.RealClock{})
	i.Reflector.TrackLocal(controlPlane, func() (talosapi.State, error) { return talosapi.DialSocket(e.machine.Socket()) })
	i.controlPlane = controlplane.New(controlplane.Config{
		Kubernetes: e.product, Client: i.Client, Nodes: i.Nodes, Machines: i.Inventory, Local: i.Reflector.Local, Clock: clock.RealClock{},
	})

	var followed, failed error

	if !e.followLast {
		followed = i.Reflector.FollowNodes(i.Nodes)
	}

	hasNodes, unclaimed := nodes.Watch(i.Nodes, i.Inventory.Claims.NodeChanged)
	records, unwatched := recorder.NewLeader(i.Client, i.Nodes, i.Inventory, i.Recorder, clk, func() string { return "" })
	i.controller, failed = csrapproval.New(csrapproval.Config{
		Client: i.Client, Nodes: i.Nodes, Inventory: i.Inventory, Identity: i.controlPlane.Identity(), Recorder: i.Recorder, Clock: clk,
		Policy: i.policy, Workers: 10, HasNodes: hasNodes,
		Managed: func(node *corev1.Node, _ machine.Machine) bool {
			_, unmanaged := i.unmanaged.Load(node.Name)

			return !unmanaged
		},
	})
	initializer, err := nodecontroller.New(nodecontroller.Config{
		Client: i.Client, Nodes: i.Nodes, Inventory: i.Inventory, Recorder: i.Recorder, Clock: clock.RealClock{},
		Options: func() nodespec.Options { return nodespec.Options{} }, IsRecorded: records.IsRecorded, Workers: 10, HasNodes: hasNodes,
	})

	if e.followLast {
		followed = i.Reflector.FollowNodes(i.Nodes)
	}

	if err := errors.Join(followed, unclaimed, unwatched, failed, err); err != nil {
		return nil, err
	}

	i.Factory.Start(watching.Done()) // it has only the Node informer
	i.Start(i.controlPlane.Run, i.Reflector.Run, records.Run, i.controller.Run, initializer.Run)

	return i, nil
}

// suite is a test with its environment.
type suite struct {
	ctest.Suite
	*environment
}

// parallel returns the suite of a parallel test, which must not disturb others. Other tests use alone.
func parallel(t *testing.T) suite {
	t.Parallel()

	return alone(t)
}

func alone(t testing.TB) suite {
	t.Helper()

	return suite{shared.bed.NewSuite(t), &shared}
}

// worker is a machine of one test.
type worker struct {
	name    string
	addr    netip.Addr
	machine *talostest.Machine
}

// plan returns a worker with a name and an address only.
func (s suite) plan() worker {
	n := s.last.Add(1)

	return worker{name: fmt.Sprintf("worker-%d", n), addr: netip.AddrFrom4([4]byte{172, 31, byte(1 + n/250), byte(1 + n%250)})}
}

// boot starts the worker's machine, which stops when the test ends.
func (s suite) boot(w worker, addresses ...talostest.Address) worker {
	s.Helper()

	return s.bootAs(w, talostest.MachineSpec{Addresses: addresses})
}

func (s suite) bootAs(w worker, spec talostest.MachineSpec) worker {
	s.Helper()

	var err error

	spec.Nodename = w.name
	w.machine, err = s.addMachine(spec, w.addr)
	require.NoError(s, err)
	s.Cleanup(func() { _ = w.machine.Stop(context.Background()) })

	return w
}

// register registers the worker's Node as its kubelet does; it is deleted when the test ends.
func (s suite) register(w worker) {
	s.Helper()
	s.Register(kube.NodeSpec{Name: w.name, NodeIPs: []netip.Addr{w.addr}})
}

// join returns a worker with a machine and a Node.
func (s suite) join(addresses ...talostest.Address) worker {
	s.Helper()

	w := s.boot(s.plan(), addresses...)
	s.register(w)

	return w
}

// hold lets no leader dial the worker's machine until release is called.
func (s suite) hold(w worker) (release func()) {
	s.Helper()

	until := make(chan struct{})
	release = sync.OnceFunc(func() { close(until) })

	s.held.Store(w.name, until)
	s.Cleanup(release)

	return release
}

// known returns a joined worker whose machine is in the inventory.
func (s suite) known(addresses ...talostest.Address) worker {
	s.Helper()

	w := s.join(addresses...)
	s.awaitCondition(w.name, inventory.Current)

	return w
}

// issued returns a joined worker with a certificate: its machine is known.
func (s suite) issued(addresses ...talostest.Address) worker {
	s.Helper()

	w := s.join(addresses...)
	s.awaitIssued(s.post(w, request{}))

	return w
}

// awaitCondition waits until the inventory has the machine of a Node in a condition.
func (s suite) awaitCondition(nodename string, condition inventory.Condition) {
	s.Helper()
	s.eventually(nodename+" is "+condition.String(), func() bool { return s.main.machineIs(nodename, condition) })
}

// awaitMachine waits until ok returns true for the inventory's last view of the machine of a Node.
func (s suite) awaitMachine(nodename, what string, ok func(machine.Machine) bool) {
	s.Helper()
	s.eventually(nodename+" is known "+what, func() bool { return ok(s.main.Inventory.Get(nodename).Machine) })
}

// awaitCached waits until a version of the Node that contains the texts is in the cache: requests posted before may be
// reviewed without it.
func (s suite) awaitCached(nodename string, texts ...string) {
	s.Helper()
	s.eventually("node "+nodename+" is in the cache", func() bool {
		node, err := s.main.Nodes.Lister().Get(nodename)
		missing := func(text string) bool { return !strings.Contains(node.String(), text) }

		return err == nil && !slices.ContainsFunc(texts, missing)
	})
}

func (s suite) eventually(what string, ok func() bool) {
	s.Helper()
	ctest.Eventually(s, what, ok)
}

// list adds an address to the Node, as its kubelet can. Otherwise, a request for an address that the machine does not have
// is outdated.
func (s suite) list(w worker, addr netip.Addr) {
	s.Helper()
	s.PatchNode(w.name, "", fmt.Sprintf(`{"metadata":{"annotations":{%q:"%s,%s"}}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr, w.addr, addr))
}

// report makes the worker's machine report another address.
func (s suite) report(w worker, link string, addr netip.Addr) {
	s.Helper()
	require.NoError(s, w.machine.AddAddress(s.Context(), link, netip.PrefixFrom(addr, 32)))
}

// restart replaces the leader.
func (s suite) restart() {
	s.Helper()
	s.main.Stop()

	next, err := s.start(clock.RealClock{})
	require.NoError(s, err)

	s.main = next
}

// another starts another leader, which stops when the test ends.
func (s suite) another(clk clock.WithTicker) *instance {
	s.Helper()

	leader, err := s.start(clk)
	require.NoError(s, err)
	s.Cleanup(leader.Stop)

	return leader
}

func (s suite) requests() typedcertificatesv1.CertificateSigningRequestInterface {
	return s.Client.CertificatesV1().CertificateSigningRequests()
}

func (s suite) get(name string) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	csr, err := s.requests().Get(s.Context(), name, metav1.GetOptions{})
	require.NoError(s, err)

	return csr
}

// await returns a request as soon as ok returns true.
func (s suite) await(name, what string, ok func(*certificatesv1.CertificateSigningRequest) bool) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	return ctest.Await(s, s.requests(), ctest.Named(name), func(csr *certificatesv1.CertificateSigningRequest, asrt *assert.Assertions) {
		asrt.True(ok(csr), what)
	})
}

func (s suite) awaitIssued(name string) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	return s.await(name, "issued", func(csr *certificatesv1.CertificateSigningRequest) bool {
		require.False(s, denied(csr), csr.Status.Conditions)

		return len(csr.Status.Certificate) > 0
	})
}

// awaitDenied waits until a request is denied, and returns the condition.
func (s suite) awaitDenied(name string) certificatesv1.CertificateSigningRequestCondition {
	s.Helper()

	return s.await(name, "denied", func(csr *certificatesv1.CertificateSigningRequest) bool {
		require.False(s, approved(csr), "request %s was approved: %v", name, csr.Status.Conditions)

		return denied(csr)
	}).Status.Conditions[0]
}

// awaitDeferred waits for an Event that reports the deferral with the given code.
func (s suite) awaitDeferred(name, code string) {
	s.Helper()
	s.AwaitEvent(name, csrapproval.ReasonDeferred, code)
}

// assertUndecided fails if the request is decided.
func (s suite) assertUndecided(name string) {
	s.Helper()
	require.Empty(s, s.get(name).Status, name)
}

// assertPending fails unless the request is still pending after a later request has been issued.
func (s suite) assertPending(name string) {
	s.Helper()
	s.awaitIssued(s.post(s.join(), request{}))
	s.assertUndecided(name)
}

func approved(csr *certificatesv1.CertificateSigningRequest) bool {
	return has(csr, certificatesv1.CertificateApproved)
}

func denied(csr *certificatesv1.CertificateSigningRequest) bool {
	return has(csr, certificatesv1.CertificateDenied)
}

func has(csr *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType) bool {
	return slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool { return c.Type == kind })
}
