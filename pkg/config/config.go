// Package config reads the configuration file.
//
// Parse takes bytes and returns what they mean, ready for use, or every mistake in them at once, each with its line. It never reads a file, an
// environment or a clock, and it never guesses: what it does not know it refuses.
package config

//go:generate go run ./internal/reference

import (
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// MaxSize of a file in bytes, and of what its anchors and aliases expand to.
const MaxSize = 1 << 20

// Config is the configuration file. The zero value, an empty file, is a valid one: every key has a default.
//
// The JSON schema and the reference in docs/configuration.md are made of these types and their comments, which therefore speak to whoever writes the file. A
// key whose tag has no omitempty or omitzero is required; `alias` is another spelling of a key, `default` what holds without it.
type Config struct {
	// Global are settings that hold everywhere.
	Global Global `json:"global,omitzero"`
	// Transformations are the rules that set labels, annotations, taints and metadata. They apply in order: every rule that selects a machine does, and
	// selectors and templates see what earlier rules have replaced. Where two set the same key, the later one wins.
	Transformations []rules.Rule `json:"transformations,omitempty"`
	// Nodes says which Nodes are ours.
	Nodes Nodes `json:"nodes,omitzero"`
	// CSRApproval is about the kubelets' requests for serving certificates.
	CSRApproval CSRApproval `json:"csrApproval,omitzero"`
	// IPAM is about the Nodes' pod CIDRs.
	IPAM IPAM `json:"ipam,omitzero"`
}

// Global are settings that hold everywhere.
type Global struct {
	// ClusterName is the value of the label `node.cloudprovider.kubernetes.io/clustername`.
	ClusterName string `default:"the name that Talos knows" json:"clusterName,omitempty"`
	// PreferIPv6 puts a Node's IPv6 addresses before its IPv4 ones.
	PreferIPv6 bool `alias:"PreferIPv6" json:"preferIPv6,omitempty"`
	// ProviderIDFallback is what identifies a machine whose platform does not: `uuid`, its SMBIOS UUID where that is valid and unique and else its node IP, or `node-ip`,
	// always the node IP, as the upstream Talos CCM does. A providerID is for ever: this never changes one that is written.
	ProviderIDFallback ProviderIDFallback `default:"the flag --provider-id-fallback, which is uuid" json:"providerIDFallback,omitempty"`
}

// ProviderIDFallback says what identifies a machine whose platform does not.
type ProviderIDFallback string

// The fallbacks. The zero value leaves it to the flag.
const (
	FallbackUUID   ProviderIDFallback = "uuid"
	FallbackNodeIP ProviderIDFallback = "node-ip"
)

// Nodes says which Nodes are ours.
type Nodes struct {
	// NodeSelector terms are OR-ed; a machine that none of them selects is left alone, and so are its Node and its certificate requests. They look at what the machine says
	// itself, before any rule.
	NodeSelector []rules.SelectorTerm `default:"every Talos machine" json:"nodeSelector,omitempty"`
}

// CSRApproval is about the kubelets' requests for serving certificates.
type CSRApproval struct {
	// MaxExpiration is the longest lifetime that a kubelet may ask for, such as `720h`; at least `10m`.
	MaxExpiration string `default:"8784h" json:"maxExpiration,omitempty"`
	// AllowedSANs are names and addresses that a machine may have in its certificate although it does not have them itself, such as a DNS name of yours that leads to it.
	AllowedSANs []AllowedSANs `json:"allowedSANs,omitempty"`
}

// AllowedSANs are names and addresses beyond a machine's own.
type AllowedSANs struct {
	// Name tells the entry from others, for people.
	Name string `json:"name,omitempty"`
	// NodeSelector terms are OR-ed. They look at what the machine says itself; a label of the Node proves nothing, since its kubelet may set it.
	NodeSelector []rules.SelectorTerm `default:"every machine" json:"nodeSelector,omitempty"`
	// DNSNames in full and without wildcards. Names of the cluster itself, such as `kubernetes.default.svc`, are refused.
	DNSNames []string `json:"dnsNames,omitempty"`
	// IPAddresses of either family, without prefix length.
	IPAddresses []string `json:"ipAddresses,omitempty"`
}

// IPAM is about the Nodes' pod CIDRs.
type IPAM struct {
	// Pools to allocate pod CIDRs from. The first that selects a Node is its pool; a Node that already has its CIDRs keeps them.
	Pools []Pool `default:"one pool for all: the cluster's pod CIDRs" json:"pools,omitempty"`
	// BlockSize `auto` sizes a Node's IPv4 block by the number of pods that its kubelet admits: the smallest that has two addresses for each. A pool with a mask
	// size for IPv4 keeps that.
	BlockSize BlockSize `json:"blockSize,omitempty"`
}

// BlockSize says how large a Node's pod CIDR is.
type BlockSize string

// BlockSizeAuto goes by the number of pods that the kubelet admits. The zero value goes by the mask size.
const BlockSizeAuto BlockSize = "auto"

// Pool is a set of CIDRs of which some Nodes get their pod CIDRs.
type Pool struct {
	// Name tells the pool from others: in Events and metrics.
	Name string `json:"name"`
	// NodeSelector terms are OR-ed. `labels.<key>` can be selected, too: a label of the Node.
	NodeSelector []rules.SelectorTerm `default:"every machine" json:"nodeSelector,omitempty"`
	// CIDRs of either family or both; no two may overlap. Of one family the first that is not exhausted is used; a family that the pool does not have comes from where it comes
	// from without pools.
	CIDRs []string `json:"cidrs"`
	// MaskSize is the length of a Node's prefix, such as 24, in a pool of one family.
	MaskSize int `json:"maskSize,omitempty" jsonschema:"minimum=0,maximum=128"`
	// MaskSizeIPv4 is the same for IPv4.
	MaskSizeIPv4 int `default:"the flag --node-cidr-mask-size-ipv4" json:"maskSizeIPv4,omitempty" jsonschema:"minimum=0,maximum=32"`
	// MaskSizeIPv6 is the same for IPv6.
	MaskSizeIPv6 int `default:"the flag --node-cidr-mask-size-ipv6" json:"maskSizeIPv6,omitempty" jsonschema:"minimum=0,maximum=128"`
}

// MinExpiration is the shortest lifetime that Kubernetes lets anybody ask for (certificates.k8s.io/v1, expirationSeconds).
const MinExpiration = 10 * time.Minute

// DefaultMaxExpiration bounds the lifetime of certificates unless the file says otherwise: a leap year.
const DefaultMaxExpiration = 366 * 24 * time.Hour
