package csrapproval

import (
	"context"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

// Reasons of Events. The message contains the codes of csrpolicy.
const (
	ReasonApproved = "CSRApproved"
	ReasonDenied   = "CSRDenied"
	ReasonDeferred = "CSRDeferred"
)

// Values of the label status, the same as the upstream Talos CCM's.
const (
	statusApprove = "approve"
	statusDeny    = "deny"
)

// conditionFor returns the condition to write for a verdict.
func conditionFor(verdict csrpolicy.Verdict) certificatesv1.CertificateSigningRequestCondition {
	kind := certificatesv1.CertificateDenied
	if verdict.Decision == csrpolicy.Approve {
		kind = certificatesv1.CertificateApproved
	}

	return certificatesv1.CertificateSigningRequestCondition{
		Type:    kind,
		Status:  corev1.ConditionTrue,
		Reason:  verdict.Reasons[0].Code,
		Message: messageFor(verdict),
	}
}

// messageFor returns all reasons in one line, truncated to the size of an Event.
func messageFor(verdict csrpolicy.Verdict) string {
	var sentences []string

	for _, reason := range verdict.Reasons {
		sentences = append(sentences, reason.Code+": "+reason.Message)
	}

	return events.Truncate(strings.Join(sentences, "; "))
}

// reportDecision reports a verdict that has been written.
func (c *Controller) reportDecision(
	ctx context.Context, csr *certificatesv1.CertificateSigningRequest, r review, condition certificatesv1.CertificateSigningRequestCondition,
) {
	logger := klog.FromContext(ctx)
	counted := map[string]bool{}

	for _, reason := range r.verdict.Reasons {
		if !counted[reason.Code] {
			verdicts.WithLabelValues(reason.Decision.String(), reason.Code).Inc()
		}

		counted[reason.Code] = true
	}

	if r.verdict.Decision == csrpolicy.Approve {
		age := c.cfg.Clock.Since(csr.CreationTimestamp.Time)

		decisions.WithLabelValues(statusApprove).Inc()
		ageAtApproval.Observe(age.Seconds())
		logger.Info("Approved CSR", "requester", csr.Spec.Username, "age", age)
		c.cfg.Recorder.Event(csr, corev1.EventTypeNormal, ReasonApproved, condition.Message)

		return
	}

	decisions.WithLabelValues(statusDeny).Inc()
	logger.Info("Denied CSR", "requester", csr.Spec.Username, "reasons", condition.Message)
	c.warn(csr, r.node, ReasonDenied, condition.Message)
}

// reportDeferral reports why a request stays pending, when there is a new reason.
func (c *Controller) reportDeferral(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, r review) {
	var conditions []events.Condition

	for _, reason := range r.verdict.Reasons {
		conditions = append(conditions, events.Condition{Reason: ReasonDeferred, Subject: reason.Code})
	}

	added := c.reporter.Update(csr.Name, conditions...)
	if len(added) == 0 {
		return
	}

	for _, condition := range added {
		verdicts.WithLabelValues(csrpolicy.Defer.String(), condition.Subject).Inc()
	}

	message := messageFor(r.verdict)
	klog.FromContext(ctx).V(2).Info("Deferred CSR", "requester", csr.Spec.Username, "reasons", message)
	c.warn(csr, r.node, ReasonDeferred, message)
}

// warn emits Events on the request and on its Node, where operators look when kubectl logs fails.
func (c *Controller) warn(csr *certificatesv1.CertificateSigningRequest, node *corev1.Node, reason, message string) {
	c.cfg.Recorder.Event(csr, corev1.EventTypeWarning, reason, message)

	if node != nil {
		c.cfg.Recorder.Event(node, corev1.EventTypeWarning, reason, events.Truncate("CSR "+csr.Name+": "+message))
	}
}
