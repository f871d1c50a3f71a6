package csrapproval_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// Policies of a control-plane Node, by what leads.
var leaders = map[string]csrpolicy.Policy{
	"extension": {EnforceCredential: true, RequireStatement: true},
	"pod":       {EnforceCredential: true},
}

// secondControlPlane returns a control-plane machine that joined, and whose EPHEMERAL volume is known. An instance of the
// extension does not run on it yet.
func (s suite) secondControlPlane() worker {
	s.Helper()

	w := s.bootAs(s.plan(), talostest.MachineSpec{Type: talosmachine.TypeControlPlane, ServeSocket: true})
	require.NoError(s, w.machine.FormatVolume(s.Context(), constants.EphemeralPartitionLabel, "volume of "+w.name))
	s.register(w)
	s.promote(w)

	return w
}

// promote makes the machine a member of etcd, and labels its Node as Talos does.
func (s suite) promote(w worker) {
	s.Helper()
	s.Talos.SetEtcdMembers(controlPlaneIP, w.addr)
	s.Cleanup(func() { s.Talos.SetEtcdMembers(controlPlaneIP) })
	s.PatchNode(w.name, "", labeledControlPlane)
	s.awaitMachine(w.name, "as a control-plane machine", func(m machine.Machine) bool { return m.ControlPlane != nil })
}

// state makes the machine state a credential as an instance of the extension does at its start, with the permissions of the
// product.
func (s suite) state(w worker, credential *rest.Config) {
	s.Helper()
	w.machine.SetKubeletCertificate(slices.Concat(credential.CertData, credential.KeyData))

	socket, err := talosapi.OpenSocket(w.machine.Socket())
	require.NoError(s, err)

	defer socket.Close()

	ctx, cancel := context.WithCancel(s.Context())
	clk := clocktesting.NewFakeClock(time.Now())
	ended := make(chan struct{})

	go func() {
		defer close(ended)

		(&recorder.Recorder{Client: s.main.Client, Socket: socket, Events: s.main.Recorder, Clock: clk, Config: func() string { return "" }}).Run(ctx)
	}()

	s.eventually("the instance waits after it has stated the certificate", func() bool {
		switch {
		case !clk.HasWaiters():
			return false
		case noderecord.Of(s.Node(w.name)).Stated == ctest.IDOf(credential):
			return true
		}

		clk.Step(2 * time.Minute)

		return false
	})
	cancel()
	<-ended
}

// When talos-ccm is installed, a client certificate that was obtained more than an hour ago may be an attacker's.
func TestStatement_CertificateOfUnknownOriginIsNotRecorded(t *testing.T) {
	s := alone(t)
	w := s.secondControlPlane()
	s.main.allow(w.name, leaders["extension"])

	stolen, kubelet := s.credential(w), s.credential(w)
	attack := s.post(w, request{config: stolen})
	s.assertUnexpected(attack)
	s.AwaitEvent(attack, csrapproval.ReasonUnexpectedCredential, "none is recorded", "Install the talos-ccm extension on the machine, or check it: talosctl -n ")

	rotated, _ := s.obtain(stolen, w)
	again := s.post(w, request{config: rotated})
	s.assertUnexpected(again)

	honest := s.post(w, request{config: kubelet})
	s.assertUnexpected(honest)
	assert.Empty(t, noderecord.Of(s.Node(w.name)).Credential)

	// The extension is installed there, and no operator is needed.
	s.state(w, kubelet)
	s.awaitIssued(honest)
	s.assertPending(attack)
	s.assertUndecided(again)
	assert.Equal(t, w.addr, noderecord.Of(s.Node(w.name)).Address)
}

// With the keys of a worker, an attacker receives the packets for a control-plane machine for some seconds, and reports
// another volume there.
func TestStatement_OutlastsMachineAtItsAddress(t *testing.T) {
	for name, policy := range leaders {
		t.Run(name, func(t *testing.T) {
			s := alone(t)
			w := s.secondControlPlane()
			s.main.allow(w.name, policy)

			kubelet := s.credential(w)
			s.state(w, kubelet)
			s.awaitIssued(s.post(w, request{config: kubelet}))

			known := s.AwaitNode(w.name, func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal(w.addr, noderecord.Of(n).Address) }).Labels
			impostor := s.bootAs(s.plan(), talostest.MachineSpec{Type: talosmachine.TypeControlPlane, Addresses: []talostest.Address{on("eth1", w.addr, 32)}})
			require.NoError(t, impostor.machine.SetNodename(t.Context(), w.name))
			require.NoError(t, impostor.machine.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, "attacker's"))

			s.routes.Store(w.addr, impostor.machine.Address())
			w.machine.BreakConnections()
			s.awaitMachine(w.name, "by the attacker's volume", func(m machine.Machine) bool { return m.Endpoint == w.addr && m.EphemeralID == "attacker's" })

			stolen, _ := s.obtain(s.bootstrapToken(), w)
			attack := s.post(w, request{config: stolen})
			s.assertUnexpected(attack)
			s.AwaitEvent(attack, csrapproval.ReasonUnexpectedCredential, ctest.IDOf(kubelet)+", which the machine itself stated. If the machine no longer runs the talos-ccm extension, check it: ")
			assert.Equal(t, known, s.Node(w.name).Labels)

			// It has its Node deleted, and registers a new one.
			s.Remove(w.name)
			s.register(w)
			s.main.allow(w.name, policy)
			s.awaitMachine(w.name, "by the attacker's volume", func(m machine.Machine) bool { return m.EphemeralID == "attacker's" })

			attack = s.post(w, request{config: stolen})
			s.assertUnexpected(attack)

			// The kubelet of the machine, which is back at its address, has obtained a new certificate.
			s.routes.Store(w.addr, w.machine.Address())
			impostor.machine.BreakConnections()
			s.PatchNode(w.name, "", labeledControlPlane) // the leader connects again
			s.awaitMachine(w.name, "by its volume", func(m machine.Machine) bool { return m.EphemeralID == "volume of "+w.name })
			s.awaitIssued(s.post(w, request{config: kubelet}))
			s.assertUndecided(attack)
		})
	}
}

// The next Node of the machine has its record before the machine has stated its certificate again, within a minute.
func TestStatement_OutlastsNode(t *testing.T) {
	s := alone(t)
	w := s.secondControlPlane()
	s.main.allow(w.name, leaders["pod"])

	kubelet := s.credential(w)
	s.state(w, kubelet)
	s.Remove(w.name)
	s.register(w)
	s.promote(w)
	s.main.allow(w.name, leaders["pod"])

	known := noderecord.Of(s.AwaitNode(w.name, func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Equal(ctest.IDOf(kubelet), noderecord.Of(n).Credential)
		asrt.Equal(w.addr, noderecord.Of(n).Address)
	}))

	// An attacker's machine responds at its address.
	s.format(w, "attacker's")
	s.awaitMachine(w.name, "by the attacker's volume", func(m machine.Machine) bool { return m.Endpoint == w.addr && m.EphemeralID == "attacker's" })

	stolen, _ := s.obtain(s.bootstrapToken(), w)
	attack := s.post(w, request{config: stolen})
	s.assertUnexpected(attack)
	s.AwaitEvent(attack, csrapproval.ReasonUnexpectedCredential, ctest.IDOf(kubelet)+", which the machine itself stated")
	assert.Equal(t, known, noderecord.Of(s.Node(w.name)))

	s.format(w, "volume of "+w.name)
	s.awaitIssued(s.post(w, request{config: kubelet}))
	s.assertUndecided(attack)
}

// The kubelet of a reinstalled machine obtains a certificate with the bootstrap token, as an attacker could.
func TestStatement_AcceptsReinstalledMachine(t *testing.T) {
	for name, policy := range leaders {
		t.Run(name, func(t *testing.T) {
			s := alone(t)
			w := s.secondControlPlane()
			s.main.allow(w.name, policy)
			s.state(w, s.credential(w))

			require.NoError(t, w.machine.SetIdentity(t.Context(), "reinstalled", ""))
			s.format(w, "reinstalled")

			renewed, _ := s.obtain(s.bootstrapToken(), w)
			pending := s.post(w, request{config: renewed})
			s.assertUnexpected(pending)

			s.state(w, renewed)
			s.awaitIssued(pending)
			s.AwaitEvent(w.name, recorder.ReasonCertificateReplaced, ctest.IDOf(renewed))

			// A machine without the extension needs an operator, who ends the statement.
			again, _ := s.obtain(s.bootstrapToken(), w)
			pending = s.post(w, request{config: again})
			s.assertUnexpected(pending)
			s.AwaitEvent(pending, csrapproval.ReasonUnexpectedCredential, fmt.Sprintf("=%s, which ends the statement", ctest.IDOf(again)))
			s.label(w, ctest.IDOf(again))
			s.awaitIssued(pending)
			assert.Empty(t, noderecord.Of(s.Node(w.name)).Stated)
		})
	}
}

// Until Talos has set the label of the control plane, any machine of the cluster may have responded for the Node.
func TestStatement_RecordOfWorkerDoesNotCountForControlPlane(t *testing.T) {
	for name, promote := range map[string]func(suite, worker){
		"same Node": suite.promote,
		"next Node": func(s suite, w worker) {
			s.Remove(w.name)
			s.register(w)
			s.promote(w)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := alone(t)
			w := s.bootAs(s.plan(), talostest.MachineSpec{Type: talosmachine.TypeControlPlane, ServeSocket: true})
			s.register(w)
			s.enforce(w)

			first := s.credential(w)
			s.awaitIssued(s.post(w, request{config: first}))
			s.awaitPinned(w, first)

			promote(s, w)
			s.main.allow(w.name, leaders["extension"])

			pending := s.post(w, request{config: first})
			s.assertUnexpected(pending)
			s.state(w, first)
			s.awaitIssued(pending)
			assert.NotContains(t, s.Node(w.name).Labels, noderecord.LabelRole)
		})
	}
}
