package paced

import (
	"context"
	"errors"
	"iter"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// wire counts what the client sends, by the first words of the subject.
type wireCount struct{ creates, deletes, infos, pulls, subs atomic.Int64 }

func (w *wireCount) filter(next faultproxy.Filter) faultproxy.Filter {
	return func(f faultproxy.Frame) faultproxy.Action {
		if f.Direction == faultproxy.ToServer {
			switch {
			case f.Verb == "SUB":
				w.subs.Add(1)
			case strings.Contains(f.Subject, ".CONSUMER.CREATE."):
				w.creates.Add(1)
			case strings.Contains(f.Subject, ".CONSUMER.DELETE."):
				w.deletes.Add(1)
			case strings.Contains(f.Subject, ".CONSUMER.MSG.NEXT."):
				w.pulls.Add(1)
			case strings.Contains(f.Subject, "INFO."):
				w.infos.Add(1)
			}
		}
		if next != nil {
			return next(f)
		}
		return faultproxy.Pass
	}
}

func (w *wireCount) total() int64 {
	return w.creates.Load() + w.deletes.Load() + w.infos.Load() + w.pulls.Load() + w.subs.Load()
}

// Nothing happens before range.
func TestLazy(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		var w wireCount
		r.srv.SetFilter(w.filter(nil))
		cfg := OrderedConfig{Stream: "S", FilterSubjects: []string{"s.a"}}
		seq := Ordered(t.Context(), r.js, cfg)
		c, err := NewOrderedConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Messages(t.Context())
		cfg.FilterSubjects[0] = "not a subject" // copied at the call
		synctest.Wait()
		if n := w.total(); n != 0 {
			t.Errorf("%d frames sent before range", n)
		}
		r.publish("s.a", 1)
		for m, err := range seq {
			if err != nil || m.Subject() != "s.a" {
				t.Fatal(m, err)
			}
			break
		}
	})
}

// A second range starts again from the configuration.
func TestRangeTwice(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 10)
		seq := Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", UntilCaughtUp: true})
		for range 3 {
			wantSequences(t, collect(t, seq), sequences(1, 10))
		}
		// Also after a break.
		for range seq {
			break
		}
		wantSequences(t, collect(t, seq), sequences(1, 10))
		r.wantClean()
	})
}

func collect(t testing.TB, seq iter.Seq2[Msg, error]) []uint64 {
	t.Helper()
	var got []uint64
	for m, err := range seq {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, m.Sequence())
	}
	return got
}

// A handle goes on behind the last message yielded, whichever way the range
// before ended; Backlog takes its own boundary each time.
func TestHandleGoesOn(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 20)
		c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S"})
		if err != nil {
			t.Fatal(err)
		}
		for m, err := range c.Backlog(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if m.Sequence() == 5 {
				r.publish("s.a", 1) // past the boundary: left for the next range
			}
			if m.Sequence() == 7 {
				break
			}
		}
		wantSequences(t, collect(t, c.Backlog(t.Context())), sequences(8, 21))
		wantSequences(t, collect(t, c.Backlog(t.Context())), nil)
		r.publish("s.a", 5)
		for range 2 {
			var got []uint64
			for m, err := range c.Messages(t.Context()) {
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, m.Sequence())
				if len(got) == 2 {
					break
				}
			}
			if got[0] != c.Stats().Sequence-1 {
				t.Errorf("got %v, stats say %d", got, c.Stats().Sequence)
			}
		}
		wantSequences(t, collect(t, c.Backlog(t.Context())), sequences(26, 26))
		r.wantClean()
	})
}

func TestErrInUse(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 3)
		c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S"})
		if err != nil {
			t.Fatal(err)
		}
		for range c.Backlog(t.Context()) {
			pairs := 0
			for m, err := range c.Messages(t.Context()) {
				pairs++
				if !errors.Is(err, ErrInUse) || m != (Msg{}) {
					t.Errorf("got %v, %v", m, err)
				}
			}
			if pairs != 1 {
				t.Errorf("%d pairs, want 1", pairs)
			}
		}
		wantSequences(t, collect(t, c.Backlog(t.Context())), nil)
	})
}

// However a range ends, nothing is left behind.
func TestEveryExitIsClean(t *testing.T) {
	boom := errors.New("boom")
	exits := map[string]func(context.Context, context.CancelCauseFunc, iter.Seq2[Msg, error]){
		"break": func(_ context.Context, _ context.CancelCauseFunc, s iter.Seq2[Msg, error]) {
			for range s {
				break
			}
		},
		"return": func(_ context.Context, _ context.CancelCauseFunc, s iter.Seq2[Msg, error]) {
			func() {
				for range s {
					return
				}
			}()
		},
		"panic": func(_ context.Context, _ context.CancelCauseFunc, s iter.Seq2[Msg, error]) {
			defer func() { _ = recover() }()
			for range s {
				panic(boom)
			}
		},
		"goexit": func(_ context.Context, _ context.CancelCauseFunc, s iter.Seq2[Msg, error]) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				for range s {
					runtime.Goexit()
				}
			}()
			<-done
		},
		"cancel in body": func(_ context.Context, cancel context.CancelCauseFunc, s iter.Seq2[Msg, error]) {
			for range s {
				cancel(boom)
			}
		},
		"cancel while parked": func(_ context.Context, cancel context.CancelCauseFunc, s iter.Seq2[Msg, error]) {
			time.AfterFunc(time.Hour, func() { cancel(boom) })
			for range s {
			}
		},
		"pull stop": func(_ context.Context, _ context.CancelCauseFunc, s iter.Seq2[Msg, error]) {
			next, stop := iter.Pull2(s)
			next()
			stop()
		},
		"pull stop at once": func(_ context.Context, _ context.CancelCauseFunc, s iter.Seq2[Msg, error]) {
			_, stop := iter.Pull2(s)
			stop()
		},
	}
	for name, exit := range exits {
		t.Run(name, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "")
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 200)
				before := budgetHeld(r.nc)
				for range 3 {
					ctx, cancel := context.WithCancelCause(t.Context())
					exit(ctx, cancel, Ordered(ctx, r.js, OrderedConfig{Stream: "S"}))
					cancel(nil)
					r.wantClean()
				}
				if after := budgetHeld(r.nc); after != before {
					t.Errorf("byte budget: %v before, %v after", before, after)
				}
				if n := listeners(r.nc); n != 0 {
					t.Errorf("%d status listeners left", n)
				}
			})
		})
	}
}

// An exit may fall into any request: the create, the info in front of it, the
// first pull. The moment is chosen by what the server is about to receive.
func TestExitDuringSubscribe(t *testing.T) {
	for _, at := range []string{"STREAM.INFO", "CONSUMER.CREATE", "MSG.NEXT"} {
		for _, side := range []string{"request", "answer"} {
			t.Run(at+" "+side, func(t *testing.T) {
				testserver.InBubble(t, func(t *testing.T) {
					r := newRig(t, "")
					r.stream(jetstream.StreamConfig{})
					ctx, cancel := context.WithCancel(t.Context())
					reply := ""
					r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
						if f.Direction == faultproxy.ToServer && strings.Contains(f.Subject, at) {
							reply = f.Reply
							if side == "request" {
								cancel()
							}
						}
						if f.Direction == faultproxy.ToClient && reply != "" && f.Subject == reply && side == "answer" {
							cancel()
						}
						return faultproxy.Pass
					})
					var cancelled time.Time
					context.AfterFunc(ctx, func() { cancelled = time.Now() })
					n := 0
					for _, err := range Ordered(ctx, r.js, OrderedConfig{Stream: "S"}) {
						if err != nil {
							n++
							if !errors.Is(err, context.Canceled) {
								t.Errorf("got %v", err)
							}
						}
					}
					if n != 1 {
						t.Errorf("%d errors, want one", n)
					}
					synctest.Wait()
					if d := time.Since(cancelled); d > 50*time.Millisecond {
						t.Errorf("took %v", d)
					}
					time.Sleep(50 * time.Millisecond)
					r.srv.SetFilter(nil)
					r.wantClean()
				})
			})
		}
	}
}

// A done context is looked at first: nothing more is yielded but one error that
// is both ctx.Err() and the cause.
func TestDoneContext(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 100)
		boom := errors.New("boom")
		var w wireCount
		r.srv.SetFilter(w.filter(nil))
		check := func(err error, want error) {
			t.Helper()
			if !errors.Is(err, want) || !errors.Is(err, boom) || !strings.HasPrefix(err.Error(), "paced: ") {
				t.Errorf("got %v", err)
			}
		}

		// Before the range.
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(boom)
		for m, err := range Ordered(ctx, r.js, OrderedConfig{Stream: "S"}) {
			check(err, context.Canceled)
			if m != (Msg{}) {
				t.Error("a message beside the error")
			}
		}
		if n := w.total(); n != 0 {
			t.Errorf("%d frames sent", n)
		}

		// In the body, with 99 messages waiting.
		ctx, cancel = context.WithCancelCause(t.Context())
		defer cancel(nil)
		msgs, errs := 0, 0
		for _, err := range Ordered(ctx, r.js, OrderedConfig{Stream: "S", UntilCaughtUp: true}) {
			if err != nil {
				errs++
				check(err, context.Canceled)
				continue
			}
			msgs++
			cancel(boom)
		}
		if msgs != 1 || errs != 1 {
			t.Errorf("%d messages, %d errors, want 1 and 1", msgs, errs)
		}

		// By deadline, while parked: at the exact instant.
		start := time.Now()
		ctx, stop := context.WithTimeoutCause(t.Context(), 42*time.Second, boom)
		defer stop()
		for _, err := range Ordered(ctx, r.js, OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverNewPolicy}) {
			check(err, context.DeadlineExceeded)
			if d := time.Since(start); d != 42*time.Second {
				t.Errorf("after %v", d)
			}
		}
		r.wantClean()
	})
}

// Time spent in the body is never counted against the server: a body that
// sleeps through heartbeats and windows loses nothing, and is no error.
func TestSlowBody(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 9)
		var failed []error
		cfg := OrderedConfig{Stream: "S", InactiveThreshold: time.Hour, Listener: &Listener{Failed: func(err error) { failed = append(failed, err) }}}
		go func() {
			for range 20 {
				time.Sleep(45 * time.Second)
				r.publish("s.a", 1)
			}
		}()
		var got []uint64
		for m, err := range Ordered(t.Context(), r.js, cfg) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, m.Sequence())
			time.Sleep(100 * time.Second)
			if len(got) == 29 {
				break
			}
		}
		wantSequences(t, got, sequences(1, 29))
		if len(failed) > 0 {
			t.Errorf("failed: %v", failed)
		}
		r.wantClean()
	})
}

// The last message before a quiet period is not withheld by status frames that
// fill the queue: nats.go's own pull iterator drops it.
func TestHeartbeatsDoNotCrowdOutAMessage(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 9)
		cfg := OrderedConfig{Stream: "S", MaxMessages: 10, Tuning: Tuning{Heartbeat: 10 * time.Millisecond, Expires: 20 * time.Second}}
		var at time.Time
		n := 0
		for m, err := range Ordered(t.Context(), r.js, cfg) {
			if err != nil {
				t.Fatal(err)
			}
			n++
			switch n {
			case 9:
				time.Sleep(15 * time.Second)
				r.publish("s.a", 1)
				at = time.Now()
			case 10:
				if d := time.Since(at); d != 0 || m.Sequence() != 10 {
					t.Errorf("message %d after %v", m.Sequence(), d)
				}
			}
			if n == 10 {
				break
			}
		}
	})
}

// Stopping in the middle of anything with iter.Pull2 from another goroutine.
func TestPull2FromAnotherGoroutine(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 10)
		next, stop := iter.Pull2(Ordered(t.Context(), r.js, OrderedConfig{Stream: "S"}))
		for i := uint64(1); i <= 10; i++ {
			done := make(chan uint64)
			go func() {
				m, err, ok := next()
				if err != nil || !ok {
					t.Error(err, ok)
				}
				done <- m.Sequence()
			}()
			if got := <-done; got != i {
				t.Errorf("got %d, want %d", got, i)
			}
		}
		stop()
		r.wantClean()
	})
}

func TestClosedConnectionEndsTheRange(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		time.AfterFunc(time.Minute, r.nc.Close)
		pairs := 0
		start := time.Now()
		for range 2 {
			for _, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S"}) {
				pairs++
				if !errors.Is(err, nats.ErrConnectionClosed) {
					t.Errorf("got %v", err)
				}
			}
		}
		if d := time.Since(start); pairs != 2 || d != time.Minute {
			t.Errorf("%d pairs after %v", pairs, d)
		}
	})
}
