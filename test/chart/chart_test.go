// Package chart_test tests the Helm chart: its RBAC equals the extension's, every value has an effect, an API server
// accepts the rendered objects, and talos-ccm accepts its arguments.
package chart_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"net/http/httptest"
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
	"github.com/google/go-containerregistry/pkg/crane"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/siderolabs/talos/pkg/machinery/compatibility/talos112"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v4"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	root       = "../.."
	schemaFile = root + "/packaging/chart/values.schema.json"
)

var update = flag.Bool("update", false, "rewrite the configuration in values.schema.json")

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
func tryRender(t *testing.T, values string, command ...string) (rendered, output string) {
	t.Helper()

	program, err := helm()
	require.NoError(t, err)

	if command == nil {
		command = []string{"template"}
	}

	args := []string{command[0], "talos-ccm", root + "/packaging/chart", "--namespace=kube-system", "--values=testdata/image.yaml", "--values=-"}
	cmd := exec.CommandContext(t.Context(), program, append(args, command[1:]...)...)
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

// find converts the rendered object of one of the kinds.
func find[T any](t *testing.T, objects []unstructured.Unstructured, apiVersion string, kinds ...string) T {
	t.Helper()

	var found T

	i := slices.IndexFunc(objects, func(o unstructured.Unstructured) bool {
		return o.GetAPIVersion() == apiVersion && slices.Contains(kinds, o.GetKind())
	})
	require.GreaterOrEqual(t, i, 0, "chart renders no %s %s", apiVersion, kinds)

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
		`["*", -cloud-node-lifecycle-controller, service-lb-controller, -route]`: {service},
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

// The custom resources of Talos (internal/app/machined/pkg/controllers/k8s/internal/k8stemplates/crds.go, Talos v1.13.5)
// and of the Prometheus operator, without its schema.
const customResources = `
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
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: podmonitors.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: PodMonitor, listKind: PodMonitorList, plural: podmonitors, singular: podmonitor}
  versions:
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}
`

// withPages adds the values of the guide and of the README, with another registry than their placeholder.
func withPages(values map[string]string) map[string]string {
	for _, name := range []string{"docs/guides/run-as-pod.md", "packaging/chart/README.md"} {
		page, err := os.ReadFile(filepath.Join(root, name))
		blocks := regexp.MustCompile("(?s)```yaml\n(# values.yaml\n.*?)```").FindAllStringSubmatch(string(page), -1)

		if err != nil || len(blocks) == 0 {
			panic(fmt.Sprint("no values in ", name, ": ", err))
		}

		for i, block := range blocks {
			values[fmt.Sprintf("values %d of %s", i, name)] = strings.ReplaceAll(block[1], "registry.example.com/", "registry.example.org/")
		}
	}

	return values
}

// effects are a setting of each value, and what it changes in the output, in which all white space is a single space.
var effects = map[string]struct{ values, want string }{
	"image.repository": {"image: {repository: example.org/a}", "image: example.org/a:v0."},
	"image.tag":        {"image: {tag: v9.8.7}", "/talos-ccm-pod:v9.8.7 "},
	"image.digest": {
		"image: {tag: v1, digest: 'sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08'}",
		"/talos-ccm-pod:v1@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 ",
	},
	"image.pullPolicy": {"image: {pullPolicy: Always}", "imagePullPolicy: Always"},
	"imagePullSecrets": {"imagePullSecrets: [pull]", "imagePullSecrets: - name: pull"},
	"kind":             {"kind: DaemonSet", "kind: DaemonSet"},
	"replicas":         {"replicas: 3", "replicas: 3 strategy: type: Recreate"},
	"updateStrategy":   {"updateStrategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 0}}", " strategy: rollingUpdate: maxSurge: 0 type: RollingUpdate"},
	"controllers":      {`controllers: ["*", service, -node-csr-approval]`, `"--controllers=*,service,-node-csr-approval"`},
	"args":             {`args: [--v=4, "--cluster-cidr=10.244.0.0/16,fd00::/64"]`, `- "--v=4" - "--cluster-cidr=10.244.0.0/16,fd00::/64"`},
	"env": {
		"env: {B: {value: b}, A: {valueFrom: {secretKeyRef: {name: s, key: k}}}, KUBERNETES_SERVICE_HOST: {value: '::1'}}",
		`- name: A valueFrom: secretKeyRef: key: k name: s - name: B value: b - name: GOMEMLIMIT value: 1GiB - name: KUBERNETES_SERVICE_HOST value: ::1 `,
	},
	"config":            {"config: {lifecycle: {dryRun: true}}", "config.yaml: | lifecycle: dryRun: true"},
	"talosconfigSecret": {"talosconfigSecret: mine", "secretName: mine"},
	"hostNetwork":       {"hostNetwork: false", "- --bind-address=0.0.0.0 env: - name: GOMEMLIMIT value: 1GiB ports:"},
	"apiServer.host":    {`apiServer: {host: "fd00::1"}`, `KUBERNETES_SERVICE_HOST value: fd00::1`},
	"apiServer.port":    {"apiServer: {port: 6443}", `KUBERNETES_SERVICE_PORT value: "6443"`},
	"resources":         {"resources: {requests: {memory: 1Gi}}", "resources: requests: cpu: 10m memory: 1Gi"},
	"priorityClassName": {"priorityClassName: system-node-critical", "priorityClassName: system-node-critical"},
	"podAnnotations":    {"podAnnotations: {example.com/a: b}", "annotations: example.com/a: b"},
	"podLabels":         {"podLabels: {example.com/a: b}", "app.kubernetes.io/managed-by: Helm example.com/a: b spec:"},
	// Helm merges maps: the default selector remains.
	"nodeSelector":              {`nodeSelector: {example.com/infra: ""}`, `nodeSelector: example.com/infra: "" node-role.kubernetes.io/control-plane: ""`},
	"tolerations":               {"tolerations: [{operator: Exists}]", "tolerations: - operator: Exists"},
	"affinity":                  {"affinity: {podAntiAffinity: {}}", "affinity: podAntiAffinity: {}"},
	"topologySpreadConstraints": {"topologySpreadConstraints: [{maxSkew: 1}]", "topologySpreadConstraints: - maxSkew: 1"},
	"podMonitor.enabled":        {"podMonitor: {enabled: true}", "- --bind-address=0.0.0.0"},
	"podMonitor.labels":         {"podMonitor: {enabled: true, labels: {release: p}}", "app.kubernetes.io/managed-by: Helm release: p spec:"},
}

// inputs are values for the tests of the rendered objects.
var inputs = withPages(map[string]string{
	"default": "",
	"all": `
image: {repository: registry.example.org/a, tag: v1, digest: "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}
imagePullSecrets: [pull]
replicas: 3
updateStrategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}
controllers: ["*", service-lb-controller, node-ipam-controller, -node-csr-approval, -route]
args: [--kube-api-qps=50, --allocate-node-cidrs, "--cluster-cidr=10.244.0.0/16,fd00::/64", --bind-address=::]
env: {HTTPS_PROXY: {value: "http://192.0.2.1"}, NODE: {valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}}
config:
  transformations:
    - name: racks
      labels:
        example.com/rack: '{{ regexFindString "^rack([0-9]+)-" .Hostname 1 }}'
talosconfigSecret: talosconfig
apiServer: {host: "fd00::1", port: 6443}
resources: {limits: {memory: 256Mi}}
podAnnotations: {example.com/a: b}
podLabels: {example.com/a: b}
nodeSelector: {example.com/infra: ""}
tolerations: [{operator: Exists}]
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}]}}}
topologySpreadConstraints: [{maxSkew: 1, topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app.kubernetes.io/name: talos-ccm}}}]
podMonitor: {enabled: true, labels: {release: prometheus}}
`,
	"pod network":  "hostNetwork: false",
	"no selectors": "{nodeSelector: null, tolerations: [], resources: null, priorityClassName: null}",
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

	for _, object := range decode(t, customResources) {
		require.NoError(t, create(object))
	}

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
		workload := find[appsv1.Deployment](t, objects, "apps/v1", "Deployment", "DaemonSet")

		options, err := ccm.NewOptions()
		require.NoError(t, err)

		flags := pflag.NewFlagSet("", pflag.ContinueOnError)

		for _, set := range options.Flags().FlagSets {
			flags.AddFlagSet(set)
		}

		assert.NoError(t, errors.Join(flags.Parse(workload.Spec.Template.Spec.Containers[0].Args), options.Validate()), title)

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

// property is a JSON schema.
type property struct {
	AdditionalProperties any
	Properties           map[string]property
}

// Every value of the schema is tested, has an effect, and is in the README.
func TestChart_ValuesHaveEffects(t *testing.T) {
	t.Parallel()

	var schema property

	text, err := os.ReadFile(schemaFile)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &schema))
	delete(schema.Properties, "global")

	var names []string

	for name, value := range schema.Properties {
		if value.Properties == nil || value.AdditionalProperties != false {
			names = append(names, name)

			continue
		}

		for key := range value.Properties {
			names = append(names, name+"."+key)
		}
	}

	assert.ElementsMatch(t, slices.Collect(maps.Keys(effects)), names)

	readme, err := os.ReadFile(root + "/packaging/chart/README.md")
	require.NoError(t, err)

	rendered := func(values string) string {
		text, output := tryRender(t, values)
		require.Empty(t, output, values)

		return strings.Join(strings.Fields(text), " ")
	}
	defaults := rendered("")

	for name, effect := range effects {
		assert.Contains(t, string(readme), "`"+name+"`")
		assert.NotContains(t, defaults, effect.want, name)
		assert.Contains(t, rendered(effect.values), effect.want, name)
	}
}

func TestChart_LimitsGoMemory(t *testing.T) {
	t.Parallel()

	for values, want := range map[string]string{
		"resources: null":                                                        "1GiB",
		"resources: {limits: {cpu: 1}}":                                          "1GiB",
		"resources: {limits: {memory: 256Mi}}":                                   "241591910",
		"resources: {limits: {memory: 1.5Gi}}":                                   "1449551462",
		"resources: {limits: {memory: 500M}}":                                    "450000000",
		"resources: {limits: {memory: 268435456}}":                               "241591910",
		"{resources: {limits: {memory: 1Gi}}, env: {GOMEMLIMIT: {value: 2GiB}}}": "2GiB",
	} {
		container := find[appsv1.Deployment](t, render(t, values), "apps/v1", "Deployment").Spec.Template.Spec.Containers[0]
		assert.Equal(t, "GOMEMLIMIT="+want, container.Env[0].Name+"="+container.Env[0].Value, values)
	}
}

// The RBAC of the extension requires the namespace.
func TestChart_RequiresKubeSystem(t *testing.T) {
	t.Parallel()

	_, output := tryRender(t, "", "template", "--namespace=default")
	assert.Contains(t, output, `talos-ccm cannot run in the namespace "default"`)
}

// Otherwise the pods would wait for an image that does not exist.
func TestChart_RequiresImage(t *testing.T) {
	t.Parallel()

	for title, args := range map[string][]string{
		"default":    {"template", "--values=" + root + "/packaging/chart/values.yaml"},
		"of a guide": {"template", "--set=image.repository=registry.example.com/talos-ccm/talos-ccm-pod"},
	} {
		_, output := tryRender(t, "", args...)
		assert.Contains(t, output, "image.repository is the placeholder registry.example.com/talos-ccm/talos-ccm-pod", title)
	}
}

// A drain must not wait for the only pod, or for a pod that is not ready. It ignores pods of a DaemonSet.
func TestChart_DisruptionBudgetNeedsSeveralReplicas(t *testing.T) {
	t.Parallel()

	for values, want := range map[string]bool{"": false, "replicas: 2": true, "{replicas: 3, kind: DaemonSet}": false} {
		objects := render(t, values)
		isBudget := func(o unstructured.Unstructured) bool { return o.GetKind() == "PodDisruptionBudget" }
		assert.Equal(t, want, slices.ContainsFunc(objects, isBudget), values)

		if want {
			budget := find[policyv1.PodDisruptionBudget](t, objects, "policy/v1", "PodDisruptionBudget").Spec
			assert.Equal(t, find[appsv1.Deployment](t, objects, "apps/v1", "Deployment").Spec.Selector, budget.Selector)
			assert.Equal(t, policyv1.PodDisruptionBudgetSpec{
				MaxUnavailable: new(intstr.FromInt32(1)), UnhealthyPodEvictionPolicy: new(policyv1.AlwaysAllow), Selector: budget.Selector,
			}, budget)
		}
	}
}

// Helm refuses a cluster that no supported Talos version runs.
func TestChart_RequiresKubernetesOfSupportedTalos(t *testing.T) {
	t.Parallel()

	oldest := talos112.MinimumKubernetesVersion

	_, output := tryRender(t, "", "template", "--kube-version="+oldest.String())
	assert.Empty(t, output)

	oldest.Minor--
	_, output = tryRender(t, "", "template", "--kube-version="+oldest.String())
	assert.Contains(t, output, "kubeVersion")
}

func TestChart_ProbesUseThePathsOfTalosCCM(t *testing.T) {
	t.Parallel()

	for values, host := range map[string]string{"": "127.0.0.1", "hostNetwork: false": ""} {
		container := find[appsv1.Deployment](t, render(t, values), "apps/v1", "Deployment").Spec.Template.Spec.Containers[0]

		for path, probe := range map[string]*corev1.Probe{"/healthz": container.LivenessProbe, "/readyz": container.ReadinessProbe} {
			require.NotNil(t, probe, path)
			assert.Equal(t, &corev1.HTTPGetAction{Scheme: "HTTPS", Host: host, Port: intstr.FromString("metrics"), Path: path}, probe.HTTPGet)
		}
	}
}

// Flux leaves symbolic links out of the archive of a repository.
func TestChart_HasOnlyRegularFiles(t *testing.T) {
	t.Parallel()

	require.NoError(t, filepath.WalkDir(root+"/packaging/chart", func(path string, entry fs.DirEntry, err error) error {
		assert.True(t, entry.IsDir() || entry.Type().IsRegular(), "%s: %s", path, entry.Type())

		return err
	}))
}

func TestChart_NotesNameTheWorkload(t *testing.T) {
	t.Parallel()

	for kind, secret := range map[string]string{"Deployment": "", "DaemonSet": "mine"} {
		notes, output := tryRender(t, fmt.Sprintf("{kind: %s, talosconfigSecret: %q}", kind, secret), "install", "--dry-run=client")
		assert.Empty(t, output)
		assert.Contains(t, notes, "rollout status "+strings.ToLower(kind)+"/talos-ccm\n")
		assert.Equal(t, secret == "", strings.Contains(notes, "describe serviceaccounts.talos.dev talos-ccm-talos\n"))
	}
}

// The schema of values contains the schema of the configuration.
func TestChart_SchemaHasConfiguration(t *testing.T) {
	t.Parallel()

	var keys, definitions map[string]json.RawMessage

	require.NoError(t, json.Unmarshal(config.Schema, &keys))
	require.NoError(t, json.Unmarshal(keys["$defs"], &definitions))
	maps.DeleteFunc(keys, func(key string, _ json.RawMessage) bool { return strings.HasPrefix(key, "$") })

	var err error

	definitions["Config"], err = json.Marshal(keys)
	require.NoError(t, err)

	text, err := os.ReadFile(schemaFile)
	require.NoError(t, err)

	before, _, _ := strings.Cut(string(text), "\n  \"$defs\": {")
	want := bytes.NewBufferString(before + "\n  \"$defs\": {")

	for i, name := range slices.Sorted(maps.Keys(definitions)) {
		fmt.Fprintf(want, "%s\n    %q: ", []string{"", ","}[min(i, 1)], name)
		require.NoError(t, json.Compact(want, definitions[name]))
	}

	want.WriteString("\n  }\n}\n")

	if *update {
		require.NoError(t, os.WriteFile(schemaFile, want.Bytes(), 0o644))
	} else {
		assert.Equal(t, want.String(), string(text), "run make generate")
	}
}

func TestChart_RejectsInvalidValues(t *testing.T) {
	t.Parallel()

	for values, want := range map[string]string{
		"imag: a":                                    "imag",
		"image: a":                                   "/image",
		"image: {repository: ''}":                    "/image/repository",
		"image: {repository: a@sha256}":              "/image/repository",
		"image: {tag: 'v1@sha256'}":                  "/image/tag",
		"image: {digest: abc}":                       "/image/digest",
		"image: {pullPolicy: Sometimes}":             "/image/pullPolicy",
		"kind: StatefulSet":                          "/kind",
		"replicas: '1'":                              "/replicas",
		"controllers: '*'":                           "/controllers",
		"controllers: []":                            "/controllers",
		"controllers: [route]":                       "/controllers/0",
		"controllers: [node-ipam]":                   "/controllers/0",
		"args: [v=4]":                                "/args/0",
		"args: ['--controllers=*']":                  "/args/0",
		"args: ['--secure-port', '0']":               "/args/0",
		"args: ['--talosconfig=/tmp/a']":             "/args/0",
		"args: ['--secure-port 1']":                  "/args/0",
		"args: ['--secure_port=1']":                  "/args/0",
		"args: ['--machine-socket=/a']":              "/args/0",
		"env: {TALOS_CCM_CONTROLLERS: {value: '*'}}": "/env/TALOS_CCM_CONTROLLERS",
		"env: {A: b}":                                "/env/A",
		"env: {A: {value: b, valueFrom: {}}}":        "/env/A",
		"config: '{}'":                               "/config",
		"config: {transformation: []}":               "transformation",
		"config: {lifecycle: {dryRun: maybe}}":       "/config/lifecycle",
		"config: {transformations: [{label: {}}]}":   "/config/transformations/0",
		"apiServer: {address: a}":                    "/apiServer",
		"apiServer: {port: 65536}":                   "/apiServer/port",
		"nodeSelector: {a: true}":                    "/nodeSelector/a",
		"podLabels: {app.kubernetes.io/name: a}":     "/podLabels/app",
		"resources: []":                              "/resources",
		"resources: {limits: {memory: 512m}}":        "/resources/limits/memory",
		"podMonitor: {enable: true}":                 "/podMonitor",
	} {
		if _, output := tryRender(t, values); !strings.Contains(output, want) {
			t.Errorf("%s: got error %q, want %s", values, output, want)
		}
	}
}

// The chart in the repository has a placeholder for the registry.
func TestChart_PackageIsCompleteAndReproducible(t *testing.T) {
	t.Parallel()

	const image = "registry.example.org:5000/pod:v1.2.3"

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

		assert.Empty(t, cmp.Diff(render(t, "image: {repository: registry.example.org:5000/pod, tag: v1.2.3}"), decode(t, string(manifests))))

		if archives[i], err = os.ReadFile(packages[0]); err != nil {
			t.Fatal(err)
		}
	}

	assert.True(t, bytes.Equal(archives[0], archives[1]), "packages of the same chart differ")
}

// The release workflow signs the digest that make prints.
func TestChart_PushPrintsDigest(t *testing.T) {
	t.Parallel()

	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)

	repository, artifacts := strings.TrimPrefix(server.URL, "http://")+"/a/charts", t.TempDir()

	output, err := runMake("chart", "ARTIFACTS="+artifacts)
	require.NoError(t, err, output)

	output, err = runMake("push", "CHART_REF="+repository, "HELM_FLAGS=--plain-http", "ARTIFACTS="+artifacts)
	require.NoError(t, err, output)
	require.True(t, strings.HasPrefix(output, repository+"/talos-ccm@"), output)

	_, err = crane.Head(output)
	assert.NoError(t, err)
}
