package ctest

import (
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
)

// Proxy forwards connections to an API server.
type Proxy struct {
	listener net.Listener
	target   string

	// Accepted and Open count connections.
	Accepted, Open atomic.Int64
	// Hangs makes the proxy stop forwarding, and keep connections open.
	Hangs atomic.Bool
}

// NewProxy returns a proxy that serves until the test ends, and changes the configuration to use it.
func NewProxy(t testing.TB, config *rest.Config) *Proxy {
	t.Helper()

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })

	p := &Proxy{listener: listener, target: strings.TrimPrefix(config.Host, "https://")}
	config.Host = "https://" + listener.Addr().String()

	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}

			p.Accepted.Add(1)
			p.Open.Add(1)

			go p.serve(client)
		}
	}()

	return p
}

// serve forwards a connection until the client closes it.
func (p *Proxy) serve(client net.Conn) {
	defer p.Open.Add(-1)
	defer client.Close() //nolint:errcheck // both sides end

	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close() //nolint:errcheck // both sides end

	go func() { _, _ = io.Copy(side{client, p}, server) }()

	_, _ = io.Copy(side{server, p}, client)
}

// side is one side of a connection.
type side struct {
	io.Writer

	proxy *Proxy
}

// Write implements io.Writer.
func (s side) Write(data []byte) (int, error) {
	if s.proxy.Hangs.Load() {
		return len(data), nil
	}

	return s.Writer.Write(data)
}
