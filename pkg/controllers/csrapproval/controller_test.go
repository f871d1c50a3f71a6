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
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// The first tests disturb others and run sequentially.

func TestController_ApprovesAfterAPIServerRestart(t *testing.T) {
	s := alone(t)

	early, late := s.plan(), s.plan()
	before := s.post(early, request{})
	s.awaitDeferred(before, csrpolicy.CodeNodeUnknown)

	s.kube.StopAPIServer(s.Context())

	// The API server is down.
	early, late = s.boot(early), s.boot(late)

	s.require(s.kube.StartAPIServer(s.Context()))
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

	s.main.stop()
	s.register(s.boot(w))
	unseen := s.post(w, request{})
	s.restart()

	s.awaitIssued(deferred)
	s.awaitIssued(unseen)
}

// The machines respond to a new leader one after the other.
func TestController_NewLeaderWaitsForMachines(t *testing.T) {
	s := alone(t)

	both := netip.MustParsePrefix("172.31.131.1/24") // which the Nodes do not list
	liar := s.join(talostest.Address{Link: "eth1", Prefix: both})
	victim := s.join(talostest.Address{Link: "eth1", Prefix: both})

	for _, w := range []worker{liar, victim} {
		s.awaitIssued(s.post(w, request{})) // its machine is known now
	}

	name := s.post(liar, request{ips: []netip.Addr{both.Addr()}})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)

	victim.machine.SlowDown(500 * time.Millisecond)
	s.restart()

	s.awaitIssued(s.post(victim, request{}))
	s.wantPending(name)
}

// Requests and Nodes are watched separately, and the kubelet may see a newer version of its Node.
func TestController_ReadsNodeBeforeDenial(t *testing.T) {
	s := alone(t)

	slow, err := s.start(s.Context())
	s.require(err)
	t.Cleanup(slow.stop)

	w := s.join()
	s.eventually("the machine is known", func() bool { return slow.inventory.Get(w.name).Condition == inventory.Current })

	s.main.unmanage(w.name)
	slow.freeze()

	added := netip.MustParseAddr("172.31.135.1")
	s.list(w, added)

	name := s.post(w, request{ips: []netip.Addr{added}})
	s.awaitDeferred(name, csrpolicy.CodeUnknownAddress)
}

func TestController_TwoInstancesDecideEachRequestOnce(t *testing.T) {
	s := alone(t)

	second, err := s.start(s.Context())
	s.require(err)
	t.Cleanup(second.stop)

	w := s.join()

	for range 10 {
		csr := s.awaitIssued(s.post(w, request{}))

		if len(csr.Status.Conditions) != 1 {
			t.Errorf("request %s has conditions %v", csr.Name, csr.Status.Conditions)
		}
	}
}

func TestController_ApprovedRequestsAreIssued(t *testing.T) {
	s := parallel(t)
	w := s.join()

	key, err := rsa.GenerateKey(rand.Reader, 2048)
	s.require(err)

	for name, r := range map[string]request{
		"names and addresses": {},
		"addresses only":      {ips: []netip.Addr{w.addr}},
		"a name only":         {names: []string{w.name}},
		"an RSA key": {key: key, usages: []certificatesv1.KeyUsage{
			certificatesv1.UsageKeyEncipherment, certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth,
		}},
	} {
		csr := s.awaitIssued(s.post(w, r))

		block, _ := pem.Decode(csr.Status.Certificate)

		certificate, err := x509.ParseCertificate(block.Bytes)
		s.require(err)

		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(s.kube.ClientCA())

		host := w.addr.String()
		if len(certificate.IPAddresses) == 0 {
			host = w.name
		}

		if _, err := certificate.Verify(x509.VerifyOptions{Roots: roots, DNSName: host}); err != nil {
			t.Errorf("%s: %v", name, err)
		}

		condition := csr.Status.Conditions[0]
		if condition.Reason != csrpolicy.CodeVerified || condition.Message == "" {
			t.Errorf("%s: condition %v", name, condition)
		}

		s.eventually("an Event reports the approval", func() bool { return len(s.messages(csr.Name, csrapproval.ReasonApproved)) == 1 })
	}
}

func TestController_DefersUntilNodeAndMachineAreKnown(t *testing.T) {
	s := parallel(t)

	w := s.plan()
	name := s.post(w, request{})
	s.awaitDeferred(name, csrpolicy.CodeNodeUnknown)

	s.register(w)
	s.awaitDeferred(name, csrpolicy.CodeMachineUnknown)

	if csr := s.get(name); len(csr.Status.Conditions) > 0 {
		t.Fatalf("decided: %v", csr.Status.Conditions)
	}

	// The reflector dials the address again after a backoff.
	s.boot(w)
	s.awaitIssued(name)
}

// The duration is only logged, because test machines are busy.
func TestController_ApprovesOnceNodeExists(t *testing.T) {
	s := parallel(t)

	w := s.boot(s.plan())
	name := s.post(w, request{})
	s.awaitDeferred(name, csrpolicy.CodeNodeUnknown)

	began := time.Now()

	s.register(w)
	s.await(name, "approved", approved)
	t.Logf("approved %s after the Node was registered", time.Since(began))
	s.awaitIssued(name)
}

func TestController_ApprovesControlPlaneMachine(t *testing.T) {
	s := parallel(t)
	w := worker{name: controlPlane, addr: netip.MustParseAddr(controlPlaneIP), machine: s.machine}

	s.awaitIssued(s.post(w, request{}))
}

func TestController_ApprovesAddressOnceReported(t *testing.T) {
	s := parallel(t)

	w := s.join()
	added := netip.MustParseAddr("172.31.128.1")
	s.list(w, added)
	name := s.post(w, request{names: []string{w.name}, ips: []netip.Addr{w.addr, added}})
	s.awaitDeferred(name, csrpolicy.CodeUnknownAddress)

	s.require(w.machine.AddAddress(s.Context(), "eth1", netip.PrefixFrom(added, 24)))
	s.awaitIssued(name)
}

func TestController_DefersAddressOfTwoMachines(t *testing.T) {
	s := parallel(t)

	both := netip.MustParsePrefix("172.31.129.1/24")
	one := s.join(talostest.Address{Link: "eth1", Prefix: both})
	other := s.join(talostest.Address{Link: "eth1", Prefix: both})

	for _, w := range []worker{one, other} {
		s.awaitIssued(s.post(w, request{})) // its machine is known now
	}

	names := map[string]string{}
	for _, w := range []worker{one, other} {
		names[w.name] = s.post(w, request{ips: []netip.Addr{both.Addr()}})
	}

	for _, name := range names {
		s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
	}

	// The machine that does not report it any more may be another one.
	s.require(other.machine.RemoveAddress(s.Context(), "eth1", both))
	s.wantPending(names[one.name])

	if csr := s.await(names[other.name], "denied", denied); csr.Status.Conditions[0].Reason != csrpolicy.CodeNotOwned {
		t.Errorf("other request: conditions %v", csr.Status.Conditions)
	}
}

func TestController_DefersAddressListedByAnotherNode(t *testing.T) {
	s := parallel(t)

	addr := netip.MustParseAddr("172.31.130.1")
	w := s.join(talostest.Address{Link: "eth1", Prefix: netip.PrefixFrom(addr, 24)})

	// A Node with another operating system, whose machine is never reached.
	foreign := kube.NodeSpec{Name: "foreign-" + w.name, NodeIPs: []netip.Addr{addr}, OSImage: "Debian GNU/Linux"}
	s.registerAs(foreign)
	s.awaitSeen(foreign.Name)

	name := s.post(w, request{ips: []netip.Addr{addr}})
	s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)

	moved := s.plan().addr
	s.list(worker{name: foreign.Name, addr: moved}, moved)
	s.patchStatus(foreign.Name, fmt.Sprintf(`{"status":{"addresses":[{"$patch":"replace"},{"type":"InternalIP","address":%q}]}}`, moved))
	s.awaitIssued(name)
}

func TestController_DefersWhenAnotherMachineResponds(t *testing.T) {
	s := parallel(t)

	owner := s.join()
	impostor := s.plan()
	impostor.addr = owner.addr
	s.register(impostor)

	name := s.post(impostor, request{})
	s.awaitDeferred(name, csrpolicy.CodeMachineMismatch)
	s.wantPending(name)
}

// A machine that takes over the address of another one responds there with a certificate that Talos has issued for it,
// and can report anything.
func TestController_DefersAddressOfImpersonatedMachine(t *testing.T) {
	for name, machineAt := range map[string]func(s suite, victim, attacker worker) *talostest.Machine{
		"as itself": func(_ suite, _, attacker worker) *talostest.Machine { return attacker.machine },
		"as the other, without the address": func(s suite, victim, _ worker) *talostest.Machine {
			lie := s.plan()
			lie.name = victim.name

			return s.boot(lie).machine
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)

			victim, attacker := s.plan(), s.join()
			s.routes.Store(victim.addr, machineAt(s, victim, attacker).Address())
			s.register(victim)
			s.eventually("a machine responds", func() bool {
				entry := s.main.inventory.Get(victim.name)

				return entry.Condition == inventory.Current || entry.Condition == inventory.Mismatch
			})

			s.require(attacker.machine.AddAddress(s.Context(), "eth1", netip.PrefixFrom(victim.addr, 24)))
			s.eventually("the attacker reports the address", func() bool {
				return s.main.inventory.Get(attacker.name).Machine.HasAddress(victim.addr)
			})

			name := s.post(attacker, request{ips: []netip.Addr{victim.addr}})
			s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
			s.wantPending(name)
		})
	}
}

// attacks returns requests of a worker that must never be issued.
func attacks(w, victim worker) map[string]struct {
	request

	denied string // reason; empty if the request stays pending
} {
	type row = struct {
		request

		denied string
	}

	cp := netip.MustParseAddr(controlPlaneIP)
	own := func(names ...string) request { return request{names: append(names, w.name), ips: []netip.Addr{w.addr}} }
	at := func(ips ...netip.Addr) request { return request{names: []string{w.name}, ips: append(ips, w.addr)} }

	return map[string]row{
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
		"the API server's address":              {at(netip.MustParseAddr("127.0.0.1")), csrpolicy.CodeSpecialAddress},
		"the control plane's address":           {at(cp), csrpolicy.CodeNotOwned},
		"the service address of the API server": {at(netip.MustParseAddr("10.0.0.1")), csrpolicy.CodeClusterAddress},
		"a service address":                     {at(netip.MustParseAddr("10.0.7.7")), csrpolicy.CodeClusterAddress},
		"a service address that Talos knows":    {at(netip.MustParseAddr("10.96.0.10")), csrpolicy.CodeClusterAddress},
		"a pod's address":                       {at(netip.MustParseAddr("10.244.3.3")), csrpolicy.CodeClusterAddress},
		"the virtual address":                   {at(netip.MustParseAddr(virtualIP)), csrpolicy.CodeClusterAddress},
		"for clients": {request{usages: []certificatesv1.KeyUsage{
			certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth,
		}}, csrpolicy.CodeUsages},
		"of another organization":         {request{organization: "system:masters"}, csrpolicy.CodeSubject},
		"of a user that is not a kubelet": {request{user: "admin", groups: []string{"system:masters"}}, ""},
		"without the group of kubelets":   {request{groups: []string{"system:masters"}}, csrpolicy.CodeGroups},
	}
}

func TestController_NeverApprovesAttacks(t *testing.T) {
	s := parallel(t)

	w, victim := s.join(), s.join()
	s.awaitIssued(s.post(w, request{})) // Node and machine are known

	names := map[string]string{}
	table := attacks(w, victim)

	for what, row := range table {
		names[what] = s.post(w, row.request)
	}

	for what, row := range table {
		if row.denied == "" {
			continue
		}

		csr := s.await(names[what], "denied", denied)
		if condition := csr.Status.Conditions[0]; condition.Reason != row.denied || condition.Message == "" {
			t.Errorf("%s: got condition %v, want %s", what, condition, row.denied)
		}
	}

	// Posted after the others; the signer issues all approved requests.
	s.awaitIssued(s.post(w, request{}))

	for what, row := range table {
		switch csr := s.get(names[what]); {
		case approved(csr), len(csr.Status.Certificate) > 0:
			t.Errorf("%s: approved", what)
		case denied(csr) != (row.denied != ""):
			t.Errorf("%s: conditions %v", what, csr.Status.Conditions)
		}
	}
}

// The admission plugin NodeRestriction refuses these requests.
func TestAPIServer_RefusesOtherCommonNames(t *testing.T) {
	s := parallel(t)

	w := s.join()
	for _, name := range []string{"system:node:" + controlPlane, "system:node:" + w.name + "x", "kubernetes"} {
		if _, err := s.create(s.Context(), w, request{commonName: name}); !apierrors.IsForbidden(err) {
			t.Errorf("common name %s: %v", name, err)
		}
	}
}

// A machine can report anything.
func TestController_DefersWhatLyingMachineReports(t *testing.T) {
	s := parallel(t)

	victim := s.known()
	liar := s.join(
		talostest.Address{Link: "eth1", Prefix: netip.PrefixFrom(victim.addr, 24)},
		talostest.Address{Link: "eth1", Prefix: netip.MustParsePrefix(controlPlaneIP + "/24")},
		talostest.Address{Link: "eth1", Prefix: netip.MustParsePrefix(virtualIP + "/32")},
	)
	s.require(liar.machine.SetHostname(s.Context(), victim.name, ""))
	s.eventually("the inventory has its hostname", func() bool { return s.main.inventory.Get(liar.name).Machine.Hostname == victim.name })

	var pending []string
	for _, r := range []request{
		{ips: []netip.Addr{victim.addr}},
		{ips: []netip.Addr{netip.MustParseAddr(controlPlaneIP)}},
	} {
		pending = append(pending, s.post(liar, r))
	}

	for _, name := range pending {
		s.awaitDeferred(name, csrpolicy.CodeOwnedByOthers)
		s.wantPending(name)
	}

	s.await(s.post(liar, request{ips: []netip.Addr{netip.MustParseAddr(virtualIP)}}), "denied", denied)
	s.await(s.post(liar, request{names: []string{victim.name}}), "denied", denied)
}

// A worker that lies about its host name does not get the names of Services.
func TestController_DeniesNamesOfServices(t *testing.T) {
	s := parallel(t)

	liar := s.known()
	s.require(liar.machine.SetHostname(s.Context(), "vault", "vault"))
	s.require(liar.machine.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InternalDNS = "metrics-server.kube-system" }))
	s.eventually("the inventory has its names", func() bool {
		m := s.main.inventory.Get(liar.name).Machine

		return m.FQDN() == "vault.vault" && m.Platform.InternalDNS != ""
	})

	for _, name := range []string{"vault", "vault.vault", "metrics-server.kube-system"} {
		csr := s.await(s.post(liar, request{names: []string{name}}), "decided", func(csr *certificatesv1.CertificateSigningRequest) bool {
			return approved(csr) || denied(csr)
		})
		if approved(csr) {
			s.Errorf("%s was approved", name)
		}
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

			var w worker

			for range 2 {
				w = s.plan()

				m, err := s.addMachine(talostest.MachineSpec{Nodename: w.name, Platform: platform(w.name, hostname)}, w.addr)
				s.require(err)
				s.Cleanup(func() { _ = m.Stop(context.WithoutCancel(s.Context())) })

				s.register(w)
				s.eventually(w.name+" is known", func() bool { return s.main.inventory.Get(w.name).Condition == inventory.Current })

				if hostname != shared {
					break
				}
			}

			var requested request

			s.eventually("the Node lists its names", func() bool {
				node, err := s.client.CoreV1().Nodes().Get(s.Context(), w.name, metav1.GetOptions{})
				s.require(err)

				requested = requestOf(node)

				return !nodespec.IsUninitialized(node) && slices.Contains(requested.names, hostname) == listed
			})
			s.awaitIssued(s.post(w, requested))
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

	csr := s.await(s.post(w, request{ips: []netip.Addr{victim.addr}}), "denied", denied)
	if condition := csr.Status.Conditions[0]; condition.Reason != csrpolicy.CodeNotOwned || !strings.Contains(condition.Message, victim.name) {
		t.Errorf("condition %+v does not name %s", condition, victim.name)
	}
}

func TestController_EmitsDenialEventsOnRequestAndNode(t *testing.T) {
	s := parallel(t)

	w := s.join()
	name := s.post(w, request{names: []string{"kubernetes"}})
	s.await(name, "denied", denied)

	for _, object := range []string{name, w.name} {
		s.eventually("an Event on "+object, func() bool {
			return slices.ContainsFunc(s.messages(object, csrapproval.ReasonDenied), func(message string) bool {
				return strings.Contains(message, csrpolicy.CodeClusterName)
			})
		})
	}
}

func TestController_EmitsDeferralEventOnce(t *testing.T) {
	s := parallel(t)

	w := s.join()
	s.awaitIssued(s.post(w, request{})) // its machine is known now

	other := netip.MustParseAddr("172.31.132.1")
	s.list(w, other)
	name := s.post(w, request{ips: []netip.Addr{other}})
	s.awaitDeferred(name, csrpolicy.CodeUnknownAddress)

	for range 5 {
		s.main.controller.Resync()
	}

	s.awaitIssued(s.post(w, request{}))

	if found := s.messages(name, csrapproval.ReasonDeferred); len(found) != 1 {
		t.Errorf("got %d Events: %v", len(found), found)
	}
}

func TestController_ApprovesOnceOperatorAllows(t *testing.T) {
	s := parallel(t)

	w := s.join()
	shared := netip.MustParseAddr("172.31.133.1")
	s.list(w, shared)
	name := s.post(w, request{ips: []netip.Addr{w.addr, shared}})
	s.awaitDeferred(name, csrpolicy.CodeUnknownAddress)

	s.main.allow(w.name, csrpolicy.Policy{ExtraIPs: []netip.Addr{shared}})
	s.awaitIssued(name)
}

func TestController_IgnoresUnmanagedNodes(t *testing.T) {
	s := parallel(t)

	unmanaged := s.boot(s.plan())
	s.main.unmanage(unmanaged.name)
	s.register(unmanaged)

	debian := s.plan()
	s.registerAs(kube.NodeSpec{Name: debian.name, NodeIPs: []netip.Addr{debian.addr}, OSImage: "Debian GNU/Linux"})
	s.awaitSeen(unmanaged.name)
	s.awaitSeen(debian.name)

	posted := []string{
		s.post(unmanaged, request{}),
		s.post(unmanaged, request{names: []string{"kubernetes"}}),
		s.post(debian, request{}),
		s.post(debian, request{names: []string{"kubernetes"}}),
	}

	s.awaitIssued(s.post(s.join(), request{}))

	for _, name := range posted {
		if csr := s.get(name); len(csr.Status.Conditions) > 0 {
			t.Errorf("request of %s: conditions %v", csr.Spec.Username, csr.Status.Conditions)
		}

		if found := s.messages(name, ""); len(found) > 0 {
			t.Errorf("request of an unmanaged Node has Events: %v", found)
		}
	}
}

// kubelet-serving-cert-approver or kubelet-csr-approver may run in the same cluster.
func TestController_KeepsDecisionsOfOtherApprovers(t *testing.T) {
	s := parallel(t)

	w := s.plan()
	decided := map[string]certificatesv1.RequestConditionType{
		s.post(w, request{}):                                     certificatesv1.CertificateDenied,
		s.post(w, request{names: []string{"kubernetes"}}):        certificatesv1.CertificateDenied,
		s.post(w, request{names: []string{"other.example.org"}}): certificatesv1.CertificateApproved,
	}

	for name, kind := range decided {
		csr := s.get(name)
		csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
			{Type: kind, Status: corev1.ConditionTrue, Reason: "Other", Message: "decided by another approver"},
		}

		_, err := s.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(s.Context(), name, csr, metav1.UpdateOptions{})
		s.require(err)
	}

	s.register(s.boot(w))
	s.awaitIssued(s.post(w, request{}))

	for name, kind := range decided {
		csr := s.get(name)
		if len(csr.Status.Conditions) != 1 || csr.Status.Conditions[0].Type != kind || csr.Status.Conditions[0].Reason != "Other" {
			t.Errorf("request %s has conditions %v", name, csr.Status.Conditions)
		}
	}
}

// Before that it is not certain that the Node is managed, and another approver may be responsible.
func TestController_DeniesOnceMachineIsKnown(t *testing.T) {
	s := parallel(t)

	w := s.plan()
	name := s.post(w, request{names: []string{"*.example.org"}})
	s.awaitDeferred(name, csrpolicy.CodeNodeUnknown)

	s.register(w)
	s.awaitDeferred(name, csrpolicy.CodeMachineUnknown)

	if csr := s.get(name); len(csr.Status.Conditions) > 0 {
		t.Fatalf("decided: %v", csr.Status.Conditions)
	}

	s.boot(w)
	s.await(name, "denied", denied)
}

// wantPending fails unless the request is still pending after a later request has been issued.
func (s suite) wantPending(name string) {
	s.Helper()

	s.awaitIssued(s.post(s.join(), request{}))

	if csr := s.get(name); len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0 {
		s.Errorf("request %s: conditions %v", name, csr.Status.Conditions)
	}
}
