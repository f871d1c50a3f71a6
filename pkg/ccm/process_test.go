package ccm_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// binary builds the command on first use and returns its path.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "talos-ccm-test-")
	if err != nil {
		return "", err
	}

	path := filepath.Join(dir, "talos-ccm")
	built = dir

	return path, builder.Executable("github.com/talos-ccm/talos-ccm/cmd/talos-ccm", path)
})

// built is the directory of binary; empty before it is built.
var built string

func removeBinary() {
	if built != "" {
		_ = os.RemoveAll(built)
	}
}

// process is talos-ccm as a child process. All its directories are below root.
type process struct {
	suite  *suite
	root   string
	port   int
	pid    int
	output *lockedBuffer
	enter  func() error // called on the thread that starts the process
	ended  chan struct{}
	err    error // once ended is closed
}

// lockedBuffer is a buffer for concurrent reads and writes.
type lockedBuffer struct {
	mu   sync.Mutex
	data bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.data.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.data.String()
}

// spawn starts the process on a machine. It is killed when the test ends.
func (s *suite) spawn(on *talostest.Machine, flags ...string) *process {
	s.Helper()

	path, err := binary()
	require.NoError(s, err)

	return s.spawnExecutable(path, on, flags...)
}

// spawnExecutable is spawn for any version of talos-ccm.
func (s *suite) spawnExecutable(path string, on *talostest.Machine, flags ...string) *process {
	s.Helper()

	p := s.newProcess()
	argv := p.argv(append([]string{"--machine-socket=" + on.Socket(), "--run-dir=" + filepath.Join(p.root, "run")}, flags...)...)
	p.start(on.Nodename(), exec.Command(path, argv[1:]...))

	return p
}

func (s *suite) newProcess() *process {
	s.Helper()

	p := &process{suite: s, root: s.TempDir(), port: reservedPort(s), output: &lockedBuffer{}, enter: func() error { return nil }, ended: make(chan struct{})}

	for _, name := range []string{"run", "tmp", "home", "work"} {
		require.NoError(s, os.Mkdir(filepath.Join(p.root, name), 0o700))
	}

	return p
}

// argv returns the command line with the given flags and the common ones.
func (p *process) argv(flags ...string) []string {
	p.suite.Helper()

	path, err := binary()
	require.NoError(p.suite, err)

	return append([]string{path, "--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(p.port), "--permit-port-sharing", "-v=2"}, flags...)
}

// start starts the process with the environment of cmd, HOME and TMPDIR.
func (p *process) start(name string, cmd *exec.Cmd) {
	s := p.suite
	s.Helper()

	cmd.Dir = filepath.Join(p.root, "work")
	cmd.Env = append(cmd.Env, "HOME="+filepath.Join(p.root, "home"), "TMPDIR="+filepath.Join(p.root, "tmp"))
	cmd.Stdout, cmd.Stderr = p.output, p.output

	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}

	// The child is killed if this process dies.
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL

	started := make(chan error)

	go func() {
		// Pdeathsig refers to the thread that started the child.
		goruntime.LockOSThread()

		err := p.enter()
		if err == nil {
			err = cmd.Start()
		}

		started <- err

		if err == nil {
			p.err = cmd.Wait()
			close(p.ended)
		}
	}()

	require.NoError(s, <-started)

	p.pid = cmd.Process.Pid

	s.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.ended

		if s.Failed() {
			s.Logf("output of talos-ccm on %s:\n%s", name, p.output.String())
		}
	})
}

// signal sends a signal to the process unless it has exited.
func (p *process) signal(sig syscall.Signal) {
	select {
	case <-p.ended:
	default:
		_ = syscall.Kill(p.pid, sig) //nolint:errcheck // it may have exited
	}
}

// terminate stops the process as Talos does.
func (p *process) terminate() {
	p.suite.Helper()

	began := time.Now()

	p.signal(syscall.SIGTERM)

	ctest.Receive(p.suite, p.ended, "talos-ccm exits after SIGTERM")
	assert.NoError(p.suite, p.err)
	assert.LessOrEqual(p.suite, time.Since(began), stopLimit)
	p.suite.Logf("exited %s after SIGTERM", time.Since(began))
}

// get sends a request without credentials to the secure port.
func (p *process) get(path string) (code int, body string, err error) {
	client := &http.Client{
		Transport: &http.Transport{
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // self-signed, on loopback
			DisableKeepAlives: true,
		},
		Timeout: ctest.Timeout / 2,
	}

	response, err := client.Get(fmt.Sprintf("https://127.0.0.1:%d%s", p.port, path))
	if err != nil {
		return 0, "", err
	}

	defer response.Body.Close()

	data, err := io.ReadAll(response.Body)

	return response.StatusCode, string(data), err
}

// metric returns the sum of a metric over all series with any of the given labels; 0 if there are none or the process
// does not respond.
func (p *process) metric(name string, labels ...string) float64 {
	_, body, err := p.get("/metrics")
	if err != nil {
		return 0
	}

	sum := 0.0

	for line := range strings.Lines(body) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")

		selected := func(label string) bool { return strings.Contains(series, label) }
		if base, _, _ := strings.Cut(series, "{"); base != name || len(labels) > 0 && !slices.ContainsFunc(labels, selected) {
			continue
		}

		n, err := strconv.ParseFloat(value, 64)
		if err == nil {
			sum += n
		}
	}

	return sum
}

func (p *process) leads() bool { return p.metric("leader_election_master_status") == 1 }

const openMetrics = "--authorization-always-allow-paths=/healthz,/metrics"

func TestLeaderElection_HandsOverBetweenInstances(t *testing.T) {
	s := newSuite(t)
	first, second, worker := s.controlPlane("cp-1"), s.controlPlane("cp-2"), s.worker("worker")
	s.register(first, second, worker)

	// The third instance waits until the lease expires.
	flags := []string{openMetrics, "--leader-elect-lease-duration=8s", "--leader-elect-renew-deadline=6s", "--leader-elect-retry-period=1s"}
	leader := s.spawn(first, flags...)
	ctest.Eventually(s, "first instance leads", leader.leads)
	s.awaitInitialized(first, second, worker)

	follower := s.spawn(second, flags...)
	ctest.Eventually(s, "second instance runs for leader election", func() bool {
		return strings.Contains(follower.output.String(), "Attempting to acquire leader lease")
	})
	s.move(worker, "by-the-first")

	assert.False(t, follower.leads())
	assert.Zero(t, follower.metric("workqueue_work_duration_seconds_count", `name="cloud-node"`))
	assert.Equal(t, 1, worker.Connections())

	before := s.holder()
	leader.terminate()

	assert.NotEqual(t, before, s.holder())

	began := time.Now()

	ctest.Eventually(s, "second instance leads", follower.leads)
	t.Logf("lease acquired %s after it was released", time.Since(began))
	s.move(worker, "by-the-second")

	third := s.spawn(first, flags...)
	ctest.Eventually(s, "third instance runs for leader election", func() bool {
		return strings.Contains(third.output.String(), "Attempting to acquire leader lease")
	})
	follower.signal(syscall.SIGKILL)
	<-follower.ended

	began = time.Now()

	ctest.Eventually(s, "third instance leads", third.leads)
	t.Logf("lease acquired %s after its holder was killed", time.Since(began))
	s.move(worker, "by-the-third")
	third.terminate()
}

// Talos runs one instance per machine and restarts it, so an instance can reacquire the lease of one that was killed.
func TestLeaderElection_RestartedInstanceReacquiresLease(t *testing.T) {
	s, self, worker := newCluster(t)

	// The lease lasts longer than any wait of the test.
	flags := []string{openMetrics, "--leader-elect-lease-duration=600s", "--leader-elect-renew-deadline=500s"}

	first := s.spawn(self, flags...)
	ctest.Eventually(s, "first process leads", first.leads)
	first.signal(syscall.SIGKILL)
	<-first.ended

	second := s.spawn(self, flags...)
	ctest.Eventually(s, "second process leads", second.leads)
	s.move(worker, "by-the-second")
	second.terminate()
}

// The process that exits is restarted by Talos.
func TestProcess_ExitsAboveItsMemoryCeiling(t *testing.T) {
	s := newSuite(t)
	first, second, worker := s.controlPlane("cp-1"), s.controlPlane("cp-2"), s.worker("worker")
	s.register(first, second, worker)

	// A process that leads needs more.
	small := s.spawn(first, "--memory-ceiling=8Mi")

	ctest.Receive(s, small.ended, "first instance exits")
	require.ErrorContains(t, small.err, "exit status 1")
	assert.Regexp(t, `(?m)^Error: \d+ MiB of memory are in use, more than the ceiling of 8 MiB; see --memory-ceiling$`, small.output.String())
	assert.Empty(t, s.holder())

	other := s.spawn(second, openMetrics)
	ctest.Eventually(s, "second instance leads", other.leads)
	s.awaitInitialized(first, second, worker)
	other.terminate()
}

// traces returns the forms in which the admin's private key could appear: base64 as in the kubeconfig, each line of
// the PEM document, and DER.
func traces(t *testing.T, keyPEM []byte) map[string][]byte {
	t.Helper()

	found := map[string][]byte{
		"base64 of the PEM": []byte(base64.StdEncoding.EncodeToString(keyPEM)),
	}

	var body strings.Builder

	for line := range strings.Lines(string(keyPEM)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "-----") {
			found["line "+strconv.Itoa(len(found))+" of the PEM"] = []byte(line)
			body.WriteString(line)
		}
	}

	der, err := base64.StdEncoding.DecodeString(body.String())
	if err != nil || len(found) < 2 {
		t.Fatalf("admin key is not PEM: %v", err)
	}

	found["the DER"] = der

	return found
}

// search looks for traces in the output of the process, the files below its root and its open files.
func (p *process) search(ctx context.Context, traces map[string][]byte) (found []string, files int) {
	look := func(path string, data []byte) {
		files++

		for name, trace := range traces {
			if bytes.Contains(data, trace) {
				found = append(found, name+" in "+path)
			}
		}
	}

	look("its output", []byte(p.output.String()))

	// Files may be created and deleted during the search.
	_ = filepath.WalkDir(p.root, func(path string, entry fs.DirEntry, err error) error { //nolint:errcheck // the callback returns no error
		if err == nil && entry.Type().IsRegular() && ctx.Err() == nil {
			if data, err := os.ReadFile(path); err == nil {
				look(path, data)
			}
		}

		return nil
	})

	descriptors := fmt.Sprintf("/proc/%d/fd", p.pid)
	entries, _ := os.ReadDir(descriptors) //nolint:errcheck // none if the process has exited

	for _, entry := range entries {
		path := filepath.Join(descriptors, entry.Name())

		// Follow the link to read deleted and in-memory files as well.
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			if data, err := os.ReadFile(path); err == nil {
				look(path, data)
			}
		}
	}

	return found, files
}

func TestProcess_NeverWritesAdminKey(t *testing.T) {
	s, self, worker := newCluster(t)

	wanted := traces(t, s.Kube.Config().KeyData)

	p := s.spawn(self)

	// Verify that the search works.
	decoy := filepath.Join(p.root, "work", "decoy")
	require.NoError(s, os.WriteFile(decoy, s.Kube.Config().KeyData, 0o600))

	if found, _ := p.search(t.Context(), wanted); len(found) == 0 {
		t.Fatal("search does not find the key in a decoy file")
	}

	require.NoError(s, os.Remove(decoy))

	// Search continuously until the last Node is initialized.
	var (
		done  = make(chan struct{})
		group sync.WaitGroup
		found []string
		files int
	)

	group.Go(func() {
		_ = wait.PollUntilContextCancel(t.Context(), time.Millisecond, true, func(ctx context.Context) (bool, error) { //nolint:errcheck // ends with done
			now, n := p.search(ctx, wanted)
			found, files = append(found, now...), max(files, n)

			select {
			case <-done:
				return true, nil
			default:
				return false, nil
			}
		})
	})

	s.awaitInitialized(self, worker)
	// A new admin kubeconfig is handled in the same way.
	tokens := calls(self, "/cosi.resource.State/Get", "KubernetesSecrets.secrets.talos.dev")
	require.NoError(s, self.SetLocalhostAdminKubeconfig(t.Context(), append(s.Kube.Kubeconfig(), "\n# again\n"...)))
	ctest.Eventually(s, "new admin kubeconfig is used", func() bool {
		return calls(self, "/cosi.resource.State/Get", "KubernetesSecrets.secrets.talos.dev") > tokens
	})
	s.move(worker, "moved")
	close(done)
	group.Wait()

	// At least one search runs after the last write.
	last, n := p.search(t.Context(), wanted)
	found, files = append(found, last...), max(files, n)

	assert.Empty(t, slices.Compact(found), "places with the admin key")

	assert.GreaterOrEqual(t, files, 3, "token, kubeconfig, output")

	for _, name := range []string{"kubeconfig", "token"} {
		info, err := os.Stat(filepath.Join(p.root, "run", name))
		require.NoError(s, err)

		assert.Equal(t, fs.FileMode(0o600), info.Mode().Perm(), name)
	}

	p.terminate()
}

// getAs sends a request with the credentials of config to the secure port.
func (p *process) getAs(config *rest.Config, path string) (code int) {
	p.suite.Helper()

	config = rest.CopyConfig(config)
	config.CAData, config.Insecure, config.Timeout = nil, true, ctest.Timeout/2

	client, err := rest.HTTPClientFor(config)
	require.NoError(p.suite, err)

	defer client.CloseIdleConnections()

	response, err := client.Get(fmt.Sprintf("https://127.0.0.1:%d%s", p.port, path))
	require.NoError(p.suite, err)
	require.NoError(p.suite, response.Body.Close())

	return response.StatusCode
}

var hexDump = regexp.MustCompile(`(?m)^\s*[0-9a-f]{8}  ([0-9a-f ]+?) +\|`)

// readable returns a log followed by what its hex dumps contain.
func readable(t *testing.T, log string) string {
	t.Helper()

	var dumped []byte

	for _, line := range hexDump.FindAllStringSubmatch(log, -1) {
		data, err := hex.DecodeString(strings.ReplaceAll(line[1], " ", ""))
		require.NoError(t, err)

		dumped = append(dumped, data...)
	}

	return log + string(dumped)
}

// Bodies of requests are protobuf, which client-go logs as hex dumps.
func TestProcess_NeverLogsCredentials(t *testing.T) {
	s, self, worker := newCluster(t)

	p := s.spawn(self, "-v=10")
	s.awaitInitialized(self, worker)

	_, err := s.Client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "prometheus"}}, metav1.CreateOptions{})
	require.NoError(t, err)

	request, err := s.Client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).CreateToken(t.Context(), "prometheus", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	require.NoError(t, err)

	// It is authenticated, which needs a TokenReview, but not authorized.
	require.Equal(t, http.StatusForbidden, p.getAs(s.Kube.TokenConfig(request.Status.Token), "/metrics"))

	token, err := os.ReadFile(filepath.Join(p.root, "run", "token"))
	require.NoError(t, err)

	p.terminate()

	unwanted := traces(t, s.Kube.Config().KeyData)
	unwanted["the ServiceAccount token"], unwanted["the client's token"] = token, []byte(request.Status.Token)
	unwanted["a token"], unwanted["a key"] = []byte("eyJhbGciOi"), []byte("PRIVATE KEY")

	log := readable(t, p.output.String())
	for name, trace := range unwanted {
		assert.Contains(t, readable(t, hex.Dump(trace)), string(trace), "search for %s does not work", name)
		assert.False(t, strings.Contains(log, string(trace)), "log contains %s", name)
	}

	for _, path := range []string{"/serviceaccounts/talos-ccm/token", "/tokenreviews"} {
		assert.True(t, strings.Contains(log, path), "log has no request to %s", path)
	}
}

func TestMetrics_AreExported(t *testing.T) {
	s, self, worker := newCluster(t)

	p := s.spawn(self, openMetrics)
	s.awaitInitialized(self, worker)

	// The metrics are updated after the Nodes.
	for _, name := range []string{
		"talosccm_machines", "talosccm_api_requests_total", "talosccm_api_request_duration_seconds_count",
	} {
		ctest.Eventually(s, "metric exists: "+name, func() bool { return p.metric(name) > 0 })
	}

	ctest.Eventually(s, "two machines are current", func() bool { return p.metric("talosccm_machines", `condition="Current"`) == 2 })
	ctest.Eventually(s, "two Nodes were initialized", func() bool { return p.metric("talosccm_node_initialization_duration_seconds_count") == 2 })

	syncs := p.metric("workqueue_work_duration_seconds_count", `name="cloud-node"`)
	restarts := p.metric("talosccm_watch_restarts_total")

	s.move(worker, "moved")
	worker.BreakStreams()
	ctest.Eventually(s, "metrics increase", func() bool {
		return p.metric("workqueue_work_duration_seconds_count", `name="cloud-node"`) > syncs && p.metric("talosccm_watch_restarts_total") > restarts
	})

	require.NoError(s, worker.Stop(t.Context()))
	ctest.Eventually(s, "one machine is counted as unreachable", func() bool {
		return p.metric("talosccm_machines", `condition="Unreachable"`) == 1 && p.metric("talosccm_machines", `condition="Current"`) == 1 &&
			p.metric("talosccm_api_request_errors_total") > 0
	})
	p.terminate()
}

// Alerts sum the gauges of all instances, so a former leader must not export them.
func TestMetrics_GaugesEndWithLeadership(t *testing.T) {
	s := newSuite(t)
	first, second := s.controlPlane("cp-1"), s.controlPlane("cp-2")
	s.register(first, second)

	gauges := []string{"talosccm_machines", "talosccm_ipam_blocked"}
	flags := []string{openMetrics, "--controllers=*,nodeipam", "--allocate-node-cidrs", "--cluster-cidr=10.99.0.0/16"}

	p := s.spawn(first, flags...)
	ctest.Eventually(s, "first instance leads and exports the gauges", func() bool {
		return p.leads() && !slices.ContainsFunc(gauges, func(gauge string) bool { return p.metric(gauge) == 0 })
	})

	other := s.spawn(second, flags...)
	require.NoError(s, first.SetStage(t.Context(), runtime.MachineStageRebooting))
	ctest.Eventually(s, "second instance leads", other.leads)

	require.NoError(s, first.SetStage(t.Context(), runtime.MachineStageRunning))
	ctest.Eventually(s, "first instance serves metrics again", func() bool { return p.metric("talosccm_build_info") == 1 })

	for _, gauge := range gauges {
		assert.Zero(t, p.metric(gauge), gauge)
	}

	p.terminate()
	other.terminate()
}

func TestMetrics_RequireAuthorization(t *testing.T) {
	s := newSuite(t)
	self := s.controlPlane("cp")
	s.register(self)

	p := s.spawn(self)
	s.awaitInitialized(self)

	code, _, err := p.get("/metrics")
	require.NoError(t, err)
	assert.Contains(t, []int{http.StatusForbidden, http.StatusUnauthorized}, code)

	// Unlike a token, a client certificate is of no use to another process that listens on the port.
	ctest.Eventually(s, "a client certificate is accepted", func() bool { return p.getAs(s.Kube.Config(), "/metrics") == http.StatusOK })

	code, body, err := p.get("/healthz")
	require.NoError(t, err)
	assert.Equal(t, http.StatusOK, code, body)
	p.terminate()
}

// controllers returns the controllers that /healthz lists.
func (p *process) controllers() []string {
	_, body, err := p.get("/healthz?verbose")
	if err != nil {
		return nil
	}

	var names []string

	for _, match := range regexp.MustCompile(`\[\+\](\S+) ok`).FindAllStringSubmatch(body, -1) {
		if name := match[1]; strings.HasSuffix(name, "-controller") {
			names = append(names, name)
		}
	}

	return names
}

func TestControllers_EnabledByFlags(t *testing.T) {
	const (
		node, lifecycle    = "cloud-node-controller", "cloud-node-lifecycle-controller"
		csr, ipam, service = "certificatesigningrequest-approving-controller", "node-ipam-controller", "service-lb-controller"
	)

	for _, test := range []struct {
		name  string
		flags []string
		want  []string
	}{
		{"by default", nil, []string{csr, node, lifecycle}},
		{"by alias", []string{"--controllers=node-csr-approval"}, []string{csr}},
		{"the first entry decides", []string{"--controllers=-cloud-node,*,cloud-node-controller"}, []string{csr, lifecycle}},
		{"without controllers of other managers", []string{"--controllers=*,-cloud-node-lifecycle,-service,-node-route-controller"}, []string{csr, node}},
		{"without CSR approval", []string{"--controllers=*,-node-csr-approval"}, []string{node, lifecycle}},
		{"with node IPAM", []string{"--controllers=*,nodeipam", "--allocate-node-cidrs"}, []string{csr, node, lifecycle, ipam}},
		{"with load balancers", []string{"--controllers=*,service"}, []string{csr, node, lifecycle, service}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSuite(t)
			p := s.spawn(s.controlPlane("cp"), append(test.flags, openMetrics)...)

			var got []string

			ctest.Eventually(s, fmt.Sprintf("controllers %v run", test.want), func() bool {
				got = p.controllers()
				slices.Sort(got)

				return len(got) >= len(test.want)
			})

			assert.Equal(t, test.want, got)

			p.terminate()
		})
	}
}

// The help of --controllers lists the accepted and the disabled-by-default controllers.
func TestHelp_ListsControllers(t *testing.T) {
	path, err := binary()
	require.NoError(t, err)

	output, err := exec.CommandContext(t.Context(), path, "--help").CombinedOutput()
	require.NoError(t, err)

	help := strings.Join(strings.Fields(string(output)), " ")

	listed := func(title string) []string {
		match := regexp.MustCompile(title + `: ([a-z, -]+?)(?: Disabled| \(default)`).FindStringSubmatch(help)
		require.NotNil(t, match)

		names := strings.Split(match[1], ", ")
		slices.Sort(names)

		return names
	}

	for _, name := range listed("All controllers") {
		options := withControllers(t, name)
		options.Framework.KubeCloudShared.AllocateNodeCIDRs = name == "node-ipam-controller"
		assert.NoError(t, options.Validate())
	}

	want := []string{"node-ipam-controller", "service-lb-controller"}
	assert.Equal(t, want, listed("Disabled-by-default controllers"))
}
