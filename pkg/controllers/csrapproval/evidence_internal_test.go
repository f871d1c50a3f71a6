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

// node is one of a Talos worker that lists addresses.
func node(name string, addresses ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	n.Status.NodeInfo.OSImage = talos

	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}

	return n
}

func TestANodeClaimsItsNameAndAddresses(t *testing.T) {
	listed := node("Node-A", "::ffff:10.0.0.1", "Host.example.org.", "10.0.0.1", "FD00::1", "")
	listed.Annotations = map[string]string{cloudproviderapi.AnnotationAlphaProvidedIPAddr: "10.0.0.1,10.0.0.2"}

	claims, err := claimsOf(listed)
	if err != nil {
		t.Fatal(err)
	}

	if want := []string{"10.0.0.1", "10.0.0.2", "fd00::1", "host.example.org", "node-a"}; !slices.Equal(claims, want) {
		t.Errorf("got %v, want %v", claims, want)
	}

	if claims, err := claimsOf(cache.DeletedFinalStateUnknown{}); err != nil || len(claims) > 0 {
		t.Errorf("what is no Node claims %v, %v", claims, err)
	}
}

func TestWhoElseClaimsWhatIsAskedFor(t *testing.T) {
	const addr = "10.0.0.1"

	seen := machine.Machine{Nodename: "other", Addresses: []machine.Address{{Link: "eth0", Prefix: netip.MustParsePrefix("10.0.0.9/24")}}}

	for _, test := range []struct {
		rule  string
		claim string
		other *corev1.Node
		known func(*inventory.Inventory)
		want  []string
	}{
		{"a Node whose machine nobody has seen", addr, node("other", addr), func(*inventory.Inventory) {}, []string{"other"}},
		{"a Node whose machine never answered", addr, node("other", addr), func(i *inventory.Inventory) { i.MarkUnreachable("other", "gone") }, []string{"other"}},
		{"one whose machine does not say so, which may be an impostor", addr, node("other", addr), func(i *inventory.Inventory) { i.Replace("other", seen) }, []string{"other"}},
		{"one at whose address another machine answers", addr, node("other", addr), func(i *inventory.Inventory) { i.MarkMismatch("other", "no") }, []string{"other"}},
		{"one of that name", "other", node("other"), func(*inventory.Inventory) {}, []string{"other"}},
		{"not the Node that asks", addr, node("asking", addr), func(*inventory.Inventory) {}, nil},
	} {
		t.Run(test.rule, func(t *testing.T) {
			indexer := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{indexClaims: claimsOf})
			if err := indexer.Add(test.other); err != nil {
				t.Fatal(err)
			}

			inv := inventory.New(time.Now)
			test.known(inv)

			e := evidence{nodes: indexer, inventory: inv}
			if got := e.nodesClaiming(test.claim, "asking"); !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func labeled(n *corev1.Node) *corev1.Node {
	n.Labels[role] = ""

	return n
}

func TestStandingOfANode(t *testing.T) {
	debian, deleted := node("a"), node("a")
	debian.Status.NodeInfo.OSImage = "Debian GNU/Linux"
	deleted.DeletionTimestamp = &metav1.Time{}

	for _, test := range []struct {
		rule    string
		node    *corev1.Node
		claimed bool
		want    csrpolicy.NodeState
	}{
		{"there is none", nil, true, csrpolicy.NodeUnknown},
		{"one that is being deleted", deleted, true, csrpolicy.NodeUnknown},
		{"another system's", debian, true, csrpolicy.NodeUnmanaged},
		{"a worker's", node("a"), true, csrpolicy.NodeWorker},
		{"one of the control plane", labeled(node("a")), true, csrpolicy.NodeControlPlane},
		{"one that is not ours", labeled(node("a")), false, csrpolicy.NodeUnmanaged},
	} {
		e := evidence{claims: func(*corev1.Node) bool { return test.claimed }}
		if got := e.nodeStanding(test.node); got != test.want {
			t.Errorf("%s: got %v, want %v", test.rule, got, test.want)
		}
	}
}

func TestStandingOfAMachine(t *testing.T) {
	now := time.Now()

	for _, test := range []struct {
		rule  string
		entry inventory.Entry
		want  csrpolicy.MachineState
	}{
		{"nobody knows it", inventory.Entry{}, csrpolicy.MachineUnknown},
		{"it never answered", inventory.Entry{Condition: inventory.Unreachable}, csrpolicy.MachineUnknown},
		{"it no longer answers", inventory.Entry{Condition: inventory.Unreachable, ObservedAt: now}, csrpolicy.MachineUnreachable},
		{"it is another", inventory.Entry{Condition: inventory.Mismatch}, csrpolicy.MachineMismatch},
		{"it is watched", inventory.Entry{Condition: inventory.Current, ObservedAt: now}, csrpolicy.MachineCurrent},
	} {
		if got := machineStanding(test.entry); got != test.want {
			t.Errorf("%s: got %v, want %v", test.rule, got, test.want)
		}
	}
}
