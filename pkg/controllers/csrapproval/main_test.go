package csrapproval_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/role"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// timeout bounds each wait, for busy machines. The signer of
	// kube-controller-manager takes some seconds to start.
	timeout  = 2 * time.Minute
	interval = 20 * time.Millisecond

	controlPlaneLabel = "node-role.kubernetes.io/control-plane"

	// The control-plane machine that always exists, and the virtual address that it may hold.
	controlPlane   = "cp-1"
	controlPlaneIP = "172.31.0.1"
	virtualIP      = "172.31.255.1"
	// endpointIP is the address of the cluster endpoint.
	endpointIP = "172.31.254.1"
)

// bed is shared by all tests: a real API server and signer, Talos machines, and the credentials of the product.
type bed struct {
	kube   *kube.Cluster
	talos  *talostest.Cluster
	client kubernetes.Interface // an administrator's
	// product is the service account's configuration, created by the product's bootstrap.
	product *rest.Config
	machine *talostest.Machine // cp-1's
	token   string             // the bootstrap token
	socket  *talosapi.Socket   // cp-1's

	// routes maps the machines' addresses to loopback addresses, where apid listens and which no certificate can
	// contain.
	routes sync.Map // netip.Addr → netip.Addr
	last   atomic.Int32

	// followFirst has the reflector receive changes of Nodes before the controller.
	followFirst bool

	main *instance
}

var shared bed

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	ctx, cancel := context.WithCancel(context.Background())

	var group sync.WaitGroup

	defer group.Wait()
	defer cancel()

	defer shared.close()

	if err := shared.open(ctx, &group, kube.Options{Progress: os.Stderr, LogDir: os.Getenv("KUBE_LOGS")}); err != nil {
		return 1, err
	}

	return m.Run(), nil
}

// open starts everything. The background tasks of group end with ctx.
func (b *bed) open(ctx context.Context, group *sync.WaitGroup, options kube.Options) (err error) {
	if b.kube, err = kube.Start(ctx, options); err != nil {
		return err
	}

	if b.token, err = b.kube.BootstrapToken(ctx); err != nil {
		return err
	}

	if b.talos, err = talostest.New(talostest.Options{}); err != nil {
		return err
	}

	if b.client, err = kubernetes.NewForConfig(b.kube.Config()); err != nil {
		return err
	}

	if err := b.addControlPlane(ctx); err != nil {
		return err
	}

	if err := b.bootstrap(ctx, group); err != nil {
		return err
	}

	b.main, err = b.start(ctx)

	return err
}

// close stops what open has started.
func (b *bed) close() {
	if b.main != nil {
		b.main.stop()
	}

	if b.talos != nil {
		b.talos.Close()
	}

	if b.kube != nil {
		if err := b.kube.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}

// addControlPlane adds a control-plane machine and its Node, labeled as by Talos.
func (b *bed) addControlPlane(ctx context.Context) error {
	var err error

	b.machine, err = b.addMachine(talostest.MachineSpec{
		Nodename: controlPlane, Type: talosmachine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(b.kube.Kubeconfig()),
		Addresses: []talostest.Address{{Link: "eth0", Prefix: netip.MustParsePrefix(virtualIP + "/32")}},
	}, netip.MustParseAddr(controlPlaneIP))
	if err != nil {
		return err
	}

	if err := excludeVirtual(ctx, b.machine); err != nil {
		return err
	}

	if _, err := b.kube.RegisterNode(ctx, kube.NodeSpec{Name: controlPlane, NodeIPs: []netip.Addr{netip.MustParseAddr(controlPlaneIP)}}); err != nil {
		return err
	}

	b.talos.SetEtcdMembers(netip.MustParseAddr(controlPlaneIP))

	endpoint := k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID)
	endpoint.TypedSpec().Addresses = []netip.Addr{netip.MustParseAddr(endpointIP)}

	if err := b.machine.State().Create(ctx, endpoint); err != nil {
		return err
	}

	return b.labelControlPlane(ctx, controlPlane)
}

// excludeVirtual publishes the virtual address as Talos does: without a prefix length, in the subnets excluded from
// node IPs.
func excludeVirtual(ctx context.Context, m *talostest.Machine) error {
	return safe.StateModify(ctx, m.State(), k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), func(config *k8s.NodeIPConfig) error {
		config.TypedSpec().ExcludeSubnets = append(config.TypedSpec().ExcludeSubnets, virtualIP)

		return nil
	})
}

// labelControlPlane adds the control-plane label to a Node.
func (b *bed) labelControlPlane(ctx context.Context, nodename string) error {
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:""}}}`, controlPlaneLabel)
	_, err := b.client.CoreV1().Nodes().Patch(ctx, nodename, types.MergePatchType, []byte(patch), metav1.PatchOptions{})

	return err
}

// unlabelControlPlane removes the control-plane label from a Node.
func (b *bed) unlabelControlPlane(ctx context.Context, nodename string) error {
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, controlPlaneLabel)
	_, err := b.client.CoreV1().Nodes().Patch(ctx, nodename, types.MergePatchType, []byte(patch), metav1.PatchOptions{})

	return err
}

// addMachine adds a machine with the given address on eth0 and as node IP.
func (b *bed) addMachine(spec talostest.MachineSpec, addr netip.Addr) (*talostest.Machine, error) {
	spec.Addresses = append(spec.Addresses, talostest.Address{Link: "eth0", Prefix: netip.PrefixFrom(addr, 24)})
	spec.NodeIPs = []netip.Addr{addr}

	m, err := b.talos.AddMachine(spec)
	if err != nil {
		return nil, err
	}

	b.routes.Store(addr, m.Address())

	return m, nil
}

// bootstrap runs the product's bootstrap, which applies the RBAC objects and writes the kubeconfig.
func (b *bed) bootstrap(ctx context.Context, group *sync.WaitGroup) error {
	var err error
	if b.socket, err = talosapi.OpenSocket(b.machine.Socket()); err != nil {
		return err
	}

	dir, err := os.MkdirTemp("", "csrapproval")
	if err != nil {
		return err
	}

	booted := bootstrap.New(b.socket.Admin, dir, func(string) bool { return false }, clock.RealClock{})
	ready := make(chan struct{})

	group.Go(func() {
		booted.Run(ctx, sync.OnceFunc(func() { close(ready) }))
		b.socket.Close()
		os.RemoveAll(dir)
	})

	select {
	case <-ready:
	case <-time.After(timeout):
		return errors.New("bootstrap timed out")
	}

	if b.product, err = clientcmd.BuildConfigFromFlags("", filepath.Clean(booted.Kubeconfig())); err != nil {
		return err
	}

	b.product.QPS, b.product.Burst = 1000, 1000

	return nil
}

// instance is everything that a leader runs.
type instance struct {
	nodes        corelisters.NodeLister
	inventory    *inventory.Inventory
	controlPlane *controlplane.Reader
	controller   *csrapproval.Controller
	stop         func()
	// kubelets maps the machines' addresses to the kubelets that respond there.
	kubelets sync.Map // netip.Addr → *endpoint
	// freeze stops the watch of Nodes.
	freeze func()

	// The operator's configuration.
	mu        sync.Mutex
	unmanaged map[string]bool
	extra     map[string]csrpolicy.Policy
}

// managed is the instance's csrapproval.Config.Managed.
func (i *instance) managed(node *corev1.Node, _ machine.Machine) bool {
	i.mu.Lock()
	defer i.mu.Unlock()

	return !i.unmanaged[node.Name]
}

func (i *instance) policy(node *corev1.Node, _ machine.Machine) csrpolicy.Policy {
	i.mu.Lock()
	defer i.mu.Unlock()

	return i.extra[node.Name]
}

func (i *instance) allow(nodename string, policy csrpolicy.Policy) {
	i.mu.Lock()
	i.extra[nodename] = policy
	i.mu.Unlock()

	i.controller.Resync()
}

func (i *instance) unmanage(nodename string) {
	i.mu.Lock()
	defer i.mu.Unlock()

	i.unmanaged[nodename] = true
}

// start starts the controllers wired as in the product, with its service account but without leader election.
func (b *bed) start(ctx context.Context) (*instance, error) { return b.startAt(ctx, clock.RealClock{}) }

// startAt starts an instance with a clock.
func (b *bed) startAt(ctx context.Context, clk clock.WithTicker) (*instance, error) {
	client, err := kubernetes.NewForConfig(b.product)
	if err != nil {
		return nil, err
	}

	credentials, err := b.talos.ClientTLS(string(role.Reader))
	if err != nil {
		return nil, err
	}

	direct := func(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
		if m, routed := b.routes.Load(addr); routed {
			addr, _ = m.(netip.Addr)
		}

		return talosapi.Dial(ctx, staticCredentials{credentials}, addr)
	}

	ctx, cancel := context.WithCancel(ctx)
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})

	var (
		group    sync.WaitGroup
		recorder = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "talos-ccm"})
		factory  = informers.NewSharedInformerFactory(client, 0)
		nodes    = factory.Core().V1().Nodes()
		dial     = controlplane.NewAddresses(client, nodes.Lister(), b.socket.EtcdMembers, clock.RealClock{}).Guard(direct)
		// The factory's only informer is the Node informer.
		watching, freeze = context.WithCancel(ctx)
		i                = &instance{
			nodes:     nodes.Lister(),
			freeze:    func() { freeze(); factory.Shutdown() },
			inventory: inventory.New(clk.Now),
			unmanaged: map[string]bool{},
			extra:     map[string]csrpolicy.Policy{},
			stop:      func() { cancel(); group.Wait(); broadcaster.Shutdown() },
		}
		machines = reflector.New(i.inventory, dial, clock.RealClock{})
	)

	i.controlPlane = controlplane.New(controlplane.Config{
		Kubernetes: b.product, Client: client, Nodes: nodes, Dial: dial, LocalState: b.socket.Reader, Recorder: recorder, Clock: clock.RealClock{},
	})

	if b.followFirst {
		if err := machines.FollowNodes(nodes); err != nil {
			return nil, err
		}
	}

	i.controller, err = csrapproval.New(csrapproval.Config{
		Client: client, Nodes: nodes, Inventory: i.inventory, Identity: i.controlPlane.Identity(), Recorder: recorder, Clock: clk, Dial: dial,
		DialKubelet: i.dialKubelet, Managed: i.managed, Policy: i.policy, Workers: 10,
	})
	if err != nil {
		return nil, err
	}

	initializer, err := nodecontroller.New(nodecontroller.Config{
		Client: client, Nodes: nodes, Inventory: i.inventory, Recorder: recorder, Clock: clock.RealClock{},
		Options: func() nodespec.Options { return nodespec.Options{} }, Workers: 10,
	})
	if err != nil {
		return nil, err
	}

	if !b.followFirst {
		if err := machines.FollowNodes(nodes); err != nil {
			return nil, err
		}
	}

	group.Go(func() { i.controlPlane.Run(ctx) })
	group.Go(func() { machines.Run(ctx) })
	group.Go(func() { i.controller.Run(ctx) })
	group.Go(func() { initializer.Run(ctx) })
	factory.Start(watching.Done())

	return i, nil
}

// staticCredentials are talosapi.Credentials that never change.
type staticCredentials struct {
	config *tls.Config
}

// TLSConfig implements talosapi.Credentials. Whatever the dialed address, the certificate is for that on loopback.
func (c staticCredentials) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

// suite is the bed of one test.
type suite struct {
	*testing.T
	*bed
}

// parallel returns a suite for a test that does not disturb others; alone for a test that does.
func parallel(t *testing.T) suite {
	t.Parallel()

	return alone(t)
}

func alone(t *testing.T) suite { return suite{t, &shared} }

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

	m, err := s.addMachine(talostest.MachineSpec{Nodename: w.name, Addresses: addresses}, w.addr)
	s.require(err)
	s.Cleanup(func() { _ = m.Stop(context.Background()) })

	w.machine = m

	return w
}

// register registers the worker's Node as its kubelet does; it is deleted when the test ends.
func (s suite) register(w worker) {
	s.Helper()

	s.registerAs(kube.NodeSpec{Name: w.name, NodeIPs: []netip.Addr{w.addr}})
}

func (s suite) registerAs(spec kube.NodeSpec) {
	s.Helper()

	_, err := s.kube.RegisterNode(s.Context(), spec)
	s.require(err)
	s.Cleanup(func() {
		err := s.client.CoreV1().Nodes().Delete(context.Background(), spec.Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			s.Error(err)
		}
	})
}

// join returns a worker with a machine and a Node.
func (s suite) join(addresses ...talostest.Address) worker {
	s.Helper()

	w := s.boot(s.plan(), addresses...)
	s.register(w)

	return w
}

// known returns a joined worker whose machine is in the inventory.
func (s suite) known(addresses ...talostest.Address) worker {
	s.Helper()

	w := s.join(addresses...)
	s.eventually(w.name+" is known", func() bool { return s.main.inventory.Get(w.name).Condition == inventory.Current })

	return w
}

// awaitSeen waits until the Node is in the cache: requests posted before may be reviewed without it.
func (s suite) awaitSeen(nodename string) {
	s.Helper()

	s.eventually("Node "+nodename+" is in the cache", func() bool {
		_, err := s.main.nodes.Get(nodename)

		return err == nil
	})
}

// list adds an address to the Node as its kubelet can: a request for what neither the machine nor the Node has is
// outdated.
func (s suite) list(w worker, addr netip.Addr) {
	s.Helper()

	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%s,%s"}}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr, w.addr, addr)
	_, err := s.client.CoreV1().Nodes().Patch(s.Context(), w.name, types.MergePatchType, patch, metav1.PatchOptions{})
	s.require(err)
}

// restart replaces the leader.
func (s suite) restart() {
	s.Helper()
	s.main.stop()

	next, err := s.start(context.WithoutCancel(s.Context()))
	s.require(err)

	s.main = next
}

func (s suite) require(err error) {
	s.Helper()

	if err != nil {
		s.Fatal(err)
	}
}

func (s suite) get(name string) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	csr, err := s.client.CertificatesV1().CertificateSigningRequests().Get(s.Context(), name, metav1.GetOptions{})
	s.require(err)

	return csr
}

// await returns a request as soon as ok returns true. It tolerates restarts of the API server.
func (s suite) await(name, what string, ok func(*certificatesv1.CertificateSigningRequest) bool) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	var csr *certificatesv1.CertificateSigningRequest

	err := wait.PollUntilContextTimeout(s.Context(), interval, timeout, true, func(ctx context.Context) (bool, error) {
		got, err := s.client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, nil //nolint:nilerr // retried
		}

		csr = got

		return ok(csr), nil
	})
	if err != nil {
		s.Fatalf("request %s is not %s after %s: %v, Events: %v", name, what, timeout, csr, s.messages(name, ""))
	}

	return csr
}

func (s suite) awaitIssued(name string) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	return s.await(name, "issued", func(csr *certificatesv1.CertificateSigningRequest) bool {
		if denied(csr) {
			s.Fatalf("request %s was denied: %v", name, csr.Status.Conditions)
		}

		return len(csr.Status.Certificate) > 0
	})
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

// messages returns the messages of the Events on an object with the given reason; empty means any.
func (s suite) messages(name, reason string) []string {
	s.Helper()

	selector := fields.Set{"involvedObject.name": name}
	if reason != "" {
		selector["reason"] = reason
	}

	list, err := s.client.CoreV1().Events(metav1.NamespaceAll).List(s.Context(), metav1.ListOptions{FieldSelector: selector.String()})
	s.require(err)

	var messages []string
	for _, event := range list.Items {
		messages = append(messages, event.Message)
	}

	return messages
}

// awaitDeferred waits for an Event that reports the deferral with the given code.
func (s suite) awaitDeferred(name, code string) {
	s.Helper()

	var found []string

	s.eventually(fmt.Sprintf("request %s is deferred for %s", name, code), func() bool {
		found = s.messages(name, csrapproval.ReasonDeferred)

		return slices.ContainsFunc(found, func(message string) bool { return strings.Contains(message, code) })
	})
}

// eventually polls until ok returns true; details adds to the failure message.
func (s suite) eventually(what string, ok func() bool, details ...func() string) {
	s.Helper()

	err := wait.PollUntilContextTimeout(s.Context(), interval, timeout, true, func(context.Context) (bool, error) { return ok(), nil })
	if err == nil {
		return
	}

	for _, detail := range details {
		what += "; " + detail()
	}

	s.Fatalf("timed out after %s: %s", timeout, what)
}
