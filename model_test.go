package paced

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"pgregory.net/rapid"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// TestModel draws a reader, its bounds, the time its body takes and a schedule
// of troubles, plays it against a server in a bubble, and compares what was
// yielded with a model of the stream: a list of what was stored and what was
// removed. A schedule that fails is made smaller and printed with a seed; play
// it again with
//
//	go test -run TestModel . -rapid.seed=N
//
// Ten thousand steps, with -full twenty times as many.
func TestModel(t *testing.T) {
	checks := 340
	if *full {
		checks *= 20
	}
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "rapid.checks" || f.Name == "rapid.seed" })
	if !chosen {
		if err := flag.Set("rapid.checks", fmt.Sprint(checks)); err != nil {
			t.Fatal(err)
		}
	}
	steps := 0
	rapid.Check(t, func(rt *rapid.T) {
		p := drawPlan(rt)
		steps += len(p.steps)
		if why := p.play(t); why != "" {
			rt.Fatalf("%v\n%s", p, why)
		}
	})
	t.Logf("%d steps", steps)
}

// plan is one run of the model.
type plan struct {
	kind   *sequence
	bounds bounds
	body   time.Duration
	steps  []step
}

// step is one trouble, or something stored.
type step struct {
	do    string
	n     int
	pause time.Duration // in front of it
}

func (s step) String() string { return fmt.Sprintf("%v: %s %d", s.pause, s.do, s.n) }

func (p plan) String() string {
	return fmt.Sprintf("%s %+v, body %v, %v", p.kind.name, p.bounds, p.body, p.steps)
}

func drawPlan(rt *rapid.T) plan {
	do := rapid.SampledFrom([]string{
		"store", "store", "store", "rewrite", "rewrite",
		"delete", "purge", "lose the consumers", "lose them untold",
		"cut", "cut for a while", "half open", "swallow", "swallow answers",
		"delay", "restart", "no JetStream", "be quiet",
	})
	one := rapid.Custom(func(rt *rapid.T) step {
		return step{
			do:    do.Draw(rt, "do"),
			n:     rapid.IntRange(0, 40).Draw(rt, "n"),
			pause: time.Duration(rapid.IntRange(0, 3000).Draw(rt, "pause")) * time.Millisecond,
		}
	})
	return plan{
		kind: rapid.SampledFrom(kinds).Draw(rt, "kind"),
		bounds: bounds{
			messages: rapid.SampledFrom([]int{0, 1, 2, 7, 50}).Draw(rt, "messages"),
			bytes:    rapid.SampledFrom([]int{0, 0, 300, 2000, 1 << 20}).Draw(rt, "bytes"),
			expires:  rapid.SampledFrom([]time.Duration{0, 0, 50 * time.Millisecond, time.Second, 7 * time.Second}).Draw(rt, "expires"),
			gap:      GapContinue,
		},
		body:  rapid.SampledFrom([]time.Duration{0, 0, time.Millisecond, 40 * time.Millisecond, 900 * time.Millisecond}).Draw(rt, "body"),
		steps: rapid.SliceOfN(one, 30, 40).Draw(rt, "steps"),
	}
}

// recorder keeps failures, so that the schedule can be made smaller before the
// test fails.
type recorder struct {
	testing.TB
	mu   sync.Mutex
	said []string
}

func (r *recorder) Error(args ...any)                 { r.Errorf("%s", fmt.Sprint(args...)) }
func (r *recorder) Fatal(args ...any)                 { r.Fatalf("%s", fmt.Sprint(args...)) }
func (r *recorder) Fatalf(format string, args ...any) { r.Errorf(format, args...); runtime.Goexit() }
func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = append(r.said, fmt.Sprintf(format, args...))
}

// modelled is a message of the model.
type modelled struct {
	seq     uint64
	subject string
	removed bool
}

// play returns what went wrong.
func (p plan) play(t *testing.T) string {
	dir, err := os.MkdirTemp("", "paced-model-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	rec := &recorder{}
	testserver.InBubble(t, func(t *testing.T) {
		rec.TB = t
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.run(&cell{TB: rec, cause: &cause{file: true}, seq: p.kind, bounds: p.bounds, dir: dir})
		}()
		<-done
	})
	return strings.Join(rec.said, "\n")
}

func (p plan) run(c *cell) {
	ctx, cancel := context.WithTimeoutCause(c.Context(), 12*time.Hour, errors.New("the end did not come"))
	defer cancel()
	c.ctx = ctx
	c.begin()
	var mu sync.Mutex
	var stored []modelled
	store := func(tail string) {
		mu.Lock()
		defer mu.Unlock()
		c.store(tail)
		if tail == "" {
			tail = "a"
			if c.seq.keyed {
				tail = fmt.Sprint("k", c.n)
			}
		}
		stored = append(stored, modelled{seq: c.stored[len(c.stored)-1], subject: c.seq.prefix + tail})
	}
	for range backlog {
		store("")
	}
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		time.Sleep(time.Second) // a first subscribe gives up sooner than a rebuild
		for _, s := range p.steps {
			time.Sleep(s.pause)
			p.step(c, s, store, func() []modelled { return stored })
		}
		c.setFault(nil)
		store("end")
	}()
	wanted := func() []uint64 { // what must have come
		mu.Lock()
		defer mu.Unlock()
		newest := map[string]uint64{}
		for _, m := range stored {
			newest[m.subject] = m.seq
		}
		var all []uint64
		for _, m := range stored {
			if !m.removed && (!c.seq.keyed || newest[m.subject] == m.seq) {
				all = append(all, m.seq)
			}
		}
		return all
	}
	seen := map[uint64]bool{}
	last := false
	for i, err := range c.seq.open(ctx, c) {
		if err != nil {
			c.Errorf("ended with %v", err)
			break
		}
		if n := len(c.got); n > 0 && i.seq <= c.got[n-1] && !c.seq.again {
			c.Errorf("%d behind %d", i.seq, c.got[n-1])
		}
		c.got = append(c.got, i.seq)
		seen[i.seq] = true
		last = last || i.subject == c.seq.prefix+"end"
		if last && !slices.ContainsFunc(wanted(), func(q uint64) bool { return !seen[q] }) {
			break
		}
		if last && !c.seq.again {
			break
		}
		time.Sleep(p.body)
	}
	<-finished
	for _, q := range wanted() {
		if !seen[q] {
			c.Errorf("%d is missing", q)
		}
	}
	for q := range seen {
		if !slices.ContainsFunc(stored, func(m modelled) bool { return m.seq == q }) {
			c.Errorf("%d was never stored", q)
		}
	}
	c.cause.untidy = true // a delete may have been lost with the last trouble
	c.cause.reaps = false
	c.moment = atExit
	c.checkLeft()
	if len(c.TB.(*recorder).said) > 0 {
		c.Errorf("got %v\nstored %v\n%s", c.got, stored, strings.Join(c.log.lines[max(0, len(c.log.lines)-25):], "\n"))
	}
}

func (p plan) step(c *cell, s step, store func(string), stored func() []modelled) {
	while := func(d time.Duration) {
		store("")
		time.Sleep(d)
		store("")
	}
	all := stored()
	some := all[s.n*7%len(all)]
	switch s.do {
	case "store":
		for range s.n%12 + 1 {
			store("")
		}
	case "rewrite":
		store(strings.TrimPrefix(some.subject, c.seq.prefix))
	case "delete":
		var err error
		if c.seq.keyed {
			err = c.stream().Purge(c.ctx, jetstream.WithPurgeSubject(some.subject))
		} else {
			err = c.stream().DeleteMsg(c.ctx, some.seq)
		}
		if err != nil && !some.removed {
			c.Errorf("delete: %v", err)
		}
		for i := range all {
			if all[i].seq == some.seq || (c.seq.keyed && all[i].subject == some.subject) {
				all[i].removed = true
			}
		}
	case "purge":
		if err := c.stream().Purge(c.ctx, jetstream.WithPurgeSequence(some.seq)); err != nil {
			c.Errorf("purge: %v", err)
		}
		for i := range all {
			if all[i].seq < some.seq {
				all[i].removed = true
			}
		}
	case "lose the consumers":
		c.loseConsumers()
	case "lose them untold":
		c.swallow(1, func(f faultproxy.Frame) bool { return f.Status() == 409 })
		c.loseConsumers()
	case "cut":
		c.faults.Disconnect()
		store("")
	case "cut for a while":
		c.faults.Cut()
		while(time.Duration(s.n) * time.Second)
		c.faults.Restore()
	case "half open":
		c.faults.Mute(faultproxy.ToClient)
		while(time.Duration(s.n) * time.Second)
		c.faults.Unmute(faultproxy.ToClient)
	case "swallow":
		c.swallow(1+s.n%3, func(f faultproxy.Frame) bool {
			return f.Status() != 0 || strings.HasPrefix(f.Reply, "$JS.ACK.")
		})
		store("")
	case "swallow answers":
		c.swallowAnswers(1+s.n%3, []string{".INFO.", ".CONSUMER.CREATE.", ".CONSUMER.DELETE."}[s.n%3])
		c.loseConsumers()
	case "delay":
		d := time.Duration(s.n) * 20 * time.Millisecond
		c.faults.Delay(faultproxy.ToClient, d)
		while(time.Duration(s.n) * time.Second / 4)
		c.faults.Delay(faultproxy.ToClient, 0)
	case "restart":
		c.halt()
		time.Sleep(time.Duration(s.n) * time.Second / 4)
		c.restart()
		c.stream()
	case "no JetStream":
		c.off = true
		c.halt()
		c.restart()
		time.Sleep(time.Duration(s.n) * time.Second / 4)
		c.off = false
		c.halt()
		c.restart()
		c.stream()
	case "be quiet":
		time.Sleep(time.Duration(s.n) * 5 * time.Second)
	}
}
