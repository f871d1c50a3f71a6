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
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
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

	require.NoError(s, safe.StateModify(s.Context(), m.State(), document, func(r *runtime.ExtensionServiceConfig) error {
		r.TypedSpec().Files = []runtime.ExtensionServiceConfigFile{{Content: content, MountPath: settings.MountPath}}
		r.TypedSpec().Environment = environment

		return nil
	}))
}

func (s *suite) awaitSite(m *talostest.Machine, value string) {
	s.Helper()

	began := time.Now()

	s.AwaitNode(m.Nodename(), ctest.Labeled(siteLabel, value))
	s.Logf("node %s: site %q after %s", m.Nodename(), value, time.Since(began))
}

// awaitEvent waits for an Event on the machine's Node whose message contains the texts, and that
// "kubectl events --for node/NAME" lists.
func (s *suite) awaitEvent(m *talostest.Machine, reason string, texts ...string) {
	s.Helper()

	event := s.AwaitEvent(m.Nodename(), reason, texts...)
	assert.Equal(s, "v1", event.InvolvedObject.APIVersion)
	assert.Equal(s, "Node", event.InvolvedObject.Kind)
	assert.Equal(s, metav1.NamespaceDefault, event.Namespace)
}

func TestConfiguration_DocumentIsReloaded(t *testing.T) {
	s, self, worker := newCluster(t)

	r := s.start(s.options(self))
	s.awaitInitialized(self, worker)

	for _, value := range []string{"paris", "lyon"} {
		s.configure(self, site(value))
		s.awaitSite(worker, value)
		s.awaitSite(self, value)
	}

	document := runtime.NewExtensionServiceConfigSpec(runtime.NamespaceName, "talos-ccm")
	require.NoError(s, self.State().Destroy(t.Context(), document.Metadata()))
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

	s := newSuite(t)
	state := runtime.NewSecurityStateSpec(runtime.NamespaceName)
	state.TypedSpec().SecureBoot = true

	self := s.controlPlane("cp")
	worker := s.machine(talostest.MachineSpec{Nodename: "worker", Platform: identified("new-facts-worker"), Resources: []resource.Resource{state}})
	silent := s.worker("silent")
	s.register(self, worker, silent)

	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(s, os.WriteFile(file, []byte(site("paris")), 0o600))

	options := s.outside(self)
	options.Framework.KubeCloudShared.CloudProvider.CloudConfigFile = file

	r := s.start(options)
	s.awaitSite(worker, "paris")
	s.awaitSite(silent, "paris")
	require.NoError(s, silent.Stop(t.Context()))

	require.NoError(s, os.WriteFile(file, []byte(bySecureBoot), 0o600))
	s.awaitSite(worker, "secure")
	s.awaitSite(self, "insecure")
	s.AwaitEvent(silent.Nodename(), nodecontroller.ReasonUnreachable)
	s.awaitSite(silent, "paris")

	silent.Start()
	s.awaitSite(silent, "insecure")
	r.alive()
}

func TestConfiguration_InvalidKeepsLastKnownGood(t *testing.T) {
	s := newSuite(t)
	self, worker, late := s.controlPlane("cp"), s.worker("worker"), s.worker("late")
	s.configure(self, site("paris"))
	s.register(self, worker)

	s.start(s.options(self))
	s.awaitInitialized(worker)
	s.awaitSite(worker, "paris")

	s.configure(self, noSuchKey)
	s.awaitEvent(self, ccm.ReasonConfigInvalid, settings.MountPath+":2:", "preferIPv7")

	s.register(late)
	s.awaitInitialized(late)
	s.awaitSite(late, "paris")

	s.configure(self, site("lyon"))
	s.awaitSite(worker, "lyon")
	s.awaitEvent(self, ccm.ReasonConfigValid)
}

// Talos restarts the service when its document changes, even if the document is invalid.
func TestConfiguration_LastKnownGoodSurvivesRestart(t *testing.T) {
	s := newSuite(t)
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
	s := newSuite(t)
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.configure(self, noSuchKey)
	s.register(self, worker)

	s.start(s.options(self))

	s.awaitEvent(self, ccm.ReasonConfigInvalid, "no Node is updated")
	assert.Empty(t, s.holder())
	s.assertUninitialized(worker)

	s.configure(self, site("paris"))
	s.awaitInitialized(self, worker)
	s.awaitSite(worker, "paris")
}

// The nodename may not be available at startup.
func TestConfiguration_InvalidIsReportedOnceNodenameIsKnown(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")
	s.configure(self, noSuchKey)
	s.register(self)
	require.NoError(s, self.State().Destroy(t.Context(), k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID).Metadata()))

	s.start(s.options(self))
	ctest.Eventually(s, "a read of the nodename fails", func() bool {
		return slices.ContainsFunc(self.Calls(), func(call talostest.Call) bool {
			return call.ResourceType == k8s.NodenameType && call.Code == codes.NotFound
		})
	})
	require.NoError(s, self.SetNodename(t.Context(), self.Nodename()))
	s.awaitEvent(self, ccm.ReasonConfigInvalid)
}

func TestConfiguration_WrongMountPathIsReported(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")
	require.NoError(s, self.SetExtensionServiceConfig(t.Context(), "talos-ccm", runtime.ExtensionServiceConfigFile{Content: site("x"), MountPath: "/etc/other.yaml"}))
	s.register(self)

	s.start(s.options(self))
	s.awaitEvent(self, ccm.ReasonConfigInvalid, "/etc/other.yaml", settings.MountPath)
}

func TestConfiguration_CloudConfigFileIsReloaded(t *testing.T) {
	s, self, worker := newCluster(t)

	path := filepath.Join(t.TempDir(), "config.yaml")
	options := s.outside(self)
	options.Framework.KubeCloudShared.CloudProvider.CloudConfigFile = path

	require.NoError(s, os.WriteFile(path, []byte(site("paris")), 0o600))

	r := s.start(options)
	s.awaitInitialized(worker)
	s.awaitSite(worker, "paris")

	for _, content := range []string{noSuchKey, site("lyon")} {
		require.NoError(s, os.WriteFile(path, []byte(content), 0o600))
	}

	s.awaitSite(worker, "lyon")

	require.NoError(s, os.Remove(path))
	require.NoError(s, os.WriteFile(path, []byte("{}"), 0o600))
	s.awaitSite(worker, "")
	r.alive()
}

func TestConfiguration_EnvironmentReplacesProcess(t *testing.T) {
	s := newSuite(t)
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.register(self)

	p := s.spawn(self, openMetrics)
	ctest.Eventually(s, "process leads", p.leads)
	s.awaitInitialized(self)

	// An invalid environment does not replace the process.
	s.configure(self, "", "TALOS_CCM_NO_SUCH_FLAG=1")
	s.awaitEvent(self, ccm.ReasonConfigInvalid, "TALOS_CCM_NO_SUCH_FLAG")

	// Other invalid entries.
	for variable, why := range map[string]string{"GOMEMLIMIT": `"GOMEMLIMIT" is not`, "TALOSCCM_BASE_ENVIRONMENT=[]": "TALOSCCM_BASE_ENVIRONMENT is"} {
		s.configure(self, "", variable)
		s.awaitEvent(self, ccm.ReasonConfigInvalid, why)
	}

	s.configure(self, "", "TALOS_CCM_CONTROLLERS=*,-cloud-node-controller", "GOMEMLIMIT=300MiB")

	ctest.Eventually(s, "process has the environment of the document", func() bool {
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))

		return err == nil && strings.Contains(string(environ), "GOMEMLIMIT=300MiB\x00")
	})
	ctest.Eventually(s, "process leads again", p.leads)

	assert.Equal(t, 1, strings.Count(p.output.String(), "Replacing the process\" reason="))
	assert.Equal(t, 1, strings.Count(p.output.String(), "Started controller\" controller=\"cloud-node-controller\""))

	s.configure(self, "", "TALOS_CCM_CONTROLLERS=*", "GOMEMLIMIT=300MiB")
	s.register(worker)
	s.awaitInitialized(worker)

	// A variable that is removed from the document gets its former value.
	s.configure(self, "")
	ctest.Eventually(s, "process has its former environment", func() bool {
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))

		return err == nil && len(environ) > 0 && !strings.Contains(string(environ), "GOMEMLIMIT=300MiB\x00")
	})
	ctest.Eventually(s, "process leads with its former environment", p.leads)

	select {
	case <-p.ended:
		t.Errorf("process exited: %v", p.err)
	default:
	}

	p.terminate()
}
