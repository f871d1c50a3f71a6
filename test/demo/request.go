package main

import (
	"crypto/x509"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
)

// request is what is known of one request for a serving certificate. The zero value has not been made.
type request struct {
	name string
	// subjects are the names and addresses asked for, sorted.
	subjects []string
	// asked is just before it was made; approved and issued are when it was first seen so.
	asked, approved, issued time.Time
	denied                  bool
	// said is the last that talos-ccm said of it.
	said string
	// wrong is what is wrong with the certificate; nil: nothing, or there is none yet.
	wrong error
}

// see notes what has become of the request of a Node's kubelet.
func (r *request) see(csr *certificatesv1.CertificateSigningRequest, nodename string, authority *x509.CertPool) {
	now := time.Now()

	has := func(kind certificatesv1.RequestConditionType) bool {
		return slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
			return c.Type == kind && c.Status == corev1.ConditionTrue
		})
	}

	if r.approved.IsZero() && has(certificatesv1.CertificateApproved) {
		r.approved = now
	}

	r.denied = has(certificatesv1.CertificateDenied)

	if r.issued.IsZero() && len(csr.Status.Certificate) > 0 {
		r.issued = now
		r.wrong = checkCertificate(csr.Status.Certificate, authority, nodename, r.subjects)
	}
}

// state is how far the request has come.
func (r request) state() string {
	switch {
	case !r.issued.IsZero():
		return "issued"
	case r.denied:
		return "denied"
	case !r.approved.IsZero():
		return "approved"
	case !r.asked.IsZero():
		return "pending"
	default:
		return "not requested"
	}
}
