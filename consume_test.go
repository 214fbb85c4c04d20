package paced

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

// worker is a durable consumer with explicit acknowledgements.
func worker(cc jetstream.ConsumerConfig) ConsumeConfig {
	if cc.Durable == "" && cc.Name == "" {
		cc.Durable = "w"
	}
	return ConsumeConfig{Stream: "S", Consumer: cc}
}

// info returns the consumer as the server sees it.
func (r *rig) info(name string) *jetstream.ConsumerInfo {
	r.Helper()
	c, err := r.js.Consumer(r.Context(), "S", name)
	if err != nil {
		r.Fatal(err)
	}
	return c.CachedInfo()
}

// consume handles messages with body until it returns false or the sequence
// ends, and returns the sequence's error.
func consume(t testing.TB, r *rig, ctx context.Context, cfg ConsumeConfig, body func(Msg) bool) error {
	t.Helper()
	for m, err := range Consume(ctx, r.js, cfg) {
		if err != nil {
			return err
		}
		if !body(m) {
			break
		}
	}
	return nil
}

func ack(t testing.TB, m Msg) bool {
	t.Helper()
	if err := m.Ack(); err != nil {
		t.Errorf("ack of %d: %v", m.Sequence(), err)
	}
	return true
}

// 1000 messages with an AckWait of a second and a body of 10 ms are handled
// 1000 times.
func TestConsumeHandlesEachMessageOnce(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1000)
		cfg := worker(jetstream.ConsumerConfig{AckWait: time.Second})
		cfg.UntilEmpty = true
		bodies := 0
		start := time.Now()
		err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			bodies++
			if m.NumDelivered() != 1 {
				t.Errorf("sequence %d delivered %d times", m.Sequence(), m.NumDelivered())
			}
			time.Sleep(10 * time.Millisecond)
			return ack(t, m)
		})
		if err != nil || bodies != 1000 {
			t.Errorf("%d bodies, %v", bodies, err)
		}
		if d := time.Since(start); d > 10100*time.Millisecond {
			t.Errorf("took %v, want the bodies' 10s", d)
		}
		if ci := r.info("w"); ci.NumAckPending != 0 || ci.AckFloor.Stream != 1000 || ci.NumWaiting != 0 {
			t.Errorf("after the end: %d pending, floor %d, %d waiting", ci.NumAckPending, ci.AckFloor.Stream, ci.NumWaiting)
		}
	})
}

// Left with a fast body, nothing but the message in hand stays with us.
func TestConsumeHandsBackOnBreak(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1000)
		handedBack := 0
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.Listener = &Listener{HandedBack: func(n int) { handedBack = n }}
		n := 0
		err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			if n++; n == 200 {
				return false
			}
			return ack(t, m)
		})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		ci := r.info("w")
		if ci.NumAckPending != 1+handedBack || handedBack == 0 || ci.NumWaiting != 0 {
			t.Errorf("%d pending of which %d are to be delivered again, %d pulls", ci.NumAckPending, handedBack, ci.NumWaiting)
		}
		// What went back is there at once.
		start := time.Now()
		got := map[uint64]int{}
		cfg.UntilEmpty = true
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { got[m.Sequence()]++; return ack(t, m) }); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); len(got) != 800 || d > time.Second {
			t.Errorf("%d messages in %v, want 800 at once", len(got), d)
		}
	})
}

// With finite attempts nothing is lost by leaving, whatever the way.
func TestConsumeKeepsAttempts(t *testing.T) {
	for _, leave := range []string{"break", "panic", "drain"} {
		t.Run(leave, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "")
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 40)
				cfg := worker(jetstream.ConsumerConfig{MaxDeliver: 1})
				got := map[uint64]int{}
				for range 6 {
					c, err := NewConsumer(r.js, cfg)
					if err != nil {
						t.Fatal(err)
					}
					func() {
						defer func() { _ = recover() }()
						n := 0
						for m, err := range c.Messages(t.Context()) {
							if err != nil {
								t.Fatal(err)
							}
							got[m.Sequence()]++
							ack(t, m)
							if n++; n == 5 {
								switch leave {
								case "break":
									return
								case "panic":
									panic("body")
								case "drain":
									c.Drain()
								}
							}
						}
					}()
				}
				cfg.UntilEmpty = true
				if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { got[m.Sequence()]++; return ack(t, m) }); err != nil {
					t.Fatal(err)
				}
				if len(got) != 40 {
					t.Errorf("%d of 40 messages reached a body", len(got))
				}
			})
		})
	}
}

// A pool behind the loop never has more than MaxMessages.
func TestConsumeBoundsAPool(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 100)
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.MaxMessages, cfg.UntilEmpty = 10, true
		var mu sync.Mutex
		var wg sync.WaitGroup
		busy, most, done := 0, 0, 0
		start := time.Now()
		err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			mu.Lock()
			busy++
			most = max(most, busy)
			mu.Unlock()
			if n := r.info("w").NumAckPending; n > 10 {
				t.Errorf("the server counts %d as ours", n)
			}
			wg.Go(func() {
				time.Sleep(time.Second)
				mu.Lock()
				busy--
				done++
				mu.Unlock()
				ack(t, m)
			})
			return true
		})
		wg.Wait()
		if err != nil || done != 100 || most != 10 {
			t.Errorf("%d done, at most %d at once, %v", done, most, err)
		}
		if d := time.Since(start); d > 10100*time.Millisecond {
			t.Errorf("took %v: an ack does not wake the loop", d)
		}
	})
}

// One replica does not hoard.
func TestConsumeShares(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1000)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var counts [2]int
		loop := func(i int, first chan<- time.Duration) {
			start := time.Now()
			_ = consume(t, r, ctx, worker(jetstream.ConsumerConfig{}), func(m Msg) bool {
				if counts[i]++; counts[i] == 1 {
					first <- time.Since(start)
				}
				time.Sleep(100 * time.Millisecond)
				return ack(t, m)
			})
		}
		first := make(chan time.Duration, 2)
		wg.Go(func() { loop(0, first) })
		time.Sleep(time.Second)
		<-first
		counts[0] = 0
		wg.Go(func() { loop(1, first) })
		time.Sleep(10 * time.Second)
		cancel()
		wg.Wait()
		if d := <-first; d > 100*time.Millisecond {
			t.Errorf("the second loop waited %v", d)
		}
		if a, b := counts[0], counts[1]; a+b < 195 || max(a, b)*10 > min(a, b)*11 {
			t.Errorf("shares %d and %d", a, b)
		}
	})
}

func TestConsumeSettlesOnce(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 6)
		var held []Msg
		cfg := worker(jetstream.ConsumerConfig{AckWait: 10 * time.Second})
		cfg.UntilEmpty = true
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { held = append(held, m); return true }); err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		settle := []func(Msg) error{Msg.Ack, func(m Msg) error { return m.DoubleAck(ctx) }, Msg.Nak,
			func(m Msg) error { return m.NakWithDelay(time.Minute) }, Msg.Term, func(m Msg) error { return m.TermWithReason("no") }}
		for i, f := range settle {
			copied := held[i]
			if err := copied.InProgress(); err != nil {
				t.Errorf("%d: %v", i, err)
			}
			if err := f(held[i]); err != nil {
				t.Errorf("%d: %v", i, err)
			}
			for j, again := range append(settle, Msg.InProgress) {
				err := again(copied)
				var said *AckError
				if !errors.Is(err, jetstream.ErrMsgAlreadyAckd) || !errors.As(err, &said) || said.Sequence != held[i].Sequence() {
					t.Errorf("%d then %d: %v", i, j, err)
				}
			}
		}
		synctest.Wait()
		// 1, 2, 5 and 6 are done, 3 comes at once, 4 in a minute.
		if ci := r.info("w"); ci.AckFloor.Stream != 2 || ci.NumAckPending != 2 {
			t.Errorf("floor %d, %d pending", ci.AckFloor.Stream, ci.NumAckPending)
		}
		start := time.Now()
		var at []string
		cfg.UntilEmpty = false
		if err := consume(t, r, ctx, cfg, func(m Msg) bool {
			at = append(at, fmt.Sprintf("%d after %v, delivery %d", m.Sequence(), time.Since(start).Round(time.Second), m.NumDelivered()))
			ack(t, m)
			return len(at) < 2
		}); err != nil {
			t.Fatal(err)
		}
		if got, want := fmt.Sprint(at), "[3 after 0s, delivery 2 4 after 1m0s, delivery 2]"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

// After AckWait a message is not ours to give back; an acknowledgement still
// counts.
func TestConsumeLateSettlement(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		var m Msg
		cfg := worker(jetstream.ConsumerConfig{BackOff: []time.Duration{time.Second, time.Minute}, MaxDeliver: 5})
		before := time.Now()
		if err := consume(t, r, t.Context(), cfg, func(got Msg) bool { m = got; return false }); err != nil {
			t.Fatal(err)
		}
		if d := m.AckDeadline().Sub(before); d > time.Second || d < 900*time.Millisecond {
			t.Errorf("deadline after %v", d)
		}
		time.Sleep(900 * time.Millisecond)
		if err := m.InProgress(); err != nil {
			t.Error(err)
		}
		time.Sleep(900 * time.Millisecond)
		if d := time.Until(m.AckDeadline()); d != 100*time.Millisecond {
			t.Errorf("deadline in %v", d)
		}
		time.Sleep(200 * time.Millisecond)
		for _, f := range []func() error{m.Nak, m.InProgress, func() error { return m.NakWithDelay(time.Second) }} {
			if err := f(); !errors.Is(err, ErrAckDeadline) {
				t.Errorf("late: %v", err)
			}
		}
		if err := m.Ack(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if ci := r.info("w"); ci.AckFloor.Stream != 1 {
			t.Error("the late acknowledgement did not count")
		}
	})
}
