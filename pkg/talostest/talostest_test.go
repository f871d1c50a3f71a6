package talostest_test

import (
	"context"
	"crypto/tls"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func addMachine(t testing.TB, cluster *talostest.Cluster, spec talostest.MachineSpec) *talostest.Machine {
	t.Helper()

	added, err := cluster.AddMachine(spec)
	require.NoError(t, err)

	return added
}

// newControlPlane returns a cluster with one control-plane machine that serves machine.sock.
func newControlPlane(t testing.TB) (*talostest.Cluster, *talostest.Machine) {
	t.Helper()

	cluster := ctest.NewTalos(t, talostest.Options{})

	return cluster, addMachine(t, cluster, talostest.MachineSpec{
		Nodename:                 "cp-1",
		Type:                     machine.TypeControlPlane,
		ServeSocket:              true,
		LocalhostAdminKubeconfig: "apiVersion: v1",
	})
}

func withDeadline(t testing.TB) context.Context {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), ctest.Timeout)
	t.Cleanup(cancel)

	return ctx
}

// dial connects to a machine's apid.
func dial(t testing.TB, to *talostest.Machine, config *tls.Config) *client.Client {
	t.Helper()

	return newClient(t, client.WithTLSConfig(config), client.WithEndpoints(to.Address().String()))
}

func dialAs(t testing.TB, cluster *talostest.Cluster, to *talostest.Machine, roles ...string) *client.Client {
	t.Helper()

	return dial(t, to, clientTLS(t, cluster, roles...))
}

func clientTLS(t testing.TB, cluster *talostest.Cluster, roles ...string) *tls.Config {
	t.Helper()

	config, err := cluster.ClientTLS(roles...)
	require.NoError(t, err)

	return config
}

func dialSocket(t testing.TB, to *talostest.Machine) *client.Client {
	t.Helper()

	return newClient(t,
		client.WithUnixSocket(to.Socket()),
		client.WithGRPCDialOptions(grpc.WithTransportCredentials(insecure.NewCredentials())))
}

func newClient(t testing.TB, options ...client.OptionFunc) *client.Client {
	t.Helper()

	c, err := client.New(t.Context(), options...)
	require.NoError(t, err)

	t.Cleanup(func() { _ = c.Close() })

	return c
}

// withRole adds a role to the metadata as callers of machine.sock do.
func withRole(ctx context.Context, role string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, constants.APIAuthzRoleMetadataKey, role)
}

func requireCode(t testing.TB, want codes.Code, err error) {
	t.Helper()
	require.Equal(t, want, status.Code(err), "%v", err)
}

func newWorker(t *testing.T) (*talostest.Cluster, *talostest.Machine) {
	t.Helper()

	cluster := ctest.NewTalos(t, talostest.Options{})

	return cluster, addMachine(t, cluster, talostest.MachineSpec{
		Nodename: "worker-1", Platform: runtime.PlatformMetadataSpec{Platform: "aws", Zone: "zone-0"},
	})
}
