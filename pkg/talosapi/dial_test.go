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
	"syscall"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// fixed are Credentials that do not change.
type fixed struct{ config *tls.Config }

func (c fixed) TLSConfig() (*tls.Config, error) { return c.config.Clone(), nil }

func (s *site) reader(t testing.TB) fixed {
	t.Helper()

	config, err := s.cluster.ClientTLS(string(role.Reader))
	require.NoError(t, err)

	return fixed{config}
}

func TestDial_RejectsCertificateOfAnotherAddress(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	st, err := talosapi.Dial(t.Context(), s.reader(t), forward(t, s.worker))
	require.NoError(t, err)
	t.Cleanup(func() { _ = st.Close() })

	_, err = nodename(t, st)
	assert.Equal(t, codes.Unavailable, status.Code(err))
	assert.Contains(t, err.Error(), "certificate is valid for")
	assert.Len(t, s.worker.Calls(), 0, "machine received calls")
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

		require.NoError(t, err)
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

	_, err := talosapi.Dial(ctx, reader, direct)
	require.Error(t, err, "connected to a documentation address")

	target := netip.AddrPortFrom(control, constants.ApidPort).String()

	conn, err := grpc.NewClient("passthrough:///"+target, grpc.WithTransportCredentials(credentials.NewTLS(reader.config)))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })

	_, err = v1alpha1.NewStateClient(conn).Get(t.Context(), &v1alpha1.GetRequest{})
	require.Error(t, err, "call succeeded")

	// The first request that the proxy receives must come from the other client.
	assert.Equal(t, target, ctest.Receive(t, proxied, "the proxy receives a request from the other client"))
}

func TestState_FailsAfterClose(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	for name, open := range map[string]func() (talosapi.State, error){
		"apid":   func() (talosapi.State, error) { return talosapi.Dial(t.Context(), s.reader(t), s.worker.Address()) },
		"socket": func() (talosapi.State, error) { return talosapi.DialSocket(s.worker.Socket()) },
	} {
		t.Run(name, func(t *testing.T) {
			st, err := open()
			require.NoError(t, err)
			requireNodename(t, st, s.worker.Nodename())
			require.NoError(t, st.Close())

			_, err = nodename(t, st)
			assert.Error(t, err, "call on closed state succeeded")
		})
	}

	ctest.Eventually(t, "no connection is open", func() bool { return s.worker.Connections() == 0 })
}

func TestProbe_FailsOnlyIfMachineAcceptsNoConnection(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	require.NoError(t, talosapi.Probe(t.Context(), s.worker.Address()))

	canceled, cancel := context.WithCancel(t.Context())
	cancel()

	require.NoError(t, s.worker.BlackHole())
	assert.ErrorContains(t, talosapi.Probe(t.Context(), s.worker.Address()), "i/o timeout")
	assert.NoError(t, talosapi.Probe(canceled, s.worker.Address()), "not the fault of the machine")
	assert.ErrorContains(t, talosapi.Probe(t.Context(), netip.MustParseAddr("127.255.255.1")), "connection refused")
}

func TestDial_FailsBeforeCertificateIsIssued(t *testing.T) {
	creds := talosapi.NewIssuedCredentials(&talosapi.Admin{}, clock.RealClock{})

	_, err := talosapi.Dial(t.Context(), creds, netip.MustParseAddr("192.0.2.1"))
	require.Error(t, err)
	assert.Equal(t, "dial 192.0.2.1: no os:reader certificate issued yet", err.Error())
}
