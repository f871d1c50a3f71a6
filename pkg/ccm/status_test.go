package ccm_test

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/status"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// status returns what talos-ccm status reads, and its text with names, versions and times as in the documentation.
func (s *suite) status() (status.Report, string) {
	s.Helper()

	report, err := status.Read(s.Context(), s.Client, leaseNamespace, leaseName)
	require.NoError(s, err)

	var text bytes.Buffer

	require.NoError(s, preview.Write(&text, "table", report))

	lines := strings.ReplaceAll(text.String(), s.prefix, "")
	for pattern, example := range map[string]string{
		`, since \d+s`: ", since 2m", `v0\.0\.0-\S+`: "v1.0.0", `csr-\w+`: "csr-x7k2p", `(is unreachable: ).*`: "${1}…", `; ClusterIdentityIncomplete: .*`: "",
	} {
		lines = regexp.MustCompile(pattern).ReplaceAllString(lines, example)
	}

	return report, regexp.MustCompile(`(?m) +$`).ReplaceAllString(lines, "")
}

func (s *suite) awaitInstance(machines ...*talostest.Machine) {
	s.Helper()

	for _, m := range machines {
		s.AwaitNode(m.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.NotEmpty(noderecord.InstanceOf(n).Config) })
	}
}

func TestStatus_ShowsWhatNeedsAttention(t *testing.T) {
	s, self, worker := newCluster(t)

	// Those of other tests are problems, too.
	require.NoError(t, s.Client.CertificatesV1().CertificateSigningRequests().DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))
	require.NoError(t, s.Client.CoreV1().Events(metav1.NamespaceDefault).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))

	report, _ := s.status()
	require.Len(t, report.Problems, 1)
	assert.Equal(t, "NoLeader", report.Problems[0].Reason)

	second := s.controlPlane("cp-2")
	s.configure(second, site("other"))
	s.register(second)
	s.label(self, second)

	leader := s.launch(s.options(self))
	s.awaitInstance(self)
	s.awaitInitialized(self, worker, second)

	report, text := s.status()
	assert.Empty(t, report.Problems, text)
	assert.Equal(t, self.Nodename(), report.Leader.Node)
	assert.Equal(t, status.Nodes{Talos: 3, Managed: 3}, report.Nodes)

	data, err := json.Marshal(report)
	require.NoError(t, err)
	assert.Contains(t, string(data), `"problems":[]`)

	// A document that differs, a silent machine, a certificate for the address of another machine.
	standby := s.launch(s.options(second))
	silent := s.worker("worker-2")
	require.NoError(t, silent.Stop(t.Context()))
	s.register(silent)

	s.AwaitEvent(s.requestCertificate(worker, "192.0.2.99"), csrapproval.ReasonDenied)
	s.awaitEvent(silent, "MachineUnreachable")
	s.AwaitEvent(s.requestCertificate(silent), csrapproval.ReasonDeferred)
	s.awaitInstance(second)

	report, text = s.status()
	assert.Equal(t, status.Nodes{Talos: 4, Managed: 3, Waiting: 1}, report.Nodes)
	assert.Equal(t, 1, report.PendingCSRs)
	assert.Len(t, report.Problems, 4, text)

	page, err := os.ReadFile("../../docs/troubleshooting/README.md")
	require.NoError(t, err)
	assert.Contains(t, string(page), "```console\n$ talos-ccm status\n"+text+"```\n", text)

	// The leader is gone, and so is the Node.
	standby.stop()
	leader.stop()
	s.Remove(silent.Nodename())

	report, text = s.status()
	assert.Len(t, report.Problems, 4, text)
	assert.Equal(t, "NoLeader", report.Problems[0].Reason)
	assert.Empty(t, report.Leader.Holder)
}

// Messages of Events may have been written by others.
func TestStatus_EscapesControlCharacters(t *testing.T) {
	var text bytes.Buffer

	require.NoError(t, preview.Write(&text, "table", status.Report{Problems: []status.Problem{{Reason: "Reason", Objects: []string{"a", "b", "c", "d"}, Message: "\x1b[31mred\n"}}}))
	assert.Contains(t, text.String(), "Reason: a, b, c and 1 more")
	assert.NotContains(t, text.String(), "\x1b")
}
