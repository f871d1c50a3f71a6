package nodespec_test

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

func TestIsTalos(t *testing.T) {
	for osImage, want := range map[string]bool{
		"Talos (v1.13.5)":         true,
		"Talos (v1.14.0-alpha.1)": true,
		"Talos (v1.10.9-dirty)":   true,

		"":                           false,
		"Ubuntu 24.04.1 LTS":         false,
		"Flatcar Container Linux":    false,
		"Not Talos":                  false,
		"talos":                      false,
		" Talos (v1.13.5)":           false,
		"Bottlerocket OS 1.20.0":     false,
		"Debian GNU/Linux 12 (Talo)": false,
	} {
		t.Run(osImage, func(t *testing.T) {
			node := &corev1.Node{Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{OSImage: osImage}}}
			if got := nodespec.IsTalos(node); got != want {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

// nodeWith returns a Node whose kubelet reports the node IPs in annotation, and internal addresses.
func nodeWith(annotation string, internal ...string) *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-1", Annotations: map[string]string{"alpha.kubernetes.io/provided-node-ip": annotation}}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "192.0.2.77"}, {Type: corev1.NodeExternalIP, Address: "192.0.2.78"}}

	for _, ip := range internal {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip})
	}

	return node
}

func texts(addrs []netip.Addr) string {
	var list []string
	for _, a := range addrs {
		list = append(list, a.String())
	}

	return strings.Join(list, " ")
}

func TestProvidedNodeIPs(t *testing.T) {
	for _, test := range []struct{ name, annotation, want string }{
		{"none", "", ""},
		{"one", "10.0.0.1", "10.0.0.1"},
		{"two", "2001:db8::1,10.0.0.1", "2001:db8::1 10.0.0.1"},
		{"surrounded by spaces", " 10.0.0.1 , 2001:db8::1 ", "10.0.0.1 2001:db8::1"},
		{"invalid addresses", "10.0.0.1,worker-1,10.0.0.0/24,300.0.0.1", "10.0.0.1"},
		{"empty items", ",,10.0.0.1,", "10.0.0.1"},
		{"address with a zone", "fe80::1%eth0,10.0.0.1", "10.0.0.1"},
		{"IPv4-mapped IPv6", "::ffff:10.0.0.1", "10.0.0.1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := texts(nodespec.ProvidedNodeIPs(nodeWith(test.annotation))); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}

	if got := nodespec.ProvidedNodeIPs(&corev1.Node{}); len(got) != 0 {
		t.Errorf("without annotations: got %v", got)
	}
}

func TestDialAddresses(t *testing.T) {
	for _, test := range []struct {
		name, annotation string
		internal         []string
		want             string
	}{
		{"host names and external addresses only", "", nil, ""},
		{"node IP before internal addresses", "10.0.0.2", []string{"10.0.0.1"}, "10.0.0.2 10.0.0.1"},
		{"internal addresses only", "", []string{"10.0.0.1", "2001:db8::1"}, "10.0.0.1 2001:db8::1"},
		{"duplicates", "10.0.0.1", []string{"10.0.0.1", "::ffff:10.0.0.1"}, "10.0.0.1"},
		{"invalid addresses", "x", []string{"worker-1", "10.0.0.1"}, "10.0.0.1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := texts(nodespec.DialAddresses(nodeWith(test.annotation, test.internal...))); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// The annotation is untrusted: a client with the credentials of a kubelet can write it.
func FuzzProvidedNodeIPs(f *testing.F) {
	f.Add("", "")
	f.Add("10.0.0.1,2001:db8::1", "10.0.0.1")
	f.Add("::ffff:10.0.0.1,fe80::1%eth0", "fe80::1%eth0")
	f.Add(",,\x00\xff,1.2.3.4.5", "0x7f000001")
	f.Add(strings.Repeat("10.0.0.1,", 1000), "\n10.0.0.1\t")

	f.Fuzz(func(t *testing.T, annotation, internal string) {
		node := nodeWith(annotation, internal)
		provided, dialed := nodespec.ProvidedNodeIPs(node), nodespec.DialAddresses(node)

		for _, a := range slices.Concat(provided, dialed) {
			if !a.IsValid() || a.Zone() != "" || a.Is4In6() {
				t.Errorf("%q and %q gave %v", annotation, internal, a)
			}
		}

		for i, a := range dialed {
			if slices.Contains(dialed[:i], a) {
				t.Errorf("%v is listed twice", a)
			}
		}

		for _, a := range provided {
			if !slices.Contains(dialed, a) {
				t.Errorf("%v is provided but not dialed", a)
			}
		}
	})
}

func TestNewInput_WithPeers(t *testing.T) {
	m := running().Machine
	m.Addresses = append(m.Addresses, external("203.0.113.1"), external("203.0.113.2"))
	m.Platform.Hostname = "w.example.org"

	peer := m
	peer.Nodename, peer.Addresses = "worker-2", []machine.Address{external("203.0.113.1")}

	machines := inventory.New(time.Now)
	machines.Replace("worker-1", m)

	node := nodeWith("10.0.0.1")
	node.Status.NodeInfo.Architecture, node.Status.NodeInfo.KubeletVersion = "arm64", "v1.36.2"

	in := nodespec.NewInput(node, m, nodespec.Options{PreferIPv6: true})
	want := nodespec.Input{
		Machine: m, ProvidedNodeIPs: addrs([]string{"10.0.0.1"}), Architecture: "arm64", KubernetesVersion: "v1.36.2", Options: nodespec.Options{PreferIPv6: true},
	}

	if !reflect.DeepEqual(in, want) {
		t.Errorf("got %+v, want %+v", in, want)
	}

	if in := in.WithPeers(machines, "worker-1"); in.SharedUUID || len(in.SharedAddresses) > 0 || len(in.OwnersOf("w.example.org")) > 0 {
		t.Errorf("without peers: shared UUID %t, addresses %v", in.SharedUUID, in.SharedAddresses)
	}

	machines.Replace("worker-2", peer)

	if in := in.WithPeers(machines, "worker-1"); !slices.Equal(in.OwnersOf("w.example.org"), []string{"worker-2"}) || !in.SharedUUID || !slices.Equal(in.SharedAddresses, addrs([]string{"203.0.113.1"})) {
		t.Errorf("with a peer: shared UUID %t, addresses %v", in.SharedUUID, in.SharedAddresses)
	}
}

func TestIsControlPlane_NeedsTheLabel(t *testing.T) {
	labeled := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"node-role.kubernetes.io/control-plane": ""}}}
	if !nodespec.IsControlPlane(labeled) {
		t.Error("a Node with the label is not of the control plane")
	}

	if nodespec.IsControlPlane(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "controlplane-1"}}) {
		t.Error("a Node without the label is of the control plane")
	}
}
