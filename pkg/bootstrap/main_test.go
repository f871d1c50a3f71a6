package bootstrap_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// beds has a control plane for each test, because some stop the API server or change the RBAC objects.
var beds ctest.Pool

func TestMain(m *testing.M) { beds.Main(m, kube.Options{}, 4, nil) }

// suite is a control-plane machine with a Bootstrap and its directory.
type suite struct {
	ctest.Suite

	machine *talostest.Machine
	admin   *countingAdmin
	dir     string
	enabled []string // controllers and extension.SecurePort
	local   string   // address of the local API server
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
func newSuite(bed ctest.Suite, kubeconfig []byte) *suite {
	bed.Helper()

	s := &suite{Suite: bed, dir: bed.TempDir()}
	s.Talos = ctest.NewTalos(s, talostest.Options{})
	s.machine = s.Machine(talostest.MachineSpec{
		Nodename: "cp-1", Type: machine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(kubeconfig),
	})

	socket, err := talosapi.OpenSocket(s.machine.Socket())
	require.NoError(s, err)
	s.Cleanup(func() { _ = socket.Close() })

	s.admin = &countingAdmin{Admin: socket.Admin}

	return s
}

// start runs a Bootstrap until the test ends.
func (s *suite) start(clk clock.Clock) {
	s.Helper()

	s.sut = bootstrap.New(s.admin, s.dir, func(controller string) bool { return slices.Contains(s.enabled, controller) }, clk)
	s.sut.LocalAPIServer = func(context.Context) string { return s.local }
	s.ready, s.ended = make(chan struct{}), make(chan struct{})

	go func() {
		defer close(s.ended)

		s.sut.Run(s.Context(), func() { close(s.ready) })
	}()

	s.Cleanup(func() { ctest.Receive(s, s.ended, "Run returns when its context ends") })
}

// awaitReady waits until the credentials are written.
func (s *suite) awaitReady() {
	s.Helper()
	ctest.Receive(s, s.ready, "credentials are written")
}

// bootstrapped returns a suite with credentials, in which the given controllers, and extension.SecurePort, are enabled.
func bootstrapped(bed ctest.Suite, clk clock.Clock, enabled ...string) *suite {
	bed.Helper()

	s := newSuite(bed, bed.Kube.Kubeconfig())
	s.enabled = enabled
	s.start(clk)
	s.awaitReady()

	return s
}

// awaitOther waits for a token other than the given one.
func (s *suite) awaitOther(token string) {
	s.Helper()
	ctest.Eventually(s, "token is renewed", func() bool { return s.token() != token })
}

// awaitWatch waits until the admin kubeconfig is watched.
func (s *suite) awaitWatch() {
	s.Helper()
	ctest.Eventually(s, "admin kubeconfig is watched", func() bool { return s.machine.OpenStreams() == 1 })
}

// awaitRenewalTimer waits until only the timer of the next renewal runs: the one of the watch stops once it is accepted.
func (s *suite) awaitRenewalTimer(clk *clocktesting.FakeClock) {
	s.Helper()
	ctest.Eventually(s, "renewal is scheduled", func() bool { return s.admin.events.Load() > 0 && clk.Waiters() == 1 })
}

// client returns a client with the written kubeconfig.
func (s *suite) client() kubernetes.Interface {
	s.Helper()

	config, err := clientcmd.BuildConfigFromFlags("", s.sut.Kubeconfig())
	require.NoError(s, err)

	config.QPS, config.Burst = 1000, 1000

	client, err := kubernetes.NewForConfig(config)
	require.NoError(s, err)

	return client
}

func (s *suite) requireWorks() {
	s.Helper()
	s.awaitRights()

	_, err := s.client().CoreV1().Nodes().List(s.Context(), metav1.ListOptions{})
	require.NoError(s, err)
}

// awaitRights waits until the API server has observed the RBAC. It checks one permission of each binding.
func (s *suite) awaitRights() {
	s.Helper()

	client := s.client()

	for _, right := range []authorizationv1.ResourceAttributes{
		{Verb: "list", Resource: "nodes"},
		{Verb: "create", Resource: "events", Namespace: "default"},
		{Verb: "create", Group: "coordination.k8s.io", Resource: "leases", Namespace: "kube-system"},
	} {
		ctest.Eventually(s, "token may "+right.Verb+" "+right.Resource, func() bool { return may(s, client, right) })
	}

	for _, right := range []authorizationv1.ResourceAttributes{
		{Verb: "create", Group: "authentication.k8s.io", Resource: "tokenreviews"},
		{Verb: "get", Resource: "configmaps", Namespace: "kube-system", Name: "extension-apiserver-authentication"},
	} {
		want := slices.Contains(s.enabled, extension.SecurePort)
		ctest.Eventually(s, fmt.Sprintf("token may %s %s: %t", right.Verb, right.Resource, want), func() bool { return may(s, client, right) == want })
	}
}

// files returns the files of the directory by name, including temporary ones.
func (s *suite) files() map[string][]byte {
	s.Helper()

	entries, err := os.ReadDir(s.dir)
	require.NoError(s, err)

	contents := map[string][]byte{}

	for _, entry := range entries {
		contents[entry.Name()], err = os.ReadFile(filepath.Join(s.dir, entry.Name()))
		require.NoError(s, err)
	}

	return contents
}

func (s *suite) token() string {
	s.Helper()

	token, err := os.ReadFile(filepath.Join(s.dir, "token"))
	require.NoError(s, err)

	return string(token)
}
