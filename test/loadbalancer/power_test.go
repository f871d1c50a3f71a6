//go:build e2e

package loadbalancer_test

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	renewInterval   = 10 * time.Second // of kubelets
	connectInterval = 50 * time.Millisecond
	connectTimeout  = time.Second
)

// The address is removed long before the Node is not ready. Without probes it is removed only then.
func TestLossOfPower_RemovesAddress(t *testing.T) {
	t.Parallel()

	after := testLossOfPower(t, func(b *bed) func(string) { return b.instance.Reflector.Probe })
	assert.Less(t, after, 35*time.Second)
}

func TestLossOfPower_RemovesAddressWithoutProbesWhenNodeIsNotReady(t *testing.T) {
	t.Parallel()

	after := testLossOfPower(t, func(*bed) func(string) { return func(string) {} })
	assert.Greater(t, after, 45*time.Second)
}

// testLossOfPower cuts the connections of a machine just after its kubelet has renewed its Lease. It returns the time until
// the address is removed.
func testLossOfPower(t *testing.T, probe func(*bed) func(nodename string)) time.Duration {
	b := newBed(t, kube.ControllerManager{Flags: []string{"--controllers=node-lifecycle-controller"}})
	x, y := b.join("x", 1, "nftables"), b.join("y", 2, "nftables")
	b.route(x, y)

	machine := b.follow(x)
	b.follow(y)
	b.instance.Start(b.instance.Reflector.Run)
	b.startController(probe(b))
	b.createService()
	b.setEndpoint(y)

	stop := b.startKubelet(x)
	b.startKubelet(y)
	b.awaitAddresses(x, y)
	b.awaitResponse(b.outside, x, "y "+x.address)
	b.awaitResponse(b.outside, y, "y 10.244.2.1")

	c := b.startClient()
	ctest.Eventually(t, "the client has connected to both Nodes", func() bool { return c.opened.Load() >= 20 })

	before := c.failed.Load()

	stop()
	require.NoError(t, b.Kube.RenewLease(t.Context(), x.name))
	require.NoError(t, machine.BlackHole())
	require.NoError(t, b.lan.IP(t.Context(), "link set x down"))

	start := time.Now()

	b.awaitAddresses(y)

	after := time.Since(start)

	c.stop()
	assert.Greater(t, c.failed.Load(), before)
	t.Logf("the address was removed after %.1f s; %d of %d connections failed", after.Seconds(), c.failed.Load(), c.opened.Load())

	return after
}

// follow adds a machine with the address of a Node, and tracks it.
func (b *bed) follow(n node) *talostest.Machine {
	b.Helper()

	m := b.Machine(talostest.MachineSpec{
		Nodename: n.name, Addresses: []talostest.Address{{Link: "eth0", Prefix: netip.MustParsePrefix(n.address + "/24")}},
	})
	b.instance.Reflector.Track(n.name, []netip.Addr{m.Address()}, reflector.Unknown)

	return m
}

// startKubelet renews the Lease of a Node until stop or the end of the test.
func (b *bed) startKubelet(n node) (stop func()) {
	ctx, cancel := context.WithCancel(b.Context())

	var group wait.Group

	group.StartWithContext(ctx, func(ctx context.Context) {
		wait.UntilWithContext(ctx, func(ctx context.Context) { _ = b.Kube.RenewLease(ctx, n.name) }, renewInterval)
	})

	stop = func() {
		cancel()
		group.Wait()
	}
	b.Cleanup(stop)

	return stop
}

// client opens connections to the addresses of the Service in turn, as clients of a DNS name do.
type client struct {
	opened, failed atomic.Int64
	stop           func() // returns when all attempts have ended
}

func (b *bed) startClient() *client {
	c := &client{}
	ctx, cancel := context.WithCancel(b.Context())

	var group sync.WaitGroup

	group.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			svc, err := b.Client.CoreV1().Services("default").Get(ctx, "web", metav1.GetOptions{})
			if err != nil || len(svc.Status.LoadBalancer.Ingress) == 0 {
				return // the test has ended or failed
			}

			list := svc.Status.LoadBalancer.Ingress
			address := net.JoinHostPort(list[i%len(list)].IP, "80")

			group.Go(func() {
				dialing, done := context.WithTimeout(context.WithoutCancel(ctx), connectTimeout)
				defer done()

				conn, err := b.outside.Dial(dialing, "tcp", address)
				if err == nil {
					_ = conn.Close()
				} else {
					c.failed.Add(1)
				}

				c.opened.Add(1)
			})

			select {
			case <-ctx.Done():
			case <-time.After(connectInterval):
			}
		}
	})

	c.stop = func() {
		cancel()
		group.Wait()
	}
	b.Cleanup(c.stop)

	return c
}
