package ccm

import (
	"context"
	"fmt"
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	memoryInterval = 2 * time.Second

	mebibyte = 1 << 20
	// A leader uses about 76 MiB and 0.25 MiB per machine. Nodes that are not known do not count, because a bootstrap token
	// can register any number of them. The base is enough for about 1,700.
	baseMemory, memoryPerNode = 512 * mebibyte, mebibyte
)

// limitMemory sends an error to exceeded if the process uses more memory than its ceiling, even after a garbage
// collection: Talos does not limit the memory of extension services, and machines and Nodes determine how much is needed.
// It returns when ctx ends.
func (m *Manager) limitMemory(ctx context.Context, nodes corelisters.NodeLister, exceeded chan<- error) {
	for backoff.Sleep(ctx, m.clock, memoryInterval) {
		ceiling := m.memoryCeiling(nodes)
		if usedMemory() <= ceiling {
			continue
		}

		debug.FreeOSMemory()

		if used := usedMemory(); used > ceiling {
			exceeded <- fmt.Errorf("%d MiB of memory are in use, more than the ceiling of %d MiB; see --memory-ceiling", used/mebibyte, ceiling/mebibyte)

			return
		}
	}
}

// memoryCeiling returns the most memory that the process may use, in bytes.
func (m *Manager) memoryCeiling(nodes corelisters.NodeLister) uint64 {
	if ceiling := m.options.MemoryCeiling.Value(); ceiling > 0 {
		return uint64(ceiling)
	}

	ceiling := uint64(baseMemory)
	all, _ := nodes.List(labels.Everything()) // a list from the cache cannot fail

	for _, node := range all {
		if nodespec.IsKnown(node) {
			ceiling += memoryPerNode
		}
	}

	return min(ceiling, machineMemory()/2)
}

// machineMemory returns the memory of the machine in bytes; the largest number if it is not known.
func machineMemory() uint64 {
	var kibibytes uint64

	data, err := os.ReadFile("/proc/meminfo")
	if err == nil {
		_, err = fmt.Sscanf(string(data), "MemTotal: %d kB", &kibibytes)
	}

	if err != nil {
		return math.MaxUint64
	}

	return kibibytes * 1024
}

// usedMemory returns the memory that GOMEMLIMIT refers to, in bytes: all but the program file.
func usedMemory() uint64 {
	samples := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(samples)

	return samples[0].Value.Uint64() - samples[1].Value.Uint64()
}
