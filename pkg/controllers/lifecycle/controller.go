// Package lifecycle taints the Nodes of Talos machines that have been shut down, and deletes the Nodes of machines that
// are gone.
//
// Name: cloud-node-lifecycle-controller (alias cloud-node-lifecycle), in place of the controller of
// k8s.io/cloud-provider. That controller deletes a Node as soon as the provider does not know it.
//
// Inputs: Nodes, from the informer; machines, from the inventory; the settings in force; at the start, the Events of
// recent deletions.
//
// Outputs, for selected Nodes of Talos machines only:
//   - the taint node.cloudprovider.kubernetes.io/shutdown, and if enabled node.kubernetes.io/out-of-service;
//   - the deletion of Nodes, each recorded as an Event before;
//   - a label that tells the next leader that the machine of this leader is being reset;
//   - Events for every verdict and, with discovery, for members of the cluster without a Node.
//
// It never deletes a Node whose kubelet reports or whose machine responds under the Node's name: the kubelet would not
// register again before its next start. It never deletes a Node without proof that the machine is gone. A machine that
// does not respond proves nothing.
//
// # Proof
//
// The function decide does no I/O. The inventory keeps the last proven view of each machine, even while another machine
// responds at the address. An announcement (resetting, shuttingDown) therefore counts until the machine publishes
// another stage, or until its kubelet reports another boot ID: Talos always reboots after an announcement. It counts only
// from the machine and at the address that the record of the Node has (noderecord): kubelets write the other addresses.
//
// Two machines are the same if their SMBIOS UUIDs are equal, or without UUIDs their node IDs. Different UUIDs with the
// same node ID are a cloned disk. An identifier that two machines had at the same time does not count. With a different
// node ID, the same UUID counts only at the same address, because some vendors use a UUID several times.
//
// # Limits
//
// Grace periods count observed time: a jump of the clock or a suspended process counts as 15 s. One worker handles all
// Nodes, because the limit of deletions applies to all Nodes together. A deletion is preceded by a live read and a
// stored Event, and has UID and resourceVersion as preconditions. A new leader counts the stored Events as if they were
// new, so the limit holds without comparing the clocks of machines.
package lifecycle

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Reasons of the Events on Nodes. The two about a deletion are those of k8s.io/cloud-provider.
const (
	// ReasonShutdown: the machine announced a shutdown and no longer responds; the Node is tainted, unless it was not the
	// recorded machine.
	// Fix: start the machine, which removes the taint.
	ReasonShutdown = "NodeShutdown"
	// ReasonSilent: machine and kubelet have not responded for a day, without proof that the machine is gone.
	// Fix: delete the Node, or enable more proofs: docs/guides/node-lifecycle.md#delete-more-nodes.
	ReasonSilent = "MachineSilent"
	// ReasonMissing: with `lifecycle.discovery`: a machine has been discovered for 35 minutes, but has no Node.
	// Fix: `talosctl service kubelet restart`; ignore it with `skipNodeRegistration`, or if the machine does not exist.
	ReasonMissing = "NodeMissing"
	// ReasonGone: the machine is gone; the grace period has begun.
	// Fix: none, docs/guides/node-lifecycle.md#what-happens-to-a-node.
	ReasonGone = "NodeGone"
	// ReasonDeleting (Normal): the Node is deleted; names the proof.
	ReasonDeleting = "DeletingNode"
	// ReasonDeletingFailed: the API server rejected the deletion, which is retried.
	// Fix: docs/troubleshooting/installation.md#kubernetes-api-errors.
	ReasonDeletingFailed = "DeletingNodeFailed"
	// ReasonDeletionLimited: delayed: a tenth of the Nodes was deleted in ten minutes.
	// Fix: wait, or delete the Node as the message says.
	ReasonDeletionLimited = "DeletionLimited"
	// ReasonDeletionPaused: not deleted: docs/guides/node-lifecycle.md#limits.
	// Fix: docs/troubleshooting/nodes.md#machine-unreachable, or delete the Node as the message says.
	ReasonDeletionPaused = "DeletionPaused"
	// ReasonDeletionDisabled: the Node would be deleted without `lifecycle.dryRun`.
	// Fix: remove `lifecycle.dryRun`, or delete the Node.
	ReasonDeletionDisabled = "DeletionDryRun"
)

// Names of the controller, as in k8s.io/cloud-provider.
const (
	Name  = "cloud-node-lifecycle-controller"
	Alias = "cloud-node-lifecycle"
)

const (
	// component is the source of the Events of deletions.
	component = "talos-ccm"

	// checkInterval is how often Nodes that are not ready are checked, in addition to changes.
	checkInterval = 10 * time.Second

	// deletionWindow is the period in which deletions are limited.
	deletionWindow = 10 * time.Minute

	// unresponsivePeriod is how long a machine and its kubelet do not respond before a Node without proof is reported.
	unresponsivePeriod = 24 * time.Hour

	// missingPeriod is how long a member has no Node before it is reported. Discovery removes a member that announces
	// nothing for 30 minutes, such as a destroyed machine (defaultDiscoveryTTL in siderolabs/talos), unless the discovery
	// service itself fails.
	missingPeriod = 35 * time.Minute

	// syncTimeout bounds all API requests of one sync.
	syncTimeout = 30 * time.Second

	// recordTimeout bounds the last write of a leader, which delays the release of the lease.
	recordTimeout = 5 * time.Second
)

// componentTaints are domains of taints, or whole keys, of Kubernetes, Talos, autoscalers, Cluster API and Cilium.
var componentTaints = []string{
	"node.kubernetes.io", "node-role.kubernetes.io", "node.cloudprovider.kubernetes.io", nodespec.TaintToBeDeleted, "DeletionCandidateOfClusterAutoscaler",
	"karpenter.sh", "node.cluster.x-k8s.io", "node.cilium.io",
}

// Config configures a Controller. Every field is required unless noted.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory *inventory.Inventory
	Recorder  record.EventRecorder
	Clock     clock.Clock
	// Settings returns the settings in force. Call Resync after they have changed.
	Settings func() config.CompiledLifecycle
	// Selected reports whether the Node is selected. The machine is the last proven view of its machine.
	Selected func(node *corev1.Node, talos machine.Machine) bool
	// Spec returns the labels and taints that the rules give the Node of a machine.
	Spec func(node *corev1.Node, talos machine.Machine) nodespec.Spec
	// Absent explains which control-plane machines do not see the machine with the nodename and node ID as a member of
	// the cluster. It returns an empty string if the machine may be a member. It is used with Discovery only.
	Absent func(nodename, nodeID string) string
	// Members returns an address of each member by nodename. The caller owns the map. It is empty without Discovery, or if
	// the members could not be read.
	Members func() map[string]netip.Addr
	// Resetting returns the nodename of the local machine if it is being reset, or an empty string.
	Resetting func(ctx context.Context) string
}

// Controller is the node lifecycle controller. Use New and Run.
type Controller struct {
	config   Config
	lister   corelisters.NodeLister
	reporter *events.Reporter
	observed *stopwatch
	queue    queue.Queue
	missing  map[string]time.Duration // since when members have had no Node, by nodename; only Run uses it

	// Only the worker uses these.
	histories map[string]history // by nodename
	deletions map[types.UID]deletion
}

// deletion is a deletion of a Node that is stored as an Event. The proof is empty if an earlier leader has stored it.
type deletion struct {
	proof Proof
	at    time.Duration // reading of the stopwatch
}

// New returns a Controller that is subscribed to Nodes and machines. Call it before the informer is started.
func New(cfg Config) (*Controller, error) {
	c := &Controller{
		config:    cfg,
		lister:    cfg.Nodes.Lister(),
		reporter:  events.New(cfg.Recorder),
		observed:  &stopwatch{clock: cfg.Clock},
		queue:     queue.New(Alias),
		histories: map[string]history{},
		deletions: map[types.UID]deletion{},
	}

	_, err := nodes.Watch(cfg.Nodes, func(before, after *corev1.Node) { c.queue.Add(cmp.Or(after, before).Name) })
	if err != nil {
		return nil, err
	}

	cfg.Inventory.Subscribe(c.queue.Add)

	return c, nil
}

// Resync queues every Node.
func (c *Controller) Resync() { c.enqueueIf(func(*corev1.Node) bool { return true }) }

func (c *Controller) enqueueIf(condition func(*corev1.Node) bool) {
	for _, node := range c.nodes() {
		if condition(node) {
			c.queue.Add(node.Name)
		}
	}
}

func (c *Controller) nodes() []*corev1.Node {
	nodes, _ := c.lister.List(labels.Everything()) // a list from the cache cannot fail

	return nodes
}

// Run processes the queue with one worker: the limit of deletions applies to all Nodes together. It returns after ctx
// has ended and the worker has finished.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()
	defer affectedNodes.Reset()

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.config.Nodes.Informer().HasSynced) {
		return
	}

	c.observed.read()

	if err := backoff.Retry(ctx, "Failed to count recent deletions; retrying", c.loadDeletions); err != nil {
		return // ctx has ended
	}

	var group wait.Group

	group.Start(func() {
		queue.Reconciler{Queue: c.queue, Subject: "node", Failure: "Failed to manage lifecycle of node; retrying", Sync: c.sync}.Run(ctx, 1)
	})

	for backoff.Sleep(ctx, c.config.Clock, checkInterval) {
		c.reportMissing(c.observed.read())

		affectedNodes.Reset()

		for reason, count := range c.reporter.CountByReason() {
			affectedNodes.WithLabelValues(reason).Set(float64(count))
		}

		c.enqueueIf(func(node *corev1.Node) bool { return !nodespec.IsReady(node) })
	}

	group.Wait()
	c.recordReset(context.WithoutCancel(ctx))
}

// reportMissing reports members of the cluster that have no Node. If the Node was deleted while the machine was cut off,
// the kubelet does not register again.
func (c *Controller) reportMissing(now time.Duration) {
	members, missing := c.config.Members(), map[string]time.Duration{}
	if len(members) == 0 { // they could not be read
		return
	}

	for _, node := range c.nodes() {
		delete(members, node.Name)
	}

	for nodename, addr := range members {
		missing[nodename] = cmp.Or(c.missing[nodename], now)
		delete(c.missing, nodename)

		if now-missing[nodename] >= missingPeriod {
			c.reporter.Report("member/"+nodename, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodename}}, events.Problem{
				Reason:  ReasonMissing,
				Message: fmt.Sprintf("Discovery lists the machine, but it has no node; if it works, run talosctl -n %s service kubelet restart", addr),
			})
		}
	}

	for nodename := range c.missing {
		c.reporter.Forget("member/" + nodename)
	}

	c.missing = missing
}

// sync taints or deletes the Node if the verdict says so.
func (c *Controller) sync(ctx context.Context, nodename string) (again time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()

	node, err := c.lister.Get(nodename) // fails only if there is none
	if err != nil || !c.isManaged(node) {
		c.reporter.Forget(nodename)
		delete(c.histories, nodename)

		return 0, nil
	}

	settings, now := c.config.Settings(), c.observed.read()
	entry := c.config.Inventory.Get(nodename) // once: history and evidence must agree
	h := c.histories[nodename].after(node, entry, now)
	e := c.evidence(node, entry, h)
	v := decide(e, settings)
	h.explained = v.shutdown || v.proof == ProofReset && e.doubt == "" || v.proof == ProofScaledDown

	if h.proof != v.proof {
		h.proof, h.goneSince = v.proof, now
	}

	if h.shutdown != v.shutdown {
		h.shutdown, h.shutdownSince = v.shutdown, now
	}

	c.histories[nodename] = h

	blocked := c.blocked(node, v, settings, now-h.goneSince-v.period)
	c.reporter.Report(nodename, node, v.problems(blocked, now-h.respondedAt)...)

	if taints := v.taints(node.Spec.Taints, settings, now-h.shutdownSince); !slices.Equal(taints, node.Spec.Taints) {
		return 0, c.setTaints(ctx, node, taints)
	}

	if v.proof != "" && now-h.goneSince >= v.period && blocked == nil {
		return 0, c.delete(ctx, node, v, settings)
	}

	return 0, nil
}

// isManaged reports whether the controller may write the Node.
func (c *Controller) isManaged(node *corev1.Node) bool {
	return nodespec.IsTalos(node) && node.DeletionTimestamp == nil && c.config.Selected(node, c.config.Inventory.Get(node.Name).Last)
}

// Selects reports whether the selector selects the Node of a machine. A machine that has never responded to this leader
// is selected only if selector is nil, because NotIn and DoesNotExist would match it.
func Selects(selector *rules.Selector, node *corev1.Node, talos machine.Machine) bool {
	return selector == nil || (talos.Nodename != "" && selector.Matches(nodespec.FactsOf(node, talos)))
}

func (c *Controller) evidence(node *corev1.Node, entry inventory.Entry, h history) evidence {
	e := evidence{
		ready: nodespec.IsReady(node), reports: reports(node), entry: entry, booted: node.Status.NodeInfo.BootID != h.bootID,
		scaledDown: nodespec.IsScaledDown(node), recorded: isResetRecorded(node),
	}

	record := noderecord.Of(node)
	e.doubt = doubt(record, entry.Last, entry.Last)

	// A machine reports its identity itself, so a compromised worker can report the identity of a machine that is down. A
	// new name counts only at the recorded address, which an attacker must take over in the network. A worker can never get
	// the label of the control plane.
	if name := c.config.Inventory.RenamedTo(node.Name); name == entry.Responding {
		successor, err := c.lister.Get(name)
		if err == nil && (nodespec.IsControlPlane(successor) || !nodespec.IsControlPlane(node)) {
			e.renamedTo, e.renameDoubt = name, doubt(record, entry.Last, c.config.Inventory.Get(name).Last)
		}
	}

	if entry.Last.Stage == runtime.MachineStageResetting || e.recorded || e.renamedTo != "" {
		e.restricted = restriction(node, c.config.Spec(node, entry.Last))
	}

	if c.config.Settings().Discovery {
		e.absent = c.config.Absent(node.Name, entry.Last.NodeID)
	}

	return e
}

// doubt explains why what a machine announces does not count; empty if it counts, or if no machine has responded. last is
// the last machine that responded under the Node's name: announcer is the same, or has a new name. A kubelet can have
// another machine dialed for its Node, except for a control-plane Node.
func doubt(record noderecord.Record, last, announcer machine.Machine) string {
	switch {
	case last.Nodename == "", !record.Address.IsValid() && announcer.ControlPlane != nil:
	case !record.Address.IsValid():
		return "no address of the machine is recorded"
	case !record.IsAt(announcer):
		return fmt.Sprintf("the machine responded at %s, and %s is recorded", announcer.Endpoint, record.Address)
	case record.Contradicts(last), record.Volume != "" && last.EphemeralID == "":
		return fmt.Sprintf("the machine at %s does not have the recorded EPHEMERAL volume", announcer.Endpoint)
	}

	return ""
}

// restriction names a label or a taint that only an administrator can have set and that a new Node would not have; empty
// if there is none. spec has the labels and taints of rules. Taints of machine.nodeTaints count on workers, where the
// kubelet sets them at registration.
func restriction(node *corev1.Node, spec nodespec.Spec) string {
	for _, key := range slices.Sorted(maps.Keys(node.Labels)) {
		domain, _, _ := strings.Cut(key, "/")
		isRestricted := strings.HasSuffix("."+domain, "."+corev1.LabelNamespaceNodeRestriction) && domain != "talos-ccm."+corev1.LabelNamespaceNodeRestriction

		if isRestricted && spec.Labels[key] != node.Labels[key] {
			return "a new node would not have label " + key
		}
	}

	for _, taint := range node.Spec.Taints {
		domain, _, _ := strings.Cut(taint.Key, "/")
		isOfRule := slices.ContainsFunc(spec.Taints, func(t rules.Taint) bool { return t.MatchTaint(&taint) })
		isOfTalos := nodespec.IsControlPlane(node) && strings.Contains(node.Annotations[constants.AnnotationOwnedTaints], strconv.Quote(taint.Key))

		if !slices.Contains(componentTaints, domain) && !isOfRule && !isOfTalos {
			return "a new node would not have taint " + taint.Key
		}
	}

	return ""
}

// reports reports whether the kubelet reports its state. Kubernetes sets the Ready condition to Unknown if it does not.
func reports(node *corev1.Node) bool {
	ready := nodespec.ReadyCondition(node)

	return ready != nil && ready.Status != corev1.ConditionUnknown
}

// problems returns the problems of a Node with this verdict. blocked may be nil. unresponsiveFor is how long neither the
// machine nor its kubelet has responded.
func (v verdict) problems(blocked *events.Problem, unresponsiveFor time.Duration) []events.Problem {
	var list []events.Problem

	switch {
	case v.shutdown:
		list = append(list, events.Problem{Reason: ReasonShutdown, Message: "Machine announced that it is shutting down and no longer responds"})
	case v.doubt != "":
		list = append(list, events.Problem{Reason: ReasonShutdown, Message: "Node is not tainted although a machine announced that it is shutting down: " +
			v.doubt + "; if it is off, taint the node with " + corev1.TaintNodeOutOfService + ", or delete the node"})
	case v.proof == "" && unresponsiveFor >= unresponsivePeriod:
		list = append(list, events.Problem{
			Reason:  ReasonSilent,
			Message: "Machine and kubelet have not responded for a day; delete the node if the machine no longer exists, or enable lifecycle.discovery",
		})
	}

	if v.proof != "" && v.weakness == "" {
		list = append(list, events.Problem{
			Reason: ReasonGone, Subject: string(v.proof),
			Message: fmt.Sprintf("Machine is gone: %s; the node is deleted after %s unless it becomes ready", v.message, v.period),
		})
	}

	if blocked != nil {
		list = append(list, *blocked)
	}

	return list
}

// blocked returns why the Node is not deleted although its deletion has been due for some time; nil if it is not due, or
// may be deleted.
func (c *Controller) blocked(node *corev1.Node, v verdict, s config.CompiledLifecycle, dueFor time.Duration) *events.Problem {
	if v.proof == "" || dueFor < 0 {
		return nil
	}

	if v.weakness != "" {
		return &events.Problem{
			Reason:  ReasonDeletionPaused,
			Message: fmt.Sprintf("Node is not deleted, because only a machine reports that it is gone: %s; to delete it, run kubectl delete node %s; %s", v.weakness, node.Name, v.message),
		}
	}

	managed, responding, unknown, unexplained := c.count()

	if total := managed + unknown; 2*responding < total && unknown+unexplained > 0 {
		return &events.Problem{
			Reason:  ReasonDeletionPaused,
			Message: fmt.Sprintf("Node is not deleted: only %d of %d machines respond; if the others are gone, delete their nodes; %s", responding, total, v.message),
		}
	}

	now := c.observed.read()
	maps.DeleteFunc(c.deletions, func(_ types.UID, d deletion) bool { return now-d.at >= deletionWindow })

	limit := max(1, managed/10)
	if _, counted := c.deletions[node.UID]; !counted && len(c.deletions) >= limit {
		return &events.Problem{
			Reason:  ReasonDeletionLimited,
			Message: fmt.Sprintf("Node is not deleted yet: at most %d nodes are deleted in %s; %s", limit, deletionWindow, v.message),
		}
	}

	if s.DryRun {
		return &events.Problem{Reason: ReasonDeletionDisabled, Message: "Node would be deleted without lifecycle.dryRun: " + v.message}
	}

	return nil
}

// count returns the number of managed Nodes, of those with a machine that responds, and of those with a machine that has
// stopped responding for an unknown reason. unknown is the number of Nodes that may be managed: their machines have never
// responded.
func (c *Controller) count() (managed, responding, unknown, unexplained int) {
	for _, node := range c.nodes() {
		entry := c.config.Inventory.Get(node.Name)

		switch {
		case !nodespec.IsTalos(node) || node.DeletionTimestamp != nil:
		case c.isManaged(node):
			managed++

			if entry.Condition == inventory.Current {
				responding++
			} else if !c.histories[node.Name].explained {
				unexplained++
			}
		case entry.Last.Nodename == "":
			unknown++
		}
	}

	return managed, responding, unknown, unexplained
}
