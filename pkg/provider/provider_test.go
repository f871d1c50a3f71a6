package provider_test

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudprovider "k8s.io/cloud-provider"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/provider"
)

// The tests of the node controller verify on real Nodes that it writes the same values.

const nodename = "worker-1"

func worker() machine.Machine {
	address := netip.MustParseAddr("10.0.0.1")

	return machine.Machine{
		Nodename:  nodename,
		Platform:  runtime.PlatformMetadataSpec{Platform: "aws", Region: "r", Zone: "z", InstanceType: "t", InstanceID: "i-1", ProviderID: "aws:///z/i-1"},
		Addresses: []machine.Address{{Prefix: netip.PrefixFrom(address, 24), Link: "eth0"}},
		NodeIPs:   []netip.Addr{address},
	}
}

func nodeNamed(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// conditions returns one inventory per condition of the machine of worker-1.
func conditions() map[string]*inventory.Inventory {
	all := map[string]*inventory.Inventory{}

	for name, fill := range map[string]func(*inventory.Inventory){
		"unknown":          func(*inventory.Inventory) {},
		"current":          func(inv *inventory.Inventory) { inv.Replace(nodename, worker()) },
		"never reached":    func(inv *inventory.Inventory) { inv.MarkUnreachable(nodename, "down") },
		"lost":             func(inv *inventory.Inventory) { inv.Replace(nodename, worker()); inv.MarkUnreachable(nodename, "down") },
		"mismatch":         func(inv *inventory.Inventory) { inv.MarkMismatch(nodename, "other") },
		"pending metadata": func(inv *inventory.Inventory) { inv.Replace(nodename, pendingWorker()) },
	} {
		all[name] = inventory.New(time.Now)
		fill(all[name])
	}

	return all
}

func pendingWorker() machine.Machine {
	m := worker()
	m.Platform = runtime.PlatformMetadataSpec{Platform: "aws"}

	return m
}

func TestProvider_NeverReportsMachineAsDeletedOrShutDown(t *testing.T) {
	for name, inv := range conditions() {
		t.Run(name, func(t *testing.T) {
			p := provider.New(inv, defaults)

			if exists, err := p.InstanceExists(t.Context(), nodeNamed(nodename)); err != nil || !exists {
				t.Errorf("InstanceExists: got %t, %v, want true", exists, err)
			}

			if down, err := p.InstanceShutdown(t.Context(), nodeNamed(nodename)); err != nil || down {
				t.Errorf("InstanceShutdown: got %t, %v, want false", down, err)
			}
		})
	}
}

func TestInstanceMetadata_RequiresCurrentMachine(t *testing.T) {
	for name, inv := range conditions() {
		t.Run(name, func(t *testing.T) {
			metadata, err := provider.New(inv, defaults).InstanceMetadata(t.Context(), nodeNamed(nodename))

			if name != "current" {
				if !errors.Is(err, cloudprovider.InstanceNotFound) {
					t.Errorf("got %+v, %v, want InstanceNotFound", metadata, err)
				}

				return
			}

			if err != nil {
				t.Fatal(err)
			}

			if metadata.ProviderID != "aws:///z/i-1" || metadata.Zone != "z" || metadata.Region != "r" || metadata.InstanceType != "t" {
				t.Errorf("unexpected metadata %+v", metadata)
			}
		})
	}
}

func TestInstanceMetadata_KeepsProviderIDOfNode(t *testing.T) {
	node := nodeNamed(nodename)
	node.Spec.ProviderID = "talos://aws/10.0.0.1"

	metadata, err := provider.New(conditions()["current"], defaults).InstanceMetadata(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}

	if metadata.ProviderID != node.Spec.ProviderID {
		t.Errorf("got providerID %q, want %q", metadata.ProviderID, node.Spec.ProviderID)
	}
}

func TestProvider_SupportsOnlyInstances(t *testing.T) {
	p := provider.New(inventory.New(time.Now), defaults)

	_, balancers := p.LoadBalancer()
	_, instances := p.Instances()
	_, zones := p.Zones()
	_, clusters := p.Clusters()
	_, routes := p.Routes()

	if balancers || instances || zones || clusters || routes {
		t.Errorf("supported: load balancers %t, instances %t, zones %t, clusters %t, routes %t; want none", balancers, instances, zones, clusters, routes)
	}

	if _, v2 := p.InstancesV2(); !v2 {
		t.Error("InstancesV2 is not supported")
	}

	if p.ProviderName() != provider.Name || !p.HasClusterID() {
		t.Errorf("got name %q, HasClusterID %t", p.ProviderName(), p.HasClusterID())
	}
}

func defaults() nodespec.Options { return nodespec.Options{} }
