package reflector_test

import (
	"context"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

// lists counts the List calls by resource type.
func lists(m *talostest.Machine) map[resource.Type]int {
	counts := map[resource.Type]int{}

	for _, call := range m.Calls() {
		if call.Method == "/cosi.resource.State/List" {
			counts[call.ResourceType]++
		}
	}

	return counts
}

// laggingState delays the watch of one kind.
type laggingState struct {
	talosapi.State

	kind    resource.Type
	release <-chan struct{}
}

func (s laggingState) WatchKind(ctx context.Context, kind resource.Kind, ch chan<- state.Event, opts ...state.WatchKindOption) error {
	if kind.Type() == s.kind {
		select {
		case <-s.release:
		case <-ctx.Done():
			return ctx.Err()
		}
	}

	return s.State.WatchKind(ctx, kind, ch, opts...)
}

func TestSession_PublishesNoViewBeforeAllWatchesBootstrapped(t *testing.T) {
	for _, kind := range machine.KindsOf(nil).Watched {
		t.Run(kind.Type(), func(t *testing.T) {
			t.Parallel()

			clk := &countingClock{FakeClock: clocktesting.NewFakeClock(time.Now())}
			s := newSuite(t, clk)
			worker := s.add(t, talostest.MachineSpec{Nodename: "worker-1", Platform: runtime.PlatformMetadataSpec{Platform: "aws", InstanceID: "i-1"}})
			must(t, worker.SetStage(t.Context(), runtime.MachineStageBooting)) // is polled often

			release := make(chan struct{})
			s.run(t, func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
				st, err := s.dial(ctx, nodename, addr)

				return laggingState{State: st, kind: kind.Type(), release: release}, err
			}, clk)
			s.track(worker)

			others := len(machine.KindsOf(nil).Watched) - 1
			eventually(t, "the other watches are open", func() bool { return worker.OpenStreams() == others })

			// This step reaches the second poll but not the deadline of the watches. Each poll resets the poll timer.
			eventually(t, "the machine is polled", func() bool { return clk.resets.Load() == 1 })
			clk.Step(firstPoll)
			eventually(t, "the machine is polled again", func() bool { return clk.resets.Load() == 2 && worker.OpenStreams() == others })

			if got := s.inventory.viewsOf(worker.Nodename()); len(got) > 0 {
				t.Errorf("view was published without %s: %+v", kind.Type(), got[0])
			}

			close(release)
			s.await(t, worker.Nodename(), inventory.Current)

			view := s.inventory.viewsOf(worker.Nodename())[0]
			if view.Nodename == "" || view.Hostname == "" || view.Platform.InstanceID != "i-1" || !view.HasAddress(worker.Address()) {
				t.Errorf("first view is incomplete: %+v", view)
			}
		})
	}
}

// oddState replaces the events of the watch of one kind.
type oddState struct {
	talosapi.State

	kind   resource.Type
	events []state.Event
}

func (s oddState) WatchKind(ctx context.Context, kind resource.Kind, ch chan<- state.Event, opts ...state.WatchKindOption) error {
	if kind.Type() != s.kind {
		return s.State.WatchKind(ctx, kind, ch, opts...)
	}

	go func() {
		for _, event := range s.events {
			select {
			case ch <- event:
			case <-ctx.Done():
				return
			}
		}
	}()

	return nil
}

// runOdd starts a reflector that receives the given events from every machine's watch of addresses.
func (s *suite) runOdd(t *testing.T, clk clock.Clock, events ...state.Event) {
	t.Helper()
	s.run(t, func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		st, err := s.dial(ctx, nodename, addr)

		return oddState{State: st, kind: network.AddressStatusType, events: events}, err
	}, clk)
}

func TestSession_FailsOnEventWithoutResource(t *testing.T) {
	for _, typ := range []state.EventType{state.Created, state.Updated, state.Destroyed} {
		t.Run(typ.String(), func(t *testing.T) {
			t.Parallel()

			s := newRealSuite(t)
			s.runOdd(t, clock.RealClock{}, state.Event{Type: typ})

			worker := s.addWorker(t)
			s.track(worker)

			if entry := s.await(t, worker.Nodename(), inventory.Unreachable); !strings.Contains(entry.Reason, "without a resource") {
				t.Errorf("got reason %q", entry.Reason)
			}
		})
	}
}

func TestSession_FailsOnTooManyResources(t *testing.T) {
	t.Parallel()

	var events []state.Event

	for i := range 10_001 {
		address := network.NewAddressStatus(network.NamespaceName, strconv.Itoa(i))
		events = append(events, state.Event{Type: state.Created, Resource: address})
	}

	// The clock stands still, so that reading ten thousand events cannot exceed the answer timeout.
	s, clk := newTimedSuite(t)
	s.runOdd(t, clk, events...)

	worker := s.addWorker(t)
	s.track(worker)

	if entry := s.await(t, worker.Nodename(), inventory.Unreachable); !strings.Contains(entry.Reason, "more than 10000 resources") {
		t.Errorf("got reason %q", entry.Reason)
	}
}

func TestSession_TimesOutIfWatchNeverBootstrapsDespitePolls(t *testing.T) {
	t.Parallel()

	s, clk := newTimedSuite(t)
	s.runOdd(t, clk)

	worker := s.addWorker(t)
	must(t, worker.SetStage(t.Context(), runtime.MachineStageBooting))
	s.track(worker)

	eventually(t, "the machine is unreachable", func() bool {
		clk.Step(time.Second)

		return s.inventory.Get(worker.Nodename()).Condition == inventory.Unreachable
	})
}
