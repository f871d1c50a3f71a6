//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

// leaseName is the name of talos-ccm's leader election lease.
const leaseName = "cloud-controller-manager-talos"

// observer records changes of the Nodes and holders of the lease. It watches both.
type observer struct {
	// before contains the Nodes at the start, by name.
	before map[string]*corev1.Node
	// extension is the holder identity of the extension.
	extension string

	stop  context.CancelFunc
	group sync.WaitGroup

	mu sync.Mutex
	// versions is the number of observed versions of Nodes.
	versions int
	// changes are the differences of Nodes, and holders the consecutive holders of the lease.
	changes, holders []string
	// renewed is the last renewal of the lease.
	renewed time.Time
}

// observe starts an observer when the extension holds the lease.
func observe(t *testing.T) *observer {
	t.Helper()

	// An instance that has just started may acquire the lease later.
	eventually(t, checkLeaseHeldBy(extensionHolder))

	lease, err := getLease(t.Context())
	require.NoError(t, err)

	ctx, stop := context.WithCancel(t.Context())
	o := &observer{before: map[string]*corev1.Node{}, extension: *lease.Spec.HolderIdentity, stop: stop}

	for _, m := range bed.Machines() {
		o.before[m.Name()] = nodeOf(t, m)
	}

	nodes := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "nodes", metav1.NamespaceNone, fields.Everything())
	lock := cache.NewListWatchFromClient(client.CoordinationV1().RESTClient(), "leases", metav1.NamespaceSystem,
		fields.OneTermEqualSelector(metav1.ObjectNameField, leaseName))

	o.group.Go(func() { watchObjects(ctx, nodes, o.recordNode) })
	o.group.Go(func() { watchObjects(ctx, lock, o.recordLease) })

	return o
}

// watchObjects calls record for each version of the objects. It lists and watches again when a watch ends, so it can miss
// versions between a stop of the API server and its restart.
func watchObjects(ctx context.Context, objects *cache.ListWatch, record func(runtime.Object)) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		list, err := objects.ListWithContext(ctx, metav1.ListOptions{})
		if err != nil {
			return
		}

		items, err := meta.ExtractList(list)
		if err != nil {
			return
		}

		for _, item := range items {
			record(item)
		}

		from, err := meta.ListAccessor(list)
		if err != nil {
			return
		}

		versions, err := objects.WatchWithContext(ctx, metav1.ListOptions{ResourceVersion: from.GetResourceVersion()})
		if err != nil {
			return
		}
		defer versions.Stop()

		for event := range versions.ResultChan() {
			record(event.Object)
		}
	}, tick)
}

// recordNode records the difference between a Node and its version at the start.
func (o *observer) recordNode(object runtime.Object) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return // the error that ends a watch
	}

	o.mu.Lock()
	defer o.mu.Unlock()

	o.versions++

	before := ptr.Deref(o.before[node.Name], corev1.Node{}) // empty for a Node with another name

	change := cmp.Diff(persistentFields(&before), persistentFields(node))
	if change != "" && !slices.Contains(o.changes, change) {
		o.changes = append(o.changes, change)
	}
}

// recordLease records the holder of the lease and its last renewal.
func (o *observer) recordLease(object runtime.Object) {
	lease, ok := object.(*coordinationv1.Lease)
	if !ok {
		return // the error that ends a watch
	}

	holder, name := lease.Spec.HolderIdentity, "other instance"

	switch {
	case holder == nil || *holder == "":
		name = "no instance"
	case *holder == o.extension:
		name = "extension"
	}

	o.mu.Lock()
	defer o.mu.Unlock()

	if lease.Spec.RenewTime != nil {
		o.renewed = lease.Spec.RenewTime.Time
	}

	if len(o.holders) == 0 || o.holders[len(o.holders)-1] != name {
		o.holders = append(o.holders, name)
	}
}

// checkHeldByOther returns an error unless the observer has seen that the other instance holds and renews the lease.
func (o *observer) checkHeldByOther(context.Context) error {
	o.mu.Lock()
	defer o.mu.Unlock()

	if len(o.holders) == 0 || o.holders[len(o.holders)-1] != "other instance" || time.Since(o.renewed) > maxLeaseAge {
		return fmt.Errorf("the lease was held by %s, and last renewed at %s", strings.Join(o.holders, ", "), o.renewed)
	}

	return nil
}

// finish stops the observer. It requires that no Node changed, and that the holders of the lease match one of the sequences.
func (o *observer) finish(t *testing.T, sequences ...string) {
	t.Helper()

	o.stop()
	o.group.Wait()

	holders := strings.Join(o.holders, ", ")
	t.Logf("observed %d versions of Nodes; holders of the lease: %s", o.versions, holders)

	assert.Empty(t, o.changes, "changes of Nodes")
	assert.Contains(t, sequences, holders, "holders of the lease")
}

// persistentFields returns a Node with only the fields that must not change during an upgrade of its machine.
func persistentFields(node *corev1.Node) *corev1.Node {
	persistent := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: node.Name, UID: node.UID,
			Labels:      withoutKeys(node.Labels, versionLabel, noderecord.LabelVersion, noderecord.LabelConfig),
			Annotations: withoutKeys(node.Annotations, constants.AnnotationCordonedKey),
		},
		Spec:   *node.Spec.DeepCopy(),
		Status: corev1.NodeStatus{Addresses: node.Status.Addresses},
	}

	persistent.Spec.Unschedulable = false // Talos drains its Node
	// The bed reboots with a shutdown. If it takes long, Kubernetes and talos-ccm taint the Node.
	persistent.Spec.Taints = slices.DeleteFunc(persistent.Spec.Taints, func(taint corev1.Taint) bool {
		return strings.HasPrefix(taint.Key, "node.kubernetes.io/") || taint.Key == cloudproviderapi.TaintNodeShutdown
	})
	slices.SortFunc(persistent.Spec.Taints, func(a, b corev1.Taint) int { return strings.Compare(a.Key, b.Key) })

	return persistent
}

// withoutKeys returns a copy of a map without some keys.
func withoutKeys(all map[string]string, keys ...string) map[string]string {
	rest := maps.Clone(all)
	maps.DeleteFunc(rest, func(key, _ string) bool { return slices.Contains(keys, key) })

	return rest
}
