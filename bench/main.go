// Command bench measures paced beside its peers: what package jetstream offers
// for the same task, and a floor, the least that nats.go itself costs.
//
//	go run ./bench                       all cases
//	go run ./bench -case ordered -runs 9
//	go run ./bench -profile /tmp/prof    with a CPU profile of each run
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

func compare() error {
	var names []string
	for _, c := range cases {
		names = append(names, c.name)
	}
	only := flag.String("case", "", "cases to run, separated by commas: "+strings.Join(names, ", ")+" (default all)")
	who := flag.String("contestants", "", "contestants to run, separated by commas (default all)")
	n := flag.Int("n", 0, "messages, instead of each case's own number")
	runs := flag.Int("runs", 5, "runs of each contestant")
	jsonFile := flag.String("json", "", "write the ratios to this file")
	quiet := flag.Float64("quiet", 1, "repeat a run, up to 4 times, while other processes use more than this share of the machine")
	profile := flag.String("profile", "", "write a CPU profile of each run into this directory")
	flag.Parse()

	chosen, err := choose(*only, *who, *n)
	if err != nil {
		return err
	}
	if *profile != "" {
		if err := os.MkdirAll(*profile, 0o777); err != nil {
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

	var all []row
	for i := range chosen {
		c := &chosen[i]
		results, err := c.run(ctx, srv, *runs, *quiet, *profile)
		if err != nil {
			return fmt.Errorf("case %s: %w", c.name, err)
		}
		rows := c.rows(results)
		c.print(os.Stdout, *runs, results, rows)
		all = append(all, rows...)
	}
	if *jsonFile == "" {
		return nil
	}
	data, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(*jsonFile, append(data, '\n'), 0o666)
}

func choose(only, who string, n int) ([]benchCase, error) {
	pick := func(list, name string) bool {
		return list == "" || strings.Contains(","+list+",", ","+name+",")
	}
	var chosen []benchCase
	for _, c := range cases {
		if !pick(only, c.name) {
			continue
		}
		var some []contestant
		for _, p := range c.contestants {
			if pick(who, p.name) {
				some = append(some, p)
			}
		}
		c.contestants = some
		if n > 0 {
			c.n = n
		}
		chosen = append(chosen, c)
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no case %q", only)
	}
	return chosen, nil
}

// run lets every contestant of a case run in turn, runs times.
func (c *benchCase) run(ctx context.Context, srv *serverProcess, runs int, quiet float64, profile string) (map[string][]result, error) {
	nc, err := nats.Connect(srv.Direct)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(os.Stderr, "%s: preparing\n", c.name)
	if err := c.prepare(ctx, js, c); err != nil {
		return nil, err
	}
	defer func() { _ = js.DeleteStream(context.WithoutCancel(ctx), streamName) }()

	results := map[string][]result{}
	for i := range runs {
		for k := range c.contestants {
			// Each round begins with another one, so that no contestant always
			// follows the same.
			p := c.contestants[(i+k)%len(c.contestants)]
			j := job{Case: c.name, Contestant: p.name, N: c.n, URL: srv.url(c.rtt)}
			if profile != "" {
				j.Profile = filepath.Join(profile, fmt.Sprintf("%s-%s-%d.pprof", c.name, p.name, i+1))
			}
			r, err := j.quietly(ctx, srv, quiet)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			fmt.Fprintf(os.Stderr, "%s: run %d of %d: %s %.0f msgs/s, others %.0f%%\n",
				c.name, i+1, runs, p.name, r.rate(), 100*r.Others)
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
func (j *job) quietly(ctx context.Context, srv *serverProcess, quiet float64) (best result, err error) {
	for i := range 5 {
		if i > 0 {
			time.Sleep(time.Duration(i) * time.Second)
		}
		n := listen(srv)
		r, err := j.run(ctx)
		if err != nil {
			return r, err
		}
		r.Others, r.ServerCPU = n.share(), srv.cpuTime()-n.server
		if i == 0 || r.Others < best.Others {
			best = r
		}
		if best.Others <= quiet {
			break
		}
	}
	return best, nil
}

func (j *job) run(ctx context.Context) (r result, err error) {
	// A contestant that hangs must not hang the others.
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
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
