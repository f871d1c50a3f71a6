package ccm_test

import (
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// awaitHolder waits until another instance than before holds the lease, and returns its identity.
func (s *suite) awaitHolder(before string) (holder string) {
	s.Helper()
	ctest.Eventually(s, "another instance holds the lease", func() bool {
		holder = s.holder()

		return holder != "" && holder != before
	})

	return holder
}

func TestLeaderElection_StandbyActsWhenMachineGoesDown(t *testing.T) {
	s := newSuite(t)
	leader, standby, worker := s.controlPlane("cp-1"), s.controlPlane("cp-2"), s.worker("worker")
	s.register(leader, standby, worker)

	for _, m := range []*talostest.Machine{leader, standby} {
		options := s.options(m)
		longLease(options) // so the standby acquires the lease because it was released
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

		_, recorded := s.Node(leader.Nodename()).Labels["talos-ccm.node-restriction.kubernetes.io/resetting"]
		assert.Equal(t, stage == runtime.MachineStageResetting, recorded, stage)

		count := candidacies(leader)

		require.NoError(s, leader.SetStage(t.Context(), runtime.MachineStageRunning))
		ctest.Eventually(s, "the instance runs for leader election again", func() bool { return candidacies(leader) > count })

		leader, standby = standby, leader
	}
}

// candidacies returns how often talos-ccm on the machine has started to run for leader election: each time it reads the
// identity of the machine.
func candidacies(m *talostest.Machine) int {
	return calls(m, "/cosi.resource.State/Get", cluster.IdentityType)
}

// The lifecycle controller stops when it knows whether the local machine is being reset.
func TestLeaderElection_ReleasesLeaseWhenControllersHaveStopped(t *testing.T) {
	s, self, worker := newCluster(t)
	r := s.start(s.options(self))
	s.awaitInitialized(self, worker)
	self.Freeze()

	began := time.Now()

	r.cancel()
	ctest.Eventually(s, "lease is released", func() bool { return s.holder() == "" })
	assert.GreaterOrEqual(t, time.Since(began), 2*time.Second, "the local machine does not respond")
}

// A lease of an instance that was killed is acquired when it expires, not earlier.
func TestLeaderElection_StandbyActsWhenLeaseExpires(t *testing.T) {
	const duration = 6 * time.Second

	s := newSuite(t)
	self := s.controlPlane("cp")
	s.register(self)

	options := s.options(self)
	election := &options.Framework.Generic.LeaderElection
	election.LeaseDuration.Duration, election.RenewDeadline.Duration, election.RetryPeriod.Duration = duration, duration-time.Second, time.Second

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
