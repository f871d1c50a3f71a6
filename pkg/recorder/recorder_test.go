package recorder_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/pkg/version"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

var bed ctest.Bed

func TestMain(m *testing.M) { bed.Main(m, kube.Options{}, nil) }

const labeled = `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`

// suite is a control-plane machine with its Node, and a Recorder on it that waits for its first turn.
type suite struct {
	ctest.Suite

	machine *talostest.Machine
	clock   *clocktesting.FakeClock
	config  hash
	log     ktesting.Buffer
}

// hash is the hash of an instance's configuration.
type hash struct{ value atomic.Value }

func (h *hash) String() string { return fmt.Sprint(h.value.Load()) }

func (h *hash) set(value string) { h.value.Store(value) }

func start(t *testing.T, name string, changes ...func(*rest.Config)) *suite {
	t.Helper()
	t.Parallel()

	s := &suite{Suite: bed.NewSuite(t), clock: clocktesting.NewFakeClock(time.Now())}
	s.config.set("a")
	s.machine = s.Machine(talostest.MachineSpec{Nodename: name, Type: talosmachine.TypeControlPlane, ServeSocket: true})

	socket, err := talosapi.OpenSocket(s.machine.Socket())
	require.NoError(t, err)

	config := s.Kube.Config()
	for _, change := range changes {
		change(config)
	}

	instance, err := ctest.NewInstance(t.Context(), config, nil)
	require.NoError(t, err)

	logger := ktesting.NewLogger(ktesting.NopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
	sink, _ := logger.GetSink().(ktesting.Underlier)
	s.log = sink.GetBuffer()

	r := recorder.Recorder{Client: instance.Client, Socket: socket, Events: instance.Recorder, Clock: s.clock, Config: s.config.String}
	instance.Start(func(ctx context.Context) { r.Run(klog.NewContext(ctx, logger)) })
	t.Cleanup(func() {
		instance.Stop()
		socket.Close()
	})

	return s
}

// register registers the Node of the machine, with the label of the control plane.
func (s *suite) register() {
	s.Helper()
	s.Register(ctest.NodeOf(s.machine))
	s.PatchNode(s.machine.Nodename(), "", labeled)
}

// turn makes the Recorder try once.
func (s *suite) turn() {
	s.Helper()
	ctest.Eventually(s, "the recorder waits", s.clock.HasWaiters)
	s.clock.Step(2 * time.Minute)
	ctest.Eventually(s, "the recorder waits again", s.clock.HasWaiters)
}

// obtain replaces the kubelet's certificate by a new one for a user, and returns its ID.
func (s *suite) obtain(user, group string) string {
	s.Helper()

	config, err := s.Kube.UserConfig(user, group)
	require.NoError(s, err)

	return s.store(config)
}

func (s *suite) store(credential *rest.Config) string {
	s.Helper()
	s.machine.SetKubeletCertificate(slices.Concat(credential.CertData, credential.KeyData))

	return ctest.IDOf(credential)
}

func (s *suite) renew() string {
	s.Helper()

	return s.obtain("system:node:"+s.machine.Nodename(), "system:nodes")
}

func (s *suite) record() noderecord.Record {
	s.Helper()

	return noderecord.Of(s.Node(s.machine.Nodename()))
}

func TestRecorder_StatesCertificateInLabelsOfOwnNodeOnly(t *testing.T) {
	s := start(t, "states")
	s.register()

	other := s.Register(kube.NodeSpec{Name: "states-2"})
	before := s.PatchNode(other.Name, "", labeled)
	node := s.Node(s.machine.Nodename())

	require.NoError(t, s.machine.SetIdentity(t.Context(), "node-id", ""))
	require.NoError(t, s.machine.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, "volume"))

	id := s.renew()
	s.turn()

	record := s.record()
	assert.Equal(t, [...]string{id, id, "", noderecord.Fingerprint("node-id"), noderecord.ID([]byte("volume"))},
		[...]string{record.Credential, record.Stated, record.Previous, record.NodeID, record.Volume})
	assert.False(t, record.Expires.IsZero())

	after := s.Node(s.machine.Nodename())
	assert.Equal(t, noderecord.Instance{Config: "a", Version: version.Version()}, noderecord.InstanceOf(after))
	delete(after.Labels, noderecord.LabelConfig)
	delete(after.Labels, noderecord.LabelVersion)
	maps.DeleteFunc(after.Labels, func(key, _ string) bool { return strings.HasPrefix(key, noderecord.LabelCredential) })
	after.ResourceVersion, after.ManagedFields = node.ResourceVersion, node.ManagedFields
	assert.Equal(t, node, after)
	assert.Equal(t, before, s.Node(other.Name))
	assert.NotContains(t, s.Node(s.machine.Nodename()).Labels, noderecord.LabelAddress)

	// It writes only what differs, and restores it.
	stated := s.Node(s.machine.Nodename())
	s.turn()
	assert.Equal(t, stated, s.Node(s.machine.Nodename()))

	s.PatchNode(s.machine.Nodename(), "", fmt.Sprintf(`{"metadata":{"labels":{%q:"0","%s":null,%q:"worker"}}}`,
		noderecord.LabelCredential, noderecord.LabelStated, noderecord.LabelRole))
	s.turn()
	assert.Equal(t, record, s.record())
	assert.NotContains(t, s.Node(s.machine.Nodename()).Labels, noderecord.LabelRole)

	// The configuration changes.
	s.config.set("b")
	s.turn()
	assert.Equal(t, noderecord.Instance{Config: "b", Version: version.Version()}, noderecord.InstanceOf(s.Node(s.machine.Nodename())))
	assert.Equal(t, record, s.record())
}

func TestRecorder_StatesNothingWithoutOwnNodeAndCertificate(t *testing.T) {
	s := start(t, "nothing")
	name := s.machine.Nodename()

	steps := []struct {
		reason string
		set    func()
	}{
		{`no node "nothing" with the label of the control plane`, func() { s.renew() }},
		{`no node "nothing" with the label of the control plane`, func() { s.Register(ctest.NodeOf(s.machine)) }},
		{"no such file", func() {
			s.machine.SetKubeletCertificate(nil)
			s.PatchNode(name, "", labeled)
		}},
		{"no client certificate", func() { s.machine.SetKubeletCertificate(s.Kube.ClientCA()) }},
		{`has the subject "CN=system:node:other,O=system:nodes"`, func() { s.obtain("system:node:other", "system:nodes") }},
		{`has the subject "CN=system:node:nothing,O=system:masters"`, func() { s.obtain("system:node:nothing", "system:masters") }},
		{"expired at", func() {
			s.renew()
			s.clock.Step(365 * 24 * time.Hour)
		}},
	}

	var want []string

	for i, step := range steps {
		step.set()

		for range 3 {
			s.turn()
		}

		if i == 0 || step.reason != steps[i-1].reason {
			want = append(want, step.reason)
		}

		logged := s.log.Data()
		require.Len(t, logged, len(want), step.reason)
		assert.Contains(t, fmt.Sprint(logged[len(logged)-1].WithKVList, logged[len(logged)-1].ParameterKVList), step.reason)
	}

	assert.Equal(t, noderecord.Record{}, s.record())

	require.NoError(t, s.machine.SetNodename(t.Context(), ""))
	s.turn()
	assert.Equal(t, noderecord.Record{}, s.record())
}

// During a rotation, the leader and the machine write different certificates at different times.
func TestRecorder_FollowsRotationWithLeader(t *testing.T) {
	s := start(t, "rotation")
	s.register()

	first := s.renew()
	s.turn()

	// The leader is first.
	second, err := s.Kube.UserConfig("system:node:"+s.machine.Nodename(), "system:nodes")
	require.NoError(t, err)

	followed := s.record()
	followed.Credential, followed.Previous = ctest.IDOf(second), first
	s.lead(followed)

	before := s.Node(s.machine.Nodename())
	s.turn()
	assert.Equal(t, before, s.Node(s.machine.Nodename()), "the kubelet has not stored the certificate")

	s.store(second)
	s.turn()
	assert.Equal(t, [...]string{followed.Credential, first, followed.Credential}, [...]string{s.record().Credential, s.record().Previous, s.record().Stated})

	// The machine is first.
	third := s.renew()
	s.turn()
	assert.Equal(t, [...]string{third, followed.Credential, third}, [...]string{s.record().Credential, s.record().Previous, s.record().Stated})

	// An attacker's certificate is not the previous one.
	s.lead(noderecord.Record{Credential: strings.Repeat("e", noderecord.IDLength)})
	s.turn()
	assert.Equal(t, [...]string{third, "", third}, [...]string{s.record().Credential, s.record().Previous, s.record().Stated})
	assert.Empty(t, s.Events(s.machine.Nodename(), recorder.ReasonCertificateReplaced))
}

// lead writes a record as a leader does.
func (s *suite) lead(record noderecord.Record) {
	s.Helper()

	patch, err := record.ByLeader().PatchOf(&corev1.Node{})
	require.NoError(s, err)
	s.PatchNode(s.machine.Nodename(), "", strings.NewReplacer(`"resourceVersion":"",`, "", `,"resourceVersion":""`, "", `,"uid":""`, "", `"uid":"",`, "").Replace(string(patch)))
}

func TestRecorder_ReportsCertificateOfAnotherVolume(t *testing.T) {
	s := start(t, "reinstalled")
	s.register()
	require.NoError(t, s.machine.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, "volume"))

	first := s.renew()
	s.turn()
	require.NoError(t, s.machine.FormatVolume(t.Context(), constants.EphemeralPartitionLabel, "other"))

	second := s.renew()
	s.turn()
	s.AwaitEvent(s.machine.Nodename(), recorder.ReasonCertificateReplaced, first, second)
	assert.Equal(t, [...]string{second, second, noderecord.ID([]byte("other"))}, [...]string{s.record().Credential, s.record().Stated, s.record().Volume})
}

// contender changes the Node before the first patch of it.
type contender struct {
	http.RoundTripper

	change func()
	codes  []int
}

func (c *contender) RoundTrip(request *http.Request) (*http.Response, error) {
	isPatch := request.Method == http.MethodPatch && strings.HasPrefix(request.URL.Path, "/api/v1/nodes/")
	if isPatch {
		c.change()
	}

	response, err := c.RoundTripper.RoundTrip(request)
	if isPatch && err == nil {
		c.codes = append(c.codes, response.StatusCode)
	}

	return response, err
}

func TestRecorder_WritesNothingToNewerVersion(t *testing.T) {
	var (
		s *suite
		c contender
	)

	c.change = sync.OnceFunc(func() { s.PatchNode(s.machine.Nodename(), "", `{"metadata":{"labels":{"example.org/a":"b"}}}`) })
	s = start(t, "conflict", func(config *rest.Config) {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			c.RoundTripper = next

			return &c
		})
	})
	s.register()

	id := s.renew()
	s.turn()
	assert.Equal(t, noderecord.Record{}, s.record())
	s.turn()
	assert.Equal(t, id, s.record().Stated)
	assert.Equal(t, []int{http.StatusConflict, http.StatusOK}, c.codes)
}
