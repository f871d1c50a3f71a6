package talosapi_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// patience bounds every wait for something that must happen. It costs nothing when all is well.
const patience = 2 * time.Minute

// proxy is what HTTPS_PROXY names while these tests run: Go reads it once per process.
var proxy = &fakeProxy{targets: make(chan string, 16)}

func TestMain(m *testing.M) {
	if err := proxy.start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}

	os.Exit(m.Run())
}

// fakeProxy refuses to connect to anything, and tells what it was asked for.
type fakeProxy struct{ targets chan string }

func (p *fakeProxy) start() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen for the proxy's clients: %w", err)
	}

	go http.Serve(listener, p) //nolint:errcheck,gosec // lives as long as the process

	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "ALL_PROXY"} {
		if err := os.Setenv(name, "http://"+listener.Addr().String()); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}

	return nil
}

func (p *fakeProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.targets <- r.Host

	w.WriteHeader(http.StatusForbidden)
}

// site is a cluster with one control-plane machine, whose machine.sock is open, and one worker.
type site struct {
	cluster      *talostest.Cluster
	controlPlane *talostest.Machine
	worker       *talostest.Machine
	socket       *talosapi.Socket
}

func newSite(t *testing.T, clk clock.PassiveClock) *site {
	t.Helper()

	cluster, err := talostest.New(talostest.Options{Clock: clk})
	must(t, err)
	t.Cleanup(cluster.Close)

	controlPlane, err := cluster.AddMachine(talostest.MachineSpec{
		Nodename: "cp-1", Type: machine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: "first",
	})
	must(t, err)

	worker, err := cluster.AddMachine(talostest.MachineSpec{Nodename: "worker-1", ServeSocket: true})
	must(t, err)

	return &site{cluster: cluster, controlPlane: controlPlane, worker: worker, socket: openSocket(t, controlPlane)}
}

func openSocket(t *testing.T, m *talostest.Machine) *talosapi.Socket {
	t.Helper()

	socket, err := talosapi.OpenSocket(m.Socket())
	must(t, err)
	t.Cleanup(func() { _ = socket.Close() })

	return socket
}

// mint runs credentials until the test ends, and returns when the first certificate is there.
func (s *site) mint(t *testing.T, clk clock.Clock) *talosapi.IssuedCredentials {
	t.Helper()

	minted := talosapi.NewIssuedCredentials(s.socket.Admin, clk)
	ready, done := make(chan struct{}), make(chan struct{})

	go func() {
		defer close(done)

		minted.Run(t.Context(), sync.OnceFunc(func() { close(ready) }))
	}()

	t.Cleanup(func() { await(t, done, "the credentials end with their context") })
	await(t, ready, "the first certificate is minted")

	return minted
}

// dial connects to a machine's apid.
func dial(t *testing.T, creds talosapi.Credentials, to *talostest.Machine) talosapi.State {
	t.Helper()

	st, err := talosapi.Dial(creds, to.Address())
	must(t, err)
	t.Cleanup(func() { _ = st.Close() })

	return st
}

// nodename asks for something that os:reader may know.
func nodename(t *testing.T, st talosapi.State) (string, error) {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	res, err := safe.StateGetByID[*k8s.Nodename](ctx, st, k8s.NodenameID)
	if err != nil {
		return "", err
	}

	return res.TypedSpec().Nodename, nil
}

func requireNodename(t *testing.T, st talosapi.State, want string) {
	t.Helper()

	if got, err := nodename(t, st); err != nil || got != want {
		t.Fatalf("got nodename %q, %v, want %q", got, err, want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()

	if err != nil {
		t.Fatal(err)
	}
}

func await(t *testing.T, done <-chan struct{}, what string) {
	t.Helper()

	select {
	case <-done:
	case <-time.After(patience):
		t.Errorf("waited %s in vain until %s", patience, what)
	}
}

// eventually waits for a condition that no channel announces.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()

	ticker := time.NewTicker(2 * time.Millisecond)
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
