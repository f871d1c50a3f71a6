package recorder_test

import (
	"fmt"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/transport"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// leader is a Leader whose machines the test describes. No other controller runs.
type leader struct {
	ctest.Suite
	*recorder.Leader

	instance  *ctest.Instance
	transport *ctest.Transport
	clock     *clocktesting.FakePassiveClock
	config    hash
}

func lead(t *testing.T) *leader {
	t.Helper()

	return leadThrough(t, nil)
}

// leadThrough is lead with a wrapper of the transport to the API server.
func leadThrough(t *testing.T, wrap transport.WrapperFunc) *leader {
	t.Helper()
	t.Parallel()

	l := &leader{Suite: bed.NewSuite(t), clock: clocktesting.NewFakePassiveClock(time.Now())}
	l.config.set("leader")

	config := l.Kube.Config()
	l.transport = ctest.NewTransport(config)
	config.Wrap(wrap)

	var err error

	l.instance, err = ctest.NewInstance(t.Context(), config, nil)
	require.NoError(t, err)

	l.instance.Inventory = inventory.New(l.clock.Now)
	l.Leader, err = recorder.NewLeader(l.instance.Client, l.instance.Nodes, l.instance.Inventory, l.instance.Recorder, l.clock, l.config.String)
	require.NoError(t, err)
	l.instance.Start(l.Run)
	t.Cleanup(l.instance.Stop)

	return l
}

func ip(text string) netip.Addr { return netip.MustParseAddr(text) }

// on returns a worker with a volume, the address at which it responds, and further node IPs.
func on(volume, address string, nodeIPs ...string) machine.Machine {
	m := machine.Machine{NodeID: "machine with " + volume, EphemeralID: volume, Endpoint: ip(address), NodeIPs: []netip.Addr{ip(address)}}
	for _, address := range nodeIPs {
		m.NodeIPs = append(m.NodeIPs, ip(address))
	}

	return m
}

// verified returns the machine, dialed as a control-plane machine.
func verified(m machine.Machine) machine.Machine {
	m.ControlPlane = &machine.ControlPlane{}

	return m
}

// of returns the record of a worker without a certificate.
func of(m machine.Machine, other string) noderecord.Record {
	r := noderecord.Record{NodeID: noderecord.Fingerprint(m.NodeID), Volume: noderecord.ID([]byte(m.EphemeralID)), Address: m.Endpoint, IsWorker: m.ControlPlane == nil}
	if other != "" {
		r.OtherAddress = ip(other)
	}

	return r
}

// register registers a Node, which is in the cache afterwards.
func (l *leader) register(name string, isControlPlane bool) {
	l.Helper()
	l.Register(kube.NodeSpec{Name: name, ControlPlane: isControlPlane})
	l.awaitCached(name, isControlPlane)
}

func (l *leader) awaitCached(name string, isControlPlane bool) {
	l.Helper()
	ctest.Eventually(l, name+" is in the cache", func() bool {
		node, err := l.instance.Nodes.Lister().Get(name)
		if err != nil {
			return false
		}

		_, labeled := node.Labels["node-role.kubernetes.io/control-plane"]

		return labeled == isControlPlane
	})
}

// join registers a Node, whose machine responds.
func (l *leader) join(name string, m machine.Machine) {
	l.Helper()
	l.register(name, m.ControlPlane != nil)
	l.responds(name, m)
}

func (l *leader) responds(name string, m machine.Machine) {
	m.Nodename = name
	l.instance.Inventory.Replace(name, m)
}

func (l *leader) awaitRecord(name string, want noderecord.Record) *corev1.Node {
	l.Helper()

	node := l.AwaitNode(name, func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal(want, noderecord.Of(n)) })
	ctest.Eventually(l, "the record of "+name+" is in the cache", func() bool {
		cached, err := l.instance.Nodes.Lister().Get(name)

		return err == nil && noderecord.Of(cached) == want
	})

	return node
}

// assertKept fails if the record of a Node is another one, or is about to change.
func (l *leader) assertKept(name string, want noderecord.Record, what string) {
	l.Helper()

	node := l.Node(name)
	assert.Equal(l, want, noderecord.Of(node), what)
	assert.True(l, l.IsRecorded(node), what)
}

// touch makes the Leader sync a Node.
func (l *leader) touch(name string) {
	l.Helper()
	l.PatchNode(name, "", fmt.Sprintf(`{"metadata":{"annotations":{"test/touched":"%d"}}}`, time.Now().UnixNano()))
}

func TestLeader_RecordsMachine(t *testing.T) {
	l := lead(t)
	l.register("records", false)
	assert.False(t, l.IsRecorded(l.Node("records")))

	dual := on("volume", "10.1.0.1", "2001:db8:1::1")
	l.responds("records", dual)
	node := l.awaitRecord("records", of(dual, "2001:db8:1::1"))
	assert.True(t, l.IsRecorded(node))
	assert.True(t, slices.ContainsFunc(node.ManagedFields, func(m metav1.ManagedFieldsEntry) bool {
		return m.Manager == noderecord.FieldManager && strings.Contains(m.FieldsV1.GetRawString(), noderecord.LabelVolume)
	}))
	assert.NotContains(t, node.Labels, noderecord.LabelCredential)

	// It has no IPv6 address for a while, and its node IPs are not known after a reboot.
	l.responds("records", on("volume", "10.1.0.1"))
	l.awaitRecord("records", of(dual, ""))
	l.responds("records", dual)
	l.awaitRecord("records", of(dual, "2001:db8:1::1"))
	l.responds("records", machine.Machine{NodeID: dual.NodeID, EphemeralID: "volume", Endpoint: dual.Endpoint})
	l.assertKept("records", of(dual, "2001:db8:1::1"), "no node IPs")

	// Node IPs that cannot be an address of the machine only.
	for i, address := range []string{"fe80::1", "::1", "ff02::1", "10.1.0.100"} {
		name, m := fmt.Sprintf("records-%d", i), on("volume "+address, fmt.Sprintf("10.1.1.%d", i), address)
		l.join(name, m)
		l.awaitRecord(name, of(m, ""))
	}
}

// Whoever takes the address of a machine for seconds, or knows its node ID and a hash of 48 bits, does not get its record.
func TestLeader_RecordFollowsOnlyItsVolume(t *testing.T) {
	l := lead(t)
	m := on("volume", "10.2.0.1")
	want := of(m, "")

	l.join("follows", m)
	l.awaitRecord("follows", want)

	sameNode := func(volume, address string) machine.Machine {
		other := on(volume, address, "2001:db8:2::2")
		other.NodeID = m.NodeID

		return other
	}

	for name, other := range map[string]machine.Machine{
		"other volume at its address":          on("other", "10.2.0.1", "2001:db8:2::2"),
		"other volume with its node ID":        sameNode("other", "10.2.0.1"),
		"no volume at its address":             sameNode("", "10.2.0.1"),
		"no volume, other node ID":             {NodeID: "other", Endpoint: m.Endpoint, NodeIPs: m.NodeIPs},
		"its node ID elsewhere":                sameNode("", "10.2.0.2"),
		"its node ID, other volume, elsewhere": sameNode("other", "10.2.0.2"),
	} {
		l.responds("follows", other)
		l.assertKept("follows", want, name)
	}

	// The machine has another address, and its partition STATE was wiped.
	moved := on("volume", "10.2.0.3", "2001:db8:2::3")
	moved.NodeID = "other"
	l.responds("follows", moved)

	want.Address, want.OtherAddress = ip("10.2.0.3"), ip("2001:db8:2::3")
	l.awaitRecord("follows", want)

	// An earlier version recorded 48 bits of the volume.
	want.Volume = want.Volume[:12]
	l.PatchNode("follows", "", `{"metadata":{"labels":{"`+noderecord.LabelVolume+`":null}}}`)
	l.awaitRecord("follows", want)
	l.responds("follows", on("volume", "10.2.0.4"))
	l.assertKept("follows", want, "volume of an earlier version")
}

func TestLeader_RecordsExchangedAddresses(t *testing.T) {
	l := lead(t)
	l.join("swaps-1", on("first", "10.3.0.1"))
	l.join("swaps-2", on("second", "10.3.0.2"))
	l.awaitRecord("swaps-1", of(on("first", "10.3.0.1"), ""))
	l.awaitRecord("swaps-2", of(on("second", "10.3.0.2"), ""))

	l.responds("swaps-1", on("first", "10.3.0.2"))
	l.awaitRecord("swaps-1", of(on("first", "10.3.0.2"), ""))
	l.responds("swaps-2", on("second", "10.3.0.1"))
	l.awaitRecord("swaps-2", of(on("second", "10.3.0.1"), ""))
}

// A machine that is down keeps what is recorded for it, whatever others report.
func TestLeader_RecordsNoAddressOfOtherNodes(t *testing.T) {
	l := lead(t)
	first := on("first", "10.4.0.1", "2001:db8:4::1")
	l.join("taken-1", first)
	l.awaitRecord("taken-1", of(first, "2001:db8:4::1"))

	evil := on("evil", "10.4.0.2", "2001:db8:4::1")
	l.join("taken-2", evil)
	l.awaitRecord("taken-2", of(evil, ""))
	l.touch("taken-1")
	l.assertKept("taken-1", of(first, "2001:db8:4::1"), "reported by another worker")
	l.instance.Inventory.MarkUnreachable("taken-1", "down")

	atFirst := on("third", "10.4.0.1")
	without := of(atFirst, "")
	without.Address = netip.Addr{}

	l.join("taken-3", atFirst)
	l.awaitRecord("taken-3", without)
	l.touch("taken-3")
	l.assertKept("taken-3", without, "recorded for another worker")

	// Control-plane machines are dialed only at addresses that no kubelet can write.
	controlPlane := verified(on("cp", "10.4.0.1", "2001:db8:4::1"))
	l.join("taken-cp", controlPlane)
	l.awaitRecord("taken-cp", of(controlPlane, "2001:db8:4::1"))

	later := verified(on("cp-2", "10.4.0.5", "2001:db8:4::1"))
	l.join("taken-cp-2", later)
	l.awaitRecord("taken-cp-2", of(later, ""))

	// What a control-plane machine reports, or another machine has as node IP, is of no worker.
	reporting := verified(on("cp-3", "10.4.0.6"))
	reporting.Addresses = []machine.Address{{Link: "eth1", Prefix: netip.MustParsePrefix("2001:db8:4::6/64")}}
	l.responds("taken-cp-3", reporting)
	l.responds("taken-4", on("fourth", "10.4.0.7", "2001:db8:4::7"))

	for i, address := range []string{"2001:db8:4::6", "2001:db8:4::7"} {
		name, m := fmt.Sprintf("taken-5%d", i), on("volume "+address, fmt.Sprintf("10.4.1.%d", i), address)
		l.join(name, m)
		l.awaitRecord(name, of(m, ""))
	}

	// The Nodes with the address are deleted.
	for _, name := range []string{"taken-1", "taken-cp"} {
		l.Remove(name)
	}

	ctest.Eventually(l, "the machine has its address", func() bool {
		l.touch("taken-3")

		return noderecord.Of(l.Node("taken-3")) == of(atFirst, "")
	})
}

func TestLeader_RecordsControlPlaneMachineOnlyIfVerified(t *testing.T) {
	l := lead(t)
	m := on("volume", "10.5.0.1")

	l.register("verified", true)
	l.responds("verified", m)
	assert.False(t, l.IsRecorded(l.Node("verified")))
	l.responds("verified", verified(m))
	l.awaitRecord("verified", of(verified(m), ""))

	// The kubelet wrote a virtual IP into the Node.
	local := on("local", "10.5.0.100")
	local.ControlPlane, local.NodeIPs = &machine.ControlPlane{Local: true}, []netip.Addr{ip("10.5.0.2"), ip("2001:db8:5::2")}
	want := of(local, "2001:db8:5::2")
	want.Address = ip("10.5.0.2")

	l.join("verified-2", local)
	l.awaitRecord("verified-2", want)

	// Before Talos has set the label, any machine of the cluster may have responded.
	worker := on("worker", "10.5.0.3")
	l.join("verified-3", worker)
	l.awaitRecord("verified-3", of(worker, ""))
	l.PatchNode("verified-3", "", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":"","`+noderecord.LabelVolume+`":null}}}`)
	l.awaitCached("verified-3", true)
	assert.False(t, l.IsRecorded(l.Node("verified-3")))
	l.responds("verified-3", verified(on("machine", "10.5.0.4")))
	l.awaitRecord("verified-3", of(verified(on("machine", "10.5.0.4")), ""))
}

// The machine states its certificate and its volume, and no address.
func TestLeader_AddsAddressesToStatedRecord(t *testing.T) {
	l := lead(t)
	l.register("stated", true)

	m := verified(on("volume", "10.6.0.1", "2001:db8:6::1"))
	node := l.Node("stated")
	stated := noderecord.Record{Credential: noderecord.ID([]byte("certificate")), Stated: noderecord.ID([]byte("certificate")), Volume: noderecord.ID([]byte("volume"))}
	require.NoError(t, recorder.Write(t.Context(), l.Client, node, stated.ByMachine()))
	l.awaitRecord("stated", stated)

	l.responds("stated", verified(on("other", "10.6.0.1")))
	l.assertKept("stated", stated, "another machine")
	l.responds("stated", m)

	stated.Address, stated.OtherAddress = ip("10.6.0.1"), ip("2001:db8:6::1")
	l.awaitRecord("stated", stated)
}

// delete deletes a Node, as the controller of CSRs sees it. The cache shows the deletion afterwards.
func (l *leader) delete(node *corev1.Node) {
	l.Helper()
	l.instance.Inventory.Claims.SetNode(node)
	l.Remove(node.Name)
	l.instance.Inventory.Claims.DeleteNode(node)
	l.instance.Inventory.Forget(node.Name)

	ctest.Eventually(l, "the cache shows the deletion", func() bool {
		_, err := l.instance.Nodes.Lister().Get(node.Name)

		return err != nil
	})
}

// A client that deletes a Node and registers it again must not get its certificate once the record of the deleted Node has ended.
func TestLeader_KeepsCertificateOfMachineAfterDeletion(t *testing.T) {
	for name, isControlPlane := range map[string]bool{"kept": false, "kept-stated": true} {
		t.Run(name, func(t *testing.T) {
			l := lead(t)
			m := on("volume", "10.42.0.1")
			m.Nodename = name

			want := of(m, "")
			want.Credential, want.Previous, want.IsWorker = noderecord.ID([]byte("certificate")), noderecord.ID([]byte("previous")), !isControlPlane

			if isControlPlane {
				m = verified(m)
			}

			l.register(name, isControlPlane)
			require.NoError(t, recorder.Write(t.Context(), l.Client, l.Node(name), want.ByLeader()))

			if stated := want; isControlPlane {
				stated.Stated = want.Credential
				require.NoError(t, recorder.Write(t.Context(), l.Client, l.Node(name), stated.ByMachine()))
			}

			deleted := l.Node(name)
			require.Equal(t, isControlPlane, noderecord.Of(deleted).Stated != "")
			l.delete(deleted)

			l.join(name, m)
			l.awaitRecord(name, want)
			l.assertKept(name, want, "machine of the deleted Node")
		})
	}
}

// For 15 minutes, the record of a deleted Node counts for the next one, which is initialized without a record.
func TestLeader_RecordsNoOtherMachineAfterDeletion(t *testing.T) {
	l := lead(t)
	m, other := on("volume", "10.7.0.1"), on("other", "10.7.0.2")

	l.join("again", m)
	deleted := l.awaitRecord("again", of(m, ""))
	l.delete(deleted)
	l.join("again", other)
	l.touch("again")
	l.assertKept("again", noderecord.Record{}, "another machine")

	l.responds("again", m)
	l.awaitRecord("again", of(m, ""))

	l.responds("again", other)
	l.PatchNode("again", "", `{"metadata":{"labels":{"`+noderecord.LabelContext+`":null,"`+noderecord.LabelAddress+`":null}}}`)
	l.awaitRecord("again", noderecord.Record{})
	l.clock.SetTime(l.clock.Now().Add(claims.Retention))
	l.touch("again")
	l.awaitRecord("again", of(other, ""))
}

// An honest machine may have another volume and another address, such as a VM that was replaced.
func TestLeader_ReportsMachineThatRecordCannotFollow(t *testing.T) {
	l := lead(t)
	m, replaced := on("volume", "10.8.0.1"), on("replaced", "10.8.0.2", "2001:db8:8::2")

	l.join("replaced", m)
	l.awaitRecord("replaced", of(m, ""))
	l.responds("replaced", replaced)

	// A kubelet that requests a certificate within minutes updates the record itself.
	l.touch("replaced")
	time.Sleep(100 * time.Millisecond)
	assert.Empty(t, l.Events("replaced", recorder.ReasonMismatch))

	var event *corev1.Event

	ctest.Eventually(l, "the machine is reported", func() bool {
		l.clock.SetTime(l.clock.Now().Add(5 * time.Minute))
		l.touch("replaced")

		events := l.Events("replaced", recorder.ReasonMismatch)
		if len(events) > 0 {
			event = &events[0]
		}

		return event != nil
	})

	for range 3 {
		l.clock.SetTime(l.clock.Now().Add(5 * time.Minute))
		l.touch("replaced")
	}

	l.assertKept("replaced", of(m, ""), "reported")
	t.Logf("%d bytes: %s", len(event.Message), event.Message)

	// The command removes the record.
	command := regexp.MustCompile(`kubectl label node replaced (.*)$`).FindStringSubmatch(event.Message)
	require.Len(t, command, 2)

	var labels []string
	for key := range strings.FieldsSeq(command[1]) {
		labels = append(labels, fmt.Sprintf("%q:null", strings.TrimSuffix(key, "-")))
	}

	assert.EqualValues(t, 1, l.Events("replaced", recorder.ReasonMismatch)[0].Count)
	l.PatchNode("replaced", "", `{"metadata":{"labels":{`+strings.Join(labels, ",")+`}}}`)
	l.awaitRecord("replaced", of(replaced, "2001:db8:8::2"))
}

// An admission policy may forbid labels. The Node is not initialized before its machine is recorded.
func TestLeader_ReportsRejectedRecord(t *testing.T) {
	l := lead(t)
	l.register("rejected", false)
	allow := l.forbidRecord("rejected")
	l.responds("rejected", on("volume", "10.41.0.1"))

	event := l.AwaitEvent("rejected", recorder.ReasonWriteFailed, "until its machine is recorded", "no records here")
	t.Logf("%d bytes: %s", len(event.Message), event.Message)

	wait := l.transport.Overtake(t, http.MethodPatch, "rejected", 1, func() { l.touch("rejected") }) // makes a conflict
	l.touch("rejected")
	wait()
	allow()
	l.touch("rejected")
	l.awaitRecord("rejected", of(on("volume", "10.41.0.1"), ""))
	assert.EqualValues(t, 1, l.Events("rejected", recorder.ReasonWriteFailed)[0].Count, "a conflict does not end the problem")
}

// The API server rejects the record of a Node that is deleted before the Leader receives the response.
func TestLeader_ForgetsProblemOfNodeThatIsDeletedDuringWrite(t *testing.T) {
	rejected, deleted := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() {
		close(rejected)
		<-deleted
	})

	l := leadThrough(t, func(next http.RoundTripper) http.RoundTripper {
		return ctest.RoundTripper(func(r *http.Request) (*http.Response, error) {
			response, err := next.RoundTrip(r)
			if err == nil && response.StatusCode == http.StatusUnprocessableEntity && strings.HasSuffix(r.URL.Path, "/nodes/deleted") {
				once()
			}

			return response, err
		})
	})

	l.register("deleted", false)
	l.forbidRecord("deleted")
	l.responds("deleted", on("volume", "10.42.0.1"))
	ctest.Receive(t, rejected, "the API server rejects the record")
	l.delete(l.Node("deleted"))
	close(deleted)
	l.AwaitEvent("deleted", recorder.ReasonWriteFailed)

	l.responds("deleted", on("volume", "10.42.0.1"))
	l.register("deleted", false)

	next := l.Node("deleted")

	ctest.Eventually(t, "the problem of the next Node is reported", func() bool {
		return slices.ContainsFunc(l.Events("deleted", recorder.ReasonWriteFailed), func(e corev1.Event) bool { return e.InvolvedObject.UID == next.UID })
	})
}

// forbidRecord returns once the API server rejects records of the Node, until allow is called.
func (l *leader) forbidRecord(name string) (allow func()) {
	l.Helper()

	object := metav1.ObjectMeta{Name: "no-record-of-" + name}
	client := l.Client.AdmissionregistrationV1()

	_, err := client.ValidatingAdmissionPolicies().Create(l.Context(), &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: object, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{
			ResourceNames: []string{name},
			RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Update},
				Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"nodes"}},
			},
		}}},
		Validations: []admissionv1.Validation{{Expression: "!('" + noderecord.LabelContext + "' in object.metadata.labels)", Message: "no records here"}},
	}}, metav1.CreateOptions{})
	require.NoError(l, err)

	_, err = client.ValidatingAdmissionPolicyBindings().Create(l.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: object, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: object.Name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}}, metav1.CreateOptions{})
	require.NoError(l, err)

	dryRun := func() error {
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:"x"}}}`, noderecord.LabelContext)
		_, err := l.Client.CoreV1().Nodes().Patch(l.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})

		return err
	}
	ctest.Eventually(l, "records are rejected", func() bool { return dryRun() != nil })

	return func() {
		require.NoError(l, client.ValidatingAdmissionPolicyBindings().Delete(l.Context(), object.Name, metav1.DeleteOptions{}))
		require.NoError(l, client.ValidatingAdmissionPolicies().Delete(l.Context(), object.Name, metav1.DeleteOptions{}))
		ctest.Eventually(l, "records are allowed", func() bool { return dryRun() == nil })
	}
}

// Containers have no EPHEMERAL volume. A record with only a node ID must not stay when the address becomes free.
func TestLeader_RecordsAddressWithoutVolumeOnceItIsFree(t *testing.T) {
	l := lead(t)
	first, second := on("", "10.40.0.1"), on("", "10.40.0.1")
	first.NodeID, second.NodeID = "first", "second"

	l.join("container-1", first)
	l.awaitRecord("container-1", of(first, ""))

	taken := of(second, "")
	taken.Address = netip.Addr{}

	l.join("container-2", second)
	l.awaitRecord("container-2", taken)

	l.Remove("container-1")
	ctest.Eventually(l, "the address is recorded", func() bool {
		l.touch("container-2")

		return noderecord.Of(l.Node("container-2")) == of(second, "")
	})
}

// Documents of machines differ for a while when they are edited one after the other.
func TestLeader_ReportsOtherConfiguration(t *testing.T) {
	l := lead(t)
	local, silent, worker := verified(on("local", "10.41.0.1")), verified(on("silent", "10.41.0.4")), on("worker", "10.41.0.3")
	local.ControlPlane.Local = true

	for name, m := range map[string]machine.Machine{
		"config-local": local, "config-same": verified(on("same", "10.41.0.2")), "config-other": verified(on("other", "10.41.0.5")),
		"config-silent": silent, "config-worker": worker, "config-none": verified(on("none", "10.41.0.6")),
	} {
		l.join(name, m)
		l.awaitRecord(name, of(m, ""))
	}

	state := func(name, config string) {
		node := l.Node(name)
		require.NoError(t, recorder.Write(t.Context(), l.Client, node, noderecord.Instance{Config: config, Version: "v1.0.0"}.Labels()))
	}

	for name, config := range map[string]string{
		"config-local": "stale", "config-same": "leader", "config-other": "other", "config-silent": "other", "config-worker": "other", "config-none": "",
	} {
		state(name, config)
	}

	l.instance.Inventory.MarkUnreachable("config-silent", "down")

	pass := func() {
		l.clock.SetTime(l.clock.Now().Add(5 * time.Minute))

		for _, name := range []string{"config-local", "config-same", "config-silent", "config-worker", "config-none", "config-other"} {
			l.touch(name)
		}
	}

	ctest.Eventually(l, "the configuration is reported", func() bool {
		pass()

		return len(l.Events("config-other", recorder.ReasonConfigDiffers)) == 1
	})

	message := l.Events("config-other", recorder.ReasonConfigDiffers)[0].Message
	assert.Contains(t, message, "(other)")
	assert.Contains(t, message, "(leader)")

	// The command in the message ends the problem.
	assert.Contains(t, message, "kubectl label node config-other "+noderecord.LabelConfig+"- "+noderecord.LabelVersion+"-")

	// So does the same document.
	l.config.set("other")

	ctest.Eventually(l, "the other machine is reported", func() bool {
		pass()

		return len(l.Events("config-same", recorder.ReasonConfigDiffers)) == 1
	})

	for _, name := range []string{"config-local", "config-silent", "config-worker", "config-none"} {
		assert.Empty(t, l.Events(name, recorder.ReasonConfigDiffers), name)
	}

	assert.EqualValues(t, 1, l.Events("config-other", recorder.ReasonConfigDiffers)[0].Count)
}
