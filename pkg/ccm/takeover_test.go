//go:build e2e

package ccm_test

import (
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/netns"
)

// lan is a cluster whose machines each have a network namespace. A bridge connects them.
type lan struct {
	*suite

	bridge *netns.Namespace
}

// host is a network namespace on the bridge.
type host struct {
	*netns.Namespace

	address netip.Addr
}

func newLAN(t *testing.T) *lan {
	t.Helper()

	bridge, err := netns.New(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = bridge.Close() })
	require.NoError(t, bridge.IP(t.Context(), "link add br0 type bridge", "link set br0 up"))

	return &lan{newSuite(t), bridge}
}

// plug adds a host, from which the API server can be reached.
func (l *lan) plug(link, address string) host {
	l.Helper()

	h := host{address: netip.MustParseAddr(address)}

	var err error

	h.Namespace, err = l.bridge.Connect(l.Context(), link, netip.PrefixFrom(h.address, 24))
	require.NoError(l, err)
	l.Cleanup(func() { _ = h.Close() })
	require.NoError(l, l.bridge.IP(l.Context(), "link set "+link+" master br0"))

	api, err := h.Forward(l.Context(), strings.TrimPrefix(l.Kube.Endpoint(), "https://"))
	require.NoError(l, err)
	l.Cleanup(func() { _ = api.Close() })

	return h
}

// boot starts a control-plane machine with an address on a host, and formats its volume.
func (l *lan) boot(on host, name string, address netip.Addr) *talostest.Machine {
	l.Helper()

	m := l.controlPlane(name, func(spec *talostest.MachineSpec) {
		spec.Address, spec.Listen = address, on.Listen
		spec.Addresses = []talostest.Address{{Link: netns.Link, Prefix: netip.PrefixFrom(address, 24)}}
	})
	require.NoError(l, m.FormatVolume(l.Context(), constants.EphemeralPartitionLabel, "volume of "+name))

	return m
}

// install starts the extension on a machine.
func (l *lan) install(on host, m *talostest.Machine) {
	l.Helper()

	p := l.newProcess()
	p.enter = on.Enter

	path, err := binary()
	require.NoError(l, err)

	flags := p.argv("--machine-socket="+m.Socket(), "--run-dir="+filepath.Join(p.root, "run"), "--leader-elect-retry-period=1s")
	p.start(m.Nodename(), exec.Command(path, flags[1:]...))
}

// takeOver makes packets from one host to an address of another one reach the attacker's host, as ARP spoofing does.
func (l *lan) takeOver(attacker, from host, victim netip.Addr) {
	l.Helper()

	const hardwareAddress = "02:00:00:00:00:66"

	require.NoError(l, attacker.IP(l.Context(), "link set "+netns.Link+" address "+hardwareAddress, "address add "+victim.String()+"/24 dev "+netns.Link))
	require.NoError(l, from.IP(l.Context(), "neighbor replace "+victim.String()+" lladdr "+hardwareAddress+" dev "+netns.Link+" nud permanent"))
}

// giveBack ends takeOver.
func (l *lan) giveBack(attacker, from host, victim netip.Addr) {
	l.Helper()
	require.NoError(l, attacker.IP(l.Context(), "link set "+netns.Link+" down"))
	require.NoError(l, from.IP(l.Context(), "neighbor del "+victim.String()+" dev "+netns.Link))
}

// awaitRead waits until the leader has read the machine that responds for the Node and has an instance type.
func (l *lan) awaitRead(of *talostest.Machine, instanceType string) {
	l.Helper()

	began := time.Now()

	l.AwaitNode(of.Nodename(), ctest.Labeled(corev1.LabelInstanceTypeStable, instanceType))
	l.Logf("instance type %q read after %s", instanceType, time.Since(began).Round(time.Millisecond))
}

// Root on a worker takes over the address of a control-plane machine, and has the keys with which trustd signs a certificate of
// apid for any address, and the bootstrap token, which obtains a client certificate for any Node. The leader is on another
// machine.
func TestTakeover_OfControlPlaneAddressGainsNoCertificate(t *testing.T) {
	l := newLAN(t)
	leading, taken, attacker := l.plug("cp-1", "192.0.2.11"), l.plug("cp-2", "192.0.2.12"), l.plug("worker", "192.0.2.21")
	first, second := l.boot(leading, "cp-1", leading.address), l.boot(taken, "cp-2", taken.address)

	for _, m := range []*talostest.Machine{first, second} {
		l.configure(m, "csrApproval: {credentialPinning: enforce}")
	}

	l.register(first, second)
	l.label(first, second)

	k := &kubelet{suite: l.suite, machine: second, addresses: []net.IP{taken.address.AsSlice()}}
	k.use(k.otherCertificate())
	l.install(leading, first)
	ctest.Eventually(l, "an instance leads", func() bool { return l.holder() != "" })
	l.install(taken, second)
	l.awaitApproved(k.requestServing(k.config))

	before := noderecord.Of(l.AwaitNode(second.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) {
		r := noderecord.Of(n)
		asrt.Equal(ctest.IDOf(k.config), r.Stated)
		asrt.Equal(taken.address, r.Address)
		asrt.Len(r.Volume, noderecord.IDLength)
	}))

	token, err := l.Kube.BootstrapToken(t.Context())
	require.NoError(t, err)

	l.takeOver(attacker, leading, taken.address)

	impostor := l.boot(attacker, "worker", taken.address)
	require.NoError(t, impostor.SetNodename(t.Context(), second.Nodename()))
	require.NoError(t, impostor.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) {
		*spec = identified(second.Nodename())
		spec.InstanceType = "attackers"
	}))
	l.awaitRead(second, "attackers")

	stolen := k.requestServing(k.obtain(l.Kube.TokenConfig(token)))
	event := l.AwaitEvent(stolen, csrapproval.ReasonUnexpectedCredential, before.Stated+", which the machine itself stated")
	t.Log(event.Message)

	assert.Equal(t, before, noderecord.Of(l.Node(second.Nodename())))

	// The machine has its address again. Its kubelet needs no operator.
	l.giveBack(attacker, leading, taken.address)
	l.awaitRead(second, "type")
	l.awaitApproved(k.requestServing(k.config))
	assert.Empty(t, l.csr(stolen).Status.Conditions)
	assert.Equal(t, before, noderecord.Of(l.Node(second.Nodename())))
}
