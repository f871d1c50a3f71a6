package inventory_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

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

func newFixture() *fixture {
	f := &fixture{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	f.Inventory = inventory.New(func() time.Time { return f.now })
	f.Subscribe(func(nodename string) { f.notified = append(f.notified, nodename) })

	return f
}

// takeNotified returns the notifications since the last call.
func (f *fixture) takeNotified() []string {
	notified := f.notified
	f.notified = nil

	return notified
}

func inZone(zone string) machine.Machine {
	return machine.Machine{Nodename: "worker-1", Platform: runtime.PlatformMetadataSpec{Platform: "metal", Zone: zone}}
}

func withUUID(uuid string) machine.Machine {
	return machine.Machine{System: hardware.SystemInformationSpec{UUID: uuid}}
}

func TestInventory_Get(t *testing.T) {
	start := newFixture().now

	for _, test := range []struct {
		name   string
		change func(*fixture)
		want   inventory.Entry
	}{
		{"unknown nodename", func(*fixture) {}, inventory.Entry{}},
		{
			"first view",
			func(f *fixture) { f.Replace("worker-1", inZone("a")) },
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start},
		},
		{
			"changed view",
			func(f *fixture) {
				f.Replace("worker-1", inZone("a"))

				f.now = start.Add(time.Minute)
				f.Replace("worker-1", inZone("b"))
			},
			inventory.Entry{Machine: inZone("b"), Condition: inventory.Current, ObservedAt: start.Add(time.Minute)},
		},
		{
			"confirmed view",
			func(f *fixture) {
				f.Replace("worker-1", inZone("a"))

				f.now = start.Add(time.Minute)
				f.Replace("worker-1", inZone("a"))
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start.Add(time.Minute)},
		},
		{
			"unreachable machine keeps view and time",
			func(f *fixture) {
				f.Replace("worker-1", inZone("a"))

				f.now = start.Add(time.Minute)
				f.MarkUnreachable("worker-1", "connection refused")
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Unreachable, Reason: "connection refused", ObservedAt: start},
		},
		{
			"unreachable from the start",
			func(f *fixture) { f.MarkUnreachable("worker-1", "connection refused") },
			inventory.Entry{Condition: inventory.Unreachable, Reason: "connection refused"},
		},
		{
			"reachable again",
			func(f *fixture) {
				f.MarkUnreachable("worker-1", "connection refused")
				f.Replace("worker-1", inZone("a"))
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start},
		},
		{
			"mismatch drops the view",
			func(f *fixture) {
				f.Replace("worker-1", inZone("a"))
				f.MarkMismatch("worker-1", "other", "it is worker-2")
			},
			inventory.Entry{Condition: inventory.Mismatch, Reason: "it is worker-2"},
		},
		{
			"unreachable after mismatch has no view",
			func(f *fixture) {
				f.Replace("worker-1", inZone("a"))
				f.MarkMismatch("worker-1", "other", "it is worker-2")
				f.MarkUnreachable("worker-1", "connection refused")
			},
			inventory.Entry{Condition: inventory.Unreachable, Reason: "connection refused"},
		},
		{
			"forgotten",
			func(f *fixture) {
				f.Replace("worker-1", inZone("a"))
				f.Forget("worker-1")
			},
			inventory.Entry{},
		},
		{
			"other nodenames changed",
			func(f *fixture) {
				f.Replace("worker-2", inZone("a"))
				f.MarkMismatch("worker-3", "other", "it is worker-4")
			},
			inventory.Entry{},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFixture()
			test.change(f)

			got := f.Get("worker-1")
			if !got.Machine.Equal(test.want.Machine) || got.Condition != test.want.Condition || got.Reason != test.want.Reason || !got.ObservedAt.Equal(test.want.ObservedAt) {
				t.Errorf("got  %+v\nwant %+v", got, test.want)
			}
		})
	}
}

func TestInventory_NotifiesOnChangeOnly(t *testing.T) {
	for _, test := range []struct {
		name           string
		before, change func(*fixture)
		notified       bool
	}{
		{"first view", nil, func(f *fixture) { f.Replace("worker-1", inZone("a")) }, true},
		{"first view is the zero value", nil, func(f *fixture) { f.Replace("worker-1", machine.Machine{}) }, true},
		{"same view", func(f *fixture) { f.Replace("worker-1", inZone("a")) }, func(f *fixture) { f.Replace("worker-1", inZone("a")) }, false},
		{
			"same view at a later time", func(f *fixture) { f.Replace("worker-1", inZone("a")) },
			func(f *fixture) {
				f.now = f.now.Add(time.Hour)
				f.Replace("worker-1", inZone("a"))
			}, false,
		},
		{"changed view", func(f *fixture) { f.Replace("worker-1", inZone("a")) }, func(f *fixture) { f.Replace("worker-1", inZone("b")) }, true},
		{"unreachable", func(f *fixture) { f.Replace("worker-1", inZone("a")) }, func(f *fixture) { f.MarkUnreachable("worker-1", "gone") }, true},
		{"still unreachable", func(f *fixture) { f.MarkUnreachable("worker-1", "gone") }, func(f *fixture) { f.MarkUnreachable("worker-1", "gone") }, false},
		{"unreachable for another reason", func(f *fixture) { f.MarkUnreachable("worker-1", "gone") }, func(f *fixture) { f.MarkUnreachable("worker-1", "expired") }, true},
		{"reachable again with the same view", func(f *fixture) {
			f.Replace("worker-1", inZone("a"))
			f.MarkUnreachable("worker-1", "gone")
		}, func(f *fixture) { f.Replace("worker-1", inZone("a")) }, true},
		{"mismatch", func(f *fixture) { f.Replace("worker-1", inZone("a")) }, func(f *fixture) { f.MarkMismatch("worker-1", "other", "no") }, true},
		{"still a mismatch", func(f *fixture) { f.MarkMismatch("worker-1", "other", "no") }, func(f *fixture) { f.MarkMismatch("worker-1", "other", "no") }, false},
		{"forgotten", func(f *fixture) { f.Replace("worker-1", inZone("a")) }, func(f *fixture) { f.Forget("worker-1") }, true},
		{"forgotten but never known", nil, func(f *fixture) { f.Forget("worker-1") }, false},
		{"forgotten twice", func(f *fixture) { f.Replace("worker-1", inZone("a")); f.Forget("worker-1") }, func(f *fixture) { f.Forget("worker-1") }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFixture()
			if test.before != nil {
				test.before(f)
			}

			f.takeNotified()
			test.change(f)

			var want []string
			if test.notified {
				want = []string{"worker-1"}
			}

			if got := f.takeNotified(); !slices.Equal(got, want) {
				t.Errorf("notified %v, want %v", got, want)
			}
		})
	}
}

func TestInventory_NotifiesEverySubscriberWithoutLock(t *testing.T) {
	f := newFixture()

	var second []inventory.Condition

	f.Subscribe(func(nodename string) { second = append(second, f.Get(nodename).Condition) })
	f.Replace("worker-1", inZone("a"))
	f.MarkMismatch("worker-1", "other", "no")

	if len(f.notified) != 2 || !slices.Equal(second, []inventory.Condition{inventory.Current, inventory.Mismatch}) {
		t.Errorf("notified %v and %v", f.notified, second)
	}
}

func TestInventory_Count(t *testing.T) {
	conditions := []inventory.Condition{inventory.Unknown, inventory.Current, inventory.Unreachable, inventory.Mismatch}
	f := newFixture()

	for _, step := range []struct {
		name   string
		change func()
		want   [4]int // in the order of conditions
	}{
		{"none", func() {}, [4]int{}},
		{"two current", func() { f.Replace("a", inZone("a")); f.Replace("b", inZone("a")) }, [4]int{0, 2, 0, 0}},
		{"one changes", func() { f.Replace("a", inZone("b")) }, [4]int{0, 2, 0, 0}},
		{"one unreachable", func() { f.MarkUnreachable("a", "gone") }, [4]int{0, 1, 1, 0}},
		{"still unreachable", func() { f.MarkUnreachable("a", "gone for good") }, [4]int{0, 1, 1, 0}},
		{"third mismatches", func() { f.MarkMismatch("c", "other", "no") }, [4]int{0, 1, 1, 1}},
		{"fourth unreachable", func() { f.MarkUnreachable("d", "gone") }, [4]int{0, 1, 2, 1}},
		{"first reachable again", func() { f.Replace("a", inZone("b")) }, [4]int{0, 2, 1, 1}},
		{"all forgotten", func() { f.Forget("a"); f.Forget("b"); f.Forget("c"); f.Forget("d") }, [4]int{}},
		{"forgotten twice", func() { f.Forget("a"); f.Forget("z") }, [4]int{}},
	} {
		step.change()

		var got [4]int
		for i, c := range conditions {
			got[i] = f.Count(c)
		}

		if got != step.want {
			t.Errorf("%s: got %v, want %v", step.name, got, step.want)
		}
	}
}

func TestCondition_String(t *testing.T) {
	for condition, want := range map[inventory.Condition]string{
		inventory.Unknown: "Unknown", inventory.Current: "Current", inventory.Unreachable: "Unreachable", inventory.Mismatch: "Mismatch", inventory.Condition(99): "Unknown",
	} {
		if got := condition.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestInventory_SharedUUID(t *testing.T) {
	const other = "11111111-2222-3333-4444-555555555555"

	for _, test := range []struct {
		name   string
		change func(*fixture)
		want   bool
	}{
		{"no machine", func(*fixture) {}, false},
		{"this machine only", func(f *fixture) { f.Replace("a", withUUID(uuid)) }, false},
		{"another machine only", func(f *fixture) { f.Replace("b", withUUID(uuid)) }, true},
		{"two machines", func(f *fixture) { f.Replace("a", withUUID(uuid)); f.Replace("b", withUUID(uuid)) }, true},
		{"other machine reports upper case", func(f *fixture) { f.Replace("b", withUUID("30A0BDF7-4B1A-4F0E-9F86-2A3D64A3C5EE")) }, true},
		{"other machine has another UUID", func(f *fixture) { f.Replace("a", withUUID(uuid)); f.Replace("b", withUUID(other)) }, false},
		{"other machine changed its UUID", func(f *fixture) { f.Replace("b", withUUID(uuid)); f.Replace("b", withUUID(other)) }, false},
		{"other machine lost its UUID", func(f *fixture) { f.Replace("b", withUUID(uuid)); f.Replace("b", withUUID("")) }, false},
		{"other machine replaced twice, then forgotten", func(f *fixture) { f.Replace("b", withUUID(uuid)); f.Replace("b", withUUID(uuid)); f.Forget("b") }, false},
		{"other machine unreachable", func(f *fixture) { f.Replace("b", withUUID(uuid)); f.MarkUnreachable("b", "gone") }, true},
		{"other machine never reached", func(f *fixture) { f.MarkUnreachable("b", "gone") }, false},
		{"other machine mismatched", func(f *fixture) { f.Replace("b", withUUID(uuid)); f.MarkMismatch("b", "other", "no") }, false},
		{"other machine unreachable, then forgotten", func(f *fixture) { f.Replace("b", withUUID(uuid)); f.MarkUnreachable("b", "gone"); f.Forget("b") }, false},
		{"one of two others forgotten", func(f *fixture) { f.Replace("b", withUUID(uuid)); f.Replace("c", withUUID(uuid)); f.Forget("b") }, true},
		{"both others forgotten", func(f *fixture) {
			f.Replace("b", withUUID(uuid))
			f.Replace("c", withUUID(uuid))
			f.Forget("b")
			f.Forget("c")
		}, false},
		{"this machine forgotten", func(f *fixture) { f.Replace("a", withUUID(uuid)); f.Replace("b", withUUID(uuid)); f.Forget("a") }, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFixture()
			test.change(f)

			if got := f.SharedUUID(uuid, "a"); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestInventory_SharedUUIDIgnoresMissingUUIDs(t *testing.T) {
	f := newFixture()
	f.Replace("a", withUUID(""))
	f.Replace("b", withUUID(""))
	f.Replace("c", withUUID("00000000-0000-0000-0000-000000000000"))

	if f.SharedUUID("", "a") {
		t.Error("machines without a UUID share one")
	}
}

// Run with -race. Counts and indexes agree with the entries in the end, whatever the order of changes.
func TestInventory_ConcurrentUse(t *testing.T) {
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

	if len(notified) != machines {
		t.Errorf("notified of %v, want %d nodenames", notified, machines)
	}

	checkConsistency(t, inv, machines)
}

// churn changes every machine in every way, many times.
func churn(inv *inventory.Inventory, first, machines int) {
	for i := range 200 {
		name := fmt.Sprintf("worker-%d", (first+i)%machines)

		switch i % 4 {
		case 0:
			inv.Replace(name, withUUID(uuid))
		case 1:
			inv.MarkUnreachable(name, "gone")
		case 2:
			inv.MarkMismatch(name, "other", "no")
		case 3:
			inv.Forget(name)
		}

		inv.SharedUUID(uuid, name)
		inv.Count(inventory.Current)
	}
}

func checkConsistency(t *testing.T, inv *inventory.Inventory, machines int) {
	t.Helper()

	found := map[inventory.Condition]int{}
	shared := false

	for i := range machines {
		entry := inv.Get(fmt.Sprintf("worker-%d", i))
		found[entry.Condition]++
		shared = shared || entry.Machine.UUID() == uuid
	}

	for _, c := range []inventory.Condition{inventory.Current, inventory.Unreachable, inventory.Mismatch} {
		if got := inv.Count(c); got != found[c] {
			t.Errorf("%s: Count returns %d, want %d", c, got, found[c])
		}
	}

	if got := inv.SharedUUID(uuid, "unknown"); got != shared {
		t.Errorf("shared: got %v, want %v", got, shared)
	}
}
