package node_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// silent returns the address of a machine that has stopped.
func (s suite) silent(nodename string) netip.Addr {
	s.Helper()

	m := s.Machine(talostest.MachineSpec{Nodename: nodename})
	require.NoError(s, m.Stop(s.Context()))

	return m.Address()
}

// A kubelet with the bootstrap token registers a Node with the providerID that another machine will get.
func TestController_IgnoresProviderIDThatKubeletRegistered(t *testing.T) {
	for name, register := range map[string]func(s suite, spec kube.NodeSpec, victim *talostest.Machine){
		"silent": func(s suite, spec kube.NodeSpec, _ *talostest.Machine) {
			spec.NodeIPs = []netip.Addr{s.silent(spec.Name)}
			s.Register(spec)
		},
		"without-address": func(s suite, spec kube.NodeSpec, _ *talostest.Machine) { s.Register(spec) },
		"at-its-address": func(s suite, spec kube.NodeSpec, victim *talostest.Machine) {
			spec.NodeIPs = []netip.Addr{victim.Address()}
			s.Register(spec)
		},
		"initialized": func(s suite, spec kube.NodeSpec, _ *talostest.Machine) {
			spec.NodeIPs, spec.WithoutCloudProvider = []netip.Addr{s.silent(spec.Name)}, true
			s.Register(spec)
		},
		"other-system": func(s suite, spec kube.NodeSpec, _ *talostest.Machine) {
			spec.OSImage = "Ubuntu 24.04.1 LTS"
			s.Register(spec)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)
			fake, providerID := "fake-"+name, "hcloud://victim-"+name

			victim := s.Machine(talostest.MachineSpec{Nodename: "victim-" + name, Platform: identified("hcloud", providerID)})
			register(s, kube.NodeSpec{Name: fake, ProviderID: providerID}, victim)

			if name != "other-system" {
				ctest.Eventually(s, "the fake node's machine was dialed", func() bool { return s.inventory.Get(fake).Condition != inventory.Unknown })
			}

			s.Register(ctest.NodeOf(victim))
			assert.Equal(t, providerID, s.awaitInitialized(victim.Nodename()).Spec.ProviderID)
			s.AwaitEvent(victim.Nodename(), node.ReasonProviderIDInUse, fake, providerID)

			if name != "other-system" { // no such Node gets an Event
				s.AwaitEvent(fake, node.ReasonProviderIDInUse, victim.Nodename(), providerID)
			}
		})
	}
}

// A kubelet changes the address of its Node before a dial fails.
func TestController_IgnoresProviderIDOfNodeThatKeepsMoving(t *testing.T) {
	s := parallel(t)
	providerID := "hcloud://victim-of-moving"
	victim := s.Machine(talostest.MachineSpec{Nodename: "victim-of-moving", Platform: identified("hcloud", providerID)})

	addresses := make([]netip.Addr, 2)
	for i := range addresses {
		m := s.Machine(talostest.MachineSpec{Nodename: fmt.Sprint("silent-", i)})
		require.NoError(t, m.BlackHole())
		addresses[i] = m.Address()
	}

	s.Register(kube.NodeSpec{Name: "fake-moving", ProviderID: providerID, NodeIPs: addresses[:1]})
	s.Register(ctest.NodeOf(victim))

	moves := 0

	ctest.Eventually(s, "the victim is initialized", func() bool {
		moves++
		s.PatchNode("fake-moving", "kubelet", fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}},"status":{"addresses":[{"type":"InternalIP","address":%q}]}}`,
			cloudproviderapi.AnnotationAlphaProvidedIPAddr, addresses[moves%2], addresses[moves%2]), "status")

		return !nodespec.IsUninitialized(s.Node(victim.Nodename()))
	})
	assert.Equal(t, providerID, s.Node(victim.Nodename()).Spec.ProviderID)
}

// No kubelet can set these labels, and none can make a machine respond under the Node's name.
func TestController_NeverAssignsProviderIDOfKnownNode(t *testing.T) {
	label := func(s suite, spec kube.NodeSpec, labels string) {
		spec.NodeIPs = []netip.Addr{s.silent(spec.Name)}
		s.Register(spec)
		s.PatchNode(spec.Name, "kubectl", `{"metadata":{"labels":`+labels+`}}`)
	}

	for name, register := range map[string]func(s suite, spec kube.NodeSpec){
		// Initialized by an earlier version, or by the upstream.
		"labeled": func(s suite, spec kube.NodeSpec) {
			label(s, spec, fmt.Sprintf(`{%q:"hcloud"}`, nodespec.LabelPlatform))
		},
		"recorded": func(s suite, spec kube.NodeSpec) {
			label(s, spec, fmt.Sprintf(`{%q:"none.0.0.0.0",%q:"10.0.0.9"}`, noderecord.LabelContext, noderecord.LabelAddress))
		},
		"control-plane": func(s suite, spec kube.NodeSpec) { spec.ControlPlane = true; s.Register(spec) },
		"responding": func(s suite, spec kube.NodeSpec) {
			m := s.Machine(talostest.MachineSpec{Nodename: spec.Name, Platform: platform("aws", spec.Name), PlatformPending: true})
			spec.NodeIPs = []netip.Addr{m.Address()}
			s.Register(spec)
			ctest.Eventually(s, "machine responds", func() bool { return s.inventory.Get(spec.Name).Condition == inventory.Current })
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)
			known, clone, providerID := "known-"+name, "clone-of-"+name, "hcloud://known-"+name

			register(s, kube.NodeSpec{Name: known, ProviderID: providerID})
			ctest.Eventually(s, "the known node was dialed", func() bool { return s.inventory.Get(known).Condition != inventory.Unknown })

			s.Join(talostest.MachineSpec{Nodename: clone, Platform: identified("hcloud", providerID)})
			s.AwaitEvent(clone, node.ReasonProviderIDInUse, known)
			s.waitForIdle()
			s.assertUntouched(clone)

			s.Remove(known)
			assert.Equal(t, providerID, s.awaitInitialized(clone).Spec.ProviderID)
		})
	}
}

// A hostile machine reports the SMBIOS UUID of another machine before that machine registers.
func TestController_IgnoresUUIDOfNodeThatWasNotInitializedWithIt(t *testing.T) {
	for name, hostile := range map[string]struct {
		uuid, providerID string
		platform         runtime.PlatformMetadataSpec
		isPending        bool
	}{
		"registered": {uuid: "6a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b01", providerID: "talos://metal/x/6a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b01"},
		"pending":    {uuid: "6a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b02", platform: platform("aws", "uuid-pending"), isPending: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)
			attacker, victim := "uuid-"+name, "uuid-victim-"+name
			system := &hardware.SystemInformationSpec{UUID: hostile.uuid}

			m := s.Machine(talostest.MachineSpec{Nodename: attacker, Platform: hostile.platform, PlatformPending: hostile.isPending, SystemInformation: system})
			spec := ctest.NodeOf(m)
			spec.ProviderID = hostile.providerID
			s.Register(spec)
			ctest.Eventually(s, "the hostile machine reports the UUID", func() bool { return s.inventory.Get(attacker).Machine.UUID() == hostile.uuid })

			if !hostile.isPending {
				s.awaitInitialized(attacker)
			}

			s.initialize(talostest.MachineSpec{Nodename: victim, SystemInformation: system})
			assert.Equal(t, "talos://metal/"+hostile.uuid, s.Node(victim).Spec.ProviderID)
		})
	}
}

// A hostile machine whose platform stays pending responds for a Node with the providerID of another machine.
func TestController_UUIDOfPendingNodeOnlyDelays(t *testing.T) {
	const uuid = "6a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b04"

	s := parallel(t)
	system := &hardware.SystemInformationSpec{UUID: uuid}

	spec := ctest.NodeOf(s.Machine(talostest.MachineSpec{
		Nodename: "uuid-delaying", Platform: platform("aws", "uuid-delaying"), PlatformPending: true, SystemInformation: system,
	}))
	spec.ProviderID = "talos://metal/" + uuid
	s.Register(spec)
	ctest.Eventually(s, "the hostile machine reports the UUID", func() bool { return s.inventory.Get("uuid-delaying").Machine.UUID() == uuid })

	s.Join(talostest.MachineSpec{Nodename: "uuid-delayed", SystemInformation: system})
	s.AwaitEvent("uuid-delayed", node.ReasonProviderIDInUse, "uuid-delaying")
	s.waitForIdle()
	s.assertUntouched("uuid-delayed")

	s.Remove("uuid-delaying")
	assert.Equal(t, "talos://metal/"+uuid, s.awaitInitialized("uuid-delayed").Spec.ProviderID)
}

// Of two machines with one UUID, the second waits until the providerID of the first is written.
func TestController_UUIDCountsOnceProviderIDIsWritten(t *testing.T) {
	const uuid = "6a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b03"

	s := parallel(t)
	system := &hardware.SystemInformationSpec{UUID: uuid}
	first := s.Machine(talostest.MachineSpec{Nodename: "board-first", SystemInformation: system})

	const last = 2 // labels, then the providerID

	var second *talostest.Machine

	wait := s.overtake("board-first", last, func() {
		second = s.Join(talostest.MachineSpec{Nodename: "board-second", SystemInformation: system})
		s.AwaitEvent("board-second", node.ReasonProviderIDInUse, "board-first")
		assert.Empty(t, s.Node("board-second").Spec.ProviderID)
	})

	s.Register(ctest.NodeOf(first))
	wait()

	assert.Equal(t, "talos://metal/"+uuid, s.awaitInitialized("board-first").Spec.ProviderID)
	assert.Equal(t, "talos://metal/"+second.Address().String(), s.awaitInitialized("board-second").Spec.ProviderID)
}
