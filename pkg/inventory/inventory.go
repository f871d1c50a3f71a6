// Package inventory holds the last view of every Talos machine, by the name of its Node.
//
// The reflector writes it and the controllers read it. It never contacts a machine or the API server.
package inventory

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

// Condition says whether an Entry is up to date.
type Condition int

const (
	// Unknown means that the machine has not been contacted yet. The zero value.
	Unknown Condition = iota
	// Current means that the machine has responded, and that no attempt to connect has failed since.
	Current
	// Unreachable means that the machine does not respond. Its last view, if any, is kept.
	Unreachable
	// Mismatch means that the machine at the Node's address reports a different nodename. Entry.Machine is empty.
	Mismatch
)

// String returns the condition's name as Events and metrics show it.
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

// Entry is what is known about the machine of one Node. The zero value means that nothing is known.
type Entry struct {
	// Machine is the last view; the zero value if ObservedAt is zero.
	Machine   machine.Machine
	Condition Condition
	// Reason explains to people why the condition is not Current.
	Reason string
	// ObservedAt is when Machine was set; zero means that there is no view.
	ObservedAt time.Time
	// UnresponsiveSince is when the machine stopped responding under the Node's name; zero if the condition is Current, or if
	// the machine has never responded.
	UnresponsiveSince time.Time
	// Last is the last view that was read under the Node's name. MarkUnreachable and MarkMismatch keep it.
	Last machine.Machine
	// Responding is the nodename of the machine that responds at the Node's address, if the condition is Mismatch.
	Responding string

	before  machine.Identity // of the machine that responded before Last; zero if there was none
	rival   netip.Addr       // see Rivals
	rivalAt time.Time        // when the rival was replaced
}

// Inventory is safe for concurrent use. Use New.
type Inventory struct {
	// Claims contains what the machines report: that of Entry.Last.
	Claims *claims.Claims

	now func() time.Time

	mu       sync.RWMutex
	entries  map[string]Entry
	counts   map[Condition]int // of entries
	handlers []func(nodename string)

	uuids     index[string]     // SMBIOS UUIDs
	platforms index[netip.Addr] // addresses that only the platform's metadata knows

	identities index[identifier]        // of Entry.Last
	ambiguous  map[identifier]time.Time // of several current machines at the same time; since when no entry has it, or zero
}

// New returns an empty Inventory that reads the time from now.
func New(now func() time.Time) *Inventory {
	return &Inventory{
		Claims: claims.New(now),
		now:    now, entries: map[string]Entry{}, counts: map[Condition]int{},
		uuids: index[string]{}, platforms: index[netip.Addr]{},
		identities: index[identifier]{}, ambiguous: map[identifier]time.Time{},
	}
}

// Subscribe registers a handler. The Inventory calls the handler with a nodename after one of these may have changed for
// that nodename: Machine, Condition or Reason of the entry, or the result of SharedAddresses, SharedName or RenamedTo. A
// change of ObservedAt alone does not count. The handler runs on the writer's goroutine without locks held, and must not
// block. Subscribe before the first write.
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

// Count returns the number of machines in the given condition.
func (i *Inventory) Count(c Condition) int {
	i.mu.RLock()
	defer i.mu.RUnlock()

	return i.counts[c]
}

// SharedUUID returns the other Nodes whose machines have the SMBIOS UUID. An old name of the same machine does not
// count.
func (i *Inventory) SharedUUID(uuid, nodename string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()

	return i.withoutRenamed(i.uuids.others(uuid, nodename), nodename)
}

// SharedAddresses returns the addresses that the platform's metadata lists for nodename's machine and for others, with
// the other Nodes: Azure's metadata lists the addresses of a load balancer for every machine behind it. An old name of
// the same machine does not count.
func (i *Inventory) SharedAddresses(nodename string) map[netip.Addr][]string {
	i.mu.RLock()
	defer i.mu.RUnlock()

	shared := map[netip.Addr][]string{}

	for _, addr := range platformAddresses(i.entries[nodename].Machine) {
		if others := i.withoutRenamed(i.platforms.others(addr, nodename), nodename); len(others) > 0 {
			shared[addr] = others
		}
	}

	return shared
}

// SharedName returns the other Nodes whose machines report the name, given in canonical form. An old name of the
// same machine does not count.
func (i *Inventory) SharedName(name, nodename string) []string {
	i.mu.RLock()
	defer i.mu.RUnlock()

	return i.withoutRenamed(i.Claims.ReportedBy(name, nodename), nodename)
}

// Replace sets the current view of nodename's machine. Subscribers are called only if something changed.
func (i *Inventory) Replace(nodename string, m machine.Machine) {
	i.update(nodename, func(e *Entry) {
		last := e.Last
		*e = Entry{Machine: m, Condition: Current, ObservedAt: i.now(), Last: m, before: e.before, rival: e.rival, rivalAt: e.rivalAt}

		if last.Identity().Compare(m.Identity()) == machine.Different {
			if e.before.Compare(m.Identity()) == machine.Same && last.Endpoint != m.Endpoint {
				e.rival, e.rivalAt = last.Endpoint, i.now()
			}

			e.before = last.Identity()
		}
	})
}

// MarkUnreachable keeps the last view of nodename's machine and records why it cannot be refreshed.
func (i *Inventory) MarkUnreachable(nodename, reason string) {
	i.update(nodename, func(e *Entry) { e.Condition, e.Reason, e.Responding = Unreachable, reason, "" })
}

// MarkMismatch drops the view of nodename's machine, because the machine of another nodename responds at the Node's
// address.
func (i *Inventory) MarkMismatch(nodename, responding, reason string) {
	i.update(nodename, func(e *Entry) {
		*e = Entry{Condition: Mismatch, Reason: reason, UnresponsiveSince: e.UnresponsiveSince, Last: e.Last, Responding: responding}
	})
}

// Forget removes the entry of nodename, and ends its claims.
func (i *Inventory) Forget(nodename string) {
	i.mu.Lock()

	old, known := i.entries[nodename]
	delete(i.entries, nodename)

	if known {
		i.counts[old.Condition]--
	}

	affected := append(i.reindex(nodename, old, Entry{}), i.reidentify(nodename, old, Entry{})...)
	i.mu.Unlock()

	if known {
		affected = append(affected, nodename)
	}

	i.notify(affected)
}

func (i *Inventory) update(nodename string, change func(*Entry)) {
	i.mu.Lock()

	old, known := i.entries[nodename]
	if known {
		i.counts[old.Condition]--
	}

	entry := old
	change(&entry)

	if old.Condition == Current && entry.Condition != Current {
		entry.UnresponsiveSince = i.now()
	}

	i.entries[nodename] = entry
	i.counts[entry.Condition]++

	var affected []string

	sameMachine := old.Machine.Equal(entry.Machine)
	if !sameMachine {
		affected = i.reindex(nodename, old, entry)
	}

	if !sameMachine || old.Condition != entry.Condition || old.Reason != entry.Reason {
		affected = append(affected, nodename)
		affected = append(affected, i.reidentify(nodename, old, entry)...)
	}

	i.mu.Unlock()

	i.notify(affected)
}

// reindex updates the claims and the indexes for nodename's machine. It returns the other nodenames for which the result
// of SharedAddresses or SharedName may have changed. It requires i.mu.
func (i *Inventory) reindex(nodename string, before, after Entry) (affected []string) {
	i.Claims.SetMachine(nodename, after.Last)
	i.uuids.replace(nodename, uuids(before.Machine), uuids(after.Machine))

	for name := range sets.New(before.Last.ReportedNames()...).SymmetricDifference(sets.New(after.Last.ReportedNames()...)) {
		if others := i.Claims.ReportedBy(name, nodename); len(others) == 1 {
			affected = append(affected, others...)
		}
	}

	return append(affected, i.platforms.replace(nodename, platformAddresses(before.Machine), platformAddresses(after.Machine))...)
}

func (i *Inventory) notify(nodenames []string) {
	i.mu.RLock()
	handlers := i.handlers
	i.mu.RUnlock()

	slices.Sort(nodenames)

	for _, nodename := range slices.Compact(nodenames) {
		for _, handler := range handlers {
			handler(nodename)
		}
	}
}
