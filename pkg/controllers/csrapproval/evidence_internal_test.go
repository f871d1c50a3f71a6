package csrapproval

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	cloudproviderapi "k8s.io/cloud-provider/api"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const (
	talos = "Talos (v1.13.5)"
	role  = "node-role.kubernetes.io/control-plane"
)

// node returns a Node of a Talos worker that lists addresses.
func node(name string, addresses ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	n.Status.NodeInfo.OSImage = talos

	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}

	return n
}

func labeled(n *corev1.Node) *corev1.Node {
	n.Labels[role] = ""

	return n
}

func TestSubjectsOf_ReturnsCanonicalNameAndAddresses(t *testing.T) {
	listed := node("Node-A", "::ffff:10.0.0.1", "Host.example.org.", "10.0.0.1", "FD00::1", "")
	listed.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: "10.0.0.1,10.0.0.2"}

	subjects, err := subjectsOf(listed)
	if err != nil {
		t.Fatal(err)
	}

	if want := []string{"10.0.0.1", "10.0.0.2", "fd00::1", "host.example.org", "node-a"}; !slices.Equal(subjects, want) {
		t.Errorf("got %v, want %v", subjects, want)
	}

	if subjects, err := subjectsOf(cache.DeletedFinalStateUnknown{}); err != nil || len(subjects) > 0 {
		t.Errorf("not a Node: got %v, %v", subjects, err)
	}
}

func TestOtherOwners_IncludesNodesWhateverTheirMachinesReport(t *testing.T) {
	const addr = "10.0.0.1"

	reported := machine.Machine{Nodename: "other", Addresses: []machine.Address{{Link: "eth0", Prefix: netip.MustParsePrefix("10.0.0.9/24")}}}

	for _, test := range []struct {
		name    string
		subject string
		node    *corev1.Node
		update  func(*inventory.Inventory)
		want    []string
	}{
		{"machine unknown", addr, node("other", addr), func(*inventory.Inventory) {}, []string{"other"}},
		{"machine never responded", addr, node("other", addr), func(i *inventory.Inventory) { i.MarkUnreachable("other", "gone") }, []string{"other"}},
		{"machine does not report the address", addr, node("other", addr), func(i *inventory.Inventory) { i.Replace("other", reported) }, []string{"other"}},
		{"another machine responds", addr, node("other", addr), func(i *inventory.Inventory) { i.MarkMismatch("other", "other", "no") }, []string{"other"}},
		{"Node does not list the address", "10.0.0.9", node("other", addr), func(i *inventory.Inventory) { i.Replace("other", reported) }, []string{"other"}},
		{"name of a Node", "other", node("other"), func(*inventory.Inventory) {}, []string{"other"}},
		{"requesting Node", addr, node("requesting", addr), func(*inventory.Inventory) {}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			indexer := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{indexSubjects: subjectsOf})
			if err := indexer.Add(test.node); err != nil {
				t.Fatal(err)
			}

			machines := inventory.New(time.Now)
			test.update(machines)

			if got := otherOwners(indexer, machines, test.subject, "requesting"); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestNodeState(t *testing.T) {
	debian, deleted := node("a"), node("a")
	debian.Status.NodeInfo.OSImage = "Debian GNU/Linux"
	deleted.DeletionTimestamp = &metav1.Time{}

	for _, test := range []struct {
		name    string
		node    *corev1.Node
		managed bool
		want    csrpolicy.NodeState
	}{
		{"no Node", nil, true, csrpolicy.NodeUnknown},
		{"being deleted", deleted, true, csrpolicy.NodeUnknown},
		{"another operating system", debian, true, csrpolicy.NodeUnmanaged},
		{"worker", node("a"), true, csrpolicy.NodeWorker},
		{"control plane", labeled(node("a")), true, csrpolicy.NodeControlPlane},
		{"not managed", labeled(node("a")), false, csrpolicy.NodeUnmanaged},
	} {
		if got := nodeState(test.node, func() bool { return test.managed }); got != test.want {
			t.Errorf("%s: got %v, want %v", test.name, got, test.want)
		}
	}
}

func TestMachineState(t *testing.T) {
	now := time.Now()

	for _, test := range []struct {
		name  string
		entry inventory.Entry
		want  csrpolicy.MachineState
	}{
		{"unknown", inventory.Entry{}, csrpolicy.MachineUnknown},
		{"never responded", inventory.Entry{Condition: inventory.Unreachable}, csrpolicy.MachineUnknown},
		{"no longer responds", inventory.Entry{Condition: inventory.Unreachable, ObservedAt: now}, csrpolicy.MachineUnreachable},
		{"another machine responds", inventory.Entry{Condition: inventory.Mismatch}, csrpolicy.MachineMismatch},
		{"watched", inventory.Entry{Condition: inventory.Current, ObservedAt: now}, csrpolicy.MachineCurrent},
	} {
		if got := machineState(test.entry); got != test.want {
			t.Errorf("%s: got %v, want %v", test.name, got, test.want)
		}
	}
}
