package reflector

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

// mismatchError says that what answers is another machine.
type mismatchError struct {
	addr     netip.Addr
	nodename string
}

func (e *mismatchError) Error() string {
	return fmt.Sprintf("the machine at %s calls itself %q", e.addr, e.nodename)
}

// task follows one Node's machine for as long as the Node is tracked.
type task struct {
	*Reflector

	nodename  string
	addresses []netip.Addr // its own: the order changes
	backoff   wait.Backoff
}

func (t *task) run(ctx context.Context) {
	logger := klog.FromContext(ctx)

	for ctx.Err() == nil {
		established, err := t.follow(ctx)
		if ctx.Err() != nil {
			return
		}

		var pause time.Duration

		if established {
			// It was good until now: the view stays current while we try again, after a moment that is spread over all machines.
			if !errors.Is(err, errSessionOver) {
				restarts.Inc()
			}

			logger.V(2).Info("Machine's watches ended, starting over", "err", err)

			t.backoff = newBackoff()
			pause = wait.Jitter(50*time.Millisecond, 5)
		} else {
			t.report(ctx, err)

			pause = t.backoff.Step()
		}

		select {
		case <-ctx.Done():
		case <-t.clock.After(pause):
		}
	}
}

// follow tries the addresses in turn until one of them has been followed; it then returns true when that ends.
func (t *task) follow(ctx context.Context) (established bool, err error) {
	if len(t.addresses) == 0 {
		return false, errors.New("the Node names no address to reach the machine at")
	}

	var failures []error

	for i, addr := range t.addresses {
		established, err := t.followAt(ctx, addr)
		if established {
			// The next time it is tried first: one before it may be silent, and takes long to fail.
			t.addresses = slices.Insert(slices.Delete(t.addresses, i, i+1), 0, addr)
		}

		if established || ctx.Err() != nil {
			return established, err
		}

		failures = append(failures, err)
	}

	return false, errors.Join(failures...)
}

func (t *task) followAt(ctx context.Context, addr netip.Addr) (established bool, err error) {
	select {
	case t.connecting <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}

	release := sync.OnceFunc(func() { <-t.connecting })
	defer release()

	st, err := t.dial(t.nodename, addr)
	if err != nil {
		return false, err
	}

	defer st.Close() //nolint:errcheck // nothing is in flight that anyone waits for

	return newSession(t, st, addr, release).run(ctx)
}

func (t *task) report(ctx context.Context, err error) {
	logger := klog.FromContext(ctx)

	if mismatch := (*mismatchError)(nil); errors.As(err, &mismatch) {
		logger.V(2).Info("Another machine answers at the Node's address", "address", mismatch.addr, "machine", mismatch.nodename)
		t.inventory.MarkMismatch(t.nodename, mismatch.Error())

		return
	}

	logger.V(2).Info("Machine is unreachable", "err", err)
	t.inventory.MarkUnreachable(t.nodename, strings.ReplaceAll(err.Error(), "\n", "; "))
}
