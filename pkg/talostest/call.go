package talostest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// errStreamsBroken is the cause of streams ended by [Machine.BreakStreams].
var errStreamsBroken = errors.New("streams broken by the test")

// inbound is an RPC received by a machine.
type inbound struct {
	machine *Machine
	boot    *boot
	roles   role.Set
	record  *Call // in the machine's journal
}

type inboundKey struct{}

// callFrom returns the RPC that a handler serves. The interceptors below set it for all handlers.
func callFrom(ctx context.Context) *inbound {
	call, _ := ctx.Value(inboundKey{}).(*inbound)

	return call
}

func newInbound(ctx context.Context, method string) *inbound {
	caller, _ := peer.FromContext(ctx)
	info, _ := caller.AuthInfo.(connInfo) // set by handshake

	roles := rolesOf(ctx, info)

	info.machine.cluster.calls.Add(1)

	return &inbound{
		machine: info.machine,
		boot:    info.machine.currentBoot(),
		roles:   roles,
		record:  info.machine.journal.begin(Call{Transport: info.transport, Method: method, Roles: roles.Strings(), Open: true}),
	}
}

// rolesOf returns the roles from the metadata of a call to the socket, or from the client certificate of a call to apid.
func rolesOf(ctx context.Context, info connInfo) role.Set {
	if info.transport == TransportAPID {
		return info.certificateRoles
	}

	roles, _ := role.Parse(metadata.ValueFromIncomingContext(ctx, constants.APIAuthzRoleMetadataKey))

	return roles
}

// admit delays the call according to the machine's faults, routes it and authorizes it.
func (c *inbound) admit(ctx context.Context) error {
	if !c.machine.frozen.wait(ctx.Done()) || !pause(ctx.Done(), time.Duration(c.machine.delay.Load())) {
		return status.FromContextError(ctx.Err()).Err()
	}

	if c.record.Transport == TransportAPID {
		if err := c.route(ctx); err != nil {
			return err
		}
	}

	return authorizeMethod(c.record.Method, c.roles)
}

// end records the result of the call.
func (c *inbound) end(err error) {
	c.machine.journal.amend(c.record, func(call *Call) { call.Code, call.Open = status.Code(err), false })
}

func (c *inbound) asksFor(request any) {
	typed, ok := request.(interface{ GetType() string })
	if !ok || !strings.HasPrefix(c.record.Method, "/cosi.resource.State/") {
		return
	}

	c.machine.journal.amend(c.record, func(call *Call) { call.ResourceType = typed.GetType() })
}

// route evaluates the metadata key node as apid's router does: workers forward no calls. Several nodes are not supported.
func (c *inbound) route(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	node := md.Get("node")

	switch {
	case len(md.Get("nodes")) > 0 || len(node) > 1:
		return status.Error(codes.InvalidArgument, "talostest does not forward requests to several nodes")
	case len(node) == 0 || c.machine.isLocalTarget(node[0]):
		return nil
	case c.isWorker():
		return status.Error(codes.PermissionDenied, "no request forwarding")
	default:
		return c.forward(ctx, node[0])
	}
}

// forward moves the call to another machine of the cluster, and to that machine's journal. Unlike on Talos there is no connection between the
// two machines: of the target's network faults only [Machine.Stop] has an effect.
func (c *inbound) forward(ctx context.Context, target string) error {
	machines := c.machine.cluster.Machines()

	i := slices.IndexFunc(machines, func(m *Machine) bool { return m.isLocalTarget(target) })
	if i < 0 || machines[i].api.isDown() {
		return status.Errorf(codes.Unavailable, "dial %s: no machine responds", target)
	}

	var forwarded Call

	c.machine.journal.amend(c.record, func(call *Call) { forwarded, call.Open = *call, false })

	c.machine = machines[i]
	c.boot = c.machine.currentBoot()
	c.record = c.machine.journal.begin(forwarded)

	if !c.machine.frozen.wait(ctx.Done()) {
		return status.FromContextError(ctx.Err()).Err()
	}

	return nil
}

func (c *inbound) isWorker() bool { return !c.machine.spec.Type.IsControlPlane() }

// isLocalTarget reports whether a node in metadata is this machine.
func (m *Machine) isLocalTarget(target string) bool {
	names, err := m.dnsNames()

	return err == nil && (slices.Contains(names, target) || target == m.spec.Address.String())
}

func interceptUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	call := newInbound(ctx, info.FullMethod)
	call.asksFor(request)

	if err := call.admit(ctx); err != nil {
		call.end(err)

		return nil, err
	}

	reply, err := handler(context.WithValue(ctx, inboundKey{}, call), request)

	// The machine may freeze while the handler runs.
	if !call.machine.frozen.wait(ctx.Done()) {
		err = status.FromContextError(ctx.Err()).Err()
	}

	call.end(err)

	return reply, err
}

func interceptStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	call := newInbound(stream.Context(), info.FullMethod)

	if err := call.admit(stream.Context()); err != nil {
		call.end(err)

		return err
	}

	ctx, cancel := context.WithCancelCause(context.WithValue(stream.Context(), inboundKey{}, call))
	defer cancel(nil)

	call.machine.openStreams.Add(1)
	defer call.machine.openStreams.Add(-1)

	stop := context.AfterFunc(call.machine.streamsContext(), func() { cancel(errStreamsBroken) })
	defer stop()

	err := handler(srv, &servedStream{ServerStream: stream, ctx: ctx, call: call})

	if errors.Is(context.Cause(ctx), errStreamsBroken) {
		err = status.Error(codes.Unavailable, errStreamsBroken.Error())
	}

	call.end(err)

	return err
}

// servedStream passes the call to the handler and applies the machine's faults.
type servedStream struct {
	grpc.ServerStream

	ctx  context.Context //nolint:containedctx // grpc.ServerStream has its context as a method
	call *inbound
}

// Context implements grpc.ServerStream.
func (s *servedStream) Context() context.Context { return s.ctx }

// RecvMsg implements grpc.ServerStream.
func (s *servedStream) RecvMsg(message any) error {
	if err := s.ServerStream.RecvMsg(message); err != nil {
		return err //nolint:wrapcheck // io.EOF and status errors must survive
	}

	s.call.asksFor(message)

	return nil
}

// SendMsg implements grpc.ServerStream.
func (s *servedStream) SendMsg(message any) error {
	if !s.call.machine.frozen.wait(s.ctx.Done()) {
		return status.FromContextError(s.ctx.Err()).Err()
	}

	return s.ServerStream.SendMsg(message) //nolint:wrapcheck // status errors must survive
}
