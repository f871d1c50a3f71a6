//go:build e2e && ha

package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/test/talos"
)

// auditor checks each version of each Node and of the lease. No Node may be deleted unless it is expected. Its watches continue
// at another API server, so that it misses hardly any version.
type auditor struct {
	stop  context.CancelFunc
	group sync.WaitGroup

	mu sync.Mutex
	// names contains the names of the machines by their identity in the lease.
	names map[string]string
	// nodes contains the last version of each Node by its name, and lease the last version of the lease.
	nodes map[string]*corev1.Node
	lease *coordinationv1.Lease
	// deletions are the names of the Nodes that may be deleted once.
	deletions []string
	// versions is the number of checked versions, and handovers are the changes of the holder.
	versions              int
	violations, handovers []string
	// listed are the objects that were listed because no API server had their versions.
	listed []string
}

// audit starts an auditor.
func audit(t *testing.T) *auditor {
	t.Helper()

	ctx, stop := context.WithCancel(t.Context())
	a := &auditor{names: map[string]string{}, stop: stop, nodes: map[string]*corev1.Node{}}

	t.Cleanup(func() {
		stop()
		a.group.Wait()
	})

	for _, m := range bed.ControlPlanes {
		a.add(t, m)
	}

	// Without talos-ccm, there is no lease.
	a.lease = &coordinationv1.Lease{}

	for resource, objects := range map[string]func(kubernetes.Interface) *cache.ListWatch{
		"Nodes": func(api kubernetes.Interface) *cache.ListWatch {
			return cache.NewListWatchFromClient(api.CoreV1().RESTClient(), "nodes", metav1.NamespaceNone, fields.Everything())
		},
		"lease": func(api kubernetes.Interface) *cache.ListWatch {
			return cache.NewListWatchFromClient(api.CoordinationV1().RESTClient(), "leases", metav1.NamespaceSystem,
				fields.OneTermEqualSelector(metav1.ObjectNameField, leaseName))
		},
	} {
		version, err := a.list(ctx, objects(client))
		require.NoError(t, err)

		a.group.Go(func() { a.watch(ctx, resource, version, objects) })
	}

	return a
}

// add adds the identity of a machine, which changes with its installation.
func (a *auditor) add(t *testing.T, m *talos.Machine) {
	t.Helper()

	identity := identityOf(t, m)

	a.mu.Lock()
	defer a.mu.Unlock()

	a.names[extensionHolder+identity] = m.Name()
}

// watch checks all versions after a resource version until ctx ends. An API server forgets the versions from before its start,
// and before its etcd lost the leader, so that the watch continues at another one. If none has them, the auditor lists the
// objects, and misses the versions of that moment.
func (a *auditor) watch(ctx context.Context, resource, version string, objects func(kubernetes.Interface) *cache.ListWatch) {
	for first, expired := 0, 0; ctx.Err() == nil; time.Sleep(tick) {
		api, err := newClient(first)
		if err != nil {
			a.violate("%s", err)

			return
		}

		if expired == len(bed.ControlPlanes) {
			if listed, err := a.list(ctx, objects(api)); err == nil {
				version, expired = listed, 0
				a.noteListed(resource)
			}

			continue
		}

		events, err := objects(api).WatchWithContext(ctx, metav1.ListOptions{ResourceVersion: version, AllowWatchBookmarks: true})
		if err == nil {
			version, err = a.recordAll(events, version)
		}

		switch {
		case apierrors.IsResourceExpired(err):
			first, expired = first+1, expired+1
		case err == nil:
			expired = 0
		}
	}
}

// newClient returns a client for the API server of the control-plane machine with an index, or the next one that responds.
func newClient(first int) (kubernetes.Interface, error) {
	config, err := bed.RESTConfigFrom(first)
	if err != nil {
		return nil, err
	}

	return kubernetes.NewForConfig(config)
}

// list checks Nodes as new versions, keeps the lease for the comparison with the next version, and returns the resource
// version.
func (a *auditor) list(ctx context.Context, objects *cache.ListWatch) (string, error) {
	list, err := objects.ListWithContext(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}

	switch list := list.(type) {
	case *corev1.NodeList:
		for i := range list.Items {
			a.recordNode(&list.Items[i])
		}

		a.recordMissing(list.Items)

		return list.ResourceVersion, nil
	case *coordinationv1.LeaseList:
		a.mu.Lock()
		defer a.mu.Unlock()

		// The release before the last change may be missed.
		for i := range list.Items {
			a.lease = &list.Items[i]
		}

		return list.ResourceVersion, nil
	default:
		return "", fmt.Errorf("unexpected list %T", list)
	}
}

// recordAll checks the versions of a watch until it ends, and returns the last resource version, or the error of the watch.
func (a *auditor) recordAll(events watch.Interface, version string) (string, error) {
	defer events.Stop()

	for event := range events.ResultChan() {
		accessor, err := meta.Accessor(event.Object)
		if err != nil { // it is a Status
			return version, apierrors.FromObject(event.Object)
		}

		version = accessor.GetResourceVersion()

		switch object := event.Object.(type) {
		case *corev1.Node:
			a.recordEvent(event.Type, object)
		case *coordinationv1.Lease:
			if event.Type != watch.Bookmark {
				a.recordLease(object)
			}
		}
	}

	return version, nil
}

func (a *auditor) recordEvent(kind watch.EventType, node *corev1.Node) {
	switch kind {
	case watch.Added, watch.Modified:
		a.recordNode(node)
	case watch.Deleted:
		a.recordDeletion(node.Name)
	default: // a bookmark has only a resource version
	}
}

// recordMissing requires that the deletion of Nodes that are not listed is expected.
func (a *auditor) recordMissing(listed []corev1.Node) {
	a.mu.Lock()
	names := slices.Collect(maps.Keys(a.nodes))
	a.mu.Unlock()

	for _, name := range names {
		if !slices.ContainsFunc(listed, func(node corev1.Node) bool { return node.Name == name }) {
			a.recordDeletion(name)
		}
	}
}

// expectDeletion allows the deletion of a Node once.
func (a *auditor) expectDeletion(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()

	a.deletions = append(a.deletions, name)
}

// recordDeletion requires that the deletion of a Node is expected.
func (a *auditor) recordDeletion(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()

	delete(a.nodes, name)

	if i := slices.Index(a.deletions, name); i >= 0 {
		a.deletions = slices.Delete(a.deletions, i, i+1)
	} else {
		a.violations = append(a.violations, name+" was deleted")
	}
}

func (a *auditor) noteListed(resource string) {
	a.mu.Lock()
	defer a.mu.Unlock()

	a.listed = append(a.listed, resource)
}

// violate records a violation. The caller must not hold a.mu.
func (a *auditor) violate(format string, args ...any) {
	a.mu.Lock()
	defer a.mu.Unlock()

	a.violations = append(a.violations, fmt.Sprintf(format, args...))
}

// recordNode requires that the providerID and the podCIDRs of a Node do not change, that podCIDRs do not overlap those of
// other Nodes, and that the Node is initialized once.
func (a *auditor) recordNode(node *corev1.Node) {
	a.mu.Lock()
	defer a.mu.Unlock()

	before := ptr.Deref(a.nodes[node.Name], corev1.Node{})
	a.nodes[node.Name] = node
	a.versions++

	check := func(isKept bool, what string, was, is any) {
		if before.UID == node.UID && !isKept {
			a.violations = append(a.violations, fmt.Sprintf("%s: %s changed from %v to %v", node.Name, what, was, is))
		}
	}
	check(before.Spec.ProviderID == "" || before.Spec.ProviderID == node.Spec.ProviderID, "providerID", before.Spec.ProviderID, node.Spec.ProviderID)
	check(len(before.Spec.PodCIDRs) == 0 || slices.Equal(before.Spec.PodCIDRs, node.Spec.PodCIDRs), "podCIDRs", before.Spec.PodCIDRs, node.Spec.PodCIDRs)
	check(isUninitialized(&before) || !isUninitialized(node), "taints", before.Spec.Taints, node.Spec.Taints)

	if slices.Equal(before.Spec.PodCIDRs, node.Spec.PodCIDRs) {
		return
	}

	for _, other := range a.nodes {
		if other.Name != node.Name && overlap(node.Spec.PodCIDRs, other.Spec.PodCIDRs) {
			a.violations = append(a.violations, fmt.Sprintf("podCIDRs %v of %s and %v of %s overlap", node.Spec.PodCIDRs, node.Name, other.Spec.PodCIDRs, other.Name))
		}
	}
}

// isUninitialized reports whether a Node has the taint of Nodes that are not initialized.
func isUninitialized(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == cloudproviderapi.TaintExternalCloudProvider })
}

// overlap reports whether CIDRs of two Nodes overlap.
func overlap(a, b []string) bool {
	return slices.ContainsFunc(a, func(one string) bool {
		return slices.ContainsFunc(b, func(other string) bool { return netip.MustParsePrefix(one).Overlaps(netip.MustParsePrefix(other)) })
	})
}

// recordLease requires that an instance acquires the lease only after its holder has released it, or after it has expired.
func (a *auditor) recordLease(lease *coordinationv1.Lease) {
	a.mu.Lock()
	defer a.mu.Unlock()

	before := a.lease
	a.lease = lease
	a.versions++

	holder, previous := ptr.Deref(lease.Spec.HolderIdentity, ""), ptr.Deref(before.Spec.HolderIdentity, "")
	if holder == previous {
		return
	}

	since := lease.Spec.RenewTime.Sub(ptr.Deref(before.Spec.RenewTime, *lease.Spec.RenewTime).Time)
	a.handovers = append(a.handovers, fmt.Sprintf("%q to %q after %.1f s", a.names[previous], a.names[holder], since.Seconds()))

	if expiry := time.Duration(ptr.Deref(before.Spec.LeaseDurationSeconds, 0)) * time.Second; holder != "" && previous != "" && since < expiry {
		a.violations = append(a.violations, fmt.Sprintf("%s took the lease %s after %s had renewed it", holder, since, previous))
	}
}

// finish stops the auditor and requires that there are no violations.
func (a *auditor) finish(t *testing.T) {
	t.Helper()

	a.stop()
	a.group.Wait()

	t.Logf("checked %d versions of Nodes and of the lease; listed again: %v; lease: %s", a.versions, a.listed, strings.Join(a.handovers, "; "))
	assert.Empty(t, a.violations, "violations")
}
