package csrapproval

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

func verdict(decision csrpolicy.Decision, reasons ...csrpolicy.Reason) csrpolicy.Verdict {
	return csrpolicy.Verdict{Decision: decision, Reasons: reasons}
}

func TestMessageFor_ContainsAllReasons(t *testing.T) {
	message := messageFor(verdict(csrpolicy.Denied,
		csrpolicy.Reason{Code: "Wildcard", Decision: csrpolicy.Denied, Message: "one"},
		csrpolicy.Reason{Code: "WeakKey", Decision: csrpolicy.Denied, Message: "two"},
		csrpolicy.Reason{Code: "UnknownDNSName", Decision: csrpolicy.Pending, Message: "three"},
	))
	assert.Equal(t, "Wildcard: one; WeakKey: two; UnknownDNSName: three", message)
}

func TestMessageFor_FitsIntoEvent(t *testing.T) {
	for length := events.MaxMessage - 20; length < events.MaxMessage+20; length++ {
		reason := csrpolicy.Reason{Code: "C", Decision: csrpolicy.Denied, Message: strings.Repeat("ä", length/2) + strings.Repeat("x", length%2)}
		message := messageFor(verdict(csrpolicy.Denied, reason))
		assert.LessOrEqual(t, len(message), events.MaxMessage)
		assert.True(t, utf8.ValidString(message), message)
	}
}

func TestReportDeferral_EmitsEventsForNewReasons(t *testing.T) {
	recorder := record.NewFakeRecorder(10)
	c := &Controller{cfg: Config{Recorder: recorder}, reporter: events.New(recorder)}
	csr := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "csr-1"}}

	for _, step := range []struct {
		codes []string
		want  int // Events on the request and on its Node
	}{
		{[]string{"One"}, 2},
		{[]string{"One"}, 0},
		{[]string{"Two", "One"}, 2},
		{[]string{"One", "Two"}, 0},
		{[]string{"Two"}, 0},
		{[]string{"Two", "Two"}, 0},
		{nil, 0},
		{[]string{"One"}, 0},
	} {
		var reasons []csrpolicy.Reason
		for _, code := range step.codes {
			reasons = append(reasons, csrpolicy.Reason{Code: code, Decision: csrpolicy.Pending, Message: strings.Repeat("x", events.MaxMessage)})
		}

		c.reportPending(t.Context(), csr, review{node: node("a"), verdict: verdict(csrpolicy.Pending, reasons...)})
		assert.Len(t, recorder.Events, step.want, "%v", step.codes)

		for range len(recorder.Events) {
			message, isPending := strings.CutPrefix(<-recorder.Events, "Warning CSRDeferred ")
			assert.True(t, isPending, message)
			assert.LessOrEqual(t, len(message), events.MaxMessage)
		}
	}

	c.reporter.Forget(csr.Name)
	assert.Len(t, c.reporter.Add(csr.Name, events.Problem{Reason: ReasonDeferred, Subject: "Two"}), 1, "another request with the same name")
}
