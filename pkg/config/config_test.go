package config_test

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

// good is a file that loads.
type good struct {
	rule, file string
	// want changes what an empty file gives into what this one does; nil: as an empty one.
	want func(*config.Compiled)
}

func goodFiles() []good {
	return []good{
		{rule: "an empty file is the default"},
		{rule: "comments alone are an empty file", file: "# nothing\n"},
		{rule: "so is an empty document", file: "---\n"},
		{rule: "and an empty mapping", file: "{}"},
		{rule: "a key without a value is as good as none", file: "global:\n  # nothing\ntransformations:\nnodes:\ncsrApproval: ~\nipam: null\n"},
		{rule: "an empty list selects as none does", file: "nodes: {nodeSelector: []}\ntransformations: []\nipam: {pools: []}"},
		{rule: "a byte order mark is no content", file: "\ufeffglobal:\n"},

		{rule: "the cluster's name", file: "global: {clusterName: shop}", want: func(c *config.Compiled) { c.ClusterName = "shop" }},
		{rule: "text may look like a number", file: "global: {clusterName: 007}", want: func(c *config.Compiled) { c.ClusterName = "007" }},
		{rule: "text may look like a truth value", file: "global: {clusterName: yes}", want: func(c *config.Compiled) { c.ClusterName = "yes" }},
		{rule: "text may look like a date", file: "global: {clusterName: 2026-11-21}", want: func(c *config.Compiled) { c.ClusterName = "2026-11-21" }},
		{rule: "text keeps the digits that it is written with", file: "global: {clusterName: 1.10}", want: func(c *config.Compiled) { c.ClusterName = "1.10" }},
		{rule: "preferIPv6 as the upstream Talos CCM reads it", file: "global: {preferIPv6: true}", want: func(c *config.Compiled) { c.PreferIPv6 = true }},
		{rule: "PreferIPv6 as its documents write it", file: "global: {PreferIPv6: true}", want: func(c *config.Compiled) { c.PreferIPv6 = true }},
		{rule: "JSON is YAML", file: "{\n\t\"global\": {\"preferIPv6\": true}\n}", want: func(c *config.Compiled) { c.PreferIPv6 = true }},
		{rule: "the fallback of the upstream Talos CCM", file: "global: {providerIDFallback: node-ip}", want: func(c *config.Compiled) { c.ProviderIDFallback = config.FallbackNodeIP }},
		{rule: "our fallback", file: "global: {providerIDFallback: uuid}", want: func(c *config.Compiled) { c.ProviderIDFallback = config.FallbackUUID }},

		{rule: "the longest lifetime", file: "csrApproval: {maxExpiration: 720h}", want: func(c *config.Compiled) { c.MaxExpiration = 720 * time.Hour }},
		{rule: "no shorter than Kubernetes allows", file: "csrApproval: {maxExpiration: 10m}", want: func(c *config.Compiled) { c.MaxExpiration = 10 * time.Minute }},
		{
			rule: "names are folded and addresses unmapped",
			file: "csrApproval: {allowedSANs: [{name: edge, dnsNames: [Web.Example.ORG], ipAddresses: [192.0.2.7, '::ffff:192.0.2.8', '2001:DB8::1']}]}",
			want: func(c *config.Compiled) {
				c.AllowedSANs = []config.CompiledSANs{{Name: "edge", DNSNames: []string{"web.example.org"}, IPAddresses: addresses("192.0.2.7", "192.0.2.8", "2001:db8::1")}}
			},
		},

		{
			rule: "a pool of both families",
			file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.244.0.0/16, 'fd00:1::/48'], maskSizeIPv4: 25, maskSizeIPv6: 64}\n",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.244.0.0/16", "fd00:1::/48"), MaskSizeIPv4: 25, MaskSizeIPv6: 64}}
			},
		},
		{
			rule: "blocks follow the number of pods where there is no mask size for IPv4, in pools and elsewhere",
			file: "ipam: {blockSize: auto, pools: [{name: a, cidrs: [10.0.0.0/25]}, {name: b, cidrs: [10.1.0.0/16], maskSize: 26}, {name: c, cidrs: ['fd00::/48'], maskSize: 64}]}",
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
			rule: "a mask size may be for blocks from elsewhere", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv6: 96}]}",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv6: 96}}
			},
		},
		{
			rule: "maskSize is that of the pool's one family", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 26}, {name: b, cidrs: ['fd00::/56'], maskSize: 72}]}",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.0.0.0/16"), MaskSizeIPv4: 26}, {Name: "b", CIDRs: prefixes("fd00::/56"), MaskSizeIPv6: 72}}
			},
		},
		{
			rule: "neighbors do not overlap", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/24, 10.0.2.0/24]}, {name: b, cidrs: [10.0.1.0/24]}]}",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.0.0.0/24", "10.0.2.0/24")}, {Name: "b", CIDRs: prefixes("10.0.1.0/24")}}
			},
		},
		{
			rule: "an alias stands for what its anchor names", file: "ipam: {pools: [{name: a, cidrs: &site [10.0.0.0/16]}]}\nglobal: &empty {}\nnodes: *empty\n",
			want: func(c *config.Compiled) {
				c.Pools = []config.CompiledPool{{Name: "a", CIDRs: prefixes("10.0.0.0/16")}}
			},
		},
		{
			rule: "a merge key adds what is not there",
			file: "ipam:\n  pools:\n  - &a {name: a, cidrs: [10.0.0.0/16], maskSize: 26}\n  - {<<: *a, name: b, cidrs: [10.1.0.0/16]}\n  - {name: c, <<: [{maskSize: 27}, *a], cidrs: [10.2.0.0/16]}\n",
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

func TestWhatLoads(t *testing.T) {
	for _, test := range goodFiles() {
		t.Run(test.rule, func(t *testing.T) {
			got, err := config.Parse("config.yaml", []byte(test.file))
			if err != nil {
				t.Fatal(err)
			}

			if got.Rules == nil {
				t.Error("Rules are nil")
			}

			want := &config.Compiled{Rules: got.Rules, MaxExpiration: config.DefaultMaxExpiration}
			if test.want != nil {
				test.want(want)
			}

			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

// bad is a file with mistakes.
type bad struct {
	rule, file string
	// want are the beginnings of the problems, after the file's name.
	want []string
	// bySchema is true if the schema finds it as well: a mistake of form, and not of meaning.
	bySchema bool
}

func badFiles() []bad {
	return []bad{
		// YAML.
		{rule: "syntax names the line", file: "global:\n  clusterName: a: b\n", want: []string{":2: not YAML: mapping values"}},
		{rule: "whichever part of the library finds it", file: "# one\nnodes: {a\nglobal: b\n", want: []string{":3: not YAML: did not find expected ',' or '}'"}},
		{rule: "the end of the file is its last line", file: "# one\nnodes: {a\n", want: []string{":2: not YAML: did not find expected ',' or '}'"}},
		{rule: "at the beginning too", file: "a: }", want: []string{":1: not YAML: did not find expected node content"}},
		{rule: "bytes that are no text name the line", file: "# ä\n# \x01", want: []string{":2: not YAML: control characters are not allowed"}},
		{rule: "an unknown anchor names the line", file: "\nglobal: *nothing\n", want: []string{":2: not YAML: unknown anchor"}},
		{rule: "one document", file: "global: {}\n---\nglobal: {}\n", want: []string{":2: a second document begins here"}},
		{rule: "and no nonsense behind it", file: "global: {}\n---\n}\n", want: []string{":3: not YAML:"}},
		{rule: "a text is no configuration", file: "hello\n", want: []string{`:1: must be a mapping, not the text "hello"`}, bySchema: true},
		{rule: "nor is a list", file: "- a\n", want: []string{":1: must be a mapping, not a list"}, bySchema: true},
		{rule: "a key is set once", file: "global:\n  clusterName: a\n  clusterName: b\n", want: []string{":3: global.clusterName: set twice, first in line 2"}},
		{
			rule: "in lists of labels too", file: "transformations:\n- name: web\n  labels:\n    team: a\n    team: b\n",
			want: []string{`:5: transformations[0].labels[team] (rule "web"): set twice, first in line 4`},
		},
		{rule: "a key is text", file: "? [a]\n: b\n", want: []string{":1: a key must be text"}},
		{
			rule: "a template that is not quoted is explained", file: "transformations:\n- name: web\n  labels:\n    zone: {{ .Zone }}\n",
			want: []string{`:4: transformations[0].labels[zone] (rule "web"): a text that begins with "{{" must be in quotes`},
		},
		{rule: "tags of others are not understood", file: "global:\n  clusterName: !secret a\n", want: []string{`:2: global.clusterName: tag "!secret" is not understood`}},
		{rule: "text is not binary", file: "global:\n  clusterName: !!binary aGk=\n", want: []string{`:2: global.clusterName: tag "!!binary" is not understood`}},
		{rule: "a tag makes no text of a mapping", file: "global:\n  clusterName: !!str {a: b}\n", want: []string{`:2: global.clusterName: tag "!!str" is not understood`}, bySchema: true},
		{rule: "what contains itself is refused", file: "global: &a\n  clusterName: *a\n", want: []string{`:2: global.clusterName: alias "a" stands for something that contains it`}},
		{rule: "in a merge key too", file: "global: &a\n  <<: *a\n", want: []string{`:2: global.<<: alias "a" stands for something that contains it`}},
		{rule: "only mappings can be merged", file: "global:\n  <<: [a]\n", want: []string{":2: global.<<: must be a mapping, or a list of mappings"}},

		// Keys.
		{
			rule: "R9: an unknown key is refused", file: "global: {}\nwhatever: 1\n",
			want: []string{":2: whatever: unknown key; there are global, transformations, nodes, csrApproval, ipam"}, bySchema: true,
		},
		{rule: "with what was meant, if that is clear", file: "transformation: []\n", want: []string{":1: transformation: unknown key; did you mean transformations?"}, bySchema: true},
		{
			rule: "in a rule too", file: "transformations:\n- {name: web}\n- name: db\n  lables: {a: b}\n",
			want: []string{`:4: transformations[1].lables (rule "db"): unknown key; did you mean labels?`}, bySchema: true,
		},
		{rule: "case matters", file: "global: {ClusterName: a}\n", want: []string{":1: global.ClusterName: unknown key; did you mean clusterName?"}, bySchema: true},
		{
			rule: "a key in the wrong place is explained",
			file: "transformations:\n- name: web\n  nodeSelector:\n  - matchExpressions: []\n    labels: {a: b}\n",
			want: []string{`:5: transformations[0].nodeSelector[0].labels (rule "web"): unknown key; it belongs to transformations[0]: look at the indentation`}, bySchema: true,
		},
		{rule: "one that belongs to the top too", file: "global:\n  nodes: {}\n", want: []string{":2: global.nodes: unknown key; it belongs to the top level"}, bySchema: true},
		{
			rule: "a feature of drafts of the upstream Talos CCM", file: "transformations:\n- features:\n    publicIPPredict: true\n",
			want: []string{":3: transformations[0].features.publicIPPredict: unknown key; there are publicIPDiscovery"}, bySchema: true,
		},
		{
			rule: "two spellings of one key are one too many", file: "global:\n  preferIPv6: true\n  PreferIPv6: true\n",
			want: []string{":3: global.PreferIPv6: the same as preferIPv6, which is set as well"}, bySchema: true,
		},
		{
			rule: "what must be there is missed",
			file: "transformations:\n- name: web\n  nodeSelector:\n  - matchExpressions:\n    - values: [a]\n",
			want: []string{
				`:5: transformations[0].nodeSelector[0].matchExpressions[0].key (rule "web"): missing`,
				`:5: transformations[0].nodeSelector[0].matchExpressions[0].operator (rule "web"): missing`,
			}, bySchema: true,
		},

		// Types.
		{rule: "a mapping is not a list", file: "global: []\n", want: []string{":1: global: must be a mapping, not a list"}, bySchema: true},
		{rule: "a list is not a mapping", file: "transformations: {name: web}\n", want: []string{":1: transformations: must be a list, not a mapping"}, bySchema: true},
		{
			rule: "a list of texts is not a text", file: "ipam:\n  pools:\n  - name: a\n    cidrs: 10.0.0.0/16\n",
			want: []string{`:4: ipam.pools[0].cidrs (pool "a"): must be a list, not the text "10.0.0.0/16"`}, bySchema: true,
		},
		{rule: "a text is not a list", file: "global: {clusterName: [a]}\n", want: []string{":1: global.clusterName: must be text, not a list"}, bySchema: true},
		{
			rule: "labels are not a list", file: "transformations:\n- name: web\n  labels: [a]\n",
			want: []string{`:3: transformations[0].labels (rule "web"): must be a mapping, not a list`}, bySchema: true,
		},
		{
			rule: "a label's value is text", file: "transformations:\n- name: web\n  labels:\n    team: [a]\n",
			want: []string{`:4: transformations[0].labels[team] (rule "web"): must be text, not a list`}, bySchema: true,
		},
		{rule: "an entry has something in it", file: "transformations:\n-\n- name: a\n", want: []string{":2: transformations[0]: an entry with nothing in it"}, bySchema: true},
		{rule: "true is not a text", file: "global: {preferIPv6: 'true'}\n", want: []string{`:1: global.preferIPv6: must be true or false, not the text "true"`}, bySchema: true},
		{rule: "yes is not true", file: "global: {preferIPv6: yes}\n", want: []string{`:1: global.preferIPv6: must be true or false, not the text "yes"`}, bySchema: true},
		{
			rule: "a number is not a text", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: '24'}]}",
			want: []string{`:1: ipam.pools[0].maskSize (pool "a"): must be a whole number, not the text "24"`}, bySchema: true,
		},
		{
			rule: "a whole number is whole", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 24.5}]}",
			want: []string{`:1: ipam.pools[0].maskSize (pool "a"): must be a whole number, not "24.5"`}, bySchema: true,
		},
		{
			rule: "digits are decimal", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 030}]}",
			want: []string{`:1: ipam.pools[0].maskSize (pool "a"): must be a whole number in plain digits, not "030"`},
		},
		{
			rule: "and few", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 99999999999999999999}]}",
			want: []string{`:1: ipam.pools[0].maskSize (pool "a"): must be a whole number`}, bySchema: true,
		},

		// Meaning.
		{rule: "the cluster's name is fit for a label", file: "global: {clusterName: my shop}\n", want: []string{":1: global.clusterName: must be fit for a label"}},
		{rule: "a fallback is one of two", file: "global: {providerIDFallback: hostname}\n", want: []string{`:1: global.providerIDFallback: must be uuid or node-ip, not "hostname"`}, bySchema: true},
		{rule: "there is one way to size a block", file: "ipam: {blockSize: large}\n", want: []string{`:1: ipam.blockSize: must be auto, not "large"`}, bySchema: true},
		{rule: "a lifetime is a duration", file: "csrApproval: {maxExpiration: a year}\n", want: []string{`:1: csrApproval.maxExpiration: must be a duration such as 720h or 90m, not "a year"`}},
		{rule: "with a unit", file: "csrApproval: {maxExpiration: 3600}\n", want: []string{`:1: csrApproval.maxExpiration: must be a duration such as 720h or 90m, not "3600"`}},
		{rule: "that is not too short", file: "csrApproval: {maxExpiration: 9m}\n", want: []string{":1: csrApproval.maxExpiration: 9m is less than Kubernetes allows (10m0s)"}},
		{rule: "nor negative", file: "csrApproval: {maxExpiration: -24h}\n", want: []string{":1: csrApproval.maxExpiration: -24h is less than Kubernetes allows (10m0s)"}},
		{
			rule: "C3: no kubelet is allowed a wildcard or a name of the cluster",
			file: "csrApproval:\n  allowedSANs:\n  - name: edge\n    dnsNames:\n    - '*.example.org'\n    - Kubernetes.default.SVC\n    - kubernetes\n    - a.b.svc.cluster.local\n    - localhost\n",
			want: []string{
				`:5: csrApproval.allowedSANs[0].dnsNames[0] (entry "edge"): "*.example.org" is a wildcard`,
				`:6: csrApproval.allowedSANs[0].dnsNames[1] (entry "edge"): "kubernetes.default.svc" is a name of the cluster itself`,
				`:7: csrApproval.allowedSANs[0].dnsNames[2] (entry "edge"): "kubernetes" is a name of the cluster itself`,
				`:8: csrApproval.allowedSANs[0].dnsNames[3] (entry "edge"): "a.b.svc.cluster.local" is a name of the cluster itself`,
				`:9: csrApproval.allowedSANs[0].dnsNames[4] (entry "edge"): "localhost" is a name of the cluster itself`,
			},
		},
		{
			rule: "names are names and addresses are addresses",
			file: "csrApproval:\n  allowedSANs:\n  - dnsNames: [192.0.2.1, a_b, 'a..b', '']\n    ipAddresses: [example.org, 10.0.0.0/8, 127.0.0.1, 'fe80::1%eth0', 'fe80::1', 224.0.0.1, '::']\n",
			want: []string{
				`:3: csrApproval.allowedSANs[0].dnsNames[0]: "192.0.2.1" is an address; it belongs to ipAddresses`,
				`:3: csrApproval.allowedSANs[0].dnsNames[1]: "a_b" is not a DNS name`,
				`:3: csrApproval.allowedSANs[0].dnsNames[2]: "a..b" is not a DNS name`,
				`:3: csrApproval.allowedSANs[0].dnsNames[3]: "" is not a DNS name`,
				`:4: csrApproval.allowedSANs[0].ipAddresses[0]: "example.org" is not an IP address`,
				`:4: csrApproval.allowedSANs[0].ipAddresses[1]: "10.0.0.0/8" is not an IP address`,
				`:4: csrApproval.allowedSANs[0].ipAddresses[2]: "127.0.0.1" is no unicast address that others can reach`,
				`:4: csrApproval.allowedSANs[0].ipAddresses[3]: "fe80::1%eth0" has a zone`,
				`:4: csrApproval.allowedSANs[0].ipAddresses[4]: "fe80::1" is no unicast address that others can reach`,
				`:4: csrApproval.allowedSANs[0].ipAddresses[5]: "224.0.0.1" is no unicast address that others can reach`,
				`:4: csrApproval.allowedSANs[0].ipAddresses[6]: "::" is no unicast address that others can reach`,
			},
		},
		{rule: "an entry allows something", file: "csrApproval:\n  allowedSANs:\n  - name: edge\n", want: []string{`:3: csrApproval.allowedSANs[0] (entry "edge"): allows nothing`}},
		{
			rule: "entries have names of their own", file: "csrApproval:\n  allowedSANs:\n  - {name: a, dnsNames: [a.example.org]}\n  - {name: a, dnsNames: [b.example.org]}\n",
			want: []string{`:4: csrApproval.allowedSANs[1].name (entry "a"): taken by the entry in line 3`},
		},

		// Rules and selectors. What is wrong with them package transform says.
		{
			rule: "R3: a bad regular expression is refused",
			file: "transformations:\n- name: web\n  nodeSelector:\n  - matchExpressions:\n    - key: hostname\n      operator: Regexp\n      values:\n      - '^web-('\n",
			want: []string{`:7: transformations[0].nodeSelector[0].matchExpressions[0].values (rule "web"): `},
		},
		{
			rule: "a bad template is refused", file: "transformations:\n- name: web\n  labels:\n    a: b\n    zone: '{{ .Zone }'\n",
			want: []string{`:5: transformations[0].labels[zone] (rule "web"): `},
		},
		{
			rule: "a variable that there is not is refused", file: "transformations:\n- name: web\n  annotations:\n    zone: '{{ .Zoen }}'\n",
			want: []string{`:4: transformations[0].annotations[zone] (rule "web"): `},
		},
		{
			rule: "keys and values are what Kubernetes accepts",
			file: "transformations:\n- name: web\n  labels:\n    foo bar: a\n    team: a b\n  annotations:\n    'a/b/c': x\n  taints:\n    a b: NoSchedule\n    a: Never\n",
			want: []string{
				`:4: transformations[0].labels[foo bar] (rule "web"): `, `:5: transformations[0].labels[team] (rule "web"): `, `:7: transformations[0].annotations[a/b/c] (rule "web"): `,
				`:9: transformations[0].taints[a b] (rule "web"): `, `:10: transformations[0].taints[a] (rule "web"): `,
			},
		},
		{
			rule: "the taints of Kubernetes itself are prohibited", file: "transformations:\n- name: web\n  taints:\n    node.kubernetes.io/not-ready: NoSchedule\n",
			want: []string{`:4: transformations[0].taints[node.kubernetes.io/not-ready] (rule "web"): `},
		},
		{
			rule: "what makes the machine cannot be replaced", file: "transformations:\n- platformMetadata:\n    Hostname: a\n    Color: b\n",
			want: []string{":3: transformations[0].platformMetadata[Hostname]: ", ":4: transformations[0].platformMetadata[Color]: "},
		},
		{
			rule: "rules have names of their own", file: "transformations:\n- name: web\n- name: db\n- name: web\n",
			want: []string{`:4: transformations[2].name (rule "web"): `},
		},
		{
			rule: "facts are known, and labels, which kubelets set, are for pools alone",
			file: "nodes: {nodeSelector: [{matchExpressions: [{key: color, operator: Exists}]}]}\ntransformations:\n- name: web\n  nodeSelector: [{matchExpressions: [{key: labels.a, operator: Exists}]}]\n" +
				"csrApproval: {allowedSANs: [{nodeSelector: [{matchExpressions: [{key: labels.a, operator: Exists}]}], dnsNames: [example.org]}]}\n" +
				"ipam: {pools: [{name: a, nodeSelector: [{matchExpressions: [{key: labels.a, operator: In}]}], cidrs: [10.0.0.0/16]}]}\n",
			want: []string{
				":1: nodes.nodeSelector[0].matchExpressions[0].key: ", `:4: transformations[0].nodeSelector[0].matchExpressions[0].key (rule "web"): `,
				":5: csrApproval.allowedSANs[0].nodeSelector[0].matchExpressions[0].key: ", `:6: ipam.pools[0].nodeSelector[0].matchExpressions[0].values (pool "a"): `,
			},
		},
		{
			rule: "an operator is one of seven", bySchema: true, file: "nodes: {nodeSelector: [{matchExpressions: [{key: zone, operator: Equals, values: [a]}]}]}\n",
			want: []string{":1: nodes.nodeSelector[0].matchExpressions[0].operator: "},
		},

		// Pools.
		{
			rule: "a pool has a name and CIDRs", file: "ipam:\n  pools:\n  - {}\n  - {name: '', cidrs: []}\n",
			want: []string{":3: ipam.pools[0].name: missing", ":3: ipam.pools[0].cidrs: missing", ":4: ipam.pools[1].name: must not be empty", ":4: ipam.pools[1].cidrs: must not be empty"}, bySchema: true,
		},
		{
			rule: "pools have names of their own", file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16]}\n  - {name: a, cidrs: [10.1.0.0/16]}\n",
			want: []string{`:4: ipam.pools[1].name (pool "a"): taken by the entry in line 3`},
		},
		{
			rule: "CIDRs are CIDRs", file: "ipam:\n  pools:\n  - name: a\n    cidrs: [10.0.0.0, 10.0.0.0/33, 10.1.2.3/16, '::ffff:10.0.0.0/112', 0.0.0.0/0]\n",
			want: []string{
				`:4: ipam.pools[0].cidrs[0] (pool "a"): "10.0.0.0" is not a CIDR`,
				`:4: ipam.pools[0].cidrs[1] (pool "a"): "10.0.0.0/33" is not a CIDR`,
				`:4: ipam.pools[0].cidrs[2] (pool "a"): "10.1.2.3/16" has bits beyond its prefix length; did you mean 10.1.0.0/16?`,
				`:4: ipam.pools[0].cidrs[3] (pool "a"): "::ffff:10.0.0.0/112" is IPv4 written as IPv6`,
				`:4: ipam.pools[0].cidrs[4] (pool "a"): "0.0.0.0/0" is all there is`,
			},
		},
		{
			rule: "pools do not overlap, and both are named",
			file: "ipam:\n  pools:\n  - name: small\n    cidrs: [10.1.0.0/16, 'fd00::/48']\n" +
				"  - name: large\n    cidrs: ['fd00:0:0:5::/64', 10.0.0.0/8]\n  - name: twice\n    cidrs: [192.168.0.0/16, 192.168.0.0/16]\n",
			want: []string{
				`:6: ipam.pools[1].cidrs[0] (pool "large"): fd00:0:0:5::/64 overlaps fd00::/48 of pool "small" in line 4`,
				`:6: ipam.pools[1].cidrs[1] (pool "large"): 10.0.0.0/8 overlaps 10.1.0.0/16 of pool "small" in line 4`,
				`:8: ipam.pools[2].cidrs[1] (pool "twice"): 192.168.0.0/16 overlaps 192.168.0.0/16 of pool "twice" in line 8`,
			},
		},
		{
			rule: "a mask size fits the CIDR",
			file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16], maskSize: 15}\n  - {name: b, cidrs: ['fd00::/48'], maskSizeIPv6: 40}\n  - {name: c, cidrs: ['fd01::/16'], maskSize: 96}\n",
			want: []string{
				`:3: ipam.pools[0].maskSize (pool "a"): cut 10.0.0.0/16 into blocks of /15: a block would be larger than the whole`,
				`:4: ipam.pools[1].maskSizeIPv6 (pool "b"): cut fd00::/48 into blocks of /40: a block would be larger than the whole`,
				`:5: ipam.pools[2].maskSize (pool "c"): cut fd01::/16 into blocks of /96: more than 2^63 blocks`,
			},
		},
		{
			rule: "a mask size fits the family", file: "ipam:\n  pools:\n  - {name: a, cidrs: [10.0.0.0/16], maskSize: 64}\n",
			want: []string{`:3: ipam.pools[0].maskSize (pool "a"): cut 10.0.0.0/16 into blocks of /64: its addresses have 32 bits`},
		},
		{
			rule: "no prefix is longer than an address", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: 33}]}",
			want: []string{`:1: ipam.pools[0].maskSizeIPv4 (pool "a"): 33 is not between 1 and 32`}, bySchema: true,
		},
		{
			rule: "none is shorter than nothing", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSizeIPv4: -1}]}",
			want: []string{`:1: ipam.pools[0].maskSizeIPv4 (pool "a"): -1 is not between 1 and 32`}, bySchema: true,
		},
		{
			rule: "two families have two mask sizes", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16, 'fd00::/48'], maskSize: 24}]}",
			want: []string{`:1: ipam.pools[0].maskSize (pool "a"): the pool has CIDRs of both families`},
		},
		{
			rule: "a family has one mask size", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/16], maskSize: 24, maskSizeIPv4: 24}]}",
			want: []string{`:1: ipam.pools[0].maskSize (pool "a"): does not go together with maskSizeIPv4`},
		},
		{
			rule: "a small CIDR needs a mask size", file: "ipam: {pools: [{name: a, cidrs: [10.0.0.0/25]}]}",
			want: []string{`:1: ipam.pools[0].maskSizeIPv4 (pool "a"): missing: it must be said for a CIDR as small as 10.0.0.0/25`},
		},
	}
}

func TestEveryMistakeNamesLineRuleAndKey(t *testing.T) {
	for _, test := range badFiles() {
		t.Run(test.rule, func(t *testing.T) { mistaken(t, test.file, test.want) })
	}
}

// mistaken asserts the problems of a file.
func mistaken(t *testing.T, file string, want []string) {
	t.Helper()

	compiled, err := config.Parse("config.yaml", []byte(file))

	var mistakes *config.Error
	if !errors.As(err, &mistakes) || compiled != nil {
		t.Fatalf("got %v and %v, want an Error and nothing", compiled, err)
	}

	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(want) {
		t.Fatalf("got %d problems:\n%v\nwant %d: %q", len(lines), err, len(want), want)
	}

	for i, line := range lines {
		if !strings.HasPrefix(line, "config.yaml"+want[i]) {
			t.Errorf("got  %s\nwant config.yaml%s…", line, want[i])
		}
	}
}

func TestAllMistakesAreToldAtOnce(t *testing.T) {
	var file strings.Builder

	var want []string

	file.WriteString("unknown: 1\ntransformations:\n")

	want = append(want, ":1: unknown: unknown key")

	for i := range 50 {
		fmt.Fprintf(&file, "- {name: rule-%d, lables: {}}\n", i)
		want = append(want, fmt.Sprintf(`:%d: transformations[%d].lables (rule "rule-%d"): unknown key; did you mean labels?`, i+3, i, i))
	}

	file.WriteString("ipam: {pools: [{name: a, cidrs: [10.0.0.1/16]}]}\ncsrApproval: {maxExpiration: 1s}\n")

	want = append(want, `:53: ipam.pools[0].cidrs[0] (pool "a"): "10.0.0.1/16" has bits`, ":54: csrApproval.maxExpiration: 1s is less")

	mistaken(t, file.String(), want)
}

func TestFollowUpsAreNotTold(t *testing.T) {
	mistaken(t, "ipam: {pools: [{name: [], cidrs: {}}]}\ncsrApproval: {maxExpiration: []}\n", []string{
		":1: ipam.pools[0].name: must be text, not a list", ":1: ipam.pools[0].cidrs: must be a list, not a mapping", ":2: csrApproval.maxExpiration: must be text, not a list",
	})
}

func TestHugeFilesAreRefused(t *testing.T) {
	mistaken(t, strings.Repeat("#\n", config.MaxSize/2+1), []string{": 1048578 bytes are more than a configuration may have"})
}

func TestManyMistakesAreCut(t *testing.T) {
	var file strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&file, "a%d: 1\n", i)
	}

	_, err := config.Parse("config.yaml", []byte(file.String()))

	var mistakes *config.Error
	if !errors.As(err, &mistakes) || len(mistakes.Problems) != 1001 || !strings.Contains(mistakes.Problems[1000].Msg, "there may be more") {
		t.Errorf("got %v", err)
	}
}

func TestLongTextsAreCut(t *testing.T) {
	_, err := config.Parse("config.yaml", []byte("global: {providerIDFallback: "+strings.Repeat("ä", 10_000)+"}\n"+strings.Repeat("b", 900)+": 1\n"))
	if err == nil || len(err.Error()) > 1000 {
		t.Errorf("got %v", err)
	}
}

// TestAliasesAreBounded reads files that are small and expand to what no memory holds.
func TestAliasesAreBounded(t *testing.T) {
	lists, merges := "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n", "m0: &m0 {k: v}\n"

	for i := range 30 {
		lists += fmt.Sprintf("a%d: &a%d [%s]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d, ", i), 10))
		merges += fmt.Sprintf("m%d: &m%d {<<: [%s], k%d: v}\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*m%d, ", i), 10), i)
	}

	long := "a: &a " + strings.Repeat("x", 1<<18) + "\nb: [" + strings.Repeat("*a, ", 100) + "]\n"

	for rule, file := range map[string]string{"lists of lists": lists, "merges of merges": merges, "a long text many times": long} {
		t.Run(rule, func(t *testing.T) {
			_, err := config.Parse("config.yaml", []byte(file))
			if err == nil || !strings.Contains(err.Error(), "with its aliases expanded the configuration is too large") {
				t.Errorf("got %.200v", err)
			}
		})
	}
}
