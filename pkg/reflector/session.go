package reflector

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// answerTimeout bounds the time from dialing to a complete view, and from a poll to its answer. Without the latter a machine
	// that hangs, while its kernel keeps the connection alive, would be taken for current until the session ends.
	answerTimeout = 30 * time.Second

	// A session ends after sessionLength, spread by half of it, and the next one reads everything anew over a new
	// connection: the safety net below the watches, and what keeps certificates fresh.
	sessionLength = 30 * time.Minute

	// Facts that are not watched are polled at growing intervals: they settle shortly after boot, and the intervals grow from then on.
	pollFirst = 10 * time.Second
	pollMax   = 10 * time.Minute

	// settleTime is for changes that Talos makes together to arrive together: metadata and addresses come over different watches, and a
	// Node must not be initialized with the one and without the other.
	settleTime = 50 * time.Millisecond

	// maxResources is far more than a machine has: its addresses are the only kind with more than a few.
	maxResources = 10_000
)

// errSessionOver ends a session that was good to the end.
var errSessionOver = errors.New("time to read everything anew")

// session is one connection to one machine, from dialing to the first break.
type session struct {
	*task

	state talosapi.State
	addr  netip.Addr
	// release gives back the place among those that are connecting; calls after the first do nothing.
	release func()

	view machine.View
	// The view is complete when every watch has told what there is, and all else has been polled once.
	bootstrapping int // watches that have not told yet
	polled        bool
	polling       bool // a poll is under way
	established   bool
	interval      time.Duration
	// settled fires when the changes since the last view are to be published; nil if there are none.
	settled <-chan time.Time
}

// listing is the outcome of polling one kind.
type listing struct {
	kind  resource.Kind
	items []resource.Resource
}

func newSession(t *task, st talosapi.State, addr netip.Addr, release func()) *session {
	return &session{task: t, state: st, addr: addr, release: release, interval: pollFirst}
}

// run returns when the session breaks, always with an error, and whether the view was complete before that.
func (s *session) run(ctx context.Context) (established bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	events, polls, failures := s.open(ctx)

	deadline := s.clock.NewTimer(answerTimeout)
	defer deadline.Stop()

	over := s.clock.NewTimer(wait.Jitter(sessionLength, 0.5))
	defer over.Stop()

	poll := s.clock.NewTimer(pollMax)
	defer poll.Stop()

	for {
		if s.answered() {
			deadline.Stop()
		}

		select {
		case <-ctx.Done():
			return s.established, ctx.Err()
		case err = <-failures:
		case event := <-events:
			err = s.handle(ctx, event)
		case listings := <-polls:
			s.take(listings)
			poll.Reset(s.nextPoll())

			err = s.publish(ctx)
		case <-s.settled:
			s.settled = nil
			err = s.publish(ctx)
		case <-poll.C():
			s.beginPoll(ctx, deadline, polls, failures)
		case <-deadline.C():
			err = s.overdue()
		case <-over.C():
			err = errSessionOver
		}

		if err != nil {
			return s.established, err
		}
	}
}

// answered tells whether the machine owes us nothing but events.
func (s *session) answered() bool { return s.bootstrapping == 0 && !s.polling }

func (s *session) beginPoll(ctx context.Context, deadline clock.Timer, polls chan<- []listing, failures chan<- error) {
	s.polling = true

	if s.bootstrapping == 0 { // else the deadline of the watches stands
		deadline.Reset(answerTimeout)
	}

	go s.poll(ctx, polls, failures)
}

// overdue is the error of a machine that has not answered in time.
func (s *session) overdue() error {
	if s.answered() {
		return nil
	}

	return fmt.Errorf("the machine at %s did not answer within %s", s.addr, answerTimeout)
}

// open starts all watches and the first poll at once: on a slow machine their delays must not add up.
func (s *session) open(ctx context.Context) (chan state.Event, chan []listing, chan error) {
	events, polls, failures := make(chan state.Event), make(chan []listing), make(chan error)

	kinds := machine.WatchedKinds()
	s.bootstrapping, s.polling = len(kinds), true

	for _, kind := range kinds {
		go func() {
			if err := s.state.WatchKind(ctx, kind, events, state.WithBootstrapContents(true)); err != nil {
				fail(ctx, failures, fmt.Errorf("watch %s at %s: %w", kind.Type(), s.addr, err))
			}
		}()
	}

	go s.poll(ctx, polls, failures)

	return events, polls, failures
}

func fail(ctx context.Context, failures chan<- error, err error) {
	select {
	case failures <- err:
	case <-ctx.Done():
	}
}

// poll lists all polled kinds at once and sends the outcome. A kind that this version of Talos does not have is empty there
// (Talos answers PermissionDenied for it).
func (s *session) poll(ctx context.Context, polls chan<- []listing, failures chan<- error) {
	kinds := machine.PolledKinds()
	listings := make([]listing, len(kinds))
	errs := make(chan error, len(kinds))

	for i, kind := range kinds {
		go func() {
			list, err := s.state.List(ctx, kind)
			if status.Code(err) == codes.PermissionDenied {
				klog.FromContext(ctx).V(4).Info("Machine does not show this kind", "kind", kind.Type(), "err", err)

				err = nil
			}

			listings[i] = listing{kind: kind, items: list.Items}
			errs <- err
		}()
	}

	var err error
	for range kinds {
		err = errors.Join(err, <-errs)
	}

	if err != nil {
		fail(ctx, failures, fmt.Errorf("list resources at %s: %w", s.addr, err))

		return
	}

	select {
	case polls <- listings:
	case <-ctx.Done():
	}
}

func (s *session) nextPoll() time.Duration {
	interval := s.interval

	if s.view.Machine().Stage != runtime.MachineStageBooting {
		s.interval = min(2*s.interval, pollMax)
	}

	return wait.Jitter(interval, 0.2)
}

func (s *session) handle(ctx context.Context, event state.Event) error {
	switch event.Type {
	case state.Created, state.Updated, state.Destroyed:
		if err := s.record(event); err != nil {
			return err
		}
	case state.Bootstrapped:
		s.bootstrapping--
	case state.Errored:
		return fmt.Errorf("watch at %s: %w", s.addr, event.Error)
	case state.Noop:
		return nil
	}

	if !s.established {
		return s.publish(ctx)
	}

	if s.settled == nil {
		s.settled = s.clock.After(settleTime)
	}

	return nil
}

// record takes a resource in or drops it. What a machine sends is not to be trusted before it has said who it is, and not entirely after
// that: an event may lack its resource (the client also takes events of a kind it does not know for Created), and there may be no end to
// them.
func (s *session) record(event state.Event) error {
	if event.Resource == nil {
		return fmt.Errorf("watch at %s: event of type %s without a resource", s.addr, event.Type)
	}

	if event.Type == state.Destroyed {
		s.view.Drop(event.Resource.Metadata())

		return nil
	}

	s.view.Put(event.Resource)

	if s.view.Len() > maxResources {
		return fmt.Errorf("the machine at %s has more than %d resources of the kinds that we watch", s.addr, maxResources)
	}

	return nil
}

func (s *session) take(listings []listing) {
	s.polled, s.polling = true, false

	for _, l := range listings {
		s.view.ReplaceKind(l.kind, l.items)
	}
}

// publish hands the view on once it is complete and the machine has said that it is this Node's.
func (s *session) publish(ctx context.Context) error {
	if s.bootstrapping > 0 || !s.polled {
		return nil
	}

	m := s.view.Machine()

	switch m.Nodename {
	case s.nodename:
	case "":
		return fmt.Errorf("the machine at %s has not published its nodename yet", s.addr)
	default:
		// If it was good until now, the machine has been renamed, and no longer is.
		s.established = false

		return &mismatchError{s.addr, m.Nodename}
	}

	if !s.established {
		s.established = true
		s.release()
		klog.FromContext(ctx).V(2).Info("Watching machine", "address", s.addr)
	}

	s.inventory.Replace(s.nodename, m)

	return nil
}
