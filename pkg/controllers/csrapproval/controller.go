// Package csrapproval approves and denies kubelet-serving CertificateSigningRequests of Talos machines.
//
// Name: certificatesigningrequest-approving-controller (alias node-csr-approval).
//
// Inputs: an informer of the requests for kubernetes.io/kubelet-serving and of issued client certificates of kubelets,
// the Node informer, the inventory, the cluster identity; before a denial, the Node as stored by the API server.
//
// Outputs: the condition Approved or Denied, by UpdateApproval only; labels that record the client certificate of a
// Node's kubelet; Events on requests and Nodes.
//
// Package csrpolicy makes the decisions. A request that cannot be decided yet stays pending and is reviewed again when
// something that it depends on changes. The controller never touches a request that is decided, that was not made by a
// kubelet, or whose Node does not run Talos or is not managed, and it never issues a certificate:
// kube-controller-manager does.
//
// Names and addresses keep their owner while a Node is deleted: claims.Claims has the Nodes and their machines.
//
// Labels of the Node record which client certificate its kubelet has, since the API server forgets requests within about
// an hour. One watch covers the requests of both signers, so that a client certificate is known before the requests
// that are made with it. The cache keeps only hashes of client certificates.
package csrapproval

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	certificatesinformers "k8s.io/client-go/informers/certificates/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Names of the controller, as in the upstream Talos CCM.
const (
	Name  = "certificatesigningrequest-approving-controller"
	Alias = "node-csr-approval"
)

const (
	// syncTimeout bounds all API calls of one sync.
	syncTimeout = 30 * time.Second

	// Bounds of the time after which a pending request is reviewed even if nothing has changed. It grows with the age of the
	// request, unless a different Node owns a requested name or address.
	retryMin = 10 * time.Second
	retryMax = 5 * time.Minute

	// All machines of a large cluster have responded or failed to respond within warmUpTimeout, and those that do not stall
	// within recordedTimeout.
	warmUpTimeout   = time.Minute
	recordedTimeout = 10 * time.Second
	warmUpInterval  = 100 * time.Millisecond
)

// indexPending is the index of pending requests by the name of the Node whose kubelet made them.
const indexPending = "csrapproval/pending"

// Identity provides the cluster identity.
type Identity interface {
	Current() csrpolicy.ClusterIdentity
	Subscribe(handler func())
}

// Config configures a Controller. All fields are required.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory *inventory.Inventory
	Identity  Identity
	Recorder  record.EventRecorder
	Clock     clock.Clock
	// HasNodes reports whether the inventory has the claims of all Nodes that existed at the start.
	HasNodes func() bool
	// Managed reports whether a Node that runs Talos is managed. Call Resync if its result changes for other
	// reasons than its arguments.
	Managed func(node *corev1.Node, m machine.Machine) bool
	// Policy returns what the operator allows a machine. Call Resync as for Managed.
	Policy func(node *corev1.Node, m machine.Machine) csrpolicy.Policy
	// Workers is the number of requests that are reviewed concurrently.
	Workers int
}

// Controller approves and denies requests. Use New.
type Controller struct {
	cfg      Config
	requests cache.SharedIndexInformer
	reporter *events.Reporter
	queue    queue.Queue

	started time.Time   // of Run, after the caches have synced
	warm    atomic.Bool // all machines have responded or failed to respond
	mu      sync.Mutex
	pending sets.Set[string] // names of the requests that wait for this controller's decision
}

// New returns a Controller that is subscribed to its inputs. The Node informer must not have been started yet; the
// informer of requests is the controller's own.
func New(cfg Config) (*Controller, error) {
	c := &Controller{
		cfg: cfg,
		requests: certificatesinformers.NewCertificateSigningRequestInformer(cfg.Client, 0, cache.Indexers{
			indexPending: pendingFor, indexIssued: issuedFor,
		}),
		pending:  sets.New[string](),
		reporter: events.New(cfg.Recorder),
		queue:    queue.New(Alias),
	}

	if err := c.requests.SetTransform(compact); err != nil {
		return nil, fmt.Errorf("watch certificate signing requests: %w", err)
	}

	enqueue := func(obj any) {
		if name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
			c.queue.Add(name)
		}
	}

	// Requests are enqueued when they appear and when something that their verdict depends on changes.
	_, err := c.requests.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: enqueue, UpdateFunc: func(_, obj any) { enqueue(obj) }, DeleteFunc: enqueue,
	})
	if err != nil {
		return nil, fmt.Errorf("watch certificate signing requests: %w", err)
	}

	if _, err := nodes.Watch(cfg.Nodes, func(before, after *corev1.Node) { c.requeueFor(cmp.Or(after, before).Name) }); err != nil {
		return nil, err
	}

	c.cfg.Inventory.Subscribe(c.requeueFor)
	c.cfg.Identity.Subscribe(c.Resync)

	return c, nil
}

// pendingFor is the index function of indexPending. It returns no name if the request is decided, or was not made by a
// kubelet.
func pendingFor(obj any) (nodenames []string, _ error) {
	csr, ok := obj.(*certificatesv1.CertificateSigningRequest)
	if !ok || len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0 {
		return nil, nil
	}

	if nodename, isKubelet := csrpolicy.Nodename(csr); isKubelet {
		nodenames = []string{nodename}
	}

	return nodenames, nil
}

// Resync enqueues all pending requests.
func (c *Controller) Resync() {
	for _, nodename := range c.requests.GetIndexer().ListIndexFuncValues(indexPending) {
		c.requeueFor(nodename)
	}
}

// requeueFor enqueues the pending requests of a Node.
func (c *Controller) requeueFor(nodename string) {
	names, _ := c.requests.GetIndexer().IndexKeys(indexPending, nodename) // fails only without the index

	for _, name := range names {
		c.queue.Add(name)
	}
}

// Run reviews requests until ctx ends and all workers have returned.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()
	defer pendingGauge.Set(0)

	var group wait.Group
	defer group.Wait()

	group.StartWithContext(ctx, c.requests.RunWithContext)

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.requests.HasSynced, c.cfg.HasNodes) {
		return
	}

	c.started = time.Now()
	group.StartWithContext(ctx, c.warmUp)

	queue.Reconciler{Queue: c.queue, Subject: "csr", Failure: "Failed to review CSR; retrying", Sync: c.sync}.Run(ctx, c.cfg.Workers)
}

// warmUp waits until each machine has responded or failed to respond, at most warmUpTimeout. The machines respond to a
// new leader one after the other; what one reports must not count before the others could report that they own it. After
// recordedTimeout, only those that stall have not, and they do not hold up requests for what is recorded.
func (c *Controller) warmUp(ctx context.Context) {
	var unknown []string

	err := wait.PollUntilContextTimeout(ctx, warmUpInterval, warmUpTimeout, true, func(context.Context) (bool, error) {
		unknown = nil

		all, _ := c.cfg.Nodes.Lister().List(labels.Everything()) // a list from the cache cannot fail
		for _, node := range all {
			if nodespec.IsTalos(node) && c.cfg.Inventory.Get(node.Name).Condition == inventory.Unknown {
				unknown = append(unknown, node.Name)
			}
		}

		return len(unknown) == 0, nil
	})
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Reviewing all CSRs; some machines have not responded", "nodes", events.Truncate(strings.Join(unknown, " ")))
	}

	c.warm.Store(true)
	c.Resync()
}

// isRecorded reports whether a request is for nothing but the name and the recorded address of a Node that has one. This
// includes invalid requests, which have no names and addresses.
func (c *Controller) isRecorded(request *csrpolicy.Request, nodename string) bool {
	node, err := c.cfg.Nodes.Lister().Get(nodename)
	if err != nil {
		return false
	}

	recorded := noderecord.Of(node).Address
	isOther := func(subject string) bool { return subject != nodename && subject != machine.CanonicalAddress(recorded) }

	return recorded.IsValid() && !slices.ContainsFunc(request.Subjects, isOther)
}

// sync reviews one request and writes the decision, if there is one.
func (c *Controller) sync(ctx context.Context, name string) (again time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()

	obj, _, _ := c.requests.GetIndexer().GetByKey(name) // fails only without a key

	if request, ok := obj.(*clientRequest); ok {
		return 0, c.syncIssued(ctx, request.nodename)
	}

	nodenames, _ := pendingFor(obj)
	if len(nodenames) == 0 {
		c.forget(name)

		return 0, nil
	}

	c.updatePending(c.pending.Insert, name)

	csr, _ := obj.(*certificatesv1.CertificateSigningRequest)

	if !c.warm.Load() {
		early := time.Until(c.started.Add(recordedTimeout))
		if !c.isRecorded(csrpolicy.Parse(csr), nodenames[0]) || early > 0 {
			return max(0, early), nil // warmUp will queue it
		}
	}

	r, err := c.review(ctx, csr, nodenames[0])
	if err != nil {
		return 0, err
	}

	switch r.verdict.Decision {
	case csrpolicy.Approved, csrpolicy.Denied:
		if err := c.decide(ctx, csr, r); err != nil {
			return 0, err
		}

		c.forget(name)
	case csrpolicy.Pending:
		again = min(max(c.cfg.Clock.Since(csr.CreationTimestamp.Time), retryMin), retryMax)
		if len(r.evidence.Owners) > 0 {
			again = retryMin
		}

		c.reportPending(ctx, csr, r)
		c.reportCredential(csr, r)
	case csrpolicy.Ignored:
		klog.FromContext(ctx).V(4).Info("Ignored CSR", "reasons", r.verdict.Reasons)
		c.forget(name)
	}

	return again, nil
}

// review is the result of a review. The Node is nil if it does not exist.
type review struct {
	node     *corev1.Node
	evidence csrpolicy.Evidence
	verdict  csrpolicy.Verdict
}

// review reviews a request by the caches, and before a denial again by the Node that the API server has: requests and
// Nodes are watched separately, and the kubelet may have seen a newer version of its Node.
func (c *Controller) review(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, nodename string) (review, error) {
	cached, _ := c.cfg.Nodes.Lister().Get(nodename) // fails only if there is none
	request := csrpolicy.Parse(csr)
	r := c.reviewFor(request, nodename, cached)

	if r.verdict.Decision == csrpolicy.Denied {
		// The ServiceAccount may list Nodes, but not get them.
		selector := fields.OneTermEqualSelector(metav1.ObjectNameField, nodename).String()

		list, err := c.cfg.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{FieldSelector: selector})
		if err != nil {
			return review{}, fmt.Errorf("get node %q: %w", nodename, err)
		}

		var node *corev1.Node
		if len(list.Items) > 0 {
			node = &list.Items[0]
		}

		r = c.reviewFor(request, nodename, node)
	}

	return r, nil
}

// decide writes the verdict and reports it. It fails with a conflict if the request has changed, such as by the
// decision of another approver.
func (c *Controller) decide(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, r review) error {
	if err := c.writeRecord(ctx, r.node, r.verdict.Record); err != nil {
		return err
	}

	kind := certificatesv1.CertificateDenied
	if r.verdict.Decision == csrpolicy.Approved {
		kind = certificatesv1.CertificateApproved
	}

	decided, message, logger := csr.DeepCopy(), messageFor(r.verdict), klog.FromContext(ctx)
	decided.Status.Conditions = append(decided.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: kind, Status: corev1.ConditionTrue, Reason: r.verdict.Reasons[0].Code, Message: message,
	})

	_, err := c.cfg.Client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, csr.Name, decided, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("update approval of %q from %q: %w", csr.Name, csr.Spec.Username, err)
	}

	counted := map[string]bool{}

	for _, reason := range r.verdict.Reasons {
		if !counted[reason.Code] {
			verdicts.WithLabelValues(reason.Decision.String(), reason.Code).Inc()
		}

		counted[reason.Code] = true
	}

	if r.verdict.Decision == csrpolicy.Approved {
		age := c.cfg.Clock.Since(csr.CreationTimestamp.Time)

		decisions.WithLabelValues("approve").Inc()
		ageAtApproval.Observe(age.Seconds())
		logger.Info("Approved CSR", "requester", csr.Spec.Username, "age", age)
		c.cfg.Recorder.Event(csr, corev1.EventTypeNormal, ReasonApproved, message)
		c.reportCredential(csr, r)

		return nil
	}

	decisions.WithLabelValues("deny").Inc()
	logger.Info("Denied CSR", "requester", csr.Spec.Username, "reasons", message)
	c.warn(csr, r.node, ReasonDenied, message)

	return nil
}

// forget drops the state of a request that is decided, deleted or ignored.
func (c *Controller) forget(name string) {
	c.updatePending(c.pending.Delete, name)
	c.reporter.Forget(name)
}

// updatePending inserts a name into pending, or deletes it.
func (c *Controller) updatePending(update func(names ...string) sets.Set[string], name string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	update(name)
	pendingGauge.Set(float64(c.pending.Len()))
}
