package nodespec_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

func TestIsTalos(t *testing.T) {
	for want, images := range map[bool][]string{
		true:  {"Talos (v1.13.5)", "Talos (v1.14.0-alpha.1)", "Talos (v1.10.9-dirty)"},
		false: {"", "Ubuntu 24.04.1 LTS", "Flatcar Container Linux", "Not Talos", "talos", " Talos (v1.13.5)", "Bottlerocket OS 1.20.0", "Debian GNU/Linux 12 (Talo)"},
	} {
		for _, osImage := range images {
			node := &corev1.Node{Status: corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{OSImage: osImage}}}
			assert.Equal(t, want, nodespec.IsTalos(node), osImage)
		}
	}
}

// A kubelet can set none of these labels.
func TestIsKnown(t *testing.T) {
	for label, want := range map[string]bool{
		"node-role.kubernetes.io/control-plane": true, nodespec.LabelPlatform: true, "node-role.kubernetes.io/worker": false, "team": false,
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{label: "x"}}}
		assert.Equal(t, want, nodespec.IsKnown(node), label)
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

func texts(addrs []netip.Addr) string { return strings.Trim(fmt.Sprint(addrs), "[]") }

func TestProvidedNodeIPsAndDialAddresses(t *testing.T) {
	for _, test := range []struct {
		name, annotation string
		internal         []string
		provided, dialed string
	}{
		{"host names and external addresses only", "", nil, "", ""},
		{"one", "10.0.0.1", nil, "10.0.0.1", "10.0.0.1"},
		{"two", "2001:db8::1,10.0.0.1", nil, "2001:db8::1 10.0.0.1", "2001:db8::1 10.0.0.1"},
		{"surrounded by spaces", " 10.0.0.1 , 2001:db8::1 ", nil, "10.0.0.1 2001:db8::1", "10.0.0.1 2001:db8::1"},
		{"invalid node IPs", "10.0.0.1,worker-1,10.0.0.0/24,300.0.0.1", nil, "10.0.0.1", "10.0.0.1"},
		{"empty items", ",,10.0.0.1,", nil, "10.0.0.1", "10.0.0.1"},
		{"address with a zone", "fe80::1%eth0,10.0.0.1", nil, "10.0.0.1", "10.0.0.1"},
		{"IPv4-mapped IPv6", "::ffff:10.0.0.1", nil, "10.0.0.1", "10.0.0.1"},
		{"node IP before internal addresses", "10.0.0.2", []string{"10.0.0.1"}, "10.0.0.2", "10.0.0.2 10.0.0.1"},
		{"internal addresses only", "", []string{"10.0.0.1", "2001:db8::1"}, "", "10.0.0.1 2001:db8::1"},
		{"duplicates", "10.0.0.1", []string{"10.0.0.1", "::ffff:10.0.0.1"}, "10.0.0.1", "10.0.0.1"},
		{"invalid addresses", "x", []string{"worker-1", "10.0.0.1"}, "", "10.0.0.1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			node := nodeWith(test.annotation, test.internal...)
			assert.Equal(t, test.provided, texts(nodespec.ProvidedNodeIPs(node)))
			assert.Equal(t, test.dialed, texts(nodespec.DialAddresses(node)))
		})
	}

	assert.Empty(t, nodespec.ProvidedNodeIPs(&corev1.Node{}), "without annotations")

	for label, want := range map[string]string{
		"10.0.0.9": "10.0.0.9 10.0.0.1 10.0.0.2", "10.0.0.2": "10.0.0.2 10.0.0.1", "": "10.0.0.1 10.0.0.2", "worker-1": "10.0.0.1 10.0.0.2",
		"2001-0db8-0000-0000-0000-0000-0000-0000": "2001:db8:: 10.0.0.1 10.0.0.2",
	} {
		node := nodeWith("10.0.0.1", "10.0.0.2")
		node.Labels = map[string]string{noderecord.LabelAddress: label}
		assert.Equal(t, want, texts(nodespec.DialAddresses(node)), label)
	}

	translated := nodeWith("10.0.0.1", "10.0.0.2", "10.0.0.3")
	translated.Labels = map[string]string{noderecord.RuleAddressLabel(addr("10.0.0.2")): "InternalIP"}
	assert.Equal(t, "10.0.0.1 10.0.0.3", texts(nodespec.DialAddresses(translated)), "addresses of rules are not dialed")
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
			assert.True(t, a.IsValid() && a.Zone() == "" && !a.Is4In6(), a)
		}

		for i, a := range dialed {
			assert.NotContains(t, dialed[:i], a)
		}

		for _, a := range provided {
			assert.Contains(t, dialed, a)
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
	assert.Equal(t, nodespec.Input{
		Machine: m, ProvidedNodeIPs: addrs([]string{"10.0.0.1"}), ExternalIPs: addrs([]string{"192.0.2.78"}),
		Architecture: "arm64", KubernetesVersion: "v1.36.2", Options: nodespec.Options{PreferIPv6: true},
	}, in)

	other := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{nodespec.LabelPlatform: "metal"}},
		Spec:       corev1.NodeSpec{ProviderID: "talos://metal/" + uuid},
	}
	nodes := func(string) (*corev1.Node, error) { return other, nil }

	alone := in.WithPeers(machines, "worker-1", nodes)
	assert.Empty(t, alone.SharedUUID)
	assert.Empty(t, alone.SharedAddresses)
	assert.Empty(t, alone.OwnersOf("w.example.org"))

	machines.Replace("worker-2", peer)

	in = in.WithPeers(machines, "worker-1", nodes)
	assert.Equal(t, []string{"worker-2"}, in.SharedUUID)
	assert.Equal(t, map[netip.Addr][]string{addr("203.0.113.1"): {"worker-2"}}, in.SharedAddresses)
	assert.Equal(t, []string{"worker-2"}, in.OwnersOf("w.example.org"))

	for providerID, counts := range map[string]bool{
		"talos://metal/" + strings.ToUpper(uuid): true, "talos://metal/x/" + uuid: false, "talos://metal/" + uuid[1:]: false, "talos://metal/10.0.0.2": false, "": false,
	} {
		other.Spec.ProviderID = providerID
		assert.Equal(t, counts, len(in.WithPeers(machines, "worker-1", nodes).SharedUUID) > 0, providerID)
	}

	other.Spec.ProviderID, other.Labels = "talos://metal/"+uuid, nil
	assert.Empty(t, in.WithPeers(machines, "worker-1", nodes).SharedUUID)
	assert.Empty(t, in.WithPeers(machines, "worker-1", func(string) (*corev1.Node, error) { return nil, errors.New("not found") }).SharedUUID)
}

func TestIsControlPlane_NeedsTheLabel(t *testing.T) {
	labeled := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"node-role.kubernetes.io/control-plane": ""}}}
	assert.True(t, nodespec.IsControlPlane(labeled))
	assert.False(t, nodespec.IsControlPlane(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "controlplane-1"}}))
}
