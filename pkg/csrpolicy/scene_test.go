package csrpolicy_test

import (
	"encoding/asn1"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// now is the time of all reviews.
var now = time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)

func addr(ip string) netip.Addr { return netip.MustParseAddr(ip) }

func onLink(link, prefix string) machine.Address {
	return machine.Address{Prefix: netip.MustParsePrefix(prefix), Link: link}
}

// machineOf returns a machine of the cluster: cp-1 to cp-3 have 10.0.0.1 to 10.0.0.3, worker-1 and worker-2 have
// 10.0.0.11 and 10.0.0.12, and the same host number in their other networks.
func machineOf(name string) machine.Machine {
	role, number, _ := strings.Cut(name, "-")

	typ := talosmachine.TypeControlPlane
	if role == "worker" {
		typ, number = talosmachine.TypeWorker, "1"+number
	}

	return machine.Machine{
		Nodename: name, Hostname: name, Domainname: "example.org", ClusterName: "prod", Type: typ,
		Platform: runtime.PlatformMetadataSpec{
			Platform: "aws", Hostname: "ip-10-0-0-" + number + ".ec2.internal", InternalDNS: "ip-10-0-0-" + number + ".ec2.internal", ExternalDNS: "ec2-203-0-113-" + number + ".example.net",
		},
		Addresses: []machine.Address{
			onLink("cni0", "10.244."+number+".1/24"),
			onLink("eth0", "10.0.0."+number+"/24"),
			onLink("eth0", "2001:db8::"+number+"/64"),
			onLink("eth0", "fe80::"+number+"/64"),
			onLink("external", "203.0.113."+number+"/32"),
			onLink("kube-ipvs0", "10.96.0.1/32"),
			onLink("lo", "127.0.0.1/8"),
			onLink("lo", "169.254.116.108/32"),
		},
		NodeIPs: []netip.Addr{addr("10.0.0." + number), addr("2001:db8::" + number)},
		ExcludedSubnets: []netip.Prefix{
			netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("10.0.0.100/32"),
		},
	}
}

// clusterIdentity returns the identity from the API server, and from cp-1.
func clusterIdentity() csrpolicy.ClusterIdentity {
	return csrpolicy.ClusterIdentity{
		Known:   true,
		Domains: []string{"cluster.local"},
		Stated: csrpolicy.ClusterSubjects{
			APIServerNames: []string{
				"api.example.org", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost",
				"cp-1", "cp-1.example.org", "cp-2", "cp-2.example.org", "cp-3", "cp-3.example.org",
			},
			APIServerIPs: []netip.Addr{
				addr("10.96.0.1"), addr("127.0.0.1"), addr("10.0.0.100"), addr("192.0.2.1"),
				addr("10.0.0.1"), addr("2001:db8::1"), addr("203.0.113.1"), addr("10.0.0.2"), addr("2001:db8::2"), addr("203.0.113.2"), addr("10.0.0.3"),
			},
			VIPs:         []netip.Addr{addr("10.96.0.1"), addr("fd00:96::1")},
			ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:96::/112")},
		},
		Reported: []csrpolicy.Report{{Source: `machine "cp-1"`, ClusterSubjects: csrpolicy.ClusterSubjects{
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/56")},
			VIPs:     []netip.Addr{addr("10.0.0.100")},
		}}},
	}
}

// scene is a request before it is encoded, and the evidence for its review.
type scene struct {
	csr      certificatesv1.CertificateSigningRequest
	pkcs10   pkcs10
	evidence csrpolicy.Evidence
	// owners are owners in addition to the other machines.
	owners map[string][]string
	// reserved are the ends of the reservations of deleted Nodes.
	reserved map[string]time.Time
}

// asks returns the request of a machine's kubelet once the node controller has listed the Node's addresses.
func asks(name string) *scene {
	m := machineOf(name)

	state := csrpolicy.NodeWorker
	if m.Type.IsControlPlane() {
		state = csrpolicy.NodeControlPlane
	}

	s := &scene{
		csr: certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{Name: "csr-" + name, CreationTimestamp: metav1.NewTime(now.Add(-time.Second))},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				SignerName: certificatesv1.KubeletServingSignerName,
				Username:   "system:node:" + name,
				Groups:     []string{"system:nodes", "system:authenticated"},
				Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
				Extra:      map[string]certificatesv1.ExtraValue{"authentication.kubernetes.io/credential-id": {"X509SHA256=0"}},
			},
		},
		pkcs10: pkcs10{
			subject: []rdn{{{asn1.ObjectIdentifier{2, 5, 4, 10}, tagPrintable, "system:nodes"}}, {{asn1.ObjectIdentifier{2, 5, 4, 3}, tagPrintable, "system:node:" + name}}},
			key:     "p256",
		},
		evidence: csrpolicy.Evidence{
			Node: state, MachineState: csrpolicy.MachineCurrent, Machine: m, Cluster: clusterIdentity(), Now: now,
		},
		owners: map[string][]string{}, reserved: map[string]time.Time{},
	}

	for _, dns := range []string{m.Platform.ExternalDNS, m.Platform.InternalDNS, name} {
		s.pkcs10.addDNS(dns)
	}

	for _, ip := range append(slices.Clone(m.NodeIPs), m.Addresses[4].Prefix.Addr()) {
		s.pkcs10.addIP(ip)
	}

	return s
}

// review encodes the request and returns the verdict on it.
func (s *scene) review(t testing.TB) csrpolicy.Verdict {
	t.Helper()

	s.csr.Spec.Request = s.pkcs10.encode()

	return s.verdict(t)
}

// verdict looks up the owners of the request's names and addresses as the controller does, and reviews it. It fails if
// the verdict is inconsistent or approves a request that is not true.
func (s *scene) verdict(t testing.TB) csrpolicy.Verdict {
	t.Helper()

	s.evidence.Owners = map[string]map[string]time.Time{}
	request := csrpolicy.Parse(&s.csr)
	self, _ := csrpolicy.Nodename(&s.csr)

	for _, subject := range slices.AppendSeq(slices.Clone(request.Subjects), maps.Keys(s.owners)) {
		for _, owner := range slices.Concat(s.owners[subject], others().Claims.ReportedBy(subject, self)) {
			if s.evidence.Owners[subject] == nil {
				s.evidence.Owners[subject] = map[string]time.Time{}
			}

			s.evidence.Owners[subject][owner] = s.reserved[owner]
		}
	}

	verdict := csrpolicy.Review(request, s.evidence)
	checkVerdict(t, s.csr, s.evidence, verdict)

	return verdict
}

var others = sync.OnceValue(func() *inventory.Inventory {
	i := inventory.New(func() time.Time { return now })
	for _, name := range []string{"cp-1", "cp-2", "cp-3", "worker-1", "worker-2"} {
		i.Replace(name, machineOf(name))
	}

	return i
})

// codes returns the codes of the reasons in order.
func codes(v csrpolicy.Verdict) string {
	var list []string
	for _, r := range v.Reasons {
		list = append(list, r.Code)
	}

	return strings.Join(list, ",")
}
