package bootstrap_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// patience bounds every wait for something that must happen. Attempts that failed are repeated with growing pauses. What is renewed after
// this time only was not renewed at once: the next renewal by the clock is minutes away.
const patience = time.Minute

// controlPlane is what the tests of this package share. They run one after the other: some stop its API server.
var controlPlane *kube.Cluster

func TestMain(m *testing.M) {
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func runTests(m *testing.M) (code int, err error) {
	controlPlane, err = kube.Start(context.Background(), kube.Options{Progress: os.Stderr})
	if err != nil {
		return 1, err
	}

	code = m.Run()

	return code, controlPlane.Stop()
}

// suite is a control-plane machine and the folder in which its bootstrap keeps the credentials.
type suite struct {
	machine *talostest.Machine
	admin   *countingAdmin
	dir     string
	sut     *bootstrap.Bootstrap
	ready   chan struct{} // closed by the first success
	ended   chan struct{} // closed when the bootstrap has returned
}

// countingAdmin counts how often the admin kubeconfig was read, which is once for each renewal that is tried, and the events that
// were taken in.
type countingAdmin struct {
	bootstrap.Admin

	reads, events atomic.Int64
}

func (a *countingAdmin) LocalhostAdminKubeconfig(ctx context.Context) ([]byte, error) {
	a.reads.Add(1)

	return a.Admin.LocalhostAdminKubeconfig(ctx)
}

func (a *countingAdmin) WatchLocalhostAdminKubeconfig(ctx context.Context, ch chan<- state.Event) error {
	events := make(chan state.Event)

	go func() {
		for {
			select {
			case event := <-events:
				select {
				case ch <- event:
					a.events.Add(1)
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()

	return a.Admin.WatchLocalhostAdminKubeconfig(ctx, events)
}

// newSuite has a machine whose Talos has issued the admin kubeconfig already, unless that is empty.
func newSuite(t *testing.T, kubeconfig []byte) *suite {
	t.Helper()

	cluster, err := talostest.New(talostest.Options{})
	must(t, err)
	t.Cleanup(cluster.Close)

	m, err := cluster.AddMachine(talostest.MachineSpec{
		Nodename: "cp-1", Type: machine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(kubeconfig),
	})
	must(t, err)

	socket, err := talosapi.OpenSocket(m.Socket())
	must(t, err)
	t.Cleanup(func() { _ = socket.Close() })

	return &suite{machine: m, admin: &countingAdmin{Admin: socket.Admin}, dir: t.TempDir()}
}

// start runs the bootstrap until the test ends.
func (s *suite) start(t *testing.T, clk clock.Clock) {
	t.Helper()

	s.sut = bootstrap.New(s.admin, s.dir, clk)
	s.ready, s.ended = make(chan struct{}), make(chan struct{})

	go func() {
		defer close(s.ended)

		s.sut.Run(t.Context(), func() { close(s.ready) })
	}()

	t.Cleanup(func() { await(t, s.ended, "the bootstrap ends with its context") })
}

// bootstrapped is a suite whose credentials are there.
func bootstrapped(t *testing.T, clk clock.Clock) *suite {
	t.Helper()

	s := newSuite(t, controlPlane.Kubeconfig())
	s.start(t, clk)
	await(t, s.ready, "the credentials are there")

	return s
}

// awaitOther waits for a token other than the one that was read before.
func (s *suite) awaitOther(t *testing.T, token string) {
	t.Helper()
	eventually(t, "the token is renewed", func() bool { return s.token(t) != token })
}

// awaitWatch waits until new admin kubeconfigs are being waited for.
func (s *suite) awaitWatch(t *testing.T) {
	t.Helper()
	eventually(t, "the admin kubeconfig is watched", func() bool { return s.machine.OpenStreams() == 1 })
}

// client works with the files.
func (s *suite) client(t *testing.T) kubernetes.Interface {
	t.Helper()

	config, err := clientcmd.BuildConfigFromFlags("", s.sut.Kubeconfig())
	must(t, err)

	config.QPS, config.Burst = 1000, 1000

	client, err := kubernetes.NewForConfig(config)
	must(t, err)

	return client
}

func (s *suite) requireWorks(t *testing.T) {
	t.Helper()
	s.awaitRights(t)

	if _, err := s.client(t).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
}

// awaitRights waits until the API server goes by the RBAC, of which it hears a moment after that was applied: one right of each binding.
func (s *suite) awaitRights(t *testing.T) {
	t.Helper()

	client := s.client(t)

	for _, right := range []authorizationv1.ResourceAttributes{
		{Verb: "list", Resource: "nodes"},
		{Verb: "create", Group: "authentication.k8s.io", Resource: "tokenreviews"},
		{Verb: "create", Resource: "events", Namespace: "default"},
		{Verb: "create", Group: "coordination.k8s.io", Resource: "leases", Namespace: "kube-system"},
		{Verb: "get", Resource: "configmaps", Namespace: "kube-system", Name: "extension-apiserver-authentication"},
	} {
		eventually(t, "the token may "+right.Verb+" "+right.Resource, func() bool { return may(t, client, right) })
	}
}

// files are the contents of the folder by name. A file that is being replaced is there with another name, too.
func (s *suite) files(t *testing.T) map[string][]byte {
	t.Helper()

	entries, err := os.ReadDir(s.dir)
	must(t, err)

	contents := map[string][]byte{}

	for _, entry := range entries {
		contents[entry.Name()], err = os.ReadFile(filepath.Join(s.dir, entry.Name()))
		must(t, err)
	}

	return contents
}

func (s *suite) token(t *testing.T) string {
	t.Helper()

	token, err := os.ReadFile(filepath.Join(s.dir, "token"))
	must(t, err)

	return string(token)
}

func adminClient(t *testing.T) kubernetes.Interface {
	t.Helper()

	client, err := kubernetes.NewForConfig(controlPlane.Config())
	must(t, err)

	return client
}

func await(t *testing.T, done <-chan struct{}, what string) {
	t.Helper()

	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("waited %s in vain until %s", patience, what)
	}
}

func must(t *testing.T, err error) {
	t.Helper()

	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits for a condition that no channel announces.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()

	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()

	deadline := time.After(patience)

	for !condition() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("waited %s in vain until %s", patience, what)
		}
	}
}
