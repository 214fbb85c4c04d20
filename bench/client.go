package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"runtime/pprof"
	"slices"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// result is what one run of one contestant found.
type result struct {
	Values  map[string]float64 // by the name of a metric
	Waiting []sample           // for the picture
}

// client is the process of one run: a connection and the loops on it.
type client struct {
	*benchCase
	nc      *nats.Conn
	js      jetstream.JetStream
	loops   []*loop
	arrived arrivals

	left       atomic.Int64 // loops that have not finished
	begin, end reading
	done       chan struct{}
	heap       atomic.Uint64 // the peak
}

// loop is what a contestant gets: one reader of one stream.
type loop struct {
	*client
	n         int
	stream    string
	handed    atomic.Int64 // messages given to the body
	inBody    atomic.Int64 // nanoseconds that the body took
	latencies []float64
	_         [64]byte // loops count on several cores
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
	who := c.contestant(j.Contestant)

	k := &client{benchCase: c, done: make(chan struct{})}
	var failures atomic.Int64
	options := []nats.Option{nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) { failures.Add(1) })}
	if c.watchesBuffer() {
		options = append(options, nats.SetCustomDialer(&k.arrived))
	}
	var err error
	if k.nc, err = nats.Connect(j.URL, options...); err != nil {
		return err
	}
	defer k.nc.Close()
	if k.js, err = jetstream.New(k.nc); err != nil {
		return err
	}
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
	values, samples, err := k.run(j.URL, who)
	if err != nil {
		return err
	}
	values["errors"] = float64(failures.Load())
	values["reconnects"] = float64(k.nc.Stats().Reconnects)
	return json.NewEncoder(os.Stdout).Encode(result{values, samples})
}

// run starts the loops and waits until all have finished. Setting up is
// measured, tearing down is not.
func (k *client) run(url string, who contestant) (map[string]float64, []sample, error) {
	for range who.loopsIn(k.benchCase) {
		k.loops = append(k.loops, &loop{client: k, n: k.n, stream: streamName})
	}
	if who.alone {
		k.loops[0].n, k.loops[0].stream = k.n*k.loopCount(), wholeName
	}
	k.left.Store(int64(len(k.loops)))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	failed := make(chan error, 1)
	if k.every > 0 {
		go func() {
			if err := k.publish(url); err != nil {
				failed <- err
			}
		}()
	}
	over := time.After(cmp.Or(k.lasts, k.timeout()))
	go k.watchHeap()
	atRest := rest()
	watch := watchBuffer(k)
	k.begin = read()
	returned := make(chan error, len(k.loops))
	for _, l := range k.loops {
		go func() {
			err := who.run(ctx, l)
			if err == nil && int(l.handed.Load()) < l.n {
				err = errors.New("ended early")
			}
			if err != nil && ctx.Err() == nil {
				select {
				case failed <- fmt.Errorf("after %d messages: %w", l.handed.Load(), err):
				default:
				}
			}
			returned <- err
		}()
	}
	unfinished := false
	select {
	case <-k.done:
	case <-over:
		unfinished = k.lasts == 0
		k.end = read()
	case err := <-failed:
		return nil, nil, err
	}
	samples := watch.stop()
	values := k.values(samples)
	if k.idle > 0 {
		k.measureIdle(values, atRest)
	}
	if unfinished {
		values["unfinished"] = 1
	}
	// What they made on the server should be gone before the next run. Some are
	// not able to.
	cancel()
	patience := time.After(time.Second)
	for range k.loops {
		select {
		case <-returned:
		case <-patience:
			return values, samples, nil
		}
	}
	return values, samples, nil
}

func (k *client) values(samples []sample) map[string]float64 {
	var total, inBody int64
	var latencies []float64
	for _, l := range k.loops {
		total += l.handed.Load()
		inBody += l.inBody.Load()
		latencies = append(latencies, l.latencies...)
	}
	n, seconds := float64(total), k.end.at.Sub(k.begin.at).Seconds()
	v := map[string]float64{
		"messages":   n,
		"seconds":    seconds,
		"msgs/s":     n / seconds,
		"cpu/msg":    (k.end.cpu - k.begin.cpu).Seconds() * 1e6 / n,
		"allocs/msg": float64(k.end.mallocs-k.begin.mallocs) / n,
		"peak heap":  float64(k.heap.Load()) / 1e6,
		"in body":    100 * float64(inBody) / 1e9 / seconds / float64(len(k.loops)),
	}
	if k.body > 0 && len(samples) > 0 {
		// The first half belongs to those who have to learn how long the body
		// takes; the picture shows it.
		most := 0
		for _, s := range samples {
			if 2*s.Handed > int(total) {
				most = max(most, s.Waiting)
			}
		}
		v["waiting"] = float64(most) * k.body.Seconds() * 1e3
	}
	if len(latencies) > 0 {
		slices.Sort(latencies)
		v["p50"] = latencies[len(latencies)/2]
		v["p99"] = latencies[len(latencies)*99/100]
	}
	return v
}

// hit is the loop body. It reports whether more messages are wanted.
func (l *loop) hit(data []byte) bool {
	n := l.handed.Add(1)
	if l.every > 0 {
		sent := time.Duration(binary.LittleEndian.Uint64(data))
		l.latencies = append(l.latencies, float64(time.Since(epoch)-sent)/float64(time.Microsecond))
	}
	if l.body > 0 || l.phases != nil {
		l.work()
	}
	return n < int64(l.n)
}

func (l *loop) work() {
	start := time.Now()
	d := l.body
	if l.phases != nil {
		d = bodyAt(l.phases, start.Sub(l.begin.at))
	}
	if d >= time.Millisecond {
		time.Sleep(d)
	}
	for time.Since(start) < d {
	}
	l.inBody.Add(int64(time.Since(start)))
}

// finish is called once in a loop, when it has read what it wanted. It checks
// what can be checked without a cost for each message: as many came as the
// sequence of the last says.
func (l *loop) finish(last uint64) error {
	if n := l.handed.Load(); n != int64(l.n) || last != uint64(n) {
		return fmt.Errorf("messages are missing or came twice: %d came, the last has sequence %d", n, last)
	}
	if l.left.Add(-1) == 0 {
		l.end = read()
		close(l.done)
	}
	return nil
}

// epoch is the zero of the times that publish sends.
var epoch = time.Now()

// publish sends a message now and then, over a connection of its own, when the
// loops have had time to find the stream empty.
func (k *client) publish(url string) error {
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	time.Sleep(500 * time.Millisecond)
	data := make([]byte, max(k.size, 8))
	tick := time.NewTicker(k.every)
	defer tick.Stop()
	for range k.n {
		<-tick.C
		binary.LittleEndian.PutUint64(data, uint64(time.Since(epoch)))
		if err := nc.Publish(dataSubject, data); err != nil {
			return err
		}
	}
	return nc.Flush()
}

type reading struct {
	at      time.Time
	cpu     time.Duration
	mallocs uint64
}

func read() reading {
	var s runtime.MemStats
	at, cpu := time.Now(), cpuTime() // ReadMemStats stops the world
	runtime.ReadMemStats(&s)
	return reading{at: at, cpu: cpu, mallocs: s.Mallocs}
}

// atRest is what a process has when it does nothing.
type atRest struct {
	goroutines  int
	heap, stack uint64
}

func rest() atRest {
	debug.FreeOSMemory() // also collects
	runtime.GC()         // empties pools
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return atRest{runtime.NumGoroutine(), s.HeapAlloc, s.StackInuse}
}

// measureIdle says what a loop costs that has nothing to do.
func (k *client) measureIdle(v map[string]float64, before atRest) {
	time.Sleep(time.Second) // whatever belongs to the end of reading
	now := rest()
	cpu := cpuTime()
	time.Sleep(k.idle)
	cpu = cpuTime() - cpu
	n := float64(len(k.loops))
	v["goroutines"] = float64(now.goroutines-before.goroutines)/n - 1 // the caller's
	v["heap/loop"] = (float64(now.heap) - float64(before.heap)) / n / 1e3
	v["stack/loop"] = (float64(now.stack) - float64(before.stack)) / n / 1e3
	v["cpu/loop"] = cpu.Seconds() * 1e6 / k.idle.Seconds() / n
}

// watchHeap samples the bytes in heap spans that hold an object, garbage
// included (HeapInuse of runtime.MemStats). Reading these metrics does not stop
// the world.
func (k *client) watchHeap() {
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"},
	}
	for range time.Tick(5 * time.Millisecond) {
		metrics.Read(samples)
		n := samples[0].Value.Uint64() + samples[1].Value.Uint64()
		k.heap.Store(max(k.heap.Load(), n))
	}
}
