package talostest

import (
	"context"
	"slices"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/siderolabs/talos/pkg/machinery/api/common"
	machineapi "github.com/siderolabs/talos/pkg/machinery/api/machine"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// resourceService passes reads to the resource state of the called machine. It does not implement writes.
type resourceService struct {
	v1alpha1.UnimplementedStateServer
}

func (resourceService) Get(ctx context.Context, request *v1alpha1.GetRequest) (*v1alpha1.GetResponse, error) {
	return callFrom(ctx).boot.served.Get(ctx, request)
}

func (resourceService) List(request *v1alpha1.ListRequest, stream grpc.ServerStreamingServer[v1alpha1.ListResponse]) error {
	call := callFrom(stream.Context())

	return call.machine.answer(request, stream, func() error { return call.boot.served.List(request, stream) })
}

func (resourceService) Watch(request *v1alpha1.WatchRequest, stream grpc.ServerStreamingServer[v1alpha1.WatchResponse]) error {
	call := callFrom(stream.Context())
	memory := call.boot

	if bookmark := request.GetOptions().GetStartFromBookmark(); bookmark != nil {
		request.Options.StartFromBookmark = memory.bookmark.apply(bookmark)
	}

	return call.machine.answer(request, stream, func() error {
		return memory.served.Watch(request, &markedStream{ServerStreamingServer: stream, mask: memory.bookmark})
	})
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

// machineService implements the methods that a cloud controller manager uses. Others return Unimplemented to authorized callers.
type machineService struct {
	machineapi.UnimplementedMachineServiceServer
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
	ca := issuer.authority.current().CrtPEM

	talosconfig, err := clientconfig.NewConfig(issuer.options.Name, nil, ca, crt).Bytes()
	if err != nil {
		return nil, status.Errorf(codes.Internal, "marshal talosconfig: %v", err)
	}

	return &machineapi.GenerateClientConfigurationResponse{Messages: []*machineapi.GenerateClientConfiguration{{
		Ca: ca, Crt: crt.Crt, Key: crt.Key, Talosconfig: talosconfig,
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

// chunkSize is that of machined.
const chunkSize = 1024

// Read implements the machine API for the file of [Machine.SetKubeletCertificate].
func (machineService) Read(request *machineapi.ReadRequest, stream grpc.ServerStreamingServer[common.Data]) error {
	content := *callFrom(stream.Context()).machine.kubeletFile.Load()
	if request.GetPath() != constants.KubeletPKIDir+"/kubelet-client-current.pem" || len(content) == 0 {
		return status.Errorf(codes.NotFound, "stat %s: no such file or directory", request.GetPath())
	}

	for chunk := range slices.Chunk(content, chunkSize) {
		if err := stream.Send(&common.Data{Bytes: chunk}); err != nil {
			return err //nolint:wrapcheck // status errors must survive
		}
	}

	return nil
}
