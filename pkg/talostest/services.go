package talostest

import (
	"context"
	"runtime"
	"strings"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/safe"
	clusterapi "github.com/siderolabs/talos/pkg/machinery/api/cluster"
	inspectapi "github.com/siderolabs/talos/pkg/machinery/api/inspect"
	machineapi "github.com/siderolabs/talos/pkg/machinery/api/machine"
	storageapi "github.com/siderolabs/talos/pkg/machinery/api/storage"
	timeapi "github.com/siderolabs/talos/pkg/machinery/api/time"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// registerServices registers all services of machined. Methods that are not implemented return Unimplemented to authorized callers.
func registerServices(registrar grpc.ServiceRegistrar) {
	v1alpha1.RegisterStateServer(registrar, resourceService{})
	machineapi.RegisterMachineServiceServer(registrar, machineService{})
	machineapi.RegisterImageServiceServer(registrar, machineapi.UnimplementedImageServiceServer{})
	machineapi.RegisterDebugServiceServer(registrar, machineapi.UnimplementedDebugServiceServer{})
	machineapi.RegisterLifecycleServiceServer(registrar, machineapi.UnimplementedLifecycleServiceServer{})
	clusterapi.RegisterClusterServiceServer(registrar, clusterapi.UnimplementedClusterServiceServer{})
	inspectapi.RegisterInspectServiceServer(registrar, inspectapi.UnimplementedInspectServiceServer{})
	storageapi.RegisterStorageServiceServer(registrar, storageapi.UnimplementedStorageServiceServer{})
	timeapi.RegisterTimeServiceServer(registrar, timeapi.UnimplementedTimeServiceServer{})
}

// resourceService passes each call to the resource state of the called machine.
type resourceService struct {
	v1alpha1.UnimplementedStateServer
}

func (resourceService) Get(ctx context.Context, request *v1alpha1.GetRequest) (*v1alpha1.GetResponse, error) {
	return callFrom(ctx).boot.served.Get(ctx, request)
}

func (resourceService) List(request *v1alpha1.ListRequest, stream grpc.ServerStreamingServer[v1alpha1.ListResponse]) error {
	return callFrom(stream.Context()).boot.served.List(request, stream)
}

func (resourceService) Create(ctx context.Context, request *v1alpha1.CreateRequest) (*v1alpha1.CreateResponse, error) {
	return callFrom(ctx).boot.served.Create(ctx, request)
}

func (resourceService) Update(ctx context.Context, request *v1alpha1.UpdateRequest) (*v1alpha1.UpdateResponse, error) {
	return callFrom(ctx).boot.served.Update(ctx, request)
}

func (resourceService) Destroy(ctx context.Context, request *v1alpha1.DestroyRequest) (*v1alpha1.DestroyResponse, error) {
	return callFrom(ctx).boot.served.Destroy(ctx, request)
}

func (resourceService) Watch(request *v1alpha1.WatchRequest, stream grpc.ServerStreamingServer[v1alpha1.WatchResponse]) error {
	memory := callFrom(stream.Context()).boot

	if bookmark := request.GetOptions().GetStartFromBookmark(); bookmark != nil {
		request.Options.StartFromBookmark = memory.bookmark.apply(bookmark)
	}

	return memory.served.Watch(request, &markedStream{ServerStreamingServer: stream, mask: memory.bookmark})
}

// markedStream masks the bookmarks of a watch.
type markedStream struct {
	grpc.ServerStreamingServer[v1alpha1.WatchResponse]

	mask bookmarkMask
}

func (s *markedStream) Send(response *v1alpha1.WatchResponse) error {
	for _, event := range response.GetEvent() {
		event.Bookmark = s.mask.apply(event.GetBookmark())
	}

	return s.ServerStreamingServer.Send(response) //nolint:wrapcheck // status errors must survive
}

// machineService implements the methods that a cloud controller manager uses.
type machineService struct {
	machineapi.UnimplementedMachineServiceServer
}

// Version implements the machine API.
func (machineService) Version(ctx context.Context, _ *emptypb.Empty) (*machineapi.VersionResponse, error) {
	machine := callFrom(ctx).machine

	version, err := machine.version(ctx)
	if err != nil {
		return nil, err
	}

	platform, err := machine.platform(ctx)
	if err != nil {
		return nil, err
	}

	return &machineapi.VersionResponse{Messages: []*machineapi.Version{{
		Version: &machineapi.VersionInfo{
			Tag: version, GoVersion: runtime.Version(), Os: runtime.GOOS, Arch: runtime.GOARCH,
		},
		Platform: &machineapi.PlatformInfo{Name: platform, Mode: platformMode(platform)},
		Features: &machineapi.FeaturesInfo{Rbac: true},
	}}}, nil
}

// platformMode returns Talos's mode of a platform.
func platformMode(platform string) string {
	switch platform {
	case "metal", "container":
		return platform
	default:
		return "cloud"
	}
}

// Hostname implements the machine API.
func (machineService) Hostname(ctx context.Context, _ *emptypb.Empty) (*machineapi.HostnameResponse, error) {
	hostname, err := safe.StateGetByID[*network.HostnameStatus](ctx, callFrom(ctx).boot.state, network.HostnameID)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "get hostname: %v", err)
	}

	return &machineapi.HostnameResponse{Messages: []*machineapi.Hostname{{Hostname: hostname.TypedSpec().Hostname}}}, nil
}

// GenerateClientConfiguration implements the machine API: a control-plane machine issues a client certificate with the requested roles.
func (machineService) GenerateClientConfiguration(
	ctx context.Context, request *machineapi.GenerateClientConfigurationRequest,
) (*machineapi.GenerateClientConfigurationResponse, error) {
	call := callFrom(ctx)

	if call.isWorker() {
		return nil, status.Error(codes.Unimplemented, "generate client configuration is only available on control plane nodes")
	}

	ttl := request.GetCrtTtl().AsDuration()
	if ttl <= 0 {
		return nil, status.Error(codes.InvalidArgument, "crt_ttl should be positive")
	}

	roles, _ := role.Parse(request.GetRoles())
	issuer := call.machine.cluster

	crt, err := issuer.authority.clientCertificate(roles, ttl)
	if err != nil {
		return nil, err
	}

	// The reply contains only the issuing CA, even while older CAs are accepted.
	issuing, _ := issuer.authority.current()

	talosconfig, err := clientconfig.NewConfig(contextName(issuer.name, roles), nil, issuing.Crt, crt).Bytes()
	if err != nil {
		return nil, status.Errorf(codes.Internal, "marshal talosconfig: %v", err)
	}

	return &machineapi.GenerateClientConfigurationResponse{Messages: []*machineapi.GenerateClientConfiguration{{
		Ca: issuing.Crt, Crt: crt.Crt, Key: crt.Key, Talosconfig: talosconfig,
	}}}, nil
}

// EtcdMemberList implements the machine API: see [Cluster.SetEtcdMembers].
func (machineService) EtcdMemberList(ctx context.Context, _ *machineapi.EtcdMemberListRequest) (*machineapi.EtcdMemberListResponse, error) {
	call := callFrom(ctx)

	if call.isWorker() {
		return nil, status.Error(codes.Unimplemented, "member list is only available on control plane nodes")
	}

	members := call.machine.cluster.listEtcdMembers()
	if len(members) == 0 {
		return nil, status.Error(codes.Unavailable, "etcdserver: no leader")
	}

	return &machineapi.EtcdMemberListResponse{Messages: []*machineapi.EtcdMembers{{Members: members}}}, nil
}

// contextName returns Talos's name of a context, such as reader@cluster.
func contextName(clusterName string, roles role.Set) string {
	if names := roles.Strings(); len(names) == 1 {
		return strings.TrimPrefix(names[0], role.Prefix) + "@" + clusterName
	}

	return clusterName
}
