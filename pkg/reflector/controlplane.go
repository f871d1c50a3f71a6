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
