//go:build e2e

package loadbalancer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/netns"
)

const (
	clientAddress = "192.0.2.100"
	targetPort    = 8080
	podSubnets    = "10.244.0.0/16,fd00:10:244::/56"
)

// bed contains a control plane, Nodes and a client. A bridge connects the Nodes and the client.
type bed struct {
	ctest.Suite

	instance *ctest.Instance
	// lan is the namespace of the bridge, and outside is the namespace of the client.
	lan, outside *netns.Namespace
}

// node is a Node with one pod. The pod responds to HTTP requests with the name of the Node and the source address.
type node struct {
	name, address, podAddress string

	namespace, pod *netns.Namespace
}

// connect creates a namespace that is connected with the new interface link of another one.
func (b *bed) connect(to *netns.Namespace, link, address string) *netns.Namespace {
	b.Helper()

	ns, err := to.Connect(b.Context(), link, netip.MustParsePrefix(address+"/24"))
	require.NoError(b, err)
	b.Cleanup(func() { _ = ns.Close() })

	return ns
}

// plug creates a namespace that is connected to the bridge.
func (b *bed) plug(name, address string) *netns.Namespace {
	b.Helper()

	ns := b.connect(b.lan, name, address)
	require.NoError(b, b.lan.IP(b.Context(), "link set "+name+" master br0"))

	return ns
}

// newBed returns a bed with the client and without Nodes.
func newBed(t *testing.T, manager kube.ControllerManager) *bed {
	t.Helper()

	b := &bed{Suite: ctest.Start(t, kube.Options{ControllerManager: manager})}

	var err error

	b.instance, err = ctest.NewInstance(t.Context(), b.Kube.Config(), ctest.Dial(b.Talos))
	require.NoError(t, err)
	t.Cleanup(b.instance.Stop)

	b.lan, err = netns.New(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.lan.Close() })
	require.NoError(t, b.lan.IP(t.Context(), "link add br0 type bridge", "link set br0 up"))
	b.outside = b.plug("client", clientAddress)

	return b
}

// join adds a Node with a pod and kube-proxy. The addresses contain the number, which must be unique.
func (b *bed) join(name string, number int, proxyMode string) node {
	b.Helper()

	n := node{name: name, address: fmt.Sprintf("192.0.2.%d", number), podAddress: fmt.Sprintf("10.244.%d.2", number)}
	n.namespace = b.plug(name, n.address)
	n.pod = b.connect(n.namespace, "pod", n.podAddress)
	gateway := fmt.Sprintf("10.244.%d.1", number)

	require.NoError(b, n.namespace.IP(b.Context(), "address add "+gateway+"/24 dev pod"))
	require.NoError(b, n.pod.IP(b.Context(), "route add default via "+gateway))
	require.NoError(b, n.namespace.Inside(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644) }))

	b.serve(n)
	b.register(n)
	b.forwardAPI(n)
	b.startKubeProxy(n, proxyMode)

	return n
}

// serve starts the server of a Node's pod.
func (b *bed) serve(n node) {
	b.Helper()

	listener, err := n.pod.Listen(b.Context(), fmt.Sprintf(":%d", targetPort))
	require.NoError(b, err)

	server := &http.Server{ReadHeaderTimeout: ctest.Timeout, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprint(w, n.name, " ", host)
	})}

	go func() { _ = server.Serve(listener) }()

	b.Cleanup(func() { _ = server.Close() })
}

// route routes the pods of a Node from another one.
func (b *bed) route(from, to node) {
	b.Helper()
	require.NoError(b, from.namespace.IP(b.Context(), "route add "+to.podAddress+" via "+to.address))
}

// register registers a ready Node, and adds a machine with its address to the inventory.
func (b *bed) register(n node) {
	b.Helper()

	address := netip.MustParseAddr(n.address)
	b.Register(kube.NodeSpec{Name: n.name, NodeIPs: []netip.Addr{address}, WithoutCloudProvider: true})
	b.SetReady(n.name, corev1.ConditionTrue)
	b.instance.Inventory.Replace(n.name, machine.Machine{
		Nodename: n.name, Addresses: []machine.Address{{Link: "eth0", Prefix: netip.PrefixFrom(address, 24)}},
	})
}

// forwardAPI makes the API server reachable from the Node's namespace.
func (b *bed) forwardAPI(n node) {
	b.Helper()

	listener, err := n.namespace.Forward(b.Context(), strings.TrimPrefix(b.Kube.Endpoint(), "https://"))
	require.NoError(b, err)
	b.Cleanup(func() { _ = listener.Close() })
}

// startKubeProxy runs kube-proxy in the Node's namespace until the test ends.
func (b *bed) startKubeProxy(n node, mode string) {
	b.Helper()

	assets, err := kube.NodeAssetsOf(b.Context(), kube.KubernetesVersion, os.Stderr)
	require.NoError(b, err)

	b.run(n, os.Environ(), filepath.Join(assets, "kube-proxy"), "--kubeconfig="+b.kubeconfig(), "--hostname-override="+n.name,
		"--proxy-mode="+mode, "--cluster-cidr="+podSubnets, "--conntrack-max-per-core=0", "--v=2")
}

// kubeconfig returns a file with the administrator's kubeconfig.
func (b *bed) kubeconfig() string {
	b.Helper()

	file := filepath.Join(b.TempDir(), "kubeconfig")
	require.NoError(b, os.WriteFile(file, b.Kube.Kubeconfig(), 0o600))

	return file
}

// run runs a program in the Node's namespace until the test ends. It returns its log and a channel that is closed when the
// program exits.
func (b *bed) run(n node, environment []string, program string, args ...string) (log string, exited <-chan struct{}) {
	b.Helper()

	name := filepath.Base(program)

	file, err := os.Create(filepath.Join(b.TempDir(), name+".log"))
	require.NoError(b, err)

	cmd := exec.CommandContext(b.Context(), program, args...)
	cmd.Env = environment
	cmd.Stdout, cmd.Stderr = file, file
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}

	started, done := make(chan error), make(chan struct{})

	go func() {
		defer close(done)

		// The thread ends with the goroutine, and Pdeathsig is sent when it ends.
		runtime.LockOSThread()

		err := errors.Join(n.namespace.Enter(), cmd.Start())
		started <- err

		if err == nil {
			_ = cmd.Wait()
		}
	}()

	require.NoError(b, <-started)
	b.Cleanup(func() {
		<-done // the context of the test has ended

		if content, err := os.ReadFile(file.Name()); err == nil && b.Failed() {
			b.Logf("%s of %s:\n%s", name, n.name, content)
		}
	})

	return file.Name(), done
}

// startController runs the service controller until the test ends.
func (b *bed) startController(probe func(nodename string)) {
	b.Helper()

	i := b.instance
	controller, err := service.New(service.Config{
		Client: i.Client, Nodes: i.Nodes, Inventory: i.Inventory, Recorder: i.Recorder, Probe: probe,
		Managed:  func(*corev1.Node, machine.Machine) bool { return true },
		Options:  func() config.Service { return config.Service{} },
		Identity: func() csrpolicy.ClusterIdentity { return csrpolicy.ClusterIdentity{Known: true} },
	})
	require.NoError(b, err)
	i.Start(controller.Run)
}

// createService creates the Service without endpoints.
func (b *bed) createService() {
	b.Helper()

	_, err := b.Client.CoreV1().Services("default").Create(b.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(service.Class), AllocateLoadBalancerNodePorts: new(false),
			Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(targetPort)}},
		},
	}, metav1.CreateOptions{})
	require.NoError(b, err)
}

// setEndpoint sets the pod of a Node as the only endpoint of the Service.
func (b *bed) setEndpoint(n node) {
	b.Helper()

	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{n.podAddress}, NodeName: &n.name}},
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(targetPort))}},
	}

	client := b.Client.DiscoveryV1().EndpointSlices("default")
	if _, err := client.Update(b.Context(), slice, metav1.UpdateOptions{}); err != nil {
		_, err = client.Create(b.Context(), slice, metav1.CreateOptions{})
		require.NoError(b, err)
	}
}

// patch applies a merge patch to the Service.
func (b *bed) patch(patch string) {
	b.Helper()

	_, err := b.Client.CoreV1().Services("default").Patch(b.Context(), "web", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	require.NoError(b, err)
}

// awaitAddresses waits until the status of the Service lists exactly the addresses of the Nodes, in order.
func (b *bed) awaitAddresses(nodes ...node) {
	b.Helper()

	var want []string
	for _, n := range nodes {
		want = append(want, n.address)
	}

	ctest.Await(b, b.Client.CoreV1().Services("default"), ctest.Named("web"), ctest.Published(want...))
}

// get sends a request from a namespace to port 80 of a Node, and returns the body of the response.
func (b *bed) get(from *netns.Namespace, to node) (string, error) {
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{DialContext: from.Dial, DisableKeepAlives: true}}

	request, err := http.NewRequestWithContext(b.Context(), http.MethodGet, "http://"+to.address, http.NoBody)
	if err != nil {
		return "", err
	}

	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close() //nolint:errcheck // only read

	body, err := io.ReadAll(response.Body)

	return string(body), err
}

// awaitResponse waits until the response to a request is want.
func (b *bed) awaitResponse(from *netns.Namespace, to node, want string) {
	b.Helper()
	ctest.EventuallyNoError(b, func(context.Context) error {
		got, err := b.get(from, to)
		if got != want {
			return fmt.Errorf("%s responds %q, %w, want %q", to.name, got, err, want)
		}

		return nil
	})
}

// awaitFailure waits until a request fails with an error that contains the text.
func (b *bed) awaitFailure(from *netns.Namespace, to node, text string) {
	b.Helper()
	ctest.EventuallyNoError(b, func(context.Context) error {
		got, err := b.get(from, to)
		if err == nil || !strings.Contains(err.Error(), text) {
			return fmt.Errorf("%s responds %q, %w, want %s", to.name, got, err, text)
		}

		return nil
	})
}

// translate adds an ExternalIP to a Node that the bridge translates to the Node's address in both directions, as clouds do
// with public addresses: the machine does not have it on a link. It returns the Node with that address.
func (b *bed) translate(n node, external string) node {
	b.Helper()

	require.NoError(b, b.lan.IP(b.Context(), "address add 192.0.2.254/24 dev br0"))
	require.NoError(b, b.outside.IP(b.Context(), "route add "+external+" via 192.0.2.254"))
	require.NoError(b, b.lan.Inside(func() error {
		output, err := exec.CommandContext(b.Context(), "nft", fmt.Sprintf(`add table ip nat
			add chain ip nat prerouting { type nat hook prerouting priority dstnat; }
			add chain ip nat postrouting { type nat hook postrouting priority srcnat; }
			add rule ip nat prerouting ip daddr %s dnat to %s
			add rule ip nat postrouting ip daddr %s masquerade`, external, n.address, n.address)).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, output)
		}

		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
	}))

	b.PatchNode(n.name, "test", fmt.Sprintf(`{"status":{"addresses":[{"type":"InternalIP","address":%q},{"type":"ExternalIP","address":%q}]}}`, n.address, external), "status")

	m := b.instance.Inventory.Get(n.name).Machine
	m.Addresses = append(slices.Clone(m.Addresses), machine.Address{Link: machine.LinkExternal, Prefix: netip.MustParsePrefix(external + "/32")})
	b.instance.Inventory.Replace(n.name, m)

	n.address = external

	return n
}

func TestKubeProxy_ServesNodeAddresses(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) { testKubeProxy(t, mode) })
	}
}

func testKubeProxy(t *testing.T, mode string) {
	b := newBed(t, kube.ControllerManager{Absent: true})
	x, y := b.join("x", 1, mode), b.join("y", 2, mode)
	b.route(x, y)
	b.route(y, x)
	b.startController(b.instance.Reflector.Probe)
	b.createService()

	// Policy Cluster: both Nodes forward to the pod on x, and masquerade the source address. Otherwise x would respond
	// directly to clients of y.
	b.setEndpoint(x)
	b.awaitAddresses(x, y)
	b.awaitResponse(b.outside, x, "x 10.244.1.1")
	b.awaitResponse(b.outside, y, "x "+y.address)
	b.awaitResponse(y.namespace, x, "x "+y.address)

	// Policy Local: only x has an endpoint, and the pod receives the client's address.
	b.patch(`{"spec":{"externalTrafficPolicy":"Local"}}`)
	b.awaitAddresses(x)
	b.awaitResponse(b.outside, x, "x "+clientAddress)
	b.awaitFailure(b.outside, y, "connection refused")

	b.setEndpoint(y)
	b.awaitAddresses(y)
	b.awaitResponse(b.outside, y, "y "+clientAddress)
	b.awaitFailure(b.outside, x, "connection refused")

	// kube-proxy drops requests from other sources.
	b.patch(`{"spec":{"loadBalancerSourceRanges":["203.0.113.0/24"]}}`)
	b.awaitFailure(b.outside, y, "deadline exceeded")
	b.patch(`{"spec":{"loadBalancerSourceRanges":["192.0.2.0/24"]}}`)
	b.awaitResponse(b.outside, y, "y "+clientAddress)
}

// The packets to a translated address arrive at the Node's own address, and kube-proxy serves only published addresses.
func TestKubeProxy_ServesTranslatedAddresses(t *testing.T) {
	b := newBed(t, kube.ControllerManager{Absent: true})
	x := b.join("x", 1, "nftables")
	translated := b.translate(x, "203.0.113.1")
	b.startController(b.instance.Reflector.Probe)
	b.createService()
	b.setEndpoint(x)
	b.awaitResponse(b.outside, translated, "x 10.244.1.1")
	b.awaitAddresses(x)
}
