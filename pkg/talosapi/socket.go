package talosapi

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"path"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/api/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Socket is the machine.sock of the local machine. Since Talos 1.13 only extension services that run as root or uid 50 can
// use it. Talos trusts the roles that a caller of the socket names: Reader uses os:reader, Admin uses os:admin.
type Socket struct {
	Reader State
	Admin  *Admin

	reader *grpc.ClientConn
}

// OpenSocket returns a Socket for the given path. The first calls connect.
func OpenSocket(path string) (*Socket, error) {
	reader, err := dialSocket(path, role.Reader)
	if err != nil {
		return nil, err
	}

	admin, err := dialSocket(path, role.Admin)
	if err != nil {
		return nil, err
	}

	return &Socket{Reader: newState(reader), Admin: &Admin{conn: admin, state: newState(admin)}, reader: reader}, nil
}

// EtcdMembers returns the addresses at which the members of etcd reach each other, as the machine's own member knows
// them. URLs without an IP address are omitted. It fails on workers and while that member has no leader.
func (s *Socket) EtcdMembers(ctx context.Context) ([]netip.Addr, error) {
	reply, err := machine.NewMachineServiceClient(s.reader).EtcdMemberList(ctx, &machine.EtcdMemberListRequest{QueryLocal: true})
	if err != nil {
		return nil, fmt.Errorf("list etcd members: %w", err)
	}

	var addrs []netip.Addr

	for _, message := range reply.GetMessages() {
		for _, member := range message.GetMembers() {
			for _, peer := range member.GetPeerUrls() {
				parsed, err := url.Parse(peer)
				if err != nil {
					continue
				}

				if addr, err := netip.ParseAddr(parsed.Hostname()); err == nil { // not a host name
					addrs = append(addrs, addr.Unmap())
				}
			}
		}
	}

	return addrs, nil
}

// DialSocket returns the local machine's state for os:reader over a new connection.
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
	conn, err := grpc.NewClient("unix://"+path, append(dialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithPerRPCCredentials(roleCredentials(as)),
	)...)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}

	return conn, nil
}

// roleCredentials add a role to the metadata of each call.
type roleCredentials role.Role

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (c roleCredentials) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{constants.APIAuthzRoleMetadataKey: string(c)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (roleCredentials) RequireTransportSecurity() bool { return false }

// kubeletCertificate is the file with the kubelet's client certificate and its key. maxFile limits what is read of it: real
// ones have less than 4 KiB.
var kubeletCertificate = path.Join(constants.KubeletPKIDir, "kubelet-client-current.pem")

const maxFile = 64 << 10

// Admin holds all calls that use os:admin.
type Admin struct {
	conn  *grpc.ClientConn
	state State
}

// ReaderCertificate is a client certificate for os:reader and the CA of the machines' server certificates, PEM-encoded.
type ReaderCertificate struct {
	CA, Certificate, Key []byte
}

// IssueReader issues a client certificate for os:reader that is valid for ttl by the machine's clock. Only control-plane
// machines can issue certificates.
func (a *Admin) IssueReader(ctx context.Context, ttl time.Duration) (ReaderCertificate, error) {
	reply, err := machine.NewMachineServiceClient(a.conn).GenerateClientConfiguration(ctx, &machine.GenerateClientConfigurationRequest{
		Roles:  []string{string(role.Reader)},
		CrtTtl: durationpb.New(ttl),
	})
	if err != nil {
		return ReaderCertificate{}, fmt.Errorf("issue os:reader certificate: %w", err)
	}

	if len(reply.GetMessages()) != 1 {
		return ReaderCertificate{}, fmt.Errorf("issue os:reader certificate: got %d replies, want 1", len(reply.GetMessages()))
	}

	m := reply.GetMessages()[0]

	return ReaderCertificate{CA: m.GetCa(), Certificate: m.GetCrt(), Key: m.GetKey()}, nil
}

// LocalhostAdminKubeconfig returns the kubeconfig of a system:masters user for the local API server. Callers must keep it in
// memory only. On a machine that is not, or not yet, a control-plane machine the error satisfies state.IsNotFoundError.
func (a *Admin) LocalhostAdminKubeconfig(ctx context.Context) ([]byte, error) {
	certs, err := safe.StateGetByID[*secrets.Kubernetes](ctx, a.state, secrets.KubernetesID)
	if err != nil {
		return nil, fmt.Errorf("get localhost admin kubeconfig: %w", err)
	}

	return []byte(certs.TypedSpec().LocalhostAdminKubeconfig), nil
}

// WatchLocalhostAdminKubeconfig sends an event to ch for the current kubeconfig and for each renewal. An event of type Errored is
// the last.
func (a *Admin) WatchLocalhostAdminKubeconfig(ctx context.Context, ch chan<- state.Event) error {
	return a.watch(ctx, secrets.NewKubernetes(), ch)
}

// WatchServiceConfig sends an event to ch for the current ExtensionServiceConfig of the extension service name and for each
// change. The first event has type Destroyed if there is no configuration. An event of type Errored is the last.
func (a *Admin) WatchServiceConfig(ctx context.Context, name string, ch chan<- state.Event) error {
	return a.watch(ctx, runtime.NewExtensionServiceConfigSpec(runtime.NamespaceName, name), ch)
}

func (a *Admin) watch(ctx context.Context, r resource.Resource, ch chan<- state.Event) error {
	if err := a.state.Watch(ctx, r.Metadata(), ch); err != nil {
		return fmt.Errorf("watch %s %s: %w", r.Metadata().Type(), r.Metadata().ID(), err)
	}

	return nil
}

// KubeletCertificate returns the client certificate of the machine's kubelet. The file also has the private key, so the
// copies in this package are cleared. Before the kubelet has a certificate, the code of the error is NotFound.
func (a *Admin) KubeletCertificate(ctx context.Context) (*x509.Certificate, error) {
	ctx, cancel := context.WithCancel(ctx) // ends the stream
	defer cancel()

	stream, err := machine.NewMachineServiceClient(a.conn).Read(ctx, &machine.ReadRequest{Path: kubeletCertificate})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", kubeletCertificate, err)
	}

	content := make([]byte, 0, maxFile)
	defer clear(content[:maxFile])

	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return parseCertificate(content)
		} else if err != nil {
			return nil, fmt.Errorf("read %s: %w", kubeletCertificate, err)
		}

		isTooLong := len(content)+len(chunk.GetBytes()) > maxFile
		if !isTooLong {
			content = append(content, chunk.GetBytes()...)
		}

		clear(chunk.GetBytes())

		if isTooLong {
			return nil, fmt.Errorf("read %s: file has more than %d bytes", kubeletCertificate, maxFile)
		}
	}
}

// parseCertificate returns the first certificate in PEM encoding that is not a CA's. It clears all other blocks.
func parseCertificate(content []byte) (*x509.Certificate, error) {
	for block, rest := pem.Decode(content); block != nil; block, rest = pem.Decode(rest) {
		certificate, err := x509.ParseCertificate(block.Bytes)
		if block.Type == "CERTIFICATE" && err == nil && !certificate.IsCA {
			return certificate, nil
		}

		clear(block.Bytes)
	}

	return nil, fmt.Errorf("parse %s: no client certificate", kubeletCertificate)
}
