package csrapproval

import (
	"context"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/metric"
)

// Reasons of Events. The message contains the codes of csrpolicy.
const (
	// ReasonApproved (Normal): the CSR was approved.
	ReasonApproved = "CSRApproved"
	// ReasonDeferred: the CSR stays pending.
	// Fix: docs/reference/csr-approval.md#pending-csrs.
	ReasonDeferred = "CSRDeferred"
	// ReasonDenied: the CSR was denied.
	// Fix: docs/reference/csr-approval.md#denied-csrs.
	ReasonDenied = "CSRDenied"
	// ReasonUnexpectedCredential: another client certificate than the recorded one was used.
	// Fix: docs/troubleshooting/certificates.md#unexpected-credential.
	ReasonUnexpectedCredential = "UnexpectedCredential"
)

var (
	// The upstream Talos CCM has a metric of the same name, with the same values of the label.
	decisions = metric.Zero(metric.NewCounterVec("talosccm_csr_approval_count",
		"Number of decided kubelet-serving CSRs by status: approve or deny.", "status"), "approve", "deny")

	verdicts = metric.NewCounterVec("talosccm_csr_verdicts_total",
		"Number of reasons of verdicts on kubelet-serving CSRs, by decision (Approve, Defer or Deny) and code.", "decision", "reason")

	ageAtApproval = metric.NewHistogram("talosccm_csr_approval_age_seconds",
		"Age of kubelet-serving CSRs at approval.", []float64{.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600})

	pendingGauge = metric.NewGauge("talosccm_csr_pending",
		"Number of pending kubelet-serving CSRs of selected Nodes.")

	unexpectedCredentials = metric.NewCounter("talosccm_csr_unexpected_credentials_total",
		"Number of kubelet-serving CSRs with another client certificate than the recorded one.")
)

// Queries with increase() miss the first increment of a series that did not exist before.
func init() {
	for decision, codes := range csrpolicy.Codes {
		for _, code := range codes {
			verdicts.WithLabelValues(decision.String(), code)
		}
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

// reportPending reports why a request stays pending, when there is a new reason.
func (c *Controller) reportPending(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, r review) {
	var problems []events.Problem

	for _, reason := range r.verdict.Reasons {
		problems = append(problems, events.Problem{Reason: ReasonDeferred, Subject: reason.Code})
	}

	added := c.reporter.Add(csr.Name, problems...)
	if len(added) == 0 {
		return
	}

	for _, problem := range added {
		verdicts.WithLabelValues(csrpolicy.Pending.String(), problem.Subject).Inc()
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
