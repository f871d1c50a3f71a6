package controlplane

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// having returns a control-plane machine that has reported facts.
func having(nodename string, facts machine.ControlPlane) source {
	return source{nodename, inventory.Entry{Condition: inventory.Current, Last: machine.Machine{Nodename: nodename, ControlPlane: &facts}}}
}

func TestFacts_IdentityIsKnownOnlyWithAllSources(t *testing.T) {
	t.Parallel()

	services := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}
	local := having("cp-1", machine.ControlPlane{Local: true, Subjects: &machine.ClusterSubjects{}})
	read, unread := having("cp-2", machine.ControlPlane{Subjects: &machine.ClusterSubjects{}}), having("cp-3", machine.ControlPlane{})

	for name, test := range map[string]struct {
		change func(*facts)
		want   bool
	}{
		"all sources, and the local machine":     {func(*facts) {}, true},
		"no certificate":                         {func(f *facts) { f.apiServer.certificate = nil }, false},
		"no Service":                             {func(f *facts) { f.apiServer.service = nil }, false},
		"no answer about ServiceCIDRs":           {func(f *facts) { f.apiServer.serviceCIDRs = nil }, false},
		"two of three machines, neither local":   {func(f *facts) { f.machines = []source{read, read, unread} }, true},
		"one of two machines, not the local one": {func(f *facts) { f.machines = []source{read, unread} }, false},
		"no ServiceCIDR":                         {func(f *facts) { f.apiServer.serviceCIDRs.ServiceCIDRs = nil }, false},
		"a ServiceCIDR of a machine, as before Kubernetes 1.33": {func(f *facts) {
			f.machines[0] = having("cp-1", machine.ControlPlane{Local: true, Subjects: &machine.ClusterSubjects{ServiceCIDRs: services}})
			f.apiServer.serviceCIDRs.ServiceCIDRs = nil
		}, true},
		"the local machine without a labeled Node": {func(f *facts) {
			f.machines = []source{{localMachine, local.entry}}
		}, false},
	} {
		f := &facts{
			apiServer: apiServer{
				certificate:  &csrpolicy.ClusterSubjects{APIServerNames: []string{"kubernetes.default.svc.cluster.local"}},
				service:      &csrpolicy.ClusterSubjects{},
				serviceCIDRs: &csrpolicy.ClusterSubjects{ServiceCIDRs: services},
			},
			machines: []source{local, unread},
		}
		test.change(f)

		if id := f.identity(); id.Known != test.want {
			t.Errorf("%s: Known is %t; identity is %+v", name, id.Known, id)
		}
	}
}

// The facts of a machine that does not respond stay, except its members.
func TestFacts_OnlyMembersNeedCurrentMachine(t *testing.T) {
	t.Parallel()

	read := machine.ControlPlane{
		Subjects: &machine.ClusterSubjects{}, KCM: &machine.KCMConfig{AllocatesNodeCIDRs: true}, Members: MemberList{"w-1": {NodeID: "1"}},
	}

	for condition, want := range map[inventory.Condition]int{inventory.Current: 1, inventory.Unreachable: 0, inventory.Mismatch: 0} {
		s := having("cp-1", read)
		s.entry.Condition = condition
		f := &facts{machines: []source{s}, isLabeled: true, nodes: []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "cp-1"}}}}

		if got := f.members(); len(got.SeenBy) != want || got.ControlPlane != 1 {
			t.Errorf("%s: members are %+v", condition, got)
		}

		if network := f.network(); len(network.Allocators()) != 1 || len(f.identity().Reported) != 1 {
			t.Errorf("%s: network is %+v", condition, network)
		}
	}
}
