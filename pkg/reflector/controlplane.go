package reflector

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const (
	// factsInterval bounds the age of the facts of a control-plane machine. Until all are known, they are read again after
	// factsRetryFirst up to factsRetryMax.
	factsInterval   = 30 * time.Second
	factsRetryFirst = 500 * time.Millisecond
	factsRetryMax   = 5 * time.Second

	// factsTimeout is less than answerTimeout: a session goes on without facts that take longer.
	factsTimeout = 10 * time.Second
)

// startFacts returns the timer of the facts of a control-plane machine; of other machines, it never fires.
func (s *session) startFacts() (next <-chan time.Time, stop func()) {
	if s.controlPlane == nil {
		return nil, func() {}
	}

	s.nextFacts = s.clock.NewTimer(factsInterval)

	return s.nextFacts.C(), func() { s.nextFacts.Stop() }
}

// pollFacts reads the facts, unless a poll is in progress, which reads them, too.
func (s *session) pollFacts(ctx context.Context) {
	if !s.polling {
		s.startPoll(ctx, nil)
	}
}

// readControlPlane reads the facts of a control-plane machine. A fact that the machine does not have, refuses, or that
// exceeds a limit or the timeout keeps its last value. The result is nil for other machines.
func (s *session) readControlPlane(ctx context.Context) *machine.ControlPlane {
	if s.controlPlane == nil {
		return nil
	}

	ctx, cancel := context.WithTimeout(ctx, factsTimeout)
	defer cancel()

	facts := *s.controlPlane // views share it

	err := facts.Update(func(pointer resource.Pointer) (resource.Resource, error) {
		r, err := s.state.Get(ctx, pointer)
		if state.IsNotFoundError(err) {
			return nil, nil
		}

		return r, err //nolint:wrapcheck // Update does
	})

	facts.Members = nil

	if s.readsMembers != nil && s.readsMembers() {
		list, listErr := s.state.List(ctx, machine.MemberKind())
		if listErr == nil {
			facts.UpdateMembers(list.Items)
		} else {
			err = errors.Join(err, fmt.Errorf("list members of the cluster: %w", listErr))
		}
	}

	facts.Problem = ""
	if err != nil {
		facts.Problem = textOf(err)
	}

	return &facts
}

// updateFacts is called after every poll, with the result of readControlPlane.
func (s *session) updateFacts(facts *machine.ControlPlane) {
	if facts == nil {
		return
	}

	delay := factsInterval
	if !facts.IsComplete() {
		delay = s.retries.Step()
	}

	s.controlPlane = facts
	s.nextFacts.Reset(delay)
}
