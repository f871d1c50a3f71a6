package settings

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
)

// Source delivers configurations.
type Source interface {
	// Follow calls deliver with the current document and again after every change, or with an error if the document
	// cannot be read. It returns when ctx ends.
	Follow(ctx context.Context, deliver func(Document, error))
}

// Defaults is the source of the default configuration.
type Defaults struct{}

// Follow implements Source.
func (Defaults) Follow(ctx context.Context, deliver func(Document, error)) {
	deliver(Document{Name: "defaults"}, nil)
	<-ctx.Done()
}

// MountPath is the mountPath of the configuration file in an ExtensionServiceConfig.
const MountPath = "/usr/local/etc/talos-ccm/config.yaml"

// Extension follows the ExtensionServiceConfig of an extension service. Without one, it delivers the default
// configuration.
type Extension struct {
	// Admin is talosapi.Admin.
	Admin interface {
		WatchServiceConfig(ctx context.Context, name string, ch chan<- state.Event) error
	}
	// Name of the extension service, without "ext-".
	Name  string
	Clock clock.Clock
}

// Follow implements Source.
func (e Extension) Follow(ctx context.Context, deliver func(Document, error)) {
	watch := func(ctx context.Context, events chan<- state.Event) error {
		return e.Admin.WatchServiceConfig(ctx, e.Name, events)
	}

	backoff.WatchLocal(ctx, e.Clock, "ExtensionServiceConfig", watch, func(event state.Event) bool {
		resource, ok := event.Resource.(*runtime.ExtensionServiceConfig)

		switch {
		case event.Type == state.Destroyed:
			deliver(Document{Name: "ExtensionServiceConfig " + e.Name}, nil)
		case ok:
			deliver(e.document(resource.TypedSpec()))
		}

		return false
	})
}

// document returns the file at MountPath. Other files are errors, because they would be ignored.
func (e Extension) document(spec *runtime.ExtensionServiceConfigSpec) (Document, error) {
	resource := "ExtensionServiceConfig " + e.Name
	doc := Document{Name: resource + " " + MountPath, Environment: spec.Environment}

	for _, file := range spec.Files {
		if file.MountPath != MountPath {
			return doc, fmt.Errorf("%s: configFiles: mountPath %q is not supported; the only file is %s", resource, file.MountPath, MountPath)
		}

		doc.Config = []byte(file.Content)
	}

	return doc, nil
}

// File follows a file, outside Talos.
type File struct {
	Path  string
	Clock clock.Clock
}

// Follow implements Source. It polls, which works on every file system, and delivers content that it has read twice,
// because a file may be half written.
func (f File) Follow(ctx context.Context, deliver func(Document, error)) {
	var last, delivered *reading

	for ctx.Err() == nil {
		data, err := os.ReadFile(f.Path)
		if err != nil {
			err = fmt.Errorf("read configuration: %w", err)
		} else {
			err = config.CheckNotEmpty(f.Path, data)
		}

		current := &reading{data, err}

		if current.equal(last) && !current.equal(delivered) {
			deliver(Document{Name: f.Path, Config: current.data}, current.err)

			delivered = current
		}

		last = current

		backoff.Sleep(ctx, f.Clock, 250*time.Millisecond)
	}
}

// reading is the content of a file at one time, or the error of reading it.
type reading struct {
	data []byte
	err  error
}

func (r *reading) equal(other *reading) bool {
	return other != nil && bytes.Equal(r.data, other.data) && fmt.Sprint(r.err) == fmt.Sprint(other.err)
}
