package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced"
)

// result is what one side came to.
type result struct {
	Side       string
	Took       time.Duration
	Finished   bool   // within the timeout
	Heap       uint64 // peak
	Entries    int
	Rebuilds   int // consumers made beyond one for each watcher
	Drops      int // slow-consumer errors of the client
	ServerSlow int // slow consumers that the server counted
	Reconnects int
	Watchers   int
	Complete   int // watchers that saw every key in strict revision order
	Trouble    []string
}

const unknown = -1

func (r *result) complete() bool { return r.Complete == r.Watchers }

func (r *result) err() error {
	switch {
	case !r.Finished:
		return errors.New("did not finish")
	case !r.complete():
		return fmt.Errorf("only %d of %d watchers saw every key in order", r.Complete, r.Watchers)
	}
	return nil
}

// run lets all watchers of a side read the bucket at once.
func (l *load) run(ctx context.Context, out io.Writer, side string) (result, error) {
	r := result{Side: side, Watchers: l.Watchers, ServerSlow: unknown}
	var drops atomic.Int64
	nc, err := nats.Connect(l.URL, nats.Name("paced warmup "+side), nats.MaxReconnects(-1),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if errors.Is(err, nats.ErrSlowConsumer) {
				drops.Add(1)
			}
		}))
	if err != nil {
		return r, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return r, err
	}
	made, err := countConsumers(l)
	if err != nil {
		return r, err
	}
	defer made.close()
	wanted, err := l.wanted(ctx, js)
	if err != nil {
		return r, err
	}

	ctx, cancel := context.WithTimeout(ctx, l.Timeout)
	defer cancel()
	watchers := make([]*watcher, l.Watchers)
	for i := range watchers {
		watchers[i] = &watcher{load: l, wanted: wanted, seen: make([]bool, len(wanted))}
		if side == "paced" {
			watchers[i].handle, err = paced.NewWatcher(js, paced.WatchConfig{Bucket: l.Bucket})
			if err != nil {
				return r, err
			}
		}
	}
	fmt.Fprintf(out, "%s: %d watchers, %d keys, %v for each entry\n", side, l.Watchers, len(wanted), l.Cost)

	debug.FreeOSMemory() // also collects
	heap := watchHeap()
	start := time.Now()
	show := progress(out, start, watchers, heap)
	var wg sync.WaitGroup
	for _, w := range watchers {
		wg.Go(func() {
			if w.handle != nil {
				w.err = w.pace(ctx)
			} else {
				w.err = w.stock(ctx, js)
			}
		})
	}
	wg.Wait()
	r.Took = time.Since(start)
	show.stop()
	r.Heap = heap.stop()
	r.Finished = ctx.Err() == nil

	r.Drops = int(drops.Load())
	r.Reconnects = int(nc.Stats().Reconnects)
	troubles := map[string]int{}
	for _, w := range watchers {
		r.Entries += int(w.entries.Load())
		if w.handle != nil {
			r.Rebuilds += int(w.handle.Stats().Rebuilds)
		}
		if err := w.verdict(); err != nil {
			troubles[err.Error()]++
		} else {
			r.Complete++
		}
	}
	if side != "paced" {
		r.Rebuilds = max(0, made.count()-l.Watchers)
	}
	for text, n := range troubles {
		r.Trouble = append(r.Trouble, fmt.Sprintf("%d x %s", n, text))
	}
	return r, nil
}

// wanted returns the keys that each watcher has to see, with numbers from 0.
func (l *load) wanted(ctx context.Context, js jetstream.JetStream) (map[string]int, error) {
	wanted := make(map[string]int, l.Keys)
	if !l.Foreign {
		for i := range l.Keys {
			wanted[key(i)] = i
		}
		return wanted, nil
	}
	for k, err := range paced.Keys(ctx, js, l.Bucket) {
		if err != nil {
			return nil, err
		}
		if _, ok := wanted[k]; !ok {
			wanted[k] = len(wanted)
		}
	}
	return wanted, nil
}

// watcher is one of those that read the bucket, and what it saw.
type watcher struct {
	*load
	handle  *paced.Watcher // nil: the stock one
	wanted  map[string]int
	entries atomic.Int64

	seen     []bool
	distinct int
	last     uint64
	wrong    error
	err      error
}

// pace warms up through package paced. To follow the bucket afterwards, range
// over w.handle.Updates.
func (w *watcher) pace(ctx context.Context) error {
	for e, err := range w.handle.Snapshot(ctx) {
		if err != nil {
			return err
		}
		w.take(e)
	}
	return nil
}

// stock warms up through package jetstream, whose watcher sends nil when it
// takes the bucket for read. Where the watcher cannot be made, because other
// watchers' data is in front of the answer, it is tried again.
func (w *watcher) stock(ctx context.Context, js jetstream.JetStream) error {
	kv, err := js.KeyValue(ctx, w.Bucket)
	if err != nil {
		return err
	}
	all, err := kv.WatchAll(ctx)
	for err != nil {
		if ctx.Err() != nil {
			return err
		}
		all, err = kv.WatchAll(ctx)
	}
	// Not stopped: it goes with the process, and Stop waits for a callback that
	// may wait for us.
	for {
		select {
		case e, ok := <-all.Updates():
			if !ok {
				return errors.New("the watcher ended without an error")
			}
			if e == nil {
				return nil
			}
			w.take(e)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// take is the loop body.
func (w *watcher) take(e jetstream.KeyValueEntry) {
	if e.Revision() <= w.last && w.wrong == nil {
		w.wrong = errors.New("a revision came out of order")
	}
	w.last = e.Revision()
	if i, ok := w.wanted[e.Key()]; ok && !w.seen[i] {
		w.seen[i] = true
		w.distinct++
	}
	if v, k := e.Value(), e.Key(); !w.Foreign && (len(v) != w.Size || string(v[:min(len(v), len(k))]) != k[:min(len(v), len(k))]) {
		w.wrong = errors.New("a value is not what was put")
	}
	w.entries.Add(1)
	if w.Cost > 0 {
		time.Sleep(w.Cost)
	}
}

func (w *watcher) verdict() error {
	switch {
	case w.wrong != nil:
		return w.wrong
	case w.err != nil:
		return w.err
	case w.distinct < len(w.wanted):
		return errors.New("said that it is done with keys missing")
	}
	return nil
}

// consumers counts, on a connection of its own, the consumers that the server
// makes on the bucket.
type consumers struct {
	nc *nats.Conn
	n  atomic.Int64
}

func countConsumers(l *load) (*consumers, error) {
	c := &consumers{}
	var err error
	c.nc, err = nats.Connect(l.URL, nats.Name("paced warmup, advisories"),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		return nil, err
	}
	_, err = c.nc.Subscribe("$JS.EVENT.ADVISORY.CONSUMER.CREATED.KV_"+l.Bucket+".*", func(*nats.Msg) { c.n.Add(1) })
	if err == nil {
		err = c.nc.Flush()
	}
	if err != nil {
		c.nc.Close()
		return nil, err
	}
	return c, nil
}

func (c *consumers) count() int {
	_ = c.nc.Flush()
	return int(c.n.Load())
}

func (c *consumers) close() { c.nc.Close() }

// background is something that goes on beside the watchers.
type background struct{ quit, done chan struct{} }

func every(d time.Duration, f func()) background {
	b := background{make(chan struct{}), make(chan struct{})}
	go func() {
		defer close(b.done)
		t := time.NewTicker(d)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				f()
			case <-b.quit:
				return
			}
		}
	}()
	return b
}

func (b background) stop() {
	close(b.quit)
	<-b.done
}

// heapWatch samples the bytes in heap spans that hold an object (HeapInuse of
// runtime.MemStats), without stopping the world.
type heapWatch struct {
	now, peak atomic.Uint64
	loop      background
}

func watchHeap() *heapWatch {
	h := &heapWatch{}
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"},
	}
	h.loop = every(5*time.Millisecond, func() {
		metrics.Read(samples)
		n := samples[0].Value.Uint64() + samples[1].Value.Uint64()
		h.now.Store(n)
		h.peak.Store(max(h.peak.Load(), n))
	})
	return h
}

func (h *heapWatch) stop() uint64 {
	h.loop.stop()
	return h.peak.Load()
}

// progress prints a line each second.
func progress(out io.Writer, start time.Time, watchers []*watcher, heap *heapWatch) background {
	total := int64(len(watchers) * len(watchers[0].wanted))
	return every(time.Second, func() {
		var sum int64
		least, most := watchers[0].entries.Load(), int64(0)
		for _, w := range watchers {
			n := w.entries.Load()
			sum += n
			least, most = min(least, n), max(most, n)
		}
		fmt.Fprintf(out, "%5.1fs  %d entries (%d%%), by watcher %d to %d, heap %.1f MB\n",
			time.Since(start).Seconds(), sum, 100*sum/max(total, 1), least, most, float64(heap.now.Load())/1e6)
	})
}
