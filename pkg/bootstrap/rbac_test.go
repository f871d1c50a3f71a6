package bootstrap_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/extension"
)

// document is an object of rbac.yaml.
type document struct {
	want   unstructured.Unstructured
	client dynamic.ResourceInterface
}

// documents returns the objects of rbac.yaml with the admin's clients for them.
func documents(t *testing.T) (list []document) {
	t.Helper()

	client, err := dynamic.NewForConfig(controlPlane.Config())
	must(t, err)

	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(extension.RBAC)))

	for {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return list
		}

		must(t, err)

		var want unstructured.Unstructured

		must(t, utilyaml.Unmarshal(text, &want))

		kind := want.GroupVersionKind()
		resource := schema.GroupVersionResource{Group: kind.Group, Version: kind.Version, Resource: strings.ToLower(kind.Kind) + "s"}
		list = append(list, document{want: want, client: client.Resource(resource).Namespace(want.GetNamespace())})
	}
}

// manifests returns the objects of rbac.yaml from the API server; nil for an object that does not exist.
func manifests(t *testing.T) map[string]*unstructured.Unstructured {
	t.Helper()

	objects := map[string]*unstructured.Unstructured{}

	for _, d := range documents(t) {
		object, err := d.client.Get(t.Context(), d.want.GetName(), metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			object, err = nil, nil
		}

		must(t, err)

		objects[fmt.Sprintf("%s %s/%s", d.want.GetKind(), d.want.GetNamespace(), d.want.GetName())] = object
	}

	return objects
}

// Names of controllers with RBAC of their own.
const (
	lifecycle = "cloud-node-lifecycle-controller"
	service   = "service-lb-controller"
)

func TestRBAC_IsAppliedAndOwned(t *testing.T) {
	bootstrapped(t, clock.RealClock{}, lifecycle, service, extension.SecurePort)

	objects := manifests(t)
	if len(objects) < 2 {
		t.Fatalf("got %d objects, want at least 2", len(objects))
	}

	for name, object := range objects {
		owned := object != nil && slices.ContainsFunc(object.GetManagedFields(), func(entry metav1.ManagedFieldsEntry) bool {
			return entry.Manager == "talos-ccm" && entry.Operation == metav1.ManagedFieldsOperationApply
		})
		if !owned {
			t.Errorf("%s is not owned by field manager talos-ccm", name)
		}
	}
}

func TestRBAC_SecondApplyChangesNothing(t *testing.T) {
	bootstrapped(t, clock.RealClock{}, lifecycle, service, extension.SecurePort)

	before := manifests(t)

	bootstrapped(t, clock.RealClock{}, lifecycle, service, extension.SecurePort)

	for name, after := range manifests(t) {
		if after.GetResourceVersion() != before[name].GetResourceVersion() {
			t.Errorf("%s was changed by the second apply", name)
		}
	}
}

func TestRBAC_RevertsChangesByOthers(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	s.awaitRights(t)

	roles := adminClient(t).RbacV1().ClusterRoles()

	role, err := roles.Get(t.Context(), "system:talos-ccm", metav1.GetOptions{})
	must(t, err)

	want := role.DeepCopy().Rules
	role.Rules = nil

	_, err = roles.Update(t.Context(), role, metav1.UpdateOptions{})
	must(t, err)

	// The authorizer observes the change with a delay. Wait for it, so that the old permissions are not mistaken for
	// the restored ones.
	client := s.client(t)
	eventually(t, "token may no longer list nodes", func() bool {
		return !may(t, client, authorizationv1.ResourceAttributes{Verb: "list", Resource: "nodes"})
	})

	bootstrapped(t, clock.RealClock{}).awaitRights(t)

	role, err = roles.Get(t.Context(), "system:talos-ccm", metav1.GetOptions{})
	must(t, err)

	if len(role.Rules) != len(want) {
		t.Errorf("got rules %v, want %v", role.Rules, want)
	}
}

// everywhere is the empty namespace of reviews: a cluster-scoped resource, or all namespaces.
const everywhere = ""

// allowed returns everything that the token may do without naming an object, as verb and resource by namespace. In
// everywhere, the first three rows are granted to every authenticated user.
func allowed(enabled ...string) map[string][]string {
	all := map[string][]string{
		everywhere: {
			"create selfsubjectaccessreviews.authorization.k8s.io",
			"create selfsubjectrulesreviews.authorization.k8s.io",
			"create selfsubjectreviews.authentication.k8s.io",
			"list nodes", "watch nodes", "patch nodes",
			"patch nodes/status",
			"list certificatesigningrequests.certificates.k8s.io", "watch certificatesigningrequests.certificates.k8s.io",
			"update certificatesigningrequests/approval.certificates.k8s.io",
			"list servicecidrs.networking.k8s.io",
		},
		"default": {
			"create events", "patch events",
			"list endpointslices.discovery.k8s.io",
		},
		"kube-system": {
			"create events", "patch events",
			"create leases.coordination.k8s.io",
		},
		"kube-public": {},
	}

	if slices.Contains(enabled, extension.SecurePort) { // system:auth-delegator
		all[everywhere] = append(all[everywhere],
			"create subjectaccessreviews.authorization.k8s.io", "create tokenreviews.authentication.k8s.io")
	}

	if slices.Contains(enabled, lifecycle) {
		all[everywhere] = append(all[everywhere], "get nodes", "delete nodes")
		all["default"] = append(all["default"], "list events")
	}

	if slices.Contains(enabled, service) {
		all[everywhere] = append(all[everywhere], "list services", "watch services", "patch services/status",
			"list endpointslices.discovery.k8s.io", "watch endpointslices.discovery.k8s.io", "create events", "patch events")
	}

	return all
}

// The test reviews every verb on every resource of the API server. The permissions of a controller that is disabled
// must not remain.
func TestRBAC_GrantsExactlyTheExpectedPermissions(t *testing.T) {
	resources := allResources(t)

	for _, enabled := range [][]string{nil, {lifecycle}, {service}, {lifecycle, service, extension.SecurePort}, nil} {
		s := bootstrapped(t, clock.RealClock{}, enabled...)
		s.awaitRights(t)

		client, want := s.client(t), allowed(enabled...)

		// The authorizer observes changes with a delay.
		for verb, attributes := range map[string]authorizationv1.ResourceAttributes{
			"delete nodes":          {Verb: "delete", Resource: "nodes"},
			"patch services/status": {Verb: "patch", Resource: "services", Subresource: "status"},
			"list services":         {Verb: "list", Resource: "services"},
			"list events":           {Verb: "list", Resource: "events", Namespace: "default"},
		} {
			granted := slices.Contains(slices.Concat(want[everywhere], want["default"]), verb)
			eventually(t, fmt.Sprintf("token may %s: %t", verb, granted), func() bool { return may(t, client, attributes) == granted })
		}

		// Permissions in all namespaces are also granted in each one.
		general := permissions(t, client, everywhere, resources)
		requireSame(t, fmt.Sprintf("everywhere with %v", enabled), general, want[everywhere])

		for namespace, additional := range want {
			if namespace != everywhere {
				where := fmt.Sprintf("in %s with %v", namespace, enabled)
				requireSame(t, where, permissions(t, client, namespace, resources), append(additional, want[everywhere]...))
			}
		}
	}
}

func TestRBAC_DeletesObjectsOfDisabledControllers(t *testing.T) {
	bootstrapped(t, clock.RealClock{}, lifecycle, service, extension.SecurePort)
	bootstrapped(t, clock.RealClock{}, service, extension.SecurePort)

	for name, object := range manifests(t) {
		if gone, want := object == nil, strings.HasSuffix(name, ":lifecycle"); gone != want {
			t.Errorf("%s is deleted: %t, want %t", name, gone, want)
		}
	}
}

// During a rolling upgrade, machines with the old version must not take away what the new version needs: neither its
// permissions nor the objects of its controllers.
func TestRBAC_KeepsObjectsOfNewerVersion(t *testing.T) {
	older := extension.RBAC
	restore := func() { extension.RBAC = older }

	t.Cleanup(func() {
		restore()
		applyAsOperator(t)
	})

	extension.RBAC = regexp.MustCompile(`talos-ccm.dev/rbac-version: "\d+"`).ReplaceAll(older, []byte(`talos-ccm.dev/rbac-version: "1000"`))
	extension.RBAC = bytes.Replace(extension.RBAC, []byte("verbs: [list, watch, patch]"), []byte("verbs: [list, watch, patch, deletecollection]"), 1)
	bootstrapped(t, clock.RealClock{}, lifecycle, extension.SecurePort)

	newer := manifests(t)

	restore()
	bootstrapped(t, clock.RealClock{}, service, extension.SecurePort).requireWorks(t)

	for name, object := range manifests(t) {
		switch before := newer[name]; {
		case before == nil:
			if object == nil {
				t.Errorf("%s, which the newer version does not have, was not applied", name)
			}
		case object == nil:
			t.Errorf("%s of the newer version was deleted", name)
		case object.GetResourceVersion() != before.GetResourceVersion():
			t.Errorf("%s of the newer version was changed", name)
		}
	}

	// The way back that the reference describes.
	applyAsOperator(t)
	bootstrapped(t, clock.RealClock{}).requireWorks(t)

	for name, object := range manifests(t) {
		if object != nil && object.GetAnnotations()[extension.RBACVersionAnnotation] == "1000" {
			t.Errorf("%s is still of the newer version", name)
		}
	}
}

// applyAsOperator does the same as `kubectl apply --server-side --force-conflicts -f rbac.yaml`.
func applyAsOperator(t *testing.T) {
	t.Helper()

	for _, m := range documents(t) {
		_, err := m.client.Apply(context.WithoutCancel(t.Context()), m.want.GetName(), &m.want, metav1.ApplyOptions{FieldManager: "kubectl", Force: true})
		must(t, err)
	}
}

func TestRBAC_RestrictsNamedObjects(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{}, extension.SecurePort)
	s.awaitRights(t)

	client := s.client(t)

	for _, c := range []struct {
		verb, group, resource, subresource, namespace, name string
		want                                                bool
	}{
		{"get", "coordination.k8s.io", "leases", "", "kube-system", "cloud-controller-manager-talos", true},
		{"update", "coordination.k8s.io", "leases", "", "kube-system", "cloud-controller-manager-talos", true},
		{"watch", "coordination.k8s.io", "leases", "", "kube-system", "cloud-controller-manager-talos", true},
		{"watch", "coordination.k8s.io", "leases", "", "kube-system", "kube-controller-manager", false},
		{"delete", "coordination.k8s.io", "leases", "", "kube-system", "cloud-controller-manager-talos", false},
		{"update", "coordination.k8s.io", "leases", "", "kube-system", "kube-controller-manager", false},
		{"update", "coordination.k8s.io", "leases", "", "kube-node-lease", "cloud-controller-manager-talos", false},
		{"get", "", "configmaps", "", "kube-system", "extension-apiserver-authentication", true},
		{"update", "", "configmaps", "", "kube-system", "extension-apiserver-authentication", false},
		{"get", "", "configmaps", "", "kube-system", "kube-root-ca.crt", false},
		{"get", "", "secrets", "", "kube-system", "any", false},
		{"create", "", "serviceaccounts", "token", "kube-system", "talos-ccm", false},
		{"approve", "certificates.k8s.io", "signers", "", everywhere, "kubernetes.io/kubelet-serving", true},
		{"approve", "certificates.k8s.io", "signers", "", everywhere, "kubernetes.io/kube-apiserver-client", false},
		{"get", "", "services", "", "default", "kubernetes", true},
		{"get", "", "services", "", "default", "any", false},
		{"bind", "rbac.authorization.k8s.io", "clusterroles", "", everywhere, "system:talos-ccm", false},
		{"impersonate", "", "users", "", everywhere, "admin", false},
	} {
		got := may(t, client, authorizationv1.ResourceAttributes{
			Verb: c.verb, Group: c.group, Resource: c.resource, Subresource: c.subresource, Namespace: c.namespace, Name: c.name,
		})
		if got != c.want {
			t.Errorf("%s %s/%s %s/%s: allowed is %t, want %t", c.verb, c.resource, c.subresource, c.namespace, c.name, got, c.want)
		}
	}
}

// allResources returns the resources and subresources of the API server, such as nodes/status and
// leases.coordination.k8s.io.
func allResources(t *testing.T) []schema.GroupResource {
	t.Helper()

	_, lists, err := adminClient(t).Discovery().ServerGroupsAndResources()
	must(t, err)

	found := map[schema.GroupResource]struct{}{}

	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		must(t, err)

		for _, resource := range list.APIResources {
			found[schema.GroupResource{Group: version.Group, Resource: resource.Name}] = struct{}{}
		}
	}

	for _, needed := range []string{"nodes/status", "serviceaccounts/token", "secrets"} {
		if _, known := found[schema.GroupResource{Resource: needed}]; !known {
			t.Fatalf("discovery does not list %s", needed)
		}
	}

	return slices.Collect(maps.Keys(found))
}

// permissions returns what the client may do in a namespace.
func permissions(t *testing.T, client kubernetes.Interface, namespace string, resources []schema.GroupResource) []string {
	t.Helper()

	var granted []string

	for _, resource := range resources {
		name, subresource, _ := strings.Cut(resource.Resource, "/")

		for _, verb := range []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"} {
			attributes := authorizationv1.ResourceAttributes{
				Namespace: namespace, Verb: verb, Group: resource.Group, Resource: name, Subresource: subresource,
			}
			if may(t, client, attributes) {
				granted = append(granted, verb+" "+resource.String())
			}
		}
	}

	return granted
}

func may(t *testing.T, client kubernetes.Interface, attributes authorizationv1.ResourceAttributes) bool {
	t.Helper()

	review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &attributes},
	}, metav1.CreateOptions{})
	must(t, err)

	return review.Status.Allowed
}

func requireSame(t *testing.T, where string, got, want []string) {
	t.Helper()

	for _, permission := range got {
		if !slices.Contains(want, permission) {
			t.Errorf("%s: unexpected permission %s", where, permission)
		}
	}

	for _, permission := range want {
		if !slices.Contains(got, permission) {
			t.Errorf("%s: missing permission %s", where, permission)
		}
	}
}
