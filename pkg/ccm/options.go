package ccm

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/cloud-provider/names"
	"k8s.io/cloud-provider/options"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/service"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

const (
	// leaseName is the lease of the upstream Talos CCM, so that both never act at the same time.
	leaseName = "cloud-controller-manager-talos"

	// securePort is not the port of the framework (10258) or of the upstream Talos CCM (10458), since all of them
	// may share a host.
	securePort = 10459

	// clientQPS disables client-side rate limiting: workers are few, and the API server has priority and fairness.
	clientQPS       = -1
	concurrentSyncs = 10
)

// Options configures a Manager. Use NewOptions.
type Options struct {
	// Framework has the options that all cloud controller managers share.
	Framework *options.CloudControllerManagerOptions
	// MachineSocket is the path of machine.sock; empty outside Talos.
	MachineSocket string
	// Talosconfig is the path of a talosconfig with the role os:reader, for use outside Talos.
	Talosconfig string
	// RunDir is the directory for short-lived Kubernetes credentials. Required with MachineSocket unless a kubeconfig
	// is given.
	RunDir string
	// StateDir is the directory for the last-known-good configuration. If empty, it does not survive a restart.
	StateDir string
	// DropPrivileges makes main switch to an unprivileged user at startup.
	DropPrivileges bool
	// MemoryCeiling is the memory above which the process exits; 0 is the default, which depends on the Nodes and the
	// machine.
	MemoryCeiling resource.QuantityValue
	// ProviderIDFallback applies to platforms that publish no providerID.
	ProviderIDFallback config.ProviderIDFallback
	// ServiceCIDRs is a comma-separated list of prefixes that no pod CIDR may overlap. If empty, the Service CIDRs of
	// the Talos configuration are used.
	ServiceCIDRs string
	// HostedControlPlane is a comma-separated list of the DNS names and IP addresses of the API servers of a control
	// plane that has no machines in the cluster.
	HostedControlPlane string
	// NodeCIDRMaskSize, NodeCIDRMaskSizeIPv4 and NodeCIDRMaskSizeIPv6 are the prefix lengths of pod CIDRs; 0 is the
	// default. The first is for single-stack clusters.
	NodeCIDRMaskSize, NodeCIDRMaskSizeIPv4, NodeCIDRMaskSizeIPv6 int
	// Environment is the environment of the process, as NAME=value. Run returns a RestartError if a document sets
	// other variables.
	Environment []string
	// CheckEnvironment reports why the process could not be started with environ.
	CheckEnvironment func(environ []string) error
	// Clock is used for everything except leader election and the delays of work queues.
	Clock clock.Clock
}

// NewOptions returns the default options.
func NewOptions() (*Options, error) {
	framework, err := options.NewCloudControllerManagerOptions()
	if err != nil {
		return nil, fmt.Errorf("create default options: %w", err)
	}

	framework.KubeCloudShared.CloudProvider.Name = "talos"
	framework.Generic.LeaderElection.ResourceName = leaseName
	framework.Generic.ClientConnection.QPS = clientQPS
	framework.NodeController.ConcurrentNodeSyncs = concurrentSyncs
	framework.SecureServing.BindPort = securePort
	// An extension service shares the host's network.
	framework.SecureServing.BindAddress = net.IPv4(127, 0, 0, 1)
	framework.Authentication.TolerateInClusterLookupFailure = true
	framework.Authorization.AlwaysAllowPaths = []string{"/healthz", "/readyz"} // there is no /livez
	// talos-ccm has no webhooks.
	framework.Webhook, framework.WebhookServing = nil, nil

	return &Options{
		Framework:          framework,
		ProviderIDFallback: config.FallbackUUID,
		CheckEnvironment:   func([]string) error { return nil },
		Clock:              clock.RealClock{},
	}, nil
}

// withoutEffect are flags of the framework that are accepted because users set them for every cloud controller manager.
// The help omits them.
var withoutEffect = []string{
	"cloud-provider",                                                 // there is only one
	"cluster-name",                                                   // is part of the names of load balancers and routes in a cloud
	"concurrent-node-status-updates", "node-status-update-frequency", // --concurrent-node-syncs is used, and Nodes follow their machines
	"concurrent-service-syncs",                              // of the framework's service controller
	"configure-cloud-routes", "route-reconciliation-period", // of its route controller
	"controller-start-interval",                          // all controllers start together
	"enable-leader-migration", "leader-migration-config", // no controller comes from kube-controller-manager
	"external-cloud-volume-plugin",    // for in-tree cloud providers
	"node-monitor-period",             // of its lifecycle controller
	"use-service-account-credentials", // there is one ServiceAccount
}

// Flags returns all flags by section. The help omits those without effect, and sections that have no other flags.
func (o *Options) Flags() cliflag.NamedFlagSets {
	var all, disabledByDefault []string

	for _, c := range controllers {
		all = append(all, c.name)

		if !c.enabledByDefault {
			disabledByDefault = append(disabledByDefault, c.name)
		}
	}

	sections := o.Framework.Flags(all, disabledByDefault, nil, nil, nil)

	for name, fs := range sections.FlagSets {
		for _, flag := range withoutEffect {
			if f := fs.Lookup(flag); f != nil {
				f.Hidden = true
			}
		}

		if !fs.HasAvailableFlags() {
			sections.Order = slices.DeleteFunc(sections.Order, func(section string) bool { return section == name })
		}
	}

	shared := sections.FlagSet("generic")
	shared.Lookup("allocate-node-cidrs").Usage = "Allocate pod CIDRs. Requires node-ipam-controller in --controllers."
	shared.Lookup("cluster-cidr").Usage = "Comma-separated list of pod CIDRs. If empty, the pod subnets of the Talos configuration are used."
	shared.Lookup("cidr-allocator-type").Usage = "Source of pod CIDRs: 'RangeAllocator' (cluster CIDRs and pools) or 'CloudAllocator' (each machine's own IPv6 prefix)."

	fs := sections.FlagSet("talos")
	fs.StringVar(&o.MachineSocket, "machine-socket", o.MachineSocket,
		"Path to the local machine's machine.sock. Only available to Talos extension services.")
	fs.StringVar(&o.Talosconfig, "talosconfig", o.Talosconfig,
		"Path to a talosconfig file whose current context has the role os:reader. Use instead of --machine-socket in a pod or outside the cluster.")
	fs.StringVar(&o.RunDir, "run-dir", o.RunDir,
		"Directory for short-lived Kubernetes credentials, preferably on a tmpfs. Required with --machine-socket unless --kubeconfig is set.")
	fs.StringVar(&o.StateDir, "state-dir", o.StateDir,
		"Directory for the last-known-good configuration. If empty, the last-known-good configuration does not survive a restart.")
	fs.BoolVar(&o.DropPrivileges, "drop-privileges", o.DropPrivileges,
		"Raise the open file limit and the OOM score, then switch to UID 50 and drop all capabilities at startup. Requires root and --run-dir.")
	fs.Var(&o.MemoryCeiling, "memory-ceiling",
		"Memory above which the process exits, such as 2Gi. If 0, it is 512Mi and 1Mi per Node that it has labeled, but at most half of the machine's memory.")
	fs.StringVar((*string)(&o.ProviderIDFallback), "provider-id-fallback", string(o.ProviderIDFallback),
		"Source of the providerID on platforms that publish no providerID: 'uuid' (instance ID, or SMBIOS UUID if it is unique) or 'node-ip' (as in the upstream Talos CCM). "+
			"global.providerIDFallback in the configuration takes precedence.")

	fs.StringVar(&o.HostedControlPlane, "hosted-control-plane", o.HostedControlPlane,
		"Comma-separated list of all DNS names and IP addresses of the API servers, if none of the Nodes is a control-plane machine. "+
			"No kubelet gets a certificate for them. Requires --talosconfig, --cluster-cidr and --service-cluster-ip-range.")

	ipam := sections.FlagSet("node IPAM")
	ipam.StringVar(&o.ServiceCIDRs, "service-cluster-ip-range", o.ServiceCIDRs,
		"Comma-separated list of Service CIDRs. Pod CIDRs never overlap them. If empty, the Service CIDRs of the Talos configuration are used.")
	ipam.IntVar(&o.NodeCIDRMaskSize, "node-cidr-mask-size", o.NodeCIDRMaskSize,
		"Mask size for node CIDRs in a single-stack cluster. Cannot be combined with --node-cidr-mask-size-ipv4 or --node-cidr-mask-size-ipv6.")
	ipam.IntVar(&o.NodeCIDRMaskSizeIPv4, "node-cidr-mask-size-ipv4", o.NodeCIDRMaskSizeIPv4,
		fmt.Sprintf("Mask size for IPv4 node CIDRs. If 0, kube-controller-manager's is used for the cluster CIDRs if it is set, else %d.", nodeipam.DefaultMaskSizeIPv4))
	ipam.IntVar(&o.NodeCIDRMaskSizeIPv6, "node-cidr-mask-size-ipv6", o.NodeCIDRMaskSizeIPv6,
		fmt.Sprintf("Mask size for IPv6 node CIDRs. If 0, kube-controller-manager's is used for the cluster CIDRs if it is set, else %d.", nodeipam.DefaultMaskSizeIPv6))

	return sections
}

// Directories returns the directories that the process writes to.
func (o *Options) Directories() []string {
	return slices.DeleteFunc([]string{o.RunDir, o.StateDir}, func(dir string) bool { return dir == "" })
}

// Validate returns all errors in the options.
func (o *Options) Validate() error {
	var errs []error

	if (o.MachineSocket == "") == (o.Talosconfig == "") {
		errs = append(errs, errors.New("exactly one of --machine-socket and --talosconfig is required"))
	}

	if o.MachineSocket != "" && o.Framework.KubeCloudShared.CloudProvider.CloudConfigFile != "" {
		errs = append(errs, errors.New("--cloud-config cannot be combined with --machine-socket, which reads the configuration from the ExtensionServiceConfig document"))
	}

	switch kubeconfig := o.Framework.Generic.ClientConnection.Kubeconfig; {
	case kubeconfig != "":
	case o.MachineSocket != "" && o.RunDir == "":
		errs = append(errs, errors.New("--machine-socket requires --run-dir or --kubeconfig"))
	case o.MachineSocket == "" && o.Framework.Master != "": // the in-cluster configuration is for the API server of the cluster only
		errs = append(errs, errors.New("--master requires --kubeconfig, which has the credentials"))
	}

	if o.DropPrivileges && o.RunDir == "" {
		errs = append(errs, errors.New("--drop-privileges requires --run-dir"))
	}

	if !slices.Contains([]config.ProviderIDFallback{config.FallbackUUID, config.FallbackNodeIP}, o.ProviderIDFallback) {
		errs = append(errs, fmt.Errorf("--provider-id-fallback: %q is not supported; use %q or %q",
			o.ProviderIDFallback, config.FallbackUUID, config.FallbackNodeIP))
	}

	_, err := o.ipam()
	_, hostedErr := o.hosted()
	errs = append(errs, err, o.checkControllers(), hostedErr, o.checkElection(), o.checkTLS(), o.checkMemory(), o.checkFramework())

	return errors.Join(errs...)
}

// checkFramework returns the errors of the framework. Its error about a large port says that 0 is invalid.
func (o *Options) checkFramework() error {
	if port := o.Framework.SecureServing.BindPort; port > 65535 {
		return fmt.Errorf("--secure-port: must be between 0 and 65535, not %d", port)
	}

	return o.Framework.Validate(o.entryNames(), nil, nil, nil, nil)
}

// checkElection returns the errors with which the leader election would fail.
func (o *Options) checkElection() error {
	var errs []error

	const prefix = "--leader-elect-"

	election := o.Framework.Generic.LeaderElection
	minRenewDeadline := time.Duration(leaderelection.JitterFactor * float64(election.RetryPeriod.Duration))

	switch {
	case !election.LeaderElect:
		return nil
	case election.RetryPeriod.Duration <= 0:
		errs = append(errs, fmt.Errorf("%sretry-period: must be positive, not %s", prefix, election.RetryPeriod.Duration))
	case election.RenewDeadline.Duration <= minRenewDeadline:
		errs = append(errs, fmt.Errorf("%srenew-deadline: must be longer than %s, %g times the retry period, not %s",
			prefix, minRenewDeadline, leaderelection.JitterFactor, election.RenewDeadline.Duration))
	case election.LeaseDuration.Duration <= election.RenewDeadline.Duration:
		errs = append(errs, fmt.Errorf("%slease-duration: must be longer than the renew deadline, %s, not %s",
			prefix, election.RenewDeadline.Duration, election.LeaseDuration.Duration))
	}

	if o.MachineSocket == "" {
		return errors.Join(errs...)
	}

	// The Role in extension.RBAC allows no other lease.
	if election.ResourceName != leaseName {
		errs = append(errs, fmt.Errorf("%sresource-name: must be %s for the extension, not %q", prefix, leaseName, election.ResourceName))
	}

	if election.ResourceNamespace != metav1.NamespaceSystem {
		errs = append(errs, fmt.Errorf("%sresource-namespace: must be %s for the extension, not %q", prefix, metav1.NamespaceSystem, election.ResourceNamespace))
	}

	return errors.Join(errs...)
}

func (o *Options) checkMemory() error {
	if o.MemoryCeiling.Sign() < 0 {
		return fmt.Errorf("--memory-ceiling: must be positive, or 0 for the default, not %s", o.MemoryCeiling.String())
	}

	return nil
}

// checkTLS returns the errors with which the secure port would fail.
func (o *Options) checkTLS() error {
	_, err := cliflag.TLSVersion(o.Framework.SecureServing.MinTLSVersion)
	if err != nil {
		err = fmt.Errorf("--tls-min-version: %w; supported versions: %s", err, strings.Join(cliflag.TLSPossibleVersions(), ", "))
	}

	_, suitesErr := cliflag.TLSCipherSuites(o.Framework.SecureServing.CipherSuites)
	if suitesErr != nil {
		suitesErr = fmt.Errorf("--tls-cipher-suites: %w", suitesErr)
	}

	return errors.Join(err, suitesErr)
}

func (o *Options) ipam() (nodeipam.Options, error) {
	shared := o.Framework.KubeCloudShared

	cluster, err := parseCIDRs("--cluster-cidr", shared.ClusterCIDR)
	service, serviceErr := parseCIDRs("--service-cluster-ip-range", o.ServiceCIDRs)

	if err := errors.Join(err, serviceErr); err != nil {
		return nodeipam.Options{}, err
	}

	result := nodeipam.Options{
		Allocator:    nodeipam.Allocator(shared.CIDRAllocatorType),
		ClusterCIDRs: cluster,
		ServiceCIDRs: service,
		MaskSizeIPv4: o.NodeCIDRMaskSizeIPv4,
		MaskSizeIPv6: o.NodeCIDRMaskSizeIPv6,
	}

	isIPv4 := func(cidr netip.Prefix) bool { return cidr.Addr().Is4() }
	anyIPv4 := slices.ContainsFunc(cluster, isIPv4)
	anyIPv6 := slices.ContainsFunc(cluster, func(cidr netip.Prefix) bool { return !isIPv4(cidr) })

	switch {
	case o.NodeCIDRMaskSize == 0:
	case max(o.NodeCIDRMaskSizeIPv4, o.NodeCIDRMaskSizeIPv6) > 0:
		return result, errors.New("--node-cidr-mask-size cannot be combined with --node-cidr-mask-size-ipv4 or --node-cidr-mask-size-ipv6")
	case anyIPv4 && anyIPv6:
		return result, errors.New("--node-cidr-mask-size requires a single-stack cluster, but --cluster-cidr is dual-stack")
	case anyIPv6 || !anyIPv4 && o.NodeCIDRMaskSize > 32: // without --cluster-cidr, the IP family is not known yet
		result.MaskSizeIPv6 = o.NodeCIDRMaskSize
	default:
		result.MaskSizeIPv4 = o.NodeCIDRMaskSize
	}

	return result, result.Validate()
}

func parseCIDRs(flag, list string) ([]netip.Prefix, error) {
	if list == "" {
		return nil, nil
	}

	prefixes, err := cidrset.ParsePrefixes(strings.Split(list, ","))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}

	return prefixes, nil
}

// hosted returns what the flags state about a hosted control plane; nil if it is not hosted.
func (o *Options) hosted() (*csrpolicy.ClusterSubjects, error) {
	const flag = "--hosted-control-plane"

	if o.HostedControlPlane == "" {
		return nil, nil
	}

	pods, podsErr := parseCIDRs("--cluster-cidr", o.Framework.KubeCloudShared.ClusterCIDR)
	services, servicesErr := parseCIDRs("--service-cluster-ip-range", o.ServiceCIDRs)

	switch {
	case podsErr != nil || servicesErr != nil:
		return nil, nil // reported with the other flags
	case o.MachineSocket != "":
		return nil, errors.New(flag + " cannot be combined with --machine-socket, which belongs to a control-plane machine")
	case len(pods) == 0 || len(services) == 0:
		return nil, errors.New(flag + " requires --cluster-cidr and --service-cluster-ip-range")
	}

	subjects := &csrpolicy.ClusterSubjects{PodCIDRs: pods, ServiceCIDRs: services}

	for entry := range strings.SplitSeq(o.HostedControlPlane, ",") {
		entry = strings.TrimSpace(entry)

		addr, err := netip.ParseAddr(entry)
		if err == nil {
			subjects.APIServerIPs = append(subjects.APIServerIPs, addr.Unmap())
			err = csrpolicy.CheckAllowedAddress(addr)
		} else {
			subjects.APIServerNames = append(subjects.APIServerNames, entry)
			err = csrpolicy.CheckAllowedName(entry)
		}

		if err != nil {
			return nil, fmt.Errorf("%s: %q %w; write host names and addresses without scheme and port", flag, entry, err)
		}
	}

	return subjects, nil
}

// notListening has the address of the extension's secure port. Manager.serveLater replaces it.
type notListening struct{ addr *net.TCPAddr }

func (l notListening) Addr() net.Addr          { return l.addr }
func (notListening) Accept() (net.Conn, error) { return nil, net.ErrClosed }
func (notListening) Close() error              { return nil }

// frameworkFor returns a copy of the framework's options for one connection with kubeconfig. Their Config method
// modifies them; among others it sets the listener, which is closed with the connection. The extension opens the secure
// port later.
func (o *Options) frameworkFor(kubeconfig string) *options.CloudControllerManagerOptions {
	framework := *o.Framework

	generic := *framework.Generic
	generic.GenericControllerManagerConfiguration = generic.DeepCopy()
	generic.ClientConnection.Kubeconfig = kubeconfig
	framework.Generic = &generic

	serving := *framework.SecureServing.SecureServingOptions
	framework.SecureServing = serving.WithLoopback()

	if o.MachineSocket != "" && serving.BindPort != 0 {
		serving.Listener = notListening{&net.TCPAddr{IP: serving.BindAddress, Port: serving.BindPort}}
	}

	authentication, authorization := *framework.Authentication, *framework.Authorization
	authentication.RemoteKubeConfigFile = cmp.Or(authentication.RemoteKubeConfigFile, kubeconfig)
	authorization.RemoteKubeConfigFile = cmp.Or(authorization.RemoteKubeConfigFile, kubeconfig)
	framework.Authentication, framework.Authorization = &authentication, &authorization

	return &framework
}

// Enabled reports whether --controllers enables the controller with the given name.
func (o *Options) Enabled(name string) bool {
	return slices.ContainsFunc(controllers, func(c controllerType) bool { return c.name == name && c.enabled(o.Framework.Generic.Controllers) })
}

// loopbackPorts are the ports of Talos and Kubernetes on the loopback address, besides those on a machine's addresses.
var loopbackPorts = map[int]string{7445: "KubePrism", 10248: "kubelet", 10249: "kube-proxy"}

// Warnings returns the options that are valid, but probably mistakes, one line each.
func (o *Options) Warnings() (warnings []string) {
	port := o.Framework.SecureServing.BindPort
	user := cmp.Or(service.UserOfPort(port), loopbackPorts[port])

	if user != "" && port != securePort {
		warnings = append(warnings, fmt.Sprintf("--secure-port: %d is the port of %s; use another one, such as %d", port, user, securePort))
	}

	if !o.Framework.Generic.LeaderElection.LeaderElect {
		warnings = append(warnings, "--leader-elect: false makes all instances write to Nodes at the same time; use it with a single instance only")
	}

	if !slices.ContainsFunc(controllers, func(c controllerType) bool { return c.enabledByDefault && o.Enabled(c.name) }) {
		warnings = append(warnings, "no default controller runs; add * for the default ones")
	}

	return warnings
}

// Unused returns the keys of a configuration that have no effect, because their controllers are disabled, with the
// reason.
func (o *Options) Unused() map[string]string {
	unused := map[string]string{}

	for _, c := range controllers {
		if !o.Enabled(c.name) {
			unused[c.section] = fmt.Sprintf("has no effect, because %s is off; add it to TALOS_CCM_CONTROLLERS", c.name)
		}
	}

	return unused
}

// enabled reports whether the entries of --controllers enable the controller. The first entry for it decides.
func (c controllerType) enabled(entries []string) bool {
	for _, entry := range entries {
		if entryName := strings.TrimPrefix(entry, "-"); entryName == c.name || entryName == c.alias {
			return entryName == entry
		}
	}

	return c.enabledByDefault && slices.Contains(entries, "*")
}

// needsRBAC reports whether the RBAC objects with the given value of extension.ControllerLabel are needed.
func (o *Options) needsRBAC(value string) bool {
	if value == extension.SecurePort {
		return o.Framework.SecureServing.BindPort != 0
	}

	return o.Enabled(value)
}

// entryNames returns the names in --controllers. The framework gets them as the names that it knows, because its error
// does not name the flag; see checkControllers.
func (o *Options) entryNames() (list []string) {
	for _, entry := range o.Framework.Generic.Controllers {
		list = append(list, strings.TrimPrefix(entry, "-"))
	}

	return list
}

// checkControllers returns an error for each name in --controllers that does not exist, and if --concurrent-node-syncs is
// not positive. Without such errors, it returns an error if no controller is enabled, or if only one of two flags enables
// the allocation of pod CIDRs.
func (o *Options) checkControllers() error {
	var (
		supported []string
		errs      []error
	)

	for _, c := range controllers {
		supported = append(supported, c.name, c.alias)
	}

	if workers := o.Framework.NodeController.ConcurrentNodeSyncs; workers <= 0 {
		errs = append(errs, fmt.Errorf("--concurrent-node-syncs: must be positive, not %d", workers))
	}

	// Users disable the route controller in every cloud controller manager.
	valid := []string{"*", "-route", "-" + names.NodeRouteController}

	for _, entry := range o.Framework.Generic.Controllers {
		name := strings.TrimPrefix(entry, "-")
		if !slices.Contains(valid, entry) && !slices.Contains(supported, name) {
			errs = append(errs, fmt.Errorf("--controllers: unknown controller %q; supported controllers: %s", name, strings.Join(supported, ", ")))
		}
	}

	switch allocates := o.Framework.KubeCloudShared.AllocateNodeCIDRs; {
	case len(errs) > 0:
	case !slices.ContainsFunc(controllers, func(c controllerType) bool { return o.Enabled(c.name) }):
		errs = append(errs, errors.New("--controllers: enables no controller"))
	case allocates && !o.Enabled(nodeipam.Name):
		errs = append(errs, fmt.Errorf("--allocate-node-cidrs: requires %s in --controllers", nodeipam.Name))
	case !allocates && o.Enabled(nodeipam.Name):
		errs = append(errs, fmt.Errorf("--controllers: %s requires --allocate-node-cidrs", nodeipam.Name))
	}

	return errors.Join(errs...)
}
