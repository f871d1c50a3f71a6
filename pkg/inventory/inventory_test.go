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

// bench is an inventory with a clock that stands still, and everything its subscriber heard.
type bench struct {
	*inventory.Inventory
	now   time.Time
	heard []string
}

func newBench() *bench {
	b := &bench{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	b.Inventory = inventory.New(func() time.Time { return b.now })
	b.Subscribe(func(nodename string) { b.heard = append(b.heard, nodename) })

	return b
}

// takeHeard returns what was heard since the last time.
func (b *bench) takeHeard() []string {
	heard := b.heard
	b.heard = nil

	return heard
}

func inZone(zone string) machine.Machine {
	return machine.Machine{Nodename: "worker-1", Platform: runtime.PlatformMetadataSpec{Platform: "metal", Zone: zone}}
}

func withUUID(uuid string) machine.Machine {
	return machine.Machine{System: hardware.SystemInformationSpec{UUID: uuid}}
}

func TestEntryOfAMachine(t *testing.T) {
	start := newBench().now

	for _, test := range []struct {
		rule   string
		change func(*bench)
		want   inventory.Entry
	}{
		{"is zero for one that nobody knows", func(*bench) {}, inventory.Entry{}},
		{
			"is current with its view",
			func(b *bench) { b.Replace("worker-1", inZone("a")) },
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start},
		},
		{
			"has the last view",
			func(b *bench) {
				b.Replace("worker-1", inZone("a"))

				b.now = start.Add(time.Minute)
				b.Replace("worker-1", inZone("b"))
			},
			inventory.Entry{Machine: inZone("b"), Condition: inventory.Current, ObservedAt: start.Add(time.Minute)},
		},
		{
			"is observed again though nothing changed",
			func(b *bench) {
				b.Replace("worker-1", inZone("a"))

				b.now = start.Add(time.Minute)
				b.Replace("worker-1", inZone("a"))
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start.Add(time.Minute)},
		},
		{
			"keeps its view and the time of it while the machine is unreachable",
			func(b *bench) {
				b.Replace("worker-1", inZone("a"))

				b.now = start.Add(time.Minute)
				b.MarkUnreachable("worker-1", "connection refused")
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Unreachable, Reason: "connection refused", ObservedAt: start},
		},
		{
			"has no view of a machine that was never reached",
			func(b *bench) { b.MarkUnreachable("worker-1", "connection refused") },
			inventory.Entry{Condition: inventory.Unreachable, Reason: "connection refused"},
		},
		{
			"is current again, without a reason, once it answers",
			func(b *bench) {
				b.MarkUnreachable("worker-1", "connection refused")
				b.Replace("worker-1", inZone("a"))
			},
			inventory.Entry{Machine: inZone("a"), Condition: inventory.Current, ObservedAt: start},
		},
		{
			"loses its view if another machine answers",
			func(b *bench) {
				b.Replace("worker-1", inZone("a"))
				b.MarkMismatch("worker-1", "it is worker-2")
			},
			inventory.Entry{Condition: inventory.Mismatch, Reason: "it is worker-2"},
		},
		{
			"does not get the view back when that one is unreachable",
			func(b *bench) {
				b.Replace("worker-1", inZone("a"))
				b.MarkMismatch("worker-1", "it is worker-2")
				b.MarkUnreachable("worker-1", "connection refused")
			},
			inventory.Entry{Condition: inventory.Unreachable, Reason: "connection refused"},
		},
		{
			"is zero again once forgotten",
			func(b *bench) {
				b.Replace("worker-1", inZone("a"))
				b.Forget("worker-1")
			},
			inventory.Entry{},
		},
		{
			"is its own",
			func(b *bench) {
				b.Replace("worker-2", inZone("a"))
				b.MarkMismatch("worker-3", "it is worker-4")
			},
			inventory.Entry{},
		},
	} {
		t.Run(test.rule, func(t *testing.T) {
			b := newBench()
			test.change(b)

			got := b.Get("worker-1")
			if !got.Machine.Equal(test.want.Machine) || got.Condition != test.want.Condition || got.Reason != test.want.Reason || !got.ObservedAt.Equal(test.want.ObservedAt) {
				t.Errorf("got  %+v\nwant %+v", got, test.want)
			}
		})
	}
}

func TestSubscribersHearOfChangesAndOfNothingElse(t *testing.T) {
	for _, test := range []struct {
		rule           string
		before, change func(*bench)
		heard          bool
	}{
		{"a machine that answers for the first time", nil, func(b *bench) { b.Replace("worker-1", inZone("a")) }, true},
		{"even one that says nothing", nil, func(b *bench) { b.Replace("worker-1", machine.Machine{}) }, true},
		{"the same view again", func(b *bench) { b.Replace("worker-1", inZone("a")) }, func(b *bench) { b.Replace("worker-1", inZone("a")) }, false},
		{
			"the same view later", func(b *bench) { b.Replace("worker-1", inZone("a")) },
			func(b *bench) {
				b.now = b.now.Add(time.Hour)
				b.Replace("worker-1", inZone("a"))
			}, false,
		},
		{"another view", func(b *bench) { b.Replace("worker-1", inZone("a")) }, func(b *bench) { b.Replace("worker-1", inZone("b")) }, true},
		{"a machine that stops answering", func(b *bench) { b.Replace("worker-1", inZone("a")) }, func(b *bench) { b.MarkUnreachable("worker-1", "gone") }, true},
		{"one that still does not", func(b *bench) { b.MarkUnreachable("worker-1", "gone") }, func(b *bench) { b.MarkUnreachable("worker-1", "gone") }, false},
		{"another reason", func(b *bench) { b.MarkUnreachable("worker-1", "gone") }, func(b *bench) { b.MarkUnreachable("worker-1", "expired") }, true},
		{"one that answers again with what it said before", func(b *bench) {
			b.Replace("worker-1", inZone("a"))
			b.MarkUnreachable("worker-1", "gone")
			b.heard = nil
		}, func(b *bench) { b.Replace("worker-1", inZone("a")) }, true},
		{"another machine", func(b *bench) { b.Replace("worker-1", inZone("a")) }, func(b *bench) { b.MarkMismatch("worker-1", "no") }, true},
		{"still another machine", func(b *bench) { b.MarkMismatch("worker-1", "no") }, func(b *bench) { b.MarkMismatch("worker-1", "no") }, false},
		{"a machine that is forgotten", func(b *bench) { b.Replace("worker-1", inZone("a")) }, func(b *bench) { b.Forget("worker-1") }, true},
		{"one that was not known", nil, func(b *bench) { b.Forget("worker-1") }, false},
		{"one that was forgotten before", func(b *bench) { b.Replace("worker-1", inZone("a")); b.Forget("worker-1") }, func(b *bench) { b.Forget("worker-1") }, false},
	} {
		t.Run(test.rule, func(t *testing.T) {
			b := newBench()
			if test.before != nil {
				test.before(b)
			}

			b.takeHeard()
			test.change(b)

			var want []string
			if test.heard {
				want = []string{"worker-1"}
			}

			if got := b.takeHeard(); !slices.Equal(got, want) {
				t.Errorf("heard %v, want %v", got, want)
			}
		})
	}
}

func TestEverySubscriberHearsAndMayAsk(t *testing.T) {
	b := newBench()

	var second []inventory.Condition

	b.Subscribe(func(nodename string) { second = append(second, b.Get(nodename).Condition) })
	b.Replace("worker-1", inZone("a"))
	b.MarkMismatch("worker-1", "no")

	if len(b.heard) != 2 || !slices.Equal(second, []inventory.Condition{inventory.Current, inventory.Mismatch}) {
		t.Errorf("heard %v and %v", b.heard, second)
	}
}

func TestMachinesAreCountedByCondition(t *testing.T) {
	conditions := []inventory.Condition{inventory.Unknown, inventory.Current, inventory.Unreachable, inventory.Mismatch}
	b := newBench()

	for _, step := range []struct {
		rule   string
		change func()
		want   [4]int // in the order of conditions
	}{
		{"none", func() {}, [4]int{}},
		{"two answer", func() { b.Replace("a", inZone("a")); b.Replace("b", inZone("a")) }, [4]int{0, 2, 0, 0}},
		{"one answers again", func() { b.Replace("a", inZone("b")) }, [4]int{0, 2, 0, 0}},
		{"one stops answering", func() { b.MarkUnreachable("a", "gone") }, [4]int{0, 1, 1, 0}},
		{"and still does not answer", func() { b.MarkUnreachable("a", "gone for good") }, [4]int{0, 1, 1, 0}},
		{"a third is another machine", func() { b.MarkMismatch("c", "no") }, [4]int{0, 1, 1, 1}},
		{"a fourth does not answer", func() { b.MarkUnreachable("d", "gone") }, [4]int{0, 1, 2, 1}},
		{"the first is back", func() { b.Replace("a", inZone("b")) }, [4]int{0, 2, 1, 1}},
		{"all are forgotten", func() { b.Forget("a"); b.Forget("b"); b.Forget("c"); b.Forget("d") }, [4]int{}},
		{"and once more", func() { b.Forget("a"); b.Forget("z") }, [4]int{}},
	} {
		step.change()

		var got [4]int
		for i, c := range conditions {
			got[i] = b.Count(c)
		}

		if got != step.want {
			t.Errorf("%s: got %v, want %v", step.rule, got, step.want)
		}
	}
}

func TestConditionsHaveNames(t *testing.T) {
	for condition, want := range map[inventory.Condition]string{
		inventory.Unknown: "Unknown", inventory.Current: "Current", inventory.Unreachable: "Unreachable", inventory.Mismatch: "Mismatch", inventory.Condition(99): "Unknown",
	} {
		if got := condition.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestSharedUUID(t *testing.T) {
	const other = "11111111-2222-3333-4444-555555555555"

	for _, test := range []struct {
		rule   string
		change func(*bench)
		want   bool
	}{
		{"nobody has it", func(*bench) {}, false},
		{"only the machine itself has it", func(b *bench) { b.Replace("a", withUUID(uuid)) }, false},
		{"only another has it", func(b *bench) { b.Replace("b", withUUID(uuid)) }, true},
		{"two have it", func(b *bench) { b.Replace("a", withUUID(uuid)); b.Replace("b", withUUID(uuid)) }, true},
		{"the other has it in upper case", func(b *bench) { b.Replace("b", withUUID("30A0BDF7-4B1A-4F0E-9F86-2A3D64A3C5EE")) }, true},
		{"the other has another", func(b *bench) { b.Replace("a", withUUID(uuid)); b.Replace("b", withUUID(other)) }, false},
		{"the other had it and has another now", func(b *bench) { b.Replace("b", withUUID(uuid)); b.Replace("b", withUUID(other)) }, false},
		{"the other had it and has none now", func(b *bench) { b.Replace("b", withUUID(uuid)); b.Replace("b", withUUID("")) }, false},
		{"the other said it twice and is forgotten", func(b *bench) { b.Replace("b", withUUID(uuid)); b.Replace("b", withUUID(uuid)); b.Forget("b") }, false},
		{"the other is unreachable and keeps it", func(b *bench) { b.Replace("b", withUUID(uuid)); b.MarkUnreachable("b", "gone") }, true},
		{"the other was never reached", func(b *bench) { b.MarkUnreachable("b", "gone") }, false},
		{"the other turns out to be another machine", func(b *bench) { b.Replace("b", withUUID(uuid)); b.MarkMismatch("b", "no") }, false},
		{"the other was unreachable and is forgotten", func(b *bench) { b.Replace("b", withUUID(uuid)); b.MarkUnreachable("b", "gone"); b.Forget("b") }, false},
		{"one of two others is forgotten", func(b *bench) { b.Replace("b", withUUID(uuid)); b.Replace("c", withUUID(uuid)); b.Forget("b") }, true},
		{"both others are forgotten", func(b *bench) {
			b.Replace("b", withUUID(uuid))
			b.Replace("c", withUUID(uuid))
			b.Forget("b")
			b.Forget("c")
		}, false},
		{"forgetting the machine itself does not touch the other", func(b *bench) { b.Replace("a", withUUID(uuid)); b.Replace("b", withUUID(uuid)); b.Forget("a") }, true},
	} {
		t.Run(test.rule, func(t *testing.T) {
			b := newBench()
			test.change(b)

			if got := b.SharedUUID(uuid, "a"); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestNoUUIDIsSharedWithNobody(t *testing.T) {
	b := newBench()
	b.Replace("a", withUUID(""))
	b.Replace("b", withUUID(""))
	b.Replace("c", withUUID("00000000-0000-0000-0000-000000000000"))

	if b.SharedUUID("", "a") {
		t.Error("machines without a UUID share one")
	}
}

// Run with -race. Whatever the order, the books agree with the entries in the end.
func TestManyMayWriteReadAndSubscribeAtOnce(t *testing.T) {
	const machines = 5

	inv := inventory.New(time.Now)

	var (
		group sync.WaitGroup
		mu    sync.Mutex
		heard = map[string]bool{}
	)

	inv.Subscribe(func(nodename string) {
		inv.Get(nodename)

		mu.Lock()
		defer mu.Unlock()

		heard[nodename] = true
	})

	for first := range 8 {
		group.Go(func() { churn(inv, first, machines) })
	}

	group.Wait()

	if len(heard) != machines {
		t.Errorf("heard of %v, want %d", heard, machines)
	}

	checkBooks(t, inv, machines)
}

// churn does everything to every machine, many times.
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

func checkBooks(t *testing.T, inv *inventory.Inventory, machines int) {
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
			t.Errorf("%s: %d counted, %d found", c, got, found[c])
		}
	}

	if got := inv.SharedUUID(uuid, "none of them"); got != shared {
		t.Errorf("shared: got %v, want %v", got, shared)
	}
}
