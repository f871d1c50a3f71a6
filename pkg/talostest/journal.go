package talostest

import (
	"maps"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
)

// Transport is the connection over which a machine received a call.
type Transport string

// The transports of a machine.
const (
	TransportAPID   Transport = "apid"   // mutual TLS on port 50000
	TransportSocket Transport = "socket" // machine.sock
)

// journalSize is the number of calls that a journal keeps.
const journalSize = 128

// Call is an RPC that a machine received.
type Call struct {
	Transport Transport
	// Method is the full gRPC method, such as /cosi.resource.State/Watch.
	Method string
	// Roles are the roles of the caller, sorted.
	Roles []string
	// Code is the status of the call; codes.OK while the call is open.
	Code codes.Code
	// Open is true until the call has ended; an active watch is open.
	Open bool
	// ResourceType is the resource type of a COSI call. It is empty for other methods, and for streams that were rejected before their
	// request was read.
	ResourceType string
}

// CallKind is the key of [Cluster.CallCounts].
type CallKind struct {
	Transport Transport
	Method    string
	Code      codes.Code
}

// journal keeps the last calls of a machine.
type journal struct {
	mu    sync.Mutex
	calls []Call // a ring once it is full
	next  uint64 // sequence number of the next call
}

func (j *journal) begin(call Call) uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()

	sequence := j.next
	j.next++

	if len(j.calls) < journalSize {
		j.calls = append(j.calls, call)
	} else {
		j.calls[sequence%journalSize] = call
	}

	return sequence
}

// amend changes a call if the journal still has it.
func (j *journal) amend(sequence uint64, change func(*Call)) {
	j.mu.Lock()
	defer j.mu.Unlock()

	if j.next-sequence <= journalSize {
		change(&j.calls[sequence%journalSize])
	}
}

// list returns the calls, oldest first.
func (j *journal) list() []Call {
	j.mu.Lock()
	defer j.mu.Unlock()

	if len(j.calls) < journalSize {
		return slices.Clone(j.calls)
	}

	oldest := j.next % journalSize

	return slices.Concat(j.calls[oldest:], j.calls[:oldest])
}

// tally counts the finished calls of a cluster.
type tally struct {
	mu     sync.Mutex
	counts map[CallKind]uint64
}

func (t *tally) add(kind CallKind) {
	t.mu.Lock()
	defer t.mu.Unlock()

	if t.counts == nil {
		t.counts = make(map[CallKind]uint64)
	}

	t.counts[kind]++
}

func (t *tally) snapshot() map[CallKind]uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()

	counts := make(map[CallKind]uint64, len(t.counts))
	maps.Copy(counts, t.counts)

	return counts
}
