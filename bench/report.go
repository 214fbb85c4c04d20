package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// metric is what is measured: one column of the table.
type metric struct {
	name  string
	of    func(*result) float64
	print func(float64) string
}

var columns = []metric{
	{"msgs/s", (*result).rate, digits(0)},
	{"cpu/msg", func(r *result) float64 { return r.perMessage(float64(r.CPU) / float64(time.Microsecond)) }, digits(2)},
	{"server cpu/msg", func(r *result) float64 { return r.perMessage(float64(r.ServerCPU) / float64(time.Microsecond)) }, digits(2)},
	{"allocs/msg", func(r *result) float64 { return r.perMessage(float64(r.Mallocs)) }, digits(3)},
	{"peak heap", func(r *result) float64 { return float64(r.PeakHeap) / (1 << 20) }, digits(1)},
}

const units = "cpu/msg in µs, user and system; peak heap in MiB, garbage included;\nothers: share of the machine that other processes used"

func (r *result) perMessage(v float64) float64 { return v / float64(r.Messages) }

func digits(n int) func(float64) string {
	return func(v float64) string { return fmt.Sprintf("%.*f", n, v) }
}

// row is one comparison. The values are medians over all runs. The ratio is
// taken in each round, between runs that were neighbours in time, because a
// shared machine drifts by more than the contestants differ.
type row struct {
	Case     string  `json:"case"`
	Metric   string  `json:"metric"`
	Paced    float64 `json:"paced"`
	Peer     float64 `json:"peer"`
	PeerName string  `json:"peer_name"`
	Ratio    float64 `json:"ratio"` // paced / peer, the median over the rounds
}

// rows compares paced with every other contestant.
func (c *benchCase) rows(results map[string][]result) []row {
	var rows []row
	if len(results[pacedName]) == 0 {
		return nil
	}
	for _, p := range c.contestants {
		if p.name == pacedName {
			continue
		}
		for _, m := range columns {
			mine, _, _ := spread(results[pacedName], m.of)
			its, _, _ := spread(results[p.name], m.of)
			if its == 0 {
				continue // not measured here
			}
			var ratios []float64
			for i := range results[p.name] {
				ratios = append(ratios, m.of(&results[pacedName][i])/m.of(&results[p.name][i]))
			}
			ratio, _, _ := median(ratios)
			rows = append(rows, row{c.name, m.name, mine, its, p.name, ratio})
		}
	}
	return rows
}

// spread returns median, least and greatest.
func spread(rs []result, of func(*result) float64) (mid, least, greatest float64) {
	var v []float64
	for i := range rs {
		v = append(v, of(&rs[i]))
	}
	return median(v)
}

// median sorts v and returns its median, least and greatest.
func median(v []float64) (mid, least, greatest float64) {
	slices.Sort(v)
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2, v[0], v[n-1]
}

func (c *benchCase) print(w io.Writer, runs int, results map[string][]result, rows []row) {
	fmt.Fprintf(w, "\n%s: %s\n%d messages of %d B in a memory stream; medians of %d runs; %s\n\n",
		c.name, c.about, c.n, c.size, runs, units)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(cells ...string) { fmt.Fprintln(t, strings.Join(cells, "\t")) }

	head := []string{""}
	for _, m := range columns {
		head = append(head, m.name, "")
	}
	line(append(head, "rebuilds", "dropped", "errors", "others")...)
	for _, p := range c.contestants {
		cells := []string{p.name}
		for _, m := range columns {
			median, least, greatest := spread(results[p.name], m.of)
			cells = append(cells, m.print(median), "("+m.print(least)+".."+m.print(greatest)+")")
		}
		var rebuilds, dropped, errs int
		for _, r := range results[p.name] {
			rebuilds += r.Rebuilds
			dropped += r.Dropped
			errs += r.Errors
		}
		others, _, _ := spread(results[p.name], func(r *result) float64 { return r.Others })
		line(append(cells, fmt.Sprint(rebuilds), fmt.Sprint(dropped), fmt.Sprint(errs), fmt.Sprintf("%.0f%%", 100*others))...)
	}
	t.Flush()
	if len(rows) == 0 {
		return
	}

	fmt.Fprintln(w)
	head = []string{"paced against, by round"}
	for _, m := range columns {
		head = append(head, m.name)
	}
	line(head...)
	for _, p := range c.contestants {
		cells := []string{p.name}
		for _, m := range columns {
			if r := find(rows, m.name, p.name); r != nil {
				cells = append(cells, fmt.Sprintf("%.3f×", r.Ratio)+c.verdict(r))
			}
		}
		if len(cells) > 1 {
			line(cells...)
		}
	}
	t.Flush()
}

func find(rows []row, metric, peer string) *row {
	for i := range rows {
		if rows[i].Metric == metric && rows[i].PeerName == peer {
			return &rows[i]
		}
	}
	return nil
}

// verdict says what was wanted of a ratio.
func (c *benchCase) verdict(r *row) string {
	for _, w := range c.wants {
		if w.metric != r.Metric || w.peer != r.PeerName {
			continue
		}
		word, sign, bound := "ok", "≥", w.atLeast
		if w.atMost > 0 {
			sign, bound = "≤", w.atMost
		}
		if (w.atMost > 0 && r.Ratio > bound) || (w.atMost == 0 && r.Ratio < bound) {
			word = "MISSED"
		}
		return fmt.Sprintf(" (%s, %s %.4g)", word, sign, bound)
	}
	return ""
}
