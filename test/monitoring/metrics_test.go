package monitoring_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"flag"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/talos-ccm/talos-ccm/pkg/settings"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	list = "metrics.txt"

	// patience bounds the wait for the scrape to show all that the list has, on a machine that has much else to do.
	patience = 2 * time.Minute
	interval = 250 * time.Millisecond
)

var update = flag.Bool("update", false, "rewrite "+list)

// rules has a label that Kubernetes accepts of no machine.
const rules = `transformations:
  - name: bad
    labels:
      example.com/bad: "{{ .Hostname }} is no label"
lifecycle:
  gracePeriod: 1m
`

func TestMetrics(t *testing.T) {
	content, err := os.ReadFile(list)
	if err != nil && !*update {
		t.Fatal(err)
	}

	b := newBed(t)
	b.happen()

	if *update {
		b.require(os.WriteFile(list, []byte(b.seen.String()), 0o600))

		return
	}

	wanted := parseFamilies(string(content))
	b.see(wanted)

	for _, missing := range wanted.lacks(b.seen) {
		// Not every value can be had whenever one likes, and not every metric of a library.
		if strings.HasPrefix(missing, "talosccm_") && !strings.Contains(missing, "=") {
			t.Errorf("%s is exported and not in %s (go test ./test/monitoring -update)", missing, list)
		}
	}
}

// see waits until the metrics have shown all that is wanted.
func (b *bed) see(wanted families) {
	b.Helper()

	err := wait.PollUntilContextTimeout(b.Context(), interval, patience, true, func(ctx context.Context) (bool, error) {
		if scraped, err := scrape(ctx, b.url); err == nil {
			b.seen.add(scraped)
		}

		return len(b.seen.lacks(wanted)) == 0, nil
	})
	if err != nil {
		b.Fatalf("not seen in %s:\n%s", patience, strings.Join(b.seen.lacks(wanted), "\n"))
	}
}

// happen makes everything happen that an alert is about, and waits for the metrics to show it.
func (b *bed) happen() {
	b.Helper()

	self := b.machine(talostest.MachineSpec{
		Nodename: "cp", Type: talosmachine.TypeControlPlane, ServeSocket: true, LocalhostAdminKubeconfig: string(b.kube.Kubeconfig()),
		Controllers: []string{"-node-ipam-controller"},
	})
	b.require(self.SetExtensionServiceConfig(b.Context(), "talos-ccm", runtime.ExtensionServiceConfigFile{Content: rules, MountPath: settings.MountPath}))

	worker := b.machine(talostest.MachineSpec{Nodename: "worker"})
	silent := b.machine(talostest.MachineSpec{Nodename: "silent"})
	late := b.machine(talostest.MachineSpec{Nodename: "late", PlatformPending: true})

	reset := b.machine(talostest.MachineSpec{Nodename: "reset"})
	b.require(reset.SetStage(b.Context(), runtime.MachineStageResetting))

	for _, m := range []*talostest.Machine{self, worker, silent, late, reset} {
		b.register(m.Nodename(), m.Address())
	}

	b.register("moved", worker.Address())
	b.patch(self.Nodename(), `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)

	// Two Nodes have one block, and for the other three there are two.
	for _, m := range []*talostest.Machine{silent, late} {
		b.patch(m.Nodename(), `{"spec":{"podCIDR":"10.201.0.0/24","podCIDRs":["10.201.0.0/24"]}}`)
	}

	b.require(silent.Stop(b.Context()))
	b.start(self, "--controllers=*,node-ipam-controller", "--allocate-node-cidrs", "--cluster-cidr=10.200.0.0/23")

	for _, name := range []string{worker.Nodename(), "*.example.com", "gone.example.com"} {
		b.ask(worker.Nodename(), name)
	}

	b.ask("moved", worker.Nodename())

	b.see(parseFamilies(`
talosccm_machines gauge condition=Current|Mismatch|Unreachable
talosccm_node_syncs_total counter result=changed|pending
talosccm_csr_verdicts_total counter decision=Approve|Defer|Deny reason=NotOwned|OwnedByOtherMachine
talosccm_ipam_affected_nodes gauge reason=PodCIDROverlap|PodCIDRPoolExhausted
`))

	// A machine is gone for longer than the grace period.
	b.require(reset.Stop(b.Context()))
	b.patchStatus(reset.Nodename(), `{"status":{"conditions":[{"type":"Ready","status":"Unknown"}]}}`)
	b.see(parseFamilies(`
talosccm_lifecycle_nodes gauge reason=NodeGone
talosccm_lifecycle_deletions_total counter proof=reset
`))

	// The watches of a machine end, and the API server refuses us.
	worker.BreakStreams()
	b.forbid("system:talos-ccm")
	b.require(worker.UpdatePlatform(b.Context(), func(spec *runtime.PlatformMetadataSpec) { spec.Zone, spec.InstanceType = "other", "other" }))

	b.see(parseFamilies(`
talosccm_node_syncs_total counter result=error
talosccm_reconcile_errors_total counter controller=cloud-node
`))
}

// machine adds a machine of a platform with identities.
func (b *bed) machine(spec talostest.MachineSpec) *talostest.Machine {
	b.Helper()

	spec.Platform = runtime.PlatformMetadataSpec{Platform: "hcloud", Zone: "zone", InstanceID: spec.Nodename, ProviderID: "hcloud://" + spec.Nodename}

	m, err := b.talos.AddMachine(spec)
	b.require(err)

	return m
}

func (b *bed) register(nodename string, address netip.Addr) {
	b.Helper()

	_, err := b.kube.RegisterNode(b.Context(), kube.NodeSpec{Name: nodename, NodeIPs: []netip.Addr{address}})
	b.require(err)
}

// patch changes a Node as an administrator does.
func (b *bed) patch(nodename, change string) {
	b.Helper()

	_, err := b.client.CoreV1().Nodes().Patch(b.Context(), nodename, types.MergePatchType, []byte(change), metav1.PatchOptions{})
	b.require(err)
}

// patchStatus changes the status of a Node as kube-controller-manager does.
func (b *bed) patchStatus(nodename, change string) {
	b.Helper()

	_, err := b.client.CoreV1().Nodes().Patch(b.Context(), nodename, types.StrategicMergePatchType, []byte(change), metav1.PatchOptions{}, "status")
	b.require(err)
}

// forbid deletes a ClusterRoleBinding, and waits until the API server acts on that: it watches its own bindings, and for a moment allows what it no longer should.
func (b *bed) forbid(binding string) {
	b.Helper()

	b.require(b.client.RbacV1().ClusterRoleBindings().Delete(b.Context(), binding, metav1.DeleteOptions{}))

	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:               "system:serviceaccount:kube-system:talos-ccm",
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "patch", Resource: "nodes"},
	}}

	b.require(wait.PollUntilContextTimeout(b.Context(), interval, patience, true, func(ctx context.Context) (bool, error) {
		got, err := b.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})

		return err == nil && !got.Status.Allowed, err
	}))
}

// ask has the Node's kubelet ask for a serving certificate for the name.
func (b *bed) ask(nodename, name string) {
	b.Helper()

	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	b.require(err)

	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:  pkix.Name{CommonName: "system:node:" + nodename, Organization: []string{"system:nodes"}},
		DNSNames: []string{name},
	}, key)
	b.require(err)

	client, err := kubernetes.NewForConfig(b.kube.KubeletConfig(nodename))
	b.require(err)

	_, err = client.CertificatesV1().CertificateSigningRequests().Create(b.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeletServingSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}, metav1.CreateOptions{})
	b.require(err)
}
