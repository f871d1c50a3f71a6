package machine_test

import (
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestCheckName_FindsNamesThatAreNotOfNodes(t *testing.T) {
	for _, test := range []struct {
		name, nodename string
		want           machine.NameProblem
	}{
		{"worker-1", "worker-1", ""},
		{"w1.example.org", "worker-1", ""},
		{"vm17.example.org", "worker-1", ""},
		{"10.example", "worker-1", ""},
		{"*.example.org", "worker-1", machine.NameWildcard},
		{"", "", machine.NameInvalid},
		{"worker_1", "worker_1", machine.NameInvalid},
		{"a." + strings.Repeat("a.", 126) + "a", "worker-1", machine.NameInvalid},
		{"vm.17", "worker-1", machine.NameNumeric},
		{"vm.17", "vm.17", ""},
		{"10023", "10023", ""},
		{"10023", "10024", machine.NameNumeric},
		{"0x7f000001", "0x7f000001", ""},
		{"127.1", "127.1", ""},
		{"127.0.0.1", "127.0.0.1", machine.NameNumeric},
		{"127.0.0.01", "127.0.0.01", machine.NameNumeric},
		{"kubernetes", "kubernetes", machine.NameReserved},
		{"localhost.localdomain", "worker-1", machine.NameReserved},
		{"w1.default.svc", "worker-1", machine.NameReserved},
		{"w1.cluster.example", "w1.cluster.example", machine.NameReserved},
		{"w1.cluster.local", "worker-1", ""}, // not one of the domains
	} {
		got := machine.CheckName(test.name, test.nodename, []string{"Cluster.Example."})
		assert.Equal(t, test.want, got, "%s for node %s", test.name, test.nodename)
	}
}

func TestMachine_OwnNamesBelongToTheNodename(t *testing.T) {
	for _, test := range []struct {
		name                       string
		nodename, hostname, domain string
		platform                   runtime.PlatformMetadataSpec
		want                       []string
	}{
		{name: "nothing", want: []string{}},
		{name: "hostname without a nodename", hostname: "-", domain: "example.org", want: []string{}},
		{name: "nodename only", nodename: "w1", want: []string{"w1"}},
		{name: "nodename is the hostname", nodename: "w1", hostname: "w1", domain: "example.org", want: []string{"w1", "w1", "w1.example.org"}},
		{name: "nodename is the FQDN", nodename: "w1.example.org", hostname: "w1", domain: "example.org", want: []string{"w1.example.org", "w1", "w1.example.org"}},
		{name: "hostname in upper case", nodename: "w1", hostname: "W1", domain: "Example.org.", want: []string{"w1", "w1", "w1.example.org"}},
		{name: "hostname with underscore", nodename: "w-1", hostname: "w_1", domain: "a", want: []string{"w-1", "w_1", "w_1.a"}},
		{name: "hostname with characters that Talos drops", nodename: "w1", hostname: "-w\u00e9~1-", want: []string{"w1", "-w\u00e9~1-", "-w\u00e9~1-"}},
		{name: "another hostname", nodename: "w1", hostname: "vault", domain: "vault", want: []string{"w1"}},
		{name: "nodename as domain", nodename: "w1", hostname: "vault", domain: "w1", want: []string{"w1"}},
		{name: "letter that Unicode folds to k", nodename: "k1", hostname: "\u212a1", want: []string{"k1"}},
		{
			name: "platform names", nodename: "w1",
			platform: runtime.PlatformMetadataSpec{Hostname: "W1.a.example.", InternalDNS: "ip-1.internal", ExternalDNS: "vault"}, want: []string{"w1", "w1.a.example"},
		},
		{
			name: "platform's hostname of two labels is the FQDN", nodename: "w1", hostname: "w1", domain: "novalocal",
			platform: runtime.PlatformMetadataSpec{Hostname: "w1.novalocal"}, want: []string{"w1", "w1", "w1.novalocal"},
		},
	} {
		m := machine.Machine{Nodename: test.nodename, Hostname: test.hostname, Domainname: test.domain, Platform: test.platform}
		assert.Equal(t, test.want, m.OwnNames(), test.name)
		assert.Subset(t, m.ReportedNames(), test.want, test.name)
	}
}
