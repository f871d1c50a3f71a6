package controlplane_test

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/role"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	pollTimeout  = 2 * time.Minute
	pollInterval = 20 * time.Millisecond

	// refresh is longer than any pause of the Reader.
	refresh = time.Minute
)

var cluster *kube.Cluster

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	cluster, err = kube.Start(context.Background(), kube.Options{Progress: os.Stderr, ControllerManager: kube.ControllerManager{Absent: true}})
	if err != nil {
		return 1, err
	}

	code = m.Run()

	return code, cluster.Stop()
}

// suite is a Talos cluster and a Reader of it.
type suite struct {
	*testing.T

	talos    *talostest.Cluster
	client   kubernetes.Interface
	clock    *clocktesting.FakeClock
	recorder *record.FakeRecorder
	reader   *controlplane.Reader
	changes  atomic.Int64 // of the identity
}

// newSuite starts a Reader that connects to the API server with config. The options, if any, change its configuration.
func newSuite(t *testing.T, config *rest.Config, options ...func(*suite, *controlplane.Config)) *suite {
	t.Helper()

	s := &suite{T: t, clock: clocktesting.NewFakeClock(time.Now()), recorder: record.NewFakeRecorder(10)}

	var err error

	s.talos, err = talostest.New(talostest.Options{})
	s.require(err)
	t.Cleanup(s.talos.Close)

	s.client, err = kubernetes.NewForConfig(cluster.Config())
	s.require(err)

	credentials, err := s.talos.ClientTLS(string(role.Reader))
	s.require(err)

	factory := informers.NewSharedInformerFactory(s.client, 0)
	cfg := controlplane.Config{
		Kubernetes: config,
		Client:     s.client,
		Nodes:      factory.Core().V1().Nodes(),
		Recorder:   s.recorder,
		Clock:      s.clock,
		Dial: func(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
			st, err := talosapi.Dial(ctx, staticCredentials{credentials}, addr)

			return talosapi.ControlPlane{State: st}, err
		},
	}

	for _, option := range options {
		option(s, &cfg)
	}

	s.reader = controlplane.New(cfg)
	s.reader.Identity().Subscribe(func() { s.changes.Add(1) })

	factory.Start(t.Context().Done())

	ended := make(chan struct{})

	go func() {
		defer close(ended)

		s.reader.Run(t.Context())
	}()

	t.Cleanup(func() { <-ended })

	return s
}

// staticCredentials implements talosapi.Credentials with a fixed configuration.
type staticCredentials struct {
	config *tls.Config
}

// TLSConfig implements talosapi.Credentials.
func (c staticCredentials) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

// add adds a machine and its Node, which has no labels.
func (s *suite) add(nodename string, machineType talosmachine.Type) *talostest.Machine {
	s.Helper()

	m, err := s.talos.AddMachine(talostest.MachineSpec{Nodename: nodename, Type: machineType})
	s.require(err)

	s.register(nodename, m.Address())

	return m
}

func (s *suite) register(nodename string, addr netip.Addr) {
	s.Helper()

	_, err := cluster.RegisterNode(s.Context(), kube.NodeSpec{Name: nodename, NodeIPs: []netip.Addr{addr}})
	s.require(err)
	s.Cleanup(func() {
		s.require(s.client.CoreV1().Nodes().Delete(context.Background(), nodename, metav1.DeleteOptions{}))
	})
}

// label labels the Node as part of the control plane.
func (s *suite) label(nodename string) {
	s.Helper()

	patch := []byte(`{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)

	_, err := s.client.CoreV1().Nodes().Patch(s.Context(), nodename, types.MergePatchType, patch, metav1.PatchOptions{})
	s.require(err)
}

// stopAPIServer stops the API server until the test ends. Cleanup and other tests need it again.
func (s *suite) stopAPIServer() {
	s.Helper()

	cluster.StopAPIServer(s.Context())
	s.Cleanup(func() { s.require(cluster.StartAPIServer(context.Background())) })
}

func (s *suite) require(err error) {
	s.Helper()

	if err != nil {
		s.Fatal(err)
	}
}

// await refreshes until ok returns true for the identity, and returns it after the refresh has finished. Handlers are
// called a moment after a change is visible.
func (s *suite) await(what string, ok func(csrpolicy.ClusterIdentity) bool) csrpolicy.ClusterIdentity {
	s.Helper()

	err := wait.PollUntilContextTimeout(s.Context(), pollInterval, pollTimeout, true, func(context.Context) (bool, error) {
		if ok(s.identity()) {
			return true, nil
		}

		s.clock.Step(refresh)

		return false, nil
	})
	if err != nil {
		s.Fatalf("timed out waiting until %s; identity is %+v", what, s.identity())
	}

	s.awaitIdle()

	return s.identity()
}

func (s *suite) identity() csrpolicy.ClusterIdentity { return s.reader.Identity().Current() }

// refresh waits for one more refresh.
func (s *suite) refresh() {
	s.Helper()

	s.awaitIdle()
	s.clock.Step(refresh)
	s.awaitIdle()
}

func (s *suite) awaitIdle() {
	s.Helper()

	err := wait.PollUntilContextTimeout(s.Context(), pollInterval, pollTimeout, true, func(context.Context) (bool, error) { return s.clock.HasWaiters(), nil })
	s.require(err)
}

func known(id csrpolicy.ClusterIdentity) bool { return id.Known }

func TestReader_ReadsTheClusterIdentity(t *testing.T) {
	s := newSuite(t, cluster.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)

	endpoint := k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID)
	endpoint.TypedSpec().Hosts = []string{"api.example.org"}
	endpoint.TypedSpec().Addresses = []netip.Addr{netip.MustParseAddr("203.0.113.1")}
	s.require(m.State().Create(t.Context(), endpoint))
	s.exclude(m, "203.0.113.2", "fd00::2/128", "192.168.0.0/16")

	// The machine is read as soon as its Node has the label.
	s.label("cp-1")

	id := s.await("the identity is known", known)

	wantAll(t, "names", id.APIServerNames, "kubernetes", "kubernetes.default.svc.cluster.local", "api.example.org")
	wantAll(t, "domains", id.Domains, "cluster.local")
	wantAll(t, "addresses", id.APIServerIPs, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("203.0.113.1"))
	wantAll(t, "service addresses", id.ServiceIPs, netip.MustParseAddr("10.0.0.1"))
	wantAll(t, "service CIDRs", id.ServiceCIDRs, netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("10.96.0.0/12"))
	wantAll(t, "pod CIDRs", id.PodCIDRs, netip.MustParsePrefix("10.244.0.0/16"))

	if vips := []netip.Addr{netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("fd00::2")}; !slices.Equal(id.VIPs, vips) {
		t.Errorf("virtual IPs are %v, want %v", id.VIPs, vips)
	}

	if s.changes.Load() == 0 {
		t.Error("the subscriber was not called")
	}
}

func wantAll[T comparable](t *testing.T, what string, got []T, want ...T) {
	t.Helper()

	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("%s are %v, want them to contain %v", what, got, w)
		}
	}
}

// exclude adds subnets to those that the kubelet excludes from node IPs.
func (s *suite) exclude(m *talostest.Machine, subnets ...string) {
	s.Helper()

	err := safe.StateModify(s.Context(), m.State(), k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), func(config *k8s.NodeIPConfig) error {
		config.TypedSpec().ExcludeSubnets = append(config.TypedSpec().ExcludeSubnets, subnets...)

		return nil
	})
	s.require(err)
}

func TestReader_NeedsALabeledNode(t *testing.T) {
	s := newSuite(t, cluster.Config())

	// Any machine can report that it is of the control plane.
	liar := s.add("liar", talosmachine.TypeControlPlane)
	s.add("cp-1", talosmachine.TypeControlPlane)
	s.await("the API server has answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.ServiceIPs) > 0 })
	s.refresh()

	if s.identity().Known {
		t.Fatalf("identity is known without a labeled Node: %+v", s.identity())
	}

	s.label("cp-1")
	s.await("the identity is known", known)

	if calls := liar.Calls(); len(calls) > 0 {
		t.Errorf("a machine without the label was read: %v", calls)
	}
}

func TestReader_VerifiesTheNodename(t *testing.T) {
	s := newSuite(t, cluster.Config())

	other, err := s.talos.AddMachine(talostest.MachineSpec{Nodename: "other", Type: talosmachine.TypeControlPlane})
	s.require(err)

	s.register("cp-1", other.Address())
	s.label("cp-1")
	s.await("the machine was read", func(csrpolicy.ClusterIdentity) bool { return len(other.Calls()) > 0 })
	s.refresh()

	if id := s.identity(); id.Known || len(id.PodCIDRs) > 0 {
		t.Errorf("the identity contains facts of another machine: %+v", id)
	}
}

func TestReader_KeepsTheLastAnswers(t *testing.T) {
	s := newSuite(t, cluster.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)
	s.label("cp-1")

	before := s.await("the identity is known", known)
	changes := s.changes.Load()

	m.CutOff()
	s.refresh()

	if network := s.reader.Network().Current(); network.Problem != "" || len(network.Allocators()) != 1 {
		t.Errorf("network is %+v, want the last answer of the machine", network)
	}

	// ServiceCIDRs must be read each time, because pods must not be assigned addresses of a new one.
	s.stopAPIServer()
	s.refresh()

	network := s.reader.Network().Current()
	if !strings.Contains(network.Problem, "list ServiceCIDRs") || len(network.ServiceCIDRs) == 0 {
		t.Errorf("network is %+v, want a problem and the last ServiceCIDRs", network)
	}

	after := s.identity()
	if !after.Known || !slices.Equal(after.PodCIDRs, before.PodCIDRs) || !slices.Equal(after.APIServerNames, before.APIServerNames) {
		t.Errorf("identity is %+v, before it was %+v", after, before)
	}

	if s.changes.Load() != changes {
		t.Error("the subscriber was called without a change")
	}
}

func TestReader_CallsSubscribersAfterChanges(t *testing.T) {
	s := newSuite(t, cluster.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)
	s.label("cp-1")
	s.await("the identity is known", known)

	changes := s.changes.Load()

	s.refresh()

	if s.changes.Load() != changes {
		t.Error("the subscriber was called without a change")
	}

	s.exclude(m, "203.0.113.3")
	s.await("the virtual IP is known", func(id csrpolicy.ClusterIdentity) bool { return len(id.VIPs) == 1 })

	if s.changes.Load() == changes {
		t.Error("the subscriber was not called")
	}
}

func TestReader_NeedsAClusterDomain(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()

	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	s := newSuite(t, &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	s.add("cp-1", talosmachine.TypeControlPlane)
	s.label("cp-1")
	s.await("the machine has answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.PodCIDRs) > 0 })

	if s.identity().Known {
		t.Error("the identity is known")
	}
}

func TestReader_ReadsTheNetwork(t *testing.T) {
	s := newSuite(t, cluster.Config())
	s.add("cp-2", talosmachine.TypeControlPlane)
	s.add("cp-1", talosmachine.TypeControlPlane)
	s.label("cp-2")
	s.label("cp-1")

	// Talos has kube-controller-manager allocate by default.
	network := s.awaitNetwork("both machines are known", func(n *controlplane.Network) bool { return len(n.KCMConfigs) == 2 })

	if network.Problem != "" || !slices.Equal(network.Allocators(), []string{"cp-1", "cp-2"}) {
		t.Errorf("network is %+v, want two allocators", network)
	}

	config := network.KCMConfigs[0]
	wantAll(t, "cluster CIDRs", config.ClusterCIDRs, netip.MustParsePrefix("10.244.0.0/16"))
	wantAll(t, "service CIDRs", config.ServiceCIDRs, netip.MustParsePrefix("10.96.0.0/12"))
	wantAll(t, "CIDRs of the ServiceCIDR API", network.ServiceCIDRs, netip.MustParsePrefix("10.0.0.0/16"))
}

// awaitNetwork is await for the Network.
func (s *suite) awaitNetwork(what string, ok func(*controlplane.Network) bool) *controlplane.Network {
	s.Helper()
	s.await(what, func(csrpolicy.ClusterIdentity) bool {
		network := s.reader.Network().Current()

		return network != nil && ok(network)
	})

	return s.reader.Network().Current()
}

func TestReader_ReadsTheLocalMachineWithoutLabeledNodes(t *testing.T) {
	s := newSuite(t, cluster.Config(), func(s *suite, cfg *controlplane.Config) {
		m, err := s.talos.AddMachine(talostest.MachineSpec{Nodename: "cp-1", Type: talosmachine.TypeControlPlane})
		s.require(err)

		cfg.LocalState = m.State()
	})

	network := s.awaitNetwork("the network is known", func(n *controlplane.Network) bool { return n.Problem == "" })
	if got := network.Allocators(); !slices.Equal(got, []string{"this machine"}) {
		t.Errorf("allocators are %v, want this machine", got)
	}

	if s.identity().Known {
		t.Error("the identity is known without a labeled Node")
	}

	s.add("cp-2", talosmachine.TypeControlPlane)
	s.label("cp-2")

	network = s.awaitNetwork("the Node is read", func(n *controlplane.Network) bool { return slices.Contains(n.Allocators(), "cp-2") })
	if len(network.KCMConfigs) != 1 {
		t.Errorf("network is %+v, want only the labeled Node's machine", network)
	}
}

// TestReader_HostedControlPlane: what the operator states replaces the answers of machines only where there are none.
func TestReader_HostedControlPlane(t *testing.T) {
	s := newSuite(t, cluster.Config(), func(_ *suite, cfg *controlplane.Config) {
		cfg.Hosted = &csrpolicy.ClusterIdentity{
			APIServerNames: []string{"api.example.org"}, APIServerIPs: []netip.Addr{netip.MustParseAddr("203.0.113.1")},
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16")}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.65.0.0/16")},
		}
	})
	s.add("worker", talosmachine.TypeWorker)

	id := s.await("the identity is known", known)

	wantAll(t, "names", id.APIServerNames, "kubernetes", "kubernetes.default.svc.cluster.local", "api.example.org")
	wantAll(t, "addresses", id.APIServerIPs, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("203.0.113.1"))
	wantAll(t, "service CIDRs", id.ServiceCIDRs, netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("10.65.0.0/16"))
	wantAll(t, "pod CIDRs", id.PodCIDRs, netip.MustParsePrefix("10.64.0.0/16"))

	if len(id.Unconfirmed.Names)+len(id.Unconfirmed.IPs)+len(id.Unconfirmed.CIDRs) > 0 {
		t.Errorf("unconfirmed are %+v, want nothing", id.Unconfirmed)
	}

	if network := s.awaitNetwork("the network is read", func(*controlplane.Network) bool { return true }); network.Problem != "" {
		t.Errorf("network is %+v, want no problem", network)
	}

	m := s.add("cp-1", talosmachine.TypeControlPlane)
	m.CutOff()
	s.label("cp-1")
	s.await("the machine counts", func(id csrpolicy.ClusterIdentity) bool { return !id.Known })

	if network := s.reader.Network().Current(); !strings.Contains(network.Problem, "cp-1") {
		t.Errorf("network is %+v, want a problem with the machine", network)
	}
}

// TestReader_IgnoresChangedOSImage: a kubelet, which writes the osImage of its Node, cannot have stated facts replace its
// machine, or drop what the machine has reported.
func TestReader_IgnoresChangedOSImage(t *testing.T) {
	s := newSuite(t, cluster.Config(), func(_ *suite, cfg *controlplane.Config) {
		cfg.Hosted = &csrpolicy.ClusterIdentity{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16")}}
	})

	setOSImage := func(nodename string) {
		_, err := s.client.CoreV1().Nodes().Patch(s.Context(), nodename, types.MergePatchType,
			[]byte(`{"status":{"nodeInfo":{"osImage":"Debian"}}}`), metav1.PatchOptions{}, "status")
		s.require(err)
	}

	m := s.add("cp-1", talosmachine.TypeControlPlane)
	s.exclude(m, "203.0.113.2")
	s.label("cp-1")
	s.await("the virtual IP is known", func(id csrpolicy.ClusterIdentity) bool { return len(id.VIPs) == 1 })

	m.CutOff()
	setOSImage("cp-1")

	for _, nodename := range []string{"cp-2", "cp-3"} {
		s.add(nodename, talosmachine.TypeControlPlane).CutOff()
		s.label(nodename)
	}

	s.await("most of the machines have not been read", func(id csrpolicy.ClusterIdentity) bool { return !id.Known })

	for range 4 {
		s.refresh() // the cache may be late
	}

	if id := s.identity(); id.Known || len(id.VIPs) != 1 {
		t.Errorf("the identity is %+v, want an unknown one with the virtual IP", id)
	}

	for _, nodename := range []string{"cp-2", "cp-3"} {
		setOSImage(nodename)
	}

	for range 4 {
		s.refresh()
	}

	if id := s.identity(); id.Known || len(id.VIPs) != 1 {
		t.Errorf("the identity is %+v, want an unknown one with the virtual IP", id)
	}
}

// TestReader_NeedsMachinesOfOtherSystems: stated facts do not replace a control-plane Node that never reported Talos.
func TestReader_NeedsMachinesOfOtherSystems(t *testing.T) {
	s := newSuite(t, cluster.Config(), func(_ *suite, cfg *controlplane.Config) {
		cfg.Hosted = &csrpolicy.ClusterIdentity{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16")}}
	})
	s.await("the identity is known", known)

	_, err := cluster.RegisterNode(s.Context(), kube.NodeSpec{Name: "cp-1", OSImage: "Debian"})
	s.require(err)
	s.Cleanup(func() {
		s.require(s.client.CoreV1().Nodes().Delete(context.WithoutCancel(s.Context()), "cp-1", metav1.DeleteOptions{}))
	})
	s.label("cp-1")
	s.await("the Node counts", func(id csrpolicy.ClusterIdentity) bool { return !id.Known })
}

func TestReader_ExplainsAnUnknownNetwork(t *testing.T) {
	s := newSuite(t, cluster.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)
	m.CutOff()
	s.label("cp-1")

	s.awaitNetwork("the problem names the machine", func(n *controlplane.Network) bool { return strings.Contains(n.Problem, "cp-1") })
}

func TestReader_ReadsNothingWithoutSubscribers(t *testing.T) {
	factory := informers.NewSharedInformerFactory(nil, 0)

	// Without subscribers Run returns before it uses any of its configuration.
	controlplane.New(controlplane.Config{Nodes: factory.Core().V1().Nodes()}).Run(t.Context())
}
