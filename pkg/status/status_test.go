package status_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/pkg/status"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

var bed ctest.Bed

func TestMain(m *testing.M) { bed.Main(m, kube.Options{}, nil) }

// suite shares its Nodes and Events with the other tests. The names of its Nodes have a prefix.
type suite struct{ ctest.Suite }

// emit creates an Event as talos-ccm or a kubelet does.
func (s suite) emit(kind, name, reason, message string, at time.Time, changes ...func(*corev1.Event)) {
	s.Helper()

	event := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: "event-", Namespace: metav1.NamespaceDefault},
		InvolvedObject: corev1.ObjectReference{Kind: kind, Name: name, Namespace: metav1.NamespaceDefault},
		Reason:         reason, Message: message, Type: corev1.EventTypeWarning, Source: corev1.EventSource{Component: "talos-ccm"},
		FirstTimestamp: metav1.NewTime(at), LastTimestamp: metav1.NewTime(at), Count: 1,
	}
	if kind == "Node" {
		event.InvolvedObject.Namespace = ""
	}

	for _, change := range changes {
		change(event)
	}

	_, err := s.Client.CoreV1().Events(metav1.NamespaceDefault).Create(s.Context(), event, metav1.CreateOptions{})
	require.NoError(s, err)
}

func (s suite) read() status.Report {
	s.Helper()

	report, err := status.Read(s.Context(), s.Client, "kube-system", "status")
	require.NoError(s, err)

	return report
}

// problems returns the reasons and objects of the problems that concern objects whose names contain a text.
func (s suite) problems(text string) (problems []string) {
	s.Helper()

	for _, p := range s.read().Problems {
		if objects := strings.Join(p.Objects, ","); strings.Contains(objects, text) {
			problems = append(problems, p.Reason+" "+objects)
		}
	}

	return problems
}

func (s suite) talosReady(name string, value corev1.ConditionStatus) {
	s.Helper()
	s.SetCondition(name, "talos-ccm", fmt.Sprintf(`{"type":"TalosReady","status":%q,"reason":"NotReady","message":"not ready","lastTransitionTime":%q,"lastHeartbeatTime":null}`,
		value, time.Now().Add(time.Second).UTC().Format(time.RFC3339)))
}

func TestRead_ShowsEventsUntilNodeShowsThatProblemIsSolved(t *testing.T) {
	s := suite{bed.NewSuite(t)}
	now := time.Now().Add(time.Second)

	for _, name := range []string{"solved-a", "solved-b", "solved-cp"} {
		s.Register(kube.NodeSpec{Name: name})
	}

	s.PatchNode("solved-cp", "", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)

	// The condition can be off, and a leader that has not reached a machine does not change it.
	s.emit("Node", "solved-a", "MachineUnreachable", "m", now)
	assert.Equal(t, []string{"MachineUnreachable solved-a"}, s.problems("solved-a"))

	s.talosReady("solved-a", corev1.ConditionTrue)
	s.emit("Node", "solved-b", "TopologyChanged", "m", now)
	s.emit("Node", "solved-b", "MachineUnreachable", "m", now)
	s.talosReady("solved-b", corev1.ConditionFalse)
	assert.NotContains(t, s.problems("solved-a"), "MachineUnreachable solved-a")
	assert.ElementsMatch(t, []string{"TopologyChanged solved-b", "NotReady solved-b"}, s.problems("solved-b"))

	// The Node was not initialized; it is now. Another Node is missing until it registers, or was deleted.
	s.emit("Node", "solved-c", "NodeMissing", "m", now)
	s.emit("Node", "solved-c", "OwnershipConflict", "m", now)
	s.emit("Node", "solved-a", "OwnershipConflict", "m", now.Add(-time.Hour))
	assert.Equal(t, []string{"NodeMissing solved-c"}, s.problems("solved-c"))
	s.Register(kube.NodeSpec{Name: "solved-c"})
	assert.NotContains(t, s.problems("solved-c"), "NodeMissing solved-c")
	assert.NotContains(t, s.problems("solved-a"), "OwnershipConflict solved-a")

	s.emit("Node", "solved-cp", "ConfigInvalid", "m", now)
	assert.Contains(t, s.problems("solved-cp"), "ConfigInvalid solved-cp")
	s.emit("Node", "solved-cp", "ConfigValid", "m", now.Add(time.Second), func(e *corev1.Event) { e.Type = corev1.EventTypeNormal })
	assert.NotContains(t, s.problems("solved-cp"), "ConfigInvalid solved-cp")
}

func TestRead_ShowsUnexpectedCredentialsAndCodesOfCSRs(t *testing.T) {
	s := suite{bed.NewSuite(t)}
	s.Register(kube.NodeSpec{Name: "csr-node"})

	csr, err := s.Kube.RequestServingCertificate(t.Context(), "csr-node", "", "csr-node")
	require.NoError(t, err)

	now := time.Now()
	with := func(e *corev1.Event) { e.InvolvedObject.UID = csr.UID }
	s.emit("CertificateSigningRequest", csr.Name, "CSRDeferred", "NotOwned: the address", now, with)
	s.emit("CertificateSigningRequest", csr.Name, "UnexpectedCredential", "client certificate 00 was used: check", now.Add(time.Second), with)
	s.emit("Node", "csr-node", "UnexpectedCredential", "CSR x: client certificate 00 was used", now.Add(time.Second))
	s.emit("Node", "csr-node", "CSRDeferred", "(combined from similar events): CSR x: NotOwned: the address", now.Add(time.Second))

	assert.Contains(t, s.problems(csr.Name), "NotOwned "+csr.Name)
	assert.Equal(t, []string{"UnexpectedCredential csr-node"}, slices.DeleteFunc(s.problems("csr-node"), func(p string) bool { return p == "MachineUnknown csr-node" }))
}

// Every kubelet can create Events.
func TestRead_LimitsWhatKubeletsCanForge(t *testing.T) {
	s := suite{bed.NewSuite(t)}
	s.Register(kube.NodeSpec{Name: "forged"})

	now := time.Now().Add(time.Second)
	s.emit("Node", "forged", "NoLeader", "run a command", now)
	s.emit("Lease", "forged", "NoLeader", "run a command", now)
	s.emit("Node", "forged", "ConfigInvalid", "run a command", now)
	s.emit("Node", "forged", strings.Repeat("r", 5000), "run a command", now)
	s.emit("Node", "forged", "OwnershipConflict", "run a command", now.Add(time.Hour))
	assert.Empty(t, s.problems("forged"))

	s.emit("Node", "forged", "OwnershipConflict", strings.Repeat("m", 5000)+"\x1b[31m", now)

	for i := range 30 {
		s.emit("Node", "forged", fmt.Sprintf("Forged%d", i), "run a command", now)
	}

	var text bytes.Buffer

	report := s.read()
	require.NoError(t, preview.Write(&text, "table", report))
	assert.Equal(t, "NoLeader", report.Problems[0].Reason)
	assert.Contains(t, text.String(), "more problems")
	assert.Less(t, text.Len(), 40<<10)
	assert.NotContains(t, text.String(), "\x1b")
}

func TestRead_ComparesInstancesOfMachinesThatRespond(t *testing.T) {
	s := suite{bed.NewSuite(t)}

	for name, config := range map[string]string{"differs-a": "1", "differs-b": "2", "differs-c": ""} {
		s.Register(kube.NodeSpec{Name: name})
		s.PatchNode(name, "", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)

		node := s.Node(name)
		require.NoError(t, recorder.Write(t.Context(), s.Client, node, noderecord.Instance{Config: config}.Labels()))
	}

	assert.Equal(t, []string{"ConfigDiffers differs-a,differs-b"}, s.problems("differs-"))

	var names []string
	for _, i := range s.read().Instances {
		names = append(names, i.Node)
	}

	assert.Subset(t, names, []string{"differs-a", "differs-b", "differs-c"})

	s.talosReady("differs-b", corev1.ConditionFalse) // as before the CNI runs
	assert.Contains(t, s.problems("differs-"), "ConfigDiffers differs-a,differs-b")

	s.talosReady("differs-b", corev1.ConditionUnknown)
	assert.NotContains(t, s.problems("differs-"), "ConfigDiffers differs-a,differs-b")
}
