package ccm_test

import (
	"context"
	"crypto"
	"crypto/x509/pkix"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/certificate/csr"
	"k8s.io/client-go/util/keyutil"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// label sets the label of control-plane Nodes, as Talos does.
func (s *suite) label(machines ...*talostest.Machine) {
	s.Helper()

	members := []netip.Addr{}

	for _, m := range machines {
		s.PatchNode(m.Nodename(), "", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)
		members = append(members, m.Address())
	}

	s.Talos.SetEtcdMembers(members...)
}

// kubelet makes the requests of a machine's kubelet.
type kubelet struct {
	suite     *suite
	machine   *talostest.Machine
	addresses []net.IP // in its serving certificates

	config, previous *rest.Config // of its client certificates
}

// use makes the kubelet use a client certificate, and stores it on the machine.
func (k *kubelet) use(config *rest.Config) {
	k.config, k.previous = config, k.config
	k.machine.SetKubeletCertificate(slices.Concat(config.CertData, config.KeyData))
}

func (k *kubelet) user() string { return "system:node:" + k.machine.Nodename() }

// otherCertificate returns another client certificate of unknown origin, such as an attacker's.
func (k *kubelet) otherCertificate() *rest.Config {
	k.suite.Helper()

	config, err := k.suite.Kube.UserConfig(k.user(), "system:nodes")
	require.NoError(k.suite, err)

	return config
}

// request creates a CSR with the credentials of config.
func (k *kubelet) request(config *rest.Config, signer string, usage certificatesv1.KeyUsage, names []string, addresses []net.IP) (name string, key []byte) {
	k.suite.Helper()

	key, err := keyutil.MakeEllipticPrivateKeyPEM()
	require.NoError(k.suite, err)

	private, err := keyutil.ParsePrivateKeyPEM(key)
	require.NoError(k.suite, err)

	signing, isSigner := private.(crypto.Signer)
	require.True(k.suite, isSigner)

	text, err := cert.MakeCSR(signing, &pkix.Name{CommonName: k.user(), Organization: []string{"system:nodes"}}, names, addresses)
	require.NoError(k.suite, err)

	client, err := kubernetes.NewForConfig(config)
	require.NoError(k.suite, err)

	usages := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, usage}
	name, _, err = csr.RequestCertificateWithContext(k.suite.Context(), client, text, "", signer, nil, usages, signing)
	require.NoError(k.suite, err)

	return name, key
}

// requestServing creates a CSR for a serving certificate with the credentials of config.
func (k *kubelet) requestServing(config *rest.Config) (name string) {
	k.suite.Helper()

	name, _ = k.request(config, certificatesv1.KubeletServingSignerName, certificatesv1.UsageServerAuth, []string{k.machine.Nodename()}, k.addresses)

	return name
}

// rotate replaces the client certificate.
func (k *kubelet) rotate() {
	k.suite.Helper()
	k.use(k.obtain(k.config))
}

// obtain requests a client certificate with the credentials of config, which may be a bootstrap token.
// kube-controller-manager approves and issues it.
func (k *kubelet) obtain(config *rest.Config) *rest.Config {
	k.suite.Helper()

	name, key := k.request(config, certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.UsageClientAuth, nil, nil)

	var issued []byte

	ctest.Eventually(k.suite, "client certificate is issued", func() bool {
		issued = k.suite.csr(name).Status.Certificate

		return len(issued) > 0
	})

	return k.suite.Kube.CertificateConfig(issued, key)
}

func (s *suite) csr(name string) *certificatesv1.CertificateSigningRequest {
	s.Helper()

	return ctest.Ask(s, func(ctx context.Context) (*certificatesv1.CertificateSigningRequest, error) {
		return s.Client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
	})
}

// An instance states its machine's certificate also while another instance leads, and whatever controllers are enabled.
func TestManager_StatesCertificateOfLocalKubeletWithoutLeading(t *testing.T) {
	s, self, worker := newCluster(t)
	s.label(self)
	s.leaseTo("other", time.Hour)

	options := s.options(self)
	options.Framework.Generic.Controllers = []string{nodecontroller.Alias}
	s.start(options)

	node := s.AwaitNode(self.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.NotEmpty(noderecord.Of(n).Stated) })
	assert.Equal(t, noderecord.Of(node).Credential, noderecord.Of(node).Stated)
	assert.Equal(t, 1, calls(self, "/machine.MachineService/Read", ""))
	assert.Equal(t, "other", s.holder())
	assert.Equal(t, noderecord.Record{}, noderecord.Of(s.Node(worker.Nodename())))
}

// The first CSR of a control-plane machine without the extension may be an attacker's. While the extension leads, it makes
// no record.
func TestManager_RecordsNoCertificateThatControlPlaneMachineDidNotState(t *testing.T) {
	s, self, _ := newCluster(t)
	second := s.controlPlane("cp-2")
	s.register(second)
	s.label(self, second)
	s.start(s.options(self))

	k := &kubelet{suite: s, machine: second}
	k.use(k.otherCertificate())

	name := k.requestServing(k.config)
	event := s.AwaitEvent(name, csrapproval.ReasonUnexpectedCredential, "Install the talos-ccm extension on the machine", noderecord.LabelCredential+"="+ctest.IDOf(k.config))
	t.Logf("%d bytes: %s", len(event.Message), event.Message)

	assert.Empty(t, s.csr(name).Status.Conditions)
	assert.Empty(t, noderecord.Of(s.Node(second.Nodename())).Credential)
}
