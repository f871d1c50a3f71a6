package csrapproval

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
)

// userBootstrap is the prefix of the users of bootstrap tokens (k8s.io/cluster-bootstrap/token/api).
const userBootstrap = "system:bootstrap:"

// indexIssued is the index of issued client certificates by the name of their Node.
const indexIssued = "csrapproval/issued"

// clientRequest replaces requests for signers other than kubelet-serving in the cache. It has the client certificate of a
// kubelet as soon as it is issued.
type clientRequest struct {
	metav1.ObjectMeta

	nodename string // empty if it is not an issued client certificate of a kubelet
	issued   csrpolicy.ClientCertificate
}

// compact is the transformation of the cache.
func compact(obj any) (any, error) {
	csr, ok := obj.(*certificatesv1.CertificateSigningRequest)
	if !ok || csr.Spec.SignerName == certificatesv1.KubeletServingSignerName {
		return obj, nil
	}

	request := &clientRequest{ObjectMeta: metav1.ObjectMeta{
		Name: csr.Name, UID: csr.UID, ResourceVersion: csr.ResourceVersion, CreationTimestamp: csr.CreationTimestamp,
	}}

	block, _ := pem.Decode(csr.Status.Certificate)
	if block == nil || csr.Spec.SignerName != certificatesv1.KubeAPIServerClientKubeletSignerName {
		return request, nil
	}

	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return request, nil //nolint:nilerr // of no use to its requester either
	}

	if nodename, isNode := strings.CutPrefix(certificate.Subject.CommonName, "system:node:"); isNode {
		request.nodename = nodename
		request.issued = csrpolicy.ClientCertificate{
			ID:            noderecord.ID(certificate.Raw),
			RequestedWith: csrpolicy.CredentialID(csr),
			RequestedAt:   csr.CreationTimestamp.Time,
			Serial:        fmt.Sprintf("%X", certificate.SerialNumber.Bytes()),
			Bootstrapped:  strings.HasPrefix(csr.Spec.Username, userBootstrap),
			Issuer:        noderecord.Fingerprint(string(certificate.AuthorityKeyId)),
			Expires:       certificate.NotAfter.UTC(),
		}
	}

	return request, nil
}

// issuedFor is the index function of indexIssued.
func issuedFor(obj any) (nodenames []string, _ error) {
	if request, ok := obj.(*clientRequest); ok && request.nodename != "" {
		nodenames = []string{request.nodename}
	}

	return nodenames, nil
}

// credentials returns the client certificates of a Node's kubelet.
func (c *Controller) credentials(node *corev1.Node) csrpolicy.Credentials {
	credentials := csrpolicy.Credentials{Record: noderecord.Of(node), NodeCreated: node.CreationTimestamp.Time}
	objs, _ := c.requests.GetIndexer().ByIndex(indexIssued, node.Name) // fails only without the index

	for _, obj := range objs {
		if request, ok := obj.(*clientRequest); ok {
			credentials.Issued = append(credentials.Issued, request.issued)
		}
	}

	return credentials
}

// syncIssued updates the record of a Node after a rotation: the API server forgets the request within about an hour.
// Requests of the Node may depend on it.
func (c *Controller) syncIssued(ctx context.Context, nodename string) error {
	c.requeueFor(nodename)

	node, _ := c.cfg.Nodes.Lister().Get(nodename) // fails only if there is none
	if node == nil {
		return nil
	}

	credentials := c.credentials(node)

	return c.writeRecord(ctx, node, credentials.Follow())
}

// writeRecord writes the record of a version of a Node, and fails with a conflict if there is a newer one: another request
// may have been recorded.
func (c *Controller) writeRecord(ctx context.Context, node *corev1.Node, record noderecord.Record) error {
	if record == (noderecord.Record{}) || record == noderecord.Of(node) {
		return nil
	}

	if err := recorder.Write(ctx, c.cfg.Client, node, record.ByLeader()); err != nil {
		return err
	}

	klog.FromContext(ctx).Info("Recorded client certificate of kubelet", "node", node.Name, "credential", record.Credential, "previous", record.Previous)

	return nil
}

// reportCredential reports once that a request was made with an unexpected credential.
func (c *Controller) reportCredential(csr *certificatesv1.CertificateSigningRequest, r review) {
	if r.verdict.Unexpected == "" || len(c.reporter.Add(csr.Name, events.Problem{Reason: ReasonUnexpectedCredential})) == 0 {
		return
	}

	unexpectedCredentials.Inc()

	address := "ADDRESS" // the machine that responds may be the attacker's, so its address is not named
	if recorded := r.evidence.Credentials.Record.Address; recorded.IsValid() {
		address = recorded.String()
	}

	remedy, effect := "Check the machine", ""

	switch credentials := r.evidence.Credentials; {
	case credentials.Follow().Stated != "":
		remedy, effect = "If the machine no longer runs the talos-ccm extension, check it", ", which ends the statement"
	case r.evidence.Policy.RequireStatement:
		remedy = "Install the talos-ccm extension on the machine, or check it"
	}

	c.warn(csr, r.node, ReasonUnexpectedCredential, fmt.Sprintf("%s. %s: talosctl -n %s read %s/kubelet-client-current.pem | openssl x509 -outform der | sha256sum. "+
		"Only if the hash begins with the ID of the client certificate, run kubectl label node --overwrite %s %s=%s%s",
		r.verdict.Unexpected, remedy, address, constants.KubeletPKIDir, r.node.Name, noderecord.LabelCredential, csrpolicy.CredentialID(csr), effect))
}
