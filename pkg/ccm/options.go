package ccm

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/cloud-provider/app"
	"k8s.io/cloud-provider/names"
	"k8s.io/cloud-provider/options"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/utils/clock"

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

// ProviderIDFallback says what identifies a machine whose platform does not.
type ProviderIDFallback string

const (
	// FallbackUUID is `talos://<platform>/<SMBIOS UUID>` where that is valid and unique, else the node IP.
	FallbackUUID ProviderIDFallback = "uuid"
	// FallbackNodeIP is `talos://<platform>/<node IP>`, as the upstream Talos CCM does.
	FallbackNodeIP ProviderIDFallback = "node-ip"
)

// Options is the whole configuration of a run. Use NewOptions.
type Options struct {
	// Framework are the options of every cloud controller manager.
	Framework *options.CloudControllerManagerOptions
	// MachineSocket is the path of machine.sock; empty outside Talos.
	MachineSocket string
	// Talosconfig is the path of a talosconfig with the role os:reader, for use outside Talos.
	Talosconfig string
	// RunDir is the folder for short-lived Kubernetes credentials; needed if there is no kubeconfig.
	RunDir string
	// DropPrivileges is for the extension: become an ordinary user before anything else.
	DropPrivileges bool
	// ProviderIDFallback applies to platforms without an instance identity.
	ProviderIDFallback ProviderIDFallback
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
	framework.Authentication.TolerateInClusterLookupFailure = true
	// There are no webhooks to serve.
	framework.Webhook, framework.WebhookServing = nil, nil

	return &Options{Framework: framework, ProviderIDFallback: FallbackUUID}, nil
}

// Flags returns all flags by section.
func (o *Options) Flags() cliflag.NamedFlagSets {
	sections := o.Framework.Flags(controllerNames(), disabledByDefault().List(), names.CCMControllerAliases(), nil, nil)

	fs := sections.FlagSet("talos")
	fs.StringVar(&o.MachineSocket, "machine-socket", o.MachineSocket, "Path of this machine's machine.sock. Only a Talos extension service can use it.")
	fs.StringVar(&o.Talosconfig, "talosconfig", o.Talosconfig, "Path of a talosconfig whose current context has the role os:reader. For use outside Talos.")
	fs.StringVar(&o.RunDir, "run-dir", o.RunDir, "Folder in memory for short-lived Kubernetes credentials. Used if there is no --kubeconfig.")
	fs.BoolVar(&o.DropPrivileges, "drop-privileges", o.DropPrivileges, "Raise the limit of open files and become uid 50 without capabilities before anything else.")
	fs.StringVar((*string)(&o.ProviderIDFallback), "provider-id-fallback", string(o.ProviderIDFallback),
		"What makes the providerID on platforms without an instance identity: 'uuid' (the SMBIOS UUID where it is unique) or 'node-ip' (as the upstream Talos CCM).")

	return sections
}

// Validate returns all that is wrong with the options that are ours; the framework checks its own.
func (o *Options) Validate() error {
	var errs []error

	if (o.MachineSocket == "") == (o.Talosconfig == "") {
		errs = append(errs, errors.New("exactly one of --machine-socket and --talosconfig is needed"))
	}

	kubeconfig := o.Framework.Generic.ClientConnection.Kubeconfig
	if o.MachineSocket == "" && kubeconfig == "" {
		errs = append(errs, errors.New("--kubeconfig is needed outside Talos"))
	}

	if kubeconfig == "" && o.RunDir == "" {
		errs = append(errs, errors.New("--run-dir is needed without --kubeconfig"))
	}

	if o.DropPrivileges && o.RunDir == "" {
		errs = append(errs, errors.New("--drop-privileges needs --run-dir, to make it the ordinary user's own"))
	}

	if !slices.Contains([]ProviderIDFallback{FallbackUUID, FallbackNodeIP}, o.ProviderIDFallback) {
		errs = append(errs, fmt.Errorf("--provider-id-fallback: %q is neither %q nor %q", o.ProviderIDFallback, FallbackUUID, FallbackNodeIP))
	}

	errs = append(errs, o.Framework.Validate(controllerNames(), disabledByDefault().List(), names.CCMControllerAliases(), nil, nil))

	return errors.Join(errs...)
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

func controllerNames() []string { return slices.Sorted(maps.Keys(app.DefaultInitFuncConstructors)) }

// disabledByDefault are the controllers that run only if --controllers names them.
func disabledByDefault() sets.String { //nolint:staticcheck // what the framework takes
	return sets.NewString(names.CloudNodeLifecycleController, names.ServiceLBController, names.NodeRouteController)
}
