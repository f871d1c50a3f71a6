package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	talosmachine "github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	cloudprovider "k8s.io/cloud-provider"
	upstreamnode "k8s.io/cloud-provider/controllers/node"
	"k8s.io/cloud-provider/fake"
	cloudnodeutil "k8s.io/cloud-provider/node/helpers"
	controllersmetrics "k8s.io/component-base/metrics/prometheus/controllers"
	"k8s.io/utils/clock"

	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	holder = "talos-cloud-controller-manager-6c8b7f9d5-x2x7k_8ab5f9f2-6b1c-4a0e-9f86-2a3d64a3c5ee"
	stray  = "example.org/stray"

	siteRule = `
transformations:
  - name: site
    labels:
      example.org/site: new
`
)

// migration is a real API server with the Nodes of simulated machines that the controller of the upstream Talos CCM has
// initialized.
type migration struct {
	*testing.T

	kube        *kube.Cluster
	site        *talostest.Cluster
	client      kubernetes.Interface
	kubeconfig  string
	talosconfig string
}

func newMigration(t *testing.T) *migration {
	t.Helper()

	cluster, err := kube.Start(t.Context(), kube.Options{Progress: os.Stderr})
	require.NoError(t, err)
	t.Cleanup(func() { _ = cluster.Stop() })

	site, err := talostest.New(talostest.Options{})
	require.NoError(t, err)
	t.Cleanup(site.Close)

	client, err := kubernetes.NewForConfig(cluster.Config())
	require.NoError(t, err)

	m := &migration{T: t, kube: cluster, site: site, client: client, kubeconfig: file(t, string(cluster.Kubeconfig()))}
	m.add(talostest.MachineSpec{Nodename: "cp-1", Type: talosmachine.TypeControlPlane})
	m.add(talostest.MachineSpec{Nodename: "web-1", SystemInformation: &hardware.SystemInformationSpec{UUID: "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"}})
	m.talosconfig = writeTalosconfig(t, site, "https://"+site.Machine("cp-1").Address().String()+":50000")

	return m
}

func (m *migration) add(spec talostest.MachineSpec) {
	m.Helper()

	spec.Platform = runtime.PlatformMetadataSpec{Platform: "metal"}
	added, err := m.site.AddMachine(spec)
	require.NoError(m, err)

	_, err = m.kube.RegisterNode(m.Context(), kube.NodeSpec{Name: spec.Nodename, NodeIPs: []netip.Addr{added.Address()}})
	require.NoError(m, err)
}

func (m *migration) node(name string) *corev1.Node {
	m.Helper()

	node, err := m.client.CoreV1().Nodes().Get(m.Context(), name, metav1.GetOptions{})
	require.NoError(m, err)

	return node
}

// initialize runs the controller of k8s.io/cloud-provider that the upstream Talos CCM consists of, under the upstream's
// name, until all Nodes are initialized.
func (m *migration) initialize() {
	m.Helper()

	ctx, cancel := context.WithCancel(m.Context())
	defer cancel()

	config := m.kube.Config()
	config.UserAgent = "talos-cloud-controller-manager/v1.12.0 (linux/amd64) kubernetes/$Format/cloud-node-controller"

	client, err := kubernetes.NewForConfig(config)
	require.NoError(m, err)

	cloud := &fake.Cloud{EnableInstancesV2: true, OverrideInstanceMetadata: func(_ context.Context, node *corev1.Node) (*cloudprovider.InstanceMetadata, error) {
		ip := m.site.Machine(node.Name).Address().String()

		if !cloudnodeutil.AddOrUpdateLabelsOnNode(client, map[string]string{nodespec.LabelPlatform: "metal"}, node) {
			return nil, errors.New("set labels")
		}

		return &cloudprovider.InstanceMetadata{
			ProviderID:       "talos://metal/" + ip,
			NodeAddresses:    []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}, {Type: corev1.NodeExternalIP, Address: "10.0.0.1"}, {Type: corev1.NodeHostName, Address: node.Name}},
			AdditionalLabels: map[string]string{"example.org/site": "old", stray: "1"},
		}, nil
	}}

	factory := informers.NewSharedInformerFactory(client, 0)
	controller, err := upstreamnode.NewCloudNodeController(factory.Core().V1().Nodes(), client, cloud, time.Hour, 1, 1)
	require.NoError(m, err)

	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()

	factory.Start(ctx.Done())
	group.Go(func() { controller.RunWithContext(ctx, controllersmetrics.NewControllerManagerMetrics("test")) })

	m.eventually(func() bool {
		return !slices.ContainsFunc([]string{"cp-1", "web-1"}, func(name string) bool {
			node := m.node(name)

			return node.Spec.ProviderID == "" || !slices.ContainsFunc(node.Status.Addresses, func(a corev1.NodeAddress) bool { return a.Type == corev1.NodeExternalIP })
		})
	})

	name := holder
	_, err = client.CoordinationV1().Leases(metav1.NamespaceSystem).Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: "cloud-controller-manager-talos"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &name},
	}, metav1.CreateOptions{})
	require.NoError(m, err)
}

func (m *migration) eventually(ok func() bool) {
	m.Helper()

	const timeout, interval = 2 * time.Minute, 100 * time.Millisecond
	require.NoError(m, wait.PollUntilContextTimeout(m.Context(), interval, timeout, true, func(context.Context) (bool, error) { return ok(), nil }))
}

// diff runs the command.
func (m *migration) diff(args ...string) (stdout string, err error) {
	m.Helper()

	stdout, _, err = execute(m.T, newDiffCommand(), "", append(args, "--kubeconfig", m.kubeconfig, "--talosconfig", m.talosconfig)...)

	return stdout, err
}

// takeOver runs the node controller of talos-ccm until the function returns true.
func (m *migration) takeOver(config string, ok func() bool) {
	m.Helper()

	options, err := (&nodeFlags{config: config}).options(newDiffCommand())
	require.NoError(m, err)

	ctx, cancel := context.WithCancel(m.Context())

	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()

	factory := informers.NewSharedInformerFactory(m.client, 0)
	machines := inventory.New(time.Now)
	controller, err := nodecontroller.New(nodecontroller.Config{
		Client: m.client, Nodes: factory.Core().V1().Nodes(), Inventory: machines, Recorder: &record.FakeRecorder{}, Clock: clock.RealClock{},
		Options: func() nodespec.Options { return options }, HasNodes: factory.Core().V1().Nodes().Informer().HasSynced,
		IsRecorded: func(*corev1.Node) bool { return true }, Workers: 1,
	})
	require.NoError(m, err)

	refl := reflector.New(machines, func(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
		return talosapi.Dial(ctx, talosapi.Talosconfig{Path: m.talosconfig}, addr)
	}, clock.RealClock{})
	require.NoError(m, refl.FollowNodes(factory.Core().V1().Nodes()))

	group.Go(func() { refl.Run(ctx) })
	group.Go(func() { controller.Run(ctx) })
	factory.Start(ctx.Done())

	m.eventually(ok)
}

func TestDiff_OfMigratedCluster(t *testing.T) {
	m := newMigration(t)
	m.initialize()

	config := file(t, siteRule)
	before := m.node("web-1")
	ip := m.site.Machine("web-1").Address().String()

	// The endpoint forwards requests to the worker, which this host cannot reach.
	m.site.Machine("web-1").CutOff()

	stdout, err := m.diff("--config", config)
	require.ErrorIs(t, err, errDifferent, stdout)

	_, web, _ := strings.Cut(squeezed(stdout), "Node web-1\n")

	assertContains(t, web,
		"providerID talos://metal/"+ip+" kept; a new Node would get talos://metal/30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee\n",
		"- address ExternalIP 10.0.0.1\n",
		"- label example.org/site old\n",
		"+ label example.org/site new rule site\n",
		"+ label node.cloudprovider.kubernetes.io/clustername talostest machine\n",
		"upstream metadata.labels "+stray+" stays, talos-ccm does not set it\n",
		"upstream metadata.labels "+nodespec.LabelPlatform+" taken over\n",
		"upstream spec.providerID\n",
		"upstream status.addresses\n",
		"Lease kube-system/cloud-controller-manager-talos: held by "+holder+"\n",
		"2 Nodes: 2 would change, 0 would not, 0 cannot be compared, 0 not managed\n")

	assert.Equal(t, before.Labels["example.org/site"], m.node("web-1").Labels["example.org/site"], "the command has changed the Node")

	m.site.Machine("web-1").Reconnect()
	m.takeOver(config, func() bool {
		_, err := m.diff("--config", config)

		return err == nil
	})

	stdout, err = m.diff("web-1", "--config", config)
	require.NoError(t, err)
	assertContains(t, squeezed(stdout), "Node web-1\n", "rule site applies\n", "1 Nodes: 0 would change, 1 would not,")
	assert.NotContains(t, stdout, "Node cp-1\n")

	_, err = m.diff("web-1", "web-2", "--config", config)
	require.EqualError(t, err, `node "web-2" not found`)

	stdout, err = m.diff("--config", config, "-o", "json")
	require.NoError(m, err)

	var after preview.Comparison
	require.NoError(m, json.Unmarshal([]byte(stdout), &after))
	require.Len(t, after.Nodes, 2)
	assert.Equal(t, holder, after.Lease.Holder)
	assert.Equal(t, "talos://metal/"+ip, after.Nodes[1].ProviderID.Current)

	// The upstream Talos CCM no longer owns what talos-ccm sets.
	fields := after.Nodes[1].Upstream
	assert.Contains(t, fields, nodecontroller.UpstreamField{Name: "metadata.labels", Key: stray})
	assert.False(t, slices.ContainsFunc(fields, func(f nodecontroller.UpstreamField) bool { return f.Key == nodespec.LabelPlatform }))

	m.testNamed(config)
	m.testIncomplete(config)
}

// testNamed compares single Nodes of a cluster while web-1 does not respond, and then stops it.
func (m *migration) testNamed(config string) {
	m.Helper()

	proxied, silent := m.talosconfig, m.site.Machine("web-1")
	defer func() { m.talosconfig = proxied }()

	m.talosconfig = writeTalosconfig(m.T, m.site) // dials the machines themselves

	silent.CutOff()

	start := time.Now()
	_, err := m.diff("cp-1", "--config", config)
	require.NoError(m, err)
	assert.Less(m, time.Since(start), machineTimeout/2, "waits for a machine of another Node")

	silent.Reconnect()
	require.NoError(m, silent.Stop(m.Context()))

	calls := len(m.site.Machine("cp-1").Calls())
	_, err = m.diff("web-1", "--config", config)
	require.ErrorContains(m, err, "nodes cannot be compared: web-1")
	assert.Len(m, m.site.Machine("cp-1").Calls(), calls, "reads machines of other Nodes without need")
}

// terminal returns a terminal, and a function that closes it and returns what was written to it.
func terminal(t *testing.T) (slave *os.File, written func() string) {
	t.Helper()

	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = master.Close() })

	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))

	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = slave.Close() })

	return slave, func() string {
		require.NoError(t, slave.Close())

		output, err := io.ReadAll(master)
		require.ErrorIs(t, err, unix.EIO) // the end of a terminal that was closed

		return string(output)
	}
}

func TestDiff_ShowsProgressOnTerminal(t *testing.T) {
	site, _ := liveSite(t)
	slave, written := terminal(t)

	var nodes []*corev1.Node
	for _, name := range []string{"cp-1", "worker-1"} {
		nodes = append(nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: site.Machine(name).Address().String()}},
			NodeInfo:  corev1.NodeSystemInfo{OSImage: "Talos (v1.14.1)"},
		}})
	}

	cmd := newDiffCommand()
	cmd.SetContext(t.Context())
	cmd.SetErr(slave)

	machines, err := (&diffOptions{talos: talosFlags{talosconfig: writeTalosconfig(t, site)}}).readMachines(cmd, nodes, nil, machine.BaseKinds())
	require.NoError(t, err)
	assert.Equal(t, inventory.Current, machines.Get("worker-1").Condition)
	assert.Equal(t, "\rMachines read: 0 of 2\rMachines read: 1 of 2\r\x1b[K", written())
}

// testIncomplete compares a cluster in which one machine does not respond and one Node has the address of another machine.
func (m *migration) testIncomplete(config string) {
	m.Helper()

	stdout, err := m.diff("--config", config)
	require.ErrorContains(m, err, "nodes cannot be compared: web-1")
	assert.NotErrorIs(m, err, errDifferent)
	assert.Contains(m, stdout, "MachineUnreachable")
	require.NoError(m, m.site.Machine("cp-1").SetNodename(m.Context(), "cp-2"))

	stdout, _ = m.diff("--config", config)
	assert.Contains(m, stdout, `reports nodename "cp-2"`)
	assert.Contains(m, stdout, "2 cannot be compared")
}

// squeezed replaces the padding of columns by one space.
func squeezed(table string) string {
	return strings.ReplaceAll(regexp.MustCompile(` +`).ReplaceAllString(table, " "), " \n", "\n")
}

// The exit codes are those of diff and kubectl diff.
func TestDiff_ExitsWithTwoOnErrors(t *testing.T) {
	for _, args := range [][]string{{"diff", "--kubeconfig=/nowhere"}, {"diff", "--nonsense"}, {"diff", "web-1", "--kubeconfig=/nowhere"}} {
		got := command(t, nil, args...)
		assert.Equal(t, exitTrouble, got.code)
		assert.True(t, strings.HasPrefix(got.stderr, "Error: "))
	}

	assert.Contains(t, command(t, []string{"KUBECONFIG=/nowhere"}, "diff").stderr, "no cluster in /nowhere; set --kubeconfig or KUBECONFIG")
}
