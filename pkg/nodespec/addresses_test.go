package nodespec_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

func TestDesired_InternalIPs(t *testing.T) {
	for _, test := range []struct {
		name              string
		provided, ofTalos []string
		preferIPv6        bool
		want              []string
	}{
		{"kubelet reports one", []string{"10.0.0.1"}, nil, false, []string{"10.0.0.1"}},
		{"kubelet and Talos differ", []string{"10.0.0.2"}, []string{"10.0.0.1"}, false, []string{"10.0.0.2"}},
		{"kubelet reports none", nil, []string{"10.0.0.2"}, false, []string{"10.0.0.2"}},
		{"address of another machine", []string{"10.0.0.99"}, []string{"10.0.0.1"}, false, nil},
		{"one of two is on the machine", []string{"10.0.0.99", "10.0.0.1"}, nil, false, []string{"10.0.0.1"}},
		{"neither kubelet nor Talos reports any", nil, nil, false, nil},
		{"several of each family", []string{"10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2"}, nil, false, []string{"10.0.0.1", "2001:db8::1"}},
		{"order of the kubelet", []string{"2001:db8::1", "10.0.0.1"}, nil, false, []string{"2001:db8::1", "10.0.0.1"}},
		{"IPv6 preferred", []string{"10.0.0.1", "2001:db8::1"}, nil, true, []string{"2001:db8::1", "10.0.0.1"}},
		{"IPv6 only", []string{"2001:db8::1"}, nil, false, []string{"2001:db8::1"}},
		{"IPv4 only, IPv6 preferred", []string{"10.0.0.1"}, nil, true, []string{"10.0.0.1"}},
		{"IPv4-mapped IPv6", []string{"::ffff:10.0.0.1", "10.0.0.2"}, nil, false, []string{"10.0.0.1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := running()
			in.Machine.Addresses = []machine.Address{
				onLink("eth0", "10.0.0.1/24"), onLink("eth0", "10.0.0.2/24"), onLink("eth0", "2001:db8::1/64"), onLink("eth0", "2001:db8::2/64"),
			}
			in.ProvidedNodeIPs, in.Machine.NodeIPs = addrs(test.provided), addrs(test.ofTalos)
			in.Options.PreferIPv6 = test.preferIPv6

			if len(test.want) == 0 {
				requirePending(t, in, "node IPs")
			} else {
				requireAddresses(t, corev1.NodeInternalIP, in, test.want...)
			}
		})
	}
}

func TestDesired_VirtualIPIsNotAnInternalIP(t *testing.T) {
	in := running()
	in.Machine.Addresses = []machine.Address{onLink("eth0", "10.0.0.1/24"), onLink("eth0", "10.0.0.100/32"), onLink("kube-ipvs0", "10.96.0.1/32")}
	in.Machine.ExcludedSubnets = []netip.Prefix{prefix("10.0.0.100/32"), prefix("10.96.0.0/12")}

	in.ProvidedNodeIPs = addrs([]string{"10.0.0.100"})
	requirePending(t, in, "node IPs")

	in.ProvidedNodeIPs = addrs([]string{"10.96.0.1", "10.0.0.1"})
	requireAddresses(t, corev1.NodeInternalIP, in, "10.0.0.1")
}

// The upstream Talos CCM lists addresses of CNI links.
func TestDesired_DiscoversPublicAddressesByLink(t *testing.T) {
	const ipv4, ipv6 = "203.0.113.5/24", "2001:db8:1::5/64"

	for own, links := range map[bool]string{
		true: "eth0 ens18 enp3s0f1np1 eno1 bond0 bond0.100 br0 vlan20 enx001122334455 wlan0",
		false: "lo kubespan siderolink kube-ipvs0 kube-bridge kube-dummy-if kube_bridge nodelocaldns flannel.1 flannel-v6.1 flannel-wg cni0 cilium_host cilium_net " +
			"cilium_vxlan cilium_wg0 lxc12ab34cd56ef lxc_health cali1234567890a vxlan.calico vethwe-bridge veth1a2b3c4d antrea-gw0 ovn-k8s-mp0 genev_sys_6081 tunl0 virbr0 vxlan-v6.calico wireguard.cali " +
			"wg-v6.cali weave docker0 dummy0 tailscale0 wg0",
	} {
		for link := range strings.FieldsSeq(links) {
			in := having(onLink(link, ipv4), onLink(link, ipv6))
			requireAddresses(t, corev1.NodeExternalIP, in, map[bool][]string{true: {"203.0.113.5", "2001:db8:1::5"}}[own]...)
		}
	}
}

func TestDesired_DiscoversPublicAddressesByRange(t *testing.T) {
	for _, test := range []struct {
		name, prefix string
		public       bool
	}{
		{"public IPv4", "203.0.113.5/24", true},
		{"public IPv4 without a subnet", "203.0.113.5/32", true},
		{"public IPv6", "2001:db8::5/64", true},
		{"just below carrier-grade NAT", "100.63.255.255/24", true},
		{"just above carrier-grade NAT", "100.128.0.0/24", true},
		{"just above 172.16/12", "172.32.0.1/24", true},
		{"public IPv4-mapped IPv6", "::ffff:203.0.113.5/120", true},

		{"private 10/8", "10.1.2.3/24", false},
		{"private 172.16/12", "172.31.255.1/24", false},
		{"private 192.168/16", "192.168.1.1/24", false},
		{"private IPv4-mapped IPv6", "::ffff:10.1.2.3/120", false},
		{"carrier-grade NAT and Tailscale", "100.64.0.1/32", false},
		{"end of carrier-grade NAT", "100.127.255.254/32", false},
		{"this network", "0.1.2.3/8", false},
		{"loopback", "127.0.0.1/8", false},
		{"link-local IPv4, used by host DNS of Talos", "169.254.116.108/32", false},
		{"protocol assignments", "192.0.0.8/32", false},
		{"benchmarking IPv4", "198.18.0.1/15", false},
		{"multicast IPv4", "224.0.0.1/32", false},
		{"reserved", "240.0.0.1/32", false},
		{"broadcast", "255.255.255.255/32", false},

		{"unique local", "fd00::1/64", false},
		{"unique local, fc00::/8", "fc00::1/64", false},
		{"link-local IPv6", "fe80::1/64", false},
		{"site-local", "fec0::1/64", false},
		{"loopback IPv6", "::1/128", false},
		{"multicast IPv6", "ff02::1/128", false},
		{"NAT64", "64:ff9b::cb00:7105/96", false},
		{"NAT64 of the local network", "64:ff9b:1::cb00:7105/96", false},
		{"discard only", "100::1/64", false},
		{"benchmarking IPv6", "2001:2::1/48", false},
		{"segment routing", "5f00::1/16", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			found := onLink("eth0", test.prefix)
			requireAddresses(t, corev1.NodeExternalIP, having(found), map[bool][]string{true: {found.Prefix.Addr().Unmap().String()}}[test.public]...)
		})
	}
}

func TestDesired_DiscoversStableAddresses(t *testing.T) {
	public := func(flags nethelpers.AddressFlag, scope nethelpers.Scope) machine.Address {
		return machine.Address{Prefix: prefix("2001:db8:1::5/64"), Link: "eth0", Flags: nethelpers.AddressFlags(flags), Scope: scope}
	}

	for _, test := range []struct {
		name     string
		address  machine.Address
		excluded string
		want     []string
	}{
		{"permanent", public(nethelpers.AddressPermanent, nethelpers.ScopeGlobal), "", []string{"2001:db8:1::5"}},
		{"from a router advertisement", public(nethelpers.AddressManagementTemp, nethelpers.ScopeGlobal), "", []string{"2001:db8:1::5"}},
		{"stable (RFC 7217)", public(nethelpers.AddressPermanent|nethelpers.AddressStablePrivacy, nethelpers.ScopeGlobal), "", []string{"2001:db8:1::5"}},
		{"temporary (RFC 8981)", public(nethelpers.AddressTemporary, nethelpers.ScopeGlobal), "", nil},
		{"deprecated", public(nethelpers.AddressPermanent|nethelpers.AddressDeprecated, nethelpers.ScopeGlobal), "", nil},
		{"tentative", public(nethelpers.AddressPermanent|nethelpers.AddressTentative, nethelpers.ScopeGlobal), "", nil},
		{"duplicate", public(nethelpers.AddressPermanent|nethelpers.AddressDADFailed, nethelpers.ScopeGlobal), "", nil},
		{"link scope", public(nethelpers.AddressPermanent, nethelpers.ScopeLink), "", nil},
		{"host scope", public(nethelpers.AddressPermanent, nethelpers.ScopeHost), "", nil},
		{"virtual IP", onLink("eth0", "203.0.113.100/32"), "203.0.113.100/32", nil},
		{"pod address", onLink("eth0", "203.0.113.129/25"), "203.0.113.128/25", nil},
		{"next to a virtual IP", onLink("eth0", "203.0.113.101/32"), "203.0.113.100/32", []string{"203.0.113.101"}},
		{"other IP family excluded", onLink("eth0", "203.0.113.101/32"), "::/0", []string{"203.0.113.101"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := having(test.address)
			if test.excluded != "" {
				in.Machine.ExcludedSubnets = []netip.Prefix{prefix("10.244.0.0/16"), prefix(test.excluded)}
			}

			requireAddresses(t, corev1.NodeExternalIP, in, test.want...)
		})
	}
}

func TestDesired_SourceOfExternalIPs(t *testing.T) {
	metadataOnly := []string{"akamai", "alibabacloud", "aws", "azure", "cloudstack", "digital-ocean", "equinixMetal", "exoscale", "gcp", "hcloud", "scaleway", "upcloud", "vultr"}
	both := []string{"container", "metal", "nocloud", "opennebula", "openstack", "oracle", "vmware"}
	require.ElementsMatch(t, talosPlatforms(), slices.Concat(metadataOnly, both))

	for _, platform := range talosPlatforms() {
		t.Run(platform, func(t *testing.T) {
			in := having(external("203.0.113.9"), onLink("eth0", "203.0.113.5/24"))
			in.Machine.Platform = runtime.PlatformMetadataSpec{Platform: platform, InstanceID: "i-1"}

			want := []string{"203.0.113.9", "203.0.113.5"} // in the order of the machine's addresses
			if slices.Contains(metadataOnly, platform) {
				want = want[:1]
			}

			requireAddresses(t, corev1.NodeExternalIP, in, want...)
		})
	}
}

func TestDesired_ExternalIPs(t *testing.T) {
	temporary := func(link, prefix string) machine.Address {
		a := onLink(link, prefix)
		a.Flags = 0

		return a
	}

	for _, test := range []struct {
		name       string
		addresses  []machine.Address
		nodeIPs    []string
		preferIPv6 bool
		want       []string
	}{
		{"none", nil, nil, false, nil},
		{"node IP", []machine.Address{onLink("eth0", "203.0.113.5/24")}, []string{"203.0.113.5"}, false, nil},
		{"node IP in metadata", []machine.Address{onLink("eth0", "203.0.113.5/24"), external("203.0.113.5")}, []string{"203.0.113.5"}, false, nil},
		{"node IP in metadata as IPv4-mapped IPv6", []machine.Address{onLink("eth0", "203.0.113.5/24"), external("::ffff:203.0.113.5")}, []string{"203.0.113.5"}, false, nil},
		{"same address on several links", []machine.Address{onLink("eth0", "203.0.113.5/24"), onLink("eth1", "203.0.113.5/32"), external("203.0.113.5")}, nil, false, []string{"203.0.113.5"}},
		{"IPv4 first", []machine.Address{onLink("eth0", "2001:db8:1::5/64"), onLink("eth0", "203.0.113.5/24")}, nil, false, []string{"203.0.113.5", "2001:db8:1::5"}},
		{"IPv6 preferred", []machine.Address{onLink("eth0", "203.0.113.5/24"), onLink("eth0", "2001:db8:1::5/64")}, nil, true, []string{"2001:db8:1::5", "203.0.113.5"}},
		{"IPv4 in the order of the links", []machine.Address{temporary("eth1", "203.0.113.10/24"), onLink("eth2", "203.0.113.9/24")}, nil, false, []string{"203.0.113.10", "203.0.113.9"}},
		{
			"permanent IPv6 first, last one first",
			[]machine.Address{temporary("eth0", "2001:db8:1::5/64"), onLink("eth0", "2001:db8:1::6/64"), onLink("eth1", "2001:db8:1::7/64")},
			nil, false,
			[]string{"2001:db8:1::7", "2001:db8:1::6", "2001:db8:1::5"},
		},
		{"private address in metadata", []machine.Address{external("10.9.9.9")}, nil, false, []string{"10.9.9.9"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := having(test.addresses...)
			in.Options.PreferIPv6 = test.preferIPv6

			if test.nodeIPs != nil {
				in.ProvidedNodeIPs = addrs(test.nodeIPs)
			}

			requireAddresses(t, corev1.NodeExternalIP, in, test.want...)
		})
	}
}

// The upstream Talos CCM lists one of each family.
func TestDesired_FirstExternalIPPerFamily(t *testing.T) {
	in := having(onLink("eth1", "203.0.113.10/24"), onLink("eth2", "203.0.113.9/24"), onLink("eth1", "2001:db8:1::5/64"), onLink("eth2", "2001:db8:1::4/64"))
	in.Options.OneExternalIPPerFamily = true
	requireAddresses(t, corev1.NodeExternalIP, in, "203.0.113.10", "2001:db8:1::4")
}

// With machine.kubelet.registerWithFQDN, the nodename has a domain.
func TestDesired_NodenameIsTheHostNameWithoutAPlatformHostName(t *testing.T) {
	for nodename, want := range map[string][]string{
		"worker-1.example.org": {"worker-1.example.org"}, "worker-1.example": {"worker-1.example"}, "worker-1": nil, "w1.default.svc": nil,
	} {
		in := withRules(t, running(), rules.Rule{Labels: map[string]string{"host": "{{ .Hostname }}"}})
		in.Machine.Nodename, in.Machine.Hostname = nodename, "worker-1"
		requireAddresses(t, corev1.NodeInternalDNS, in, want...)
		assert.Equal(t, nodename, specOf(t, in).Labels["host"])

		in.Machine.Platform.Hostname = "vm-7"
		requireAddresses(t, corev1.NodeInternalDNS, in)
	}
}

func TestDesired_HostnameIsNodename(t *testing.T) {
	in := running()
	in.Machine.Hostname, in.Machine.Platform.Hostname = "elsewhere", "elsewhere-too"
	requireAddresses(t, corev1.NodeHostName, in, "worker-1")
}

func TestDesired_DNSNames(t *testing.T) {
	for _, test := range []struct {
		name, hostname, internal, external string
		wantInternal, wantExternal         []string
		// problems are the types of the omitted names.
		problems []string
	}{
		{name: "none"},
		{name: "internal and external", internal: "ip-1.ec2.internal", external: "ec2-1.example.org", wantInternal: []string{"ip-1.ec2.internal"}, wantExternal: []string{"ec2-1.example.org"}},
		{name: "host name with domain", hostname: "worker-1.example.org", wantInternal: []string{"worker-1.example.org"}},
		{name: "host name without domain", hostname: "worker-1"},
		{name: "host name with trailing dot only", hostname: "worker-1."},
		{name: "internal name and host name", hostname: "worker-1.example.org", internal: "worker-1.ec2.internal", wantInternal: []string{"worker-1.ec2.internal"}},
		{name: "external only", external: "www.example.org", wantExternal: []string{"www.example.org"}},
		{name: "upper case", internal: "IP-1.EC2.Internal", external: "EC2-1.Example.ORG", wantInternal: []string{"ip-1.ec2.internal"}, wantExternal: []string{"ec2-1.example.org"}},
		{name: "trailing dot", internal: "ip-1.ec2.internal.", external: "ec2-1.example.org.", wantInternal: []string{"ip-1.ec2.internal"}, wantExternal: []string{"ec2-1.example.org"}},
		{name: "single dot", internal: ".", external: "."},
		{name: "two trailing dots", internal: "ip-1..", problems: []string{"InternalDNS"}},
		{name: "underscore in one of two names", internal: "ip_1.internal", external: "www.example.org", wantExternal: []string{"www.example.org"}, problems: []string{"InternalDNS"}},
		{name: "wildcard", external: "*.example.org", problems: []string{"ExternalDNS"}},
		{name: "IP address", hostname: "10.0.0.5", problems: []string{"InternalDNS"}},
		{name: "space", internal: "ip 1.internal", problems: []string{"InternalDNS"}},
		{name: "letter outside ASCII", internal: "wörker.internal", problems: []string{"InternalDNS"}},
		{name: "host name with underscore", hostname: "worker_1.example.org", problems: []string{"InternalDNS"}},
		{name: "host name of two labels", hostname: "worker.novalocal", problems: []string{"InternalDNS"}},
		{name: "host name of two labels that is the FQDN", hostname: "worker-1.novalocal", wantInternal: []string{"worker-1.novalocal"}},
		{name: "default host name", hostname: "localhost.localdomain", problems: []string{"InternalDNS"}},
		{name: "service", internal: "w1.default.svc", external: "w1.default.svc.cluster.local", problems: []string{"InternalDNS", "ExternalDNS"}},
		{name: "domain of the cluster", external: "w1.a.k8s.example", problems: []string{"ExternalDNS"}},
		{name: "ends in a number", internal: "vm.17", external: "vm.example.17", problems: []string{"InternalDNS", "ExternalDNS"}},
		{name: "one label", internal: "vault", external: "vault", problems: []string{"InternalDNS", "ExternalDNS"}},
		{name: "nodename", internal: "worker-1", wantInternal: []string{"worker-1"}},
		{name: "name of another machine", internal: "shared.ec2.internal", external: "www.example.org", wantExternal: []string{"www.example.org"}, problems: []string{"InternalDNS"}},
		{name: "too long", internal: strings.Repeat("a.", 127) + "aa", problems: []string{"InternalDNS"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := running()
			in.Machine.Hostname, in.Machine.Domainname = "worker-1", "novalocal"
			in.Options.Domains = []string{"k8s.example"}
			in.OwnersOf = func(name string) []string {
				return map[string][]string{"shared.ec2.internal": {"worker-3", "worker-2"}}[name]
			}
			in.Machine.Platform.Hostname, in.Machine.Platform.InternalDNS, in.Machine.Platform.ExternalDNS = test.hostname, test.internal, test.external
			requireAddresses(t, corev1.NodeInternalDNS, in, test.wantInternal...)
			requireAddresses(t, corev1.NodeExternalDNS, in, test.wantExternal...)
			assert.Equal(t, test.problems, problemKeys(t, in))
		})
	}
}

// A kubelet requests its nodename and node IPs, which a Node lists in any case.
func TestDesired_ReportsNodeWhoseCertificateWouldBeDenied(t *testing.T) {
	for _, test := range []struct{ name, nodename, nodeIP, problem string }{
		{"approvable", "worker-1", nodeIP, ""},
		{"number", "42", nodeIP, ""},
		{"localhost", "localhost", nodeIP, `Hostname="localhost" kept: is reserved for the cluster; its kubelet gets no certificate`},
		{"default domain", "w1.a.cluster.local", nodeIP, `Hostname="w1.a.cluster.local" kept: is reserved for the cluster; its kubelet gets no certificate`},
		{"domain of the cluster", "w1.k8s.example", nodeIP, `Hostname="w1.k8s.example" kept: is reserved for the cluster; its kubelet gets no certificate`},
		{"link-local", "worker-1", "169.254.10.1", `InternalIP="169.254.10.1" kept: is a link-local address; its kubelet gets no certificate`},
		{"link-local IPv6", "worker-1", "fe80::1", `InternalIP="fe80::1" kept: is a link-local address; its kubelet gets no certificate`},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := running()
			in.Options.Domains = []string{"k8s.example"}
			in.Machine.Nodename, in.Machine.Platform.Hostname = test.nodename, "worker-1"
			in.Machine.Addresses = []machine.Address{onLink("eth0", netip.PrefixFrom(addr(test.nodeIP), 24).String())}
			in.ProvidedNodeIPs = addrs([]string{test.nodeIP})

			spec, problems, pending := nodespec.Desired(in)
			require.Empty(t, pending)
			assert.Contains(t, spec.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: test.nodeIP})
			assert.Contains(t, spec.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: test.nodename})

			var got []string
			for _, problem := range problems {
				got = append(got, problem.String())
			}

			assert.Equal(t, test.problem, strings.Join(got, "; "))
		})
	}
}

func TestDesired_OrderOfAddresses(t *testing.T) {
	in := running()
	in.Machine.Platform.InternalDNS, in.Machine.Platform.ExternalDNS = "a.ec2.internal", "a.example.org"
	in.Machine.Addresses = append(in.Machine.Addresses, onLink("eth0", "2001:db8::1/64"), onLink("eth1", "203.0.113.5/24"), onLink("eth1", "2001:db8:1::5/64"))
	in.ProvidedNodeIPs = append(in.ProvidedNodeIPs, addr("2001:db8::1"))

	assert.Equal(t, []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: nodeIP},
		{Type: corev1.NodeInternalIP, Address: "2001:db8::1"},
		{Type: corev1.NodeExternalIP, Address: "203.0.113.5"},
		{Type: corev1.NodeExternalIP, Address: "2001:db8:1::5"},
		{Type: corev1.NodeHostName, Address: "worker-1"},
		{Type: corev1.NodeInternalDNS, Address: "a.ec2.internal"},
		{Type: corev1.NodeExternalDNS, Address: "a.example.org"},
	}, specOf(t, in).Addresses)
}

// Azure's metadata lists a load balancer's addresses for every machine behind it.
func TestDesired_OmitsSharedAddresses(t *testing.T) {
	in := running()
	in.Machine.Platform = runtime.PlatformMetadataSpec{Platform: "azure", InstanceID: "vm-1"}
	in.Machine.Addresses = append(in.Machine.Addresses, external("203.0.113.1"), external("203.0.113.2"))
	in.SharedAddresses = map[netip.Addr][]string{addr("203.0.113.1"): {"worker-3", "worker-2"}}

	for _, test := range []struct {
		platform string
		listed   []netip.Addr
		want     []string
		problem  string
	}{
		{"azure", nil, []string{"203.0.113.2"}, ""},
		{"azure", addrs([]string{"203.0.113.1"}), []string{"203.0.113.2"}, ""},
		{"hcloud", nil, []string{"203.0.113.2"}, `ExternalIP="203.0.113.1" omitted: the machine of node "worker-2" reports the same address`},
		{"hcloud", addrs([]string{"203.0.113.1"}), []string{"203.0.113.1", "203.0.113.2"}, `ExternalIP="203.0.113.1" kept: the machine of node "worker-2" reports the same address`},
	} {
		in.Machine.Platform.Platform, in.ExternalIPs = test.platform, test.listed

		spec, problems := desired(t, in)
		assert.Equal(t, test.want, of(corev1.NodeExternalIP, spec), test)

		var texts []string
		for _, p := range problems {
			texts = append(texts, p.String())
		}

		assert.Equal(t, test.problem, strings.Join(texts, "\n"), test)
	}
}

func TestDesired_ExplainsOmittedNames(t *testing.T) {
	in := running()
	in.Machine.Platform.InternalDNS, in.Machine.Platform.ExternalDNS = "worker.novalocal", "shared.example.org"
	in.OwnersOf = func(string) []string { return []string{"worker-3", "worker-2"} }

	_, problems := desired(t, in)

	var got []string
	for _, p := range problems {
		got = append(got, p.String())
	}

	assert.Equal(t, []string{
		`InternalDNS="worker.novalocal" omitted: has fewer than three labels and is not the machine's FQDN`,
		`ExternalDNS="shared.example.org" omitted: the machine of node "worker-2" has the same name`,
	}, got)
}

// Numbers are valid nodenames, and the kubelet requests a certificate for its nodename.
func TestDesired_ListsNumericNodename(t *testing.T) {
	in := running()
	in.Machine.Nodename = "10023"

	_, problems := desired(t, in)
	assert.Empty(t, problems)
	requireAddresses(t, corev1.NodeHostName, in, "10023")
}

func TestDesired_OmitsAddressesThatOperatorExcludes(t *testing.T) {
	in := having(onLink("eth0", "10.0.0.10/32"), onLink("eth1", "203.0.113.10/24"), onLink("eth1", "203.0.113.11/24"), external("203.0.113.10"))
	in.Machine.ValidSubnets = []machine.ValidSubnet{{Prefix: prefix("10.0.0.0/24")}, {Prefix: prefix("10.0.0.10/32"), Inverted: true}, {Prefix: prefix("203.0.113.10/32"), Inverted: true}}
	in.ProvidedNodeIPs = addrs([]string{"10.0.0.10", nodeIP})

	requireAddresses(t, corev1.NodeInternalIP, in, nodeIP)
	requireAddresses(t, corev1.NodeExternalIP, in, "203.0.113.11")
}

// No kubelet gets a certificate for more.
func TestDesired_ListsAtMostAsManyAddressesAsCertificateHas(t *testing.T) {
	in := running()
	in.Machine.Platform.InternalDNS = "a.ec2.internal"

	var all []string

	for ip := addr("8.8.0.0"); len(all) < machine.MaxSubjects-3; ip = ip.Next() { // the node IP and two names come first
		all = append(all, ip.String())
		in.Machine.Addresses = append(in.Machine.Addresses, onLink("eth1", ip.String()+"/32"))
	}

	spec, problems := desired(t, in)
	assert.Len(t, spec.Addresses, machine.MaxSubjects)
	assert.Empty(t, problems)

	in.Machine.Addresses = append(slices.Insert(in.Machine.Addresses, 1, onLink("eth0", "198.51.100.1/32")), onLink("eth2", "198.51.100.2/32"))

	spec, problems = desired(t, in)
	want, last := append([]string{"198.51.100.1"}, all[:len(all)-1]...), all[len(all)-1]
	assert.Equal(t, want, of(corev1.NodeExternalIP, spec))
	assert.Equal(t, []string{nodeIP}, of(corev1.NodeInternalIP, spec))
	assert.Equal(t, []string{"a.ec2.internal"}, of(corev1.NodeInternalDNS, spec))
	require.Len(t, problems, 1)
	assert.Equal(t, fmt.Sprintf("ExternalIPs=%q omitted: 2 addresses exceed the limit of 1000 names and addresses in the certificate of a kubelet; "+
		"set addresses.externalIPs: first-per-family, or remove addresses from the machine", last), problems[0].String())
}

// setting returns an input with a rule that sets addresses.
func setting(t *testing.T, in nodespec.Input, addresses map[string]string) nodespec.Input {
	t.Helper()

	set, errs := rules.Compile([]rules.Rule{{Name: "nat", Addresses: addresses, AddressCIDRs: []string{"198.51.100.0/24", "10.8.0.0/16", "2001:db8:8::/48"}}}, nil, nil)
	require.Empty(t, errs)

	in.Options.Rules = set

	return in
}

func TestDesired_ListsRuleAddressesAfterTheMachines(t *testing.T) {
	in := setting(t, having(onLink("eth1", "203.0.113.5/24")), map[string]string{"ExternalIP": "198.51.100.5 2001:db8:8::5 198.51.100.5", "InternalIP": "10.8.0.5"})
	in.Options.OneExternalIPPerFamily = true

	spec, problems := desired(t, in)
	assert.Empty(t, problems)
	assert.Equal(t, []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: nodeIP},
		{Type: corev1.NodeInternalIP, Address: "10.8.0.5"},
		{Type: corev1.NodeExternalIP, Address: "203.0.113.5"},
		{Type: corev1.NodeExternalIP, Address: "198.51.100.5"},
		{Type: corev1.NodeExternalIP, Address: "2001:db8:8::5"},
		{Type: corev1.NodeHostName, Address: "worker-1"},
	}, spec.Addresses)

	// The labels record these addresses only, and are read again.
	node := &corev1.Node{}
	node.Labels = spec.Labels
	assert.ElementsMatch(t, addrs([]string{"10.8.0.5", "198.51.100.5", "2001:db8:8::5"}), nodespec.NewInput(node, in.Machine, in.Options).RuleAddresses)

	for key, value := range spec.Labels {
		assert.Empty(t, validation.IsQualifiedName(key))
		assert.Empty(t, validation.IsValidLabelValue(value))
	}
}

// The machine reports the address itself: it needs no record.
func TestDesired_OwnAddressIsNoRuleAddress(t *testing.T) {
	in := setting(t, having(onLink("eth1", "198.51.100.5/24")), map[string]string{"ExternalIP": "198.51.100.5"})
	in.ReserveAddress = func(netip.Addr) string { panic("reserved") }

	requireAddresses(t, corev1.NodeExternalIP, in, "198.51.100.5")
	assert.NotContains(t, specOf(t, in).Labels, noderecord.RuleAddressLabel(addr("198.51.100.5")))
}

func TestDesired_OmitsRuleAddressesThatTheNodeCannotHave(t *testing.T) {
	const set = "198.51.100.5"

	ofCluster := func(source string, isKnown bool) func(*nodespec.Input) {
		return func(in *nodespec.Input) {
			in.Options.ClusterAddress = func(netip.Addr) (string, bool) { return source, isKnown }
		}
	}
	ofOther := func(in *nodespec.Input) { in.ReserveAddress = func(netip.Addr) string { return "worker-2" } }
	recorded := func(in *nodespec.Input) { in.RuleAddresses = addrs([]string{set}) }

	for name, test := range map[string]struct {
		changes []func(*nodespec.Input)
		why     string // empty if there is no problem
		listed  bool
	}{
		"unique":                                {nil, "", true},
		"outside the cluster":                   {[]func(*nodespec.Input){ofCluster("", true)}, "", true},
		"of the cluster":                        {[]func(*nodespec.Input){ofCluster("the API server", true)}, "is an address of the cluster according to the API server", false},
		"of the cluster, and recorded":          {[]func(*nodespec.Input){ofCluster("the API server", false), recorded}, "is an address of the cluster according to the API server", false},
		"cluster is not known":                  {[]func(*nodespec.Input){ofCluster("", false)}, "", false},
		"cluster is not known, and recorded":    {[]func(*nodespec.Input){ofCluster("", false), recorded}, "", true},
		"of another Node":                       {[]func(*nodespec.Input){ofOther}, `node "worker-2" has the address`, false},
		"of another Node, and recorded":         {[]func(*nodespec.Input){ofOther, recorded}, `node "worker-2" has the address`, true},
		"excluded by the machine, and recorded": {[]func(*nodespec.Input){excluding(set), recorded}, "is in a subnet that the machine excludes from node IPs", false},
	} {
		t.Run(name, func(t *testing.T) {
			in := setting(t, running(), map[string]string{"InternalIP": set})
			for _, change := range test.changes {
				change(&in)
			}

			spec, problems := desired(t, in)
			assert.Equal(t, test.listed, slices.Contains(of(corev1.NodeInternalIP, spec), set))
			assert.Equal(t, test.listed, !spec.AwaitsAddress)
			assert.Equal(t, test.listed, spec.Labels[noderecord.RuleAddressLabel(addr(set))] == "InternalIP")

			if test.why == "" {
				assert.Empty(t, problems)
			} else {
				assert.Equal(t, []nodespec.Problem{{Rule: "nat", Key: "addresses[InternalIP]", Value: set, Why: test.why, Kept: test.listed}}, problems)
			}
		})
	}
}

func excluding(address string) func(*nodespec.Input) {
	return func(in *nodespec.Input) { in.Machine.ExcludedSubnets = []netip.Prefix{prefix(address + "/32")} }
}

func TestDesired_RuleAddressesCountInTheLimit(t *testing.T) {
	in := running()
	for i := range machine.MaxSubjects - 3 {
		in.Machine.Addresses = append(in.Machine.Addresses, onLink("eth1", fmt.Sprintf("203.0.%d.%d/32", i/250, 1+i%250)))
	}

	var reserved []netip.Addr

	in.ReserveAddress = func(ip netip.Addr) string {
		reserved = append(reserved, ip)

		return ""
	}

	spec, problems := desired(t, setting(t, in, map[string]string{"ExternalIP": "198.51.100.5 198.51.100.6"}))
	assert.Equal(t, addrs([]string{"198.51.100.5"}), reserved)
	assert.Len(t, spec.Addresses, machine.MaxSubjects)
	assert.Contains(t, of(corev1.NodeExternalIP, spec), "198.51.100.5")
	assert.Equal(t, []nodespec.Problem{{Rule: "nat", Key: "addresses[ExternalIP]", Value: "198.51.100.6", Why: "the Node has 1000 names and addresses"}}, problems)
}
