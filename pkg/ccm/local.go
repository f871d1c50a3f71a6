package ccm

import (
	"context"
	"fmt"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// standing is what this machine's own state says of whether we should work on it.
type standing struct {
	controlPlane bool
	stage        runtime.MachineStage
}

// serves is true on a control-plane machine that is not about to go away. In maintenance mode Talos has no machine type yet.
func (s standing) serves() bool {
	switch s.stage {
	case runtime.MachineStageUnknown: // not told yet
		return false
	case runtime.MachineStageRebooting, runtime.MachineStageShuttingDown, runtime.MachineStageResetting, runtime.MachineStageUpgrading:
		return false
	case runtime.MachineStageBooting, runtime.MachineStageInstalling, runtime.MachineStageMaintenance, runtime.MachineStageRunning:
	}

	return s.controlPlane
}

// watchStanding sends every change of this machine's standing until ctx ends. When machined cannot be asked it tries again, with
// capped back-off, and the last standing remains.
func watchStanding(ctx context.Context, st state.CoreState, clk clock.Clock, changes chan<- standing) {
	var (
		last    standing
		backoff = newBackoff()
	)

	for ctx.Err() == nil {
		began := clk.Now()
		err := followStanding(ctx, st, &last, changes)

		if ctx.Err() != nil {
			return
		}

		if clk.Since(began) > backoffMax {
			backoff = newBackoff()
		}

		klog.FromContext(ctx).V(2).Info("This machine's state cannot be watched, trying again", "err", err)

		select {
		case <-ctx.Done():
		case <-clk.After(backoff.Step()):
		}
	}
}

func followStanding(ctx context.Context, st state.CoreState, last *standing, changes chan<- standing) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	events := make(chan state.Event)

	if err := st.Watch(ctx, config.NewMachineType().Metadata(), events); err != nil {
		return fmt.Errorf("watch this machine's type: %w", err)
	}

	if err := st.Watch(ctx, runtime.NewMachineStatus().Metadata(), events); err != nil {
		return fmt.Errorf("watch this machine's status: %w", err)
	}

	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event := <-events:
			next, err := last.after(event)
			if err != nil {
				return err
			}

			if next == *last {
				continue
			}

			*last = next

			select {
			case changes <- next:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// after is the standing once event has happened. A resource that is gone changes nothing: machined may be starting.
func (s standing) after(event state.Event) (standing, error) {
	if event.Type == state.Errored {
		return s, fmt.Errorf("watch this machine: %w", event.Error)
	}

	if event.Type != state.Created && event.Type != state.Updated {
		return s, nil
	}

	switch r := event.Resource.(type) {
	case *config.MachineType:
		s.controlPlane = r.MachineType().IsControlPlane()
	case *runtime.MachineStatus:
		s.stage = r.TypedSpec().Stage
	}

	return s, nil
}

const (
	backoffFirst = 500 * time.Millisecond
	backoffMax   = 30 * time.Second
)

func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: backoffFirst, Factor: 2, Jitter: 0.3, Steps: 10, Cap: backoffMax}
}
