// Package talosapi connects to the Talos API: to the local machine's machine.sock and to the apid of any machine.
//
// Only the methods of Admin use the role os:admin, over machine.sock. All other calls use os:reader. The package never
// writes a resource and never uses apid's request forwarding.
//
// The os:reader certificate is valid for one hour and is replaced after half of it, or when a machine presents a
// certificate of an unknown CA. It is needed only while dialing. When Talos uses a new CA, the previous one stays trusted
// for 24 hours, the longest lifetime of a machine's server certificate.
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
	"syscall"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/state"
	cosiclient "github.com/cosi-project/runtime/pkg/state/protobuf/client"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

const (
	// connectTimeout limits the time to open a connection. It is gRPC's default.
	connectTimeout = 20 * time.Second

	// probeTimeout limits the time of Probe. The kernel sends three SYN packets within it.
	probeTimeout = 4 * time.Second

	// bufferSize replaces gRPC's shared write buffers of 32 KiB.
	bufferSize = 4 << 10
)

// dialer detects a machine that lost power. With Talos's kernel parameters that takes about 19 minutes. The kernel sends
// the probes; gRPC's pings would cost a goroutine per machine, and apid allows one in five minutes only.
var dialer = net.Dialer{
	Timeout:         connectTimeout,
	KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 20 * time.Second, Count: 3},
}

// State is the read-only COSI state of a machine. Close closes its connection.
type State interface {
	state.CoreState
	io.Closer
}

// ControlPlane is the State of a verified control-plane machine: the local machine, or the machine at an address that no
// kubelet can write.
type ControlPlane struct {
	State

	// Local is true for the local machine, which is not dialed at an address.
	Local bool
}

// Credentials provide the TLS configuration for each Dial. They may change at any time.
type Credentials interface {
	// TLSConfig returns a new configuration with the client certificate and the trusted OS CAs of the cluster.
	TLSConfig() (*tls.Config, error)
}

// refreshable is implemented by Credentials that can be renewed.
type refreshable interface {
	// UnknownCA is called when a machine presents a certificate of a CA that TLSConfig does not trust.
	UnknownCA()
}

// DialFunc connects to the machine at addr, which is expected to have the given nodename. Callers must verify the nodename.
// The State outlives ctx.
type DialFunc func(ctx context.Context, nodename string, addr netip.Addr) (State, error)

// Dial connects to apid on port 50000 of the machine at addr, and returns the machine's state. It blocks until the TCP
// connection is open. The first call does the TLS handshake, and verifies that the machine's certificate is valid for
// addr. The machine may send what the Share of ctx allows, if there is one.
func Dial(ctx context.Context, creds Credentials, addr netip.Addr) (State, error) {
	config, err := creds.TLSConfig()
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}

	config.ServerName = addr.String()

	transport := credentials.NewTLS(config)
	if r, ok := creds.(refreshable); ok {
		transport = reportingCredentials{TransportCredentials: transport, creds: r}
	}

	target := netip.AddrPortFrom(addr, constants.ApidPort).String()

	first, err := dialer.DialContext(ctx, "tcp", target)
	if err != nil {
		return nil, fmt.Errorf("connect to machine: %w", err)
	}

	share, _ := ctx.Value(shareKey{}).(*Share)
	unused := make(chan net.Conn, 1)
	unused <- sharedConn{first, share}

	conn, err := grpc.NewClient("passthrough:///"+target, append(append(boundOptions(share), dialOptions()...),
		grpc.WithTransportCredentials(transport),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			select {
			case first := <-unused:
				return first, nil
			default:
				conn, err := dialer.DialContext(ctx, "tcp", target)

				return sharedConn{conn, share}, err
			}
		}),
	)...)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("dial %s: %w", addr, err), first.Close())
	}

	return cosiState{CoreState: newState(conn), Closer: connection{conn, first}}, nil
}

// Probe returns an error if the machine at addr accepts no connection. It makes no request. Errors of this process, such
// as too many open files, prove nothing and are not returned.
func Probe(ctx context.Context, addr netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()

	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", netip.AddrPortFrom(addr, constants.ApidPort).String())
	if err == nil {
		_ = conn.Close()
	}

	if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() ||
		errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EHOSTUNREACH) {
		return fmt.Errorf("connect to machine: %w", err)
	}

	return nil
}

// connection closes its first TCP connection even if no call has used it.
type connection struct {
	*grpc.ClientConn

	first net.Conn
}

// Close implements io.Closer.
func (c connection) Close() error {
	defer c.first.Close() //nolint:errcheck // usually closed already

	return c.ClientConn.Close()
}

// reportingCredentials call UnknownCA when a handshake fails because of an unknown CA.
type reportingCredentials struct {
	credentials.TransportCredentials

	creds refreshable
}

// ClientHandshake implements credentials.TransportCredentials.
func (c reportingCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, raw)

	if unknown := (x509.UnknownAuthorityError{}); errors.As(err, &unknown) {
		c.creds.UnknownCA()
	}

	return conn, info, err
}

// Clone implements credentials.TransportCredentials.
func (c reportingCredentials) Clone() credentials.TransportCredentials {
	return reportingCredentials{TransportCredentials: c.TransportCredentials.Clone(), creds: c.creds}
}

func dialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithNoProxy(),         // the environment of the machine may set HTTPS_PROXY, which apid ignores as well
		grpc.WithReadBufferSize(0), // TLS has one, and there is one mostly idle connection per machine
		grpc.WithWriteBufferSize(bufferSize),
		grpc.WithChainUnaryInterceptor(measureUnary),
		grpc.WithChainStreamInterceptor(measureStream),
	}
}

type cosiState struct {
	state.CoreState
	io.Closer
}

// newState disables the adapter's retry of watches: it gives up on streams older than 15 minutes, and bookmarks do not
// survive a reboot. The reflector restarts failed watches instead.
func newState(conn *grpc.ClientConn) State {
	return cosiState{
		CoreState: cosiclient.NewAdapter(v1alpha1.NewStateClient(conn), cosiclient.WithDisableWatchRetry()),
		Closer:    conn,
	}
}
