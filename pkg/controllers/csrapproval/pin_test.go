package csrapproval_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// enforced returns a joined worker whose requests need the pinned credential.
func (s suite) enforced() worker {
	s.Helper()

	w := s.known()
	s.main.allow(w.name, csrpolicy.Policy{EnforceCredential: true})

	return w
}

// pinned returns a worker and its kubelet's credential, which is pinned.
func (s suite) pinned() (worker, *rest.Config) {
	s.Helper()

	w := s.enforced()
	kubelet := s.credential(w)
	s.awaitIssued(s.post(w, request{config: kubelet}))
	s.awaitPinned(w, kubelet)

	return w, kubelet
}

// credential returns a client certificate of the worker that no request obtained, such as one that was issued long ago.
func (s suite) credential(w worker) *rest.Config {
	s.Helper()

	config, err := s.kube.UserConfig("system:node:"+w.name, "system:nodes")
	s.require(err)

	return config
}

func (s suite) bootstrapToken() *rest.Config { return s.kube.TokenConfig(s.token) }

// obtain requests a client certificate for the worker as its kubelet does. kube-controller-manager approves and issues it.
func (s suite) obtain(requester *rest.Config, w worker) (credential *rest.Config, requestName string) {
	s.Helper()

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	s.require(err)

	encoded, err := request{key: key, names: []string{}}.of(w).pem()
	s.require(err)

	client, err := kubernetes.NewForConfig(requester)
	s.require(err)

	csr, err := client.CertificatesV1().CertificateSigningRequests().Create(s.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "node-csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
			Request:    encoded,
		},
	}, metav1.CreateOptions{})
	s.require(err)
	s.Cleanup(func() { s.remove(csr.Name) })

	der, err := x509.MarshalECPrivateKey(key)
	s.require(err)

	certificate := s.awaitIssued(csr.Name).Status.Certificate

	return s.kube.CertificateConfig(certificate, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})), csr.Name
}

func idOf(credential *rest.Config) string {
	block, _ := pem.Decode(credential.CertData)

	return csrpolicy.CertificateID(block.Bytes)
}

func (s suite) labels(w worker) map[string]string {
	s.Helper()

	node, err := s.client.CoreV1().Nodes().Get(s.Context(), w.name, metav1.GetOptions{})
	s.require(err)

	return node.Labels
}

func (s suite) awaitPinned(w worker, credential *rest.Config) {
	s.Helper()
	s.eventually(w.name+" is pinned to "+idOf(credential), func() bool { return s.labels(w)[csrapproval.LabelCredential] == idOf(credential) })
}

// wantUnexpected fails unless the request stays pending because of its credential, with an Event that has the remedy.
func (s suite) wantUnexpected(name string) {
	s.Helper()
	s.awaitDeferred(name, csrpolicy.CodeUnexpectedCredential)
	s.awaitRemedy(name)
	s.wantPending(name)
}

func (s suite) awaitRemedy(name string) {
	s.Helper()
	s.eventually("an Event has the remedy", func() bool {
		return slices.ContainsFunc(s.messages(name, csrapproval.ReasonUnexpectedCredential), func(message string) bool {
			return strings.Contains(message, "kubectl label node --overwrite")
		})
	})
}

func (s suite) label(w worker, value string) error {
	patch := []byte(`{"metadata":{"labels":{"` + csrapproval.LabelCredential + `":"` + value + `"}}}`)
	_, err := s.client.CoreV1().Nodes().Patch(s.Context(), w.name, types.MergePatchType, patch, metav1.PatchOptions{})

	return err
}

// The bootstrap token is in the machine configuration of every worker, and obtains a client certificate for any Node.
func TestPinning_DefersBootstrapTokenForExistingNode(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()

	stolen, _ := s.obtain(s.bootstrapToken(), w)
	s.wantUnexpected(s.post(w, request{config: stolen}))

	renewed, _ := s.obtain(stolen, w)
	s.wantUnexpected(s.post(w, request{config: renewed}))

	s.awaitIssued(s.post(w, request{config: kubelet}))
	s.awaitPinned(w, kubelet)
}

func TestPinning_DefersBootstrapTokenWithoutPin(t *testing.T) {
	s := parallel(t)
	w := s.enforced()

	node, err := s.client.CoreV1().Nodes().Get(t.Context(), w.name, metav1.GetOptions{})
	s.require(err)
	s.eventually("the Node is older than clocks may differ", func() bool { return time.Since(node.CreationTimestamp.Time) > 15*time.Second })

	stolen, _ := s.obtain(s.bootstrapToken(), w)
	s.wantUnexpected(s.post(w, request{config: stolen}))

	renewed, _ := s.obtain(stolen, w)
	s.wantUnexpected(s.post(w, request{config: renewed}))

	kubelet := s.credential(w)
	s.awaitIssued(s.post(w, request{config: kubelet}))
	s.awaitPinned(w, kubelet)
}

func TestPinning_WarnsByDefault(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()
	s.main.allow(w.name, csrpolicy.Policy{})

	stolen, _ := s.obtain(s.bootstrapToken(), w)
	name := s.post(w, request{config: stolen})
	s.awaitIssued(name)
	s.awaitRemedy(name)
	s.awaitPinned(w, kubelet)
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
	s.wantUnexpected(s.post(w, request{config: first}))
}

// The recommendation to limit the bootstrap token: kubelets that have joined do not need it.
func TestPinning_DeletedBootstrapTokenIsOfNoUse(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()

	token, err := s.kube.CreateBootstrapToken(t.Context(), "a1b2c3")
	s.require(err)

	requester := s.kube.TokenConfig(token)
	s.obtain(requester, w)

	secrets := s.client.CoreV1().Secrets(metav1.NamespaceSystem)

	list, err := secrets.List(t.Context(), metav1.ListOptions{FieldSelector: "type=bootstrap.kubernetes.io/token,metadata.name=bootstrap-token-a1b2c3"})
	s.require(err)

	if len(list.Items) != 1 {
		t.Fatalf("got %d Secrets", len(list.Items))
	}

	s.require(secrets.Delete(t.Context(), list.Items[0].Name, metav1.DeleteOptions{}))

	client, err := kubernetes.NewForConfig(requester)
	s.require(err)
	s.eventually("the token is rejected", func() bool {
		_, err := client.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})

		return apierrors.IsUnauthorized(err)
	})

	renewed, _ := s.obtain(kubelet, w)
	s.awaitIssued(s.post(w, request{config: renewed}))
}

// The API server forgets the request for a client certificate within about an hour.
func TestPinning_UnseenRotationNeedsOperator(t *testing.T) {
	s := alone(t)
	w, first := s.pinned()

	s.main.stop()

	second, name := s.obtain(first, w)
	s.remove(name)

	next, err := s.start(context.WithoutCancel(t.Context()))
	s.require(err)

	s.main = next
	s.main.allow(w.name, csrpolicy.Policy{EnforceCredential: true})

	pending := s.post(w, request{config: second})
	s.wantUnexpected(pending)
	s.require(s.label(w, idOf(second)))
	s.awaitIssued(pending)
}

func TestPinning_AcceptsReinstalledMachine(t *testing.T) {
	s := parallel(t)
	w, _ := s.pinned()

	renewed, _ := s.obtain(s.bootstrapToken(), w)
	name := s.post(w, request{config: renewed})
	s.wantUnexpected(name)

	s.require(w.machine.SetIdentity(s.Context(), "reinstalled", ""))
	w.machine.BreakConnections()
	s.awaitIssued(name)
	s.awaitPinned(w, renewed)
}

// The kubelet keeps its certificates on EPHEMERAL. A new node ID alone, as after STATE was wiped, replaces none.
func TestPinning_AcceptsMachineWithWipedVolume(t *testing.T) {
	s := parallel(t)

	w := s.boot(s.plan())
	format := func(uuid string) {
		s.require(w.machine.FormatVolume(s.Context(), constants.EphemeralPartitionLabel, uuid))
		w.machine.BreakConnections()
	}
	format("85b1a5d4-94ab-4b6c-9e69-6d2f5ac6ee3b")
	s.register(w)
	s.eventually("the volume is known", func() bool { return s.main.inventory.Get(w.name).Machine.EphemeralID != "" })
	s.main.allow(w.name, csrpolicy.Policy{EnforceCredential: true})

	kubelet := s.credential(w)
	s.awaitIssued(s.post(w, request{config: kubelet}))
	s.awaitPinned(w, kubelet)

	renewed, _ := s.obtain(s.bootstrapToken(), w)
	name := s.post(w, request{config: renewed})
	s.wantUnexpected(name)

	s.require(w.machine.SetIdentity(s.Context(), "new", ""))
	w.machine.BreakConnections()
	s.eventually("the node ID is known", func() bool { return s.main.inventory.Get(w.name).Machine.NodeID == "new" })
	s.wantPending(name)

	format("0d5e7f2e-2c39-4b52-a3a6-8c9c53a2a6a0")
	s.awaitIssued(name)
	s.awaitPinned(w, renewed)
}

// Two requests at once: the Node is pinned to the first, and the second is reviewed again.
func TestPinning_PinsOneOfTwoConcurrentRequests(t *testing.T) {
	s := parallel(t)
	w := s.plan()
	first, second := s.credential(w), s.credential(w)
	names := []string{s.post(w, request{config: first}), s.post(w, request{config: second})}

	s.boot(w)
	s.main.allow(w.name, csrpolicy.Policy{EnforceCredential: true})
	s.register(w)

	var pending string

	s.eventually("one request is approved", func() bool {
		i := slices.IndexFunc(names, func(name string) bool { return approved(s.get(name)) })
		if i >= 0 {
			pending = names[1-i]
		}

		return i >= 0
	})
	s.wantUnexpected(pending)
}

// API servers before 1.32 do not report the credential.
func TestPinning_AcceptsRequestsWithoutCredential(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()

	s.awaitIssued(s.post(w, request{}))
	s.awaitPinned(w, kubelet)
}

func TestPinning_KubeletCannotWriteLabels(t *testing.T) {
	s := parallel(t)
	w, kubelet := s.pinned()

	client, err := kubernetes.NewForConfig(kubelet)
	s.require(err)

	for _, label := range []string{csrapproval.LabelCredential, csrapproval.LabelPrevious, csrapproval.LabelContext} {
		for _, value := range []string{"null", `"0"`} {
			patch := []byte(`{"metadata":{"labels":{"` + label + `":` + value + `}}}`)

			_, present := s.labels(w)[label]
			if !present && value == "null" {
				continue // changes nothing
			}

			if _, err := client.CoreV1().Nodes().Patch(t.Context(), w.name, types.MergePatchType, patch, metav1.PatchOptions{}); !apierrors.IsForbidden(err) {
				t.Errorf("%s=%s: got %v", label, value, err)
			}
		}
	}

	if err := client.CoreV1().Nodes().Delete(t.Context(), w.name, metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("delete node: got %v", err)
	}
}

// A real kubelet obtains its client certificate with the bootstrap token and rotates it: kube-controller-manager backdates
// certificates by five minutes, so that 70 to 90 % of this lifetime are over after up to one and a half minutes. Then
// no instance sees a rotation, and last, EPHEMERAL is wiped.
func TestPinning_KubeletKeepsItsCertificates(t *testing.T) {
	t.Parallel()

	var (
		own   bed
		group sync.WaitGroup
	)

	ctx, cancel := context.WithCancel(t.Context())

	defer group.Wait()
	defer cancel()
	defer own.close()

	if err := own.open(ctx, &group, kube.Options{ControllerManager: kube.ControllerManager{Flags: []string{"--cluster-signing-duration=132s"}}}); err != nil {
		t.Fatal(err)
	}

	t.Run("kubelet", func(t *testing.T) {
		s := suite{t, &own}
		w := s.plan()
		w.addr = hostAddress(t)
		w = s.boot(w)
		s.main.allow(w.name, csrpolicy.Policy{EnforceCredential: true})

		s.require(w.machine.FormatVolume(s.Context(), constants.EphemeralPartitionLabel, "85b1a5d4-94ab-4b6c-9e69-6d2f5ac6ee3b"))

		spec := kube.KubeletSpec{BootstrapToken: s.token, RotateCertificates: true}
		kubelet := s.startKubeletAs(w, spec)
		s.reportTalos(w.name)
		first := s.awaitIssuedFor(w)

		s.eventually("the pin follows the rotation", func() bool { return s.labels(w)[csrapproval.LabelPrevious] == csrpolicy.CredentialID(first) })

		// The kubelet closes its connections a few seconds after the rotation, and uses the previous certificate until then.
		var added []netip.Addr

		for id := csrpolicy.CredentialID(first); id == csrpolicy.CredentialID(first); {
			added = append(added, netip.AddrFrom4([4]byte{8, 8, 4, byte(1 + len(added))}))
			s.require(w.machine.AddAddress(s.Context(), talostest.LinkExternal, netip.PrefixFrom(added[len(added)-1], 32)))

			id = csrpolicy.CredentialID(s.awaitIssuedFor(w, added...))
		}

		if found := s.messages(w.name, csrapproval.ReasonUnexpectedCredential); len(found) > 0 {
			t.Errorf("got Events %q", found)
		}

		s.missRotation(w)

		next := netip.MustParseAddr("8.8.5.1")
		added = append(added, next)
		s.require(w.machine.AddAddress(s.Context(), talostest.LinkExternal, netip.PrefixFrom(next, 32)))

		pending := s.awaitRequestFor(w, next)
		s.wantUnexpected(pending.Name)
		s.require(s.label(w, csrpolicy.CredentialID(pending)))
		s.awaitIssuedFor(w, added...)

		// EPHEMERAL is wiped: the kubelet has to obtain a certificate with the token again.
		s.require(kubelet.Stop())
		s.removeAllOf(w)
		s.require(w.machine.FormatVolume(s.Context(), constants.EphemeralPartitionLabel, "0e5e1a3c-5a80-4b0e-8d0f-6f2f0b1f3f6e"))
		w.machine.BreakConnections()
		s.startKubeletAs(w, spec)
		s.awaitIssuedFor(w, added...)
	})
}

// missRotation returns when the kubelet has rotated its client certificate and the requests are gone. In between, no
// instance ran.
func (s suite) missRotation(w worker) {
	s.Helper()
	s.main.stop()
	s.removeAllOf(w)

	s.eventually("the kubelet has rotated its certificate", func() bool {
		return s.findRequest(w, func(csr *certificatesv1.CertificateSigningRequest, _ []netip.Addr) bool {
			// The kubelet watches the request, and has read the certificate by then.
			return len(csr.Status.Certificate) > 0 && time.Since(csr.CreationTimestamp.Time) > 10*time.Second
		}) != nil
	})
	s.removeAllOf(w)

	next, err := s.start(context.WithoutCancel(s.Context()))
	s.require(err)

	s.main = next
	s.main.allow(w.name, csrpolicy.Policy{EnforceCredential: true})
}

// awaitRequestFor waits for a request of the worker's kubelet that contains the address.
func (s suite) awaitRequestFor(w worker, addr netip.Addr) (found *certificatesv1.CertificateSigningRequest) {
	s.Helper()
	s.eventually("the kubelet requests a certificate for "+addr.String(), func() bool {
		found = s.findRequest(w, func(_ *certificatesv1.CertificateSigningRequest, ips []netip.Addr) bool {
			return slices.Contains(ips, addr)
		})

		return found != nil
	})

	return found
}
