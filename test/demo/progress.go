package main

import (
	"fmt"
	"strings"
)

// counts are how many Nodes have come how far.
type counts struct {
	registered, released, allocated, approved, issued, done int
	waiting                                                 []record // registered and not done
}

func (d *demo) counts() counts {
	var c counts

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
			c.waiting = append(c.waiting, r)
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

	named := worthNaming(c.waiting)
	for _, r := range named {
		lines = append(lines, "pending: "+reason(r))
	}

	if more := len(c.waiting) - len(named); more > 0 {
		lines = append(lines, fmt.Sprintf("pending: %d more", more))
	}

	return lines
}

// worthNaming returns the first pending Nodes that have a message or a remark; if only a few are pending, all of them.
func worthNaming(waiting []record) []record {
	const most = 4

	if len(waiting) <= most {
		return waiting
	}

	var named []record

	for _, r := range waiting {
		if len(named) < most && (r.said != "" || r.member.remark != "") {
			named = append(named, r)
		}
	}

	return named
}

// reason returns why the Node is pending, according to its Events.
func reason(r record) string {
	name := r.member.name
	if r.member.remark != "" {
		name += " (" + r.member.remark + ")"
	}

	if r.said == "" {
		return name
	}

	return name + ": " + r.said
}

// indented indents every line of text.
func indented(text []byte) string {
	return "  " + strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", "\n  ") + "\n"
}
