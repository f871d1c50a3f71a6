package main

import (
	"fmt"
	"html"
	"io"
	"slices"
	"strings"
)

// Sizes of the chart in pixels.
const (
	chartWidth, barsX, barsWidth = 860, 300, 400
	barHeight, groupHeight       = 12, 38
)

// drawChart draws as SVG what was measured of talos-ccm and of others: two bars for each comparison, in proportion.
func drawChart(w io.Writer, machines int, results []result) error {
	list := slices.DeleteFunc(compare(results), func(c comparison) bool { return c.other == 0 })
	height := 50 + groupHeight*len(list)

	var svg strings.Builder

	fmt.Fprintf(&svg, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">
<rect width="100%%" height="100%%" fill="white"/>
<text x="10" y="24" font-size="15">%d machines: talos-ccm (blue) and others (gray), shorter is better</text>
`, chartWidth, height, machines)

	for i, c := range list {
		y := 42 + i*groupHeight
		fmt.Fprintf(&svg, "<text x=\"10\" y=\"%d\">%s</text>\n", y+barHeight+4, html.EscapeString(c.row.name))

		for j, bar := range []struct {
			value float64
			color string
			label string
		}{
			{c.own, "#2563eb", talosCCM}, {c.other, "#9ca3af", c.name},
		} {
			width := barsWidth * bar.value / max(c.own, c.other)
			fmt.Fprintf(&svg, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/><text x=\"%.1f\" y=\"%d\" font-size=\"10\">%.1f %s %s</text>\n",
				barsX, y+j*(barHeight+1), width, barHeight, bar.color, barsX+width+5, y+j*(barHeight+1)+10, bar.value, c.unit, html.EscapeString(bar.label))
		}
	}

	svg.WriteString("</svg>\n")

	_, err := io.WriteString(w, svg.String())

	return err
}
