package csrapproval_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// fastClock is a shiftedClock whose timers expire after a fiftieth of their time.
type fastClock struct{ shiftedClock }

func (c *fastClock) NewTimer(d time.Duration) clock.Timer { return c.RealClock.NewTimer(d / 50) }

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

// listen makes the instance connect to the address when it dials the worker's kubelet.
func (i *instance) listen(w worker, address string) *endpoint {
	kubelet := &endpoint{address: address}
	i.kubelets.Store(w.addr, kubelet)

	return kubelet
}

// otherKubelet starts a TLS server, and returns its address. By default, it has a certificate that no request obtained.
func (s suite) otherKubelet(config *tls.Config) string {
	s.Helper()

	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.TLS = config
	server.StartTLS()
	s.Cleanup(server.Close)

	return server.Listener.Addr().String()
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

// watchful starts another leader and waits until its inventory has the workers. It returns the leader and its clock.
func (s suite) watchful(workers ...worker) (*instance, *fastClock) {
	s.Helper()

	clk := &fastClock{}
	leader := s.another(clk)

	for _, w := range workers {
		s.eventually("the leader knows "+w.name, func() bool { return leader.machineIs(w.name, inventory.Current) })
	}

	return leader, clk
}

const (
	notServed = "talosccm_csr_certificates_not_served_total"
	unchecked = "talosccm_csr_certificates_unchecked_total"
)

func TestServed_ChecksKubelet(t *testing.T) {
	none := &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return &tls.Config{MinVersion: tls.VersionTLS13}, nil }}

	for name, test := range map[string]struct {
		listen               func(s suite) string // returns the address of the kubelet
		notServed, unchecked float64
	}{
		// A client with the kubelet's credentials obtains a certificate for another key.
		"has another certificate": {listen: func(s suite) string { return s.otherKubelet(nil) }, notServed: 1},
		"has no certificate":      {listen: func(s suite) string { return s.otherKubelet(none) }, notServed: 1},
		// A firewall may block the kubelet's port.
		"does not respond": {listen: func(suite) string { return "127.0.0.1:0" }, unchecked: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := alone(t)
			w := s.known()
			before := ctest.Metrics(s)
			leader, clk := s.watchful(w)
			kubelet := leader.listen(w, test.listen(s))

			name := s.post(w, request{config: s.credential(w)})
			s.awaitIssued(name)
			s.eventually("the kubelet is checked", func() bool { return kubelet.dialed.Load() > 1 })
			assert.Empty(t, s.Events(w.name, csrapproval.ReasonNotServed), "reported at once")

			clk.shift(5 * time.Minute)

			for _, object := range []string{name, w.name} {
				s.eventually("Events are on "+object, func() bool { return len(s.Events(object, csrapproval.ReasonNotServed)) == int(test.notServed) })
			}

			s.eventually("the certificate is counted", func() bool {
				after := ctest.Metrics(s)

				return after[notServed]-before[notServed] == test.notServed && after[unchecked]-before[unchecked] == test.unchecked
			})
			assert.Len(t, s.Events(w.name, csrapproval.ReasonNotServed), int(test.notServed))
		})
	}
}

func TestServed_AcceptsKubelet(t *testing.T) {
	s := alone(t)
	s.restart() // the deleted Node of an earlier test had the same address

	w, thief := s.boot(s.planKubelet()), s.known()
	address := s.startKubelet(w, kube.KubeletSpec{}).Address.String()
	certificate := s.awaitIssuedFor(w).Status.Certificate
	s.eventually("the kubelet serves its certificate", func() bool { return serves(address, certificate) })
	s.post(thief, request{config: s.credential(thief)})

	// A new leader checks certificates that were issued before.
	leader, clk := s.watchful(w, thief)
	kubelet, compared := leader.listen(w, address), leader.listen(thief, s.otherKubelet(nil))

	s.eventually("both kubelets are checked", func() bool { return kubelet.dialed.Load() > 0 && compared.dialed.Load() > 0 })

	// The check has ended: another certificate is no longer detected.
	checked := compared.dialed.Load()
	s.eventually("the other kubelet is checked again", func() bool { return compared.dialed.Load() > checked+1 })

	replaced := leader.listen(w, s.otherKubelet(nil))

	clk.shift(5 * time.Minute)
	s.AwaitEvent(thief.name, csrapproval.ReasonNotServed)
	assert.Len(t, s.Events(thief.name, csrapproval.ReasonNotServed), 1)
	assert.Empty(t, s.Events(w.name, csrapproval.ReasonNotServed))
	assert.Zero(t, replaced.dialed.Load(), "the check has not ended")
}
