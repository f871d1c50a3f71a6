package csrapproval_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// A kubelet requests a certificate for the addresses that the node controller lists, and another one once the machine
// has another address.
func TestKubelet_ObtainsCertificateForAllAddresses(t *testing.T) {
	s := alone(t)

	w := s.plan()
	w.addr = hostAddress(t) // a kubelet accepts only an address of its host as node IP
	w = s.boot(w)

	s.startKubelet(w)
	s.reportTalos(w.name)

	first := s.awaitIssuedFor(w)
	s.wantListed(first, w)

	added := netip.MustParseAddr("8.8.4.4")
	s.require(w.machine.AddAddress(s.Context(), talostest.LinkExternal, netip.PrefixFrom(added, 32)))

	second := s.awaitIssuedFor(w, added)
	s.wantListed(second, w)

	if second.Name == first.Name {
		t.Errorf("request %s has both addresses", first.Name)
	}
}

// A kubelet requests its nodename, which may look like a number, and no name of the platform that cannot be approved.
func TestKubelet_ObtainsCertificateForNumericNodename(t *testing.T) {
	s := alone(t)
	w := worker{name: "10023", addr: hostAddress(t)}

	s.restart() // the deleted Node of an earlier test had the same address

	m, err := s.addMachine(talostest.MachineSpec{Nodename: w.name, Platform: platform(w.name, "localhost.localdomain")}, w.addr)
	s.require(err)
	s.Cleanup(func() { _ = m.Stop(context.WithoutCancel(s.Context())) })

	s.startKubelet(w)
	s.reportTalos(w.name)
	s.wantListed(s.awaitIssuedFor(w), w)
}

// A kubelet whose Node lists an address that its machine no longer has requests it, and ignores changes of the Node
// until that request is decided (client-go's certificate manager; the timeout is a quarter of an hour).
func TestKubelet_ReplacesOutdatedRequest(t *testing.T) {
	s := alone(t)

	w := s.plan()
	w.addr = hostAddress(t)
	gone := netip.MustParseAddr("8.8.8.8")

	s.restart() // the deleted Node of an earlier test had the same address
	s.register(w)

	listed := fmt.Appendf(nil, `{"status":{"addresses":[{"type":"InternalIP","address":%q},{"type":"ExternalIP","address":%q},{"type":"Hostname","address":%q}]}}`, w.addr, gone, w.name)
	_, err := s.client.CoreV1().Nodes().Patch(s.Context(), w.name, types.MergePatchType, listed, metav1.PatchOptions{}, "status")
	s.require(err)

	s.startKubelet(w)
	s.reportTalos(w.name)

	var outdated *certificatesv1.CertificateSigningRequest

	s.eventually("the kubelet requests the listed address", func() bool {
		outdated = s.findRequest(w, func(_ *certificatesv1.CertificateSigningRequest, ips []netip.Addr) bool {
			return slices.Contains(ips, gone)
		})

		return outdated != nil
	})
	s.awaitDeferred(outdated.Name, csrpolicy.CodeMachineUnknown)

	w = s.boot(w)
	s.awaitIssuedFor(w)
}

// hostAddress returns an IPv4 address of the host that is not loopback.
func hostAddress(t *testing.T) netip.Addr {
	t.Helper()

	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}

	for _, address := range addresses {
		if prefix, err := netip.ParsePrefix(address.String()); err == nil && prefix.Addr().Is4() && prefix.Addr().IsGlobalUnicast() {
			return prefix.Addr()
		}
	}

	t.Fatalf("no address for a kubelet: %v", addresses)

	return netip.Addr{}
}

// reportTalos makes the Node report Talos until the test ends: the kubelet reports the operating system of the host.
func (s suite) reportTalos(nodename string) {
	s.Helper()

	patch := []byte(`{"status":{"nodeInfo":{"osImage":"` + kube.DefaultOSImage + `"}}}`)

	w, err := s.client.CoreV1().Nodes().Watch(s.Context(), metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, nodename).String()})
	s.require(err)
	s.Cleanup(w.Stop)

	go func() {
		for event := range w.ResultChan() {
			if n, ok := event.Object.(*corev1.Node); !ok || nodespec.IsTalos(n) || event.Type == watch.Deleted {
				continue
			}

			_, err := s.client.CoreV1().Nodes().Patch(s.Context(), nodename, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
			if err != nil && s.Context().Err() == nil {
				s.Error(err)
			}
		}
	}()
}

// startKubelet starts a real kubelet for the worker. The kubelet, its Node and its requests are removed when the test
// ends.
func (s suite) startKubelet(w worker) {
	s.Helper()

	s.startKubeletAs(w, kube.KubeletSpec{})
}

func (s suite) startKubeletAs(w worker, spec kube.KubeletSpec) *kube.Kubelet {
	s.Helper()

	spec.NodeName, spec.Flags = w.name, []string{"--node-ip=" + w.addr.String()}

	kubelet, err := s.kube.StartKubelet(s.Context(), spec)
	s.require(err)
	s.Cleanup(func() {
		if err := kubelet.Stop(); err != nil {
			s.Error(err)
		}

		if err := s.client.CoreV1().Nodes().Delete(context.Background(), w.name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			s.Error(err)
		}

		s.removeAllOf(w)
	})

	return kubelet
}

func (s suite) removeAllOf(w worker) {
	s.Helper()

	list, err := s.client.CertificatesV1().CertificateSigningRequests().List(context.Background(), metav1.ListOptions{})
	s.require(err)

	for _, csr := range list.Items {
		if csr.Spec.Username == "system:node:"+w.name {
			s.remove(csr.Name)
		}
	}
}

// findRequest returns a request of the worker's kubelet that matches; nil if there is none.
func (s suite) findRequest(w worker, matches func(csr *certificatesv1.CertificateSigningRequest, ips []netip.Addr) bool) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	list, err := s.client.CertificatesV1().CertificateSigningRequests().List(s.Context(), metav1.ListOptions{})
	s.require(err)

	for i := range list.Items {
		csr := &list.Items[i]
		if csr.Spec.Username != "system:node:"+w.name {
			continue
		}

		if _, ips := csrpolicy.Parse(csr).Subjects(); matches(csr, ips) {
			return csr
		}
	}

	return nil
}

// awaitIssuedFor waits for a certificate for exactly the worker's address and the given others.
func (s suite) awaitIssuedFor(w worker, others ...netip.Addr) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	want := append([]netip.Addr{w.addr}, others...)
	slices.SortFunc(want, netip.Addr.Compare)

	var found *certificatesv1.CertificateSigningRequest

	s.eventually("the kubelet has a certificate for its addresses", func() bool {
		found = s.findRequest(w, func(csr *certificatesv1.CertificateSigningRequest, ips []netip.Addr) bool {
			return len(csr.Status.Certificate) > 0 && slices.Equal(ips, want)
		})

		return found != nil
	})

	return found
}

// wantListed fails unless the request contains exactly what the Node lists.
func (s suite) wantListed(csr *certificatesv1.CertificateSigningRequest, w worker) {
	s.Helper()

	var asked, listed []string

	names, ips := csrpolicy.Parse(csr).Subjects()

	asked = append(asked, names...)
	for _, ip := range ips {
		asked = append(asked, ip.String())
	}

	node, err := s.client.CoreV1().Nodes().Get(s.Context(), w.name, metav1.GetOptions{})
	s.require(err)

	for _, a := range node.Status.Addresses {
		listed = append(listed, a.Address)
	}

	slices.Sort(asked)
	slices.Sort(listed)

	if !slices.Equal(asked, slices.Compact(listed)) {
		s.Errorf("kubelet requested %v, Node lists %v", asked, listed)
	}
}
