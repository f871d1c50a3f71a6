package talostest_test

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

// BenchmarkAddMachine reports the time and the memory per idle machine.
func BenchmarkAddMachine(b *testing.B) {
	cluster := ctest.NewTalos(b, talostest.Options{})
	before := liveMemory()

	for i := range b.N {
		addMachine(b, cluster, talostest.MachineSpec{Nodename: fmt.Sprintf("n-%d", i)})
	}

	b.StopTimer()
	reportPerMachine(b, before)
}

// BenchmarkWatchedMachine reports the time and the memory per machine with a watching client, including the client.
func BenchmarkWatchedMachine(b *testing.B) {
	cluster := ctest.NewTalos(b, talostest.Options{})

	config := clientTLS(b, cluster, "os:reader")
	kind := resource.NewMetadata(network.NamespaceName, network.AddressStatusType, "", resource.VersionUndefined)
	before := liveMemory()

	for i := range b.N {
		added := addMachine(b, cluster, talostest.MachineSpec{Nodename: fmt.Sprintf("n-%d", i)})
		reader := newClient(b, client.WithTLSConfig(config), client.WithEndpoints(added.Address().String()))
		events := make(chan state.Event)

		require.NoError(b, reader.COSI.WatchKind(b.Context(), kind, events, state.WithBootstrapContents(true)))

		for event := range events {
			if event.Type == state.Bootstrapped {
				break
			}
		}
	}

	b.StopTimer()
	reportPerMachine(b, before)
}

func reportPerMachine(b *testing.B, before uint64) {
	b.Helper()

	b.ReportMetric((float64(liveMemory())-float64(before))/float64(b.N), "B/machine")
	b.ReportMetric(float64(runtime.NumGoroutine())/float64(b.N), "goroutines/machine")
}

// liveMemory returns the size of heap and stacks after a garbage collection.
func liveMemory() uint64 {
	runtime.GC()

	var stats runtime.MemStats

	runtime.ReadMemStats(&stats)

	return stats.HeapAlloc + stats.StackInuse
}
