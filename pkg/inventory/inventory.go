// Package inventory holds the last view of every Talos machine, by the name of its Node.
//
// It is written by the reflector and read by the controllers. It keeps what it was told and never asks anyone.
package inventory

import (
	"net/netip"
	"sync"
	"time"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Condition says how far an Entry can be relied on.
type Condition int

const (
	// Unknown: nobody has tried to reach the machine yet. The zero value.
	Unknown Condition = iota
	// Current: the machine is being watched.
	Current
	// Unreachable: the machine does not answer; the last view, if there is one, is kept.
	Unreachable
	// Mismatch: what answers at the Node's address is another machine. There is no view.
	Mismatch
)

// String is the condition's name as events and metrics show it.
func (c Condition) String() string {
	switch c {
	case Current:
		return "Current"
	case Unreachable:
		return "Unreachable"
	case Mismatch:
		return "Mismatch"
	default:
		return "Unknown"
	}
}

// Entry is what is known of one nodename's machine.
type Entry struct {
	// Machine is the last view; the zero value if ObservedAt is zero.
	Machine   machine.Machine
	Condition Condition
	// Reason says why the condition is not Current, for people.
	Reason string
	// ObservedAt is when Machine was last known to be true; zero means never.
	ObservedAt time.Time
}

// Inventory is safe for concurrent use. Use New.
type Inventory struct {
	now func() time.Time

	mu       sync.RWMutex
	entries  map[string]Entry
	counts   map[Condition]int
	byUUID   map[string]map[string]struct{} // SMBIOS UUID → nodenames
	handlers []func(nodename string)
	// claimants are the nodenames by what they claim. Nearly always there is one.
	claimants map[string][]string
	// platforms are the nodenames by the addresses that only their platforms' metadata knows.
	platforms map[netip.Addr][]string
}

// New makes an empty Inventory; now is its clock.
func New(now func() time.Time) *Inventory {
	return &Inventory{
		now:       now,
		entries:   map[string]Entry{},
		counts:    map[Condition]int{},
		byUUID:    map[string]map[string]struct{}{},
		claimants: map[string][]string{},
		platforms: map[netip.Addr][]string{},
	}
}

// Subscribe has handler called with the nodename after every change of its entry, and of the addresses that it shares. It is called
// without locks held, on the writer's goroutine, so it must not block. Subscribe before the first write.
func (i *Inventory) Subscribe(handler func(nodename string)) {
	i.mu.Lock()
	defer i.mu.Unlock()

	i.handlers = append(i.handlers, handler)
}

// Get returns the entry of nodename; the zero Entry if there is none.
func (i *Inventory) Get(nodename string) Entry {
	i.mu.RLock()
	defer i.mu.RUnlock()

	return i.entries[nodename]
}

// Count returns how many machines are in the given condition.
func (i *Inventory) Count(c Condition) int {
	i.mu.RLock()
	defer i.mu.RUnlock()

	return i.counts[c]
}

// SharedUUID tells whether another machine than nodename's has the SMBIOS UUID too.
func (i *Inventory) SharedUUID(uuid, nodename string) bool {
	i.mu.RLock()
	defer i.mu.RUnlock()

	for holder := range i.byUUID[uuid] {
		if holder != nodename {
			return true
		}
	}

	return false
}

// Replace makes m the current view of nodename's machine. Handlers hear of it only if something changed.
func (i *Inventory) Replace(nodename string, m machine.Machine) {
	i.update(nodename, func(e *Entry) {
		*e = Entry{Machine: m, Condition: Current, ObservedAt: i.now()}
	})
}

// MarkUnreachable keeps the last view of nodename's machine and says why it can no longer be renewed.
func (i *Inventory) MarkUnreachable(nodename, reason string) {
	i.update(nodename, func(e *Entry) { e.Condition, e.Reason = Unreachable, reason })
}

// MarkMismatch drops the view of nodename's machine: what answers there is another machine.
func (i *Inventory) MarkMismatch(nodename, reason string) {
	i.update(nodename, func(e *Entry) { *e = Entry{Condition: Mismatch, Reason: reason} })
}

// Forget removes nodename altogether.
func (i *Inventory) Forget(nodename string) {
	i.mu.Lock()
	old, known := i.entries[nodename]
	delete(i.entries, nodename)

	var concerned []string

	if known {
		i.counts[old.Condition]--
		i.unindex(nodename, old.Machine.UUID())
		i.reclaim(nodename, claims(old.Machine), nil)
		concerned = append(i.share(nodename, platformAddresses(old.Machine), nil), nodename)
	}
	i.mu.Unlock()

	i.notify(concerned)
}

func (i *Inventory) update(nodename string, change func(*Entry)) {
	i.mu.Lock()

	old, known := i.entries[nodename]
	entry := old
	change(&entry)
	i.entries[nodename] = entry

	if known {
		i.counts[old.Condition]--
	}

	i.counts[entry.Condition]++
	i.unindex(nodename, old.Machine.UUID())
	i.index(nodename, entry.Machine.UUID())

	var concerned []string

	sameMachine := old.Machine.Equal(entry.Machine)
	if !sameMachine {
		i.reclaim(nodename, claims(old.Machine), claims(entry.Machine))
		concerned = i.share(nodename, platformAddresses(old.Machine), platformAddresses(entry.Machine))
	}

	if !sameMachine || old.Condition != entry.Condition || old.Reason != entry.Reason {
		concerned = append(concerned, nodename)
	}

	i.mu.Unlock()

	i.notify(concerned)
}

func (i *Inventory) index(nodename, uuid string) {
	if uuid == "" {
		return
	}

	if i.byUUID[uuid] == nil {
		i.byUUID[uuid] = map[string]struct{}{}
	}

	i.byUUID[uuid][nodename] = struct{}{}
}

func (i *Inventory) unindex(nodename, uuid string) {
	delete(i.byUUID[uuid], nodename)

	if len(i.byUUID[uuid]) == 0 {
		delete(i.byUUID, uuid)
	}
}

func (i *Inventory) notify(nodenames []string) {
	i.mu.RLock()
	handlers := i.handlers
	i.mu.RUnlock()

	for _, nodename := range nodenames {
		for _, handler := range handlers {
			handler(nodename)
		}
	}
}
