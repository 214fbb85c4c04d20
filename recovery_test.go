package paced

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// log is a listener that writes down what it is told, with the time.
type log struct {
	start  time.Time
	lines  []string
	resubs int
}

func (l *log) listener() *Listener {
	l.start = time.Now()
	add := func(format string, args ...any) {
		l.lines = append(l.lines, fmt.Sprintf("%v ", time.Since(l.start))+fmt.Sprintf(format, args...))
	}
	return &Listener{
		Subscribed: func(c string, g int) { add("subscribed %d", g) },
		Resubscribing: func(err error, n int, d time.Duration) {
			l.resubs++
			add("resubscribing: %v, attempt %d, delay %v", err, n, d)
		},
		Failed:   func(err error) { add("failed: %v", err) },
		CaughtUp: func(s uint64) { add("caught up at %d", s) },
	}
}

func (l *log) String() string { return strings.Join(l.lines, "\n") }

// recover runs a live reader over a stream of 10 messages, does harm when it is
// parked, stores 10 more at once and checks that they follow without a hole or
// a repeat. It returns the time from the store to the body, and the log.
func recoverFrom(t *testing.T, r *rig, cfg OrderedConfig, harm func()) (time.Duration, *log) {
	t.Helper()
	quiet := nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})
	_ = quiet(&r.nc.Opts)
	l := &log{}
	cfg.Stream, cfg.Listener = "S", l.listener()
	r.publish("s.a", 10)
	var published, resumed time.Time
	go func() {
		time.Sleep(time.Minute)
		harm()
		published = time.Now()
		for range 10 { // without waiting for answers: the harm may last
			_ = r.nc.Publish("s.a", []byte("x"))
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	var got []uint64
	for m, err := range Ordered(ctx, r.js, cfg) {
		if err != nil {
			t.Fatalf("%v\n%v", err, l)
		}
		got = append(got, m.Sequence())
		if len(got) == 11 {
			resumed = time.Now()
		}
		if len(got) == 20 {
			break
		}
	}
	wantSequences(t, got, sequences(1, 20))
	r.srv.SetFilter(nil)
	r.wantClean()
	if t.Failed() {
		t.Logf("%v", l)
	}
	return resumed.Sub(published), l
}

func deleteConsumers(r *rig) {
	for _, c := range r.consumers() {
		if err := r.js.DeleteConsumer(r.Context(), "S", c); err != nil {
			r.Error(err)
		}
	}
}

func TestConsumerDeletedWhileParked(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		d, l := recoverFrom(t, r, OrderedConfig{}, func() { deleteConsumers(r) })
		if d != 0 || l.resubs != 1 {
			t.Errorf("resumed after %v with %d rebuilds\n%v", d, l.resubs, l)
		}
	})
}

// The status that tells of the deletion is lost on the way: heartbeats stop.
func TestConsumerDeletedUntold(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		d, l := recoverFrom(t, r, OrderedConfig{}, func() {
			r.srv.SetFilter(faultproxy.First(1, func(f faultproxy.Frame) bool { return f.Status() == 409 }, faultproxy.Drop))
			deleteConsumers(r)
		})
		// Two heartbeats of 5 s, counted from the last one that came.
		if d > 10*time.Second || l.resubs != 1 {
			t.Errorf("resumed after %v with %d rebuilds\n%v", d, l.resubs, l)
		}
	})
}

// No pull was open, so that nobody was told: the next pull is answered by 503.
func TestConsumerDeletedWhileTheBodyRuns(t *testing.T) {
	for _, how := range []string{"deleted", "reaped"} {
		t.Run(how, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 5)
				l := &log{}
				cfg := OrderedConfig{Stream: "S", Listener: l.listener()}
				if how == "reaped" {
					cfg.InactiveThreshold = 2 * time.Second
				}
				var got []uint64
				for m, err := range Ordered(t.Context(), r.js, cfg) {
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, m.Sequence())
					switch len(got) {
					case 5:
						time.Sleep(time.Minute) // every pull has expired
						if how == "deleted" {
							deleteConsumers(r)
						} else if c := r.consumers(); len(c) > 0 {
							t.Errorf("not reaped: %v", c)
						}
						r.publish("s.a", 5)
					case 10:
					}
					if len(got) == 10 {
						break
					}
				}
				wantSequences(t, got, sequences(1, 10))
				if l.resubs != 1 {
					t.Errorf("%d rebuilds, want 1\n%v", l.resubs, l)
				}
				r.wantClean()
			})
		})
	}
}

// A data frame that is lost shows as a gap in the consumer sequence; the last
// one before a pause shows in the heartbeat behind it.
func TestLostFrames(t *testing.T) {
	data := func(f faultproxy.Frame) bool {
		return f.Direction == faultproxy.ToClient && strings.HasPrefix(f.Reply, "$JS.ACK.")
	}
	for _, tc := range []struct {
		name string
		lost func(n int) bool // of the data frames since the harm
		most time.Duration
	}{
		{"gap", func(n int) bool { return n == 4 }, 0},
		{"tail", func(n int) bool { return n == 10 }, 5 * time.Second},
		{"all", func(n int) bool { return n <= 10 }, 5 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "")
				r.stream(jetstream.StreamConfig{})
				d, l := recoverFrom(t, r, OrderedConfig{}, func() {
					n := 0
					r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
						if data(f) {
							if n++; tc.lost(n) {
								return faultproxy.Drop
							}
						}
						return faultproxy.Pass
					})
				})
				if d > tc.most || l.resubs != 1 {
					t.Errorf("resumed after %v with %d rebuilds\n%v", d, l.resubs, l)
				}
			})
		})
	}
}

// The status that ends a pull is lost: the next pull is on time all the same,
// and the consumer is kept.
func TestLostExpiry(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		_, l := recoverFrom(t, r, OrderedConfig{}, func() {
			r.srv.SetFilter(faultproxy.First(1, func(f faultproxy.Frame) bool { return f.Status() == 408 }, faultproxy.Drop))
			time.Sleep(31 * time.Second)
			// The message is stored half a second after the pull has ended.
		})
		if l.resubs != 0 {
			t.Errorf("%d rebuilds\n%v", l.resubs, l)
		}
	})
}

func TestReconnect(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		d, l := recoverFrom(t, r, OrderedConfig{}, func() {
			r.srv.Disconnect()
			time.Sleep(time.Second)
		})
		if d != 0 || l.resubs != 0 {
			t.Errorf("resumed after %v with %d rebuilds\n%v", d, l.resubs, l)
		}
	})
}

// Messages on the wire when the connection broke are lost; the sequence shows
// it.
func TestReconnectWithMessagesOnTheWire(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		d, l := recoverFrom(t, r, OrderedConfig{}, func() {
			r.srv.Mute(faultproxy.ToClient)
			_ = r.nc.Publish("s.a", nil)
			time.AfterFunc(time.Second, func() {
				r.srv.Discard(faultproxy.ToClient)
				r.srv.Disconnect()
				r.srv.Unmute(faultproxy.ToClient)
			})
			time.Sleep(2 * time.Second)
		})
		if d > 0 || l.resubs != 1 {
			t.Errorf("resumed after %v with %d rebuilds\n%v", d, l.resubs, l)
		}
	})
}

// A server that restarts brings the consumer back from disk, or not.
func TestServerRestart(t *testing.T) {
	for _, outage := range []time.Duration{0, 90 * time.Second} {
		t.Run(outage.String(), func(t *testing.T) {
			dir := t.TempDir()
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, dir)
				r.stream(jetstream.StreamConfig{Storage: jetstream.FileStorage})
				d, l := recoverFrom(t, r, OrderedConfig{}, func() {
					r.srv.Stop()
					time.Sleep(outage)
					if err := r.srv.Start(); err != nil {
						t.Error(err)
					}
					for r.nc.Stats().Reconnects == 0 || !r.nc.IsConnected() {
						time.Sleep(time.Millisecond)
					}
				})
				if d > 0 || l.resubs > 1 {
					t.Errorf("resumed after %v with %d rebuilds\n%v", d, l.resubs, l)
				}
			})
		})
	}
}

// With a memory stream the restart takes the stream along; its name comes back
// empty, as another stream.
func TestServerRestartLosesTheStream(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		r.stream(jetstream.StreamConfig{Storage: jetstream.MemoryStorage})
		r.publish("s.a", 10)
		go func() {
			time.Sleep(time.Minute)
			r.srv.Stop()
			_ = r.srv.Start()
			for r.nc.Stats().Reconnects == 0 || !r.nc.IsConnected() {
				time.Sleep(time.Millisecond)
			}
			time.Sleep(300 * time.Millisecond)
			r.stream(jetstream.StreamConfig{Storage: jetstream.MemoryStorage})
			r.publish("s.a", 20)
		}()
		n := 0
		for _, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S"}) {
			if err != nil {
				if !errors.Is(err, ErrStreamRecreated) {
					t.Errorf("got %v", err)
				}
				break
			}
			n++
		}
		if n != 10 {
			t.Errorf("%d messages", n)
		}
	})
}

func TestStreamDeleted(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 3)
		time.AfterFunc(time.Minute, func() { _ = r.js.DeleteStream(t.Context(), "S") })
		start := time.Now()
		var last error
		for _, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S"}) {
			last = err
		}
		if !errors.Is(last, jetstream.ErrStreamNotFound) {
			t.Errorf("got %v", last)
		}
		if d := time.Since(start); d < 61*time.Second || d > 63*time.Second {
			t.Errorf("after %v", d)
		}
	})
}

// Answers to the create are swallowed three times; the fourth try succeeds,
// under the same name.
func TestCreateFails(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		replies := map[string]bool{}
		names := map[string]bool{}
		_, l := recoverFrom(t, r, OrderedConfig{}, func() {
			n := 0
			r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
				if f.Direction == faultproxy.ToServer && strings.Contains(f.Subject, "CONSUMER.CREATE") {
					names[f.Subject] = true
					replies[f.Reply] = true
				}
				if f.Direction == faultproxy.ToClient && replies[f.Subject] {
					if n++; n <= 3 {
						return faultproxy.Drop
					}
				}
				return faultproxy.Pass
			})
			deleteConsumers(r)
		})
		if len(names) != 1 || len(replies) != 4 {
			t.Errorf("%d creates under %d names\n%v", len(replies), len(names), l)
		}
	})
}

// A half-open connection: nothing arrives and nothing fails.
func TestHalfOpen(t *testing.T) {
	for _, reconnect := range []bool{false, true} {
		t.Run(fmt.Sprint(reconnect), func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", nats.PingInterval(time.Hour))
				r.stream(jetstream.StreamConfig{})
				_, l := recoverFrom(t, r, OrderedConfig{Tuning: Tuning{ReconnectHalfOpen: reconnect}}, func() {
					r.srv.Mute(faultproxy.ToClient)
					time.AfterFunc(5*time.Minute, func() { r.srv.Unmute(faultproxy.ToClient) })
					if reconnect {
						time.AfterFunc(20*time.Second, func() {
							r.srv.Discard(faultproxy.ToClient)
							r.srv.Unmute(faultproxy.ToClient)
						})
					}
				})
				found := false
				for _, line := range l.lines {
					found = found || strings.Contains(line, "half open")
				}
				if !found {
					t.Errorf("the listener was not told\n%v", l)
				}
			})
		})
	}
}
