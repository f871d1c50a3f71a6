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
)

// leaseName is the name of talos-ccm's leader election lease.
const leaseName = "cloud-controller-manager-talos"

// observer sees every version of the Nodes and of the lease that an API server tells of.
type observer struct {
	// What was, when the observation began.
	before    map[string]*corev1.Node
	extension string

	stop  context.CancelFunc
	group sync.WaitGroup

	// What was seen.
	mu               sync.Mutex
	versions         int
	changes, holders []string
	renewed          time.Time
}

// observe begins to compare Nodes to what they are now, while the extension holds the lease.
func observe(t *testing.T) *observer {
	t.Helper()

	// The one that is held: an instance that has just started may be about to take it.
	eventually(t, heldBy(theExtension))

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

	o.group.Go(func() { follow(ctx, nodes, o.seeNode) })
	o.group.Go(func() { follow(ctx, lock, o.seeLease) })

	return o
}

// follow shows the versions of some objects, and goes on when an API server does. What it does not tell of before it ends is seen in its result only.
func follow(ctx context.Context, objects *cache.ListWatch, see func(runtime.Object)) {
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
			see(item)
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
			see(event.Object)
		}
	}, tick)
}

func (o *observer) seeNode(object runtime.Object) {
	node, ok := object.(*corev1.Node)
	if !ok {
		return // the end of a watch
	}

	o.mu.Lock()
	defer o.mu.Unlock()

	o.versions++

	if change := changed(o.before[node.Name], node); change != "" && !slices.Contains(o.changes, change) {
		o.changes = append(o.changes, change)
	}
}

func (o *observer) seeLease(object runtime.Object) {
	lease, ok := object.(*coordinationv1.Lease)
	if !ok {
		return // the end of a watch
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

// otherInstanceWorks says what is missing for the other instance to be seen to hold the lease and renew it.
func (o *observer) otherInstanceWorks(context.Context) error {
	o.mu.Lock()
	defer o.mu.Unlock()

	if len(o.holders) == 0 || o.holders[len(o.holders)-1] != "other instance" || time.Since(o.renewed) > renewedLately {
		return fmt.Errorf("the lease was seen to be held by %s, until %s", strings.Join(o.holders, ", "), o.renewed)
	}

	return nil
}

// judge ends the observation. Nodes must have been what they were before all the time, and those who held the lease, one after the other, as in one of
// the sequences.
func (o *observer) judge(t *testing.T, sequences ...string) {
	t.Helper()

	o.stop()
	o.group.Wait()

	holders := strings.Join(o.holders, ", ")
	t.Logf("the Nodes were seen in %d versions; the lease was held by: %s", o.versions, holders)

	assert.Empty(t, o.changes, "changes of Nodes")
	assert.Contains(t, sequences, holders, "holders of the lease")
}

// lasting is the part of a Node that must not change while its machine is upgraded: everything except versions and what a reboot changes.
func lasting(node *corev1.Node) *corev1.Node {
	kept := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: node.Name, UID: node.UID, Labels: without(node.Labels, versionLabel), Annotations: without(node.Annotations, constants.AnnotationCordonedKey),
		},
		Spec:   *node.Spec.DeepCopy(),
		Status: corev1.NodeStatus{Addresses: node.Status.Addresses},
	}

	kept.Spec.Unschedulable = false // Talos drains its Node
	// The bed's reboot is a shutdown. One that takes long enough for Kubernetes to notice it taints the Node.
	kept.Spec.Taints = slices.DeleteFunc(kept.Spec.Taints, func(taint corev1.Taint) bool {
		return strings.HasPrefix(taint.Key, "node.kubernetes.io/") || taint.Key == cloudproviderapi.TaintNodeShutdown
	})
	slices.SortFunc(kept.Spec.Taints, func(a, b corev1.Taint) int { return strings.Compare(a.Key, b.Key) })

	return kept
}

func without(all map[string]string, key string) map[string]string {
	rest := maps.Clone(all)
	delete(rest, key)

	return rest
}

// changed says in what a Node is not what it was.
func changed(before, now *corev1.Node) string { return cmp.Diff(lasting(before), lasting(now)) }
