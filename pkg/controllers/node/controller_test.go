package node_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/util/retry"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// platform returns metadata of an instance on a cloud platform.
func platform(name, instance string) runtime.PlatformMetadataSpec {
	return runtime.PlatformMetadataSpec{
		Platform: name, Region: name + "-region", Zone: name + "-zone", InstanceType: name + "-type", InstanceID: instance,
	}
}

// identified returns metadata with a providerID.
func identified(name, providerID string) runtime.PlatformMetadataSpec {
	spec := platform(name, "some-instance")
	spec.ProviderID = providerID

	return spec
}

func topology(region, zone, instanceType string) map[string]string {
	return map[string]string{
		corev1.LabelTopologyRegion: region, corev1.LabelFailureDomainBetaRegion: region,
		corev1.LabelTopologyZone: zone, corev1.LabelFailureDomainBetaZone: zone,
		corev1.LabelInstanceTypeStable: instanceType, corev1.LabelInstanceType: instanceType,
	}
}

// ourKeys returns the keys of all labels that the controller sets without rules.
func ourKeys() []string {
	return append(slices.Collect(maps.Keys(topology("", "", ""))), nodespec.LabelPlatform, nodespec.LabelClusterName, nodespec.LabelLifecycle)
}

// ourLabels returns the Node's labels with ourKeys.
func ourLabels(n *corev1.Node) map[string]string {
	labels := map[string]string{}

	for _, key := range ourKeys() {
		if value, ok := n.Labels[key]; ok {
			labels[key] = value
		}
	}

	return labels
}

// nodeState is the expected state of an initialized Node.
type nodeState struct {
	providerID string
	labels     map[string]string
	addresses  []corev1.NodeAddress
}

func (s suite) requireState(n *corev1.Node, want nodeState) {
	s.Helper()

	assert.Equal(s, want.providerID, n.Spec.ProviderID)

	assert.Equal(s, want.labels, ourLabels(n))

	assert.Equal(s, want.addresses, n.Status.Addresses)
}

// requireAtomicInitialization fails if a version of the Node lacks the uninitialized taint but does not have the
// expected state.
func (s suite) requireAtomicInitialization(versions []*corev1.Node, want nodeState) {
	s.Helper()

	for _, n := range versions {
		if !nodespec.IsUninitialized(n) {
			s.requireState(n, want)
		}

		if nodespec.IsUninitialized(n) && n.Spec.ProviderID != "" {
			s.Errorf("version %s of node %s has a providerID and the uninitialized taint", n.ResourceVersion, n.Name)
		}
	}
}

func TestController_InitializesNodesOfEveryPlatform(t *testing.T) {
	t.Parallel()

	const uuid = "7d1a7f3c-6a53-4a35-9c6c-3a7f1f0c3e11"

	aws := identified("aws", "aws:///eu-west-1a/i-0123456789abcdef0")
	aws.Spot, aws.Hostname, aws.ExternalDNS = true, "ip-10-0-0-1.EC2.internal", "ec2-3-120-1-2.example.com."

	for _, test := range []struct {
		name       string
		spec       talostest.MachineSpec
		providerID string
		labels     map[string]string
		external   []string
		names      []corev1.NodeAddress
	}{
		{
			name: "aws",
			spec: talostest.MachineSpec{
				Platform:  aws,
				Addresses: []talostest.Address{{Link: talostest.LinkExternal, Prefix: netip.MustParsePrefix("3.120.1.2/32")}},
			},
			providerID: "aws:///eu-west-1a/i-0123456789abcdef0",
			labels:     topology("aws-region", "aws-zone", "aws-type"),
			external:   []string{"3.120.1.2"},
			names: []corev1.NodeAddress{
				{Type: corev1.NodeInternalDNS, Address: "ip-10-0-0-1.ec2.internal"},
				{Type: corev1.NodeExternalDNS, Address: "ec2-3-120-1-2.example.com"},
			},
		},
		{
			name:       "hcloud",
			spec:       talostest.MachineSpec{Platform: identified("hcloud", "hcloud://4711")},
			providerID: "hcloud://4711",
			labels:     topology("hcloud-region", "hcloud-zone", "hcloud-type"),
		},
		{
			name:       "cloudstack",
			spec:       talostest.MachineSpec{Platform: platform("cloudstack", "cloudstack-instance")},
			providerID: "talos://cloudstack/cloudstack-instance",
			labels:     topology("cloudstack-region", "cloudstack-zone", "cloudstack-type"),
		},
		{
			name: "nocloud",
			spec: talostest.MachineSpec{
				Platform: runtime.PlatformMetadataSpec{Platform: "nocloud", InstanceID: "iid-1"},
				Addresses: []talostest.Address{
					{Link: "eth1", Prefix: netip.MustParsePrefix("203.0.112.9/24")},
					{Link: "eth1", Prefix: netip.MustParsePrefix("2a01:4f8::9/64")},
					{Link: "tailscale0", Prefix: netip.MustParsePrefix("100.100.1.1/32")},
				},
			},
			providerID: "talos://nocloud/iid-1",
			labels:     map[string]string{},
			external:   []string{"203.0.112.9", "2a01:4f8::9"},
		},
		{
			name:       "metal",
			spec:       talostest.MachineSpec{SystemInformation: &hardware.SystemInformationSpec{UUID: uuid}},
			providerID: "talos://metal/" + uuid,
			labels:     map[string]string{},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := parallel(t)
			test.spec.Nodename = "platform-" + test.name
			m := s.Machine(test.spec)

			test.labels[nodespec.LabelPlatform] = test.name
			test.labels[nodespec.LabelClusterName] = s.Talos.Name()

			if test.spec.Platform.Spot {
				test.labels[nodespec.LabelLifecycle] = "spot"
			}

			want := nodeState{providerID: test.providerID, labels: test.labels, addresses: addressList(m, test.external, test.names)}
			until := s.history(m.Nodename())

			s.Register(ctest.NodeOf(m))
			n := s.awaitInitialized(m.Nodename())
			s.requireState(n, want)
			s.requireAtomicInitialization(until(n.ResourceVersion), want)
			s.AwaitEvent(m.Nodename(), node.ReasonInitialized)
		})
	}
}

// addressList returns the expected addresses of the Node of m.
func addressList(m *talostest.Machine, external []string, names []corev1.NodeAddress) []corev1.NodeAddress {
	list := []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: m.Address().String()}}
	for _, ip := range external {
		list = append(list, corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: ip})
	}

	list = append(list, corev1.NodeAddress{Type: corev1.NodeHostName, Address: m.Nodename()})

	return append(list, names...)
}

func TestController_WaitsForMetadata(t *testing.T) {
	s := parallel(t)
	m := s.Join(talostest.MachineSpec{Nodename: "late", Platform: platform("aws", "late"), PlatformPending: true})

	s.AwaitEvent("late", node.ReasonMetadataPending)
	s.touch("late", 20)
	require.NoError(s, m.SetHostname(s.Context(), "late", "example.com"))
	s.waitForIdle()
	s.assertUntouched("late")

	assert.True(t, nodespec.IsUninitialized(s.Node("late")), "Node initialized before its machine had metadata")

	require.NoError(s, m.ResolvePlatform(s.Context()))

	assert.Equal(t, "talos://aws/late", s.awaitInitialized("late").Spec.ProviderID)

	s.AwaitEvent("late", node.ReasonInitialized)
	s.assertOneEvent("late", node.ReasonMetadataPending)
}

// A machine lacks metadata for a moment after a reboot.
func TestController_KeepsNodeWhileMetadataIsMissing(t *testing.T) {
	s := parallel(t)
	m := s.Join(talostest.MachineSpec{Nodename: "moment", Platform: platform("aws", "moment")})
	before := s.awaitInitialized("moment")

	s.update(m, func(spec *runtime.PlatformMetadataSpec) { *spec = runtime.PlatformMetadataSpec{Platform: "aws"} })
	ctest.Eventually(s, "inventory lacks metadata", func() bool {
		return s.inventory.Get("moment").Machine.Platform.InstanceID == ""
	})
	s.waitForIdle()

	assert.Equal(t, before.ResourceVersion, s.Node("moment").ResourceVersion)

	assert.Empty(t, s.Events("moment", node.ReasonMetadataPending))
}

// A kubelet with hostname-override registers a Node whose name is not the machine's nodename.
func TestController_ExplainsIdentityMismatch(t *testing.T) {
	for name, hasNode := range map[string]bool{"override": false, "moved-address": true} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)
			m := s.Machine(talostest.MachineSpec{Nodename: name + "-machine", Platform: platform("aws", name)})

			if hasNode {
				s.Register(ctest.NodeOf(m))
				s.awaitInitialized(m.Nodename())
			}

			s.Register(kube.NodeSpec{Name: name + "-kubelet", NodeIPs: []netip.Addr{m.Address()}})

			message := s.AwaitEvent(name+"-kubelet", node.ReasonIdentityMismatch).Message
			assert.Contains(t, message, m.Nodename())
			assert.NotEqual(t, hasNode, strings.Contains(message, "hostname-override"))
		})
	}
}

func TestController_RefusesIdentityOfAnotherMachine(t *testing.T) {
	s := parallel(t)
	victim := s.Machine(talostest.MachineSpec{Nodename: "victim", Platform: platform("aws", "victim")})

	// The kubelet writes the annotation and the addresses that lead to the machine.
	s.Register(kube.NodeSpec{Name: "impostor", NodeIPs: []netip.Addr{victim.Address()}})

	s.AwaitEvent("impostor", node.ReasonIdentityMismatch)
	s.touch("impostor", 20)
	s.waitForIdle()

	s.assertUntouched("impostor")
	s.assertOneEvent("impostor", node.ReasonIdentityMismatch)

	assert.True(t, nodespec.IsUninitialized(s.Node("impostor")), "Node initialized")
}

// The kubelet reports the address of another machine after initialization.
func TestController_KeepsNodeThatPointsToAnotherMachine(t *testing.T) {
	s := parallel(t)
	victim := s.Machine(talostest.MachineSpec{Nodename: "turned-victim", Platform: identified("hcloud", "hcloud://turned-victim")})
	s.Join(talostest.MachineSpec{Nodename: "turned", Platform: identified("hcloud", "hcloud://turned")})
	before := s.awaitInitialized("turned")

	s.PatchNode("turned", "kubelet", fmt.Sprintf(`{"metadata":{"annotations":{"alpha.kubernetes.io/provided-node-ip":%q}}}`, victim.Address()))
	s.waitForIdle()

	// status.addresses still leads to the Node's machine, which does not have the reported node IP.
	after := s.Node("turned")
	s.requireState(after, nodeState{before.Spec.ProviderID, ourLabels(before), before.Status.Addresses})
}

func TestController_IgnoresNodesOfOtherOperatingSystems(t *testing.T) {
	s := parallel(t)
	m := s.Machine(talostest.MachineSpec{Nodename: "foreign", Platform: platform("aws", "foreign")})

	// Both have the address of a Talos machine, and one has its name.
	s.Register(kube.NodeSpec{Name: "foreign", NodeIPs: []netip.Addr{m.Address()}, OSImage: "Ubuntu 24.04.3 LTS"})
	s.Register(kube.NodeSpec{Name: "foreign-ready", NodeIPs: []netip.Addr{m.Address()}, OSImage: "Ubuntu 24.04.3 LTS", WithoutCloudProvider: true})
	s.waitForIdle()

	for _, name := range []string{"foreign", "foreign-ready"} {
		s.assertUntouched(name)

		assert.Empty(t, s.Events(name, ""))
	}

	assert.True(t, nodespec.IsUninitialized(s.Node("foreign")), "Node of another operating system was initialized")

	assert.Empty(t, m.Calls())
}

func TestController_MachineUnreachableAndReachableAgain(t *testing.T) {
	s := parallel(t)
	m := s.initialize(talostest.MachineSpec{Nodename: "unreachable", Platform: platform("aws", "unreachable")})

	require.NoError(s, m.Stop(s.Context()))
	s.AwaitEvent("unreachable", node.ReasonUnreachable)
	s.touch("unreachable", 20)
	s.waitForIdle()

	n := s.Node("unreachable")
	assert.Equal(t, "aws-zone", n.Labels[corev1.LabelTopologyZone])
	assert.Equal(t, "talos://aws/unreachable", n.Spec.ProviderID)
	assert.Len(t, n.Status.Addresses, 2)

	s.update(m, func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType = "resized" })
	m.Start()
	s.AwaitNode("unreachable", ofType("resized"))
	s.waitForIdle()
	s.assertOneEvent("unreachable", node.ReasonUnreachable)
}

func inZone(zone string) func(*corev1.Node, *assert.Assertions) {
	return ctest.Labeled(corev1.LabelTopologyZone, zone)
}

func ofType(instanceType string) func(*corev1.Node, *assert.Assertions) {
	return ctest.Labeled(corev1.LabelInstanceTypeStable, instanceType)
}

func TestController_DoesNotInitializeFromStaleView(t *testing.T) {
	s := parallel(t)
	m := s.Join(talostest.MachineSpec{Nodename: "stale-view", Platform: platform("aws", "stale-view"), PlatformPending: true})

	s.AwaitEvent("stale-view", node.ReasonMetadataPending)
	require.NoError(s, m.Stop(s.Context()))
	s.AwaitEvent("stale-view", node.ReasonUnreachable)
	require.NoError(s, m.ResolvePlatform(s.Context()))
	s.waitForIdle()
	s.assertUntouched("stale-view")

	m.Start()
	s.awaitInitialized("stale-view")
}

// competingTaint is the taint of the competitor's n-th write.
func competingTaint(n int) corev1.Taint {
	return corev1.Taint{Key: fmt.Sprintf("competing/%d", n), Effect: corev1.TaintEffectPreferNoSchedule}
}

// compete updates the Node as fast as it can, and adds a taint in every tenth update. It runs in its own
// goroutine, so it returns errors.
func (s suite) compete(ctx context.Context, nodename string, times int) error {
	nodes := s.Client.CoreV1().Nodes()

	for i := range times {
		err := retry.RetryOnConflict(conflictBackoff, func() error {
			n, err := nodes.Get(ctx, nodename, metav1.GetOptions{})
			if err != nil {
				return err
			}

			n.Labels["competing/label"] = fmt.Sprint(i)
			n.Annotations["competing/annotation"] = fmt.Sprint(i)

			if i%10 == 0 {
				n.Spec.Taints = append(n.Spec.Taints, competingTaint(i))
			}

			_, err = nodes.Update(ctx, n, metav1.UpdateOptions{FieldManager: "competitor"})

			return err
		})
		if err != nil {
			return fmt.Errorf("competing write %d: %w", i, err)
		}
	}

	return nil
}

func TestController_CompetingWriter(t *testing.T) {
	s := parallel(t)
	m := s.Join(talostest.MachineSpec{Nodename: "contested", Platform: platform("aws", "contested"), PlatformPending: true})
	s.AwaitEvent("contested", node.ReasonMetadataPending)

	const writes = 200

	competitor := make(chan error, 1)

	go func() { competitor <- s.compete(s.Context(), "contested", writes) }()

	s.AwaitNode("contested", func(n *corev1.Node, asrt *assert.Assertions) { asrt.Contains(n.Labels, "competing/label") })
	require.NoError(s, m.ResolvePlatform(s.Context()))
	require.NoError(s, <-competitor)

	s.awaitInitialized("contested")
	n := s.Node("contested")
	want := topology("aws-region", "aws-zone", "aws-type")
	want[nodespec.LabelPlatform], want[nodespec.LabelClusterName] = "aws", s.Talos.Name()
	s.requireState(n, nodeState{"talos://aws/contested", want, addressList(m, nil, nil)})

	for i := 0; i < writes; i += 10 {
		assert.True(t, slices.Contains(n.Spec.Taints, competingTaint(i)), "taint %s of the competitor is missing", competingTaint(i).Key)
	}

	assert.Equal(t, fmt.Sprint(writes-1), n.Labels["competing/label"])
}

// applyAs applies labels as `kubectl apply --server-side --force-conflicts` does.
func (s suite) applyAs(manager, nodename string, labels map[string]string) {
	s.Helper()

	config := corev1ac.Node(nodename).WithLabels(labels)

	require.NoError(s, retry.RetryOnConflict(conflictBackoff, func() error {
		_, err := s.Client.CoreV1().Nodes().Apply(s.Context(), config, metav1.ApplyOptions{FieldManager: manager, Force: true})

		return err
	}))
}

func TestController_LabelOwnedByAnotherManagerBeforeInitialization(t *testing.T) {
	s := parallel(t)
	m := s.Join(talostest.MachineSpec{Nodename: "owned-before", Platform: platform("aws", "owned-before"), PlatformPending: true})
	s.applyAs("kubectl", "owned-before", map[string]string{corev1.LabelTopologyZone: "theirs"})

	require.NoError(s, m.ResolvePlatform(s.Context()))

	n := s.awaitInitialized("owned-before")
	want := topology("aws-region", "aws-zone", "aws-type")
	want[corev1.LabelTopologyZone], want[corev1.LabelFailureDomainBetaZone] = "theirs", "theirs"
	want[nodespec.LabelPlatform], want[nodespec.LabelClusterName] = "aws", s.Talos.Name()
	s.requireState(n, nodeState{"talos://aws/owned-before", want, addressList(m, nil, nil)})

	s.AwaitEvent("owned-before", node.ReasonOwnershipConflict)
	s.touch("owned-before", 20)
	s.waitForIdle()
	s.assertOneEvent("owned-before", node.ReasonOwnershipConflict)

	s.applyAs("kubectl", "owned-before", nil)
	s.AwaitNode("owned-before", inZone("aws-zone"))
}

func TestController_LabelTakenOverByAnotherManager(t *testing.T) {
	s := parallel(t)
	m := s.initialize(talostest.MachineSpec{Nodename: "owned-after", Platform: platform("aws", "owned-after")})

	s.PatchNode("owned-after", "kubectl-label", fmt.Sprintf(`{"metadata":{"labels":{%q:"theirs"}}}`, corev1.LabelInstanceTypeStable))
	s.AwaitEvent("owned-after", node.ReasonOwnershipConflict)

	// Other labels are still updated.
	s.update(m, func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType, spec.Spot = "next-type", true })

	n := s.AwaitNode("owned-after", ctest.Labeled(nodespec.LabelLifecycle, "spot"))
	assert.Equal(t, "theirs", n.Labels[corev1.LabelInstanceTypeStable])
	assert.Equal(t, "next-type", n.Labels[corev1.LabelInstanceType])

	s.waitForIdle()
	s.assertOneEvent("owned-after", node.ReasonOwnershipConflict)

	s.PatchNode("owned-after", "kubectl-label", fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, corev1.LabelInstanceTypeStable))
	s.AwaitNode("owned-after", ofType("next-type"))
}

// Talos reverts changes by other clients to labels in machine.nodeLabels.
func TestController_DoesNotWriteLabelsOwnedByTalos(t *testing.T) {
	s := parallel(t)
	m := s.Join(talostest.MachineSpec{Nodename: "talos-owned", Platform: platform("aws", "talos-owned"), PlatformPending: true})

	owned := []string{corev1.LabelInstanceTypeStable, corev1.LabelTopologyRegion, corev1.LabelTopologyZone}
	annotation, err := json.Marshal(owned)
	require.NoError(s, err)

	// A different value, the same value and no value.
	s.PatchNode("talos-owned", "machined", fmt.Sprintf(`{"metadata":{"annotations":{"talos.dev/owned-labels":%q},"labels":{%q:"talos-zone",%q:"aws-region"}}}`,
		annotation, corev1.LabelTopologyZone, corev1.LabelTopologyRegion))
	require.NoError(s, m.ResolvePlatform(s.Context()))

	n := s.awaitInitialized("talos-owned")
	assert.Equal(t, "talos-zone", n.Labels[corev1.LabelTopologyZone])

	assert.NotContains(t, n.Labels, corev1.LabelInstanceTypeStable)

	applied, err := corev1ac.ExtractNode(n, node.FieldManager)
	require.NoError(s, err)

	for _, key := range owned {
		assert.NotContains(t, applied.Labels, key)
	}
}

func TestController_FollowsChangesImmediately(t *testing.T) {
	// Not parallel, because it measures latency.
	s := alone(t)
	m := s.Join(talostest.MachineSpec{
		Nodename: "changing", Platform: platform("nocloud", "changing"),
		Addresses: []talostest.Address{{Link: "eth1", Prefix: netip.MustParsePrefix("203.0.112.1/24")}},
	})
	s.awaitInitialized("changing")

	public := netip.MustParsePrefix("203.0.112.20/24")
	metadata := func(change func(*runtime.PlatformMetadataSpec)) func(context.Context) error {
		return func(ctx context.Context) error { return m.UpdatePlatform(ctx, change) }
	}
	absent := func(keys ...string) func(*corev1.Node, *assert.Assertions) {
		return func(n *corev1.Node, asrt *assert.Assertions) {
			for _, key := range keys {
				asrt.NotContains(n.Labels, key)
			}
		}
	}

	var took []time.Duration

	for _, change := range []struct {
		name   string
		do     func(context.Context) error
		follow func(*corev1.Node, *assert.Assertions)
	}{
		{"instance type", metadata(func(p *runtime.PlatformMetadataSpec) { p.InstanceType = "t2" }), ofType("t2")},
		{"host name", metadata(func(p *runtime.PlatformMetadataSpec) { p.Hostname = "changing.example.com" }), lists(corev1.NodeInternalDNS, "changing.example.com")},
		{"spot", metadata(func(p *runtime.PlatformMetadataSpec) { p.Spot = true }), ctest.Labeled(nodespec.LabelLifecycle, "spot")},
		{"no longer spot", metadata(func(p *runtime.PlatformMetadataSpec) { p.Spot = false }), absent(nodespec.LabelLifecycle)},
		{
			"no longer of a type", metadata(func(p *runtime.PlatformMetadataSpec) { p.InstanceType = "" }),
			absent(corev1.LabelInstanceTypeStable, corev1.LabelInstanceType),
		},
		{
			"public address added", func(ctx context.Context) error { return m.AddAddress(ctx, "eth1", public) },
			lists(corev1.NodeExternalIP, "203.0.112.1", "203.0.112.20"),
		},
		{
			"public address removed", func(ctx context.Context) error { return m.RemoveAddress(ctx, "eth1", public) },
			lists(corev1.NodeExternalIP, "203.0.112.1"),
		},
	} {
		started := time.Now()

		require.NoError(s, change.do(t.Context()))
		s.AwaitNode("changing", change.follow)

		took = append(took, time.Since(started))
		t.Logf("%s: %s", change.name, time.Since(started))
	}

	// Some changes may be slow on a busy machine, but not all.
	assert.LessOrEqual(t, slices.Min(took), time.Second)
}

func TestController_DoesNotWriteUnchangedNodes(t *testing.T) {
	const count = 20

	s := parallel(t)

	var machines []*talostest.Machine

	for i := range count {
		machines = append(machines, s.Join(talostest.MachineSpec{
			Nodename: fmt.Sprintf("idle-%d", i), Platform: identified("hcloud", fmt.Sprintf("hcloud://idle-%d", i)),
		}))
	}

	for _, m := range machines {
		s.awaitInitialized(m.Nodename())
	}

	s.waitForIdle()

	before := map[string]int{}
	for _, m := range machines {
		before[m.Nodename()] = s.transport.Writes(m.Nodename())
	}

	pod := netip.MustParsePrefix("10.244.3.9/32")

	for round := range 3 {
		for _, m := range machines {
			require.NoError(s, m.AddAddress(t.Context(), fmt.Sprintf("lxc%d", round), pod))
		}
	}

	for _, m := range machines {
		ctest.Eventually(s, "inventory has the links of pods", func() bool {
			links := 0

			for _, a := range s.inventory.Get(m.Nodename()).Machine.Addresses {
				if a.Prefix == pod {
					links++
				}
			}

			return links == 3
		})
	}

	s.waitForIdle()

	for nodename, n := range before {
		assert.Equal(t, n, s.transport.Writes(nodename))
		assert.NotEqual(t, 0, n)
	}
}

func TestController_ReportsProviderIDInUse(t *testing.T) {
	s := parallel(t)
	spec := talostest.MachineSpec{Nodename: "twin-a", Platform: identified("hcloud", "hcloud://twins")}
	s.initialize(spec)

	spec.Nodename = "twin-b"
	s.Join(spec)
	s.AwaitEvent("twin-b", node.ReasonProviderIDInUse)
	s.touch("twin-b", 20)
	s.waitForIdle()
	s.assertUntouched("twin-b")
	s.assertOneEvent("twin-b", node.ReasonProviderIDInUse)

	assert.True(t, nodespec.IsUninitialized(s.Node("twin-b")), "second Node initialized")

	// Deleting the first Node releases the providerID.
	s.Remove("twin-a")
	s.awaitInitialized("twin-b")
}

func TestController_AssignsUniqueProviderIDsConcurrently(t *testing.T) {
	s := parallel(t)

	const count = 10

	// Machines with the same instance ID, which is invalid, and machines with the same SMBIOS UUID, which some boards
	// have.
	uuid := "0d1a7f3c-6a53-4a35-9c6c-3a7f1f0c3e22"

	var uuids []*talostest.Machine

	for i := range count {
		s.Join(talostest.MachineSpec{Nodename: fmt.Sprintf("clone-%d", i), Platform: identified("hcloud", "hcloud://clones")})
		uuids = append(uuids, s.Join(talostest.MachineSpec{
			Nodename: fmt.Sprintf("board-%d", i), SystemInformation: &hardware.SystemInformationSpec{UUID: uuid},
		}))
	}

	ids := map[string]string{}

	for _, m := range uuids {
		n := s.awaitInitialized(m.Nodename())

		assert.NotContains(t, ids, n.Spec.ProviderID)
		assert.Contains(t, []string{"talos://metal/" + uuid, "talos://metal/" + m.Address().String()}, n.Spec.ProviderID)

		ids[n.Spec.ProviderID] = n.Name
	}

	assigned := 0

	for i := range count {
		name := fmt.Sprintf("clone-%d", i)

		ctest.Eventually(s, "node "+name+" is initialized or reported", func() bool {
			return s.Node(name).Spec.ProviderID != "" || len(s.Events(name, node.ReasonProviderIDInUse)) > 0
		})

		if s.Node(name).Spec.ProviderID != "" {
			assigned++
		}
	}

	assert.Equal(t, 1, assigned)
}

func TestController_InitializesRecreatedNode(t *testing.T) {
	s := parallel(t)
	m := s.Join(talostest.MachineSpec{Nodename: "again", Platform: platform("aws", "again")})
	first := s.awaitInitialized("again")

	for range 3 {
		s.Remove("again")
		s.Register(ctest.NodeOf(m))

		n := s.AwaitNode("again", func(n *corev1.Node, asrt *assert.Assertions) {
			ctest.Initialized(n, asrt)
			asrt.NotEqual(first.UID, n.UID)
		})
		s.requireState(n, nodeState{first.Spec.ProviderID, ourLabels(first), first.Status.Addresses})
		first = n
	}
}

// Changes by another client during an initialization are corrected before the uninitialized taint is removed.
func TestController_InitializesCompleteNodesOnly(t *testing.T) {
	otherAddresses := func(s suite, name string) {
		s.PatchNode(name, "kubectl", `{"status":{"addresses":[{"type":"Hostname","address":"other"}]}}`, "status")
	}

	for _, test := range []struct {
		name     string
		overtake func(s suite, name string) (wait func())
	}{
		// The kubelet has registered the Node with the desired addresses.
		{"addresses", func(s suite, name string) func() {
			return s.overtake(name, 1, func() { otherAddresses(s, name) })
		}},
		// The label is removed between the first two writes.
		{"label", func(s suite, name string) func() {
			otherAddresses(s, name)

			return s.overtake(name, 2, func() {
				s.PatchNode(name, "kubectl", fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, corev1.LabelTopologyZone))
			})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := parallel(t)
			name := "overtaken-" + test.name
			m := s.Join(talostest.MachineSpec{Nodename: name, Platform: platform("aws", name), PlatformPending: true})
			s.AwaitEvent(name, node.ReasonMetadataPending)

			wait := test.overtake(s, name)
			seen := s.Node(name)
			require.NoError(s, m.ResolvePlatform(t.Context()))
			wait()

			n := s.AwaitNodeSince(seen, ctest.Schedulable)
			assert.Equal(t, addressList(m, nil, nil), n.Status.Addresses)
			assert.Equal(t, "aws-zone", n.Labels[corev1.LabelTopologyZone])
		})
	}
}

// Another client adds a taint before the first or the second of two requests.
func TestController_KeepsTaintThatIsAddedDuringInitialization(t *testing.T) {
	for request := 1; request <= 2; request++ {
		t.Run(fmt.Sprintf("request %d", request), func(t *testing.T) {
			s := parallel(t)
			nodename := fmt.Sprintf("tainted-before-%d", request)
			m := s.Join(talostest.MachineSpec{Nodename: nodename, Platform: platform("aws", nodename), PlatformPending: true})
			s.AwaitEvent(nodename, node.ReasonMetadataPending)

			wait := s.overtake(nodename, request, func() {
				s.PatchNode(nodename, "kubectl", fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"},{"key":"team","effect":"NoSchedule"}]}}`,
					cloudproviderapi.TaintExternalCloudProvider))
			})

			require.NoError(s, m.ResolvePlatform(t.Context()))
			wait()

			n := s.awaitInitialized(nodename)
			assert.Equal(t, "aws-zone", n.Labels[corev1.LabelTopologyZone])
			assert.Len(t, taintsNamed(n, "team"), 1)
		})
	}
}

func TestController_NodeDeletedDuringInitialization(t *testing.T) {
	s := parallel(t)

	const count = 10

	var names []string

	for i := range count {
		name := fmt.Sprintf("deleted-%d", i)
		names = append(names, name)

		m := s.Machine(talostest.MachineSpec{Nodename: name, Platform: identified("hcloud", "hcloud://"+name)})
		s.Register(ctest.NodeOf(m))

		// Delete at different times: some Nodes before the first write, others after.
		if i%2 == 0 {
			s.AwaitNode(name, func(n *corev1.Node, asrt *assert.Assertions) { asrt.True(isWritten(n)) })
		}

		s.Remove(name)
	}

	s.waitForIdle()

	for _, name := range names {
		_, err := s.Client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		assert.True(t, apierrors.IsNotFound(err), "node %s: %v", name, err)
		ctest.Eventually(s, "inventory has no machine for "+name, func() bool { return s.inventory.Get(name).Condition == inventory.Unknown })
	}
}

// The kubelet has registered the Nodes with the desired addresses, so two writes initialize them.
func TestController_DoesNotCreateDeletedNode(t *testing.T) {
	s := parallel(t)

	for write := 1; write <= 2; write++ {
		name := fmt.Sprintf("removed-%d", write)
		m := s.Join(talostest.MachineSpec{Nodename: name, Platform: identified("hcloud", "hcloud://"+name), PlatformPending: true})
		s.AwaitEvent(name, node.ReasonMetadataPending)

		wait := s.overtake(name, write, func() { s.Remove(name) })
		require.NoError(t, m.ResolvePlatform(t.Context()))
		wait()
		s.waitForIdle()

		_, err := s.Client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		assert.True(t, apierrors.IsNotFound(err), "before write %d: %v", write, err)
	}
}

// After a machine was renamed, its old Node still has the providerID.
func TestController_InitializesRenamedMachineWithoutProviderID(t *testing.T) {
	s := parallel(t)

	spec := talostest.MachineSpec{Nodename: "old-name", Platform: identified("hcloud", "hcloud://renamed")}
	spec.Platform.InternalDNS = "renamed.example.org"

	m := s.Machine(spec)
	require.NoError(s, m.SetIdentity(t.Context(), "renamed", ""))
	s.Register(ctest.NodeOf(m))
	s.awaitInitialized("old-name")
	require.NoError(s, m.SetHostname(t.Context(), "new-name", ""))
	require.NoError(s, m.SetNodename(t.Context(), "new-name"))
	s.AwaitEvent("old-name", node.ReasonIdentityMismatch)
	s.Register(kube.NodeSpec{Name: "new-name", NodeIPs: []netip.Addr{m.Address()}})

	n := s.AwaitNode("new-name", ctest.Schedulable)
	assert.Empty(t, n.Spec.ProviderID)
	assert.Equal(t, "hcloud", n.Labels[nodespec.LabelPlatform])

	s.AwaitNode("new-name", lists(corev1.NodeInternalDNS, "renamed.example.org")) // as its former Node does

	s.AwaitEvent("new-name", node.ReasonRenamed)
	s.waitForIdle()
	s.assertOneEvent("new-name", node.ReasonRenamed, "old-name")
	s.Remove("old-name")

	assert.Equal(t, "hcloud://renamed", s.awaitInitialized("new-name").Spec.ProviderID)
}

// The machine responds under its new name before the controller detects that it no longer responds under the former one.
func TestController_InitializesRenamedMachineAtAnotherAddress(t *testing.T) {
	s := parallel(t)
	spec := talostest.MachineSpec{Nodename: "moved-old", Platform: identified("hcloud", "hcloud://moved")}
	m := s.Machine(spec)
	require.NoError(s, m.SetIdentity(t.Context(), "moved", ""))
	s.Register(ctest.NodeOf(m))
	s.awaitInitialized("moved-old")
	require.NoError(s, m.Stop(t.Context()))

	spec.Nodename = "moved-new"
	other := s.Machine(spec)
	require.NoError(s, other.SetIdentity(t.Context(), "moved", ""))
	ctest.Eventually(s, "the former name does not respond", func() bool { return s.inventory.Get("moved-old").Condition == inventory.Unreachable })
	s.Register(ctest.NodeOf(other))
	s.AwaitNode("moved-new", ctest.Schedulable)
	s.AwaitEvent("moved-new", node.ReasonRenamed)
}

func TestController_ReportsProviderIDOfAnotherInstance(t *testing.T) {
	s := parallel(t)
	m := s.initialize(talostest.MachineSpec{Nodename: "re-created", Platform: identified("hcloud", "hcloud://before")})

	s.update(m, func(spec *runtime.PlatformMetadataSpec) { *spec = identified("hcloud", "hcloud://after") })

	s.AwaitEvent("re-created", node.ReasonProviderIDMismatch)
	s.waitForIdle()
	s.assertOneEvent("re-created", node.ReasonProviderIDMismatch, "hcloud://before", "hcloud://after")
	assert.Equal(t, "hcloud://before", s.Node("re-created").Spec.ProviderID)
}

// The kubelets of both machines write the same Node.
func TestController_ReportsHostnameOfTwoMachines(t *testing.T) {
	s := parallel(t)
	m := s.initialize(talostest.MachineSpec{Nodename: "twin", Platform: identified("hcloud", "hcloud://first")})
	other := s.Machine(talostest.MachineSpec{Nodename: "twin-2", Platform: identified("hcloud", "hcloud://second")})
	require.NoError(t, other.SetNodename(t.Context(), "twin"))

	for _, next := range []*talostest.Machine{other, m, other} {
		s.PatchNode("twin", "kubelet", fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr, next.Address()))
		ctest.Eventually(s, "the other machine is watched", func() bool { return s.inventory.Get("twin").Machine.Endpoint == next.Address() })
	}

	s.AwaitEvent("twin", node.ReasonProviderIDMismatch, "Two machines have the hostname", m.Address().String(), other.Address().String(), "change the hostname of one of them")
	assert.Equal(t, "hcloud://first", s.Node("twin").Spec.ProviderID)
}

// The upstream Talos CCM, and talos-ccm for machines that share a UUID, use the address in the providerID.
func TestController_AcceptsOtherFormOfProviderID(t *testing.T) {
	s := parallel(t)
	m := s.Machine(talostest.MachineSpec{
		Nodename: "by-address", SystemInformation: &hardware.SystemInformationSpec{UUID: "0c34ad2d-f29e-136f-e25b-fdc0ce3b6b3c"},
	})
	registered := ctest.NodeOf(m)
	registered.OSImage = "Another OS" // the controller must not be first
	s.Register(registered)
	s.PatchNode("by-address", "upstream", fmt.Sprintf(`{"spec":{"providerID":"talos://metal/%s"}}`, m.Address()))
	s.release("by-address")
	s.awaitInitialized("by-address")
	s.waitForIdle()

	assert.Empty(t, s.Events("by-address", node.ReasonProviderIDMismatch))
}

// No kubelet gets a certificate for a name that two machines report.
func TestController_OmitsNamesWhileShared(t *testing.T) {
	s := parallel(t)

	const name = "shared.example.org"

	named := func(nodename string) talostest.MachineSpec {
		metadata := platform("nocloud", nodename)
		metadata.Hostname = name

		return talostest.MachineSpec{Nodename: nodename, Platform: metadata}
	}

	s.initialize(named("names-1"))
	s.AwaitNode("names-1", lists(corev1.NodeInternalDNS, name))

	second := s.initialize(named("names-2"))

	for nodename, other := range map[string]string{"names-1": "names-2", "names-2": "names-1"} {
		s.AwaitNode(nodename, lists(corev1.NodeInternalDNS))
		s.AwaitEvent(nodename, node.ReasonInvalidValue)
		s.waitForIdle()
		s.assertOneEvent(nodename, node.ReasonInvalidValue, name, other)
	}

	s.update(second, func(p *runtime.PlatformMetadataSpec) { p.Hostname = "own.example.org" })
	s.AwaitNode("names-1", lists(corev1.NodeInternalDNS, name))
	s.AwaitNode("names-2", lists(corev1.NodeInternalDNS, "own.example.org"))
}

// A hostile worker reports the public address of another machine on the link "external".
func TestController_KeepsAddressThatAnotherMachineReports(t *testing.T) {
	s := parallel(t)

	address := netip.MustParsePrefix("203.0.114.7/32")
	on := func(nodename string, addresses ...talostest.Address) talostest.MachineSpec {
		return talostest.MachineSpec{Nodename: nodename, Platform: platform("hcloud", nodename), Addresses: addresses}
	}

	victim := s.initialize(on("address-1", talostest.Address{Link: talostest.LinkExternal, Prefix: address}))
	s.AwaitNode("address-1", lists(corev1.NodeExternalIP, "203.0.114.7"))

	hostile := s.initialize(on("address-2"))
	require.NoError(t, hostile.AddAddress(s.Context(), talostest.LinkExternal, address))

	for nodename, texts := range map[string][]string{"address-1": {"kept", `"address-2"`}, "address-2": {"omitted", `"address-1"`}} {
		s.AwaitEvent(nodename, node.ReasonInvalidValue)
		s.waitForIdle()
		s.assertOneEvent(nodename, node.ReasonInvalidValue, append(texts, "203.0.114.7")...)
	}

	assert.Equal(t, []string{"203.0.114.7"}, addressesOf(s.Node("address-1"), corev1.NodeExternalIP))
	assert.Empty(t, addressesOf(s.Node("address-2"), corev1.NodeExternalIP))

	require.NoError(t, victim.RemoveAddress(s.Context(), talostest.LinkExternal, address))
	s.AwaitNode("address-2", lists(corev1.NodeExternalIP, "203.0.114.7"))
}

// A duplicate SMBIOS UUID counts unless the other Node is initialized as another instance.
func TestController_IgnoresUUIDThatInitializedNodeDoesNotHave(t *testing.T) {
	s := parallel(t)

	const first, second = "5a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b01", "5a0b1c6e-0d0f-4a43-8f0e-3f0d8f1c2b02"

	on := func(nodename, uuid string) talostest.MachineSpec {
		return talostest.MachineSpec{Nodename: nodename, SystemInformation: &hardware.SystemInformationSpec{UUID: uuid}}
	}

	hostile := s.initialize(on("uuid-1", first))
	require.NoError(t, hostile.SetIdentity(s.Context(), "uuid-1", second))
	hostile.BreakConnections()
	s.AwaitEvent("uuid-1", node.ReasonProviderIDMismatch)

	s.initialize(on("uuid-2", second))
	assert.Equal(t, "talos://metal/"+second, s.Node("uuid-2").Spec.ProviderID)

	third := s.initialize(on("uuid-3", second))
	assert.Equal(t, "talos://metal/"+third.Address().String(), s.Node("uuid-3").Spec.ProviderID)
	s.AwaitEvent("uuid-3", node.ReasonInvalidValue, second, `"uuid-`, "node IP")
}
