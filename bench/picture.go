package main

import (
	"fmt"
	"strings"
	"time"
)

const pictureName = "picture"

// phase is a stretch of time in which the body takes as long.
type phase struct{ lasts, body time.Duration }

func bodyAt(phases []phase, t time.Duration) time.Duration {
	for _, p := range phases[:len(phases)-1] {
		if t < p.lasts {
			return p.body
		}
		t -= p.lasts
	}
	return phases[len(phases)-1].body
}

// Measures of the drawing, in pixels.
const (
	plotLeft, plotTop, plotWidth, plotHeight = 70, 48, 720, 260
)

// draw draws what waited for the body, over time, as SVG.
func draw(c *benchCase, results map[string][]result) []byte {
	colours := []string{"#0969da", "#bc4c00", "#8250df"}
	most := 1
	for _, rs := range results {
		for _, s := range rs[0].Waiting {
			most = max(most, s.Waiting)
		}
	}
	top := (most + 99) / 100 * 100
	x := func(t time.Duration) float64 { return plotLeft + plotWidth*t.Seconds()/c.lasts.Seconds() }
	y := func(n int) float64 { return plotTop + plotHeight*(1-float64(n)/float64(top)) }

	var b strings.Builder
	text := func(x, y float64, anchor, colour, s string) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s">%s</text>`+"\n", x, y, anchor, colour, s)
	}
	line := func(x1, y1, x2, y2 float64) {
		fmt.Fprintf(&b, `<path d="M%.1f %.1fL%.1f %.1f" stroke="#d0d7de"/>`+"\n", x1, y1, x2, y2)
	}
	const black = "#1f2328"
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 370" font-family="sans-serif" font-size="13">`+"\n")
	fmt.Fprintf(&b, `<rect width="820" height="370" fill="#fff"/>`+"\n")
	text(plotLeft, 20, "start", black, "Messages on the client that wait for the loop body")

	var from time.Duration
	for i, p := range c.phases {
		if i%2 == 1 {
			fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="#f6f8fa"/>`+"\n",
				x(from), plotTop, x(p.lasts)-plotLeft, plotHeight)
		}
		text(x(from+p.lasts/2), plotTop-8, "middle", black, fmt.Sprintf("body %v", p.body))
		from += p.lasts
	}
	for i := range 5 {
		n := top * i / 4
		line(plotLeft, y(n), plotLeft+plotWidth, y(n))
		text(plotLeft-8, y(n)+4, "end", black, fmt.Sprint(n))
	}
	for t := time.Duration(0); t <= c.lasts; t += time.Second {
		text(x(t), plotTop+plotHeight+18, "middle", black, fmt.Sprint(int(t.Seconds()), " s"))
	}
	for i, p := range c.contestants {
		fmt.Fprintf(&b, `<path fill="none" stroke="%s" stroke-width="1.5" d="`, colours[i%len(colours)])
		step, command := c.lasts/(plotWidth/2), "M"
		for bin := time.Duration(0); bin < c.lasts; bin += step {
			n := -1
			for _, s := range results[p.name][0].Waiting {
				if s.At >= bin && s.At < bin+step {
					n = max(n, s.Waiting)
				}
			}
			if n >= 0 {
				fmt.Fprintf(&b, "%s%.1f %.1f", command, x(bin), y(n))
				command = "L"
			}
		}
		b.WriteString("\"/>\n")
		text(plotLeft+float64(i)*110, plotTop+plotHeight+44, "start", colours[i%len(colours)], "■ "+p.name)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}
