package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/client"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const machineTimeout = 30 * time.Second

// talosFlags choose how to reach machines. They have the names of talosctl's flags.
type talosFlags struct {
	talosconfig string
	context     string
	endpoints   []string
}

func (f *talosFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.talosconfig, "talosconfig", "", "Path of the talosconfig. (default $TALOSCONFIG or ~/.talos/config)")
	flags.StringVar(&f.context, "context", "", "Context of the talosconfig. (default: its current context)")
	flags.StringSliceVarP(&f.endpoints, "endpoints", "e", nil, "Endpoints of the Talos API, which forward requests to machines. (default: those of the talosconfig)")
}

// open returns a reader of the given kinds that connects as talosctl does. Callers must call close.
func (f *talosFlags) open(ctx context.Context, kinds machine.Kinds) (*machineReader, error) {
	talosconfig, err := f.read()
	if err != nil {
		return nil, err
	}

	name := cmp.Or(f.context, talosconfig.Context)

	current, ok := talosconfig.Contexts[name]
	if !ok {
		return nil, fmt.Errorf("read talosconfig: context %q not found", name)
	}

	r := &machineReader{kinds: kinds, options: []client.OptionFunc{
		client.WithConfig(talosconfig),
		client.WithContextName(name),
		client.WithDefaultGRPCDialOptions(),
		client.WithSideroV1KeysDir(clientconfig.CustomSideroV1KeysDirPath("")),
	}}

	if len(f.endpoints) > 0 {
		r.options = append(r.options, client.WithEndpoints(f.endpoints...))
	}

	if len(f.endpoints)+len(current.Endpoints) > 0 {
		r.shared, err = client.New(ctx, r.options...)
	}

	return r, err
}

// read reads the file that talosctl would use.
func (f *talosFlags) read() (*clientconfig.Config, error) {
	paths := []clientconfig.Path{{Path: f.talosconfig}}

	if f.talosconfig == "" {
		var err error
		if paths, err = clientconfig.GetDefaultPaths(); err != nil {
			return nil, fmt.Errorf("find talosconfig: %w", err)
		}
	}

	var errs []error

	for _, path := range paths {
		talosconfig, err := talosapi.ReadTalosconfig(path.Path)
		if !errors.Is(err, fs.ErrNotExist) {
			return talosconfig, err
		}

		errs = append(errs, err)
	}

	return nil, errors.Join(errs...)
}

// machineReader reads machines over the Talos API. It is safe for concurrent use.
type machineReader struct {
	kinds   machine.Kinds
	options []client.OptionFunc
	// shared is the client of the endpoints; nil without endpoints, when each machine is dialed itself.
	shared *client.Client
}

func (r *machineReader) close() {
	if r.shared != nil {
		r.shared.Close() //nolint:errcheck // no call is in flight
	}
}

// read reads the machine with the given name or address.
func (r *machineReader) read(ctx context.Context, node string) (machine.Machine, error) {
	ctx, cancel := context.WithTimeout(ctx, machineTimeout)
	defer cancel()

	c := r.shared
	if c == nil {
		var err error
		if c, err = client.New(ctx, append(slices.Clip(r.options), client.WithEndpoints(node))...); err != nil {
			return machine.Machine{}, err
		}
		defer c.Close() //nolint:errcheck // no call is in flight
	}

	ctx = client.WithNode(ctx, node) // the API of resources does not support WithNodes

	view := machine.View{Facts: r.kinds.Facts}

	for i, kind := range r.kinds.All() {
		// Talos answers PermissionDenied for a kind that its version does not have. Every version has the watched kinds.
		list, err := c.COSI.List(ctx, kind)
		if err != nil && (i < len(r.kinds.Watched) || status.Code(err) != codes.PermissionDenied) {
			return machine.Machine{}, fmt.Errorf("list %s: %w", kind.Type(), err)
		}

		view.ReplaceKind(kind, list.Items)
	}

	m := view.Machine()
	if m.Nodename == "" {
		return machine.Machine{}, errors.New("machine has not published its nodename")
	}

	return m, nil
}
