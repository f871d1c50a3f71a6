package csrapproval

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
)

const (
	// servedWithin is how long after its issuance a kubelet may take to serve a certificate. Kubelets take seconds.
	servedWithin = 5 * time.Minute

	// Kubelets are checked every servedInterval, servedWorkers at a time, each for at most servedTimeout.
	servedInterval = 10 * time.Second
	servedTimeout  = 3 * time.Second
	servedWorkers  = 10
)

// indexApproved is the index of the requests that talos-ccm approved by the name of their Node.
const indexApproved = "csrapproval/approved"

// DialKubeletFunc connects to the kubelet's port of the machine at an address.
type DialKubeletFunc func(ctx context.Context, addr netip.Addr) (net.Conn, error)

// servedCheck is the check whether the kubelet that requested a certificate serves it.
type servedCheck struct {
	csr   *certificatesv1.CertificateSigningRequest
	until time.Time
	done  bool
}

// approvedFor is the index function of indexApproved.
func approvedFor(obj any) (nodenames []string, _ error) {
	if csr, ok := obj.(*certificatesv1.CertificateSigningRequest); ok && !approvedAt(csr).IsZero() {
		nodename, _ := csrpolicy.Nodename(csr) // was reviewed
		nodenames = []string{nodename}
	}

	return nodenames, nil
}

// approvedAt returns when talos-ccm approved a request; zero if it did not.
func approvedAt(csr *certificatesv1.CertificateSigningRequest) time.Time {
	for _, condition := range csr.Status.Conditions {
		if condition.Type == certificatesv1.CertificateApproved && condition.Reason == csrpolicy.CodeVerified {
			return condition.LastUpdateTime.Time
		}
	}

	return time.Time{}
}

// watchServed checks whether kubelets serve the certificates that they were issued, until ctx ends. It finds
// certificates that another client requested with the credentials of a kubelet, and prevents nothing.
func (c *Controller) watchServed(ctx context.Context) {
	checks, requests := map[types.UID]*servedCheck{}, c.requests.GetIndexer()

	for backoff.Sleep(ctx, c.cfg.Clock, servedInterval) {
		var due []*servedCheck

		next := map[types.UID]*servedCheck{}

		for _, nodename := range requests.ListIndexFuncValues(indexApproved) {
			approved, _ := requests.ByIndex(indexApproved, nodename) // fails only without the index
			due = append(due, dueChecks(approved, checks, next, c.cfg.Clock.Now())...)
		}

		checks = next

		workqueue.ParallelizeUntil(ctx, servedWorkers, len(due), func(i int) { c.checkServed(ctx, due[i]) })
	}
}

// dueChecks returns the checks of a Node's certificates that have not ended, and moves the checks of the approved
// requests to next. A check ends when a newer request is approved: the kubelet serves only one certificate. A new
// leader checks what was approved within servedWithin.
func dueChecks(approved []any, checks, next map[types.UID]*servedCheck, now time.Time) (due []*servedCheck) {
	var newest time.Time

	for _, obj := range approved {
		csr, _ := obj.(*certificatesv1.CertificateSigningRequest)

		check, known := checks[csr.UID]
		if !known {
			until := approvedAt(csr).Add(servedWithin)
			check = &servedCheck{until: until, done: !now.Before(until)}
		}

		check.csr, next[csr.UID] = csr, check

		if created := csr.CreationTimestamp.Time; created.After(newest) {
			newest = created
		}
	}

	for _, obj := range approved {
		csr, _ := obj.(*certificatesv1.CertificateSigningRequest)
		check := next[csr.UID]

		switch {
		case check.done:
		case csr.CreationTimestamp.Time.Before(newest):
			check.done = true
		case len(csr.Status.Certificate) == 0:
			check.until = now.Add(servedWithin)
		default:
			due = append(due, check)
		}
	}

	return due
}

// checkServed ends a check whose certificate the kubelet serves, or whose time is over. A kubelet that does not respond
// is no evidence of theft.
func (c *Controller) checkServed(ctx context.Context, check *servedCheck) {
	nodename, _ := csrpolicy.Nodename(check.csr) // was reviewed
	node, _ := c.cfg.Nodes.Lister().Get(nodename)
	issued, _ := pem.Decode(check.csr.Status.Certificate)

	if node == nil || issued == nil {
		check.done = true

		return
	}

	addr, served, err := c.servedBy(ctx, nodename)
	isServed := err == nil && bytes.Equal(served, issued.Bytes)

	if ctx.Err() != nil || (!isServed && c.cfg.Clock.Now().Before(check.until)) {
		return
	}

	check.done = true
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "csr", check.csr.Name, "node", nodename, "address", addr)

	switch {
	case isServed:
		logger.V(4).Info("Kubelet serves its certificate")
	case err != nil:
		uncheckedCertificates.Inc()
		logger.Info("Failed to check whether kubelet serves its certificate", "err", err)
	default:
		notServed.Inc()
		logger.Info("Kubelet does not serve its certificate")
		c.warn(check.csr, node, ReasonNotServed, fmt.Sprintf("kubelet at %s does not serve the certificate that was issued more than %s ago; "+
			"another client may have requested it with the kubelet's credentials", addr, servedWithin))
	}
}

// servedBy returns the certificate that the kubelet of a Node serves, whose key it has proven to have; nil if it has
// none. The kubelet is dialed only where its machine responds.
func (c *Controller) servedBy(ctx context.Context, nodename string) (addr netip.Addr, certificate []byte, _ error) {
	entry := c.cfg.Inventory.Get(nodename)
	if addr = entry.Machine.Endpoint; entry.Condition != inventory.Current || !addr.IsValid() {
		return addr, nil, fmt.Errorf("machine of node %q does not respond", nodename)
	}

	ctx, cancel := context.WithTimeout(ctx, servedTimeout)
	defer cancel()

	conn, err := c.cfg.DialKubelet(ctx, addr)
	if err != nil {
		return addr, nil, fmt.Errorf("dial kubelet %s: %w", addr, err)
	}
	defer conn.Close() //nolint:errcheck // nothing was sent

	client := tls.Client(conn, &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true}) //nolint:gosec // compared, not trusted

	err = client.HandshakeContext(ctx)

	// A kubelet without a certificate responds with an alert.
	if alert := (*net.OpError)(nil); errors.As(err, &alert) && alert.Op == "remote error" {
		return addr, nil, nil
	}

	if err != nil {
		return addr, nil, fmt.Errorf("handshake with kubelet %s: %w", addr, err)
	}

	return addr, client.ConnectionState().PeerCertificates[0].Raw, nil
}
