package reflector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// answerTimeout limits the time from the first request to a complete view, and from the start of a poll to its
	// end. Without the latter, a machine that hangs while its kernel keeps the connection open would count as current
	// until the session expires.
	answerTimeout = 30 * time.Second

	// A session expires after sessionLength plus up to sessionJitter of it. The next session reads all resources over a new connection,
	// which recovers from lost watch events and uses fresh certificates.
	sessionLength = 30 * time.Minute
	sessionJitter = 0.5

	// Resources that are not watched are polled. They rarely change after boot, so the interval doubles up to pollMax, and begins with
	// pollRunning if the machine runs and does not have the metadata of an earlier boot.
	pollFirst   = 10 * time.Second
	pollRunning = time.Minute
	pollMax     = 10 * time.Minute
	pollJitter  = 0.2

	// debounce batches changes that Talos makes together: metadata and addresses arrive over different watches. It saves
	// writes and guarantees nothing. Package nodespec decides which metadata and addresses a Node needs to be initialized.
	debounce = 15 * time.Millisecond

	// maxFlushed limits the events that are received after a session has failed. Few are pending then.
	maxFlushed = 64
)

// errSessionExpired ends a session that had no failure.
var errSessionExpired = errors.New("session expired")

// mismatchError reports that the machine at addr has another nodename than expected.
type mismatchError struct {
	addr     netip.Addr
	nodename string
}

func (e *mismatchError) Error() string {
	return fmt.Sprintf("machine at %s reports nodename %q", e.addr, e.nodename)
}

// session is one connection to one machine, from dialing to the first failure.
type session struct {
	inventory Inventory
	clock     clock.Clock
	nodename  string
	addr      netip.Addr
	addresses []netip.Addr // of the Node
	state     talosapi.State
	kinds     machine.Kinds
	// controlPlane has the last facts of a control-plane machine; nil for other machines.
	controlPlane *machine.ControlPlane
	readsMembers func() bool // nil means never
	release      func()      // lets other machines connect
	connected    func()      // called when the session is established

	events  chan state.Event
	results chan func() error // of requests; run calls them

	// The view is complete when every watch has bootstrapped and the other resources have been polled once.
	view          machine.View
	bootstrapping int // watches that have not bootstrapped
	polled        bool
	constant      bool             // the constant facts are known
	polling       bool             // a poll is in progress
	pollAgain     bool             // when the poll has ended
	pollSoon      bool             // the next poll is not later than pollFirst
	established   bool             // the first view has been published
	debounced     <-chan time.Time // fires when changes are to be published; nil if there are none

	slot     clock.Timer // other machines wait until it fires, or until the session is established
	deadline clock.Timer // of the requests in progress
	nextPoll clock.Timer
	interval time.Duration // between polls
	retries  wait.Backoff  // of polls, while a fact of a control-plane machine is unknown
}

// run returns when the session fails or expires, always with an error. established reports whether a view was published.
// The caller must then cancel ctx.
func (s *session) run(ctx context.Context) (established bool, err error) {
	s.deadline = s.clock.NewTimer(answerTimeout)
	defer s.deadline.Stop()

	expiry := s.clock.NewTimer(wait.Jitter(sessionLength, sessionJitter))
	defer expiry.Stop()

	s.nextPoll = s.clock.NewTimer(pollMax)
	defer s.nextPoll.Stop()

	s.slot = s.clock.NewTimer(slotTime)
	defer s.slot.Stop()

	s.open(ctx)

	for {
		s.stopDeadline()

		select {
		case <-ctx.Done():
			return s.established, ctx.Err()
		case event := <-s.events:
			err = s.handle(ctx, event)
		case result := <-s.results:
			err = result()
		case <-s.debounced:
			s.debounced = nil
			err = s.publish()
		case <-s.nextPoll.C():
			s.pollSoon = false
			s.requestPoll(ctx)
		case <-s.slot.C():
			s.release()
		case <-s.deadline.C():
			err = s.checkAnswered()
		case <-expiry.C():
			err = errSessionExpired
		}

		if err != nil {
			return s.established, cmp.Or(s.flush(ctx), err)
		}
	}
}

// flush publishes the changes that were received before the session failed: a machine may announce that it is being
// reset and end within the debounce. flush returns an error only if the machine no longer belongs to the Node.
func (s *session) flush(ctx context.Context) error {
	for range maxFlushed {
		select {
		case event := <-s.events:
			_ = s.handle(ctx, event) // the session has failed already
		default:
		}
	}

	if mismatch := (*mismatchError)(nil); s.debounced != nil && errors.As(s.publish(), &mismatch) {
		return mismatch
	}

	return nil
}

func (s *session) answered() bool { return s.bootstrapping == 0 && !s.polling }

// stopDeadline stops the deadline if the machine has answered every request.
func (s *session) stopDeadline() {
	if s.answered() {
		s.deadline.Stop()
	}
}

// checkAnswered is called when the deadline has passed. The machine may have answered at the same moment.
func (s *session) checkAnswered() error {
	if s.answered() {
		return nil
	}

	return fmt.Errorf("machine at %s did not answer within %s", s.addr, answerTimeout)
}

// probe ends the session if the machine accepts no further connection.
func (s *session) probe(ctx context.Context) {
	if err := talosapi.Probe(ctx, s.addr); err != nil {
		s.send(ctx, func() error {
			s.inventory.MarkUnreachable(s.nodename, err.Error())

			return err
		})
	}
}

// startPoll starts a poll and its deadline. While watches have not bootstrapped, their earlier deadline applies.
func (s *session) startPoll(ctx context.Context) {
	s.polling = true

	if s.bootstrapping == 0 {
		s.deadline.Reset(answerTimeout)
	}

	kinds := s.kinds.Polled
	if !s.constant {
		kinds = slices.Concat(kinds, s.kinds.Constant)
	}

	go s.poll(ctx, kinds)
}

// requestPoll starts a poll, after the present one if there is one.
func (s *session) requestPoll(ctx context.Context) {
	if s.polling {
		s.pollAgain = true
	} else {
		s.startPoll(ctx)
	}
}

// open starts all watches and the first poll concurrently, so that the latencies of a slow machine do not add up.
func (s *session) open(ctx context.Context) {
	s.events, s.results = make(chan state.Event), make(chan func() error)

	s.bootstrapping = len(s.kinds.Watched)

	for _, kind := range s.kinds.Watched {
		go func() {
			if err := s.state.WatchKind(ctx, kind, s.events, state.WithBootstrapContents(true)); err != nil {
				s.send(ctx, func() error { return fmt.Errorf("watch %s at %s: %w", kind.Type(), s.addr, err) })
			}
		}()
	}

	s.startPoll(ctx)
}

// send makes run call result.
func (s *session) send(ctx context.Context, result func() error) {
	select {
	case s.results <- result:
	case <-ctx.Done():
	}
}

// poll lists the kinds concurrently and replaces them in the view, and reads the facts of a control-plane machine. Talos
// answers PermissionDenied for a kind that its version does not have; the listing of that kind is empty.
func (s *session) poll(ctx context.Context, kinds []resource.Kind) {
	facts := make(chan *machine.ControlPlane, 1)
	go func() { facts <- s.readControlPlane(ctx) }()

	listings, refusals := make([][]resource.Resource, len(kinds)), make([]error, len(kinds))
	errs := make(chan error, len(kinds))

	for i, kind := range kinds {
		go func() {
			list, err := s.state.List(ctx, kind)

			if status.Code(err) == codes.ResourceExhausted {
				refusals[i], err = err, nil
			} else if status.Code(err) == codes.PermissionDenied {
				klog.FromContext(ctx).V(4).Info("Machine does not serve resource kind", "kind", kind.Type(), "err", textOf(err))

				err = nil
			}

			listings[i] = list.Items
			errs <- err
		}()
	}

	var err error
	for range kinds {
		err = cmp.Or(err, <-errs) // the others are often the same
	}

	readFacts := <-facts

	s.send(ctx, func() error {
		if err != nil {
			return fmt.Errorf("list resources at %s: %w", s.addr, err)
		}

		s.controlPlane = readFacts

		for i, kind := range kinds {
			if refusals[i] == nil {
				s.view.ReplaceKind(kind, listings[i])
			} else if err := s.ignore(kind, refusals[i]); err != nil {
				return err
			}
		}

		return s.endPoll(ctx)
	})
}

func (s *session) endPoll(ctx context.Context) error {
	s.polling, s.polled = false, true

	if s.established {
		s.scheduleNextPoll(s.view.Machine())
	} else {
		s.pollWithin(pollFirst)
	}

	if s.pollAgain {
		s.pollAgain = false
		s.startPoll(ctx)
	}

	if s.debounced != nil {
		return nil
	}

	return s.publish()
}

// ignore handles resources that exceed a limit. Machines of the control plane keep their last ones, because the whole
// cluster depends on them. Of other machines, facts are not reported, and sessions end without the kinds of every View.
func (s *session) ignore(kind resource.Kind, err error) error {
	if isKept := s.controlPlane != nil && s.established; !isKept && !s.view.DropFacts(kind) {
		return fmt.Errorf("list resources at %s: %w", s.addr, err)
	}

	s.view.Ignore(kind, textOf(err))

	return nil
}

// scheduleNextPoll is called after a poll, and for the first view.
func (s *session) scheduleNextPoll(m machine.Machine) {
	s.constant = s.constant || m.Stage == runtime.MachineStageRunning // else it may be booting

	if s.constant && !m.PlatformFromCache {
		s.interval = max(s.interval, pollRunning)
	}

	delay := s.interval
	if s.pollSoon {
		delay = pollFirst
	}

	s.pollWithin(delay)

	if m.Stage != runtime.MachineStageBooting {
		s.interval = min(2*s.interval, pollMax)
	}
}

// pollWithin has the next poll start after about the delay. Polls of a control-plane machine are more frequent, because the
// whole cluster depends on its facts.
func (s *session) pollWithin(delay time.Duration) {
	delay = wait.Jitter(delay, pollJitter)

	switch {
	case s.controlPlane == nil:
	case s.controlPlane.IsComplete():
		delay = min(delay, factsInterval)
	default:
		delay = min(delay, s.retries.Step())
	}

	s.nextPoll.Reset(delay)
}

// pollAfter polls if polled resources probably change with the one of the event.
func (s *session) pollAfter(ctx context.Context, event state.Event) {
	switch r := event.Resource.(type) {
	case *k8s.Nodename, *runtime.PlatformMetadata: // with the hostname (k8s/NodenameController), and the platform's configuration
		s.requestPoll(ctx)
	case *runtime.MachineStatus:
		if r.TypedSpec().Stage == runtime.MachineStageRunning && !s.constant {
			s.requestPoll(ctx)
		}
	case *network.AddressStatus:
		// Node IPs follow a little later (k8s/NodeIPController). Pods add link-local addresses only.
		if r.TypedSpec().Scope == nethelpers.ScopeGlobal && !s.pollSoon {
			s.pollSoon = true
			s.pollWithin(pollFirst)
		}
	}
}

// handle applies one watch event. A machine is not trusted before its nodename is verified, and not fully afterwards: an event may lack its
// resource (the COSI client maps events of an unknown type to Created).
func (s *session) handle(ctx context.Context, event state.Event) error {
	switch event.Type {
	case state.Created, state.Updated, state.Destroyed:
		if event.Resource == nil {
			return fmt.Errorf("watch at %s: event of type %s without a resource", s.addr, event.Type)
		}

		if event.Type == state.Destroyed {
			s.view.Drop(event.Resource.Metadata())
		} else {
			s.view.Put(event.Resource)
		}
	case state.Bootstrapped:
		s.bootstrapping--
	case state.Errored:
		return fmt.Errorf("watch at %s: %w", s.addr, event.Error)
	case state.Noop:
		return nil
	}

	if !s.established {
		return s.publish()
	}

	s.pollAfter(ctx, event)

	if s.debounced == nil {
		s.debounced = s.clock.After(debounce)
	}

	return nil
}

// isLocal reports whether the machine is the local one, which is not dialed at an address.
func (s *session) isLocal() bool { return s.controlPlane != nil && s.controlPlane.Local }

// publish writes a complete view to the inventory. It fails if the machine's nodename is not the Node's.
func (s *session) publish() error {
	if s.bootstrapping > 0 || !s.polled {
		return nil
	}

	m := s.view.Machine()

	// The nodename is kept if it is not the Node's.
	if len(m.Nodename) > validation.DNS1123SubdomainMaxLength {
		return fmt.Errorf("machine at %s reports a nodename of %d bytes", s.addr, len(m.Nodename))
	}

	switch m.Nodename {
	case s.nodename:
	case "":
		return fmt.Errorf("machine at %s has not published its nodename yet", s.addr)
	default:
		// A machine that was renamed during the session no longer belongs to the Node.
		s.established = false

		return &mismatchError{s.addr, m.Nodename}
	}

	if !s.established {
		s.established = true
		s.slot.Stop()
		s.release()
		s.connected()
		s.scheduleNextPoll(m)
	}

	m.ControlPlane = s.controlPlane

	if !s.isLocal() {
		m.Endpoint = s.addr
	} else if i := slices.IndexFunc(s.addresses, m.HasAddress); i >= 0 {
		m.Endpoint = s.addresses[i]
	}

	s.inventory.Replace(s.nodename, m)

	return nil
}
