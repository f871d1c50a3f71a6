package nodeipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
)

// disableKCMAllocator is the machine configuration that disables kube-controller-manager's allocator. Talos adds
// `controllers` to its own, `*,tokencleaner` or `*` (k8s.ControlPlaneStaticPodController: MergeAdditive; since Talos
// 1.14 ControlPlaneFinalController). A cluster created with Talos 1.14 has a document instead of the field, and Talos
// rejects a configuration with both.
const disableKCMAllocator = `cluster: {controllerManager: {extraArgs: {controllers: "-` + Name + `"}}}; ` +
	`or the same extraArgs in the document KubeControllerManagerConfig if there is one (Talos 1.14)`

// conflictPeriod is how long allocation is blocked after another controller has assigned podCIDRs.
const conflictPeriod = 10 * time.Minute

// effectiveOptions returns the options with the CIDRs of the control plane filled in, and why nothing can be allocated
// now; nil if something can.
func (c *Controller) effectiveOptions(network *controlplane.Network) (Options, *events.Condition) {
	options := c.cfg.Options
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

	if conflict := c.conflict.Load(); conflict != nil && c.cfg.Clock.Since(conflict.at) < conflictPeriod {
		return options, conflict.condition()
	}

	switch allocators := network.Allocators(); {
	case len(allocators) > 0:
		return options, newCondition(ReasonAllocatorConflict,
			"kube-controller-manager allocates pod CIDRs on %s; disable its allocator in the configuration of every control-plane machine: %s",
			strings.Join(allocators, ", "), disableKCMAllocator)
	case network.Problem != "":
		return options, newCondition(ReasonAllocatorUnknown, "%s", network.Problem)
	case differ:
		return options, newCondition(ReasonAllocatorUnknown,
			"The control-plane machines have different pod subnets (cluster.network.podSubnets); configure the same ones, or set --cluster-cidr")
	}

	return options, nil
}

// conflictingAllocator is another controller that has assigned podCIDRs to a Node.
type conflictingAllocator struct {
	node, fieldManager string
	at                 time.Time
}

func (a conflictingAllocator) condition() *events.Condition {
	return newCondition(ReasonAllocatorConflict,
		"Field manager %q assigned podCIDRs to Node %s; allocation is blocked until no other controller has done so for %s", a.fieldManager, a.node, conflictPeriod)
}

// detectConflict records that another controller has assigned podCIDRs to a Node that had none.
func (c *Controller) detectConflict(before, node *corev1.Node) {
	if before.UID != node.UID || len(before.Spec.PodCIDRs) > 0 || len(node.Spec.PodCIDRs) == 0 {
		return
	}

	if owner := podCIDRsOwner(node); owner != FieldManager {
		conflict := &conflictingAllocator{node: node.Name, fieldManager: owner, at: c.cfg.Clock.Now()}
		c.conflict.Store(conflict)
		c.report(node, conflict.condition())
	}
}

// podCIDRsOwner returns the field manager of a Node's podCIDRs, or "unknown".
func podCIDRsOwner(node *corev1.Node) string {
	for _, m := range node.ManagedFields {
		if m.FieldsV1 != nil && strings.Contains(m.FieldsV1.GetRawString(), `"f:podCIDRs"`) {
			return m.Manager
		}
	}

	return "unknown"
}

func newCondition(reason, format string, args ...any) *events.Condition {
	return &events.Condition{Reason: reason, Message: fmt.Sprintf(format, args...)}
}
