package csrapproval_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

// hastyClock is a shiftedClock whose timers expire after a fiftieth of their time.
type hastyClock struct{ shiftedClock }

func (c *hastyClock) NewTimer(d time.Duration) clock.Timer { return c.RealClock.NewTimer(d / 50) }

// endpoint is where a kubelet listens.
type endpoint struct {
	address string
	dialed  atomic.Int32
}

// dialKubelet is the instance's csrapproval.Config.DialKubelet.
func (i *instance) dialKubelet(ctx context.Context, addr netip.Addr) (net.Conn, error) {
	found, _ := i.kubelets.Load(addr)

	kubelet, ok := found.(*endpoint)
	if !ok {
		return nil, errors.New("no kubelet")
	}

	kubelet.dialed.Add(1)

	return (&net.Dialer{}).DialContext(ctx, "tcp", kubelet.address)
}

// listen makes an address the worker's kubelet for the instance.
func (i *instance) listen(w worker, address string) *endpoint {
	kubelet := &endpoint{address: address}
	i.kubelets.Store(w.addr, kubelet)

	return kubelet
}

// kubeletAddress returns where the worker's real kubelet listens.
func (s suite) kubeletAddress(w worker) string {
	s.Helper()

	node, err := s.client.CoreV1().Nodes().Get(s.Context(), w.name, metav1.GetOptions{})
	s.require(err)

	return net.JoinHostPort("127.0.0.1", strconv.Itoa(int(node.Status.DaemonEndpoints.KubeletEndpoint.Port)))
}

// otherKubelet starts a TLS server with a certificate that no request obtained, or with none, and returns its address.
func (s suite) otherKubelet(certificates ...tls.Certificate) string {
	s.Helper()

	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		if len(certificates) == 0 {
			return nil, errors.New("no certificate")
		}

		return &certificates[0], nil
	}})
	s.require(err)
	s.Cleanup(func() { listener.Close() })

	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}

			_, _ = conn.Read(make([]byte, 1)) // shakes hands
			conn.Close()
		}
	}()

	return listener.Addr().String()
}

// selfSigned returns a certificate as a kubelet without serverTLSBootstrap has it.
func (s suite) selfSigned() tls.Certificate {
	s.Helper()

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	s.require(err)

	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	s.require(err)

	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// serves reports whether a kubelet serves a certificate.
func serves(address string, certificate []byte) bool {
	block, _ := pem.Decode(certificate)

	conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // compared
	if err != nil {
		return false
	}
	defer conn.Close()

	return bytes.Equal(conn.ConnectionState().PeerCertificates[0].Raw, block.Bytes)
}

// watchful starts another leader, which knows the workers, with its clock.
func (s suite) watchful(workers ...worker) (*instance, *hastyClock) {
	s.Helper()

	clk := &hastyClock{}
	leader, err := s.startAt(s.Context(), clk)
	s.require(err)
	s.Cleanup(leader.stop)

	for _, w := range workers {
		s.eventually("the leader knows "+w.name, func() bool { return leader.inventory.Get(w.name).Condition == inventory.Current })
	}

	return leader, clk
}

const (
	notServed = "talosccm_csr_certificates_not_served_total"
	unchecked = "talosccm_csr_certificates_unchecked_total"
)

// A client with the kubelet's credentials obtains a certificate for a key of its own.
func TestServed_ReportsStolenCertificate(t *testing.T) {
	for name, certificates := range map[string][]tls.Certificate{
		"kubelet has another certificate": {alone(t).selfSigned()},
		"kubelet has none":                nil,
	} {
		t.Run(name, func(t *testing.T) {
			s := alone(t)
			w := s.known()
			before := s.metrics()
			leader, clk := s.watchful(w)
			kubelet := leader.listen(w, s.otherKubelet(certificates...))

			name := s.post(w, request{config: s.credential(w)})
			s.awaitIssued(name)
			s.eventually("the kubelet is checked", func() bool { return kubelet.dialed.Load() > 1 })

			if found := s.messages(w.name, csrapproval.ReasonNotServed); len(found) > 0 {
				t.Errorf("reported at once: %v", found)
			}

			clk.shift(5 * time.Minute)

			for _, object := range []string{name, w.name} {
				s.eventually("an Event is on "+object, func() bool { return len(s.messages(object, csrapproval.ReasonNotServed)) == 1 })
			}

			if after := s.metrics(); after[notServed]-before[notServed] != 1 || after[unchecked] != before[unchecked] {
				t.Errorf("counted %v and %v, want 1 and 0", after[notServed]-before[notServed], after[unchecked]-before[unchecked])
			}
		})
	}
}

// A firewall may block the kubelet's port.
func TestServed_CountsKubeletsThatDoNotRespond(t *testing.T) {
	s := alone(t)
	w := s.known()
	before := s.metrics()
	leader, clk := s.watchful(w)
	closed := leader.listen(w, "127.0.0.1:0")

	s.awaitIssued(s.post(w, request{}))
	s.eventually("the kubelet is dialed", func() bool { return closed.dialed.Load() > 1 })
	clk.shift(5 * time.Minute)
	s.eventually("the certificate is counted as unchecked", func() bool { return s.metrics()[unchecked]-before[unchecked] == 1 })

	if found := s.messages(w.name, csrapproval.ReasonNotServed); len(found) > 0 || s.metrics()[notServed] != before[notServed] {
		t.Errorf("reported: %v", found)
	}
}

func TestServed_AcceptsKubelet(t *testing.T) {
	s := alone(t)
	w, thief := s.plan(), s.known()
	w.addr = hostAddress(t)
	w = s.boot(w)
	s.startKubelet(w)
	s.reportTalos(w.name)

	certificate := s.awaitIssuedFor(w).Status.Certificate
	s.eventually("the kubelet serves its certificate", func() bool { return serves(s.kubeletAddress(w), certificate) })
	s.post(thief, request{config: s.credential(thief)})

	// A new leader checks what was issued before.
	leader, clk := s.watchful(w, thief)
	kubelet, compared := leader.listen(w, s.kubeletAddress(w)), leader.listen(thief, s.otherKubelet(s.selfSigned()))

	s.eventually("both kubelets are checked", func() bool { return kubelet.dialed.Load() > 0 && compared.dialed.Load() > 0 })

	// The check has ended: another certificate is not noticed any more.
	checked := compared.dialed.Load()
	s.eventually("the other kubelet is checked again", func() bool { return compared.dialed.Load() > checked+1 })

	replaced := leader.listen(w, s.otherKubelet(s.selfSigned()))

	clk.shift(5 * time.Minute)
	s.eventually("the other kubelet is reported", func() bool { return len(s.messages(thief.name, csrapproval.ReasonNotServed)) == 1 })

	if found := s.messages(w.name, csrapproval.ReasonNotServed); len(found) > 0 || replaced.dialed.Load() > 0 {
		t.Errorf("the check has not ended: %v", found)
	}
}
