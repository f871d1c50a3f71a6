// Package rules applies the user's rules to what a machine says of itself.
//
// It is part of the pure core: compiled once, a Machine in, a Result out. It never decides what of the Result reaches the Node.
package rules

import (
	"fmt"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Facts are what rules can select by and templates can read.
type Facts struct {
	Machine machine.Machine
	// Architecture is the Node's, such as "amd64"; empty if it is not known. The kubelet says it, not the machine.
	Architecture string
	// NodeLabels can be selected as "labels.<key>"; nil for transformation rules, which must not depend on what they set.
	NodeLabels map[string]string
}

// Result is what all matching rules say together.
type Result struct {
	// Platform is the machine's metadata with what rules have replaced.
	Platform    runtime.PlatformMetadataSpec
	Labels      map[string]Value
	Annotations map[string]Value
	// Taints, sorted by key and effect.
	Taints []Taint
	// PublicIPDiscovery is nil if no rule says anything about it.
	PublicIPDiscovery *bool
	// Replaced names the rule that last replaced a field of Platform, by the field's name in Go ("Zone").
	Replaced map[string]string
	// Problems are values that were left out, in the order of the rules.
	Problems []Problem
}

// Value is a rendered template and the name of the rule that it is from.
type Value struct {
	Value string
	Rule  string
}

// Taint is one taint and the name of the rule that it is from.
type Taint struct {
	corev1.Taint

	Rule string
	// Enforce: keep it after initialization too.
	Enforce bool
}

// Problem is one value that a rule could not set.
type Problem struct {
	Rule string
	// Key is where in the rule, such as "labels[topology.kubernetes.io/zone]" or "platformMetadata[ProviderID]".
	Key string
	// Value is what was rendered, if anything.
	Value string
	Why   string
	// Identity is true if the machine's identity (ProviderID, InstanceID) was to be replaced: without it the Node must not be identified.
	Identity bool
}

// CompileError is one mistake in the rules.
type CompileError struct {
	// Path leads to the place: the rule's index, then keys and indices as in the file, such as 2, "nodeSelector", 0, "matchExpressions", 1, "values".
	Path []any
	// Rule is the rule's name.
	Rule string
	Err  error
}

// Error is the mistake in a sentence.
func (e CompileError) Error() string { return fmt.Sprintf("rule %q: %v", e.Rule, e.Err) }

// Unwrap returns the cause.
func (e CompileError) Unwrap() error { return e.Err }
