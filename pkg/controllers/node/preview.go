package node

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Preview is what the controller would write to one Node.
type Preview struct {
	// Before is the Node now.
	Before *corev1.Node
	// After is the Node when the controller has written it; nil if the desired state is not known, or if nothing is
	// written because the Node is not managed.
	After *corev1.Node
	// Unmanaged is true if the configuration does not select the Node, or if its machine does not run Talos.
	Unmanaged bool
	// ProviderID is what a new Node of the machine would get.
	ProviderID string
	// Conditions are what the controller would report as Events.
	Conditions []events.Condition
	// Upstream are the fields that the upstream Talos CCM owns, sorted.
	Upstream []UpstreamField
}

// UpstreamField is a field of a Node that the upstream Talos CCM owns.
type UpstreamField struct {
	// Name is the path without list items, such as "metadata.labels", "spec.providerID" and "status.addresses".
	Name string
	// Key is the key of a label or an annotation; empty for other fields.
	Key string
	// TakenOver is true if the controller would become the owner.
	TakenOver bool
}

// NewPreviews returns what the controller would write to each Node, in the order of nodes, which are all Nodes of the
// cluster. It writes nothing. The inventory must not change any more.
func NewPreviews(nodes []*corev1.Node, machines *inventory.Inventory, options nodespec.Options) ([]Preview, error) {
	informer := informers.NewSharedInformerFactory(nil, 0).Core().V1().Nodes() // never started

	c, err := New(Config{
		Nodes:     informer,
		Inventory: machines,
		Recorder:  &record.FakeRecorder{}, // discards
		Clock:     clock.RealClock{},
		Options:   func(machine.Machine) nodespec.Options { return options },
	})
	if err != nil {
		return nil, err
	}
	defer c.queue.ShutDown()

	for _, node := range nodes {
		if err := informer.Informer().GetIndexer().Add(node); err != nil {
			return nil, fmt.Errorf("index node %s: %w", node.Name, err)
		}
	}

	previews := make([]Preview, 0, len(nodes))

	for _, node := range nodes {
		p, err := c.preview(node)
		if err != nil {
			return nil, fmt.Errorf("compare node %s: %w", node.Name, err)
		}

		previews = append(previews, p)
	}

	return previews, nil
}

// preview returns what the next sync would write to the Node.
func (c *Controller) preview(node *corev1.Node) (Preview, error) {
	result := Preview{Before: node}
	entry := c.config.Inventory.Get(node.Name)

	if !nodespec.IsTalos(node) || node.DeletionTimestamp != nil || !mayManage(entry, nodespec.NewInput(node, entry.Machine, c.config.Options(entry.Machine))) {
		result.Unmanaged = true

		return result, nil
	}

	p, conditions, err := c.plan(node)
	if err != nil {
		return Preview{}, err
	}

	result.Conditions = conditions

	if p != nil {
		result.ProviderID = p.wantedID

		if result.After, err = p.applyTo(node); err != nil {
			return Preview{}, err
		}
	}

	result.Upstream, err = upstreamFields(node, p)

	return result, err
}

// upstreamFields returns the fields that the upstream Talos CCM owns. The plan may be nil.
func upstreamFields(node *corev1.Node, p *plan) ([]UpstreamField, error) {
	managers, err := fieldManagers(node)
	if err != nil {
		return nil, err
	}

	var fields []UpstreamField

	for _, m := range managers {
		if m.entry.Manager != upstreamManager {
			continue
		}

		m.fields.Leaves().Iterate(func(path fieldpath.Path) { fields = append(fields, newUpstreamField(path, m, p)) })
	}

	slices.SortFunc(fields, func(a, b UpstreamField) int { return strings.Compare(a.Name+" "+a.Key, b.Name+" "+b.Key) })

	return slices.Compact(fields), nil
}

func newUpstreamField(path fieldpath.Path, m fieldManager, p *plan) UpstreamField {
	const depth = 2 // such as metadata.labels

	field := UpstreamField{Name: strings.TrimPrefix(path[:min(depth, len(path))].String(), ".")}

	if len(path) <= depth || path[depth].FieldName == nil {
		return field
	}

	for _, f := range []metadataField{labelsField, annotationsField} {
		if field.Name != "metadata."+f.name {
			continue
		}

		field.Key = *path[depth].FieldName

		if p != nil && m.isUpstream() {
			_, field.TakenOver = map[string]map[string]string{labelsField.name: p.labels, annotationsField.name: p.annotations}[f.name][field.Key]
		}
	}

	return field
}
