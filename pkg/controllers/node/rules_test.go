package node_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
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

	compiled, errs := rules.Compile(all, nil)
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

	if errs := s.options.set(s.Name(), list); len(errs) > 0 {
		s.Fatalf("compile rules: %v", errs)
	}

	s.resync()
}

const storageTaint = "example.com/storage"

func storage(effect corev1.TaintEffect, value string) corev1.Taint {
	return corev1.Taint{Key: storageTaint, Value: value, Effect: effect}
}

func taintsNamed(n *corev1.Node, key string) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(t corev1.Taint) bool { return t.Key != key })
}

// hasRecord reports whether an enforced taint of the Node is recorded.
func hasRecord(n *corev1.Node) bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(n.Labels)), func(key string) bool { return strings.Contains(key, "node-restriction") })
}

func hasTaint(n *corev1.Node, taint corev1.Taint) bool { return slices.Contains(n.Spec.Taints, taint) }

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

	s.join(aws("rules-follow"))
	s.awaitInitialized("rules-follow")
	s.patch("rules-follow", "kubectl-label", `{"metadata":{"labels":{"team":"blue"}}}`)

	for _, value := range []string{"paris", "lyon"} {
		s.rules("rules-follow", rule(value))
		s.await("rules-follow", "labeled "+value, func(n *corev1.Node) bool {
			return n.Labels["example.com/site"] == value && n.Annotations["example.com/note"] == value+" of eu"
		})
	}

	s.rules("rules-follow")

	n := s.await("rules-follow", "without the label and the annotation", func(n *corev1.Node) bool {
		_, label := n.Labels["example.com/site"]
		_, annotation := n.Annotations["example.com/note"]

		return !label && !annotation
	})

	if n.Labels["team"] != "blue" || n.Labels[corev1.LabelTopologyZone] != "eu-1a" {
		t.Errorf("labels of other clients or of the platform were removed: %v", n.Labels)
	}
}

// A providerID cannot be changed once it is set, so a rule that fails to compute it must not stop other updates.
func TestController_UpdatesIdentifiedNodesWhoseIdentityRuleFails(t *testing.T) {
	s := parallel(t)
	label := func(value string) rules.Rule { return rules.Rule{Labels: map[string]string{"example.com/site": value}} }
	broken := rules.Rule{Name: "broken", PlatformMetadata: map[string]string{"ProviderID": "{{ .Tags.missing }}"}}

	s.join(aws("identity-broken"))
	before := s.awaitInitialized("identity-broken")

	s.rules("identity-broken", label("lyon"), broken, rules.Rule{Enforce: true, Taints: map[string]string{storageTaint: "ceph:NoSchedule"}})

	n := s.await("identity-broken", "labeled and tainted", func(n *corev1.Node) bool {
		return n.Labels["example.com/site"] == "lyon" && hasTaint(n, storage(corev1.TaintEffectNoSchedule, "ceph"))
	})
	if n.Spec.ProviderID != before.Spec.ProviderID {
		t.Errorf("providerID changed from %s to %s", before.Spec.ProviderID, n.Spec.ProviderID)
	}

	const want = `rule "broken": platformMetadata[ProviderID]="" omitted: it does not identify an instance`
	if event := s.awaitEvent("identity-broken", node.ReasonInvalidValue); event.Message != want {
		t.Errorf("got Event %q, want %q", event.Message, want)
	}
}

func TestController_SetsTaintsOfRulesAtInitialization(t *testing.T) {
	s := parallel(t)
	s.rules("taint-first", rules.Rule{Taints: map[string]string{storageTaint: "{{ .Zone }}:NoSchedule"}})

	until := s.history("taint-first")
	s.join(aws("taint-first"))
	n := s.awaitInitialized("taint-first")

	for _, version := range until(n.ResourceVersion) {
		if !tainted(version) && !hasTaint(version, storage(corev1.TaintEffectNoSchedule, "eu-1a")) {
			t.Errorf("initialized without the taint: %v", version.Spec.Taints)
		}
	}
}

func TestController_DoesNotRestoreTaintsThatAreNotEnforced(t *testing.T) {
	s := parallel(t)
	s.rules("taint-once", rules.Rule{Taints: map[string]string{storageTaint: "ceph:NoSchedule"}})
	s.join(aws("taint-once"))
	s.awaitInitialized("taint-once")

	s.patch("taint-once", "kubectl", `{"spec":{"taints":null}}`)
	s.rules("taint-once", rules.Rule{Taints: map[string]string{storageTaint: "nfs:NoSchedule"}, Labels: map[string]string{"example.com/seen": "true"}})

	n := s.await("taint-once", "labeled", func(n *corev1.Node) bool { return n.Labels["example.com/seen"] == "true" })
	if len(taintsNamed(n, storageTaint)) > 0 {
		t.Errorf("taints: %v", n.Spec.Taints)
	}
}

func TestController_RestoresEnforcedTaintsUntilTheRuleIsRemoved(t *testing.T) {
	s := parallel(t)
	enforced := func(value string) rules.Rule {
		return rules.Rule{Enforce: true, Taints: map[string]string{storageTaint: value + ":NoSchedule"}}
	}

	s.join(aws("taint-enforced"))
	s.awaitInitialized("taint-enforced")
	s.patch("taint-enforced", "kubectl", `{"spec":{"taints":[{"key":"team","value":"blue","effect":"NoSchedule"}]}}`)

	s.rules("taint-enforced", enforced("ceph"))
	s.await("taint-enforced", "tainted", func(n *corev1.Node) bool { return hasTaint(n, storage(corev1.TaintEffectNoSchedule, "ceph")) })

	removed := s.patch("taint-enforced", "kubectl", `{"spec":{"taints":[{"key":"team","value":"blue","effect":"NoSchedule"}]}}`)
	s.awaitSince(removed, "tainted again", func(n *corev1.Node) bool { return hasTaint(n, storage(corev1.TaintEffectNoSchedule, "ceph")) })

	s.rules("taint-enforced", enforced("nfs"))
	s.await("taint-enforced", "tainted with the new value", func(n *corev1.Node) bool { return hasTaint(n, storage(corev1.TaintEffectNoSchedule, "nfs")) })

	s.rules("taint-enforced")

	n := s.await("taint-enforced", "without the taint and its record", func(n *corev1.Node) bool {
		return len(taintsNamed(n, storageTaint)) == 0 && !hasRecord(n)
	})
	if len(taintsNamed(n, "team")) != 1 {
		t.Errorf("taint of another client was removed: %v", n.Spec.Taints)
	}
}

func TestController_ReportsConflictingTaint(t *testing.T) {
	s := parallel(t)
	s.join(aws("taint-foreign"))
	s.awaitInitialized("taint-foreign")
	s.patch("taint-foreign", "kubectl", `{"spec":{"taints":[{"key":"`+storageTaint+`","value":"mine","effect":"NoSchedule"}]}}`)

	s.rules("taint-foreign", rules.Rule{Enforce: true, Taints: map[string]string{storageTaint: "ceph:NoSchedule"}})
	s.awaitEvent("taint-foreign", node.ReasonOwnershipConflict)

	s.rules("taint-foreign")
	s.waitForIdle()

	if n := s.get("taint-foreign"); !hasTaint(n, storage(corev1.TaintEffectNoSchedule, "mine")) {
		t.Errorf("taints: %v", n.Spec.Taints)
	}
}

// The controller may receive a rule before the Node that already has its taint.
func TestController_DoesNotRecordTaintThatItHasNotReceived(t *testing.T) {
	const ours = "ceph"

	for _, theirs := range []string{"mine", ours} {
		t.Run("value "+theirs, func(t *testing.T) {
			s := parallel(t)
			name := "taint-unseen-" + theirs

			s.join(aws(name))
			s.awaitInitialized(name)

			wait := s.overtake(name, func(ctx context.Context) error {
				patch := fmt.Appendf(nil, `{"spec":{"taints":[{"key":%q,"value":%q,"effect":"NoSchedule"}]}}`, storageTaint, theirs)
				_, err := s.client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "kubectl"})

				return err
			})

			s.rules(name, rules.Rule{Enforce: true, Taints: map[string]string{storageTaint: ours + ":NoSchedule"}, Labels: map[string]string{"example.com/seen": "true"}})
			wait()

			n := s.await(name, "labeled", func(n *corev1.Node) bool { return n.Labels["example.com/seen"] == "true" })
			if hasRecord(n) {
				t.Errorf("taint of another client was recorded as enforced: %v", n.Labels)
			}

			s.rules(name)
			s.await(name, "no longer labeled", func(n *corev1.Node) bool { return n.Labels["example.com/seen"] == "" })
			s.waitForIdle()

			if n := s.get(name); !hasTaint(n, storage(corev1.TaintEffectNoSchedule, theirs)) {
				t.Errorf("taints: %v", n.Spec.Taints)
			}
		})
	}
}

func TestController_OmitsAndReportsInvalidValue(t *testing.T) {
	s := parallel(t)
	s.rules("rules-invalid", rules.Rule{Name: "site", Labels: map[string]string{"example.com/bad": "{{ .Region }} !", "example.com/good": "{{ .Region }}"}})
	s.join(aws("rules-invalid"))

	n := s.awaitInitialized("rules-invalid")
	if _, bad := n.Labels["example.com/bad"]; bad || n.Labels["example.com/good"] != "eu" {
		t.Errorf("labels: %v", n.Labels)
	}

	message := s.awaitEvent("rules-invalid", node.ReasonInvalidValue).Message
	for _, part := range []string{`rule "site"`, "labels[example.com/bad]", `"eu !"`} {
		if !strings.Contains(message, part) {
			t.Errorf("Event does not contain %s: %s", part, message)
		}
	}
}

func TestController_KeepsNodeTaintedWhileRuleCannotSetProviderID(t *testing.T) {
	s := parallel(t)
	rule := rules.Rule{Name: "identity", PlatformMetadata: map[string]string{"ProviderID": "custom:///{{ .Tags.serial }}"}}

	spec := aws("rules-identity")
	s.rules("rules-identity", rule)

	m := s.join(spec)
	s.awaitEvent("rules-identity", node.ReasonMetadataPending)
	s.requireUntouched("rules-identity")

	s.require(m.UpdatePlatform(t.Context(), func(meta *runtime.PlatformMetadataSpec) { meta.Tags = map[string]string{"serial": "s-1"} }))

	if n := s.awaitInitialized("rules-identity"); n.Spec.ProviderID != "custom:///s-1" {
		t.Errorf("providerID %q", n.Spec.ProviderID)
	}
}

// The upstream Talos CCM patches labels, so it owns them by Update.
func TestController_TakesOverLabelsOfUpstreamCCM(t *testing.T) {
	s := parallel(t)
	spec := aws("takeover")
	spec.PlatformPending = true // keeps it uninitialized
	m := s.join(spec)
	s.awaitEvent("takeover", node.ReasonMetadataPending)

	config := rest.CopyConfig(s.kube.Config())
	config.UserAgent = "talos-cloud-controller-manager/v1.12.0 (linux/amd64) kubernetes/$Format/cloud-node-controller"
	upstream, err := kubernetes.NewForConfig(config)
	s.require(err)

	// Like AddOrUpdateLabelsOnNode of k8s.io/cloud-provider, and the annotations of the upstream Talos CCM.
	_, err = upstream.CoreV1().Nodes().Patch(t.Context(), "takeover", types.StrategicMergePatchType, []byte(`{"metadata":{
		"labels":{"example.com/site":"old","example.com/same":"same","example.com/stray":"left","topology.kubernetes.io/zone":"eu-1a"},
		"annotations":{"example.com/note":"old"}}}`), metav1.PatchOptions{})
	s.require(err)

	s.rules("takeover", rules.Rule{
		Labels:      map[string]string{"example.com/site": "new", "example.com/same": "same"},
		Annotations: map[string]string{"example.com/note": "new"},
	})
	s.require(m.ResolvePlatform(t.Context()))

	n := s.await("takeover", "relabeled", func(n *corev1.Node) bool {
		return initialized(n) && n.Labels["example.com/site"] == "new" && n.Annotations["example.com/note"] == "new"
	})
	if n.Labels["example.com/stray"] != "left" {
		t.Errorf("label that no rule sets was changed: %v", n.Labels)
	}

	if found := s.events("takeover", node.ReasonOwnershipConflict); len(found) > 0 {
		t.Errorf("conflicts reported: %s", messages(found))
	}

	s.rules("takeover")
	n = s.await("takeover", "without the labels", func(n *corev1.Node) bool {
		return n.Labels["example.com/site"] == "" && n.Labels["example.com/same"] == "" && n.Annotations["example.com/note"] == ""
	})

	if n.Labels[corev1.LabelTopologyZone] != "eu-1a" {
		t.Errorf("labels: %v", n.Labels)
	}
}

func TestController_NeverWritesUnmanagedNode(t *testing.T) {
	s := parallel(t)

	s.require(s.options.exclude("unmanaged"))
	s.join(aws("unmanaged"))
	s.waitForIdle()
	s.requireUntouched("unmanaged")
}

func TestController_KeepsTopologyUntilLabelIsRemoved(t *testing.T) {
	s := parallel(t)
	m := s.join(aws("topology"))
	s.awaitInitialized("topology")

	s.require(m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone, spec.InstanceType = "eu-1b", "larger" }))

	message := s.awaitEvent("topology", node.ReasonTopologyChanged).Message
	for _, part := range []string{corev1.LabelTopologyZone + `="eu-1a"`, `its machine now sets "eu-1b"`, "nodes.topology: follow"} {
		if !strings.Contains(message, part) {
			t.Errorf("Event does not contain %s: %s", part, message)
		}
	}

	s.rules("topology", rules.Rule{Name: "move", PlatformMetadata: map[string]string{"Region": "us"}, Labels: map[string]string{"example.com/seen": "true"}})
	s.await("topology", "labeled", labeled("example.com/seen", "true"))
	s.touch("topology", 20)
	s.waitForIdle()

	n := s.get("topology")
	if want := topology("eu", "eu-1a", "larger"); !maps.Equal(want, without(ourLabels(n), nodespec.LabelPlatform, nodespec.LabelClusterName)) {
		t.Errorf("labels %v, want %v", ourLabels(n), want)
	}

	if found := s.events("topology", node.ReasonTopologyChanged); len(found) != 2 || found[0].Count != 1 || found[1].Count != 1 {
		t.Errorf("want one Event for the zone and one for the region: %s", messages(found))
	}

	s.patch("topology", "kubectl-label", fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, corev1.LabelTopologyZone))
	s.await("topology", "in the new zone", func(n *corev1.Node) bool {
		return inZone("eu-1b")(n) && n.Labels[corev1.LabelFailureDomainBetaZone] == "eu-1b" && n.Labels[corev1.LabelTopologyRegion] == "eu"
	})

	// The API server would remove labels that are no longer applied.
	s.require(m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone, spec.InstanceType = "", "" }))

	n = s.await("topology", "without an instance type", ofType(""))
	if n.Labels[corev1.LabelTopologyZone] != "eu-1b" {
		t.Errorf("zone that the machine no longer reports was removed: %v", n.Labels)
	}
}

func without(labels map[string]string, keys ...string) map[string]string {
	maps.DeleteFunc(labels, func(key, _ string) bool { return slices.Contains(keys, key) })

	return labels
}

func TestController_UpdatesTopologyOfNodeThatRegistersAgain(t *testing.T) {
	s := parallel(t)
	m := s.join(aws("registers-again"))
	s.awaitInitialized("registers-again")

	s.require(m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "eu-1b" }))
	s.awaitEvent("registers-again", node.ReasonTopologyChanged)
	s.remove("registers-again")
	s.register(nodeOf(m))

	if n := s.awaitInitialized("registers-again"); !inZone("eu-1b")(n) {
		t.Errorf("labels %v", ourLabels(n))
	}
}

func TestController_FollowsTopologyIfConfigured(t *testing.T) {
	// Not parallel, because the option applies to all Nodes.
	s := suite{t, &shared}
	m := s.join(aws("topology-follow"))
	s.awaitInitialized("topology-follow")
	s.require(m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "eu-1b" }))
	s.awaitEvent("topology-follow", node.ReasonTopologyChanged)

	s.options.follow(true)
	defer s.options.follow(false)

	s.resync()
	s.await("topology-follow", "in the new zone", inZone("eu-1b"))
	s.require(m.UpdatePlatform(t.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone = "" }))
	s.await("topology-follow", "without a zone", inZone(""))
}
