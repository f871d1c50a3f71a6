package talostest_test

import (
	"net/netip"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/resource/meta"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	clusterres "github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func addControlPlane(t *testing.T, cluster *talostest.Cluster, name string) *talostest.Machine {
	t.Helper()

	return addMachine(t, cluster, talostest.MachineSpec{Nodename: name, Type: machine.TypeControlPlane, ServeSocket: true})
}

// read gets a typed resource through a client.
func read[R meta.ResourceWithRD](t *testing.T, c *client.Client, id resource.ID) R {
	t.Helper()

	got, err := safe.StateGetByID[R](withDeadline(t), c.COSI, id)
	require.NoError(t, err)

	return got
}

// watchPlatform watches PlatformMetadata as the reflector does. It returns after the bootstrap.
func watchPlatform(t *testing.T, c *client.Client) {
	t.Helper()

	events := make(chan state.Event)
	kind := resource.NewMetadata(runtime.NamespaceName, runtime.PlatformMetadataType, "", resource.VersionUndefined)

	require.NoError(t, c.COSI.WatchKind(t.Context(), kind, events, state.WithBootstrapContents(true)))

	for event := range events {
		if event.Type == state.Bootstrapped {
			return
		}
	}
}

func TestMachine_PublishesResourcesOfTalos(t *testing.T) {
	cluster := ctest.NewTalos(t, talostest.Options{Name: "prod"})
	aws := addMachine(t, cluster, talostest.MachineSpec{
		Nodename:          "aws-1",
		Type:              machine.TypeControlPlane,
		Platform:          runtime.PlatformMetadataSpec{Platform: "aws", Zone: "eu-1a", ProviderID: "aws:///eu-1a/i-1", Tags: map[string]string{"a": "b"}},
		SystemInformation: &hardware.SystemInformationSpec{UUID: "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
	})
	reader := dialAs(t, cluster, aws, "os:reader")

	metadata := read[*runtime.PlatformMetadata](t, reader, runtime.PlatformMetadataID).TypedSpec()
	info := read[*clusterres.Info](t, reader, clusterres.InfoID).TypedSpec()
	status := read[*runtime.MachineStatus](t, reader, runtime.MachineStatusID).TypedSpec()

	for _, published := range []struct {
		what      string
		got, want any
	}{
		{"provider ID", metadata.ProviderID, "aws:///eu-1a/i-1"},
		{"tags", metadata.Tags, map[string]string{"a": "b"}},
		{"machine type", read[*config.MachineType](t, reader, config.MachineTypeID).MachineType(), machine.TypeControlPlane},
		{"nodename", read[*k8s.Nodename](t, reader, k8s.NodenameID).TypedSpec().Nodename, "aws-1"},
		{"node IPs", read[*k8s.NodeIP](t, reader, k8s.KubeletID).TypedSpec().Addresses, []netip.Addr{aws.Address()}},
		{"cluster name", info.ClusterName, "prod"},
		{"a cluster ID", info.ClusterID != "", true},
		{"Talos version", read[*runtime.Version](t, reader, runtime.NewVersion().Metadata().ID()).TypedSpec().Version, "v1.14.1"},
		{"stage", status.Stage, runtime.MachineStageRunning},
		{"ready", status.Status.Ready, true},
		{"UUID", read[*hardware.SystemInformation](t, reader, hardware.SystemInformationID).TypedSpec().UUID, "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
	} {
		assert.Equal(t, published.want, published.got, published.what)
	}

	extensions, err := safe.StateListAll[*runtime.ExtensionStatus](withDeadline(t), reader.COSI)
	require.NoError(t, err)
	assert.Equal(t, 1, extensions.Len())
}

func TestMachine_WorkerHasNoControlPlaneResources(t *testing.T) {
	cluster, worker := newWorker(t)
	admin := dialAs(t, cluster, worker, "os:admin")

	for _, absent := range []resource.Pointer{
		k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID).Metadata(),
		secrets.NewKubernetes().Metadata(),
		hardware.NewSystemInformation(hardware.SystemInformationID).Metadata(), // a machine without SMBIOS
	} {
		_, err := admin.COSI.Get(withDeadline(t), absent)
		assert.True(t, state.IsNotFoundError(err), "%s: %v", absent, err)
	}
}

func TestAddress_HasDefaultsOfTalos(t *testing.T) {
	cluster := ctest.NewTalos(t, talostest.Options{})
	temporary := nethelpers.AddressFlags(nethelpers.AddressManagementTemp)
	host := addMachine(t, cluster, talostest.MachineSpec{
		Nodename: "host",
		Addresses: []talostest.Address{
			{Link: "eth1", Prefix: netip.MustParsePrefix("192.0.2.7/24")},
			{Link: "eth1", Prefix: netip.MustParsePrefix("2001:db8::7/64"), Flags: temporary},
			{Link: "eth1", Prefix: netip.MustParsePrefix("fe80::7/64"), Scope: nethelpers.ScopeLink},
			{Link: talostest.LinkExternal, Prefix: netip.MustParsePrefix("203.0.113.7/32")},
		},
	})
	reader := dialAs(t, cluster, host, "os:reader")
	permanent := nethelpers.AddressFlags(nethelpers.AddressPermanent)

	for id, want := range map[string]network.AddressStatusSpec{
		"lo/127.0.0.1/8": {Flags: permanent, Scope: nethelpers.ScopeHost},
		"eth0/" + host.Address().String() + "/32":  {Flags: permanent},
		"eth1/192.0.2.7/24":                        {Flags: permanent},
		"eth1/2001:db8::7/64":                      {Flags: temporary},
		"eth1/fe80::7/64":                          {Flags: permanent, Scope: nethelpers.ScopeLink},
		talostest.LinkExternal + "/203.0.113.7/32": {},
	} {
		got := read[*network.AddressStatus](t, reader, id).TypedSpec()
		assert.Equal(t, []any{want.Flags, want.Scope}, []any{got.Flags, got.Scope}, id)
	}
}

func TestCertificate_HasNamesAndAddressOfMachine(t *testing.T) {
	cluster, worker := newWorker(t)

	for name, want := range map[string]codes.Code{
		"127.0.0.1": codes.OK, worker.Address().String(): codes.OK, "worker-1": codes.OK,
		"198.51.100.10": codes.Unavailable, "worker-2": codes.Unavailable,
	} {
		config := clientTLS(t, cluster, "os:reader")
		config.ServerName = name

		assert.Equal(t, want, status.Code(version(withDeadline(t), dial(t, worker, config))), name)
	}
}

func prefixes(texts ...string) []netip.Prefix {
	var list []netip.Prefix
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}

	return list
}

func TestControllerManager_HasArgumentsOfTalos(t *testing.T) {
	for name, test := range map[string]struct {
		options     talostest.Options
		controllers []string
		pods        []string
		arguments   []string
	}{
		"with Talos's defaults it allocates": {
			pods: []string{"10.244.0.0/16"},
			arguments: []string{
				"--allocate-node-cidrs=true", "--controllers=*,tokencleaner", "--cluster-cidr=10.244.0.0/16", "--service-cluster-ip-range=10.96.0.0/12",
			},
		},
		"CIDRs are the cluster's": {
			options:   talostest.Options{PodCIDRs: prefixes("10.64.0.0/10", "fd00:10:244::/56")},
			pods:      []string{"10.64.0.0/10", "fd00:10:244::/56"},
			arguments: []string{"--cluster-cidr=10.64.0.0/10,fd00:10:244::/56"},
		},
		"more controllers are added to Talos's own": {
			controllers: []string{"-node-ipam-controller"},
			pods:        []string{"10.244.0.0/16"},
			arguments:   []string{"--controllers=*,tokencleaner,-node-ipam-controller"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := ctest.NewTalos(t, test.options)
			cp := addMachine(t, cluster, talostest.MachineSpec{Nodename: "cp-1", Type: machine.TypeControlPlane, Controllers: test.controllers})
			reader := dialAs(t, cluster, cp, "os:reader")

			manager := read[*k8s.ControllerManagerConfig](t, reader, k8s.ControllerManagerConfigID).TypedSpec()
			assert.True(t, manager.Enabled)
			assert.Equal(t, test.pods, manager.PodCIDRs)
			assert.Equal(t, []string{"10.96.0.0/12"}, manager.ServiceCIDRs)
			assert.Equal(t, test.controllers, manager.ExtraArgs["controllers"].Values)

			var pod corev1.Pod

			object := read[*k8s.StaticPod](t, reader, k8s.ControllerManagerID).TypedSpec().Pod
			require.NoError(t, apiruntime.DefaultUnstructuredConverter.FromUnstructured(object, &pod))
			require.Len(t, pod.Spec.Containers, 1)
			assert.Equal(t, "kube-controller-manager", pod.Spec.Containers[0].Name)
			assert.Subset(t, pod.Spec.Containers[0].Command, test.arguments)
		})
	}
}

func TestClose_ReleasesEverything(t *testing.T) {
	cluster, err := talostest.New(talostest.Options{})
	require.NoError(t, err)

	cp := addControlPlane(t, cluster, "cp-1")
	watcher := dialAs(t, cluster, cp, "os:reader")
	watchPlatform(t, watcher)

	// Close must work for machines that are cut off or frozen.
	cp.CutOff()
	addControlPlane(t, cluster, "cp-2").Freeze()

	cluster.Close()
	cluster.Close()

	_ = watcher.Close()

	ctest.Eventually(t, "all goroutines have ended", func() bool {
		var stacks strings.Builder

		_ = pprof.Lookup("goroutine").WriteTo(&stacks, 2)

		return !strings.Contains(stacks.String(), "pkg/talostest.(") && !strings.Contains(stacks.String(), "state/impl/inmem.(")
	})

	assert.NoDirExists(t, filepath.Dir(cp.Socket()))

	again := ctest.NewTalos(t, talostest.Options{})
	addMachine(t, again, talostest.MachineSpec{Nodename: "reuser", Address: cp.Address()})
}
