package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/metrics"
	"runtime/pprof"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// result is what one run of one contestant found.
type result struct {
	Messages int
	Time     time.Duration
	CPU      time.Duration // user and system, of the whole process
	Mallocs  uint64
	PeakHeap uint64 // sampled
	Rebuilds int    // consumers made in place of one that was lost
	Dropped  int    // messages that found no room
	Errors   int    // told to an error handler

	// Added by the parent.
	ServerCPU time.Duration
	Others    float64 // share of the machine that other processes used
}

func (r *result) rate() float64 { return float64(r.Messages) / r.Time.Seconds() }

// client is what a contestant gets.
type client struct {
	*benchCase
	nc    *nats.Conn
	js    jetstream.JetStream
	meter meter
	// Counted by contestants, for what they can see.
	rebuilds, dropped int
}

// measure is the process of one run.
func measure(instructions string) error {
	var j job
	if err := json.Unmarshal([]byte(instructions), &j); err != nil {
		return err
	}
	c := caseNamed(j.Case)
	if c == nil {
		return fmt.Errorf("no case %q", j.Case)
	}
	c.n = j.N
	run := c.contestant(j.Contestant)

	var errs atomic.Int64
	nc, err := nats.Connect(j.URL, nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) { errs.Add(1) }))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	k := &client{benchCase: c, nc: nc, js: js, meter: meter{n: c.n}}
	if j.Profile != "" {
		f, err := os.Create(j.Profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}

	m := &k.meter
	m.start(c.limit)
	err = run(context.Background(), k)
	if err == nil && !m.done {
		err = errors.New("ended early")
	}
	if err != nil {
		return fmt.Errorf("after %d messages: %w", m.seen, err)
	}
	return json.NewEncoder(os.Stdout).Encode(result{
		Messages: m.seen,
		Time:     m.end.at.Sub(m.begin.at),
		CPU:      m.end.cpu - m.begin.cpu,
		Mallocs:  m.end.mallocs - m.begin.mallocs,
		PeakHeap: m.peak.Load(),
		Rebuilds: k.rebuilds,
		Dropped:  k.dropped,
		Errors:   int(errs.Load()),
	})
}

// meter counts messages and takes the readings at both ends. Setting up is
// inside, tearing down is not.
type meter struct {
	n, seen    int
	done       bool
	begin, end reading
	late       atomic.Bool
	peak       atomic.Uint64
}

type reading struct {
	at      time.Time
	cpu     time.Duration
	mallocs uint64
}

func (m *meter) start(limit time.Duration) {
	runtime.GC()
	if limit > 0 {
		time.AfterFunc(limit, func() { m.late.Store(true) })
	}
	go m.watchHeap()
	m.begin = read()
}

// hit counts one message and reports whether more are wanted.
func (m *meter) hit() bool {
	if m.seen++; m.seen < m.n && !m.late.Load() {
		return true
	}
	if !m.done {
		m.end = read()
		m.done = true
	}
	return false
}

func read() reading {
	var s runtime.MemStats
	at, cpu := time.Now(), cpuTime() // ReadMemStats stops the world
	runtime.ReadMemStats(&s)
	return reading{at: at, cpu: cpu, mallocs: s.Mallocs}
}

// watchHeap samples the heap, garbage included. Reading this metric does not
// stop the world.
func (m *meter) watchHeap() {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	for range time.Tick(5 * time.Millisecond) {
		metrics.Read(sample)
		if n := sample[0].Value.Uint64(); n > m.peak.Load() {
			m.peak.Store(n)
		}
	}
}
