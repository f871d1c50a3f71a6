package talostest_test

import (
	"context"
	"crypto/tls"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	machineapi "github.com/siderolabs/talos/pkg/machinery/api/machine"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func getPlatform(ctx context.Context, c *client.Client) error {
	_, err := safe.StateGetByID[*runtime.PlatformMetadata](ctx, c.COSI, runtime.PlatformMetadataID)

	return err
}

func getAdminKubeconfig(ctx context.Context, c *client.Client) error {
	_, err := safe.StateGetByID[*secrets.Kubernetes](ctx, c.COSI, secrets.KubernetesID)

	return err
}

func getExtensionConfig(ctx context.Context, c *client.Client) error {
	_, err := safe.StateGetByID[*runtime.ExtensionServiceConfig](ctx, c.COSI, "talos-ccm")

	return err
}

func getUnknownType(ctx context.Context, c *client.Client) error {
	_, err := c.COSI.Get(ctx, resource.NewMetadata(runtime.NamespaceName, "Unknowns.talos.dev", "one", resource.VersionUndefined))

	return err
}

func getUnknownNamespace(ctx context.Context, c *client.Client) error {
	_, err := c.COSI.Get(ctx, resource.NewMetadata("nowhere", runtime.PlatformMetadataType, "one", resource.VersionUndefined))

	return err
}

func getAbsentResource(ctx context.Context, c *client.Client) error {
	_, err := safe.StateGetByID[*runtime.PlatformMetadata](ctx, c.COSI, "no-such-id")

	return err
}

func version(ctx context.Context, c *client.Client) error {
	_, err := safe.StateGetByID[*runtime.Version](ctx, c.COSI, runtime.NewVersion().Metadata().ID())

	return err
}

func reboot(ctx context.Context, c *client.Client) error {
	return c.Reboot(ctx)
}

func issue(ctx context.Context, c *client.Client) error { return issueFor(ctx, c, time.Hour) }

func issueWithoutLifetime(ctx context.Context, c *client.Client) error { return issueFor(ctx, c, 0) }

func issueFor(ctx context.Context, c *client.Client, lifetime time.Duration) error {
	_, err := c.GenerateClientConfiguration(ctx, &machineapi.GenerateClientConfigurationRequest{Roles: []string{"os:reader"}, CrtTtl: durationpb.New(lifetime)})

	return err
}

// accessRules apply to both transports.
var accessRules = []struct {
	name string
	role string
	call func(context.Context, *client.Client) error
	want codes.Code
}{
	{"a reader reads resources that are not sensitive", "os:reader", getPlatform, codes.OK},
	{"an operator reads resources that are not sensitive", "os:operator", getPlatform, codes.OK},
	{"an admin reads resources that are not sensitive", "os:admin", getPlatform, codes.OK},
	{"a reader does not read secrets", "os:reader", getAdminKubeconfig, codes.PermissionDenied},
	{"an operator does not read secrets", "os:operator", getAdminKubeconfig, codes.PermissionDenied},
	{"an admin reads secrets", "os:admin", getAdminKubeconfig, codes.OK},
	{"a reader does not read the configuration of extension services", "os:reader", getExtensionConfig, codes.PermissionDenied},
	{"an admin reads the configuration of extension services", "os:admin", getExtensionConfig, codes.NotFound},
	{"an unrelated role reads nothing", "os:etcd:backup", getPlatform, codes.PermissionDenied},
	{"an unknown role reads nothing", "os:king", getPlatform, codes.PermissionDenied},
	{"an unknown type is forbidden", "os:admin", getUnknownType, codes.PermissionDenied},
	{"an unknown namespace is forbidden", "os:admin", getUnknownNamespace, codes.PermissionDenied},
	{"a missing resource is not found", "os:reader", getAbsentResource, codes.NotFound},
	{"a reader does not reboot", "os:reader", reboot, codes.PermissionDenied},
	{"an authorized call of an unimplemented method is unimplemented", "os:admin", reboot, codes.Unimplemented},
	{"a reader does not issue certificates", "os:reader", issue, codes.PermissionDenied},
	{"an admin issues certificates", "os:admin", issue, codes.OK},
	{"a certificate requires a lifetime", "os:admin", issueWithoutLifetime, codes.InvalidArgument},
}

func TestSocket_TrustsRolesInMetadata(t *testing.T) {
	_, cp := newControlPlane(t)
	socket := dialSocket(t, cp)

	for _, rule := range accessRules {
		t.Run(rule.name, func(t *testing.T) {
			requireCode(t, rule.want, cosiCode(rule.call(withRole(withDeadline(t), rule.role), socket)))
		})
	}

	t.Run("calls without roles are denied", func(t *testing.T) {
		requireCode(t, codes.PermissionDenied, getPlatform(withDeadline(t), socket))
	})
}

func TestAPID_UsesRolesOfCertificate(t *testing.T) {
	cluster, cp := newControlPlane(t)

	for _, rule := range accessRules {
		t.Run(rule.name, func(t *testing.T) {
			requireCode(t, rule.want, cosiCode(rule.call(withDeadline(t), dialAs(t, cluster, cp, rule.role))))
		})
	}

	t.Run("roles in metadata are ignored", func(t *testing.T) {
		requireCode(t, codes.PermissionDenied, getAdminKubeconfig(withRole(withDeadline(t), "os:admin"), dialAs(t, cluster, cp, "os:reader")))
	})
}

// cosiCode converts errors of the COSI client back to gRPC status errors.
func cosiCode(err error) error {
	if state.IsNotFoundError(err) {
		return status.Error(codes.NotFound, err.Error())
	}

	return err
}

func TestAPID_RequiresCertificateOfCluster(t *testing.T) {
	cluster, cp := newControlPlane(t)

	for name, certificates := range map[string][]tls.Certificate{
		"no certificate":                 nil,
		"certificate of another cluster": clientTLS(t, ctest.NewTalos(t, talostest.Options{}), "os:admin").Certificates,
	} {
		t.Run(name, func(t *testing.T) {
			config := clientTLS(t, cluster, "os:admin")
			config.Certificates = certificates

			requireCode(t, codes.Unavailable, version(withDeadline(t), dial(t, cp, config)))
		})
	}
}

func TestAPID_RoutesByNodeMetadata(t *testing.T) {
	cluster, cp := newControlPlane(t)
	worker := addMachine(t, cluster, talostest.MachineSpec{Nodename: "worker-1"})

	for _, rule := range []struct {
		name string
		to   *talostest.Machine
		call func(context.Context, *client.Client) error
		with func(context.Context) context.Context
		want codes.Code
	}{
		{"a worker serves its own address", worker, getPlatform, node(worker.Address().String()), codes.OK},
		{"a worker serves its own name", worker, getPlatform, node("worker-1"), codes.OK},
		{"a worker does not forward", worker, getPlatform, node(cp.Address().String()), codes.PermissionDenied},
		{"a worker does not serve COSI for several nodes", worker, getPlatform, nodes("worker-1", "cp-1"), codes.InvalidArgument},
		{"a control plane serves its own address", cp, getPlatform, node(cp.Address().String()), codes.OK},
		{"COSI does not support several nodes", cp, getPlatform, nodes(cp.Address().String()), codes.InvalidArgument},
		{"a control plane forwards to an address", cp, getPlatform, node(worker.Address().String()), codes.OK},
		{"a control plane forwards to a name", cp, getPlatform, node("worker-1"), codes.OK},
		{"a control plane does not find an unknown node", cp, getPlatform, node("worker-2"), codes.Unavailable},
	} {
		t.Run(rule.name, func(t *testing.T) {
			requireCode(t, rule.want, rule.call(rule.with(withDeadline(t)), dialAs(t, cluster, rule.to, "os:reader")))
		})
	}

	t.Run("a control plane does not forward to a stopped machine", func(t *testing.T) {
		require.NoError(t, worker.Stop(t.Context()))

		requireCode(t, codes.Unavailable, getPlatform(node("worker-1")(withDeadline(t)), dialAs(t, cluster, cp, "os:reader")))
	})

	t.Run("machine.sock has no router", func(t *testing.T) {
		ctx := node("203.0.113.1")(withRole(withDeadline(t), "os:reader"))
		requireCode(t, codes.OK, getPlatform(ctx, dialSocket(t, cp)))
	})
}

func node(target string) func(context.Context) context.Context {
	return func(ctx context.Context) context.Context { return client.WithNode(ctx, target) }
}

func nodes(targets ...string) func(context.Context) context.Context {
	return func(ctx context.Context) context.Context { return client.WithNodes(ctx, targets...) } //nolint:staticcheck // machines still support it
}
