package ccm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/cosi-project/runtime/pkg/controller/generic"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/recorder"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

// localTimeout bounds reads of the local machine: the other machines must not wait for it.
const localTimeout = 3 * time.Second

// localState is the type and stage of the local machine. The zero value means unknown.
type localState struct {
	controlPlane bool
	stage        runtime.MachineStage
}

// serves reports whether talos-ccm should run: on a control-plane machine that is not going down. A machine in
// maintenance mode has no type.
func (s localState) serves() bool {
	return s.controlPlane && !slices.Contains([]runtime.MachineStage{
		runtime.MachineStageUnknown, runtime.MachineStageRebooting, runtime.MachineStageShuttingDown, runtime.MachineStageResetting,
		runtime.MachineStageUpgrading,
	}, s.stage)
}

// watchLocalState sends the state of the local machine on every change until ctx ends. While machined cannot be
// reached, the last state holds.
func (m *Manager) watchLocalState(ctx context.Context, changes chan<- localState) {
	var current localState

	watch := func(ctx context.Context, events chan<- state.Event) error {
		if err := m.socket.Reader.Watch(ctx, config.NewMachineType().Metadata(), events); err != nil {
			return fmt.Errorf("watch machine type: %w", err)
		}

		if err := m.socket.Reader.Watch(ctx, runtime.NewMachineStatus().Metadata(), events); err != nil {
			return fmt.Errorf("watch machine status: %w", err)
		}

		return nil
	}

	backoff.WatchLocal(ctx, m.clock, "machine state", watch, func(event state.Event) bool {
		// The destruction of a resource changes nothing: machined may be starting.
		if event.Type != state.Created && event.Type != state.Updated {
			return false
		}

		next := current

		switch r := event.Resource.(type) {
		case *config.MachineType:
			next.controlPlane = r.MachineType().IsControlPlane()
		case *runtime.MachineStatus:
			next.stage = r.TypedSpec().Stage
		}

		if next != current {
			current = next

			select {
			case changes <- next:
			case <-ctx.Done():
			}
		}

		return false
	})
}

// localResource reads a resource of the local machine. It returns nil outside Talos and if the resource is not
// available.
func localResource[T generic.ResourceWithRD](ctx context.Context, m *Manager, id string) (r T) {
	if m.socket == nil {
		return r
	}

	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()

	r, err := safe.StateGetByID[T](ctx, m.socket.Reader, id)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Resource of the local machine is not available", "id", id, "err", err)
	}

	return r
}

// localNodename returns the nodename of the local machine; it is empty outside Talos and if it is not known.
func (m *Manager) localNodename(ctx context.Context) string {
	if nodename := localResource[*k8s.Nodename](ctx, m, k8s.NodenameID); nodename != nil {
		return nodename.TypedSpec().Nodename
	}

	return ""
}

// stateCertificate states the client certificate of the local machine's kubelet until ctx ends. It does nothing outside
// Talos.
func (m *Manager) stateCertificate(ctx context.Context, conn connection) {
	if m.socket == nil {
		return
	}

	client, err := conn.newClient()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Failed to state client certificate of kubelet")

		return
	}

	r := recorder.Recorder{Client: client, Socket: m.socket, Events: conn.recorder, Clock: m.clock, Config: m.documentHash}
	r.Run(ctx)
}

// documentHash returns the hash of the local machine's document; empty outside Talos, where the configuration is no
// document.
func (m *Manager) documentHash() string {
	if m.socket == nil {
		return ""
	}

	return m.store.Hash()
}

// awaitLocalNodename returns the nodename of the local machine once it is known; it is empty outside Talos and if ctx ends.
func (m *Manager) awaitLocalNodename(ctx context.Context) (nodename string) {
	if m.socket == nil {
		return ""
	}

	_ = backoff.Retry(ctx, "Failed to get nodename of local machine; retrying", func(ctx context.Context) error {
		if nodename = m.localNodename(ctx); nodename == "" {
			return errors.New("not known yet")
		}

		return nil
	})

	return nodename
}

// trackLocal has the local machine read over its socket as soon as its nodename is known.
func (m *Manager) trackLocal(ctx context.Context, refl *reflector.Reflector) {
	if nodename := m.awaitLocalNodename(ctx); nodename != "" {
		refl.TrackLocal(nodename, func() (talosapi.State, error) { return talosapi.DialSocket(m.options.MachineSocket) })
	}
}

// resetting returns the nodename of the local machine if it is being reset, or an empty string.
func (m *Manager) resetting(ctx context.Context) string {
	status := localResource[*runtime.MachineStatus](ctx, m, runtime.MachineStatusID)
	if status == nil || status.TypedSpec().Stage != runtime.MachineStageResetting {
		return ""
	}

	return m.localNodename(ctx)
}

// localAPIServer returns the host and the port of the API server of the local machine. It is empty if KubePrism is
// disabled: then the machine's kubeconfig names this API server.
func (m *Manager) localAPIServer(ctx context.Context) string {
	if prism := localResource[*k8s.KubePrismConfig](ctx, m, k8s.KubePrismConfigID); prism != nil {
		for _, endpoint := range prism.TypedSpec().Endpoints {
			if endpoint.Host == "localhost" { // not resolved, but replaced by the loopback address of KubePrism
				return net.JoinHostPort(prism.TypedSpec().Host, strconv.Itoa(int(endpoint.Port)))
			}
		}
	}

	return ""
}
