package ccm

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/cloud-provider/names"
	"k8s.io/cloud-provider/options"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/provider"
)

const (
	// leaseName is the upstream Talos CCM's, so that the two never act at once.
	leaseName = "cloud-controller-manager-talos"

	// securePort is neither the framework's (10258) nor the upstream Talos CCM's (10458): all may share a host.
	securePort = 10459

	// A thousand Nodes take three writes each.
	clientQPS       = 100
	clientBurst     = 200
	concurrentSyncs = 10
)

// Options is the whole configuration of a run. Use NewOptions.
type Options struct {
	// Framework are the options of every cloud controller manager.
	Framework *options.CloudControllerManagerOptions
	// MachineSocket is the path of machine.sock; empty outside Talos.
	MachineSocket string
	// Talosconfig is the path of a talosconfig with the role os:reader, for use outside Talos. There a kubeconfig is needed too, except in a pod.
	Talosconfig string
	// RunDir is the folder for short-lived Kubernetes credentials; needed if there is a socket and no kubeconfig.
	RunDir string
	// StateDir is the folder for what is to outlive the process: the last good configuration. Empty: that ends with the process.
	StateDir string
	// DropPrivileges is for the extension: become an ordinary user before anything else.
	DropPrivileges bool
	// ProviderIDFallback applies to platforms without an instance identity.
	ProviderIDFallback config.ProviderIDFallback
	// ServiceCIDRs is a comma-separated list of prefixes that no pod CIDR may overlap; empty: those that Talos has.
	ServiceCIDRs string
	// NodeCIDRMaskSize, NodeCIDRMaskSizeIPv4 and NodeCIDRMaskSizeIPv6 are the prefix lengths of pod CIDRs; 0: the default. The first is for clusters of one family.
	NodeCIDRMaskSize, NodeCIDRMaskSizeIPv4, NodeCIDRMaskSizeIPv6 int
	// Environment is the process's, as NAME=value. A document that sets other variables has Run return a RestartError.
	Environment []string
	// CheckEnvironment says whether the process could be started with another environment; nil: always.
	CheckEnvironment func(environ []string) error
	// Clock is what everything but leader election and back-off of requests goes by; nil: the system's.
	Clock clock.Clock
}

// NewOptions returns the defaults.
func NewOptions() (*Options, error) {
	framework, err := options.NewCloudControllerManagerOptions()
	if err != nil {
		return nil, fmt.Errorf("make the default options: %w", err)
	}

	framework.KubeCloudShared.CloudProvider.Name = provider.Name
	framework.Generic.LeaderElection.ResourceName = leaseName
	framework.Generic.ClientConnection.QPS = clientQPS
	framework.Generic.ClientConnection.Burst = clientBurst
	framework.NodeController.ConcurrentNodeSyncs = concurrentSyncs
	framework.SecureServing.BindPort = securePort
	// Nobody outside the machine, unless its operator says so: an extension service shares the host's network.
	framework.SecureServing.BindAddress = net.IPv4(127, 0, 0, 1)
	framework.Authentication.TolerateInClusterLookupFailure = true
	// There are no webhooks to serve.
	framework.Webhook, framework.WebhookServing = nil, nil

	return &Options{Framework: framework, ProviderIDFallback: config.FallbackUUID}, nil
}

// Flags returns all flags by section.
func (o *Options) Flags() cliflag.NamedFlagSets {
	sections := o.Framework.Flags(controllerNames(), disabledByDefault().List(), controllerAliases(), nil, nil)

	fs := sections.FlagSet("talos")
	fs.StringVar(&o.MachineSocket, "machine-socket", o.MachineSocket, "Path of this machine's machine.sock. Only a Talos extension service can use it.")
	fs.StringVar(&o.Talosconfig, "talosconfig", o.Talosconfig, "Path of a talosconfig whose current context has the role os:reader. For use outside Talos, with --kubeconfig or in a pod.")
	fs.StringVar(&o.RunDir, "run-dir", o.RunDir, "Folder in memory for short-lived Kubernetes credentials. Used with --machine-socket if there is no --kubeconfig.")
	fs.StringVar(&o.StateDir, "state-dir", o.StateDir, "Folder that outlives the process, for the last good configuration.")
	fs.BoolVar(&o.DropPrivileges, "drop-privileges", o.DropPrivileges, "Raise the limit of open files and become uid 50 without capabilities before anything else.")
	fs.StringVar((*string)(&o.ProviderIDFallback), "provider-id-fallback", string(o.ProviderIDFallback),
		"What makes the providerID on platforms without an instance identity: 'uuid' (the SMBIOS UUID where it is unique) or 'node-ip' (as the upstream Talos CCM).")

	ipam := sections.FlagSet("node IPAM")
	ipam.StringVar(&o.ServiceCIDRs, "service-cluster-ip-range", o.ServiceCIDRs,
		"Comma-separated CIDRs of Services, which no pod CIDR may overlap. By default those that Talos has configured.")
	ipam.IntVar(&o.NodeCIDRMaskSize, "node-cidr-mask-size", o.NodeCIDRMaskSize, "Prefix length of pod CIDRs in a cluster of one family.")
	ipam.IntVar(&o.NodeCIDRMaskSizeIPv4, "node-cidr-mask-size-ipv4", o.NodeCIDRMaskSizeIPv4,
		fmt.Sprintf("Prefix length of IPv4 pod CIDRs; %d if it is 0.", nodeipam.DefaultMaskSizeIPv4))
	ipam.IntVar(&o.NodeCIDRMaskSizeIPv6, "node-cidr-mask-size-ipv6", o.NodeCIDRMaskSizeIPv6,
		fmt.Sprintf("Prefix length of IPv6 pod CIDRs; %d if it is 0.", nodeipam.DefaultMaskSizeIPv6))

	return sections
}

// ipam are the options for pod CIDRs.
func (o *Options) ipam() (nodeipam.Options, error) {
	shared := o.Framework.KubeCloudShared

	cluster, err := parseCIDRs("--cluster-cidr", shared.ClusterCIDR)
	service, serviceErr := parseCIDRs("--service-cluster-ip-range", o.ServiceCIDRs)

	result := nodeipam.Options{
		Allocator:    nodeipam.Allocator(shared.CIDRAllocatorType),
		ClusterCIDRs: cluster,
		ServiceCIDRs: service,
		MaskSizeIPv4: o.NodeCIDRMaskSizeIPv4,
		MaskSizeIPv6: o.NodeCIDRMaskSizeIPv6,
	}

	if err := errors.Join(err, serviceErr); err != nil {
		return nodeipam.Options{}, err
	}

	if err := o.setOneMaskSize(&result); err != nil {
		return nodeipam.Options{}, err
	}

	return result, result.Validate()
}

// setOneMaskSize gives --node-cidr-mask-size to the cluster's one family. Without --cluster-cidr only Talos knows that, and the size has to tell.
func (o *Options) setOneMaskSize(result *nodeipam.Options) error {
	if o.NodeCIDRMaskSize == 0 {
		return nil
	}

	if result.MaskSizeIPv4 != 0 || result.MaskSizeIPv6 != 0 {
		return errors.New("--node-cidr-mask-size excludes --node-cidr-mask-size-ipv4 and --node-cidr-mask-size-ipv6")
	}

	isIPv4 := func(cidr netip.Prefix) bool { return cidr.Addr().Is4() }
	anyIPv4 := slices.ContainsFunc(result.ClusterCIDRs, isIPv4)
	anyIPv6 := slices.ContainsFunc(result.ClusterCIDRs, func(cidr netip.Prefix) bool { return !isIPv4(cidr) })

	switch {
	case anyIPv4 && anyIPv6:
		return errors.New("--node-cidr-mask-size is for a cluster of one family, and --cluster-cidr has two")
	case anyIPv6 || (!anyIPv4 && o.NodeCIDRMaskSize > 32):
		result.MaskSizeIPv6 = o.NodeCIDRMaskSize
	default:
		result.MaskSizeIPv4 = o.NodeCIDRMaskSize
	}

	return nil
}

func parseCIDRs(flag, list string) ([]netip.Prefix, error) {
	if list == "" {
		return nil, nil
	}

	var prefixes []netip.Prefix

	for part := range strings.SplitSeq(list, ",") {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(part))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}

		prefixes = append(prefixes, prefix.Masked())
	}

	return prefixes, nil
}

// Folders are those that the process writes to.
func (o *Options) Folders() []string {
	return slices.DeleteFunc([]string{o.RunDir, o.StateDir}, func(dir string) bool { return dir == "" })
}

// Validate returns all that is wrong with the options that are ours; the framework checks its own.
func (o *Options) Validate() error {
	var errs []error

	if (o.MachineSocket == "") == (o.Talosconfig == "") {
		errs = append(errs, errors.New("exactly one of --machine-socket and --talosconfig is needed"))
	}

	if o.MachineSocket != "" && o.Framework.KubeCloudShared.CloudProvider.CloudConfigFile != "" {
		errs = append(errs, errors.New("--cloud-config is for use outside Talos; with --machine-socket the configuration is the ExtensionServiceConfig document"))
	}

	errs = append(errs, o.validateConnection())

	if o.DropPrivileges && o.RunDir == "" {
		errs = append(errs, errors.New("--drop-privileges needs --run-dir, to make it the ordinary user's own"))
	}

	if !slices.Contains([]config.ProviderIDFallback{config.FallbackUUID, config.FallbackNodeIP}, o.ProviderIDFallback) {
		errs = append(errs, fmt.Errorf("--provider-id-fallback: %q is neither %q nor %q", o.ProviderIDFallback, config.FallbackUUID, config.FallbackNodeIP))
	}

	if _, err := o.ipam(); err != nil {
		errs = append(errs, err)
	}

	errs = append(errs, o.Framework.Validate(controllerNames(), disabledByDefault().List(), controllerAliases(), nil, nil))

	return errors.Join(errs...)
}

// validateConnection says what is wrong with the way to the API server. A pod needs no kubeconfig.
func (o *Options) validateConnection() error {
	switch {
	case o.Framework.Generic.ClientConnection.Kubeconfig != "":
		return nil
	case o.MachineSocket != "" && o.RunDir == "":
		return errors.New("--run-dir is needed without --kubeconfig")
	case o.MachineSocket == "" && o.Framework.Master != "":
		return errors.New("--master needs --kubeconfig: it says nothing of credentials")
	}

	return nil
}

// frameworkFor is a copy of the framework's options for one run with kubeconfig: asking them for their Config writes to them, among
// others the listener, which ends with the run.
func (o *Options) frameworkFor(kubeconfig string) *options.CloudControllerManagerOptions {
	framework := *o.Framework

	generic := *framework.Generic
	generic.GenericControllerManagerConfiguration = generic.DeepCopy()
	generic.ClientConnection.Kubeconfig = kubeconfig
	framework.Generic = &generic

	serving := *framework.SecureServing.SecureServingOptions
	framework.SecureServing = serving.WithLoopback()

	authentication, authorization := *framework.Authentication, *framework.Authorization
	authentication.RemoteKubeConfigFile = cmp.Or(authentication.RemoteKubeConfigFile, kubeconfig)
	authorization.RemoteKubeConfigFile = cmp.Or(authorization.RemoteKubeConfigFile, kubeconfig)
	framework.Authentication, framework.Authorization = &authentication, &authorization

	return &framework
}

func controllerNames() []string { return slices.Sorted(maps.Keys(controllers{}.constructors())) }

// controllerAliases are the names that users know from the framework and from the upstream Talos CCM.
func controllerAliases() map[string]string {
	aliases := maps.Clone(names.CCMControllerAliases())
	aliases[csrApprovalAlias] = csrApproval
	aliases[nodeipam.Alias] = nodeipam.Name

	return aliases
}

// disabledByDefault are the controllers that run only if --controllers names them.
func disabledByDefault() sets.String { //nolint:staticcheck // what the framework takes
	return sets.NewString(names.CloudNodeLifecycleController, names.ServiceLBController, names.NodeRouteController, nodeipam.Name)
}
