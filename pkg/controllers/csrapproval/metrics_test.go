package csrapproval_test

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func TestMetrics_CountVerdicts(t *testing.T) {
	const pending = "talosccm_csr_pending"

	s := alone(t)
	w, victim := s.known(), s.known()

	// Requests of other tests are decided or deleted.
	s.eventually("nothing is pending", func() bool { return ctest.Metrics(s)[pending] == 0 })

	before := ctest.Metrics(s)
	s.awaitIssued(s.post(w, request{}))
	s.awaitDenied(s.post(w, request{names: []string{"kubernetes", "*.example.org"}}))
	s.awaitDenied(s.post(w, request{ips: []netip.Addr{victim.addr}}))

	other := s.plan().addr
	s.list(w, other)
	deferred := s.post(w, request{ips: []netip.Addr{other}})
	s.awaitDeferred(deferred, csrpolicy.CodeUnknownAddress)

	wanted := map[string]float64{
		"talosccm_csr_approval_count approve":                               1,
		"talosccm_csr_approval_count deny":                                  2,
		"talosccm_csr_approval_age_seconds":                                 1,
		"talosccm_csr_verdicts_total Approve " + csrpolicy.CodeVerified:     1,
		"talosccm_csr_verdicts_total Deny " + csrpolicy.CodeClusterName:     1,
		"talosccm_csr_verdicts_total Deny " + csrpolicy.CodeWildcard:        1,
		"talosccm_csr_verdicts_total Deny " + csrpolicy.CodeNotOwned:        1,
		"talosccm_csr_verdicts_total Deny " + csrpolicy.CodeOwnedByOthers:   0, // other owners are no reason for denial
		"talosccm_csr_verdicts_total Defer " + csrpolicy.CodeOwnedByOthers:  1,
		"talosccm_csr_verdicts_total Defer " + csrpolicy.CodeUnknownAddress: 1,
		pending: 1,
	}

	counted := map[string]float64{}
	defer func() { t.Logf("counted %v", counted) }()

	s.eventually("all verdicts are counted", func() bool {
		after := ctest.Metrics(s)
		for name := range wanted {
			counted[name] = after[name] - before[name]
		}

		return maps.Equal(counted, wanted)
	})

	s.remove(deferred)
	s.eventually("the deleted request is not pending", func() bool { return ctest.Metrics(s)[pending] == 0 })
}
