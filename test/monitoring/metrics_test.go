package monitoring_test

import (
	"context"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	list = "metrics.txt"

	// timeout bounds the wait for metrics, on a machine under load.
	timeout  = 2 * time.Minute
	interval = 250 * time.Millisecond
)

var update = flag.Bool("update", false, "rewrite "+list)

// rules has a label with an invalid value.
const rules = `transformations:
  - name: bad
    labels:
      example.com/bad: "{{ .Hostname }} is no label"
lifecycle:
  gracePeriod: 1m
`

func TestMetrics(t *testing.T) {
	t.Parallel()

	content, err := os.ReadFile(list)
	if err != nil && !*update {
		t.Fatal(err)
	}

	b := newBed(t)
	b.happen()

	if *update {
		require.NoError(b, os.WriteFile(list, []byte(b.seen.String()), 0o600))

		return
	}

	wanted := parseFamilies(string(content))
	b.see(wanted)

	for _, missing := range wanted.lacks(b.seen) {
		// Values, and the metrics of libraries, differ between runs.
		if strings.HasPrefix(missing, "talosccm_") && !strings.Contains(missing, "=") {
			t.Errorf("%s is exported and not in %s (go test ./test/monitoring -update)", missing, list)
		}
	}
}

// A new leader counts the first event of its kind. increase() does not see it in a series that did not exist before.
// This process runs no controllers.
func TestMetrics_CountersOfKnownLabelsStartAtZero(t *testing.T) {
	t.Parallel()

	_, err := ccm.NewOptions() // links the controllers
	require.NoError(t, err)

	gathered, err := legacyregistry.DefaultGatherer.Gather()
	require.NoError(t, err)

	// The help of a metric lists the values of its label as "a, b or c".
	listed := regexp.MustCompile(`: ((?:[\w-]+, )*[\w-]+) or ([\w-]+)\.$`)

	names := map[string]int{}
	got := map[string][]string{}

	for _, metrics := range gathered {
		name := metrics.GetName()
		if !strings.HasPrefix(name, "talosccm_") || metrics.GetType() != dto.MetricType_COUNTER {
			continue
		}

		for _, metric := range metrics.GetMetric() {
			assert.Zero(t, metric.GetCounter().GetValue(), name)
			names[name]++

			for _, pair := range metric.GetLabel() {
				got[name+" "+pair.GetName()] = append(got[name+" "+pair.GetName()], pair.GetValue())
			}
		}

		if match := listed.FindStringSubmatch(metrics.GetHelp()); match != nil {
			label := metrics.GetMetric()[0].GetLabel()[0].GetName()
			assert.ElementsMatch(t, append(strings.Split(match[1], ", "), match[2]), got[name+" "+label], name)
		}
	}

	for _, name := range []string{"talosccm_lifecycle_deletions_total", "talosccm_transformer_errors_total", "talosccm_csr_approval_count"} {
		assert.Greater(t, names[name], 1, name)
	}

	assert.ElementsMatch(t, []string{corev1.LabelTopologyRegion, corev1.LabelTopologyZone}, got["talosccm_topology_changes_total label"])
	assert.ElementsMatch(t, constants(t, "controllers/nodeipam/metrics.go", "Reason"), got["talosccm_ipam_failures_total reason"])

	ignored := []string{csrpolicy.CodeOtherSigner, csrpolicy.CodeDecided, csrpolicy.CodeNodeUnmanaged, csrpolicy.CodeExpired}
	codes := sets.New(constants(t, "csrpolicy/*.go", "Code")...).Delete(ignored...)
	assert.Equal(t, sets.List(codes), sets.List(sets.New(got["talosccm_csr_verdicts_total reason"]...)))
}

// constants returns the values of the constants in files of pkg whose names begin with prefix.
func constants(t *testing.T, files, prefix string) (values []string) {
	t.Helper()

	paths, err := filepath.Glob("../../pkg/" + files)
	require.NoError(t, err)

	for _, path := range paths {
		source, err := os.ReadFile(path)
		require.NoError(t, err)

		for _, match := range regexp.MustCompile(`(?m)^(?:const )?\s*`+prefix+`\w+\s+= "(\w+)"`).FindAllStringSubmatch(string(source), -1) {
			values = append(values, match[1])
		}
	}

	return values
}

// see waits until scrapes have returned all that is wanted.
func (b *bed) see(wanted families) {
	b.Helper()

	err := wait.PollUntilContextTimeout(b.Context(), interval, timeout, true, func(ctx context.Context) (bool, error) {
		if scraped, err := scrape(ctx, b.url); err == nil {
			b.seen.add(scraped)
		}

		return len(b.seen.lacks(wanted)) == 0, nil
	})
	if err != nil {
		b.Fatalf("not seen in %s:\n%s", timeout, strings.Join(b.seen.lacks(wanted), "\n"))
	}
}

// happen causes everything that an alert reports, and waits for its metrics.
func (b *bed) happen() {
	b.Helper()

	self := b.machine(talostest.MachineSpec{
		Nodename: "cp", Type: talosmachine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(b.Kube.Kubeconfig()),
		Controllers: []string{"-node-ipam-controller"},
	})
	require.NoError(b, self.SetExtensionServiceConfig(b.Context(), "talos-ccm", runtime.ExtensionServiceConfigFile{Content: rules, MountPath: settings.MountPath}))

	worker := b.machine(talostest.MachineSpec{Nodename: "worker"})
	silent := b.machine(talostest.MachineSpec{Nodename: "silent"})
	late := b.machine(talostest.MachineSpec{Nodename: "late", PlatformPending: true})

	reset := b.machine(talostest.MachineSpec{Nodename: "reset"})
	require.NoError(b, reset.SetStage(b.Context(), runtime.MachineStageResetting))

	for _, m := range []*talostest.Machine{self, worker, silent, late, reset} {
		b.Register(ctest.NodeOf(m))
	}

	b.Register(kube.NodeSpec{Name: "moved", NodeIPs: []netip.Addr{worker.Address()}})
	b.PatchNode(self.Nodename(), "kubectl", `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)

	// Two Nodes have the same block, and two blocks are left for the other three.
	for _, m := range []*talostest.Machine{silent, late} {
		b.PatchNode(m.Nodename(), "kubectl", `{"spec":{"podCIDR":"10.201.0.0/24","podCIDRs":["10.201.0.0/24"]}}`)
	}

	require.NoError(b, silent.Stop(b.Context()))
	b.start(self, "--controllers=*,node-ipam-controller,service-lb-controller", "--allocate-node-cidrs", "--cluster-cidr=10.200.0.0/23")

	// The grace period begins when a known machine does not respond.
	b.AwaitNode(reset.Nodename(), ctest.Initialized)
	require.NoError(b, reset.Stop(b.Context()))
	b.SetReady(reset.Nodename(), corev1.ConditionUnknown)

	for _, request := range []struct{ nodename, name string }{
		{worker.Nodename(), worker.Nodename()}, {worker.Nodename(), "*.example.com"}, {worker.Nodename(), "gone.example.com"}, {"moved", worker.Nodename()},
	} {
		_, err := b.Kube.RequestServingCertificate(b.Context(), request.nodename, "", request.name)
		require.NoError(b, err)
	}

	b.see(parseFamilies(`
talosccm_machines gauge condition=Current|Mismatch|Unreachable
talosccm_csr_verdicts_total counter decision=Approve|Defer|Deny reason=NotOwned|OwnedByOtherMachine
talosccm_ipam_affected_nodes gauge reason=PodCIDROverlap|PodCIDRPoolExhausted
`))

	// The grace period ends.
	b.see(parseFamilies(`
talosccm_lifecycle_nodes gauge reason=NodeGone
talosccm_lifecycle_deletions_total counter proof=reset
`))

	// The watches of a machine end, and the API server rejects the requests of talos-ccm.
	worker.BreakStreams()
	b.forbid("system:talos-ccm")
	require.NoError(b, worker.UpdatePlatform(b.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone, spec.InstanceType = "other", "other" }))

	b.see(parseFamilies(`
talosccm_reconcile_errors_total counter controller=cloud-node
`))
}

// machine adds a machine with an instance ID and a providerID.
func (b *bed) machine(spec talostest.MachineSpec) *talostest.Machine {
	b.Helper()

	spec.Platform = runtime.PlatformMetadataSpec{Platform: "hcloud", Zone: "zone", InstanceID: spec.Nodename, ProviderID: "hcloud://" + spec.Nodename}

	return b.Machine(spec)
}

// forbid deletes a ClusterRoleBinding, and waits until the API server, which watches bindings, has noticed.
func (b *bed) forbid(binding string) {
	b.Helper()

	require.NoError(b, b.Client.RbacV1().ClusterRoleBindings().Delete(b.Context(), binding, metav1.DeleteOptions{}))

	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:               "system:serviceaccount:kube-system:talos-ccm",
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "patch", Resource: "nodes"},
	}}

	require.NoError(b, wait.PollUntilContextTimeout(b.Context(), interval, timeout, true, func(ctx context.Context) (bool, error) {
		got, err := b.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})

		return err == nil && !got.Status.Allowed, err
	}))
}
