package talostest_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime/pprof"
	"slices"
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
	"google.golang.org/grpc/codes"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

func addControlPlane(t *testing.T, cluster *talostest.Cluster, name string) *talostest.Machine {
	t.Helper()

	return addMachine(t, cluster, talostest.MachineSpec{Nodename: name, Type: machine.TypeControlPlane, ServeSocket: true})
}

// read gets a typed resource through a client.
func read[R meta.ResourceWithRD](t *testing.T, c *client.Client, id resource.ID) R {
	t.Helper()

	got, err := safe.StateGetByID[R](withDeadline(t), c.COSI, id)
	if err != nil {
		t.Fatalf("get %s: %v", id, err)
	}

	return got
}

func nodeAddresses(t *testing.T, c *client.Client, id resource.ID) []string {
	t.Helper()

	prefixes := read[*network.NodeAddress](t, c, id).TypedSpec().Addresses
	texts := make([]string, 0, len(prefixes))

	for _, prefix := range prefixes {
		texts = append(texts, prefix.String())
	}

	return texts
}

func requireAddresses(t *testing.T, c *client.Client, id resource.ID, want ...string) {
	t.Helper()

	if got := nodeAddresses(t, c, id); !slices.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", id, got, want)
	}
}

func TestMachine_PublishesResourcesOfTalos(t *testing.T) {
	cluster := newCluster(t, talostest.Options{Name: "prod"})
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
	pod := fmt.Sprint(read[*k8s.StaticPod](t, reader, k8s.ControllerManagerID).TypedSpec().Pod)

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
		{"cluster ID", info.ClusterID, cluster.ID()},
		{"stage", status.Stage, runtime.MachineStageRunning},
		{"ready", status.Status.Ready, true},
		{"UUID", read[*hardware.SystemInformation](t, reader, hardware.SystemInformationID).TypedSpec().UUID, "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"},
		{"controller manager allocates CIDRs", strings.Contains(pod, "--allocate-node-cidrs=true"), true},
	} {
		if !reflect.DeepEqual(published.got, published.want) {
			t.Errorf("%s: got %v, want %v", published.what, published.got, published.want)
		}
	}

	extensions, err := safe.StateListAll[*runtime.ExtensionStatus](withDeadline(t), reader.COSI)
	if err != nil || extensions.Len() != 1 {
		t.Errorf("got %d extensions, %v", extensions.Len(), err)
	}
}

func TestMachine_WorkerHasNoControlPlaneResources(t *testing.T) {
	cluster, worker := newWorker(t)
	admin := dialAs(t, cluster, worker, "os:admin")

	_, err := safe.StateGetByID[*k8s.StaticPod](withDeadline(t), admin.COSI, k8s.ControllerManagerID)
	if !state.IsNotFoundError(err) {
		t.Errorf("got %v", err)
	}

	if err := getAdminKubeconfig(withDeadline(t), admin); !state.IsNotFoundError(err) {
		t.Errorf("got %v", err)
	}

	_, err = safe.StateGetByID[*hardware.SystemInformation](withDeadline(t), admin.COSI, hardware.SystemInformationID)
	if !state.IsNotFoundError(err) {
		t.Errorf("got %v for a machine without SMBIOS", err)
	}
}

func TestResolvePlatform_PublishesMetadata(t *testing.T) {
	cluster := newCluster(t, talostest.Options{})
	late := addMachine(t, cluster, talostest.MachineSpec{
		Nodename: "late", PlatformPending: true, Platform: runtime.PlatformMetadataSpec{Platform: "hcloud", InstanceID: "42"},
	})
	reader := dialAs(t, cluster, late, "os:reader")

	got := read[*runtime.PlatformMetadata](t, reader, runtime.PlatformMetadataID).TypedSpec()
	if got.Platform != "hcloud" || got.InstanceID != "" {
		t.Errorf("got %+v before ResolvePlatform", got)
	}

	if err := late.ResolvePlatform(t.Context()); err != nil {
		t.Fatal(err)
	}

	got = read[*runtime.PlatformMetadata](t, reader, runtime.PlatformMetadataID).TypedSpec()
	if got.InstanceID != "42" {
		t.Errorf("got %+v after ResolvePlatform", got)
	}
}

func TestAddresses_AreInNodeAddresses(t *testing.T) {
	cluster := newCluster(t, talostest.Options{})
	host := addMachine(t, cluster, talostest.MachineSpec{
		Nodename: "host",
		Addresses: []talostest.Address{
			{Link: "eth1", Prefix: netip.MustParsePrefix("192.0.2.7/24")},
			{Link: "eth1", Prefix: netip.MustParsePrefix("2001:db8::7/64"), Flags: nethelpers.AddressFlags(nethelpers.AddressManagementTemp)},
			{Link: "eth1", Prefix: netip.MustParsePrefix("fe80::7/64"), Scope: nethelpers.ScopeLink},
			{Link: "cni0", Prefix: netip.MustParsePrefix("10.244.1.1/24")},
			{Link: "siderolink", Prefix: netip.MustParsePrefix("fdae:41e4:649b:9303::7/64")},
			{Link: talostest.LinkExternal, Prefix: netip.MustParsePrefix("203.0.113.7/32")},
		},
	})
	reader := dialAs(t, cluster, host, "os:reader")
	api := host.Address().String() + "/32"

	requireAddresses(t, reader, "default", api)
	requireAddresses(t, reader, "current",
		"10.244.1.1/24", api, "192.0.2.7/24", "203.0.113.7/32", "2001:db8::7/64", "fdae:41e4:649b:9303::7/64")
	requireAddresses(t, reader, "current-no-k8s",
		api, "192.0.2.7/24", "203.0.113.7/32", "2001:db8::7/64", "fdae:41e4:649b:9303::7/64")
	requireAddresses(t, reader, "routed-no-k8s", api, "192.0.2.7/24", "2001:db8::7/64")

	external := read[*network.AddressStatus](t, reader, "external/203.0.113.7/32").TypedSpec()
	if external.LinkIndex != 0 || external.Flags != 0 || external.Scope != nethelpers.ScopeGlobal {
		t.Errorf("got external address %+v", external)
	}
}

func TestAddAddress_UpdatesNodeAddressesAndCertificate(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")
	api := worker.Address().String() + "/32"
	added := netip.MustParsePrefix("198.51.100.9/24")

	if err := worker.AddAddress(t.Context(), "eth0", added); err != nil {
		t.Fatal(err)
	}

	requireAddresses(t, reader, "routed", api, added.String())

	// The certificate includes the new address.
	config := clientTLS(t, cluster, "os:reader")
	config.ServerName = added.Addr().String()
	requireCode(t, version(withDeadline(t), dial(t, worker, config)), codes.OK)

	if err := worker.RemoveAddress(t.Context(), "eth0", added); err != nil {
		t.Fatal(err)
	}

	requireAddresses(t, reader, "current", api)
	requireAddresses(t, reader, "accumulative", api, added.String())

	if err := worker.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}

	requireAddresses(t, dialAs(t, cluster, worker, "os:reader"), "accumulative", api)
}

func TestSetNodename_IsIndependentOfHostname(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")

	for _, change := range []error{
		worker.SetHostname(t.Context(), "renamed", "example.org"),
		worker.SetNodename(t.Context(), "renamed"),
		worker.SetStage(t.Context(), runtime.MachineStageRebooting),
		worker.SetNodeIPs(t.Context(), netip.MustParseAddr("192.0.2.1")),
	} {
		if change != nil {
			t.Fatal(change)
		}
	}

	if got := read[*network.HostnameStatus](t, reader, network.HostnameID).TypedSpec().FQDN(); got != "renamed.example.org" {
		t.Errorf("got hostname %q", got)
	}

	if got := read[*k8s.Nodename](t, reader, k8s.NodenameID).TypedSpec().Nodename; got != "renamed" {
		t.Errorf("got nodename %q", got)
	}

	if got := read[*runtime.MachineStatus](t, reader, runtime.MachineStatusID).TypedSpec(); got.Stage != runtime.MachineStageRebooting || got.Status.Ready {
		t.Errorf("got status %+v", got)
	}

	if cluster.Machine("worker-1") != worker {
		t.Error("cluster does not find the machine under its original nodename")
	}
}

func TestSetLocalhostAdminKubeconfig_CreatesSecret(t *testing.T) {
	cluster := newCluster(t, talostest.Options{})
	cp := addControlPlane(t, cluster, "cp-1")
	admin := dialAs(t, cluster, cp, "os:admin")

	if err := getAdminKubeconfig(withDeadline(t), admin); !state.IsNotFoundError(err) {
		t.Fatalf("got %v before SetLocalhostAdminKubeconfig", err)
	}

	if err := cp.SetLocalhostAdminKubeconfig(t.Context(), []byte("kind: Config")); err != nil {
		t.Fatal(err)
	}

	requireCode(t, getAdminKubeconfig(withDeadline(t), admin), codes.OK)
}

func TestDefinitions_AreReadOnly(t *testing.T) {
	_, worker := newWorker(t)

	if err := worker.State().Create(t.Context(), meta.NewNamespace("another", meta.NamespaceSpec{})); err == nil {
		t.Error("shared definitions were changed")
	}
}

func TestCalls_RecordsCalls(t *testing.T) {
	cluster, cp := newControlPlane(t)
	reader := dialAs(t, cluster, cp, "os:reader")

	watchPlatform(t, reader)
	requireCode(t, getAdminKubeconfig(withDeadline(t), reader), codes.PermissionDenied)
	requireCode(t, version(withRoles(withDeadline(t), "os:admin"), dialSocket(t, cp)), codes.OK)

	got := make([]string, 0, 3)
	for _, call := range cp.Calls() {
		got = append(got, fmt.Sprintf("%s %s %s %v %s open=%t", call.Transport, call.Method, call.ResourceType, call.Roles, call.Code, call.Open))
	}

	want := []string{
		"apid /cosi.resource.State/Watch PlatformMetadatas.talos.dev [os:reader] OK open=true",
		"apid /cosi.resource.State/Get KubernetesSecrets.secrets.talos.dev [os:reader] PermissionDenied open=false",
		"socket /machine.MachineService/Version  [os:admin] OK open=false",
	}

	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}

	denied := talostest.CallKind{Transport: talostest.TransportAPID, Method: "/cosi.resource.State/Get", Code: codes.PermissionDenied}
	if got := cluster.CallCounts()[denied]; got != 1 {
		t.Errorf("got %d denied calls, want 1", got)
	}
}

func TestCalls_AreLimited(t *testing.T) {
	cluster, worker := newWorker(t)
	reader := dialAs(t, cluster, worker, "os:reader")

	const calls = 300

	for range calls {
		requireCode(t, version(withDeadline(t), reader), codes.OK)
	}

	if got := len(worker.Calls()); got != 128 {
		t.Errorf("got %d calls in the journal, want 128", got)
	}

	counted := talostest.CallKind{Transport: talostest.TransportAPID, Method: "/machine.MachineService/Version", Code: codes.OK}
	if got := cluster.CallCounts()[counted]; got != calls {
		t.Errorf("got %d calls in total, want %d", got, calls)
	}
}

func TestNew_ClustersUseDifferentAddresses(t *testing.T) {
	seen := make(map[netip.Addr]bool)

	for range 20 {
		cluster := newCluster(t, talostest.Options{})

		for i := range 5 {
			added := addMachine(t, cluster, talostest.MachineSpec{Nodename: fmt.Sprintf("n-%d", i)})

			if seen[added.Address()] {
				t.Fatalf("two machines have address %s", added.Address())
			}

			seen[added.Address()] = true
		}
	}
}

func TestAddMachine_RejectsInvalidSpec(t *testing.T) {
	cluster, worker := newWorker(t)

	for _, rule := range []struct {
		name string
		spec talostest.MachineSpec
	}{
		{"no name", talostest.MachineSpec{}},
		{"a duplicate name", talostest.MachineSpec{Nodename: worker.Nodename()}},
		{"an address in use", talostest.MachineSpec{Nodename: "second", Address: worker.Address()}},
		{"a socket path that is too long", talostest.MachineSpec{Nodename: strings.Repeat("n", 120), ServeSocket: true}},
	} {
		t.Run(rule.name, func(t *testing.T) {
			if _, err := cluster.AddMachine(rule.spec); err == nil {
				t.Error("machine was added")
			}
		})
	}

	if got := len(cluster.Machines()); got != 1 {
		t.Errorf("got %d machines, want 1", got)
	}

	requireCode(t, version(withDeadline(t), dialAs(t, cluster, worker, "os:reader")), codes.OK)
}

func TestClose_ReleasesEverything(t *testing.T) {
	cluster, err := talostest.New(talostest.Options{})
	if err != nil {
		t.Fatal(err)
	}

	cp := addControlPlane(t, cluster, "cp-1")
	watcher := dialAs(t, cluster, cp, "os:reader")
	watchPlatform(t, watcher)

	// Close must work for machines that are cut off or frozen.
	cp.CutOff()
	addControlPlane(t, cluster, "cp-2").Freeze()

	cluster.Close()
	cluster.Close()

	_ = watcher.Close()

	eventually(t, "all goroutines have ended", func() bool {
		var stacks strings.Builder

		_ = pprof.Lookup("goroutine").WriteTo(&stacks, 2)

		return !strings.Contains(stacks.String(), "pkg/talostest.(") && !strings.Contains(stacks.String(), "state/impl/inmem.(")
	})

	if _, err := os.Stat(filepath.Dir(cp.Socket())); !os.IsNotExist(err) {
		t.Errorf("directory of sockets was not removed: %v", err)
	}

	again := newCluster(t, talostest.Options{})
	if _, err := again.AddMachine(talostest.MachineSpec{Nodename: "reuser", Address: cp.Address()}); err != nil {
		t.Errorf("address was not released: %v", err)
	}

	if _, err := cluster.AddMachine(talostest.MachineSpec{Nodename: "too-late"}); err == nil {
		t.Error("machine was added to a closed cluster")
	}
}

func TestAddMachine_Concurrently(t *testing.T) {
	cluster := newCluster(t, talostest.Options{})

	const machines = 100

	errs := make(chan error, machines)

	for i := range machines {
		go func() {
			added, err := cluster.AddMachine(talostest.MachineSpec{Nodename: fmt.Sprintf("n-%03d", i)})
			if err == nil {
				err = added.SetStage(context.WithoutCancel(t.Context()), runtime.MachineStageRunning)
			}

			errs <- err
		}()
	}

	for range machines {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}

	for _, added := range cluster.Machines() {
		requireCode(t, version(withDeadline(t), dialAs(t, cluster, added, "os:reader")), codes.OK)
	}
}
