package controlplane_test

import (
	"net/netip"
	"testing"

	"github.com/cosi-project/runtime/api/v1alpha1"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	clusterres "github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func TestMembers_Absent(t *testing.T) {
	type list = controlplane.MemberList

	all := list{"cp-1": {NodeID: "1"}, "cp-2": {NodeID: "2"}, "cp-3": {NodeID: "3"}, "w-1": {NodeID: "4"}}

	for _, test := range []struct {
		name     string
		members  *controlplane.Members
		nodename string
		nodeID   string
		want     bool
	}{
		{"absent", &controlplane.Members{ControlPlane: 3, SeenBy: map[string]list{"cp-1": all, "cp-2": all, "cp-3": all}}, "w-2", "5", true},
		{"absent, node ID unknown", &controlplane.Members{ControlPlane: 1, SeenBy: map[string]list{"cp-1": all}}, "w-2", "", true},
		{"member", &controlplane.Members{ControlPlane: 3, SeenBy: map[string]list{"cp-1": all, "cp-2": all, "cp-3": all}}, "w-1", "4", false},
		{"member under another name", &controlplane.Members{ControlPlane: 1, SeenBy: map[string]list{"cp-1": all}}, "w-2", "4", false},
		{"majority", &controlplane.Members{ControlPlane: 3, SeenBy: map[string]list{"cp-1": all, "cp-2": all}}, "w-2", "5", true},
		{"no majority", &controlplane.Members{ControlPlane: 4, SeenBy: map[string]list{"cp-1": all, "cp-2": all}}, "w-2", "5", false},
		{"no machine", &controlplane.Members{}, "w-2", "5", false},
		{"discovery is disabled", &controlplane.Members{ControlPlane: 1, SeenBy: map[string]list{"cp-1": {}}}, "w-2", "5", false},
		{
			"one machine sees only itself",
			&controlplane.Members{ControlPlane: 2, SeenBy: map[string]list{"cp-1": all, "cp-2": {"cp-2": {NodeID: "2"}}}}, "w-2", "5", false,
		},
		{
			"seen by one",
			&controlplane.Members{ControlPlane: 2, SeenBy: map[string]list{"cp-1": {"cp-1": {NodeID: "1"}, "cp-2": {NodeID: "2"}}, "cp-2": all}}, "w-1", "4", false,
		},
	} {
		assert.Equal(t, test.want, test.members.Absent(test.nodename, test.nodeID) != "", test.name)
	}
}

// The list of a machine that is cut off from the discovery service is outdated.
func TestMembers_AddressesOfThoseThatMostMachinesSee(t *testing.T) {
	type list = controlplane.MemberList

	present, outdated := list{"w-1": {Address: memberAddress}}, list{"w-1": {Address: memberAddress}, "w-2": {Address: memberAddress}}
	members := controlplane.Members{ControlPlane: 3, SeenBy: map[string]list{"cp-1": present, "cp-2": outdated}}

	assert.Equal(t, map[string]netip.Addr{"w-1": memberAddress}, members.Addresses())
}

func TestReader_ReadsTheMembers(t *testing.T) {
	s := newSuite(t, bed.Kube.Config(), func(s *suite, _ *controlplane.Config) { s.readsMembers = true })
	m := s.addControlPlane("members-cp")
	s.discover(m, "members-cp", "1")
	s.discover(m, "w-1", "2")

	s.await("the members are read", func(csrpolicy.ClusterIdentity) bool { return len(s.members().SeenBy["members-cp"]) == 2 })

	assert.Empty(t, s.members().Absent("w-1", "2"))
	assert.NotEmpty(t, s.members().Absent("w-2", "3"))
	assert.Equal(t, map[string]netip.Addr{"members-cp": memberAddress, "w-1": memberAddress}, s.members().Addresses())

	// A machine that does not respond proves nothing.
	require.NoError(s, m.Stop(t.Context()))
	s.await("the machine does not respond", func(csrpolicy.ClusterIdentity) bool { return len(s.members().SeenBy) == 0 })

	assert.Empty(t, s.members().Absent("w-2", "3"))
	assert.Empty(t, s.members().Addresses())
}

// Only the members are unknown then.
func TestReader_ReadsTheRestOfMachineWithTooManyMembers(t *testing.T) {
	s := newSuite(t, bed.Kube.Config(), func(s *suite, _ *controlplane.Config) { s.readsMembers = true })
	m := s.add("crowded-cp", talosmachine.TypeControlPlane)

	member := &v1alpha1.Resource{
		Metadata: &v1alpha1.Metadata{Namespace: clusterres.NamespaceName, Type: clusterres.MemberType, Version: "1", Phase: "running"},
		Spec:     &v1alpha1.Spec{},
	}
	m.Lie(func(request proto.Message, stream grpc.ServerStream, honest func() error) error {
		if list, ok := request.(*v1alpha1.ListRequest); !ok || list.GetType() != clusterres.MemberType {
			return honest()
		}

		for range 17_000 {
			if err := stream.SendMsg(&v1alpha1.ListResponse{Resource: member}); err != nil {
				return err
			}
		}

		return nil
	})

	label(s.Suite, m.Nodename()) // members are read from now on

	// Steps of the clock would end a session that has not listed so many members yet.
	ctest.Eventually(s, "the machine was read", func() bool { return s.inventory.Get(m.Nodename()).Condition == inventory.Current })
	s.await("the identity is known", known)
	assert.Empty(t, s.members().SeenBy)
	assert.Equal(t, 1, s.members().ControlPlane)
}

var memberAddress = netip.MustParseAddr("192.0.2.1")

// discover adds a member to those that the machine reports.
func (s *suite) discover(m *talostest.Machine, nodename, nodeID string) {
	s.Helper()

	member := clusterres.NewMember(clusterres.NamespaceName, nodename)
	member.TypedSpec().NodeID, member.TypedSpec().Addresses = nodeID, []netip.Addr{memberAddress, netip.MustParseAddr("192.0.2.2")}
	require.NoError(s, m.State().Create(s.Context(), member))
}

func (s *suite) members() *controlplane.Members { return s.reader.Members().Current() }
