package node

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestReservations_Reserve(t *testing.T) {
	const id = "talos://metal/u-1"

	for _, test := range []struct {
		name   string
		before func(*reservations)
		want   string
	}{
		{"free", func(*reservations) {}, ""},
		{"reserved by this Node", func(c *reservations) { c.reserve(id, "a") }, ""},
		{"reserved by another Node", func(c *reservations) { c.reserve(id, "b") }, "b"},
		{"requested by two others", func(c *reservations) { c.reserve(id, "b"); c.reserve(id, "c") }, "b"},
		{"released by another Node", func(c *reservations) { c.reserve(id, "b"); c.release("b") }, ""},
		{"another Node has reserved a different one since", func(c *reservations) { c.reserve(id, "b"); c.reserve("talos://metal/u-2", "b") }, ""},
		{"another Node has failed to reserve a different one since", func(c *reservations) { c.reserve(id, "b"); c.reserve("other", "c"); c.reserve("other", "b") }, "b"},
		{"released by a Node that failed to reserve it", func(c *reservations) { c.reserve(id, "b"); c.reserve(id, "c"); c.release("c") }, "b"},
		{"released twice", func(c *reservations) { c.reserve(id, "b"); c.release("b"); c.release("b") }, ""},
		{"released by a Node without reservation", func(c *reservations) { c.release("a") }, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newReservations()
			test.before(c)

			if got, _ := c.reserve(id, "a"); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestReservations_OneOfManyConcurrentRequestsSucceeds(t *testing.T) {
	c := newReservations()

	var (
		group  sync.WaitGroup
		mu     sync.Mutex
		owners []string
	)

	for i := range 50 {
		group.Go(func() {
			name := fmt.Sprintf("worker-%d", i)
			if owner, _ := c.reserve("talos://metal/u-1", name); owner == "" {
				mu.Lock()
				defer mu.Unlock()

				owners = append(owners, name)
			}
		})
	}

	group.Wait()

	assert.Len(t, owners, 1)
}

func TestReservations_ReleaseReturnsWaitingNodes(t *testing.T) {
	r := newReservations()

	for _, name := range []string{"a", "b", "c", "d"} {
		r.request(name)
	}

	r.reserve("talos://metal/u-1", "a")
	r.reserve("talos://metal/u-1", "b")
	r.release("d")

	assert.Equal(t, []string{"b", "c"}, r.release("a"))
}

func TestReservations_ReserveReturnsNodesThatWaitForFormerReservation(t *testing.T) {
	r := newReservations()

	for _, name := range []string{"a", "b"} {
		r.request(name)
		r.reserve("talos://metal/u-1", name)
	}

	for _, test := range []struct {
		providerID string
		want       []string
	}{{"talos://metal/u-1", nil}, {"talos://metal/u-2", []string{"b"}}} {
		if owner, got := r.reserve(test.providerID, "a"); owner != "" || !slices.Equal(got, test.want) {
			t.Errorf("%s: got %q and %v, want %v", test.providerID, owner, got, test.want)
		}
	}
}
