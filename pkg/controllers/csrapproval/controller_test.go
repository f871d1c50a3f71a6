package csrapproval_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// The first tests disturb others and run sequentially.

func TestController_ApprovesAfterAPIServerRestart(t *testing.T) {
	s := alone(t)

	early, late := s.plan(), s.plan()
	before := s.post(early, request{})
	s.awaitDeferred(before, csrpolicy.CodeNodeUnknown)

	stopping, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()

	s.Kube.StopAPIServer(stopping)

	early, late = s.boot(early), s.boot(late)

	require.NoError(t, s.Kube.StartAPIServer(s.Context()))
	s.register(early)
	s.awaitIssued(before)

	after := s.post(late, request{})
	s.register(late)
	s.awaitIssued(after)
}

func TestController_NewLeaderDecidesPendingRequests(t *testing.T) {
	s := alone(t)

	w := s.plan()
	deferred := s.post(w, request{})
	s.awaitDeferred(deferred, csrpolicy.CodeNodeUnknown)

	s.main.Stop()
	s.register(s.boot(w))
	unseen := s.post(w, request{})
	s.restart()

	s.awaitIssued(deferred)
	s.awaitIssued(unseen)
}

// The machines respond to a new leader one after the other.
func TestController_NewLeaderWaitsForMachines(t *testing.T) {
	s := alone(t)

	both := s.plan().addr // which the Nodes do not list
	liar, victim := s.issued(on("eth1", both, 24)), s.issued(on("eth1", both, 24))
	name := s.post(liar, request{ips: []netip.Addr{both}})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)

	victim.machine.SlowDown(500 * time.Millisecond)
	s.restart()

	s.awaitIssued(s.post(victim, request{}))
	s.assertPending(name)
}

// A machine that stalls holds up only what is not recorded.
func TestController_NewLeaderApprovesRecordedAddresses(t *testing.T) {
	s := alone(t)

	recorded, kubelet := s.pinned()
	second := s.plan().addr
	silent, other := s.issued(), s.issued(on("eth1", second, 24))
	release := s.hold(silent)

	s.restart()
	s.enforce(recorded)

	foreign := s.post(recorded, request{config: kubelet, ips: []netip.Addr{recorded.addr, silent.addr}})
	unrecorded := s.post(other, request{ips: []netip.Addr{second}})
	s.awaitIssued(s.post(recorded, request{config: kubelet}))
	s.assertUndecided(unrecorded)
	s.assertUndecided(foreign)
	require.True(t, s.main.machineIs(silent.name, inventory.Unknown))

	release()
	s.awaitIssued(unrecorded)
	s.awaitDenied(foreign)
}

// Requests and Nodes are watched separately, and the kubelet may see a newer version of its Node.
func TestController_ReadsNodeBeforeDenial(t *testing.T) {
	s := alone(t)
	slow, w, added := s.another(clock.RealClock{}), s.join(), s.plan().addr
	s.eventually("the machine is known", func() bool { return slow.machineIs(w.name, inventory.Current) })

	s.main.unmanaged.Store(w.name, nil)
	slow.freeze()
	s.list(w, added)
	s.awaitDeferred(s.post(w, request{ips: []netip.Addr{added}}), csrpolicy.CodeUnknownAddress)
}

func TestController_TwoInstancesDecideEachRequestOnce(t *testing.T) {
	s := alone(t)
	s.another(clock.RealClock{})

	w := s.join()
	for range 10 {
		assert.Len(t, s.awaitIssued(s.post(w, request{})).Status.Conditions, 1)
	}
}

func TestController_ApprovedRequestsAreIssued(t *testing.T) {
	s := parallel(t)
	w := s.join()

	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)

	for name, r := range map[string]request{
		"names and addresses": {},
		"addresses only":      {ips: []netip.Addr{w.addr}},
		"a name only":         {names: []string{w.name}},
		"an RSA key": {key: key, usages: usages{
			certificatesv1.UsageKeyEncipherment, certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth,
		}},
	} {
		csr := s.awaitIssued(s.post(w, r))
		certificate := s.certificateOf(csr)

		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(s.Kube.ClientCA())

		host := w.addr.String()
		if len(certificate.IPAddresses) == 0 {
			host = w.name
		}

		_, err := certificate.Verify(x509.VerifyOptions{Roots: roots, DNSName: host})
		require.NoError(t, err, name)

		condition := csr.Status.Conditions[0]
		assert.Equal(t, csrpolicy.CodeVerified, condition.Reason, name)
		assert.NotEmpty(t, condition.Message, name)
		s.AwaitEvent(csr.Name, csrapproval.ReasonApproved)
		assert.Len(t, s.Events(csr.Name, csrapproval.ReasonApproved), 1)
	}
}

func (s suite) certificateOf(csr *certificatesv1.CertificateSigningRequest) *x509.Certificate {
	s.Helper()

	block, _ := pem.Decode(csr.Status.Certificate)
	certificate, err := x509.ParseCertificate(block.Bytes)
	require.NoError(s, err)

	return certificate
}

func TestController_DecidesOnceNodeAndMachineAreKnown(t *testing.T) {
	for decision, names := range map[string][]string{"approves": nil, "denies": {"*.example.org"}} {
		t.Run(decision, func(t *testing.T) {
			s := parallel(t)

			w := s.plan()
			name := s.post(w, request{names: names})
			s.awaitDeferred(name, csrpolicy.CodeNodeUnknown)

			// The Node may not be managed, and another approver may be responsible for it.
			s.register(w)
			s.awaitDeferred(name, csrpolicy.CodeMachineUnknown)
			s.assertUndecided(name)

			// The reflector dials the address again after a backoff.
			s.boot(w)

			if names == nil {
				s.awaitIssued(name)
			} else {
				s.awaitDenied(name)
			}
		})
	}
}

func TestController_ApprovesOnceNodeExists(t *testing.T) {
	s := parallel(t)

	w := s.boot(s.plan())
	name := s.post(w, request{})
	s.awaitDeferred(name, csrpolicy.CodeNodeUnknown)

	s.register(w)
	s.awaitIssued(name)
}

// A finalizer can keep a Node for hours.
func TestController_DefersWhileNodeIsBeingDeleted(t *testing.T) {
	s := parallel(t)
	w := s.known()

	s.PatchNode(w.name, "", `{"metadata":{"finalizers":["test/drain"]}}`)
	require.NoError(t, s.Client.CoreV1().Nodes().Delete(s.Context(), w.name, metav1.DeleteOptions{}))
	defer s.PatchNode(w.name, "", `{"metadata":{"finalizers":null}}`)

	s.eventually("the deletion is in the cache", func() bool {
		node, err := s.main.Nodes.Lister().Get(w.name)

		return err == nil && node.DeletionTimestamp != nil
	})

	name := s.post(w, request{})
	s.AwaitEvent(name, csrapproval.ReasonDeferred, csrpolicy.CodeNodeDeleting, "is being deleted")
	s.assertPending(name)
}

func TestController_ApprovesControlPlaneMachine(t *testing.T) {
	s := parallel(t)
	s.awaitIssued(s.post(worker{name: controlPlane, addr: controlPlaneIP}, request{}))
}

func TestController_ApprovesUnknownAddressOnce(t *testing.T) {
	for what, allow := range map[string]func(s suite, w worker, addr netip.Addr){
		"machine reports it": func(s suite, w worker, addr netip.Addr) { s.report(w, "eth1", addr) },
		"operator allows it": func(s suite, w worker, addr netip.Addr) {
			s.main.allow(w.name, csrpolicy.Policy{ExtraIPs: []netip.Addr{addr}})
		},
	} {
		t.Run(what, func(t *testing.T) {
			s := parallel(t)

			w, added := s.join(), s.plan().addr
			s.list(w, added)
			name := s.post(w, request{names: []string{w.name}, ips: []netip.Addr{w.addr, added}})
			s.awaitDeferred(name, csrpolicy.CodeUnknownAddress)

			allow(s, w, added)
			s.awaitIssued(name)
		})
	}
}

func TestController_DefersAddressOfTwoMachines(t *testing.T) {
	s := parallel(t)

	both := s.plan().addr
	one, other := s.issued(on("eth1", both, 24)), s.issued(on("eth1", both, 24))
	ofOne, ofOther := s.post(one, request{ips: []netip.Addr{both}}), s.post(other, request{ips: []netip.Addr{both}})
	s.awaitDeferred(ofOne, csrpolicy.CodeOwnedByOthers)
	s.awaitDeferred(ofOther, csrpolicy.CodeOwnedByOthers)

	// The machine that no longer reports the address may be another machine.
	require.NoError(t, other.machine.RemoveAddress(s.Context(), "eth1", netip.PrefixFrom(both, 24)))
	s.assertPending(ofOne)
	assert.Equal(t, csrpolicy.CodeNotOwned, s.awaitDenied(ofOther).Reason)
}

func TestController_DefersAddressListedByAnotherNode(t *testing.T) {
	s := parallel(t)

	addr, moved := s.plan().addr, s.plan().addr
	w := s.join(on("eth1", addr, 24))

	// A Node with another operating system, whose machine is never reached.
	foreign := worker{name: "foreign-" + w.name, addr: addr}
	s.Register(kube.NodeSpec{Name: foreign.name, NodeIPs: []netip.Addr{addr}, OSImage: "Debian GNU/Linux"})
	s.awaitCached(foreign.name)

	name := s.post(w, request{ips: []netip.Addr{addr}})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)

	s.move(foreign, moved)
	s.patchStatus(foreign.name, fmt.Sprintf(`{"addresses":[{"$patch":"replace"},{"type":"InternalIP","address":%q}]}`, moved))
	s.awaitIssued(name)
}

func TestController_DefersWhenAnotherMachineResponds(t *testing.T) {
	s := parallel(t)

	impostor := s.plan()
	impostor.addr = s.join().addr
	s.register(impostor)

	name := s.post(impostor, request{})
	s.awaitDeferred(name, csrpolicy.CodeMachineMismatch)
	s.assertPending(name)
}

// A machine that takes over the address of another one responds there with a certificate that Talos has issued for it,
// and can report anything.
func TestController_DefersAddressOfImpersonatedMachine(t *testing.T) {
	for name, machineAt := range map[string]func(s suite, victim, attacker worker) *talostest.Machine{
		"as itself": func(_ suite, _, attacker worker) *talostest.Machine { return attacker.machine },
		"as the other, without the address": func(s suite, victim, _ worker) *talostest.Machine {
			return s.boot(worker{name: victim.name, addr: s.plan().addr}).machine
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)

			victim, attacker := s.plan(), s.join()
			s.routes.Store(victim.addr, machineAt(s, victim, attacker).Address())
			s.register(victim)
			s.eventually("a machine responds", func() bool {
				return s.main.machineIs(victim.name, inventory.Current) || s.main.machineIs(victim.name, inventory.Mismatch)
			})

			s.report(attacker, "eth1", victim.addr)
			s.awaitMachine(attacker.name, "to have the address", func(m machine.Machine) bool { return m.HasAddress(victim.addr) })

			name := s.post(attacker, request{ips: []netip.Addr{victim.addr}})
			s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
			s.assertPending(name)
		})
	}
}

// attack is a request that must never be issued.
type attack struct {
	request

	denied string // reason; empty if the request stays pending
}

func attacks(w, victim worker) map[string]attack {
	own := func(names ...string) request { return request{names: append(names, w.name), ips: []netip.Addr{w.addr}} }
	at := func(ip string) request {
		return request{names: []string{w.name}, ips: []netip.Addr{netip.MustParseAddr(ip), w.addr}}
	}
	clientUsages := usages{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}

	return map[string]attack{
		"another's address and no name":         {request{ips: []netip.Addr{victim.addr}}, csrpolicy.CodeNotOwned},
		"an unknown address and no name":        {request{ips: []netip.Addr{netip.MustParseAddr("198.51.100.1")}}, csrpolicy.CodeNotOwned},
		"the control plane's name":              {own(controlPlane), csrpolicy.CodeNotOwned},
		"another worker's name":                 {own(victim.name), csrpolicy.CodeNotOwned},
		"the API server's name":                 {own("kubernetes.default.svc"), csrpolicy.CodeClusterName},
		"the API server's name in capitals":     {own("KUBERNETES.default.svc"), csrpolicy.CodeClusterName},
		"its name with the cluster's domain":    {own("kubernetes.default.svc.cluster.local"), csrpolicy.CodeClusterName},
		"a wildcard":                            {own("*.default.svc"), csrpolicy.CodeWildcard},
		"a service":                             {own("vault.secrets.svc"), csrpolicy.CodeClusterName},
		"any name":                              {own("example.org"), csrpolicy.CodeNotOwned},
		"the API server's address":              {at("127.0.0.1"), csrpolicy.CodeSpecialAddress},
		"the control plane's address":           {at(controlPlaneIP.String()), csrpolicy.CodeNotOwned},
		"the service address of the API server": {at("10.0.0.1"), csrpolicy.CodeClusterAddress},
		"a service address":                     {at("10.0.7.7"), csrpolicy.CodeClusterAddress},
		"a service address that Talos knows":    {at("10.96.0.10"), ""},
		"a pod's address":                       {at("10.244.3.3"), ""},
		"the virtual address":                   {at(virtualIP.String()), ""},
		"for clients":                           {request{usages: clientUsages}, csrpolicy.CodeUsages},
		"of another organization":               {request{organization: "system:masters"}, csrpolicy.CodeSubject},
		"of a user that is not a kubelet":       {request{user: "admin", groups: []string{"system:masters"}}, ""},
		"without the group of kubelets":         {request{groups: []string{"system:masters"}}, csrpolicy.CodeGroups},
	}
}

func TestController_NeverApprovesAttacks(t *testing.T) {
	s := parallel(t)

	w, victim := s.issued(), s.join()
	names, table := map[string]string{}, attacks(w, victim)

	for what, attack := range table {
		names[what] = s.post(w, attack.request)
	}

	for what, attack := range table {
		if attack.denied != "" {
			condition := s.awaitDenied(names[what])
			assert.Equal(t, attack.denied, condition.Reason, what)
			assert.NotEmpty(t, condition.Message, what)
		}
	}

	// Posted after the others; the signer issues all approved requests.
	s.awaitIssued(s.post(w, request{}))

	for what, attack := range table {
		csr := s.get(names[what])
		assert.False(t, approved(csr), what)
		assert.Empty(t, csr.Status.Certificate, what)
		assert.Equal(t, attack.denied != "", denied(csr), what)
	}
}

// The admission plugin NodeRestriction refuses these requests.
func TestAPIServer_RefusesOtherCommonNames(t *testing.T) {
	s := parallel(t)

	w := s.join()
	for _, name := range []string{"system:node:" + controlPlane, "system:node:" + w.name + "x", "kubernetes"} {
		_, err := s.create(s.Context(), w, request{commonName: name})
		assert.True(t, apierrors.IsForbidden(err), "common name %s: %v", name, err)
	}
}

// A machine can report anything. What it reported of the control plane stays reserved when its Node is deleted.
func TestController_DefersWhatLyingMachineReports(t *testing.T) {
	s := alone(t)
	s.Cleanup(s.restart)

	victim := s.known()
	liar := s.join(on("eth1", victim.addr, 24), on("eth1", controlPlaneIP, 24), on("eth1", virtualIP, 32))
	require.NoError(t, liar.machine.SetHostname(s.Context(), victim.name, ""))
	s.awaitMachine(liar.name, "by its hostname", func(m machine.Machine) bool { return m.Hostname == victim.name })

	pending := []string{s.post(liar, request{ips: []netip.Addr{victim.addr}}), s.post(liar, request{ips: []netip.Addr{controlPlaneIP}})}
	for _, name := range pending {
		s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
		s.assertPending(name)
	}

	s.awaitDeferred(s.post(liar, request{ips: []netip.Addr{virtualIP}}), csrpolicy.CodeClusterAddress)
	s.awaitDenied(s.post(liar, request{names: []string{victim.name}}))
}

// A worker that reports a false host name gets no certificate for the name of a Service.
func TestController_DeniesNamesOfServices(t *testing.T) {
	s := parallel(t)

	liar := s.known()
	require.NoError(t, liar.machine.SetHostname(s.Context(), "vault", "vault"))
	require.NoError(t, liar.machine.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InternalDNS = "metrics-server.kube-system" }))
	s.awaitMachine(liar.name, "by its names", func(m machine.Machine) bool { return m.FQDN() == "vault.vault" && m.Platform.InternalDNS != "" })

	for _, name := range []string{"vault", "vault.vault", "metrics-server.kube-system"} {
		s.awaitDenied(s.post(liar, request{names: []string{name}}))
	}
}

func platform(instanceID, hostname string) runtime.PlatformMetadataSpec {
	return runtime.PlatformMetadataSpec{Platform: "nocloud", InstanceID: instanceID, Hostname: hostname}
}

// A kubelet requests the names and addresses of its Node. The Node must list none that cannot be approved.
func TestController_ApprovesAllThatNodeLists(t *testing.T) {
	t.Parallel()

	const shared = "shared.eu.compute.internal"

	for hostname, listed := range map[string]bool{
		"w1.eu.compute.internal": true,
		"worker.novalocal":       false,
		"localhost.localdomain":  false,
		"w1.default.svc":         false,
		"vm.17":                  false,
		shared:                   false,
	} {
		t.Run(hostname, func(t *testing.T) {
			s := parallel(t)

			workers := []worker{s.plan()}
			if hostname == shared {
				workers = append(workers, s.plan())
			}

			for i, w := range workers {
				workers[i] = s.bootAs(w, talostest.MachineSpec{Platform: platform(w.name, hostname)})
				s.register(w)
				s.awaitCondition(w.name, inventory.Current)
			}

			w := workers[len(workers)-1]
			node := s.AwaitNode(w.name, func(node *corev1.Node, asrt *assert.Assertions) {
				ctest.Schedulable(node, asrt)
				asrt.Equal(listed, slices.Contains(requestOf(node).names, hostname))
			})
			s.awaitIssued(s.post(w, requestOf(node)))
		})
	}
}

// A prefix can be routed to a machine. The certificate of a thousand addresses has room for all but one, because the name
// comes first.
func TestController_ApprovesManyAddresses(t *testing.T) {
	t.Parallel()

	for i, count := range []int{20, 61, 63, 250, 1000} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			s := parallel(t)
			routed := make([]talostest.Address, count-1) // besides the node IP

			for j, ip := 0, netip.AddrFrom4([4]byte{8, byte(i)}); j < len(routed); j, ip = j+1, ip.Next() {
				routed[j] = on("eth1", ip, 32)
			}

			w := s.join(routed...)
			node := s.AwaitNode(w.name, ctest.Schedulable)
			want := min(count, machine.MaxSubjects-1)
			require.Len(t, requestOf(node).ips, want)

			csr := s.awaitIssued(s.post(w, requestOf(node)))
			assert.Len(t, s.certificateOf(csr).IPAddresses, want)

			if want < count {
				s.AwaitEvent(w.name, nodecontroller.ReasonInvalidValue, "addresses.externalIPs: first-per-family")
			}
		})
	}
}

// requestOf returns what the kubelet of a Node requests.
func requestOf(node *corev1.Node) (r request) {
	for _, a := range node.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil {
			r.ips = append(r.ips, ip)
		} else if !slices.Contains(r.names, a.Address) {
			r.names = append(r.names, a.Address)
		}
	}

	return r
}

// The operator must see the owner of the address, although it is not the reason for the denial.
func TestController_DenialNamesOwner(t *testing.T) {
	s := parallel(t)
	w, victim := s.join(), s.known()

	condition := s.awaitDenied(s.post(w, request{ips: []netip.Addr{victim.addr}}))
	assert.Equal(t, csrpolicy.CodeNotOwned, condition.Reason)
	assert.Contains(t, condition.Message, victim.name)
}

func TestController_EmitsDenialEventsOnRequestAndNode(t *testing.T) {
	s := parallel(t)
	w := s.join()
	name := s.post(w, request{names: []string{"kubernetes"}})

	s.awaitDenied(name)
	s.AwaitEvent(name, csrapproval.ReasonDenied, csrpolicy.CodeClusterName)
	s.AwaitEvent(w.name, csrapproval.ReasonDenied, csrpolicy.CodeClusterName)
}

func TestController_EmitsDeferralEventOnce(t *testing.T) {
	s := parallel(t)

	w, other := s.issued(), s.plan().addr
	s.list(w, other)
	name := s.post(w, request{ips: []netip.Addr{other}})
	s.awaitDeferred(name, csrpolicy.CodeUnknownAddress)

	for range 5 {
		s.main.controller.Resync()
	}

	s.awaitIssued(s.post(w, request{}))
	assert.Len(t, s.Events(name, csrapproval.ReasonDeferred), 1)
}

func TestController_IgnoresUnmanagedNodes(t *testing.T) {
	s := parallel(t)

	unmanaged, debian := s.boot(s.plan()), s.plan()
	s.main.unmanaged.Store(unmanaged.name, nil)
	s.register(unmanaged)
	s.Register(kube.NodeSpec{Name: debian.name, NodeIPs: []netip.Addr{debian.addr}, OSImage: "Debian GNU/Linux"})

	var posted []string

	for _, w := range []worker{unmanaged, debian} {
		s.awaitCached(w.name)
		posted = append(posted, s.post(w, request{}), s.post(w, request{names: []string{"kubernetes"}}))
	}

	s.awaitIssued(s.post(s.join(), request{}))

	for _, name := range posted {
		s.assertUndecided(name)
		assert.Empty(t, s.Events(name, ""))
	}
}

// decided returns the conditions of another approver.
func decided(kind certificatesv1.RequestConditionType) []certificatesv1.CertificateSigningRequestCondition {
	return []certificatesv1.CertificateSigningRequestCondition{{Type: kind, Status: corev1.ConditionTrue, Reason: "Other", Message: "decided by another approver"}}
}

// kubelet-serving-cert-approver or kubelet-csr-approver may run in the same cluster.
func TestController_KeepsDecisionsOfOtherApprovers(t *testing.T) {
	s := parallel(t)

	w := s.plan()
	requests := map[string]certificatesv1.RequestConditionType{
		s.post(w, request{}):                                     certificatesv1.CertificateDenied,
		s.post(w, request{names: []string{"kubernetes"}}):        certificatesv1.CertificateDenied,
		s.post(w, request{names: []string{"other.example.org"}}): certificatesv1.CertificateApproved,
	}

	for name, kind := range requests {
		csr := s.get(name)
		csr.Status.Conditions = decided(kind)

		_, err := s.requests().UpdateApproval(s.Context(), name, csr, metav1.UpdateOptions{})
		require.NoError(t, err)
	}

	s.register(s.boot(w))
	s.awaitIssued(s.post(w, request{}))

	for name, kind := range requests {
		conditions := s.get(name).Status.Conditions
		require.Len(t, conditions, 1)
		assert.Equal(t, kind, conditions[0].Type)
		assert.Equal(t, "Other", conditions[0].Reason)
	}
}
