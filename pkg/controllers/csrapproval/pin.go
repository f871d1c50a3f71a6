package csrapproval

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Labels that record the pinned client certificate of a Node. No kubelet can write them (NodeRestriction).
const (
	// LabelCredential is the ID of the kubelet's client certificate: the first 32 hexadecimal digits of its SHA-256 hash.
	// An operator may set it.
	LabelCredential = "talos-ccm.node-restriction.kubernetes.io/credential"
	// LabelPrevious is the ID of the certificate with which the kubelet requested its client certificate.
	LabelPrevious = "talos-ccm.node-restriction.kubernetes.io/credential-previous"
	// LabelContext contains hashes of the Talos node ID, the EPHEMERAL file system and the CA, and the expiry time.
	LabelContext = "talos-ccm.node-restriction.kubernetes.io/credential-context"
)

const (
	// FieldManager owns the labels.
	FieldManager = "talos-ccm-csr-approval"

	// unknown is an empty part of the context.
	unknown = "0"
	// contextKey is the length of the prefix of the certificate's ID in the context.
	contextKey = 8
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
			ID:            csrpolicy.CertificateID(certificate.Raw),
			RequestedWith: csrpolicy.CredentialID(csr),
			RequestedAt:   csr.CreationTimestamp.Time,
			Serial:        fmt.Sprintf("%X", certificate.SerialNumber.Bytes()),
			Bootstrapped:  strings.HasPrefix(csr.Spec.Username, userBootstrap),
			Issuer:        csrpolicy.Fingerprint(string(certificate.AuthorityKeyId)),
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
	credentials := csrpolicy.Credentials{Record: pinOf(node), NodeCreated: node.CreationTimestamp.Time}
	objs, _ := c.requests.GetIndexer().ByIndex(indexIssued, node.Name) // fails only without the index

	for _, obj := range objs {
		if request, ok := obj.(*clientRequest); ok {
			credentials.Issued = append(credentials.Issued, request.issued)
		}
	}

	return credentials
}

// syncIssued moves the pin of a Node after a rotation: the API server forgets the request within about an hour.
// Requests of the Node may depend on it.
func (c *Controller) syncIssued(ctx context.Context, nodename string) error {
	c.requeueFor(nodename)

	node, _ := c.cfg.Nodes.Lister().Get(nodename) // fails only if there is none
	if node == nil {
		return nil
	}

	credentials := c.credentials(node)

	return c.writePin(ctx, node, credentials.Record.Follow(credentials.Issued))
}

// writePin records a pin on a version of a Node, and fails with a conflict if there is a newer one: another request may
// have been pinned.
func (c *Controller) writePin(ctx context.Context, node *corev1.Node, pin csrpolicy.Record) error {
	if pin == (csrpolicy.Record{}) || pin == pinOf(node) {
		return nil
	}

	labels := map[string]any{LabelCredential: pin.Credential, LabelPrevious: nil, LabelContext: pinContext(pin), nodespec.LabelAddress: nil}
	if pin.Previous != "" {
		labels[LabelPrevious] = pin.Previous
	}

	if pin.Address.IsValid() {
		labels[nodespec.LabelAddress] = nodespec.AddressLabel(pin.Address)
	}

	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion, "labels": labels}})
	if err != nil {
		return fmt.Errorf("encode credential of node %q: %w", node.Name, err)
	}

	if _, err = c.cfg.Client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: FieldManager}); err != nil {
		return fmt.Errorf("record credential of node %q: %w", node.Name, err)
	}

	klog.FromContext(ctx).Info("Pinned client certificate of kubelet", "node", node.Name, "credential", pin.Credential, "previous", pin.Previous)

	return nil
}

// pinOf reads the pin of a Node. It ignores the context if it is of a different certificate, such as after an operator has
// set LabelCredential.
func pinOf(node *corev1.Node) csrpolicy.Record {
	pin := csrpolicy.Record{Credential: node.Labels[LabelCredential], Address: nodespec.RecordedAddress(node)}
	if pin.Credential == "" {
		return csrpolicy.Record{}
	}

	parts := strings.Split(node.Labels[LabelContext], ".")
	if len(parts) != 5 || !strings.HasPrefix(pin.Credential, parts[0]) {
		return pin
	}

	for i, value := range []*string{&pin.NodeID, &pin.Volume, &pin.Issuer} {
		if part := parts[i+1]; part != unknown {
			*value = part
		}
	}

	if seconds, err := strconv.ParseInt(parts[4], 10, 64); err == nil && seconds > 0 {
		pin.Expires = time.Unix(seconds, 0).UTC()
	}

	pin.Previous = node.Labels[LabelPrevious]

	return pin
}

// pinContext returns the value of LabelContext: the start of the certificate's ID, the fingerprints of the node ID, the
// volume and the issuer, and the time of expiry in seconds since 1970.
func pinContext(pin csrpolicy.Record) string {
	parts := []string{pin.Credential[:min(contextKey, len(pin.Credential))]}

	for _, value := range []string{pin.NodeID, pin.Volume, pin.Issuer} {
		if value == "" {
			value = unknown
		}

		parts = append(parts, value)
	}

	return strings.Join(append(parts, strconv.FormatInt(max(pin.Expires.Unix(), 0), 10)), ".")
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

	c.warn(csr, r.node, ReasonUnexpectedCredential, fmt.Sprintf("%s. Check the machine: talosctl -n %s read %s/kubelet-client-current.pem | openssl x509 -outform der | sha256sum. "+
		"Only if the hash begins with the ID of the client certificate, run kubectl label node --overwrite %s %s=%s",
		r.verdict.Unexpected, address, constants.KubeletPKIDir, r.node.Name, LabelCredential, csrpolicy.CredentialID(csr)))
}
