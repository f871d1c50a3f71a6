package main

import (
	"cmp"
	"fmt"
	"maps"
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
	rows, left := choose(records)

	var text strings.Builder

	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tPLATFORM\tPROVIDERID\tZONE\tINTERNAL\tEXTERNAL\tINITIALISED AFTER\t")

	for _, r := range rows {
		fmt.Fprintln(table, strings.Join(cells(r), "\t")+"\t")
	}

	_ = table.Flush()

	head, body, _ := strings.Cut(text.String(), "\n")
	s.printf("\n%s\n%s", s.in(bold, strings.TrimRight(head, " ")), trimLines(body))

	if len(left) > 0 {
		s.printf("… and %d more: %s", len(left), byPlatform(left))
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

// choose divides the records into those that the table shows and those it leaves out.
func choose(records []record) (rows, left []record) {
	if len(records) <= wholeTable {
		return records, nil
	}

	for i, r := range records {
		if i < tableRows || (!r.done() && len(rows) < maxRows) {
			rows = append(rows, r)
		} else {
			left = append(left, r)
		}
	}

	return rows, left
}

func cells(r record) []string {
	name := r.member.name
	if r.member.remark != "" {
		name += " (" + r.member.remark + ")"
	}

	if r.node == nil {
		return []string{name, "-", "-", "-", "-", "-", "not registered"}
	}

	after := "not yet"
	if !r.released.IsZero() {
		after = inSeconds(r.took())
	}

	return []string{
		name,
		orDash(r.node.Labels[labelPlatform]),
		orDash(r.node.Spec.ProviderID),
		orDash(r.node.Labels[corev1.LabelTopologyZone]),
		orDash(strings.Join(addressesOf(r.node, corev1.NodeInternalIP), ",")),
		orDash(strings.Join(addressesOf(r.node, corev1.NodeExternalIP), ",")),
		after,
	}
}

func orDash(text string) string { return cmp.Or(text, "-") }

// byPlatform is how many machines there are of each platform, and how many of them are initialised.
func byPlatform(records []record) string {
	counts, done := map[string]int{}, 0

	for _, r := range records {
		counts[r.member.origin.platform.Platform]++

		if r.done() {
			done++
		}
	}

	var parts []string

	for _, platform := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d %s", counts[platform], platform))
	}

	return fmt.Sprintf("%s; %d of them initialised", strings.Join(parts, ", "), done)
}

// printTimes shows how long Nodes had to wait, all of them and those of ordinary machines.
func (s *screen) printTimes(records []record) {
	var all, ordinary []time.Duration

	for _, r := range records {
		if r.released.IsZero() {
			continue
		}

		all = append(all, r.took())

		if !r.member.pending && r.member.remark != "slow" {
			ordinary = append(ordinary, r.took())
		}
	}

	if len(all) == 0 {
		return
	}

	s.printf("\nFrom the creation of a Node to the removal of its taint: %s", percentiles(all))

	if 0 < len(ordinary) && len(ordinary) < len(all) {
		s.printf("Without the slow machine and the late one:               %s", percentiles(ordinary))
	}
}

// printVerdict says how many Nodes are right.
func (s *screen) printVerdict(records []record) {
	done := 0

	for _, r := range records {
		if r.done() {
			done++
		}
	}

	colour := green
	if done < len(records) {
		colour = red
	}

	s.printf("%s as their machines say.", s.in(colour, fmt.Sprintf("%d of %d nodes initialised,", done, len(records))))
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
