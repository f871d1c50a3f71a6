package csrapproval

import (
	"context"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

// Reasons of the Events. Which of the policy's reasons it was is in the message.
const (
	ReasonApproved = "CSRApproved"
	ReasonDenied   = "CSRDenied"
	ReasonDeferred = "CSRDeferred"
)

// maxMessage is what an Event's message can hold.
const maxMessage = 1024

// Values of the label status, as the upstream Talos CCM has them.
const (
	statusApprove = "approve"
	statusDeny    = "deny"
)

// conditionOf is a verdict as the request shows it.
func conditionOf(verdict csrpolicy.Verdict) certificatesv1.CertificateSigningRequestCondition {
	kind := certificatesv1.CertificateDenied
	if verdict.Decision == csrpolicy.Approve {
		kind = certificatesv1.CertificateApproved
	}

	return certificatesv1.CertificateSigningRequestCondition{
		Type:    kind,
		Status:  corev1.ConditionTrue,
		Reason:  verdict.Reasons[0].Code,
		Message: messageOf(verdict),
	}
}

// messageOf is all reasons, those that decided first, in one line that an Event can hold.
func messageOf(verdict csrpolicy.Verdict) string {
	var sentences []string

	for _, reason := range verdict.Reasons {
		sentences = append(sentences, reason.Code+": "+reason.Message)
	}

	message := strings.Join(sentences, "; ")
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage-len("…")], "") + "…"
	}

	return message
}

// distinct are a verdict's reasons, each code once.
func distinct(verdict csrpolicy.Verdict) []csrpolicy.Reason {
	var reasons []csrpolicy.Reason

	for _, reason := range verdict.Reasons {
		if !slices.ContainsFunc(reasons, func(r csrpolicy.Reason) bool { return r.Code == reason.Code }) {
			reasons = append(reasons, reason)
		}
	}

	return reasons
}

func codesOf(verdict csrpolicy.Verdict) []string {
	var codes []string

	for _, reason := range distinct(verdict) {
		codes = append(codes, reason.Code)
	}

	return codes
}

// reportDecided tells of a verdict that was written.
func (c *Controller) reportDecided(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, node *corev1.Node, verdict csrpolicy.Verdict,
	condition certificatesv1.CertificateSigningRequestCondition,
) {
	logger := klog.FromContext(ctx)
	age := c.clock.Since(csr.CreationTimestamp.Time)

	for _, reason := range distinct(verdict) {
		verdicts.WithLabelValues(reason.Decision.String(), reason.Code).Inc()
	}

	if verdict.Decision == csrpolicy.Approve {
		decisions.WithLabelValues(statusApprove).Inc()
		ageAtApproval.Observe(age.Seconds())
		logger.Info("Approved the request", "requester", csr.Spec.Username, "age", age)
		c.recorder.Event(csr, corev1.EventTypeNormal, ReasonApproved, condition.Message)

		return
	}

	decisions.WithLabelValues(statusDeny).Inc()
	logger.Info("Denied the request", "requester", csr.Spec.Username, "reasons", condition.Message)
	c.warn(csr, node, ReasonDenied, condition.Message)
}

// reportDeferred tells why a request stays pending, once for each reason.
func (c *Controller) reportDeferred(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, node *corev1.Node, verdict csrpolicy.Verdict,
	facts csrpolicy.Evidence,
) {
	news := c.deferred.note(csr.Name, facts.Owners, codesOf(verdict))
	if len(news) == 0 {
		return
	}

	for _, code := range news {
		verdicts.WithLabelValues(verdict.Decision.String(), code).Inc()
	}

	message := messageOf(verdict)
	klog.FromContext(ctx).V(2).Info("Cannot decide the request yet", "requester", csr.Spec.Username, "reasons", message)
	c.warn(csr, node, ReasonDeferred, message)
}

// warn says it on the request, and on the Node, where an operator looks when kubectl logs fails.
func (c *Controller) warn(csr *certificatesv1.CertificateSigningRequest, node *corev1.Node, reason, message string) {
	c.recorder.Event(csr, corev1.EventTypeWarning, reason, message)

	if node != nil {
		c.recorder.Eventf(node, corev1.EventTypeWarning, reason, "Certificate request %s: %s", csr.Name, message)
	}
}
