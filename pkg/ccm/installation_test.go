package ccm_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// statementLimit is how long the CSR of a control-plane machine may be pending after its instance has started
// (docs/explanation/node-records.md).
const statementLimit = time.Minute

// newExistingCluster returns a cluster without the external cloud provider, of three control-plane machines and two workers. Its
// kubelets obtained their client certificates long ago, and their Nodes have no records.
func newExistingCluster(t *testing.T) (f *fleet, controlPlanes, workers []*kubelet) {
	t.Helper()

	f = &fleet{suite: newSuite(t)}

	var machines []*talostest.Machine

	for i := range 5 {
		spec := talostest.MachineSpec{Nodename: fmt.Sprintf("worker-%d", i)}
		if i < 3 {
			spec = f.controlPlaneSpec(fmt.Sprintf("cp-%d", i))
		}

		node := ctest.NodeOf(f.boot(spec).machine)
		node.WithoutCloudProvider = true
		f.Register(node)
	}

	controlPlanes, workers = f.kubelets[:3], f.kubelets[3:]
	for _, k := range controlPlanes {
		machines = append(machines, k.machine)
	}

	f.label(machines...)

	return f, controlPlanes, workers
}

// The extension is installed in the order of docs/guides/install.md, while all kubelets request serving certificates.
func TestInstallation_OverThreeControlPlanesNeedsNoOperator(t *testing.T) {
	f, controlPlanes, workers := newExistingCluster(t)
	requests := map[*kubelet][]string{}
	request := func() {
		for _, k := range f.kubelets {
			requests[k] = append(requests[k], k.requestServing(k.config))
		}
	}

	var instances []*run

	request()

	for i, k := range controlPlanes {
		require.NoError(t, k.machine.Reboot(t.Context())) // with the installer image

		began := time.Now()

		instances = append(instances, f.start(f.options(k.machine)))
		request()

		for _, served := range append(controlPlanes[:i+1:i+1], workers...) {
			for _, name := range requests[served] {
				f.awaitApproved(name)
			}

			t.Logf("extension on %d control-plane machines: CSRs of %s approved after %s", i+1, served.machine.Nodename(), time.Since(began).Round(time.Millisecond))
		}

		assert.Less(t, time.Since(began), statementLimit)

		for _, waiting := range controlPlanes[i+1:] {
			for _, name := range requests[waiting] {
				f.AwaitEvent(name, csrapproval.ReasonUnexpectedCredential, "none is recorded", "Install the talos-ccm extension on the machine")
				assert.Empty(t, f.csr(name).Status.Conditions)
			}
		}

		if i == 0 { // the external cloud provider is enabled, and the kubelets restart
			for _, k := range f.kubelets {
				f.PatchNode(k.machine.Nodename(), "kubelet", fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, cloudproviderapi.AnnotationAlphaProvidedIPAddr, k.machine.Address()))
			}
		}
	}

	f.awaitInstalled(controlPlanes)

	// The next leader approves the same.
	leader := f.holder()

	instances[0].stop()
	ctest.Eventually(t, "another instance leads", func() bool { return !slices.Contains([]string{"", leader}, f.holder()) })

	led := time.Now()

	for _, k := range f.kubelets {
		f.awaitApproved(k.requestServing(k.config))
	}

	t.Logf("all CSRs approved %s after the change of leader", time.Since(led).Round(time.Millisecond))
	f.awaitInstalled(controlPlanes)
}

// awaitInstalled waits until all Nodes have complete records and providerIDs, and fails if there is an Event that needs an
// operator.
func (f *fleet) awaitInstalled(stated []*kubelet) {
	f.Helper()

	for _, k := range f.kubelets {
		f.awaitRecord(k)
		f.AwaitNode(k.machine.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { asrt.Equal("hcloud://"+n.Name, n.Spec.ProviderID) })

		for _, reason := range []string{recorder.ReasonCertificateReplaced, recorder.ReasonMismatch, recorder.ReasonWriteFailed, csrapproval.ReasonDenied} {
			assert.Empty(f, f.Events(k.machine.Nodename(), reason), "%s: %s", k.machine.Nodename(), reason)
		}
	}

	for _, k := range stated {
		assert.Equal(f, ctest.IDOf(k.config), noderecord.Of(f.Node(k.machine.Nodename())).Stated)
	}
}
