// Package config defines and reads the configuration file.
//
// Parse turns a YAML or JSON document into a Compiled configuration or returns every error in it, each with line,
// column and path. The package does no I/O.
package config

import (
	"bytes"
	_ "embed" // the schema and the starter
	"fmt"
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// MaxRows is the maximum number of keys in all tables.
const MaxRows = 10_000

// MaxSize is the maximum size of a file in bytes.
const MaxSize = 1 << 20

// Schema is the JSON schema of the file, for editors. It accepts every file that Parse accepts.
//
//go:embed schema.json
var Schema []byte

// Starter is a document with a commented configuration to start with.
//
//go:embed starter.yaml
var Starter []byte

// Parse reads a YAML or JSON document; an empty one gives the defaults (see CheckNotEmpty). The error is an *Error
// that holds every error. The name is used in errors only.
func Parse(name string, data []byte) (*Compiled, error) {
	d := newDecoder()
	compiled := d.parse(d.load(data))

	return compiled, d.err(name)
}

// CheckNotEmpty returns an error if data is blank. A blank file is an error rather than the defaults: it may be half
// written, or lost on a full disk, and the defaults manage every Node.
func CheckNotEmpty(name string, data []byte) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return fmt.Errorf("%s is empty; use {} for the defaults", name)
	}

	return nil
}

// Config is the configuration file. All keys are optional unless marked as required.
//
// test/docs/reference generates the JSON schema and docs/reference/configuration.md from these types and their comments. A
// field whose JSON tag has neither omitempty nor omitzero is required. The tag `alias` is another spelling of a key,
// `default` describes the default, and `jsonschema` has the bounds and the enumerated values for the schema.
type Config struct {
	// Global holds settings that apply to all Nodes.
	Global Global `json:"global,omitzero"`
	// Transformations are rules that set labels, annotations, taints, platform metadata and addresses. All rules that
	// select a machine apply, in order. The last rule that sets a key wins.
	Transformations []rules.Rule `json:"transformations,omitempty"`
	// Tables map names to mappings of keys to texts, with at most 10,000 keys together. Templates of transformations read
	// them with the function `lookup`.
	Tables rules.Tables `json:"tables,omitempty"`
	// Nodes configures the initialization and updates of Nodes.
	Nodes Nodes `json:"nodes,omitzero"`
	// Addresses configures the addresses of Nodes.
	Addresses Addresses `json:"addresses,omitzero"`
	// CSRApproval configures the approval of kubelet serving certificates.
	CSRApproval CSRApproval `json:"csrApproval,omitzero"`
	// IPAM configures the allocation of pod CIDRs.
	IPAM IPAM `json:"ipam,omitzero"`
	// Service configures load balancers by node IP.
	Service Service `json:"service,omitzero"`
	// Lifecycle configures the taints and the deletion of Nodes whose machines are shut down or gone.
	Lifecycle Lifecycle `json:"lifecycle,omitzero"`
}

// Global holds settings that apply to all Nodes.
type Global struct {
	// ClusterName is the value of the label `node.cloudprovider.kubernetes.io/clustername`.
	ClusterName string `default:"the cluster name in the machine configuration" json:"clusterName,omitempty"`
	// PreferIPv6 lists the IPv6 addresses of a Node first.
	PreferIPv6 bool `alias:"PreferIPv6" json:"preferIPv6,omitempty"`
	// ProviderIDFallback is the identifier in a new providerID if the platform publishes none. `uuid` is the platform's
	// instance ID, else a valid and unique SMBIOS UUID, else the node IP. `node-ip` is always the node IP, as in the
	// upstream Talos CCM.
	ProviderIDFallback ProviderIDFallback `default:"that of --provider-id-fallback, uuid" json:"providerIDFallback,omitempty" jsonschema:"enum=uuid,enum=node-ip"`
}

// ProviderIDFallback is the identifier of a machine whose platform publishes no providerID. Empty means the value of the flag.
type ProviderIDFallback string

// Values of ProviderIDFallback.
const (
	FallbackUUID   ProviderIDFallback = "uuid"
	FallbackNodeIP ProviderIDFallback = "node-ip"
)

// Nodes configures the initialization and updates of Nodes.
type Nodes struct {
	// Selector selects the Nodes to initialize and update.
	Selector []rules.SelectorTerm `default:"all Talos machines" json:"selector,omitempty"`
	// Topology is for another region or zone of an initialized Node's machine or a rule. `keep` keeps the labels, with the
	// Event TopologyChanged. `follow` changes them.
	Topology Choice `default:"keep" json:"topology,omitempty" jsonschema:"enum=keep,enum=follow"`
	// Conditions is for the Node conditions TalosReady, MaintenanceInProgress and GracefulNodeShutdownInProgress. `publish`
	// sets them, `omit` removes them.
	Conditions Choice `default:"publish" json:"conditions,omitempty" jsonschema:"enum=publish,enum=omit"`
}

// Choice is one of the values that the tag `jsonschema` of its field enumerates. Empty means the default.
type Choice string

// Addresses configures the addresses of Nodes.
type Addresses struct {
	// ExternalIPs selects the public addresses that a Node lists, and so those of its certificate and load balancers.
	// `first-per-family` lists one IPv4 and one IPv6 address, as the upstream Talos CCM does.
	ExternalIPs Choice `default:"all" json:"externalIPs,omitempty" jsonschema:"enum=all,enum=first-per-family"`
}

// CSRApproval configures the approval of kubelet serving certificates.
type CSRApproval struct {
	// Selector selects the Nodes whose CSRs talos-ccm decides.
	Selector []rules.SelectorTerm `default:"all Talos machines" json:"selector,omitempty"`
	// MaxExpiration is the maximum validity that a kubelet may request (minimum: `10m`).
	MaxExpiration string `default:"8784h" json:"maxExpiration,omitempty"`
	// AllowedSANs lists names and addresses that certificates may contain besides the machine's own.
	AllowedSANs []AllowedSANs `json:"allowedSANs,omitempty"`
	// CredentialPinning is for CSRs made with another client certificate than the Node's recorded one. `warn` reports them,
	// `enforce` also leaves them pending. Either value applies to all Nodes.
	CredentialPinning Choice `default:"enforce for control-plane Nodes, warn for workers" json:"credentialPinning,omitempty" jsonschema:"enum=warn,enum=enforce"`
}

// AllowedSANs lists DNS names and IP addresses that selected machines may have in their certificates.
type AllowedSANs struct {
	// Name is the entry's unique name in error messages.
	Name string `json:"name,omitempty"`
	// NodeSelector selects machines.
	NodeSelector []rules.SelectorTerm `default:"all machines" json:"nodeSelector,omitempty"`
	// DNSNames are fully qualified names without wildcards.
	DNSNames []string `json:"dnsNames,omitempty"`
	// IPAddresses are IPv4 or IPv6 addresses without a prefix length.
	IPAddresses []string `json:"ipAddresses,omitempty"`
}

// IPAM configures the allocation of pod CIDRs.
type IPAM struct {
	// Selector selects the Nodes that get pod CIDRs.
	Selector []rules.SelectorTerm `default:"all Talos machines" json:"selector,omitempty"`
	// Pools are address pools for pod CIDRs. A Node uses the first pool that selects it, and keeps its pod CIDRs.
	Pools []Pool `default:"the cluster CIDRs" json:"pools,omitempty"`
	// BlockSize `auto` gives each Node the smallest IPv4 pod CIDR with two addresses per pod of the kubelet's maxPods. The
	// IPv4 mask size of a pool takes precedence.
	BlockSize Choice `default:"the mask size" json:"blockSize,omitempty" jsonschema:"enum=auto"`
	// FallbackToClusterCIDRs allocates IPv6 pod CIDRs from the cluster CIDRs, with CloudAllocator, if the machine has no
	// global IPv6 prefix a minute after its Node has registered. By default the Node waits.
	FallbackToClusterCIDRs bool `json:"fallbackToClusterCIDRs,omitempty"`
}

// Pool is a set of CIDRs from which the pod CIDRs of the selected Nodes are allocated.
type Pool struct {
	// Name is the pool's unique name in Events, metrics and error messages.
	Name string `json:"name"`
	// NodeSelector selects machines; `labels.<key>` is a label of the Node.
	NodeSelector []rules.SelectorTerm `default:"all machines" json:"nodeSelector,omitempty"`
	// CIDRs are IPv4 or IPv6 CIDRs. Within an IP family, the first CIDR with a free block is used. A family without CIDRs is
	// allocated as if there were no pools. Pools may have the same CIDR.
	CIDRs []string `json:"cidrs"`
	// ContainsMachines must be set if machines have addresses in the CIDRs. Otherwise they get no serving certificates for
	// these addresses.
	ContainsMachines bool `json:"containsMachines,omitempty"`
	// MaskSizeIPv4 is the prefix length of a Node's IPv4 pod CIDR.
	MaskSizeIPv4 int `default:"--node-cidr-mask-size-ipv4, else 24" json:"maskSizeIPv4,omitempty" jsonschema:"minimum=0,maximum=32"`
	// MaskSizeIPv6 is the prefix length of a Node's IPv6 pod CIDR.
	MaskSizeIPv6 int `default:"--node-cidr-mask-size-ipv6, else 80" json:"maskSizeIPv6,omitempty" jsonschema:"minimum=0,maximum=128"`
}

// Service configures load balancers by node IP.
type Service struct {
	// Default also gives addresses to Services without a `loadBalancerClass`. Enable it only if no other controller
	// handles such Services.
	Default bool `json:"default,omitempty"`
	// Addresses is the type of the Node addresses that Services get. The annotation `talos-ccm.dev/addresses` overrides it.
	Addresses ServiceAddresses `default:"external, or internal for a Node without external ones" json:"addresses,omitempty" jsonschema:"enum=external,enum=internal"`
	// ExternalCIDRs limits the external addresses that Services get. Set it to your own public CIDRs: otherwise a worker can
	// redirect the cluster's traffic by reporting a false address.
	ExternalCIDRs []string `default:"all addresses" json:"externalCIDRs,omitempty"`
	// ReservedPorts are ports of any protocol that Services cannot have, besides those of Talos, Kubernetes and talos-ccm.
	ReservedPorts []int `json:"reservedPorts,omitempty"`
}

// ServiceAddresses is the type of the Node addresses that Services get. Empty means the external ones of a Node, or
// the internal ones of a Node that has no external ones of the IP family.
type ServiceAddresses string

// Values of ServiceAddresses.
const (
	AddressesExternal ServiceAddresses = "external"
	AddressesInternal ServiceAddresses = "internal"
)

// Lifecycle configures the taints and the deletion of Nodes whose machines are shut down or gone.
type Lifecycle struct {
	// Selector selects the Nodes that talos-ccm may taint and delete.
	Selector []rules.SelectorTerm `default:"the machines of managed Nodes" json:"selector,omitempty"`
	// GracePeriod is how long a Node must be not ready, with proof that its machine is gone, before it is deleted (minimum: `1m`).
	GracePeriod string `default:"5m" json:"gracePeriod,omitempty"`
	// DryRun reports verdicts as Events and metrics, but neither taints nor deletes Nodes. It removes earlier taints.
	DryRun bool `json:"dryRun,omitempty"`
	// OutOfServiceTaint sets the taint `node.kubernetes.io/out-of-service` on Nodes whose machines announced a shutdown and
	// have not responded for the grace period. Kubernetes then deletes their pods and detaches their volumes.
	OutOfServiceTaint bool `json:"outOfServiceTaint,omitempty"`
	// Discovery also deletes a Node if its machine does not respond and no control-plane machine discovers it. It needs
	// Talos's discovery service.
	Discovery bool `json:"discovery,omitempty"`
	// AbsentPeriod is the grace period for `discovery` (minimum: `30m`).
	AbsentPeriod string `default:"1h" json:"absentPeriod,omitempty"`
}

// Defaults and minimums of the periods of Lifecycle. Kubernetes notices after 50 s that a kubelet does not respond, and the
// discovery service forgets a machine after 30 minutes (Talos cluster/DiscoveryServiceController).
const (
	DefaultGracePeriod  = 5 * time.Minute
	MinGracePeriod      = time.Minute
	DefaultAbsentPeriod = time.Hour
	MinAbsentPeriod     = 30 * time.Minute
)
