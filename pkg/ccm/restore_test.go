package ccm_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// newEnforcing returns a cluster of a control-plane machine and a worker. The configuration enforces credential pinning.
func newEnforcing(t *testing.T) (f *fleet, controlPlane *talostest.Machine) {
	t.Helper()

	f = &fleet{suite: newSuite(t)}

	_, err := f.Kube.BootstrapToken(t.Context()) // with it, kubelets may rotate their client certificates
	require.NoError(t, err)

	controlPlane = f.add(f.controlPlaneSpec("cp"))
	f.configure(controlPlane, "csrApproval: {credentialPinning: enforce}")
	f.label(controlPlane)
	f.add(talostest.MachineSpec{Nodename: "worker"})

	return f, controlPlane
}

// rotateRecorded rotates the client certificate, and waits for the record.
func (f *fleet) rotateRecorded(k *kubelet) {
	f.Helper()
	k.rotate()
	f.awaitApproved(k.requestServing(k.config))
	f.awaitRecord(k)
}

// awaitAccepted requires that the kubelet gets a certificate: on a control-plane machine without an operator, and on a worker
// with the command of the Event.
func (f *fleet) awaitAccepted(k *kubelet) {
	f.Helper()

	began := time.Now()
	name := k.requestServing(k.config)

	if !k.machine.Type().IsControlPlane() {
		f.AwaitEvent(name, csrapproval.ReasonUnexpectedCredential, noderecord.LabelCredential+"="+ctest.IDOf(k.config))
		assert.Empty(f, f.csr(name).Status.Conditions)
		f.PatchNode(k.machine.Nodename(), "operator", fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, noderecord.LabelCredential, ctest.IDOf(k.config)))
	}

	f.awaitApproved(name)
	f.Logf("CSR of %s approved after %s", k.machine.Nodename(), time.Since(began).Round(time.Millisecond))
}

// The disk of a machine is restored from a snapshot, with the client certificate of that time.
func TestSnapshot_OfDisk(t *testing.T) {
	f, self := newEnforcing(t)
	f.start(f.options(self))

	for _, k := range f.kubelets {
		f.awaitApproved(k.requestServing(k.config))
		f.awaitRecord(k)

		snapshot := k.config

		f.rotateRecorded(k)
		f.awaitApproved(k.requestServing(snapshot)) // it is one rotation old
		f.rotateRecorded(k)
		f.deleteCSRs() // rotations are a year apart, and CSRs last for an hour
		k.use(snapshot)
		f.awaitAccepted(k)
		f.rotateRecorded(k)
	}
}

// etcd is restored from a snapshot: the Nodes have the records of that time, and CSRs are missing.
func TestSnapshot_OfEtcd(t *testing.T) {
	f, self := newEnforcing(t)
	instance := f.start(f.options(self))
	records := map[*kubelet]map[string]any{}

	for _, k := range f.kubelets {
		f.awaitApproved(k.requestServing(k.config))
		f.awaitRecord(k)
		records[k] = f.recordLabels(k)

		for range 2 {
			f.rotateRecorded(k)
		}
	}

	instance.stop()

	for _, k := range f.kubelets {
		labels := records[k]

		for key := range f.recordLabels(k) {
			if _, isKept := labels[key]; !isKept {
				labels[key] = nil
			}
		}

		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
		require.NoError(t, err)
		f.PatchNode(k.machine.Nodename(), "etcd", string(patch))
	}

	f.deleteCSRs()
	f.start(f.options(self))

	for _, k := range f.kubelets {
		f.awaitAccepted(k)
		f.rotateRecorded(k)
	}
}

func (f *fleet) deleteCSRs() {
	f.Helper()
	require.NoError(f, f.Client.CertificatesV1().CertificateSigningRequests().DeleteCollection(f.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))
}

// recordLabels returns the labels of the record of a kubelet's Node.
func (f *fleet) recordLabels(k *kubelet) map[string]any {
	f.Helper()

	labels := map[string]any{}

	for key, value := range f.Node(k.machine.Nodename()).Labels {
		if strings.HasPrefix(key, noderecord.LabelCredential) {
			labels[key] = value
		}
	}

	return labels
}
