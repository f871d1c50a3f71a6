// Package recorder writes the records of Nodes. Whatever the configuration selects, it runs as no controller:
//   - Recorder, in every instance of the extension, whether the instance leads or not. It states the client certificate of
//     the local machine's kubelet, the hash of the instance's configuration, and its version.
//   - Leader, in the leader. It records the machine of each Node that responds, and reports instances with another
//     configuration.
//
// Inputs of the Recorder: the machine's nodename, identity and volumes, and the kubelet's certificate, over machine.sock; the
// machine's own Node. Of the Leader: Nodes, the inventory, and the records of deleted Nodes.
//
// Outputs: the labels of the record and Events on the Node. The Recorder writes only its own Node, if that has the label of
// the control plane.
package recorder

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

const (
	// interval is the time between two statements, and the longest delay after a failure. firstDelay is the shortest.
	interval   = time.Minute
	firstDelay = 5 * time.Second

	// timeout bounds all calls of one statement.
	timeout = 30 * time.Second
)

// ReasonCertificateReplaced: the machine stated another client certificate, and has another volume or node ID: it was
// reinstalled, or two machines have the nodename.
// Fix: none after a reinstallation; docs/troubleshooting/certificates.md#client-certificate-replaced.
const ReasonCertificateReplaced = "ClientCertificateReplaced"

// Recorder states the certificate, the hash of the configuration and the version until Run returns. All fields are required.
type Recorder struct {
	Client kubernetes.Interface
	Socket *talosapi.Socket
	Events record.EventRecorder
	Clock  clock.Clock
	// Config returns the hash of the instance's configuration; empty if it is not known yet.
	Config func() string
}

// Run states them every minute until ctx ends, and sooner after the first few failures. It logs the reason of
// failures when the reason changes.
func (r *Recorder) Run(ctx context.Context) {
	var reported string

	retries := backoff.New(firstDelay, interval)

	for delay := time.Duration(0); backoff.Sleep(ctx, r.Clock, delay); {
		switch err := r.state(ctx); {
		case err == nil:
			reported, delay = "", interval
		case ctx.Err() != nil:
		default:
			if delay = min(interval, retries.Step()); err.Error() != reported {
				klog.FromContext(ctx).Info("Client certificate of kubelet not stated; retrying", "err", err)
			}

			reported = err.Error()
		}
	}
}

// state writes to the Node what differs.
func (r *Recorder) state(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	self, err := r.self(ctx)
	if err != nil {
		return err
	}

	node, err := r.node(ctx, self.Nodename)
	if err != nil {
		return err
	}

	before, labels := noderecord.Of(node), noderecord.Labels{}
	next := before

	certificate, certificateErr := r.certificate(ctx, self.Nodename)
	if certificateErr == nil {
		next = before.State(certificate, self)
	}

	if next != before {
		labels = next.ByMachine()
	}

	if instance := r.instance(); instance != noderecord.InstanceOf(node) {
		maps.Copy(labels, instance.Labels())
	}

	if len(labels) > 0 {
		err = Write(ctx, r.Client, node, labels)
	}

	if err != nil || next == before {
		return cmp.Or(err, certificateErr)
	}

	klog.FromContext(ctx).Info("Stated client certificate of kubelet", "node", node.Name, "credential", next.Stated, "before", before.Stated)

	if before.Stated != "" && !before.Has(next.Stated) && before.Contradicts(self) {
		r.Events.Eventf(node, corev1.EventTypeWarning, ReasonCertificateReplaced,
			"Machine stated client certificate %s in place of %s, and has another volume or node ID. If it was not reinstalled, two control-plane machines have this nodename",
			next.Stated, before.Stated)
	}

	return nil
}

// instance returns what the instance states about itself, without a version that cannot be the value of a label.
func (r *Recorder) instance() noderecord.Instance {
	i := noderecord.Instance{Config: r.Config(), Version: version.Version()}
	if len(validation.IsValidLabelValue(i.Version)) > 0 {
		i.Version = ""
	}

	return i
}

// self returns the nodename, the node ID and the volume of the local machine.
func (r *Recorder) self(ctx context.Context) (machine.Machine, error) {
	var view machine.View

	for _, kind := range []resource.Kind{
		k8s.NewNodename(k8s.NamespaceName, "").Metadata(),
		cluster.NewIdentity(cluster.NamespaceName, "").Metadata(),
		block.NewDiscoveredVolume(block.NamespaceName, "").Metadata(),
	} {
		list, err := r.Socket.Reader.List(ctx, kind)
		if err != nil {
			return machine.Machine{}, fmt.Errorf("list %s of local machine: %w", kind.Type(), err)
		}

		view.ReplaceKind(kind, list.Items)
	}

	self := view.Machine()
	if self.Nodename == "" {
		return self, errors.New("local machine has no nodename yet")
	}

	return self, nil
}

// node returns the machine's own Node. The ServiceAccount may list Nodes, but not get them.
func (r *Recorder) node(ctx context.Context, nodename string) (*corev1.Node, error) {
	selector := fields.OneTermEqualSelector(metav1.ObjectNameField, nodename).String()

	list, err := r.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return nil, fmt.Errorf("get node %q: %w", nodename, err)
	}

	if len(list.Items) == 0 || !nodespec.IsControlPlane(&list.Items[0]) {
		return nil, fmt.Errorf("no node %q with the label of the control plane", nodename)
	}

	return &list.Items[0], nil
}

// certificate returns the client certificate of the kubelet, which must be valid for the nodename.
func (r *Recorder) certificate(ctx context.Context, nodename string) (*x509.Certificate, error) {
	certificate, err := r.Socket.Admin.KubeletCertificate(ctx)
	if err != nil {
		return nil, err
	}

	subject := certificate.Subject

	switch {
	case subject.CommonName != "system:node:"+nodename, !slices.Equal(subject.Organization, []string{"system:nodes"}):
		return nil, fmt.Errorf("kubelet's client certificate has the subject %.200q", subject)
	case !r.Clock.Now().Before(certificate.NotAfter):
		return nil, fmt.Errorf("kubelet's client certificate expired at %s", certificate.NotAfter.UTC().Format(time.RFC3339))
	}

	return certificate, nil
}
