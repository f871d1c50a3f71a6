package config_test

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// good is a valid file.
type good struct {
	name, file string
	// want is the result, without defaults.
	want compiled
}

type (
	compiled = config.Compiled
	pool     = config.CompiledPool
)

func goodFiles() []good {
	return []good{
		{"empty file", "", compiled{}},
		{"comments only", "# nothing\n", compiled{}},
		{"empty document", "---\n", compiled{}},
		{"empty mapping", "{}", compiled{}},
		{"keys without values", "global:\n  # nothing\ntransformations:\nnodes:\ncsrApproval: ~\nipam: null\n", compiled{}},
		{"empty lists", "nodes: {selector: []}\ntransformations: []\nipam: {pools: []}", compiled{}},
		{"byte order mark", "\ufeffglobal:\n", compiled{}},

		{"cluster name", "global: {clusterName: shop}", compiled{ClusterName: "shop"}},
		{"string that looks like a number", "global: {clusterName: 007}", compiled{ClusterName: "007"}},
		{"string that looks like a boolean", "global: {clusterName: yes}", compiled{ClusterName: "yes"}},
		{"string that looks like a date", "global: {clusterName: 2026-11-21}", compiled{ClusterName: "2026-11-21"}},
		{"string that looks like a decimal fraction", "global: {clusterName: 1.10}", compiled{ClusterName: "1.10"}},
		{"preferIPv6 as in the code of the upstream Talos CCM", "global: {preferIPv6: true}", compiled{PreferIPv6: true}},
		{"PreferIPv6 as in the docs of the upstream Talos CCM", "global: {PreferIPv6: true}", compiled{PreferIPv6: true}},
		{"JSON", "{\n\t\"global\": {\"preferIPv6\": true}\n}", compiled{PreferIPv6: true}},
		{"providerID fallback node-ip", "global: {providerIDFallback: node-ip}", compiled{ProviderIDFallback: config.FallbackNodeIP}},
		{"providerID fallback uuid", "global: {providerIDFallback: uuid}", compiled{ProviderIDFallback: config.FallbackUUID}},

		{"addresses of rules", "transformations: [{addresses: {InternalIP: '{{ get .Meta \"0x0d\" }}'}, addressCIDRs: ['fd00:8::/32', 10.8.0.0/16]}]", compiled{FactKinds: machine.FactKindsOf("Meta")}},
		{"topology to follow", "nodes: {topology: follow}", compiled{FollowTopology: true}},
		{"first external IP per family", "addresses: {externalIPs: first-per-family}", compiled{OneExternalIPPerFamily: true}},
		{"all external IPs", "addresses: {externalIPs: all}", compiled{}},
		{"conditions to omit", "nodes: {conditions: omit}", compiled{OmitConditions: true}},
		{"conditions to publish", "nodes: {conditions: publish}", compiled{}},
		{"topology to keep", "nodes: {topology: keep}", compiled{}},
		{"lifecycle", "lifecycle: {gracePeriod: 1m, absentPeriod: 30m, dryRun: true, outOfServiceTaint: true, discovery: true}", compiled{Lifecycle: config.CompiledLifecycle{
			GracePeriod: time.Minute, AbsentPeriod: 30 * time.Minute, DryRun: true, OutOfServiceTaint: true, Discovery: true,
		}}},

		{"tables", "transformations: [{labels: {rack: '{{ lookup \"racks\" .UUID }}', none: '{{ lookup \"none\" .UUID }}'}}]\n" +
			"tables:\n  racks: {CZJ1: r12, '007': 1.10, empty: }\n  none:\n", compiled{}},

		{"labels from tags", "transformations: [{labelsFromTags: {match: '^team/', prefix: example.org/}}, {labelsFromTags: {match: ''}}, {labelsFromTags: }]", compiled{}},

		{"maximum expiration", "csrApproval: {maxExpiration: 720h}", compiled{MaxExpiration: 720 * time.Hour}},
		{"credential pinning enforced", "csrApproval: {credentialPinning: enforce}", compiled{CredentialPinning: "enforce"}},
		{"credential pinning with warnings", "csrApproval: {credentialPinning: warn}", compiled{CredentialPinning: "warn"}},
		{"minimum of the maximum expiration", "csrApproval: {maxExpiration: 10m}", compiled{MaxExpiration: 10 * time.Minute}},
		{"allowed SANs are canonicalized", "csrApproval: {allowedSANs: [{name: edge, dnsNames: [Web.Example.ORG, db.example.org.], ipAddresses: [192.0.2.7, '::ffff:192.0.2.8', '2001:DB8::1']}]}", compiled{
			AllowedSANs: []config.CompiledSANs{{Name: "edge", DNSNames: []string{"web.example.org", "db.example.org"}, IPAddresses: addresses("192.0.2.7", "192.0.2.8", "2001:db8::1")}},
		}},

		{"dual-stack pool", "ipam:\n  pools:\n  - {name: a, cidrs: [10.244.0.0/16, 'fd00:1::/48'], maskSizeIPv4: 25, maskSizeIPv6: 64}\n", pools(
			pool{Name: "a", CIDRs: prefixes("10.244.0.0/16", "fd00:1::/48"), MaskSizeIPv4: 25, MaskSizeIPv6: 64},
		)},
		{"block size auto applies where no IPv4 mask size is set", "ipam: {blockSize: auto, pools: [{name: a, cidrs: [10.0.0.0/25]}, {name: b, cidrs: [10.1.0.0/16], maskSizeIPv4: 26}, {name: c, " +
			"cidrs: ['fd00::/48'], maskSizeIPv6: 64}]}", pools(
			pool{Name: "a", CIDRs: prefixes("10.0.0.0/25"), BlockSizeAuto: true},
			pool{Name: "b", CIDRs: prefixes("10.1.0.0/16"), MaskSizeIPv4: 26},
			pool{Name: "c", CIDRs: prefixes("fd00::/48"), MaskSizeIPv6: 64, BlockSizeAuto: true},
			pool{BlockSizeAuto: true},
		)},
		{"mask size of an IP family without CIDRs", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv6: 96}]}", pools(pool{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv6: 96})},
		{"pools of one CIDR with blocks of different sizes", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 25}, {name: b, cidrs: [10.0.0.0/16], maskSizeIPv4: 22}]}", pools(
			pool{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 25}, pool{Name: "b", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 22},
		)},
		{"adjacent CIDRs", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/24, 10.0.2.0/24]}, {name: b, cidrs: [10.0.1.0/24]}]}", pools(
			pool{Name: "a", CIDRs: prefixes("10.0.0.0/24", "10.0.2.0/24")}, pool{Name: "b", CIDRs: prefixes("10.0.1.0/24")},
		)},
		{"service", "service: {default: true, addresses: internal, externalCIDRs: ['2001:db8::/32'], reservedPorts: [443]}", compiled{Service: config.Service{
			Default: true, Addresses: config.AddressesInternal, ExternalCIDRs: []string{"2001:db8::/32"}, ReservedPorts: []int{443},
		}}},
		{"aliases", "ipam: {pools: [{name: a, cidrs: &site [10.0.0.0/16]}]}\nglobal: &empty {}\nnodes: *empty\n", pools(pool{Name: "a", CIDRs: prefixes("10.0.0.0/16")})},
		{"merge keys", "ipam:\n  pools:\n  - &a {name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 26}\n  - {<<: *a, name: b, cidrs: [10.1.0.0/16]}\n" +
			"  - {name: c, <<: [{maskSizeIPv4: 27}, *a], cidrs: [10.2.0.0/16]}\n", pools(
			pool{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 26},
			pool{Name: "b", CIDRs: prefixes("10.1.0.0/16"), MaskSizeIPv4: 26},
			pool{Name: "c", CIDRs: prefixes("10.2.0.0/16"), MaskSizeIPv4: 27},
		)},
	}
}

func pools(list ...pool) compiled { return compiled{Pools: list} }

func addresses(list ...string) (addrs []netip.Addr) {
	for _, s := range list {
		addrs = append(addrs, netip.MustParseAddr(s))
	}

	return addrs
}

func prefixes(list ...string) (prefixes []netip.Prefix) {
	for _, s := range list {
		prefixes = append(prefixes, netip.MustParsePrefix(s))
	}

	return prefixes
}

func TestParse_AcceptsValidFiles(t *testing.T) {
	for _, test := range goodFiles() {
		t.Run(test.name, func(t *testing.T) {
			got, err := config.Parse("config.yaml", []byte(test.file))
			require.NoError(t, err)
			assert.NotNil(t, got.Rules)

			want := test.want
			want.Rules, want.MaxExpiration = got.Rules, cmp.Or(want.MaxExpiration, csrpolicy.DefaultMaxExpiration)
			want.Lifecycle.GracePeriod = cmp.Or(want.Lifecycle.GracePeriod, config.DefaultGracePeriod)
			want.Lifecycle.AbsentPeriod = cmp.Or(want.Lifecycle.AbsentPeriod, config.DefaultAbsentPeriod)
			assert.Equal(t, &want, got)
		})
	}
}

// badFile is an invalid file.
type badFile struct {
	name, file string
	// bySchema is true if the JSON schema refuses the file, too.
	bySchema bool
	// want are the prefixes of the lines of the error, without the name of the file.
	want []string
}

const byParser, bySchema = false, true

func bad(name, file string, bySchema bool, want ...string) badFile {
	return badFile{name, file, bySchema, want}
}

func badFiles() []badFile {
	return []badFile{
		// YAML.
		bad("YAML syntax error in the scanner", "global:\n  clusterName: a: b\n", byParser, ":2:17: invalid YAML: mapping values are not allowed in this context"),
		bad("YAML syntax error in the parser", "# one\nnodes: {a\nglobal: b\n", byParser, ":3: invalid YAML: did not find expected ',' or '}' while parsing a flow mapping"),
		bad("YAML syntax error at the end of the file", "# one\nnodes: {a\n", byParser, ":2: invalid YAML: did not find expected ',' or '}' while parsing a flow mapping"),
		bad("YAML syntax error in the first line", "a: }", byParser, ":1:4: invalid YAML: did not find expected node content while parsing a block node"),
		bad("control character", "# ä\n# \x01", byParser, ":2:3: invalid YAML: control characters are not allowed (value: 1)"),
		bad("unknown anchor", "\nglobal: *nothing\n", byParser, ":2:9: invalid YAML: unknown anchor 'nothing' referenced"),
		bad("two documents", "global: {}\n---\nglobal: {}\n", byParser, ":3:1: file contains more than one YAML document"),
		bad("syntax error in a second document", "global: {}\n---\n}\n", byParser, ":3:1: invalid YAML: did not find expected node content while parsing a block node"),
		bad("scalar document", "hello\n", bySchema, `:1:1: must be a mapping, not the string "hello"`),
		bad("list document", "- a\n", bySchema, ":1:1: must be a mapping, not a list"),
		bad("duplicate key", "global:\n  clusterName: a\n  clusterName: b\n", byParser, ":3:3: global.clusterName: duplicate key, first set in line 2"),
		bad("duplicate label", "transformations:\n- name: web\n  labels:\n    team: a\n    team: b\n", byParser, `:5:5: transformations[0].labels[team] (rule "web"): duplicate key, first set in line 4`),
		bad("key that is not a string", "? [a]\n: b\n", byParser, ":1:3: a key must be a string"),
		bad("unquoted template", "transformations:\n- name: web\n  labels:\n    zone: {{ .Zone }}\n", byParser,
			`:4:11: transformations[0].labels[zone] (rule "web"): a value that begins with "{{" must be quoted`),
		bad("double quotes in double quotes", "transformations:\n- labels:\n    zone: \"{{ default \"none\" .Zone }}\"\n", byParser,
			`:3:24: invalid YAML: did not find expected key while parsing a block mapping`),
		bad("single quotes in single quotes", "transformations:\n- labels: {zone: '{{ regexFind '^a' .Hostname }}'}\n", byParser,
			":2:33: invalid YAML: did not find expected ',' or '}' while parsing a flow mapping"),
		bad("text after an unquoted template", "transformations:\n- labels:\n    zone: {{ .Zone }}-a\n", byParser,
			`:3:22: invalid YAML: did not find expected key while parsing a block mapping; a value that begins with "{{" must be quoted`),
		bad("tab", "transformations:\n- name: web\n\tlabels: {}\n", byParser,
			`:3:1: invalid YAML: found a tab character that violates indentation while scanning a plain scalar`),
		bad("tab at the start", "transformations:\n\t- name: web\n", byParser,
			`:2:1: invalid YAML: found character that cannot start any token while scanning for the next token`),
		bad("character that must be quoted", "transformations:\n- labels:\n    team: @web\n", byParser,
			`:3:11: invalid YAML: found character that cannot start any token while scanning for the next token`),
		bad("regular expression in double quotes", "nodes: {selector: [{matchExpressions: [{key: zone, operator: Regexp, values: [\"\\d\"]}]}]}\n", byParser,
			`:1:80: invalid YAML: found unknown escape character while scanning a quoted scalar`),
		bad("regular expression without quotes", "nodes: {selector: [{matchExpressions: [{key: zone, operator: Regexp, values: [^[0-9]+$]}]}]}\n", byParser,
			`:1:80: invalid YAML: did not find expected ',' or ']' while parsing a flow sequence`),
		bad("quote that is not closed", "transformations:\n- labels:\n    team: 'web\n    tier: front\n", byParser,
			`:3:11: invalid YAML: found unexpected end of stream while scanning a quoted scalar`),
		bad("keys that are not aligned", "transformations:\n- name: web\n   labels: {}\n", byParser,
			`:3:10: invalid YAML: mapping values are not allowed in this context`),
		bad("list that is not aligned", "transformations:\n  - name: web\n  labels: {}\n", byParser,
			`:3:3: invalid YAML: did not find expected '-' indicator while parsing a block collection`),
		bad("custom tag", "global:\n  clusterName: !secret a\n", byParser, `:2:16: global.clusterName: must be a string, not a value with the YAML tag "!secret"`),
		bad("binary tag", "global:\n  clusterName: !!binary aGk=\n", byParser, `:2:16: global.clusterName: must be a string, not a value with the YAML tag "!!binary"`),
		bad("custom tag on a mapping", "global: !secret {}\n", byParser, `:1:9: global: must be a mapping, not a value with the YAML tag "!secret"`),
		bad("null tag on a mapping", "global: !!null {}\n", byParser, `:1:9: global: must be a mapping, not a value with the YAML tag "!!null"`),
		bad("string tag on a mapping", "global:\n  clusterName: !!str {a: b}\n", bySchema, `:2:16: global.clusterName: must be a string, not a value with the YAML tag "!!str"`),
		bad("boolean tag on a list", "global:\n  preferIPv6: !!bool [a]\n", bySchema, `:2:15: global.preferIPv6: must be true or false, not a value with the YAML tag "!!bool"`),
		bad("alias that contains itself", "global: &a\n  clusterName: *a\n", byParser, `:1:9: global.clusterName: must be a string, not a mapping`),
		bad("merge key that contains itself", "global: &a\n  <<: *a\n", byParser, ":2:7: global.<<: must not contain itself"),
		bad("merge key that is not a mapping", "global:\n  <<: [a]\n", byParser, ":2:7: global.<<: must be a mapping or a list of mappings"),

		// Unknown, misplaced and missing keys.
		bad("unknown key", "global: {}\nwhatever: 1\n", bySchema, ":2:1: whatever: unknown key; expected global, transformations, tables, nodes, addresses, csrApproval, ipam"),
		bad("misspelled key at the top level", "transformation: []\n", bySchema, ":1:1: transformation: unknown key; expected global, transformations, "),
		bad("misspelled key in a rule", "transformations:\n- {name: web}\n- name: db\n  lables: {a: b}\n", bySchema,
			`:4:3: transformations[1].lables (rule "db"): unknown key; expected name, nodeSelector, `),
		bad("key in another case", "global: {ClusterName: a}\n", bySchema, ":1:10: global.ClusterName: unknown key; expected clusterName, preferIPv6, providerIDFallback"),
		bad("key at the wrong indentation", "transformations:\n- name: web\n  nodeSelector:\n  - matchExpressions: []\n    labels: {a: b}\n", bySchema,
			`:5:5: transformations[0].nodeSelector[0].labels (rule "web"): unknown key; expected name, matchExpressions`),
		bad("key that belongs to the top level", "global:\n  nodes: {}\n", bySchema, ":2:3: global.nodes: unknown key; expected clusterName"),
		bad("feature of drafts of the upstream Talos CCM", "transformations:\n- features:\n    publicIPPredict: true\n", bySchema,
			":3:5: transformations[0].features.publicIPPredict: unknown key; expected publicIPDiscovery"),
		bad("both spellings of a key", "global:\n  preferIPv6: true\n  PreferIPv6: true\n", bySchema, ":3:3: global.PreferIPv6: cannot be combined with preferIPv6, which is another spelling of this key"),
		bad("missing required keys", "transformations:\n- name: web\n  nodeSelector:\n  - matchExpressions:\n    - values: [a]\n", bySchema,
			`:5:7: transformations[0].nodeSelector[0].matchExpressions[0].key (rule "web"): Required value`,
			`:5:7: transformations[0].nodeSelector[0].matchExpressions[0].operator (rule "web"): Required value`),

		// Types.
		bad("list instead of mapping", "global: []\n", bySchema, ":1:9: global: must be a mapping, not a list"),
		bad("mapping instead of list", "transformations: {name: web}\n", bySchema, ":1:18: transformations: must be a list, not a mapping"),
		bad("string instead of list of strings", "ipam:\n  pools:\n  - name: a\n    cidrs: 10.0.0.0/16\n", bySchema, `:4:12: ipam.pools[0].cidrs (pool "a"): must be a list, not the string "10.0.0.0/16"`),
		bad("list instead of string", "global: {clusterName: [a]}\n", bySchema, ":1:23: global.clusterName: must be a string, not a list"),
		bad("list of labels", "transformations:\n- name: web\n  labels: [a]\n", bySchema, `:3:11: transformations[0].labels (rule "web"): must be a mapping, not a list`),
		bad("list as a label value", "transformations:\n- name: web\n  labels:\n    team: [a]\n", bySchema, `:4:11: transformations[0].labels[team] (rule "web"): must be a string, not a list`),
		bad("empty list item", "transformations:\n-\n- name: a\n", bySchema, ":2:2: transformations[0]: Required value: list item is empty"),
		bad("quoted boolean", "global: {preferIPv6: 'true'}\n", bySchema, `:1:22: global.preferIPv6: must be true or false, not the string "true"`),
		bad("YAML 1.1 boolean", "global: {preferIPv6: yes}\n", bySchema, `:1:22: global.preferIPv6: must be true or false, not the string "yes"`),
		bad("quoted number", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: '24'}]}", bySchema,
			`:1:62: ipam.pools[0].maskSizeIPv4 (pool "a"): must be a decimal integer, not the string "24"`),
		bad("fraction instead of integer", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 24.5}]}", bySchema,
			`:1:62: ipam.pools[0].maskSizeIPv4 (pool "a"): must be a decimal integer, not "24.5"`),
		bad("leading zero", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 030}]}", byParser, `:1:62: ipam.pools[0].maskSizeIPv4 (pool "a"): must be a decimal integer, not "030"`),
		bad("integer that overflows", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 99999999999999999999}]}", bySchema,
			`:1:62: ipam.pools[0].maskSizeIPv4 (pool "a"): must be a decimal integer, not "99999999999999999999"`),

		// Values.
		bad("cluster name that is not a label value", "global: {clusterName: my shop}\n", byParser, `:1:10: global.clusterName: "my shop": must be a valid label value: `),
		bad("unknown providerID fallback", "global: {providerIDFallback: hostname}\n", bySchema, `:1:10: global.providerIDFallback: Unsupported value: "hostname": supported values: "uuid", "node-ip"`),
		bad("unknown block size", "ipam: {blockSize: large}\n", bySchema, `:1:8: ipam.blockSize: Unsupported value: "large": supported values: "auto"`),
		bad("unknown addresses of Services", "service: {addresses: public}\n", bySchema, `:1:11: service.addresses: Unsupported value: "public": supported values: "external", "internal"`),
		bad("reserved port that is not a port", "service: {reservedPorts: [443, 65536]}\n", byParser, `:1:32: service.reservedPorts[1]: 65536: must be between 1 and 65535, inclusive`),
		bad("external CIDR with host bits", "service: {externalCIDRs: [203.0.113.0/24, 203.0.113.1/24]}\n", byParser,
			`:1:43: service.externalCIDRs[1]: "203.0.113.1/24" has host bits set; did you mean 203.0.113.0/24?`),
		bad("lifecycle periods", "lifecycle: {gracePeriod: 59s, absentPeriod: 30}\n", byParser,
			`:1:13: lifecycle.gracePeriod: "59s": must be at least 1m0s, since Kubernetes takes`,
			`:1:31: lifecycle.absentPeriod: "30": must be a duration such as 720h or 90m`),
		bad("lifecycle selector", "lifecycle: {selector: [{matchExpressions: [{key: nope, operator: Exists}]}]}\n", byParser, `:1:45: lifecycle.selector[0].matchExpressions[0].key: `),
		bad("maximum expiration that is not a duration", "csrApproval: {maxExpiration: a year}\n", byParser,
			`:1:15: csrApproval.maxExpiration: "a year": must be a duration such as 720h or 90m`),
		bad("maximum expiration without unit", "csrApproval: {maxExpiration: 3600}\n", byParser, `:1:15: csrApproval.maxExpiration: "3600": must be a duration such as 720h or 90m`),
		bad("maximum expiration below the minimum", "csrApproval: {maxExpiration: 9m}\n", byParser,
			`:1:15: csrApproval.maxExpiration: "9m": must be at least 10m0s, the minimum of Kubernetes`),
		bad("negative maximum expiration", "csrApproval: {maxExpiration: -24h}\n", byParser, `:1:15: csrApproval.maxExpiration: "-24h": must be at least 10m0s, the minimum of Kubernetes`),
		bad("DNS names that no certificate may contain", "csrApproval:\n  allowedSANs:\n  - name: edge\n    dnsNames:\n    - '*.example.org'\n    - Kubernetes.default.SVC\n    - kubernetes\n"+
			"    - a.b.svc.cluster.local\n    - localhost\n    - cluster.local\n    - web.Cluster.Local.\n", byParser,
			`:5:7: csrApproval.allowedSANs[0].dnsNames[0] (entry "edge"): "*.example.org": is a wildcard`,
			`:6:7: csrApproval.allowedSANs[0].dnsNames[1] (entry "edge"): "Kubernetes.default.SVC": is reserved for the cluster`,
			`:7:7: csrApproval.allowedSANs[0].dnsNames[2] (entry "edge"): "kubernetes": is reserved for the cluster`,
			`:8:7: csrApproval.allowedSANs[0].dnsNames[3] (entry "edge"): "a.b.svc.cluster.local": is reserved for the cluster`,
			`:9:7: csrApproval.allowedSANs[0].dnsNames[4] (entry "edge"): "localhost": is reserved for the cluster`,
			`:10:7: csrApproval.allowedSANs[0].dnsNames[5] (entry "edge"): "cluster.local": is reserved for the cluster`,
			`:11:7: csrApproval.allowedSANs[0].dnsNames[6] (entry "edge"): "web.Cluster.Local.": is reserved for the cluster`),
		bad("invalid DNS names and addresses", "csrApproval:\n  allowedSANs:\n  - dnsNames: [192.0.2.1, a_b, 'a..b', '']\n"+
			"    ipAddresses: [example.org, 10.0.0.0/8, 127.0.0.1, 'fe80::1%eth0', 'fe80::1', 224.0.0.1, '::']\n", byParser,
			`:3:16: csrApproval.allowedSANs[0].dnsNames[0]: "192.0.2.1": is an IP address; list it in ipAddresses`,
			`:3:27: csrApproval.allowedSANs[0].dnsNames[1]: "a_b": is not a valid DNS name`,
			`:3:32: csrApproval.allowedSANs[0].dnsNames[2]: "a..b": is not a valid DNS name`,
			`:3:40: csrApproval.allowedSANs[0].dnsNames[3]: "": is not a valid DNS name`,
			`:4:19: csrApproval.allowedSANs[0].ipAddresses[0]: "example.org": is not an IP address`,
			`:4:32: csrApproval.allowedSANs[0].ipAddresses[1]: "10.0.0.0/8": is not an IP address`,
			`:4:44: csrApproval.allowedSANs[0].ipAddresses[2]: "127.0.0.1": is a loopback, link-local, multicast, unspecified or broadcast address`,
			`:4:55: csrApproval.allowedSANs[0].ipAddresses[3]: "fe80::1%eth0": has a zone`,
			`:4:71: csrApproval.allowedSANs[0].ipAddresses[4]: "fe80::1": is a loopback, link-local, multicast, unspecified or broadcast address`,
			`:4:82: csrApproval.allowedSANs[0].ipAddresses[5]: "224.0.0.1": is a loopback, link-local, multicast, unspecified or broadcast address`,
			`:4:93: csrApproval.allowedSANs[0].ipAddresses[6]: "::": is a loopback, link-local, multicast, unspecified or broadcast address`),
		bad("allowed SANs without names and addresses", "csrApproval:\n  allowedSANs:\n  - name: edge\n", byParser,
			`:3:5: csrApproval.allowedSANs[0] (entry "edge"): Required value: must have dnsNames or ipAddresses`),
		bad("allowed SANs with the same name", "csrApproval:\n  allowedSANs:\n  - {name: a, dnsNames: [a.example.org]}\n  - {name: a, dnsNames: [b.example.org]}\n", byParser,
			`:4:6: csrApproval.allowedSANs[1].name (entry "a"): "a": is also the name of the entry in line 3`),

		// Rules and selectors. Package rules validates them.
		bad("invalid regular expression", "transformations:\n- name: web\n"+
			"  nodeSelector:\n  - matchExpressions:\n    - key: hostname\n      operator: Regexp\n      values:\n      - '^web-('\n", byParser,
			`:7:7: transformations[0].nodeSelector[0].matchExpressions[0].values (rule "web"): `),
		bad("invalid template", "transformations:\n- name: web\n  labels:\n    a: b\n    zone: '{{ .Zone }'\n", byParser, `:5:5: transformations[0].labels[zone] (rule "web"): `),
		bad("unknown template variable", "transformations:\n- name: web\n  annotations:\n    zone: '{{ .Zoen }}'\n", byParser, `:4:5: transformations[0].annotations[zone] (rule "web"): `),
		bad("labels from tags", "transformations:\n- name: web\n  labelsFromTags: {match: '(', prefix: kubernetes.io/}\n- labelsFromTags: {prefix: a}\n- labelsFromTags: ^team/\n", bySchema,
			`:3:20: transformations[0].labelsFromTags.match (rule "web"): error parsing regexp`,
			`:3:32: transformations[0].labelsFromTags.prefix (rule "web"): key "kubernetes.io/name" cannot be set from tags`,
			`:4:3: transformations[1].labelsFromTags.match: Required value`,
			`:5:19: transformations[2].labelsFromTags: must be a mapping, not the string "^team/"`),
		bad("prefix of Kubernetes for labels from tags", "transformations:\n- labelsFromTags: {match: a, prefix: a.k8s.io/}\n", byParser,
			`:2:30: transformations[0].labelsFromTags.prefix: key "a.k8s.io/name" cannot be set from tags`),
		bad("unknown table", "tables: {racks: {}}\ntransformations:\n- name: web\n  labels:\n    rack: '{{ lookup \"rack\" .UUID }}'\n", byParser,
			`:5:5: transformations[0].labels[rack] (rule "web"): unknown table "rack"; tables of the configuration: racks`),
		bad("table that is not one", "tables:\n  racks: [a]\n  rows: {r1: {site: a}}\n", bySchema,
			`:2:10: tables[racks]: must be a mapping, not a list`,
			`:3:14: tables[rows][r1]: must be a string, not a mapping`),
		bad("key twice in a table", "tables:\n  racks:\n    CZJ1: r1\n    CZJ1: r2\n", byParser, ":4:5: tables[racks][CZJ1]: duplicate key, first set in line 3"),
		bad("invalid label, annotation and taint", "transformations:\n- name: web\n"+
			"  labels:\n    foo bar: a\n    team: a b\n  annotations:\n    'a/b/c': x\n  taints:\n    a b: NoSchedule\n    a: Never\n", byParser,
			`:4:5: transformations[0].labels[foo bar] (rule "web"): `,
			`:5:5: transformations[0].labels[team] (rule "web"): `,
			`:7:5: transformations[0].annotations[a/b/c] (rule "web"): `,
			`:9:5: transformations[0].taints[a b] (rule "web"): `,
			`:10:5: transformations[0].taints[a] (rule "web"): `),
		bad("reserved taint", "transformations:\n- name: web\n  taints:\n    node.kubernetes.io/not-ready: NoSchedule\n", byParser,
			`:4:5: transformations[0].taints[node.kubernetes.io/not-ready] (rule "web"): `),
		bad("platform metadata that cannot be replaced", "transformations:\n- platformMetadata:\n    Hostname: a\n    Color: b\n", byParser,
			":3:5: transformations[0].platformMetadata[Hostname]: ",
			":4:5: transformations[0].platformMetadata[Color]: "),
		bad("providerID that identifies no instance", "transformations:\n- platformMetadata:\n    ProviderID: web-1\n", byParser,
			`:3:5: transformations[0].platformMetadata[ProviderID]: "web-1" does not identify an instance`),
		bad("addresses outside their CIDRs, and without CIDRs", "transformations:\n- name: nat\n  addresses:\n    ExternalIP: 192.0.2.1\n    InternalIP: 10.8.0.1\n"+
			"  addressCIDRs:\n  - 10.8.0.0/16\n- addresses: {ExternalIP: '{{ .Meta.nat }}'}\n", byParser,
			`:4:5: transformations[0].addresses[ExternalIP] (rule "nat"): "192.0.2.1" is in none of the rule's addressCIDRs`,
			`:8:3: transformations[1].addressCIDRs: Required value: must contain the rule's addresses`),
		bad("addresses with invalid or no CIDRs", "transformations:\n- addresses: {ExternalIP: 192.0.2.1}\n  addressCIDRs: [192.0.2.1/24]\n- addresses: {ExternalIP: 192.0.2.2}\n", byParser,
			`:3:18: transformations[0].addressCIDRs[0]: "192.0.2.1/24" has host bits set; did you mean 192.0.2.0/24?`,
			`:4:3: transformations[1].addressCIDRs: Required value: must contain the rule's addresses`),
		bad("rules with the same name", "transformations:\n- name: web\n- name: db\n- name: web\n", byParser, `:4:3: transformations[2].name (rule "web"): `),
		bad("selector keys that are unknown or for pools only", "nodes: {selector: [{matchExpressions: [{key: color, operator: Exists}]}]}\ntransformations:\n- name: web\n"+
			"  nodeSelector: [{matchExpressions: [{key: labels.a, operator: Exists}]}]\n"+
			"csrApproval: {allowedSANs: [{nodeSelector: [{matchExpressions: [{key: labels.a, operator: Exists}]}], dnsNames: [example.org]}],\n"+
			"  selector: [{matchExpressions: [{key: labels.a, operator: Exists}]}]}\n"+
			"ipam: {pools: [{name: a, nodeSelector: [{matchExpressions: [{key: labels.a, operator: In}]}], cidrs: [10.0.0.0/16]}],\n"+
			"  selector: [{matchExpressions: [{key: labels.a, operator: Exists}]}]}\n", byParser,
			":1:41: nodes.selector[0].matchExpressions[0].key: ",
			`:4:39: transformations[0].nodeSelector[0].matchExpressions[0].key (rule "web"): `,
			":5:66: csrApproval.allowedSANs[0].nodeSelector[0].matchExpressions[0].key: ",
			":6:35: csrApproval.selector[0].matchExpressions[0].key: ",
			`:7:61: ipam.pools[0].nodeSelector[0].matchExpressions[0].values (pool "a"): `,
			":8:35: ipam.selector[0].matchExpressions[0].key: "),
		bad("unknown operator", "nodes: {selector: [{matchExpressions: [{key: zone, operator: Equals, values: [a]}]}]}\n", bySchema, ":1:52: nodes.selector[0].matchExpressions[0].operator: "),

		// Pools.
		bad("pool without name and CIDRs", "ipam:\n  pools:\n  - {}\n  - {name: '', cidrs: []}\n", bySchema,
			":3:5: ipam.pools[0].name: Required value",
			":3:5: ipam.pools[0].cidrs: Required value",
			":4:6: ipam.pools[1].name: Required value",
			":4:16: ipam.pools[1].cidrs: Required value"),
		bad("pools with the same name", "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16]}\n  - {name: a, cidrs: [10.1.0.0/16]}\n", byParser,
			`:4:6: ipam.pools[1].name (pool "a"): "a": is also the name of the entry in line 3`),
		bad("invalid CIDRs", "ipam:\n  pools:\n  - name: a\n    cidrs: [10.0.0.0, 10.0.0.0/33, 10.1.2.3/16, '::ffff:10.0.0.0/112', 0.0.0.0/0]\n", byParser,
			`:4:13: ipam.pools[0].cidrs[0] (pool "a"): "10.0.0.0" is not a CIDR such as 10.244.0.0/16`,
			`:4:23: ipam.pools[0].cidrs[1] (pool "a"): "10.0.0.0/33" is not a CIDR such as 10.244.0.0/16`,
			`:4:36: ipam.pools[0].cidrs[2] (pool "a"): "10.1.2.3/16" has host bits set; did you mean 10.1.0.0/16?`,
			`:4:49: ipam.pools[0].cidrs[3] (pool "a"): "::ffff:10.0.0.0/112" is an IPv4-mapped IPv6 CIDR; write it as IPv4`,
			`:4:72: ipam.pools[0].cidrs[4] (pool "a"): "0.0.0.0/0": must not contain all addresses`),
		bad("CIDRs that pods cannot have addresses of", "ipam:\n  pools:\n  - name: a\n    cidrs: [224.0.0.0/8, 127.0.0.0/16, '::/64', 169.254.0.0/16, 'fe80::/64', 'ff05::/16']\n", byParser,
			`:4:13: ipam.pools[0].cidrs[0] (pool "a"): 224.0.0.0/8 contains multicast addresses`,
			`:4:26: ipam.pools[0].cidrs[1] (pool "a"): 127.0.0.0/16 contains loopback addresses`,
			`:4:40: ipam.pools[0].cidrs[2] (pool "a"): ::/64 contains loopback addresses`,
			`:4:49: ipam.pools[0].cidrs[3] (pool "a"): 169.254.0.0/16 contains link-local addresses`,
			`:4:65: ipam.pools[0].cidrs[4] (pool "a"): fe80::/64 contains link-local addresses`,
			`:4:78: ipam.pools[0].cidrs[5] (pool "a"): ff05::/16 contains multicast addresses`),
		bad("pools of one CIDR that disagree about machines", "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16]}\n  - {name: b, cidrs: [10.0.0.0/16], containsMachines: true}\n", byParser,
			`:4:37: ipam.pools[1].containsMachines (pool "b"): true: pool "a" in line 3 has the CIDR 10.0.0.0/16, too; set the same value for both`),
		bad("overlapping CIDRs", "ipam:\n  pools:\n  - name: small\n    cidrs: [10.1.0.0/16, 'fd00::/48']\n  - name: large\n    cidrs: ['fd00:0:0:5::/64', 10.0.0.0/8]\n  - name: twice\n"+
			"    cidrs: [192.168.0.0/16, 192.168.0.0/16]\n", byParser,
			`:6:13: ipam.pools[1].cidrs[0] (pool "large"): "fd00:0:0:5::/64": overlaps fd00::/48 of pool "small" in line 4`,
			`:6:32: ipam.pools[1].cidrs[1] (pool "large"): "10.0.0.0/8": overlaps 10.1.0.0/16 of pool "small" in line 4`,
			`:8:29: ipam.pools[2].cidrs[1] (pool "twice"): "192.168.0.0/16": overlaps 192.168.0.0/16 of pool "twice" in line 8`),
		bad("mask size that does not fit the CIDR", "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 15}\n  - {name: b, cidrs: ['fd00::/48'], maskSizeIPv6: 40}\n"+
			"  - {name: c, cidrs: ['fd01::/16'], maskSizeIPv6: 96}\n", byParser,
			`:3:37: ipam.pools[0].maskSizeIPv4 (pool "a"): `,
			`:4:37: ipam.pools[1].maskSizeIPv6 (pool "b"): `,
			`:5:37: ipam.pools[2].maskSizeIPv6 (pool "c"): `),
		bad("mask size that is too large", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 33}]}", bySchema,
			`:1:48: ipam.pools[0].maskSizeIPv4 (pool "a"): 33: must be between 1 and 32`),
		bad("negative mask size", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: -1}]}", bySchema,
			`:1:48: ipam.pools[0].maskSizeIPv4 (pool "a"): -1: must be between 1 and 32`),
		bad("small CIDR without mask size", "ipam: {pools: [{name: a, cidrs: [10.0.0.0/25]}]}", byParser,
			`:1:16: ipam.pools[0].maskSizeIPv4 (pool "a"): Required value: 10.0.0.0/25 is smaller than a pod CIDR of the default mask size`),
	}
}

func TestParse_ReportsPositionPathAndRule(t *testing.T) {
	for _, test := range badFiles() {
		t.Run(test.name, func(t *testing.T) { assertProblems(t, test.file, test.want...) })
	}
}

// assertProblems asserts that the lines of the error start with the given ones.
func assertProblems(t *testing.T, file string, want ...string) {
	t.Helper()

	compiled, err := config.Parse("config.yaml", []byte(file))

	problems, ok := errors.AsType[*config.Error](err)
	require.True(t, ok, err)
	require.Nil(t, compiled)

	lines := strings.Split(problems.Error(), "\n")
	require.Len(t, lines, len(want))

	for i, line := range lines {
		assert.True(t, strings.HasPrefix(line, "config.yaml"+want[i]), "got %s, want %s", line, want[i])
	}
}

func TestIsOurs(t *testing.T) {
	for text, want := range map[string]bool{
		"": true, "# nothing": true, "{}": true, "a: b: c": true,
		"transformations: []": true, "transformations: []\nsops: {}": true, "nodes: {}\nlables: {}": true, "transformation: []": false,
		"global: {}\nservice: {}\nimage: a\nreplicas: 1\nresources: {}": false, "- a": false, "text": false, "a: 1": false,
		"kind: Pod\nname: a": false, "kind: Pod\n---\ntransformations: []": true, "machine: {}\ncluster: {}": false,
		"kind: ExtensionServiceConfig\nname: talos-ccm": true, "kind: ExtensionServiceConfig": true, "kind: ExtensionServiceConfig\nname: tailscale": false,
		"kind: ExtensionServicesConfig\nname: talos-ccm": true, "machine: {}\n---\nkind: ExtensionServiceConfig\nname: talos-ccm": true,
	} {
		assert.Equal(t, want, config.IsOurs("talos-ccm", []byte(text)), text)
	}
}

func TestParse_ReportsAllProblems(t *testing.T) {
	file, want := "unknown: 1\ntransformations:\n", []string{":1:1: unknown: unknown key"}

	for i := range 50 {
		file += fmt.Sprintf("- {lables: {}, name: rule-%d}\n", i)
		want = append(want, fmt.Sprintf(`:%d:4: transformations[%d].lables (rule "rule-%d"): unknown key; expected name, nodeSelector, `, i+3, i, i))
	}

	file += "ipam: {pools: [{name: a, cidrs: [10.0.0.1/16]}]}\ncsrApproval: {maxExpiration: 1s}\n"
	want = append(want, `:53:34: ipam.pools[0].cidrs[0] (pool "a"): "10.0.0.1/16"`, `:54:15: csrApproval.maxExpiration: "1s"`)
	assertProblems(t, file, want...)
}

// TestParse_OmitsConsequentialProblems asserts that a value that cannot be decoded is not reported as missing, too.
func TestParse_OmitsConsequentialProblems(t *testing.T) {
	assertProblems(t, "ipam: {pools: [{name: [], cidrs: {}}]}\ncsrApproval: {maxExpiration: []}\n", ":1:23: ipam.pools[0].name: must be a string, not a list",
		":1:34: ipam.pools[0].cidrs: must be a list, not a mapping", ":2:30: csrApproval.maxExpiration: must be a string, not a list")
}

func TestParse_RefusesLargeFiles(t *testing.T) {
	assertProblems(t, strings.Repeat("#\n", config.MaxSize/2+1), ": file is larger than 1048576 bytes")
}

func TestParse_BoundsTables(t *testing.T) {
	rows := func(count int) (table string) {
		for i := range count {
			table += fmt.Sprintf("%d: a,", i)
		}

		return table
	}

	_, err := config.Parse("config.yaml", []byte("tables: {a: {"+rows(config.MaxRows-1)+"}, b: {"+rows(1)+"}}"))
	require.NoError(t, err)

	assertProblems(t, "tables: {a: {"+rows(config.MaxRows)+"}, b: {"+rows(1)+"}}", ":1:1: tables: Too many: 10001: must have at most 10000 items")
}

func TestParse_BoundsNumberOfProblems(t *testing.T) {
	unknown, invalid := "", "transformations:\n"+strings.Repeat("- {labels: {a: b c}}\n", 2000)
	for i := range 2000 {
		unknown += fmt.Sprintf("a%d: 1\n", i)
	}

	for _, file := range []string{unknown, invalid} {
		_, err := config.Parse("config.yaml", []byte(file))

		problems, ok := errors.AsType[*config.Error](err)
		require.True(t, ok)
		require.Len(t, problems.Problems, 1001)
		assert.Contains(t, problems.Problems[1000].Msg, "too many problems")
	}
}

func TestParse_BoundsLengthOfProblems(t *testing.T) {
	long := strings.Repeat("ä", 10_000)

	_, err := config.Parse("config.yaml", []byte("global: {providerIDFallback: "+long+"}\n"+strings.Repeat("b", 900)+": 1\n"))
	require.Error(t, err)
	assert.LessOrEqual(t, len(err.Error()), 1000)
	assert.True(t, utf8.ValidString(err.Error()))
}

// TestParse_DoesNotExpandAliasesBelowUnknownKeys parses files that would expand to more than fits in memory.
func TestParse_DoesNotExpandAliasesBelowUnknownKeys(t *testing.T) {
	lists, merges := "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n", "m0: &m0 {k: v}\n"

	for i := range 30 {
		lists += fmt.Sprintf("a%d: &a%d [%s]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d, ", i), 10))
		merges += fmt.Sprintf("m%d: &m%d {<<: [%s], k%d: v}\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*m%d, ", i), 10), i)
	}

	long := "a: &a " + strings.Repeat("x", 1<<18) + "\nb: [" + strings.Repeat("*a, ", 100) + "]\n"

	for name, file := range map[string]string{"lists of lists": lists, "merges of merges": merges, "long string many times": long} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse("config.yaml", []byte(file))
			require.Error(t, err)
			assert.LessOrEqual(t, len(err.Error()), 10_000)
		})
	}
}
