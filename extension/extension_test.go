package extension_test

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/extensions/services"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/ccm"
)

// spec returns the service spec. packaging/image checks that Talos accepts it.
func spec(t *testing.T) services.Spec {
	t.Helper()

	var s services.Spec

	require.NoError(t, yaml.Load(extension.Spec, &s, yaml.WithKnownFields()))

	return s
}

func TestSpec_MountsOnlySocketAndStateDirectories(t *testing.T) {
	const own = "/run/talos-ccm-state"

	dir := filepath.Dir(constants.MachineSocketPath)
	assert.Equal(t, []specs.Mount{
		{Source: dir, Destination: dir, Type: "bind", Options: []string{"rbind", "ro"}},
		{Source: own, Destination: own, Type: "bind", Options: []string{"bind", "rw", "nosuid", "nodev", "noexec"}},
	}, spec(t).Container.Mounts)
	assert.Zero(t, spec(t).Container.Security)
}

func TestSpec_DropsPrivileges(t *testing.T) {
	assert.Subset(t, spec(t).Container.Args, []string{"--drop-privileges", "--machine-socket=" + constants.MachineSocketPath})
}

// objects returns the objects of the RBAC manifest, decoded strictly.
func objects(t *testing.T) []runtime.Object {
	t.Helper()

	var (
		list    []runtime.Object
		decoder = serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
		reader  = utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(extension.RBAC)))
	)

	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return list
		}

		require.NoError(t, err)

		object, _, err := decoder.Decode(document, nil, nil)
		require.NoError(t, err, string(document))

		list = append(list, object)
	}
}

// suffix returns the controller that the object belongs to, after " of "; empty if the object is always applied.
func suffix(object metav1.Object) string {
	if controller, optional := object.GetLabels()[extension.ControllerLabel]; optional {
		return " of " + controller
	}

	return ""
}

// An object with an unknown controller would never be applied.
func TestRBAC_LabelsNameControllers(t *testing.T) {
	for _, object := range objects(t) {
		accessor, err := meta.Accessor(object)
		require.NoError(t, err)

		controller, optional := accessor.GetLabels()[extension.ControllerLabel]
		if !optional || controller == extension.SecurePort {
			continue
		}

		options, err := ccm.NewOptions()
		require.NoError(t, err)

		options.MachineSocket, options.RunDir = "/machine.sock", "/run"
		options.Framework.Generic.Controllers = []string{"*", "-" + controller}

		assert.NoError(t, options.Validate(), accessor.GetName())
	}
}

// rbacDigests are the digests of the manifest without comments, by version. Append a digest when the manifest changes;
// never change the digest of a released version.
var rbacDigests = []string{
	"4ad14d5b161a3a68b10227bc2686b5cf4420ebab6f8e9c4a1a015ab706eb2954",
}

// A machine with an older version of the manifest overwrites the objects unless their version was raised.
func TestRBAC_ChangesRaiseTheVersion(t *testing.T) {
	version := strconv.Itoa(len(rbacDigests))
	digest := sha256.New()

	for _, object := range objects(t) {
		accessor, err := meta.Accessor(object)
		require.NoError(t, err)
		assert.Equal(t, version, accessor.GetAnnotations()[extension.RBACVersionAnnotation], accessor.GetName())
	}

	for decoder := yaml.NewDecoder(bytes.NewReader(extension.RBAC)); ; {
		var object map[string]any

		err := decoder.Decode(&object)
		if errors.Is(err, io.EOF) {
			break
		}

		require.NoError(t, errors.Join(err, json.NewEncoder(digest).Encode(object)))
	}

	assert.Equal(t, rbacDigests[len(rbacDigests)-1], hex.EncodeToString(digest.Sum(nil)),
		"rbac.yaml differs from version %s: raise %s of all its objects by 1, and append the digest that this test then reports to rbacDigests;", version, extension.RBACVersionAnnotation)
}

func TestRBAC_BindsOnlyTheServiceAccount(t *testing.T) {
	want := []string{
		"/system:talos-ccm → ClusterRole system:talos-ccm",
		"/system:talos-ccm:auth-delegator of secure-port → ClusterRole system:auth-delegator",
		"/system:talos-ccm:lifecycle of cloud-node-lifecycle-controller → ClusterRole system:talos-ccm:lifecycle",
		"/system:talos-ccm:service of service-lb-controller → ClusterRole system:talos-ccm:service",
		"default/system:talos-ccm → Role system:talos-ccm",
		"default/system:talos-ccm:lifecycle of cloud-node-lifecycle-controller → Role system:talos-ccm:lifecycle",
		"kube-node-lease/system:talos-ccm:service of service-lb-controller → Role system:talos-ccm:service",
		"kube-system/system:talos-ccm → Role system:talos-ccm",
		"kube-system/system:talos-ccm:authentication-reader of secure-port → Role extension-apiserver-authentication-reader",
	}

	account := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: extension.ServiceAccount, Namespace: extension.Namespace}}

	var got []string

	bound := func(id string, subjects []rbacv1.Subject, ref rbacv1.RoleRef) {
		got = append(got, fmt.Sprintf("%s → %s %s", id, ref.Kind, ref.Name))
		assert.Equal(t, account, subjects, id)
	}

	for _, object := range objects(t) {
		switch o := object.(type) {
		case *rbacv1.ClusterRoleBinding:
			bound("/"+o.Name+suffix(o), o.Subjects, o.RoleRef)
		case *rbacv1.RoleBinding:
			bound(o.Namespace+"/"+o.Name+suffix(o), o.Subjects, o.RoleRef)
		}
	}

	slices.Sort(got)
	assert.Equal(t, want, got)
}

func TestRBAC_DisablesTokenAutomount(t *testing.T) {
	accounts := 0

	for _, object := range objects(t) {
		if account, ok := object.(*corev1.ServiceAccount); ok {
			accounts++

			assert.Equal(t, extension.Namespace+"/"+extension.ServiceAccount, account.Namespace+"/"+account.Name)
			assert.Equal(t, new(false), account.AutomountServiceAccountToken)
		}
	}

	assert.Equal(t, 1, accounts)
}
