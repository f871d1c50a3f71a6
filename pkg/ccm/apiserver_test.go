package ccm_test

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// outages are outages of the API server of one control-plane machine.
var outages = []struct {
	name     string
	grace    time.Duration // between SIGTERM and SIGKILL, at most five seconds
	duration time.Duration
}{
	{"down", 0, time.Minute},
	{"upgraded", 5 * time.Second, 0},
	{"replaced", 0, 0}, // another process serves at the address
}

// Each of two control-plane machines has an API server. KubePrism of the machine self uses the other machine's. KubePrism works
// from the first outage on, so until then, talos-ccm uses the local one.
func TestLeaderElection_SurvivesOutagesOfLocalAPIServer(t *testing.T) {
	t.Run("of the leader", func(t *testing.T) {
		s, self, other, local := newTwoAPIServers(t)
		s.spawn(self)
		leader := s.awaitHolder("")
		awaitCandidacy(s.spawn(other), 1)

		for _, outage := range outages {
			local.stop(s, outage.grace)
			s.workFor(outage.duration, outage.name)
			require.NoError(s, local.Start(s.Context()))
			s.workFor(0, outage.name+"-after")
			assert.Equal(s, leader, s.holder(), outage.name)
		}
	})

	t.Run("of the standby", func(t *testing.T) {
		s, self, other, local := newTwoAPIServers(t)
		first := s.spawn(other)
		leader := s.awaitHolder("")
		second := s.spawn(self)
		awaitCandidacy(second, 1)

		for i, outage := range outages {
			local.stop(s, outage.grace)
			s.workFor(outage.duration, outage.name)

			standby := s.handOver(other, leader)
			awaitCandidacy(first, i+2)
			s.workFor(0, outage.name+"-standby")
			require.NoError(s, local.Start(s.Context()))
			s.workFor(0, outage.name+"-after")
			assert.Equal(s, standby, s.holder(), outage.name)
			assert.Equal(s, leader, s.handOver(self, standby))
			awaitCandidacy(second, i+2)
		}
	})
}

// localAPIServer is the API server of a machine whose kubeconfig names kubePrism.
type localAPIServer struct {
	*kube.APIServer

	kubePrism *ctest.Proxy
}

// newTwoAPIServers returns two control-plane machines, and the API server of the first one.
func newTwoAPIServers(t *testing.T) (s *suite, self, other *talostest.Machine, local localAPIServer) {
	t.Helper()

	s = newSuite(t)
	server, err := s.Kube.AddAPIServer()
	require.NoError(s, err)
	s.Cleanup(func() {
		server.Stop(s.Context())
		server.Port().Release()
	})
	require.NoError(s, server.Start(s.Context()))

	config := s.Kube.Config()
	local = localAPIServer{server, ctest.NewProxy(s, config)}
	local.kubePrism.Hangs.Store(true)

	self = s.controlPlane("self", func(spec *talostest.MachineSpec) { spec.LocalhostAdminKubeconfig = string(kube.Kubeconfig(config)) })
	other = s.controlPlane("other")
	s.register(self, other)

	resource := k8s.NewKubePrismConfig(k8s.NamespaceName, k8s.KubePrismConfigID)
	resource.TypedSpec().Host = "127.0.0.1"
	resource.TypedSpec().Endpoints = []k8s.KubePrismEndpoint{{Host: "localhost", Port: uint32(server.Port().Number())}} //nolint:gosec // a port
	require.NoError(s, self.State().Create(s.Context(), resource))

	return s, self, other, local
}

// stop stops the API server. KubePrism works from now on.
func (l localAPIServer) stop(s *suite, grace time.Duration) {
	s.Helper()

	ctx, cancel := context.WithTimeout(s.Context(), grace)
	defer cancel()

	l.kubePrism.Hangs.Store(false)
	l.Stop(ctx)
}

// awaitCandidacy waits until the process has run for leader election n times.
func awaitCandidacy(p *process, n int) {
	p.suite.Helper()
	ctest.Eventually(p.suite, "the process runs for leader election", func() bool {
		return strings.Count(p.output.String(), "Attempting to acquire leader lease") >= n
	})
}

// handOver has the leader release the lease, and returns the next holder.
func (s *suite) handOver(leader *talostest.Machine, holder string) (next string) {
	s.Helper()
	require.NoError(s, leader.SetStage(s.Context(), runtime.MachineStageRebooting))
	next = s.awaitHolder(holder)
	require.NoError(s, leader.SetStage(s.Context(), runtime.MachineStageRunning))

	return next
}

// workFor registers the Node of a new machine and waits until it is initialized. For the duration, it then changes the
// machine every five seconds and waits until the Node is updated.
func (s *suite) workFor(duration time.Duration, name string) {
	s.Helper()

	began, slowest := time.Now(), time.Duration(0)
	worker := s.worker(name)
	s.register(worker)
	s.awaitInitialized(worker)

	initialized := time.Since(began)

	ticker := time.NewTicker(5 * time.Second)
	defer ticker.Stop()

	for i := 0; time.Since(began) < duration; i++ {
		changed := <-ticker.C
		s.move(worker, strconv.Itoa(i))

		slowest = max(slowest, time.Since(changed))
	}

	s.Logf("%s: Node initialized after %s, and updated within %s", name, initialized, slowest)
}
