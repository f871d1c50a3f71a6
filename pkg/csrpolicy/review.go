package csrpolicy

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

// CodeVerified is the code of the only reason to approve a request.
const CodeVerified = "IdentityVerified"

// Codes of reasons to ignore a request.
const (
	CodeOtherSigner   = "OtherSigner"    // not kubernetes.io/kubelet-serving
	CodeDecided       = "AlreadyDecided" // approved, denied, failed or issued
	CodeNodeUnmanaged = "NodeNotManaged" // the Node does not run Talos or is not selected by the configuration
	CodeExpired       = "Abandoned"      // no kubelet waits for it any longer
)

// abandonedAfter is four times as long as a kubelet waits before it discards the key and sends another request
// (certificateWaitTimeout in k8s.io/client-go/util/certificate). Approving a backlog of such requests is of no use.
const abandonedAfter = time.Hour

// reasons collects the reasons not to approve a request.
type reasons []Reason

// denied adds a reason that no evidence can remove.
func (r *reasons) denied(code, format string, args ...any) {
	*r = append(*r, Reason{Code: code, Decision: Denied, Message: fmt.Sprintf(format, args...)})
}

// pending adds a reason that other evidence can remove.
func (r *reasons) pending(code, format string, args ...any) {
	*r = append(*r, Reason{Code: code, Decision: Pending, Message: fmt.Sprintf(format, args...)})
}

// checker checks one request.
type checker struct {
	reasons

	Evidence

	request *Request
	// nodename is empty if the requester is not a kubelet.
	nodename string

	// The results of checkCredential.
	unexpected string
	record     noderecord.Record
}

// Review returns the decision on a request with all reasons. It is deterministic and does not modify its arguments.
func Review(request *Request, e Evidence) Verdict {
	if code, message := ignored(request.csr, e); code != "" {
		return Verdict{Decision: Ignored, Reasons: []Reason{{Code: code, Decision: Ignored, Message: message}}}
	}

	c := checker{request: request, Evidence: e}
	c.checkRequester()
	c.reasons = append(c.reasons, request.reasons...)
	c.checkTerms()

	for _, name := range request.names {
		c.checkName(name)
	}

	for _, ip := range request.ips {
		c.checkAddress(ip)
	}

	c.checkCredential()

	if len(c.reasons) == 0 {
		message := fmt.Sprintf("All requested names and addresses belong to the machine of Node %q", c.nodename)

		return Verdict{
			Decision: Approved, Reasons: []Reason{{Code: CodeVerified, Decision: Approved, Message: message}},
			Unexpected: c.unexpected, Record: c.record,
		}
	}

	// An unknown Node may turn out to be unmanaged, so that none of its kubelet's requests is denied.
	if !c.Node.managed() && c.nodename != "" {
		for i := range c.reasons {
			c.reasons[i].Decision = Pending
		}
	}

	slices.SortStableFunc(c.reasons, func(a, b Reason) int { return cmp.Compare(b.Decision, a.Decision) })

	return Verdict{Decision: c.reasons[0].Decision, Reasons: c.reasons, Unexpected: c.unexpected}
}

// ignored returns why the request must not be touched; empty if it is pending and concerns us.
func ignored(csr *certificatesv1.CertificateSigningRequest, e Evidence) (code, message string) {
	created := csr.CreationTimestamp.Time

	switch {
	case csr.Spec.SignerName != certificatesv1.KubeletServingSignerName:
		return CodeOtherSigner, "Request is for another signer"
	case len(csr.Status.Conditions) > 0, len(csr.Status.Certificate) > 0:
		return CodeDecided, "Request is already decided"
	case e.Node == NodeUnmanaged:
		return CodeNodeUnmanaged, "Node does not run Talos or is not managed"
	case !created.IsZero() && e.Now.Sub(created) > abandonedAfter:
		return CodeExpired, fmt.Sprintf("Request is older than %s; its kubelet no longer waits for it", abandonedAfter)
	}

	return "", ""
}
