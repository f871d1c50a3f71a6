package rules

// Rule sets things on the Nodes of the machines that it selects. It is what the configuration file holds; Compile makes it usable.
type Rule struct {
	// Name tells the rule from others in errors, Events and `talos-ccm render`. It must be unique; empty: the rule is called by its number.
	Name string `json:"name,omitempty"`
	// NodeSelector terms are OR-ed; without any the rule applies to every machine.
	NodeSelector []SelectorTerm `json:"nodeSelector,omitempty"`
	// Annotations of the Node: key to template.
	Annotations map[string]string `json:"annotations,omitempty"`
	// Labels of the Node: key to template.
	Labels map[string]string `json:"labels,omitempty"`
	// Taints of the Node: key to a template of "value:Effect" or "Effect".
	Taints map[string]string `json:"taints,omitempty"`
	// Enforce keeps the rule's taints on the Node after its initialization too, and removes them when the rule goes. Without it they are set once, at
	// initialization.
	Enforce bool `json:"enforce,omitempty"`
	// PlatformMetadata replaces what the platform says of the machine: field to template. Hostname and Platform cannot be replaced.
	PlatformMetadata map[string]string `json:"platformMetadata,omitempty"`
	// Features switches behavior on or off.
	Features Features `json:"features,omitzero"`
}

// Features are switches of a rule. One that is absent leaves what earlier rules said.
type Features struct {
	// PublicIPDiscovery looks for public addresses on the machine's links even if the platform reports them.
	PublicIPDiscovery *bool `json:"publicIPDiscovery,omitempty"`
}

// SelectorTerm matches if all its expressions do. A term without expressions matches nothing, as in Kubernetes.
type SelectorTerm struct {
	// Name is for people.
	Name string `json:"name,omitempty"`
	// MatchExpressions are AND-ed.
	MatchExpressions []Expression `json:"matchExpressions,omitempty"`
}

// Expression compares one fact of the machine with values.
type Expression struct {
	// Key is the fact's name, in any case.
	Key string `json:"key"`
	// Operator is the relation between the fact and the values.
	Operator Operator `json:"operator"`
	// Values to compare with: at least one for In and NotIn, one for Gt, Lt and Regexp, none for Exists and DoesNotExist.
	Values []string `json:"values,omitempty"`
}

// Operator is a relation between a fact and values.
type Operator string

// The operators of Kubernetes' node selectors, and Regexp.
const (
	In           Operator = "In"
	NotIn        Operator = "NotIn"
	Exists       Operator = "Exists"
	DoesNotExist Operator = "DoesNotExist"
	Gt           Operator = "Gt"
	Lt           Operator = "Lt"
	Regexp       Operator = "Regexp"
)
