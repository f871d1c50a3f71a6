//go:build upgrade

package ccm_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// handoverLimit is how long a CSR may be pending because the leader changes between versions.
const handoverLimit = 30 * time.Second

var upgradeFlags = []string{openMetrics, "--leader-elect-retry-period=1s"}

// newFleet returns a cluster of two control-plane machines.
func newFleet(t *testing.T) (f *fleet, first, second *talostest.Machine) {
	t.Helper()
	t.Parallel()

	f = &fleet{suite: prepared(ctest.Start(t, kube.Options{}), talostest.Options{})}

	_, err := f.Kube.BootstrapToken(t.Context()) // with it, kubelets may rotate their client certificates
	require.NoError(t, err)

	var machines []*talostest.Machine

	for _, name := range []string{"cp-1", "cp-2"} {
		machines = append(machines, f.add(f.controlPlaneSpec(name)))
		f.configure(machines[len(machines)-1], "csrApproval: {credentialPinning: enforce}")
	}

	f.label(machines...)

	return f, machines[0], machines[1]
}

// verify requires that the leader approves the CSRs of all kubelets after a rotation, records their certificates, and approves
// no CSR with another certificate.
func (f *fleet) verify(leader string) {
	f.Helper()

	for _, k := range f.kubelets {
		f.awaitApproved(k.requestServing(k.config))
		k.rotate()
		f.awaitRecord(k)
		f.awaitApproved(k.requestServing(k.config))

		stolen := k.requestServing(k.otherCertificate())
		f.AwaitEvent(stolen, csrapproval.ReasonUnexpectedCredential, noderecord.LabelCredential)
		f.stolen = append(f.stolen, stolen)
	}

	for _, name := range f.stolen {
		assert.Empty(f, f.csr(name).Status.Conditions, "%s leads: CSR with an unexpected credential", leader)
	}
}

// handOver ends the leader, and requires that the next one approves CSRs in time: also those of kubelets that rotated their
// certificates while no instance led.
func (f *fleet) handOver(from, to *process) {
	f.Helper()

	from.terminate()

	began := time.Now()
	pending := map[string]*kubelet{}

	for i, k := range f.kubelets {
		if i%2 == 0 {
			k.rotate()
		} else if k.previous != nil { // a kubelet that failed to store its certificate
			pending[k.requestServing(k.previous)] = k
		}

		pending[k.requestServing(k.config)] = k
	}

	ctest.Eventually(f, "next instance leads", to.leads)

	led := time.Now()

	for name, k := range pending {
		f.awaitApproved(name)
		f.awaitRecord(k)
	}

	assert.LessOrEqual(f, time.Since(led), handoverLimit)
	f.Logf("%s: next instance led after %s, all CSRs approved and recorded %s later", f.Name(), led.Sub(began), time.Since(led))
}

// spawnOlder starts the older version on a machine.
func (s *suite) spawnOlder(on *talostest.Machine) *process {
	s.Helper()

	path, err := builder.Older()
	require.NoError(s, err)

	return s.spawnExecutable(path, on, upgradeFlags...)
}

// During an upgrade or a downgrade, both versions run, and each of them may lead. No Node loses its record, and no CSR waits for
// longer than the other instance takes to lead.
func TestUpgrade_KeepsRecordsAndApprovesCSRs(t *testing.T) {
	f, first, second := newFleet(t)
	f.add(talostest.MachineSpec{Nodename: "worker-1"})

	old := f.spawnOlder(first)
	f.verify("older")

	// The newer version states the certificate of its machine while the older one leads.
	newer := f.spawn(second, upgradeFlags...)
	f.awaitStated(second)
	f.verify("older, beside newer")

	f.handOver(old, newer)
	upgraded := f.spawn(first, upgradeFlags...)
	f.awaitStated(first)
	f.verify("newer")

	// The record of this Node has no certificate yet when the older version leads again.
	last := f.add(talostest.MachineSpec{Nodename: "worker-2"})
	f.AwaitNode(last.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal(last.Address(), noderecord.Of(n).Address) })

	upgraded.terminate()

	old = f.spawnOlder(first)
	f.handOver(newer, old)
	f.verify("older, after newer")

	f.add(talostest.MachineSpec{Nodename: "worker-3"})
	f.verify("older, after newer, with a new Node")

	newer = f.spawn(second, upgradeFlags...)
	f.handOver(old, newer)
	f.spawn(first, upgradeFlags...)
	f.awaitStated(first, second)
	f.verify("newer, after older")

	for _, k := range f.kubelets {
		f.AwaitNode(k.machine.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.Len(noderecord.Of(n).Volume, noderecord.IDLength) })
	}
}
