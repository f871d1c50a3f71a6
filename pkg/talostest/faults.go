package talostest

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// Stop powers the machine off: all connections break and new ones are reset. The resources are kept, but their versions and watch history
// start over, so that earlier bookmarks are rejected with FailedPrecondition. Changes that a test makes while the machine is down are
// visible after its start. For an orderly reboot, call [Machine.SetStage] first.
func (m *Machine) Stop(ctx context.Context) error {
	m.power.Lock()
	defer m.power.Unlock()

	next := newBoot(m.spec.UnsupportedTypes)

	for _, l := range m.links() {
		l.takeDown()
	}

	m.BreakStreams()

	if err := m.currentBoot().copyInto(ctx, next); err != nil {
		return fmt.Errorf("stop machine %s: %w", m.spec.Nodename, err)
	}

	m.mu.Lock()
	m.memory = next
	m.mu.Unlock()

	return nil
}

// Start starts a stopped machine.
func (m *Machine) Start() {
	m.power.Lock()
	defer m.power.Unlock()

	for _, l := range m.links() {
		l.bringUp()
	}
}

// Reboot is [Machine.Stop] and [Machine.Start].
func (m *Machine) Reboot(ctx context.Context) error {
	if err := m.Stop(ctx); err != nil {
		return err
	}

	m.Start()

	return nil
}

// CutOff drops all packets between apid and its clients: connections stay open but transfer nothing, and new handshakes hang.
// machine.sock is not affected. Clients do not notice when a machine is stopped while it is cut off, as after a power loss.
func (m *Machine) CutOff() { m.api.flow.shut() }

// BlackHole cuts the machine off like [Machine.CutOff], and drops the packets of connection attempts and keepalive probes
// too: they get no answer, and clients can notice it.
func (m *Machine) BlackHole() error {
	m.CutOff()

	return m.api.filter(unix.SO_ATTACH_FILTER)
}

// Reconnect ends [Machine.CutOff] and [Machine.BlackHole]. Data that was sent in between arrives; connections that the
// machine has closed are reset.
func (m *Machine) Reconnect() {
	_ = m.api.filter(unix.SO_DETACH_FILTER) // fails if there is none

	m.api.flow.open()
}

// BreakStreams ends every open stream of both transports with Unavailable. Connections and watch history are kept.
func (m *Machine) BreakStreams() {
	streams, cancel := context.WithCancel(context.Background())

	m.mu.Lock()
	broken := m.breakStreams
	m.streams, m.breakStreams = streams, cancel
	m.mu.Unlock()

	if broken != nil {
		broken()
	}
}

// ExpireWatches ends every open stream and rejects its bookmarks. A client sees exactly one Errored event, as when a watch breaks that is
// older than 15 minutes, which the COSI client does not resume.
func (m *Machine) ExpireWatches() {
	m.mu.Lock()
	m.memory = m.memory.withoutHistory()
	m.mu.Unlock()

	m.BreakStreams()
}

// BreakConnections resets every open connection to apid. New connections are accepted immediately.
func (m *Machine) BreakConnections() { m.api.dropAll() }

// SlowDown delays each RPC and each TLS handshake; zero ends the delay. Events of open watches are not delayed.
func (m *Machine) SlowDown(delay time.Duration) { m.delay.Store(int64(delay)) }

// Freeze stops all responses to RPCs and watches, while connections stay healthy and HTTP/2 pings are answered. Clients can detect it only
// by a deadline.
func (m *Machine) Freeze() { m.frozen.shut() }

// Thaw ends [Machine.Freeze].
func (m *Machine) Thaw() { m.frozen.open() }

// Answer answers a List or a Watch: it sends messages to the stream, or returns the result of honest, which answers as the
// machine does.
type Answer func(request proto.Message, stream grpc.ServerStream, honest func() error) error

// Lie makes the machine answer each List and Watch with answer, as one that an attacker has taken over; nil ends that. Open
// streams stay; see [Machine.BreakStreams].
func (m *Machine) Lie(answer Answer) { m.lie.Store(&answer) }

func (m *Machine) answer(request proto.Message, stream grpc.ServerStream, honest func() error) error {
	if lie := m.lie.Load(); lie != nil && *lie != nil {
		return (*lie)(request, stream, honest)
	}

	return honest()
}

// ExpireCertificate makes apid present a certificate that expired an hour ago. Open connections stay; see [Machine.BreakConnections].
func (m *Machine) ExpireCertificate() {
	m.certificateTime.Store(m.cluster.now().Add(-serverCertificateValidity - time.Hour).Unix())
}

// RenewCertificate makes apid present a certificate that is valid from now on, as Talos does when addresses change.
func (m *Machine) RenewCertificate() { m.certificateTime.Store(m.cluster.now().Unix()) }
