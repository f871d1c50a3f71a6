package csrapproval_test

import (
	"context"
	"maps"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// This test comes first: the kubelet of the next one requests certificates while other tests run, which count, too.
func TestMetrics_CountVerdicts(t *testing.T) {
	const pending = "talosccm_csr_pending"

	s := alone(t)
	w, victim := s.known(), s.known()

	before := ctest.Metrics(s)
	s.awaitIssued(s.post(w, request{}))
	s.awaitDenied(s.post(w, request{names: []string{"kubernetes", "*.example.org"}}))
	s.awaitDenied(s.post(w, request{ips: []netip.Addr{victim.addr}}))

	other := s.plan().addr
	s.list(w, other)
	deferred := s.post(w, request{ips: []netip.Addr{other}})
	s.awaitDeferred(deferred, csrpolicy.CodeUnknownAddress)

	wanted := map[string]float64{
		"talosccm_csr_approval_count approve":                               1,
		"talosccm_csr_approval_count deny":                                  2,
		"talosccm_csr_approval_age_seconds":                                 1,
		"talosccm_csr_verdicts_total Approve " + csrpolicy.CodeVerified:     1,
		"talosccm_csr_verdicts_total Deny " + csrpolicy.CodeClusterName:     1,
		"talosccm_csr_verdicts_total Deny " + csrpolicy.CodeWildcard:        1,
		"talosccm_csr_verdicts_total Deny " + csrpolicy.CodeNotOwned:        1,
		"talosccm_csr_verdicts_total Deny " + csrpolicy.CodeOwnedByOthers:   0, // other owners are no reason for denial
		"talosccm_csr_verdicts_total Defer " + csrpolicy.CodeOwnedByOthers:  1,
		"talosccm_csr_verdicts_total Defer " + csrpolicy.CodeUnknownAddress: 1,
		pending: 1,
	}

	counted := map[string]float64{}
	defer func() { t.Logf("counted %v", counted) }()

	s.eventually("all verdicts are counted", func() bool {
		after := ctest.Metrics(s)
		for name := range wanted {
			counted[name] = after[name] - before[name]
		}

		return maps.Equal(counted, wanted)
	})

	s.remove(deferred)
	s.eventually("the deleted request is not pending", func() bool { return ctest.Metrics(s)[pending] == 0 })
}

// A real kubelet obtains its client certificate with the bootstrap token and rotates it: kube-controller-manager
// backdates certificates by five minutes, so that 70 to 90 % of the lifetime have passed after 15 to 105 s. Not earlier:
// until the kubelet has closed its connections, it would request the next certificate with the previous one.
// The test then removes all traces of the rotation, and finally wipes EPHEMERAL. It comes before the rest, so that its
// kubelet waits for the rotation while other tests run.
func TestPinning_KubeletKeepsItsCertificates(t *testing.T) {
	cluster, err := kube.Start(context.WithoutCancel(t.Context()), kube.Options{ControllerManager: kube.ControllerManager{Flags: []string{"--cluster-signing-duration=150s"}}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Stop()) })

	client, err := kubernetes.NewForConfig(cluster.Config())
	require.NoError(t, err)

	own := &environment{bed: ctest.Bed{Kube: cluster, Client: client, Talos: ctest.NewTalos(t, talostest.Options{})}}
	stop, err := own.open()
	require.NoError(t, err)
	t.Cleanup(stop)

	s := suite{own.bed.NewSuite(t), own}
	w := s.boot(s.planKubelet())
	s.enforce(w)
	s.format(w, "85b1a5d4-94ab-4b6c-9e69-6d2f5ac6ee3b")

	spec := kube.KubeletSpec{BootstrapToken: s.token, RotateCertificates: true}
	kubelet := s.startKubelet(w, spec)
	first := csrpolicy.CredentialID(s.awaitIssuedFor(w))

	t.Parallel()

	rotated := s.AwaitNode(w.name, func(n *corev1.Node, asrt *assert.Assertions) { asrt.NotEmpty(n.Labels[noderecord.LabelPrevious]) })
	assert.NotEqual(t, first, rotated.Labels[noderecord.LabelCredential])

	var added []netip.Addr

	request := func() netip.Addr {
		added = append(added, netip.AddrFrom4([4]byte{8, 8, 4, byte(1 + len(added))}))
		s.report(w, talostest.LinkExternal, added[len(added)-1])

		return added[len(added)-1]
	}

	// The kubelet closes its connections a few seconds after the rotation, and uses the previous certificate until then.
	for id := first; id == first; {
		request()

		id = csrpolicy.CredentialID(s.awaitIssuedFor(w, added...))
	}

	assert.Empty(t, s.Events(w.name, csrapproval.ReasonUnexpectedCredential))

	s.main.Stop()
	s.removeAllOf(w)
	s.label(w, first)
	s.restart()
	s.enforce(w)

	pending := s.awaitRequestFor(w, request())
	s.assertUnexpected(pending.Name)
	s.label(w, csrpolicy.CredentialID(pending))
	s.awaitIssuedFor(w, added...)

	// The kubelet has to obtain a certificate with the token again.
	kubelet.Stop(t.Context())
	s.removeAllOf(w)
	s.format(w, "0e5e1a3c-5a80-4b0e-8d0f-6f2f0b1f3f6e")
	s.startKubelet(w, spec)
	s.awaitIssuedFor(w, added...)
}
