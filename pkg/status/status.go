// Package status summarizes what the Kubernetes API knows about talos-ccm: the lease, the labels of the instances, Nodes, CSRs
// and the Events of talos-ccm. It writes nothing.
//
// Every kubelet can write, change and delete Events. So their number and size are limited, and they say nothing about the
// leader and the instances.
package status

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/csrapproval"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
)

// Reasons of problems that no Event reports.
const (
	reasonNoLeader      = "NoLeader"
	reasonUninitialized = "Uninitialized"
	reasonNotReviewed   = "CSRNotReviewed"
)

const (
	kindNode = "Node"
	kindCSR  = "CertificateSigningRequest"
)

const (
	// delay is how long a Node may be uninitialized, and a CSR pending, before that is a problem without an Event. It also
	// allows for clocks that differ.
	delay = time.Minute
	// maxReason is the length of the longest reason of an Event (validation of events.k8s.io).
	maxReason = 128
)

// worst are the reasons of the most severe problems.
var worst = []string{
	reasonNoLeader, ccm.ReasonConfigInvalid, recorder.ReasonConfigDiffers, ccm.ReasonSecurePortUnavailable, csrapproval.ReasonUnexpectedCredential,
	recorder.ReasonCertificateReplaced, recorder.ReasonMismatch,
}

// explaining are the reasons of Events that say why a Node is not initialized or not ready.
var explaining = []string{
	nodecontroller.ReasonMetadataPending, nodecontroller.ReasonRenamed, nodecontroller.ReasonUnreachable, nodecontroller.ReasonIdentityMismatch,
	nodecontroller.ReasonProviderIDInUse, lifecycle.ReasonSilent, lifecycle.ReasonShutdown,
}

// Report is the state of talos-ccm in a cluster.
type Report struct {
	Leader    Leader     `json:"leader"`
	Instances []Instance `json:"instances"`
	Nodes     Nodes      `json:"nodes"`
	// PendingCSRs is the number of undecided CSRs for kubelet serving certificates.
	PendingCSRs int `json:"pendingCSRs"`
	// Problems are ordered by severity. Those that an Event reports may have been solved within the last hour.
	Problems []Problem `json:"problems"`
}

// Leader is the holder of the lease.
type Leader struct {
	// Holder is the identity in the lease; empty if there is none.
	Holder string `json:"holder,omitempty"`
	// Node is the Node of the machine on which the extension leads; empty if it is not known, as for a pod.
	Node string `json:"node,omitempty"`
	// Since is when the holder acquired the lease, and Renewed when it last renewed it.
	Since   *metav1.MicroTime `json:"since,omitempty"`
	Renewed *metav1.MicroTime `json:"renewed,omitempty"`
}

// Instance is what the labels of a control-plane Node say about the instance of the extension on its machine. Without them, it
// is an earlier version, or a pod, or there is none.
type Instance struct {
	Node    string `json:"node"`
	Version string `json:"version,omitempty"`
	// Config is the hash of its configuration.
	Config string `json:"config,omitempty"`
}

// Nodes counts Nodes whose kubelets report Talos. Managed ones have fields that the node controller has written. Waiting ones
// have the taint of Nodes that are not initialized.
type Nodes struct {
	Talos   int `json:"talos"`
	Managed int `json:"managed"`
	Waiting int `json:"waiting"`
}

// Problem is something that needs attention.
type Problem struct {
	// Reason is the reason of an Event or of a condition, a code of a CSR, NoLeader, Uninitialized or CSRNotReviewed.
	Reason string `json:"reason"`
	// Kind is the kind of the objects.
	Kind string `json:"kind"`
	// Objects are the names of the objects that have it, sorted.
	Objects []string `json:"objects,omitempty"`
	// Message is that of one of the objects.
	Message string `json:"message"`
}

// reader collects a Report.
type reader struct {
	Report

	now   time.Time
	nodes map[string]*corev1.Node
	// reported are the names of Nodes with an Event that says why they are not initialized or not ready.
	reported map[string]bool
	// valid is when the configurations of instances became valid again, by Node.
	valid map[string]time.Time
}

// Read returns the state of a cluster in which the lease has the given namespace and name.
func Read(ctx context.Context, client kubernetes.Interface, namespace, name string) (Report, error) {
	r := reader{Report: Report{Instances: []Instance{}, Problems: []Problem{}}, now: time.Now(), nodes: map[string]*corev1.Node{}, reported: map[string]bool{}, valid: map[string]time.Time{}}

	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return Report{}, fmt.Errorf("list nodes: %w", err)
	}

	for i := range nodes.Items {
		r.addNode(&nodes.Items[i])
	}

	r.checkInstances()

	lease, err := ReadLease(ctx, client, namespace, name)
	if err != nil {
		return Report{}, err
	}

	spec := lease.Spec
	r.Leader = Leader{Holder: ptr.Deref(spec.HolderIdentity, ""), Since: spec.AcquireTime, Renewed: spec.RenewTime}
	r.checkLeader(namespace+"/"+name, ptr.Deref(spec.LeaseDurationSeconds, 0))

	csrs, err := client.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.signerName", certificatesv1.KubeletServingSignerName).String(),
	})
	if err != nil {
		return Report{}, fmt.Errorf("list CSRs: %w", err)
	}

	list, err := client.CoreV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("source", ccm.Component).String(),
	})
	if err != nil {
		return Report{}, fmt.Errorf("list events: %w", err)
	}

	warnings := r.warnings(list.Items)
	r.addCSRs(csrs.Items, warnings)

	for i := range warnings {
		r.addEvent(&warnings[i])
	}

	r.checkNodes()
	slices.SortStableFunc(r.Problems, bySeverity)

	return r.Report, nil
}

// ReadLease returns a lease, or an empty one if there is none.
func ReadLease(ctx context.Context, client kubernetes.Interface, namespace, name string) (*coordinationv1.Lease, error) {
	lease, err := client.CoordinationV1().Leases(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("get lease %s/%s: %w", namespace, name, err)
	}

	return lease, nil
}

func (r *reader) addNode(node *corev1.Node) {
	r.nodes[node.Name] = node

	if !nodespec.IsTalos(node) {
		return
	}

	if nodespec.IsControlPlane(node) {
		i := noderecord.InstanceOf(node)
		r.Instances = append(r.Instances, Instance{Node: node.Name, Version: i.Version, Config: i.Config})
	}

	r.Nodes.Talos++

	if slices.ContainsFunc(node.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Manager == nodecontroller.FieldManager }) {
		r.Nodes.Managed++
	}

	if nodespec.IsUninitialized(node) {
		r.Nodes.Waiting++
	}
}

// add adds an object to a problem. The first message stays.
func (r *reader) add(kind, reason, object, message string) {
	i := slices.IndexFunc(r.Problems, func(p Problem) bool { return p.Kind == kind && p.Reason == reason })
	if i < 0 {
		i = len(r.Problems)
		r.Problems = append(r.Problems, Problem{Reason: reason, Kind: kind, Message: message})
	}

	p := &r.Problems[i]
	if at, found := slices.BinarySearch(p.Objects, object); !found {
		p.Objects = slices.Insert(p.Objects, at, object)
	}
}

func (r *reader) checkLeader(lease string, validSeconds int32) {
	switch l := r.Leader; {
	case l.Holder == "":
		r.add("Lease", reasonNoLeader, lease, "No instance holds the lease")
	case l.Renewed == nil || r.now.Sub(l.Renewed.Time) > time.Duration(validSeconds)*time.Second+delay: // clocks differ
		r.add("Lease", reasonNoLeader, lease, "The lease has expired")
	}

	id, isExtension := strings.CutPrefix(r.Leader.Holder, ccm.Component+"_")

	for name, node := range r.nodes {
		if isExtension && nodespec.IsControlPlane(node) && noderecord.Of(node).NodeID == noderecord.Fingerprint(id) {
			r.Leader.Node = name
		}
	}
}

// checkInstances reports instances with different configurations. Machines that do not respond may have been changed since.
func (r *reader) checkInstances() {
	configs := map[string][]string{}

	for _, i := range r.Instances {
		condition := notReady(r.nodes[i.Node])
		if i.Config != "" && (condition == nil || condition.Status != corev1.ConditionUnknown) {
			configs[i.Config] = append(configs[i.Config], i.Node)
		}
	}

	if len(configs) < 2 {
		return
	}

	for _, name := range slices.Concat(slices.Collect(maps.Values(configs))...) {
		r.add(kindNode, recorder.ReasonConfigDiffers, name, fmt.Sprintf(
			"The instances have different configurations. Apply the same ExtensionServiceConfig document to all control-plane machines. "+
				"From a Node whose machine no longer runs the extension, remove the labels %s and %s", noderecord.LabelConfig, noderecord.LabelVersion))
	}
}

// warnings returns the Warning Events, the newest first, without those that talos-ccm cannot have emitted.
func (r *reader) warnings(list []corev1.Event) []corev1.Event {
	for i := range list {
		if e := &list[i]; e.Reason == ccm.ReasonConfigValid {
			r.valid[e.InvolvedObject.Name] = e.LastTimestamp.Time
		}
	}

	slices.SortStableFunc(list, func(a, b corev1.Event) int { return b.LastTimestamp.Compare(a.LastTimestamp.Time) })

	return slices.DeleteFunc(list, func(e corev1.Event) bool {
		return e.Type != corev1.EventTypeWarning || len(e.Reason) > maxReason || e.LastTimestamp.After(r.now.Add(delay))
	})
}

// addCSRs adds denied CSRs, which Kubernetes keeps for an hour, and pending ones by the first code in their Events.
func (r *reader) addCSRs(csrs []certificatesv1.CertificateSigningRequest, warnings []corev1.Event) {
	deferred := map[types.UID]string{} // the newest message by CSR

	for _, e := range slices.Backward(warnings) {
		if e.Reason == csrapproval.ReasonDeferred {
			deferred[e.InvolvedObject.UID] = e.Message
		}
	}

	for _, csr := range csrs {
		if conditions := csr.Status.Conditions; len(conditions) > 0 {
			if conditions[0].Type == certificatesv1.CertificateDenied {
				r.add(kindCSR, conditions[0].Reason, csr.Name, strings.TrimPrefix(conditions[0].Message, conditions[0].Reason+": "))
			}

			continue
		}

		r.PendingCSRs++

		code, message, isReported := strings.Cut(deferred[csr.UID], ": ")

		switch {
		case isReported:
			r.add(kindCSR, code, csr.Name, message)
		case r.now.Sub(csr.CreationTimestamp.Time) > delay:
			r.add(kindCSR, reasonNotReviewed, csr.Name, "The CSR is pending, and no Event of the last hour says why")
		}
	}
}

// addEvent adds a Warning Event, unless the Node shows that the problem is solved. CSRs are added by their codes; their
// Events, and copies of these on Nodes, are not.
func (r *reader) addEvent(event *corev1.Event) {
	object, name := event.InvolvedObject, event.InvolvedObject.Name

	switch {
	case object.Kind == kindCSR, event.Reason == csrapproval.ReasonDeferred, event.Reason == csrapproval.ReasonDenied:
		return
	case slices.Contains([]string{reasonNoLeader, reasonUninitialized, reasonNotReviewed}, event.Reason): // not talos-ccm's
		return
	case object.Kind != kindNode:
		name = object.Namespace + "/" + name
	case r.isSolved(event):
		return
	}

	r.reported[name] = r.reported[name] || slices.Contains(explaining, event.Reason)
	r.add(object.Kind, event.Reason, name, events.Truncate(event.Message))
}

// isSolved reports whether a Node shows that it no longer has a problem.
func (r *reader) isSolved(event *corev1.Event) bool {
	name := event.InvolvedObject.Name
	node, exists := r.nodes[name]

	switch {
	case event.Reason == lifecycle.ReasonMissing:
		return exists
	case !exists || event.LastTimestamp.Time.Before(node.CreationTimestamp.Time):
		return true
	}

	switch event.Reason {
	case nodecontroller.ReasonMetadataPending, nodecontroller.ReasonRenamed:
		return !nodespec.IsUninitialized(node)
	case nodecontroller.ReasonUnreachable, nodecontroller.ReasonIdentityMismatch, lifecycle.ReasonSilent, lifecycle.ReasonShutdown:
		ready := nodespec.Condition(node, nodecontroller.ConditionTalosReady)

		return ready != nil && ready.Status != corev1.ConditionUnknown && !ready.LastTransitionTime.Before(&event.LastTimestamp)
	case ccm.ReasonConfigInvalid:
		return !nodespec.IsControlPlane(node) || r.valid[name].After(event.LastTimestamp.Time)
	case ccm.ReasonSecurePortUnavailable:
		return !nodespec.IsControlPlane(node)
	}

	return event.Reason == recorder.ReasonConfigDiffers // checkInstances compares the labels
}

// notReady returns the condition TalosReady unless it is absent or true.
func notReady(node *corev1.Node) *corev1.NodeCondition {
	condition := nodespec.Condition(node, nodecontroller.ConditionTalosReady)
	if condition != nil && condition.Status == corev1.ConditionTrue {
		return nil
	}

	return condition
}

// checkNodes adds Nodes that are not initialized or not ready although no Event says why: the API server deletes Events after an hour.
func (r *reader) checkNodes() {
	for _, name := range slices.Sorted(maps.Keys(r.nodes)) {
		node := r.nodes[name]

		switch condition := notReady(node); {
		case r.reported[name] || !nodespec.IsTalos(node):
		case condition != nil:
			r.add(kindNode, condition.Reason, name, events.Truncate(condition.Message))
		case nodespec.IsUninitialized(node) && r.now.Sub(node.CreationTimestamp.Time) > delay:
			r.add(kindNode, reasonUninitialized, name, "The Node is not initialized, and no Event of the last hour says why. See the log of the leader")
		}
	}
}

// bySeverity orders the worst problems first, then those of many objects.
func bySeverity(a, b Problem) int {
	rank := func(p Problem) int {
		if i := slices.Index(worst, p.Reason); i >= 0 {
			return i
		}

		return len(worst)
	}

	return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(len(b.Objects), len(a.Objects)), cmp.Compare(a.Reason, b.Reason))
}

// Limits of the table.
const (
	maxObjects  = 3 // of a problem
	maxProblems = 20
)

// Table writes the report as text to a buffer.
func (r Report) Table(out io.Writer) {
	leader := cmp.Or(r.Leader.Node, r.Leader.Holder, "none")

	if isExpired := slices.ContainsFunc(r.Problems, func(p Problem) bool { return p.Reason == reasonNoLeader }); isExpired {
		leader = "none"
	} else if r.Leader.Since != nil {
		leader += ", since " + duration.HumanDuration(time.Since(r.Leader.Since.Time))
	}

	columns := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(columns, "Leader\t%s\n", preview.Printable(leader))

	for _, i := range r.Instances {
		fmt.Fprintf(columns, "Instance\t%s\t%s\tconfiguration %s\n", i.Node, cmp.Or(i.Version, "version not stated"), cmp.Or(i.Config, "not stated"))
	}

	fmt.Fprintf(columns, "Nodes\t%d with Talos, %d managed, %d not initialized\n", r.Nodes.Talos, r.Nodes.Managed, r.Nodes.Waiting)
	fmt.Fprintf(columns, "CSRs\t%d pending\n", r.PendingCSRs)
	columns.Flush() //nolint:errcheck // writes to memory

	for i, p := range r.Problems {
		if i == maxProblems {
			fmt.Fprintf(out, "\n%d more problems; see --output json\n", len(r.Problems)-i)

			break
		}

		objects := strings.Join(p.Objects[:min(maxObjects, len(p.Objects))], ", ")
		if more := len(p.Objects) - maxObjects; more > 0 {
			objects += fmt.Sprintf(" and %d more", more)
		}

		fmt.Fprintf(out, "\n%s: %s\n  %s\n", preview.Printable(p.Reason), preview.Printable(objects), preview.Printable(p.Message))
	}
}
