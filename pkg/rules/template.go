package rules

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"text/template"
	"text/template/parse"
	"unicode/utf8"
)

// Bounds on what a template can do: the metadata that it works on comes from others.
const (
	// maxText is the most bytes that a template makes, and that any value within it holds.
	maxText = 64 << 10
	// maxWork bounds one execution, in steps: a byte looked at by a function, or by one instruction of a regular expression.
	maxWork = 64 << 20
	// nodeWork is what one node of a template counts, however little it does: a comparison looks at maxText bytes, but quickly.
	nodeWork = 1 << 10
)

// values are what templates see: the names of the upstream Talos CCM, which are those of Talos's resources, and ours.
type values struct {
	Platform, Hostname, Region, Zone, InstanceType, InstanceID, ProviderID string
	Spot                                                                   bool
	InternalDNS, ExternalDNS                                               string
	Tags                                                                   map[string]string

	Manufacturer, ProductName, Version, SerialNumber, UUID, WakeUpType, SKUNumber string

	Nodename, ClusterName, MachineType, TalosVersion, Schematic, Architecture string
	Extensions                                                                map[string]string

	// patterns are the regular expressions that the template names, compiled.
	patterns map[string]pattern
	// work is how many steps the execution may still take.
	work int
}

func newValues(on subject) *values {
	meta, m := on.platform, &on.facts.Machine

	return &values{
		Platform: meta.Platform, Hostname: hostname(on.facts, meta), Region: meta.Region, Zone: meta.Zone, InstanceType: meta.InstanceType,
		InstanceID: meta.InstanceID, ProviderID: meta.ProviderID, Spot: meta.Spot, InternalDNS: meta.InternalDNS, ExternalDNS: meta.ExternalDNS, Tags: meta.Tags,
		Manufacturer: m.System.Manufacturer, ProductName: m.System.ProductName, Version: m.System.Version, SerialNumber: m.System.SerialNumber,
		UUID: m.System.UUID, WakeUpType: m.System.WakeUpType, SKUNumber: m.System.SKUNumber,
		Nodename: m.Nodename, ClusterName: m.ClusterName, MachineType: machineType(on.facts), TalosVersion: m.TalosVersion,
		Schematic: m.Extensions[schematicExtension], Architecture: on.facts.Architecture, Extensions: m.Extensions,
	}
}

// Variables are the names that templates can read, sorted.
func Variables() []string { return slices.Sorted(maps.Keys(variables)) }

// variables are the exported fields of values; true: a map, whose entries can be read, too.
var variables = func() map[string]bool {
	fields := map[string]bool{}

	for _, f := range reflect.VisibleFields(reflect.TypeFor[values]()) {
		if f.IsExported() {
			fields[f.Name] = f.Type.Kind() == reflect.Map
		}
	}

	return fields
}()

// spend takes steps from what is left.
func (v *values) spend(steps int) error {
	if v.work -= steps; v.work < 0 {
		return errors.New("the template does too much")
	}

	return nil
}

// text is a compiled template. One without actions is its own result; one that does no more than to name variables needs no execution.
type text struct {
	constant string
	template *template.Template // nil for a constant
	parts    []part
	patterns map[string]pattern
}

// compileText compiles what a user has written.
func compileText(source string) (text, error) {
	if err := checkText(source); err != nil {
		return text{}, err
	}

	if !strings.Contains(source, "{{") {
		return text{constant: source}, nil
	}

	t, err := template.New("line").Option("missingkey=zero").Funcs(functions).Parse(source)
	if err != nil {
		return text{}, errors.New(strings.TrimPrefix(err.Error(), "template: "))
	}

	if len(t.Templates()) > 1 {
		return text{}, errors.New("templates cannot define others")
	}

	if t.Tree == nil || t.Root == nil {
		return text{}, nil
	}

	if constant, is := constantText(t.Root); is {
		return text{constant: constant}, nil
	}

	parts := partsOf(t.Root)
	c := checker{patterns: map[string]pattern{}}
	c.list(t.Root, topDot)

	return text{template: t.Funcs(hooks), parts: parts, patterns: c.patterns}, errors.Join(c.errs...)
}

// constantText is the text of a template that has comments at most.
func constantText(root *parse.ListNode) (string, bool) {
	var out strings.Builder

	for _, node := range root.Nodes {
		t, is := node.(*parse.TextNode)
		if !is {
			return "", false
		}

		out.Write(t.Text)
	}

	return out.String(), true
}

func (t text) render(v *values) (string, error) {
	if t.template == nil {
		return t.constant, nil
	}

	rendered, err := t.execute(v)
	if err == nil {
		err = checkText(rendered)
	}

	if err != nil {
		return "", err // and no text that is not UTF-8
	}

	return rendered, nil
}

func (t text) execute(v *values) (string, error) {
	var out limited

	if t.parts == nil {
		v.patterns, v.work = t.patterns, maxWork

		if err := t.template.Execute(&out, v); err != nil {
			return "", explain(err)
		}
	}

	for _, p := range t.parts {
		if err := out.add(p(v)); err != nil {
			return "", err
		}
	}

	return out.String(), nil
}

// explain leaves out where in which template, which the key says, and what nobody has called.
func explain(err error) error {
	why := err.Error()
	if _, after, found := strings.Cut(why, ">: "); found {
		why = after
	}

	for hook := range hooks {
		why = strings.TrimPrefix(why, "error calling "+hook+": ")
	}

	return errors.New(why)
}

// limited takes text up to the limit.
type limited struct{ strings.Builder }

func (l *limited) Write(p []byte) (int, error) { return len(p), l.add(string(p)) }

func (l *limited) add(s string) error {
	if err := checkLength(l.Len() + len(s)); err != nil {
		return err
	}

	l.WriteString(s)

	return nil
}

// checkText refuses what no field of a Node takes.
func checkText(s string) error {
	if !utf8.ValidString(s) {
		return errors.New("the text is not valid UTF-8")
	}

	return checkLength(len(s))
}

func checkLength(length int) error {
	if length > maxText {
		return fmt.Errorf("the text is longer than %d bytes", maxText)
	}

	return nil
}
