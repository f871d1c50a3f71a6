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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// checkVerdict fails if a verdict is inconsistent or approves a request that is not true.
func checkVerdict(t testing.TB, csr certificatesv1.CertificateSigningRequest, e csrpolicy.Evidence, v csrpolicy.Verdict) {
	t.Helper()

	require.NotEmpty(t, v.Reasons)
	assert.Equal(t, v.Decision, v.Reasons[0].Decision)

	for i, r := range v.Reasons {
		assert.True(t, r.Decision == csrpolicy.Ignored || slices.Contains(csrpolicy.Codes[r.Decision], r.Code), "%s %s", r.Decision, r.Code)
		assert.NotEmpty(t, r.Message)
		assert.LessOrEqual(t, len(r.Message), 1000)
		assert.True(t, i == 0 || r.Decision <= v.Reasons[i-1].Decision, "order of %+v", v.Reasons)
	}

	if v.Decision == csrpolicy.Approved {
		checkApproval(t, csr, e)
	}

	checkListed(t, csr, e, v)
	checkReported(t, csr, e, v)
}

// checkReported fails if a source that is not the API server has a request denied. Such a source can only make a name or
// an address one of the API server, which a control-plane machine must then own.
func checkReported(t testing.TB, csr certificatesv1.CertificateSigningRequest, e csrpolicy.Evidence, v csrpolicy.Verdict) {
	t.Helper()

	e.Cluster.Reported, e.Policy.PodCIDRs = nil, nil

	without := csrpolicy.Review(csrpolicy.Parse(&csr), e)

	for _, reason := range v.Reasons {
		if reason.Decision == csrpolicy.Denied && reason.Code != csrpolicy.CodeNotOwned {
			assert.Contains(t, without.Reasons, reason)
		}
	}
}

// checkListed fails if the names and addresses that the Node lists, which its kubelet writes, do more than turn Pending
// into Denied.
func checkListed(t testing.TB, csr certificatesv1.CertificateSigningRequest, e csrpolicy.Evidence, v csrpolicy.Verdict) {
	t.Helper()

	request, listed := csrpolicy.Parse(&csr), e.Listed

	e.Listed = nil

	without := csrpolicy.Review(request, e)
	if without.Decision != csrpolicy.Pending || v.Decision != csrpolicy.Denied {
		assert.Equal(t, without.Decision, v.Decision, "the Node lists %q", listed)
	}

	e.Listed = append(slices.Clone(request.Subjects), e.Machine.Nodename)
	all := csrpolicy.Review(request, e)
	assert.Equal(t, without.Decision, all.Decision, "the Node lists all requested names and addresses")
	assert.Len(t, all.Reasons, len(without.Reasons), "the Node lists all requested names and addresses")
}

// checkApproval parses the request as the signer does, with crypto/x509, and is independent of the policy.
func checkApproval(t testing.TB, csr certificatesv1.CertificateSigningRequest, e csrpolicy.Evidence) {
	t.Helper()

	block, rest := pem.Decode(csr.Spec.Request)
	require.NotNil(t, block)
	assert.Empty(t, bytes.TrimSpace(rest))

	request, err := x509.ParseCertificateRequest(block.Bytes)
	require.NoError(t, err)
	require.NoError(t, request.CheckSignature())

	user := "system:node:" + e.Machine.Nodename
	assert.Equal(t, user, csr.Spec.Username)
	assert.Equal(t, "CN="+user+",O=system:nodes", request.Subject.String())
	assert.Len(t, request.Subject.Names, 2)
	assert.Empty(t, request.EmailAddresses)
	assert.Empty(t, request.URIs)
	assert.Len(t, request.Extensions, 1)

	assert.Equal(t, certificatesv1.KubeletServingSignerName, csr.Spec.SignerName)
	assert.Empty(t, csr.Status)
	assert.Subset(t, []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth, certificatesv1.UsageKeyEncipherment}, csr.Spec.Usages)
	assert.Equal(t, csrpolicy.MachineCurrent, e.MachineState)
	assert.True(t, e.Cluster.Known)
	assert.Contains(t, []csrpolicy.NodeState{csrpolicy.NodeWorker, csrpolicy.NodeControlPlane}, e.Node)

	checkNames(t, e, request.DNSNames)
	checkAddresses(t, e, request.IPAddresses)
}

// grantableNames returns the names that may be granted to the machine.
func grantableNames(e csrpolicy.Evidence) []string {
	m := e.Machine
	own := append([]string{m.Nodename}, e.Policy.ExtraNames...)

	// Of the names in the corpus that Talos changes, only those in another case or with a trailing dot are DNS names.
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

func checkNames(t testing.TB, e csrpolicy.Evidence, names []string) {
	t.Helper()

	own := grantableNames(e)

	for _, name := range names {
		name = strings.ToLower(strings.TrimSuffix(name, "."))
		same := func(other string) bool { return strings.EqualFold(name, strings.TrimSuffix(other, ".")) }

		assert.True(t, slices.ContainsFunc(own, same), "approved %q, which is not the machine's", name)
		assert.Empty(t, e.Owners[name], "owners of %q, which was approved", name)
		assert.False(t, slices.ContainsFunc(clusterSubjects(e).APIServerNames, same) && e.Node != csrpolicy.NodeControlPlane, "approved %q of the API server", name)
		assert.False(t, strings.HasPrefix(name, "kubernetes.default"), "approved %q", name)

		for _, domain := range append([]string{"svc", "localhost", "kubernetes"}, e.Cluster.Domains...) {
			assert.False(t, strings.HasSuffix("."+name, "."+strings.TrimSuffix(domain, ".")), "approved %q, which belongs to the cluster", name)
		}
	}
}

// special are networks without addresses of a single machine (RFC 6890).
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("::/127"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

// clusterSubjects returns the cluster's names and addresses by all sources.
func clusterSubjects(e csrpolicy.Evidence) csrpolicy.ClusterSubjects {
	all := e.Cluster.Stated
	all.PodCIDRs = slices.Concat(all.PodCIDRs, e.Policy.PodCIDRs)

	for _, report := range e.Cluster.Reported {
		all.APIServerNames = slices.Concat(all.APIServerNames, report.APIServerNames)
		all.APIServerIPs = slices.Concat(all.APIServerIPs, report.APIServerIPs)
		all.ServiceCIDRs = slices.Concat(all.ServiceCIDRs, report.ServiceCIDRs)
		all.PodCIDRs = slices.Concat(all.PodCIDRs, report.PodCIDRs)
		all.VIPs = slices.Concat(all.VIPs, report.VIPs)
	}

	return all
}

func checkAddresses(t testing.TB, e csrpolicy.Evidence, ips []net.IP) {
	t.Helper()

	cluster := clusterSubjects(e)

	for _, raw := range ips {
		ip, _ := netip.AddrFromSlice(raw)
		ip = ip.Unmap()
		same := func(other netip.Addr) bool { return other.Unmap() == ip }
		contains := func(p netip.Prefix) bool { return p.Contains(ip) }
		has := e.Machine.HasAddress(ip)

		assert.True(t, has || slices.ContainsFunc(e.Policy.ExtraIPs, same), "approved %s, which is not the machine's", ip)
		assert.Empty(t, e.Owners[ip.String()], "owners of %s, which was approved", ip)
		assert.False(t, slices.ContainsFunc(slices.Concat(special, cluster.ServiceCIDRs, cluster.PodCIDRs, e.Machine.ExcludedSubnets), contains), "approved %s", ip)
		assert.False(t, excludedByUser(e.Machine, ip), "approved %s, which is excluded from node IPs", ip)
		assert.False(t, slices.ContainsFunc(cluster.VIPs, same), "approved %s, which is virtual or belongs to a service", ip)

		ofAPIServer := slices.ContainsFunc(cluster.APIServerIPs, same)
		assert.False(t, ofAPIServer && (!has || e.Node != csrpolicy.NodeControlPlane), "approved %s, which belongs to the API server", ip)
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
