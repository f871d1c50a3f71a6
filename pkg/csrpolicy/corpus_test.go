package csrpolicy_test

import (
	_ "embed"
	"encoding/asn1"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cryptobyteasn1 "golang.org/x/crypto/cryptobyte/asn1"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

//go:embed testdata/hostile.txt
var hostile string

//go:embed testdata/genuine.txt
var genuine string

// row is one line of the corpus: changes to a genuine request, and the expected verdict.
type row struct {
	line                          int
	changes, decision, codes, why string
}

func rows(t testing.TB, table string) []row {
	t.Helper()

	var list []row

	for i, line := range strings.Split(table, "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}

		columns := strings.Split(line, " | ")
		require.Lenf(t, columns, 4, "line %d", i+1)

		for c := range columns {
			columns[c] = strings.TrimSpace(columns[c])
		}

		list = append(list, row{i + 1, columns[0], columns[1], columns[2], columns[3]})
	}

	return list
}

func TestReview_ApprovesGenuineRequests(t *testing.T) { checkCorpus(t, genuine, true) }

func TestReview_ApprovesNoHostileRequest(t *testing.T) {
	checkCorpus(t, hostile, false)
	assert.GreaterOrEqual(t, len(rows(t, hostile)), 200)
}

func checkCorpus(t *testing.T, table string, approves bool) {
	t.Helper()

	seen := map[string]int{}

	for _, r := range rows(t, table) {
		t.Run(r.changes, func(t *testing.T) {
			verdict := sceneOf(t, r.changes).review(t)
			assert.Equal(t, r.decision+" "+r.codes, verdict.Decision.String()+" "+codes(verdict), "line %d: %+v", r.line, verdict.Reasons)
			assert.Equal(t, approves, r.decision == csrpolicy.Approved.String(), "line %d belongs to the other file", r.line)
			assert.NotEmpty(t, r.why, "line %d has no explanation", r.line)
			assert.Zero(t, seen[r.changes], "line %d repeats another", r.line)

			seen[r.changes] = r.line
		})
	}
}

// sceneOf parses a list of changes, such as `as=cp-1 no-sans dns="KUBERNETES.default"`. Quoted values have Go syntax.
func sceneOf(t testing.TB, changes string) *scene {
	t.Helper()

	s := asks("worker-1")

	for rest := strings.TrimSpace(changes); rest != ""; rest = strings.TrimSpace(rest) {
		var value string

		end := strings.IndexAny(rest, " =")
		if end < 0 {
			end = len(rest)
		}

		name := rest[:end]
		rest = rest[end:]

		if after, ok := strings.CutPrefix(rest, "="); ok {
			value, rest = cutValue(after)
		}

		require.Contains(t, changesByName, name)
		changesByName[name](s, value)
	}

	return s
}

func cutValue(text string) (value, rest string) {
	quoted, err := strconv.QuotedPrefix(text)
	if err != nil {
		value, rest, _ = strings.Cut(text, " ")

		return value, rest
	}

	return must(strconv.Unquote(quoted)), text[len(quoted):]
}

// changesByName are the changes to requests and evidence that the corpus refers to.
var changesByName = map[string]func(s *scene, v string){
	"as": func(s *scene, v string) { *s = *asks(v) },

	// Object.
	"user":      func(s *scene, v string) { s.csr.Spec.Username = v },
	"groups":    func(s *scene, v string) { s.csr.Spec.Groups = list(v) },
	"signer":    func(s *scene, v string) { s.csr.Spec.SignerName = v },
	"usages":    (*scene).setUsages,
	"expires":   func(s *scene, v string) { s.csr.Spec.ExpirationSeconds = new(int32(number(v))) },
	"condition": (*scene).setCondition,
	"issued":    func(s *scene, _ string) { s.csr.Status.Certificate = []byte("a certificate") },
	"age":       func(s *scene, v string) { s.csr.CreationTimestamp = metav1.NewTime(now.Add(-duration(v))) },

	// Subject.
	"cn": func(s *scene, v string) { s.pkcs10.eachOf("2.5.4.3", func(p *pair) { p.value = v }) },
	"cn-type": func(s *scene, v string) {
		s.pkcs10.eachOf("2.5.4.3", func(p *pair) { p.tag = cryptobyteasn1.Tag(number(v)) })
	},
	"org":        func(s *scene, v string) { s.pkcs10.eachOf("2.5.4.10", func(p *pair) { p.value = v }) },
	"no-subject": func(s *scene, _ string) { s.pkcs10.subject = nil },
	"no-cn":      func(s *scene, _ string) { s.pkcs10.drop("2.5.4.3") },
	"no-org":     func(s *scene, _ string) { s.pkcs10.drop("2.5.4.10") },
	"cn-first":   func(s *scene, _ string) { slices.Reverse(s.pkcs10.subject) },
	"one-rdn":    func(s *scene, _ string) { s.pkcs10.subject = []rdn{slices.Concat(s.pkcs10.subject...)} },
	"rdn":        func(s *scene, v string) { add(&s.pkcs10.subject, rdn{attribute(v)}) },
	"rdn-before": func(s *scene, v string) { s.pkcs10.subject = append([]rdn{{attribute(v)}}, s.pkcs10.subject...) },
	"in-org-rdn": func(s *scene, v string) { s.pkcs10.join("2.5.4.10", attribute(v)) },

	// SANs.
	"no-sans":      func(s *scene, _ string) { s.pkcs10.sans = nil },
	"dns":          func(s *scene, v string) { s.pkcs10.addDNS(v) },
	"ip":           func(s *scene, v string) { s.pkcs10.addIP(addr(v)) },
	"ip-bytes":     func(s *scene, v string) { add(&s.pkcs10.sans, general{tagIP, unhex(v)}) },
	"general-name": func(s *scene, v string) { add(&s.pkcs10.sans, generalName(v)) },
	"names":        func(s *scene, v string) { s.addNames(number(v)) },
	"repeat":       func(s *scene, v string) { s.repeatNames(number(v)) },
	"routed":       func(s *scene, v string) { s.addRouted(number(v)) },
	"long-name":    func(s *scene, v string) { s.pkcs10.addDNS(strings.Repeat("a.", number(v)/2) + "b") },
	"long-label":   func(s *scene, v string) { s.pkcs10.addDNS(strings.Repeat("a", number(v))) },

	// Key, extensions and encoding.
	"key":       func(s *scene, v string) { s.pkcs10.key = v },
	"flaw":      func(s *scene, v string) { add(&s.pkcs10.flaws, v) },
	"extension": func(s *scene, v string) { add(&s.pkcs10.extensions, oid(v)) },
	"attribute": func(s *scene, v string) { add(&s.pkcs10.attributes, oid(v)) },

	// Evidence.
	"node":          func(s *scene, v string) { s.evidence.Node = nodeStates[v] },
	"machine-state": func(s *scene, v string) { s.evidence.MachineState = machineStates[v] },
	"cluster":       func(s *scene, v string) { clusterGaps[v](&s.evidence.Cluster) },
	"owner":         (*scene).own,
	"reserved":      (*scene).reserve,
	"max":           func(s *scene, v string) { s.evidence.Policy.MaxExpiration = duration(v) },
	"extra-dns":     func(s *scene, v string) { add(&s.evidence.Policy.ExtraNames, v) },
	"extra-ip":      func(s *scene, v string) { add(&s.evidence.Policy.ExtraIPs, addr(v)) },
	"api-dns":       func(s *scene, v string) { add(&s.evidence.Cluster.Stated.APIServerNames, v) },
	"api-ip":        func(s *scene, v string) { add(&s.evidence.Cluster.Stated.APIServerIPs, addr(v)) },
	"service-ip":    func(s *scene, v string) { add(&s.evidence.Cluster.Stated.VIPs, addr(v)) },
	"reported-dns":  func(s *scene, v string) { add(&s.reported().APIServerNames, v) },
	"reported-ip":   func(s *scene, v string) { add(&s.reported().APIServerIPs, addr(v)) },
	"services":      func(s *scene, v string) { add(&s.reported().ServiceCIDRs, netip.MustParsePrefix(v)) },
	"pods":          func(s *scene, v string) { add(&s.reported().PodCIDRs, netip.MustParsePrefix(v)) },
	"vip":           func(s *scene, v string) { add(&s.reported().VIPs, addr(v)) },
	"pool":          func(s *scene, v string) { add(&s.evidence.Policy.PodCIDRs, netip.MustParsePrefix(v)) },
	"dns-domain":    func(s *scene, v string) { add(&s.evidence.Cluster.Domains, v) },
	"machine":       func(s *scene, v string) { s.evidence.Machine = machineOf(v) },
	"nodename-only": func(s *scene, _ string) { s.evidence.Machine = machine.Machine{Nodename: s.evidence.Machine.Nodename} },
	"type":          func(s *scene, v string) { s.evidence.Machine.Type = types[v] },
	"nodename":      func(s *scene, v string) { s.evidence.Machine.Nodename = v },
	"hostname":      func(s *scene, v string) { s.evidence.Machine.Hostname = v },
	"domainname":    func(s *scene, v string) { s.evidence.Machine.Domainname = v },
	"internal":      func(s *scene, v string) { s.evidence.Machine.Platform.InternalDNS = v },
	"external":      func(s *scene, v string) { s.evidence.Machine.Platform.ExternalDNS = v },
	"metadata":      func(s *scene, v string) { s.evidence.Machine.Platform.Hostname = v },
	"has":           func(s *scene, v string) { add(&s.evidence.Machine.Addresses, onLinkOf(v)) },
	"flags":         (*scene).flagLast,
	"lost":          func(s *scene, v string) { s.lose(addr(v)) },
	"listed":        func(s *scene, v string) { s.evidence.Listed = list(v) },
	"node-ip":       func(s *scene, v string) { add(&s.evidence.Machine.NodeIPs, addr(v)) },
	"no-node-ips":   func(s *scene, _ string) { s.evidence.Machine.NodeIPs = nil },
	"excludes":      func(s *scene, v string) { add(&s.evidence.Machine.ExcludedSubnets, netip.MustParsePrefix(v)) },
	"valid-subnets": func(s *scene, v string) { s.evidence.Machine.ValidSubnets = validSubnets(list(v)) },
}

// validSubnets parses subnets as Talos publishes them.
func validSubnets(list []string) []machine.ValidSubnet {
	r := k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID)
	r.TypedSpec().ValidSubnets = list

	var view machine.View

	view.Put(r)

	return view.Machine().ValidSubnets
}

var nodeStates = map[string]csrpolicy.NodeState{
	"unknown": csrpolicy.NodeUnknown, "deleting": csrpolicy.NodeDeleting, "unmanaged": csrpolicy.NodeUnmanaged,
	"worker": csrpolicy.NodeWorker, "control-plane": csrpolicy.NodeControlPlane, "undefined": 99,
}

var machineStates = map[string]csrpolicy.MachineState{
	"unknown": csrpolicy.MachineUnknown, "stale": csrpolicy.MachineUnreachable, "mismatch": csrpolicy.MachineMismatch, "undefined": 99,
}

var types = map[string]talosmachine.Type{
	"unknown": talosmachine.TypeUnknown, "init": talosmachine.TypeInit, "controlplane": talosmachine.TypeControlPlane, "worker": talosmachine.TypeWorker,
}

var clusterGaps = map[string]func(*csrpolicy.ClusterIdentity){
	"unknown": func(c *csrpolicy.ClusterIdentity) { c.Known = false },
	"nothing": func(c *csrpolicy.ClusterIdentity) { *c = csrpolicy.ClusterIdentity{} },
}

// reported returns the subjects that cp-1 reports.
func (s *scene) reported() *csrpolicy.ClusterSubjects {
	if len(s.evidence.Cluster.Reported) == 0 {
		s.evidence.Cluster.Reported = []csrpolicy.Report{{Source: `machine "cp-1"`}}
	}

	return &s.evidence.Cluster.Reported[0].ClusterSubjects
}

func add[T any](list *[]T, value T) { *list = append(*list, value) }

func list(v string) []string {
	if v == "" {
		return nil
	}

	return strings.Split(v, ",")
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}

	return value
}

func number(v string) int { return must(strconv.Atoi(v)) }

func duration(v string) time.Duration { return must(time.ParseDuration(v)) }

func unhex(v string) []byte { return must(hex.DecodeString(v)) }

func oid(v string) asn1.ObjectIdentifier {
	var id asn1.ObjectIdentifier
	for arc := range strings.SplitSeq(v, ".") {
		id = append(id, number(arc))
	}

	return id
}

// attribute parses "2.5.4.11:value".
func attribute(v string) pair {
	id, value, _ := strings.Cut(v, ":")

	return pair{oid(id), tagPrintable, value}
}

// generalName parses "1:value", with a tag of GeneralName in RFC 5280.
func generalName(v string) general {
	tag, value, _ := strings.Cut(v, ":")

	return general{cryptobyteasn1.Tag(number(tag)) | 0x80, []byte(value)}
}

// onLinkOf parses "10.0.0.1/24@eth0".
func onLinkOf(v string) machine.Address {
	prefix, link, _ := strings.Cut(v, "@")

	return onLink(link, prefix)
}

func (s *scene) setUsages(v string) {
	s.csr.Spec.Usages = nil
	for _, usage := range list(v) {
		add(&s.csr.Spec.Usages, certificatesv1.KeyUsage(usage))
	}
}

func (s *scene) setCondition(v string) {
	s.csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.RequestConditionType(v), Status: "True"}}
}

// own parses "10.0.0.1@worker-1,worker-2"; the owner is by default another Node.
func (s *scene) own(v string) {
	subject, owners, named := strings.Cut(v, "@")
	if !named {
		owners = "elsewhere"
	}

	s.owners[subject] = append(s.owners[subject], list(owners)...)
}

// reserve parses "worker-1@2006-01-02T15:04:05Z".
func (s *scene) reserve(v string) {
	name, until, _ := strings.Cut(v, "@")
	s.reserved[name] = must(time.Parse(time.RFC3339, until))
}

func (s *scene) addNames(n int) {
	for i := range n {
		s.pkcs10.addDNS(fmt.Sprintf("name-%d", i))
	}
}

func (s *scene) repeatNames(n int) {
	for range n {
		s.pkcs10.addDNS(s.evidence.Machine.Nodename)
	}
}

// addRouted adds the first n addresses of a prefix that is routed to the machine.
func (s *scene) addRouted(n int) {
	for ip := addr("198.51.96.0"); n > 0; ip, n = ip.Next(), n-1 {
		s.pkcs10.addIP(ip)
		add(&s.evidence.Machine.Addresses, onLink("lo1", ip.String()+"/32"))
	}
}

func (s *scene) flagLast(v string) {
	last := &s.evidence.Machine.Addresses[len(s.evidence.Machine.Addresses)-1]
	last.Flags = must(nethelpers.AddressFlagsString(v))
}

func (s *scene) lose(ip netip.Addr) {
	s.evidence.Machine.Addresses = slices.DeleteFunc(s.evidence.Machine.Addresses, func(a machine.Address) bool { return a.Prefix.Addr() == ip })
}
