package talostest_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

func prefixes(texts ...string) []netip.Prefix {
	var list []netip.Prefix
	for _, text := range texts {
		list = append(list, netip.MustParsePrefix(text))
	}

	return list
}

func TestControllerManager_HasArgumentsOfTalos(t *testing.T) {
	dual := talostest.Options{
		PodCIDRs:     prefixes("10.64.0.0/10", "fd00:10:244::/56"),
		ServiceCIDRs: prefixes("10.32.0.0/16", "fd00:10:96::/112"),
	}

	for name, test := range map[string]struct {
		options        talostest.Options
		controllers    []string
		pods, services []string
		arguments      []string
	}{
		"with Talos's defaults it allocates": {
			pods: []string{"10.244.0.0/16"}, services: []string{"10.96.0.0/12"},
			arguments: []string{
				"--allocate-node-cidrs=true", "--controllers=*,tokencleaner", "--cluster-cidr=10.244.0.0/16", "--service-cluster-ip-range=10.96.0.0/12",
			},
		},
		"CIDRs are the cluster's": {
			options: dual,
			pods:    []string{"10.64.0.0/10", "fd00:10:244::/56"}, services: []string{"10.32.0.0/16", "fd00:10:96::/112"},
			arguments: []string{"--cluster-cidr=10.64.0.0/10,fd00:10:244::/56", "--service-cluster-ip-range=10.32.0.0/16,fd00:10:96::/112"},
		},
		"more controllers are added to Talos's own": {
			controllers: []string{"-node-ipam-controller"},
			pods:        []string{"10.244.0.0/16"}, services: []string{"10.96.0.0/12"},
			arguments: []string{"--controllers=*,tokencleaner,-node-ipam-controller"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := newCluster(t, test.options)
			cp := addMachine(t, cluster, talostest.MachineSpec{Nodename: "cp-1", Type: machine.TypeControlPlane, Controllers: test.controllers})
			reader := dialAs(t, cluster, cp, "os:reader")

			manager := read[*k8s.ControllerManagerConfig](t, reader, k8s.ControllerManagerConfigID).TypedSpec()
			if !manager.Enabled || !slices.Equal(manager.PodCIDRs, test.pods) || !slices.Equal(manager.ServiceCIDRs, test.services) {
				t.Errorf("got %+v, want pod CIDRs %v and service CIDRs %v", *manager, test.pods, test.services)
			}

			if got := manager.ExtraArgs["controllers"].Values; !slices.Equal(got, test.controllers) {
				t.Errorf("got extra controllers %v, want %v", got, test.controllers)
			}

			command := controllerManagerCommand(t, read[*k8s.StaticPod](t, reader, k8s.ControllerManagerID))
			for _, argument := range test.arguments {
				if !slices.Contains(command, argument) {
					t.Errorf("argument %s is missing in %q", argument, command)
				}
			}
		})
	}
}

// controllerManagerCommand returns the command of the pod's only container.
func controllerManagerCommand(t *testing.T, pod *k8s.StaticPod) []string {
	t.Helper()

	spec, _ := pod.TypedSpec().Pod["spec"].(map[string]any)
	containers, _ := spec["containers"].([]any)

	if len(containers) != 1 {
		t.Fatalf("got %v", pod.TypedSpec().Pod)
	}

	container, _ := containers[0].(map[string]any)
	if container["name"] != "kube-controller-manager" {
		t.Errorf("got container name %v", container["name"])
	}

	var command []string

	list, _ := container["command"].([]any)
	for _, argument := range list {
		command = append(command, fmt.Sprint(argument))
	}

	return command
}

func TestClusterCIDRs_ExcludeMachineAddresses(t *testing.T) {
	cluster := newCluster(t, talostest.Options{PodCIDRs: prefixes("10.64.0.0/10"), ServiceCIDRs: prefixes("10.32.0.0/16")})
	worker := addMachine(t, cluster, talostest.MachineSpec{
		Nodename:        "worker-1",
		Addresses:       []talostest.Address{{Link: "eth0", Prefix: netip.MustParsePrefix("192.168.1.7/24")}, {Link: "cni0", Prefix: netip.MustParsePrefix("10.64.3.1/24")}},
		ExcludedSubnets: prefixes("127.0.0.0/8"),
	})
	reader := dialAs(t, cluster, worker, "os:reader")

	excluded := read[*k8s.NodeIPConfig](t, reader, k8s.KubeletID).TypedSpec().ExcludeSubnets
	if want := []string{"10.64.0.0/10", "10.32.0.0/16", "127.0.0.0/8"}; !slices.Equal(excluded, want) {
		t.Errorf("got excluded subnets %v, want %v", excluded, want)
	}

	withoutKubernetes := network.FilteredNodeAddressID(network.NodeAddressCurrentID, k8s.NodeAddressFilterNoK8s)
	if got := nodeAddresses(t, reader, withoutKubernetes); slices.Contains(got, "10.64.3.1/24") || !slices.Contains(got, "192.168.1.7/24") {
		t.Errorf("got addresses %v in the no-k8s list", got)
	}

	documents, err := safe.StateGetByID[*config.MachineConfig](withDeadline(t), dialAs(t, cluster, worker, "os:admin").COSI, config.ActiveID)
	if err != nil {
		t.Fatal(err)
	}

	if got := documents.Config().Cluster().Network().PodCIDRs(); !slices.Equal(got, []string{"10.64.0.0/10"}) {
		t.Errorf("got pod CIDRs %v in the machine configuration", got)
	}
}

func TestSetExtensionServiceDocument_ReplacesDocument(t *testing.T) {
	cluster, cp := newControlPlane(t)
	admin := dialAs(t, cluster, cp, "os:admin")
	file := func(content string) runtime.ExtensionServiceConfigFile {
		return runtime.ExtensionServiceConfigFile{Content: content, MountPath: "/etc/c.yaml"}
	}

	err := cp.SetExtensionServiceDocument(t.Context(), "talos-ccm", runtime.ExtensionServiceConfigSpec{
		Files: []runtime.ExtensionServiceConfigFile{file("a: b")}, Environment: []string{"A=1"},
	})
	if err != nil {
		t.Fatal(err)
	}

	if err := cp.SetExtensionServiceConfig(t.Context(), "talos-ccm", file("a: c")); err != nil {
		t.Fatal(err)
	}

	got := read[*runtime.ExtensionServiceConfig](t, admin, "talos-ccm").TypedSpec()
	if !slices.Equal(got.Environment, []string{"A=1"}) || !slices.Equal(got.Files, []runtime.ExtensionServiceConfigFile{file("a: c")}) {
		t.Errorf("got %+v", *got)
	}
}
