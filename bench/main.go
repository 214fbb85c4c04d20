// Command bench measures paced beside its peers: what package jetstream offers
// for the same task, and a floor, the least that nats.go itself costs.
//
//	go run ./bench                        all cases, as Markdown tables
//	go run ./bench -case ordered -runs 9  some
//	go run ./bench -full                  medians for the long case, too
//	go run ./bench -json FILE             each comparison as a row
//	go run ./bench -svg FILE              the picture: how much waits in a buffer
//	go run ./bench -profile DIR           with a CPU profile of each run
//
// The server runs in a process of its own, and so does each single run of each
// contestant, so that CPU time, heap and garbage collector belong to it alone.
// Runs are interleaved (A B C, B C A, …) because a shared machine is not equally
// fast all the time; the tables show medians and, in brackets, the extremes.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// roleEnv tells a child process what it is; the rest of its instructions is
// its first argument.
const roleEnv = "PACED_BENCH_ROLE"

func main() {
	var err error
	switch os.Getenv(roleEnv) {
	case "server":
		err = serve(os.Args[1])
	case "client":
		err = measure(os.Args[1])
	default:
		err = compare()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	only, who, json, svg, profile string
	n, runs                       int
	full                          bool
	quiet                         float64
}

func compare() error {
	var names []string
	for _, c := range cases {
		names = append(names, c.name)
	}
	var o options
	flag.StringVar(&o.only, "case", "", "cases to run, separated by commas: "+strings.Join(names, ", ")+" (default all but picture)")
	flag.StringVar(&o.who, "contestants", "", "contestants to run, separated by commas (default all)")
	flag.IntVar(&o.n, "n", 0, "messages for each loop, instead of each case's own number")
	flag.IntVar(&o.runs, "runs", 0, "runs of each contestant (default 3; 5 in the first case; 1 in the long one)")
	flag.BoolVar(&o.full, "full", false, "take medians of the long case, too")
	flag.StringVar(&o.json, "json", "", "write the comparisons to this file")
	flag.StringVar(&o.svg, "svg", "", "run only the case picture and draw it into this file")
	flag.Float64Var(&o.quiet, "quiet", 1, "repeat a run, up to 4 times, while other processes use more than this share of the machine")
	flag.StringVar(&o.profile, "profile", "", "write a CPU profile of each run into this directory")
	flag.Parse()
	if o.svg != "" {
		o.only = pictureName
	}

	chosen, err := o.choose()
	if err != nil {
		return err
	}
	if o.profile != "" {
		if err := os.MkdirAll(o.profile, 0o777); err != nil {
			return err
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	srv, err := startServer(ctx, chosen)
	if err != nil {
		return err
	}
	defer srv.stop()

	printHead(os.Stdout)
	all := []row{}
	var verdicts []verdict
	for i := range chosen {
		c := &chosen[i]
		results, err := c.run(ctx, srv, &o)
		if err != nil {
			return fmt.Errorf("case %s: %w", c.name, err)
		}
		rows := c.rows(results)
		c.print(os.Stdout, results, rows)
		verdicts = append(verdicts, c.judge(results, rows)...)
		all = append(all, rows...)
		if o.svg != "" {
			if err := os.WriteFile(o.svg, draw(c, results), 0o666); err != nil {
				return err
			}
		}
	}
	printVerdicts(os.Stdout, verdicts)
	printWorse(os.Stdout, all)
	if o.json == "" {
		return nil
	}
	data, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(o.json, append(data, '\n'), 0o666)
}

func (o *options) choose() ([]benchCase, error) {
	pick := func(list, name string) bool { return strings.Contains(","+list+",", ","+name+",") }
	var chosen []benchCase
	for _, c := range cases {
		if o.only == "" && c.name == pictureName || o.only != "" && !pick(o.only, c.name) {
			continue
		}
		var some []contestant
		for _, p := range c.contestants {
			if o.who == "" || pick(o.who, p.name) {
				some = append(some, p)
			}
		}
		c.contestants = some
		if o.n > 0 {
			c.n = o.n
		}
		chosen = append(chosen, c)
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no case %q", o.only)
	}
	return chosen, nil
}

func (o *options) runsOf(c *benchCase) int {
	switch {
	case o.runs > 0:
		return o.runs
	case c.phases != nil, c.long && !o.full:
		return 1
	case c.name == cases[0].name:
		return 5
	}
	return 3
}

// run lets every contestant of a case run in turn, several times.
func (c *benchCase) run(ctx context.Context, srv *serverProcess, o *options) (map[string][]result, error) {
	nc, err := nats.Connect(srv.Direct)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	defer func() { _ = clearStreams(context.WithoutCancel(ctx), js) }()

	// The server tells of each consumer that is made.
	var made atomic.Int64
	if _, err := nc.Subscribe("$JS.EVENT.ADVISORY.CONSUMER.CREATED.>", func(*nats.Msg) { made.Add(1) }); err != nil {
		return nil, err
	}

	results := map[string][]result{}
	runs := o.runsOf(c)
	for i := range runs {
		for k := range c.contestants {
			// Each round begins with another one, so that no contestant always
			// follows the same.
			p := c.contestants[(i+k)%len(c.contestants)]
			if i+k == 0 || c.every > 0 {
				if err := clearStreams(ctx, js); err != nil {
					return nil, err
				}
				if err := c.prepare(ctx, js, c); err != nil {
					return nil, err
				}
			}
			j := job{Case: c.name, Contestant: p.name, N: c.n, URL: srv.url(c.rtt)}
			if o.profile != "" {
				j.Profile = filepath.Join(o.profile, fmt.Sprintf("%s-%s-%d.pprof", c.name, p.name, i+1))
			}
			r, err := j.quietly(ctx, srv, c, o.quiet)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			if err := clearConsumers(ctx, js); err != nil {
				return nil, err
			}
			// Its answers were behind the advisories.
			r.Values["rebuilds"] = max(0, float64(int(made.Swap(0))-p.loopsIn(c)))
			fmt.Fprintf(os.Stderr, "%s: run %d of %d: %s %s\n", c.name, i+1, runs, p.name, c.brief(r))
			results[p.name] = append(results[p.name], r)
		}
	}
	return results, nil
}

// job is one run of one contestant in a process of its own.
type job struct {
	Case, Contestant string
	N                int
	URL              string
	Profile          string
}

// quietly takes the first run that the rest of the machine left alone, or the
// one that it disturbed least.
func (j *job) quietly(ctx context.Context, srv *serverProcess, c *benchCase, quiet float64) (best result, err error) {
	for i := range 5 {
		if i > 0 {
			time.Sleep(time.Duration(i) * time.Second)
		}
		n := listen(srv)
		r, err := j.run(ctx, c)
		if err != nil {
			return r, err
		}
		r.Values["others"] = 100 * n.share()
		r.Values["server cpu/msg"] = (srv.cpuTime() - n.server).Seconds() * 1e6 / r.Values["messages"]
		if i == 0 || r.Values["others"] < best.Values["others"] {
			best = r
		}
		if best.Values["others"] <= 100*quiet {
			break
		}
	}
	return best, nil
}

func (j *job) run(ctx context.Context, c *benchCase) (r result, err error) {
	// A contestant that hangs must not hang the others.
	ctx, cancel := context.WithTimeout(ctx, c.timeout()+time.Minute)
	defer cancel()
	cmd, err := child(ctx, "client", j)
	if err != nil {
		return r, err
	}
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		return r, errors.Join(err, ctx.Err())
	}
	return r, json.Unmarshal(out.Bytes(), &r)
}

// child prepares this program to run again in another role. It is killed when
// ctx is done.
func child(ctx context.Context, role string, instructions any) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	arg, err := json.Marshal(instructions)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, string(arg))
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.Stderr = os.Stderr
	return cmd, nil
}
