// Package talosapi connects to the Talos API: to this machine's machine.sock and to every machine's apid.
//
// Over machine.sock it asks for os:admin in exactly the calls that Admin names, and nowhere else. Everything else, here
// and on other machines, runs as os:reader. It never writes a resource and never goes through apid's proxy.
package talosapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/state"
	cosiclient "github.com/cosi-project/runtime/pkg/state/protobuf/client"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	// A Talos machine answers pings that come more often than every five minutes with ENHANCE_YOUR_CALM; without pings a
	// machine that lost power is noticed only after some 19 minutes.
	keepaliveTime    = 6 * time.Minute
	keepaliveTimeout = 20 * time.Second

	// bufferSize replaces gRPC's 32 KiB buffers for reading and writing: there is one connection per machine, nearly
	// always idle.
	bufferSize = 4 << 10

	// maxStream is the most that a machine may send over one stream: twice what ten thousand addresses take. A list is read to its end before anybody
	// looks at it, and there may be none.
	maxStream = 8 << 20
)

// State is the read-only part of a machine's COSI state, together with its connection.
type State interface {
	state.CoreState
	io.Closer
}

// Credentials are what a machine is dialed with. They are asked for at each dial, so they may change at any time.
type Credentials interface {
	// TLSConfig returns a configuration that presents the client certificate and trusts the cluster's OS CA.
	TLSConfig() (*tls.Config, error)
}

// refreshable are Credentials that want to know when they are out of date.
type refreshable interface {
	// UnknownCA is called when a machine has shown a certificate of a CA that TLSConfig does not trust.
	UnknownCA()
}

// Dial connects to the apid of the machine at addr, port 50000. It returns at once; the first call on the state
// connects, and verifies that the machine's certificate is valid for addr.
func Dial(creds Credentials, addr netip.Addr) (State, error) {
	config, err := creds.TLSConfig()
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}

	config.ServerName = addr.String()

	target := "passthrough:///" + netip.AddrPortFrom(addr, constants.ApidPort).String()

	conn, err := grpc.NewClient(target, append(dialOptions(),
		grpc.WithTransportCredentials(transport(creds, config)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
		grpc.WithChainStreamInterceptor(boundStream),
	)...)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}

	return newState(conn), nil
}

func transport(creds Credentials, config *tls.Config) credentials.TransportCredentials {
	secured := credentials.NewTLS(config)

	if r, ok := creds.(refreshable); ok {
		return tellingCredentials{TransportCredentials: secured, creds: r}
	}

	return secured
}

// tellingCredentials tell when a machine's CA is unknown. The connection fails all the same.
type tellingCredentials struct {
	credentials.TransportCredentials

	creds refreshable
}

// ClientHandshake implements credentials.TransportCredentials.
func (c tellingCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, raw)

	if unknown := (x509.UnknownAuthorityError{}); errors.As(err, &unknown) {
		c.creds.UnknownCA()
	}

	return conn, info, err
}

// Clone implements credentials.TransportCredentials.
func (c tellingCredentials) Clone() credentials.TransportCredentials {
	return tellingCredentials{TransportCredentials: c.TransportCredentials.Clone(), creds: c.creds}
}

func dialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithNoProxy(), // machine.env may carry HTTPS_PROXY; apid strips it for the same reason
		grpc.WithReadBufferSize(bufferSize),
		grpc.WithWriteBufferSize(bufferSize),
		grpc.WithSharedWriteBuffer(true),
		grpc.WithChainUnaryInterceptor(measureUnary),
		grpc.WithChainStreamInterceptor(measureStream),
	}
}

func boundStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		return nil, err
	}

	return &boundedStream{ClientStream: stream, left: maxStream}, nil
}

// boundedStream fails when more was received than may be.
type boundedStream struct {
	grpc.ClientStream

	left int // bytes
}

// RecvMsg implements grpc.ClientStream.
func (s *boundedStream) RecvMsg(message any) error {
	if err := s.ClientStream.RecvMsg(message); err != nil {
		return err
	}

	if m, ok := message.(proto.Message); ok {
		s.left -= proto.Size(m)
	}

	if s.left < 0 {
		return status.Errorf(codes.ResourceExhausted, "the machine has sent more than %d bytes over one stream", maxStream)
	}

	return nil
}

type cosiState struct {
	state.CoreState
	io.Closer
}

// newState switches the adapter's own retry of watches off: it gives up on a stream older than 15 minutes at its first
// break, and bookmarks do not survive a reboot, so a break is reported and the reflector starts over.
func newState(conn *grpc.ClientConn) State {
	return cosiState{
		CoreState: cosiclient.NewAdapter(v1alpha1.NewStateClient(conn), cosiclient.WithDisableWatchRetry()),
		Closer:    conn,
	}
}

// measureUnary counts each call by method and code.
func measureUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	start := time.Now()
	err := invoke(ctx, method, req, reply, cc, opts...)

	observe(method, start, err)

	return err
}

// measureStream counts each stream by method and code too. A stream opens before the server has seen it, so what counts is the first
// answer.
func measureStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	start := time.Now()

	stream, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		observe(method, start, err)

		return nil, err
	}

	return &measuredStream{ClientStream: stream, answered: func(err error) { observe(method, start, err) }}, nil
}

// measuredStream tells once what a stream was answered first.
type measuredStream struct {
	grpc.ClientStream

	once     sync.Once
	answered func(error)
}

// RecvMsg implements grpc.ClientStream.
func (s *measuredStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)

	s.once.Do(func() {
		if errors.Is(err, io.EOF) { // a list of nothing
			s.answered(nil)
		} else {
			s.answered(err)
		}
	})

	return err
}

// DialFunc connects to the machine at addr, which is expected to have the given nodename. Callers must verify the nodename.
type DialFunc func(nodename string, addr netip.Addr) (State, error)
