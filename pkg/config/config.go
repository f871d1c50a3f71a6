// Package config defines and reads the configuration file.
//
// Parse turns a YAML or JSON document into a Compiled configuration or returns every error in it, each with line,
// column and path. The package does no I/O.
package config

//go:generate go run ./internal/reference

import (
	"bytes"
	_ "embed" // the schema
	"fmt"
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// MaxSize is the maximum size of a file in bytes.
const MaxSize = 1 << 20

// Schema is the JSON schema of the file, for editors. It accepts every file that Parse accepts.
//
//go:embed schema.json
var Schema []byte

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
// The JSON schema and docs/reference/configuration.md are generated from these types and their comments. A field
// whose JSON tag has neither omitempty nor omitzero is required. The tag `alias` is another spelling of a key,
// `default` describes the default, and `jsonschema` has the bounds and the enumerated values for the schema.
type Config struct {
	// Global holds settings that apply to all Nodes.
	Global Global `json:"global,omitzero"`
	// Transformations are rules that set labels, annotations, taints and platform metadata. All rules that select a
	// machine apply, in order: selectors and templates see the metadata that earlier rules have replaced, and the
	// last rule that sets a key wins.
	Transformations []rules.Rule `json:"transformations,omitempty"`
	// Nodes selects the Nodes that talos-ccm initializes and updates.
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
	// ClusterName is the value of the label `node.cloudprovider.kubernetes.io/clustername`. It must be a valid label
	// value.
	ClusterName string `default:"the cluster name in the machine configuration" json:"clusterName,omitempty"`
	// PreferIPv6 lists the IPv6 addresses of a Node before its IPv4 addresses.
	PreferIPv6 bool `alias:"PreferIPv6" json:"preferIPv6,omitempty"`
	// ProviderIDFallback is the identifier used in the providerID of a machine whose platform publishes no providerID.
	// `uuid` is the platform's instance ID, or else the SMBIOS UUID, or else, if the UUID is invalid or not unique, the
	// node IP. `node-ip` is always the node IP, as in the upstream Talos CCM. A providerID cannot be changed once set,
	// so this affects new Nodes only.
	ProviderIDFallback ProviderIDFallback `default:"the value of --provider-id-fallback, which defaults to uuid" json:"providerIDFallback,omitempty" jsonschema:"enum=uuid,enum=node-ip"`
}

// ProviderIDFallback is the identifier of a machine whose platform publishes no providerID. Empty means the value of the flag.
type ProviderIDFallback string

// Values of ProviderIDFallback.
const (
	FallbackUUID   ProviderIDFallback = "uuid"
	FallbackNodeIP ProviderIDFallback = "node-ip"
)

// Nodes selects the Nodes that talos-ccm initializes and updates.
type Nodes struct {
	// Selector is a list of terms that are ORed. Nodes whose machine matches no term are not managed: talos-ccm neither
	// initializes nor updates them. It still approves their certificates and allocates their pod CIDRs, which have
	// selectors of their own. Terms see the machine as it is, before any rule.
	Selector []rules.SelectorTerm `default:"all Talos machines" json:"selector,omitempty"`
	// Topology is what happens to the region and zone labels of an initialized Node if its machine or a rule sets other
	// values. `keep` leaves them and reports the Event TopologyChanged, because volumes are bound to these labels.
	// `follow` changes them.
	Topology Choice `default:"keep" json:"topology,omitempty" jsonschema:"enum=keep,enum=follow"`
}

// Choice is one of the values that the tag `jsonschema` of its field enumerates. Empty means the default.
type Choice string

// Addresses configures the addresses of Nodes.
type Addresses struct {
	// ExternalIPs selects which of a machine's public addresses its Node lists. `all` lists every one, because the
	// kubelet's certificate, load balancers and DNS controllers get only the addresses that the Node lists.
	// `first-per-family` lists the first IPv4 and the first IPv6 address, as the upstream Talos CCM does.
	ExternalIPs Choice `default:"all" json:"externalIPs,omitempty" jsonschema:"enum=all,enum=first-per-family"`
}

// moved are keys of earlier versions, with their replacements.
var moved = map[string]string{
	"nodes.nodeSelector": "it is now nodes.selector, which no longer limits certificate approval and pod CIDRs: " +
		"see csrApproval.selector and ipam.selector",
	"lifecycle.replaced": "removed in this version; use lifecycle.discovery, or delete the Nodes of replaced machines yourself",
}

// CSRApproval configures the approval of kubelet serving certificates.
type CSRApproval struct {
	// Selector is a list of terms that are ORed. The certificate signing requests of Nodes whose machine matches no
	// term are left to other approvers. Terms see the machine as it is, before any rule.
	Selector []rules.SelectorTerm `default:"all Talos machines, whether nodes.selector selects them or not" json:"selector,omitempty"`
	// MaxExpiration is the maximum validity that a kubelet may request, such as `720h`. The minimum is `10m`.
	MaxExpiration string `default:"8784h" json:"maxExpiration,omitempty"`
	// AllowedSANs lists DNS names and IP addresses that certificates may contain in addition to the machine's own,
	// such as a DNS name that resolves to the machine.
	AllowedSANs []AllowedSANs `json:"allowedSANs,omitempty"`
	// CredentialPinning is what happens to a request that was made with another client certificate than the one that
	// the Node's kubelet is known to have, such as one that was obtained with a bootstrap token. `warn` reports the
	// Event UnexpectedCredential. `enforce` also leaves the request pending. Either value applies to all Nodes.
	CredentialPinning Choice `default:"enforce for control-plane Nodes, warn for workers" json:"credentialPinning,omitempty" jsonschema:"enum=warn,enum=enforce"`
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
	// IPAddresses are IPv4 or IPv6 addresses without a prefix length. Loopback, link-local and multicast addresses are
	// invalid.
	IPAddresses []string `json:"ipAddresses,omitempty"`
}

// IPAM configures the allocation of pod CIDRs.
type IPAM struct {
	// Selector is a list of terms that are ORed. Nodes whose machine matches no term get no pod CIDRs from talos-ccm.
	// Terms see the machine as it is, before any rule.
	Selector []rules.SelectorTerm `default:"all Talos machines, whether nodes.selector selects them or not" json:"selector,omitempty"`
	// Pools are address pools for pod CIDRs. A Node uses the first pool that selects it. A Node that already has pod
	// CIDRs keeps them.
	Pools []Pool `default:"none: Nodes use the cluster CIDRs" json:"pools,omitempty"`
	// BlockSize `auto` derives the size of a Node's IPv4 pod CIDR from the maximum number of pods of its kubelet: the
	// smallest CIDR with two addresses per pod. The IPv4 mask size of a pool takes precedence.
	BlockSize Choice `default:"the mask size" json:"blockSize,omitempty" jsonschema:"enum=auto"`
	// FallbackToClusterCIDRs applies to --cidr-allocator-type=CloudAllocator. It allocates a Node's IPv6 pod CIDR from
	// the cluster CIDRs, as the upstream Talos CCM does, if the machine has no global IPv6 prefix a minute after the
	// Node has registered. By default the Node waits for a prefix, because its pod CIDRs cannot be changed once set.
	FallbackToClusterCIDRs bool `json:"fallbackToClusterCIDRs,omitempty"`
}

// Pool is a set of CIDRs from which the pod CIDRs of the selected Nodes are allocated.
type Pool struct {
	// Name identifies the pool in Events, metrics and error messages. It must be unique.
	Name string `json:"name"`
	// NodeSelector is a list of terms that are ORed. In addition to other keys, `labels.<key>` selects by a label of
	// the Node.
	NodeSelector []rules.SelectorTerm `default:"all machines" json:"nodeSelector,omitempty"`
	// CIDRs are IPv4 or IPv6 CIDRs. Pools may have the same CIDR, with different mask sizes, but must not overlap
	// otherwise. Within an IP family, the first CIDR that is not exhausted is used. An IP family without CIDRs is
	// allocated as if there were no pools.
	CIDRs []string `json:"cidrs"`
	// ContainsMachines must be set if machines have addresses in the CIDRs, such as in a part of their own subnet.
	// Otherwise no machine gets a serving certificate for an address in the CIDRs, because it can be a pod's.
	ContainsMachines bool `json:"containsMachines,omitempty"`
	// MaskSize is the prefix length of a Node's pod CIDR, such as 24, in a pool with a single IP family.
	MaskSize int `json:"maskSize,omitempty" jsonschema:"minimum=0,maximum=128"`
	// MaskSizeIPv4 is the prefix length of a Node's IPv4 pod CIDR.
	MaskSizeIPv4 int `default:"the value of --node-cidr-mask-size-ipv4" json:"maskSizeIPv4,omitempty" jsonschema:"minimum=0,maximum=32"`
	// MaskSizeIPv6 is the prefix length of a Node's IPv6 pod CIDR.
	MaskSizeIPv6 int `default:"the value of --node-cidr-mask-size-ipv6" json:"maskSizeIPv6,omitempty" jsonschema:"minimum=0,maximum=128"`
}

// Service configures load balancers by node IP.
type Service struct {
	// Default also gives addresses to Services of type LoadBalancer without a `loadBalancerClass`. Do not set it if
	// another controller does that.
	Default bool `json:"default,omitempty"`
	// Addresses is the type of the Node addresses that Services get, unless their annotation `talos-ccm.dev/addresses`
	// overrides it.
	Addresses ServiceAddresses `default:"external, or internal for a Node without external ones" json:"addresses,omitempty" jsonschema:"enum=external,enum=internal"`
	// ExternalCIDRs limits the external addresses that Services get to CIDRs, such as those that your provider has
	// assigned to you. Internal addresses are not limited. A worker that reports a false external address could otherwise
	// redirect the cluster's traffic to that address.
	ExternalCIDRs []string `default:"all addresses" json:"externalCIDRs,omitempty"`
	// ReservedPorts are ports that Services cannot have, whatever the protocol, because processes on the machines use
	// them. Ports of Talos, Kubernetes and talos-ccm are always reserved.
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
	// Selector is a list of terms that are ORed. talos-ccm neither taints nor deletes the Nodes of machines that match
	// no term.
	Selector []rules.SelectorTerm `default:"the machines of managed Nodes" json:"selector,omitempty"`
	// GracePeriod is how long a Node must be not ready, while there is proof that its machine is gone, before it is
	// deleted. The minimum is `1m`.
	GracePeriod string `default:"5m" json:"gracePeriod,omitempty"`
	// DryRun reports verdicts as Events and metrics, but neither taints nor deletes Nodes.
	DryRun bool `json:"dryRun,omitempty"`
	// OutOfServiceTaint sets the taint `node.kubernetes.io/out-of-service` on Nodes whose machines announced a shutdown
	// and have been silent for the grace period. Kubernetes then deletes their pods and detaches their volumes.
	OutOfServiceTaint bool `json:"outOfServiceTaint,omitempty"`
	// Discovery also deletes a Node if its machine does not respond, and if no control-plane machine that responds
	// discovers it as a member of the cluster. It needs Talos's discovery service.
	Discovery bool `json:"discovery,omitempty"`
	// AbsentPeriod is the grace period for `discovery`. The minimum is `30m`, the time after which the discovery
	// service forgets a machine.
	AbsentPeriod string `default:"1h" json:"absentPeriod,omitempty"`
}

// Defaults and minimums of the periods of Lifecycle. Kubernetes notices a silent kubelet after 50 s, and the discovery
// service forgets a machine after 30 minutes (Talos cluster/DiscoveryServiceController).
const (
	DefaultGracePeriod  = 5 * time.Minute
	MinGracePeriod      = time.Minute
	DefaultAbsentPeriod = time.Hour
	MinAbsentPeriod     = 30 * time.Minute
)
