package talostest

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/resource/meta"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/cosi-project/runtime/pkg/state/impl/inmem"
	"github.com/cosi-project/runtime/pkg/state/impl/namespaced"
	"github.com/cosi-project/runtime/pkg/state/protobuf/server"
)

// Watch history per resource type, as in the v1alpha2 state of machined. Bookmarks expire as quickly as on Talos.
const (
	historyInitialCapacity = 8
	historyMaxCapacity     = 1024
	historyGap             = 4
)

// boot is the state of a machine that a restart clears: its resources, their versions and their watch history.
type boot struct {
	state    state.State
	served   *server.State // the state behind the access policy
	bookmark bookmarkMask
}

func newBoot(unsupported []resource.Type) *boot {
	build := inmem.NewStateWithOptions(
		inmem.WithHistoryInitialCapacity(historyInitialCapacity),
		inmem.WithHistoryMaxCapacity(historyMaxCapacity),
		inmem.WithHistoryGap(historyGap),
	)
	core := namespaced.NewState(func(ns resource.Namespace) state.CoreState {
		if ns == meta.NamespaceName {
			return sharedDefinitions()
		}

		return build(ns)
	})

	return &boot{
		state:    state.WrapCore(core),
		served:   server.NewState(state.Filter(core, accessPolicy{unsupported}.check)),
		bookmark: newBookmarkMask(),
	}
}

// withoutHistory returns a copy that does not accept earlier bookmarks.
func (b *boot) withoutHistory() *boot {
	forgetful := *b
	forgetful.bookmark = newBookmarkMask()

	return &forgetful
}

// copyInto publishes the resources of this boot in the next one, where their versions start again.
func (b *boot) copyInto(ctx context.Context, next *boot) error {
	for _, definition := range definitions {
		if definition.DefaultNamespace == meta.NamespaceName {
			continue // shared
		}

		items, err := b.state.List(ctx, resource.NewMetadata(definition.DefaultNamespace, definition.Type, "", resource.VersionUndefined))
		if err != nil {
			return fmt.Errorf("list %s: %w", definition.Type, err)
		}

		for _, item := range items.Items {
			owner := item.Metadata().Owner()

			if err := next.state.Create(ctx, item.DeepCopy(), state.WithCreateOwner(owner)); err != nil {
				return fmt.Errorf("restore %s: %w", item.Metadata(), err)
			}
		}
	}

	return nil
}

// bookmarkMask invalidates bookmarks of other boots. The in-memory state starts each bookmark with a random cookie per process. All
// machines of this process share it, so each boot masks it in both directions. A bookmark of another boot then has a wrong cookie, which
// the state rejects as Talos does after a reboot.
type bookmarkMask uint64

const bookmarkLength = 16

func newBookmarkMask() bookmarkMask {
	return bookmarkMask(rand.Uint64()) //nolint:gosec // not security-relevant
}

func (m bookmarkMask) apply(bookmark []byte) []byte {
	if len(bookmark) != bookmarkLength {
		return bookmark
	}

	masked := slices.Clone(bookmark)
	binary.BigEndian.PutUint64(masked, binary.BigEndian.Uint64(bookmark)^uint64(m))

	return masked
}
