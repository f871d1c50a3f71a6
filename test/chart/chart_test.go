// Package chart_test tests the Helm chart: its RBAC equals the extension's, an API server accepts the rendered objects,
// and talos-ccm accepts its arguments.
package chart_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const root = "../.."

// runMake runs a target of the Makefile and returns its output.
func runMake(args ...string) (string, error) {
	cmd := exec.Command("make", append([]string{"--silent", "--directory=" + root}, args...)...)
	// Ignore the flags of a make that runs this test.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=")
	cmd.Stderr = os.Stderr

	output, err := cmd.Output()

	return strings.TrimSpace(string(output)), err
}

// helm returns the path of Helm, which is built if it is not in the cache.
var helm = sync.OnceValues(func() (string, error) {
	output, err := runMake("helm")

	return output[strings.LastIndex(output, "\n")+1:], err
})

// tryRender returns the objects that the chart creates with the given values, and the output of Helm if it fails.
func tryRender(t *testing.T, values string) (rendered, output string) {
	t.Helper()

	program, err := helm()
	require.NoError(t, err)

	cmd := exec.CommandContext(t.Context(), program, "template", "talos-ccm", root+"/packaging/chart", "--namespace", "kube-system", "--values", "-")
	cmd.Stdin = strings.NewReader(values)

	var stdout, stderr bytes.Buffer

	cmd.Stdout, cmd.Stderr = &stdout, &stderr

	if err := cmd.Run(); err != nil {
		return "", stderr.String()
	}

	return stdout.String(), ""
}

func render(t *testing.T, values string) []unstructured.Unstructured {
	t.Helper()

	rendered, output := tryRender(t, values)
	require.Empty(t, output)

	return decode(t, rendered)
}

// decode decodes a stream of objects.
func decode(t *testing.T, stream string) []unstructured.Unstructured {
	t.Helper()

	var objects []unstructured.Unstructured

	for decoder := yaml.NewDecoder(strings.NewReader(stream)); ; {
		var object map[string]any

		err := decoder.Decode(&object)
		if errors.Is(err, io.EOF) {
			return objects
		}

		require.NoError(t, err, stream)

		objects = append(objects, unstructured.Unstructured{Object: object})
	}
}

// isRBAC reports whether an object is one of the extension's RBAC manifest.
func isRBAC(object unstructured.Unstructured) bool {
	return object.GetAnnotations()[extension.RBACVersionAnnotation] != ""
}

func name(object unstructured.Unstructured) string {
	return object.GetKind() + " " + object.GetNamespace() + "/" + object.GetName()
}

// find converts the rendered object of a kind.
func find[T any](t *testing.T, objects []unstructured.Unstructured, apiVersion, kind string) T {
	t.Helper()

	var found T

	i := slices.IndexFunc(objects, func(o unstructured.Unstructured) bool { return o.GetAPIVersion() == apiVersion && o.GetKind() == kind })
	require.GreaterOrEqual(t, i, 0, "chart renders no %s %s", apiVersion, kind)

	require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(objects[i].Object, &found))

	return found
}

func TestChart_RBACIsThatOfTheExtension(t *testing.T) {
	t.Parallel()

	const (
		lifecycle = "cloud-node-lifecycle-controller"
		service   = "service-lb-controller"
	)

	for controllers, optional := range map[string][]string{
		`["*"]`:                                    {lifecycle},
		`["*", -cloud-node-lifecycle]`:             {},
		`["*", service]`:                           {lifecycle, service},
		`["*", -cloud-node-lifecycle, service]`:    {service},
		`["*", -service, -cloud-node]`:             {lifecycle},
		`[cloud-node]`:                             {},
		`[cloud-node, cloud-node-lifecycle]`:       {lifecycle},
		`[node-csr-approval, nodeipam, -service]`:  {},
		`[cloud-node, -cloud-node-lifecycle, "*"]`: {},
	} {
		want, got := map[string]any{}, map[string]any{}

		for _, object := range decode(t, string(extension.RBAC)) {
			controller := object.GetLabels()[extension.ControllerLabel]
			if controller == "" || controller == extension.SecurePort || slices.Contains(optional, controller) {
				want[name(object)] = object.Object
			}
		}

		for _, object := range render(t, "controllers: "+controllers) {
			if isRBAC(object) {
				got[name(object)] = object.Object
			}
		}

		assert.Empty(t, cmp.Diff(want, got), "controllers %s (-extension +chart)", controllers)
	}
}

// The custom resource of Talos (internal/app/machined/pkg/controllers/k8s/internal/k8stemplates/crds.go, Talos v1.13.5).
const talosServiceAccount = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: serviceaccounts.talos.dev}
spec:
  group: talos.dev
  scope: Namespaced
  names: {kind: ServiceAccount, listKind: ServiceAccountList, plural: serviceaccounts, singular: serviceaccount}
  versions:
    - name: v1alpha1
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec: {type: object, properties: {roles: {type: array, items: {type: string}}}}
`

// withGuide adds the values of the guide.
func withGuide(values map[string]string) map[string]string {
	page, err := os.ReadFile(root + "/docs/guides/run-as-pod.md")
	blocks := regexp.MustCompile("(?s)```yaml\n(# values.yaml\n.*?)```").FindAllStringSubmatch(string(page), -1)

	if err != nil || len(blocks) == 0 {
		panic(fmt.Sprint("no values in the guide: ", err))
	}

	for i, block := range blocks {
		values[fmt.Sprintf("values %d of the guide", i)] = block[1]
	}

	return values
}

// inputs are values for the tests of the rendered objects.
var inputs = withGuide(map[string]string{
	"default": "",
	"all": `
image: registry.example.com/a:v1@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
imagePullSecrets: [pull]
replicas: 3
controllers: ["*", service, -node-csr-approval]
args: [--kube-api-qps=50, "--cluster-cidr=10.244.0.0/16,fd00::/64", --bind-address=::]
config:
  transformations:
    - name: racks
      labels:
        example.com/rack: '{{ regexFindString "^rack([0-9]+)-" .Hostname 1 }}'
talosconfigSecret: talosconfig
apiServer: {host: "fd00::1", port: 6443}
resources: {limits: {memory: 256Mi}}
nodeSelector: {example.com/infra: ""}
tolerations: [{operator: Exists}]
`,
	"pod network":  "hostNetwork: false",
	"no selectors": "{nodeSelector: null, tolerations: [], resources: null}",
})

func TestChart_APIServerAccepts(t *testing.T) {
	t.Parallel()

	s := ctest.Start(t, kube.Options{ControllerManager: kube.ControllerManager{Absent: true}})
	client, err := dynamic.NewForConfig(s.Kube.Config())
	require.NoError(t, err)

	create := func(object unstructured.Unstructured, dryRun ...string) error {
		kind := object.GroupVersionKind()
		resource := schema.GroupVersionResource{Group: kind.Group, Version: kind.Version, Resource: strings.ToLower(kind.Kind) + "s"}
		_, err := client.Resource(resource).Namespace(object.GetNamespace()).Create(t.Context(), &object,
			metav1.CreateOptions{DryRun: dryRun, FieldValidation: metav1.FieldValidationStrict})

		return err
	}

	require.NoError(t, create(decode(t, talosServiceAccount)[0]))

	for title, values := range inputs {
		for _, object := range render(t, values) {
			// The API server creates namespaces and serves custom resources with a delay.
			err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
				err := create(object, metav1.DryRunAll)
				if apierrors.IsNotFound(err) {
					return false, nil
				}

				return true, err
			})
			assert.NoError(t, err, "%s: create %s", title, name(object))
		}
	}
}

func TestChart_TalosCCMAcceptsArgumentsAndConfiguration(t *testing.T) {
	t.Parallel()

	for title, values := range inputs {
		objects := render(t, values)
		deployment := find[appsv1.Deployment](t, objects, "apps/v1", "Deployment")

		options, err := ccm.NewOptions()
		require.NoError(t, err)

		flags := pflag.NewFlagSet("", pflag.ContinueOnError)

		for _, set := range options.Flags().FlagSets {
			flags.AddFlagSet(set)
		}

		assert.NoError(t, errors.Join(flags.Parse(deployment.Spec.Template.Spec.Containers[0].Args), options.Validate()), title)

		content := find[struct {
			Data map[string]string `json:"data"`
		}](t, objects, "v1", "ConfigMap").Data["config.yaml"]
		_, err = config.Parse("config.yaml", []byte(content))
		assert.NoError(t, err, title)

		var given struct{ Config map[string]any }

		var got map[string]any

		require.NoError(t, errors.Join(yaml.Unmarshal([]byte(values), &given), yaml.Unmarshal([]byte(content), &got)))

		assert.Empty(t, cmp.Diff(given.Config, got, cmpopts.EquateEmpty()), title)
	}
}

func TestChart_SetsValues(t *testing.T) {
	t.Parallel()

	deployment := find[appsv1.Deployment](t, render(t, inputs["all"]), "apps/v1", "Deployment")
	pod := deployment.Spec.Template.Spec
	container := pod.Containers[0]

	got := map[string]any{
		"replicas":    *deployment.Spec.Replicas,
		"image":       container.Image,
		"pullSecret":  pod.ImagePullSecrets[0].Name,
		"secret":      pod.Volumes[0].Secret.SecretName,
		"apiServer":   container.Env[0].Value + " " + container.Env[1].Value,
		"memory":      container.Resources.Limits.Memory().String(),
		"selector":    pod.NodeSelector,
		"tolerations": len(pod.Tolerations),
		"args":        container.Args[2:],
	}

	want := map[string]any{
		"replicas":   int32(3),
		"image":      "registry.example.com/a:v1@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
		"pullSecret": "pull",
		"secret":     "talosconfig",
		"apiServer":  "fd00::1 6443",
		"memory":     "256Mi",
		// Helm merges maps: the default selector remains.
		"selector":    map[string]string{"example.com/infra": "", "node-role.kubernetes.io/control-plane": ""},
		"tolerations": 1,
		"args":        []string{"--controllers=*,service,-node-csr-approval", "--kube-api-qps=50", "--cluster-cidr=10.244.0.0/16,fd00::/64", "--bind-address=::"},
	}

	assert.Empty(t, cmp.Diff(want, got))
}

func TestChart_RejectsInvalidValues(t *testing.T) {
	t.Parallel()

	for values, want := range map[string]string{
		"imag: a":                        "imag",
		"image: ''":                      "/image",
		"replicas: '1'":                  "/replicas",
		"controllers: '*'":               "/controllers",
		"controllers: []":                "/controllers",
		"controllers: [route]":           "/controllers/0",
		"args: [v=4]":                    "/args/0",
		"args: ['--controllers=*']":      "/args/0",
		"args: ['--secure-port', '0']":   "/args/0",
		"args: ['--talosconfig=/tmp/a']": "/args/0",
		"args: ['--secure-port 1']":      "/args/0",
		"args: ['--secure_port=1']":      "/args/0",
		"args: ['--machine-socket=/a']":  "/args/0",
		"config: '{}'":                   "/config",
		"apiServer: {address: a}":        "/apiServer",
		"apiServer: {port: 65536}":       "/apiServer/port",
		"nodeSelector: {a: true}":        "/nodeSelector/a",
		"resources: []":                  "/resources",
	} {
		if _, output := tryRender(t, values); !strings.Contains(output, want) {
			t.Errorf("%s: got error %q, want %s", values, output, want)
		}
	}
}

// The chart in the repository has a symbolic link, and a placeholder for the registry.
func TestChart_PackageIsCompleteAndReproducible(t *testing.T) {
	t.Parallel()

	const image = "registry.example.org/pod:v1.2.3"

	var archives [2][]byte

	for i := range archives {
		artifacts := t.TempDir()
		if output, err := runMake("chart", "POD_REF="+image, "ARTIFACTS="+artifacts, "SOURCE_DATE_EPOCH=1700000000"); err != nil {
			t.Fatal(err, output)
		}

		packages, err := filepath.Glob(artifacts + "/chart/talos-ccm-*.tgz")
		require.NoError(t, err)
		require.Len(t, packages, 1)

		manifests, err := os.ReadFile(artifacts + "/chart/talos-ccm.yaml")
		require.NoError(t, err)

		assert.Empty(t, cmp.Diff(render(t, "image: "+image), decode(t, string(manifests))))

		if archives[i], err = os.ReadFile(packages[0]); err != nil {
			t.Fatal(err)
		}
	}

	assert.True(t, bytes.Equal(archives[0], archives[1]), "packages of the same chart differ")
}
