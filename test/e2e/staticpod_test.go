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
	"path/filepath"
	"regexp"
	"strconv"
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

// podsPage and staticPodPage are the paths of the guides with the patch and the manifest that the tests apply.
const (
	podsPage      = "../../docs/guides/run-as-pod.md"
	staticPodPage = "../../docs/guides/static-pod.md"
)

var (
	yamlBlock = regexp.MustCompile("(?s)\n *```yaml\n(.*?\n) *```\n")
	imageLine = regexp.MustCompile(`(?m)^ *image: "?([^\s"]+)"?$`)
)

// yamlBlocks returns the YAML blocks in a section of a page. Blocks may be indented.
func yamlBlocks(t *testing.T, path, section string) []string {
	t.Helper()

	page, err := os.ReadFile(path)
	require.NoError(t, err)

	_, text, found := strings.Cut(string(page), "\n## "+section+"\n")
	if !found {
		t.Fatalf("%s has no section %q", path, section)
	}

	text, _, _ = strings.Cut(text, "\n## ")

	var blocks []string

	for _, match := range yamlBlock.FindAllStringSubmatch(text, -1) {
		blocks = append(blocks, match[1])
	}

	return blocks
}

// renderedChart returns the manifests that the Helm chart renders with its default values, except for the image.
func renderedChart(t *testing.T) string {
	t.Helper()

	dir := t.TempDir()
	require.NoError(t, runMake(t.Context(), "chart", "ARTIFACTS="+dir, "POD_REF=registry.example.org/talos-ccm/talos-ccm-pod:v0.1.0"))

	manifests, err := os.ReadFile(filepath.Join(dir, "chart/talos-ccm.yaml"))
	require.NoError(t, err)

	return string(manifests)
}

// pushImage pushes talos-ccm's image to the registry of the bed under the name in a manifest.
func pushImage(t *testing.T, manifest string) {
	t.Helper()

	match := imageLine.FindStringSubmatch(manifest)
	if match == nil {
		t.Fatal("the manifest has no image")
	}

	index, err := layout.ImageIndexFromPath(filepath.Join(artifactsDir(version), "oci-pod"))
	require.NoError(t, err)

	require.NoError(t, bed.Push(t.Context(), match[1], index))
}

// Prefixes of holder identities: the extension's is derived from its machine, a pod's from the host name.
const (
	extensionHolder = "talos-ccm_"
	podHolder       = "talos-cp-1_"
)

// checkLeaseHeldBy returns a condition: an instance whose identity begins with prefix holds and renews the lease.
func checkLeaseHeldBy(prefix string) func(context.Context) error {
	return func(ctx context.Context) error {
		lease, err := getLease(ctx)
		if err == nil && !strings.HasPrefix(ptr.Deref(lease.Spec.HolderIdentity, ""), prefix) {
			err = fmt.Errorf("the lease is not held by %s*: %v", prefix, lease.Spec)
		}

		return errors.Join(err, checkLeaseRenewed(ctx))
	}
}

// checkMachinesCurrent returns an error unless the instance on the control plane watches all machines.
func checkMachinesCurrent(ctx context.Context) error {
	return checkMetric(ctx, `talosccm_machines{condition="Current"}`, strconv.Itoa(len(bed.Machines())))
}

// controlService starts or stops the extension on m with talosctl.
func controlService(t *testing.T, m *talos.Machine, action string) {
	t.Helper()
	shell(t, fmt.Sprintf("talosctl -n %s service %s %s", m.Address(), service, action))
}

// patchMachine patches the configuration of m with talosctl.
func patchMachine(t *testing.T, m *talos.Machine, mode, patch string) {
	t.Helper()

	path := filepath.Join(t.TempDir(), "patch.yaml")
	require.NoError(t, os.WriteFile(path, []byte(patch), 0o600))

	shell(t, fmt.Sprintf("talosctl -n %s patch machineconfig --mode %s --patch @%s", m.Address(), mode, path))
}

// editControlPlane changes the control plane's configuration without a reboot. Cleanup functions can use it.
func editControlPlane(t *testing.T, change func(*v1alpha1.MachineConfig)) {
	t.Helper()

	ctx := context.WithoutCancel(t.Context())

	api, err := controlPlane.TalosClient(ctx)
	require.NoError(t, err)
	defer api.Close() //nolint:errcheck // all calls have ended

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

// failOverToPod stops the extension, and requires that the pod acquires the lease and reconciles Nodes.
func failOverToPod(t *testing.T, address string) {
	t.Helper()

	controlService(t, controlPlane, "stop")
	t.Cleanup(func() { controlService(t, controlPlane, "start") })
	t.Cleanup(func() { logPods(t) })

	t.Logf("the pod held the lease %s after the extension was stopped", eventually(t, checkLeaseHeldBy(podHolder)).Round(time.Millisecond))
	requireAddressUpdates(t, worker, netip.MustParsePrefix(address))
}

// failBackToExtension waits until the pod is deleted, starts the extension, and requires that it acquires the lease and
// reconciles Nodes.
func failBackToExtension(t *testing.T, address string) {
	t.Helper()

	eventually(t, checkNoPods)
	controlService(t, controlPlane, "start")

	t.Logf("the extension held the lease %s after it was started", eventually(t, checkLeaseHeldBy(extensionHolder)).Round(time.Millisecond))
	requireAddressUpdates(t, worker, netip.MustParsePrefix(address))
}

// podSelector selects the pods of talos-ccm.
const podSelector = "app.kubernetes.io/name=talos-ccm"

// checkNoPods returns an error unless all pods of talos-ccm are deleted.
func checkNoPods(ctx context.Context) error {
	pods, err := client.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: podSelector})
	if err == nil && len(pods.Items) > 0 {
		err = fmt.Errorf("pod %s is not deleted", pods.Items[0].Name)
	}

	return err
}

// logPods logs the status and the logs of talos-ccm's pods.
func logPods(t *testing.T) {
	t.Helper()

	ctx := context.WithoutCancel(t.Context())

	pods, err := client.CoreV1().Pods(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: podSelector})
	if err != nil {
		t.Log(err)

		return
	}

	for _, pod := range pods.Items {
		log, err := client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
		t.Logf("pod %s on node %q is %s\n%s(%v)", pod.Name, pod.Spec.NodeName, pod.Status.Phase, log, err)

		if t.Failed() {
			t.Logf("%v %v", pod.Status.Conditions, pod.Status.ContainerStatuses)
		}
	}
}

// insertCredentials creates the credentials that staticPodPage describes, and replaces the placeholders in the manifest.
func insertCredentials(t *testing.T, manifest string) string {
	t.Helper()

	path := filepath.Join(t.TempDir(), "talosconfig")
	shell(t, fmt.Sprintf("talosctl -n %s config new %s --roles os:reader --crt-ttl 8760h", controlPlane.Address(), path))

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
	eventually(t, checkNodesInitialized)
	eventually(t, checkLeaseHeldBy(extensionHolder))

	manifest := yamlBlocks(t, staticPodPage, "Static pod")[0]
	pushImage(t, manifest)

	// Talos in a container cannot reboot itself to apply the patch.
	patchMachine(t, controlPlane, "staged", insertCredentials(t, manifest))
	t.Cleanup(func() { editControlPlane(t, func(m *v1alpha1.MachineConfig) { m.MachinePods = nil }) }) //nolint:staticcheck // the field that the page uses

	require.NoError(t, controlPlane.Reboot(t.Context()))

	awaitTalosAPI(t, controlPlane)
	failOverToPod(t, "203.0.113.30/32")

	editControlPlane(t, func(m *v1alpha1.MachineConfig) { m.MachinePods = nil }) //nolint:staticcheck // the field that the page uses
	failBackToExtension(t, "203.0.113.31/32")
}

// forEachObject calls do for each object of a manifest, with a client for its resource, and retries until it succeeds.
func forEachObject(t *testing.T, manifest string, do func(context.Context, dynamic.ResourceInterface, *unstructured.Unstructured) error) {
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

		// Helm's manifests begin with a separator. The extension has already applied the RBAC.
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
	eventually(t, checkNodesInitialized)
	eventually(t, checkLeaseHeldBy(extensionHolder))

	access, deployment := yamlBlocks(t, podsPage, "Deployment")[0], renderedChart(t)
	pushImage(t, deployment)

	patchMachine(t, controlPlane, "no-reboot", access)
	t.Cleanup(func() {
		editControlPlane(t, func(m *v1alpha1.MachineConfig) { m.MachineFeatures.KubernetesTalosAPIAccessConfig = nil }) //nolint:staticcheck // the field that the page uses
	})

	remove := func() {
		forEachObject(t, deployment, func(ctx context.Context, kind dynamic.ResourceInterface, object *unstructured.Unstructured) error {
			err := kind.Delete(ctx, object.GetName(), metav1.DeleteOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}

			return err
		})
	}
	t.Cleanup(remove)

	// Talos registers its ServiceAccount CRD only when kubernetesTalosAPIAccess is enabled.
	forEachObject(t, deployment, func(ctx context.Context, kind dynamic.ResourceInterface, object *unstructured.Unstructured) error {
		_, err := kind.Apply(ctx, object.GetName(), object, metav1.ApplyOptions{FieldManager: "e2e"})

		return err
	})

	failOverToPod(t, "203.0.113.32/32")

	remove()
	failBackToExtension(t, "203.0.113.33/32")
}
