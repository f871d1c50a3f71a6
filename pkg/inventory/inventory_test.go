package inventory_test

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const uuid = "30a0bdf7-4b1a-4f0e-9f86-2a3d64a3c5ee"

// fixture is an inventory with a fake clock, and the notifications of its subscriber.
type fixture struct {
	*inventory.Inventory
	now      time.Time
	notified []string
}

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// newFixture returns an inventory after the given changes.
func newFixture(changes ...step) *fixture {
	f := &fixture{now: start}
	f.Inventory = inventory.New(func() time.Time { return f.now })
	f.Subscribe(func(nodename string) { f.notified = append(f.notified, nodename) })
	f.do(changes...)

	return f
}

// takeNotified returns the notifications since the last call.
func (f *fixture) takeNotified() []string {
	notified := f.notified
	f.notified = nil

	return notified
}

// step is a change of an inventory, or of its time.
type (
	step  func(*fixture)
	steps []step
)

func (f *fixture) do(changes ...step) {
	for _, change := range changes {
		change(f)
	}
}

// view is a view of the machine that responds at the address of its Node.
func view(nodename string, m machine.Machine) step {
	return func(f *fixture) { f.Replace(nodename, m) }
}

func unreachable(nodename string) step {
	return func(f *fixture) { f.MarkUnreachable(nodename, "gone") }
}

func mismatch(nodename, responding string) step {
	return func(f *fixture) { f.MarkMismatch(nodename, responding, "no") }
}

func forgotten(nodename string) step {
	return func(f *fixture) { f.Forget(nodename) }
}

func after(d time.Duration) step {
	return func(f *fixture) { f.now = f.now.Add(d) }
}

func inZone(zone string) machine.Machine {
	return machine.Machine{Nodename: "worker-1", Platform: runtime.PlatformMetadataSpec{Platform: "metal", Zone: zone}}
}

func withUUID(uuid string) machine.Machine {
	return machine.Machine{System: hardware.SystemInformationSpec{UUID: uuid}}
}

func TestInventory_GetReturnsTheLastChange(t *testing.T) {
	a, b := inZone("a"), inZone("b")
	inA, inB := view("worker-1", a), view("worker-1", b)
	gone, other := unreachable("worker-1"), mismatch("worker-1", "other")

	for _, test := range []struct {
		name    string
		changes steps
		want    inventory.Entry // without the last view of its machine
	}{
		{"unknown nodename", nil, inventory.Entry{}},
		{"first view", steps{inA}, inventory.Entry{Machine: a, Condition: inventory.Current, ObservedAt: start}},
		{"changed view", steps{inA, after(1), inB}, inventory.Entry{Machine: b, Condition: inventory.Current, ObservedAt: start.Add(1)}},
		{"confirmed view", steps{inA, after(1), inA}, inventory.Entry{Machine: a, Condition: inventory.Current, ObservedAt: start.Add(1)}},
		{"unreachable machine keeps view and time", steps{inA, after(1), gone}, inventory.Entry{
			Machine: a, Condition: inventory.Unreachable, Reason: "gone", ObservedAt: start, UnresponsiveSince: start.Add(1),
		}},
		{"unreachable for longer", steps{inA, gone, after(1), gone}, inventory.Entry{
			Machine: a, Condition: inventory.Unreachable, Reason: "gone", ObservedAt: start, UnresponsiveSince: start,
		}},
		{"unreachable from the start", steps{gone}, inventory.Entry{Condition: inventory.Unreachable, Reason: "gone"}},
		{"reachable again", steps{gone, inA}, inventory.Entry{Machine: a, Condition: inventory.Current, ObservedAt: start}},
		{"mismatch drops the view", steps{inA, other}, inventory.Entry{Condition: inventory.Mismatch, Reason: "no", UnresponsiveSince: start}},
		{"mismatch after a silence", steps{inA, gone, after(1), other}, inventory.Entry{Condition: inventory.Mismatch, Reason: "no", UnresponsiveSince: start}},
		{"unreachable after mismatch has no view", steps{inA, other, after(1), gone}, inventory.Entry{
			Condition: inventory.Unreachable, Reason: "gone", UnresponsiveSince: start,
		}},
		{"forgotten", steps{inA, forgotten("worker-1")}, inventory.Entry{}},
		{"other nodenames changed", steps{view("worker-2", a), mismatch("worker-3", "other")}, inventory.Entry{}},
	} {
		got := newFixture(test.changes...).Get("worker-1")
		got.Last, got.Responding = machine.Machine{}, ""
		assert.Equal(t, test.want, got, test.name)
	}
}

func TestInventory_NotifiesOnChangeOnly(t *testing.T) {
	inA, inB := view("worker-1", inZone("a")), view("worker-1", inZone("b"))
	gone, other, forget := unreachable("worker-1"), mismatch("worker-1", "other"), forgotten("worker-1")
	expired := func(f *fixture) { f.MarkUnreachable("worker-1", "expired") }

	for _, test := range []struct {
		name    string
		changes steps // before the last one
		last    step
		want    []string
	}{
		{"first view", nil, inA, []string{"worker-1"}},
		{"first view is the zero value", nil, view("worker-1", machine.Machine{}), []string{"worker-1"}},
		{"same view", steps{inA}, inA, nil},
		{"same view at a later time", steps{inA, after(time.Hour)}, inA, nil},
		{"changed view", steps{inA}, inB, []string{"worker-1"}},
		{"unreachable", steps{inA}, gone, []string{"worker-1"}},
		{"still unreachable", steps{gone}, gone, nil},
		{"unreachable for another reason", steps{gone}, expired, []string{"worker-1"}},
		{"reachable again with the same view", steps{inA, gone}, inA, []string{"worker-1"}},
		{"mismatch", steps{inA}, other, []string{"worker-1"}},
		{"still a mismatch", steps{other}, other, nil},
		{"forgotten", steps{inA}, forget, []string{"worker-1"}},
		{"forgotten but never known", nil, forget, nil},
		{"forgotten twice", steps{inA, forget}, forget, nil},
	} {
		f := newFixture(test.changes...)
		f.takeNotified()
		f.do(test.last)
		assert.Equal(t, test.want, f.takeNotified(), test.name)
	}
}

func TestInventory_NotifiesEverySubscriberWithoutLock(t *testing.T) {
	f := newFixture()

	var second []inventory.Condition

	f.Subscribe(func(nodename string) { second = append(second, f.Get(nodename).Condition) })
	f.do(view("worker-1", inZone("a")), mismatch("worker-1", "other"))

	assert.Len(t, f.notified, 2)
	assert.Equal(t, []inventory.Condition{inventory.Current, inventory.Mismatch}, second)
}

func TestInventory_CountsConditions(t *testing.T) {
	f := newFixture()

	for _, test := range []struct {
		name    string
		changes steps
		want    [4]int // unknown, current, unreachable, mismatch
	}{
		{"none", nil, [4]int{}},
		{"two current", steps{view("a", inZone("a")), view("b", inZone("a"))}, [4]int{0, 2, 0, 0}},
		{"one changes", steps{view("a", inZone("b"))}, [4]int{0, 2, 0, 0}},
		{"one unreachable", steps{unreachable("a")}, [4]int{0, 1, 1, 0}},
		{"still unreachable", steps{func(f *fixture) { f.MarkUnreachable("a", "gone for good") }}, [4]int{0, 1, 1, 0}},
		{"third mismatches", steps{mismatch("c", "other")}, [4]int{0, 1, 1, 1}},
		{"fourth unreachable", steps{unreachable("d")}, [4]int{0, 1, 2, 1}},
		{"first reachable again", steps{view("a", inZone("b"))}, [4]int{0, 2, 1, 1}},
		{"all forgotten", steps{forgotten("a"), forgotten("b"), forgotten("c"), forgotten("d")}, [4]int{}},
		{"forgotten twice", steps{forgotten("a"), forgotten("z")}, [4]int{}},
	} {
		f.do(test.changes...)

		got := [4]int{f.Count(inventory.Unknown), f.Count(inventory.Current), f.Count(inventory.Unreachable), f.Count(inventory.Mismatch)}
		assert.Equal(t, test.want, got, test.name)
	}
}

func TestCondition_String(t *testing.T) {
	conditions := []inventory.Condition{inventory.Unknown, inventory.Current, inventory.Unreachable, inventory.Mismatch, 99}
	assert.Equal(t, "[Unknown Current Unreachable Mismatch Unknown]", fmt.Sprint(conditions))
}

func TestInventory_SharedUUIDOfSeveralMachines(t *testing.T) {
	const other = "11111111-2222-3333-4444-555555555555"

	a, b, c := view("a", withUUID(uuid)), view("b", withUUID(uuid)), view("c", withUUID(uuid))

	for _, test := range []struct {
		name    string
		changes steps
		want    bool
	}{
		{"no machine", nil, false},
		{"this machine only", steps{a}, false},
		{"this machine under its former name", steps{view("old", original), unreachable("old"), view("a", original)}, false},
		{"this machine, whose connection under its former name is open", steps{view("old", reached(original, "10.0.0.1")), view("a", reached(original, "10.0.0.1"))}, false},
		{"another machine only", steps{b}, true},
		{"two machines", steps{a, b}, true},
		{"other machine reports upper case", steps{view("b", withUUID("30A0BDF7-4B1A-4F0E-9F86-2A3D64A3C5EE"))}, true},
		{"other machine has another UUID", steps{a, view("b", withUUID(other))}, false},
		{"other machine changed its UUID", steps{b, view("b", withUUID(other))}, false},
		{"other machine lost its UUID", steps{b, view("b", withUUID(""))}, false},
		{"other machine replaced twice, then forgotten", steps{b, b, forgotten("b")}, false},
		{"other machine unreachable", steps{b, unreachable("b")}, true},
		{"other machine never reached", steps{unreachable("b")}, false},
		{"other machine mismatched", steps{b, mismatch("b", "other")}, false},
		{"other machine unreachable, then forgotten", steps{b, unreachable("b"), forgotten("b")}, false},
		{"one of two others forgotten", steps{b, c, forgotten("b")}, true},
		{"both others forgotten", steps{b, c, forgotten("b"), forgotten("c")}, false},
		{"this machine forgotten", steps{a, b, forgotten("a")}, true},
	} {
		assert.Equal(t, test.want, len(newFixture(test.changes...).SharedUUID(uuid, "a")) > 0, test.name)
	}
}

func TestInventory_SharedUUIDIgnoresMissingUUIDs(t *testing.T) {
	f := newFixture(view("a", withUUID("")), view("b", withUUID("")), view("c", withUUID("00000000-0000-0000-0000-000000000000")))
	assert.Empty(t, f.SharedUUID("", "a"))
}

// Run with -race. Counts and indexes agree with the entries after changes in any order.
func TestInventory_IsConsistentAfterConcurrentUse(t *testing.T) {
	const machines = 5

	inv := inventory.New(time.Now)

	var (
		group    sync.WaitGroup
		mu       sync.Mutex
		notified = map[string]bool{}
	)

	inv.Subscribe(func(nodename string) {
		inv.Get(nodename)

		mu.Lock()
		defer mu.Unlock()

		notified[nodename] = true
	})

	for first := range 8 {
		group.Go(func() { churn(inv, first, machines) })
	}

	group.Wait()

	var owners []string

	found, shared := map[inventory.Condition]int{}, false

	for i := range machines {
		name := fmt.Sprintf("worker-%d", i)
		entry := inv.Get(name)
		found[entry.Condition]++
		shared = shared || entry.Machine.UUID() == uuid

		if entry.Last.HasAddress(netip.MustParseAddr("10.0.0.1")) {
			owners = append(owners, name)
		}
	}

	for _, c := range []inventory.Condition{inventory.Current, inventory.Unreachable, inventory.Mismatch} {
		assert.Equal(t, found[c], inv.Count(c), c)
	}

	assert.Len(t, notified, machines)
	assert.Equal(t, shared, len(inv.SharedUUID(uuid, "unknown")) > 0)
	assert.ElementsMatch(t, owners, inv.Claims.ReportedBy("10.0.0.1", "unknown"))

	for i := range machines {
		inv.Forget(fmt.Sprintf("worker-%d", i))
	}

	for _, addr := range []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"} {
		assert.Empty(t, inv.Claims.ReportedBy(addr, "unknown"), "of forgotten machines")
	}
}

// churn repeatedly changes machines in every way, and modifies the lists that the inventory returns.
func churn(inv *inventory.Inventory, first, machines int) {
	for i := range 200 {
		name := fmt.Sprintf("worker-%d", (first+i)%machines)

		switch i % 4 {
		case 0:
			m := at(fmt.Sprintf("10.0.0.%d/24", 1+i%3))
			m.System.UUID = uuid
			inv.Replace(name, m)
		case 1:
			inv.MarkUnreachable(name, "gone")
		case 2:
			inv.MarkMismatch(name, "other", "no")
		case 3:
			inv.Forget(name)
		}

		inv.SharedUUID(uuid, name)
		inv.Count(inventory.Current)
		slices.Reverse(inv.Claims.ReportedBy("10.0.0.1", name))
	}
}
