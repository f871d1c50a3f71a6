// Package ctest supports tests of controllers, which run against a real API server and simulated Talos machines.
//
//	var bed ctest.Bed
//
//	func TestMain(m *testing.M) { bed.Main(m, kube.Options{}, nil) }
//
//	func TestController_X(t *testing.T) {
//		s := bed.NewSuite(t)
//		m := s.Join(talostest.MachineSpec{Nodename: "a"})
//		s.AwaitNode(m.Nodename(), func(n *corev1.Node, asrt *assert.Assertions) { … })
//	}
//
// Packages that need neither use [Eventually], [Receive] and [Credentials] alone.
package ctest

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

const (
	// Timeout bounds every wait. It is generous for slow machines, and longer than the maximum backoff of the reflector,
	// 78 s.
	Timeout = 2 * time.Minute

	// minPause and maxPause are between two checks of a condition.
	minPause, maxPause = time.Millisecond, 20 * time.Millisecond
)

// Eventually polls until ok returns true, for conditions that cannot be watched. ok may fail the test.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()

	EventuallyNoError(t, func(context.Context) error {
		if !ok() {
			return errors.New(what)
		}

		return nil
	})
}

// EventuallyNoError repeats do until it succeeds, also after the test has ended: cleanups may use it.
func EventuallyNoError(t testing.TB, do func(context.Context) error) {
	t.Helper()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Timeout)
	defer cancel()

	pause := minPause

	for err := do(ctx); err != nil; err = do(ctx) {
		require.NoError(t, ctx.Err(), err.Error())
		time.Sleep(pause)

		pause = min(2*pause, maxPause)
	}
}

// Receive returns what a channel delivers, or the zero value if the channel is closed.
func Receive[T any](t testing.TB, ch <-chan T, what string) (value T) {
	t.Helper()

	select {
	case value = <-ch:
	case <-time.After(Timeout):
		require.FailNow(t, "not true after "+Timeout.String()+": "+what)
	}

	return value
}

// Metrics returns the values of all metrics of this process; for histograms the count. The keys consist of the name and
// the values of the labels, in the order of the labels' names, such as "talosccm_csr_verdicts_total Approve Verified".
func Metrics(t testing.TB) map[string]float64 {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	require.NoError(t, err)

	values := map[string]float64{}

	for _, family := range families {
		for _, metric := range family.GetMetric() {
			key := []string{family.GetName()}
			for _, label := range metric.GetLabel() {
				key = append(key, label.GetValue())
			}

			values[strings.Join(key, " ")] = metric.GetCounter().GetValue() + metric.GetGauge().GetValue() + float64(metric.GetHistogram().GetSampleCount())
		}
	}

	return values
}

// IDOf returns the ID of the client certificate of a configuration.
func IDOf(credential *rest.Config) string {
	block, _ := pem.Decode(credential.CertData)

	return noderecord.ID(block.Bytes)
}

// NewTalos returns a Talos cluster without machines, which is closed when the test ends.
func NewTalos(t testing.TB, options talostest.Options) *talostest.Cluster {
	t.Helper()

	cluster, err := talostest.New(options)
	require.NoError(t, err)
	t.Cleanup(cluster.Close)

	return cluster
}

// credentials is a talosapi.Credentials that never changes.
type credentials func() (*tls.Config, error)

// TLSConfig implements talosapi.Credentials.
func (c credentials) TLSConfig() (*tls.Config, error) {
	config, err := c()

	return config.Clone(), err
}

// Credentials returns the credentials of a client with the given roles, such as os:reader. They are issued at the first
// use, and never renewed.
func Credentials(talos *talostest.Cluster, roles ...string) talosapi.Credentials {
	return credentials(sync.OnceValues(func() (*tls.Config, error) { return talos.ClientTLS(roles...) }))
}

// Dial returns a function that connects to machines as a reader.
func Dial(talos *talostest.Cluster) talosapi.DialFunc {
	reader := Credentials(talos, string(role.Reader))

	return func(ctx context.Context, _ string, addr netip.Addr) (talosapi.State, error) {
		return talosapi.Dial(ctx, reader, addr)
	}
}
