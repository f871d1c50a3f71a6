package ccm_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
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
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// binary is the command, built when the first test needs it.
var binary = sync.OnceValues(func() (string, error) {
	folder, err := os.MkdirTemp("", "talos-ccm-test-")
	if err != nil {
		return "", err
	}

	path := filepath.Join(folder, "talos-ccm")

	output, err := exec.Command("go", "build", "-o", path, "github.com/talos-ccm/talos-ccm/cmd/talos-ccm").CombinedOutput()
	if err != nil {
		return path, fmt.Errorf("build talos-ccm: %w\n%s", err, output)
	}

	built = folder

	return path, nil
})

// built is the folder of binary, once there is one.
var built string

func removeBinary() {
	if built != "" {
		_ = os.RemoveAll(built)
	}
}

// process is talos-ccm as a child process. It knows no other folders than those below root.
type process struct {
	suite  *suite
	root   string
	port   int
	pid    int
	output *lockedBuffer
	ended  chan struct{}
	err    error // once ended is closed
}

// lockedBuffer is a buffer that is written while it is read.
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

// spawn starts the process on the machine. When the test ends it is killed if it still runs.
func (s *suite) spawn(on *talostest.Machine, flags ...string) *process {
	s.Helper()

	p := s.newProcess()
	argv := p.argv(append([]string{"--machine-socket=" + on.Socket(), "--run-dir=" + filepath.Join(p.root, "run")}, flags...)...)
	p.start(on.Nodename(), exec.Command(argv[0], argv[1:]...))

	return p
}

func (s *suite) newProcess() *process {
	s.Helper()

	p := &process{suite: s, root: s.TempDir(), port: reservedPort(s.T), output: &lockedBuffer{}, ended: make(chan struct{})}

	for _, name := range []string{"run", "tmp", "home", "work"} {
		s.require(os.Mkdir(filepath.Join(p.root, name), 0o700))
	}

	return p
}

// argv is the command with the flags, and with those that every process here has.
func (p *process) argv(flags ...string) []string {
	p.suite.Helper()

	path, err := binary()
	p.suite.require(err)

	return append([]string{path, "--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(p.port), "--permit-port-sharing", "-v=2"}, flags...)
}

// start starts the process, which knows the variables that the command has, and of others only where its folders are.
func (p *process) start(name string, cmd *exec.Cmd) {
	s := p.suite
	s.Helper()

	cmd.Dir = filepath.Join(p.root, "work")
	cmd.Env = append(cmd.Env, "HOME="+filepath.Join(p.root, "home"), "TMPDIR="+filepath.Join(p.root, "tmp"))
	cmd.Stdout, cmd.Stderr = p.output, p.output

	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}

	// It dies with this process, however that ends.
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL

	started := make(chan error)

	go func() {
		// The death of a parent is that of the thread.
		goruntime.LockOSThread()

		err := cmd.Start()
		started <- err

		if err == nil {
			p.err = cmd.Wait()
			close(p.ended)
		}
	}()

	s.require(<-started)

	p.pid = cmd.Process.Pid

	s.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.ended

		if s.Failed() {
			s.Logf("output of talos-ccm on %s:\n%s", name, p.output.String())
		}
	})
}

// signal sends the process a signal, unless it has ended.
func (p *process) signal(sig syscall.Signal) {
	select {
	case <-p.ended:
	default:
		_ = syscall.Kill(p.pid, sig) //nolint:errcheck // it may have ended just now
	}
}

// terminate ends the process as Talos does.
func (p *process) terminate() {
	p.suite.Helper()

	began := time.Now()

	p.signal(syscall.SIGTERM)

	select {
	case <-p.ended:
	case <-time.After(stopLimit):
		p.suite.Fatalf("talos-ccm still runs %s after SIGTERM", stopLimit)
	}

	if p.err != nil {
		p.suite.Errorf("talos-ccm ended after SIGTERM with: %v", p.err)
	}

	p.suite.Logf("ended %s after SIGTERM", time.Since(began))
}

// get asks the process's secure port, as somebody without credentials.
func (p *process) get(path string) (code int, body string, err error) {
	client := &http.Client{
		Transport: &http.Transport{
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // self-signed, on loopback
			DisableKeepAlives: true,
		},
		Timeout: patience / 2,
	}

	response, err := client.Get(fmt.Sprintf("https://127.0.0.1:%d%s", p.port, path))
	if err != nil {
		return 0, "", err
	}

	defer response.Body.Close()

	data, err := io.ReadAll(response.Body)

	return response.StatusCode, string(data), err
}

// metric is the sum over all series of a metric of the process; 0 if there are none or the process does not answer.
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

func TestTwoInstances(t *testing.T) {
	s := newSuite(t, "two-", talostest.Options{})
	first, second, worker := s.controlPlane("cp-1"), s.controlPlane("cp-2"), s.worker("worker")
	s.register(first, second, worker)

	leader := s.spawn(first, openMetrics)
	s.eventually("the first instance leads", leader.leads)
	s.awaitInitialized(first, second, worker)

	follower := s.spawn(second, openMetrics)
	s.eventually("the second instance stands for election", func() bool {
		return strings.Contains(follower.output.String(), "Attempting to acquire leader lease")
	})
	s.move(worker, "by-the-first")

	if follower.leads() || follower.metric("talosccm_node_syncs_total") > 0 || worker.Connections() != 1 {
		t.Errorf("the follower leads: %t, has looked at %v Nodes; the worker has %d connections, want one",
			follower.leads(), follower.metric("talosccm_node_syncs_total"), worker.Connections())
	}

	before := s.holder()
	leader.terminate()

	if s.holder() == before {
		t.Error("the first instance ended and still holds the lease")
	}

	began := time.Now()

	s.eventually("the second instance leads", follower.leads)
	t.Logf("the lease was taken over %s after it was released", time.Since(began))
	s.move(worker, "by-the-second")

	third := s.spawn(first, openMetrics)
	s.eventually("the third instance stands for election", func() bool {
		return strings.Contains(third.output.String(), "Attempting to acquire leader lease")
	})
	follower.signal(syscall.SIGKILL)
	<-follower.ended

	began = time.Now()

	s.eventually("the third instance leads", third.leads)
	t.Logf("the lease was taken over %s after its holder was killed", time.Since(began))
	s.move(worker, "by-the-third")
	third.terminate()
}

// Talos runs one of us per machine and starts it again when it has ended: nobody else can hold the lease of one that was killed.
func TestKilledInstanceTakesItsLeaseUpAgain(t *testing.T) {
	s := newSuite(t, "killed-", talostest.Options{})
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.register(self, worker)

	// The lease lasts longer than the test is patient.
	flags := []string{openMetrics, "--leader-elect-lease-duration=600s", "--leader-elect-renew-deadline=500s"}

	first := s.spawn(self, flags...)
	s.eventually("the first process leads", first.leads)
	first.signal(syscall.SIGKILL)
	<-first.ended

	second := s.spawn(self, flags...)
	s.eventually("the second process leads", second.leads)
	s.move(worker, "by-the-second")
	second.terminate()
}

// traces are what would give the administrator's private key away: the key as the kubeconfig has it, as PEM, as DER and each line of it.
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
		t.Fatalf("the administrator's key is not PEM: %v", err)
	}

	found["the DER"] = der

	return found
}

// search looks for traces in all files of the process: those below its root, those it has open, and its output.
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

	// Files come and go while we look.
	_ = filepath.WalkDir(p.root, func(path string, entry fs.DirEntry, err error) error { //nolint:errcheck // the callback returns none
		if err == nil && entry.Type().IsRegular() && ctx.Err() == nil {
			if data, err := os.ReadFile(path); err == nil {
				look(path, data)
			}
		}

		return nil
	})

	descriptors := fmt.Sprintf("/proc/%d/fd", p.pid)
	entries, _ := os.ReadDir(descriptors) //nolint:errcheck // none if the process has ended

	for _, entry := range entries {
		path := filepath.Join(descriptors, entry.Name())

		// Through the link, so that deleted files and such in memory are read too.
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			if data, err := os.ReadFile(path); err == nil {
				look(path, data)
			}
		}
	}

	return found, files
}

func TestAdminKubeconfigIsNeverWritten(t *testing.T) {
	s := newSuite(t, "secret-", talostest.Options{})
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.register(self, worker)

	wanted := traces(t, s.kube.Config().KeyData)

	p := s.spawn(self)

	// The search itself is searched for, or it would find nothing for the wrong reason.
	decoy := filepath.Join(p.root, "work", "decoy")
	s.require(os.WriteFile(decoy, s.kube.Config().KeyData, 0o600))

	if found, _ := p.search(t.Context(), wanted); len(found) == 0 {
		t.Fatal("the search does not find a key that is there")
	}

	s.require(os.Remove(decoy))

	// All the time from the start to the last Node, not only in the end.
	var (
		done  = make(chan struct{})
		group sync.WaitGroup
		found []string
		files int
	)

	group.Go(func() {
		_ = wait.PollUntilContextCancel(t.Context(), time.Millisecond, true, func(ctx context.Context) (bool, error) { //nolint:errcheck // ends by done
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
	// Issued anew, the kubeconfig goes the same way once more.
	tokens := calls(self, "/cosi.resource.State/Get", "KubernetesSecrets.secrets.talos.dev")
	s.require(self.SetLocalhostAdminKubeconfig(t.Context(), append(s.kube.Kubeconfig(), "\n# again\n"...)))
	s.eventually("the new kubeconfig is used", func() bool {
		return calls(self, "/cosi.resource.State/Get", "KubernetesSecrets.secrets.talos.dev") > tokens
	})
	s.move(worker, "moved")
	close(done)
	group.Wait()

	// Once more, whatever the scheduler has let the other searches see.
	last, n := p.search(t.Context(), wanted)
	found, files = append(found, last...), max(files, n)

	if len(found) > 0 {
		t.Errorf("found the administrator's key: %s", strings.Join(slices.Compact(found), "; "))
	}

	if files < 3 {
		t.Errorf("searched %d files at most, want at least the token, the kubeconfig and the output", files)
	}

	for _, name := range []string{"kubeconfig", "token"} {
		info, err := os.Stat(filepath.Join(p.root, "run", name))
		s.require(err)

		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %s", name, info.Mode())
		}
	}

	p.terminate()
}

func TestMetrics(t *testing.T) {
	s := newSuite(t, "metrics-", talostest.Options{})
	self, worker := s.controlPlane("cp"), s.worker("worker")
	s.register(self, worker)

	p := s.spawn(self, openMetrics)
	s.awaitInitialized(self, worker)

	// Nodes show what was done to them before it is counted.
	for _, name := range []string{
		"talosccm_machines", "talosccm_api_requests_total", "talosccm_api_request_duration_seconds_count", "talosccm_node_syncs_total",
	} {
		s.eventually("there is a metric "+name, func() bool { return p.metric(name) > 0 })
	}

	s.eventually("two machines are current", func() bool { return p.metric("talosccm_machines", `condition="Current"`) == 2 })
	s.eventually("two Nodes were initialized", func() bool { return p.metric("talosccm_node_initialization_duration_seconds_count") == 2 })

	changed := p.metric("talosccm_node_syncs_total", `result="changed"`)
	restarts := p.metric("talosccm_watch_restarts_total")

	s.move(worker, "moved")
	worker.BreakStreams()
	s.eventually("the metrics move", func() bool {
		return p.metric("talosccm_node_syncs_total", `result="changed"`) > changed && p.metric("talosccm_watch_restarts_total") > restarts
	})

	s.require(worker.Stop(t.Context()))
	s.eventually("a machine is counted as unreachable", func() bool {
		return p.metric("talosccm_machines", `condition="Unreachable"`) == 1 && p.metric("talosccm_machines", `condition="Current"`) == 1 &&
			p.metric("talosccm_api_request_errors_total") > 0
	})
	p.terminate()
}

// An instance that led and does not any more must not go on saying what was so then: alerts add up what all instances say.
func TestGaugesEndWithLeadership(t *testing.T) {
	s := newSuite(t, "led-", talostest.Options{})
	first, second := s.controlPlane("cp-1"), s.controlPlane("cp-2")
	s.register(first, second)

	gauges := []string{"talosccm_machines", "talosccm_ipam_blocked"}
	flags := []string{openMetrics, "--controllers=*,nodeipam", "--allocate-node-cidrs", "--cluster-cidr=10.99.0.0/16"}

	p := s.spawn(first, flags...)
	s.eventually("the first instance leads, and knows", func() bool {
		return p.leads() && !slices.ContainsFunc(gauges, func(gauge string) bool { return p.metric(gauge) == 0 })
	})

	other := s.spawn(second, flags...)
	s.require(first.SetStage(t.Context(), runtime.MachineStageRebooting))
	s.eventually("the second instance leads", other.leads)

	s.require(first.SetStage(t.Context(), runtime.MachineStageRunning))
	s.eventually("the first instance is back", func() bool { return p.metric("talosccm_build_info") == 1 })

	for _, gauge := range gauges {
		if n := p.metric(gauge); n != 0 {
			t.Errorf("%s is still %v", gauge, n)
		}
	}

	p.terminate()
	other.terminate()
}

func TestMetricsAreNotForEverybody(t *testing.T) {
	s := newSuite(t, "closed-", talostest.Options{})
	self := s.controlPlane("cp")
	s.register(self)

	p := s.spawn(self)
	s.awaitInitialized(self)

	if code, _, err := p.get("/metrics"); err != nil || (code != http.StatusForbidden && code != http.StatusUnauthorized) {
		t.Errorf("metrics without credentials: %d, %v", code, err)
	}

	if code, body, err := p.get("/healthz"); err != nil || code != http.StatusOK {
		t.Errorf("health: %d %s, %v", code, body, err)
	}

	p.terminate()
}

// controllers are those that the process says it runs.
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

// K1: what is documented and what runs agree.
func TestControllersThatRun(t *testing.T) {
	const node, csr, ipam, lifecycle = "cloud-node-controller", "certificatesigningrequest-approving-controller", "node-ipam-controller", "cloud-node-lifecycle-controller"

	for _, test := range []struct {
		name  string
		flags []string
		want  []string
	}{
		{"by default", nil, []string{csr, node}},
		{"by alias", []string{"--controllers=cloud-node-lifecycle"}, []string{lifecycle}},
		{"besides", []string{"--controllers=*,cloud-node-lifecycle-controller"}, []string{csr, node, lifecycle}},
		// Both ask the provider for what it does not offer.
		{"service and route", []string{"--controllers=*,service,route"}, []string{csr, node}},
		{"without the approval of certificates", []string{"--controllers=*,-node-csr-approval"}, []string{node}},
		{"with pod CIDRs", []string{"--controllers=*,nodeipam", "--allocate-node-cidrs"}, []string{csr, node, ipam}},
		{"pod CIDRs that nobody asked for", []string{"--controllers=*,nodeipam"}, []string{csr, node}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSuite(t, "controllers-", talostest.Options{})
			p := s.spawn(s.controlPlane("cp"), append(test.flags, openMetrics)...)

			var got []string

			s.eventually(fmt.Sprintf("controllers %v run", test.want), func() bool {
				got = p.controllers()
				slices.Sort(got)

				return len(got) >= len(test.want)
			})

			if !slices.Equal(got, test.want) {
				t.Errorf("controllers %v run, want %v", got, test.want)
			}

			p.terminate()
		})
	}
}

// What --help says of --controllers is what the flag accepts and what runs by default.
func TestHelpNamesTheControllers(t *testing.T) {
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}

	output, err := exec.CommandContext(t.Context(), path, "--help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, output)
	}

	help := strings.Join(strings.Fields(string(output)), " ")

	listed := func(title string) []string {
		match := regexp.MustCompile(title + `: ([a-z, -]+?)(?: Disabled| \(default)`).FindStringSubmatch(help)
		if match == nil {
			t.Fatalf("--help does not list %q", title)
		}

		names := strings.Split(match[1], ", ")
		slices.Sort(names)

		return names
	}

	for _, name := range listed("All controllers") {
		if err := withControllers(t, name).Validate(); err != nil {
			t.Error(err)
		}
	}

	want := []string{"cloud-node-lifecycle-controller", "node-ipam-controller", "node-route-controller", "service-lb-controller"}
	if off := listed("Disabled-by-default controllers"); !slices.Equal(off, want) {
		t.Errorf("--help says that %v are off by default, want %v", off, want)
	}
}
