package ccm_test

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// slowPolling sets a polling interval of the standby that exceeds the timeout of the tests.
func slowPolling(options *ccm.Options) {
	election := &options.Framework.Generic.LeaderElection
	election.LeaseDuration.Duration, election.RenewDeadline.Duration, election.RetryPeriod.Duration = time.Hour, 50*time.Minute, 5*time.Minute
}

// awaitHolder waits until another instance than before holds the lease, and returns its identity.
func (s *suite) awaitHolder(before string) (holder string) {
	s.Helper()
	ctest.Eventually(s, "another instance holds the lease", func() bool {
		holder = s.holder()

		return holder != "" && holder != before
	})

	return holder
}

func TestLeaderElection_StandbyActsAtOnceWhenMachineGoesDown(t *testing.T) {
	s := newSuite(t)
	leader, standby, worker := s.controlPlane("cp-1"), s.controlPlane("cp-2"), s.worker("worker")
	s.register(leader, standby, worker)

	for _, m := range []*talostest.Machine{leader, standby} {
		options := s.options(m)
		slowPolling(options)
		s.start(options)
		s.awaitHolder("") // the first instance leads
	}

	s.awaitInitialized(leader, standby, worker)
	ctest.Eventually(s, "standby runs for leader election", func() bool { return candidacies(standby) > 0 })

	for _, stage := range []runtime.MachineStage{runtime.MachineStageRebooting, runtime.MachineStageUpgrading, runtime.MachineStageResetting} {
		before, began := s.holder(), time.Now()

		require.NoError(s, leader.SetStage(t.Context(), stage))
		s.awaitHolder(before)

		acquired := time.Since(began)

		s.move(worker, "by-the-other-"+stage.String())
		t.Logf("%s: lease acquired by the standby after %s, Node updated after %s", stage, acquired, time.Since(began))

		count := candidacies(leader)

		require.NoError(s, leader.SetStage(t.Context(), runtime.MachineStageRunning))
		ctest.Eventually(s, "former leader runs for leader election", func() bool { return candidacies(leader) > count })

		leader, standby = standby, leader
	}
}

// candidacies returns how often talos-ccm on the machine has started to run for leader election: each time it reads the
// identity of the machine.
func candidacies(m *talostest.Machine) int {
	return calls(m, "/cosi.resource.State/Get", cluster.IdentityType)
}

// A lease of an instance that was killed is acquired when it expires, not earlier.
func TestLeaderElection_StandbyActsWhenLeaseExpires(t *testing.T) {
	const duration = 6 * time.Second

	s := newSuite(t)
	self := s.controlPlane("cp")
	s.register(self)

	options := s.options(self)
	// Polling alone would take up to 11 s longer.
	election := &options.Framework.Generic.LeaderElection
	election.LeaseDuration.Duration, election.RenewDeadline.Duration, election.RetryPeriod.Duration = duration, duration-time.Millisecond, 4900*time.Millisecond

	s.leaseTo("killed", duration)
	s.start(options)

	// The holder renews the lease for the last time.
	ctest.Eventually(s, "standby runs for leader election", func() bool { return candidacies(self) > 0 })
	s.renewLease("killed")

	began := time.Now()

	s.awaitHolder("killed")

	took := time.Since(began)
	t.Logf("lease acquired %s after the last renewal", took)

	assert.GreaterOrEqual(t, took, duration)

	s.awaitInitialized(self)
}

// Permissions that were applied by hand may lack the watch.
func TestLeaderElection_PollsIfLeaseCannotBeWatched(t *testing.T) {
	s := newSuite(t)
	first, second := s.controlPlane("cp-1"), s.controlPlane("cp-2")
	s.register(first, second)

	config := s.Kube.Config()
	transport, err := rest.TransportFor(config)
	require.NoError(s, err)

	target, err := url.Parse(config.Host)
	require.NoError(s, err)

	var refused atomic.Int64

	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: transport, FlushInterval: -1}
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/leases") {
			refused.Add(1)
			http.Error(w, "leases may not be listed or watched", http.StatusForbidden)

			return
		}

		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(proxy.CloseClientConnections)

	leader := s.start(s.options(first))
	before := s.awaitHolder("")

	options := s.options(second)
	options.Framework.Generic.ClientConnection.Kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(s, os.WriteFile(options.Framework.Generic.ClientConnection.Kubeconfig, kube.Kubeconfig(&rest.Config{Host: proxy.URL}), 0o600))
	s.start(options)
	ctest.Eventually(s, "standby has tried to watch the lease", func() bool { return refused.Load() > 0 })

	leader.stop()

	began := time.Now()

	s.awaitHolder(before)
	t.Logf("lease acquired %s after it was released", time.Since(began))
	s.awaitInitialized(first, second)
}
