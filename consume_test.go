package paced

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
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
		var c *Consumer
		cfg.Listener = &Listener{PullIssued: func(int, int) {
			if s := c.Stats(); s.Outstanding+s.Unsettled > 10 {
				t.Errorf("%d asked for and %d unsettled", s.Outstanding, s.Unsettled)
			}
		}}
		c, err := NewConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var wg sync.WaitGroup
		busy, most, done := 0, 0, 0
		start := time.Now()
		for m, err := range c.Messages(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			mu.Lock()
			busy++
			most = max(most, busy)
			mu.Unlock()
			wg.Go(func() {
				time.Sleep(time.Second)
				mu.Lock()
				busy--
				done++
				mu.Unlock()
				ack(t, m)
			})
		}
		wg.Wait()
		if done != 100 || most != 10 {
			t.Errorf("%d done, at most %d at once", done, most)
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
		var counts [2]atomic.Int64
		loop := func(i int, first chan<- time.Duration) {
			start := time.Now()
			_ = consume(t, r, ctx, worker(jetstream.ConsumerConfig{}), func(m Msg) bool {
				if counts[i].Add(1) == 1 {
					first <- time.Since(start)
				}
				time.Sleep(100 * time.Millisecond)
				return ack(t, m)
			})
		}
		wg.Go(func() { loop(0, make(chan time.Duration, 2)) })
		time.Sleep(time.Second)
		counts[0].Store(0)
		first := make(chan time.Duration, 1)
		wg.Go(func() { loop(1, first) })
		time.Sleep(10 * time.Second)
		cancel()
		wg.Wait()
		if d := <-first; d > 100*time.Millisecond {
			t.Errorf("the second loop waited %v", d)
		}
		if a, b := counts[0].Load(), counts[1].Load(); a+b < 195 || max(a, b)*10 > min(a, b)*11 {
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

// AckWait counts from when a message can have been sent, which is after the
// inbox was last seen empty, however old its pull is.
func TestConsumeDeadlineAfterAPark(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		time.AfterFunc(20*time.Second, func() { r.publish("s.a", 1) })
		if err := consume(t, r, t.Context(), worker(jetstream.ConsumerConfig{AckWait: time.Second}), func(m Msg) bool {
			if d := time.Until(m.AckDeadline()); m.NumDelivered() != 1 || d < 999*time.Millisecond || d > time.Second {
				t.Errorf("delivery %d, deadline in %v", m.NumDelivered(), d)
			}
			ack(t, m)
			return false
		}); err != nil {
			t.Fatal(err)
		}
	})
}

// How long the server makes a loop wait for messages that are pending (others
// have all that MaxAckPending allows) says nothing of the way they take.
func TestConsumeMaxAckPendingIsNoRoundTrip(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		s := r.stream(jetstream.StreamConfig{})
		cfg := worker(jetstream.ConsumerConfig{AckWait: 5 * time.Second, MaxAckPending: 1})
		other, err := s.CreateConsumer(t.Context(), cfg.Consumer)
		if err != nil {
			t.Fatal(err)
		}
		r.publish("s.a", 20)
		var wg sync.WaitGroup
		defer wg.Wait()
		wg.Go(func() {
			for range 10 {
				m, err := other.Next()
				if err != nil {
					return
				}
				time.Sleep(4 * time.Second)
				_ = m.Ack()
			}
		})
		time.Sleep(time.Second)
		c, err := NewConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for m, err := range c.Messages(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if d := time.Until(m.AckDeadline()); d < 4900*time.Millisecond {
				t.Errorf("sequence %d: deadline in %v", m.Sequence(), d)
			}
			ack(t, m)
			if n++; n == 8 {
				break
			}
		}
		if d := c.Stats().RoundTrip; d > time.Millisecond {
			t.Errorf("a round trip of %v", d)
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

func TestConsumeBadInput(t *testing.T) {
	good := func(f func(*ConsumeConfig)) ConsumeConfig {
		c := worker(jetstream.ConsumerConfig{})
		f(&c)
		return c
	}
	cc := func(cc jetstream.ConsumerConfig) ConsumeConfig { return worker(cc) }
	seconds := func(n ...time.Duration) []time.Duration {
		for i := range n {
			n[i] *= time.Second
		}
		return n
	}
	for _, tc := range []struct {
		field string
		cfg   ConsumeConfig
	}{
		{"Stream", good(func(c *ConsumeConfig) { c.Stream = "" })},
		{"Stream", good(func(c *ConsumeConfig) { c.Stream = "a.b" })},
		{"Consumer.Durable", good(func(c *ConsumeConfig) { c.Consumer.Durable = "" })},
		{"Consumer.Durable", cc(jetstream.ConsumerConfig{Durable: "a.b"})},
		{"Consumer.Name", cc(jetstream.ConsumerConfig{Durable: "a", Name: "b"})},
		{"Consumer.AckPolicy", cc(jetstream.ConsumerConfig{AckPolicy: jetstream.AckNonePolicy})},
		{"Consumer.AckPolicy", cc(jetstream.ConsumerConfig{AckPolicy: jetstream.AckAllPolicy})},
		{"Consumer.DeliverSubject", cc(jetstream.ConsumerConfig{DeliverSubject: "d"})},
		{"Consumer.DeliverSubject", cc(jetstream.ConsumerConfig{DeliverGroup: "d"})},
		{"Consumer.AckWait", cc(jetstream.ConsumerConfig{AckWait: -1})},
		{"Consumer.AckWait", cc(jetstream.ConsumerConfig{AckWait: time.Second, BackOff: seconds(2, 3)})},
		{"Consumer.BackOff", cc(jetstream.ConsumerConfig{MaxDeliver: 1, BackOff: seconds(2, 3)})},
		{"Consumer.BackOff", cc(jetstream.ConsumerConfig{BackOff: seconds(0, 3)})},
		{"OnDeleted", good(func(c *ConsumeConfig) { c.OnDeleted = 7 })},
		{"ConfirmTimeout", good(func(c *ConsumeConfig) { c.ConfirmTimeout = time.Second })},
		{"ConfirmTimeout", good(func(c *ConsumeConfig) { c.ConfirmAcks, c.ConfirmTimeout = true, -1 })},
		{"Progress", good(func(c *ConsumeConfig) { c.Progress = -1 })},
		{"Progress", good(func(c *ConsumeConfig) { c.Progress = 31 * time.Second })},
		{"Progress", good(func(c *ConsumeConfig) { c.Progress, c.Consumer.AckWait = 2*time.Second, time.Second })},
		{"Progress", good(func(c *ConsumeConfig) { c.Progress, c.Consumer.BackOff = 2*time.Second, seconds(3, 1) })},
		{"MaxMessages", good(func(c *ConsumeConfig) { c.MaxMessages = -1 })},
		{"MaxBytes", good(func(c *ConsumeConfig) { c.MaxBytes = -1 })},
		{"Tuning.Heartbeat", good(func(c *ConsumeConfig) { c.Tuning.Heartbeat = time.Minute })},
	} {
		js, _ := jetstream.New(&nats.Conn{})
		check := func(err error) {
			t.Helper()
			ce, ok := errors.AsType[*ConfigError](err)
			if !ok || !errors.Is(err, ErrInvalidConfig) || ce.Field != "ConsumeConfig."+tc.field || ce.Bound == "" {
				t.Errorf("%s: got %v", tc.field, err)
			}
		}
		_, err := NewConsumer(js, tc.cfg)
		check(err)
		pairs := 0
		for m, err := range Consume(context.Background(), js, tc.cfg) {
			pairs++
			check(err)
			if m != (Msg{}) {
				t.Error("a message beside the error")
			}
		}
		if pairs != 1 {
			t.Errorf("%s: %d pairs", tc.field, pairs)
		}
	}
}

// A consumer that is there is used as it is, if it can be.
func TestConsumeUsesWhatIsThere(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		s := r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 20)
		for _, cc := range []jetstream.ConsumerConfig{
			{Durable: "none", AckPolicy: jetstream.AckNonePolicy},
			{Durable: "all", AckPolicy: jetstream.AckAllPolicy},
			{Durable: "quick", AckWait: time.Second},
			{Durable: "limits", AckWait: time.Second, MaxAckPending: 3, MaxRequestBatch: 2, MaxRequestExpires: 2 * time.Second, MaxRequestMaxBytes: 200},
		} {
			if _, err := s.CreateConsumer(t.Context(), cc); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := r.js.CreatePushConsumer(t.Context(), "S", jetstream.ConsumerConfig{Durable: "push", DeliverSubject: "d"}); err != nil {
			t.Fatal(err)
		}
		var w wireCount
		r.srv.SetFilter(w.filter(nil))
		for _, name := range []string{"none", "all", "push", "quick"} {
			cfg := worker(jetstream.ConsumerConfig{Durable: name})
			cfg.Progress = 2 * time.Second
			start := time.Now()
			err := consume(t, r, t.Context(), cfg, func(Msg) bool { t.Error("a message"); return false })
			if !errors.Is(err, ErrInvalidConfig) || time.Since(start) != 0 {
				t.Errorf("%s: %v after %v", name, err, time.Since(start))
			}
		}
		if w.creates.Load() != 0 || w.pulls.Load() != 0 {
			t.Errorf("%d creates, %d pulls", w.creates.Load(), w.pulls.Load())
		}
		// Limits that are read are kept: no pull is refused.
		cfg := worker(jetstream.ConsumerConfig{Durable: "limits"})
		cfg.UntilEmpty = true
		cfg.Listener = &Listener{
			Failed: func(err error) { t.Error(err) },
			PullIssued: func(batch, maxBytes int) {
				if batch > 2 || maxBytes > 200 {
					t.Errorf("pull of %d messages, %d bytes", batch, maxBytes)
				}
			},
		}
		n := 0
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { n++; return ack(t, m) }); err != nil || n != 20 {
			t.Errorf("%d messages, %v", n, err)
		}
	})
}

// However it is learnt that the consumer is gone, it is the same error.
func TestConsumeDeleted(t *testing.T) {
	for name, harm := range map[string]func(*rig){
		"told": func(r *rig) { deleteConsumers(r) },
		"stream": func(r *rig) {
			if err := r.js.DeleteStream(context.Background(), "S"); err != nil {
				r.Error(err)
			}
		},
		"not told": func(r *rig) {
			r.srv.SetFilter(dropStatus(409))
			deleteConsumers(r)
		},
		"replaced": func(r *rig) {
			r.srv.SetFilter(dropStatus(409))
			deleteConsumers(r)
			if _, err := r.js.CreateConsumer(r.Context(), "S", jetstream.ConsumerConfig{Durable: "w"}); err != nil {
				r.Error(err)
			}
		},
		"while away": func(r *rig) {
			r.srv.SetFilter(dropStatus(409))
			deleteConsumers(r)
			if err := r.nc.ForceReconnect(); err != nil {
				r.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", quietly())
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 10)
				var start time.Time
				done := make(chan struct{})
				time.AfterFunc(time.Minute, func() { start = time.Now(); harm(r); close(done) })
				n := 0
				err := consume(t, r, t.Context(), worker(jetstream.ConsumerConfig{}), func(m Msg) bool { n++; return ack(t, m) })
				if n != 10 || !errors.Is(err, jetstream.ErrConsumerDeleted) || !strings.Contains(err.Error(), "stream S, consumer w") {
					t.Errorf("%d messages, %v", n, err)
				}
				took := time.Since(start)
				<-done
				if d := took; d > 12*time.Second || (name == "told" && d > 10*time.Millisecond) {
					t.Errorf("after %v", d)
				}
				r.srv.SetFilter(nil)
				if name != "stream" {
					deleteConsumers(r)
					r.wantClean()
				}
			})
		})
	}
}

// Made again, the consumer goes on behind what is acknowledged: nothing is
// lost, and nothing that was acknowledged comes again.
func TestConsumeRecreates(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 20)
		cfg := worker(jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverNewPolicy})
		cfg.OnDeleted = DeletedRecreate
		var held []Msg
		got := map[uint64]int{}
		go func() {
			time.Sleep(time.Minute)
			r.publish("s.a", 20) // 21 to 40
			time.Sleep(10 * time.Second)
			var creates atomic.Int64
			r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
				if f.Direction == faultproxy.ToServer && strings.Contains(f.Subject, "CONSUMER.CREATE") && creates.Add(1) == 1 {
					return faultproxy.Drop
				}
				return faultproxy.Pass
			})
			time.AfterFunc(time.Second, func() { r.publish("s.a", 1) }) // 41, with no consumer there
			deleteConsumers(r)
		}()
		err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			got[m.Sequence()]++
			if m.Sequence() == 33 && got[33] == 1 {
				held = append(held, m) // not settled when the consumer goes
				return true
			}
			if m.Sequence() == 35 && got[35] == 1 {
				if err := m.NakWithDelay(time.Hour); err != nil {
					t.Error(err)
				}
				return true
			}
			ack(t, m)
			return m.Sequence() < 41
		})
		if err != nil {
			t.Fatal(err)
		}
		for seq := uint64(1); seq <= 41; seq++ {
			want := 1
			switch {
			case seq <= 20:
				want = 0
			case seq >= 33 && seq <= 40:
				want = 2 // behind the first that was not acknowledged
			}
			if got[seq] != want {
				t.Errorf("sequence %d came %d times, want %d", seq, got[seq], want)
			}
		}
	})
}

// What has waited too long is not handed out: the server delivers it again.
func TestConsumeDropsWhatIsStale(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 30)
		cfg := worker(jetstream.ConsumerConfig{AckWait: time.Second})
		cfg.UntilEmpty = true
		cfg.Tuning.LookAhead = 10 * time.Second // more than is good
		c, err := NewConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		got := map[uint64]int{}
		for m, err := range c.Messages(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			got[m.Sequence()]++
			if len(got) == 20 { // four wait behind it
				_ = m.InProgress()
				time.Sleep(900 * time.Millisecond)
				_ = m.InProgress()
				time.Sleep(900 * time.Millisecond)
			}
			ack(t, m)
		}
		for seq := range uint64(30) {
			if got[seq+1] != 1 {
				t.Errorf("sequence %d was handed out %d times", seq+1, got[seq+1])
			}
		}
		if c.Stats().Expired == 0 {
			t.Error("nothing waited too long: this test tests nothing")
		}
	})
}

// On its last attempt a message is handed out all the same.
func TestConsumeHandsOutTheLastAttempt(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 30)
		cfg := worker(jetstream.ConsumerConfig{AckWait: time.Second, MaxDeliver: 1})
		cfg.UntilEmpty = true
		cfg.Tuning.LookAhead = 300 * time.Millisecond
		got := map[uint64]int{}
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			got[m.Sequence()]++
			if len(got) == 20 {
				time.Sleep(1800 * time.Millisecond)
			}
			ack(t, m)
			return true
		}); err != nil {
			t.Fatal(err)
		}
		if len(got) != 30 {
			t.Errorf("%d of 30 messages were handed out", len(got))
		}
	})
}

// Forgetting to settle is said once.
func TestConsumeForgotten(t *testing.T) {
	for _, most := range []int{5, 0} {
		testserver.InBubble(t, func(t *testing.T) {
			var said []string
			r := newRig(t, "", nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { said = append(said, err.Error()) }))
			r.stream(jetstream.StreamConfig{})
			r.publish("s.a", 20)
			cfg := worker(jetstream.ConsumerConfig{})
			cfg.MaxMessages = most
			c, err := NewConsumer(r.js, cfg)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			time.AfterFunc(20*time.Second, func() {
				if s := c.Stats(); most == 5 && (s.Unsettled != 5 || time.Since(s.UnsettledSince) != 20*time.Second) {
					t.Errorf("%d unsettled since %v", s.Unsettled, s.UnsettledSince)
				}
			})
			for _, err := range c.Messages(ctx) {
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					t.Fatal(err)
				}
			}
			if len(said) != 1 || !strings.Contains(said[0], "settled") {
				t.Errorf("said %q", said)
			}
			if s := c.Stats(); s.Expired < 20 {
				t.Errorf("%d expired", s.Expired)
			}
		})
	}
}

// Drain ends a loop wherever it is, and costs no message an attempt.
func TestConsumeDrain(t *testing.T) {
	for _, tc := range []struct {
		name   string
		stored int
		when   time.Duration // the body takes 20 ms
	}{
		{"in the body", 100, 90 * time.Millisecond},
		{"parked with a young pull", 3, 100 * time.Millisecond},
		{"parked", 3, 10 * time.Second},
		{"parked, pull young again", 3, 30500 * time.Millisecond},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "")
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", tc.stored)
				cfg := worker(jetstream.ConsumerConfig{MaxDeliver: 1})
				cfg.Tuning.LookAhead = 100 * time.Millisecond // so that messages wait
				c, err := NewConsumer(r.js, cfg)
				if err != nil {
					t.Fatal(err)
				}
				var drained time.Time
				signal, cancel := context.WithTimeout(t.Context(), tc.when)
				defer cancel()
				context.AfterFunc(signal, func() { drained = time.Now(); c.Drain() })
				n := 0
				for m, err := range c.Messages(t.Context()) {
					if err != nil {
						t.Fatal(err)
					}
					n++
					time.Sleep(20 * time.Millisecond)
					ack(t, m)
				}
				if d := time.Since(drained); drained.IsZero() || d > 2*time.Second+200*time.Millisecond {
					t.Errorf("ended %v after Drain", d)
				}
				synctest.Wait()
				ci := r.info("w")
				if ci.NumAckPending != 0 || ci.NumWaiting != 0 || int(ci.Delivered.Stream) != n {
					t.Errorf("%d handled, %d delivered, %d pending, %d pulls", n, ci.Delivered.Stream, ci.NumAckPending, ci.NumWaiting)
				}
				for range c.Messages(t.Context()) {
					t.Error("a pair after Drain")
				}
				if tc.stored > 50 && n > 20 {
					t.Errorf("%d messages: Drain did not stop it", n)
				}
			})
		})
	}
}

func TestConsumeConfirmAcks(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 10)
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.ConfirmAcks, cfg.ConfirmTimeout = true, 3*time.Second
		var swallow, acks atomic.Int64
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			if f.Direction == faultproxy.ToServer && strings.HasPrefix(f.Subject, "$JS.ACK.") {
				acks.Add(1)
				if swallow.Add(-1) >= 0 {
					return faultproxy.Drop
				}
			}
			return faultproxy.Pass
		})
		n := 0
		var start time.Time
		var failed error
		err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			n++
			switch n {
			case 1:
				ack(t, m)
				if ci := r.info("w"); ci.AckFloor.Stream != 1 {
					t.Error("Ack came back and the server does not have it")
				}
			case 2:
				swallow.Store(3) // repeated until it is there
				ack(t, m)
				if ci := r.info("w"); ci.AckFloor.Stream != 2 || acks.Load() != 5 {
					t.Errorf("floor %d after %d acks", ci.AckFloor.Stream, acks.Load())
				}
			case 3:
				swallow.Store(1 << 40)
				start = time.Now()
				failed = m.Ack()
			}
			return true
		})
		said, ok := errors.AsType[*AckError](err)
		if n != 3 || !ok || said.Sequence != 3 || !errors.Is(failed, err) {
			t.Errorf("%d bodies, Ack returned %v, the loop %v", n, failed, err)
		}
		if d := time.Since(start); d != 3*time.Second {
			t.Errorf("after %v", d)
		}
	})
}

// Progress keeps what a long body holds and what waits behind it, and a body
// that hangs is given up in the end.
func TestConsumeProgress(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 30)
		cfg := worker(jetstream.ConsumerConfig{AckWait: time.Second})
		cfg.UntilEmpty, cfg.Progress = true, 400*time.Millisecond
		got := map[uint64]int{}
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			got[m.Sequence()]++
			if len(got) == 20 {
				if r.info("w").NumAckPending < 2 {
					t.Error("nothing waits: this test tests nothing")
				}
				time.Sleep(10 * time.Second)
			}
			if m.NumDelivered() != 1 {
				t.Errorf("sequence %d delivered %d times", m.Sequence(), m.NumDelivered())
			}
			return ack(t, m)
		}); err != nil {
			t.Fatal(err)
		}
		if len(got) != 30 {
			t.Errorf("%d messages", len(got))
		}
		// Handed to another goroutine it is kept as well, for an hour.
		r.publish("s.a", 1)
		cfg.UntilEmpty, cfg.MaxMessages = false, 1
		start := time.Now()
		deliveries := 0
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			deliveries++
			return deliveries < 2
		}); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d < time.Hour || d > time.Hour+2*time.Second {
			t.Errorf("delivered again after %v", d)
		}
	})
}

// MaxWaiting is full: the server is silent. It is said, and paced.
func TestConsumeOverflow(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		var pulls, overflows int
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		cfg := worker(jetstream.ConsumerConfig{MaxWaiting: 1})
		cfg.Listener = &Listener{
			PullIssued: func(int, int) { pulls++ },
			Failed: func(err error) {
				if errors.Is(err, errOverflow) {
					overflows++
				}
			},
			Resubscribing: func(err error, _ int, _ time.Duration) { t.Error(err) },
		}
		got := 0
		var wg sync.WaitGroup
		loop := func() {
			for m, err := range Consume(ctx, r.js, cfg) {
				if err != nil {
					return
				}
				got++
				ack(t, m)
			}
		}
		wg.Go(loop)
		time.Sleep(time.Second)
		wg.Go(loop)
		for range 10 {
			time.Sleep(50 * time.Second)
			r.publish("s.a", 1)
		}
		wg.Wait()
		if got != 10 || overflows == 0 || pulls > 150 {
			t.Errorf("%d messages, %d overflows, %d pulls in 10 minutes", got, overflows, pulls)
		}
	})
}

// The end is the server's: nothing pending and nothing to deliver again.
func TestConsumeUntilEmpty(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		s := r.stream(jetstream.StreamConfig{})
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.UntilEmpty = true
		start := time.Now()
		if err := consume(t, r, t.Context(), cfg, nil); err != nil || time.Since(start) > 20*time.Millisecond {
			t.Errorf("empty: %v after %v", err, time.Since(start))
		}
		r.publish("s.a", 10)
		n := 0
		start = time.Now()
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			if n++; m.NumDelivered() == 1 && m.Sequence() > 7 {
				_ = m.Nak()
				return true
			}
			return ack(t, m)
		}); err != nil || n != 13 || time.Since(start) > 40*time.Millisecond {
			t.Errorf("%d bodies, %v after %v", n, err, time.Since(start))
		}
		// What is held back is not nothing.
		r.publish("s.a", 1)
		if _, err := s.PauseConsumer(t.Context(), "w", time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		start, n = time.Now(), 0
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { n++; return ack(t, m) }); err != nil || n != 1 || time.Since(start) < time.Minute || time.Since(start) > 62*time.Second {
			t.Errorf("paused: %d bodies, %v after %v", n, err, time.Since(start))
		}
	})
}

// A reset by somebody else delivers again, and is no fault.
func TestConsumeReset(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		s := r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 10)
		time.AfterFunc(time.Minute, func() {
			if _, err := s.ResetConsumerToSequence(r.Context(), "w", 5); err != nil {
				t.Error(err)
			}
		})
		var got []uint64
		start := time.Now()
		if err := consume(t, r, t.Context(), worker(jetstream.ConsumerConfig{}), func(m Msg) bool {
			got = append(got, m.Sequence())
			ack(t, m)
			return len(got) < 16
		}); err != nil {
			t.Fatal(err)
		}
		wantSequences(t, got, append(sequences(1, 10), sequences(5, 10)...))
		if d := time.Since(start); d > 75*time.Second {
			t.Errorf("after %v", d)
		}
	})
}

// However a loop ends, nothing of it is left, and what it had is there for the
// next one.
func TestConsumeEveryExitIsClean(t *testing.T) {
	exits := map[string]func(context.Context, context.CancelFunc, iter.Seq2[Msg, error]){
		"break": func(_ context.Context, _ context.CancelFunc, s iter.Seq2[Msg, error]) {
			for range s {
				break
			}
		},
		"panic": func(_ context.Context, _ context.CancelFunc, s iter.Seq2[Msg, error]) {
			defer func() { _ = recover() }()
			for range s {
				panic("body")
			}
		},
		"goexit": func(_ context.Context, _ context.CancelFunc, s iter.Seq2[Msg, error]) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				for range s {
					runtime.Goexit()
				}
			}()
			<-done
		},
		"cancel in body": func(_ context.Context, cancel context.CancelFunc, s iter.Seq2[Msg, error]) {
			for range s {
				cancel()
			}
		},
		"cancel while parked": func(_ context.Context, cancel context.CancelFunc, s iter.Seq2[Msg, error]) {
			time.AfterFunc(20*time.Second, cancel)
			for range s {
			}
		},
		"pull stop": func(_ context.Context, _ context.CancelFunc, s iter.Seq2[Msg, error]) {
			next, stop := iter.Pull2(s)
			next()
			stop()
		},
	}
	for name, exit := range exits {
		for _, progress := range []time.Duration{0, time.Second} {
			t.Run(fmt.Sprint(name, progress), func(t *testing.T) {
				testserver.InBubble(t, func(t *testing.T) {
					r := newRig(t, "", quietly())
					r.stream(jetstream.StreamConfig{})
					r.publish("s.a", 200)
					cfg := worker(jetstream.ConsumerConfig{})
					cfg.Progress = progress
					for range 3 {
						ctx, cancel := context.WithCancel(t.Context())
						exit(ctx, cancel, Consume(ctx, r.js, cfg))
						cancel()
					}
					time.Sleep(2500 * time.Millisecond) // a young pull is watched so long
					synctest.Wait()
					if n := r.nc.NumSubscriptions(); n > 1 {
						t.Errorf("%d subscriptions left", n)
					}
					if n := listeners(r.nc); n != 0 {
						t.Errorf("%d status listeners left", n)
					}
					if n := budgetHeld(r.nc); n != 0 {
						t.Errorf("%d loops left in the byte budget", n)
					}
					if n := r.info("w").NumWaiting; n != 0 {
						t.Errorf("%d pulls left", n)
					}
					got := map[uint64]bool{}
					cfg.UntilEmpty = true
					time.Sleep(time.Minute) // what was in hand, unsettled
					if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { got[m.Sequence()] = true; return ack(t, m) }); err != nil || len(got) != 200 {
						t.Errorf("%d messages, %v", len(got), err)
					}
				})
			})
		}
	}
}

// A cut connection, a server that restarts and a consumer without a leader are
// repaired, and nothing is lost.
func TestConsumeRecovers(t *testing.T) {
	for name, harm := range map[string]func(*rig){
		"cut": func(r *rig) { r.srv.Disconnect() },
		"restart": func(r *rig) {
			r.srv.Stop()
			if err := r.srv.Start(); err != nil {
				r.Error(err)
			}
		},
		"lost heartbeats": func(r *rig) {
			r.srv.SetFilter(dropStatus(100))
			time.AfterFunc(20*time.Second, func() { r.srv.SetFilter(nil) })
		},
		"lost expiry": func(r *rig) {
			r.srv.SetFilter(dropStatus(408))
			time.AfterFunc(time.Minute, func() { r.srv.SetFilter(nil) })
		},
	} {
		for _, when := range []time.Duration{50 * time.Millisecond, time.Minute} {
			t.Run(fmt.Sprint(name, when), func(t *testing.T) {
				testserver.InBubble(t, func(t *testing.T) {
					r := newRig(t, t.TempDir(), quietly())
					r.stream(jetstream.StreamConfig{Storage: jetstream.FileStorage})
					r.publish("s.a", 100)
					var published time.Time
					time.AfterFunc(when, func() {
						n := r.nc.Stats().Reconnects
						harm(r)
						if name == "cut" || name == "restart" {
							waitConnected(r.nc, n+1)
						}
						time.Sleep(time.Second)
						published = time.Now()
						for range 50 {
							_ = r.nc.Publish("s.a", nil)
						}
					})
					got := map[uint64]int{}
					start := time.Now()
					l := &log{}
					cfg := worker(jetstream.ConsumerConfig{})
					cfg.Listener = l.listener()
					if err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
						got[m.Sequence()]++
						time.Sleep(time.Millisecond)
						_ = m.Ack()
						return len(got) < 150
					}); err != nil {
						t.Fatalf("%v\n%v", err, l)
					}
					// What was on the wire when the connection broke is the
					// server's to give again, after AckWait.
					if d := time.Since(start) - when; d > 35*time.Second {
						t.Errorf("after %v\n%v", d, l)
					}
					if d := time.Since(published); when == time.Minute && d > 300*time.Millisecond {
						t.Errorf("parked, 50 bodies of 1ms were over %v after the store\n%v", d, l)
					}
				})
			})
		}
	}
}

// A connection is cut while the pull is young: the old pull is still listened
// to, and whichever the server has serves the next message.
func TestConsumeCutWithAYoungPull(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 10)
		var published time.Time
		n := 0
		if err := consume(t, r, t.Context(), worker(jetstream.ConsumerConfig{}), func(m Msg) bool {
			ack(t, m)
			if n++; n == 10 {
				time.AfterFunc(time.Second, func() {
					k := r.nc.Stats().Reconnects
					r.srv.Disconnect()
					waitConnected(r.nc, k+1)
					published = time.Now()
					r.publish("s.a", 1)
				})
			}
			if d := time.Since(published); n == 11 && d > 0 {
				t.Errorf("resumed after %v", d)
			}
			return n < 11
		}); err != nil {
			t.Fatal(err)
		}
	})
}

// What nats.go refuses at once is not tried again at once.
func TestConsumeConfirmAcksWhileRefused(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", nats.ReconnectBufSize(-1), quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.ConfirmAcks = true
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			k := r.nc.Stats().Reconnects
			r.srv.Cut()
			time.AfterFunc(2*time.Second, r.srv.Restore)
			for r.nc.IsConnected() {
				time.Sleep(time.Millisecond)
			}
			ack(t, m)
			if r.nc.Stats().Reconnects == k {
				t.Error("the connection was never cut")
			}
			return false
		}); err != nil {
			t.Fatal(err)
		}
		if ci := r.info("w"); ci.AckFloor.Stream != 1 {
			t.Errorf("floor %d", ci.AckFloor.Stream)
		}
	})
}

// With finite attempts no pull asks for more than one message and none is sent
// beside another, also those that ask whether the queue is empty.
func TestConsumeUntilEmptyKeepsAttempts(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		s := r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 100)
		cfg := worker(jetstream.ConsumerConfig{MaxDeliver: 1})
		cfg.UntilEmpty = true
		cfg.Listener = &Listener{PullIssued: func(n, _ int) {
			if n > 1 {
				t.Errorf("a pull of %d", n)
			}
			if out := r.info("w").NumWaiting; out > 1 {
				t.Errorf("%d pulls at once", out)
			}
		}}
		n := 0
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { n++; return ack(t, m) }); err != nil || n != 100 {
			t.Fatalf("%d bodies, %v", n, err)
		}
		// Pending, and held back for now.
		r.publish("s.a", 3)
		if _, err := s.PauseConsumer(t.Context(), "w", time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { return false }); err != nil {
			t.Fatal(err)
		}
		if ci := r.info("w"); ci.Delivered.Stream != 101 {
			t.Errorf("%d delivered, want the one in the body", ci.Delivered.Stream-100)
		}
		// Pending no more: the loop has to find out without another pull.
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			if err := s.Purge(t.Context()); err != nil {
				t.Error(err)
			}
			return ack(t, m)
		}); err != nil {
			t.Fatal(err)
		}
	})
}

// A pull that ended because the next message is too large for it shows nothing
// about the queue: a large message that was given back is delivered again.
func TestConsumeUntilEmptyOversize(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 50)
		if _, err := r.js.Publish(t.Context(), "s.a", make([]byte, 30_000)); err != nil {
			t.Fatal(err)
		}
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.UntilEmpty, cfg.MaxBytes = true, 10_000
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		acked := 0
		if err := consume(t, r, ctx, cfg, func(m Msg) bool {
			if m.Sequence() == 51 && m.NumDelivered() == 1 {
				_ = m.Nak()
				return true
			}
			acked++
			return ack(t, m)
		}); err != nil || acked != 51 {
			t.Errorf("%d acknowledged, %v", acked, err)
		}
	})
}

// On replicated consumers data comes behind heartbeats and answers to requests:
// what is on its way is waited for.
func TestConsumeUntilEmptyWaitsForWhatWasSent(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 20)
		r.srv.SetFilter(faultproxy.First(1, func(f faultproxy.Frame) bool {
			return f.Direction == faultproxy.ToClient && strings.HasPrefix(f.Reply, "$JS.ACK.") && strings.Contains(f.Reply, ".20.20.")
		}, faultproxy.After(60*time.Millisecond)))
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.UntilEmpty = true
		n := 0
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { n++; return ack(t, m) }); err != nil || n != 20 {
			t.Errorf("%d bodies, %v", n, err)
		}
	})
}

// An unknown outcome ends a loop also while its consumer cannot be had.
func TestConsumeConfirmAcksInARebuild(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.ConfirmAcks = true
		var rebuilding atomic.Int64
		cfg.Listener = &Listener{Resubscribing: func(error, int, time.Duration) { rebuilding.Add(1) }}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		unknown := make(chan time.Time, 1)
		err := consume(t, r, ctx, cfg, func(m Msg) bool {
			r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
				if f.Direction == faultproxy.ToServer && strings.HasPrefix(f.Subject, "$JS.") {
					return faultproxy.Drop
				}
				return faultproxy.Pass
			})
			time.AfterFunc(time.Minute, func() {
				if m.Ack() == nil || rebuilding.Load() == 0 {
					t.Error("confirmed, or no rebuild: this test tests nothing")
				}
				unknown <- time.Now()
			})
			return true
		})
		ended := time.Now()
		late := ended.Sub(<-unknown)
		if _, ok := errors.AsType[*AckError](err); !ok || late > maxRequestTimeout {
			t.Errorf("%v, %v after the outcome", err, late)
		}
	})
}

// After Drain nothing is asked for, not even whether the queue is empty.
func TestConsumeDrainUntilEmpty(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		s := r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 5)
		if _, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{
			Durable: "w", AckPolicy: jetstream.AckExplicitPolicy, PauseUntil: new(time.Now().Add(time.Hour)),
		}); err != nil {
			t.Fatal(err)
		}
		var c *Consumer
		var drained time.Time
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.UntilEmpty = true
		cfg.Listener = &Listener{PullIssued: func(int, int) {
			if !drained.IsZero() {
				t.Errorf("a pull %v after Drain", time.Since(drained))
			}
		}}
		c, err := NewConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(500*time.Millisecond, func() { drained = time.Now(); c.Drain() })
		for m, err := range c.Messages(t.Context()) {
			t.Errorf("sequence %d, %v", m.Sequence(), err)
		}
		if d := time.Since(drained); d > youth {
			t.Errorf("ended %v after Drain", d)
		}
	})
}

// What has arrived when Drain is called is yielded, also when the loop is just
// about to look for its consumer.
func TestConsumeDrainInARebuild(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		pulls := make(chan string, 100)
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			if f.Direction == faultproxy.ToServer && strings.Contains(f.Subject, "CONSUMER.MSG.NEXT") {
				pulls <- f.Reply
			}
			return faultproxy.Pass
		})
		var c *Consumer
		rebuilding := false
		cfg := worker(jetstream.ConsumerConfig{MaxDeliver: 1})
		cfg.Tuning.LookAhead = time.Second // there is a pull while the body runs
		cfg.Listener = &Listener{
			Resubscribing: func(error, int, time.Duration) { rebuilding = true; c.Drain() },
			HandedBack:    func(n int) { t.Errorf("%d handed back", n) },
		}
		c, err := NewConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for m, err := range c.Messages(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n == 1 {
				time.Sleep(time.Second)
				for len(pulls) > 1 {
					<-pulls
				}
				status := nats.NewMsg(<-pulls) // in front of a message
				status.Header.Set("Status", "599")
				if err := r.nc.PublishMsg(status); err != nil {
					t.Error(err)
				}
				r.publish("s.a", 1)
				time.Sleep(time.Second)
			}
			ack(t, m)
		}
		time.Sleep(handBackTime)
		if n != 2 || !rebuilding {
			t.Errorf("%d bodies, rebuilding %v", n, rebuilding)
		}
	})
}

// What is due for redelivery is not nothing either while a pause holds it back.
func TestConsumeUntilEmptyPausedRedelivery(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		s := r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 3)
		cfg := worker(jetstream.ConsumerConfig{})
		var held []Msg
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { held = append(held, m); return len(held) < 3 }); err != nil {
			t.Fatal(err)
		}
		if _, err := s.PauseConsumer(t.Context(), "w", time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		for _, m := range held {
			if err := m.Nak(); err != nil {
				t.Error(err)
			}
		}
		cfg.UntilEmpty = true
		start := time.Now()
		got := map[uint64]bool{}
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool { got[m.Sequence()] = true; return ack(t, m) }); err != nil || len(got) != 3 || time.Since(start) < time.Minute {
			t.Errorf("%d messages, %v after %v", len(got), err, time.Since(start))
		}
	})
}

// The credit of a message that was not handed out comes back when its AckWait
// has passed, and does not wait for what else is out.
func TestConsumeCreditOfWhatIsStale(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 2)
		cfg := worker(jetstream.ConsumerConfig{BackOff: []time.Duration{20 * time.Second, 4 * time.Second}})
		cfg.MaxMessages = 3
		c, err := NewConsumer(r.js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		var slow time.Time
		var wg sync.WaitGroup
		for m, err := range c.Messages(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case m.Sequence() == 1 && m.NumDelivered() == 1:
				if err := m.NakWithDelay(time.Second); err != nil {
					t.Error(err)
				}
				continue
			case m.Sequence() == 2:
				slow = time.Now()
				ack(t, m)
				time.Sleep(2 * time.Second) // 1 comes again, with 4 seconds since its pull
				r.publish("s.a", 3)
				time.Sleep(1500 * time.Millisecond)
				continue
			}
			got = append(got, fmt.Sprintf("%v: %d", time.Since(slow).Round(10*time.Millisecond), m.Sequence()))
			if len(got) == 3 {
				ack(t, m)
				break
			}
			wg.Go(func() { time.Sleep(10 * time.Second); ack(t, m) })
		}
		if g, want := fmt.Sprint(got), "[3.5s: 3 3.5s: 4 4s: 5]"; g != want || c.Stats().Expired != 1 {
			t.Errorf("got %s, want %s; %d expired", g, want, c.Stats().Expired)
		}
		wg.Wait()
	})
}

// Progress goes on while the loop waits for an answer, while the body looks at
// the error that ends it, and while an acknowledgement waits to be confirmed.
func TestConsumeProgressInEveryState(t *testing.T) {
	swallow := func(r *rig, match func(faultproxy.Frame) bool) {
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			if match(f) {
				return faultproxy.Drop
			}
			return faultproxy.Pass
		})
		time.AfterFunc(4*time.Second, func() { r.srv.SetFilter(nil) })
	}
	for name, tc := range map[string]struct {
		cfg  func(*ConsumeConfig)
		harm func(*rig, context.CancelFunc)
	}{
		"request": {func(c *ConsumeConfig) { c.UntilEmpty = true }, func(r *rig, _ context.CancelFunc) {
			swallow(r, func(f faultproxy.Frame) bool { return strings.Contains(f.Subject, "CONSUMER.INFO") })
		}},
		"barrier": {func(c *ConsumeConfig) { c.UntilEmpty = true }, func(r *rig, _ context.CancelFunc) {
			r.srv.Mute(faultproxy.ToClient)
			time.AfterFunc(4*time.Second, func() { r.srv.Unmute(faultproxy.ToClient) })
		}},
		"error": {func(*ConsumeConfig) {}, func(_ *rig, cancel context.CancelFunc) { cancel() }},
		"confirm": {func(c *ConsumeConfig) { c.ConfirmAcks, c.ConfirmTimeout = true, 10*time.Second }, func(r *rig, cancel context.CancelFunc) {
			time.AfterFunc(14*time.Second, cancel)
			time.AfterFunc(7900*time.Millisecond, func() {
				swallow(r, func(f faultproxy.Frame) bool { return strings.HasPrefix(f.Subject, "$JS.ACK.") && f.Reply != "" })
			})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", quietly())
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 3)
				cfg := worker(jetstream.ConsumerConfig{AckWait: time.Second})
				cfg.Progress = 400 * time.Millisecond
				tc.cfg(&cfg)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var wg sync.WaitGroup
				n := 0
				for m, err := range Consume(ctx, r.js, cfg) {
					if err != nil {
						wg.Wait()
						break
					}
					if n++; m.NumDelivered() != 1 {
						t.Errorf("sequence %d is delivered again", m.Sequence())
					}
					wg.Go(func() { time.Sleep(8 * time.Second); ack(t, m) })
					if n == 3 {
						tc.harm(r, cancel)
					}
				}
				wg.Wait()
				if ci := r.info("w"); ci.NumRedelivered != 0 || int(ci.Delivered.Consumer) != 3 {
					t.Errorf("%d deliveries", ci.Delivered.Consumer)
				}
			})
		})
	}
}

// What waited behind a body while the connection was gone, for longer than
// AckWait, is another loop's: Progress must not keep it, nor is it handed out.
func TestConsumeProgressKeepsOnlyItsOwn(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 30)
		js, err := jetstream.New(testserver.Connect(t, "", nats.InProcessServer(around{r.srv})))
		if err != nil {
			t.Fatal(err)
		}
		cfg := worker(jetstream.ConsumerConfig{AckWait: time.Second})
		cfg.Progress = 400 * time.Millisecond
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var mu sync.Mutex
		got := map[uint64]int{}
		count := func(m Msg) int {
			mu.Lock()
			defer mu.Unlock()
			got[m.Sequence()]++
			return len(got)
		}
		var wg sync.WaitGroup
		defer wg.Wait()
		other := func() {
			for m, err := range Consume(ctx, js, cfg) {
				if err != nil {
					return
				}
				count(m)
				wg.Go(func() { time.Sleep(5 * time.Second); ack(t, m) })
			}
		}
		_ = consume(t, r, ctx, cfg, func(m Msg) bool {
			n := count(m)
			ack(t, m)
			if n == 20 {
				if r.nc.Flush() != nil || r.info("w").NumAckPending < 2 {
					t.Error("nothing waits: this test tests nothing")
				}
				r.srv.Cut()
				time.Sleep(3 * time.Second)
				wg.Go(other)
				time.Sleep(time.Second)
				r.srv.Restore()
				waitConnected(r.nc, 1)
				time.Sleep(1500 * time.Millisecond)
			}
			return true
		})
		for seq := uint64(1); seq <= 30; seq++ {
			if got[seq] != 1 {
				t.Errorf("sequence %d was handed out %d times", seq, got[seq])
			}
		}
	})
}

// What arrives while a body runs, through a pull that is older than AckWait, is
// kept as well.
func TestConsumeProgressKeepsWhatComesLate(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		cfg := worker(jetstream.ConsumerConfig{AckWait: time.Second})
		cfg.Progress = 400 * time.Millisecond
		n := 0
		if err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			if n++; n == 1 {
				time.Sleep(3 * time.Second)
				r.publish("s.a", 3)
				synctest.Wait()
				if out := r.info("w").NumAckPending; out < 2 {
					t.Errorf("%d out, none waits: this test tests nothing", out)
				}
				time.Sleep(3 * time.Second)
			}
			return ack(t, m) && n < 4
		}); err != nil {
			t.Fatal(err)
		}
		if ci := r.info("w"); ci.Delivered.Consumer != 4 {
			t.Errorf("%d deliveries", ci.Delivered.Consumer)
		}
	})
}

// Several loops end when it is empty, also where one that was told of a message
// that another one got has no room for a second pull.
func TestConsumeUntilEmptyShared(t *testing.T) {
	for _, c := range []struct{ most, waiting, deliver int }{{1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {0, 0, 0}} {
		t.Run(fmt.Sprintf("MaxMessages %d, MaxWaiting %d, MaxDeliver %d", c.most, c.waiting, c.deliver), func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", quietly())
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 21)
				cfg := worker(jetstream.ConsumerConfig{MaxWaiting: c.waiting, MaxDeliver: c.deliver})
				cfg.UntilEmpty, cfg.MaxMessages = true, c.most
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				var n atomic.Int64
				var wg sync.WaitGroup
				start := time.Now()
				for range 2 {
					wg.Go(func() {
						if err := consume(t, r, ctx, cfg, func(m Msg) bool {
							n.Add(1)
							time.Sleep(100 * time.Millisecond)
							return ack(t, m)
						}); err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				if d := time.Since(start); n.Load() != 21 || d > 5*time.Second {
					t.Errorf("%d messages in %v", n.Load(), d)
				}
			})
		})
	}
}
