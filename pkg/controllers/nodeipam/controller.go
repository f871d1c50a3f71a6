// Package nodeipam assigns pod CIDRs to Nodes.
//
// Name: node-ipam-controller (alias nodeipam).
//
// Inputs: the Node informer, a list of all Nodes from the API server when leadership starts, the inventory, the pools
// of the configuration, and from the control plane the ServiceCIDRs and the configuration of kube-controller-manager,
// Flannel and kube-proxy.
//
// Outputs: spec.podCIDR and spec.podCIDRs of Talos Nodes that have none, all IP families in one write.
//
// It never changes podCIDRs, which the API server forbids. It never writes one IP family without the other, and never
// guesses a prefix that it cannot determine. It writes nothing while another controller allocates pod CIDRs, such as
// kube-controller-manager on a machine with the control-plane label.
//
// # Allocations
//
// The Nodes are the only storage of allocations. A leader lists the Nodes after it has acquired the lease. Then it follows
// the cache, and remembers its own writes until the cache contains them. A block becomes free only when its Node is
// deleted. A process that crashes leaks nothing: blocks that it has written are in the next list, and all others are
// free. Several workers write, and share one record of the blocks in use.
//
// A podCIDR counts even if another client set it, and whatever its size. There is one exception: a kubelet can register
// its Node with a podCIDR that contains a whole pool. See [assignment.source] for the limit.
//
// # Leader changes
//
// The API server checks a write against one Node, not against all of them, so two leaders that write at the same time
// could allocate a block twice. A leader stops before its lease expires, and releases the lease only after it has
// stopped. It waits for every write, and a write times out before the lease can expire. Each write has therefore
// succeeded or failed before the next leader lists. A process can still allocate a block twice if it is suspended between
// its last check of the lease and its write. The next leader reports the overlap on both Nodes.
package nodeipam

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/siderolabs/gen/xslices"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Names of the controller, as in kube-controller-manager.
const (
	Name  = "node-ipam-controller"
	Alias = "nodeipam"
)

// labelAssigned is `true` if talos-ccm assigned the podCIDRs. Otherwise a kubelet may have chosen them.
const labelAssigned = "talos-ccm.node-restriction.kubernetes.io/pod-cidrs"

// FieldManager owns the podCIDRs that this controller has written.
const FieldManager = "talos-ccm-node-ipam"

const (
	// refreshInterval is the time between refreshes that no event triggers.
	refreshInterval = 30 * time.Second

	// releaseDelay combines what one change releases, and the deletions of many Nodes, to one refresh.
	releaseDelay = 10 * time.Millisecond

	// listTimeout bounds a list of all Nodes.
	listTimeout = time.Minute

	// writeTimeout bounds a write, by client and API server. It must be shorter than the time for which a leader that
	// stops still holds the lease: then the next leader's list contains every write.
	writeTimeout = 3 * time.Second

	// workers is the number of Nodes that are assigned pod CIDRs concurrently.
	workers = 16

	// refreshKey is the queue key of the work for all Nodes. It cannot be the name of a Node.
	refreshKey = "/refresh"
)

// disableKCMAllocator is the machine configuration that disables kube-controller-manager's allocator. Talos adds
// `controllers` to its own, `*,tokencleaner` or `*` (k8s.ControlPlaneStaticPodController: MergeAdditive; since Talos
// 1.14 ControlPlaneFinalController). A cluster created with Talos 1.14 has a document instead of the field, and Talos
// rejects a configuration with both.
const disableKCMAllocator = `cluster: {controllerManager: {extraArgs: {controllers: "-` + Name + `"}}}; ` +
	`or the same extraArgs in the document KubeControllerManagerConfig if there is one (Talos 1.14)`

// conflictPeriod is how long allocation is blocked after a write of podCIDRs by another controller. Two such writes within
// this period prove that there is another controller.
const conflictPeriod = 10 * time.Minute

// Config configures a Controller. All fields but Options are required.
type Config struct {
	Client       kubernetes.Interface
	Nodes        coreinformers.NodeInformer
	Inventory    *inventory.Inventory
	ControlPlane *controlplane.Value[*controlplane.Network]
	Recorder     record.EventRecorder
	Clock        clock.Clock
	// Selector returns the current selector of the Nodes to allocate for; nil: all.
	Selector func() *rules.Selector
	// Pools returns the current pools; the first that selects a Node applies.
	Pools func() []Pool
	// Fallback returns whether machines without an IPv6 prefix get blocks of the cluster CIDRs with CloudAllocator.
	Fallback func() bool
	// Options are the cluster-wide settings; the zero value is the default. They must be valid.
	Options Options
}

// Controller is the node IPAM controller. Use New and Run.
type Controller struct {
	cfg         Config
	lister      corelisters.NodeLister
	synced      cache.InformerSynced
	allocations *allocations
	reporter    *events.Reporter
	queue       queue.Queue
	// conflict is the last write of podCIDRs by another client.
	conflict atomic.Pointer[conflict]
	// machineMu is held while a machine's addresses and the CIDRs are read and reserved. Otherwise, older ones could replace
	// newer ones.
	machineMu sync.Mutex
	// loggedState and loggedOutside were logged last. Only the worker that processes refreshKey uses them.
	loggedState   string
	loggedOutside []string
}

type conflict struct {
	at       time.Time
	nodename string
	// problem blocks allocation; nil if the client can be the kubelet of the Node.
	problem *events.Problem
}

// New returns a Controller that has subscribed to its inputs. The informer must not have been started yet.
func New(cfg Config) (*Controller, error) {
	c := &Controller{cfg: cfg, lister: cfg.Nodes.Lister(), reporter: events.New(cfg.Recorder), queue: queue.New(Alias)}
	c.allocations = newAllocations(func() { c.queue.AddAfter(refreshKey, releaseDelay) })

	// The allocations must contain all Nodes of the cache, so wait for the handler, not only for the informer.
	synced, err := nodes.Watch(cfg.Nodes, c.nodeChanged)
	if err != nil {
		return nil, err
	}

	c.synced = synced

	cfg.Inventory.Subscribe(c.machineChanged)
	cfg.ControlPlane.Subscribe(func() {
		c.Resync()

		for _, node := range c.cachedNodes() {
			c.queue.Add(node.Name) // podCIDRs may no longer match the configuration
		}
	})

	return c, nil
}

// Resync retries the Nodes without podCIDRs: the configuration has changed.
func (c *Controller) Resync() { c.queue.Add(refreshKey) }

// Run works until ctx ends and the current write has finished. Call it only while holding the lease: it starts from a
// list of Nodes that must be newer than every write of earlier leaders.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()
	defer resetGauges()

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.synced) {
		return
	}

	if err := backoff.Retry(ctx, "Failed to list allocated pod CIDRs; retrying", c.listAllocations); err != nil {
		return // ctx has ended
	}

	c.Resync()

	var group wait.Group

	defer group.Wait()

	group.Start(func() {
		for backoff.Sleep(ctx, c.cfg.Clock, refreshInterval) {
			if err := c.releaseMissing(ctx); err != nil {
				klog.FromContext(ctx).Error(err, "Failed to list allocated pod CIDRs; retrying")
			}

			c.Resync()
		}
	})

	queue.Reconciler{Queue: c.queue, Subject: "node", Failure: "Failed to assign pod CIDRs; retrying", Sync: c.sync}.Run(ctx, workers)
}

// listAllocations reads all Nodes from the API server. Without a resourceVersion the list is consistent, not served
// from a cache.
func (c *Controller) listAllocations(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()

	nodes, err := c.cfg.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}

	c.allocations.recordList(nodes)

	return nil
}

// sync assigns podCIDRs to a Node that has none, and otherwise reports problems of its podCIDRs. If an input is missing,
// it reports that and returns nil: the change that provides the input queues the Node again.
func (c *Controller) sync(ctx context.Context, key string) (again time.Duration, err error) {
	if key == refreshKey {
		c.refresh(ctx)

		return 0, nil
	}

	node, _ := c.lister.Get(key) // fails only if there is none
	blocks, pending := c.allocations.resolve(key, node)

	if node == nil {
		c.reporter.Forget(key)

		return 0, nil
	}

	network := c.cfg.ControlPlane.Current()
	options, blockedReason := c.effectiveOptions(network)
	a := assignment{
		node: node, entry: c.cfg.Inventory.Get(node.Name), selector: c.cfg.Selector(), pools: c.cfg.Pools(), options: options,
		blocked: blockedReason, fallback: c.cfg.Fallback(), now: c.cfg.Clock.Now(),
	}

	switch {
	case !pending:
		problem := a.unusable()
		if problem == nil {
			problem = c.allocations.overlap(node)
		}

		c.report(node, problem, a.prefixChanged())
	case network != nil && nodespec.IsTalos(node) && node.DeletionTimestamp == nil: // otherwise, the first refresh queues the Node again
		err = c.assign(ctx, a, blocks)
	}

	return 0, err
}

// assign allocates blocks for a Node and writes them. It writes blocks again that were allocated before, if the result of
// that write is not known.
func (c *Controller) assign(ctx context.Context, a assignment, blocks []netip.Prefix) error {
	sources, problem := a.sourcesByFamily()

	if len(sources) > 0 && len(blocks) == 0 {
		// Here too, because a refresh may be late.
		c.allocations.reserve("services", a.options.ServiceCIDRs)

		blocks, problem = c.allocations.allocate(a.node, sources)
	}

	if len(sources) == 0 || len(blocks) == 0 {
		c.report(a.node, problem)

		return nil
	}

	return c.write(ctx, a.node, blocks, sources)
}

// effectiveOptions returns the options with the CIDRs of the control plane filled in, and a problem if blocks cannot be
// allocated. network is nil before the control plane has been read.
func (c *Controller) effectiveOptions(network *controlplane.Network) (Options, *events.Problem) {
	options := c.cfg.Options
	if network == nil {
		return options, nil
	}

	options.ServiceCIDRs = slices.Clone(options.ServiceCIDRs)
	differ := false

	for _, kcmConfig := range network.KCMConfigs {
		if len(c.cfg.Options.ClusterCIDRs) == 0 {
			options.ClusterCIDRs = network.KCMConfigs[0].ClusterCIDRs
			differ = differ || !slices.Equal(kcmConfig.ClusterCIDRs, options.ClusterCIDRs)
		}

		if len(c.cfg.Options.ServiceCIDRs) == 0 {
			options.ServiceCIDRs = append(options.ServiceCIDRs, kcmConfig.ServiceCIDRs...)
		}
	}

	options.ServiceCIDRs = append(options.ServiceCIDRs, network.ServiceCIDRs...)
	slices.SortFunc(options.ServiceCIDRs, netip.Prefix.Compare)
	options.ServiceCIDRs = slices.Compact(options.ServiceCIDRs)
	uncertainSizes := options.setKCMMaskSizes(network)

	if last := c.conflict.Load(); last != nil && last.problem != nil && c.cfg.Clock.Since(last.at) < conflictPeriod {
		return options, last.problem
	}

	switch allocators := network.Allocators(); {
	case len(allocators) > 0:
		return options, newProblem(ReasonAllocatorConflict,
			"kube-controller-manager allocates pod CIDRs on %s; disable its allocator in the configuration of every control-plane machine: %s",
			strings.Join(allocators, ", "), disableKCMAllocator)
	case network.Problem != "":
		return options, newProblem(ReasonAllocatorUnknown, "%s", network.Problem)
	case differ:
		return options, newProblem(ReasonAllocatorUnknown,
			"The control-plane machines have different podSubnets; configure the same ones, or set --cluster-cidr")
	}

	return options, uncertainSizes
}

// write sets podCIDR, podCIDRs and labelAssigned in one patch. The patch contains UID and resourceVersion of the Node that
// the blocks were allocated for, so it cannot change a later version, or a new Node of the same name.
func (c *Controller) write(ctx context.Context, node *corev1.Node, blocks []netip.Prefix, sources []familySources) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	podCIDRs := make([]string, len(blocks))
	for i, block := range blocks {
		podCIDRs[i] = block.String()
	}

	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion, "labels": map[string]string{labelAssigned: "true"}},
		"spec":     map[string]any{"podCIDR": podCIDRs[0], "podCIDRs": podCIDRs},
	})
	if err != nil {
		return fmt.Errorf("encode podCIDRs: %w", err)
	}

	// Not canceled with ctx: the result must be known before another leader starts.
	writeCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()

	updated := &corev1.Node{}
	err = c.cfg.Client.CoreV1().RESTClient().Patch(types.MergePatchType).Resource("nodes").Name(node.Name).
		VersionedParams(&metav1.PatchOptions{FieldManager: FieldManager}, scheme.ParameterCodec).
		Timeout(writeTimeout).Body(patch).Do(writeCtx).Into(updated)

	switch {
	case apierrors.IsNotFound(err):
		return nil // deleted
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err):
		c.report(node, newProblem(ReasonWriteFailed, "The API server rejected podCIDRs %v: %v", podCIDRs, err))
	}

	if err != nil {
		// The write may have succeeded. The blocks stay allocated until the cache shows whether it has.
		return fmt.Errorf("patch podCIDRs %v of node %q: %w", podCIDRs, node.Name, err)
	}

	c.allocations.confirm(updated)
	c.report(node, nil)
	klog.FromContext(ctx).Info("Assigned pod CIDRs", "podCIDRs", podCIDRs)

	for _, r := range sources {
		allocationsTotal.WithLabelValues(r.sources[0].name, string(r.family)).Inc()
	}

	return nil
}

// report replaces the problems of a Node. Nil is none.
func (c *Controller) report(node *corev1.Node, problems ...*events.Problem) {
	var found []events.Problem

	for _, problem := range problems {
		if problem != nil {
			found = append(found, *problem)
		}
	}

	for _, added := range c.reporter.Report(node.Name, node, found...) {
		failuresTotal.WithLabelValues(added.Reason).Inc()
	}
}

// releaseMissing releases the blocks of Nodes that were listed, but deleted before the cache contained them: the informer
// never reports their deletion.
func (c *Controller) releaseMissing(ctx context.Context) error {
	missing := c.allocations.nodenames()
	for _, node := range c.cachedNodes() {
		missing.Delete(node.Name)
	}

	if len(missing) == 0 {
		return nil
	}

	return c.listAllocations(ctx)
}

// refresh does the work that concerns all Nodes, and queues those without podCIDRs.
func (c *Controller) refresh(ctx context.Context) {
	network := c.cfg.ControlPlane.Current()
	if network == nil {
		return
	}

	options, blockedReason := c.effectiveOptions(network)
	c.allocations.reserve("services", options.ServiceCIDRs)

	if len(network.KCMConfigs) > 0 {
		c.reportOutside(ctx, network.KCMConfigs[0], options)
	}

	c.updateGauges(options, blockedReason)

	c.logState(klog.FromContext(ctx), options, blockedReason)

	all := c.cachedNodes()

	// Which of a machine's addresses are reserved first depends on the pools and cluster CIDRs.
	for _, node := range all {
		c.reserveMachine(node.Name)
	}

	for _, node := range all {
		if len(node.Spec.PodCIDRs) == 0 {
			c.queue.Add(node.Name)
		}
	}
}

// logState logs when allocation is blocked and when it resumes.
func (c *Controller) logState(logger klog.Logger, options Options, blockedReason *events.Problem) {
	state := "Allocating"
	if blockedReason != nil {
		state = blockedReason.Reason
	}

	switch {
	case state == c.loggedState:
	case blockedReason != nil:
		logger.Info("Pod CIDR allocation blocked; retrying", "reason", state, "message", blockedReason.Message)
	default:
		logger.Info("Allocating pod CIDRs", "clusterCIDRs", options.ClusterCIDRs, "serviceCIDRs", options.ServiceCIDRs)
	}

	c.loggedState = state
}

// reportOutside logs what is allocated from outside podSubnets, and emits one Event if that breaks what Talos deploys.
func (c *Controller) reportOutside(ctx context.Context, config controlplane.KCMConfig, options Options) {
	outside := xslices.Map(slices.DeleteFunc(c.cidrs(), func(cidr netip.Prefix) bool {
		return slices.ContainsFunc(config.ClusterCIDRs, func(s netip.Prefix) bool { return s.Bits() <= cidr.Bits() && s.Overlaps(cidr) })
	}), netip.Prefix.String)

	if options.Allocator == CloudAllocator && len(ofFamily(options.ClusterCIDRs, ipv6)) > 0 {
		outside = append(outside, "IPv6 prefixes of machines")
	}

	if !slices.Equal(outside, c.loggedOutside) {
		klog.FromContext(ctx).Info("Sources of pod CIDRs outside podSubnets changed", "outside", outside, "podSubnets", config.ClusterCIDRs)
		c.loggedOutside = outside
	}

	var problems []events.Problem

	node, err := c.lister.Get(config.Nodename) // without labeled Nodes, it is not the name of a Node
	if err == nil && len(outside) > 0 && len(config.SubnetBound) > 0 {
		problems = append(problems, *newProblem(ReasonOutsidePodSubnets, "Pod CIDRs from %s are outside podSubnets %v. "+
			"This breaks what Talos deploys: %s. Use pools inside podSubnets; for kube-proxy, detectLocalMode: NodeCIDR suffices",
			strings.Join(outside, ", "), config.ClusterCIDRs, strings.Join(config.SubnetBound, ", ")))
	}

	for range c.reporter.Report("/podSubnets", node, problems...) { // not the name of a Node
		failuresTotal.WithLabelValues(ReasonOutsidePodSubnets).Inc()
	}
}

func (c *Controller) cachedNodes() []*corev1.Node {
	nodes, _ := c.lister.List(labels.Everything()) // a list from the cache cannot fail

	return nodes
}

// nodeChanged is the event handler of Nodes; see nodes.Watch.
func (c *Controller) nodeChanged(before, after *corev1.Node) {
	if after == nil {
		c.allocations.release(before.Name, before.UID)
		c.allocations.reserve("node "+before.Name, nil)
		c.queue.Add(before.Name)

		return
	}

	if before != nil && len(before.Spec.PodCIDRs) == 0 && len(after.Spec.PodCIDRs) > 0 {
		c.detectConflict(after)
	}

	c.allocations.record(after)
	c.allocations.reserve("node "+after.Name, hostPrefixes(nodespec.DialAddresses(after)))
	c.machineChanged(after.Name)
}

// detectConflict records a write of podCIDRs by another client. Writes to two Nodes prove that there is another allocator.
// A write to one Node does not: a kubelet can write the podCIDRs of its own Node, under the name of any field manager.
func (c *Controller) detectConflict(node *corev1.Node) {
	manager := "unknown"

	for _, m := range node.ManagedFields {
		if m.FieldsV1 != nil && strings.Contains(m.FieldsV1.GetRawString(), `"f:podCIDRs"`) {
			manager = m.Manager

			break
		}
	}

	if manager == FieldManager {
		return
	}

	klog.Background().Info("Another client assigned pod CIDRs", "node", node.Name, "fieldManager", manager, "podCIDRs", node.Spec.PodCIDRs)

	next := &conflict{at: c.cfg.Clock.Now(), nodename: node.Name}
	if last := c.conflict.Load(); last != nil && next.at.Sub(last.at) < conflictPeriod {
		next.problem = last.problem

		if last.nodename != node.Name {
			next.problem = newProblem(ReasonAllocatorConflict,
				"Field manager %q assigned podCIDRs to Node %s after Node %s; allocation is blocked until no other controller has done so for %s",
				manager, node.Name, last.nodename, conflictPeriod)
		}
	}

	c.conflict.Store(next)
	c.report(node, next.problem)
}

// machineChanged reserves the addresses of a machine. The inventory calls it before any worker sees the change.
func (c *Controller) machineChanged(nodename string) {
	c.reserveMachine(nodename)
	c.queue.Add(nodename)
}

// cidrs returns the CIDRs from which blocks are allocated, without the machines' own prefixes.
func (c *Controller) cidrs() []netip.Prefix {
	options, _ := c.effectiveOptions(c.cfg.ControlPlane.Current())
	cidrs := slices.Clone(options.ClusterCIDRs)

	for _, pool := range c.cfg.Pools() {
		cidrs = append(cidrs, pool.CIDRs...)
	}

	return cidrs
}

func (c *Controller) reserveMachine(nodename string) {
	c.machineMu.Lock()
	defer c.machineMu.Unlock()

	c.allocations.reserve("machine "+nodename, reservedPrefixes(c.cfg.Inventory.Get(nodename).Machine, c.cidrs()))
}

func newProblem(reason, format string, args ...any) *events.Problem {
	return &events.Problem{Reason: reason, Message: fmt.Sprintf(format, args...)}
}
