package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	// A fleet of more than wholeTable nodes is shown in part: as many as tableRows, and those that are not as they should be.
	wholeTable = 40
	tableRows  = 20
	maxRows    = 60
)

// printTable shows the Nodes as they are.
func (s *screen) printTable(records []record) {
	rows := choose(records)

	var text strings.Builder

	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tPROVIDERID\tZONE\tCAPACITY\tINTERNAL\tEXTERNAL\tPOD CIDR\tCERTIFICATE\t")

	for _, r := range rows {
		fmt.Fprintln(table, strings.Join(cells(r), "\t")+"\t")
	}

	_ = table.Flush()

	head, body, _ := strings.Cut(text.String(), "\n")
	s.printf("\n%s\n%s", s.in(bold, strings.TrimRight(head, " ")), trimLines(body))

	if left := len(records) - len(rows); left > 0 {
		s.printf("… and %d more", left)
	}
}

// trimLines removes what the table fills up its last column with.
func trimLines(text string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimRight(line, " ")
	}

	return strings.Join(lines, "\n")
}

// choose returns the records that the table shows.
func choose(records []record) (rows []record) {
	if len(records) <= wholeTable {
		return records
	}

	for i, r := range records {
		if i < tableRows || (!r.done() && len(rows) < maxRows) {
			rows = append(rows, r)
		}
	}

	return rows
}

func cells(r record) []string {
	switch {
	case r.node == nil:
		return []string{r.member.title(), "not registered", "", "", "", "", "", ""}
	case !r.deleted.IsZero():
		return []string{r.member.title(), "deleted", "", "", "", "", "", ""}
	}

	return []string{
		r.member.title(),
		orDash(r.node.Spec.ProviderID),
		orDash(r.node.Labels[corev1.LabelTopologyZone]),
		orDash(r.node.Labels[labelCapacity]),
		orDash(strings.Join(addressesOf(r.node, corev1.NodeInternalIP), ",")),
		orDash(strings.Join(addressesOf(r.node, corev1.NodeExternalIP), ",")),
		orDash(strings.Join(r.node.Spec.PodCIDRs, ",")),
		r.certificate.state(),
	}
}

func orDash(text string) string { return cmp.Or(text, "-") }

// span is a time that every Node takes for something.
type span struct {
	what     string
	from, to func(record) time.Time
}

func registered(r record) time.Time { return r.registered }
func released(r record) time.Time   { return r.released }
func allocated(r record) time.Time  { return r.allocated }
func asked(r record) time.Time      { return r.certificate.asked }
func approved(r record) time.Time   { return r.certificate.approved }
func issued(r record) time.Time     { return r.certificate.issued }

// printTimes prints the latency of each step.
func (s *screen) printTimes(records []record) {
	initialization := span{"Node registered → taint removed", registered, released}

	s.printf("\nLatency per Node:")
	s.printTime(initialization.what, initialization.times(records))

	if ordinary := slices.DeleteFunc(slices.Clone(records), held); len(ordinary) < len(records) {
		s.printTime("  without the slow and the late machine", initialization.times(ordinary))
	}

	for _, span := range []span{
		{"Node registered → pod CIDR assigned", registered, allocated},
		{"CSR created → approved", asked, approved},
		{"CSR created → certificate issued", asked, issued},
	} {
		s.printTime(span.what, span.times(records))
	}
}

func (s *screen) printTime(what string, times []time.Duration) {
	if len(times) > 0 {
		s.printf("  %-42s  %s", what, percentiles(times))
	}
}

// printApprovalDelay explains why approvals took long if they did: they do not if the slow machine registered last.
func (s *screen) printApprovalDelay(records []record) {
	times := span{from: asked, to: approved}.times(records)
	slices.Sort(times)

	if len(times) > 0 && percentile(times, 50) > slowness {
		s.printf("CSR approval waited for the slow machine, because a new leader reads all machines before it approves a CSR.")
	}
}

// held reports whether the machine is one that delays its Node on purpose.
func held(r record) bool { return r.member.pending || r.member.remark == "slow" }

// times of the Nodes that reached this step.
func (p span) times(records []record) []time.Duration {
	var times []time.Duration

	for _, r := range records {
		if to := p.to(r); !to.IsZero() {
			times = append(times, max(0, to.Sub(p.from(r))))
		}
	}

	return times
}

// printVerdict says how many Nodes are right.
func (s *screen) printVerdict(records []record) {
	done := 0

	for _, r := range records {
		if r.done() {
			done++
		}
	}

	color := green
	if done < len(records) {
		color = red
	}

	s.printf("%s, match their machines, and have pod CIDRs and serving certificates.", s.in(color, fmt.Sprintf("%d of %d Nodes are initialized", done, len(records))))
}

func percentiles(times []time.Duration) string {
	slices.Sort(times)

	return fmt.Sprintf("p50 %s, p95 %s, max %s", inSeconds(percentile(times, 50)), inSeconds(percentile(times, 95)), inSeconds(times[len(times)-1]))
}

// percentile is the least of the sorted times that so many per cent of them do not exceed.
func percentile(sorted []time.Duration, percent int) time.Duration {
	return sorted[(len(sorted)*percent+99)/100-1]
}

// printFollowed shows what a change of a machine did to its Node.
func (s *screen) printFollowed(what, before, after string, took time.Duration) {
	s.printf("  %-8s  %s → %s  after %s", what, before, after, s.in(green, inSeconds(took)))
}

// inSeconds is a duration for people: milliseconds below a second.
func inSeconds(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}

	return fmt.Sprintf("%.2f s", d.Seconds())
}
