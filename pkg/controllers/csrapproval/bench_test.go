package csrapproval_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	benchRequests = 1000
	benchWorkers  = 10
)

// BenchmarkController_ThousandRequests measures the approval of a thousand requests of as many Nodes: by the
// controller, including its start and Events, and by a client that lists and approves them without a review. Neither
// has a client-side rate limit.
func BenchmarkController_ThousandRequests(b *testing.B) {
	shared.main.stop()

	fleet := newFleet(b)
	defer fleet.remove(b)

	b.Run("controller", func(b *testing.B) { fleet.measure(b, fleet.controller) })
	b.Run("bare client", func(b *testing.B) { fleet.measure(b, fleet.bareClient) })

	next, err := shared.start(context.WithoutCancel(b.Context()))
	if err != nil {
		b.Fatal(err)
	}

	shared.main = next
}

// fleet is a thousand machines and their Nodes.
type fleet struct {
	config    *rest.Config
	client    kubernetes.Interface
	inventory *inventory.Inventory
	workers   []worker
	key       *ecdsa.PrivateKey
}

func newFleet(b *testing.B) *fleet {
	b.Helper()

	f := &fleet{config: rest.CopyConfig(shared.product), inventory: inventory.New(time.Now)}
	f.config.QPS = -1

	var err error
	if f.client, err = kubernetes.NewForConfig(f.config); err != nil {
		b.Fatal(err)
	}

	if f.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		b.Fatal(err)
	}

	for n := range benchRequests {
		f.workers = append(f.workers, worker{name: fmt.Sprintf("bench-%d", n), addr: netip.AddrFrom4([4]byte{172, 20, byte(n / 250), byte(1 + n%250)})})
	}

	f.inventory.MarkUnreachable(controlPlane, "not in the fleet") // or the controller would wait for it

	f.each(b, func(ctx context.Context, w worker) error {
		f.inventory.Replace(w.name, machine.Machine{
			Nodename: w.name, Hostname: w.name, NodeIPs: []netip.Addr{w.addr},
			Addresses: []machine.Address{{Link: "eth0", Prefix: netip.PrefixFrom(w.addr, 16)}},
		})

		_, err := shared.kube.RegisterNode(ctx, kube.NodeSpec{Name: w.name, NodeIPs: []netip.Addr{w.addr}})

		return err
	})

	return f
}

func (f *fleet) remove(b *testing.B) {
	b.Helper()
	f.each(b, func(ctx context.Context, w worker) error {
		return shared.client.CoreV1().Nodes().Delete(ctx, w.name, metav1.DeleteOptions{})
	})
}

// each calls do for every worker, several at a time.
func (f *fleet) each(b *testing.B, do func(context.Context, worker) error) {
	b.Helper()

	var group sync.WaitGroup

	for first := range benchWorkers {
		group.Go(func() {
			for n := first; n < len(f.workers); n += benchWorkers {
				if err := do(b.Context(), f.workers[n]); err != nil {
					b.Error(err)
				}
			}
		})
	}

	group.Wait()
}

// measure measures the time from the start of the approver to the approval of the last request.
func (f *fleet) measure(b *testing.B, approve func(*testing.B) (stop func())) {
	for b.Loop() {
		b.StopTimer()
		f.each(b, func(ctx context.Context, w worker) error {
			_, err := shared.create(ctx, w, request{key: f.key})

			return err
		})

		list, err := shared.client.CertificatesV1().CertificateSigningRequests().List(b.Context(), metav1.ListOptions{})
		if err != nil {
			b.Fatal(err)
		}

		b.StartTimer()

		stop := approve(b)
		f.awaitApproved(b, list)

		b.StopTimer()
		stop()

		err = shared.client.CertificatesV1().CertificateSigningRequests().DeleteCollection(b.Context(), metav1.DeleteOptions{}, metav1.ListOptions{})
		if err != nil {
			b.Fatal(err)
		}

		b.StartTimer()
	}

	b.ReportMetric(float64(benchRequests*b.N)/b.Elapsed().Seconds(), "requests/s")
}

// awaitApproved waits until the pending requests of the list are approved.
func (f *fleet) awaitApproved(b *testing.B, list *certificatesv1.CertificateSigningRequestList) {
	b.Helper()

	pending := map[string]bool{}

	for i := range list.Items {
		if csr := &list.Items[i]; len(csr.Status.Conditions) == 0 {
			pending[csr.Name] = true
		}
	}

	w, err := shared.client.CertificatesV1().CertificateSigningRequests().Watch(b.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		b.Fatal(err)
	}
	defer w.Stop()

	for len(pending) > 0 {
		event, open := <-w.ResultChan()
		if !open {
			b.Fatal("watch closed")
		}

		if csr, ok := event.Object.(*certificatesv1.CertificateSigningRequest); ok && approved(csr) {
			delete(pending, csr.Name)
		}
	}
}

// fixedIdentity is the identity of the cluster under test.
type fixedIdentity struct{}

// Current implements csrapproval.Identity.
func (fixedIdentity) Current() csrpolicy.ClusterIdentity {
	return csrpolicy.ClusterIdentity{
		Known: true, Domains: []string{"cluster.local"}, APIServerNames: []string{"kubernetes"},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")},
	}
}

// Subscribe implements csrapproval.Identity.
func (fixedIdentity) Subscribe(func()) {}

func (f *fleet) controller(b *testing.B) (stop func()) {
	b.Helper()

	ctx, cancel := context.WithCancel(b.Context())

	events, err := kubernetes.NewForConfig(f.config)
	if err != nil {
		b.Fatal(err)
	}

	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: events.CoreV1().Events("")})

	factory := informers.NewSharedInformerFactory(f.client, 0)

	c, err := csrapproval.New(csrapproval.Config{
		Client: f.client, Nodes: factory.Core().V1().Nodes(), Inventory: f.inventory, Identity: fixedIdentity{}, Clock: clock.RealClock{},
		Recorder: broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "bench"}),
		Dial: func(context.Context, string, netip.Addr) (talosapi.State, error) {
			return nil, errors.New("no machine")
		},
		DialKubelet: func(context.Context, netip.Addr) (net.Conn, error) { return nil, errors.New("no kubelet") },
		Managed:     func(*corev1.Node, machine.Machine) bool { return true },
		Policy:      func(*corev1.Node, machine.Machine) csrpolicy.Policy { return csrpolicy.Policy{} },
		Workers:     benchWorkers,
	})
	if err != nil {
		b.Fatal(err)
	}

	var group sync.WaitGroup

	group.Go(func() { c.Run(ctx) })
	factory.Start(ctx.Done())

	return func() {
		cancel()
		group.Wait()
		broadcaster.Shutdown()
	}
}

func (f *fleet) bareClient(b *testing.B) (stop func()) {
	b.Helper()

	requests := f.client.CertificatesV1().CertificateSigningRequests()

	list, err := requests.List(b.Context(), metav1.ListOptions{})
	if err != nil {
		b.Fatal(err)
	}

	var group sync.WaitGroup

	for first := range benchWorkers {
		group.Go(func() {
			for n := first; n < len(list.Items); n += benchWorkers {
				csr := &list.Items[n]
				csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
					Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Bench", Message: "without a review",
				})

				if _, err := requests.UpdateApproval(b.Context(), csr.Name, csr, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) {
					b.Error(err)
				}
			}
		})
	}

	return group.Wait
}
