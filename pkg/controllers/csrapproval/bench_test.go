package csrapproval_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/test/ctest"
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
	f := &fleet{suite: alone(b), inventory: inventory.New(time.Now)}
	f.main.Stop()
	b.Cleanup(f.restart)

	for n := range benchRequests {
		f.workers = append(f.workers, worker{name: fmt.Sprintf("bench-%d", n), addr: netip.AddrFrom4([4]byte{172, 20, byte(n / 250), byte(1 + n%250)})})
	}

	f.inventory.MarkUnreachable(controlPlane, "not in the fleet") // or the controller would wait for it

	each(benchRequests, func(n int) {
		w := f.workers[n]
		_, err := f.Kube.RegisterNode(b.Context(), kube.NodeSpec{Name: w.name, NodeIPs: []netip.Addr{w.addr}})
		assert.NoError(b, err)
		f.inventory.Replace(w.name, machine.Machine{
			Nodename: w.name, Hostname: w.name, NodeIPs: []netip.Addr{w.addr},
			Addresses: []machine.Address{{Link: "eth0", Prefix: netip.PrefixFrom(w.addr, 16)}},
		})
	})

	b.Cleanup(func() {
		options := metav1.ListOptions{LabelSelector: "!node-role.kubernetes.io/control-plane"}
		require.NoError(b, f.Client.CoreV1().Nodes().DeleteCollection(context.WithoutCancel(b.Context()), metav1.DeleteOptions{}, options))
	})
	b.Run("controller", func(b *testing.B) { f.measure(b, f.controller) })
	b.Run("bare client", func(b *testing.B) { f.measure(b, f.bareClient) })
}

// fleet is a thousand machines and their Nodes.
type fleet struct {
	suite

	inventory *inventory.Inventory
	workers   []worker
}

func each(n int, do func(n int)) {
	workqueue.ParallelizeUntil(context.Background(), benchWorkers, n, do)
}

// instance returns a client and an inventory for the approver.
func (f *fleet) instance(b *testing.B) *ctest.Instance {
	b.Helper()

	config := rest.CopyConfig(f.product)
	config.QPS = -1
	i, err := ctest.NewInstance(b.Context(), config, nil)
	require.NoError(b, err)

	return i
}

// measure measures the time from the start of the approver to the approval of the last request.
func (f *fleet) measure(b *testing.B, approve func(*testing.B) (stop func())) {
	key := newKey()

	for b.Loop() {
		b.StopTimer()
		each(benchRequests, func(n int) {
			_, err := f.create(b.Context(), f.workers[n], request{key: key})
			assert.NoError(b, err)
		})

		list, err := f.requests().List(b.Context(), metav1.ListOptions{})
		require.NoError(b, err)
		b.StartTimer()

		stop := approve(b)
		f.awaitApproved(b, list)

		b.StopTimer()
		stop()
		require.NoError(b, f.requests().DeleteCollection(b.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))
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

	options := metav1.ListOptions{ResourceVersion: list.ResourceVersion}
	ctest.Await(b, f.requests(), options, "all requests are approved", func(csr *certificatesv1.CertificateSigningRequest) bool {
		if approved(csr) {
			delete(pending, csr.Name)
		}

		return len(pending) == 0
	})
}

// fixedIdentity is the identity of the cluster under test.
type fixedIdentity struct{}

// Current implements csrapproval.Identity.
func (fixedIdentity) Current() csrpolicy.ClusterIdentity {
	return csrpolicy.ClusterIdentity{
		Known: true, Domains: []string{"cluster.local"},
		Stated: csrpolicy.ClusterSubjects{APIServerNames: []string{"kubernetes"}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}},
	}
}

// Subscribe implements csrapproval.Identity.
func (fixedIdentity) Subscribe(func()) {}

func (f *fleet) controller(b *testing.B) (stop func()) {
	b.Helper()

	i := f.instance(b)
	c, err := csrapproval.New(csrapproval.Config{
		Client: i.Client, Nodes: i.Nodes, Inventory: f.inventory, Identity: fixedIdentity{}, Recorder: i.Recorder, Clock: clock.RealClock{},
		Managed: func(*corev1.Node, machine.Machine) bool { return true },
		Policy:  func(*corev1.Node, machine.Machine) csrpolicy.Policy { return csrpolicy.Policy{} },
		Workers: benchWorkers,
	})
	require.NoError(b, err)
	i.Start(c.Run)

	return i.Stop
}

func (f *fleet) bareClient(b *testing.B) (stop func()) {
	b.Helper()

	i := f.instance(b)
	requests := i.Client.CertificatesV1().CertificateSigningRequests()

	list, err := requests.List(b.Context(), metav1.ListOptions{})
	require.NoError(b, err)

	each(len(list.Items), func(n int) {
		csr := &list.Items[n]
		csr.Status.Conditions = append(csr.Status.Conditions, decided(certificatesv1.CertificateApproved)...)

		if _, err := requests.UpdateApproval(b.Context(), csr.Name, csr, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
			assert.NoError(b, err)
		}
	})

	return i.Stop
}
