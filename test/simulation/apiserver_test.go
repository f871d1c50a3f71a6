package simulation_test

import (
	"encoding/json"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// apiServer is the part of an API server that the controllers use: Nodes, with the field managers of Kubernetes. A real
// one cannot run in a bubble of testing/synctest, and client-go's fake clientset has neither resourceVersions, nor
// preconditions, nor the REST client that the IPAM controller uses.
type apiServer struct {
	nodes  map[string]*corev1.Node
	events corev1.EventList
	// history are all versions of all Nodes. The resourceVersion is the position, from 1. Watches read it.
	history []event
}

type event struct {
	node    *corev1.Node
	deleted bool
}

var nodeKind = corev1.SchemeGroupVersion.WithKind("Node")

// fieldManagers are those of Nodes and of their subresource status.
var fieldManagers = sync.OnceValue(func() map[string]*managedfields.FieldManager {
	managers := map[string]*managedfields.FieldManager{}
	converter := applyconfigurations.NewTypeConverter(scheme.Scheme)

	// The fields that each of the two endpoints ignores, as in the strategies of Node.
	for subresource, ignored := range map[string]string{"": "status", "status": "spec"} {
		reset := map[fieldpath.APIVersion]fieldpath.Filter{"v1": fieldpath.NewExcludeSetFilter(fieldpath.NewSet(fieldpath.MakePathOrDie(ignored)))}

		managers[subresource] = must(managedfields.NewDefaultFieldManager(
			converter, scheme.Scheme, scheme.Scheme, scheme.Scheme, nodeKind, nodeKind.GroupVersion(), subresource, reset))
	}

	return managers
})

// must returns the result of a function that cannot fail.
func must[T any](result T, err error) T {
	utilruntime.Must(err)

	return result
}

// create registers a Node.
func (a *apiServer) create(manager string, node *corev1.Node) {
	a.put(must(fieldManagers()[""].Update(&corev1.Node{TypeMeta: node.TypeMeta}, node, manager)))
}

// put stores a Node as the next version, and returns that.
func (a *apiServer) put(obj runtime.Object) *corev1.Node {
	node, _ := obj.DeepCopyObject().(*corev1.Node)
	node.ResourceVersion = strconv.Itoa(len(a.history) + 1)
	a.history = append(a.history, event{node: node})
	a.nodes[node.Name] = node

	return node
}

func (a *apiServer) delete(name string) {
	if a.nodes[name] != nil {
		a.put(a.nodes[name])
		a.history[len(a.history)-1].deleted = true
		delete(a.nodes, name)
	}
}

// at returns the Nodes at a resourceVersion, by name.
func (a *apiServer) at(version int) map[string]*corev1.Node {
	nodes := map[string]*corev1.Node{}

	for _, e := range a.history[:version] {
		if nodes[e.node.Name] = e.node; e.deleted {
			delete(nodes, e.node.Name)
		}
	}

	return nodes
}

// update updates a Node or its status. The change gets a copy.
func (a *apiServer) update(manager, subresource, name string, change func(node *corev1.Node)) (*corev1.Node, error) {
	return a.write(subresource, name, func(m *managedfields.FieldManager, live *corev1.Node) (runtime.Object, error) {
		next := live.DeepCopy()
		change(next)

		return m.Update(live, next, manager)
	})
}

// write changes a Node and stores it, after the checks of the API server. A change without effect creates no version.
func (a *apiServer) write(
	subresource, name string, change func(*managedfields.FieldManager, *corev1.Node) (runtime.Object, error),
) (*corev1.Node, error) {
	live := a.nodes[name]
	if live == nil {
		return nil, apierrors.NewNotFound(corev1.Resource("nodes"), name)
	}

	changed, err := change(fieldManagers()[subresource], live)
	if err != nil {
		return nil, err
	}

	next, _ := changed.(*corev1.Node)
	if subresource == "" {
		next.Status = live.Status
	} else {
		next.Spec = live.Spec
	}

	immutable := ""

	switch {
	case next.UID != live.UID:
		immutable = "metadata.uid"
	case live.Spec.ProviderID != "" && next.Spec.ProviderID != live.Spec.ProviderID:
		immutable = providerIDField
	case len(live.Spec.PodCIDRs) > 0 && !slices.Equal(next.Spec.PodCIDRs, live.Spec.PodCIDRs):
		immutable = podCIDRsField
	}

	if immutable != "" {
		return nil, apierrors.NewInvalid(nodeKind.GroupKind(), name, field.ErrorList{field.Forbidden(field.NewPath(immutable), "may not be changed")})
	}

	if equality.Semantic.DeepEqual(withoutTimes(next), withoutTimes(live)) {
		return live, nil
	}

	return a.put(next), nil
}

// The fields that cannot be changed.
const (
	providerIDField = "spec.providerID"
	podCIDRsField   = "spec.podCIDRs"
)

// withoutTimes returns a copy of a Node without the times of its managed fields, which change with every write.
func withoutTimes(node *corev1.Node) *corev1.Node {
	node = node.DeepCopy()
	for i := range node.ManagedFields {
		node.ManagedFields[i].Time = nil
	}

	return node
}

// serve answers a request of a controller.
func (a *apiServer) serve(r *http.Request, body []byte) (runtime.Object, error) {
	name, _ := nodeOf(r)

	switch resource := path.Base(r.URL.Path); {
	case resource == "events":
		return a.serveEvents(body)
	case r.Method == http.MethodPatch:
		return a.patch(r, body)
	case r.Method == http.MethodGet && resource == "nodes":
		list := &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(len(a.history))}}
		for _, name := range slices.Sorted(maps.Keys(a.nodes)) {
			list.Items = append(list.Items, *a.nodes[name])
		}

		return list, nil
	case r.Method == http.MethodGet && a.nodes[name] != nil:
		return a.nodes[name], nil
	case r.Method == http.MethodDelete:
		if err := a.checkPreconditions(name, body); err != nil {
			return nil, err
		}

		a.delete(name)

		return &metav1.Status{Status: metav1.StatusSuccess}, nil
	default:
		return nil, apierrors.NewNotFound(corev1.Resource(resource), name)
	}
}

// serveEvents creates an Event, or lists all if there is no body.
func (a *apiServer) serveEvents(body []byte) (runtime.Object, error) {
	if len(body) == 0 {
		return &a.events, nil
	}

	event := &corev1.Event{}
	utilruntime.Must(json.Unmarshal(body, event))
	event.CreationTimestamp = metav1.Now()
	a.events.Items = append(a.events.Items, *event)

	return event, nil
}

// checkPreconditions returns the error of a request to delete a Node.
func (a *apiServer) checkPreconditions(name string, body []byte) error {
	var options metav1.DeleteOptions

	utilruntime.Must(json.Unmarshal(body, &options))

	live := a.nodes[name]
	if live == nil {
		return apierrors.NewNotFound(corev1.Resource("nodes"), name)
	}

	if want := options.Preconditions; want != nil && (ptr.Deref(want.UID, live.UID) != live.UID || ptr.Deref(want.ResourceVersion, live.ResourceVersion) != live.ResourceVersion) {
		return apierrors.NewConflict(corev1.Resource("nodes"), name, errConflict)
	}

	return nil
}

// patch answers a request with a merge patch, a strategic merge patch or an apply patch.
func (a *apiServer) patch(r *http.Request, body []byte) (runtime.Object, error) {
	var patch map[string]any
	if err := json.Unmarshal(body, &patch); err != nil {
		return nil, err
	}

	name, subresource := nodeOf(r)
	manager := r.URL.Query().Get("fieldManager")

	version, isVersioned, _ := unstructured.NestedString(patch, "metadata", "resourceVersion")
	if live := a.nodes[name]; isVersioned && live != nil && live.ResourceVersion != version {
		return nil, apierrors.NewConflict(corev1.Resource("nodes"), name, errConflict)
	}

	if types.PatchType(r.Header.Get("Content-Type")) == types.ApplyYAMLPatchType {
		return a.write(subresource, name, func(m *managedfields.FieldManager, live *corev1.Node) (runtime.Object, error) {
			return m.Apply(live, &unstructured.Unstructured{Object: patch}, manager, r.URL.Query().Get("force") == "true")
		})
	}

	merge := jsonpatch.MergePatch
	if types.PatchType(r.Header.Get("Content-Type")) == types.StrategicMergePatchType {
		merge = func(node, patch []byte) ([]byte, error) {
			return strategicpatch.StrategicMergePatch(node, patch, corev1.Node{})
		}
	}

	return a.update(manager, subresource, name, func(node *corev1.Node) {
		merged := must(merge(must(json.Marshal(node)), body))
		*node = corev1.Node{}
		utilruntime.Must(json.Unmarshal(merged, node))
	})
}

// nodeOf returns the name of a Node and its subresource in the path of a request.
func nodeOf(r *http.Request) (name, subresource string) {
	_, rest, _ := strings.Cut(r.URL.Path, "/nodes/")
	name, subresource, _ = strings.Cut(rest, "/")

	return name, subresource
}
