package bootstrap_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// document is an object of rbac.yaml.
type document struct {
	want   unstructured.Unstructured
	client dynamic.ResourceInterface
}

// documents returns the objects of rbac.yaml with the admin's clients for them.
func documents(bed ctest.Suite) (list []document) {
	bed.Helper()

	client, err := dynamic.NewForConfig(bed.Kube.Config())
	require.NoError(bed, err)

	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(extension.RBAC)))

	for {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return list
		}

		require.NoError(bed, err)

		var want unstructured.Unstructured

		require.NoError(bed, utilyaml.Unmarshal(text, &want))

		kind := want.GroupVersionKind()
		resource := schema.GroupVersionResource{Group: kind.Group, Version: kind.Version, Resource: strings.ToLower(kind.Kind) + "s"}
		list = append(list, document{want: want, client: client.Resource(resource).Namespace(want.GetNamespace())})
	}
}

// manifests returns the objects of rbac.yaml from the API server; nil for an object that does not exist.
func manifests(bed ctest.Suite) map[string]*unstructured.Unstructured {
	bed.Helper()

	objects := map[string]*unstructured.Unstructured{}

	for _, d := range documents(bed) {
		object, err := d.client.Get(bed.Context(), d.want.GetName(), metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			object, err = nil, nil
		}

		require.NoError(bed, err)

		objects[fmt.Sprintf("%s %s/%s", d.want.GetKind(), d.want.GetNamespace(), d.want.GetName())] = object
	}

	return objects
}

// Names of controllers with their own RBAC objects.
const (
	lifecycle = "cloud-node-lifecycle-controller"
	service   = "service-lb-controller"
)

func TestRBAC_IsAppliedAndOwned(t *testing.T) {
	bed := beds.NewSuite(t)
	bootstrapped(bed, clock.RealClock{}, lifecycle, service, extension.SecurePort)

	objects := manifests(bed)
	if len(objects) < 2 {
		t.Fatalf("got %d objects, want at least 2", len(objects))
	}

	for name, object := range objects {
		owned := object != nil && slices.ContainsFunc(object.GetManagedFields(), func(entry metav1.ManagedFieldsEntry) bool {
			return entry.Manager == "talos-ccm" && entry.Operation == metav1.ManagedFieldsOperationApply
		})
		assert.True(t, owned, "%s is not owned by field manager talos-ccm", name)
	}
}

func TestRBAC_SecondApplyChangesNothing(t *testing.T) {
	bed := beds.NewSuite(t)
	bootstrapped(bed, clock.RealClock{}, lifecycle, service, extension.SecurePort)

	before := manifests(bed)

	bootstrapped(bed, clock.RealClock{}, lifecycle, service, extension.SecurePort)

	for name, after := range manifests(bed) {
		assert.Equal(t, before[name].GetResourceVersion(), after.GetResourceVersion())
	}
}

func TestRBAC_RevertsChangesByOthers(t *testing.T) {
	bed := beds.NewSuite(t)
	s := bootstrapped(bed, clock.RealClock{})
	s.awaitRights()

	roles := bed.Client.RbacV1().ClusterRoles()

	role, err := roles.Get(t.Context(), "system:talos-ccm", metav1.GetOptions{})
	require.NoError(t, err)

	want := role.DeepCopy().Rules
	role.Rules = nil

	_, err = roles.Update(t.Context(), role, metav1.UpdateOptions{})
	require.NoError(t, err)

	// The authorizer observes the change with a delay. Wait for it, so that the old permissions are not mistaken for
	// the restored ones.
	client := s.client()
	ctest.Eventually(t, "token may no longer list nodes", func() bool {
		return !may(t, client, authorizationv1.ResourceAttributes{Verb: "list", Resource: "nodes"})
	})

	bootstrapped(bed, clock.RealClock{}).awaitRights()

	role, err = roles.Get(t.Context(), "system:talos-ccm", metav1.GetOptions{})
	require.NoError(t, err)

	assert.Len(t, role.Rules, len(want))
}

// everywhere is the empty namespace of access reviews: a cluster-scoped resource, or all namespaces.
const everywhere = ""

// allowed returns everything that the token may do in some namespaces, and everywhere, as permissions returns it. The
// first three permissions are granted to every authenticated user.
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
			"approve signers.certificates.k8s.io kubernetes.io/kubelet-serving",
			"list servicecidrs.networking.k8s.io",
			// Those of all ServiceAccounts since Kubernetes 1.37: system:cluster-trust-bundle-discovery.
			"get clustertrustbundles.certificates.k8s.io", "list clustertrustbundles.certificates.k8s.io", "watch clustertrustbundles.certificates.k8s.io",
		},
		"default": {
			"create events", "patch events",
			"get services kubernetes",
			"list endpointslices.discovery.k8s.io",
		},
		"kube-system": {
			"create events", "patch events",
			"create leases.coordination.k8s.io",
		},
		"kube-public":     {},
		"kube-node-lease": {},
	}

	for _, verb := range []string{"get", "update"} {
		all["kube-system"] = append(all["kube-system"], verb+" leases.coordination.k8s.io cloud-controller-manager-talos")
	}

	if slices.Contains(enabled, extension.SecurePort) { // system:auth-delegator, extension-apiserver-authentication-reader
		all[everywhere] = append(all[everywhere],
			"create subjectaccessreviews.authorization.k8s.io", "create tokenreviews.authentication.k8s.io")

		for _, verb := range []string{"get", "list", "watch"} {
			all["kube-system"] = append(all["kube-system"], verb+" configmaps extension-apiserver-authentication")
		}
	}

	if slices.Contains(enabled, lifecycle) {
		all[everywhere] = append(all[everywhere], "get nodes", "delete nodes")
		all["default"] = append(all["default"], "list events")
	}

	if slices.Contains(enabled, service) {
		all[everywhere] = append(all[everywhere], "list services", "watch services", "patch services/status",
			"list endpointslices.discovery.k8s.io", "watch endpointslices.discovery.k8s.io", "create events", "patch events")
		all["kube-node-lease"] = append(all["kube-node-lease"], "list leases.coordination.k8s.io", "watch leases.coordination.k8s.io")
	}

	return all
}

// The test compares the rules in each namespace with the expected ones. The permissions of a controller that is disabled
// must not remain.
func TestRBAC_GrantsExactlyTheExpectedPermissions(t *testing.T) {
	bed := beds.NewSuite(t)

	for _, enabled := range [][]string{nil, {lifecycle}, {service}, {lifecycle, service, extension.SecurePort}, nil} {
		s := bootstrapped(bed, clock.RealClock{}, enabled...)
		client, want := s.client(), allowed(enabled...)

		for namespace := range want {
			if namespace == everywhere {
				continue // permissions everywhere are granted in each namespace
			}

			want := sets.New(slices.Concat(want[namespace], want[everywhere])...)

			ctest.EventuallyNoError(t, func(context.Context) error { // the authorizer observes changes with a delay
				granted, err := permissions(t, client, namespace)
				if err == nil && !granted.Equal(want) {
					err = fmt.Errorf("missing %v, unexpected %v", sets.List(want.Difference(granted)), sets.List(granted.Difference(want)))
				}

				if err != nil {
					return fmt.Errorf("in %s with %v: %w", namespace, enabled, err)
				}

				return nil
			})
		}
	}
}

func TestRBAC_DeletesObjectsOfDisabledControllers(t *testing.T) {
	bed := beds.NewSuite(t)
	bootstrapped(bed, clock.RealClock{}, lifecycle, service, extension.SecurePort)
	bootstrapped(bed, clock.RealClock{}, service, extension.SecurePort)

	for name, object := range manifests(bed) {
		assert.Equal(t, strings.HasSuffix(name, ":lifecycle"), object == nil, "%s is deleted", name)
	}
}

// During a rolling upgrade, machines with the old version must not remove permissions that the new version needs, or
// objects of its controllers.
func TestRBAC_KeepsObjectsOfNewerVersion(t *testing.T) {
	// Not parallel, because it changes the RBAC objects of the process.
	bed := beds.NewSerialSuite(t)
	older := extension.RBAC
	restore := func() { extension.RBAC = older }

	t.Cleanup(func() {
		restore()
		applyAsOperator(bed)
	})

	extension.RBAC = regexp.MustCompile(`talos-ccm.dev/rbac-version: "\d+"`).ReplaceAll(older, []byte(`talos-ccm.dev/rbac-version: "1000"`))
	extension.RBAC = bytes.Replace(extension.RBAC, []byte("verbs: [list, watch, patch]"), []byte("verbs: [list, watch, patch, deletecollection]"), 1)
	bootstrapped(bed, clock.RealClock{}, lifecycle, extension.SecurePort)

	newer := manifests(bed)

	restore()
	bootstrapped(bed, clock.RealClock{}, service, extension.SecurePort).requireWorks()

	for name, object := range manifests(bed) {
		require.NotNil(t, object, name)

		if before := newer[name]; before != nil {
			assert.Equal(t, before.GetResourceVersion(), object.GetResourceVersion(), name)
		}
	}

	// The rollback that the reference describes.
	applyAsOperator(bed)
	bootstrapped(bed, clock.RealClock{}).requireWorks()

	for name, object := range manifests(bed) {
		if object != nil {
			assert.NotEqual(t, "1000", object.GetAnnotations()[extension.RBACVersionAnnotation], name)
		}
	}
}

// applyAsOperator does the same as `kubectl apply --server-side --force-conflicts -f rbac.yaml`.
func applyAsOperator(bed ctest.Suite) {
	bed.Helper()

	for _, m := range documents(bed) {
		_, err := m.client.Apply(context.WithoutCancel(bed.Context()), m.want.GetName(), &m.want, metav1.ApplyOptions{FieldManager: "kubectl", Force: true})
		require.NoError(bed, err)
	}
}

// permissions returns what the client may do in a namespace, as verb, resource, and name if the permission is for one
// object. Wildcards are not expanded.
func permissions(t *testing.T, client kubernetes.Interface, namespace string) (sets.Set[string], error) {
	t.Helper()

	review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(), &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace},
	}, metav1.CreateOptions{})
	require.NoError(t, err)

	if review.Status.Incomplete {
		return nil, fmt.Errorf("the review is incomplete: %s", review.Status.EvaluationError)
	}

	granted := sets.New[string]()

	for _, rule := range review.Status.ResourceRules {
		names := rule.ResourceNames
		if len(names) == 0 {
			names = []string{""}
		}

		for _, verb := range rule.Verbs {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, name := range names {
						permission := verb + " " + schema.GroupResource{Group: group, Resource: resource}.String() + " " + name
						granted.Insert(strings.TrimSpace(permission))
					}
				}
			}
		}
	}

	return granted, nil
}

func may(t testing.TB, client kubernetes.Interface, attributes authorizationv1.ResourceAttributes) bool {
	t.Helper()

	review, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &attributes},
	}, metav1.CreateOptions{})
	require.NoError(t, err)

	return review.Status.Allowed
}
