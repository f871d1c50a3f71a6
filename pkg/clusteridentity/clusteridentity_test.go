package clusteridentity_test

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
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/clusteridentity"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	patience = 2 * time.Minute
	interval = 20 * time.Millisecond

	// renewal is longer than what is known is kept without asking again.
	renewal = time.Minute
)

var controlPlane *kube.Cluster

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	// Without a signer: nothing is issued here.
	controlPlane, err = kube.Start(context.Background(), kube.Options{Progress: os.Stderr, ControllerManager: kube.ControllerManager{Absent: true}})
	if err != nil {
		return 1, err
	}

	code = m.Run()

	return code, controlPlane.Stop()
}

// suite is a Talos cluster and a Gatherer for it.
type suite struct {
	*testing.T

	talos    *talostest.Cluster
	client   kubernetes.Interface
	clock    *clocktesting.FakeClock
	gatherer *clusteridentity.Gatherer
	changes  atomic.Int64
}

// newSuite has a Gatherer that reaches the API server by config.
func newSuite(t *testing.T, config *rest.Config) *suite {
	t.Helper()

	s := &suite{T: t, clock: clocktesting.NewFakeClock(time.Now())}

	var err error

	s.talos, err = talostest.New(talostest.Options{})
	s.require(err)
	t.Cleanup(s.talos.Close)

	s.client, err = kubernetes.NewForConfig(controlPlane.Config())
	s.require(err)

	credentials, err := s.talos.ClientTLS(string(role.Reader))
	s.require(err)

	factory := informers.NewSharedInformerFactory(s.client, 0)
	nodes := factory.Core().V1().Nodes()

	s.gatherer = clusteridentity.New(clusteridentity.Config{
		Kubernetes: config,
		Client:     s.client,
		Nodes:      nodes.Lister(),
		Clock:      s.clock,
		Dial: func(_ string, addr netip.Addr) (talosapi.State, error) {
			return talosapi.Dial(staticCredentials{credentials}, addr)
		},
	})
	s.gatherer.Subscribe(func() { s.changes.Add(1) })

	nodes.Informer()
	factory.Start(t.Context().Done())

	ended := make(chan struct{})

	go func() {
		defer close(ended)

		s.gatherer.Run(t.Context())
	}()

	t.Cleanup(func() { <-ended })

	return s
}

// staticCredentials are talosapi.Credentials that never change.
type staticCredentials struct {
	config *tls.Config
}

// TLSConfig implements talosapi.Credentials.
func (c staticCredentials) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

// add adds a machine and its Node, without labels.
func (s *suite) add(nodename string, machineType talosmachine.Type) *talostest.Machine {
	s.Helper()

	m, err := s.talos.AddMachine(talostest.MachineSpec{Nodename: nodename, Type: machineType})
	s.require(err)

	s.register(nodename, m.Address())

	return m
}

func (s *suite) register(nodename string, addr netip.Addr) {
	s.Helper()

	_, err := controlPlane.RegisterNode(s.Context(), kube.NodeSpec{Name: nodename, NodeIPs: []netip.Addr{addr}})
	s.require(err)
	s.Cleanup(func() {
		s.require(s.client.CoreV1().Nodes().Delete(context.Background(), nodename, metav1.DeleteOptions{}))
	})
}

// label makes the Node one of the control plane.
func (s *suite) label(nodename string) {
	s.Helper()

	patch := []byte(`{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)

	_, err := s.client.CoreV1().Nodes().Patch(s.Context(), nodename, types.MergePatchType, patch, metav1.PatchOptions{})
	s.require(err)
}

// stopAPIServer stops the API server until the test ends: its end needs it, and so do other tests, whatever becomes of this one.
func (s *suite) stopAPIServer() {
	s.Helper()

	controlPlane.StopAPIServer(s.Context())
	s.Cleanup(func() { s.require(controlPlane.StartAPIServer(context.Background())) })
}

func (s *suite) require(err error) {
	s.Helper()

	if err != nil {
		s.Fatal(err)
	}
}

// await has time go by until ok is true of what is known, and returns what is known once all sources have been asked and all subscribers told: a
// subscriber hears of a change a moment after it can be seen.
func (s *suite) await(what string, ok func(csrpolicy.ClusterIdentity) bool) csrpolicy.ClusterIdentity {
	s.Helper()

	err := wait.PollUntilContextTimeout(s.Context(), interval, patience, true, func(context.Context) (bool, error) {
		if ok(s.gatherer.Current()) {
			return true, nil
		}

		s.clock.Step(renewal)

		return false, nil
	})
	if err != nil {
		s.Fatalf("not so after %s: %s; known is %+v", patience, what, s.gatherer.Current())
	}

	s.awaitIdle()

	return s.gatherer.Current()
}

// again has all sources asked once more, and returns when they have answered or not.
func (s *suite) again() {
	s.Helper()

	s.awaitIdle()
	s.clock.Step(renewal)
	s.awaitIdle()
}

func (s *suite) awaitIdle() {
	s.Helper()

	err := wait.PollUntilContextTimeout(s.Context(), interval, patience, true, func(context.Context) (bool, error) { return s.clock.HasWaiters(), nil })
	s.require(err)
}

func known(id csrpolicy.ClusterIdentity) bool { return id.Known }

func TestAllThatStandsForTheClusterIsKnown(t *testing.T) {
	s := newSuite(t, controlPlane.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)

	endpoint := k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID)
	endpoint.TypedSpec().Hosts = []string{"api.example.org"}
	endpoint.TypedSpec().Addresses = []netip.Addr{netip.MustParseAddr("203.0.113.1")}
	s.require(m.State().Create(t.Context(), endpoint))
	s.exclude(m, "203.0.113.2", "fd00::2/128", "192.168.0.0/16")

	// It is asked as soon as its Node has the label, and all is known then.
	s.label("cp-1")

	id := s.await("all is known", known)

	wantAll(t, "names", id.APIServerNames, "kubernetes", "kubernetes.default.svc.cluster.local", "api.example.org")
	wantAll(t, "domains", id.Domains, "cluster.local")
	wantAll(t, "addresses", id.APIServerIPs, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("203.0.113.1"))
	wantAll(t, "service addresses", id.ServiceIPs, netip.MustParseAddr("10.0.0.1"))
	wantAll(t, "service CIDRs", id.ServiceCIDRs, netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("10.96.0.0/12"))
	wantAll(t, "pod CIDRs", id.PodCIDRs, netip.MustParsePrefix("10.244.0.0/16"))

	if vips := []netip.Addr{netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("fd00::2")}; !slices.Equal(id.VIPs, vips) {
		t.Errorf("virtual addresses are %v, want %v", id.VIPs, vips)
	}

	if s.changes.Load() == 0 {
		t.Error("nobody was told")
	}
}

func wantAll[T comparable](t *testing.T, what string, got []T, want ...T) {
	t.Helper()

	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("%s are %v, without %v", what, got, w)
		}
	}
}

// exclude adds subnets that can hold no node IP.
func (s *suite) exclude(m *talostest.Machine, subnets ...string) {
	s.Helper()

	err := safe.StateModify(s.Context(), m.State(), k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), func(config *k8s.NodeIPConfig) error {
		config.TypedSpec().ExcludeSubnets = append(config.TypedSpec().ExcludeSubnets, subnets...)

		return nil
	})
	s.require(err)
}

func TestNothingIsKnownWithoutTheControlPlane(t *testing.T) {
	s := newSuite(t, controlPlane.Config())

	// It says that it is of the control plane, as any machine can.
	liar := s.add("liar", talosmachine.TypeControlPlane)
	s.add("cp-1", talosmachine.TypeControlPlane)
	s.await("the API server has answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.ServiceIPs) > 0 })
	s.again()

	if s.gatherer.Current().Known {
		t.Fatalf("known without a labeled Node: %+v", s.gatherer.Current())
	}

	s.label("cp-1")
	s.await("all is known", known)

	if calls := liar.Calls(); len(calls) > 0 {
		t.Errorf("a worker was asked: %v", calls)
	}
}

func TestAnotherMachineAtTheControlPlanesAddressIsNotBelieved(t *testing.T) {
	s := newSuite(t, controlPlane.Config())

	other, err := s.talos.AddMachine(talostest.MachineSpec{Nodename: "other", Type: talosmachine.TypeControlPlane})
	s.require(err)

	s.register("cp-1", other.Address())
	s.label("cp-1")
	s.await("it was asked", func(csrpolicy.ClusterIdentity) bool { return len(other.Calls()) > 0 })
	s.again()

	if id := s.gatherer.Current(); id.Known || len(id.PodCIDRs) > 0 {
		t.Errorf("it was believed: %+v", id)
	}
}

func TestWhatIsKnownStaysWhileNobodyAnswers(t *testing.T) {
	s := newSuite(t, controlPlane.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)
	s.label("cp-1")

	before := s.await("all is known", known)
	changes := s.changes.Load()

	m.CutOff()
	s.stopAPIServer()
	s.again()

	after := s.gatherer.Current()
	if !after.Known || !slices.Equal(after.PodCIDRs, before.PodCIDRs) || !slices.Equal(after.APIServerNames, before.APIServerNames) {
		t.Errorf("known is %+v, before it was %+v", after, before)
	}

	if s.changes.Load() != changes {
		t.Error("that nobody answers was told as a change")
	}
}

func TestChangesAreNoticed(t *testing.T) {
	s := newSuite(t, controlPlane.Config())
	m := s.add("cp-1", talosmachine.TypeControlPlane)
	s.label("cp-1")
	s.await("all is known", known)

	changes := s.changes.Load()

	s.again()

	if s.changes.Load() != changes {
		t.Error("a change was told of where there was none")
	}

	s.exclude(m, "203.0.113.3")
	s.await("the virtual address is known", func(id csrpolicy.ClusterIdentity) bool { return len(id.VIPs) == 1 })

	if s.changes.Load() == changes {
		t.Error("nobody was told")
	}
}

func TestAnAPIServerWhoseCertificateNamesNoDomainIsNotUnderstood(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()

	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	s := newSuite(t, &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	s.add("cp-1", talosmachine.TypeControlPlane)
	s.label("cp-1")
	s.await("the machine has answered", func(id csrpolicy.ClusterIdentity) bool { return len(id.PodCIDRs) > 0 })

	if s.gatherer.Current().Known {
		t.Error("all is known")
	}
}
