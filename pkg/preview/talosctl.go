package preview

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/cosi-project/runtime/pkg/resource"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Machine is what is known of one machine.
type Machine struct {
	// Node is what the machine was asked as: talosctl's --nodes. It may be empty.
	Node    string
	Machine machine.Machine
	// Missing are the kinds of which there was no resource, as talosctl calls them. A machine may have none of a kind.
	Missing []string
}

// Command is the shell command whose output holds all that counts of a machine. talosctl gets one kind at a time.
func Command() string {
	return "for kind in " + strings.Join(kindNames(), " ") + "; do talosctl -n NODE get $kind -o yaml; done"
}

func kindNames() []string {
	var names []string

	for _, kind := range kinds() {
		names = append(names, kindName(kind.Type()))
	}

	return names
}

func kinds() []resource.Kind { return append(machine.WatchedKinds(), machine.PolledKinds()...) }

// kindName is the plural by which talosctl knows a kind: "nodenames" of "Nodenames.kubernetes.talos.dev".
func kindName(typ resource.Type) string {
	name, _, _ := strings.Cut(typ, ".")

	return strings.ToLower(name)
}

// Parse reads the output of `talosctl get KIND -o yaml` or `-o json`, of any number of kinds and machines, one after the other. The machines come in
// the order of their first resource. Kinds that do not count are ignored.
func Parse(output []byte) ([]Machine, error) {
	var all gathering

	for i, d := range split(output) {
		printed, err := d.decode()
		if err == nil {
			err = all.take(printed)
		}

		if err != nil {
			return nil, fmt.Errorf("document %d, from line %d: %w", i+1, d.line, err)
		}
	}

	if len(all.order) == 0 {
		return nil, errors.New("there is no resource of a machine in it")
	}

	var machines []Machine

	for _, node := range all.order {
		machines = append(machines, all.views[node].machine(node))
	}

	return machines, nil
}

// document is the text of one resource and where it begins.
type document struct {
	text []byte
	line int
}

// split parts the outputs of several calls too, between which nobody has put the separator: each resource begins with its node in YAML, and with
// a brace in JSON, and neither stands at the beginning of a line anywhere else.
func split(output []byte) []document {
	var (
		documents []document
		current   document
		number    int
	)

	for line := range bytes.Lines(output) {
		number++

		separator := bytes.HasPrefix(line, []byte("---"))
		begins := separator || bytes.HasPrefix(line, []byte("node:")) || line[0] == '{'

		if begins {
			documents = append(documents, current)
			current = document{}
		}

		if separator {
			continue
		}

		if current.line == 0 {
			current.line = number
		}

		current.text = append(current.text, line...)
	}

	return slices.DeleteFunc(append(documents, current), document.blank)
}

// blank documents have comments at most.
func (d document) blank() bool {
	for line := range bytes.Lines(d.text) {
		if content := bytes.TrimSpace(line); len(content) > 0 && content[0] != '#' {
			return false
		}
	}

	return true
}

// printed is a resource as talosctl prints it (cmd/talosctl/cmd/talos/output/yaml.go).
type printed struct {
	Node     string `yaml:"node"`
	Event    string `yaml:"event"` // with --watch
	Metadata struct {
		Namespace string `yaml:"namespace"`
		Type      string `yaml:"type"`
		ID        string `yaml:"id"`
	} `yaml:"metadata"`
	Spec yaml.Node `yaml:"spec"`

	// resource is nil if it is of a kind that does not count.
	resource resource.Resource
}

func (d document) decode() (printed, error) {
	p, err := decode(d.text)
	if err != nil {
		// Once more, so that the error has the numbers of the lines in the input.
		p, err = decode(append(bytes.Repeat([]byte("\n"), d.line-1), d.text...))
	}

	return p, err
}

func decode(text []byte) (printed, error) {
	var p printed

	if err := yaml.Unmarshal(text, &p); err != nil {
		return p, err
	}

	if p.Metadata.Type == "" {
		return p, errors.New("it is no resource as talosctl prints it: metadata.type is missing")
	}

	read, counts := specs[p.Metadata.Type]
	if !counts {
		return p, nil
	}

	if p.Spec.IsZero() {
		return p, errors.New("it is no resource as talosctl prints it: spec is missing")
	}

	md := resource.NewMetadata(p.Metadata.Namespace, p.Metadata.Type, p.Metadata.ID, resource.VersionUndefined)

	r, err := read(&p.Spec)
	if err != nil {
		return p, fmt.Errorf("spec of %s: %w", md.String(), err)
	}

	*r.Metadata() = md
	p.resource = r

	return p, nil
}

// specs read the spec of each kind that counts.
var specs = map[resource.Type]func(spec *yaml.Node) (resource.Resource, error){
	runtime.PlatformMetadataType:   whole[runtime.PlatformMetadata],
	runtime.MachineStatusType:      whole[runtime.MachineStatus],
	runtime.VersionType:            whole[runtime.Version],
	runtime.ExtensionStatusType:    whole[runtime.ExtensionStatus],
	network.AddressStatusType:      addressStatus,
	network.HostnameStatusType:     whole[network.HostnameStatus],
	network.PlatformConfigType:     platformConfig,
	hardware.SystemInformationType: whole[hardware.SystemInformation],
	cluster.InfoType:               whole[cluster.Info],
	config.MachineTypeType:         machineType,
	k8s.NodenameType:               whole[k8s.Nodename],
	k8s.NodeIPType:                 whole[k8s.NodeIP],
	k8s.NodeIPConfigType:           whole[k8s.NodeIPConfig],
}

// whole reads a spec that is printed in the form in which it is read.
func whole[T any, R interface {
	*T
	resource.Resource
}](spec *yaml.Node) (resource.Resource, error) {
	r := R(new(T))

	return r, spec.Decode(r.Spec())
}

// addressStatus knows that an address without flags, such as those that only the platform's metadata knows, is printed in a form that Talos
// itself does not read: "".
func addressStatus(spec *yaml.Node) (resource.Resource, error) {
	var text struct {
		Address  netip.Prefix     `yaml:"address"`
		LinkName string           `yaml:"linkName"`
		Scope    nethelpers.Scope `yaml:"scope"`
		Flags    string           `yaml:"flags"`
	}

	if err := spec.Decode(&text); err != nil {
		return nil, err
	}

	status := &network.AddressStatus{}
	*status.TypedSpec() = network.AddressStatusSpec{Address: text.Address, LinkName: text.LinkName, Scope: text.Scope}

	if text.Flags == "" {
		return status, nil
	}

	return status, status.TypedSpec().Flags.UnmarshalText([]byte(text.Flags))
}

// platformConfig reads the metadata alone: all else in it, such as addresses without flags, does not count.
func platformConfig(spec *yaml.Node) (resource.Resource, error) {
	var text struct {
		Metadata *runtime.PlatformMetadataSpec `yaml:"metadata"`
	}

	delivered := &network.PlatformConfig{}
	err := spec.Decode(&text)
	delivered.TypedSpec().Metadata = text.Metadata

	return delivered, err
}

// machineType reads the one spec that is a word.
func machineType(spec *yaml.Node) (resource.Resource, error) {
	var word string
	if err := spec.Decode(&word); err != nil {
		return nil, err
	}

	typ, err := talosmachine.ParseType(word)
	if err != nil {
		return nil, err
	}

	r := config.NewMachineType()
	r.SetMachineType(typ)

	return r, nil
}

// gathering sorts resources by the node that they are from.
type gathering struct {
	order []string
	views map[string]*gathered
}

type gathered struct {
	view machine.View
	seen map[resource.Type]bool
	// nodename tells machines apart that were asked without a name.
	nodename string
}

func (g *gathering) take(p printed) error {
	if p.resource == nil {
		return nil
	}

	of, known := g.views[p.Node]
	if !known {
		if g.views == nil {
			g.views = map[string]*gathered{}
		}

		of = &gathered{seen: map[resource.Type]bool{}}
		g.views[p.Node] = of
		g.order = append(g.order, p.Node)
	}

	return of.take(p)
}

func (g *gathered) take(p printed) error {
	md := p.resource.Metadata()

	if p.Event == "destroyed" {
		g.view.Drop(md)

		return nil
	}

	g.view.Put(p.resource)
	g.seen[md.Type()] = true

	nodename, ok := p.resource.(*k8s.Nodename)
	if !ok {
		return nil
	}

	name := nodename.TypedSpec().Nodename
	if g.nodename != "" && g.nodename != name {
		return fmt.Errorf("node %q is both %q and %q: several machines need names of their own (talosctl --nodes)", p.Node, g.nodename, name)
	}

	g.nodename = name

	return nil
}

func (g *gathered) machine(node string) Machine {
	m := Machine{Node: node, Machine: g.view.Machine()}

	for _, kind := range kinds() {
		if !g.seen[kind.Type()] {
			m.Missing = append(m.Missing, kindName(kind.Type()))
		}
	}

	return m
}
