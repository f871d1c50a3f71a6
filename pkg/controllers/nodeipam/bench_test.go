package nodeipam_test

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/talos-ccm/talos-ccm/pkg/controllers/nodeipam"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

var benchNodes = flag.Int("nodes", 5000, "number of Nodes of the benchmark")

// registrars is the number of Nodes that are registered concurrently.
const registrars = 16

// BenchmarkAllocateAll compares this controller with kube-controller-manager's RangeAllocator, for existing dual-stack
// Nodes on the same API server, without client-side rate limits. It reports the time from the start of the allocator to
// the last Node, and the rate from the first Node to the last.
func BenchmarkAllocateAll(b *testing.B) {
	for _, allocator := range []struct {
		name  string
		start func(*world) (stop func())
	}{
		{"ours", startOurs},
		{"kube-controller-manager", startKubeControllerManager},
	} {
		b.Run(allocator.name, func(b *testing.B) {
			for range b.N {
				b.StopTimer()

				w := newWorld(b)
				w.fill(*benchNodes)
				given := w.count(*benchNodes)

				b.StartTimer()

				began := time.Now()
				stop := allocator.start(w)
				first, last := given()

				b.StopTimer()
				stop()
				w.empty()
				b.ReportMetric(last.Sub(began).Seconds(), "s-to-last")
				b.ReportMetric(float64(*benchNodes)/last.Sub(first).Seconds(), "nodes/s")
			}
		})
	}
}

// benchCIDRs have 8,192 and 65,536 blocks.
func benchCIDRs() []netip.Prefix { return prefixes("10.64.0.0/11", "fd00:5::/48") }

func startOurs(w *world) (stop func()) {
	p := w.run(setup{Options: nodeipam.Options{ClusterCIDRs: benchCIDRs(), MaskSizeIPv6: 64}})

	return p.stop
}

func startKubeControllerManager(w *world) (stop func()) {
	assets, err := kube.Assets(w.Context(), os.Stderr)
	w.require(err)

	kubeconfig := filepath.Join(w.TempDir(), "kubeconfig")
	w.require(os.WriteFile(kubeconfig, w.kube.Kubeconfig(), 0o600))

	manager := exec.CommandContext(context.WithoutCancel(w.Context()), filepath.Join(assets, "kube-controller-manager"), //nolint:gosec // the bed's
		"--kubeconfig="+kubeconfig, "--leader-elect=false", "--secure-port=0", "--controllers=node-ipam-controller", "--allocate-node-cidrs",
		"--cluster-cidr="+fmt.Sprintf("%s,%s", benchCIDRs()[0], benchCIDRs()[1]), "--node-cidr-mask-size-ipv6=64",
		"--kube-api-qps=2000", "--kube-api-burst=4000", "--flex-volume-plugin-dir="+w.TempDir())
	w.require(manager.Start())

	return func() {
		if err := manager.Process.Kill(); err != nil {
			w.Error(err)
		}

		_ = manager.Wait() // says that it was killed
	}
}

// fill registers Nodes.
func (w *world) fill(count int) {
	w.Helper()

	numbers := make(chan int)

	var group sync.WaitGroup

	for range registrars {
		group.Go(func() {
			for i := range numbers {
				if _, err := w.tryRegister(w.Context(), fmt.Sprintf("n%d", i)); err != nil {
					w.Error(err)
				}
			}
		})
	}

	for i := range count {
		numbers <- i
	}

	close(numbers)
	group.Wait()
}

// count returns a function that waits until count Nodes have blocks of both families, and returns the times of the first
// and the last.
func (w *world) count(count int) func() (first, last time.Time) {
	w.Helper()

	list, err := w.client.CoreV1().Nodes().List(w.Context(), metav1.ListOptions{Limit: 1})
	w.require(err)

	watch, err := w.client.CoreV1().Nodes().Watch(w.Context(), metav1.ListOptions{LabelSelector: w.selector(), ResourceVersion: list.ResourceVersion})
	w.require(err)

	return func() (first, last time.Time) {
		defer watch.Stop()

		given := map[string]struct{}{}

		for event := range watch.ResultChan() {
			node, ok := event.Object.(*corev1.Node)
			if !ok || len(node.Spec.PodCIDRs) < 2 {
				continue
			}

			if last = time.Now(); len(given) == 0 {
				first = last
			}

			if given[node.Name] = struct{}{}; len(given) == count {
				return first, last
			}
		}

		w.Fatalf("the watch ended after %d Nodes", len(given))

		return first, last
	}
}

// empty deletes all Nodes.
func (w *world) empty() {
	w.Helper()
	w.require(w.client.CoreV1().Nodes().DeleteCollection(w.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: w.selector()}))
}
