package ccm_test

import (
	"net"
	"net/netip"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// fleet is a cluster whose machines get talos-ccm, or another version of it, one after the other.
type fleet struct {
	*suite

	kubelets []*kubelet
	stolen   []string // CSRs of attackers
}

// add adds a machine with its kubelet and a Node.
func (f *fleet) add(spec talostest.MachineSpec) *talostest.Machine {
	f.Helper()

	k := f.boot(spec)
	f.register(k.machine)

	return k.machine
}

// controlPlaneSpec returns the spec of a control-plane machine on which talos-ccm can run.
func (f *fleet) controlPlaneSpec(nodename string) talostest.MachineSpec {
	return talostest.MachineSpec{
		Nodename: nodename, Type: talosmachine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(f.Kube.Kubeconfig()),
	}
}

// boot adds a machine with its kubelet. Its second address is one for which a kubelet may get a certificate: loopback
// addresses are never approved.
func (f *fleet) boot(spec talostest.MachineSpec) *kubelet {
	f.Helper()

	address := netip.AddrFrom4([4]byte{10, 250, 0, byte(len(f.kubelets) + 1)})
	spec.Addresses = []talostest.Address{{Link: "eth1", Prefix: netip.PrefixFrom(address, 24)}}

	m := f.machine(spec)
	require.NoError(f, m.FormatVolume(f.Context(), constants.EphemeralPartitionLabel, "volume of "+m.Nodename()))

	k := &kubelet{suite: f.suite, machine: m, addresses: []net.IP{address.AsSlice()}}
	k.use(k.otherCertificate())
	f.kubelets = append(f.kubelets, k)

	return k
}

// awaitRecord waits for a record of the kubelet's certificate, its machine and its address.
func (f *fleet) awaitRecord(k *kubelet) {
	f.Helper()
	f.AwaitNode(k.machine.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) {
		r := noderecord.Of(n)
		asrt.Equal(ctest.IDOf(k.config), r.Credential)
		asrt.Equal(k.machine.Address(), r.Address)
		asrt.NotEmpty(r.NodeID)
		asrt.NotEmpty(r.Volume)
	})
}

// awaitStated waits until the present certificates of the machines' kubelets are in statements of the machines.
func (f *fleet) awaitStated(machines ...*talostest.Machine) {
	f.Helper()

	for _, m := range machines {
		f.AwaitNode(m.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.NotEmpty(noderecord.Of(n).Stated) })
	}
}
