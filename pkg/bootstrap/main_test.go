package bootstrap_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// waitTimeout bounds every wait. It covers several retries and is shorter than the interval of renewals, so a renewal
// within it is an immediate one.
const waitTimeout = time.Minute

// controlPlane is shared by the tests of this package. They are not parallel, since some stop its API server.
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

// suite is a control-plane machine with a Bootstrap and its directory.
type suite struct {
	machine *talostest.Machine
	admin   *countingAdmin
	dir     string
	enabled []string // controllers and extension.SecurePort
	sut     *bootstrap.Bootstrap
	ready   chan struct{} // closed after the first success
	ended   chan struct{} // closed when Run has returned
}

// countingAdmin counts the reads of the admin kubeconfig, one per attempt, and the events that were received.
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

// newSuite returns a suite whose machine has the given admin kubeconfig. If it is empty, Talos has not issued one yet.
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

// start runs a Bootstrap until the test ends.
func (s *suite) start(t *testing.T, clk clock.Clock) {
	t.Helper()

	s.sut = bootstrap.New(s.admin, s.dir, func(controller string) bool { return slices.Contains(s.enabled, controller) }, clk)
	s.ready, s.ended = make(chan struct{}), make(chan struct{})

	go func() {
		defer close(s.ended)

		s.sut.Run(t.Context(), func() { close(s.ready) })
	}()

	t.Cleanup(func() { await(t, s.ended, "Run returns when its context ends") })
}

// bootstrapped returns a suite with credentials, in which the given controllers, and extension.SecurePort, are enabled.
func bootstrapped(t *testing.T, clk clock.Clock, enabled ...string) *suite {
	t.Helper()

	s := newSuite(t, controlPlane.Kubeconfig())
	s.enabled = enabled
	s.start(t, clk)
	await(t, s.ready, "credentials are written")

	return s
}

// awaitOther waits for a token other than the given one.
func (s *suite) awaitOther(t *testing.T, token string) {
	t.Helper()
	eventually(t, "token is renewed", func() bool { return s.token(t) != token })
}

// awaitWatch waits until the admin kubeconfig is watched.
func (s *suite) awaitWatch(t *testing.T) {
	t.Helper()
	eventually(t, "admin kubeconfig is watched", func() bool { return s.machine.OpenStreams() == 1 })
}

// client returns a client with the written kubeconfig.
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

// awaitRights waits until the API server has observed the RBAC. It checks one permission of each binding.
func (s *suite) awaitRights(t *testing.T) {
	t.Helper()

	client := s.client(t)

	for _, right := range []authorizationv1.ResourceAttributes{
		{Verb: "list", Resource: "nodes"},
		{Verb: "create", Resource: "events", Namespace: "default"},
		{Verb: "create", Group: "coordination.k8s.io", Resource: "leases", Namespace: "kube-system"},
	} {
		eventually(t, "token may "+right.Verb+" "+right.Resource, func() bool { return may(t, client, right) })
	}

	for _, right := range []authorizationv1.ResourceAttributes{
		{Verb: "create", Group: "authentication.k8s.io", Resource: "tokenreviews"},
		{Verb: "get", Resource: "configmaps", Namespace: "kube-system", Name: "extension-apiserver-authentication"},
	} {
		want := slices.Contains(s.enabled, extension.SecurePort)
		eventually(t, fmt.Sprintf("token may %s %s: %t", right.Verb, right.Resource, want), func() bool { return may(t, client, right) == want })
	}
}

// files returns the files of the directory by name, including temporary ones.
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
	case <-time.After(waitTimeout):
		t.Fatalf("condition not met after %s: %s", waitTimeout, what)
	}
}

func must(t *testing.T, err error) {
	t.Helper()

	if err != nil {
		t.Fatal(err)
	}
}

// eventually polls until condition returns true.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()

	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()

	deadline := time.After(waitTimeout)

	for !condition() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("condition not met after %s: %s", waitTimeout, what)
		}
	}
}
