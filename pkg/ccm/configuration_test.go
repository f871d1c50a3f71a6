package ccm_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

const siteLabel = "example.com/site"

// site returns a configuration that labels every Node.
func site(value string) string {
	return fmt.Sprintf("transformations:\n  - name: site\n    labels:\n      %s: %s\n", siteLabel, value)
}

// noSuchKey is a configuration with an unknown key in line 2.
const noSuchKey = "global:\n  preferIPv7: true\n"

// configure replaces the machine's ExtensionServiceConfig document.
func (s *suite) configure(m *talostest.Machine, content string, environment ...string) {
	s.Helper()

	document := runtime.NewExtensionServiceConfigSpec(runtime.NamespaceName, "talos-ccm")

	s.require(safe.StateModify(s.Context(), m.State(), document, func(r *runtime.ExtensionServiceConfig) error {
		r.TypedSpec().Files = []runtime.ExtensionServiceConfigFile{{Content: content, MountPath: settings.MountPath}}
		r.TypedSpec().Environment = environment

		return nil
	}))
}

func (s *suite) awaitSite(m *talostest.Machine, value string) {
	s.Helper()

	began := time.Now()

	s.await(m.Nodename(), "labeled with site "+value, func(n *corev1.Node) bool { return n.Labels[siteLabel] == value })
	s.Logf("node %s: site %q after %s", m.Nodename(), value, time.Since(began))
}

// awaitEvent waits for an Event on the machine's Node that "kubectl events --for node/NAME" lists, and returns its
// message.
func (s *suite) awaitEvent(m *talostest.Machine, reason string) (message string) {
	s.Helper()

	selector := fields.Set{
		"involvedObject.apiVersion": "v1", "involvedObject.kind": "Node", "involvedObject.name": m.Nodename(), "reason": reason,
	}.String()

	s.eventually(fmt.Sprintf("node %s has an Event %s", m.Nodename(), reason), func() bool {
		list, err := s.client.CoreV1().Events(metav1.NamespaceDefault).List(s.Context(), metav1.ListOptions{FieldSelector: selector})
		if err != nil || len(list.Items) == 0 {
			return false
		}

		message = list.Items[0].Message

		return true
	})

	return message
}

func TestConfiguration_DocumentIsReloaded(t *testing.T) {
	s := newSuite(t, "document-", talostest.Options{})
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.register(self, worker)

	r := s.start(s.options(self))
	s.awaitInitialized(self, worker)

	for _, value := range []string{"paris", "lyon"} {
		s.configure(self, site(value))
		s.awaitSite(worker, value)
		s.awaitSite(self, value)
	}

	document := runtime.NewExtensionServiceConfigSpec(runtime.NamespaceName, "talos-ccm")
	s.require(self.State().Destroy(t.Context(), document.Metadata()))
	s.awaitSite(worker, "")
	r.alive()
}

func TestConfiguration_NewFactsAreRead(t *testing.T) {
	const bySecureBoot = `transformations:
  - name: secure
    nodeSelector: [{matchExpressions: [{key: secureBoot, operator: In, values: ["true"]}]}]
    labels: {example.com/site: secure}
  - name: insecure
    nodeSelector: [{matchExpressions: [{key: secureBoot, operator: NotIn, values: ["true"]}]}]
    labels: {example.com/site: insecure}
`

	s := newSuite(t, "new-facts-", talostest.Options{})
	state := runtime.NewSecurityStateSpec(runtime.NamespaceName)
	state.TypedSpec().SecureBoot = true

	self := s.controlPlane("cp")
	worker := s.machine(talostest.MachineSpec{Nodename: "worker", Platform: identified("new-facts-worker"), Resources: []resource.Resource{state}})
	s.register(self, worker)

	file := filepath.Join(t.TempDir(), "config.yaml")
	s.require(os.WriteFile(file, []byte(site("paris")), 0o600))

	options := s.outside(self)
	options.Framework.KubeCloudShared.CloudProvider.CloudConfigFile = file

	r := s.start(options)
	s.awaitSite(worker, "paris")

	s.require(os.WriteFile(file, []byte(bySecureBoot), 0o600))
	s.awaitSite(worker, "secure")
	s.awaitSite(self, "insecure")
	r.alive()
}

func TestConfiguration_InvalidKeepsLastKnownGood(t *testing.T) {
	s := newSuite(t, "bad-config-", talostest.Options{})
	self, worker, late := s.controlPlane("cp"), s.worker("worker"), s.worker("late")
	s.configure(self, site("paris"))
	s.register(self, worker)

	s.start(s.options(self))
	s.awaitInitialized(worker)
	s.awaitSite(worker, "paris")

	s.configure(self, noSuchKey)

	message := s.awaitEvent(self, ccm.ReasonConfigInvalid)
	for _, part := range []string{settings.MountPath + ":2:", "preferIPv7"} {
		if !strings.Contains(message, part) {
			t.Errorf("Event message %q does not contain %q", message, part)
		}
	}

	s.register(late)
	s.awaitInitialized(late)
	s.awaitSite(late, "paris")

	s.configure(self, site("lyon"))
	s.awaitSite(worker, "lyon")
	s.awaitEvent(self, ccm.ReasonConfigValid)
}

// Talos restarts the service when its document changes, even if the document is invalid.
func TestConfiguration_LastKnownGoodSurvivesRestart(t *testing.T) {
	s := newSuite(t, "outlives-", talostest.Options{})
	self, late := s.controlPlane("cp"), s.worker("late")
	s.configure(self, site("paris"))
	s.register(self)

	options := s.options(self)
	options.StateDir = t.TempDir()

	first := s.launch(options)
	s.awaitSite(self, "paris")
	first.stop()

	s.configure(self, noSuchKey)
	s.register(late)

	again := s.options(self)
	again.StateDir = options.StateDir

	s.start(again)
	s.awaitEvent(self, ccm.ReasonConfigInvalid)
	s.awaitInitialized(late)
	s.awaitSite(late, "paris")
}

func TestConfiguration_InvalidAtFirstStartBlocksWrites(t *testing.T) {
	s := newSuite(t, "bad-start-", talostest.Options{})
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.configure(self, noSuchKey)
	s.register(self, worker)

	s.start(s.options(self))

	if message := s.awaitEvent(self, ccm.ReasonConfigInvalid); !strings.Contains(message, "no Node is updated") {
		t.Errorf("Event message %q does not state the consequence", message)
	}

	if holder := s.holder(); holder != "" {
		t.Errorf("lease is held by %s, want no leader election without a configuration", holder)
	}

	if n := s.get(worker); !tainted(n) || n.Spec.ProviderID != "" {
		t.Errorf("Node was written without a configuration: %s", describe(n))
	}

	s.configure(self, site("paris"))
	s.awaitInitialized(self, worker)
	s.awaitSite(worker, "paris")
}

// The nodename may not be available at startup.
func TestConfiguration_InvalidIsReportedOnceNodenameIsKnown(t *testing.T) {
	s := newSuite(t, "late-name-", talostest.Options{})
	self := s.controlPlane("cp")
	s.configure(self, noSuchKey)
	s.register(self)
	s.require(self.State().Destroy(t.Context(), k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID).Metadata()))

	s.start(s.options(self))
	s.eventually("a read of the nodename fails", func() bool {
		return slices.ContainsFunc(self.Calls(), func(call talostest.Call) bool {
			return call.ResourceType == k8s.NodenameType && call.Code == codes.NotFound
		})
	})
	s.require(self.SetNodename(t.Context(), self.Nodename()))
	s.awaitEvent(self, ccm.ReasonConfigInvalid)
}

func TestConfiguration_WrongMountPathIsReported(t *testing.T) {
	s := newSuite(t, "elsewhere-", talostest.Options{})
	self := s.controlPlane("cp")
	s.require(self.SetExtensionServiceConfig(t.Context(), "talos-ccm", runtime.ExtensionServiceConfigFile{Content: site("x"), MountPath: "/etc/other.yaml"}))
	s.register(self)

	s.start(s.options(self))

	if message := s.awaitEvent(self, ccm.ReasonConfigInvalid); !strings.Contains(message, "/etc/other.yaml") || !strings.Contains(message, settings.MountPath) {
		t.Errorf("Event message %q does not contain both paths", message)
	}
}

func TestConfiguration_CloudConfigFileIsReloaded(t *testing.T) {
	s := newSuite(t, "config-file-", talostest.Options{})
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.register(self, worker)

	talosconfig, err := s.talos.Talosconfig(string(role.Reader))
	s.require(err)

	folder := t.TempDir()
	path := filepath.Join(folder, "config.yaml")
	options := s.options(self)
	options.MachineSocket, options.RunDir = "", ""
	options.Talosconfig = filepath.Join(folder, "talosconfig")
	options.Framework.Generic.ClientConnection.Kubeconfig = filepath.Join(folder, "kubeconfig")
	options.Framework.KubeCloudShared.CloudProvider.CloudConfigFile = path

	s.require(talosconfig.Save(options.Talosconfig))
	s.require(os.WriteFile(options.Framework.Generic.ClientConnection.Kubeconfig, s.kube.Kubeconfig(), 0o600))
	s.require(os.WriteFile(path, []byte(site("paris")), 0o600))

	r := s.start(options)
	s.awaitInitialized(worker)
	s.awaitSite(worker, "paris")

	for _, content := range []string{noSuchKey, site("lyon")} {
		s.require(os.WriteFile(path, []byte(content), 0o600))
	}

	s.awaitSite(worker, "lyon")

	s.require(os.Remove(path))
	s.require(os.WriteFile(path, []byte("{}"), 0o600))
	s.awaitSite(worker, "")
	r.alive()
}

func TestConfiguration_EnvironmentReplacesProcess(t *testing.T) {
	s := newSuite(t, "environment-", talostest.Options{})
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.register(self)

	p := s.spawn(self, openMetrics)
	s.eventually("process leads", p.leads)
	s.awaitInitialized(self)

	// An invalid environment does not replace the process.
	s.configure(self, "", "TALOS_CCM_NO_SUCH_FLAG=1")

	if message := s.awaitEvent(self, ccm.ReasonConfigInvalid); !strings.Contains(message, "TALOS_CCM_NO_SUCH_FLAG") {
		t.Errorf("Event message %q does not contain the variable", message)
	}

	// Other invalid entries.
	for variable, why := range map[string]string{"GOMEMLIMIT": `"GOMEMLIMIT" is not`, "TALOSCCM_BASE_ENVIRONMENT=[]": "TALOSCCM_BASE_ENVIRONMENT is"} {
		s.configure(self, "", variable)
		s.eventually("Event contains the problem", func() bool {
			return slices.ContainsFunc(s.events(self, ccm.ReasonConfigInvalid), func(e corev1.Event) bool { return strings.Contains(e.Message, why) })
		})
	}

	s.configure(self, "", "TALOS_CCM_CONTROLLERS=*,-cloud-node-controller", "GOMEMLIMIT=300MiB")

	s.eventually("process has the environment of the document", func() bool {
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))

		return err == nil && strings.Contains(string(environ), "GOMEMLIMIT=300MiB\x00")
	})
	s.eventually("process leads again", p.leads)

	if strings.Count(p.output.String(), "Started controller\" controller=\"cloud-node-controller\"") != 1 {
		t.Error("controller that the document disables was started")
	}

	s.configure(self, "", "TALOS_CCM_CONTROLLERS=*", "GOMEMLIMIT=300MiB")
	s.register(worker)
	s.awaitInitialized(worker)

	// A variable that is removed from the document gets its former value.
	s.configure(self, "")
	s.eventually("process has its former environment", func() bool {
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))

		return err == nil && len(environ) > 0 && !strings.Contains(string(environ), "GOMEMLIMIT=300MiB\x00")
	})
	s.eventually("process leads once more", p.leads)

	select {
	case <-p.ended:
		t.Errorf("process exited: %v", p.err)
	default:
	}

	p.terminate()
}
