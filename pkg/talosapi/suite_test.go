package talosapi_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/stretchr/testify/require"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// proxied receives the targets of all requests to the proxy, which rejects them. The proxy is the same for all tests,
// because Go reads the environment once per process.
var proxied = make(chan string, 16)

func TestMain(m *testing.M) {
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		proxied <- r.Host

		w.WriteHeader(http.StatusForbidden)
	}))

	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "ALL_PROXY"} {
		if err := os.Setenv(name, proxy.URL); err != nil {
			panic(err)
		}
	}

	os.Exit(m.Run())
}

// site is a simulated cluster of one control-plane machine and one worker, with an open Socket of the control-plane machine.
type site struct {
	cluster      *talostest.Cluster
	controlPlane *talostest.Machine
	worker       *talostest.Machine
	socket       *talosapi.Socket
}

func newSite(t testing.TB, clk clock.PassiveClock) *site {
	t.Helper()

	cluster := ctest.NewTalos(t, talostest.Options{Clock: clk})

	controlPlane, err := cluster.AddMachine(talostest.MachineSpec{
		Nodename: "cp-1", Type: machine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: "first",
	})
	require.NoError(t, err)

	worker, err := cluster.AddMachine(talostest.MachineSpec{Nodename: "worker-1", ServeSocket: true})
	require.NoError(t, err)

	return &site{cluster: cluster, controlPlane: controlPlane, worker: worker, socket: openSocket(t, controlPlane)}
}

func openSocket(t testing.TB, m *talostest.Machine) *talosapi.Socket {
	t.Helper()

	socket, err := talosapi.OpenSocket(m.Socket())
	require.NoError(t, err)
	t.Cleanup(func() { _ = socket.Close() })

	return socket
}

// issue runs IssuedCredentials until the test ends. It returns when the first certificate has been issued.
func (s *site) issue(t *testing.T, clk clock.Clock) *talosapi.IssuedCredentials {
	t.Helper()

	issued := talosapi.NewIssuedCredentials(s.socket.Admin, clk)
	ready, done := make(chan struct{}), make(chan struct{})

	go func() {
		defer close(done)

		issued.Run(t.Context(), sync.OnceFunc(func() { close(ready) }))
	}()

	t.Cleanup(func() { ctest.Receive(t, done, "the credentials stop with their context") })
	ctest.Receive(t, ready, "the first certificate is issued")

	return issued
}

// dial connects to a machine's apid.
func dial(t *testing.T, creds talosapi.Credentials, to *talostest.Machine) talosapi.State {
	t.Helper()

	st, err := talosapi.Dial(t.Context(), creds, to.Address())
	require.NoError(t, err)
	t.Cleanup(func() { _ = st.Close() })

	return st
}

// nodename reads a resource that os:reader may read.
func nodename(t *testing.T, st talosapi.State) (string, error) {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), ctest.Timeout)
	defer cancel()

	res, err := safe.StateGetByID[*k8s.Nodename](ctx, st, k8s.NodenameID)
	if err != nil {
		return "", err
	}

	return res.TypedSpec().Nodename, nil
}

func requireNodename(t *testing.T, st talosapi.State, want string) {
	t.Helper()

	got, err := nodename(t, st)
	require.NoError(t, err)
	require.Equal(t, want, got)
}
