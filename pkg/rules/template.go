package rules

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"text/template/parse"
	"unicode/utf8"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// maxText is the size limit of a template and of its result, in bytes.
const maxText = 64 << 10

var errNotUTF8 = errors.New("the text is not valid UTF-8")

type variables struct {
	// values are the variables that templates can read, by name: strings, booleans, and lists and maps of strings. The
	// fields of platform metadata and SMBIOS have the names of the Talos resources, as in the upstream Talos CCM.
	values map[string]any
	// facts are for selectors of labels.
	facts *Facts
}

// newVariables returns the variables of a machine after rules have changed its platform metadata to platform.
func newVariables(facts *Facts, platform runtime.PlatformMetadataSpec) *variables {
	m := &facts.Machine
	machineType := ""

	switch {
	case m.Type.IsControlPlane(): // also the deprecated type init
		machineType = "controlplane"
	case m.Type != 0:
		machineType = m.Type.String()
	}

	v := &variables{facts: facts, values: map[string]any{
		"Platform":     platform.Platform,
		"Hostname":     cmp.Or(platform.Hostname, m.Nodename),
		"Region":       platform.Region,
		"Zone":         platform.Zone,
		"InstanceType": platform.InstanceType,
		"InstanceID":   platform.InstanceID,
		"ProviderID":   platform.ProviderID,
		"Spot":         platform.Spot,
		"InternalDNS":  platform.InternalDNS,
		"ExternalDNS":  platform.ExternalDNS,
		"Tags":         platform.Tags,

		"Manufacturer": m.System.Manufacturer,
		"ProductName":  m.System.ProductName,
		"Version":      m.System.Version,
		"SerialNumber": m.System.SerialNumber,
		"UUID":         m.System.UUID,
		"WakeUpType":   m.System.WakeUpType,
		"SKUNumber":    m.System.SKUNumber,
		"BIOSVersion":  m.System.BIOSVersion,

		"Nodename":          m.Nodename,
		"ClusterName":       m.ClusterName,
		"MachineType":       machineType,
		"Architecture":      facts.Architecture,
		"KubernetesVersion": facts.KubernetesVersion,
	}}

	optional := m.Facts
	if optional == nil {
		optional = &machine.Facts{}
	}

	for field, value := range reflect.ValueOf(*optional).Fields() {
		v.values[field.Name] = value.Interface()
	}

	return v
}

// zeroVariables has the names and the types of all variables.
var zeroVariables = newVariables(&Facts{}, runtime.PlatformMetadataSpec{}).values

// Variables returns the names of the variables that templates can read, sorted.
func Variables() []string { return slices.Sorted(maps.Keys(zeroVariables)) }

// compileTemplate returns the parsed template and the kinds of facts that it reads.
func compileTemplate(source string, tables Tables) (root *parse.ListNode, factKinds machine.FactKinds, err error) {
	if !utf8.ValidString(source) {
		return nil, 0, errNotUTF8
	}

	if err := checkLength(len(source)); err != nil {
		return nil, 0, err
	}

	// With this name, a parse error starts with "template: line:3: ", which needs only the prefix cut.
	trees, err := parse.Parse("line", source, "", "", functions, builtins)
	if err != nil {
		message := strings.TrimPrefix(err.Error(), "template: ")
		if !strings.Contains(source, "\n") {
			message = strings.TrimPrefix(message, "line:1: ")
		}

		return nil, 0, errors.New(explain(message, source))
	}

	if len(trees) > 1 {
		return nil, 0, errors.New("a template cannot define other templates")
	}

	c := checker{tables: tables}

	root = trees["line"].Root
	c.list(root)

	return root, c.factKinds, errors.Join(c.errs...)
}

const quotes = "write text in double quotes or backquotes"

var (
	undefined = regexp.MustCompile(`function "(.+)" not defined$`)
	// unusualKey is an entry of a map whose name text/template does not accept after a dot.
	unusualKey = regexp.MustCompile(`(\$?\.\w+)\.([^\s|(){}"]*[^\w\s.|(){}"][^\s|(){}"]*)`)
)

// explain completes the message of a parse error if its cause is a usual one.
func explain(message, source string) string {
	key, match := unusualKey.FindStringSubmatch(source), undefined.FindStringSubmatch(message)

	switch {
	case strings.Contains(message, "character constant"):
		return message + "; " + quotes
	case strings.Contains(message, `unexpected "}"`):
		return message + "; end the action with }}"
	case strings.Contains(message, "bad character") && key != nil:
		return fmt.Sprintf("%s; use get %s %q", message, key[1], key[2])
	case match == nil:
		return message
	}

	isVariable := func(variable string) bool { return strings.EqualFold(variable, match[1]) }

	if i := slices.IndexFunc(Variables(), isVariable); i >= 0 {
		return message + "; did you mean ." + Variables()[i] + "?"
	}

	return message + "; text needs double quotes; supported functions: " + strings.Join(Functions(), ", ") + ", and those of text/template"
}

func checkLength(length int) error {
	if length > maxText {
		return fmt.Errorf("the text is longer than %d bytes", maxText)
	}

	return nil
}

// checker finds errors that would otherwise occur only when a template is rendered, or not at all.
type checker struct {
	tables Tables
	// rebound is true where "." is not the variables: inside with and range.
	rebound bool
	// factKinds are those that the template reads.
	factKinds machine.FactKinds
	errs      []error
}

func (c *checker) fail(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

func (c *checker) list(list *parse.ListNode) {
	if list == nil {
		return
	}

	for _, node := range list.Nodes {
		switch n := node.(type) {
		case *parse.ActionNode:
			c.pipe(n.Pipe)
		case *parse.IfNode:
			c.branch(&n.BranchNode, c.rebound)
		case *parse.WithNode:
			c.branch(&n.BranchNode, true)
		case *parse.RangeNode:
			c.branch(&n.BranchNode, true)
		case *parse.TemplateNode:
			c.fail("a template cannot execute other templates")
		}
	}
}

func (c *checker) branch(n *parse.BranchNode, rebound bool) {
	c.pipe(n.Pipe)

	outer := c.rebound
	c.rebound = rebound
	c.list(n.List)
	c.rebound = outer

	c.list(n.ElseList)
}

func (c *checker) pipe(pipe *parse.PipeNode) {
	for _, v := range pipe.Decl {
		if v.Ident[0] == "$" {
			c.fail("$ cannot be assigned")
		}
	}

	for i, cmd := range pipe.Cmds {
		for j, arg := range cmd.Args {
			name, isFunction := arg.(*parse.IdentifierNode)

			switch {
			case !isFunction:
				c.operand(arg)
			case j > 0:
				c.call(name.Ident, nil, 0)
			default:
				c.call(name.Ident, cmd.Args[1:], min(i, 1))
			}
		}
	}
}

// call checks the call of a function with arguments, and with piped more from the previous command.
func (c *checker) call(name string, args []parse.Node, piped int) {
	given := len(args) + piped

	if f, known := functions[name]; known {
		if err := checkArity(name, reflect.TypeOf(f), given); err != nil {
			c.errs = append(c.errs, err)
		}
	}

	var literal *parse.StringNode
	if len(args) > 0 {
		literal, _ = args[0].(*parse.StringNode)
	}

	switch {
	case strings.HasPrefix(name, "regex") && literal != nil:
		if _, err := regexp.Compile(literal.Text); err != nil {
			c.errs = append(c.errs, err)
		}
	case name == "printf" && literal == nil:
		c.fail("the format of printf must be a string literal")
	case name == "lookup" && len(args) > 0:
		c.table(literal)
	}
}

// table checks the first argument of lookup, which is nil if it is not a literal.
func (c *checker) table(name *parse.StringNode) {
	if name == nil {
		c.fail("the table of lookup must be a string literal")
	} else if _, known := c.tables[name.Text]; !known {
		c.fail("unknown table %q; tables of the configuration: %s", name.Text, strings.Join(slices.Sorted(maps.Keys(c.tables)), ", "))
	}
}

func (c *checker) operand(node parse.Node) {
	switch n := node.(type) {
	case *parse.PipeNode:
		c.pipe(n)
	case *parse.ChainNode:
		c.operand(n.Node)
	case *parse.NumberNode:
		if strings.HasPrefix(n.Text, "'") {
			c.fail("%s is a character; %s", n.Text, quotes)
		}
	case *parse.DotNode:
		if !c.rebound {
			c.variable(nil)
		}
	case *parse.FieldNode:
		if !c.rebound {
			c.variable(n.Ident)
		}
	case *parse.VariableNode:
		if n.Ident[0] == "$" {
			c.variable(n.Ident[1:])
		}
	}
}

func (c *checker) variable(path []string) {
	if len(path) == 0 {
		c.fail("the name of a variable is missing after the dot")

		return
	}

	c.factKinds |= machine.FactKindsOf(path[0])
	zero, known := zeroVariables[path[0]]
	_, isMap := zero.(map[string]string)

	switch {
	case !known:
		c.fail("unknown variable .%s; supported variables: .%s", path[0], strings.Join(Variables(), ", ."))
	case len(path) > 2 || len(path) == 2 && !isMap:
		c.fail("variable .%s has no field .%s", path[0], strings.Join(path[1:], "."))
	}
}
