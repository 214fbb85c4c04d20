package paced

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

type seen struct {
	seqs []uint64
	gaps []string
	err  error
}

// observe reads with cfg, calls at with the number of messages so far before
// each message is counted as handled, and stops after the message stop.
func observe(ctx context.Context, js jetstream.JetStream, cfg OrderedConfig, stop uint64, at func(n int)) seen {
	var s seen
	cfg.Stream = "S"
	cfg.Listener = Listeners(cfg.Listener, &Listener{Gap: func(from, to uint64, certain bool) {
		s.gaps = append(s.gaps, fmt.Sprintf("%d-%d %v", from, to, certain))
	}})
	for m, err := range Ordered(ctx, js, cfg) {
		if err != nil {
			s.err = err
			break
		}
		s.seqs = append(s.seqs, m.Sequence())
		if at != nil {
			at(len(s.seqs))
		}
		if m.Sequence() == stop {
			break
		}
	}
	return s
}

// Retention overtakes a slow reader, with the consumer alive: the stream
// sequence jumps while the consumer sequence does not.
func TestGapWithoutRebuild(t *testing.T) {
	for _, policy := range []GapPolicy{GapFail, GapContinue} {
		t.Run(fmt.Sprint(policy), func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", quietly())
				r.stream(jetstream.StreamConfig{MaxMsgs: 100})
				r.publish("s.a", 100)
				s := observe(t.Context(), r.js, OrderedConfig{MaxMessages: 10, OnGap: policy}, 350, func(n int) {
					if n == 5 {
						synctest.Wait()       // what was asked for is here
						r.publish("s.a", 250) // keeps 251 to 350
						time.Sleep(time.Second)
					}
				})
				// Eleven were asked for before: the buffer and half of it again.
				from := uint64(12)
				if policy == GapContinue {
					wantSequences(t, s.seqs, append(sequences(1, 11), sequences(251, 350)...))
					if len(s.gaps) != 1 || s.gaps[0] != "12-250 true" || s.err != nil {
						t.Errorf("gaps %v, error %v", s.gaps, s.err)
					}
				} else {
					var gap *GapError
					if !errors.As(s.err, &gap) || gap.From != from || gap.To != 250 || len(s.gaps) != 0 {
						t.Errorf("gaps %v, error %v", s.gaps, s.err)
					}
					wantSequences(t, s.seqs, sequences(1, 11))
				}
				r.wantClean()
			})
		})
	}
}

// The same seen by a rebuild; the handle goes on behind the gap.
func TestGapOnRebuild(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		s := r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 20)
		c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S"})
		if err != nil {
			t.Fatal(err)
		}
		var got []uint64
		var gap *GapError
		for m, err := range c.Messages(t.Context()) {
			if err != nil {
				if !errors.As(err, &gap) || gap.From != 21 || gap.To != 30 || gap.Stream != "S" {
					t.Errorf("got %v", err)
				}
				break
			}
			got = append(got, m.Sequence())
			if len(got) == 20 {
				deleteConsumers(r)
				r.publish("s.a", 15)
				if err := s.Purge(t.Context(), jetstream.WithPurgeSequence(31)); err != nil {
					t.Fatal(err)
				}
			}
		}
		wantSequences(t, got, sequences(1, 20))
		wantSequences(t, collect(t, c.Backlog(t.Context())), sequences(31, 35))
		r.wantClean()
	})
}

// The whole backlog behind the reader expires: an error, not a quiet end.
func TestGapAtTheTail(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  OrderedConfig
		want string
	}{
		{"fail", OrderedConfig{}, "error"},
		{"continue", OrderedConfig{OnGap: GapContinue}, "[4-10 true]"},
		{"filter", OrderedConfig{FilterSubjects: []string{"s.a"}}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", quietly())
				r.stream(jetstream.StreamConfig{MaxAge: time.Minute})
				r.publish("s.a", 10)
				tc.cfg.MaxMessages, tc.cfg.UntilCaughtUp = 1, true
				start := time.Time{}
				s := observe(t.Context(), r.js, tc.cfg, 0, func(n int) {
					if n == 2 {
						time.Sleep(2 * time.Minute)
					}
					start = time.Now()
				})
				var gap *GapError
				switch {
				case tc.want == "error":
					if !errors.As(s.err, &gap) || gap.From != 4 || gap.To != 10 {
						t.Errorf("got %v", s.err)
					}
				case s.err != nil || (tc.want != "" && fmt.Sprint(s.gaps) != tc.want):
					t.Errorf("gaps %v, error %v", s.gaps, s.err)
				}
				wantSequences(t, s.seqs, sequences(1, 3)) // 3 was waiting
				if d := time.Since(start); d > 10*time.Millisecond {
					t.Errorf("ended %v after the last message", d)
				}
			})
		})
	}
}

// No false alarm.
func TestNoGap(t *testing.T) {
	for _, tc := range []struct {
		name   string
		stream jetstream.StreamConfig
		cfg    OrderedConfig
		gaps   string // what the listener is told
		run    func(*rig, jetstream.Stream, int)
		stop   uint64
		want   int
	}{
		{name: "interior deletes", stop: 30, want: 20, run: func(r *rig, s jetstream.Stream, n int) {
			if n == 3 {
				for q := uint64(11); q <= 20; q++ {
					_ = s.DeleteMsg(r.Context(), q)
				}
				r.publish("s.a", 10)
			}
		}},
		{name: "trimmed before the start", stop: 30, want: 20, run: func(r *rig, s jetstream.Stream, n int) {
			if n == 0 {
				_ = s.Purge(r.Context(), jetstream.WithPurgeSequence(11))
				r.publish("s.a", 10)
			}
		}},
		{name: "start sequence below the first", stop: 20, want: 10,
			cfg: OrderedConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 3}, run: func(r *rig, s jetstream.Stream, n int) {
				if n == 0 {
					_ = s.Purge(r.Context(), jetstream.WithPurgeSequence(11))
				}
			}},
		// The reader heard by heartbeats that the stream passed what it is
		// not interested in.
		{name: "quiet filter on a trimmed stream", stop: 511, want: 11, stream: jetstream.StreamConfig{MaxMsgs: 50},
			cfg: OrderedConfig{FilterSubjects: []string{"s.a"}, OnGap: GapFail}, run: func(r *rig, s jetstream.Stream, n int) {
				if n == 10 {
					go func() {
						for range 10 {
							r.publish("s.other", 50)
							time.Sleep(time.Minute)
						}
						deleteConsumers(r)
						time.Sleep(time.Minute)
						_ = r.nc.Publish("s.a", nil) // the reader stops with it
					}()
				}
			}},
		{name: "limit per subject", stop: 40, want: 12, stream: jetstream.StreamConfig{MaxMsgsPerSubject: 1}, gaps: "[4-38 false]",
			cfg: OrderedConfig{MaxMessages: 1}, run: func(r *rig, s jetstream.Stream, n int) {
				if n == 0 {
					for k := range 10 {
						r.publish(fmt.Sprintf("s.%d", k), 1)
					}
				}
			}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", quietly())
				s := r.stream(tc.stream)
				if tc.name != "limit per subject" {
					r.publish("s.a", 20-10*boolInt(tc.name == "quiet filter on a trimmed stream"))
				}
				if tc.name == "limit per subject" {
					tc.run(r, s, 0)
					// 1..10, one each; each rewritten three times under a slow reader.
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					got := observe(ctx, r.js, tc.cfg, 40, func(n int) {
						if n == 2 {
							for range 3 {
								for k := range 10 {
									r.publish(fmt.Sprintf("s.%d", k), 1)
								}
							}
						}
					})
					if got.err != nil {
						t.Error(got.err)
					}
					for _, g := range got.gaps {
						if g[len(g)-5:] != "false" {
							t.Errorf("certain gap %v", g)
						}
					}
					if len(got.gaps) == 0 {
						t.Error("no possible gap reported")
					}
					return
				}
				tc.run(r, s, 0)
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				got := observe(ctx, r.js, tc.cfg, tc.stop, func(n int) { tc.run(r, s, n) })
				if got.err != nil || len(got.gaps) != 0 {
					t.Errorf("gaps %v, error %v, read %s", got.gaps, got.err, brief(got.seqs))
				}
			})
		})
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// A filtered reader whose consumer is lost may have missed something: the
// listener hears of it.
func TestPossibleGap(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{MaxMsgs: 50})
		r.publish("s.a", 10)
		s := observe(t.Context(), r.js, OrderedConfig{FilterSubjects: []string{"s.a"}}, 111, func(n int) {
			if n == 10 {
				deleteConsumers(r)
				r.publish("s.b", 100)
				r.publish("s.a", 1)
			}
		})
		if s.err != nil || fmt.Sprint(s.gaps) != "[11-61 false]" {
			t.Errorf("gaps %v, error %v", s.gaps, s.err)
		}
	})
}

// After goes on behind a stored position, in the same incarnation of the
// stream only.
func TestAfter(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		s := r.stream(jetstream.StreamConfig{Storage: jetstream.MemoryStorage})
		r.publish("s.a", 20)
		var stored Position
		for m, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S"}) {
			if err != nil {
				t.Fatal(err)
			}
			if stored = m.Position(); stored.Sequence == 7 {
				break
			}
		}
		after := func(p Position) seen {
			return observe(t.Context(), r.js, OrderedConfig{After: p, UntilCaughtUp: true}, 0, nil)
		}
		if got := after(stored); got.err != nil {
			t.Error(got.err)
		} else {
			wantSequences(t, got.seqs, sequences(8, 20))
		}
		if got := after(Position{20, stored.StreamCreated}); got.err != nil || len(got.seqs) != 0 {
			t.Error(got)
		}
		// Retention passed it.
		if err := s.Purge(t.Context(), jetstream.WithPurgeSequence(12)); err != nil {
			t.Fatal(err)
		}
		var gap *GapError
		if got := after(stored); !errors.As(got.err, &gap) || gap.From != 8 || gap.To != 11 || len(got.seqs) != 0 {
			t.Error(got)
		}
		// Another stream of that name.
		for _, p := range []Position{{7, stored.StreamCreated.Add(-time.Second)}, {100, stored.StreamCreated}} {
			start := time.Now()
			if got := after(p); !errors.Is(got.err, ErrStreamRecreated) || len(got.seqs) != 0 || time.Since(start) > time.Second {
				t.Errorf("after %v: %v %v", p, got, time.Since(start))
			}
		}
		for _, cfg := range []OrderedConfig{
			{After: stored, DeliverPolicy: jetstream.DeliverNewPolicy},
			{After: stored, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 4},
			{After: Position{Sequence: 5}},
		} {
			if got := observe(t.Context(), r.js, cfg, 0, nil); !errors.Is(got.err, ErrInvalidConfig) {
				t.Error(got.err)
			}
		}
		r.wantClean()
	})
}

// The server comes back with an older copy of its store: the position lies
// behind the stream's end.
func TestOlderStore(t *testing.T) {
	dir, backup := t.TempDir(), t.TempDir()
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, dir, quietly())
		r.stream(jetstream.StreamConfig{Storage: jetstream.FileStorage})
		r.publish("s.a", 10)
		r.srv.Stop()
		copyDir(t, dir, backup)
		if err := r.srv.Start(); err != nil {
			t.Fatal(err)
		}
		waitConnected(r.nc, 1)
		r.publish("s.a", 10)
		s := observe(t.Context(), r.js, OrderedConfig{}, 0, func(n int) {
			if n == 20 {
				r.srv.Stop()
				copyDir(t, backup, dir)
				if err := r.srv.Start(); err != nil {
					t.Error(err)
				}
				waitConnected(r.nc, 2)
			}
		})
		if !errors.Is(s.err, ErrStreamRecreated) {
			t.Errorf("got %v", s.err)
		}
		wantSequences(t, s.seqs, sequences(1, 20))
	})
}

func waitConnected(nc *nats.Conn, reconnects uint64) {
	for nc.Stats().Reconnects < reconnects || !nc.IsConnected() {
		time.Sleep(time.Millisecond)
	}
}

// Without permission to look at its consumer the loop rebuilds instead of
// asking; without permission to delete it only the connection's own handler
// hears of it.
func TestPermissionsAtRuntime(t *testing.T) {
	for _, deny := range []string{"$JS.API.CONSUMER.INFO.>", "$JS.API.CONSUMER.DELETE.>"} {
		t.Run(deny, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				srv := testserver.New(t, testserver.Options{Configure: func(o *server.Options) {
					o.Users = []*server.User{
						{Username: "admin", Password: "x"},
						{Username: "u", Password: "x", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: []string{deny}}}},
					}
				}})
				admin := srv.Connect(t, nats.UserInfo("admin", "x"))
				ajs, _ := jetstream.New(admin)
				r := &rig{T: t, srv: srv, nc: admin, js: ajs}
				r.stream(jetstream.StreamConfig{})
				var refused atomic.Int64
				nc := srv.Connect(t, nats.UserInfo("u", "x"), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
					if errors.Is(err, nats.ErrPermissionViolation) {
						refused.Add(1)
					}
				}))
				js, _ := jetstream.New(nc)
				u := &rig{T: t, srv: srv, nc: nc, js: js}
				l := &log{}
				u.publish("s.a", 3)
				got := observe(t.Context(), js, OrderedConfig{Listener: l.listener()}, 4, func(n int) {
					if n == 3 && deny == "$JS.API.CONSUMER.INFO.>" {
						time.AfterFunc(time.Minute, func() {
							// Heartbeats stop without a word.
							srv.SetFilter(dropStatus(409))
							deleteConsumers(r)
							r.publish("s.a", 1)
						})
					} else if n == 3 {
						r.publish("s.a", 1)
					}
				})
				if got.err != nil {
					t.Error(got.err)
				}
				wantSequences(t, got.seqs, sequences(1, 4))
				time.Sleep(time.Second)
				// The first is the loop's own report of why it rebuilds.
				if want := 1 + boolInt(deny == "$JS.API.CONSUMER.INFO.>"); refused.Load() != int64(want) {
					t.Errorf("%d refusals\n%v", refused.Load(), l)
				}
			})
		})
	}
}
