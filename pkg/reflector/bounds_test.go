package reflector_test

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// withLinks lists these links of a machine.
func withLinks(n int) talostest.Answer {
	return func(request proto.Message, stream grpc.ServerStream, honest func() error) error {
		if list, ok := request.(*v1alpha1.ListRequest); !ok || list.GetType() != network.LinkStatusType {
			return honest()
		}

		for i := range n {
			link := &v1alpha1.Resource{
				Metadata: &v1alpha1.Metadata{
					Namespace: network.NamespaceName, Type: network.LinkStatusType, Id: "eth" + strconv.Itoa(i), Version: "1", Phase: "running",
				},
				Spec: &v1alpha1.Spec{},
			}

			if err := stream.SendMsg(&v1alpha1.ListResponse{Resource: link}); err != nil {
				return err
			}
		}

		return nil
	}
}

// withAddresses adds these addresses to those of a machine.
func withAddresses(n int) talostest.Answer {
	return func(request proto.Message, stream grpc.ServerStream, honest func() error) error {
		watch, ok := request.(*v1alpha1.WatchRequest)
		if !ok || watch.GetType() != network.AddressStatusType {
			return honest()
		}

		for i := range n {
			address := &v1alpha1.Resource{
				Metadata: &v1alpha1.Metadata{
					Namespace: network.NamespaceName, Type: network.AddressStatusType, Id: strconv.Itoa(i), Version: "1", Phase: "running",
				},
				Spec: &v1alpha1.Spec{},
			}

			if err := stream.SendMsg(&v1alpha1.WatchResponse{Event: []*v1alpha1.Event{{Resource: address}}}); err != nil {
				return err
			}
		}

		return honest()
	}
}

// finalize gives a resource more finalizers than a resource may have, or none.
func (s *suite) finalize(m *talostest.Machine, md resource.Pointer, finalizers int) {
	s.Helper()

	_, err := m.State().UpdateWithConflicts(s.Context(), md, func(r resource.Resource) error {
		*r.Metadata().Finalizers() = make(resource.Finalizers, finalizers)

		return nil
	})
	require.NoError(s, err)
}

func TestSession_OmitsFactsThatExceedLimits(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	s.reflector.Kinds = s.reflector.Kinds.WithFacts(machine.FactKindsOf("Links") | machine.FactKindsOf("TalosVersion"))

	worker := s.machine("worker-1")
	worker.Lie(withLinks(10_000))
	s.settle(worker)

	m := s.get(worker).Machine
	assert.Contains(t, m.Ignored[network.LinkStatusType], "LinkStatuses.net.talos.dev: machine has more than 1024 KiB")
	assert.Len(t, m.Ignored, 1)
	assert.Empty(t, m.Facts.Links)
	assert.NotEmpty(t, m.Facts.TalosVersion)

	// They are reported again.
	worker.Lie(withLinks(1))
	s.clock.Step(nextPoll)
	s.awaitView(worker, func(m machine.Machine) bool { return len(m.Facts.Links) == 1 && len(m.Ignored) == 0 })
}

func TestSession_MachineThatExceedsLimitsIsUnreachable(t *testing.T) {
	for name, test := range map[string]struct {
		resource resource.Pointer
		step     time.Duration
	}{
		"polled":  {k8s.NewNodeIPConfig(k8s.NamespaceName, k8s.KubeletID).Metadata(), nextPoll},
		"watched": {runtime.NewMachineStatus().Metadata(), 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s, worker := watching(t)
			s.finalize(worker, test.resource, 101)
			s.clock.Step(test.step)

			entry := s.await(worker.Nodename(), inventory.Unreachable)
			assert.Contains(t, entry.Reason, test.resource.Type()+": a resource has more than 100 labels, annotations and finalizers")
			assert.Equal(t, worker.Nodename(), entry.Machine.Nodename, "the last view is kept")

			// It is read again as soon as it does not, but later each time.
			s.stepUntil("the machine was dialed again", func() bool { return len(s.dials()) == 4 })
			assert.GreaterOrEqual(t, s.clock.Since(entry.UnresponsiveSince), 7*time.Second)

			s.finalize(worker, test.resource, 0)
			s.stepUntilCurrent(worker, anything)
		})
	}
}

func TestSession_ShortensErrorsOfMachines(t *testing.T) {
	t.Parallel()

	s := newTimedSuite(t)
	worker := s.machine("worker-1")
	worker.Lie(func(proto.Message, grpc.ServerStream, func() error) error {
		return status.Error(codes.Internal, strings.Repeat("x", 15<<10))
	})
	s.track(worker)
	s.await(worker.Nodename(), inventory.Unreachable)
	s.stepUntil("the failure is logged", func() bool { return len(s.visible()) > 0 })

	for _, reason := range s.inventory.unreachableMarks() {
		assert.LessOrEqual(t, len(reason), len("worker-1: ")+1<<10)
		assert.Contains(t, reason, "xxx")
	}

	assert.NotContains(t, strings.Join(s.logged(), "\n"), strings.Repeat("x", 1<<10))
}

func TestSession_ReadsLargeMachine(t *testing.T) {
	t.Parallel()

	var resources []resource.Resource

	for i := range 1000 {
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{203, 0, byte(i / 250), byte(i % 250)}), 32)
		address := network.NewAddressStatus(network.NamespaceName, network.AddressID("eth1", prefix))
		address.TypedSpec().Address, address.TypedSpec().LinkName = prefix, "eth1"
		resources = append(resources, address)
	}

	for i := range 500 {
		volume := block.NewDiscoveredVolume(block.NamespaceName, "nvme"+strconv.Itoa(i))
		volume.TypedSpec().DevicePath = strings.Repeat("x", 300) // about the size of a real one
		resources = append(resources, volume)
	}

	for i := range 200 {
		link := network.NewLinkStatus(network.NamespaceName, "eno"+strconv.Itoa(i))
		link.TypedSpec().Product = strings.Repeat("x", 100)
		resources = append(resources, link)
	}

	s := newRealSuite(t)
	s.reflector.Kinds = s.reflector.Kinds.WithFacts(machine.AllFacts)

	worker := s.add(talostest.MachineSpec{Nodename: "worker-1", Resources: resources})
	s.follow(worker)

	m := s.get(worker).Machine
	assert.Empty(t, m.Ignored)
	assert.Len(t, m.Facts.Links, 200)
	assert.Len(t, m.Addresses, 1001, "the node IP, and all others that count of 1,001")
}
