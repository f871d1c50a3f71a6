package csrpolicy_test

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cryptobyteasn1 "golang.org/x/crypto/cryptobyte/asn1"
	certificatesv1 "k8s.io/api/certificates/v1"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/certificate"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

// The template of k8s.io/kubernetes/pkg/kubelet/certificate, encoded by the code that the kubelet uses.
func TestReview_ApprovesRequestsEncodedByKubeletCode(t *testing.T) {
	template := x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: "system:node:worker-1", Organization: []string{"system:nodes"}},
		DNSNames:    []string{"ec2-203-0-113-11.example.net", "ip-10-0-0-11.ec2.internal", "worker-1"},
		IPAddresses: []net.IP{net.ParseIP("10.0.0.11"), net.ParseIP("2001:db8::11"), net.ParseIP("203.0.113.11")},
	}
	withPSS := template
	withPSS.SignatureAlgorithm = x509.SHA256WithRSAPSS

	requests := map[string][]byte{"rsa-2048 with PSS": inPEM(must(x509.CreateCertificateRequest(rand.Reader, &withPSS, key("rsa-2048"))))}
	for _, kind := range []string{"p256", "p384", "p521", "ed25519", "rsa-2048", "rsa-3072", "rsa-4096"} {
		requests[kind] = must(certutil.MakeCSRFromTemplate(key(kind), &template))
	}

	for kind, request := range requests {
		s := asks("worker-1")
		s.csr.Spec.Request = request

		if !strings.HasSuffix(kind, "PSS") {
			s.csr.Spec.Usages = certificate.DefaultKubeletServingGetUsages(key(kind))
		}

		verdict := s.verdict(t)
		assert.Equal(t, csrpolicy.Approved, verdict.Decision, kind)
		assert.Equal(t, csrpolicy.CodeVerified, codes(verdict), kind)
	}
}

func TestReview_KeepsRequestPendingWithoutEvidence(t *testing.T) {
	s := asks("worker-1")
	s.review(t)

	for name, e := range map[string]csrpolicy.Evidence{
		"none":    {},
		"machine": {Machine: machineOf("worker-1"), MachineState: csrpolicy.MachineCurrent},
		"node":    {Machine: machineOf("worker-1"), Node: csrpolicy.NodeWorker},
		"cluster": {Machine: machineOf("worker-1"), Node: csrpolicy.NodeWorker, MachineState: csrpolicy.MachineCurrent},
	} {
		assert.Equal(t, csrpolicy.Pending, csrpolicy.Review(csrpolicy.Parse(&s.csr), e).Decision, name)
	}
}

func TestReview_IgnoresEmptyRequest(t *testing.T) {
	verdict := csrpolicy.Review(csrpolicy.Parse(&certificatesv1.CertificateSigningRequest{}), asks("worker-1").evidence)
	assert.Equal(t, csrpolicy.Ignored, verdict.Decision)
	assert.Equal(t, csrpolicy.Verdict{}.Decision, verdict.Decision, "the zero value")
}

func TestNodename(t *testing.T) {
	for isKubelet, users := range map[bool][]string{
		true: {
			"system:node:worker-1", "system:node:a.b.example.org", "system:node:10.0.0.5",
		},
		false: {
			"system:node:", "system:node:Worker-1", "system:node:worker-1.", "system:node:worker_1", "system:node:a/b", "system:node:system:node:a",
			"system:nodes:a", "system:node", "worker-1", "", "xsystem:node:worker-1", "system:node:w\u043erker-1", "system:node:worker-1\x00",
			"system:node:worker-1\nworker",
		},
	} {
		for _, user := range users {
			got, ok := csrpolicy.Nodename(&certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{Username: user}})
			assert.Equal(t, isKubelet, ok, user)

			if isKubelet {
				assert.Equal(t, user, "system:node:"+got)
			} else {
				assert.Empty(t, got, user)
			}
		}
	}
}

func TestSubjects_CanonicalAndSorted(t *testing.T) {
	for changes, want := range map[string][]string{
		"no-sans dns=Worker-1. dns=a.B dns=worker-1 ip=2001:db8::11 ip=::ffff:10.0.0.11 ip=10.0.0.11": {"a.b", "worker-1", "10.0.0.11", "2001:db8::11"},
		"key=rsa-1024": nil, // invalid, with valid names and addresses
	} {
		s := sceneOf(t, changes)
		s.review(t)
		assert.Equal(t, want, csrpolicy.Parse(&s.csr).Subjects, changes)
	}
}

// The operator allows each name and the kubelet requests it: Review must deny exactly the names that CheckAllowedName
// refuses.
func TestCheckAllowedName_AgreesWithReview(t *testing.T) {
	for problem, names := range map[string][]string{
		"": {
			"storage.example.org", "Storage.Example.ORG.", "storage", "xn--bcher-kva.example", "kubernetes.example.org", "svc.example.org",
		},
		"is reserved for the cluster": {
			"kubernetes", "Kubernetes.Default", "kubernetes.default.svc", "kubernetes.default.svc.", "kubernetes.default.example", "web.default.svc",
			"cluster.local", "web.default.svc.cluster.local", "localhost", "localhost.localdomain", "a.localhost",
		},
		"is a wildcard": {
			"*", "*.example.org", "st*.example.org",
		},
		"can be parsed as an IP address": {
			"192.0.2.1", "example.1", "0x7f000001", "2130706433",
		},
		"is not a valid DNS name": {
			"2001:db8::1", "storage_1", "-storage", "storage..example.org", "storage.example.org..", "", ".", strings.Repeat("a.", 127) + "a",
		},
	} {
		for _, name := range names {
			s := asks("worker-1")
			s.evidence.Policy.ExtraNames = []string{name}
			s.pkcs10.addDNS(name)
			s.checkAllowed(t, csrpolicy.CheckAllowedName(name), problem)
		}
	}
}

func TestCheckAllowedAddress_AgreesWithReview(t *testing.T) {
	for problem, addresses := range map[string][]string{
		"": {"198.51.100.7", "::ffff:198.51.100.7", "2001:db8::7", "fd00::7"},
		"is a loopback, link-local, multicast, unspecified or broadcast address": {
			"127.0.0.1", "::ffff:127.0.0.1", "::1", "169.254.0.1", "fe80::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "255.255.255.255",
		},
	} {
		for _, ip := range addresses {
			s := asks("worker-1")
			s.evidence.Policy.ExtraIPs = []netip.Addr{addr(ip)}
			s.pkcs10.addIP(addr(ip))
			s.checkAllowed(t, csrpolicy.CheckAllowedAddress(addr(ip)), problem)
		}
	}

	require.Error(t, csrpolicy.CheckAllowedAddress(netip.Addr{}))
	require.Error(t, csrpolicy.CheckAllowedAddress(addr("2001:db8::7%eth0")))
}

// checkAllowed fails unless both err and the review of an allowed name or address have the problem; empty means none.
func (s *scene) checkAllowed(t *testing.T, err error, problem string) {
	t.Helper()

	verdict := s.review(t)
	assert.Equal(t, problem != "", verdict.Decision == csrpolicy.Denied, "%q: %+v", problem, verdict)
	assert.Contains(t, verdict.Reasons[0].Message, problem)

	if problem == "" {
		require.NoError(t, err)
	} else {
		require.EqualError(t, err, problem, "%+v", verdict)
	}
}

// Errors of encoding/asn1 contain addresses in memory.
func TestReview_MessagesOfMalformedRequestsAreConstant(t *testing.T) {
	algorithm := tlv(sequence, marshal(oidSubjectAltName))
	publicKey := tlv(sequence, algorithm, marshal(asn1.BitString{Bytes: []byte{1}, BitLength: 8}))
	info := tlv(sequence, marshal(0), tlv(sequence), publicKey, tlv(cryptobyteasn1.Tag(0xa1)))

	s := asks("worker-1")
	s.csr.Spec.Request = inPEM(tlv(sequence, info, algorithm, marshal(asn1.BitString{})))

	verdict := csrpolicy.Review(csrpolicy.Parse(&s.csr), s.evidence)
	require.Len(t, verdict.Reasons, 1)
	assert.Equal(t, "Request is malformed: not the DER encoding of PKCS#10", verdict.Reasons[0].Message)
}

func TestReview_MessagesNameSubjectsAndOwners(t *testing.T) {
	for changes, want := range map[string][]string{
		"listed=worker-1,10.0.0.11 dns=cp-1": {
			`DNS name "cp-1" belongs to the API server, and Node "worker-1" is a worker`,
		},
		"ip=10.244.3.7 pool=10.9.0.0/16 ip=10.9.0.1 vip=192.0.2.9 ip=192.0.2.9": {
			"IP address 10.9.0.1 is in 10.9.0.0/16, a CIDR of pods or Services or a virtual IP according to the configuration of talos-ccm",
			`IP address 10.244.3.7 is in 10.244.0.0/16, a CIDR of pods or Services or a virtual IP according to machine "cp-1"`,
			`IP address 192.0.2.9 is in 192.0.2.9/32, a CIDR of pods or Services or a virtual IP according to machine "cp-1"`,
		},
		"has=192.0.2.1/24@eth1 ip=192.0.2.1": {
			"IP address 192.0.2.1 is in the API server's certificate; remove it from cluster.apiServer.certSANs " +
				"(Talos 1.14: certExtraSANs of KubeAPIServerConfig), or reboot the control-plane machine that had it before",
		},
		"node=unknown":  {`Node "worker-1" does not exist yet`},
		"node=deleting": {`Node "worker-1" is being deleted`},
		"reported-dns=lb.example.org dns=lb.example.org": {
			`DNS name "lb.example.org" belongs to the API server according to machine "cp-1", and Node "worker-1" is a worker`,
		},
		"listed=worker-1,10.0.0.11 dns=worker-2": {
			`DNS name "worker-2" is not reported by the machine, and its Node does not list it`,
			`DNS name "worker-2" is owned by Node "worker-2"`,
		},
		"listed=worker-1,10.0.0.11 ip=10.0.0.12": {
			"IP address 10.0.0.12 is not reported by the machine, and its Node does not list it",
			`IP address 10.0.0.12 is owned by Node "worker-2"`,
		},
		"dns=worker-2 owner=worker-2": {
			`DNS name "worker-2" is not reported by the machine`,
			`DNS name "worker-2" is owned by Node "elsewhere" and 1 other Node`,
		},
		"dns=worker-2 owner=worker-2 reserved=elsewhere@2026-01-02T03:04:05+01:00 reserved=worker-2@2026-01-02T04:04:05+01:00": {
			`DNS name "worker-2" is not reported by the machine`,
			`DNS name "worker-2" is owned by Node "elsewhere", which was deleted, at least until 2026-01-02T02:04:05Z, and 1 other Node`,
		},
		// A deleted Node of the same name.
		"owner=10.0.0.11@worker-1,worker-2,worker-3 reserved=worker-1@2026-01-02T03:04:05Z": {
			`IP address 10.0.0.11 is owned by Node "worker-1", which was deleted, at least until 2026-01-02T03:04:05Z, and 2 other Nodes`,
		},
	} {
		var got []string
		for _, r := range sceneOf(t, changes).review(t).Reasons {
			got = append(got, r.Message)
		}

		assert.Equal(t, want, got, changes)
	}
}

// The kubelet requests the address when the Node lists it. A denial would be wrong if it comes before, or if another Node has
// the address.
func TestReview_KeepsRequestForAddressOfRulePending(t *testing.T) {
	const ip = "198.51.100.7"

	for name, test := range map[string]struct {
		change func(e *csrpolicy.Evidence)
		want   csrpolicy.Decision
	}{
		"the Node does not have it": {func(e *csrpolicy.Evidence) { e.Policy.PendingIPs = []netip.Addr{addr(ip)} }, csrpolicy.Pending},
		"another Node has it": {func(e *csrpolicy.Evidence) {
			e.Policy.PendingIPs = []netip.Addr{addr(ip)}
			e.Owners = map[string]map[string]time.Time{ip: {"worker-2": {}}}
		}, csrpolicy.Pending},
		"no rule sets it": {func(*csrpolicy.Evidence) {}, csrpolicy.Denied},
		"the Node has it": {func(e *csrpolicy.Evidence) { e.Policy.ExtraIPs = []netip.Addr{addr(ip)} }, csrpolicy.Approved},
		"it is of Service": {func(e *csrpolicy.Evidence) {
			e.Policy.PendingIPs = []netip.Addr{addr(ip)}
			e.Cluster.Stated.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix(ip + "/32")}
		}, csrpolicy.Denied},
	} {
		s := asks("worker-1")
		s.evidence.Listed = []string{"worker-1"}
		s.pkcs10.addIP(addr(ip))
		test.change(&s.evidence)
		assert.Equal(t, test.want, s.review(t).Decision, name)
	}
}

// No rule gives a Node such an address, whichever source knows it.
func TestClusterIdentity_SourceOfAddresses(t *testing.T) {
	podCIDRs := []netip.Prefix{netip.MustParsePrefix("10.250.0.0/16")}

	for ip, want := range map[string]string{
		"192.0.2.1":    "the API server",
		"10.0.0.2":     "the API server",
		"10.96.7.7":    "the API server",
		"fd00:96::7":   "the API server",
		"10.0.0.100":   "the API server",
		"10.244.3.3":   `machine "cp-1"`,
		"10.250.3.3":   "the configuration of talos-ccm",
		"10.0.0.12":    "",
		"198.51.100.5": "",
	} {
		assert.Equal(t, want, clusterIdentity().SourceOf(addr(ip), podCIDRs), ip)
	}
}
