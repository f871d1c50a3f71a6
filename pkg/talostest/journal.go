package talostest

import (
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
const journalSize = 512

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

// journal keeps the last calls of a machine, oldest first.
type journal struct {
	mu    sync.Mutex
	calls []*Call
}

func (j *journal) begin(call Call) *Call {
	j.mu.Lock()
	defer j.mu.Unlock()

	if len(j.calls) == journalSize {
		j.calls = slices.Delete(j.calls, 0, 1)
	}

	j.calls = append(j.calls, &call)

	return &call
}

func (j *journal) amend(call *Call, change func(*Call)) {
	j.mu.Lock()
	defer j.mu.Unlock()

	change(call)
}

func (j *journal) list() []Call {
	j.mu.Lock()
	defer j.mu.Unlock()

	calls := make([]Call, 0, len(j.calls))
	for _, call := range j.calls {
		calls = append(calls, *call)
	}

	return calls
}
