package talostest_test

import (
	"crypto/tls"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func TestRotateCA_ReplacesCA(t *testing.T) {
	for name, test := range map[string]struct {
		old  talostest.OldCA
		want codes.Code
	}{
		"accepting the old CA": {talostest.AcceptOldCA, codes.OK},
		"dropping the old CA":  {talostest.DropOldCA, codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			cluster, cp := newControlPlane(t)
			before := clientTLS(t, cluster, "os:reader")

			require.NoError(t, cluster.RotateCA(test.old))

			// The machine presents a certificate of the new CA, which the old client does not trust.
			requireCode(t, codes.Unavailable, version(withDeadline(t), dial(t, cp, before)))

			informed := before.Clone()
			informed.RootCAs = clientTLS(t, cluster).RootCAs
			requireCode(t, test.want, version(withDeadline(t), dial(t, cp, informed)))

			requireCode(t, codes.OK, version(withDeadline(t), dialAs(t, cluster, cp, "os:reader")))
		})
	}
}

func TestClientCertificate_ExpiresByClusterClock(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC))
	cluster := ctest.NewTalos(t, talostest.Options{Clock: clock})
	cp := addControlPlane(t, cluster, "cp-1")

	issued, err := issueReader(withRole(withDeadline(t), "os:admin"), dialSocket(t, cp), time.Hour)
	require.NoError(t, err)

	pair, err := tls.X509KeyPair(issued.GetCrt(), issued.GetKey())
	require.NoError(t, err)

	config := clientTLS(t, cluster)
	config.Certificates = []tls.Certificate{pair}

	requireCode(t, codes.OK, version(withDeadline(t), dial(t, cp, config)))

	clock.SetTime(clock.Now().Add(2 * time.Hour))
	requireCode(t, codes.Unavailable, version(withDeadline(t), dial(t, cp, config)))
}

func TestTalosconfig_UsesControlPlanesAsEndpoints(t *testing.T) {
	cluster, cp := newControlPlane(t)
	addMachine(t, cluster, talostest.MachineSpec{Nodename: "worker-1"})

	talosconfig, err := cluster.Talosconfig("os:reader")
	require.NoError(t, err)

	requireCode(t, codes.OK, version(withDeadline(t), newClient(t, client.WithConfig(talosconfig))))

	assert.Len(t, cp.Calls(), 1)
}
