package talosapi

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/api/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Socket is this machine's own machine.sock. On Talos 1.13 and later only an extension service may use it, and only as root
// or uid 50. Talos there lets the caller name its roles: Reader names os:reader, Admin os:admin.
type Socket struct {
	Reader State
	Admin  *Admin
}

// OpenSocket prepares the connections to the socket at path; the first call connects.
func OpenSocket(path string) (*Socket, error) {
	reader, err := DialSocket(path)
	if err != nil {
		return nil, err
	}

	admin, err := dialSocket(path, role.Admin)
	if err != nil {
		return nil, err
	}

	return &Socket{Reader: reader, Admin: &Admin{conn: admin, state: newState(admin)}}, nil
}

// DialSocket returns this machine's state as os:reader sees it, over a connection of its own.
func DialSocket(path string) (State, error) {
	conn, err := dialSocket(path, role.Reader)
	if err != nil {
		return nil, err
	}

	return newState(conn), nil
}

// Close closes both connections.
func (s *Socket) Close() error {
	return errors.Join(s.Reader.Close(), s.Admin.state.Close())
}

func dialSocket(path string, as role.Role) (*grpc.ClientConn, error) {
	withRole := func(ctx context.Context) context.Context {
		return metadata.AppendToOutgoingContext(ctx, constants.APIAuthzRoleMetadataKey, string(as))
	}

	conn, err := grpc.NewClient("unix://"+path, append(dialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return invoke(withRole(ctx), method, req, reply, cc, opts...)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			return open(withRole(ctx), desc, cc, method, opts...)
		}),
	)...)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}

	return conn, nil
}

// Admin is the whole of what this program does as os:admin.
type Admin struct {
	conn  *grpc.ClientConn
	state State
}

// ReaderCertificate is a client certificate for os:reader, with the CA of the machines' server certificates; all PEM.
type ReaderCertificate struct {
	CA, Certificate, Key []byte
}

// IssueReader has Talos issue a client certificate for os:reader, valid for ttl from now by this machine's clock. It works on
// control-plane machines alone.
func (a *Admin) IssueReader(ctx context.Context, ttl time.Duration) (ReaderCertificate, error) {
	reply, err := machine.NewMachineServiceClient(a.conn).GenerateClientConfiguration(ctx, &machine.GenerateClientConfigurationRequest{
		Roles:  []string{string(role.Reader)},
		CrtTtl: durationpb.New(ttl),
	})
	if err != nil {
		return ReaderCertificate{}, fmt.Errorf("mint an os:reader certificate: %w", err)
	}

	if len(reply.GetMessages()) != 1 {
		return ReaderCertificate{}, fmt.Errorf("mint an os:reader certificate: %d answers instead of one", len(reply.GetMessages()))
	}

	m := reply.GetMessages()[0]

	return ReaderCertificate{CA: m.GetCa(), Certificate: m.GetCrt(), Key: m.GetKey()}, nil
}

// LocalhostAdminKubeconfig reads the kubeconfig for system:masters at this machine's API server. It must stay in memory. A machine
// that is no control plane, or not yet, gives a not-found error of package state.
func (a *Admin) LocalhostAdminKubeconfig(ctx context.Context) ([]byte, error) {
	certs, err := safe.StateGetByID[*secrets.Kubernetes](ctx, a.state, secrets.KubernetesID)
	if err != nil {
		return nil, fmt.Errorf("read the localhost admin kubeconfig: %w", err)
	}

	return []byte(certs.TypedSpec().LocalhostAdminKubeconfig), nil
}

// WatchLocalhostAdminKubeconfig sends an event on ch whenever the kubeconfig is issued anew, starting with the present one. An event of
// type Errored is the last.
func (a *Admin) WatchLocalhostAdminKubeconfig(ctx context.Context, ch chan<- state.Event) error {
	md := secrets.NewKubernetes().Metadata()

	if err := a.state.Watch(ctx, md, ch); err != nil {
		return fmt.Errorf("watch the localhost admin kubeconfig: %w", err)
	}

	return nil
}

// WatchServiceConfig sends an event on ch whenever the ExtensionServiceConfig document of the extension service called name changes, starting
// with the present one: Created if there is one, Destroyed if there is none. An event of type Errored is the last.
func (a *Admin) WatchServiceConfig(ctx context.Context, name string, ch chan<- state.Event) error {
	md := runtime.NewExtensionServiceConfigSpec(runtime.NamespaceName, name).Metadata()

	if err := a.state.Watch(ctx, md, ch); err != nil {
		return fmt.Errorf("watch the ExtensionServiceConfig of %s: %w", name, err)
	}

	return nil
}
