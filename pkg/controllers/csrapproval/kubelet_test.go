package csrapproval_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// A kubelet requests a certificate for the addresses that the node controller lists, and another one once the machine
// has another address.
func TestKubelet_ObtainsCertificateForAllAddresses(t *testing.T) {
	s := alone(t)
	w := s.boot(s.planKubelet())
	s.startKubelet(w, kube.KubeletSpec{})

	first := s.awaitIssuedFor(w)
	s.assertListed(first, w)

	added := netip.MustParseAddr("8.8.4.4")
	s.report(w, talostest.LinkExternal, added)

	second := s.awaitIssuedFor(w, added)
	s.assertListed(second, w)
	assert.NotEqual(t, first.Name, second.Name)
}

// A kubelet requests its nodename, which may look like a number, and no platform name that talos-ccm does not approve.
func TestKubelet_ObtainsCertificateForNumericNodename(t *testing.T) {
	s := alone(t)
	s.restart() // the deleted Node of an earlier test had the same address

	w := s.planKubelet()
	w.name = "10023"
	w = s.bootAs(w, talostest.MachineSpec{Platform: platform(w.name, "localhost.localdomain")})
	s.startKubelet(w, kube.KubeletSpec{})
	s.assertListed(s.awaitIssuedFor(w), w)
}

// If the Node lists an address that its machine no longer has, the kubelet requests it, and ignores changes of the Node
// until that request is decided (client-go's certificate manager; the timeout is 15 minutes).
func TestKubelet_ReplacesOutdatedRequest(t *testing.T) {
	s := alone(t)
	s.restart() // the deleted Node of an earlier test had the same address

	w, gone := s.planKubelet(), netip.MustParseAddr("8.8.8.8")
	s.register(w)
	s.PatchNode(w.name, "", fmt.Sprintf(
		`{"status":{"addresses":[{"type":"InternalIP","address":%q},{"type":"ExternalIP","address":%q},{"type":"Hostname","address":%q}]}}`, w.addr, gone, w.name), "status")
	s.startKubelet(w, kube.KubeletSpec{})
	s.awaitDeferred(s.awaitRequestFor(w, gone).Name, csrpolicy.CodeMachineUnknown)

	w = s.boot(w)
	s.awaitIssuedFor(w)
}

// planKubelet returns a worker with an IPv4 address of the host that is not loopback: a kubelet accepts no other as node
// IP.
func (s suite) planKubelet() worker {
	s.Helper()

	addresses, err := net.InterfaceAddrs()
	require.NoError(s, err)

	for _, address := range addresses {
		if prefix, err := netip.ParsePrefix(address.String()); err == nil && prefix.Addr().Is4() && prefix.Addr().IsGlobalUnicast() {
			w := s.plan()
			w.addr = prefix.Addr()

			return w
		}
	}

	require.FailNow(s, "no address for a kubelet", "%v", addresses)

	return worker{}
}

// startKubelet starts a real kubelet for the worker. The kubelet, its Node and its requests are removed when the test
// ends, and until then the Node reports Talos: the kubelet reports the operating system of the host.
func (s suite) startKubelet(w worker, spec kube.KubeletSpec) *kube.Kubelet {
	s.Helper()

	spec.NodeName, spec.Flags = w.name, []string{"--node-ip=" + w.addr.String()}

	kubelet, err := s.Kube.StartKubelet(s.Context(), spec)
	require.NoError(s, err)

	nodes, err := s.Client.CoreV1().Nodes().Watch(s.Context(), ctest.Named(w.name))
	require.NoError(s, err)
	s.Cleanup(func() {
		nodes.Stop()
		kubelet.Stop(context.Background())
		s.Remove(w.name)
		s.removeAllOf(w)
	})

	go func() {
		for event := range nodes.ResultChan() {
			if n, ok := event.Object.(*corev1.Node); !ok || nodespec.IsTalos(n) || event.Type == watch.Deleted {
				continue
			}

			patch := []byte(`{"status":{"nodeInfo":{"osImage":"` + kube.DefaultOSImage + `"}}}`)
			if _, err := s.Client.CoreV1().Nodes().Patch(s.Context(), w.name, types.MergePatchType, patch, metav1.PatchOptions{}, "status"); s.Context().Err() == nil {
				assert.NoError(s, err)
			}
		}
	}()

	return kubelet
}

// removeAllOf deletes the requests of the worker's kubelet. Cleanups may use it.
func (s suite) removeAllOf(w worker) {
	s.Helper()

	list, err := s.requests().List(context.WithoutCancel(s.Context()), metav1.ListOptions{})
	require.NoError(s, err)

	for i := range list.Items {
		if nodename, _ := csrpolicy.Nodename(&list.Items[i]); nodename == w.name {
			s.remove(list.Items[i].Name)
		}
	}
}

// awaitRequest waits for a request of the worker's kubelet that matches.
func (s suite) awaitRequest(w worker, what string, matches func(csr *certificatesv1.CertificateSigningRequest, ips []netip.Addr) bool) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	return ctest.Await(s, s.requests(), metav1.ListOptions{}, func(csr *certificatesv1.CertificateSigningRequest, asrt *assert.Assertions) {
		nodename, _ := csrpolicy.Nodename(csr)

		var ips []netip.Addr

		for _, subject := range csrpolicy.Parse(csr).Subjects {
			if ip, err := netip.ParseAddr(subject); err == nil {
				ips = append(ips, ip)
			}
		}

		asrt.True(nodename == w.name && matches(csr, ips), what)
	})
}

// awaitRequestFor waits for a request that contains the address.
func (s suite) awaitRequestFor(w worker, addr netip.Addr) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	return s.awaitRequest(w, "for "+addr.String(), func(_ *certificatesv1.CertificateSigningRequest, ips []netip.Addr) bool {
		return slices.Contains(ips, addr)
	})
}

// awaitIssuedFor waits for a certificate for exactly the worker's address and the given others.
func (s suite) awaitIssuedFor(w worker, others ...netip.Addr) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	want := append([]netip.Addr{w.addr}, others...)
	slices.SortFunc(want, netip.Addr.Compare)

	return s.awaitRequest(w, fmt.Sprint("and has it for ", want), func(csr *certificatesv1.CertificateSigningRequest, ips []netip.Addr) bool {
		return len(csr.Status.Certificate) > 0 && slices.Equal(ips, want)
	})
}

// assertListed fails unless the request contains exactly what the Node lists.
func (s suite) assertListed(csr *certificatesv1.CertificateSigningRequest, w worker) {
	s.Helper()

	listed := map[string]bool{}
	for _, a := range s.Node(w.name).Status.Addresses {
		listed[a.Address] = true
	}

	assert.ElementsMatch(s, slices.Collect(maps.Keys(listed)), csrpolicy.Parse(csr).Subjects)
}
