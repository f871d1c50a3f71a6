package settings

import (
	"context"
	"fmt"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// MountPath is where an ExtensionServiceConfig document is to mount the configuration file. It is read as a resource: Talos mounts what there is when
// it starts the service, and at boot that is before the machine's configuration is loaded (ExtensionServiceController).
const MountPath = "/usr/local/etc/talos-ccm/config.yaml"

// Extension follows the ExtensionServiceConfig document of an extension service.
type Extension struct {
	// Admin is talosapi.Admin.
	Admin interface {
		WatchServiceConfig(ctx context.Context, name string, ch chan<- state.Event) error
	}
	// Name is the extension service's, without "ext-".
	Name  string
	Clock clock.Clock
}

// Follow implements Source. Without a document the configuration is empty.
func (e Extension) Follow(ctx context.Context, deliver func(Document, error), lost func()) {
	backoff := newBackoff()

	for ctx.Err() == nil {
		began := e.Clock.Now()
		err := e.watch(ctx, deliver)

		lost()

		if ctx.Err() != nil {
			return
		}

		if e.Clock.Since(began) > backoffMax {
			backoff = newBackoff()
		}

		klog.FromContext(ctx).V(2).Info("Not told of configuration changes, asking again", "err", err)

		select {
		case <-ctx.Done():
		case <-e.Clock.After(backoff.Step()):
		}
	}
}

const backoffMax = 10 * time.Second

func newBackoff() wait.Backoff {
	return wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.3, Steps: 10, Cap: backoffMax}
}

func (e Extension) watch(ctx context.Context, deliver func(Document, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	events := make(chan state.Event)

	if err := e.Admin.WatchServiceConfig(ctx, e.Name, events); err != nil {
		return err
	}

	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case event := <-events:
			if event.Type == state.Errored {
				return fmt.Errorf("watch the ExtensionServiceConfig of %s: %w", e.Name, event.Error)
			}

			document, ok := event.Resource.(*runtime.ExtensionServiceConfig)

			switch {
			case event.Type == state.Destroyed:
				deliver(Document{Name: e.place()}, nil)
			case ok:
				deliver(e.document(document.TypedSpec()))
			}
		}
	}
}

func (e Extension) place() string { return "ExtensionServiceConfig " + e.Name }

// document picks our file: one that is mounted elsewhere would be lost in silence.
func (e Extension) document(spec *runtime.ExtensionServiceConfigSpec) (Document, error) {
	doc := Document{Name: e.place() + " " + MountPath, Environment: spec.Environment}

	for _, file := range spec.Files {
		if file.MountPath != MountPath {
			return doc, fmt.Errorf("%s: configFiles: mountPath %q: the only file is %s", e.place(), file.MountPath, MountPath)
		}

		doc.Config = []byte(file.Content)
	}

	return doc, nil
}
