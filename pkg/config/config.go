// Package config defines and reads the configuration file.
//
// Parse turns a YAML or JSON document into a Compiled configuration or returns every mistake in it, each with line,
// column and path. The package does no I/O.
package config

//go:generate go run ./internal/reference

import (
	"bytes"
	_ "embed" // the schema
	"fmt"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// MaxSize is the maximum size of a file in bytes.
const MaxSize = 1 << 20

// Schema is the JSON schema of the file, for editors. It accepts every file that Parse accepts.
//
//go:embed schema.json
var Schema []byte

// Parse reads a YAML or JSON document; an empty one gives the defaults (see CheckNotEmpty). The error is an *Error
// that holds every mistake. The name is used in errors only.
func Parse(name string, data []byte) (*Compiled, error) {
	var file Config

	d := &decoder{root: entry{&yaml.Node{}, &yaml.Node{}}, active: map[*yaml.Node]bool{}, mappings: map[*yaml.Node][]entry{}}
	d.load(data, &file)

	var compiled *Compiled
	if !d.stopped {
		compiled = d.validate(&file)
	}

	if len(d.problems) > 0 {
		return nil, d.err(name)
	}

	return compiled, nil
}

// CheckNotEmpty returns an error if data is blank. A blank file is a mistake rather than the defaults: it may be half
// written, or lost on a full disk, and the defaults manage every Node.
func CheckNotEmpty(name string, data []byte) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return fmt.Errorf("%s is empty; use {} for the defaults", name)
	}

	return nil
}

// Config is the configuration file. All keys are optional unless marked as required.
//
// The JSON schema and docs/reference/configuration.md are generated from these types and their comments. A field
// whose JSON tag has neither omitempty nor omitzero is required. The tag `alias` is another spelling of a key, and
// `default` describes the default.
type Config struct {
	// Global holds settings that apply to all Nodes.
	Global Global `json:"global,omitzero"`
	// Transformations are rules that set labels, annotations, taints and platform metadata. All rules that select a
	// machine apply, in order: selectors and templates see the metadata that earlier rules have replaced, and the
	// last rule that sets a key wins.
	Transformations []rules.Rule `json:"transformations,omitempty"`
	// Nodes selects the Nodes that talos-ccm manages.
	Nodes Nodes `json:"nodes,omitzero"`
	// CSRApproval configures the approval of kubelet serving certificates.
	CSRApproval CSRApproval `json:"csrApproval,omitzero"`
	// IPAM configures the allocation of pod CIDRs.
	IPAM IPAM `json:"ipam,omitzero"`
}

// Global holds settings that apply to all Nodes.
type Global struct {
	// ClusterName is the value of the label `node.cloudprovider.kubernetes.io/clustername`. It must be a valid label
	// value.
	ClusterName string `default:"the cluster name in the machine configuration" json:"clusterName,omitempty"`
	// PreferIPv6 lists the IPv6 addresses of a Node before its IPv4 addresses.
	PreferIPv6 bool `alias:"PreferIPv6" json:"preferIPv6,omitempty"`
	// ProviderIDFallback is the identifier used in the providerID of a machine whose platform provides none. `uuid`
	// is the SMBIOS UUID, or the node IP if the UUID is invalid or not unique. `node-ip` is always the node IP, as in
	// the upstream Talos CCM. A providerID cannot be changed once set, so this affects new Nodes only.
	ProviderIDFallback ProviderIDFallback `default:"the value of --provider-id-fallback, which defaults to uuid" json:"providerIDFallback,omitempty"`
}

// ProviderIDFallback is the identifier of a machine whose platform provides none. Empty means the value of the flag.
type ProviderIDFallback string

// Values of ProviderIDFallback.
const (
	FallbackUUID   ProviderIDFallback = "uuid"
	FallbackNodeIP ProviderIDFallback = "node-ip"
)

// Nodes selects the Nodes that talos-ccm manages.
type Nodes struct {
	// NodeSelector is a list of terms that are ORed. Nodes whose machine matches no term are not managed, and neither
	// are their certificate signing requests. Terms see the machine as it is, before any rule.
	NodeSelector []rules.SelectorTerm `default:"all Talos machines" json:"nodeSelector,omitempty"`
}

// CSRApproval configures the approval of kubelet serving certificates.
type CSRApproval struct {
	// MaxExpiration is the maximum validity that a kubelet may request, such as `720h`. The minimum is `10m`.
	MaxExpiration string `default:"8784h" json:"maxExpiration,omitempty"`
	// AllowedSANs lists DNS names and IP addresses that certificates may contain in addition to the machine's own,
	// such as a DNS name that resolves to the machine.
	AllowedSANs []AllowedSANs `json:"allowedSANs,omitempty"`
}

// AllowedSANs lists DNS names and IP addresses that selected machines may have in their certificates.
type AllowedSANs struct {
	// Name identifies the entry in error messages. It must be unique.
	Name string `json:"name,omitempty"`
	// NodeSelector is a list of terms that are ORed. Node labels cannot be selected, because a kubelet may set its
	// own labels.
	NodeSelector []rules.SelectorTerm `default:"all machines" json:"nodeSelector,omitempty"`
	// DNSNames are fully qualified names without wildcards. Names that are reserved for the cluster, such as
	// kubernetes.default.svc and cluster.local, are invalid.
	DNSNames []string `json:"dnsNames,omitempty"`
	// IPAddresses are IPv4 or IPv6 addresses without a prefix length.
	IPAddresses []string `json:"ipAddresses,omitempty"`
}

// IPAM configures the allocation of pod CIDRs.
type IPAM struct {
	// Pools are address pools for pod CIDRs. A Node uses the first pool that selects it. A Node that already has pod
	// CIDRs keeps them.
	Pools []Pool `default:"one pool for all Nodes: the pod CIDRs of the cluster" json:"pools,omitempty"`
	// BlockSize `auto` derives the size of a Node's IPv4 pod CIDR from the maximum number of pods of its kubelet: the
	// smallest CIDR with two addresses per pod. The IPv4 mask size of a pool takes precedence.
	BlockSize BlockSize `default:"the mask size" json:"blockSize,omitempty"`
}

// BlockSize is how the size of a Node's pod CIDR is chosen. Empty means by mask size.
type BlockSize string

// BlockSizeAuto derives the size from the maximum number of pods of the kubelet.
const BlockSizeAuto BlockSize = "auto"

// Pool is a set of CIDRs from which the pod CIDRs of the selected Nodes are allocated.
type Pool struct {
	// Name identifies the pool in Events, metrics and error messages. It must be unique.
	Name string `json:"name"`
	// NodeSelector is a list of terms that are ORed. In addition to other keys, `labels.<key>` selects by a label of
	// the Node.
	NodeSelector []rules.SelectorTerm `default:"all machines" json:"nodeSelector,omitempty"`
	// CIDRs are IPv4 or IPv6 CIDRs that must not overlap those of any pool. Within an IP family, the first CIDR that
	// is not exhausted is used. An IP family without CIDRs is allocated as if there were no pools.
	CIDRs []string `json:"cidrs"`
	// MaskSize is the prefix length of a Node's pod CIDR, such as 24, in a pool with a single IP family.
	MaskSize int `json:"maskSize,omitempty" jsonschema:"minimum=0,maximum=128"`
	// MaskSizeIPv4 is the prefix length of a Node's IPv4 pod CIDR.
	MaskSizeIPv4 int `default:"the value of --node-cidr-mask-size-ipv4" json:"maskSizeIPv4,omitempty" jsonschema:"minimum=0,maximum=32"`
	// MaskSizeIPv6 is the prefix length of a Node's IPv6 pod CIDR.
	MaskSizeIPv6 int `default:"the value of --node-cidr-mask-size-ipv6" json:"maskSizeIPv6,omitempty" jsonschema:"minimum=0,maximum=128"`
}

// MinExpiration is the minimum validity of a certificate that Kubernetes allows in a request (certificates.k8s.io/v1,
// expirationSeconds).
const MinExpiration = 10 * time.Minute

// DefaultMaxExpiration is the default maximum validity of a certificate: one leap year.
const DefaultMaxExpiration = 366 * 24 * time.Hour
