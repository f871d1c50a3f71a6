package talosapi

import (
	"context"
	"net"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// ownShare is what a machine may always send in a session. A new machine needs about a tenth of it.
	ownShare = 128 << 10

	// commonShare is what all machines with a Share may send beyond it, together.
	commonShare = 64 << 20
)

// Budget limits what the machines of unknown Nodes send, since it takes memory: a bootstrap token can register any number
// of Nodes, and one attacker can respond for all of them. The zero value is ready to use.
type Budget struct {
	mu    sync.Mutex
	spent int // of commonShare, in bytes
}

// Share is the part of a Budget that one session has. It counts what arrives over the connection, and again each resource,
// which can need more memory. A nil Share has no limit. All methods are safe for concurrent use.
type Share struct {
	budget   *Budget
	received int
	released bool
	exceeded bool
}

type shareKey struct{}

// NewShare returns a Share of which nothing is used.
func (b *Budget) NewShare() *Share { return &Share{budget: b} }

// WithShare returns a context for Dial, which lets the machine send no more than the Share.
func WithShare(ctx context.Context, share *Share) context.Context {
	return context.WithValue(ctx, shareKey{}, share)
}

// Release returns the Share to the Budget. A session that still uses it has no limit from then on.
func (s *Share) Release() {
	if s == nil {
		return
	}

	s.budget.mu.Lock()
	defer s.budget.mu.Unlock()

	if !s.released {
		s.released = true
		s.budget.spent -= max(0, s.received-ownShare)
	}
}

// Err returns an error with the code ResourceExhausted if the machine sent more than it may. Its connection is closed then.
func (s *Share) Err() error {
	if s == nil {
		return nil
	}

	s.budget.mu.Lock()
	defer s.budget.mu.Unlock()

	if !s.exceeded {
		return nil
	}

	return status.Errorf(codes.ResourceExhausted, "machine sent more than %d KiB, and machines whose Nodes are not initialized use all of %d MiB",
		ownShare>>10, commonShare>>20)
}

// charge counts n bytes.
func (s *Share) charge(n int) error {
	if s == nil {
		return nil
	}

	s.budget.mu.Lock()

	if !s.released {
		spent := s.budget.spent + max(0, s.received+n-ownShare) - max(0, s.received-ownShare)
		if s.exceeded = s.exceeded || spent > max(s.budget.spent, commonShare); !s.exceeded {
			s.received += n
			s.budget.spent = spent
		}
	}

	s.budget.mu.Unlock()

	return s.Err()
}

// sharedConn is a connection to a machine that has a Share.
type sharedConn struct {
	net.Conn

	share *Share
}

// Read implements net.Conn.
func (c sharedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if exceeded := c.share.charge(n); exceeded != nil {
		return 0, exceeded
	}

	return n, err //nolint:wrapcheck // io.EOF
}
