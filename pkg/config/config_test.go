package config_test

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

// good is a valid file.
type good struct {
	name, file string
	// want turns the defaults into what the file gives; nil for the defaults.
	want func(*config.Compiled)
}

func goodFiles() []good {
	return []good{
		{name: "empty file"},
		{name: "comments only", file: "# nothing\n"},
		{name: "empty document", file: "---\n"},
		{name: "empty mapping", file: "{}"},
		{name: "keys without values", file: "global:\n  # nothing\ntransformations:\nnodes:\ncsrApproval: ~\nipam: null\n"},
		{name: "empty lists", file: "nodes: {selector: []}\ntransformations: []\nipam: {pools: []}"},
		{name: "byte order mark", file: "\ufeffglobal:\n"},

		{name: "cluster name", file: "global: {clusterName: shop}", want: func(c *config.Compiled) { c.ClusterName = "shop" }},
		{name: "string that looks like a number", file: "global: {clusterName: 007}", want: func(c *config.Compiled) { c.ClusterName = "007" }},
		{name: "string that looks like a boolean", file: "global: {clusterName: yes}", want: func(c *config.Compiled) { c.ClusterName = "yes" }},
		{name: "string that looks like a date", file: "global: {clusterName: 2026-11-21}", want: func(c *config.Compiled) { c.ClusterName = "2026-11-21" }},
		{name: "string that looks like a decimal fraction", file: "global: {clusterName: 1.10}", want: func(c *config.Compiled) { c.ClusterName = "1.10" }},
		{
			name: "preferIPv6 as in the code of the upstream Talos CCM", file: "global: {preferIPv6: true}",
			want: func(c *config.Compiled) { c.PreferIPv6 = true },
		},
		{
			name: "PreferIPv6 as in the docs of the upstream Talos CCM", file: "global: {PreferIPv6: true}",
			want: func(c *config.Compiled) { c.PreferIPv6 = true },
		},
		{name: "JSON", file: "{\n\t\"global\": {\"preferIPv6\": true}\n}", want: func(c *config.Compiled) { c.PreferIPv6 = true }},
		{
			name: "providerID fallback node-ip", file: "global: {providerIDFallback: node-ip}",
			want: func(c *config.Compiled) { c.ProviderIDFallback = config.FallbackNodeIP },
		},
		{
			name: "providerID fallback uuid", file: "global: {providerIDFallback: uuid}",
			want: func(c *config.Compiled) { c.ProviderIDFallback = config.FallbackUUID },
		},

		{name: "topology to follow", file: "nodes: {topology: follow}", want: func(c *config.Compiled) { c.FollowTopology = true }},
		{name: "first external IP per family", file: "addresses: {externalIPs: first-per-family}", want: func(c *config.Compiled) { c.OneExternalIPPerFamily = true }},
		{name: "all external IPs", file: "addresses: {externalIPs: all}"},
		{name: "topology to keep", file: "nodes: {topology: keep}"},
		{
			name: "lifecycle", file: "lifecycle: {gracePeriod: 1m, absentPeriod: 30m, dryRun: true, outOfServiceTaint: true, replaced: true, discovery: true}",
			want: func(c *config.Compiled) {
				c.Lifecycle = config.CompiledLifecycle{
					GracePeriod: time.Minute, AbsentPeriod: 30 * time.Minute,
					DryRun: true, OutOfServiceTaint: true, Replaced: true, Discovery: true,
				}
			},
		},

		{name: "maximum expiration", file: "csrApproval: {maxExpiration: 720h}", want: func(c *config.Compiled) { c.MaxExpiration = 720 * time.Hour }},
		{name: "credential pinning enforced", file: "csrApproval: {credentialPinning: enforce}", want: func(c *config.Compiled) { c.EnforceCredential = true }},
		{name: "credential pinning with warnings", file: "csrApproval: {credentialPinning: warn}"},
		{
			name: "minimum of the maximum expiration", file: "csrApproval: {maxExpiration: 10m}",
			want: func(c *config.Compiled) { c.MaxExpiration = 10 * time.Minute },
		},
		{
			name: "allowed SANs are canonicalized",
			file: "csrApproval: {allowedSANs: [{name: edge, dnsNames: [Web.Example.ORG, db.example.org.], " +
				"ipAddresses: [192.0.2.7, '::ffff:192.0.2.8', '2001:DB8::1']}]}",
			want: func(c *config.Compiled) {
				c.AllowedSANs = []config.CompiledSANs{{
					Name: "edge", DNSNames: []string{"web.example.org", "db.example.org"}, IPAddresses: addresses("192.0.2.7", "192.0.2.8", "2001:db8::1"),
				}}
			},
		},

		{
			name: "dual-stack pool",
			file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.244.0.0/16, 'fd00:1::/48'], maskSizeIPv4: 25, maskSizeIPv6: 64}\n",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.244.0.0/16", "fd00:1::/48"), MaskSizeIPv4: 25, MaskSizeIPv6: 64}}
			},
		},
		{
			name: "block size auto applies where no IPv4 mask size is set",
			file: "ipam: {blockSize: auto, pools: [{name: a, cidrs: [10.0.0.0/25]}, {name: b, cidrs: [10.1.0.0/16], maskSize: 26}, " +
				"{name: c, cidrs: ['fd00::/48'], maskSize: 64}]}",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{
					{Name: "a", CIDRs: prefixes("10.0.0.0/25"), BlockSizeAuto: true},
					{Name: "b", CIDRs: prefixes("10.1.0.0/16"), MaskSizeIPv4: 26},
					{Name: "c", CIDRs: prefixes("fd00::/48"), MaskSizeIPv6: 64, BlockSizeAuto: true},
					{BlockSizeAuto: true},
				}
			},
		},
		{
			name: "mask size of an IP family without CIDRs", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv6: 96}]}",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv6: 96}}
			},
		},
		{
			name: "maskSize applies to the IP family of the pool",
			file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 26}, {name: b, cidrs: ['fd00::/56'], maskSize: 72}]}",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 26}, {Name: "b", CIDRs: prefixes("fd00::/56"), MaskSizeIPv6: 72}}
			},
		},
		{
			name: "pools of one CIDR with blocks of different sizes",
			file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 25}, {name: b, cidrs: [10.0.0.0/16], maskSize: 22}]}",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{
					{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 25}, {Name: "b", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 22},
				}
			},
		},
		{
			name: "adjacent CIDRs", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/24, 10.0.2.0/24]}, {name: b, cidrs: [10.0.1.0/24]}]}",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.0.0.0/24", "10.0.2.0/24")}, {Name: "b", CIDRs: prefixes("10.0.1.0/24")}}
			},
		},
		{
			name: "service", file: "service: {default: true, addresses: internal, reservedPorts: [443]}",
			want: func(c *config.Compiled) {
				c.Service = config.Service{Default: true, Addresses: config.AddressesInternal, ReservedPorts: []int{443}}
			},
		},
		{
			name: "aliases", file: "ipam: {pools: [{name: a, cidrs: &site [10.0.0.0/16]}]}\nglobal: &empty {}\nnodes: *empty\n",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.0.0.0/16")}}
			},
		},
		{
			name: "merge keys",
			file: "ipam:\n  pools:\n  - &a {name: a, cidrs: [10.0.0.0/16], maskSize: 26}\n  - {<<: *a, name: b, cidrs: [10.1.0.0/16]}\n" +
				"  - {name: c, <<: [{maskSize: 27}, *a], cidrs: [10.2.0.0/16]}\n",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{
					{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 26},
					{Name: "b", CIDRs: prefixes("10.1.0.0/16"), MaskSizeIPv4: 26},
					{Name: "c", CIDRs: prefixes("10.2.0.0/16"), MaskSizeIPv4: 27},
				}
			},
		},
	}
}

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
			if err != nil {
				t.Fatal(err)
			}

			if got.Rules == nil {
				t.Error("Rules are nil")
			}

			want := &config.Compiled{
				Rules: got.Rules, MaxExpiration: csrpolicy.DefaultMaxExpiration,
				Lifecycle: config.CompiledLifecycle{GracePeriod: config.DefaultGracePeriod, AbsentPeriod: config.DefaultAbsentPeriod},
			}
			if test.want != nil {
				test.want(want)
			}

			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

// bad is an invalid file.
type bad struct {
	name, file string
	// want are the prefixes of the lines of the error, without the name of the file.
	want []string
	// bySchema is true if the JSON schema refuses the file, too.
	bySchema bool
}

func badFiles() []bad {
	return []bad{
		// YAML.
		{
			name: "YAML syntax error in the scanner", file: "global:\n  clusterName: a: b\n",
			want: []string{":2:17: invalid YAML: mapping values are not allowed in this context"},
		},
		{
			name: "YAML syntax error in the parser", file: "# one\nnodes: {a\nglobal: b\n",
			want: []string{":3: invalid YAML: did not find expected ',' or '}' while parsing a flow mapping"},
		},
		{
			name: "YAML syntax error at the end of the file", file: "# one\nnodes: {a\n",
			want: []string{":2: invalid YAML: did not find expected ',' or '}' while parsing a flow mapping"},
		},
		{
			name: "YAML syntax error in the first line", file: "a: }",
			want: []string{":1:4: invalid YAML: did not find expected node content while parsing a block node"},
		},
		{name: "control character", file: "# ä\n# \x01", want: []string{":2:3: invalid YAML: control characters are not allowed (value: 1)"}},
		{name: "unknown anchor", file: "\nglobal: *nothing\n", want: []string{":2:9: invalid YAML: unknown anchor 'nothing' referenced"}},
		{name: "two documents", file: "global: {}\n---\nglobal: {}\n", want: []string{":3:1: file contains more than one YAML document"}},
		{
			name: "syntax error in a second document", file: "global: {}\n---\n}\n",
			want: []string{":3:1: invalid YAML: did not find expected node content while parsing a block node"},
		},
		{name: "scalar document", file: "hello\n", want: []string{`:1:1: must be a mapping, not the string "hello"`}, bySchema: true},
		{name: "list document", file: "- a\n", want: []string{":1:1: must be a mapping, not a list"}, bySchema: true},
		{
			name: "duplicate key", file: "global:\n  clusterName: a\n  clusterName: b\n",
			want: []string{":3:3: global.clusterName: duplicate key, first set in line 2"},
		},
		{
			name: "duplicate label", file: "transformations:\n- name: web\n  labels:\n    team: a\n    team: b\n",
			want: []string{`:5:5: transformations[0].labels[team] (rule "web"): duplicate key, first set in line 4`},
		},
		{name: "key that is not a string", file: "? [a]\n: b\n", want: []string{":1:3: a key must be a string"}},
		{
			name: "unquoted template", file: "transformations:\n- name: web\n  labels:\n    zone: {{ .Zone }}\n",
			want: []string{`:4:11: transformations[0].labels[zone] (rule "web"): a value that begins with "{{" must be quoted`},
		},
		{
			name: "double quotes in double quotes", file: "transformations:\n- labels:\n    zone: \"{{ default \"none\" .Zone }}\"\n",
			want: []string{`:3:24: invalid YAML: did not find expected key while parsing a block mapping; the value ends at the second ", which is inside {{ }}: ` +
				`enclose the value in ' and text in the template in ", as in '{{ default "none" .Zone }}'`},
		},
		{
			name: "single quotes in single quotes", file: "transformations:\n- labels: {zone: '{{ regexFind '^a' .Hostname }}'}\n",
			want: []string{":2:33: invalid YAML: did not find expected ',' or '}' while parsing a flow mapping; the value ends at the second ', which is inside {{ }}: "},
		},
		{
			name: "text after an unquoted template", file: "transformations:\n- labels:\n    zone: {{ .Zone }}-a\n",
			want: []string{`:3:22: invalid YAML: did not find expected key while parsing a block mapping; a value that begins with "{{" must be quoted`},
		},
		{
			name: "tab", file: "transformations:\n- name: web\n\tlabels: {}\n",
			want: []string{`:3:1: invalid YAML: found a tab character that violates indentation while scanning a plain scalar; indent with spaces instead of tabs`},
		},
		{
			name: "tab at the start", file: "transformations:\n\t- name: web\n",
			want: []string{`:2:1: invalid YAML: found character that cannot start any token while scanning for the next token; indent with spaces instead of tabs`},
		},
		{
			name: "character that must be quoted", file: "transformations:\n- labels:\n    team: @web\n",
			want: []string{`:3:11: invalid YAML: found character that cannot start any token while scanning for the next token; a value that begins with "@" must be quoted`},
		},
		{
			name: "regular expression in double quotes", file: "nodes: {selector: [{matchExpressions: [{key: zone, operator: Regexp, values: [\"\\d\"]}]}]}\n",
			want: []string{`:1:80: invalid YAML: found unknown escape character while scanning a quoted scalar; write \ as \\, or enclose the value in '`},
		},
		{
			name: "regular expression without quotes", file: "nodes: {selector: [{matchExpressions: [{key: zone, operator: Regexp, values: [^[0-9]+$]}]}]}\n",
			want: []string{`:1:80: invalid YAML: did not find expected ',' or ']' while parsing a flow sequence; quote a value that contains brackets, braces or commas`},
		},
		{
			name: "quote that is not closed", file: "transformations:\n- labels:\n    team: 'web\n    tier: front\n",
			want: []string{`:3:11: invalid YAML: found unexpected end of stream while scanning a quoted scalar; the quote is not closed`},
		},
		{
			name: "keys that are not aligned", file: "transformations:\n- name: web\n   labels: {}\n",
			want: []string{`:3:10: invalid YAML: mapping values are not allowed in this context; check the indentation, quote a value that contains ": ", ` +
				`and put a space after the colon of a key`},
		},
		{
			name: "list that is not aligned", file: "transformations:\n  - name: web\n  labels: {}\n",
			want: []string{`:3:3: invalid YAML: did not find expected '-' indicator while parsing a block collection; check the indentation`},
		},
		{
			name: "custom tag", file: "global:\n  clusterName: !secret a\n",
			want: []string{`:2:16: global.clusterName: must be a string, not a value with the YAML tag "!secret"`},
		},
		{
			name: "binary tag", file: "global:\n  clusterName: !!binary aGk=\n",
			want: []string{`:2:16: global.clusterName: must be a string, not a value with the YAML tag "!!binary"`},
		},
		{
			name: "custom tag on a mapping", file: "global: !secret {}\n",
			want: []string{`:1:9: global: must be a mapping, not a value with the YAML tag "!secret"`},
		},
		{
			name: "null tag on a mapping", file: "global: !!null {}\n",
			want: []string{`:1:9: global: must be a mapping, not a value with the YAML tag "!!null"`},
		},
		{
			name: "string tag on a mapping", file: "global:\n  clusterName: !!str {a: b}\n",
			want: []string{`:2:16: global.clusterName: must be a string, not a value with the YAML tag "!!str"`}, bySchema: true,
		},
		{
			name: "boolean tag on a list", file: "global:\n  preferIPv6: !!bool [a]\n",
			want: []string{`:2:15: global.preferIPv6: must be true or false, not a value with the YAML tag "!!bool"`}, bySchema: true,
		},
		{
			name: "alias that contains itself", file: "global: &a\n  clusterName: *a\n",
			want: []string{`:2:16: global.clusterName: must be a string, not an alias of a value that contains it`},
		},
		{
			name: "merge key that contains itself", file: "global: &a\n  <<: *a\n",
			want: []string{":2:7: global.<<: must be a mapping or a list of mappings, not an alias of a value that contains it"},
		},
		{name: "merge key that is not a mapping", file: "global:\n  <<: [a]\n", want: []string{":2:7: global.<<: must be a mapping or a list of mappings"}},

		// Unknown, misplaced and missing keys.
		{
			name: "unknown key", file: "global: {}\nwhatever: 1\n",
			want: []string{":2:1: whatever: unknown key; expected global, transformations, nodes, addresses, csrApproval, ipam"}, bySchema: true,
		},
		{
			name: "similar key at the top level", file: "transformation: []\n",
			want: []string{":1:1: transformation: unknown key; did you mean transformations?"}, bySchema: true,
		},
		{
			name: "similar key in a rule", file: "transformations:\n- {name: web}\n- name: db\n  lables: {a: b}\n",
			want: []string{`:4:3: transformations[1].lables (rule "db"): unknown key; did you mean labels?`}, bySchema: true,
		},
		{
			name: "key in another case", file: "global: {ClusterName: a}\n",
			want: []string{":1:10: global.ClusterName: unknown key; did you mean clusterName?"}, bySchema: true,
		},
		{
			name: "key at the wrong indentation",
			file: "transformations:\n- name: web\n  nodeSelector:\n  - matchExpressions: []\n    labels: {a: b}\n",
			want: []string{
				`:5:5: transformations[0].nodeSelector[0].labels (rule "web"): unknown key; it belongs to transformations[0]: check the indentation`,
			}, bySchema: true,
		},
		{
			name: "key that belongs to the top level", file: "global:\n  nodes: {}\n",
			want: []string{":2:3: global.nodes: unknown key; it belongs to the top level: check the indentation"}, bySchema: true,
		},
		{
			name: "feature of drafts of the upstream Talos CCM", file: "transformations:\n- features:\n    publicIPPredict: true\n",
			want: []string{":3:5: transformations[0].features.publicIPPredict: unknown key; expected publicIPDiscovery"}, bySchema: true,
		},
		{
			name: "both spellings of a key", file: "global:\n  preferIPv6: true\n  PreferIPv6: true\n",
			want: []string{":3:3: global.PreferIPv6: cannot be combined with preferIPv6, which is another spelling of this key"}, bySchema: true,
		},
		{
			name: "missing required keys",
			file: "transformations:\n- name: web\n  nodeSelector:\n  - matchExpressions:\n    - values: [a]\n",
			want: []string{
				`:5:7: transformations[0].nodeSelector[0].matchExpressions[0].key (rule "web"): Required value`,
				`:5:7: transformations[0].nodeSelector[0].matchExpressions[0].operator (rule "web"): Required value`,
			}, bySchema: true,
		},

		{
			name: "key that has moved", file: "nodes:\n  nodeSelector: []\n", bySchema: true,
			want: []string{":2:3: nodes.nodeSelector: unknown key; it is now nodes.selector, which no longer limits"},
		},

		// Types.
		{name: "list instead of mapping", file: "global: []\n", want: []string{":1:9: global: must be a mapping, not a list"}, bySchema: true},
		{
			name: "mapping instead of list", file: "transformations: {name: web}\n",
			want: []string{":1:18: transformations: must be a list, not a mapping"}, bySchema: true,
		},
		{
			name: "string instead of list of strings", file: "ipam:\n  pools:\n  - name: a\n    cidrs: 10.0.0.0/16\n",
			want: []string{`:4:12: ipam.pools[0].cidrs (pool "a"): must be a list, not the string "10.0.0.0/16"`}, bySchema: true,
		},
		{
			name: "list instead of string", file: "global: {clusterName: [a]}\n",
			want: []string{":1:23: global.clusterName: must be a string, not a list"}, bySchema: true,
		},
		{
			name: "list of labels", file: "transformations:\n- name: web\n  labels: [a]\n",
			want: []string{`:3:11: transformations[0].labels (rule "web"): must be a mapping, not a list`}, bySchema: true,
		},
		{
			name: "list as a label value", file: "transformations:\n- name: web\n  labels:\n    team: [a]\n",
			want: []string{`:4:11: transformations[0].labels[team] (rule "web"): must be a string, not a list`}, bySchema: true,
		},
		{
			name: "empty list item", file: "transformations:\n-\n- name: a\n",
			want: []string{":2:2: transformations[0]: Required value: list item is empty"}, bySchema: true,
		},
		{
			name: "quoted boolean", file: "global: {preferIPv6: 'true'}\n",
			want: []string{`:1:22: global.preferIPv6: must be true or false, not the string "true"`}, bySchema: true,
		},
		{
			name: "YAML 1.1 boolean", file: "global: {preferIPv6: yes}\n",
			want: []string{`:1:22: global.preferIPv6: must be true or false, not the string "yes"`}, bySchema: true,
		},
		{
			name: "quoted number", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: '24'}]}",
			want: []string{`:1:58: ipam.pools[0].maskSize (pool "a"): must be a decimal integer, not the string "24"`}, bySchema: true,
		},
		{
			name: "fraction instead of integer", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 24.5}]}",
			want: []string{`:1:58: ipam.pools[0].maskSize (pool "a"): must be a decimal integer, not "24.5"`}, bySchema: true,
		},
		{
			name: "leading zero", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 030}]}",
			want: []string{`:1:58: ipam.pools[0].maskSize (pool "a"): must be a decimal integer, not "030"`},
		},
		{
			name: "integer that overflows", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 99999999999999999999}]}",
			want: []string{`:1:58: ipam.pools[0].maskSize (pool "a"): must be a decimal integer, not "99999999999999999999"`}, bySchema: true,
		},

		// Values.
		{
			name: "cluster name that is not a label value", file: "global: {clusterName: my shop}\n",
			want: []string{`:1:10: global.clusterName: Invalid value: "my shop": must be a valid label value: `},
		},
		{
			name: "unknown providerID fallback", file: "global: {providerIDFallback: hostname}\n",
			want: []string{`:1:10: global.providerIDFallback: Unsupported value: "hostname": supported values: "uuid", "node-ip"`}, bySchema: true,
		},
		{
			name: "unknown block size", file: "ipam: {blockSize: large}\n",
			want: []string{`:1:8: ipam.blockSize: Unsupported value: "large": supported values: "auto"`}, bySchema: true,
		},
		{
			name: "unknown addresses of Services", file: "service: {addresses: public}\n",
			want: []string{`:1:11: service.addresses: Unsupported value: "public": supported values: "external", "internal"`}, bySchema: true,
		},
		{
			name: "reserved port that is not a port", file: "service: {reservedPorts: [443, 65536]}\n",
			want: []string{`:1:32: service.reservedPorts[1]: Invalid value: 65536: must be between 1 and 65535, inclusive`},
		},
		{
			name: "lifecycle periods", file: "lifecycle: {gracePeriod: 59s, absentPeriod: 30}\n",
			want: []string{
				`:1:13: lifecycle.gracePeriod: Invalid value: "59s": must be at least 1m0s, since Kubernetes takes`,
				`:1:31: lifecycle.absentPeriod: Invalid value: "30": must be a duration such as 720h or 90m`,
			},
		},
		{
			name: "lifecycle selector", file: "lifecycle: {selector: [{matchExpressions: [{key: nope, operator: Exists}]}]}\n",
			want: []string{`:1:45: lifecycle.selector[0].matchExpressions[0].key: `},
		},
		{
			name: "maximum expiration that is not a duration", file: "csrApproval: {maxExpiration: a year}\n",
			want: []string{`:1:15: csrApproval.maxExpiration: Invalid value: "a year": must be a duration such as 720h or 90m`},
		},
		{
			name: "maximum expiration without unit", file: "csrApproval: {maxExpiration: 3600}\n",
			want: []string{`:1:15: csrApproval.maxExpiration: Invalid value: "3600": must be a duration such as 720h or 90m`},
		},
		{
			name: "maximum expiration below the minimum", file: "csrApproval: {maxExpiration: 9m}\n",
			want: []string{`:1:15: csrApproval.maxExpiration: Invalid value: "9m": must be at least 10m0s, the minimum of Kubernetes`},
		},
		{
			name: "negative maximum expiration", file: "csrApproval: {maxExpiration: -24h}\n",
			want: []string{`:1:15: csrApproval.maxExpiration: Invalid value: "-24h": must be at least 10m0s, the minimum of Kubernetes`},
		},
		{
			name: "DNS names that no certificate may contain",
			file: "csrApproval:\n  allowedSANs:\n  - name: edge\n    dnsNames:\n    - '*.example.org'\n    - Kubernetes.default.SVC\n" +
				"    - kubernetes\n    - a.b.svc.cluster.local\n    - localhost\n    - cluster.local\n    - web.Cluster.Local.\n",
			want: []string{
				`:5:7: csrApproval.allowedSANs[0].dnsNames[0] (entry "edge"): Invalid value: "*.example.org": is a wildcard`,
				`:6:7: csrApproval.allowedSANs[0].dnsNames[1] (entry "edge"): Invalid value: "Kubernetes.default.SVC": is reserved for the cluster`,
				`:7:7: csrApproval.allowedSANs[0].dnsNames[2] (entry "edge"): Invalid value: "kubernetes": is reserved for the cluster`,
				`:8:7: csrApproval.allowedSANs[0].dnsNames[3] (entry "edge"): Invalid value: "a.b.svc.cluster.local": is reserved for the cluster`,
				`:9:7: csrApproval.allowedSANs[0].dnsNames[4] (entry "edge"): Invalid value: "localhost": is reserved for the cluster`,
				`:10:7: csrApproval.allowedSANs[0].dnsNames[5] (entry "edge"): Invalid value: "cluster.local": is reserved for the cluster`,
				`:11:7: csrApproval.allowedSANs[0].dnsNames[6] (entry "edge"): Invalid value: "web.Cluster.Local.": is reserved for the cluster`,
			},
		},
		{
			name: "invalid DNS names and addresses",
			file: "csrApproval:\n  allowedSANs:\n  - dnsNames: [192.0.2.1, a_b, 'a..b', '']\n" +
				"    ipAddresses: [example.org, 10.0.0.0/8, 127.0.0.1, 'fe80::1%eth0', 'fe80::1', 224.0.0.1, '::']\n",
			want: []string{
				`:3:16: csrApproval.allowedSANs[0].dnsNames[0]: Invalid value: "192.0.2.1": is an IP address; list it in ipAddresses`,
				`:3:27: csrApproval.allowedSANs[0].dnsNames[1]: Invalid value: "a_b": is not a valid DNS name`,
				`:3:32: csrApproval.allowedSANs[0].dnsNames[2]: Invalid value: "a..b": is not a valid DNS name`,
				`:3:40: csrApproval.allowedSANs[0].dnsNames[3]: Invalid value: "": is not a valid DNS name`,
				`:4:19: csrApproval.allowedSANs[0].ipAddresses[0]: Invalid value: "example.org": is not an IP address`,
				`:4:32: csrApproval.allowedSANs[0].ipAddresses[1]: Invalid value: "10.0.0.0/8": is not an IP address`,
				`:4:44: csrApproval.allowedSANs[0].ipAddresses[2]: Invalid value: "127.0.0.1": is a loopback, link-local, multicast, unspecified or broadcast address`,
				`:4:55: csrApproval.allowedSANs[0].ipAddresses[3]: Invalid value: "fe80::1%eth0": has a zone`,
				`:4:71: csrApproval.allowedSANs[0].ipAddresses[4]: Invalid value: "fe80::1": is a loopback, link-local, multicast, unspecified or broadcast address`,
				`:4:82: csrApproval.allowedSANs[0].ipAddresses[5]: Invalid value: "224.0.0.1": is a loopback, link-local, multicast, unspecified or broadcast address`,
				`:4:93: csrApproval.allowedSANs[0].ipAddresses[6]: Invalid value: "::": is a loopback, link-local, multicast, unspecified or broadcast address`,
			},
		},
		{
			name: "allowed SANs without names and addresses", file: "csrApproval:\n  allowedSANs:\n  - name: edge\n",
			want: []string{`:3:5: csrApproval.allowedSANs[0] (entry "edge"): Required value: must have dnsNames or ipAddresses`},
		},
		{
			name: "allowed SANs with the same name", file: "csrApproval:\n  allowedSANs:\n  - {name: a, dnsNames: [a.example.org]}\n" +
				"  - {name: a, dnsNames: [b.example.org]}\n",
			want: []string{`:4:6: csrApproval.allowedSANs[1].name (entry "a"): Invalid value: "a": is also the name of the entry in line 3`},
		},

		// Rules and selectors. Package rules validates them.
		{
			name: "invalid regular expression",
			file: "transformations:\n- name: web\n  nodeSelector:\n  - matchExpressions:\n    - key: hostname\n      operator: Regexp\n" +
				"      values:\n      - '^web-('\n",
			want: []string{`:7:7: transformations[0].nodeSelector[0].matchExpressions[0].values (rule "web"): `},
		},
		{
			name: "invalid template", file: "transformations:\n- name: web\n  labels:\n    a: b\n    zone: '{{ .Zone }'\n",
			want: []string{`:5:5: transformations[0].labels[zone] (rule "web"): `},
		},
		{
			name: "unknown template variable", file: "transformations:\n- name: web\n  annotations:\n    zone: '{{ .Zoen }}'\n",
			want: []string{`:4:5: transformations[0].annotations[zone] (rule "web"): `},
		},
		{
			name: "invalid label, annotation and taint",
			file: "transformations:\n- name: web\n  labels:\n    foo bar: a\n    team: a b\n  annotations:\n    'a/b/c': x\n  taints:\n" +
				"    a b: NoSchedule\n    a: Never\n",
			want: []string{
				`:4:5: transformations[0].labels[foo bar] (rule "web"): `,
				`:5:5: transformations[0].labels[team] (rule "web"): `,
				`:7:5: transformations[0].annotations[a/b/c] (rule "web"): `,
				`:9:5: transformations[0].taints[a b] (rule "web"): `, `:10:5: transformations[0].taints[a] (rule "web"): `,
			},
		},
		{
			name: "reserved taint", file: "transformations:\n- name: web\n  taints:\n    node.kubernetes.io/not-ready: NoSchedule\n",
			want: []string{`:4:5: transformations[0].taints[node.kubernetes.io/not-ready] (rule "web"): `},
		},
		{
			name: "platform metadata that cannot be replaced", file: "transformations:\n- platformMetadata:\n    Hostname: a\n    Color: b\n",
			want: []string{":3:5: transformations[0].platformMetadata[Hostname]: ", ":4:5: transformations[0].platformMetadata[Color]: "},
		},
		{
			name: "providerID that identifies no instance", file: "transformations:\n- platformMetadata:\n    ProviderID: web-1\n",
			want: []string{`:3:5: transformations[0].platformMetadata[ProviderID]: Invalid value: "web-1" does not identify an instance`},
		},
		{
			name: "rules with the same name", file: "transformations:\n- name: web\n- name: db\n- name: web\n",
			want: []string{`:4:3: transformations[2].name (rule "web"): `},
		},
		{
			name: "selector keys that are unknown or for pools only",
			file: "nodes: {selector: [{matchExpressions: [{key: color, operator: Exists}]}]}\ntransformations:\n- name: web\n" +
				"  nodeSelector: [{matchExpressions: [{key: labels.a, operator: Exists}]}]\n" +
				"csrApproval: {allowedSANs: [{nodeSelector: [{matchExpressions: [{key: labels.a, operator: Exists}]}], dnsNames: [example.org]}],\n" +
				"  selector: [{matchExpressions: [{key: labels.a, operator: Exists}]}]}\n" +
				"ipam: {pools: [{name: a, nodeSelector: [{matchExpressions: [{key: labels.a, operator: In}]}], cidrs: [10.0.0.0/16]}],\n" +
				"  selector: [{matchExpressions: [{key: labels.a, operator: Exists}]}]}\n",
			want: []string{
				":1:41: nodes.selector[0].matchExpressions[0].key: ", `:4:39: transformations[0].nodeSelector[0].matchExpressions[0].key (rule "web"): `,
				":5:66: csrApproval.allowedSANs[0].nodeSelector[0].matchExpressions[0].key: ",
				":6:35: csrApproval.selector[0].matchExpressions[0].key: ",
				`:7:61: ipam.pools[0].nodeSelector[0].matchExpressions[0].values (pool "a"): `,
				":8:35: ipam.selector[0].matchExpressions[0].key: ",
			},
		},
		{
			name: "unknown operator", bySchema: true, file: "nodes: {selector: [{matchExpressions: [{key: zone, operator: Equals, values: [a]}]}]}\n",
			want: []string{":1:52: nodes.selector[0].matchExpressions[0].operator: "},
		},

		// Pools.
		{
			name: "pool without name and CIDRs", file: "ipam:\n  pools:\n  - {}\n  - {name: '', cidrs: []}\n",
			want: []string{
				":3:5: ipam.pools[0].name: Required value",
				":3:5: ipam.pools[0].cidrs: Required value",
				":4:6: ipam.pools[1].name: Required value",
				":4:16: ipam.pools[1].cidrs: Required value",
			}, bySchema: true,
		},
		{
			name: "pools with the same name", file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16]}\n  - {name: a, cidrs: [10.1.0.0/16]}\n",
			want: []string{`:4:6: ipam.pools[1].name (pool "a"): Invalid value: "a": is also the name of the entry in line 3`},
		},
		{
			name: "invalid CIDRs", file: "ipam:\n  pools:\n  - name: a\n    cidrs: [10.0.0.0, 10.0.0.0/33, 10.1.2.3/16, '::ffff:10.0.0.0/112', 0.0.0.0/0]\n",
			want: []string{
				`:4:13: ipam.pools[0].cidrs[0] (pool "a"): Invalid value: "10.0.0.0" is not a CIDR such as 10.244.0.0/16`,
				`:4:23: ipam.pools[0].cidrs[1] (pool "a"): Invalid value: "10.0.0.0/33" is not a CIDR such as 10.244.0.0/16`,
				`:4:36: ipam.pools[0].cidrs[2] (pool "a"): Invalid value: "10.1.2.3/16" has host bits set; did you mean 10.1.0.0/16?`,
				`:4:49: ipam.pools[0].cidrs[3] (pool "a"): Invalid value: "::ffff:10.0.0.0/112" is an IPv4-mapped IPv6 CIDR; write it as IPv4`,
				`:4:72: ipam.pools[0].cidrs[4] (pool "a"): Invalid value: "0.0.0.0/0": must not contain all addresses`,
			},
		},
		{
			name: "CIDRs that pods cannot have addresses of",
			file: "ipam:\n  pools:\n  - name: a\n    cidrs: [224.0.0.0/8, 127.0.0.0/16, '::/64', 169.254.0.0/16, 'fe80::/64', 'ff05::/16']\n",
			want: []string{
				`:4:13: ipam.pools[0].cidrs[0] (pool "a"): Invalid value: 224.0.0.0/8 contains multicast addresses`,
				`:4:26: ipam.pools[0].cidrs[1] (pool "a"): Invalid value: 127.0.0.0/16 contains loopback addresses`,
				`:4:40: ipam.pools[0].cidrs[2] (pool "a"): Invalid value: ::/64 contains loopback addresses`,
				`:4:49: ipam.pools[0].cidrs[3] (pool "a"): Invalid value: 169.254.0.0/16 contains link-local addresses`,
				`:4:65: ipam.pools[0].cidrs[4] (pool "a"): Invalid value: fe80::/64 contains link-local addresses`,
				`:4:78: ipam.pools[0].cidrs[5] (pool "a"): Invalid value: ff05::/16 contains multicast addresses`,
			},
		},
		{
			name: "pools of one CIDR that disagree about machines",
			file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16]}\n  - {name: b, cidrs: [10.0.0.0/16], containsMachines: true}\n",
			want: []string{
				`:4:37: ipam.pools[1].containsMachines (pool "b"): Invalid value: true: pool "a" in line 3 has the CIDR 10.0.0.0/16, too; set the same value for both`,
			},
		},
		{
			name: "overlapping CIDRs",
			file: "ipam:\n  pools:\n  - name: small\n    cidrs: [10.1.0.0/16, 'fd00::/48']\n" +
				"  - name: large\n    cidrs: ['fd00:0:0:5::/64', 10.0.0.0/8]\n  - name: twice\n    cidrs: [192.168.0.0/16, 192.168.0.0/16]\n",
			want: []string{
				`:6:13: ipam.pools[1].cidrs[0] (pool "large"): Invalid value: "fd00:0:0:5::/64": overlaps fd00::/48 of pool "small" in line 4`,
				`:6:32: ipam.pools[1].cidrs[1] (pool "large"): Invalid value: "10.0.0.0/8": overlaps 10.1.0.0/16 of pool "small" in line 4`,
				`:8:29: ipam.pools[2].cidrs[1] (pool "twice"): Invalid value: "192.168.0.0/16": overlaps 192.168.0.0/16 of pool "twice" in line 8`,
			},
		},
		{
			name: "mask size that does not fit the CIDR",
			file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16], maskSize: 15}\n" +
				"  - {name: b, cidrs: ['fd00::/48'], maskSizeIPv6: 40}\n  - {name: c, cidrs: ['fd01::/16'], maskSize: 96}\n",
			want: []string{
				`:3:37: ipam.pools[0].maskSize (pool "a"): Invalid value: `,
				`:4:37: ipam.pools[1].maskSizeIPv6 (pool "b"): Invalid value: `,
				`:5:37: ipam.pools[2].maskSize (pool "c"): Invalid value: `,
			},
		},
		{
			name: "mask size of the other IP family", file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16], maskSize: 64}\n",
			want: []string{`:3:37: ipam.pools[0].maskSize (pool "a"): Invalid value: `},
		},
		{
			name: "mask size that is too large", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 33}]}",
			want: []string{`:1:48: ipam.pools[0].maskSizeIPv4 (pool "a"): Invalid value: 33: must be between 1 and 32`}, bySchema: true,
		},
		{
			name: "negative mask size", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: -1}]}",
			want: []string{`:1:48: ipam.pools[0].maskSizeIPv4 (pool "a"): Invalid value: -1: must be between 1 and 32`}, bySchema: true,
		},
		{
			name: "maskSize in a dual-stack pool", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16, 'fd00::/48'], maskSize: 24}]}",
			want: []string{`:1:61: ipam.pools[0].maskSize (pool "a"): Forbidden: the pool has IPv4 and IPv6 CIDRs; use maskSizeIPv4 and maskSizeIPv6`},
		},
		{
			name: "maskSize with maskSizeIPv4", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 24, maskSizeIPv4: 24}]}",
			want: []string{`:1:48: ipam.pools[0].maskSize (pool "a"): Forbidden: cannot be combined with maskSizeIPv4 or maskSizeIPv6`},
		},
		{
			name: "small CIDR without mask size", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/25]}]}",
			want: []string{`:1:16: ipam.pools[0].maskSizeIPv4 (pool "a"): Required value: 10.0.0.0/25 is smaller than a pod CIDR of the default mask size`},
		},
	}
}

func TestParse_ReportsPositionPathAndRule(t *testing.T) {
	for _, test := range badFiles() {
		t.Run(test.name, func(t *testing.T) { assertProblems(t, test.file, test.want) })
	}
}

// assertProblems asserts that the lines of the error start with the given ones.
func assertProblems(t *testing.T, file string, want []string) {
	t.Helper()

	compiled, err := config.Parse("config.yaml", []byte(file))

	problems, ok := errors.AsType[*config.Error](err)
	if !ok || compiled != nil {
		t.Fatalf("got %v and %v, want nil and an Error", compiled, err)
	}

	lines := strings.Split(problems.Error(), "\n")
	if len(lines) != len(want) {
		t.Fatalf("got %d problems:\n%v\nwant %d: %q", len(lines), err, len(want), want)
	}

	for i, line := range lines {
		if !strings.HasPrefix(line, "config.yaml"+want[i]) {
			t.Errorf("got  %s\nwant config.yaml%s…", line, want[i])
		}
	}
}

func TestParse_ReportsAllProblems(t *testing.T) {
	var file strings.Builder

	file.WriteString("unknown: 1\ntransformations:\n")

	want := []string{":1:1: unknown: unknown key"}

	for i := range 50 {
		fmt.Fprintf(&file, "- {lables: {}, name: rule-%d}\n", i)
		want = append(want, fmt.Sprintf(`:%d:4: transformations[%d].lables (rule "rule-%d"): unknown key; did you mean labels?`, i+3, i, i))
	}

	file.WriteString("ipam: {pools: [{name: a, cidrs: [10.0.0.1/16]}]}\ncsrApproval: {maxExpiration: 1s}\n")

	want = append(want, `:53:34: ipam.pools[0].cidrs[0] (pool "a"): Invalid value: "10.0.0.1/16"`, `:54:15: csrApproval.maxExpiration: Invalid value: "1s"`)

	assertProblems(t, file.String(), want)
}

// TestParse_OmitsConsequentialProblems asserts that a value that cannot be decoded is not reported as missing, too.
func TestParse_OmitsConsequentialProblems(t *testing.T) {
	assertProblems(t, "ipam: {pools: [{name: [], cidrs: {}}]}\ncsrApproval: {maxExpiration: []}\n", []string{
		":1:23: ipam.pools[0].name: must be a string, not a list", ":1:34: ipam.pools[0].cidrs: must be a list, not a mapping",
		":2:30: csrApproval.maxExpiration: must be a string, not a list",
	})
}

func TestParse_RefusesLargeFiles(t *testing.T) {
	assertProblems(t, strings.Repeat("#\n", config.MaxSize/2+1), []string{": file has 1048578 bytes; the maximum is 1048576"})
}

func TestParse_BoundsNumberOfProblems(t *testing.T) {
	var unknown, invalid strings.Builder

	invalid.WriteString("transformations:\n")

	for i := range 2000 {
		fmt.Fprintf(&unknown, "a%d: 1\n", i)
		invalid.WriteString("- {labels: {a: b c}}\n")
	}

	for _, file := range []string{unknown.String(), invalid.String()} {
		_, err := config.Parse("config.yaml", []byte(file))

		problems, ok := errors.AsType[*config.Error](err)
		if !ok || len(problems.Problems) != 1001 || !strings.Contains(problems.Problems[1000].Msg, "too many problems") {
			t.Errorf("got %.1000v", err)
		}
	}
}

func TestParse_BoundsLengthOfProblems(t *testing.T) {
	long := strings.Repeat("ä", 10_000)

	_, err := config.Parse("config.yaml", []byte("global: {providerIDFallback: "+long+"}\n"+strings.Repeat("b", 900)+": 1\n"))
	if err == nil || len(err.Error()) > 1000 || !utf8.ValidString(err.Error()) {
		t.Errorf("got %v", err)
	}
}

// TestParse_BoundsAliases parses small files that expand to more than fits in memory.
func TestParse_BoundsAliases(t *testing.T) {
	repeat := func(s string) string { return "[" + strings.Repeat(s+", ", 10_000) + "]" }

	lists := "transformations:\n- nodeSelector:\n  - matchExpressions: &expressions\n" +
		"    - {key: zone, operator: In, values: " + repeat("a") + "}\n" +
		"- nodeSelector: " + repeat("{matchExpressions: *expressions}") + "\n"
	merges, keys := "transformations:\n- name: a\n  labels: &all\n", "- labels: {<<: "+repeat("*all")+"}\n"
	long := "transformations:\n- labels:\n    a: &a " + strings.Repeat("x", 1<<18) + "\n" + strings.Repeat("- labels: {a: *a}\n", 100)
	nested := "transformations:\n- &m0 {labels: {k: v}}\n"

	for i := range 10_000 {
		merges += fmt.Sprintf("    k%d: v\n", i)
	}

	for i := range 30 {
		nested += fmt.Sprintf("- &m%d {<<: [%s], name: r%d}\n", i+1, strings.Repeat(fmt.Sprintf("*m%d, ", i), 10), i)
	}

	for name, file := range map[string]string{
		"lists of lists": lists, "large mapping many times": merges + keys, "merges of merges": nested, "long string many times": long,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse("config.yaml", []byte(file))
			if err == nil || !strings.HasSuffix(err.Error(), "document is too large with its aliases expanded") || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %.200v", err)
			}
		})
	}
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
			if _, err := config.Parse("config.yaml", []byte(file)); err == nil || len(err.Error()) > 10_000 {
				t.Errorf("got %.200v", err)
			}
		})
	}
}
