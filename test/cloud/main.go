// Command cloud is the cloud controller manager of a provider that does not exist: the controllers of
// k8s.io/cloud-provider with its fake cloud. It is the second controller in tests of sharing a cluster.
//
// Its instances are the nodenames in the file of --cloud-config, which it reads again each time. As a careful
// provider does, it returns an error for a Node that is not its own. Only a Node with a providerID of its scheme can be
// gone.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	cloudprovider "k8s.io/cloud-provider"
	"k8s.io/cloud-provider/app"
	"k8s.io/cloud-provider/app/config"
	"k8s.io/cloud-provider/fake"
	"k8s.io/cloud-provider/names"
	"k8s.io/cloud-provider/options"
	"k8s.io/component-base/cli"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/klog/v2"
)

// scheme is the prefix of the provider's providerIDs.
const scheme = "fake://"

func main() {
	opts, err := options.NewCloudControllerManagerOptions()
	if err != nil {
		klog.Fatalf("Failed to create options: %v", err)
	}

	command := app.NewCloudControllerManagerCommand(opts, newCloud, app.DefaultInitFuncConstructors, names.CCMControllerAliases(),
		cliflag.NamedFlagSets{}, wait.NeverStop)
	os.Exit(cli.Run(command))
}

func newCloud(completed *config.CompletedConfig) cloudprovider.Interface {
	return &cloud{Cloud: &fake.Cloud{}, file: completed.ComponentConfig.KubeCloudShared.CloudProvider.CloudConfigFile}
}

// cloud is the fake cloud with instances.
type cloud struct {
	*fake.Cloud

	file string
}

// InstancesV2 implements cloudprovider.Interface.
func (c *cloud) InstancesV2() (cloudprovider.InstancesV2, bool) { return c, true }

// InstanceExists implements cloudprovider.InstancesV2.
func (c *cloud) InstanceExists(_ context.Context, node *corev1.Node) (bool, error) {
	nodename, isOurs := strings.CutPrefix(node.Spec.ProviderID, scheme)
	if !isOurs {
		return false, fmt.Errorf("node %q with providerID %q is not of this provider", node.Name, node.Spec.ProviderID)
	}

	return c.has(nodename)
}

// InstanceMetadata implements cloudprovider.InstancesV2.
func (c *cloud) InstanceMetadata(_ context.Context, node *corev1.Node) (*cloudprovider.InstanceMetadata, error) {
	exists, err := c.has(node.Name)
	if err != nil {
		return nil, err
	}

	if !exists {
		return nil, cloudprovider.InstanceNotFound
	}

	return &cloudprovider.InstanceMetadata{
		ProviderID: scheme + node.Name, InstanceType: "fake-type", Zone: "fake-zone", Region: "fake-region", NodeAddresses: node.Status.Addresses,
	}, nil
}

func (c *cloud) has(nodename string) (bool, error) {
	content, err := os.ReadFile(c.file)

	return slices.Contains(strings.Fields(string(content)), nodename), err
}
