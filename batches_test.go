package paced

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

// A batch ends when it is full, when its time has come, or when the sequence
// does; with nothing to read it comes empty, so that a loop can keep time.
func TestBatches(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 25)
		c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S"})
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(12*time.Second, func() { r.publish("s.a", 3) })
		start := time.Now()
		var got []string
		next := uint64(1)
		for batch, err := range c.Batches(t.Context(), 10, 5*time.Second) {
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range batch {
				if m.Sequence() != next {
					t.Errorf("sequence %d, want %d", m.Sequence(), next)
				}
				next++
			}
			got = append(got, fmt.Sprintf("%v: %d", time.Since(start), len(batch)))
			if len(got) == 6 {
				break
			}
		}
		if g, want := fmt.Sprint(got), "[0s: 10 0s: 10 5s: 5 10s: 0 15s: 3 20s: 0]"; g != want {
			t.Errorf("got %s, want %s", g, want)
		}
		r.wantClean()
	})
}

// What was gathered and not handed over is not behind the position of a handle;
// a batch that was handed over is, as a whole.
func TestBatchesKeepThePosition(t *testing.T) {
	for _, policy := range []jetstream.DeliverPolicy{jetstream.DeliverAllPolicy, jetstream.DeliverLastPerSubjectPolicy} {
		testserver.InBubble(t, func(t *testing.T) {
			r := newRig(t, "", quietly())
			r.stream(jetstream.StreamConfig{})
			r.fill(20, 1, 10, true)
			c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S", DeliverPolicy: policy})
			if err != nil {
				t.Fatal(err)
			}
			var seqs []uint64
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for batch, err := range c.Batches(ctx, 8, time.Hour) {
				if err != nil {
					if !errors.Is(err, context.DeadlineExceeded) || len(batch) != 0 {
						t.Errorf("%d messages and %v", len(batch), err)
					}
					break
				}
				for _, m := range batch {
					seqs = append(seqs, m.Sequence())
				}
			}
			wantSequences(t, seqs, sequences(1, 16))
			for batch, err := range c.Batches(t.Context(), 3, time.Second) {
				if err != nil {
					t.Fatal(err)
				}
				for _, m := range batch {
					seqs = append(seqs, m.Sequence())
				}
				break
			}
			wantSequences(t, seqs, sequences(1, 19))
			for m, err := range c.Backlog(t.Context()) {
				if err != nil {
					t.Fatal(err)
				}
				seqs = append(seqs, m.Sequence())
			}
			wantSequences(t, seqs, sequences(1, 20))
		})
	}
}

// Bounds hold with what is gathered counted in, and end a batch.
func TestBatchesAreBounded(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		for range 40 {
			if _, err := r.js.Publish(t.Context(), "s.a", make([]byte, 900)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := r.js.Publish(t.Context(), "s.a", make([]byte, 30_000)); err != nil {
			t.Fatal(err)
		}
		cfg := OrderedConfig{Stream: "S", UntilCaughtUp: true, MaxBytes: 10_000}
		c, err := NewOrderedConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		start, n := time.Now(), 0
		for batch, err := range c.Batches(t.Context(), 1000, time.Minute) {
			if err != nil {
				t.Fatal(err)
			}
			size := 0
			for _, m := range batch {
				size += len(m.Data())
			}
			if size > 10_000 && len(batch) != 1 {
				t.Errorf("a batch of %d bytes", size)
			}
			if size < 7_000 && n < 36 {
				t.Errorf("a batch of %d bytes at %d", size, n)
			}
			n += len(batch)
		}
		if d := time.Since(start); n != 41 || d > time.Second {
			t.Errorf("%d messages in %v", n, d)
		}
		// As many as MaxMessages, and never more asked for.
		cfg.MaxBytes, cfg.MaxMessages = 0, 7
		if c, err = NewOrderedConsumer(r.js, cfg); err != nil {
			t.Fatal(err)
		}
		start, n = time.Now(), 0
		for batch, err := range c.Batches(t.Context(), 7, time.Minute) {
			if err != nil {
				t.Fatal(err)
			}
			n += len(batch)
		}
		if d := time.Since(start); n != 41 || d > time.Second {
			t.Errorf("%d messages in %v", n, d)
		}
		for _, tc := range []struct {
			n    int
			wait time.Duration
		}{{0, time.Second}, {-1, time.Second}, {8, time.Second}, {1, 0}, {1, -1}} {
			pairs := 0
			for batch, err := range c.Batches(t.Context(), tc.n, tc.wait) {
				if pairs++; !errors.Is(err, ErrInvalidConfig) || batch != nil {
					t.Errorf("%v: %v, %v", tc, batch, err)
				}
			}
			if pairs != 1 {
				t.Errorf("%v: %d pairs", tc, pairs)
			}
		}
	})
}

// Time is kept also while there is no connection.
func TestBatchesKeepTimeWithoutAConnection(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 5)
		c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S"})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		ticks := 0
		for batch, err := range c.Batches(t.Context(), 10, time.Second) {
			if err != nil {
				t.Fatal(err)
			}
			ticks++
			if d := time.Since(start); d != time.Duration(ticks)*time.Second {
				t.Errorf("batch %d after %v", ticks, d)
			}
			if ticks == 3 {
				down := time.Now()
				r.srv.Stop()
				start = start.Add(time.Since(down)) // the body's own time
			}
			if ticks == 60 {
				break
			}
			_ = batch
		}
		if err := r.srv.Start(); err != nil {
			t.Fatal(err)
		}
		waitConnected(r.nc, 0)
	})
}

func TestBatchesOfABucket(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		kv := r.bucket(jetstream.KeyValueConfig{Bucket: "B"})
		for i := range 10 {
			if _, err := kv.PutString(t.Context(), fmt.Sprint("k", i), "v"); err != nil {
				t.Fatal(err)
			}
		}
		w, err := NewWatcher(r.js, WatchConfig{Bucket: "B"})
		if err != nil {
			t.Fatal(err)
		}
		var sizes []int
		for batch, err := range w.Batches(t.Context(), 4, time.Second) {
			if err != nil {
				t.Fatal(err)
			}
			for i, e := range batch {
				if e.Key() != fmt.Sprint("k", 4*len(sizes)+i) {
					t.Errorf("key %s", e.Key())
				}
			}
			if sizes = append(sizes, len(batch)); len(sizes) == 4 {
				break
			}
		}
		if got, want := fmt.Sprint(sizes), "[4 4 2 0]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

// A batch of a work queue is handed over before its first message is old, goes
// back as a whole if the loop is left, and takes part in Drain.
func TestBatchesOfAConsumer(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 25)
		c, err := NewConsumer(r.js, worker(jetstream.ConsumerConfig{AckWait: 10 * time.Second}))
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		var got []string
		for batch, err := range c.Batches(t.Context(), 10, time.Minute) {
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range batch {
				ack(t, m)
			}
			got = append(got, fmt.Sprintf("%v: %d", time.Since(start).Round(time.Second), len(batch)))
			if len(got) == 3 {
				time.AfterFunc(time.Second, func() {
					r.publish("s.a", 4)
					time.Sleep(time.Second)
					c.Drain()
				})
			}
		}
		if g, want := fmt.Sprint(got), "[0s: 10 0s: 10 5s: 5 7s: 4]"; g != want {
			t.Errorf("got %s, want %s", g, want)
		}
		synctest.Wait() // the server takes acks in a goroutine of its own
		if ci := r.info("w"); ci.NumAckPending != 0 {
			t.Errorf("%d pending", ci.NumAckPending)
		}
		// Cancelled while it is gathered.
		r.publish("s.a", 4)
		if c, err = NewConsumer(r.js, worker(jetstream.ConsumerConfig{})); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		for batch, err := range c.Batches(ctx, 10, time.Minute) {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%d messages, %v", len(batch), err)
			}
		}
		start = time.Now()
		n := 0
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.UntilEmpty = true
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { n++; return ack(t, m) }); err != nil || n != 4 || time.Since(start) > time.Second {
			t.Errorf("%d messages, %v after %v", n, err, time.Since(start))
		}
	})
}

// A batch larger than the consumer's MaxAckPending can never be full, and is not
// waited for.
func TestBatchesLargerThanMaxAckPending(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 100)
		cfg := worker(jetstream.ConsumerConfig{MaxAckPending: 10})
		cfg.UntilEmpty = true
		c, err := NewConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		start, n := time.Now(), 0
		for batch, err := range c.Batches(t.Context(), 50, 10*time.Second) {
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range batch {
				ack(t, m)
			}
			n += len(batch)
		}
		if d := time.Since(start); n != 100 || d > time.Second {
			t.Errorf("%d messages in %v", n, d)
		}
	})
}

// A message that is delivered again may have less time than the first of its
// batch, which then comes earlier.
func TestBatchesComeBeforeTheShortestDeadline(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		c, err := NewConsumer(r.js, worker(jetstream.ConsumerConfig{BackOff: []time.Duration{20 * time.Second, time.Second}}))
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		var got []string
		for batch, err := range c.Batches(t.Context(), 10, 8*time.Second) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprintf("%v: %d", time.Since(start).Round(100*time.Millisecond), len(batch)))
			if len(got) == 2 {
				for _, m := range batch {
					ack(t, m)
				}
				break
			}
			if err := batch[0].NakWithDelay(3 * time.Second); err != nil {
				t.Error(err)
			}
			r.publish("s.a", 1)
		}
		if g, want := fmt.Sprint(got), "[8s: 1 11.5s: 2]"; g != want {
			t.Errorf("got %s, want %s", g, want)
		}
	})
}

// What was gathered of a consumer that is gone comes again from the next one,
// and not twice in one batch.
func TestBatchesOfAConsumerMadeAgain(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 5)
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.OnDeleted = DeletedRecreate
		cfg.Tuning.MaxAttempts = 1
		c, err := NewConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(3*time.Second, func() { deleteConsumers(r) })
		var got []uint64
		for batch, err := range c.Batches(t.Context(), 20, 10*time.Second) {
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range batch {
				got = append(got, m.Sequence())
			}
			break
		}
		wantSequences(t, got, sequences(1, 5))
	})
}
