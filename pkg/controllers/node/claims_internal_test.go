package node

import (
	"fmt"
	"sync"
	"testing"
)

func TestClaims(t *testing.T) {
	const id = "talos://metal/u-1"

	for _, test := range []struct {
		rule   string
		before func(*claims)
		want   string
	}{
		{"an ID that nobody has is taken", func(*claims) {}, ""},
		{"one that the Node has is taken again", func(c *claims) { c.take(id, "a") }, ""},
		{"one that another Node has is not", func(c *claims) { c.take(id, "b") }, "b"},
		{"the first of two others has it", func(c *claims) { c.take(id, "b"); c.take(id, "c") }, "b"},
		{"one that the other gave up is taken", func(c *claims) { c.take(id, "b"); c.release("b") }, ""},
		{"one that the other changed for another is taken", func(c *claims) { c.take(id, "b"); c.take("talos://metal/u-2", "b") }, ""},
		{"asking in vain does not cost what a Node has", func(c *claims) { c.take(id, "b"); c.take("other", "c"); c.take("other", "b") }, "b"},
		{"a Node that asked in vain gives up nothing of the other's", func(c *claims) { c.take(id, "b"); c.take(id, "c"); c.release("c") }, "b"},
		{"giving up twice is fine", func(c *claims) { c.take(id, "b"); c.release("b"); c.release("b") }, ""},
		{"a Node that has nothing gives up nothing", func(c *claims) { c.release("a") }, ""},
	} {
		t.Run(test.rule, func(t *testing.T) {
			c := newClaims()
			test.before(c)

			if got := c.take(id, "a"); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestOfManyAtOnceOneClaims(t *testing.T) {
	c := newClaims()

	var (
		group   sync.WaitGroup
		mu      sync.Mutex
		winners []string
	)

	for i := range 50 {
		group.Go(func() {
			if name := fmt.Sprintf("worker-%d", i); c.take("talos://metal/u-1", name) == "" {
				mu.Lock()
				defer mu.Unlock()

				winners = append(winners, name)
			}
		})
	}

	group.Wait()

	if len(winners) != 1 {
		t.Errorf("claimed by %v", winners)
	}
}
