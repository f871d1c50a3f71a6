// Package rules evaluates the transformation rules of the configuration file for one machine.
//
// Compile validates rules once. Set.Apply then returns the labels, annotations, taints, platform metadata and addresses that
// the matching rules set. Apply has no side effects and returns the same Result for the same Facts. The caller decides
// which part of the Result it writes to the Node.
//
// # Trust
//
// Rules are trusted: the cluster's operator writes them into the machine configuration. Machines are not trusted:
//
//   - Package machine limits the length of every text that a machine reports.
//   - Regular expressions run in linear time (package regexp).
//   - No function converts a text to a number, and the format of printf is a string literal.
//   - The result of a template has at most 64 KiB. A longer result is an error.
//   - Tags set at most 64 labels, and none that a kubelet may not set.
//
// Nothing limits the cost of a template that its author made expensive, for example by nesting loops.
package rules

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Rule sets labels, annotations, taints, platform metadata and addresses on the Nodes of the machines that it selects.
type Rule struct {
	// Name is the rule's unique name in errors, Events and `talos-ccm render`.
	Name string `default:"the position, such as #1" json:"name,omitempty"`
	// NodeSelector terms are ORed. A rule without terms applies to every machine.
	NodeSelector []SelectorTerm `json:"nodeSelector,omitempty"`
	// Annotations map keys to templates.
	Annotations map[string]string `json:"annotations,omitempty"`
	// Labels map keys to templates.
	Labels map[string]string `json:"labels,omitempty"`
	// LabelsFromTags sets labels from tags of the instance. Labels of the same rule take precedence.
	LabelsFromTags *LabelsFromTags `json:"labelsFromTags,omitempty"`
	// Taints map keys to templates of "value:Effect" or "Effect".
	Taints map[string]string `json:"taints,omitempty"`
	// Enforce keeps the rule's taints on the Node after initialization, until the rule no longer sets them.
	Enforce bool `json:"enforce,omitempty"`
	// PlatformMetadata maps fields of the platform metadata, except Hostname and Platform, to templates.
	PlatformMetadata map[string]string `json:"platformMetadata,omitempty"`
	// Addresses maps ExternalIP and InternalIP to templates of further IP addresses of the Node, separated by commas or
	// spaces.
	Addresses map[string]string `json:"addresses,omitempty"`
	// AddressCIDRs contains all of the rule's addresses. Required with addresses.
	AddressCIDRs []string `json:"addressCIDRs,omitempty"`
	// Features enables or disables optional behavior.
	Features Features `json:"features,omitzero"`
}

// LabelsFromTags sets a label for each tag with a matching name. Keys under `kubernetes.io` and `k8s.io` are not set.
type LabelsFromTags struct {
	// Match is a regular expression. The key of a label is the name of the tag without the match; a group in parentheses
	// stays.
	Match string `json:"match"`
	// Prefix precedes the key, such as `example.org/`.
	Prefix string `json:"prefix,omitempty"`
}

// Tables are texts by the name of a table and a key, for the function lookup.
type Tables map[string]map[string]string

// Features are the optional behaviors that a rule controls. A feature that a rule omits keeps the value of earlier rules.
type Features struct {
	// PublicIPDiscovery looks for public addresses on links even if the platform reports some.
	PublicIPDiscovery *bool `json:"publicIPDiscovery,omitempty"`
}

// SelectorTerm matches if all its expressions match. As in Kubernetes, a term without expressions matches nothing.
type SelectorTerm struct {
	// Name describes the term. It has no effect.
	Name string `json:"name,omitempty"`
	// MatchExpressions must all match.
	MatchExpressions []Expression `json:"matchExpressions,omitempty"`
}

// Expression compares a fact about the machine with values.
type Expression struct {
	// Key is the name of the machine's attribute, such as `platform`. It is case-insensitive.
	Key string `json:"key"`
	// Operator compares the attribute with the values.
	Operator Operator `json:"operator" jsonschema:"enum=In,enum=NotIn,enum=Exists,enum=DoesNotExist,enum=Gt,enum=Lt,enum=Regexp,enum=InCIDR"`
	// Values are one or more for In, NotIn and InCIDR, one for Gt, Lt and Regexp, none for Exists and DoesNotExist.
	Values []string `json:"values,omitempty"`
}

// Operator is the relation between a fact and the values of an Expression.
type Operator string

// The operators of Kubernetes node selectors, Regexp, and InCIDR. NotIn and DoesNotExist match an absent fact, the others
// do not. Gt and Lt compare integers, or versions for keys that are versions; InCIDR compares addresses and subnets. They
// match nothing else. An operator matches a list if it matches one of the elements; NotIn and DoesNotExist match if In and
// Exists do not.
const (
	In           Operator = "In"
	NotIn        Operator = "NotIn"
	Exists       Operator = "Exists"
	DoesNotExist Operator = "DoesNotExist"
	Gt           Operator = "Gt"
	Lt           Operator = "Lt"
	Regexp       Operator = "Regexp"
	InCIDR       Operator = "InCIDR"
)

// Facts are the inputs of selectors and templates.
type Facts struct {
	Machine machine.Machine
	// Architecture of the Node, such as "amd64"; empty if unknown. The kubelet reports it, not the machine.
	Architecture string
	// KubernetesVersion of the kubelet, such as "v1.36.2"; empty if unknown.
	KubernetesVersion string
	// NodeLabels are selected as "labels.<key>". Apply ignores them: rules must not depend on the labels that they set.
	NodeLabels map[string]string
}

// Result is the combined outcome of all matching rules.
type Result struct {
	// Platform is the machine's platform metadata with the fields that rules replaced.
	Platform    runtime.PlatformMetadataSpec
	Labels      map[string]Value
	Annotations map[string]Value
	// Taints are sorted by key and effect.
	Taints []Taint
	// Addresses are further IP addresses of the Node. All of one type are of one rule.
	Addresses []Address
	// PublicIPDiscovery is nil if no rule sets it.
	PublicIPDiscovery *bool
	// Replaced maps a replaced field of Platform, by its Go name such as "Zone", to the last rule that replaced it.
	Replaced map[string]string
	// Problems are the values that were left out, in the order of the rules.
	Problems []Problem

	// tags is the number of tags from which rules have set, or tried to set, labels.
	tags int
}

func newResult(platform runtime.PlatformMetadataSpec) Result {
	return Result{Platform: platform, Labels: map[string]Value{}, Annotations: map[string]Value{}, Replaced: map[string]string{}}
}

// Address is an IP address and the name of its rule. It is unmapped and within the rule's CIDRs.
type Address struct {
	Type corev1.NodeAddressType
	IP   netip.Addr
	Rule string
}

// Value is a rendered template and the name of its rule.
type Value struct {
	Value string
	Rule  string
}

// Taint is a taint and the name of its rule.
type Taint struct {
	corev1.Taint

	Rule string
	// Enforce keeps the taint after initialization.
	Enforce bool
}

// Problem is a value that cannot be set, or that is probably wrong.
type Problem struct {
	// Rule is the name of the rule that set the value; empty if the machine reported it.
	Rule string
	// Key is the position in the rule, such as "labels[topology.kubernetes.io/zone]" or "platformMetadata[ProviderID]", or
	// the name of a tag, as in `labelsFromTags["team"]`.
	Key string
	// Value is the rendered value; empty if the template failed.
	Value string
	// Why is the error message.
	Why string
	// Identity is true if the rule could not replace ProviderID or InstanceID. The Node must not be initialized then.
	Identity bool
	// Kept is true if the value is set nevertheless.
	Kept bool
}

// Kind returns the field of the rule ("labels", "labelsFromTags", "annotations", "taints", "platformMetadata",
// "addresses"), or "machine" for a value that the machine reported.
func (p Problem) Kind() string {
	if p.Rule == "" {
		return "machine"
	}

	kind, _, _ := strings.Cut(p.Key, "[")

	return kind
}

// String returns the problem as one sentence. It shortens long values, which come from metadata services and
// annotations.
func (p Problem) String() string {
	rule := ""
	if p.Rule != "" {
		rule = fmt.Sprintf("rule %q: ", p.Rule)
	}

	action := "omitted"
	if p.Kept {
		action = "kept"
	}

	return fmt.Sprintf("%s%s=%.80q %s: %s", rule, p.Key, p.Value, action, p.Why)
}
