package talostest

import (
	"context"
	"crypto/tls"
	stdx509 "crypto/x509"
	"fmt"
	"net"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/crypto/x509"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc/credentials"
)

// connInfo identifies the machine and the caller of a connection.
type connInfo struct {
	machine          *Machine
	transport        Transport
	certificateRoles role.Set // empty on the socket
}

// AuthType implements credentials.AuthInfo.
func (connInfo) AuthType() string { return "talostest" }

// handshake is the server side of both transports: mutual TLS for apid, none for machine.sock.
type handshake struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (handshake) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	accepted, ok := raw.(*conn)
	if !ok {
		return nil, nil, fmt.Errorf("handshake on unexpected connection %T", raw)
	}

	info := connInfo{machine: accepted.link.machine, transport: accepted.link.transport}

	if info.transport == TransportSocket {
		return accepted, info, nil
	}

	if !pause(accepted.done, time.Duration(info.machine.delay.Load())) {
		return nil, nil, net.ErrClosed
	}

	config, err := info.machine.tlsConfig()
	if err != nil {
		return nil, nil, err
	}

	secured, auth, err := credentials.NewTLS(config).ServerHandshake(accepted)
	if err != nil {
		return nil, nil, fmt.Errorf("TLS handshake with %s: %w", accepted.RemoteAddr(), err)
	}

	if tlsInfo, ok := auth.(credentials.TLSInfo); ok {
		info.certificateRoles, _ = role.Parse(tlsInfo.State.PeerCertificates[0].Subject.Organization)
	}

	return secured, info, nil
}

// pause blocks for the delay and returns true. It returns false if done is closed first.
func pause(done <-chan struct{}, delay time.Duration) bool {
	if delay <= 0 {
		return true
	}

	timer := time.NewTimer(delay)
	defer timer.Stop()

	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}

// tlsConfig returns apid's configuration: TLS 1.3, a new certificate, and a client certificate of an accepted CA.
func (m *Machine) tlsConfig() (*tls.Config, error) {
	names, err := m.dnsNames()
	if err != nil {
		return nil, err
	}

	notBefore := time.Unix(m.certificateTime.Load(), 0)

	pair, err := x509.NewKeyPair(m.cluster.authority.current(),
		x509.IPAddresses([]net.IP{net.IPv4(127, 0, 0, 1), m.spec.Address.AsSlice()}),
		x509.DNSNames(names),
		x509.CommonName(names[len(names)-1]),
		x509.NotBefore(notBefore),
		x509.NotAfter(notBefore.Add(serverCertificateValidity)),
		x509.KeyUsage(stdx509.KeyUsageDigitalSignature),
		x509.ExtKeyUsage([]stdx509.ExtKeyUsage{stdx509.ExtKeyUsageServerAuth}),
	)
	if err != nil {
		return nil, fmt.Errorf("issue server certificate for %v: %w", names, err)
	}

	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		Certificates:           []tls.Certificate{*pair.Certificate},
		ClientAuth:             tls.RequireAndVerifyClientCert,
		ClientCAs:              m.cluster.authority.pool(),
		Time:                   m.cluster.now,
	}, nil
}

// dnsNames returns the machine's hostnames, the longest last.
func (m *Machine) dnsNames() ([]string, error) {
	hostname, err := safe.StateGetByID[*network.HostnameStatus](context.Background(), m.State(), network.HostnameID) // in memory
	if err != nil {
		return nil, fmt.Errorf("get hostname of machine %s: %w", m.spec.Nodename, err)
	}

	return hostname.TypedSpec().DNSNames(), nil
}
