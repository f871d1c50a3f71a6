package nodeipam

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/clusteridentity"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	// refreshInterval is how soon a change of the environment is seen, conflictInterval how soon that somebody else has stopped to allocate, and
	// retryInterval is for what cannot be read.
	refreshInterval  = 30 * time.Second
	conflictInterval = 10 * time.Second
	retryInterval    = time.Second

	// readTimeout bounds what one machine has to answer.
	readTimeout = 10 * time.Second

	// quietTime is how long nobody else may have written podCIDRs before we do again.
	quietTime = 10 * time.Minute
)

// environment is what the cluster is like apart from its Nodes.
type environment struct {
	clusterCIDRs []netip.Prefix
	serviceCIDRs []netip.Prefix
	// obstacle is why nothing may be allocated; nil if it may.
	obstacle *finding
}

// follow keeps the environment up to date until ctx ends.
func (c *Controller) follow(ctx context.Context) {
	for {
		env := c.readEnvironment(ctx)
		if ctx.Err() != nil {
			return
		}

		c.tell(ctx, env)
		c.book.reserve("services", env.serviceCIDRs)
		c.environment.Store(&env)
		c.queue.Add(refreshKey)

		select {
		case <-ctx.Done():
			return
		case <-c.clock.After(env.interval()):
		}
	}
}

// interval is how soon the environment is to be looked at again.
func (e environment) interval() time.Duration {
	switch e.reason() {
	case "":
		return refreshInterval
	case ReasonAllocatorConflict:
		return conflictInterval
	default:
		return retryInterval
	}
}

// tell logs what an operator has to know of the environment, when it changes.
func (c *Controller) tell(ctx context.Context, env environment) {
	last := c.environment.Load()
	if last != nil && last.reason() == env.reason() {
		return
	}

	logger := klog.FromContext(ctx)

	switch env.reason() {
	case ReasonAllocatorConflict:
		logger.Error(nil, "Not allocating pod CIDRs", "why", env.obstacle.message)
	case ReasonAllocatorUnknown:
		logger.Info("Not allocating pod CIDRs yet", "why", env.obstacle.message)
	default:
		logger.Info("Allocating pod CIDRs", "clusterCIDRs", env.clusterCIDRs, "serviceCIDRs", env.serviceCIDRs)
	}
}

// reason is that of the obstacle; empty if there is none.
func (e environment) reason() string {
	if e.obstacle == nil {
		return ""
	}

	return e.obstacle.reason
}

func (c *Controller) readEnvironment(ctx context.Context) environment {
	managers, conflicts, problems, unheard := c.readManagers(ctx)

	env := environment{clusterCIDRs: c.options.ClusterCIDRs, serviceCIDRs: slices.Clone(c.options.ServiceCIDRs)}
	disagree := false

	for _, m := range managers {
		if len(c.options.ClusterCIDRs) == 0 {
			disagree = disagree || !slices.Equal(m.clusterCIDRs, managers[0].clusterCIDRs)
			env.clusterCIDRs = managers[0].clusterCIDRs
		}

		if len(c.options.ServiceCIDRs) == 0 {
			env.serviceCIDRs = union(env.serviceCIDRs, m.serviceCIDRs)
		}
	}

	declared, err := c.declaredServiceCIDRs(ctx)
	env.serviceCIDRs = union(env.serviceCIDRs, declared)

	switch {
	case len(conflicts) > 0:
		env.obstacle = &finding{reason: ReasonAllocatorConflict, message: fmt.Sprintf(
			"%s allocates pod CIDRs too, on %s. Add to the configuration of every control-plane machine: %s",
			kubeControllerManager, strings.Join(conflicts, ", "), remedy)}
	case err != nil:
		env.obstacle = &finding{reason: ReasonAllocatorUnknown, message: err.Error()}
	case disagree:
		env.obstacle = &finding{reason: ReasonAllocatorUnknown, message: "The control-plane machines have different pod subnets (cluster.network.podSubnets)"}
	case len(managers) == 0 || unheard:
		message := "Not known yet what " + kubeControllerManager + " does on the control-plane machines"
		if len(problems) > 0 {
			message += ": " + strings.Join(problems, "; ")
		}

		env.obstacle = &finding{reason: ReasonAllocatorUnknown, message: message}
	}

	return env
}

func union(list, more []netip.Prefix) []netip.Prefix {
	for _, p := range more {
		if !slices.Contains(list, p) {
			list = append(list, p)
		}
	}

	return list
}

// readManagers asks every control-plane machine that can be asked. One that does not answer says what it has said last, and if that is nothing it is left out: it
// would stop all else; but unheard are those that nobody has asked yet.
func (c *Controller) readManagers(ctx context.Context) (managers []manager, conflicts, problems []string, unheard bool) {
	last := c.managers
	c.managers = map[string]manager{}

	for _, machine := range c.controlPlane() {
		m, err := machine.read(ctx)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Could not read what the machine's "+kubeControllerManager+" does", "machine", machine.name, "err", err)
			problems = append(problems, fmt.Sprintf("%s: %v", machine.name, err))

			var known bool
			if m, known = last[machine.name]; !known {
				unheard = unheard || errors.Is(err, errUnheard)

				continue
			}
		}

		c.managers[machine.name] = m
		managers = append(managers, m)

		if m.allocates {
			conflicts = append(conflicts, machine.name)
		}
	}

	return managers, conflicts, problems, unheard
}

// controlPlaneMachine is a machine that can be asked, and how.
type controlPlaneMachine struct {
	name string
	read func(context.Context) (manager, error)
}

// errUnheard is of a machine that nobody has tried to reach yet.
var errUnheard = errors.New("nobody has tried to reach it yet")

// controlPlane are the machines of the control plane, as their Nodes' label says: a machine can say so of itself as it likes. This machine, if there are none.
func (c *Controller) controlPlane() []controlPlaneMachine {
	nodes, err := c.lister.List(labels.Everything())
	if err != nil {
		return nil
	}

	var machines []controlPlaneMachine

	for _, node := range nodes {
		if clusteridentity.IsControlPlane(node) && nodespec.IsTalos(node) {
			machines = append(machines, controlPlaneMachine{name: node.Name, read: c.remote(node.Name, c.inventory.Get(node.Name))})
		}
	}

	slices.SortFunc(machines, func(a, b controlPlaneMachine) int { return strings.Compare(a.name, b.name) })

	if len(machines) == 0 && c.own != nil {
		machines = append(machines, controlPlaneMachine{name: "this machine", read: c.local})
	}

	return machines
}

func (c *Controller) local(ctx context.Context) (manager, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()

	return readManager(ctx, c.own)
}

// remote reads another machine over a connection that lasts no longer.
func (c *Controller) remote(nodename string, entry inventory.Entry) func(context.Context) (manager, error) {
	return func(ctx context.Context) (manager, error) {
		switch {
		case entry.Condition == inventory.Unknown:
			return manager{}, errUnheard
		case entry.Condition != inventory.Current:
			return manager{}, errors.New(cmp.Or(entry.Reason, entry.Condition.String()))
		case len(entry.Machine.NodeIPs) == 0:
			return manager{}, errors.New("it has no node IP")
		}

		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()

		machine, err := c.dial(nodename, entry.Machine.NodeIPs[0])
		if err != nil {
			return manager{}, err
		}

		defer machine.Close() //nolint:errcheck // only read

		return readManager(ctx, machine)
	}
}

// declaredServiceCIDRs are those of the ServiceCIDR API; none where the cluster does not have it.
func (c *Controller) declaredServiceCIDRs(ctx context.Context) ([]netip.Prefix, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()

	list, err := c.client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list ServiceCIDRs: %w", err)
	}

	var all []netip.Prefix

	for i := range list.Items {
		cidrs, err := parsePrefixes(list.Items[i].Spec.CIDRs)
		if err != nil {
			return nil, fmt.Errorf("read ServiceCIDR %s: %w", list.Items[i].Name, err)
		}

		all = union(all, cidrs)
	}

	return all, nil
}

// watchOthers takes note if a Node that had none was given podCIDRs by somebody else.
func (c *Controller) watchOthers(before, now *corev1.Node) {
	if before.UID != now.UID || len(before.Spec.PodCIDRs) > 0 || len(now.Spec.PodCIDRs) == 0 {
		return
	}

	if who := podCIDRsManager(now); who != FieldManager {
		i := &intruder{node: now.Name, manager: who, at: c.clock.Now()}
		c.intruder.Store(i)
		c.reporter.report(now, i.finding())
	}
}

// intruder is somebody else who allocates.
type intruder struct {
	node, manager string
	at            time.Time
}

func (i intruder) finding() finding {
	return finding{reason: ReasonAllocatorConflict, message: fmt.Sprintf(
		"%s has given Node %s podCIDRs while we allocate too; nothing is allocated until nobody else has done so for %s", i.manager, i.node, quietTime)}
}

// podCIDRsManager is the field manager that has set a Node's podCIDRs.
func podCIDRsManager(node *corev1.Node) string {
	for _, m := range node.ManagedFields {
		if m.FieldsV1 != nil && strings.Contains(m.FieldsV1.GetRawString(), `"f:podCIDRs"`) {
			return m.Manager
		}
	}

	return "somebody"
}

// obstacle is why nothing may be allocated now; nil if it may.
func (c *Controller) obstacle() *finding {
	if i := c.intruder.Load(); i != nil && c.clock.Since(i.at) < quietTime {
		f := i.finding()

		return &f
	}

	return c.environment.Load().obstacle
}
