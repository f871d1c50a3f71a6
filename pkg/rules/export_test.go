package rules

import (
	"errors"
	"text/template/parse"
)

// Exported for the comparison with text/template.
var (
	FunctionMap = functions
	Builtins    = builtins
)

// Values returns the variables of a machine.
func Values(facts Facts) map[string]any { return newVariables(&facts, facts.Machine.Platform).values }

// Check returns the errors of a parsed template that are not errors of its syntax.
func Check(root *parse.ListNode, tables Tables) error {
	c := checker{tables: tables}

	c.list(root)

	return errors.Join(c.errs...)
}
