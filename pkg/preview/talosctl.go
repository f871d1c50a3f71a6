package preview

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/resource/protobuf"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Machine is the view of one machine.
type Machine struct {
	// Node is the name or address by which the machine was read, as in talosctl --nodes. It may be empty.
	Node    string
	Machine machine.Machine
	// Missing names the resource kinds without any resource, in talosctl's spelling. A machine may have no resource of a kind; see
	// IsEmpty. An empty nodename is a missing one.
	Missing []string
}

// IsEmpty reports whether the resources do not suffice for any part of a report.
func (m Machine) IsEmpty() bool {
	return slices.Contains(m.Missing, kindName(runtime.PlatformMetadataType)) && m.isPartial([]netip.Addr{{}})
}

// isPartial reports whether a resource is missing on which the addresses and the name of the Node depend. Talos's node
// IPs are not needed if the kubelet's are given.
func (m Machine) isPartial(nodeIPs []netip.Addr) bool {
	needed := []string{kindName(network.AddressStatusType), kindName(k8s.NodenameType)}
	if len(nodeIPs) == 0 {
		needed = append(needed, kindName(k8s.NodeIPType))
	}

	return slices.ContainsFunc(needed, func(kind string) bool { return slices.Contains(m.Missing, kind) })
}

// Command returns the shell command that prints all resources of a machine that Parse needs of the given kinds.
func Command(kinds machine.Kinds) string {
	var names []string

	for _, kind := range needed(kinds) {
		names = append(names, kindName(kind.Type()))
	}

	return "for kind in " + strings.Join(names, " ") + "; do talosctl -n NODE get $kind -o yaml; done"
}

func needed(kinds machine.Kinds) []resource.Kind {
	// The node ID and the volumes change nothing on the Node.
	return slices.DeleteFunc(kinds.All(), func(kind resource.Kind) bool {
		return kind.Type() == cluster.IdentityType || kind.Type() == block.DiscoveredVolumeType
	})
}

// kindName returns talosctl's plural for a resource type, such as "nodenames" for "Nodenames.kubernetes.talos.dev".
func kindName(typ resource.Type) string {
	name, _, _ := strings.Cut(typ, ".")

	return strings.ToLower(name)
}

// table matches the head of a table, which talosctl prints by default.
var table = regexp.MustCompile(`(?m)^(\S+ +)?NODE +NAMESPACE +TYPE +ID `)

// Parse reads the concatenated output of any number of `talosctl get KIND -o yaml` or `-o json` commands for any number
// of machines. It returns the machines in the order of their first resource, and ignores resources that are not of the
// given kinds. Errors name the document and the line.
func Parse(output []byte, kinds machine.Kinds) ([]Machine, error) {
	if table.Match(output) {
		return nil, errors.New("the input is a table, which omits most values: add -o yaml to the talosctl command")
	}

	var order []string

	needed, byNode := needed(kinds), map[string]*parsed{}

	for i, d := range split(output) {
		r, err := decode(d.text, needed)
		if err != nil {
			// Decode again behind empty lines, so that the error has the line numbers of the input.
			_, err = decode(append(bytes.Repeat([]byte("\n"), d.line-1), d.text...), needed)
		}

		if err == nil && r != nil {
			m, known := byNode[r.Node]
			if !known {
				m = &parsed{}
				byNode[r.Node] = m
				order = append(order, r.Node)
			}

			err = m.add(r)
		}

		if err != nil {
			return nil, fmt.Errorf("document %d, from line %d: %w", i+1, d.line, err)
		}
	}

	if len(order) == 0 {
		return nil, errors.New("no resource of a machine found")
	}

	var machines []Machine

	for _, node := range order {
		view, m := machine.View{Facts: kinds.Facts}, Machine{Node: node}

		for _, kind := range needed {
			resources := slices.DeleteFunc(slices.Clone(byNode[node].resources), func(r resource.Resource) bool {
				return r.Metadata().Type() != kind.Type()
			})
			view.ReplaceKind(kind, resources)

			if len(resources) == 0 {
				m.Missing = append(m.Missing, kindName(kind.Type()))
			}
		}

		m.Machine = view.Machine()
		machines = append(machines, m)
	}

	return machines, nil
}

// document is the text of one resource and the number of its first line.
type document struct {
	text []byte
	line int
}

// content matches a line that is neither empty nor a comment.
var content = regexp.MustCompile(`(?m)^[ \t\r]*[^# \t\r\n]`)

// split separates the resources. The output of two talosctl commands has no separator in between, but each resource starts with "node:" in YAML
// and with a brace in JSON, and neither occurs at the start of any other line.
func split(output []byte) []document {
	var (
		documents []document
		current   document
		number    int
	)

	for line := range bytes.Lines(output) {
		number++

		separator := bytes.HasPrefix(line, []byte("---"))

		if separator || bytes.HasPrefix(line, []byte("node:")) || line[0] == '{' {
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

	return slices.DeleteFunc(append(documents, current), func(d document) bool { return !content.Match(d.text) })
}

// printed is a resource in talosctl's output (cmd/talosctl/cmd/talos/output/yaml.go).
type printed struct {
	Node     string `yaml:"node"`
	Metadata struct {
		Namespace string `yaml:"namespace"`
		Type      string `yaml:"type"`
		ID        string `yaml:"id"`
	} `yaml:"metadata"`
	Spec yaml.Node `yaml:"spec"`

	resource resource.Resource
}

// decode returns the resource in a document, or nil if it is not needed.
func decode(text []byte, needed []resource.Kind) (*printed, error) {
	var p printed
	if err := yaml.Unmarshal(text, &p); err != nil {
		return nil, err
	}

	switch {
	case p.Metadata.Type == "":
		return nil, errors.New("not a resource in talosctl's format: metadata.type is missing")
	case !slices.ContainsFunc(needed, func(kind resource.Kind) bool { return kind.Type() == p.Metadata.Type }):
		return nil, nil
	case p.Spec.IsZero():
		return nil, errors.New("not a resource in talosctl's format: spec is missing")
	}

	// talosctl prints the ID 0x0c of a META key as the number 12 in JSON.
	if tag, err := strconv.ParseUint(p.Metadata.ID, 0, 8); err == nil && p.Metadata.Type == runtime.MetaKeyType {
		p.Metadata.ID = runtime.MetaKeyTagToID(uint8(tag))
	}

	// COSI's registry creates a resource of the type from an empty protobuf message.
	var empty protobuf.Resource

	*empty.Metadata() = resource.NewMetadata(p.Metadata.Namespace, p.Metadata.Type, p.Metadata.ID, resource.VersionUndefined)

	r, err := protobuf.UnmarshalResource(&empty)
	if err != nil {
		return nil, err
	}

	if err := decodeSpec(r, &p.Spec); err != nil {
		return nil, fmt.Errorf("spec of %s: %w", r.Metadata(), err)
	}

	p.resource = r

	return &p, nil
}

// decodeSpec decodes a spec with machinery's own decoder, except where it cannot read what talosctl prints.
func decodeSpec(r resource.Resource, spec *yaml.Node) error {
	switch r := r.(type) {
	case *config.MachineType: // Spec returns a copy
		var typ talosmachine.Type

		err := spec.Decode(&typ)
		r.SetMachineType(typ)

		return err
	case *network.AddressStatus: // an address without flags is printed as `flags: ""`, which machinery rejects
		for pair := range slices.Chunk(spec.Content, 2) {
			if flags := pair[len(pair)-1]; pair[0].Value == "flags" && flags.Kind == yaml.ScalarNode && flags.Value == "" {
				flags.Tag = "!!null"
			}
		}
	case *network.PlatformConfig: // only the metadata is used; the addresses may lack flags, too
		var platform struct {
			Metadata *runtime.PlatformMetadataSpec `yaml:"metadata"`
		}

		err := spec.Decode(&platform)
		r.TypedSpec().Metadata = platform.Metadata

		return err
	case *network.LinkStatus: // only the name is used; flags may be missing
		return nil
	}

	return spec.Decode(r.Spec())
}

// parsed collects the resources of one machine.
type parsed struct {
	resources []resource.Resource
	nodename  string
}

// add applies a resource. Two nodenames are an error, because talosctl prints an empty node for machines that were read without --nodes.
func (m *parsed) add(p *printed) error {
	md := p.resource.Metadata()

	isSame := func(r resource.Resource) bool {
		return r.Metadata().Type() == md.Type() && r.Metadata().ID() == md.ID()
	}

	if p.Node == "" && slices.ContainsFunc(m.resources, isSame) {
		return fmt.Errorf("%s occurs twice without a node; print each machine with its own name (talosctl --nodes)", md)
	}

	m.resources = slices.DeleteFunc(m.resources, isSame)

	if nodename, ok := p.resource.(*k8s.Nodename); ok {
		name := nodename.TypedSpec().Nodename
		if m.nodename != "" && m.nodename != name {
			return fmt.Errorf("node %q has nodenames %q and %q; print each machine with its own name (talosctl --nodes)", p.Node, m.nodename, name)
		}

		if m.nodename = name; name == "" {
			return nil // a missing one
		}
	}

	m.resources = append(m.resources, p.resource)

	return nil
}
