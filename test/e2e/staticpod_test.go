//go:build e2e

package e2e_test

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/siderolabs/talos/pkg/machinery/api/machine"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/siderolabs/talos/pkg/machinery/config/types/v1alpha1"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// podsPage has the manifest of the static pod and the patch that are applied here, as they stand there.
const podsPage = "../../docs/guides/run-as-pod.md"

var (
	yamlBlock = regexp.MustCompile("(?s)\n *```yaml\n(.*?\n) *```\n")
	imageLine = regexp.MustCompile(`(?m)^ *image: "?([^\s"]+)"?$`)
)

// yamlBlocks are those of one section of a page, which may be indented as parts of a list.
func yamlBlocks(t *testing.T, path, section string) []string {
	t.Helper()

	page, err := os.ReadFile(path)
	require.NoError(t, err)

	_, text, found := strings.Cut(string(page), "\n## "+section+"\n")
	if !found {
		t.Fatalf("%s has no section %q", path, section)
	}

	text, _, _ = strings.Cut(text, "\n## ")

	var contents []string

	for _, match := range yamlBlock.FindAllStringSubmatch(text, -1) {
		contents = append(contents, match[1])
	}

	return contents
}

// renderedChart is what the Helm chart renders with its default values.
func renderedChart(t *testing.T) string {
	t.Helper()

	artifacts := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "make", "--directory=../..", "chart", "ARTIFACTS="+artifacts)
	// Drop the flags of the make that runs this test.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=")

	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make chart: %v\n%s", err, output)
	}

	manifests, err := os.ReadFile(filepath.Join(artifacts, "chart/talos-ccm.yaml"))
	require.NoError(t, err)

	return string(manifests)
}

// pushImage has the machines find our image under the name that a manifest gives it.
func pushImage(t *testing.T, manifest string) {
	t.Helper()

	match := imageLine.FindStringSubmatch(manifest)
	if match == nil {
		t.Fatal("the manifest names no image")
	}

	index, err := layout.ImageIndexFromPath(filepath.Join(artifacts(version), "oci-pod"))
	require.NoError(t, err)

	require.NoError(t, bed.Push(t.Context(), match[1], index))
}

// Those who hold the lease are called by their machine if they are the extension, and by their host's name if they are pods.
const (
	theExtension = "talos-ccm_"
	thePod       = "talos-cp_"
)

// heldBy returns an error unless an instance whose identity begins with prefix holds and renews the lease.
func heldBy(prefix string) func(context.Context) error {
	return func(ctx context.Context) error {
		lease, err := getLease(ctx)
		if err == nil && !strings.HasPrefix(ptr.Deref(lease.Spec.HolderIdentity, ""), prefix) {
			err = fmt.Errorf("the lease is not held by %s…: %v", prefix, lease.Spec)
		}

		return errors.Join(err, working(ctx))
	}
}

// bothCurrent returns an error unless the process on the control plane watches both machines.
func bothCurrent(ctx context.Context) error {
	return metricIs(ctx, `talosccm_machines{condition="Current"}`, "2")
}

// control has Talos start or stop the extension on the control plane.
func control(t *testing.T, action string) {
	t.Helper()
	shell(t, fmt.Sprintf("talosctl -n %s service %s %s", bed.ControlPlane.Address(), service, action))
}

// patchMachine patches the configuration of m as a user would do it.
func patchMachine(t *testing.T, m *talos.Machine, mode, patch string) {
	t.Helper()

	path := filepath.Join(t.TempDir(), "patch.yaml")
	require.NoError(t, os.WriteFile(path, []byte(patch), 0o600))

	shell(t, fmt.Sprintf("talosctl -n %s patch machineconfig --mode %s --patch @%s", m.Address(), mode, path))
}

// editMachine changes the control plane's configuration in a way that takes no reboot.
func editMachine(t *testing.T, change func(*v1alpha1.MachineConfig)) {
	t.Helper()

	ctx := context.WithoutCancel(t.Context()) // tests tidy up, too

	api, err := bed.ControlPlane.TalosClient(ctx)
	require.NoError(t, err)
	defer api.Close() //nolint:errcheck // no call is in flight

	changed, err := activeConfig(t).Provider().PatchV1Alpha1(func(c *v1alpha1.Config) error {
		change(c.MachineConfig)

		return nil
	})
	require.NoError(t, err)

	text, err := changed.Bytes()
	require.NoError(t, err)

	_, err = api.ApplyConfiguration(ctx, &machine.ApplyConfigurationRequest{Data: text, Mode: machine.ApplyConfigurationRequest_NO_REBOOT})
	require.NoError(t, err)
}

// podWorks sees the pod take the lease that the extension lets go, and do what the extension does.
func podWorks(t *testing.T, address string) {
	t.Helper()

	control(t, "stop")
	t.Cleanup(func() { control(t, "start") })
	t.Cleanup(func() { showPod(t) })

	t.Logf("the pod held the lease %s after the extension was stopped", eventually(t, heldBy(thePod)).Round(time.Millisecond))
	reachesTheNode(t, bed.Worker, netip.MustParsePrefix(address))
}

// extensionWorksAgain sees the extension take the lease once the pod is gone.
func extensionWorksAgain(t *testing.T, address string) {
	t.Helper()

	eventually(t, noPods)
	control(t, "start")

	t.Logf("the extension held the lease %s after it was started", eventually(t, heldBy(theExtension)).Round(time.Millisecond))
	reachesTheNode(t, bed.Worker, netip.MustParsePrefix(address))
}

// ourPods are the pods of the manifests.
const ourPods = "app.kubernetes.io/name=talos-ccm"

func noPods(ctx context.Context) error {
	pods, err := client.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: ourPods})
	if err == nil && len(pods.Items) > 0 {
		err = fmt.Errorf("%s is still there", pods.Items[0].Name)
	}

	return err
}

// showPod logs what became of the pod, and its log.
func showPod(t *testing.T) {
	t.Helper()

	ctx := context.WithoutCancel(t.Context())

	pods, err := client.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: ourPods})
	if err != nil {
		t.Log(err)

		return
	}

	for _, pod := range pods.Items {
		log, err := client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
		t.Logf("%s is %s on %q\n%s(%v)", pod.Name, pod.Status.Phase, pod.Spec.NodeName, log, err)

		if t.Failed() {
			t.Logf("%v %v", pod.Status.Conditions, pod.Status.ContainerStatuses)
		}
	}
}

// filled puts the credentials that podsPage tells to make in the places that it has for them.
func filled(t *testing.T, manifest string) string {
	t.Helper()

	path := filepath.Join(t.TempDir(), "talosconfig")
	shell(t, fmt.Sprintf("talosctl -n %s config new %s --roles os:reader --crt-ttl 8760h", bed.ControlPlane.Address(), path))

	talosconfig, err := clientconfig.Open(path)
	require.NoError(t, err)

	year := int64((365 * 24 * time.Hour).Seconds())

	request, err := client.CoreV1().ServiceAccounts(metav1.NamespaceSystem).CreateToken(t.Context(), extension.Name,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &year}}, metav1.CreateOptions{})
	require.NoError(t, err)

	kubernetes, err := bed.RESTConfig()
	require.NoError(t, err)

	reader := talosconfig.Contexts[talosconfig.Context]

	return strings.NewReplacer(
		"TALOS_CA", reader.CA, "TALOS_CRT", reader.Crt, "TALOS_KEY", reader.Key,
		"KUBERNETES_CA", base64.StdEncoding.EncodeToString(kubernetes.CAData), "TOKEN", request.Status.Token,
	).Replace(manifest)
}

func TestDocs_StaticPodWorks(t *testing.T) {
	eventually(t, bothInitialized)
	eventually(t, heldBy(theExtension))

	manifest := yamlBlocks(t, podsPage, "Static pod")[0]
	pushImage(t, manifest)

	// Talos in a container cannot reboot by itself.
	patchMachine(t, bed.ControlPlane, "staged", filled(t, manifest))
	t.Cleanup(func() { editMachine(t, func(m *v1alpha1.MachineConfig) { m.MachinePods = nil }) })

	require.NoError(t, bed.ControlPlane.Reboot(t.Context()))

	apiAnswers(t, bed.ControlPlane)
	podWorks(t, "203.0.113.30/32")

	editMachine(t, func(m *v1alpha1.MachineConfig) { m.MachinePods = nil })
	extensionWorksAgain(t, "203.0.113.31/32")
}

// eachObject calls do with a client for the kind of each object of a manifest, and with the object, until it has no error any more.
func eachObject(t *testing.T, manifest string, do func(context.Context, dynamic.ResourceInterface, *unstructured.Unstructured) error) {
	t.Helper()

	rest, err := bed.RESTConfig()
	require.NoError(t, err)

	kubernetes, err := dynamic.NewForConfig(rest)
	require.NoError(t, err)

	documents := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(manifest)))

	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return
		}

		var object unstructured.Unstructured
		require.NoError(t, errors.Join(err, utilyaml.Unmarshal(document, &object.Object)))

		// Helm's manifests begin with a separator, and the extension of the machine has applied the RBAC.
		if object.Object == nil || object.GetAnnotations()[extension.RBACVersionAnnotation] != "" {
			continue
		}

		kind := object.GroupVersionKind()
		resource := schema.GroupVersionResource{Group: kind.Group, Version: kind.Version, Resource: strings.ToLower(kind.Kind) + "s"}

		eventually(t, func(ctx context.Context) error {
			return do(ctx, kubernetes.Resource(resource).Namespace(object.GetNamespace()), &object)
		})
	}
}

func TestDocs_DeploymentWorks(t *testing.T) {
	eventually(t, bothInitialized)
	eventually(t, heldBy(theExtension))

	access, deployment := yamlBlocks(t, podsPage, "Deployment")[0], renderedChart(t)
	pushImage(t, deployment)

	patchMachine(t, bed.ControlPlane, "no-reboot", access)
	t.Cleanup(func() {
		editMachine(t, func(m *v1alpha1.MachineConfig) { m.MachineFeatures.KubernetesTalosAPIAccessConfig = nil })
	})

	remove := func() {
		eachObject(t, deployment, func(ctx context.Context, kind dynamic.ResourceInterface, object *unstructured.Unstructured) error {
			err := kind.Delete(ctx, object.GetName(), metav1.DeleteOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}

			return err
		})
	}
	t.Cleanup(remove)

	// Talos registers its ServiceAccount CRD only when kubernetesTalosAPIAccess is enabled.
	eachObject(t, deployment, func(ctx context.Context, kind dynamic.ResourceInterface, object *unstructured.Unstructured) error {
		_, err := kind.Apply(ctx, object.GetName(), object, metav1.ApplyOptions{FieldManager: "e2e"})

		return err
	})

	podWorks(t, "203.0.113.32/32")

	remove()
	extensionWorksAgain(t, "203.0.113.33/32")
}
