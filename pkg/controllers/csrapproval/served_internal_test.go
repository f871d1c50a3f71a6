package csrapproval

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

// approvedRequest returns an issued request that talos-ccm approved a second after its creation.
func approvedRequest(name string, created time.Time) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(created)},
		Spec:       certificatesv1.CertificateSigningRequestSpec{Username: "system:node:worker-1"},
		Status: certificatesv1.CertificateSigningRequestStatus{
			Certificate: []byte("issued"),
			Conditions: []certificatesv1.CertificateSigningRequestCondition{{
				Type: certificatesv1.CertificateApproved, Reason: csrpolicy.CodeVerified, LastUpdateTime: metav1.NewTime(created.Add(time.Second)),
			}},
		},
	}
}

func TestDueChecks(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	checks := map[types.UID]*servedCheck{}

	at := func(now time.Time, requests ...*certificatesv1.CertificateSigningRequest) (due []string) {
		var approved []any
		for _, request := range requests {
			approved = append(approved, request)
		}

		next := map[types.UID]*servedCheck{}
		for _, check := range dueChecks(approved, checks, next, now) {
			due = append(due, check.csr.Name)
		}

		checks = next

		return due
	}

	want := func(what string, got []string, wanted ...string) {
		t.Helper()
		assert.Equal(t, wanted, got, what)
	}

	old := approvedRequest("old", now.Add(-servedWithin-time.Second))
	want("approved before the time of a new leader", at(now, old))

	first := approvedRequest("first", now)
	want("new", at(now, old, first), "first")
	want("until it ends", at(now.Add(2*servedWithin), first), "first")

	second, sameTime := approvedRequest("second", now.Add(time.Second)), approvedRequest("same", now.Add(time.Second))
	want("replaced", at(now.Add(time.Minute), first, second, sameTime), "second", "same")
	want("replacement deleted", at(now.Add(time.Minute), first))

	late := approvedRequest("late", now.Add(time.Minute))
	late.Status.Certificate = nil
	want("not issued", at(now.Add(time.Minute), late))
	want("not issued for long", at(now.Add(time.Hour), late))

	late.Status.Certificate = []byte("issued")
	want("issued late", at(now.Add(time.Hour+time.Second), late), "late")
	assert.Equal(t, now.Add(time.Hour+servedWithin), checks["late"].until)
}

func TestApprovedFor_IgnoresOtherApprovers(t *testing.T) {
	request := approvedRequest("csr", time.Now())
	nodenames, _ := approvedFor(request)
	assert.Equal(t, []string{"worker-1"}, nodenames)

	request.Status.Conditions[0].Reason = "KubectlApprove" // by an administrator
	nodenames, _ = approvedFor(request)
	assert.Empty(t, nodenames)
}
