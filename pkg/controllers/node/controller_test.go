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

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/util/retry"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
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

	if n.Spec.ProviderID != want.providerID {
		s.Errorf("node %s: providerID %q, want %q", n.Name, n.Spec.ProviderID, want.providerID)
	}

	if labels := ourLabels(n); !maps.Equal(labels, want.labels) {
		s.Errorf("node %s: labels %v, want %v", n.Name, labels, want.labels)
	}

	if !slices.Equal(n.Status.Addresses, want.addresses) {
		s.Errorf("node %s: addresses %v, want %v", n.Name, n.Status.Addresses, want.addresses)
	}
}

// requireAtomicInitialization fails if a version of the Node lacks the uninitialized taint but does not have the
// expected state.
func (s suite) requireAtomicInitialization(versions []*corev1.Node, want nodeState) {
	s.Helper()

	for _, n := range versions {
		if !tainted(n) {
			s.requireState(n, want)
		}

		if tainted(n) && n.Spec.ProviderID != "" {
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
			m := s.machine(test.spec)

			test.labels[nodespec.LabelPlatform] = test.name
			test.labels[nodespec.LabelClusterName] = s.talos.Name()

			if test.spec.Platform.Spot {
				test.labels[nodespec.LabelLifecycle] = "spot"
			}

			want := nodeState{providerID: test.providerID, labels: test.labels, addresses: addressList(m, test.external, test.names)}
			until := s.history(m.Nodename())

			s.register(nodeOf(m))
			n := s.awaitInitialized(m.Nodename())
			s.requireState(n, want)
			s.requireAtomicInitialization(until(n.ResourceVersion), want)
			s.awaitEvent(m.Nodename(), node.ReasonInitialized)
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

func TestController_DualStackNodeIPs(t *testing.T) {
	s := parallel(t)
	second := netip.MustParseAddr("fd00::77")
	m := s.machine(talostest.MachineSpec{
		Nodename: "dual-stack", Platform: platform("aws", "dual-stack"),
		Addresses: []talostest.Address{{Link: "eth1", Prefix: netip.PrefixFrom(second, 64)}},
	})
	s.register(kube.NodeSpec{Name: m.Nodename(), NodeIPs: []netip.Addr{m.Address(), second}})

	n := s.awaitInitialized(m.Nodename())
	if got, want := addressesOf(n, corev1.NodeInternalIP), []string{m.Address().String(), second.String()}; !slices.Equal(got, want) {
		t.Errorf("internal addresses %v, want %v", got, want)
	}
}

func TestController_WaitsForMetadata(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "late", Platform: platform("aws", "late"), PlatformPending: true})

	s.awaitEvent("late", node.ReasonMetadataPending)
	s.touch("late", 20)
	s.require(m.SetHostname(s.Context(), "late", "example.com"))
	s.waitForIdle()
	s.requireUntouched("late")

	if !tainted(s.get("late")) {
		t.Error("Node initialized before its machine had metadata")
	}

	s.require(m.ResolvePlatform(s.Context()))

	if n := s.awaitInitialized("late"); n.Spec.ProviderID != "talos://aws/late" {
		t.Errorf("providerID %q", n.Spec.ProviderID)
	}

	s.awaitEvent("late", node.ReasonInitialized)
	s.requireOneEvent("late", node.ReasonMetadataPending)
}

// A machine lacks metadata for a moment after a reboot.
func TestController_KeepsNodeWhileMetadataIsMissing(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "moment", Platform: platform("aws", "moment")})
	before := s.awaitInitialized("moment")

	s.require(m.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) {
		*spec = runtime.PlatformMetadataSpec{Platform: "aws"}
	}))
	s.eventually("inventory lacks metadata", func() bool {
		return s.inventory.Get("moment").Machine.Platform.InstanceID == ""
	})
	s.waitForIdle()

	if after := s.get("moment"); after.ResourceVersion != before.ResourceVersion {
		t.Errorf("Node was written: %s", describe(after))
	}

	if found := s.events("moment", node.ReasonMetadataPending); len(found) > 0 {
		t.Errorf("Events on an initialized Node: %s", messages(found))
	}
}

// A kubelet with hostname-override registers a Node whose name is not the machine's nodename.
func TestController_ExplainsIdentityMismatch(t *testing.T) {
	for name, hasNode := range map[string]bool{"override": false, "moved-address": true} {
		t.Run(name, func(t *testing.T) {
			s := parallel(t)
			m := s.machine(talostest.MachineSpec{Nodename: name + "-machine", Platform: platform("aws", name)})

			if hasNode {
				s.register(nodeOf(m))
				s.awaitInitialized(m.Nodename())
			}

			s.register(kube.NodeSpec{Name: name + "-kubelet", NodeIPs: []netip.Addr{m.Address()}})

			message := s.awaitEvent(name+"-kubelet", node.ReasonIdentityMismatch).Message
			if !strings.Contains(message, m.Nodename()) || strings.Contains(message, "hostname-override") == hasNode {
				t.Errorf("got %q", message)
			}
		})
	}
}

func TestController_RefusesIdentityOfAnotherMachine(t *testing.T) {
	s := parallel(t)
	victim := s.machine(talostest.MachineSpec{Nodename: "victim", Platform: platform("aws", "victim")})

	// The kubelet writes the annotation and the addresses that lead to the machine.
	s.register(kube.NodeSpec{Name: "impostor", NodeIPs: []netip.Addr{victim.Address()}})

	s.awaitEvent("impostor", node.ReasonIdentityMismatch)
	s.touch("impostor", 20)
	s.waitForIdle()

	s.requireUntouched("impostor")
	s.requireOneEvent("impostor", node.ReasonIdentityMismatch)

	if !tainted(s.get("impostor")) {
		t.Error("Node initialized")
	}
}

// The kubelet reports the address of another machine after initialization.
func TestController_KeepsNodeThatPointsToAnotherMachine(t *testing.T) {
	s := parallel(t)
	victim := s.machine(talostest.MachineSpec{Nodename: "turned-victim", Platform: identified("hcloud", "hcloud://turned-victim")})
	s.join(talostest.MachineSpec{Nodename: "turned", Platform: identified("hcloud", "hcloud://turned")})
	before := s.awaitInitialized("turned")

	s.patch("turned", "kubelet", fmt.Sprintf(`{"metadata":{"annotations":{"alpha.kubernetes.io/provided-node-ip":%q}}}`, victim.Address()))
	s.waitForIdle()

	// status.addresses still leads to the Node's machine, which does not have the reported node IP.
	after := s.get("turned")
	s.requireState(after, nodeState{before.Spec.ProviderID, ourLabels(before), before.Status.Addresses})
}

func TestController_IgnoresNodesOfOtherOperatingSystems(t *testing.T) {
	s := parallel(t)
	m := s.machine(talostest.MachineSpec{Nodename: "foreign", Platform: platform("aws", "foreign")})

	// Both have the address of a Talos machine, and one has its name.
	s.register(kube.NodeSpec{Name: "foreign", NodeIPs: []netip.Addr{m.Address()}, OSImage: "Ubuntu 24.04.3 LTS"})
	s.register(kube.NodeSpec{Name: "foreign-ready", NodeIPs: []netip.Addr{m.Address()}, OSImage: "Ubuntu 24.04.3 LTS", WithoutCloudProvider: true})
	s.waitForIdle()

	for _, name := range []string{"foreign", "foreign-ready"} {
		s.requireUntouched(name)

		if found := s.events(name, ""); len(found) > 0 {
			t.Errorf("Events for node %s: %s", name, messages(found))
		}
	}

	if !tainted(s.get("foreign")) {
		t.Error("Node of another operating system was initialized")
	}

	if calls := m.Calls(); len(calls) > 0 {
		t.Errorf("machine at the address of a Node of another operating system was called: %v", calls)
	}
}

func TestController_MachineUnreachableAndReachableAgain(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "unreachable", Platform: platform("aws", "unreachable")})
	s.awaitInitialized("unreachable")

	s.require(m.Stop(s.Context()))
	s.awaitEvent("unreachable", node.ReasonUnreachable)
	s.touch("unreachable", 20)
	s.waitForIdle()

	n := s.get("unreachable")
	if n.Labels[corev1.LabelTopologyZone] != "aws-zone" || n.Spec.ProviderID != "talos://aws/unreachable" || len(n.Status.Addresses) != 2 {
		t.Errorf("Node of an unreachable machine changed: %s", describe(n))
	}

	s.require(m.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType = "resized" }))
	m.Start()
	s.await("unreachable", "of its new type", ofType("resized"))
	s.waitForIdle()
	s.requireOneEvent("unreachable", node.ReasonUnreachable)
}

func inZone(zone string) func(*corev1.Node) bool { return labeled(corev1.LabelTopologyZone, zone) }

func ofType(instanceType string) func(*corev1.Node) bool {
	return labeled(corev1.LabelInstanceTypeStable, instanceType)
}

func labeled(key, value string) func(*corev1.Node) bool {
	return func(n *corev1.Node) bool { return n.Labels[key] == value }
}

func TestController_DoesNotInitializeFromStaleView(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "stale-view", Platform: platform("aws", "stale-view"), PlatformPending: true})

	s.awaitEvent("stale-view", node.ReasonMetadataPending)
	s.require(m.Stop(s.Context()))
	s.awaitEvent("stale-view", node.ReasonUnreachable)
	s.require(m.ResolvePlatform(s.Context()))
	s.waitForIdle()
	s.requireUntouched("stale-view")

	m.Start()
	s.awaitInitialized("stale-view")
}

// competingTaint is the taint of the competitor's n-th write.
func competingTaint(n int) corev1.Taint {
	return corev1.Taint{Key: fmt.Sprintf("competing/%d", n), Effect: corev1.TaintEffectPreferNoSchedule}
}

// compete updates the Node as fast as it can, and adds a taint in every tenth update. It runs in a goroutine of its
// own, so it returns errors.
func (s suite) compete(ctx context.Context, nodename string, times int) error {
	nodes := s.client.CoreV1().Nodes()

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
	m := s.join(talostest.MachineSpec{Nodename: "contested", Platform: platform("aws", "contested"), PlatformPending: true})
	s.awaitEvent("contested", node.ReasonMetadataPending)

	const writes = 200

	competitor := make(chan error, 1)

	go func() { competitor <- s.compete(s.Context(), "contested", writes) }()

	s.await("contested", "written by the competitor", func(n *corev1.Node) bool { return n.Labels["competing/label"] != "" })
	s.require(m.ResolvePlatform(s.Context()))
	s.require(<-competitor)

	s.awaitInitialized("contested")
	n := s.get("contested")
	want := topology("aws-region", "aws-zone", "aws-type")
	want[nodespec.LabelPlatform], want[nodespec.LabelClusterName] = "aws", s.talos.Name()
	s.requireState(n, nodeState{"talos://aws/contested", want, addressList(m, nil, nil)})

	for i := 0; i < writes; i += 10 {
		if !slices.Contains(n.Spec.Taints, competingTaint(i)) {
			t.Errorf("taint %s of the competitor is missing", competingTaint(i).Key)
		}
	}

	if n.Labels["competing/label"] != fmt.Sprint(writes-1) {
		t.Errorf("label of the competitor is %q", n.Labels["competing/label"])
	}
}

// applyAs applies labels as `kubectl apply --server-side --force-conflicts` does.
func (s suite) applyAs(manager, nodename string, labels map[string]string) {
	s.Helper()

	config := corev1ac.Node(nodename).WithLabels(labels)

	s.require(retry.RetryOnConflict(conflictBackoff, func() error {
		_, err := s.client.CoreV1().Nodes().Apply(s.Context(), config, metav1.ApplyOptions{FieldManager: manager, Force: true})

		return err
	}))
}

func TestController_LabelOwnedByAnotherManagerBeforeInitialization(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "owned-before", Platform: platform("aws", "owned-before"), PlatformPending: true})
	s.applyAs("kubectl", "owned-before", map[string]string{corev1.LabelTopologyZone: "theirs"})

	s.require(m.ResolvePlatform(s.Context()))

	n := s.awaitInitialized("owned-before")
	want := topology("aws-region", "aws-zone", "aws-type")
	want[corev1.LabelTopologyZone], want[corev1.LabelFailureDomainBetaZone] = "theirs", "theirs"
	want[nodespec.LabelPlatform], want[nodespec.LabelClusterName] = "aws", s.talos.Name()
	s.requireState(n, nodeState{"talos://aws/owned-before", want, addressList(m, nil, nil)})

	s.awaitEvent("owned-before", node.ReasonOwnershipConflict)
	s.touch("owned-before", 20)
	s.waitForIdle()
	s.requireOneEvent("owned-before", node.ReasonOwnershipConflict)

	s.applyAs("kubectl", "owned-before", nil)
	s.await("owned-before", "labeled with our zone", inZone("aws-zone"))
}

func TestController_LabelTakenOverByAnotherManager(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "owned-after", Platform: platform("aws", "owned-after")})
	s.awaitInitialized("owned-after")

	s.patch("owned-after", "kubectl-label", fmt.Sprintf(`{"metadata":{"labels":{%q:"theirs"}}}`, corev1.LabelInstanceTypeStable))
	s.awaitEvent("owned-after", node.ReasonOwnershipConflict)

	// Other labels are still updated.
	s.require(m.UpdatePlatform(s.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType, spec.Spot = "next-type", true }))

	n := s.await("owned-after", "a spot instance", labeled(nodespec.LabelLifecycle, "spot"))
	if n.Labels[corev1.LabelInstanceTypeStable] != "theirs" || n.Labels[corev1.LabelInstanceType] != "next-type" {
		t.Errorf("labels %v", ourLabels(n))
	}

	s.waitForIdle()
	s.requireOneEvent("owned-after", node.ReasonOwnershipConflict)

	s.patch("owned-after", "kubectl-label", fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, corev1.LabelInstanceTypeStable))
	s.await("owned-after", "labeled with our type again", ofType("next-type"))
}

// Talos reverts changes by other clients to labels in machine.nodeLabels.
func TestController_DoesNotWriteLabelsOwnedByTalos(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "talos-owned", Platform: platform("aws", "talos-owned"), PlatformPending: true})

	owned := []string{corev1.LabelInstanceTypeStable, corev1.LabelTopologyRegion, corev1.LabelTopologyZone}
	annotation, err := json.Marshal(owned)
	s.require(err)

	// A different value, the same value and no value.
	s.patch("talos-owned", "machined", fmt.Sprintf(`{"metadata":{"annotations":{"talos.dev/owned-labels":%q},"labels":{%q:"talos-zone",%q:"aws-region"}}}`,
		annotation, corev1.LabelTopologyZone, corev1.LabelTopologyRegion))
	s.require(m.ResolvePlatform(s.Context()))

	n := s.awaitInitialized("talos-owned")
	if n.Labels[corev1.LabelTopologyZone] != "talos-zone" {
		t.Errorf("the zone is %q", n.Labels[corev1.LabelTopologyZone])
	}

	if value, ok := n.Labels[corev1.LabelInstanceTypeStable]; ok {
		t.Errorf("the instance type is %q", value)
	}

	applied, err := corev1ac.ExtractNode(n, node.FieldManager)
	s.require(err)

	for _, key := range owned {
		if _, ours := applied.Labels[key]; ours {
			t.Errorf("label %s was applied", key)
		}
	}
}

func TestController_FollowsChangesImmediately(t *testing.T) {
	// Not parallel, because it measures latency.
	s := suite{t, &shared}
	m := s.join(talostest.MachineSpec{
		Nodename: "changing", Platform: platform("nocloud", "changing"),
		Addresses: []talostest.Address{{Link: "eth1", Prefix: netip.MustParsePrefix("203.0.112.1/24")}},
	})
	s.awaitInitialized("changing")

	public := netip.MustParsePrefix("203.0.112.20/24")
	metadata := func(change func(*runtime.PlatformMetadataSpec)) func(context.Context) error {
		return func(ctx context.Context) error { return m.UpdatePlatform(ctx, change) }
	}
	has := func(kind corev1.NodeAddressType, list ...string) func(*corev1.Node) bool {
		return func(n *corev1.Node) bool { return slices.Equal(addressesOf(n, kind), list) }
	}
	absent := func(keys ...string) func(*corev1.Node) bool {
		return func(n *corev1.Node) bool {
			return !slices.ContainsFunc(keys, func(key string) bool {
				_, ok := n.Labels[key]

				return ok
			})
		}
	}

	var took []time.Duration

	for _, change := range []struct {
		name   string
		do     func(context.Context) error
		follow func(*corev1.Node) bool
	}{
		{"instance type", metadata(func(p *runtime.PlatformMetadataSpec) { p.InstanceType = "t2" }), ofType("t2")},
		{"host name", metadata(func(p *runtime.PlatformMetadataSpec) { p.Hostname = "changing.example.com" }), has(corev1.NodeInternalDNS, "changing.example.com")},
		{"spot", metadata(func(p *runtime.PlatformMetadataSpec) { p.Spot = true }), labeled(nodespec.LabelLifecycle, "spot")},
		{"no longer spot", metadata(func(p *runtime.PlatformMetadataSpec) { p.Spot = false }), absent(nodespec.LabelLifecycle)},
		{
			"no longer of a type", metadata(func(p *runtime.PlatformMetadataSpec) { p.InstanceType = "" }),
			absent(corev1.LabelInstanceTypeStable, corev1.LabelInstanceType),
		},
		{
			"public address added", func(ctx context.Context) error { return m.AddAddress(ctx, "eth1", public) },
			has(corev1.NodeExternalIP, "203.0.112.1", "203.0.112.20"),
		},
		{
			"public address removed", func(ctx context.Context) error { return m.RemoveAddress(ctx, "eth1", public) },
			has(corev1.NodeExternalIP, "203.0.112.1"),
		},
	} {
		started := time.Now()

		s.require(change.do(t.Context()))
		s.await("changing", "updated after change: "+change.name, change.follow)

		took = append(took, time.Since(started))
		t.Logf("%s: %s", change.name, time.Since(started))
	}

	// Some changes may be slow on a busy machine, but not all.
	if quickest := slices.Min(took); quickest > time.Second {
		t.Errorf("every change took longer than a second: %v", took)
	}
}

func TestController_DoesNotWriteUnchangedNodes(t *testing.T) {
	const count = 20

	s := parallel(t)

	var machines []*talostest.Machine

	for i := range count {
		machines = append(machines, s.join(talostest.MachineSpec{
			Nodename: fmt.Sprintf("idle-%d", i), Platform: identified("hcloud", fmt.Sprintf("hcloud://idle-%d", i)),
		}))
	}

	for _, m := range machines {
		s.awaitInitialized(m.Nodename())
	}

	s.waitForIdle()

	before := map[string]int{}
	for _, m := range machines {
		before[m.Nodename()] = s.transport.writesTo(m.Nodename())
	}

	pod := netip.MustParsePrefix("10.244.3.9/32")

	for round := range 3 {
		for _, m := range machines {
			s.require(m.AddAddress(t.Context(), fmt.Sprintf("lxc%d", round), pod))
		}
	}

	for _, m := range machines {
		s.eventually("inventory has the links of pods", func() bool {
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
		if after := s.transport.writesTo(nodename); after != n || n == 0 {
			t.Errorf("node %s was written %d times at first, and %d times after irrelevant changes", nodename, n, after)
		}
	}
}

func TestController_RecoversFromBrokenWatches(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(context.Context, *talostest.Machine) error
	}{
		{"streams", func(_ context.Context, m *talostest.Machine) error {
			m.BreakStreams()

			return nil
		}},
		{"connections", func(_ context.Context, m *talostest.Machine) error {
			m.BreakConnections()

			return nil
		}},
		{"reboot", func(ctx context.Context, m *talostest.Machine) error { return m.Reboot(ctx) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := parallel(t)
			name := "breaking-" + test.name
			m := s.join(talostest.MachineSpec{Nodename: name, Platform: platform("aws", name)})
			before := s.awaitInitialized(name)
			until := s.history(name)

			for round := range 3 {
				s.require(test.do(t.Context(), m))

				instanceType := fmt.Sprintf("type-%d", round)
				s.require(m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType = instanceType }))

				for _, n := range until(s.await(name, "of "+instanceType, ofType(instanceType)).ResourceVersion) {
					if n.Labels[corev1.LabelInstanceTypeStable] == "" || !slices.Equal(n.Status.Addresses, before.Status.Addresses) {
						t.Errorf("Node was wrong during recovery: %s", describe(n))
					}
				}
			}
		})
	}
}

func TestController_RejectsExpiredMachineCertificate(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "expired", Platform: platform("aws", "expired")})
	s.awaitInitialized("expired")

	m.ExpireCertificate()
	m.BreakConnections()
	s.awaitEvent("expired", node.ReasonUnreachable)

	s.require(m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.InstanceType = "unseen" }))
	s.waitForIdle()

	if n := s.get("expired"); n.Labels[corev1.LabelInstanceTypeStable] != "aws-type" {
		t.Errorf("Node updated from a machine with an expired certificate: %s", describe(n))
	}

	m.RenewCertificate()
	s.await("expired", "updated", ofType("unseen"))
}

func TestController_ReportsProviderIDInUse(t *testing.T) {
	s := parallel(t)
	spec := talostest.MachineSpec{Nodename: "twin-a", Platform: identified("hcloud", "hcloud://twins")}
	s.join(spec)
	s.awaitInitialized("twin-a")

	spec.Nodename = "twin-b"
	s.join(spec)
	s.awaitEvent("twin-b", node.ReasonProviderIDInUse)
	s.touch("twin-b", 20)
	s.waitForIdle()
	s.requireUntouched("twin-b")
	s.requireOneEvent("twin-b", node.ReasonProviderIDInUse)

	if !tainted(s.get("twin-b")) {
		t.Error("second Node initialized")
	}

	// Deleting the first Node releases the providerID.
	s.remove("twin-a")
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
		s.join(talostest.MachineSpec{Nodename: fmt.Sprintf("clone-%d", i), Platform: identified("hcloud", "hcloud://clones")})
		uuids = append(uuids, s.join(talostest.MachineSpec{
			Nodename: fmt.Sprintf("board-%d", i), SystemInformation: &hardware.SystemInformationSpec{UUID: uuid},
		}))
	}

	ids := map[string]string{}

	for _, m := range uuids {
		n := s.awaitInitialized(m.Nodename())

		if other, taken := ids[n.Spec.ProviderID]; taken {
			t.Errorf("nodes %s and %s both have providerID %s", other, n.Name, n.Spec.ProviderID)
		}

		if id := n.Spec.ProviderID; id != "talos://metal/"+uuid && id != "talos://metal/"+m.Address().String() {
			t.Errorf("node %s has providerID %s", n.Name, id)
		}

		ids[n.Spec.ProviderID] = n.Name
	}

	assigned := 0

	for i := range count {
		name := fmt.Sprintf("clone-%d", i)

		s.eventually("node "+name+" is initialized or reported", func() bool {
			return initialized(s.get(name)) || len(s.events(name, node.ReasonProviderIDInUse)) > 0
		})

		if s.get(name).Spec.ProviderID != "" {
			assigned++
		}
	}

	if assigned != 1 {
		t.Errorf("%d Nodes of one instance have a providerID, want one", assigned)
	}
}

func TestController_InitializesRecreatedNode(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "again", Platform: platform("aws", "again")})
	first := s.awaitInitialized("again")

	for range 3 {
		s.remove("again")
		s.register(nodeOf(m))

		n := s.await("again", "initialized after recreation", func(n *corev1.Node) bool { return initialized(n) && n.UID != first.UID })
		s.requireState(n, nodeState{first.Spec.ProviderID, ourLabels(first), first.Status.Addresses})
		first = n
	}
}

// What another client changes during an initialization is corrected before the uninitialized taint is removed.
func TestController_InitializesCompleteNodesOnly(t *testing.T) {
	const otherAddresses = `{"status":{"addresses":[{"type":"Hostname","address":"other"}]}}`

	patch := func(s suite, name, patch string, subresources ...string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := s.client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: "kubectl"}, subresources...)

			return err
		}
	}

	for _, test := range []struct {
		name     string
		overtake func(s suite, name string) (wait func())
	}{
		// The kubelet has registered the Node with the desired addresses.
		{"addresses", func(s suite, name string) func() {
			return s.overtake(name, patch(s, name, otherAddresses, "status"))
		}},
		// The label is removed between the first two writes.
		{"label", func(s suite, name string) func() {
			s.require(patch(s, name, otherAddresses, "status")(s.Context()))

			second := make(chan func(), 1)
			first := s.overtake(name, func(context.Context) error {
				second <- s.overtake(name, patch(s, name, fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, corev1.LabelTopologyZone)))

				return nil
			})

			return func() { first(); (<-second)() }
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := parallel(t)
			name := "overtaken-" + test.name
			m := s.join(talostest.MachineSpec{Nodename: name, Platform: platform("aws", name), PlatformPending: true})
			s.awaitEvent(name, node.ReasonMetadataPending)

			wait := test.overtake(s, name)
			seen := s.get(name)
			s.require(m.ResolvePlatform(t.Context()))
			wait()

			n := s.awaitSince(seen, "without uninitialized taint", func(n *corev1.Node) bool { return !tainted(n) })
			if !slices.Equal(n.Status.Addresses, addressList(m, nil, nil)) || n.Labels[corev1.LabelTopologyZone] != "aws-zone" {
				t.Errorf("initialized incompletely: %s", describe(n))
			}
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

		m := s.machine(talostest.MachineSpec{Nodename: name, Platform: identified("hcloud", "hcloud://"+name)})
		s.register(nodeOf(m))

		// Delete at different times: some Nodes before the first write, others after.
		if i%2 == 0 {
			s.await(name, "written", isWritten)
		}

		s.remove(name)
	}

	s.waitForIdle()

	for _, name := range names {
		if n, err := s.client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("node %s exists again: %v, %s", name, err, describe(n))
		}

		s.eventually("inventory has no machine for "+name, func() bool { return s.inventory.Get(name).Condition == inventory.Unknown })
	}
}

// Renaming a machine leaves a Node behind that has the providerID of the new one.
func TestController_InitializesRenamedMachineWithoutProviderID(t *testing.T) {
	s := parallel(t)

	spec := talostest.MachineSpec{Nodename: "old-name", Platform: identified("hcloud", "hcloud://renamed")}
	spec.Platform.InternalDNS = "renamed.example.org"

	m := s.machine(spec)
	s.require(m.SetIdentity(t.Context(), "renamed", ""))
	s.register(nodeOf(m))
	s.awaitInitialized("old-name")
	s.require(m.SetHostname(t.Context(), "new-name", ""))
	s.require(m.SetNodename(t.Context(), "new-name"))
	s.awaitEvent("old-name", node.ReasonIdentityMismatch)
	s.register(kube.NodeSpec{Name: "new-name", NodeIPs: []netip.Addr{m.Address()}})

	n := s.await("new-name", "schedulable", func(n *corev1.Node) bool { return !tainted(n) })
	if n.Spec.ProviderID != "" || n.Labels[nodespec.LabelPlatform] != "hcloud" {
		t.Errorf("got %s", describe(n))
	}

	s.await("new-name", "listed with the name that its former Node lists", func(n *corev1.Node) bool {
		return slices.Contains(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalDNS, Address: "renamed.example.org"})
	})

	if event := s.awaitEvent("new-name", node.ReasonRenamed); !strings.Contains(event.Message, "old-name") {
		t.Errorf("got %q", event.Message)
	}

	s.remove("old-name")

	if n := s.awaitInitialized("new-name"); n.Spec.ProviderID != "hcloud://renamed" {
		t.Errorf("providerID %q", n.Spec.ProviderID)
	}
}

// The machine responds under its new name before it is known that it does not respond under its former one.
func TestController_InitializesRenamedMachineAtAnotherAddress(t *testing.T) {
	s := parallel(t)
	spec := talostest.MachineSpec{Nodename: "moved-old", Platform: identified("hcloud", "hcloud://moved")}
	m := s.machine(spec)
	s.require(m.SetIdentity(t.Context(), "moved", ""))
	s.register(nodeOf(m))
	s.awaitInitialized("moved-old")
	s.require(m.Stop(t.Context()))

	spec.Nodename = "moved-new"
	other := s.machine(spec)
	s.require(other.SetIdentity(t.Context(), "moved", ""))
	s.eventually("the former name does not respond", func() bool { return s.inventory.Get("moved-old").Condition == inventory.Unreachable })
	s.register(nodeOf(other))
	s.await("moved-new", "schedulable", func(n *corev1.Node) bool { return !tainted(n) })
	s.awaitEvent("moved-new", node.ReasonRenamed)
}

func TestController_ReportsProviderIDOfAnotherInstance(t *testing.T) {
	s := parallel(t)
	m := s.join(talostest.MachineSpec{Nodename: "re-created", Platform: identified("hcloud", "hcloud://before")})
	s.awaitInitialized("re-created")

	s.require(m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { *spec = identified("hcloud", "hcloud://after") }))

	if event := s.awaitEvent("re-created", node.ReasonProviderIDMismatch); !strings.Contains(event.Message, "hcloud://before") {
		t.Errorf("got %q", event.Message)
	}

	if n := s.get("re-created"); n.Spec.ProviderID != "hcloud://before" {
		t.Errorf("got %s", describe(n))
	}
}

// The upstream Talos CCM and the other fallback name the same machine in another way.
func TestController_AcceptsOtherFormOfProviderID(t *testing.T) {
	s := parallel(t)
	m := s.machine(talostest.MachineSpec{
		Nodename: "by-address", SystemInformation: &hardware.SystemInformationSpec{UUID: "0c34ad2d-f29e-136f-e25b-fdc0ce3b6b3c"},
	})
	s.register(nodeOf(m))
	s.patch("by-address", "upstream", fmt.Sprintf(`{"spec":{"providerID":"talos://metal/%s"}}`, m.Address()))
	s.awaitInitialized("by-address")
	s.waitForIdle()

	if got := s.events("by-address", node.ReasonProviderIDMismatch); len(got) > 0 {
		t.Errorf("got %s", messages(got))
	}
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
	lists := func(list ...string) func(*corev1.Node) bool {
		return func(n *corev1.Node) bool { return slices.Equal(addressesOf(n, corev1.NodeInternalDNS), list) }
	}

	s.join(named("names-1"))
	s.awaitInitialized("names-1")
	s.await("names-1", "lists its name", lists(name))

	second := s.join(named("names-2"))
	s.awaitInitialized("names-2")

	for nodename, other := range map[string]string{"names-1": "names-2", "names-2": "names-1"} {
		s.await(nodename, "without the shared name", lists())

		if message := s.awaitEvent(nodename, node.ReasonInvalidValue).Message; !strings.Contains(message, name) || !strings.Contains(message, other) {
			t.Errorf("Event on %s does not name %s and %s: %s", nodename, name, other, message)
		}
	}

	s.require(second.UpdatePlatform(t.Context(), func(p *runtime.PlatformMetadataSpec) { p.Hostname = "own.example.org" }))
	s.await("names-1", "lists its name again", lists(name))
	s.await("names-2", "lists its new name", lists("own.example.org"))
}

// A version that listed the name wrote the Node before.
func TestController_RemovesNamesThatCannotBeApproved(t *testing.T) {
	s := parallel(t)

	metadata := platform("nocloud", "names-3")
	metadata.Hostname = "localhost.localdomain"

	m := s.machine(talostest.MachineSpec{Nodename: "names-3", Platform: metadata})
	s.register(nodeOf(m))
	s.awaitInitialized("names-3")

	addresses, err := json.Marshal(append(s.get("names-3").Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalDNS, Address: metadata.Hostname}))
	s.require(err)

	patch := fmt.Appendf(nil, `{"status":{"addresses":%s}}`, addresses)
	written, err := s.client.CoreV1().Nodes().Patch(t.Context(), "names-3", types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	s.require(err)

	s.awaitSince(written, "without the name", func(n *corev1.Node) bool { return len(addressesOf(n, corev1.NodeInternalDNS)) == 0 })
}

// The operator excludes an address with an inverted match in machine.kubelet.nodeIP.validSubnets.
func TestController_OmitsExcludedAddress(t *testing.T) {
	s := parallel(t)
	m := s.machine(talostest.MachineSpec{
		Nodename: "excluding", Platform: platform("nocloud", "excluding"),
		Addresses: []talostest.Address{
			{Link: "eth1", Prefix: netip.MustParsePrefix("203.0.112.30/24")}, {Link: "eth1", Prefix: netip.MustParsePrefix("203.0.112.31/24")},
		},
	})

	s.require(safe.StateModify(t.Context(), m.State(), k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID), func(config *k8s.NodeIPConfig) error {
		config.TypedSpec().ValidSubnets = []string{"0.0.0.0/0", "!203.0.112.31/32"}

		return nil
	}))
	s.register(nodeOf(m))

	if got := addressesOf(s.awaitInitialized("excluding"), corev1.NodeExternalIP); !slices.Equal(got, []string{"203.0.112.30"}) {
		t.Errorf("external addresses: %v", got)
	}
}
