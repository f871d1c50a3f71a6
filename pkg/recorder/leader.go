package recorder

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/internal/nodes"
	"github.com/talos-ccm/talos-ccm/pkg/internal/queue"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	// indexAddress is the index of Nodes by the addresses in their records.
	indexAddress = "recorder/address"

	// reportDelay is how long a problem lasts before it is reported. The kubelet of a machine that was reinstalled, or has a
	// new address, requests a certificate earlier, and a new configuration reaches one machine after the other.
	reportDelay = 5 * time.Minute

	workers = 10
)

// ReasonMismatch: another machine than the recorded one responds for the Node, and no CSR has updated the record.
// Fix: docs/troubleshooting/nodes.md#node-record-mismatch.
const ReasonMismatch = "NodeRecordMismatch"

// ReasonWriteFailed: the API server rejected the Node's record, without which the Node is not initialized.
// Fix: docs/troubleshooting/installation.md#kubernetes-api-errors.
const ReasonWriteFailed = "NodeRecordWriteFailed"

// ReasonConfigDiffers: its configuration differs from the leader's.
// Fix: docs/troubleshooting/configuration.md#different-configurations.
const ReasonConfigDiffers = "ConfigDiffers"

// Leader records the machine of each Node while the instance leads. Use NewLeader.
type Leader struct {
	client    kubernetes.Interface
	nodes     coreinformers.NodeInformer
	inventory *inventory.Inventory
	clock     clock.PassiveClock
	config    func() string

	queue    queue.Queue
	reporter *events.Reporter
	problems sync.Map // nodename → map[string]time.Time: since when problems have lasted, by reason
}

// NewLeader returns a Leader that is subscribed to Nodes and machines. Call it before the informer is started. config
// returns the hash of the leader's configuration; empty if no other instance should have the same.
func NewLeader(
	client kubernetes.Interface, informer coreinformers.NodeInformer, inv *inventory.Inventory, recorder record.EventRecorder, clk clock.PassiveClock,
	config func() string,
) (*Leader, error) {
	l := &Leader{client: client, nodes: informer, inventory: inv, clock: clk, config: config, queue: queue.New("node-records"), reporter: events.New(recorder)}

	if err := informer.Informer().AddIndexers(cache.Indexers{indexAddress: recordedIn}); err != nil {
		return nil, fmt.Errorf("index nodes by recorded address: %w", err)
	}

	inv.Subscribe(l.queue.Add)

	_, err := nodes.Watch(informer, func(before, after *corev1.Node) {
		if after == nil {
			l.forget(before.Name)
		} else {
			l.queue.Add(after.Name)
		}
	})

	return l, err
}

// recordedIn is the index function of indexAddress.
func recordedIn(obj any) (addresses []string, _ error) {
	if node, ok := obj.(*corev1.Node); ok {
		r := noderecord.Of(node)
		addresses = []string{r.Address.String(), r.OtherAddress.String()}
	}

	return addresses, nil
}

// Run records machines until ctx ends.
func (l *Leader) Run(ctx context.Context) {
	if cache.WaitForNamedCacheSyncWithContext(ctx, l.nodes.Informer().HasSynced) {
		queue.Reconciler{Queue: l.queue, Subject: "node", Failure: "Failed to record machine; retrying", Sync: l.sync}.Run(ctx, workers)
	}
}

// sync updates the record of one Node, and again after a while: the records of other Nodes, or of deleted ones, may have
// ended.
func (l *Leader) sync(ctx context.Context, nodename string) (again time.Duration, err error) {
	node, _ := l.nodes.Lister().Get(nodename) // fails only if there is none
	if node == nil {
		return 0, nil
	}

	problems := l.lasting(node)

	if next := l.next(node); next != noderecord.Of(node) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()

		switch err = Write(ctx, l.client, node, next.ByLeader()); {
		case err == nil:
			klog.FromContext(ctx).Info("Recorded machine", "address", next.Address)
		case apierrors.IsInvalid(err), apierrors.IsForbidden(err):
			problems = append(problems, events.Problem{Reason: ReasonWriteFailed, Message: fmt.Sprintf(
				"A new Node is not initialized until its machine is recorded. Allow talos-ccm to write labels %s*: %v", noderecord.LabelCredential, err)})
		default: // such as a conflict, which does not end the problem
			return 0, err
		}
	}

	l.reporter.Report(nodename, node, problems...)

	// It may have been deleted during the write, and another one registered.
	if current, _ := l.nodes.Lister().Get(nodename); current == nil || current.UID != node.UID {
		l.forget(nodename)
	}

	return interval, err
}

// forget forgets the problems of a deleted Node.
func (l *Leader) forget(nodename string) {
	l.reporter.Forget(nodename)
	l.problems.Delete(nodename)
}

// Write writes labels to a version of a Node, and fails with a conflict if there is a newer one.
func Write(ctx context.Context, client kubernetes.Interface, node *corev1.Node, labels noderecord.Labels) error {
	patch, err := labels.PatchOf(node)
	if err == nil {
		_, err = client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: noderecord.FieldManager})
	}

	if err != nil {
		return fmt.Errorf("write record of node %q: %w", node.Name, err)
	}

	return nil
}

// IsRecorded reports whether the machine of a Node responds, and the Leader has nothing to write for the Node.
func (l *Leader) IsRecorded(node *corev1.Node) bool {
	_, responds := l.machineOf(node)

	return responds && l.next(node) == noderecord.Of(node)
}

// machineOf returns the machine of a Node if it responds. That of a control-plane Node must be verified to be one.
func (l *Leader) machineOf(node *corev1.Node) (m machine.Machine, responds bool) {
	entry := l.inventory.Get(node.Name)
	isVerified := entry.Machine.ControlPlane != nil || !nodespec.IsControlPlane(node)

	return entry.Machine, entry.Condition == inventory.Current && isVerified && node.DeletionTimestamp == nil
}

// next returns the record that the Node should have. An existing record follows only its volume, which other machines can
// hardly report. A Node gets the record that a deleted Node of its name had, or none if its machine is another one.
func (l *Leader) next(node *corev1.Node) noderecord.Record {
	r := noderecord.Of(node)

	m, responds := l.machineOf(node)
	if !responds {
		return r
	}

	// A record with only a node ID, which is public, is none: it could never get an address.
	if r.Credential == "" && r.Volume == "" && !r.Address.IsValid() {
		kept := noderecord.Kept(l.inventory.Claims.Deleted(node), node)

		switch {
		case kept.Credential != "" && kept.Identifies(m):
			// The kubelet has its certificate on the same volume, unless the machine was renamed. Only the machine states it.
			r = kept
			r.Stated, r.IsWorker = "", kept.IsWorker && kept.Stated == ""
		case kept != (noderecord.Record{}) && !kept.Matches(m):
			return r
		default:
			r = noderecord.Record{NodeID: noderecord.Fingerprint(m.NodeID), Volume: noderecord.ID([]byte(m.EphemeralID)), IsWorker: !nodespec.IsControlPlane(node)}
		}
	} else if !r.Identifies(m) {
		return r
	}

	return l.locate(r, m, node)
}

// locate returns the record with the addresses of its machine.
func (l *Leader) locate(r noderecord.Record, m machine.Machine, node *corev1.Node) noderecord.Record {
	// Machines may have exchanged their addresses, so that an address may be in two records until both follow.
	if address := noderecord.AddressOf(m); address.IsValid() && (r.Address.IsValid() || !l.isTaken(address, node)) {
		r.Address = address
	}

	if other := otherOf(m, r.Address); len(m.NodeIPs) > 0 && other != r.OtherAddress {
		r.OtherAddress = netip.Addr{}
		if !l.isTaken(other, node) && !l.isReported(other, node) {
			r.OtherAddress = other
		}
	}

	return r
}

// otherOf returns the machine's node IP of the other IP family than address; the zero value if there is none.
func otherOf(m machine.Machine, address netip.Addr) netip.Addr {
	for _, addr := range m.NodeIPs {
		if addr = addr.Unmap().WithZone(""); address.IsValid() && addr.Is4() != address.Is4() && addr.IsGlobalUnicast() {
			return addr
		}
	}

	return netip.Addr{}
}

// isTaken reports whether the record of another Node has an address. Control-plane machines take addresses from workers.
func (l *Leader) isTaken(addr netip.Addr, node *corev1.Node) bool {
	found, _ := l.nodes.Informer().GetIndexer().ByIndex(indexAddress, addr.String()) // fails only without the index

	return slices.ContainsFunc(found, func(obj any) bool {
		other, ok := obj.(*corev1.Node)

		return ok && other.Name != node.Name && (nodespec.IsControlPlane(other) || !nodespec.IsControlPlane(node))
	})
}

// isReported reports whether an address of a worker is that of a control-plane machine, or a node IP of another machine.
func (l *Leader) isReported(addr netip.Addr, node *corev1.Node) bool {
	others := l.inventory.Claims.ReportedBy(machine.CanonicalAddress(addr), node.Name)

	return !nodespec.IsControlPlane(node) && slices.ContainsFunc(others, func(nodename string) bool {
		other := l.inventory.Get(nodename)

		return other.Last.ControlPlane != nil || other.Condition == inventory.Current && slices.Contains(other.Machine.NodeIPs, addr)
	})
}

// lasting returns the problems of a Node that have lasted for a while.
func (l *Leader) lasting(node *corev1.Node) (lasting []events.Problem) {
	var current []events.Problem

	if m, responds := l.machineOf(node); responds {
		current = slices.Concat(mismatch(node, m), l.otherConfig(node, m))
	}

	before, _ := l.problems.Load(node.Name)
	known, _ := before.(map[string]time.Time)
	since := map[string]time.Time{}

	for _, p := range current {
		at, found := known[p.Reason]
		if !found {
			at = l.clock.Now()
		}

		if since[p.Reason] = at; l.clock.Since(at) >= reportDelay {
			lasting = append(lasting, p)
		}
	}

	if len(since) == 0 {
		l.problems.Delete(node.Name)
	} else {
		l.problems.Store(node.Name, since)
	}

	return lasting
}

// mismatch returns the problem of a machine that is not the recorded one.
func mismatch(node *corev1.Node, m machine.Machine) []events.Problem {
	r := noderecord.Of(node)
	if r.Matches(m) || !r.Address.IsValid() && !r.Contradicts(m) {
		return nil
	}

	why := fmt.Sprintf("it is not at the recorded address %s, and its volume is not recorded", r.Address)
	if r.Contradicts(m) {
		why = "it has another volume or node ID"
	}

	return []events.Problem{{Reason: ReasonMismatch, Message: fmt.Sprintf(
		"Machine at %s is not the recorded one: %s. Check the machine. Only if it is the Node's, run kubectl label node %s %s- %s- %s- %s-",
		m.Endpoint, why, node.Name, noderecord.LabelCredential, noderecord.LabelContext, noderecord.LabelAddress, noderecord.LabelAddressOther)}}
}

// otherConfig returns the problem of an instance that stated another configuration than the leader's.
func (l *Leader) otherConfig(node *corev1.Node, m machine.Machine) []events.Problem {
	own, other := l.config(), noderecord.InstanceOf(node).Config
	if m.ControlPlane == nil || m.ControlPlane.Local || own == "" || other == "" || own == other {
		return nil
	}

	return []events.Problem{{Reason: ReasonConfigDiffers, Message: fmt.Sprintf(
		"The configuration of talos-ccm on this machine (%s) differs from the leader's (%s): apply the same ExtensionServiceConfig document to all control-plane machines. "+
			"If this machine no longer runs the extension, run kubectl label node %s %s- %s-", other, own, node.Name, noderecord.LabelConfig, noderecord.LabelVersion)}}
}
