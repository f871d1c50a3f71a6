package talosapi

import (
	"context"
	"net"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Budget limits what the machines of unknown Nodes send, since it takes memory: a bootstrap token can register any number
// of Nodes, and one attacker can respond for all of them.
type Budget struct {
	// Own is what a machine may always send in a session, in bytes. Common is what all machines may send beyond it, together.
	Own, Common int

	mu    sync.Mutex
	spent int // of Common
}

// Share is the part of a Budget that one session has. It adds the bytes received and the size of each resource, as the
// limits of lists count it. A nil Share has no limit. All methods are safe for concurrent use.
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
		s.budget.spent -= max(0, s.received-s.budget.Own)
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

	return status.Errorf(codes.ResourceExhausted, "machine sent more than %d KiB, and machines of Nodes without labels of talos-ccm use all of %d MiB",
		s.budget.Own>>10, s.budget.Common>>20)
}

func (s *Share) charge(n int) error {
	if s == nil {
		return nil
	}

	s.budget.mu.Lock()

	if !s.released {
		spent := s.budget.spent + max(0, s.received+n-s.budget.Own) - max(0, s.received-s.budget.Own)
		if s.exceeded = s.exceeded || spent > max(s.budget.spent, s.budget.Common); !s.exceeded {
			s.received += n
			s.budget.spent = spent
		}
	}

	s.budget.mu.Unlock()

	return s.Err()
}

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
