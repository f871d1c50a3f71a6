package csrpolicy_test

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/certificate"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

// The template of k8s.io/kubernetes/pkg/kubelet/certificate, encoded by the code that the kubelet uses.
func TestReview_ApprovesRequestsEncodedByKubeletCode(t *testing.T) {
	template := &x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: "system:node:worker-1", Organization: []string{"system:nodes"}},
		DNSNames:    []string{"ec2-203-0-113-11.example.net", "ip-10-0-0-11.ec2.internal", "worker-1"},
		IPAddresses: []net.IP{net.ParseIP("10.0.0.11"), net.ParseIP("2001:db8::11"), net.ParseIP("203.0.113.11")},
	}

	for _, kind := range []string{"p256", "p384", "p521", "ed25519", "rsa-2048", "rsa-3072", "rsa-4096"} {
		t.Run(kind, func(t *testing.T) {
			s := asks("worker-1")
			s.csr.Spec.Request = must(certutil.MakeCSRFromTemplate(key(kind), template))
			s.csr.Spec.Usages = certificate.DefaultKubeletServingGetUsages(key(kind))
			requireApproved(t, s)
		})
	}

	t.Run("rsa-2048 with PSS", func(t *testing.T) {
		withPSS := *template
		withPSS.SignatureAlgorithm = x509.SHA256WithRSAPSS

		s := asks("worker-1")
		s.csr.Spec.Request = inPEM(must(x509.CreateCertificateRequest(rand.Reader, &withPSS, key("rsa-2048"))))
		requireApproved(t, s)
	})
}

func requireApproved(t *testing.T, s *scene) {
	t.Helper()
	s.lookUp()

	verdict := csrpolicy.Review(csrpolicy.Parse(&s.csr), s.evidence)
	checkVerdict(t, s.csr, s.evidence, verdict)

	if verdict.Decision != csrpolicy.Approve || len(verdict.Reasons) != 1 {
		t.Errorf("got %s%s", verdict.Decision, messages(verdict))
	}
}

func TestReview_DefersWithoutEvidence(t *testing.T) {
	s := asks("worker-1")
	s.review(t)

	for name, e := range map[string]csrpolicy.Evidence{
		"none":    {},
		"machine": {Machine: machineOf("worker-1"), MachineState: csrpolicy.MachineCurrent},
		"node":    {Machine: machineOf("worker-1"), Node: csrpolicy.NodeWorker},
		"cluster": {Machine: machineOf("worker-1"), Node: csrpolicy.NodeWorker, MachineState: csrpolicy.MachineCurrent},
	} {
		if v := csrpolicy.Review(csrpolicy.Parse(&s.csr), e); v.Decision != csrpolicy.Defer {
			t.Errorf("%s: got %s%s", name, v.Decision, messages(v))
		}
	}

	if v := csrpolicy.Review(csrpolicy.Parse(&certificatesv1.CertificateSigningRequest{}), s.evidence); v.Decision != csrpolicy.Ignore {
		t.Errorf("empty request: got %s%s", v.Decision, messages(v))
	}
}

func TestDecision_ZeroValueIsIgnore(t *testing.T) {
	var v csrpolicy.Verdict

	if v.Decision != csrpolicy.Ignore || v.Decision.String() != "Ignore" {
		t.Errorf("got %s", v.Decision)
	}
}

func TestNodename(t *testing.T) {
	for user, want := range map[string]string{
		"system:node:worker-1":         "worker-1",
		"system:node:a.b.example.org":  "a.b.example.org",
		"system:node:10.0.0.5":         "10.0.0.5",
		"system:node:":                 "",
		"system:node:Worker-1":         "",
		"system:node:worker-1.":        "",
		"system:node:worker_1":         "",
		"system:node:a/b":              "",
		"system:node:system:node:a":    "",
		"system:nodes:a":               "",
		"system:node":                  "",
		"worker-1":                     "",
		"":                             "",
		"xsystem:node:worker-1":        "",
		"system:node:w\u043erker-1":    "",
		"system:node:worker-1\x00":     "",
		"system:node:worker-1\nworker": "",
	} {
		csr := certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{Username: user}}

		if got, ok := csrpolicy.Nodename(&csr); got != want || ok != (want != "") {
			t.Errorf("%q: got %q, %t", user, got, ok)
		}
	}
}

func TestSubjects_CanonicalAndSorted(t *testing.T) {
	s := sceneOf(t, "no-sans dns=Worker-1. dns=a.B dns=worker-1 ip=2001:db8::11 ip=::ffff:10.0.0.11 ip=10.0.0.11")
	s.review(t)

	names, ips := csrpolicy.Parse(&s.csr).Subjects()
	if !slices.Equal(names, []string{"a.b", "worker-1"}) || !slices.Equal(ips, []netip.Addr{addr("10.0.0.11"), addr("2001:db8::11")}) {
		t.Errorf("got %v, %v", names, ips)
	}

	s = sceneOf(t, "key=rsa-1024") // with valid names and addresses
	s.review(t)

	if names, ips = csrpolicy.Parse(&s.csr).Subjects(); names != nil || ips != nil {
		t.Errorf("got %v, %v for an invalid request", names, ips)
	}
}

// The operator allows each name and the kubelet requests it: Review must deny exactly the names that CheckAllowedName
// refuses.
func TestCheckAllowedName_AgreesWithReview(t *testing.T) {
	for name, problem := range map[string]string{
		"storage.example.org":           "",
		"Storage.Example.ORG.":          "",
		"storage":                       "",
		"xn--bcher-kva.example":         "",
		"kubernetes.example.org":        "",
		"svc.example.org":               "",
		"kubernetes":                    "is reserved for the cluster",
		"Kubernetes.Default":            "is reserved for the cluster",
		"kubernetes.default.svc":        "is reserved for the cluster",
		"kubernetes.default.svc.":       "is reserved for the cluster",
		"kubernetes.default.example":    "is reserved for the cluster",
		"web.default.svc":               "is reserved for the cluster",
		"cluster.local":                 "is reserved for the cluster",
		"web.default.svc.cluster.local": "is reserved for the cluster",
		"localhost":                     "is reserved for the cluster",
		"localhost.localdomain":         "is reserved for the cluster",
		"a.localhost":                   "is reserved for the cluster",
		"*":                             "is a wildcard",
		"*.example.org":                 "is a wildcard",
		"st*.example.org":               "is a wildcard",
		"192.0.2.1":                     "can be parsed as an IP address",
		"example.1":                     "can be parsed as an IP address",
		"0x7f000001":                    "can be parsed as an IP address",
		"2130706433":                    "can be parsed as an IP address",
		"2001:db8::1":                   "is not a valid DNS name",
		"storage_1":                     "is not a valid DNS name",
		"-storage":                      "is not a valid DNS name",
		"storage..example.org":          "is not a valid DNS name",
		"storage.example.org..":         "is not a valid DNS name",
		"":                              "is not a valid DNS name",
		".":                             "is not a valid DNS name",
		strings.Repeat("a.", 127) + "a": "is not a valid DNS name",
	} {
		if err := csrpolicy.CheckAllowedName(name); (err == nil) != (problem == "") || (err != nil && err.Error() != problem) {
			t.Errorf("%q: got %v, want %q", name, err, problem)
		}

		s := asks("worker-1")
		s.evidence.Policy.ExtraNames = []string{name}
		s.pkcs10.addDNS(name)

		if v := s.review(t); (v.Decision == csrpolicy.Deny) != (problem != "") || !strings.Contains(v.Reasons[0].Message, problem) {
			t.Errorf("%q: got %s%s, want %q", name, v.Decision, messages(v), problem)
		}
	}
}

func TestCheckAllowedAddress_AgreesWithReview(t *testing.T) {
	const special = "is a loopback, link-local, multicast, unspecified or broadcast address"

	for ip, problem := range map[string]string{
		"198.51.100.7":        "",
		"::ffff:198.51.100.7": "",
		"2001:db8::7":         "",
		"fd00::7":             "",
		"127.0.0.1":           special,
		"::ffff:127.0.0.1":    special,
		"::1":                 special,
		"169.254.0.1":         special,
		"fe80::1":             special,
		"224.0.0.1":           special,
		"ff02::1":             special,
		"0.0.0.0":             special,
		"::":                  special,
		"255.255.255.255":     special,
	} {
		if err := csrpolicy.CheckAllowedAddress(addr(ip)); (err == nil) != (problem == "") || (err != nil && err.Error() != problem) {
			t.Errorf("%s: got %v, want %q", ip, err, problem)
		}

		s := asks("worker-1")
		s.evidence.Policy.ExtraIPs = []netip.Addr{addr(ip)}
		s.pkcs10.addIP(addr(ip))

		if v := s.review(t); (v.Decision == csrpolicy.Deny) != (problem != "") || !strings.Contains(v.Reasons[0].Message, problem) {
			t.Errorf("%s: got %s%s, want %q", ip, v.Decision, messages(v), problem)
		}
	}

	for _, ip := range []netip.Addr{{}, addr("2001:db8::7%eth0")} {
		if csrpolicy.CheckAllowedAddress(ip) == nil {
			t.Errorf("%s: got no error", ip)
		}
	}
}

func TestReview_MessagesNameSubjectsAndOwners(t *testing.T) {
	for changes, want := range map[string][]string{
		"listed=worker-1,10.0.0.11 dns=cp-1": {
			`DNS name "cp-1" belongs to the API server, and Node "worker-1" is a worker`,
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
	} {
		v := sceneOf(t, changes).review(t)

		var got []string
		for _, r := range v.Reasons {
			got = append(got, r.Message)
		}

		if !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", changes, got, want)
		}
	}
}

func TestReview_DefersWhatDeletedNodeOfSameNameOwns(t *testing.T) {
	s := sceneOf(t, "")
	s.owners["10.0.0.11"] = []string{"worker-1", "worker-2", "worker-3"}
	s.evidence.Reserved = map[string]time.Time{"worker-1": time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}

	want := `IP address 10.0.0.11 is owned by Node "worker-1", which was deleted, at least until 2026-01-02T03:04:05Z, and 2 other Nodes`
	if v := s.review(t); v.Decision != csrpolicy.Defer || len(v.Reasons) != 1 || v.Reasons[0].Message != want {
		t.Errorf("got %v", v)
	}
}

func TestReview_MessageSaysUntilWhenDeletedNodeOwns(t *testing.T) {
	until := time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 3600))

	s := sceneOf(t, "dns=worker-2 owner=worker-2")
	s.evidence.Reserved = map[string]time.Time{"elsewhere": until, "worker-2": until.Add(time.Hour)}

	want := `DNS name "worker-2" is owned by Node "elsewhere", which was deleted, at least until 2026-01-02T02:04:05Z, and 1 other Node`
	if v := s.review(t); !strings.Contains(messages(v), want) {
		t.Errorf("got %s, want %s", messages(v), want)
	}
}

// What too few control-plane machines report must not have requests denied, and must not be approved either.
func TestReview_DefersForUnconfirmedClusterIdentity(t *testing.T) {
	type list = csrpolicy.Unconfirmed

	for _, test := range []struct {
		name, requester string
		unconfirmed     list
		want            string
	}{
		{"pod CIDR of all addresses", "worker-1", list{CIDRs: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/1")}}, csrpolicy.CodeClusterUnconfirmed},
		{"virtual IP", "worker-1", list{IPs: []netip.Addr{addr("10.0.0.11")}}, csrpolicy.CodeClusterUnconfirmed},
		{"virtual IP of a control-plane machine", "cp-1", list{IPs: []netip.Addr{addr("10.0.0.1")}}, csrpolicy.CodeClusterUnconfirmed},
		{"name of the API server", "worker-1", list{Names: []string{"Worker-1."}}, csrpolicy.CodeClusterUnconfirmed},
		{"name of the API server on a control-plane machine", "cp-1", list{Names: []string{"cp-1"}}, csrpolicy.CodeVerified},
		{"another CIDR", "worker-1", list{CIDRs: []netip.Prefix{netip.MustParsePrefix("172.16.0.0/12")}}, csrpolicy.CodeVerified},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := asks(test.requester)
			cluster := &s.evidence.Cluster
			cluster.Unconfirmed = test.unconfirmed
			cluster.PodCIDRs = append(cluster.PodCIDRs, test.unconfirmed.CIDRs...)
			cluster.VIPs = append(cluster.VIPs, test.unconfirmed.IPs...)
			cluster.APIServerNames = append(cluster.APIServerNames, test.unconfirmed.Names...)

			verdict := s.review(t)
			checkVerdict(t, s.csr, s.evidence, verdict)

			if verdict.Decision == csrpolicy.Deny || verdict.Reasons[0].Code != test.want {
				t.Errorf("got %s%s, want %s", verdict.Decision, messages(verdict), test.want)
			}
		})
	}
}

// A confirmed CIDR has a request denied, whatever else is reported.
func TestReview_DeniesForConfirmedClusterIdentity(t *testing.T) {
	s := asks("worker-1")
	s.evidence.Cluster.Unconfirmed.CIDRs = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/1")}
	s.evidence.Cluster.PodCIDRs = append(s.evidence.Cluster.PodCIDRs, s.evidence.Cluster.Unconfirmed.CIDRs...)
	s.pkcs10.addIP(addr("10.244.3.3"))

	if verdict := s.review(t); verdict.Decision != csrpolicy.Deny || verdict.Reasons[0].Code != csrpolicy.CodeClusterAddress {
		t.Errorf("got %s%s", verdict.Decision, messages(verdict))
	}
}
