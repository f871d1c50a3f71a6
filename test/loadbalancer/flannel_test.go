//go:build e2e

package loadbalancer_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/builder"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
	"github.com/talos-ccm/talos-ccm/test/product"
)

const (
	flanneldEnv = "TALOS_CCM_FLANNELD"

	// netConf is net-conf.json as Talos v1.14.1 writes it for podSubnets (k8stemplates.FlannelConfigMapTemplate).
	// flanneld of test/flannel is that of this release.
	netConf = `{
  "Network": "10.244.0.0/16",
  "IPv6Network": "fd00:10:244::/56",
  "EnableIPv6": true,
  "EnableNFTables": true,
  "Backend": {"Port": 4789, "Type": "vxlan"}
}`

	// pools are those of docs/guides/pod-cidrs.md, and one outside podSubnets for a platform.
	pools = `
ipam:
  pools:
    - name: control-plane
      nodeSelector:
        - matchExpressions:
            - {key: machineType, operator: In, values: [controlplane]}
      cidrs: [10.244.0.0/16]
      maskSizeIPv4: 25
    - name: outside
      nodeSelector:
        - matchExpressions:
            - {key: platform, operator: In, values: [nocloud]}
      cidrs: [10.245.0.0/16]
`
)

// talosNode is a Node of a simulated machine, with flanneld, kube-proxy and a pod in its network namespace.
type talosNode struct {
	node

	spec    talostest.MachineSpec
	podIPv6 string
	// gateway is the address of the pod's bridge, and overlay that of Flannel's link.
	gateway, overlay string
}

// plugTalos plays what Talos has configured before any pod runs: addresses, default routes and forwarding.
func (b *bed) plugTalos(name string, number int, platform string) *talosNode {
	b.Helper()

	n := &talosNode{node: node{name: name, address: fmt.Sprintf("192.0.2.%d", number)}}
	n.spec = talostest.MachineSpec{
		Nodename: name, Platform: runtime.PlatformMetadataSpec{Platform: platform, InstanceID: strconv.Itoa(number)},
		SystemInformation: &hardware.SystemInformationSpec{UUID: fmt.Sprintf("4c4c4544-0042-3510-8047-%012d", number)},
		Addresses:         []talostest.Address{{Link: "eth0", Prefix: netip.MustParsePrefix(n.address + "/24")}},
	}
	n.namespace = b.plug(name, n.address)

	require.NoError(b, n.namespace.IP(b.Context(), fmt.Sprintf("address add fd00:192::%d/64 dev eth0 nodad", number),
		"route add default via 192.0.2.254", "route add default via fd00:192::fe dev eth0"))
	require.NoError(b, n.namespace.Inside(func() error {
		return errors.Join(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644),
			os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0o644))
	}))

	return n
}

// boot starts the machines, and talos-ccm on the first.
func (b *bed) boot(nodes ...*talosNode) {
	b.Helper()

	subnets := strings.Split(podSubnets, ",")
	b.Talos = ctest.NewTalos(b, talostest.Options{
		Dir: b.Kube.LogDir(), PodCIDRs: []netip.Prefix{netip.MustParsePrefix(subnets[0]), netip.MustParsePrefix(subnets[1])},
	})
	nodes[0].spec.Type = talosmachine.TypeControlPlane
	nodes[0].spec.ServeSocket = true
	nodes[0].spec.LocalhostAdminKubeconfig = string(b.Kube.Kubeconfig())
	nodes[0].spec.Controllers = []string{"-node-ipam-controller"}

	manifests := k8s.NewBootstrapManifestsConfig()
	manifests.TypedSpec().FlannelEnabled, manifests.TypedSpec().ProxyEnabled = true, true
	nodes[0].spec.Resources = []resource.Resource{manifests}

	machines := make([]*talostest.Machine, len(nodes))
	for i, n := range nodes {
		machines[i] = b.Machine(n.spec)
	}

	document := runtime.ExtensionServiceConfigSpec{
		Files: []runtime.ExtensionServiceConfigFile{{Content: pools, MountPath: "/usr/local/etc/talos-ccm/config.yaml"}},
		Environment: []string{
			"TALOS_CCM_CONTROLLERS=*,node-ipam-controller,service", "TALOS_CCM_ALLOCATE_NODE_CIDRS=true", "TALOS_CCM_NODE_CIDR_MASK_SIZE_IPV6=64",
		},
	}
	require.NoError(b, machines[0].SetExtensionServiceDocument(b.Context(), "talos-ccm", document))

	executable := filepath.Join(b.TempDir(), "talos-ccm")
	require.NoError(b, builder.Executable("../../cmd/talos-ccm", executable))

	process, err := product.Service{
		Executable: executable, Dir: filepath.Join(b.Kube.LogDir(), "talos-ccm"), Socket: machines[0].Socket(),
		Args: []string{"--secure-port=0", "-v=2"}, Env: document.Environment,
	}.Start()
	require.NoError(b, err)
	b.Cleanup(func() {
		if b.Failed() {
			b.Log(process.LogTail())
		}

		process.Stop(context.Background())
	})

	for i, n := range nodes {
		spec := ctest.NodeOf(machines[i])
		spec.ControlPlane = i == 0
		b.Register(spec)
		b.SetReady(n.name, corev1.ConditionTrue)
	}
}

// startFlanneld starts flanneld with Talos's arguments. It has the administrator's kubeconfig in place of a service account,
// and the name of the Node in place of a pod. It returns the file that flanneld writes for the CNI plugin, its log, and a
// channel that is closed when it exits.
func (b *bed) startFlanneld(n *talosNode) (subnetFile, log string, exited <-chan struct{}) {
	b.Helper()

	dir := b.TempDir()
	configuration, subnetFile := filepath.Join(dir, "net-conf.json"), filepath.Join(dir, "subnet.env")
	require.NoError(b, os.WriteFile(configuration, []byte(netConf), 0o600))

	log, exited = b.run(n.node, append(os.Environ(), "NODE_NAME="+n.name, "EVENT_QUEUE_DEPTH=5000", "CONT_WHEN_CACHE_NOT_READY=false"),
		os.Getenv(flanneldEnv), "--ip-masq", "--kube-subnet-mgr", "--kubeconfig-file="+b.kubeconfig(), "--net-config-path="+configuration, "--subnet-file="+subnetFile)

	return subnetFile, log, exited
}

// addPod plays the CNI plugins flannel and bridge: it connects a pod with the bridge cni0, which has the addresses that
// flanneld wrote to a file.
func (b *bed) addPod(n *talosNode, subnetFile string) {
	b.Helper()

	var content []byte

	ctest.EventuallyNoError(b, func(context.Context) (err error) {
		content, err = os.ReadFile(subnetFile)

		return err
	})

	subnet := map[string]string{}

	for line := range strings.Lines(string(content)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		subnet[key] = value
	}

	gateway, gateway6 := netip.MustParsePrefix(subnet["FLANNEL_SUBNET"]), netip.MustParsePrefix(subnet["FLANNEL_IPV6_SUBNET"])
	pod, pod6 := netip.PrefixFrom(gateway.Addr().Next(), gateway.Bits()), netip.PrefixFrom(gateway6.Addr().Next(), gateway6.Bits())
	n.gateway, n.overlay = gateway.Addr().String(), gateway.Masked().Addr().String()
	n.podAddress, n.podIPv6 = pod.Addr().String(), pod6.Addr().String()

	var err error

	n.pod, err = n.namespace.Connect(b.Context(), "pod", pod)
	require.NoError(b, err)
	b.Cleanup(func() { _ = n.pod.Close() })
	require.NoError(b, n.namespace.IP(b.Context(), "link add cni0 type bridge", "link set cni0 up mtu "+subnet["FLANNEL_MTU"], "link set pod master cni0", "link set pod type bridge_slave hairpin on",
		fmt.Sprintf("address add %s dev cni0", gateway), fmt.Sprintf("address add %s dev cni0 nodad", gateway6)))
	require.NoError(b, n.pod.IP(b.Context(), "link set eth0 mtu "+subnet["FLANNEL_MTU"], fmt.Sprintf("address add %s dev eth0 nodad", pod6),
		"route add default via "+gateway.Addr().String(), "route add default via "+gateway6.Addr().String()))
	b.serve(n.node)
}

// The podCIDRs of talos-ccm, from pools in podSubnets and from podSubnets, work with Talos's default network. Flannel exits on
// a Node of a pool outside podSubnets.
func TestFlannel_ConnectsPodsOfAllocatedCIDRs(t *testing.T) {
	b := newBed(t, kube.ControllerManager{Absent: true})
	x, y, z := b.plugTalos("x", 1, "metal"), b.plugTalos("y", 2, "metal"), b.plugTalos("z", 3, "nocloud")
	b.boot(x, y, z)

	for n, want := range map[*talosNode]string{x: `^10\.244\..*/25$`, y: `^10\.244\..*/24$`, z: `^10\.245\..*/24$`} {
		b.AwaitNode(n.name, func(n *corev1.Node, asrt *assert.Assertions) {
			ctest.Initialized(n, asrt)

			if asrt.Len(n.Spec.PodCIDRs, 2) {
				asrt.Regexp(want, n.Spec.PodCIDRs[0])
				asrt.Regexp(`^fd00:10:244:[0-9a-f:]*/64$`, n.Spec.PodCIDRs[1])
			}
		})
		b.forwardAPI(n.node)
	}

	for _, n := range []*talosNode{x, y} {
		subnetFile, _, _ := b.startFlanneld(n)
		b.addPod(n, subnetFile)
		b.startKubeProxy(n.node, "nftables")
		b.AwaitNode(n.name, func(n *corev1.Node, asrt *assert.Assertions) {
			asrt.True(slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Reason == "FlannelIsUp" }))
		})
	}

	// Pods receive the addresses of each other: traffic between them is not masqueraded.
	for from, to := range map[*talosNode]*talosNode{x: y, y: x} {
		b.awaitResponse(from.pod, server(to.name, to.podAddress), to.name+" "+from.podAddress)
		b.awaitResponse(from.pod, server(to.name, to.podIPv6), to.name+" "+from.podIPv6)
	}

	b.createService()
	b.setEndpoint(y.node)
	b.awaitAddresses(x.node, y.node, z.node)

	service, err := b.Client.CoreV1().Services("default").Get(t.Context(), "web", metav1.GetOptions{})
	require.NoError(t, err)

	clusterIP := node{name: "the ClusterIP", address: service.Spec.ClusterIP}
	b.awaitResponse(x.pod, clusterIP, "y "+x.podAddress)
	b.awaitResponse(y.pod, clusterIP, "y "+y.gateway)

	// Policy Cluster: both Nodes forward to the pod, and masquerade the source address.
	b.awaitResponse(b.outside, x.node, "y "+x.overlay)
	b.awaitResponse(b.outside, y.node, "y "+y.gateway)

	// Policy Local: only y has an endpoint, and the pod receives the client's address. Pods reach the Service anywhere.
	b.patch(`{"spec":{"externalTrafficPolicy":"Local"}}`)
	b.awaitAddresses(y.node)
	b.awaitResponse(b.outside, y.node, "y "+clientAddress)
	b.awaitFailure(b.outside, x.node, "connection refused")
	b.awaitResponse(x.pod, y.node, "y "+x.podAddress)

	_, log, exited := b.startFlanneld(z)
	ctest.Receive(t, exited, "flanneld exits")

	content, err := os.ReadFile(log)
	require.NoError(t, err)
	assert.Contains(t, string(content), `specified in the flannel net config doesn't contain "10.245.0.0/24" PodCIDR of the "z" node`)
	b.AwaitEvent(x.name, nodeipam.ReasonOutsidePodSubnets, "10.245.0.0/16")
}

// server returns the server of a pod on one of its addresses.
func server(name, address string) node {
	return node{name: name, address: net.JoinHostPort(address, strconv.Itoa(targetPort))}
}
