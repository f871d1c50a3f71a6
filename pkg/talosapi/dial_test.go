package talosapi_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// fixed are Credentials that do not change.
type fixed struct{ config *tls.Config }

func (c fixed) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

func (s *site) reader(t *testing.T) fixed {
	t.Helper()

	config, err := s.cluster.ClientTLS(string(role.Reader))
	must(t, err)

	return fixed{config}
}

func TestDial_RejectsCertificateOfAnotherAddress(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	st, err := talosapi.Dial(t.Context(), s.reader(t), forward(t, s.worker))
	must(t, err)
	t.Cleanup(func() { _ = st.Close() })

	_, err = nodename(t, st)
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "certificate is valid for") {
		t.Errorf("got %v", err)
	}

	if calls := s.worker.Calls(); len(calls) != 0 {
		t.Errorf("machine received calls: %v", calls)
	}
}

func TestDial_LimitsBytesPerStream(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	for i := range 16 {
		extension := runtime.NewExtensionStatus(runtime.NamespaceName, strconv.Itoa(i))
		extension.TypedSpec().Metadata.Description = strings.Repeat("x", 1<<20)
		must(t, s.worker.State().Create(t.Context(), extension))
	}

	st, err := talosapi.Dial(t.Context(), s.reader(t), s.worker.Address())
	must(t, err)
	t.Cleanup(func() { _ = st.Close() })

	kind := resource.NewMetadata(runtime.NamespaceName, runtime.ExtensionStatusType, "", resource.VersionUndefined)

	if _, err := st.List(t.Context(), kind); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("list: got %v, want ResourceExhausted", err)
	}

	events := make(chan state.Event)
	must(t, st.WatchKind(t.Context(), kind, events, state.WithBootstrapContents(true)))

	for event := range events {
		if event.Type == state.Bootstrapped {
			t.Error("watch: got all resources, want an error")
		}

		if event.Type == state.Errored || event.Type == state.Bootstrapped {
			break
		}
	}

	// Other streams still work.
	_, err = nodename(t, st)
	must(t, err)
}

// forward returns an address that is not the machine's and forwards connections to the machine.
func forward(t *testing.T, to *talostest.Machine) netip.Addr {
	t.Helper()

	for {
		addr := netip.AddrFrom4([4]byte{127, byte(1 + rand.IntN(15)), byte(rand.IntN(256)), byte(1 + rand.IntN(254))}) //nolint:gosec // any

		listener, err := net.Listen("tcp", netip.AddrPortFrom(addr, constants.ApidPort).String())
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}

		must(t, err)
		t.Cleanup(func() { _ = listener.Close() })

		go func() {
			for {
				client, err := listener.Accept()
				if err != nil {
					return
				}

				go splice(client, net.JoinHostPort(to.Address().String(), strconv.Itoa(constants.ApidPort)))
			}
		}()

		return addr
	}
}

func splice(client net.Conn, target string) {
	defer client.Close()

	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}

	go func() {
		defer server.Close()

		_, _ = io.Copy(server, client)
	}()

	_, _ = io.Copy(client, server)
}

func TestDial_IgnoresProxyEnvironment(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	reader := s.reader(t)

	// Go never uses a proxy for loopback addresses, so these are documentation addresses.
	direct, control := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")

	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()

	if _, err := talosapi.Dial(ctx, reader, direct); err == nil {
		t.Fatal("connected to a documentation address")
	}

	target := netip.AddrPortFrom(control, constants.ApidPort).String()

	conn, err := grpc.NewClient("passthrough:///"+target, grpc.WithTransportCredentials(credentials.NewTLS(reader.config)))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })

	if _, err := v1alpha1.NewStateClient(conn).Get(t.Context(), &v1alpha1.GetRequest{}); err == nil {
		t.Fatal("call succeeded")
	}

	// The first request that the proxy receives must come from the other client.
	select {
	case got := <-proxy.targets:
		if got != target {
			t.Errorf("proxy received a request for %s", got)
		}
	case <-time.After(timeout):
		t.Error("proxy received no request from the other client; the test is not effective")
	}
}

func TestState_FailsAfterClose(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	for name, open := range map[string]func() (talosapi.State, error){
		"apid":   func() (talosapi.State, error) { return talosapi.Dial(t.Context(), s.reader(t), s.worker.Address()) },
		"socket": func() (talosapi.State, error) { return talosapi.DialSocket(s.worker.Socket()) },
	} {
		t.Run(name, func(t *testing.T) {
			st, err := open()
			must(t, err)
			requireNodename(t, st, s.worker.Nodename())
			must(t, st.Close())

			if _, err := nodename(t, st); err == nil {
				t.Error("call on closed state succeeded")
			}
		})
	}

	eventually(t, "no connection is open", func() bool { return s.worker.Connections() == 0 })
}

func TestDial_FailsBeforeCertificateIsIssued(t *testing.T) {
	creds := talosapi.NewIssuedCredentials(&talosapi.Admin{}, clock.RealClock{})

	_, err := talosapi.Dial(t.Context(), creds, netip.MustParseAddr("192.0.2.1"))
	if want := "dial 192.0.2.1: no os:reader certificate issued yet"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}
