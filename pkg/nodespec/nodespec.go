// Package nodespec says what a Node of a Talos machine should look like.
//
// It is part of the pure core: a Machine in, a Spec out. Of the Node it reads only what the kubelet says
// of the machine (node.go). It never decides who owns a field, and never writes.
package nodespec

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Labels as the upstream Talos CCM names them; the topology and instance-type labels are those of Kubernetes.
const (
	LabelPlatform    = "node.cloudprovider.kubernetes.io/platform"
	LabelClusterName = "node.cloudprovider.kubernetes.io/clustername"
	LabelLifecycle   = "node.cloudprovider.kubernetes.io/lifecycle"

	lifecycleSpot = "spot"
)

// Options are the cluster-wide choices. The zero value is the default.
type Options struct {
	// ClusterName replaces the name that Talos knows; empty: use Talos's.
	ClusterName string
	// PreferIPv6 puts IPv6 addresses before IPv4 ones.
	PreferIPv6 bool
	// ProviderIDFromNodeIP makes `talos://<platform>/<node IP>` the fallback instead of the SMBIOS UUID: what the
	// upstream Talos CCM writes.
	ProviderIDFromNodeIP bool
}

// Input is all that Desired looks at.
type Input struct {
	Machine machine.Machine
	// ProvidedNodeIPs are those the kubelet says it was started with, in its order. They are believed only where the
	// machine has them.
	ProvidedNodeIPs []netip.Addr
	// SharedUUID is true if another machine has the same SMBIOS UUID.
	SharedUUID bool
	Options    Options
}

// Spec is what the Node should carry.
type Spec struct {
	// ProviderID is never empty. Kubernetes never lets it change.
	ProviderID string
	Labels     map[string]string
	// Addresses in the order in which the Node lists them.
	Addresses []corev1.NodeAddress
}

// Problem is one value that cannot be put on the Node. All others are.
type Problem struct {
	Key, Value, Why string
}

// String is the problem in a sentence.
func (p Problem) String() string {
	const enough = 80 // of a value that may be as long as a metadata service likes

	value := p.Value
	if len(value) > enough {
		value = value[:enough] + "…"
	}

	return fmt.Sprintf("%s=%q left out: %s", p.Key, value, p.Why)
}

// Desired returns what the Node should carry, or in pending why that cannot be said yet. Problems are values that were
// left out.
func Desired(in Input) (spec Spec, problems []Problem, pending string) {
	nodeIPs := internalIPs(in)
	if len(nodeIPs) == 0 {
		return Spec{}, nil, "the machine has none of the node IPs that its kubelet was started with"
	}

	providerID, pending := providerID(in, nodeIPs[0])
	if pending != "" {
		return Spec{}, nil, pending
	}

	labels, labelProblems := labels(in)
	addresses, addressProblems := addresses(in, nodeIPs)

	return Spec{ProviderID: providerID, Labels: labels, Addresses: addresses}, append(labelProblems, addressProblems...), ""
}

func labels(in Input) (map[string]string, []Problem) {
	meta := in.Machine.Platform

	clusterName := in.Options.ClusterName
	if clusterName == "" {
		clusterName = in.Machine.ClusterName
	}

	lifecycle := ""
	if meta.Spot {
		lifecycle = lifecycleSpot
	}

	wanted := []struct{ key, value string }{
		{corev1.LabelTopologyRegion, meta.Region},
		{corev1.LabelFailureDomainBetaRegion, meta.Region},
		{corev1.LabelTopologyZone, meta.Zone},
		{corev1.LabelFailureDomainBetaZone, meta.Zone},
		{corev1.LabelInstanceTypeStable, meta.InstanceType},
		{corev1.LabelInstanceType, meta.InstanceType},
		{LabelPlatform, meta.Platform},
		{LabelClusterName, clusterName},
		{LabelLifecycle, lifecycle},
	}

	result := map[string]string{}

	var problems []Problem

	for _, l := range wanted {
		if l.value == "" {
			continue
		}

		if why := validation.IsValidLabelValue(l.value); len(why) > 0 {
			problems = append(problems, Problem{Key: l.key, Value: l.value, Why: strings.Join(why, "; ")})

			continue
		}

		result[l.key] = l.value
	}

	return result, problems
}
