package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// metric is what is measured: one column of a table.
type metric struct {
	unit   string
	digits int
	more   bool // is better
}

var known = map[string]metric{
	"msgs/s":         {more: true},
	"seconds":        {unit: "s", digits: 2},
	"cpu/msg":        {unit: "µs", digits: 2},
	"server cpu/msg": {unit: "µs", digits: 2},
	"allocs/msg":     {digits: 3},
	"peak heap":      {unit: "MB", digits: 1},
	"waiting":        {unit: "ms of work"},
	"in body":        {unit: "% of the time", digits: 1, more: true},
	"p50":            {unit: "µs"},
	"p99":            {unit: "µs"},
	"goroutines":     {digits: 2},
	"heap/loop":      {unit: "kB", digits: 1},
	"stack/loop":     {unit: "kB", digits: 1},
	"cpu/loop":       {unit: "µs each second", digits: 1},
	"reconnects":     {},
}

func (m metric) print(v float64) string { return fmt.Sprintf("%.*f", m.digits, v) }

// printHead says what the tables mean and where they are from.
func printHead(w io.Writer) {
	fmt.Fprintf(w, `Measured %s: %d CPUs, %s/%s, %s, nats.go %s, nats-server %s.

Medians, in brackets the extremes. × is paced divided by the line's contestant, the
median of the rounds. cpu/msg: user and system time of the client's process. peak
heap: spans in use, garbage included, sampled. waiting: what has come and not been
handed to the body, at most, in the second half of a run. in body: the loops' time that
the body took; a body that sleeps sleeps longer in a process that receives something.
`, time.Now().UTC().Format("2006-01-02 15:04 MST"), runtime.NumCPU(), runtime.GOOS, runtime.GOARCH,
		runtime.Version(), nats.Version, server.VERSION)
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
	Ratio    float64 `json:"ratio"` // paced / peer, the median over the rounds; 0 if the peer's is 0
}

// rows compares paced with every other contestant.
func (c *benchCase) rows(results map[string][]result) []row {
	rows := []row{}
	mine := results[pacedName]
	for _, p := range c.contestants {
		its := results[p.name]
		if p.name == pacedName || len(mine) == 0 {
			continue
		}
		for _, name := range c.metrics {
			r := row{Case: c.name, Metric: name, PeerName: p.name}
			r.Paced, _, _ = spread(mine, name)
			r.Peer, _, _ = spread(its, name)
			var ratios []float64
			for i := range its {
				if v := its[i].Values[name]; v != 0 {
					ratios = append(ratios, mine[i].Values[name]/v)
				}
			}
			if len(ratios) > 0 {
				r.Ratio, _, _ = median(ratios)
			}
			rows = append(rows, r)
		}
	}
	return rows
}

// spread returns median, least and greatest.
func spread(rs []result, name string) (mid, least, greatest float64) {
	var v []float64
	for _, r := range rs {
		v = append(v, r.Values[name])
	}
	return median(v)
}

// median sorts v and returns its median, least and greatest.
func median(v []float64) (mid, least, greatest float64) {
	if len(v) == 0 {
		return 0, 0, 0
	}
	slices.Sort(v)
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2, v[0], v[n-1]
}

// brief is the line of a run.
func (c *benchCase) brief(r result) string {
	var s []string
	for _, name := range append(slices.Clone(c.metrics[:min(3, len(c.metrics))]), "others") {
		s = append(s, fmt.Sprintf("%s %s", name, known[name].print(r.Values[name])))
	}
	return strings.Join(s, ", ")
}

func (c *benchCase) print(w io.Writer, results map[string][]result, rows []row) {
	fmt.Fprintf(w, "\n### %s\n\n%s: %d of %d B", c.name, c.about, c.n, c.size)
	if c.loops > 1 {
		fmt.Fprintf(w, " for each loop")
	}
	fmt.Fprintf(w, "; runs: %d.\n\n", len(results[c.contestants[0].name]))

	var lines [][]string
	head := []string{""}
	for _, name := range c.metrics {
		head = append(head, strings.TrimSpace(name+" "+known[name].unit), "×")
	}
	lines = append(lines, head)
	var notes []string
	for _, p := range c.contestants {
		cells := []string{p.name}
		for _, name := range c.metrics {
			m := known[name]
			mid, least, greatest := spread(results[p.name], name)
			cell := m.print(mid)
			if least != greatest {
				cell += " (" + m.print(least) + "–" + m.print(greatest) + ")"
			}
			ratio := ""
			if r := find(rows, name, p.name); r != nil && r.Ratio != 0 {
				ratio = fmt.Sprintf("%.2f", r.Ratio)
			}
			cells = append(cells, cell, ratio)
		}
		lines = append(lines, cells)
		notes = append(notes, trouble(p.name, results[p.name])...)
	}
	table(w, lines)
	if len(notes) > 0 {
		fmt.Fprintf(w, "\n%s.\n", strings.Join(notes, "; "))
	}
}

// trouble tells what happened to a contestant that should not have.
func trouble(name string, rs []result) (notes []string) {
	for _, kind := range []struct{ value, text string }{
		{"unfinished", "%s: did not finish in time, runs: %d"},
		{"rebuilds", "%s: consumers made anew: %d"},
		{"reconnects", "%s: reconnects: %d"},
		{"errors", "%s: errors told to the connection's handler: %d"},
	} {
		sum := 0
		for _, r := range rs {
			sum += int(r.Values[kind.value])
		}
		if sum > 0 {
			notes = append(notes, fmt.Sprintf(kind.text, name, sum))
		}
	}
	if most := slices.MaxFunc(rs, func(a, b result) int { return int(a.Values["others"] - b.Values["others"]) }); most.Values["others"] > 10 {
		notes = append(notes, fmt.Sprintf("%s: other processes used up to %.0f %% of the machine", name, most.Values["others"]))
	}
	return notes
}

// table writes a Markdown table whose columns are aligned.
func table(w io.Writer, lines [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 1, ' ', 0)
	for i, cells := range lines {
		fmt.Fprintln(t, "| "+strings.Join(cells, "\t| ")+"\t|")
		if i == 0 {
			fmt.Fprintln(t, strings.Repeat("|---\t", len(cells))+"|")
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

// verdict is a bound and what was found.
type verdict struct {
	text  []string
	holds bool
}

// judge holds a case against what was wanted of it.
func (c *benchCase) judge(results map[string][]result, rows []row) (vs []verdict) {
	for _, w := range c.wants {
		found, _, _ := spread(results[pacedName], w.metric)
		unit, relation := " "+known[w.metric].unit, "at most"
		if w.least {
			relation = "at least"
		}
		if w.peer != "" {
			r := find(rows, w.metric, w.peer)
			if r == nil {
				continue // not among those that ran
			}
			found, unit = r.Ratio, " × "+w.peer
			if w.above {
				found, unit = r.Paced-r.Peer, " above "+w.peer
			}
		}
		v := verdict{holds: w.least && found >= w.bound || !w.least && found <= w.bound}
		v.text = []string{c.name, w.metric, fmt.Sprintf("%s %.4g%s", relation, w.bound, unit), fmt.Sprintf("%.3g", found)}
		vs = append(vs, v)
	}
	return vs
}

func printVerdicts(w io.Writer, vs []verdict) {
	if len(vs) == 0 {
		return
	}
	lines := [][]string{{"case", "metric", "wanted", "found", ""}}
	for _, v := range vs {
		word := "missed"
		if v.holds {
			word = "holds"
		}
		lines = append(lines, append(v.text, word))
	}
	fmt.Fprint(w, "\n### Wanted\n\n")
	table(w, lines)
}

// printWorse lists where a peer is better by more than 5 %. What is there as a
// bound, such as the floor, is no peer.
func printWorse(w io.Writer, rows []row) {
	lines := [][]string{{"case", "metric", "paced", "peer", "", "×"}}
	for _, r := range rows {
		m := known[r.Metric]
		worse := !m.more && r.Ratio > 1.05 || m.more && r.Ratio < 0.95
		if caseNamed(r.Case).contestant(r.PeerName).bound || r.Ratio == 0 || !worse {
			continue
		}
		lines = append(lines, []string{r.Case, strings.TrimSpace(r.Metric + " " + m.unit), m.print(r.Paced), r.PeerName, m.print(r.Peer), fmt.Sprintf("%.2f", r.Ratio)})
	}
	if len(lines) > 1 {
		fmt.Fprint(w, "\n### Worse than a peer, by more than 5 %\n\n")
		table(w, lines)
	}
}
