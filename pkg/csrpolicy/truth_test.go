package csrpolicy_test

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// checkVerdict fails if a verdict is inconsistent or approves a request that is not true.
func checkVerdict(t *testing.T, csr certificatesv1.CertificateSigningRequest, e csrpolicy.Evidence, v csrpolicy.Verdict) {
	t.Helper()

	if len(v.Reasons) == 0 || v.Reasons[0].Decision != v.Decision {
		t.Fatalf("%s for %+v", v.Decision, v.Reasons)
	}

	for i, r := range v.Reasons {
		if r.Code == "" || r.Message == "" || len(r.Message) > 1000 || (i > 0 && r.Decision > v.Reasons[i-1].Decision) {
			t.Errorf("reason %d of %d: %+v", i, len(v.Reasons), r)
		}
	}

	if v.Decision == csrpolicy.Approve {
		checkApproval(t, csr, e)
	}

	checkListed(t, csr, e, v)
}

// checkListed fails if the names and addresses that the Node lists, which its kubelet writes, do more than turn Defer
// into Deny.
func checkListed(t *testing.T, csr certificatesv1.CertificateSigningRequest, e csrpolicy.Evidence, v csrpolicy.Verdict) {
	t.Helper()

	unlisted := e
	unlisted.Listed = nil

	request := csrpolicy.Parse(&csr)

	without := csrpolicy.Review(request, unlisted)
	if without.Decision != v.Decision && (without.Decision != csrpolicy.Defer || v.Decision != csrpolicy.Deny) {
		t.Errorf("%s, but %s for a Node that lists %q", without.Decision, v.Decision, e.Listed)
	}

	names, ips := request.Subjects()
	for _, ip := range ips {
		names = append(names, ip.String())
	}

	e.Listed = slices.Concat(names, []string{e.Machine.Nodename})
	if all := csrpolicy.Review(request, e); all.Decision != without.Decision || len(all.Reasons) != len(without.Reasons) {
		t.Errorf("%s, but %s for a Node that lists all requested names and addresses", without.Decision, all.Decision)
	}
}

// checkApproval parses the request as the signer does, with crypto/x509, and is independent of the policy.
func checkApproval(t *testing.T, csr certificatesv1.CertificateSigningRequest, e csrpolicy.Evidence) {
	t.Helper()

	block, rest := pem.Decode(csr.Spec.Request)
	if block == nil || len(bytes.TrimSpace(rest)) > 0 {
		t.Fatalf("approved without a PEM block or with %d bytes after it", len(rest))
	}

	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		t.Fatalf("approved what the signer cannot parse: %v", err)
	}

	if err = request.CheckSignature(); err != nil {
		t.Errorf("approved: %v", err)
	}

	if user := "system:node:" + e.Machine.Nodename; csr.Spec.Username != user || request.Subject.String() != "CN="+user+",O=system:nodes" || len(request.Subject.Names) != 2 {
		t.Errorf("approved %q, %v for %q", csr.Spec.Username, request.Subject, user)
	}

	if len(request.EmailAddresses)+len(request.URIs) > 0 || len(request.Extensions) != 1 {
		t.Errorf("approved %v, %v, %v", request.EmailAddresses, request.URIs, request.Extensions)
	}

	checkTerms(t, csr, e)
	checkNames(t, e, request.DNSNames)
	checkAddresses(t, e, request.IPAddresses)
}

func checkTerms(t *testing.T, csr certificatesv1.CertificateSigningRequest, e csrpolicy.Evidence) {
	t.Helper()

	if csr.Spec.SignerName != certificatesv1.KubeletServingSignerName || len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0 {
		t.Errorf("approved for another signer or a decided request: %+v %+v", csr.Spec.SignerName, csr.Status)
	}

	for _, u := range csr.Spec.Usages {
		if u != certificatesv1.UsageDigitalSignature && u != certificatesv1.UsageServerAuth && u != certificatesv1.UsageKeyEncipherment {
			t.Errorf("approved for %q", u)
		}
	}

	if e.MachineState != csrpolicy.MachineCurrent || !e.Cluster.Known || (e.Node != csrpolicy.NodeWorker && e.Node != csrpolicy.NodeControlPlane) {
		t.Errorf("approved on evidence %+v", e)
	}
}

// grantableNames returns the names that may be granted to the machine.
func grantableNames(e csrpolicy.Evidence) []string {
	m := e.Machine
	own := append([]string{m.Nodename}, e.Policy.ExtraNames...)

	// The names of the corpus that Talos changes are no DNS names, except for their case and a trailing dot.
	hostname, fqdn := strings.TrimSuffix(m.Hostname, "."), m.Hostname+"."+m.Domainname
	if strings.EqualFold(hostname, m.Nodename) || strings.EqualFold(fqdn, m.Nodename) {
		own = append(own, hostname, hostname+"."+m.Domainname)
	}

	for _, name := range []string{m.Platform.InternalDNS, m.Platform.ExternalDNS, m.Platform.Hostname} {
		if strings.Count(strings.TrimSuffix(name, "."), ".") > 1 {
			own = append(own, name)
		}
	}

	return own
}

func checkNames(t *testing.T, e csrpolicy.Evidence, names []string) {
	t.Helper()

	own := grantableNames(e)

	for _, name := range names {
		name = strings.ToLower(strings.TrimSuffix(name, "."))
		same := func(other string) bool { return strings.EqualFold(name, strings.TrimSuffix(other, ".")) }

		if !slices.ContainsFunc(own, same) || len(e.Owners[name]) > 0 {
			t.Errorf("approved %q, which is not the machine's or also belongs to %v", name, e.Owners[name])
		}

		if slices.ContainsFunc(e.Cluster.APIServerNames, same) && e.Node != csrpolicy.NodeControlPlane {
			t.Errorf("approved %q, which belongs to the API server", name)
		}

		for _, domain := range append([]string{"svc", "localhost", "kubernetes"}, e.Cluster.Domains...) {
			if strings.HasSuffix("."+name, "."+strings.TrimSuffix(domain, ".")) || strings.HasPrefix(name, "kubernetes.default") {
				t.Errorf("approved %q, which belongs to the cluster", name)
			}
		}
	}
}

// special are networks without addresses of a single machine (RFC 6890).
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("::/127"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

func checkAddresses(t *testing.T, e csrpolicy.Evidence, ips []net.IP) {
	t.Helper()

	for _, raw := range ips {
		ip, _ := netip.AddrFromSlice(raw)
		ip = ip.Unmap()
		same := func(other netip.Addr) bool { return other.Unmap() == ip }
		contains := func(p netip.Prefix) bool { return p.Contains(ip) }
		has := e.Machine.HasAddress(ip)

		if (!has && !slices.ContainsFunc(e.Policy.ExtraIPs, same)) || len(e.Owners[ip.String()]) > 0 {
			t.Errorf("approved %s, which is not the machine's or also belongs to %v", ip, e.Owners[ip.String()])
		}

		if slices.ContainsFunc(slices.Concat(special, e.Cluster.ServiceCIDRs, e.Cluster.PodCIDRs, e.Machine.ExcludedSubnets), contains) || excludedByUser(e.Machine, ip) {
			t.Errorf("approved %s, which is in a network without addresses of a machine", ip)
		}

		if slices.ContainsFunc(slices.Concat(e.Cluster.VIPs, e.Cluster.ServiceIPs), same) {
			t.Errorf("approved %s, which is virtual or belongs to a service", ip)
		}

		if slices.ContainsFunc(e.Cluster.APIServerIPs, same) && (!has || e.Node != csrpolicy.NodeControlPlane) {
			t.Errorf("approved %s, which belongs to the API server", ip)
		}
	}
}

// excludedByUser reports whether the last of the valid subnets that contains the address is an inverted match.
func excludedByUser(m machine.Machine, ip netip.Addr) bool {
	for _, s := range slices.Backward(m.ValidSubnets) {
		if s.Prefix.Contains(ip) {
			return s.Inverted
		}
	}

	return false
}
