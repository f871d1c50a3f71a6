package csrapproval_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// enforce lets requests of the worker be approved only with the pinned credential.
func (s suite) enforce(w worker) {
	s.main.allow(w.name, csrpolicy.Policy{EnforceCredential: true})
}

// enforced returns a joined worker whose requests need the pinned credential.
func (s suite) enforced() worker {
	s.Helper()

	w := s.known()
	s.enforce(w)

	return w
}

// pinned returns a worker and its kubelet's credential, which is pinned.
func (s suite) pinned() (worker, *rest.Config) {
	s.Helper()

	w := s.enforced()

	return w, s.pin(w)
}

// pin returns the credential of the worker's kubelet, which is pinned after its first request.
func (s suite) pin(w worker) *rest.Config {
	s.Helper()

	kubelet := s.credential(w)
	s.awaitIssued(s.post(w, request{config: kubelet}))
	s.awaitPinned(w, kubelet)

	return kubelet
}

// credential returns a client certificate of the worker that no request obtained, such as one that was issued long ago.
func (s suite) credential(w worker) *rest.Config {
	s.Helper()

	config, err := s.Kube.UserConfig("system:node:"+w.name, "system:nodes")
	require.NoError(s, err)

	return config
}

func (s suite) bootstrapToken() *rest.Config { return s.Kube.TokenConfig(s.token) }

// obtain requests a client certificate for the worker as its kubelet does. kube-controller-manager approves and issues it.
func (s suite) obtain(requester *rest.Config, w worker) (credential *rest.Config, requestName string) {
	s.Helper()

	key := newKey()
	requestName = s.post(w, request{
		config: requester, key: key, names: []string{}, signer: certificatesv1.KubeAPIServerClientKubeletSignerName,
		usages: usages{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
	})

	der, err := x509.MarshalECPrivateKey(key)
	require.NoError(s, err)

	certificate := s.awaitIssued(requestName).Status.Certificate

	return s.Kube.CertificateConfig(certificate, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})), requestName
}

func (s suite) awaitPinned(w worker, credential *rest.Config) {
	s.Helper()
	s.AwaitNode(w.name, ctest.Labeled(noderecord.LabelCredential, ctest.IDOf(credential)))
}

// awaitRemedy waits for the Event on an unexpected credential. It is not truncated.
func (s suite) awaitRemedy(name string) {
	s.Helper()
	s.AwaitEvent(name, csrapproval.ReasonUnexpectedCredential, noderecord.LabelCredential+"="+csrpolicy.CredentialID(s.get(name)))
}

// assertUnexpected fails unless the request stays pending because of its credential, with an Event that has the remedy.
func (s suite) assertUnexpected(name string) {
	s.Helper()
	s.awaitDeferred(name, csrpolicy.CodeUnexpectedCredential)
	s.awaitRemedy(name)
	s.assertPending(name)
}

// assertStolenUseless fails unless neither a certificate that the bootstrap token obtains nor a rotation of it suffices
// for a request.
func (s suite) assertStolenUseless(w worker) {
	s.Helper()

	stolen, _ := s.obtain(s.bootstrapToken(), w)
	s.assertUnexpected(s.post(w, request{config: stolen}))

	renewed, _ := s.obtain(stolen, w)
	s.assertUnexpected(s.post(w, request{config: renewed}))
}

func (s suite) label(w worker, credential string) {
	s.Helper()
	s.PatchNode(w.name, "", `{"metadata":{"labels":{"`+noderecord.LabelCredential+`":"`+credential+`"}}}`)
}

// The bootstrap token is in the machine configuration of every worker, and obtains a client certificate for any Node.
func TestPinning_DefersBootstrapTokenForExistingNode(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()

	s.assertStolenUseless(w)
	s.awaitIssued(s.post(w, request{config: kubelet}))
	assert.Equal(t, ctest.IDOf(kubelet), s.Node(w.name).Labels[noderecord.LabelCredential])
}

func TestPinning_DefersBootstrapTokenWithoutPin(t *testing.T) {
	s := alone(t)
	w := s.enforced()

	t.Parallel() // the Node ages while the tests before run
	s.eventually("the Node is older than clocks may differ", func() bool {
		return time.Since(s.Node(w.name).CreationTimestamp.Time) > 15*time.Second
	})
	s.enforce(w) // there may be another leader

	s.assertStolenUseless(w)
	s.pin(w)
}

func TestPinning_Warns(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()
	s.main.allow(w.name, csrpolicy.Policy{})

	stolen, _ := s.obtain(s.bootstrapToken(), w)
	name := s.post(w, request{config: stolen})
	s.awaitIssued(name)
	s.awaitRemedy(name)

	block, _ := pem.Decode(stolen.CertData)
	certificate, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	s.AwaitEvent(name, csrapproval.ReasonUnexpectedCredential, fmt.Sprintf("serial number %X, requested with a bootstrap token", certificate.SerialNumber.Bytes()))
	assert.Equal(t, ctest.IDOf(kubelet), s.Node(w.name).Labels[noderecord.LabelCredential])
}

func TestPinning_FollowsRotation(t *testing.T) {
	s := parallel(t)
	w, first := s.pinned()

	second, _ := s.obtain(first, w)
	s.awaitIssued(s.post(w, request{config: second}))
	s.awaitPinned(w, second)

	// A kubelet that failed to store the second certificate.
	s.awaitIssued(s.post(w, request{config: first}))

	third, _ := s.obtain(second, w)
	s.awaitPinned(w, third)
	s.awaitIssued(s.post(w, request{config: third}))
	s.assertUnexpected(s.post(w, request{config: first}))
}

// The recommendation to limit the bootstrap token: kubelets that have joined do not need it.
func TestPinning_DeletedBootstrapTokenIsOfNoUse(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()

	token, err := s.Kube.CreateBootstrapToken(t.Context(), "a1b2c3")
	require.NoError(t, err)

	requester := s.Kube.TokenConfig(token)
	client, err := kubernetes.NewForConfig(requester)
	require.NoError(t, err)

	accepted := func() bool {
		_, err := client.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})

		return !apierrors.IsUnauthorized(err)
	}

	s.eventually("the token is accepted", accepted)
	s.obtain(requester, w)
	require.NoError(t, s.Client.CoreV1().Secrets(metav1.NamespaceSystem).Delete(t.Context(), "bootstrap-token-a1b2c3", metav1.DeleteOptions{}))
	s.eventually("the token is rejected", func() bool { return !accepted() })

	renewed, _ := s.obtain(kubelet, w)
	s.awaitIssued(s.post(w, request{config: renewed}))
}

// The API server forgets the request for a client certificate within about an hour.
func TestPinning_UnseenRotationNeedsOperator(t *testing.T) {
	s := alone(t)
	w, first := s.pinned()

	s.main.Stop()

	second, name := s.obtain(first, w)
	s.remove(name)
	s.restart()
	s.enforce(w)

	pending := s.post(w, request{config: second})
	s.assertUnexpected(pending)
	s.label(w, ctest.IDOf(second))
	s.awaitIssued(pending)
}

func TestPinning_AcceptsReinstalledMachine(t *testing.T) {
	s := parallel(t)
	w, _ := s.pinned()

	renewed, _ := s.obtain(s.bootstrapToken(), w)
	name := s.post(w, request{config: renewed})
	s.assertUnexpected(name)

	require.NoError(t, w.machine.SetIdentity(s.Context(), "reinstalled", ""))
	w.machine.BreakConnections()
	s.awaitIssued(name)
	s.awaitPinned(w, renewed)
}

// format formats the volume on which the kubelet keeps its certificates.
func (s suite) format(w worker, uuid string) {
	s.Helper()
	require.NoError(s, w.machine.FormatVolume(s.Context(), constants.EphemeralPartitionLabel, uuid))
	w.machine.BreakConnections()
}

// A new node ID alone, as after STATE was wiped, replaces no certificate.
func TestPinning_AcceptsMachineWithWipedVolume(t *testing.T) {
	s := parallel(t)

	w := s.boot(s.plan())
	s.format(w, "85b1a5d4-94ab-4b6c-9e69-6d2f5ac6ee3b")
	s.register(w)
	s.awaitMachine(w.name, "by its volume", func(m machine.Machine) bool { return m.EphemeralID != "" })
	s.enforce(w)
	s.pin(w)

	renewed, _ := s.obtain(s.bootstrapToken(), w)
	name := s.post(w, request{config: renewed})
	s.assertUnexpected(name)

	require.NoError(t, w.machine.SetIdentity(s.Context(), "new", ""))
	w.machine.BreakConnections()
	s.awaitMachine(w.name, "by its ID", func(m machine.Machine) bool { return m.NodeID == "new" })
	s.assertPending(name)

	s.format(w, "0d5e7f2e-2c39-4b52-a3a6-8c9c53a2a6a0")
	s.awaitIssued(name)
	s.awaitPinned(w, renewed)
}

// under boots a machine at another address that reports the worker's nodename and address.
func (s suite) under(w worker) worker {
	s.Helper()

	other := s.boot(s.plan(), on("eth1", w.addr, 32))
	require.NoError(s, other.machine.SetNodename(s.Context(), w.name))
	other.name = w.name

	return other
}

// The bootstrap token obtains credentials of the worker's kubelet, and with them an attacker can write the address at
// which the machine is dialed. The attacker's machine is of the cluster, and reports the worker's name and addresses.
func TestPinning_KeepsRecordDespiteImpostor(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()
	known := s.Node(w.name).Labels
	impostor := s.under(w)
	stolen, _ := s.obtain(s.bootstrapToken(), w)

	s.move(w, impostor.addr)
	s.awaitCached(w.name, impostor.addr.String())

	name := s.post(w, request{config: stolen})
	s.assertUnexpected(name)
	assert.Empty(t, impostor.machine.Calls(), "the attacker's machine was dialed")

	// The machine is down, and the attacker's machine is dialed. It reports the machine's identity, and then another one.
	require.NoError(t, w.machine.Stop(t.Context()))

	for _, id := range []string{s.main.Inventory.Get(w.name).Last.NodeID, "other"} {
		require.NoError(t, impostor.machine.SetIdentity(t.Context(), id, ""))
		impostor.machine.BreakConnections()
		s.awaitMachine(w.name, "at "+impostor.addr.String(), func(m machine.Machine) bool { return m.Endpoint == impostor.addr && m.NodeID == id })
		s.assertPending(name)
	}

	w.machine.Start()
	s.move(w, w.addr)
	s.awaitMachine(w.name, "at its address", func(m machine.Machine) bool { return m.Endpoint == w.addr })
	s.awaitIssued(s.post(w, request{config: kubelet}))
	s.assertUndecided(name)
	assert.Equal(t, known, s.Node(w.name).Labels)
}

// A machine has another address after a reboot, such as by DHCP. Its kubelet requests a certificate for that address.
func TestPinning_FollowsMachineToNewAddress(t *testing.T) {
	for name, leave := range map[string]func(context.Context, *talostest.Machine) error{
		"nothing is at the old address":   func(ctx context.Context, m *talostest.Machine) error { return m.Stop(ctx) },
		"another machine has the address": func(ctx context.Context, m *talostest.Machine) error { return m.SetNodename(ctx, "other") },
		"packets are dropped":             func(_ context.Context, m *talostest.Machine) error { return m.BlackHole() },
	} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)
			w, kubelet := s.pinned()
			moved := s.under(w)
			require.NoError(t, moved.machine.SetIdentity(t.Context(), s.main.Inventory.Get(w.name).Machine.NodeID, ""))
			require.NoError(t, leave(t.Context(), w.machine))
			w.machine.BreakConnections()

			start := time.Now()
			s.move(w, moved.addr)
			s.awaitIssued(s.post(moved, request{config: kubelet}))
			t.Logf("the machine had a certificate for its address %s after the kubelet reported it", time.Since(start).Round(time.Millisecond))

			// From now on, the record can be replaced there.
			require.NoError(t, moved.machine.SetIdentity(t.Context(), "reinstalled", ""))
			moved.machine.BreakConnections()

			renewed, _ := s.obtain(s.bootstrapToken(), w)
			s.awaitIssued(s.post(moved, request{config: renewed}))
			s.awaitPinned(w, renewed)
		})
	}
}

// A Node that is deleted and registers again, such as after its machine announced a reset, keeps its record.
func TestPinning_RecordOutlivesNode(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()
	known := s.Node(w.name).Labels

	s.Remove(w.name)

	stolen, _ := s.obtain(s.bootstrapToken(), w)
	pending := s.post(w, request{config: stolen})
	s.register(w)
	s.assertUnexpected(pending)

	s.awaitIssued(s.post(w, request{config: kubelet}))

	for _, label := range []string{noderecord.LabelCredential, noderecord.LabelContext, noderecord.LabelAddress} {
		assert.Equal(t, known[label], s.Node(w.name).Labels[label], label)
	}

	// A reinstalled machine at the same address needs no operator.
	s.Remove(w.name)
	require.NoError(t, w.machine.SetIdentity(t.Context(), "reinstalled", ""))
	w.machine.BreakConnections()
	s.register(w)
	s.awaitIssued(pending)
	s.awaitPinned(w, stolen)
}

// Two requests at once: the Node is pinned to the first, and the second is reviewed again.
func TestPinning_PinsOneOfTwoConcurrentRequests(t *testing.T) {
	s := parallel(t)
	w := s.plan()
	names := []string{s.post(w, request{config: s.credential(w)}), s.post(w, request{config: s.credential(w)})}

	s.boot(w)
	s.enforce(w)
	s.register(w)

	first := s.awaitRequest(w, "and it is approved", func(csr *certificatesv1.CertificateSigningRequest, _ []netip.Addr) bool { return approved(csr) })
	pending := slices.DeleteFunc(names, func(name string) bool { return name == first.Name })
	s.assertUnexpected(pending[0])
}

// API servers before 1.32 do not report the credential.
func TestPinning_AcceptsRequestsWithoutCredential(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()

	s.awaitIssued(s.post(w, request{}))
	assert.Equal(t, ctest.IDOf(kubelet), s.Node(w.name).Labels[noderecord.LabelCredential])
}

func TestPinning_KubeletCannotWriteLabels(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()

	client, err := kubernetes.NewForConfig(kubelet)
	require.NoError(t, err)

	labels := s.Node(w.name).Labels

	for _, label := range []string{noderecord.LabelCredential, noderecord.LabelPrevious, noderecord.LabelContext, noderecord.LabelAddress} {
		for _, value := range []string{"null", `"0"`} {
			if _, present := labels[label]; !present && value == "null" {
				continue // changes nothing
			}

			patch := []byte(`{"metadata":{"labels":{"` + label + `":` + value + `}}}`)
			_, err := client.CoreV1().Nodes().Patch(t.Context(), w.name, types.MergePatchType, patch, metav1.PatchOptions{})
			assert.True(t, apierrors.IsForbidden(err), "%s=%s: %v", label, value, err)
		}
	}

	err = client.CoreV1().Nodes().Delete(t.Context(), w.name, metav1.DeleteOptions{})
	assert.True(t, apierrors.IsForbidden(err), "delete node: %v", err)
}
