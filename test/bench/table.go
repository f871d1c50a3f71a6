package main

import (
	"fmt"
	"html"
	"io"
	"slices"
)

// row is what was measured of a subject.
type row struct {
	subject, name, goal string
	value               float64
	unit                string
}

// String returns the value with its unit.
func (r row) String() string {
	if r.value == 0 {
		return ""
	}

	return fmt.Sprintf("%.1f %s", r.value, r.unit)
}

// compare returns the rows of talos-ccm, each with that of another subject, or with an empty one if there is none.
func compare(rows []row) (pairs [][2]row) {
	for _, own := range rows {
		if own.subject != talosCCM {
			continue
		}

		found := false

		for _, other := range rows {
			if other.name == own.name && other.subject != talosCCM {
				found = true
				pairs = append(pairs, [2]row{own, other})
			}
		}

		if !found {
			pairs = append(pairs, [2]row{own})
		}
	}

	return pairs
}

// printTable prints the rows of one number of machines in Markdown, with the ratios to the others of the same run.
func printTable(w io.Writer, machines int, rows []row) {
	fmt.Fprintf(w, "\n%d machines\n\n| | goal | talos-ccm | | | ratio |\n|---|---|---:|---|---:|---:|\n", machines)

	for _, pair := range compare(rows) {
		own, other, ratio := pair[0], pair[1].String(), ""
		if other != "" {
			ratio = fmt.Sprintf("%.2f", own.value/pair[1].value)
		}

		fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s |\n", own.name, own.goal, own, pair[1].subject, other, ratio)
	}
}

// Sizes of the chart in pixels.
const (
	chartWidth, barsX, barsWidth = 860, 300, 400
	barHeight, groupHeight       = 12, 38
)

// colors of talos-ccm and of others.
var colors = [...]string{"#2563eb", "#9ca3af"}

// drawChart draws as SVG what was measured of talos-ccm and of others: two bars for each comparison, in proportion.
func drawChart(machines int, rows []row) []byte {
	pairs := slices.DeleteFunc(compare(rows), func(pair [2]row) bool { return pair[1].value == 0 })
	svg := fmt.Appendf(nil, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">
<rect width="100%%" height="100%%" fill="white"/>
<text x="10" y="24" font-size="15">%d machines: talos-ccm (blue) and others (gray), shorter is better</text>
`, chartWidth, 50+groupHeight*len(pairs), machines)

	for i, pair := range pairs {
		y := 42 + i*groupHeight
		svg = fmt.Appendf(svg, "<text x=\"10\" y=\"%d\">%s</text>\n", y+barHeight+4, html.EscapeString(pair[0].name))

		for j, bar := range pair {
			top, width := y+j*(barHeight+1), barsWidth*bar.value/max(pair[0].value, pair[1].value)
			svg = fmt.Appendf(svg, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/><text x=\"%.1f\" y=\"%d\" font-size=\"10\">%s %s</text>\n",
				barsX, top, width, barHeight, colors[j], barsX+width+5, top+10, bar, bar.subject)
		}
	}

	return append(svg, "</svg>\n"...)
}
