package main

import (
	"fmt"
	"strings"
)

// counts are how many Nodes have come how far.
type counts struct {
	registered, released, allocated, approved, issued, done int
	waiting                                                 map[string][]record // registered and not done, by what they wait for
}

func (d *demo) counts() counts {
	c := counts{waiting: map[string][]record{}}

	for _, r := range d.observer.list(d.fleet) {
		for count, reached := range map[*int]bool{
			&c.registered: !r.registered.IsZero(),
			&c.released:   !r.released.IsZero(),
			&c.allocated:  !r.allocated.IsZero(),
			&c.approved:   !r.certificate.approved.IsZero(),
			&c.issued:     !r.certificate.issued.IsZero(),
			&c.done:       r.done(),
		} {
			if reached {
				*count++
			}
		}

		if !r.registered.IsZero() && !r.done() {
			step, _ := r.waitsFor()
			c.waiting[step] = append(c.waiting[step], r)
		}
	}

	return c
}

func (d *demo) progress(s *screen) []string {
	var (
		c     = d.counts()
		total = len(d.fleet.members)
		lines = []string{
			s.label("Nodes registered") + s.bar(c.registered, total),
			s.label("initialized") + s.bar(c.released, total),
			s.label("pod CIDRs assigned") + s.bar(c.allocated, total),
			s.label("CSRs approved") + s.bar(c.approved, total),
			s.label("certificates issued") + s.bar(c.issued, total),
		}
	)

	for _, step := range steps {
		if waiting := c.waiting[step]; len(waiting) > 0 {
			lines = append(lines, "waiting for "+step+": "+summary(waiting))
		}
	}

	return lines
}

// steps are what a Node waits for, in order.
var steps = []string{"initialization", "a pod CIDR", "CSR approval", "a certificate", "an update"}

// waitsFor returns the step that a Node that is not done waits for, and the reason according to Events, if there is one.
func (r record) waitsFor() (step, reason string) {
	switch {
	case r.released.IsZero():
		return steps[0], r.said
	case r.allocated.IsZero():
		return steps[1], r.said
	case r.certificate.approved.IsZero():
		return steps[2], r.certificate.said
	case r.certificate.issued.IsZero():
		return steps[3], r.certificate.said
	default:
		return steps[4], r.said
	}
}

// summary names the first Nodes that have a reason, or all if they are few, and counts the others.
func summary(waiting []record) string {
	const most = 3

	var parts []string

	for _, r := range waiting {
		if _, reason := r.waitsFor(); len(parts) < most && (reason != "" || len(waiting) <= most) {
			parts = append(parts, described(r))
		}
	}

	switch more := len(waiting) - len(parts); {
	case len(parts) == 0:
		parts = append(parts, fmt.Sprintf("%d Nodes", more))
	case more > 0:
		parts = append(parts, fmt.Sprintf("%d more", more))
	}

	return strings.Join(parts, ", ")
}

// described returns the name of a Node with the reason why it waits.
func described(r record) string {
	if _, reason := r.waitsFor(); reason != "" {
		return r.member.title() + ": " + reason
	}

	return r.member.title()
}

// indented indents every line of text.
func indented(text []byte) string {
	return "  " + strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", "\n  ") + "\n"
}
