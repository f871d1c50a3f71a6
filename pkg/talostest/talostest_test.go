package talostest_test

import (
	"context"
	"crypto/tls"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// timeout limits every wait. It is generous because a passing test does not use it up.
const timeout = 2 * time.Minute

func newCluster(t testing.TB, options talostest.Options) *talostest.Cluster {
	t.Helper()

	cluster, err := talostest.New(options)
	if err != nil {
		t.Fatalf("new cluster: %v", err)
	}

	t.Cleanup(cluster.Close)

	return cluster
}

func addMachine(t testing.TB, cluster *talostest.Cluster, spec talostest.MachineSpec) *talostest.Machine {
	t.Helper()

	added, err := cluster.AddMachine(spec)
	if err != nil {
		t.Fatalf("add machine: %v", err)
	}

	return added
}

// newControlPlane returns a cluster with one control-plane machine that serves machine.sock.
func newControlPlane(t testing.TB) (*talostest.Cluster, *talostest.Machine) {
	t.Helper()

	cluster := newCluster(t, talostest.Options{})

	return cluster, addMachine(t, cluster, talostest.MachineSpec{
		Nodename:                 "cp-1",
		Type:                     machine.TypeControlPlane,
		ServeSocket:              true,
		LocalhostAdminKubeconfig: "apiVersion: v1",
	})
}

func withDeadline(t testing.TB) context.Context {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), timeout)
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

	config, err := cluster.ClientTLS(roles...)
	if err != nil {
		t.Fatalf("client TLS: %v", err)
	}

	return dial(t, to, config)
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
	if err != nil {
		t.Fatalf("new client: %v", err)
	}

	t.Cleanup(func() { _ = c.Close() })

	return c
}

// withRoles adds roles to the metadata like callers of machine.sock do.
func withRoles(ctx context.Context, roles ...string) context.Context {
	pairs := make([]string, 0, 2*len(roles))
	for _, role := range roles {
		pairs = append(pairs, constants.APIAuthzRoleMetadataKey, role)
	}

	return metadata.AppendToOutgoingContext(ctx, pairs...)
}

func requireCode(t testing.TB, err error, want codes.Code) {
	t.Helper()

	if got := status.Code(err); got != want {
		t.Fatalf("got %s (%v), want %s", got, err, want)
	}
}

// eventually polls until condition holds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()

	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()

	deadline := time.After(timeout)

	for !condition() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("timed out after %s waiting until %s", timeout, what)
		}
	}
}
