package node_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// atomicOptions combine the rules of all running tests.
type atomicOptions struct {
	mu      sync.Mutex
	rules   map[string][]rules.Rule
	options nodespec.Options
}

func (o *atomicOptions) get() nodespec.Options {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.options
}

func (o *atomicOptions) set(test string, list []rules.Rule) field.ErrorList {
	o.mu.Lock()
	defer o.mu.Unlock()

	if o.rules == nil {
		o.rules = map[string][]rules.Rule{}
	}

	o.rules[test] = list

	var all []rules.Rule
	for _, name := range slices.Sorted(maps.Keys(o.rules)) {
		all = append(all, o.rules[name]...)
	}

	compiled, errs := rules.Compile(all, nil, nil)
	if len(errs) == 0 {
		o.options.Rules = compiled
	}

	return errs
}

func (o *atomicOptions) follow(topology bool) {
	o.mu.Lock()
	defer o.mu.Unlock()

	o.options.FollowTopology = topology
}

// exclude makes a Node unmanaged.
func (o *atomicOptions) exclude(nodename string) error {
	o.mu.Lock()
	defer o.mu.Unlock()

	selector, errs := rules.CompileSelector([]rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "nodename", Operator: rules.NotIn, Values: []string{nodename}}}}}, nil)
	for _, err := range errs {
		return err
	}

	o.options.Selector = selector

	return nil
}

// rules replaces the rules of this test. They apply to the Node only.
func (s suite) rules(nodename string, list ...rules.Rule) {
	s.Helper()

	for i := range list {
		list[i].NodeSelector = []rules.SelectorTerm{{MatchExpressions: []rules.Expression{{Key: "nodename", Operator: rules.In, Values: []string{nodename}}}}}
	}

	require.Empty(s, s.options.set(s.Name(), list))

	s.resync()
}

const storageTaint = "example.com/storage"

func storage(value string) corev1.Taint {
	return corev1.Taint{Key: storageTaint, Value: value, Effect: corev1.TaintEffectNoSchedule}
}

func taintsNamed(n *corev1.Node, key string) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(t corev1.Taint) bool { return t.Key != key })
}

// hasRecord reports whether an enforced taint of the Node is recorded.
func hasRecord(n *corev1.Node) bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(n.Labels)), func(key string) bool { return strings.Contains(key, "node-restriction") })
}

func hasTaint(taint corev1.Taint) func(*corev1.Node, *assert.Assertions) {
	return func(n *corev1.Node, asrt *assert.Assertions) { asrt.Contains(n.Spec.Taints, taint) }
}

func aws(nodename string) talostest.MachineSpec {
	meta := platform("aws", "i-"+nodename)
	meta.Region, meta.Zone = "eu", "eu-1a"

	return talostest.MachineSpec{Nodename: nodename, Platform: meta}
}

func TestController_UpdatesAndRemovesLabelsAndAnnotationsOfRules(t *testing.T) {
	s := parallel(t)
	rule := func(value string) rules.Rule {
		return rules.Rule{Labels: map[string]string{"example.com/site": value}, Annotations: map[string]string{"example.com/note": value + " of {{ .Region }}"}}
	}

	s.initialize(aws("rules-follow"))
	s.PatchNode("rules-follow", "kubectl-label", `{"metadata":{"labels":{"team":"blue"}}}`)

	for _, value := range []string{"paris", "lyon"} {
		s.rules("rules-follow", rule(value))
		s.AwaitNode("rules-follow", func(n *corev1.Node, asrt *assert.Assertions) {
			asrt.Equal(value, n.Labels["example.com/site"])
			asrt.Equal(value+" of eu", n.Annotations["example.com/note"])
		})
	}

	s.rules("rules-follow")

	n := s.AwaitNode("rules-follow", func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.NotContains(n.Labels, "example.com/site")
		asrt.NotContains(n.Annotations, "example.com/note")
	})
	assert.Equal(t, "blue", n.Labels["team"])
	assert.Equal(t, "eu-1a", n.Labels[corev1.LabelTopologyZone])
}

func TestController_FollowsTagsWithinPrefix(t *testing.T) {
	s := parallel(t)
	fromTags := func(match, prefix string) rules.Rule {
		return rules.Rule{Name: "from " + match, LabelsFromTags: &rules.LabelsFromTags{Match: match, Prefix: prefix}}
	}

	s.rules("tags-follow", fromTags("^team/", "example.com/"), fromTags("^raw/", ""))

	spec := aws("tags-follow")
	spec.Platform.Tags = map[string]string{
		"team/owner": "web", "team/tier": "front", "team/note": "not a label", "raw/node-restriction.kubernetes.io/tier": "trusted", "raw/kubernetes.io/os": "plan9", "other": "x",
	}
	m := s.initialize(spec)
	s.PatchNode("tags-follow", "kubectl-label", `{"metadata":{"labels":{"example.com/by-hand":"kept"}}}`)

	ofCompany := func(n *corev1.Node) map[string]string {
		labels := maps.Clone(n.Labels)
		maps.DeleteFunc(labels, func(key, _ string) bool { return !strings.HasPrefix(key, "example.com/") })

		return labels
	}

	n := s.AwaitNode("tags-follow", ctest.Labeled("example.com/by-hand", "kept"))
	assert.Equal(t, map[string]string{"example.com/owner": "web", "example.com/tier": "front", "example.com/by-hand": "kept"}, ofCompany(n))
	assert.NotContains(t, n.Labels, "node-restriction.kubernetes.io/tier")
	assert.NotEqual(t, "plan9", n.Labels["kubernetes.io/os"])
	s.AwaitEvent("tags-follow", node.ReasonInvalidValue, `rule "from ^team/": labelsFromTags["team/note"]="not a label" omitted`)
	s.AwaitEvent("tags-follow", node.ReasonInvalidValue, `labelsFromTags["raw/node-restriction.kubernetes.io/tier"]="trusted" omitted`)
	s.AwaitEvent("tags-follow", node.ReasonInvalidValue, `labelsFromTags["raw/kubernetes.io/os"]="plan9" omitted`)

	s.update(m, func(meta *runtime.PlatformMetadataSpec) {
		meta.Tags = map[string]string{"team/tier": "back", "team/site": "lyon"}
	})
	s.AwaitNode("tags-follow", func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Equal(map[string]string{"example.com/site": "lyon", "example.com/tier": "back", "example.com/by-hand": "kept"}, ofCompany(n))
	})

	s.rules("tags-follow")
	s.AwaitNode("tags-follow", func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Equal(map[string]string{"example.com/by-hand": "kept"}, ofCompany(n))
	})
}

// A providerID cannot be changed once it is set, so a rule that fails to compute it must not stop other updates.
func TestController_UpdatesIdentifiedNodesWhoseIdentityRuleFails(t *testing.T) {
	s := parallel(t)
	label := func(value string) rules.Rule { return rules.Rule{Labels: map[string]string{"example.com/site": value}} }
	broken := rules.Rule{Name: "broken", PlatformMetadata: map[string]string{"ProviderID": "{{ .Tags.missing }}"}}

	s.Join(aws("identity-broken"))
	before := s.awaitInitialized("identity-broken")

	s.rules("identity-broken", label("lyon"), broken, rules.Rule{Enforce: true, Taints: map[string]string{storageTaint: "ceph:NoSchedule"}})

	n := s.AwaitNode("identity-broken", func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Equal("lyon", n.Labels["example.com/site"])
		asrt.Contains(n.Spec.Taints, storage("ceph"))
	})
	assert.Equal(t, before.Spec.ProviderID, n.Spec.ProviderID)

	const want = `rule "broken": platformMetadata[ProviderID]="" omitted: it does not identify an instance`
	assert.Equal(t, want, s.AwaitEvent("identity-broken", node.ReasonInvalidValue).Message)
	s.waitForIdle()
	s.assertOneEvent("identity-broken", node.ReasonInvalidValue)
}

func TestController_SetsTaintsOfRulesAtInitialization(t *testing.T) {
	s := parallel(t)
	s.rules("taint-first", rules.Rule{Taints: map[string]string{storageTaint: "{{ .Zone }}:NoSchedule"}})

	until := s.history("taint-first")
	s.Join(aws("taint-first"))
	n := s.awaitInitialized("taint-first")

	for _, version := range until(n.ResourceVersion) {
		if !nodespec.IsUninitialized(version) {
			assert.Contains(t, version.Spec.Taints, storage("eu-1a"))
		}
	}
}

func TestController_DoesNotRestoreTaintsThatAreNotEnforced(t *testing.T) {
	s := parallel(t)
	s.rules("taint-once", rules.Rule{Taints: map[string]string{storageTaint: "ceph:NoSchedule"}})
	s.initialize(aws("taint-once"))

	s.PatchNode("taint-once", "kubectl", `{"spec":{"taints":null}}`)
	s.rules("taint-once", rules.Rule{Taints: map[string]string{storageTaint: "nfs:NoSchedule"}, Labels: map[string]string{"example.com/seen": "true"}})

	n := s.AwaitNode("taint-once", ctest.Labeled("example.com/seen", "true"))
	assert.Empty(t, taintsNamed(n, storageTaint))
}

func TestController_RestoresEnforcedTaintsUntilTheRuleIsRemoved(t *testing.T) {
	s := parallel(t)
	enforced := func(value string) rules.Rule {
		return rules.Rule{Enforce: true, Taints: map[string]string{storageTaint: value + ":NoSchedule"}}
	}

	s.initialize(aws("taint-enforced"))
	s.PatchNode("taint-enforced", "kubectl", `{"spec":{"taints":[{"key":"team","value":"blue","effect":"NoSchedule"}]}}`)

	s.rules("taint-enforced", enforced("ceph"))
	s.AwaitNode("taint-enforced", hasTaint(storage("ceph")))

	removed := s.PatchNode("taint-enforced", "kubectl", `{"spec":{"taints":[{"key":"team","value":"blue","effect":"NoSchedule"}]}}`)
	s.AwaitNodeSince(removed, hasTaint(storage("ceph")))

	s.rules("taint-enforced", enforced("nfs"))
	s.AwaitNode("taint-enforced", hasTaint(storage("nfs")))

	s.rules("taint-enforced")

	n := s.AwaitNode("taint-enforced", func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Empty(taintsNamed(n, storageTaint))
		asrt.False(hasRecord(n), n.Labels)
	})
	assert.Len(t, taintsNamed(n, "team"), 1)
}

func TestController_ReportsConflictingTaint(t *testing.T) {
	s := parallel(t)
	s.initialize(aws("taint-foreign"))
	s.PatchNode("taint-foreign", "kubectl", `{"spec":{"taints":[{"key":"`+storageTaint+`","value":"mine","effect":"NoSchedule"}]}}`)

	s.rules("taint-foreign", rules.Rule{Enforce: true, Taints: map[string]string{storageTaint: "ceph:NoSchedule"}})
	s.AwaitEvent("taint-foreign", node.ReasonOwnershipConflict)

	s.rules("taint-foreign")
	s.waitForIdle()
	s.assertOneEvent("taint-foreign", node.ReasonOwnershipConflict, storageTaint)
	assert.Contains(t, s.Node("taint-foreign").Spec.Taints, storage("mine"))
}

// The controller may receive a rule before the Node that already has its taint.
func TestController_DoesNotRecordTaintThatItHasNotReceived(t *testing.T) {
	const ours = "ceph"

	for _, theirs := range []string{"mine", ours} {
		t.Run("value "+theirs, func(t *testing.T) {
			s := parallel(t)
			name := "taint-unseen-" + theirs

			s.initialize(aws(name))

			wait := s.overtake(name, 1, func() {
				s.PatchNode(name, "kubectl", fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"value":%q,"effect":"NoSchedule"}]}}`, storageTaint, theirs))
			})

			s.rules(name, rules.Rule{Enforce: true, Taints: map[string]string{storageTaint: ours + ":NoSchedule"}, Labels: map[string]string{"example.com/seen": "true"}})
			wait()

			n := s.AwaitNode(name, ctest.Labeled("example.com/seen", "true"))
			assert.False(t, hasRecord(n), "taint of another client was recorded as enforced: %v", n.Labels)

			s.rules(name)
			s.AwaitNode(name, ctest.Labeled("example.com/seen", ""))
			s.waitForIdle()

			assert.Contains(t, s.Node(name).Spec.Taints, storage(theirs))
		})
	}
}

func TestController_OmitsAndReportsInvalidValue(t *testing.T) {
	s := parallel(t)
	s.rules("rules-invalid", rules.Rule{Name: "site", Labels: map[string]string{"example.com/bad": "{{ .Region }} !", "example.com/good": "{{ .Region }}"}})
	s.Join(aws("rules-invalid"))

	n := s.awaitInitialized("rules-invalid")
	assert.NotContains(t, n.Labels, "example.com/bad")
	assert.Equal(t, "eu", n.Labels["example.com/good"])
	s.AwaitEvent("rules-invalid", node.ReasonInvalidValue)
	s.waitForIdle()
	s.assertOneEvent("rules-invalid", node.ReasonInvalidValue, `rule "site"`, "labels[example.com/bad]", `"eu !"`)
}

func TestController_KeepsNodeTaintedWhileRuleCannotSetProviderID(t *testing.T) {
	s := parallel(t)
	rule := rules.Rule{Name: "identity", PlatformMetadata: map[string]string{"ProviderID": "custom:///{{ .Tags.serial }}"}}

	spec := aws("rules-identity")
	s.rules("rules-identity", rule)

	m := s.Join(spec)
	s.AwaitEvent("rules-identity", node.ReasonMetadataPending)
	s.assertUntouched("rules-identity")

	s.update(m, func(meta *runtime.PlatformMetadataSpec) { meta.Tags = map[string]string{"serial": "s-1"} })

	assert.Equal(t, "custom:///s-1", s.awaitInitialized("rules-identity").Spec.ProviderID)
}

func TestController_AwaitsFactsOfIdentityRules(t *testing.T) {
	s := parallel(t)
	s.rules("rules-facts", rules.Rule{Name: "gateway", PlatformMetadata: map[string]string{"ProviderID": `custom:///{{ default "none" (first .Gateways) }}`}})

	spec := aws("rules-facts")
	spec.SystemInformation = &hardware.SystemInformationSpec{Manufacturer: "QEMU"}

	m := s.Machine(spec)
	require.NoError(t, m.SetStage(s.Context(), runtime.MachineStageBooting))
	s.Register(ctest.NodeOf(m))
	s.AwaitEvent("rules-facts", node.ReasonMetadataPending, "reads facts")
	s.assertUntouched("rules-facts")

	require.NoError(t, m.SetStage(s.Context(), runtime.MachineStageRunning))
	assert.Equal(t, "custom:///none", s.awaitInitialized("rules-facts").Spec.ProviderID)
}

// The upstream Talos CCM patches labels, so it owns them by Update.
func TestController_TakesOverLabelsOfUpstreamCCM(t *testing.T) {
	s := parallel(t)
	spec := aws("takeover")
	spec.PlatformPending = true // keeps it uninitialized
	m := s.Join(spec)
	s.AwaitEvent("takeover", node.ReasonMetadataPending)

	config := rest.CopyConfig(s.Kube.Config())
	config.UserAgent = "talos-cloud-controller-manager/v1.12.0 (linux/amd64) kubernetes/$Format/cloud-node-controller"
	upstream, err := kubernetes.NewForConfig(config)
	require.NoError(s, err)

	// Like AddOrUpdateLabelsOnNode of k8s.io/cloud-provider, and the annotations of the upstream Talos CCM.
	_, err = upstream.CoreV1().Nodes().Patch(t.Context(), "takeover", types.StrategicMergePatchType, []byte(`{"metadata":{
		"labels":{"example.com/site":"old","example.com/same":"same","example.com/stray":"left","topology.kubernetes.io/zone":"eu-1a"},
		"annotations":{"example.com/note":"old"}}}`), metav1.PatchOptions{})
	require.NoError(s, err)

	s.rules("takeover", rules.Rule{
		Labels:      map[string]string{"example.com/site": "new", "example.com/same": "same"},
		Annotations: map[string]string{"example.com/note": "new"},
	})
	require.NoError(s, m.ResolvePlatform(t.Context()))

	n := s.AwaitNode("takeover", func(n *corev1.Node, asrt *assert.Assertions) {
		ctest.Initialized(n, asrt)
		asrt.Equal("new", n.Labels["example.com/site"])
		asrt.Equal("new", n.Annotations["example.com/note"])
	})
	assert.Equal(t, "left", n.Labels["example.com/stray"])

	assert.Empty(t, s.Events("takeover", node.ReasonOwnershipConflict))

	s.rules("takeover")
	n = s.AwaitNode("takeover", func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.NotContains(n.Labels, "example.com/site")
		asrt.NotContains(n.Labels, "example.com/same")
		asrt.NotContains(n.Annotations, "example.com/note")
	})

	assert.Equal(t, "eu-1a", n.Labels[corev1.LabelTopologyZone])
}

func TestController_NeverWritesUnmanagedNode(t *testing.T) {
	s := parallel(t)

	require.NoError(s, s.options.exclude("unmanaged"))
	s.Join(aws("unmanaged"))
	s.waitForIdle()
	s.assertUntouched("unmanaged")
}

func TestController_KeepsTopologyUntilLabelIsRemoved(t *testing.T) {
	s := parallel(t)
	m := s.initialize(aws("topology"))

	s.update(m, func(spec *runtime.PlatformMetadataSpec) { spec.Zone, spec.InstanceType = "eu-1b", "larger" })

	s.AwaitEvent("topology", node.ReasonTopologyChanged)
	s.waitForIdle()
	s.assertOneEvent("topology", node.ReasonTopologyChanged, corev1.LabelTopologyZone+`="eu-1a"`, `its machine now sets "eu-1b"`, "nodes.topology: follow")

	s.rules("topology", rules.Rule{Name: "move", PlatformMetadata: map[string]string{"Region": "us"}, Labels: map[string]string{"example.com/seen": "true"}})
	s.AwaitNode("topology", ctest.Labeled("example.com/seen", "true"))
	s.touch("topology", 20)
	s.waitForIdle()

	n := s.Node("topology")
	assert.Equal(t, topology("eu", "eu-1a", "larger"), without(ourLabels(n), nodespec.LabelPlatform, nodespec.LabelClusterName))

	// One for the zone and one for the region.
	found := s.Events("topology", node.ReasonTopologyChanged)
	assert.Len(t, found, 2)
	assert.True(t, found[0].Count == 1 && found[1].Count == 1, ctest.Messages(found))

	s.PatchNode("topology", "kubectl-label", fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, corev1.LabelTopologyZone))
	s.AwaitNode("topology", func(n *corev1.Node, asrt *assert.Assertions) {
		asrt.Equal(topology("eu", "eu-1b", "larger"), without(ourLabels(n), nodespec.LabelPlatform, nodespec.LabelClusterName))
	})

	// The API server would remove labels that are no longer applied.
	s.update(m, func(spec *runtime.PlatformMetadataSpec) { spec.Zone, spec.InstanceType = "", "" })

	n = s.AwaitNode("topology", ofType(""))
	assert.Equal(t, "eu-1b", n.Labels[corev1.LabelTopologyZone])
}

func without(labels map[string]string, keys ...string) map[string]string {
	maps.DeleteFunc(labels, func(key, _ string) bool { return slices.Contains(keys, key) })

	return labels
}

func TestController_UpdatesTopologyOfNodeThatRegistersAgain(t *testing.T) {
	s := parallel(t)
	m := s.initialize(aws("registers-again"))

	s.update(m, func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "eu-1b" })
	s.AwaitEvent("registers-again", node.ReasonTopologyChanged)
	s.Remove("registers-again")
	s.Register(ctest.NodeOf(m))

	assert.Equal(t, "eu-1b", s.awaitInitialized("registers-again").Labels[corev1.LabelTopologyZone])
}

func TestController_FollowsTopologyIfConfigured(t *testing.T) {
	// Not parallel, because the option applies to all Nodes.
	s := alone(t)
	m := s.initialize(aws("topology-follow"))
	s.update(m, func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "eu-1b" })
	s.AwaitEvent("topology-follow", node.ReasonTopologyChanged)

	s.options.follow(true)
	defer s.options.follow(false)

	s.resync()
	s.AwaitNode("topology-follow", inZone("eu-1b"))
	s.update(m, func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "" })
	s.AwaitNode("topology-follow", inZone(""))
}
