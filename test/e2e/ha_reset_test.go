//go:build e2e && ha

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/api/machine"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/test/talos"
)

// resetting is the label with which a leader records that its own machine is being reset.
const resetting = "talos-ccm.node-restriction.kubernetes.io/resetting"

// TestHA_ResetOfLeader resets and reinstalls the leader's machine. The next leader deletes its Node after the grace period. The
// new Node gets a record and a certificate without an operator.
//
// Talos in a container ends all services at once if it is reset. So the test shuts the machine down, wipes its disk and removes
// the member of etcd, as Talos does, and sets the label that the leader sets before it releases the lease.
func TestHA_ResetOfLeader(t *testing.T) {
	s := begin(t)

	leader := s.leader()
	before := nodeOf(t, leader)
	member := etcdMember(t, leader)
	goals := []goal{isLedByOther(t, leader)}
	start := time.Now()

	s.auditor.expectDeletion(leader.Name())

	label := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, resetting, before.Status.NodeInfo.BootID)
	_, err := client.CoreV1().Nodes().Patch(t.Context(), leader.Name(), types.MergePatchType, label, metav1.PatchOptions{})
	require.NoError(t, err)

	require.NoError(t, leader.PowerOff(t.Context())) // the next leader must not see a shutdown
	require.NoError(t, leader.Wipe(t.Context()))
	shell(t, fmt.Sprintf("talosctl -e %[1]s -n %[1]s etcd remove-member %[2]x", others(leader)[0].Address(), member))

	added, remove := s.addWorker()
	s.measure("reset of leader "+leader.Name(), append(goals, added...)...)
	remove()
	s.measure("off", goal{"Node deleted", func(ctx context.Context) error {
		_, err := getNode(ctx, leader.Name())
		if apierrors.IsNotFound(err) {
			return nil
		}

		return errors.Join(err, errors.New("the Node exists"))
	}})
	assert.GreaterOrEqual(t, time.Since(start), config.DefaultGracePeriod, "the Node was deleted before the grace period ended")
	requireProof(t, leader.Name(), "announced that it is being reset")

	require.NoError(t, leader.PowerOn())
	awaitTalosAPI(t, leader)
	patchMachine(t, leader, "no-reboot", haDocument)
	s.auditor.add(t, leader)

	renewed, removeAddress := s.addWorkerAddress("203.0.113.90/32")
	s.measure("installation of "+leader.Name(),
		goal{"new Node", func(ctx context.Context) error { return checkInitialized(ctx, leader) }},
		goal{"its certificate", func(ctx context.Context) error { return checkKubelet(ctx, leader, leader.Address()) }},
		goal{"its record", func(ctx context.Context) error {
			node, err := getNode(ctx, leader.Name())
			if err != nil {
				return err
			}

			// The leader records the address only of a machine with the recorded volume, and a container has none.
			is, was := noderecord.Of(node), noderecord.Of(before)
			if is.Stated == "" || is.Stated == was.Stated || is.NodeID == was.NodeID {
				return fmt.Errorf("%s has the record %+v", node.Name, is)
			}

			return nil
		}},
		goal{"healthy", checkHealthy}, renewed)
	removeAddress()

	assert.NotEqual(t, before.UID, nodeOf(t, leader).UID, "UID of the Node")
	s.status()
	s.end()
}

// etcdMember returns the ID of m's member of etcd.
func etcdMember(t *testing.T, m *talos.Machine) uint64 {
	t.Helper()

	api, err := m.TalosClient(t.Context())
	require.NoError(t, err)
	defer api.Close() //nolint:errcheck // read only

	list, err := api.EtcdMemberList(t.Context(), &machine.EtcdMemberListRequest{QueryLocal: true})
	require.NoError(t, err)

	for _, member := range list.GetMessages()[0].GetMembers() {
		if member.GetHostname() == m.Name() {
			return member.GetId()
		}
	}

	t.Fatalf("etcd has no member %s", m.Name())

	return 0
}
