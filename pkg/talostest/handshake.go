package talostest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"reflect"
	"time"

	"github.com/siderolabs/crypto/x509"
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
type handshake struct{}

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

	if !pause(accepted.done, info.machine.responseDelay()) {
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

// ClientHandshake implements credentials.TransportCredentials.
func (handshake) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("client handshake is not supported")
}

// Info implements credentials.TransportCredentials.
func (handshake) Info() credentials.ProtocolInfo { return credentials.ProtocolInfo{} }

// Clone implements credentials.TransportCredentials.
func (h handshake) Clone() credentials.TransportCredentials { return h }

// OverrideServerName implements credentials.TransportCredentials.
func (handshake) OverrideServerName(string) error { return nil }

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

// tlsConfig returns apid's configuration: TLS 1.3, and a client certificate of an accepted CA.
func (m *Machine) tlsConfig() (*tls.Config, error) {
	certificate, err := m.serverCertificate()
	if err != nil {
		return nil, err
	}

	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		Certificates:           []tls.Certificate{*certificate},
		ClientAuth:             tls.RequireAndVerifyClientCert,
		ClientCAs:              m.cluster.authority.pool(),
		Time:                   m.cluster.now,
	}, nil
}

// issued is a server certificate with what it was issued from.
type issued struct {
	certificate *tls.Certificate
	ca          *x509.CertificateAuthority
	names       serverNames
	at          time.Time
}

// serverCertificate returns the current certificate of apid. It is issued on first use, and again when the CA or the machine's names have
// changed or half of its lifetime has passed.
func (m *Machine) serverCertificate() (*tls.Certificate, error) {
	names, err := m.serverNames()
	if err != nil {
		return nil, err
	}

	m.mu.Lock()
	defer m.mu.Unlock()

	now, ca := m.cluster.now(), m.cluster.authority.current()

	if m.issued.ca == ca && reflect.DeepEqual(m.issued.names, names) && now.Sub(m.issued.at) < serverCertificateRenewal {
		return m.issued.certificate, nil
	}

	notBefore := now
	if m.certificateExpired {
		notBefore = now.Add(-serverCertificateValidity - time.Hour)
	}

	certificate, err := names.certificate(ca, notBefore)
	if err != nil {
		return nil, err
	}

	m.issued = issued{certificate: certificate, ca: ca, names: names, at: now}

	return certificate, nil
}
