package csrapproval

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

func verdict(decision csrpolicy.Decision, reasons ...csrpolicy.Reason) csrpolicy.Verdict {
	return csrpolicy.Verdict{Decision: decision, Reasons: reasons}
}

func TestConditionFor_ContainsAllReasons(t *testing.T) {
	condition := conditionFor(verdict(csrpolicy.Deny,
		csrpolicy.Reason{Code: "Wildcard", Decision: csrpolicy.Deny, Message: "one"},
		csrpolicy.Reason{Code: "WeakKey", Decision: csrpolicy.Deny, Message: "two"},
		csrpolicy.Reason{Code: "UnknownDNSName", Decision: csrpolicy.Defer, Message: "three"},
	))

	if condition.Type != certificatesv1.CertificateDenied || condition.Reason != "Wildcard" || condition.Message != "Wildcard: one; WeakKey: two; UnknownDNSName: three" {
		t.Errorf("got %+v", condition)
	}

	condition = conditionFor(verdict(csrpolicy.Approve, csrpolicy.Reason{Code: "Proven", Decision: csrpolicy.Approve, Message: "all"}))
	if condition.Type != certificatesv1.CertificateApproved || condition.Reason != "Proven" {
		t.Errorf("got %+v", condition)
	}
}

func TestMessageFor_FitsIntoEvent(t *testing.T) {
	for length := events.MaxMessage - 20; length < events.MaxMessage+20; length++ {
		reason := csrpolicy.Reason{Code: "C", Decision: csrpolicy.Deny, Message: strings.Repeat("ä", length/2) + strings.Repeat("x", length%2)}

		message := messageFor(verdict(csrpolicy.Deny, reason))
		if len(message) > events.MaxMessage || !utf8.ValidString(message) {
			t.Errorf("from %d bytes: %d bytes, %q", length, len(message), message[len(message)-8:])
		}
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
			reasons = append(reasons, csrpolicy.Reason{Code: code, Decision: csrpolicy.Defer, Message: strings.Repeat("x", events.MaxMessage)})
		}

		c.reportDeferral(t.Context(), csr, review{node: node("a"), verdict: verdict(csrpolicy.Defer, reasons...)})

		if len(recorder.Events) != step.want {
			t.Errorf("%v: got %d Events, want %d", step.codes, len(recorder.Events), step.want)
		}

		for range len(recorder.Events) {
			if event := <-recorder.Events; !strings.HasPrefix(event, "Warning CSRDeferred ") || len(event) > len("Warning CSRDeferred ")+events.MaxMessage {
				t.Errorf("%v: got Event %q", step.codes, event)
			}
		}
	}

	c.reporter.Forget(csr.Name)

	if added := c.reporter.Update(csr.Name, events.Condition{Reason: ReasonDeferred, Subject: "Two"}); len(added) != 1 {
		t.Errorf("another request with the same name: got %v", added)
	}
}

func TestPendingRequests_ListsConflicting(t *testing.T) {
	p := &pendingRequests{conflicting: map[string]bool{}}

	for _, step := range []struct {
		name string
		do   func()
		want []string
	}{
		{"none", func() {}, nil},
		{"being reviewed", func() { p.set("a", true) }, []string{"a"}},
		{"without other owners", func() { p.set("a", false) }, nil},
		{"with another owner", func() { p.set("a", true) }, []string{"a"}},
		{"two", func() { p.set("b", true) }, []string{"a", "b"}},
		{"one removed", func() { p.remove("a") }, []string{"b"}},
		{"removed twice", func() { p.remove("a") }, []string{"b"}},
		{"all removed", func() { p.remove("b") }, nil},
	} {
		step.do()

		got := p.listConflicting()
		slices.Sort(got)

		if !slices.Equal(got, step.want) {
			t.Errorf("%s: got %v, want %v", step.name, got, step.want)
		}
	}
}
