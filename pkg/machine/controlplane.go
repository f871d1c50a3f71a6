package machine

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
)

const (
	kubeControllerManager = "kube-controller-manager"

	// nodeIPAM is the name of kube-controller-manager's controller that assigns pod CIDRs, and nodeIPAMAlias its name
	// in older versions.
	nodeIPAM      = "node-ipam-controller"
	nodeIPAMAlias = "nodeipam"
)

// ControlPlane is what a control-plane machine knows about the whole cluster. A fact that cannot be read keeps its last
// value; nil means that it was never read.
type ControlPlane struct {
	// Local is true for the machine that this process runs on.
	Local    bool
	Subjects *ClusterSubjects
	KCM      *KCMConfig
	// Members are the members of the cluster by nodename, as Talos discovery lists them; nil unless the last poll has
	// read them.
	Members map[string]Member
	// Problem is why the last poll did not read a fact; empty if it has read all.
	Problem string
}

// IsComplete reports whether all facts have been read at least once. Members do not count.
func (c *ControlPlane) IsComplete() bool { return c != nil && c.Subjects != nil && c.KCM != nil }

// ClusterSubjects are names and addresses of the cluster itself. Prefixes of IPv4 are not IPv4-mapped.
type ClusterSubjects struct {
	// APIServerNames and APIServerIPs identify the API server to clients: a machine reports the endpoint of the cluster as
	// it resolves it. Talos adds the names and addresses of each control-plane machine to the API server's certificate. The
	// control-plane machine may have a certificate for them.
	APIServerNames []string
	APIServerIPs   []netip.Addr
	ServiceCIDRs   []netip.Prefix
	// PodCIDRs are the cluster's, without pod CIDRs allocated from machines' own subnets.
	PodCIDRs []netip.Prefix
	// VIPs are addresses of Services, and virtual addresses that move between machines.
	VIPs []netip.Addr
}

// KCMConfig is how the machine's kube-controller-manager assigns addresses.
type KCMConfig struct {
	// AllocatesNodeCIDRs is true if kube-controller-manager assigns pod CIDRs to Nodes.
	AllocatesNodeCIDRs bool
	// ClusterCIDRs and ServiceCIDRs are masked.
	ClusterCIDRs, ServiceCIDRs []netip.Prefix
	// MaskSizes are the prefix lengths of pod CIDRs, without those that are not configured.
	MaskSizes map[corev1.IPFamily]int
	// SubnetBound are components that Talos deploys, and that do not work with podCIDRs outside the ClusterCIDRs.
	SubnetBound []string
}

// Member is a member of the cluster.
type Member struct {
	NodeID string
	// Address is its first address; the zero value if it has none.
	Address netip.Addr
}

// MemberKind is the kind of the cluster's members.
func MemberKind() resource.Kind { return kind(cluster.NamespaceName, cluster.MemberType) }

// Getter returns a resource of a machine; nil if the machine does not have it.
type Getter func(resource.Pointer) (resource.Resource, error)

var errAbsent = errors.New("the machine does not have it")

func read[R resource.Resource](get Getter, pointer resource.Pointer) (r R, err error) {
	found, err := get(pointer)

	r, isFound := found.(R)
	if err == nil && !isFound {
		err = errAbsent
	}

	return r, err
}

// Update updates the facts that can be read. It returns an error for the first fact that cannot. Without its
// configuration, kube-controller-manager must not be taken for one that does not assign pod CIDRs.
func (c *ControlPlane) Update(get Getter) error {
	// The CIDRs have the same field numbers in all versions of Talos. The arguments have not: they are read from the
	// static pod.
	config, err := read[*k8s.ControllerManagerConfig](get, k8s.NewControllerManagerConfig(k8s.ControllerManagerConfigID).Metadata())
	if err != nil {
		return fmt.Errorf("read configuration of %s: %w", kubeControllerManager, err)
	}

	var kcm KCMConfig

	if kcm.ClusterCIDRs, err = cidrset.ParsePrefixes(config.TypedSpec().PodCIDRs); err != nil {
		return fmt.Errorf("parse cluster CIDRs of %s: %w", kubeControllerManager, err)
	}

	if kcm.ServiceCIDRs, err = cidrset.ParsePrefixes(config.TypedSpec().ServiceCIDRs); err != nil {
		return fmt.Errorf("parse service CIDRs of %s: %w", kubeControllerManager, err)
	}

	subjects, subjectsErr := readSubjects(get)
	if subjectsErr == nil {
		subjects.PodCIDRs, subjects.ServiceCIDRs = kcm.ClusterCIDRs, kcm.ServiceCIDRs
		c.Subjects = subjects
	}

	if config.TypedSpec().Enabled {
		if err := kcm.readArguments(get); err != nil {
			return err
		}
	}

	// An error does not matter: this is for a warning only.
	if manifests, err := read[*k8s.BootstrapManifestsConfig](get, k8s.NewBootstrapManifestsConfig().Metadata()); err == nil {
		kcm.SubnetBound = subnetBound(manifests.TypedSpec())
	}

	c.KCM = &kcm

	return subjectsErr
}

// subnetBound contains kube-proxy unless it is configured to recognize pods in another way than by podSubnets.
func subnetBound(spec *k8s.BootstrapManifestsConfigSpec) (names []string) {
	if spec.FlannelEnabled {
		names = append(names, "Flannel")
	}

	setsMode := func(arg string) bool { return strings.HasPrefix(arg, "--detect-local-mode=") }
	if spec.ProxyEnabled && spec.ProxyConfig["detectLocalMode"] == nil && !slices.ContainsFunc(spec.ProxyArgs, setsMode) {
		names = append(names, "kube-proxy")
	}

	return names
}

// UpdateMembers replaces the members.
func (c *ControlPlane) UpdateMembers(items []resource.Resource) {
	c.Members = map[string]Member{}

	each(items, func(member *cluster.Member) {
		spec := member.TypedSpec()
		m := Member{NodeID: spec.NodeID}

		if len(spec.Addresses) > 0 {
			m.Address = spec.Addresses[0]
		}

		c.Members[member.Metadata().ID()] = m
	})
}

// readSubjects returns the endpoint of the cluster and the virtual IPs. A machine may have no endpoint.
func readSubjects(get Getter) (*ClusterSubjects, error) {
	subjects := &ClusterSubjects{}

	endpoint, err := read[*k8s.Endpoint](get, k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID).Metadata())
	if err != nil && !errors.Is(err, errAbsent) {
		return nil, fmt.Errorf("read cluster endpoint: %w", err)
	}

	if err == nil {
		subjects.APIServerIPs, subjects.APIServerNames = endpoint.TypedSpec().Addresses, endpoint.TypedSpec().Hosts
	}

	excluded, err := read[*k8s.NodeIPConfig](get, k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID).Metadata())
	if err != nil {
		return nil, fmt.Errorf("read subnets excluded from node IPs: %w", err)
	}

	// Virtual IPs are listed as single addresses, next to pod and service CIDRs (k8s.NodeIPConfigController).
	subjects.VIPs = SingleAddresses(excluded.TypedSpec().ExcludeSubnets)

	return subjects, nil
}

// SingleAddresses returns the entries that are a single address, with or without a prefix length.
func SingleAddresses(list []string) []netip.Addr {
	var found []netip.Addr

	for _, s := range list {
		if addr, err := netip.ParseAddr(s); err == nil {
			found = append(found, addr)
		} else if prefix, err := netip.ParsePrefix(s); err == nil && prefix.IsSingleIP() {
			found = append(found, prefix.Addr())
		}
	}

	return found
}

// readArguments applies the command line in kube-controller-manager's static pod.
func (c *KCMConfig) readArguments(get Getter) error {
	pod, err := read[*k8s.StaticPod](get, k8s.NewStaticPod(k8s.NamespaceName, k8s.ControllerManagerID).Metadata())
	if err != nil {
		return fmt.Errorf("read static pod of %s: %w", kubeControllerManager, err)
	}

	args, err := arguments(pod.TypedSpec().Pod)
	if err != nil {
		return fmt.Errorf("parse static pod of %s: %w", kubeControllerManager, err)
	}

	c.setArguments(args)

	return nil
}

func arguments(object map[string]any) ([]string, error) {
	var pod corev1.Pod
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object, &pod); err != nil {
		return nil, err
	}

	i := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == kubeControllerManager })
	if i < 0 {
		return nil, fmt.Errorf("no container named %s", kubeControllerManager)
	}

	return slices.Concat(pod.Spec.Containers[i].Command, pod.Spec.Containers[i].Args), nil
}

// setArguments applies the command line of kube-controller-manager, which assigns pod CIDRs with
// --allocate-node-cidrs, which is off by default, and the controller, which is on by default. --node-cidr-mask-size is
// only for single-stack clusters.
func (c *KCMConfig) setArguments(args []string) {
	flags := pflag.NewFlagSet(kubeControllerManager, pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	allocate := flags.Bool("allocate-node-cidrs", false, "")
	controllers := flags.StringSlice("controllers", []string{"*"}, "")
	size := flags.Int("node-cidr-mask-size", 0, "")
	sizeIPv4 := flags.Int("node-cidr-mask-size-ipv4", 0, "")
	sizeIPv6 := flags.Int("node-cidr-mask-size-ipv6", 0, "")

	if err := flags.Parse(args); err != nil {
		c.AllocatesNodeCIDRs = true // unknown, so talos-ccm must not allocate

		return
	}

	c.AllocatesNodeCIDRs = *allocate && assignsPodCIDRs(*controllers)

	if len(c.ClusterCIDRs) == 1 && c.ClusterCIDRs[0].Addr().Is4() {
		*sizeIPv4 = cmp.Or(*sizeIPv4, *size)
	} else if len(c.ClusterCIDRs) == 1 {
		*sizeIPv6 = cmp.Or(*sizeIPv6, *size)
	}

	c.MaskSizes = map[corev1.IPFamily]int{corev1.IPv4Protocol: *sizeIPv4, corev1.IPv6Protocol: *sizeIPv6}
	maps.DeleteFunc(c.MaskSizes, func(_ corev1.IPFamily, size int) bool { return size == 0 })
}

// assignsPodCIDRs reports whether the value of --controllers enables the controller. Its first entry decides.
func assignsPodCIDRs(controllers []string) bool {
	for _, entry := range controllers {
		if name := strings.TrimPrefix(entry, "-"); name == nodeIPAM || name == nodeIPAMAlias {
			return name == entry
		}
	}

	return slices.Contains(controllers, "*")
}
