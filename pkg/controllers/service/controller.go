// Package service gives Services of type LoadBalancer the addresses of Nodes. kube-proxy, or what replaces it, then
// accepts the traffic to these addresses on every Node. There is no load balancer in front.
//
// Name: service-lb-controller (alias service), as in k8s.io/cloud-provider. The framework's controller of that name
// ignores Services with a loadBalancerClass and does not know endpoints.
//
// Inputs: Services, EndpointSlices, Nodes, the Leases of kubelets, the inventory, the cluster identity and the
// configuration.
//
// Outputs: status.loadBalancer of the Services with the class talos-ccm.dev/node-ip, and if so configured, of Services
// without a class. The status is applied with a separate field manager. When a Service is no longer managed, exactly the
// addresses that the controller has written are removed. The API server clears the status when the type of a Service
// changes, so no finalizer is needed.
//
// It never writes the status of other Services, and publishes an address only if the machine of a managed Node has it. It
// never publishes an address of the cluster itself, of a known range of pods or of a control-plane machine for a worker.
//
// Services compete for the ports of the Nodes. Therefore one worker decides about all of them in each pass: decide is a
// pure function from Services, Nodes, machines and EndpointSlices to addresses. The controller stores nothing. Present
// addresses come first, then a hash of Service and Node decides, so a new Node or a new leader changes no full list.
//
// A Node must meet the conditions of the framework, and be ready: the framework relies on the health checks of a load
// balancer, which does not exist here. The address of a machine that announces a reboot, an upgrade, a shutdown or a reset
// is removed at once, unless the Service has no other. So is the address of a machine whose kubelet's Lease is overdue and
// whose Talos API accepts no connection, usually within 20 s of a loss of power.
package service

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/informers"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	coordinationlisters "k8s.io/client-go/listers/coordination/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/cloud-provider/names"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// FieldManager owns the load balancer status that this controller has written.
const FieldManager = "talos-ccm-service"

// Names of the controller, as in k8s.io/cloud-provider/names.
const (
	Name  = names.ServiceLBController
	Alias = "service"
)

const (
	// The keys of the queue: a pass over all Services, and a check of all Leases.
	passKey, leasesKey = "services", "leases"

	// A Lease is overdue when a third of its duration has passed since its last renewal: a kubelet renews it after a quarter
	// plus up to 4 % (k8s.io/component-helpers/apimachinery/lease). With the default, this is after 13.3 s. A probe then
	// needs 4 s to prove that the machine does not respond: at most 18 s in all.
	overdueFraction = 3
	// defaultLeaseDuration is the kubelet's.
	defaultLeaseDuration = 40
	// leaseInterval is the time between checks of all Leases, and probeInterval that between probes of a machine.
	leaseInterval = 500 * time.Millisecond
	probeInterval = 5 * time.Second

	// resyncPeriod bounds the time between passes, so that Events of lasting problems are repeated in time.
	resyncPeriod = 5 * time.Minute

	// writeTimeout bounds a write of one Service, and writers is the number of concurrent writes.
	writeTimeout = 10 * time.Second
	writers      = 10
)

// Config configures a Controller. Every field is required.
type Config struct {
	Client    kubernetes.Interface
	Nodes     coreinformers.NodeInformer
	Inventory *inventory.Inventory
	Recorder  record.EventRecorder
	// Probe makes the inventory show within seconds if the machine of a Node no longer responds. It does not block.
	Probe func(nodename string)
	// Managed reports whether talos-ccm manages the Node of the machine. Call Resync after the result may have changed.
	Managed func(*corev1.Node, machine.Machine) bool
	// Identity returns the addresses of the cluster itself and of pods. Call Resync after they have changed.
	Identity func() csrpolicy.ClusterIdentity
	// Options returns the settings in force. Call Resync after they have changed.
	Options func() config.Service
}

// Controller is the service controller. Use New and Run.
type Controller struct {
	cfg       Config
	informers []informers.SharedInformerFactory
	services  corelisters.ServiceLister
	slices    discoverylisters.EndpointSliceLister
	leases    coordinationlisters.LeaseLister
	synced    []cache.InformerSynced
	reporter  *events.Reporter
	queue     queue.Queue
	// decided are the Services of the last pass, with their node selectors. renewals are the last renewals of Leases, by
	// Node. Only the worker uses them.
	decided  map[string]*nodeSelector
	renewals map[string]renewal
}

// renewal is the last renewal of a Lease, and when this process observed it: renewTime is by another machine's clock.
type renewal struct {
	renewTime *metav1.MicroTime
	at        time.Time
	overdue   bool
	probed    time.Time // zero if the machine was not probed since
}

// New returns a Controller that is subscribed to Nodes and machines. Call it before the informer of Nodes is started.
// The informers of Services, EndpointSlices and Leases are its own, start with Run, and keep only the fields that it reads.
func New(cfg Config) (*Controller, error) {
	serviceFactory := informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTransform(trimService))
	sliceFactory := informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTransform(trimSlice),
		informers.WithTweakListOptions(func(options *metav1.ListOptions) {
			options.LabelSelector = discoveryv1.LabelServiceName + ",!" + corev1.IsHeadlessService
		}))
	leaseFactory := informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0,
		informers.WithNamespace(corev1.NamespaceNodeLease), informers.WithTransform(trimLease))
	serviceInformer, sliceInformer := serviceFactory.Core().V1().Services(), sliceFactory.Discovery().V1().EndpointSlices()

	c := &Controller{
		cfg:       cfg,
		informers: []informers.SharedInformerFactory{serviceFactory, sliceFactory, leaseFactory},
		services:  serviceInformer.Lister(),
		slices:    sliceInformer.Lister(),
		leases:    leaseFactory.Coordination().V1().Leases().Lister(),
		synced:    []cache.InformerSynced{cfg.Nodes.Informer().HasSynced, serviceInformer.Informer().HasSynced, sliceInformer.Informer().HasSynced},
		reporter:  events.New(cfg.Recorder),
		queue:     queue.New(Alias),
	}

	for _, watch := range []struct {
		informer cache.SharedIndexInformer
		relevant func(before, after any) bool
	}{
		{serviceInformer.Informer(), func(_, _ any) bool { return true }},
		{sliceInformer.Informer(), c.sliceMatters},
	} {
		changed := func(before, after any) {
			if watch.relevant(before, after) {
				c.Resync()
			}
		}

		_, err := watch.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(obj any) { changed(nil, obj) },
			UpdateFunc: changed,
			DeleteFunc: func(obj any) { changed(obj, nil) },
		})
		if err != nil {
			return nil, fmt.Errorf("watch services and endpoint slices: %w", err)
		}
	}

	_, err := nodes.Watch(cfg.Nodes, func(before, after *corev1.Node) {
		if nodeChanged(before, after) {
			c.Resync()
		}
	})
	if err != nil {
		return nil, err
	}

	cfg.Inventory.Subscribe(func(string) { c.Resync() })

	return c, nil
}

// Resync queues a pass over all Services.
func (c *Controller) Resync() { c.queue.Add(passKey) }

// Run works until ctx ends and the current pass has finished.
func (c *Controller) Run(ctx context.Context) {
	defer c.queue.ShutDown()

	for _, factory := range c.informers {
		factory.Start(ctx.Done())
		defer factory.Shutdown()
	}

	if !cache.WaitForNamedCacheSyncWithContext(ctx, c.synced...) {
		return
	}

	c.queue.Add(leasesKey)
	c.Resync() // the handlers queue nothing if there are no objects
	queue.Reconciler{Queue: c.queue, Subject: "key", Failure: "Failed to update load balancers; retrying", Sync: c.sync}.Run(ctx, 1)
}

// sync checks all Leases, or brings all Services up to date. A failed write of one Service does not hold up the others.
func (c *Controller) sync(ctx context.Context, key string) (again time.Duration, err error) {
	if key == leasesKey {
		c.checkLeases()

		return leaseInterval, nil
	}

	// A list from the cache cannot fail.
	all, _ := c.cfg.Nodes.Lister().List(labels.Everything())
	services, _ := c.services.List(labels.Everything())

	s := snapshot{services: services, options: c.cfg.Options(), identity: c.cfg.Identity(), selectors: c.decided, endpoints: c.endpoints()}
	machines, unreachable := 0, 0 // including machines that have not responded yet

	for _, node := range all {
		entry := c.cfg.Inventory.Get(node.Name)
		s.nodes = append(s.nodes, candidate{
			node: node, entry: entry, managed: !entry.ObservedAt.IsZero() && c.cfg.Managed(node, entry.Machine),
			stopping: isStopping(entry, time.Now()),
		})

		if nodespec.IsTalos(node) {
			machines++

			if entry.Condition != inventory.Current && entry.Condition != inventory.Mismatch {
				unreachable++
			}
		}
	}

	for i, n := range s.nodes {
		s.nodes[i].stopping = n.stopping || 2*unreachable <= machines && c.renewals[n.node.Name].isDown(n.entry)
	}

	decisions := s.decide()
	errs := make([]error, len(decisions))

	workqueue.ParallelizeUntil(ctx, writers, len(decisions), func(i int) { errs[i] = c.write(ctx, decisions[i]) })

	before := c.decided
	c.decided = map[string]*nodeSelector{}

	for _, d := range decisions {
		name := cache.MetaObjectToName(d.service).String()
		c.reporter.Report(name, d.service, d.problems...)
		c.decided[name] = d.selector
	}

	for name := range sets.KeySet(before).Difference(sets.KeySet(c.decided)) {
		c.reporter.Forget(name)
	}

	return resyncPeriod, errors.Join(errs...)
}

func (c *Controller) endpoints() func(*corev1.Service) []*discoveryv1.EndpointSlice {
	list, _ := c.slices.List(labels.Everything())
	byService := map[cache.ObjectName][]*discoveryv1.EndpointSlice{}

	for _, slice := range list {
		name := cache.NewObjectName(slice.Namespace, slice.Labels[discoveryv1.LabelServiceName])
		byService[name] = append(byService[name], slice)
	}

	return func(service *corev1.Service) []*discoveryv1.EndpointSlice {
		return byService[cache.MetaObjectToName(service)]
	}
}

// checkLeases records renewals. It probes machines that are Current although their kubelets' Leases are overdue.
func (c *Controller) checkLeases() {
	leases, _ := c.leases.List(labels.Everything())
	renewals := make(map[string]renewal, len(leases)) // without those of deleted Leases

	for _, lease := range leases {
		last, known := c.renewals[lease.Name]
		if !known || !last.renewTime.Equal(lease.Spec.RenewTime) {
			last.renewTime, last.at, last.probed = lease.Spec.RenewTime, time.Now(), time.Time{}
		}

		period := time.Duration(ptr.Deref(lease.Spec.LeaseDurationSeconds, defaultLeaseDuration)) * time.Second / overdueFraction
		if isOverdue := time.Since(last.at) >= period; isOverdue != last.overdue {
			last.overdue = isOverdue
			c.Resync()
		}

		if last.overdue && time.Since(last.probed) >= probeInterval && c.cfg.Inventory.Get(lease.Name).Condition == inventory.Current {
			last.probed = time.Now()
			c.cfg.Probe(lease.Name)
		}

		renewals[lease.Name] = last
	}

	c.renewals = renewals
}

// write applies the addresses of a Service if they differ. The request contains the resourceVersion of the snapshot, so
// that it cannot reach a Service that has changed since.
func (c *Controller) write(ctx context.Context, d decision) error {
	present := d.service.Status.LoadBalancer.Ingress
	if apiequality.Semantic.DeepEqual(present, d.ingress) || (len(d.ingress) == 0 && !statusManagers(d.service).Has(FieldManager)) {
		return nil
	}

	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()

	status := applycorev1.ServiceStatus()
	if len(d.ingress) > 0 {
		status.WithLoadBalancer(applycorev1.LoadBalancerStatus())
	}

	for _, ingress := range d.ingress {
		status.LoadBalancer.WithIngress(applycorev1.LoadBalancerIngress().WithIP(ingress.IP).WithIPMode(*ingress.IPMode))
	}

	apply := applycorev1.Service(d.service.Name, d.service.Namespace).WithResourceVersion(d.service.ResourceVersion).WithStatus(status)
	_, err := c.cfg.Client.CoreV1().Services(d.service.Namespace).ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: FieldManager, Force: true})

	switch {
	case err == nil:
		klog.FromContext(ctx).Info("Updated load balancer", "service", klog.KObj(d.service), "addresses", addresses(d.ingress), "before", addresses(present))
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		// The Service has changed, and the change will queue the next pass.
	default:
		return fmt.Errorf("apply load balancer status of service %s: %w", klog.KObj(d.service), err)
	}

	return nil
}

func addresses(ingress []corev1.LoadBalancerIngress) []string {
	list := make([]string, len(ingress))
	for i := range ingress {
		list[i] = ingress[i].IP
	}

	return list
}

// sliceMatters reports whether the addresses of a Service depend on the EndpointSlice. If the Service is not in the cache
// yet, its arrival will queue a pass.
func (c *Controller) sliceMatters(before, after any) bool {
	if after == nil {
		after = before
	}

	slice, isSlice := after.(*discoveryv1.EndpointSlice)
	if !isSlice {
		return true // a deletion that the watch has missed
	}

	service, err := c.services.Services(slice.Namespace).Get(slice.Labels[discoveryv1.LabelServiceName])

	return err == nil && service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && manages(c.cfg.Options(), service)
}

// nodeChanged reports whether more has changed than heartbeats; see nodes.Watch.
func nodeChanged(before, after *corev1.Node) bool {
	if before == nil || after == nil {
		return true
	}

	relevant := func(node *corev1.Node) []any {
		return []any{node.Labels, node.DeletionTimestamp, node.Spec.Taints, node.Status.Addresses, node.Status.NodeInfo.OSImage, nodespec.IsReady(node)}
	}

	return !apiequality.Semantic.DeepEqual(relevant(before), relevant(after))
}

// trimService drops fields of a Service that this package does not read.
func trimService(obj any) (any, error) {
	service, isService := obj.(*corev1.Service)
	if !isService {
		return obj, nil
	}

	service.Labels, service.OwnerReferences, service.Spec.Selector, service.Status.Conditions = nil, nil, nil, nil

	maps.DeleteFunc(service.Annotations, func(key, _ string) bool { return key != AnnotationNodeSelector && key != AnnotationAddresses })

	service.ManagedFields = slices.DeleteFunc(service.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool { return entry.Subresource != "status" })
	for i := range service.ManagedFields {
		service.ManagedFields[i] = metav1.ManagedFieldsEntry{Manager: service.ManagedFields[i].Manager, Subresource: "status"}
	}

	return service, nil
}

// trimLease keeps the duration and renewTime.
func trimLease(obj any) (any, error) {
	if lease, isLease := obj.(*coordinationv1.Lease); isLease {
		lease.ObjectMeta = metav1.ObjectMeta{Namespace: lease.Namespace, Name: lease.Name, ResourceVersion: lease.ResourceVersion}
		lease.Spec = coordinationv1.LeaseSpec{LeaseDurationSeconds: lease.Spec.LeaseDurationSeconds, RenewTime: lease.Spec.RenewTime}
	}

	return obj, nil
}

// trimSlice keeps one ready endpoint per Node.
func trimSlice(obj any) (any, error) {
	slice, isSlice := obj.(*discoveryv1.EndpointSlice)
	if !isSlice {
		return obj, nil
	}

	nodes := sets.Set[string]{}

	for _, endpoint := range slice.Endpoints {
		// An absent condition means ready: serving and not terminating (discovery.k8s.io/v1, EndpointConditions).
		if endpoint.NodeName != nil && ptr.Deref(endpoint.Conditions.Ready, true) {
			nodes.Insert(*endpoint.NodeName)
		}
	}

	slice.Labels = map[string]string{discoveryv1.LabelServiceName: slice.Labels[discoveryv1.LabelServiceName]}
	slice.Annotations, slice.OwnerReferences, slice.ManagedFields, slice.Ports, slice.Endpoints = nil, nil, nil, nil, nil

	for _, nodename := range sets.List(nodes) {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{NodeName: &nodename})
	}

	return slice, nil
}
