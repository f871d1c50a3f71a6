package talostest

import (
	"context"
	"fmt"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
)

// Stop takes the machine down without warning: all connections break and new ones are reset. Its resources are carried over into the
// memory of its next start, with versions and watch history starting again: a bookmark from before is refused with FailedPrecondition.
// What a test changes while the machine is down is there when it comes up. For an orderly reboot, call [Machine.SetStage] first.
func (m *Machine) Stop(ctx context.Context) error {
	m.power.Lock()
	defer m.power.Unlock()

	next := newBoot(m.cluster.definitions, m.unsupported)

	for _, way := range m.links() {
		way.takeDown()
	}

	m.BreakStreams()

	m.addressing.Lock()
	defer m.addressing.Unlock()

	if err := m.currentBoot().copyInto(ctx, next); err != nil {
		return fmt.Errorf("stop machine %s: %w", m.nodename, err)
	}

	if err := next.forgetAddresses(ctx); err != nil {
		return fmt.Errorf("stop machine %s: %w", m.nodename, err)
	}

	m.mu.Lock()
	m.memory = next
	m.mu.Unlock()

	return m.deriveNodeAddresses(ctx)
}

// forgetAddresses drops the lists of all addresses a machine has ever had: they live in memory only.
func (b *boot) forgetAddresses(ctx context.Context) error {
	for _, id := range []string{
		network.NodeAddressAccumulativeID,
		network.FilteredNodeAddressID(network.NodeAddressAccumulativeID, k8s.NodeAddressFilterNoK8s),
	} {
		list := network.NewNodeAddress(network.NamespaceName, id)

		if err := b.state.Destroy(ctx, list.Metadata()); err != nil {
			return fmt.Errorf("forget node addresses %s: %w", id, err)
		}
	}

	return nil
}

// Start brings a stopped machine up again.
func (m *Machine) Start() {
	m.power.Lock()
	defer m.power.Unlock()

	for _, way := range m.links() {
		way.bringUp()
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

// CutOff makes all packets between apid and its clients vanish: connections stay open but nothing flows, and the handshake of a new one
// hangs. machine.sock is not affected. A machine that is stopped while cut off looks powered off: its clients learn nothing.
func (m *Machine) CutOff() { m.api.cut() }

// Reconnect ends [Machine.CutOff]. What was sent meanwhile arrives; connections that the machine has given up are reset.
func (m *Machine) Reconnect() { m.api.restore() }

// BreakStreams ends every open stream of both transports with Unavailable. Connections stay open, and so does the watch history.
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

// ExpireWatches ends every open stream, and refuses to resume any from its bookmark. To a client this is what happens to a watch that
// breaks when it is older than 15 minutes, which the COSI client does not resume: exactly one Errored event, on a machine that is up.
func (m *Machine) ExpireWatches() {
	m.mu.Lock()
	m.memory = m.memory.withoutHistory()
	m.mu.Unlock()

	m.BreakStreams()
}

// BreakConnections resets every open connection to apid. New ones are served at once.
func (m *Machine) BreakConnections() { m.api.dropAll() }

// SlowDown makes each RPC, and each TLS handshake, wait this long before it is answered; zero ends it. Events of a watch that is
// already open are not delayed.
func (m *Machine) SlowDown(delay time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()

	m.delay = delay
}

// Freeze makes the machine answer nothing, while its connections stay healthy: HTTP/2 pings are answered, RPCs and watches are not.
// Only a deadline of the client's own notices that.
func (m *Machine) Freeze() { m.frozen.shut() }

// Thaw ends [Machine.Freeze].
func (m *Machine) Thaw() { m.frozen.open() }

// ExpireCertificate makes apid show a certificate that expired an hour ago. Open connections stay; see [Machine.BreakConnections].
func (m *Machine) ExpireCertificate() { m.setCertificateExpired(true) }

// RenewCertificate makes apid show a valid certificate again.
func (m *Machine) RenewCertificate() { m.setCertificateExpired(false) }

func (m *Machine) setCertificateExpired(expired bool) {
	m.mu.Lock()
	defer m.mu.Unlock()

	m.certificateExpired = expired
}
