package main

import (
	"slices"

	"github.com/spf13/pflag"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
)

func init() {
	utilruntime.Must(logsapi.AddFeatureGates(utilfeature.DefaultMutableFeatureGate))
}

// usualFlags are the flags that --help lists, in addition to those of their own sections.
var usualFlags = []string{
	"allocate-node-cidrs", "cidr-allocator-type", "cloud-config", "cluster-cidr", "controllers", "kube-api-qps", "leader-elect", "leader-elect-resource-name",
	"concurrent-node-syncs", "bind-address", "secure-port", "kubeconfig", "help", "help-all", "v", "version",
}

// usual returns the sections with only the flags that users are likely to need.
func usual(sections cliflag.NamedFlagSets) (result cliflag.NamedFlagSets) {
	for _, name := range sections.Order {
		sections.FlagSets[name].VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && (slices.Contains([]string{"talos", "node IPAM"}, name) || slices.Contains(usualFlags, f.Name)) {
				result.FlagSet(name).AddFlag(f)
			}
		})
	}

	return result
}
