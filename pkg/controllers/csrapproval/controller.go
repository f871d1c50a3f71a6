// Package csrapproval decides kubelet-serving CertificateSigningRequests of Talos machines.
//
// Name: certificatesigningrequest-approving-controller (alias node-csr-approval).
//
// Inputs: an informer of the requests for kubernetes.io/kubelet-serving, the Node informer, the inventory, the cluster's identity; before a denial, the Node
// as the API server has it.
//
// Outputs: the condition Approved or Denied, by UpdateApproval and nothing else; Events on requests and Nodes.
//
// What is decided, and why, is csrpolicy's. A request that cannot be decided yet stays pending, and is looked at again when something of what it
// depends on changes. It never touches a request that somebody has decided, that no Node's kubelet made, or whose Node does not run Talos or is not
// ours, and it never issues a certificate: that is kube-controller-manager's.
package csrapproval

import (
	"context"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	certificatesinformers "k8s.io/client-go/informers/certificates/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// queueName is the controller's alias.
const queueName = "node-csr-approval"

const (
	// syncTimeout bounds all remote calls of one sync.
	syncTimeout = 30 * time.Second

	// A deferred request is looked at again when something changes. This is the safety net below that.
	deferFirst = 10 * time.Second
	deferMax   = 5 * time.Minute

	// All machines of a large cluster have answered, or not, within hearing.
	hearing         = time.Minute
	hearingInterval = 100 * time.Millisecond
)

// Inventory is what the controller reads of the machines.
type Inventory interface {
	Get(nodename string) inventory.Entry
	Owners(claim, nodename string) []string
	Subscribe(handler func(nodename string))
}

// Identity is what the controller reads of the cluster.
type Identity interface {
	Current() csrpolicy.ClusterIdentity
	Subscribe(handler func())
}

// Config is all a Controller needs. Every field but Claims and Policy must be set.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory Inventory
	Identity  Identity
	Recorder  record.EventRecorder
	Clock     clock.Clock
	// Claims tells which of the Nodes that run Talos are ours; nil: all. If the answer changes without a change of the Node, call Requeue.
	Managed func(node *corev1.Node) bool
	// Policy is what the operator allows a machine; nil: the default. If it changes, call Requeue.
	Policy func(node *corev1.Node, m machine.Machine) csrpolicy.Policy
}

// Controller decides requests. Use New and Run.
type Controller struct {
	client   kubernetes.Interface
	requests cache.SharedIndexInformer
	nodes    cache.SharedIndexInformer
	evidence evidence
	deferred *deferred
	recorder record.EventRecorder
	clock    clock.Clock
	queue    queue.Queue
	// patience says when a deferred request is looked at again though nothing has changed.
	patience workqueue.TypedRateLimiter[string]
}

// New makes a Controller and subscribes it. The Node informer must not have been started yet; the informer of requests is the controller's own.
func New(cfg Config) (*Controller, error) {
	if cfg.Managed == nil {
		cfg.Managed = func(*corev1.Node) bool { return true }
	}

	if cfg.Policy == nil {
		cfg.Policy = func(*corev1.Node, machine.Machine) csrpolicy.Policy { return csrpolicy.Policy{} }
	}

	c := &Controller{
		client:   cfg.Client,
		requests: newInformer(cfg.Client),
		nodes:    cfg.Nodes.Informer(),
		evidence: newEvidence(cfg),
		deferred: newDeferred(),
		recorder: cfg.Recorder,
		clock:    cfg.Clock,
		queue:    queue.New(queueName),
		patience: workqueue.NewTypedItemExponentialFailureRateLimiter[string](deferFirst, deferMax),
	}

	if err := c.nodes.AddIndexers(cache.Indexers{indexClaims: claimsOf}); err != nil {
		return nil, fmt.Errorf("index nodes by what they claim: %w", err)
	}

	if err := c.subscribe(cfg); err != nil {
		return nil, err
	}

	return c, nil
}

// newInformer sees the requests for our one signer, and finds the pending ones by their Nodes.
func newInformer(client kubernetes.Interface) cache.SharedIndexInformer {
	return certificatesinformers.NewFilteredCertificateSigningRequestInformer(client, 0, cache.Indexers{indexPending: pendingOf},
		func(options *metav1.ListOptions) {
			options.FieldSelector = fields.OneTermEqualSelector("spec.signerName", certificatesv1.KubeletServingSignerName).String()
		})
}

// Requeue has every pending request looked at again.
func (c *Controller) Requeue() {
	for _, nodename := range c.requests.GetIndexer().ListIndexFuncValues(indexPending) {
		c.requeueOf(nodename)
	}
}

// Run works with the given number of workers until ctx ends and the last of them has finished.
func (c *Controller) Run(ctx context.Context, workers int) {
	defer c.queue.ShutDown()
	defer c.deferred.clear()

	var group wait.Group
	defer group.Wait()

	group.StartWithContext(ctx, c.requests.RunWithContext)

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.requests.HasSynced, c.nodes.HasSynced) {
		return
	}

	c.hearMachines(ctx)

	for range workers {
		group.StartWithContext(ctx, c.worker().Run)
	}

	<-ctx.Done()
	c.queue.ShutDown()
}

// hearMachines returns when every machine has answered or failed to, or after a while. A new leader hears of them one after the other, and what one
// says of itself must not count before the others have been asked what is theirs.
func (c *Controller) hearMachines(ctx context.Context) {
	enough := c.clock.After(hearing)

	for unheard := c.evidence.unheard(); len(unheard) > 0; unheard = c.evidence.unheard() {
		select {
		case <-ctx.Done():
			return
		case <-enough:
			klog.FromContext(ctx).Info("Approving without having heard of some machines", "nodes", unheard)

			return
		case <-c.clock.After(hearingInterval):
		}
	}
}

func (c *Controller) worker() queue.Worker {
	return queue.Worker{
		Queue:   c.queue,
		Subject: "csr",
		Failure: "Could not decide the request, trying again",
		Sync: func(ctx context.Context, name string) error {
			ctx, cancel := context.WithTimeout(ctx, syncTimeout)
			defer cancel()

			return c.sync(ctx, name)
		},
	}
}

// sync decides one request, if it can be decided.
func (c *Controller) sync(ctx context.Context, name string) error {
	obj, exists, err := c.requests.GetIndexer().GetByKey(name)
	if err != nil {
		return err
	}

	csr, ok := obj.(*certificatesv1.CertificateSigningRequest)
	if !exists || !ok || settled(csr) || !byKubelet(csr) {
		c.forget(name)

		return nil
	}

	// From before anything is looked at: what changes meanwhile brings the request back.
	c.deferred.watch(name)

	node, facts, verdict, err := c.review(ctx, csr)
	if err != nil {
		return err
	}

	switch verdict.Decision {
	case csrpolicy.Approve, csrpolicy.Deny:
		if err := c.decide(ctx, csr, node, verdict); err != nil {
			return err
		}

		c.forget(name)
	case csrpolicy.Defer:
		c.reportDeferred(ctx, csr, node, verdict, facts)
		c.queue.AddAfter(name, c.patience.When(name))
	case csrpolicy.Ignore:
		klog.FromContext(ctx).V(4).Info("Not a request for us", "reasons", verdict.Reasons)
		c.forget(name)
	}

	return nil
}

// review judges a request by what is known, and before it denies one again by the Node as it is: requests and Nodes are watched apart, and a kubelet may
// have seen more of its Node than we have.
func (c *Controller) review(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) (*corev1.Node, csrpolicy.Evidence, csrpolicy.Verdict, error) {
	nodename, _ := csrpolicy.Nodename(csr)
	node := c.evidence.node(nodename)
	facts := c.evidence.of(csr, nodename, node)
	verdict := csrpolicy.Review(csr, facts)

	if verdict.Decision == csrpolicy.Deny && ours(facts) {
		var err error
		if node, err = c.readNode(ctx, nodename); err != nil {
			return nil, csrpolicy.Evidence{}, csrpolicy.Verdict{}, err
		}

		facts = c.evidence.of(csr, nodename, node)
		verdict = csrpolicy.Review(csr, facts)
	}

	if verdict.Decision == csrpolicy.Deny && !ours(facts) {
		verdict.Decision = csrpolicy.Defer
	}

	return node, facts, verdict, nil
}

// readNode returns a Node as the API server has it; nil if there is none.
func (c *Controller) readNode(ctx context.Context, nodename string) (*corev1.Node, error) {
	list, err := c.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, nodename).String()})
	if err != nil {
		return nil, fmt.Errorf("read Node %s: %w", nodename, err)
	}

	if len(list.Items) == 0 {
		return nil, nil //nolint:nilnil // as with the cache, where a Node need not be there either
	}

	return &list.Items[0], nil
}

func (c *Controller) forget(name string) {
	c.deferred.forget(name)
	c.patience.Forget(name)
}

// byKubelet tells whether a Node's kubelet made the request. Any other is nobody's whom we know.
func byKubelet(csr *certificatesv1.CertificateSigningRequest) bool {
	_, ok := csrpolicy.Nodename(csr)

	return ok
}

// ours tells whether it is certain that the Node is ours: whether it is can depend on its machine. Of any other's requests somebody else may think
// better.
func ours(facts csrpolicy.Evidence) bool {
	return facts.Node != csrpolicy.NodeUnknown && (facts.MachineState == csrpolicy.MachineCurrent || facts.MachineState == csrpolicy.MachineUnreachable)
}

// settled tells whether somebody has decided the request, or its signer has given it up.
func settled(csr *certificatesv1.CertificateSigningRequest) bool {
	return len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0
}

// decide writes the verdict. A request that somebody else has decided meanwhile has another version, and the write fails.
func (c *Controller) decide(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, node *corev1.Node, verdict csrpolicy.Verdict) error {
	condition := conditionOf(verdict)
	decided := csr.DeepCopy()
	decided.Status.Conditions = append(decided.Status.Conditions, condition)

	_, err := c.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, csr.Name, decided, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("decide request %s of %s: %w", csr.Name, csr.Spec.Username, err)
	}

	c.reportDecided(ctx, csr, node, verdict, condition)

	return nil
}
