package ccm_test

import (
	"context"
	"crypto/x509/pkix"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
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

	kubelet, err := s.Kube.UserConfig("system:node:"+second.Nodename(), "system:nodes")
	require.NoError(t, err)

	client, err := kubernetes.NewForConfig(kubelet)
	require.NoError(t, err)

	key, err := keyutil.MakeEllipticPrivateKeyPEM()
	require.NoError(t, err)

	private, err := keyutil.ParsePrivateKeyPEM(key)
	require.NoError(t, err)

	subject := pkix.Name{CommonName: "system:node:" + second.Nodename(), Organization: []string{"system:nodes"}}
	text, err := cert.MakeCSR(private, &subject, []string{second.Nodename()}, nil)
	require.NoError(t, err)

	usages := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	name, _, err := csr.RequestCertificateWithContext(t.Context(), client, text, "", certificatesv1.KubeletServingSignerName, nil, usages, private)
	require.NoError(t, err)

	event := s.AwaitEvent(name, csrapproval.ReasonUnexpectedCredential, "Install the talos-ccm extension on the machine", noderecord.LabelCredential+"="+ctest.IDOf(kubelet))
	t.Logf("%d bytes: %s", len(event.Message), event.Message)

	request := ctest.Ask(s, func(ctx context.Context) (*certificatesv1.CertificateSigningRequest, error) {
		return s.Client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
	})
	assert.Empty(t, request.Status.Conditions)
	assert.Empty(t, noderecord.Of(s.Node(second.Nodename())).Credential)
}
