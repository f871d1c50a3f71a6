package reflector_test

import (
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"google.golang.org/grpc/codes"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

func TestSession_ListsNoKindThatNothingUses(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	kinds := machine.KindsOf(nil)
	if got, want := len(lists(worker)), len(kinds.Polled)+len(kinds.Constant); got != want {
		t.Errorf("%d kinds were listed, want %d: %v", got, want, lists(worker))
	}
}

func TestSession_PublishesFactsInFirstView(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	s.run(t, s.dial, clk, machine.OptionalFacts()...)

	worker := s.addWorker(t)
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	if got, want := s.inventory.viewsOf(worker.Nodename())[0].Facts, len(machine.OptionalFacts()); len(got) != want {
		t.Errorf("got %v, want %d facts", got, want)
	}

	for _, call := range worker.Calls() {
		if call.Code != codes.OK {
			t.Errorf("%s %s with the role os:reader: %s", call.Method, call.ResourceType, call.Code)
		}
	}
}

// Facts that stay the same until a reboot are listed once, but not while the machine is still discovering its devices.
func TestSession_ListsConstantFactsUntilMachineRuns(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	s.run(t, s.dial, clk, "Gateways", "PCIDevices")

	worker := s.addWorker(t)
	must(t, worker.SetStage(t.Context(), runtime.MachineStageBooting))
	s.track(worker)
	s.settle(t, clk, worker.Nodename())

	device := hardware.NewPCIDeviceInfo("0000:01:00.0")
	device.TypedSpec().VendorID = "0x10de"

	must(t, worker.State().Create(t.Context(), device))
	must(t, worker.SetStage(t.Context(), runtime.MachineStageRunning))
	s.awaitChange(t, clk, worker.Nodename(), func(m machine.Machine) bool {
		devices, _ := m.Fact("PCIDevices").([]string)

		return m.Stage == runtime.MachineStageRunning && len(devices) == 1
	})
	s.settle(t, clk, worker.Nodename())

	for polls := 3; polls <= 4; polls++ {
		clk.Step(nextPoll)
		eventually(t, "the machine is polled", func() bool { return lists(worker)[k8s.NodeIPType] == polls })
		eventually(t, "the poll has ended", func() bool { return s.inventory.Get(worker.Nodename()).ObservedAt.Equal(clk.Now()) })
		s.settle(t, clk, worker.Nodename())

		if got := lists(worker); got[hardware.PCIDeviceType] != 2 || got[network.RouteStatusType] != polls {
			t.Errorf("after %d polls: %v", polls, got)
		}
	}
}
