package node

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Preview shows the next write of the controller to one Node.
type Preview struct {
	// Before is the Node now.
	Before *corev1.Node
	// After is the Node when the controller has written it; nil if the desired state is not known, or if nothing is
	// written because the Node is not managed.
	After *corev1.Node
	// Unmanaged is true if the configuration does not select the Node, or if its machine does not run Talos.
	Unmanaged bool
	// Spec is the desired state of the Node, and of a new Node of its machine; the zero value if After is nil.
	Spec nodespec.Spec
	// Rules are the configured rules.
	Rules []rules.Match
	// Problems would be reported as Events.
	Problems []events.Problem
	// Upstream are the fields that the upstream Talos CCM owns, sorted.
	Upstream []UpstreamField
}

// UpstreamField is a field of a Node that the upstream Talos CCM owns.
type UpstreamField struct {
	// Name is the path without list items, such as "metadata.labels", "spec.providerID" and "status.addresses".
	Name string `json:"field"`
	// Key is the key of a label or an annotation; empty for other fields.
	Key string `json:"key,omitempty"`
	// TakenOver is true if the controller would become the owner.
	TakenOver bool `json:"takenOver,omitempty"`
}

// NewPreviews returns a preview of each Node. The nodes must be all Nodes of the cluster. It writes nothing. The
// inventory must not change any more.
func NewPreviews(nodes []*corev1.Node, machines *inventory.Inventory, options nodespec.Options) ([]Preview, error) {
	indexer := cache.NewIndexer(cache.MetaNamespaceKeyFunc, indexers)

	for _, node := range nodes {
		if err := indexer.Add(node); err != nil {
			return nil, fmt.Errorf("index node %s: %w", node.Name, err)
		}

		machines.Claims.SetNode(node)
	}

	p := planner{
		nodes: corelisters.NewNodeLister(indexer), inventory: machines, clock: clock.RealClock{},
		options: func() nodespec.Options { return options }, recorded: func(*corev1.Node) bool { return true },
	}
	ids := newProviderIDs(indexer, p.counts)
	previews := make([]Preview, 0, len(nodes))

	for _, node := range nodes {
		s := p.observe(node)
		if !s.managed {
			previews = append(previews, Preview{Before: node, Unmanaged: true})

			continue
		}

		plan, err := p.plan(s, ids.assign(s))
		if err != nil {
			return nil, err
		}

		managers, err := fieldManagers(node.ManagedFields)
		if err != nil {
			return nil, fmt.Errorf("compare node %s: %w", node.Name, err)
		}

		preview := Preview{Before: node, Rules: nodespec.Explain(s.input), Problems: plan.problems, Upstream: upstreamFields(managers, plan)}
		if !plan.isPending {
			preview.Spec, preview.After = *s.spec, plan.applyTo(node, managers)
		}

		previews = append(previews, preview)
	}

	return previews, nil
}

// applyTo returns the Node after the plan is written. It does not change the given one.
func (p plan) applyTo(node *corev1.Node, managers []fieldManager) *corev1.Node {
	after := node.DeepCopy()
	after.Spec.ProviderID = cmp.Or(p.providerID, node.Spec.ProviderID)

	if p.apply {
		after.Labels = afterApply("labels", node.Labels, p.labels, managers)
		after.Annotations = afterApply("annotations", node.Annotations, p.annotations, managers)
	}

	for key := range p.released {
		delete(after.Labels, key)
	}

	if p.addresses != nil {
		after.Status.Addresses = p.addresses
	}

	if p.updateTaints {
		after.Spec.Taints = p.taints
	}

	return after
}

// afterApply returns labels or annotations after others are applied: server-side apply removes keys that the controller
// no longer applies and that no other manager owns.
func afterApply(field string, before, applied map[string]string, managers []fieldManager) map[string]string {
	after := map[string]string{}

	for key, value := range before {
		path := metadataPath(field, key)

		owners := slices.DeleteFunc(slices.Clone(managers), func(m fieldManager) bool { return !m.fields.Has(path) })
		if len(owners) != 1 || !owners[0].isOurs {
			after[key] = value
		}
	}

	maps.Copy(after, applied)

	return after
}

func upstreamFields(managers []fieldManager, p plan) (fields []UpstreamField) {
	const depth = 2 // such as metadata.labels

	applied := p.appliedFields()

	for _, m := range managers {
		if m.entry.Manager != upstreamManager {
			continue
		}

		m.fields.Leaves().Iterate(func(path fieldpath.Path) {
			field := UpstreamField{Name: strings.TrimPrefix(path[:min(depth, len(path))].String(), ".")}

			isMetadata := field.Name == "metadata.labels" || field.Name == "metadata.annotations"
			if isMetadata && len(path) > depth && path[depth].FieldName != nil {
				field.Key = *path[depth].FieldName
				field.TakenOver = m.isUpstream && applied.Has(path)
			}

			fields = append(fields, field)
		})
	}

	slices.SortFunc(fields, func(a, b UpstreamField) int { return strings.Compare(a.Name+" "+a.Key, b.Name+" "+b.Key) })

	return slices.Compact(fields)
}
