package ccm_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

const (
	originalUUID = "6a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b0a"
	otherUUID    = "6a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b0b"
)

// cloning is a cluster that was migrated from the upstream Talos CCM, with a bare-metal worker whose disk is cloned.
type cloning struct {
	fleet

	self            *talostest.Machine // on which talos-ccm runs
	original, clone *kubelet
	providerID      string // of the original
}

// newCloning returns a cluster without talos-ccm. The upstream has initialized the Node of the original, which has no record.
func newCloning(t *testing.T) *cloning {
	t.Helper()

	c := &cloning{fleet: fleet{suite: newSuite(t)}}
	c.self = c.add(c.controlPlaneSpec("cp"))
	c.label(c.self)

	c.original = c.boot(talostest.MachineSpec{Nodename: "original", Platform: runtime.PlatformMetadataSpec{Platform: "metal"}})
	require.NoError(t, c.original.machine.SetIdentity(t.Context(), "node-id", originalUUID))

	node := ctest.NodeOf(c.original.machine)
	c.providerID = "talos://metal/" + node.NodeIPs[0].String()
	node.ProviderID, node.WithoutCloudProvider = c.providerID, true
	c.Register(node)
	c.PatchNode(node.Name, "upstream", fmt.Sprintf(`{"metadata":{"labels":{%q:"metal"}}}`, nodespec.LabelPlatform))
	c.writeAddress(c.original)

	return c
}

// install starts talos-ccm while the original responds.
func (c *cloning) install() {
	c.Helper()
	c.start(c.options(c.self))
	c.awaitRecordAt(c.original)
}

// installWhileOff starts talos-ccm while the original is off.
func (c *cloning) installWhileOff() {
	c.Helper()
	require.NoError(c, c.original.machine.Stop(c.Context()))
	c.start(c.options(c.self))
	c.AwaitEvent(c.original.machine.Nodename(), nodecontroller.ReasonUnreachable)
}

// bootClone boots a machine with a copy of the disk.
func (c *cloning) bootClone(uuid string) {
	c.Helper()

	c.clone = c.boot(talostest.MachineSpec{Nodename: "clone", Platform: runtime.PlatformMetadataSpec{Platform: "metal"}})
	require.NoError(c, c.clone.machine.SetIdentity(c.Context(), "node-id", uuid))
	require.NoError(c, c.clone.machine.FormatVolume(c.Context(), constants.EphemeralPartitionLabel, "volume of "+c.original.machine.Nodename()))
}

// writeAddress writes a machine's address into the original's Node, as the kubelet of that machine does.
func (c *cloning) writeAddress(of *kubelet) {
	c.Helper()

	name, address := c.original.machine.Nodename(), of.machine.Address()
	c.PatchNode(name, "kubelet", fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr, address))
	c.PatchNode(name, "kubelet", fmt.Sprintf(`{"status":{"addresses":[{"type":"InternalIP","address":%q}]}}`, address), "status")
}

// awaitRecordAt waits until the record of the original's Node has the address of a machine.
func (c *cloning) awaitRecordAt(of *kubelet) {
	c.Helper()

	began, want := time.Now(), of.machine.Address()
	n := c.AwaitNode(c.original.machine.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal(want, noderecord.Of(n).Address) })
	assert.Equal(c, noderecord.ID([]byte("volume of "+n.Name)), noderecord.Of(n).Volume)
	assert.Equal(c, c.providerID, n.Spec.ProviderID)
	c.Logf("the record has the address of %s after %s", of.machine.Nodename(), time.Since(began).Round(time.Millisecond))
}

// requestAs creates a CSR of the original's kubelet for the addresses of a machine.
func (c *cloning) requestAs(of *kubelet) (name string) {
	c.Helper()

	as := *c.original
	as.addresses = of.addresses

	return as.requestServing(as.config)
}

// assertNotApproved waits until a CSR was reviewed, and fails if it was approved.
func (c *cloning) assertNotApproved(name string) {
	c.Helper()
	ctest.Eventually(c, "CSR is reviewed", func() bool {
		return len(c.Events(name, csrapproval.ReasonDeferred))+len(c.Events(name, csrapproval.ReasonDenied))+len(c.Events(name, csrapproval.ReasonApproved)) > 0
	})
	assert.Empty(c, c.Events(name, csrapproval.ReasonApproved))
	c.Log(ctest.Messages(append(c.Events(name, csrapproval.ReasonDeferred), c.Events(name, csrapproval.ReasonDenied)...)))
}

// eachClone calls run for a clone on the same hardware and on other hardware, and for an original that responds or is off when
// talos-ccm is installed.
func eachClone(t *testing.T, run func(c *cloning, uuid string)) {
	t.Helper()

	for hardware, uuid := range map[string]string{"same UUID": originalUUID, "other UUID": otherUUID} {
		for state, install := range map[string]func(*cloning){"original responds": (*cloning).install, "original is off": (*cloning).installWhileOff} {
			t.Run(hardware+", "+state, func(t *testing.T) {
				c := newCloning(t)
				install(c)
				c.bootClone(uuid)
				run(c, uuid)
			})
		}
	}
}

// A clone that has a hostname of its own is another Node. It takes nothing from the original, which may be off.
func TestClone_WithOtherNodenameIsAnotherNode(t *testing.T) {
	eachClone(t, func(c *cloning, uuid string) {
		before := noderecord.Of(c.Node(c.original.machine.Nodename()))
		c.register(c.clone.machine)

		began := time.Now()

		n := c.AwaitNode(c.clone.machine.Nodename(), ctest.Initialized)
		assert.Equal(c, "talos://metal/"+uuid, n.Spec.ProviderID)
		c.awaitApproved(c.clone.requestServing(c.clone.config))
		c.awaitRecord(c.clone)
		c.Logf("the clone was initialized and had a certificate after %s", time.Since(began).Round(time.Millisecond))

		pending := c.original.requestServing(c.original.config)

		if before == (noderecord.Record{}) { // it is off
			c.AwaitEvent(pending, csrapproval.ReasonDeferred, csrpolicy.CodeMachineUnknown)
			assert.Equal(c, before, noderecord.Of(c.Node(c.original.machine.Nodename())))
			c.original.machine.Start()
		}

		c.awaitRecordAt(c.original)
		c.awaitApproved(pending)
		c.awaitRecord(c.clone)
	})
}

// A clone that has the original's nodename also has its volume and client certificate, so that nothing distinguishes the two. The
// machine that was recorded first stays recorded while it responds, and the kubelet of the other one gets no certificate.
func TestClone_WithSameNodenameIsRecordedOnlyWhileOriginalIsOff(t *testing.T) {
	eachClone(t, func(c *cloning, _ string) {
		first, second := c.original, c.clone

		require.NoError(c, c.clone.machine.SetNodename(c.Context(), c.original.machine.Nodename()))

		if noderecord.Of(c.Node(c.original.machine.Nodename())) == (noderecord.Record{}) { // the original is off
			first, second = second, first
			c.writeAddress(first)
			c.awaitRecordAt(first)
			second.machine.Start()
		}

		c.awaitApproved(c.requestAs(first))
		c.writeAddress(second)
		c.assertNotApproved(c.requestAs(second))
		c.awaitRecordAt(first)

		if second == c.clone {
			assert.Empty(c, second.machine.Calls(), "the clone was dialed")
		}

		require.NoError(c, first.machine.Stop(c.Context()))
		c.writeAddress(second)
		c.awaitRecordAt(second)
		c.awaitApproved(c.requestAs(second))
	})
}
