package controlplane_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
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
	"k8s.io/client-go/informers"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// refresh is longer than any pause of the Reader.
	refresh = time.Minute
	// factsInterval is the longest time between two reads of a control-plane machine, and pollStep is longer than the
	// reflector's pauses while facts are missing.
	factsInterval = 30 * time.Second
	pollStep      = 7 * time.Second
)

var bed ctest.Bed

func TestMain(m *testing.M) {
	bed.Main(m, kube.Options{ControllerManager: kube.ControllerManager{Absent: true}}, nil)
}

// suite is a Talos cluster with a reflector and a Reader of it.
type suite struct {
	ctest.Suite

	clock        *clocktesting.FakeClock // of the Reader
	polls        *clocktesting.FakeClock // of the reflector and the inventory
	inventory    *inventory.Inventory
	reflector    *reflector.Reflector
	local        *talostest.Machine // nil outside Talos
	readsMembers bool
	reader       *controlplane.Reader
	changes      atomic.Int64 // of the identity
	log          lockedBuffer // of verbosity 0
}

// lockedBuffer is a bytes.Buffer that is safe for concurrent use.
type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.buffer.String()
}

// newSuite starts a Reader that connects to the API server with config. The options, if any, change its configuration.
func newSuite(t *testing.T, config *rest.Config, options ...func(*suite, *controlplane.Config)) *suite {
	t.Helper()

	s := &suite{Suite: bed.NewSuite(t), clock: clocktesting.NewFakeClock(time.Now()), polls: clocktesting.NewFakeClock(time.Now())}
	s.Talos = ctest.NewTalos(t, talostest.Options{})
	s.inventory = inventory.New(s.polls.Now)

	factory := informers.NewSharedInformerFactory(s.Client, 0)
	nodes := factory.Core().V1().Nodes()
	direct := ctest.Dial(s.Talos)

	s.reflector = reflector.New(s.inventory, func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		st, err := direct(ctx, nodename, addr)
		if node, _ := nodes.Lister().Get(nodename); err != nil || node == nil || !nodespec.IsControlPlane(node) {
			return st, err
		}

		return talosapi.ControlPlane{State: st}, nil
	}, s.polls)

	cfg := controlplane.Config{Kubernetes: config, Client: s.Client, Nodes: nodes, Machines: s.inventory, Clock: s.clock}

	for _, option := range options {
		option(s, &cfg)
	}

	s.reflector.ReadsMembers = func() bool { return s.readsMembers }

	if s.local != nil {
		cfg.Local = s.local.Nodename
		s.reflector.TrackLocal(s.local.Nodename(), func() (talosapi.State, error) { return talosapi.DialSocket(s.local.Socket()) })
	}

	s.reader = controlplane.New(cfg)
	s.reader.Identity().Subscribe(func() { s.changes.Add(1) })

	require.NoError(t, s.reflector.FollowNodes(nodes))
	factory.Start(t.Context().Done())

	var group sync.WaitGroup

	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&s.log))))

	group.Go(func() { s.reader.Run(ctx) })
	group.Go(func() { s.reflector.Run(klog.NewContext(ctx, klog.Logger{})) })
	t.Cleanup(group.Wait)

	return s
}

// add adds a machine and its Node, which has no labels.
func (s *suite) add(nodename string, machineType talosmachine.Type) *talostest.Machine {
	s.Helper()

	return s.Join(talostest.MachineSpec{Nodename: nodename, Type: machineType})
}

// addControlPlane adds a control-plane machine and its Node, which is labeled.
func (s *suite) addControlPlane(nodename string) *talostest.Machine {
	s.Helper()

	m := s.add(nodename, talosmachine.TypeControlPlane)
	label(s.Suite, nodename)

	return m
}

func register(s ctest.Suite, nodename, addr string) {
	s.Helper()
	s.Register(kube.NodeSpec{Name: nodename, NodeIPs: []netip.Addr{netip.MustParseAddr(addr)}})
}

// label labels the Node as part of the control plane.
func label(s ctest.Suite, nodename string) {
	s.Helper()
	s.PatchNode(nodename, "machined", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)
}

// stopAPIServer stops the API server until the test ends. Cleanup and other tests need it again.
func (s *suite) stopAPIServer() {
	s.Helper()

	s.Kube.StopAPIServer(s.Context())
	s.Cleanup(func() { require.NoError(s, s.Kube.StartAPIServer(context.WithoutCancel(s.Context()))) })
}

// await refreshes until ok returns true for the identity, and returns it after the refresh has finished. Handlers are
// called a moment after a change is visible.
func (s *suite) await(what string, ok func(csrpolicy.ClusterIdentity) bool) csrpolicy.ClusterIdentity {
	s.Helper()

	ctest.EventuallyNoError(s, func(context.Context) error {
		if ok(s.identity()) {
			return nil
		}

		s.step()

		return fmt.Errorf("%s; identity is %+v, network %+v", what, s.identity(), s.reader.Network().Current())
	})
	s.awaitIdle()

	return s.identity()
}

func (s *suite) identity() csrpolicy.ClusterIdentity { return s.reader.Identity().Current() }

// step triggers a refresh. It advances the time of the reflector only a little, so that sessions can begin.
func (s *suite) step() {
	s.Helper()
	s.polls.Step(pollStep)
	ctest.Eventually(s, "the machines were read", func() bool { return len(s.outdated()) == 0 })

	s.awaitIdle()
	s.clock.Step(refresh)
}

// outdated returns the control-plane machines that respond and must be read again.
func (s *suite) outdated() (nodenames []string) {
	s.Helper()

	for _, m := range s.Talos.Machines() {
		entry := s.inventory.Get(m.Nodename())
		if entry.Condition == inventory.Current && entry.Machine.ControlPlane != nil && s.polls.Since(entry.ObservedAt) > factsInterval {
			nodenames = append(nodenames, m.Nodename())
		}
	}

	return nodenames
}

// refresh has all sources read again, and waits for the end.
func (s *suite) refresh() {
	s.Helper()

	for range factsInterval/pollStep + 1 {
		s.step()
	}

	s.awaitIdle()
}

func (s *suite) awaitIdle() {
	s.Helper()

	ctest.Eventually(s, "the reader waits", s.clock.HasWaiters)
}

func known(id csrpolicy.ClusterIdentity) bool { return id.Known }

// hasVIP reports whether a machine reports one virtual IP.
func hasVIP(id csrpolicy.ClusterIdentity) bool {
	return slices.ContainsFunc(id.Reported, func(r csrpolicy.Report) bool { return len(r.VIPs) == 1 })
}

func TestReader_ReadsTheClusterIdentity(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)

	endpoint := k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID)
	endpoint.TypedSpec().Hosts = []string{"api.example.org"}
	endpoint.TypedSpec().Addresses = []netip.Addr{netip.MustParseAddr("203.0.113.1")}
	require.NoError(s, m.State().Create(t.Context(), endpoint))
	s.exclude(m, "203.0.113.2", "fd00::2/128", "192.168.0.0/16")

	// The machine is read as soon as its Node has the label.
	label(s.Suite, "cp-1")

	id := s.await("the identity is known", known)

	wantAll(t, "domains", id.Domains, "cluster.local")
	wantAll(t, "names", id.Stated.APIServerNames, "kubernetes", "kubernetes.default.svc.cluster.local")
	wantAll(t, "addresses", id.Stated.APIServerIPs, netip.MustParseAddr("127.0.0.1"))
	wantAll(t, "service addresses", id.Stated.VIPs, netip.MustParseAddr("10.0.0.1"))
	wantAll(t, "service CIDRs", id.Stated.ServiceCIDRs, netip.MustParsePrefix("10.0.0.0/16"))

	assert.Equal(t, []csrpolicy.Report{{Source: `machine "cp-1"`, ClusterSubjects: csrpolicy.ClusterSubjects{
		APIServerNames: []string{"api.example.org"},
		APIServerIPs:   []netip.Addr{netip.MustParseAddr("203.0.113.1")},
		ServiceCIDRs:   []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		PodCIDRs:       []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		VIPs:           []netip.Addr{netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("fd00::2")},
	}}}, id.Reported)

	assert.NotZero(t, s.changes.Load())
}

func wantAll[T comparable](t *testing.T, what string, got []T, want ...T) {
	t.Helper()

	assert.Subset(t, got, want, what)
}

// exclude adds subnets to those that the kubelet excludes from node IPs.
func (s *suite) exclude(m *talostest.Machine, subnets ...string) {
	s.Helper()

	err := safe.StateModify(s.Context(), m.State(), k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), func(config *k8s.NodeIPConfig) error {
		config.TypedSpec().ExcludeSubnets = append(config.TypedSpec().ExcludeSubnets, subnets...)

		return nil
	})
	require.NoError(s, err)
}

func TestReader_NeedsALabeledNode(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())

	// Any machine can report the control-plane type.
	liar := s.add("liar", talosmachine.TypeControlPlane)
	s.add("cp-1", talosmachine.TypeControlPlane)
	s.await("the API server has answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.Stated.VIPs) > 0 })
	s.refresh()

	require.False(t, s.identity().Known, "identity is known without a labeled Node: %+v", s.identity())

	label(s.Suite, "cp-1")
	s.await("the identity is known", known)

	assert.False(t, slices.ContainsFunc(liar.Calls(), func(c talostest.Call) bool { return c.ResourceType == k8s.ControllerManagerConfigType }))
	assert.Equal(t, 1, strings.Count(s.log.String(), "Cluster identity incomplete"), s.log.String())
	assert.Equal(t, 1, strings.Count(s.log.String(), "Cluster identity complete"), s.log.String())
}

func TestReader_VerifiesTheNodename(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())

	other := s.Machine(talostest.MachineSpec{Nodename: "other", Type: talosmachine.TypeControlPlane})

	s.Register(kube.NodeSpec{Name: "cp-1", NodeIPs: []netip.Addr{other.Address()}})
	label(s.Suite, "cp-1")
	s.await("the machine was read", func(csrpolicy.ClusterIdentity) bool { return len(other.Calls()) > 0 })
	s.refresh()

	if id := s.identity(); id.Known || len(id.Reported) > 0 {
		t.Errorf("the identity contains facts of another machine: %+v", id)
	}
}

func TestReader_KeepsTheLastAnswers(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())
	m := s.addControlPlane("cp-1")

	before := s.await("the identity is known", known)
	changes := s.changes.Load()

	require.NoError(s, m.Stop(s.Context()))
	s.refresh()

	if network := s.reader.Network().Current(); network.Problem != "" || len(network.Allocators()) != 1 {
		t.Errorf("network is %+v, want the last answer of the machine", network)
	}

	// ServiceCIDRs must be read each time, because pods must not be assigned addresses of a new one.
	s.stopAPIServer()
	s.refresh()

	network := s.reader.Network().Current()
	assert.Contains(t, network.Problem, "list ServiceCIDRs")
	assert.NotEmpty(t, network.ServiceCIDRs)

	after := s.identity()
	assert.True(t, after.Known, "identity is %+v, before it was %+v", after, before)
	assert.Equal(t, before, after)

	assert.Equal(t, changes, s.changes.Load())
}

// A resource that exceeds a limit of package talosapi counts as not read.
func TestReader_KeepsTheLastAnswerOfMachineThatSendsTooMuch(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())
	m := s.addControlPlane("cp-1")
	before := s.await("the identity is known", known)

	for _, r := range []resource.Resource{
		k8s.NewControllerManagerConfig(k8s.ControllerManagerConfigID),
		k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID),
		k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID),
	} {
		_, err := m.State().UpdateWithConflicts(t.Context(), r.Metadata(), func(r resource.Resource) error {
			*r.Metadata().Finalizers() = make(resource.Finalizers, 101)

			if nodeIPs, ok := r.(*k8s.NodeIPConfig); ok {
				nodeIPs.TypedSpec().ExcludeSubnets = []string{"192.0.2.1"}
			}

			return nil
		})
		require.NoError(t, err)
	}

	s.refresh()
	assert.Equal(t, before, s.identity())
	assert.Len(t, s.reader.Network().Current().KCMConfigs, 1)
}

func TestReader_CallsSubscribersAfterChanges(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())
	m := s.addControlPlane("cp-1")
	s.await("the identity is known", known)

	changes := s.changes.Load()

	s.refresh()

	assert.Equal(t, changes, s.changes.Load())

	s.exclude(m, "203.0.113.3")
	s.await("the virtual IP is known", hasVIP)

	assert.NotEqual(t, changes, s.changes.Load())
}

func TestReader_NeedsAClusterDomain(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()

	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	s := newSuite(t, &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	s.addControlPlane("cp-1")
	s.await("the machine has answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.Reported) > 0 })

	assert.False(t, s.identity().Known, "the identity is known")
}

// TestReader_ReadsTheCertificatesOfAllEndpoints: an API server that is not the client's has other addresses in its
// certificate.
func TestReader_ReadsTheCertificatesOfAllEndpoints(t *testing.T) {
	names := []string{"kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	translated, ofWorker, added := netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("203.0.113.8"), netip.MustParseAddr("203.0.113.9")

	server, err := bed.Kube.ServingCertificate(names, translated.AsSlice())
	require.NoError(t, err)

	renewed, err := bed.Kube.ServingCertificate(names, added.AsSlice())
	require.NoError(t, err)

	// The CA signs kubelets' certificates, too.
	kubelet, err := bed.Kube.ServingCertificate([]string{"worker"}, ofWorker.AsSlice())
	require.NoError(t, err)

	serve := func(certificate tls.Certificate) *httptest.Server {
		server := httptest.NewUnstartedServer(http.NotFoundHandler())
		server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13}
		server.StartTLS()
		t.Cleanup(server.Close)

		return server
	}

	var second atomic.Pointer[httptest.Server]

	second.Store(serve(server))

	third := serve(kubelet)

	config := bed.Kube.Config()
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		switch address {
		case "192.0.2.2:6443":
			address = second.Load().Listener.Addr().String()
		case "192.0.2.3:6443":
			address = third.Listener.Addr().String()
		case "192.0.2.4:6443":
			return nil, errDialed
		}

		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	s := newSuite(t, config)
	s.addControlPlane("cp-1")
	publish(s.Suite, "kubernetes", "192.0.2.2", "192.0.2.3", "192.0.2.4")

	has := func(id csrpolicy.ClusterIdentity, addr netip.Addr) bool {
		return slices.Contains(id.Stated.APIServerIPs, addr)
	}
	id := s.await("the machine and the certificate of the second API server are known", func(id csrpolicy.ClusterIdentity) bool {
		return id.Known && has(id, translated)
	})
	wantAll(t, "addresses", id.Stated.APIServerIPs, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.4"))
	assert.NotContains(t, id.Stated.APIServerIPs, ofWorker)
	wantAll(t, "ports", id.APIServerPorts, 6443)

	second.Swap(serve(renewed)).Close()

	id = s.await("the second API server has another certificate", func(id csrpolicy.ClusterIdentity) bool {
		return has(id, added) && !has(id, translated)
	})

	second.Load().Close()
	s.refresh()
	assert.Equal(t, id, s.identity(), "the second API server does not respond")

	publish(s.Suite, "kubernetes", "192.0.2.4")
	s.await("the second API server is removed", func(id csrpolicy.ClusterIdentity) bool { return !has(id, added) })
}

// API servers write only the EndpointSlice kubernetes. With any other, a client that may create EndpointSlices could make
// the leader connect anywhere, and reserve the addresses of workers for the control plane.
func TestReader_IgnoresEndpointSlicesOfOthers(t *testing.T) {
	var dialed atomic.Int64

	config := bed.Kube.Config()
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		if strings.HasPrefix(address, "192.0.2.") {
			dialed.Add(1)

			return nil, errDialed
		}

		return (&net.Dialer{}).DialContext(ctx, network, address)
	}

	s := newSuite(t, config)
	s.addControlPlane("cp-1")
	publish(s.Suite, "other", "192.0.2.5")
	s.await("the identity is known", known)
	s.refresh()

	assert.NotContains(t, s.identity().Stated.APIServerIPs, netip.MustParseAddr("192.0.2.5"))
	assert.Empty(t, s.identity().APIServerPorts)
	assert.Zero(t, dialed.Load(), "connections to its address")
}

func TestReader_ReadsTheNetwork(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())
	s.add("cp-2", talosmachine.TypeControlPlane)
	s.add("cp-1", talosmachine.TypeControlPlane)
	label(s.Suite, "cp-2")
	label(s.Suite, "cp-1")

	// Talos has kube-controller-manager allocate by default.
	network := s.awaitNetwork("both machines are known", func(n *controlplane.Network) bool { return len(n.KCMConfigs) == 2 })

	assert.Empty(t, network.Problem)
	assert.Equal(t, []string{"cp-1", "cp-2"}, network.Allocators())

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
	s := newSuite(t, bed.Kube.Config(), func(s *suite, _ *controlplane.Config) {
		s.local = s.Machine(talostest.MachineSpec{Nodename: "cp-1", Type: talosmachine.TypeControlPlane, ServeSocket: true})
	})

	network := s.awaitNetwork("the network is known", func(n *controlplane.Network) bool { return n.Problem == "" })
	assert.Equal(t, []string{"this machine"}, network.Allocators())

	assert.False(t, s.identity().Known, "the identity is known without a labeled Node")

	s.addControlPlane("cp-2")

	network = s.awaitNetwork("the Node is read", func(n *controlplane.Network) bool { return slices.Contains(n.Allocators(), "cp-2") })
	assert.Len(t, network.KCMConfigs, 1)
}

// TestReader_HostedControlPlane: facts that the operator states apply only without control-plane Nodes.
func TestReader_HostedControlPlane(t *testing.T) {
	hosted := &csrpolicy.ClusterSubjects{
		APIServerNames: []string{"api.example.org"}, APIServerIPs: []netip.Addr{netip.MustParseAddr("203.0.113.1")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16")}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.65.0.0/16")},
	}
	s := newSuite(t, bed.Kube.Config(), func(_ *suite, cfg *controlplane.Config) {
		cfg.Hosted = hosted
	})
	s.add("worker", talosmachine.TypeWorker)

	id := s.await("the identity is known", known)
	wantAll(t, "names", id.Stated.APIServerNames, "kubernetes", "kubernetes.default.svc.cluster.local")
	wantAll(t, "service CIDRs", id.Stated.ServiceCIDRs, netip.MustParsePrefix("10.0.0.0/16"))
	assert.Equal(t, []csrpolicy.Report{{Source: "the flags about the hosted control plane", ClusterSubjects: *hosted}}, id.Reported)
	assert.Empty(t, s.awaitNetwork("the network is read", func(*controlplane.Network) bool { return true }).Problem)

	m := s.add("cp-1", talosmachine.TypeControlPlane)
	require.NoError(s, m.Stop(s.Context()))
	label(s.Suite, "cp-1")
	s.await("the identity is unknown", func(id csrpolicy.ClusterIdentity) bool { return !id.Known })

	assert.Contains(t, s.reader.Network().Current().Problem, "cp-1")
}

// TestReader_IgnoresChangedOSImage: a kubelet writes the osImage of its Node. This must neither replace the facts of its
// machine by stated ones, nor remove them.
func TestReader_IgnoresChangedOSImage(t *testing.T) {
	s := newSuite(t, bed.Kube.Config(), func(_ *suite, cfg *controlplane.Config) {
		cfg.Hosted = &csrpolicy.ClusterSubjects{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16")}}
	})

	setOSImage := func(nodename string) {
		s.PatchNode(nodename, "kubelet", `{"status":{"nodeInfo":{"osImage":"Debian"}}}`, "status")
	}

	m := s.add("cp-1", talosmachine.TypeControlPlane)
	s.exclude(m, "203.0.113.2")
	label(s.Suite, "cp-1")
	s.await("the virtual IP is known", hasVIP)

	require.NoError(s, m.Stop(s.Context()))
	setOSImage("cp-1")

	for _, nodename := range []string{"cp-2", "cp-3"} {
		require.NoError(s, s.add(nodename, talosmachine.TypeControlPlane).Stop(s.Context()))
		label(s.Suite, nodename)
	}

	s.await("most of the machines have not been read", func(id csrpolicy.ClusterIdentity) bool { return !id.Known })

	for range 4 {
		s.refresh() // the cache may be stale
	}

	if id := s.identity(); id.Known || !hasVIP(id) {
		t.Errorf("the identity is %+v, want an unknown one with the virtual IP", id)
	}

	for _, nodename := range []string{"cp-2", "cp-3"} {
		setOSImage(nodename)
	}

	for range 4 {
		s.refresh()
	}

	if id := s.identity(); id.Known || !hasVIP(id) {
		t.Errorf("the identity is %+v, want an unknown one with the virtual IP", id)
	}
}

// TestReader_NeedsMachinesOfOtherSystems: stated facts do not replace a control-plane Node that never reported Talos.
func TestReader_NeedsMachinesOfOtherSystems(t *testing.T) {
	s := newSuite(t, bed.Kube.Config(), func(_ *suite, cfg *controlplane.Config) {
		cfg.Hosted = &csrpolicy.ClusterSubjects{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16")}}
	})
	s.await("the identity is known", known)

	s.Register(kube.NodeSpec{Name: "cp-1", OSImage: "Debian"})
	label(s.Suite, "cp-1")
	s.await("the identity is unknown", func(id csrpolicy.ClusterIdentity) bool { return !id.Known })
}

func TestReader_ExplainsAnUnknownNetwork(t *testing.T) {
	s := newSuite(t, bed.Kube.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)
	m.CutOff()
	label(s.Suite, "cp-1")

	s.awaitNetwork("the problem names the machine", func(n *controlplane.Network) bool { return strings.Contains(n.Problem, "cp-1") })
}

func TestReader_ReadsNothingWithoutSubscribers(t *testing.T) {
	factory := informers.NewSharedInformerFactory(nil, 0)

	// Without subscribers Run returns before it uses any of its configuration.
	controlplane.New(controlplane.Config{Nodes: factory.Core().V1().Nodes(), Machines: inventory.New(time.Now)}).Run(t.Context())
}
