package csrapproval

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

func verdict(decision csrpolicy.Decision, reasons ...csrpolicy.Reason) csrpolicy.Verdict {
	return csrpolicy.Verdict{Decision: decision, Reasons: reasons}
}

func TestTheConditionSaysAllThatIsWrong(t *testing.T) {
	condition := conditionOf(verdict(csrpolicy.Deny,
		csrpolicy.Reason{Code: "Wildcard", Decision: csrpolicy.Deny, Message: "one"},
		csrpolicy.Reason{Code: "WeakKey", Decision: csrpolicy.Deny, Message: "two"},
		csrpolicy.Reason{Code: "UnknownDNSName", Decision: csrpolicy.Defer, Message: "three"},
	))

	if condition.Type != certificatesv1.CertificateDenied || condition.Reason != "Wildcard" || condition.Message != "Wildcard: one; WeakKey: two; UnknownDNSName: three" {
		t.Errorf("got %+v", condition)
	}

	condition = conditionOf(verdict(csrpolicy.Approve, csrpolicy.Reason{Code: "Proven", Decision: csrpolicy.Approve, Message: "all"}))
	if condition.Type != certificatesv1.CertificateApproved || condition.Reason != "Proven" {
		t.Errorf("got %+v", condition)
	}
}

func TestAMessageFitsIntoAnEvent(t *testing.T) {
	for length := maxMessage - 20; length < maxMessage+20; length++ {
		reason := csrpolicy.Reason{Code: "C", Decision: csrpolicy.Deny, Message: strings.Repeat("ä", length/2) + strings.Repeat("x", length%2)}

		message := messageOf(verdict(csrpolicy.Deny, reason))
		if len(message) > maxMessage || !utf8.ValidString(message) {
			t.Errorf("from %d bytes: %d bytes, %q", length, len(message), message[len(message)-8:])
		}
	}
}

func TestCodesAreToldOnce(t *testing.T) {
	d := newDeferred()
	d.watch("a")

	for _, test := range []struct {
		codes, news []string
	}{
		{[]string{"One"}, []string{"One"}},
		{[]string{"One"}, nil},
		{[]string{"Two", "One"}, []string{"Two"}},
		{nil, nil},
		{[]string{"Two"}, nil},
	} {
		if got := d.note("a", nil, test.codes); !slices.Equal(got, test.news) {
			t.Errorf("of %v new are %v, want %v", test.codes, got, test.news)
		}
	}

	d.forget("a")
	d.watch("a")

	if got := d.note("a", nil, []string{"One"}); len(got) != 1 {
		t.Errorf("another of that name: new are %v", got)
	}
}

func TestContestedRequests(t *testing.T) {
	d := newDeferred()

	for _, step := range []struct {
		rule string
		do   func()
		want []string
	}{
		{"none", func() {}, nil},
		{"one that is being looked at: it could miss a change", func() { d.watch("a") }, []string{"a"}},
		{"not one that nobody is in the way of", func() { d.note("a", nil, nil) }, nil},
		{"one that somebody is in the way of", func() { d.note("a", map[string][]string{"x": {"b"}}, nil) }, []string{"a"}},
		{"another", func() { d.watch("b") }, []string{"a", "b"}},
		{"not one that is gone", func() { d.forget("a") }, []string{"b"}},
		{"which cannot be noted", func() { d.note("a", map[string][]string{"x": {"b"}}, nil) }, []string{"b"}},
		{"none in the end", d.clear, nil},
	} {
		step.do()

		got := d.contested()
		slices.Sort(got)

		if !slices.Equal(got, step.want) {
			t.Errorf("%s: got %v, want %v", step.rule, got, step.want)
		}
	}
}
