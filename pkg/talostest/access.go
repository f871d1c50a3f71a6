package talostest

import (
	"context"
	"slices"
	"sync"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/resource/meta"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/cosi-project/runtime/pkg/state/impl/inmem"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// errNotAuthorized is machined's error for callers without a sufficient role.
var errNotAuthorized = status.Error(codes.PermissionDenied, "not authorized")

var (
	readerRoles = role.MakeSet(role.Admin, role.Operator, role.Reader)

	// methodRoles are the roles that may call a method, as in machined of Talos v1.14.1. Other methods require os:admin.
	methodRoles = map[string]role.Set{
		"/cosi.resource.State/Get":               readerRoles,
		"/cosi.resource.State/List":              readerRoles,
		"/cosi.resource.State/Watch":             readerRoles,
		"/machine.MachineService/EtcdMemberList": role.MakeSet(role.Admin, role.Operator, role.Reader, role.EtcdBackup),
	}
)

func authorizeMethod(method string, roles role.Set) error {
	allowed, listed := methodRoles[method]
	if !listed {
		allowed = role.MakeSet(role.Admin)
	}

	if allowed.IncludesAny(roles) {
		return nil
	}

	return errNotAuthorized
}

// definitions are the resource types that talos-ccm and its tests read. Other types fail like types that Talos does not have.
var definitions = define(
	&block.DiscoveredVolume{},
	&cluster.Identity{},
	&cluster.Info{},
	&cluster.Member{},
	&config.MachineType{},
	&hardware.MemoryModule{},
	&hardware.PCIDevice{},
	&hardware.Processor{},
	&hardware.SystemInformation{},
	&k8s.BootstrapManifestsConfig{},
	&k8s.ControllerManagerConfig{},
	&k8s.Endpoint{},
	&k8s.KubePrismConfig{},
	&k8s.NodeIP{},
	&k8s.NodeIPConfig{},
	&k8s.NodeStatus{},
	&k8s.Nodename{},
	&k8s.StaticPod{},
	&meta.ResourceDefinition{},
	&network.AddressStatus{},
	&network.HostnameStatus{},
	&network.LinkStatus{},
	&network.PlatformConfig{},
	&network.RouteStatus{},
	&runtime.ExtensionServiceConfig{},
	&runtime.ExtensionStatus{},
	&runtime.KernelCmdline{},
	&runtime.MachineStatus{},
	&runtime.MetaKey{},
	&runtime.PlatformMetadata{},
	&runtime.SecurityState{},
	&runtime.Version{},
	&secrets.Kubernetes{},
)

func define(types ...meta.ResourceWithRD) map[resource.Type]meta.ResourceDefinitionSpec {
	specs := make(map[resource.Type]meta.ResourceDefinitionSpec, len(types))

	for _, typ := range types {
		spec := typ.ResourceDefinition()
		specs[spec.Type] = spec
	}

	return specs
}

// sharedDefinitions returns the namespace meta with the resource definitions. All machines share it, as most of a machine's state.
var sharedDefinitions = sync.OnceValue(func() state.CoreState {
	core := inmem.NewState(meta.NamespaceName)

	for _, spec := range definitions {
		if definition, err := meta.NewResourceDefinition(spec); err == nil { // it is valid in Talos
			_ = core.Create(context.Background(), definition)
		}
	}

	return core
})

// accessPolicy is Talos's policy for reads of resources: all unknown types and namespaces are forbidden, and sensitive types require
// os:admin. A watch is checked once, when the stream starts.
type accessPolicy struct{ unsupported []resource.Type }

func (p accessPolicy) check(ctx context.Context, access state.Access) error {
	definition, known := definitions[access.ResourceType]
	if !known || slices.Contains(p.unsupported, access.ResourceType) {
		return status.Errorf(codes.PermissionDenied, "resource type %q is not supported", access.ResourceType)
	}

	if definition.Sensitivity == meta.Sensitive && !callFrom(ctx).roles.Includes(role.Admin) {
		return errNotAuthorized
	}

	if access.ResourceNamespace != definition.DefaultNamespace {
		return status.Errorf(codes.PermissionDenied, "namespace %q is not supported", access.ResourceNamespace)
	}

	return nil
}
