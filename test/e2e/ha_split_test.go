//go:build e2e && ha

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/test/netns"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// TestHA_SplitEtcd separates the leader's machine and a worker from all others, so that the leader reaches no API server with
// a quorum of etcd. The others continue. The condition TalosReady of the worker stays, because the next leader has never reached
// its machine.
func TestHA_SplitEtcd(t *testing.T) {
	s := begin(t)

	leader := s.leader()
	goals := []goal{isLedByOther(t, leader), isReported(worker)}
	start := time.Now()

	require.NoError(t, bed.Split(t.Context(), leader, worker))

	added, remove := s.addWorker()
	s.measure(fmt.Sprintf("leader %s and %s cut off", leader.Name(), worker.Name()), append(goals, added...)...)

	report := s.status()
	assert.NotEqual(t, leader.Name(), report.Leader.Node)

	require.NoError(t, bed.Join(t.Context(), leader, worker))

	renewed, removeAddress := s.addWorkerAddress("203.0.113.80/32")
	s.measure("connected", goal{"healthy", checkHealthy}, renewed)
	removeAddress()
	remove()

	log, err := leader.Logs(t.Context(), service)
	require.NoError(t, err)
	assert.Contains(t, after(log, start), "leader election lost")
	t.Logf("log of %s since it was cut off:\n%s", leader.Name(), after(log, start))
	s.end()
}

// TestHA_SplitWorkers loses all packets between the leader's machine and the workers, which reach the other API servers. The
// leader stays, reports the workers, and changes nothing. The next leader reaches them.
func TestHA_SplitWorkers(t *testing.T) {
	s := begin(t)

	leader := s.leader()
	if s.hasEndpoint(leader) { // without discovery, a worker joins only at the cluster endpoint
		s.handOver("change of leader", leader)
		leader = s.leader()
	}

	added, err := bed.AddWorker(t.Context())
	require.NoError(t, err)

	for _, m := range []*talos.Machine{worker, added} {
		require.NoError(t, leader.Block(t.Context(), m))
	}

	s.measure("workers cut off from leader "+leader.Name(), isReachable(worker, absent), isReported(added))
	s.status()

	assert.True(t, isUninitialized(nodeOf(t, added)), "the new Node is initialized")
	require.Equal(t, leader, s.leader(), "the leader has changed")

	renewed, removeAddress := s.addWorkerAddress("203.0.113.81/32")
	s.handOver("change of leader", leader, append(joined(added), isReachable(worker, present), renewed)...)

	for _, m := range []*talos.Machine{worker, added} {
		require.NoError(t, leader.Unblock(t.Context(), m))
	}

	s.measure("connected", goal{"healthy", checkHealthy})
	removeAddress()
	s.remove(added)
	s.end()
}

// handOver stops talos-ccm on the leader's machine until all goals are reached, with another leader.
func (s *story) handOver(name string, leader *talos.Machine, goals ...goal) {
	s.Helper()

	goals = append(goals, isLedByOther(s.T, leader))

	controlService(s.T, leader, "stop")
	s.measure(name, goals...)
	controlService(s.T, leader, "start")
	eventually(s.T, checkHealthy)
}

// hasEndpoint reports whether a control-plane machine has the address of the cluster endpoint.
func (s *story) hasEndpoint(m *talos.Machine) bool {
	s.Helper()

	config, err := bed.RESTConfig()
	require.NoError(s, err)

	endpoint, err := netip.ParseAddrPort(strings.TrimPrefix(config.Host, "https://"))
	require.NoError(s, err)

	_, err = resource[*network.AddressStatus](s.Context(), m, netns.Link+"/"+endpoint.Addr().String()+"/32")
	if !state.IsNotFoundError(err) {
		require.NoError(s, err)
	}

	return err == nil
}

// isReported is the goal that talos-ccm status reports m as unreachable.
func isReported(m *talos.Machine) goal {
	return goal{"report of " + m.Name(), func(ctx context.Context) error { return checkReported(ctx, m, node.ReasonUnreachable, present) }}
}

// isReachable is the goal that the condition of m says that talos-ccm reaches it, or does not. The leader must have reached it.
func isReachable(m *talos.Machine, want presence) goal {
	return goal{fmt.Sprintf("%s reachable (%t)", m.Name(), want), func(ctx context.Context) error {
		n, err := getNode(ctx, m.Name())
		if err != nil {
			return err
		}

		ready := nodespec.Condition(n, node.ConditionTalosReady)
		if ready == nil {
			return errors.New("no condition " + string(node.ConditionTalosReady))
		}

		return want.check(ready.Status != corev1.ConditionUnknown, "%s: %v", m.Name(), ready)
	}}
}
