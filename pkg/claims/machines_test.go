package claims_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// at returns a machine with one address on eth0.
func at(prefix string) machine.Machine { return on("eth0", prefix) }

func on(link, prefix string) machine.Machine {
	return machine.Machine{Addresses: []machine.Address{{Link: link, Prefix: netip.MustParsePrefix(prefix)}}}
}

// replace is the step in which the machine of a Node responds.
func replace(nodename string, m machine.Machine) func(*fixture) {
	return func(f *fixture) { f.machines.Replace(nodename, m) }
}

func unreachable(nodename string) func(*fixture) {
	return func(f *fixture) { f.machines.MarkUnreachable(nodename, "gone") }
}

func mismatch(nodename, responding string) func(*fixture) {
	return func(f *fixture) { f.machines.MarkMismatch(nodename, responding, "no") }
}

func forgotten(nodename string) func(*fixture) {
	return func(f *fixture) { f.machines.Forget(nodename) }
}

// dropped returns the nodenames with machines that stopped reporting a name or an address, except nodename. No Nodes exist
// or were deleted.
func (f *fixture) dropped(subject, nodename string) (nodenames []string) {
	reporting := f.ReportedBy(subject, nodename)

	for owner := range f.owners(subject, claims.Requester{Nodename: nodename}) {
		if !slices.Contains(reporting, owner) {
			nodenames = append(nodenames, owner)
		}
	}

	return nodenames
}

func excluding(m machine.Machine, prefix string) machine.Machine {
	m.ExcludedSubnets = []netip.Prefix{netip.MustParsePrefix(prefix)}

	return m
}

func TestClaims_OfAddressesOfMachines(t *testing.T) {
	m, moved := at("10.0.0.1/24"), at("10.0.0.2/24")
	twice := machine.Machine{Addresses: append(m.Addresses[:1:1], on("eth1", "10.0.0.1/32").Addresses...)}
	nodeIP := machine.Machine{NodeIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}
	endpoint := machine.Machine{Endpoint: netip.MustParseAddr("::ffff:10.0.0.1")}

	for _, test := range []struct {
		name    string
		address string
		changes steps
		want    []string
	}{
		{"no machine", "10.0.0.1", nil, nil},
		{"this machine only", "10.0.0.1", steps{replace("a", m)}, nil},
		{"another machine", "10.0.0.1", steps{replace("b", m)}, []string{"b"}},
		{"several machines", "10.0.0.1", steps{replace("a", m), replace("b", m), replace("c", at("10.0.0.1/32"))}, []string{"b", "c"}},
		{"address on two links, then changed", "10.0.0.1", steps{replace("b", twice), replace("b", moved)}, nil},
		{"IPv4-mapped IPv6", "10.0.0.1", steps{replace("b", at("::ffff:10.0.0.1/128"))}, []string{"b"}},
		{"address known to the platform only", "203.0.113.7", steps{replace("b", on("external", "203.0.113.7/32"))}, []string{"b"}},
		{"node IP on no link", "10.0.0.1", steps{replace("b", nodeIP)}, []string{"b"}},
		{"address in an excluded subnet", "10.9.0.1", steps{replace("b", excluding(at("10.9.0.1/24"), "10.9.0.0/16"))}, []string{"b"}},
		{"Service address of kube-proxy", "10.96.0.1", steps{replace("b", excluding(on("kube-ipvs0", "10.96.0.1/32"), "10.96.0.0/12"))}, nil},
		{"other address on the link of kube-proxy", "203.0.113.9", steps{
			replace("b", excluding(on("kube-ipvs0", "203.0.113.9/32"), "10.96.0.0/12")),
		}, []string{"b"}},
		{"loopback", "127.0.0.1", steps{replace("b", at("127.0.0.1/8"))}, nil},
		{"link-local", "fe80::1", steps{replace("b", at("fe80::1/64"))}, nil},
		{"machine changed its address", "10.0.0.1", steps{replace("b", m), replace("b", moved)}, nil},
		{"unreachable machine", "10.0.0.1", steps{replace("b", m), unreachable("b")}, []string{"b"}},
		{"mismatched machine", "10.0.0.1", steps{replace("b", m), mismatch("b", "other")}, []string{"b"}},
		{"changed address after a mismatch", "10.0.0.1", steps{replace("b", m), mismatch("b", "other"), replace("b", moved)}, nil},
		{"address at which the machine responds", "10.0.0.1", steps{replace("b", endpoint)}, []string{"b"}},
		{"forgotten machine", "10.0.0.1", steps{replace("b", m), forgotten("b")}, nil},
		{"one of two forgotten", "10.0.0.1", steps{replace("b", m), replace("c", m), forgotten("b")}, []string{"c"}},
	} {
		f := newFixture(t)
		f.do(test.changes)
		assert.Equal(t, test.want, f.ReportedBy(test.address, "a"), test.name)
	}
}

func TestClaims_AreContradictedIfMachineDoesNotReportAddress(t *testing.T) {
	with, without := at("10.0.0.1/24"), machine.Machine{Nodename: "a"}
	with.Nodename = "a"

	for _, test := range []struct {
		name    string
		changes steps
		want    bool
	}{
		{"unknown machine", nil, false},
		{"never responded", steps{unreachable("a")}, false},
		{"another machine responds", steps{mismatch("a", "b")}, false},
		{"reports it", steps{replace("a", with)}, false},
		{"does not report it", steps{replace("a", without)}, true},
		{"did not report it before it went silent", steps{replace("a", without), unreachable("a")}, true},
		{"did not report it before another machine responded", steps{replace("a", without), mismatch("a", "b")}, true},
		{"reported it before it went silent", steps{replace("a", with), unreachable("a")}, false},
		{"forgotten", steps{replace("a", without), forgotten("a")}, false},
		{"reported it long ago", steps{replace("a", with), replace("a", without), passes(retention)}, true},
	} {
		f := newFixture(t)
		f.add(node("a", "10.0.0.1"))
		f.do(append(steps{replace("b", with)}, test.changes...))

		owners, contradicted := f.Of("10.0.0.1", claims.Requester{Nodename: "b"})
		assert.Equal(t, test.want, len(contradicted) > 0, test.name)
		assert.Equal(t, !test.want, len(owners) > 0, test.name)
	}
}

func TestClaims_OfWhatMachineOfDeletedNodeReported(t *testing.T) {
	last, other := at("10.0.0.1/24"), at("10.0.0.2/24")
	last.Nodename, last.Endpoint, other.Nodename = "b", netip.MustParseAddr("10.0.0.3"), "b"
	reported := []string{"10.0.0.1", "10.0.0.3"}

	for _, test := range []struct {
		name    string
		changes steps
		want    []string // addresses that the Node keeps when it is deleted
		owned   bool     // 10.0.0.1 by b
		dropped bool     // 10.0.0.1 by b
	}{
		{"current", steps{replace("b", last)}, reported, true, false},
		{"unreachable", steps{replace("b", last), unreachable("b")}, reported, true, false},
		{"a different machine responded", steps{replace("b", last), mismatch("b", "c")}, reported, true, false},
		{"never responded", steps{unreachable("b")}, nil, false, false},
		{"changed", steps{replace("b", last), replace("b", other)}, []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, false, true},
		{"forgotten", steps{replace("b", last), forgotten("b")}, reported, false, true},
		{"forgotten after a mismatch", steps{replace("b", last), mismatch("b", "c"), forgotten("b")}, reported, false, true},
		{"never responded, then forgotten", steps{unreachable("b"), forgotten("b")}, nil, false, false},
		{"forgotten, then a different view", steps{replace("b", last), forgotten("b"), replace("b", other)}, reported, false, true},
		{"forgotten, then unreachable", steps{replace("b", last), forgotten("b"), unreachable("b")}, reported, false, true},
		{"forgotten long ago", steps{
			replace("b", last), forgotten("b"), passes(retention), replace("c", at("10.0.0.4/24")), forgotten("c"),
		}, nil, false, false},
	} {
		f := newFixture(t)
		f.do(test.changes)
		assert.Equal(t, test.owned, slices.Contains(f.ReportedBy("10.0.0.1", "a"), "b"), test.name)
		assert.Equal(t, test.dropped, len(f.dropped("10.0.0.1", "a")) > 0, test.name)
		assert.Empty(t, f.dropped("10.0.0.1", "b"), test.name)

		f.DeleteNode(node("b"))

		var kept []string

		for _, subject := range []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"} {
			if len(f.owners(subject, claims.Requester{Nodename: "b"})) > 0 {
				kept = append(kept, subject)
			}
		}

		assert.Equal(t, test.want, kept, test.name)
	}
}

func TestClaims_OfWhatMachineDropped(t *testing.T) {
	const unchanged, lost = "10.0.0.1", "10.0.0.2"

	larger := at(unchanged + "/24")
	larger.Addresses = append(larger.Addresses, at(lost+"/24").Addresses...)
	larger.Nodename, larger.Hostname = "b", "host-b"

	smaller := at(unchanged + "/24")
	smaller.Nodename = "b"

	drop := replace("b", smaller)
	rename := func(f *fixture) {
		for i := range 3000 {
			m := smaller
			m.Hostname = fmt.Sprintf("host-%d", i)
			f.machines.Replace("b", m)
		}
	}

	for _, test := range []struct {
		name    string
		changes steps
		subject string
		want    []string
	}{
		{"address", steps{drop}, lost, []string{"b"}},
		{"name", steps{drop}, "host-b", []string{"b"}},
		{"still reported", steps{drop}, unchanged, nil},
		{"after another machine responded", steps{mismatch("b", "c"), drop}, lost, []string{"b"}},
		{"machine does not respond", steps{unreachable("b")}, lost, nil},
		{"shortly before the end", steps{drop, passes(15*time.Minute - time.Second)}, lost, []string{"b"}},
		{"at the end", steps{drop, passes(15 * time.Minute)}, lost, nil},
		{"other change before the end", steps{drop, passes(time.Minute), replace("b", at("10.0.0.3/24"))}, lost, []string{"b"}},
		{"forgotten", steps{drop, forgotten("b")}, lost, []string{"b"}},
		{"many addresses come and go", steps{drop, rename}, lost, []string{"b"}},
		{"too many names", steps{rename}, "host-2998", nil},
	} {
		f := newFixture(t)
		f.do(append(steps{replace("b", larger)}, test.changes...))
		assert.Equal(t, test.want, f.dropped(test.subject, "a"), test.name)
		assert.Empty(t, f.dropped(test.subject, "b"), "%s: its own subject", test.name)
	}
}

func TestClaims_OfNamesOfMachines(t *testing.T) {
	f := newFixture(t)
	f.add(node("listing", "host-b"))
	f.DeleteNode(f.add(node("deleted", "host-b")))
	f.do(steps{replace("b", machine.Machine{
		Nodename: "node-b", Hostname: "Host-B", Domainname: "Example.org",
		Platform: runtime.PlatformMetadataSpec{Hostname: "meta-b.example.org", InternalDNS: "b.internal.", ExternalDNS: "B.example.com"},
	})})

	for _, name := range []string{"node-b", "host-b", "host-b.example.org", "meta-b.example.org", "b.internal", "b.example.com"} {
		assert.Equal(t, []string{"b"}, f.ReportedBy(name, "a"), name)
	}

	assert.Empty(t, f.ReportedBy("", "a"))
}
