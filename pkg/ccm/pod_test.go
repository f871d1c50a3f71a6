package ccm_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// podEnclosure runs a command with the directory $1 mounted where a kubelet mounts the ServiceAccount volume.
const podEnclosure = `set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$(readlink -f /var/run)"
mkdir -p /var/run/secrets/kubernetes.io/serviceaccount
mount --bind "$1" /var/run/secrets/kubernetes.io/serviceaccount
shift
exec "$@"`

// volume is a directory that is updated like a Secret or ConfigMap volume: replacing a symbolic link changes all
// files at once.
type volume string

func (v volume) path(name string) string { return filepath.Join(string(v), name) }

// write replaces the volume's content.
func (v volume) write(s *suite, content map[string][]byte) {
	s.Helper()

	version, err := os.MkdirTemp(string(v), "..version-")
	require.NoError(s, err)

	for name, data := range content {
		require.NoError(s, os.WriteFile(filepath.Join(version, name), data, 0o600))

		if err := os.Symlink(filepath.Join("..data", name), v.path(name)); !os.IsExist(err) {
			require.NoError(s, err)
		}
	}

	require.NoError(s, os.Symlink(filepath.Base(version), v.path("..data_new")))
	require.NoError(s, os.Rename(v.path("..data_new"), v.path("..data")))
}

// readerTalosconfig returns the talosconfig that Talos writes to the Secret of a talos.dev ServiceAccount with the
// role os:reader.
func (s *suite) readerTalosconfig() []byte {
	s.Helper()

	config, err := s.Talos.Talosconfig(string(role.Reader))
	require.NoError(s, err)

	data, err := config.Bytes()
	require.NoError(s, err)

	return data
}

// serviceAccount applies the RBAC of the extension and returns a directory with the token and CA of its
// ServiceAccount, as in a pod.
func (s *suite) serviceAccount(controlPlane *talostest.Machine) string {
	s.Helper()

	socket, err := talosapi.OpenSocket(controlPlane.Socket())
	require.NoError(s, err)

	defer socket.Close() //nolint:errcheck // no call is in flight

	dir := s.TempDir()
	ctx, made := context.WithTimeout(s.Context(), ctest.Timeout)

	bootstrap.New(socket.Admin, dir, func(string) bool { return true }, clock.RealClock{}).Run(ctx, made)
	require.NoError(s, os.WriteFile(filepath.Join(dir, "ca.crt"), s.Kube.Config().CAData, 0o600))

	require.FileExists(s, filepath.Join(dir, "token"))
	s.awaitRights()

	return dir
}

// awaitRights waits until the API server has observed the RBAC of the extension. It checks one permission of each
// binding.
func (s *suite) awaitRights() {
	s.Helper()

	for _, right := range []authorizationv1.ResourceAttributes{
		{Verb: "list", Resource: "nodes"},
		{Verb: "create", Group: "authentication.k8s.io", Resource: "tokenreviews"},
		{Verb: "create", Resource: "events", Namespace: "default"},
		{Verb: "list", Resource: "events", Namespace: "default"},
		{Verb: "create", Group: "coordination.k8s.io", Resource: "leases", Namespace: leaseNamespace},
		{Verb: "get", Resource: "configmaps", Namespace: "kube-system", Name: "extension-apiserver-authentication"},
	} {
		ctest.Eventually(s, fmt.Sprintf("ServiceAccount may %s %s", right.Verb, right.Resource), func() bool { return s.isAllowed(right) })
	}
}

// isAllowed reports whether the ServiceAccount of the extension has a permission.
func (s *suite) isAllowed(right authorizationv1.ResourceAttributes) bool {
	s.Helper()

	user := "system:serviceaccount:" + extension.Namespace + ":" + extension.ServiceAccount
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: user, ResourceAttributes: &right}}

	return ctest.Ask(s, func(ctx context.Context) (*authorizationv1.SubjectAccessReview, error) {
		return s.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	}).Status.Allowed
}

// spawnPod starts the process as in a pod, with the ServiceAccount in dir.
func (s *suite) spawnPod(dir string, flags ...string) *process {
	s.Helper()

	server, err := url.Parse(s.Kube.Config().Host)
	require.NoError(s, err)

	host, port, err := net.SplitHostPort(server.Host)
	require.NoError(s, err)

	p := s.newProcess()
	cmd := exec.Command("/bin/sh", append([]string{"-c", podEnclosure, "sh", dir}, p.argv(flags...)...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "KUBERNETES_SERVICE_HOST=" + host, "KUBERNETES_SERVICE_PORT=" + port}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	p.start("a pod", cmd)

	return p
}

func TestPod_RunsWithServiceAccount(t *testing.T) {
	s, self, worker := newCluster(t)

	secret, configMap := volume(t.TempDir()), volume(t.TempDir())
	secret.write(s, map[string][]byte{"config": s.readerTalosconfig()})
	configMap.write(s, map[string][]byte{"config.yaml": []byte(site("paris"))})

	p := s.spawnPod(s.serviceAccount(self), openMetrics, "--talosconfig="+secret.path("config"), "--cloud-config="+configMap.path("config.yaml"))
	s.awaitInitialized(self, worker)
	s.awaitSite(worker, "paris")
	ctest.Eventually(s, "pod leads", p.leads)

	// The RBAC of the extension is sufficient.
	assert.NotContains(t, p.output.String(), "forbidden")

	configMap.write(s, map[string][]byte{"config.yaml": []byte(site("lyon"))})
	s.awaitSite(worker, "lyon")

	// The former talosconfig is no longer valid for any machine.
	require.NoError(s, s.Talos.RotateCA(talostest.DropOldCA))
	worker.BreakStreams()
	ctest.Eventually(s, "worker is unreachable", func() bool { return p.metric("talosccm_machines", `condition="Unreachable"`) == 1 })

	secret.write(s, map[string][]byte{"config": s.readerTalosconfig()})
	s.move(worker, "renewed")
	p.terminate()

	assert.Empty(t, s.holder())
}

// Deployments wait for readiness. A pod is ready once it can lead, also while another instance leads.
func TestPod_IsReadyWithConfigurationAndAPIServer(t *testing.T) {
	s := newSuite(t)
	s.leaseTo("another instance", time.Hour)

	config := s.Kube.Config()
	proxy := ctest.NewProxy(s, config)
	proxy.Hangs.Store(true)

	secret, configMap := volume(t.TempDir()), volume(t.TempDir())
	secret.write(s, map[string][]byte{"config": s.readerTalosconfig(), "kubeconfig": kube.Kubeconfig(config)})
	configMap.write(s, map[string][]byte{"config.yaml": []byte(site("paris"))})

	var p *process

	start := func() {
		p = s.newProcess()
		argv := p.argv("--talosconfig="+secret.path("config"), "--kubeconfig="+secret.path("kubeconfig"), "--cloud-config="+configMap.path("config.yaml"),
			"--authentication-skip-lookup") // would wait for the API server
		p.start("a pod", exec.Command(argv[0], argv[1:]...))
	}
	await := func(state, path string, want int) {
		s.Helper()
		ctest.Eventually(s, fmt.Sprintf("%s: %s responds with %d", state, path, want), func() bool {
			code, _, err := p.get(path)

			return err == nil && code == want
		})
	}

	start()
	awaitCandidacy(p, 1)
	await("API server does not respond", "/healthz", http.StatusOK)
	await("API server does not respond", "/readyz", http.StatusInternalServerError)

	proxy.Hangs.Store(false)
	await("standby", "/readyz", http.StatusOK)

	invalid := func() bool { return strings.Contains(p.output.String(), "Invalid configuration") }

	configMap.write(s, map[string][]byte{"config.yaml": []byte(noSuchKey)})
	ctest.Eventually(s, "configuration is invalid", invalid)
	await("last-known-good configuration is in force", "/readyz", http.StatusOK)
	p.terminate()

	start()
	ctest.Eventually(s, "configuration is invalid", invalid)
	await("no configuration is in force", "/healthz", http.StatusOK)
	await("no configuration is in force", "/readyz", http.StatusInternalServerError)

	configMap.write(s, map[string][]byte{"config.yaml": []byte(site("lyon"))})
	await("configuration is fixed", "/readyz", http.StatusOK)
	p.terminate()

	assert.Equal(t, "another instance", s.holder())
}

func TestManager_RequiresKubeconfigOutsideCluster(t *testing.T) {
	// Not parallel, because it changes the environment.
	s := prepared(beds.NewSerialSuite(t), talostest.Options{})
	options := s.options(s.controlPlane("cp"))
	options.MachineSocket, options.RunDir = "", ""
	options.Talosconfig = filepath.Join(t.TempDir(), "talosconfig")
	require.NoError(s, os.WriteFile(options.Talosconfig, s.readerTalosconfig(), 0o600))

	t.Setenv("KUBERNETES_SERVICE_HOST", "")

	r := s.launch(options)

	ctest.Receive(s, r.ended, "talos-ccm ends")
	assert.ErrorContains(t, r.err, "--kubeconfig")
	assert.ErrorContains(t, r.err, "KUBERNETES_SERVICE_HOST")

	options.Framework.Master = "https://127.0.0.1:6443"
	assert.ErrorContains(t, options.Validate(), "--master")
}
