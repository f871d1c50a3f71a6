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
	b := &fixture{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	b.Inventory = inventory.New(func() time.Time { return b.now })
	b.Subscribe(func(nodename string) { b.notified = append(b.notified, nodename) })

	return b
}

// takeNotified returns the notifications since the last call.
func (b *fixture) takeNotified() []string {
	notified := b.notified
	b.notified = nil

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
			func(b *fixture) { b.Replace("worker-1", inZone("a")) },
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start},
		},
		{
			"changed view",
			func(b *fixture) {
				b.Replace("worker-1", inZone("a"))

				b.now = start.Add(time.Minute)
				b.Replace("worker-1", inZone("b"))
			},
			inventory.Entry{Machine: inZone("b"), Condition: inventory.Current, ObservedAt: start.Add(time.Minute)},
		},
		{
			"confirmed view",
			func(b *fixture) {
				b.Replace("worker-1", inZone("a"))

				b.now = start.Add(time.Minute)
				b.Replace("worker-1", inZone("a"))
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start.Add(time.Minute)},
		},
		{
			"unreachable machine keeps view and time",
			func(b *fixture) {
				b.Replace("worker-1", inZone("a"))

				b.now = start.Add(time.Minute)
				b.MarkUnreachable("worker-1", "connection refused")
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Unreachable, Reason: "connection refused", ObservedAt: start},
		},
		{
			"unreachable from the start",
			func(b *fixture) { b.MarkUnreachable("worker-1", "connection refused") },
			inventory.Entry{Condition: inventory.Unreachable, Reason: "connection refused"},
		},
		{
			"reachable again",
			func(b *fixture) {
				b.MarkUnreachable("worker-1", "connection refused")
				b.Replace("worker-1", inZone("a"))
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start},
		},
		{
			"mismatch drops the view",
			func(b *fixture) {
				b.Replace("worker-1", inZone("a"))
				b.MarkMismatch("worker-1", "it is worker-2")
			},
			inventory.Entry{Condition: inventory.Mismatch, Reason: "it is worker-2"},
		},
		{
			"unreachable after mismatch has no view",
			func(b *fixture) {
				b.Replace("worker-1", inZone("a"))
				b.MarkMismatch("worker-1", "it is worker-2")
				b.MarkUnreachable("worker-1", "connection refused")
			},
			inventory.Entry{Condition: inventory.Unreachable, Reason: "connection refused"},
		},
		{
			"forgotten",
			func(b *fixture) {
				b.Replace("worker-1", inZone("a"))
				b.Forget("worker-1")
			},
			inventory.Entry{},
		},
		{
			"other nodenames changed",
			func(b *fixture) {
				b.Replace("worker-2", inZone("a"))
				b.MarkMismatch("worker-3", "it is worker-4")
			},
			inventory.Entry{},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newFixture()
			test.change(b)

			got := b.Get("worker-1")
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
		{"first view", nil, func(b *fixture) { b.Replace("worker-1", inZone("a")) }, true},
		{"first view is the zero value", nil, func(b *fixture) { b.Replace("worker-1", machine.Machine{}) }, true},
		{"same view", func(b *fixture) { b.Replace("worker-1", inZone("a")) }, func(b *fixture) { b.Replace("worker-1", inZone("a")) }, false},
		{
			"same view at a later time", func(b *fixture) { b.Replace("worker-1", inZone("a")) },
			func(b *fixture) {
				b.now = b.now.Add(time.Hour)
				b.Replace("worker-1", inZone("a"))
			}, false,
		},
		{"changed view", func(b *fixture) { b.Replace("worker-1", inZone("a")) }, func(b *fixture) { b.Replace("worker-1", inZone("b")) }, true},
		{"unreachable", func(b *fixture) { b.Replace("worker-1", inZone("a")) }, func(b *fixture) { b.MarkUnreachable("worker-1", "gone") }, true},
		{"still unreachable", func(b *fixture) { b.MarkUnreachable("worker-1", "gone") }, func(b *fixture) { b.MarkUnreachable("worker-1", "gone") }, false},
		{"unreachable for another reason", func(b *fixture) { b.MarkUnreachable("worker-1", "gone") }, func(b *fixture) { b.MarkUnreachable("worker-1", "expired") }, true},
		{"reachable again with the same view", func(b *fixture) {
			b.Replace("worker-1", inZone("a"))
			b.MarkUnreachable("worker-1", "gone")
		}, func(b *fixture) { b.Replace("worker-1", inZone("a")) }, true},
		{"mismatch", func(b *fixture) { b.Replace("worker-1", inZone("a")) }, func(b *fixture) { b.MarkMismatch("worker-1", "no") }, true},
		{"still a mismatch", func(b *fixture) { b.MarkMismatch("worker-1", "no") }, func(b *fixture) { b.MarkMismatch("worker-1", "no") }, false},
		{"forgotten", func(b *fixture) { b.Replace("worker-1", inZone("a")) }, func(b *fixture) { b.Forget("worker-1") }, true},
		{"forgotten but never known", nil, func(b *fixture) { b.Forget("worker-1") }, false},
		{"forgotten twice", func(b *fixture) { b.Replace("worker-1", inZone("a")); b.Forget("worker-1") }, func(b *fixture) { b.Forget("worker-1") }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newFixture()
			if test.before != nil {
				test.before(b)
			}

			b.takeNotified()
			test.change(b)

			var want []string
			if test.notified {
				want = []string{"worker-1"}
			}

			if got := b.takeNotified(); !slices.Equal(got, want) {
				t.Errorf("notified %v, want %v", got, want)
			}
		})
	}
}

func TestInventory_NotifiesEverySubscriberWithoutLock(t *testing.T) {
	b := newFixture()

	var second []inventory.Condition

	b.Subscribe(func(nodename string) { second = append(second, b.Get(nodename).Condition) })
	b.Replace("worker-1", inZone("a"))
	b.MarkMismatch("worker-1", "no")

	if len(b.notified) != 2 || !slices.Equal(second, []inventory.Condition{inventory.Current, inventory.Mismatch}) {
		t.Errorf("notified %v and %v", b.notified, second)
	}
}

func TestInventory_Count(t *testing.T) {
	conditions := []inventory.Condition{inventory.Unknown, inventory.Current, inventory.Unreachable, inventory.Mismatch}
	b := newFixture()

	for _, step := range []struct {
		name   string
		change func()
		want   [4]int // in the order of conditions
	}{
		{"none", func() {}, [4]int{}},
		{"two current", func() { b.Replace("a", inZone("a")); b.Replace("b", inZone("a")) }, [4]int{0, 2, 0, 0}},
		{"one changes", func() { b.Replace("a", inZone("b")) }, [4]int{0, 2, 0, 0}},
		{"one unreachable", func() { b.MarkUnreachable("a", "gone") }, [4]int{0, 1, 1, 0}},
		{"still unreachable", func() { b.MarkUnreachable("a", "gone for good") }, [4]int{0, 1, 1, 0}},
		{"third mismatches", func() { b.MarkMismatch("c", "no") }, [4]int{0, 1, 1, 1}},
		{"fourth unreachable", func() { b.MarkUnreachable("d", "gone") }, [4]int{0, 1, 2, 1}},
		{"first reachable again", func() { b.Replace("a", inZone("b")) }, [4]int{0, 2, 1, 1}},
		{"all forgotten", func() { b.Forget("a"); b.Forget("b"); b.Forget("c"); b.Forget("d") }, [4]int{}},
		{"forgotten twice", func() { b.Forget("a"); b.Forget("z") }, [4]int{}},
	} {
		step.change()

		var got [4]int
		for i, c := range conditions {
			got[i] = b.Count(c)
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
		{"this machine only", func(b *fixture) { b.Replace("a", withUUID(uuid)) }, false},
		{"another machine only", func(b *fixture) { b.Replace("b", withUUID(uuid)) }, true},
		{"two machines", func(b *fixture) { b.Replace("a", withUUID(uuid)); b.Replace("b", withUUID(uuid)) }, true},
		{"other machine reports upper case", func(b *fixture) { b.Replace("b", withUUID("30A0BDF7-4B1A-4F0E-9F86-2A3D64A3C5EE")) }, true},
		{"other machine has another UUID", func(b *fixture) { b.Replace("a", withUUID(uuid)); b.Replace("b", withUUID(other)) }, false},
		{"other machine changed its UUID", func(b *fixture) { b.Replace("b", withUUID(uuid)); b.Replace("b", withUUID(other)) }, false},
		{"other machine lost its UUID", func(b *fixture) { b.Replace("b", withUUID(uuid)); b.Replace("b", withUUID("")) }, false},
		{"other machine replaced twice, then forgotten", func(b *fixture) { b.Replace("b", withUUID(uuid)); b.Replace("b", withUUID(uuid)); b.Forget("b") }, false},
		{"other machine unreachable", func(b *fixture) { b.Replace("b", withUUID(uuid)); b.MarkUnreachable("b", "gone") }, true},
		{"other machine never reached", func(b *fixture) { b.MarkUnreachable("b", "gone") }, false},
		{"other machine mismatched", func(b *fixture) { b.Replace("b", withUUID(uuid)); b.MarkMismatch("b", "no") }, false},
		{"other machine unreachable, then forgotten", func(b *fixture) { b.Replace("b", withUUID(uuid)); b.MarkUnreachable("b", "gone"); b.Forget("b") }, false},
		{"one of two others forgotten", func(b *fixture) { b.Replace("b", withUUID(uuid)); b.Replace("c", withUUID(uuid)); b.Forget("b") }, true},
		{"both others forgotten", func(b *fixture) {
			b.Replace("b", withUUID(uuid))
			b.Replace("c", withUUID(uuid))
			b.Forget("b")
			b.Forget("c")
		}, false},
		{"this machine forgotten", func(b *fixture) { b.Replace("a", withUUID(uuid)); b.Replace("b", withUUID(uuid)); b.Forget("a") }, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newFixture()
			test.change(b)

			if got := b.SharedUUID(uuid, "a"); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestInventory_SharedUUIDIgnoresMissingUUIDs(t *testing.T) {
	b := newFixture()
	b.Replace("a", withUUID(""))
	b.Replace("b", withUUID(""))
	b.Replace("c", withUUID("00000000-0000-0000-0000-000000000000"))

	if b.SharedUUID("", "a") {
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
			inv.MarkMismatch(name, "no")
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
