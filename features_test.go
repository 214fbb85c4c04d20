package paced

import (
	"bytes"
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

// quietly drops what the connection's error handler would print.
func quietly() nats.Option { return nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}) }

func TestDeliverPolicies(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		for _, s := range []string{"s.a", "s.b", "s.c"} {
			r.publish(s, 5)
			time.Sleep(time.Minute)
		}
		at := time.Now().Add(-150 * time.Second) // between a and b
		future := time.Now().Add(time.Hour)
		for _, tc := range []struct {
			name string
			cfg  OrderedConfig
			want []uint64 // and 16, which is published after the start
		}{
			{"all", OrderedConfig{}, sequences(1, 15)},
			{"all, one filter", OrderedConfig{FilterSubjects: []string{"s.b"}}, sequences(6, 10)},
			{"all, filters", OrderedConfig{FilterSubjects: []string{"s.c", "s.a"}}, append(sequences(1, 5), sequences(11, 15)...)},
			{"new", OrderedConfig{DeliverPolicy: jetstream.DeliverNewPolicy}, nil},
			{"last", OrderedConfig{DeliverPolicy: jetstream.DeliverLastPolicy}, sequences(15, 15)},
			{"last, filter", OrderedConfig{DeliverPolicy: jetstream.DeliverLastPolicy, FilterSubjects: []string{"s.b"}}, sequences(10, 10)},
			{"sequence", OrderedConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 8}, sequences(8, 15)},
			{"time", OrderedConfig{DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &at}, sequences(6, 15)},
			{"future", OrderedConfig{DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &future}, nil},
		} {
			t.Log(tc.name)
			cfg := tc.cfg
			cfg.Stream, cfg.UntilCaughtUp = "S", true
			wantSequences(t, collect(t, Ordered(t.Context(), r.js, cfg)), tc.want)
		}
		// Until.
		seq := func(cfg OrderedConfig) []uint64 {
			t.Helper()
			cfg.Stream = "S"
			return collect(t, Ordered(t.Context(), r.js, cfg))
		}
		wantSequences(t, seq(OrderedConfig{UntilSeq: 7}), sequences(1, 7))
		wantSequences(t, seq(OrderedConfig{UntilSeq: 7, FilterSubjects: []string{"s.a"}}), sequences(1, 5))
		wantSequences(t, seq(OrderedConfig{UntilSeq: 12, FilterSubjects: []string{"s.a"}}), sequences(1, 5))
		wantSequences(t, seq(OrderedConfig{UntilSeq: 7, UntilCaughtUp: true, DeliverPolicy: jetstream.DeliverNewPolicy}), nil)
		wantSequences(t, seq(OrderedConfig{UntilTime: &at}), sequences(1, 5))
		// A sequence that is not there yet is waited for.
		time.AfterFunc(time.Minute, func() { r.publish("s.d", 5) })
		start := time.Now()
		wantSequences(t, seq(OrderedConfig{UntilSeq: 17, DeliverPolicy: jetstream.DeliverLastPolicy}), sequences(15, 17))
		if d := time.Since(start); d != time.Minute {
			t.Errorf("after %v", d)
		}
		// So is a time: before the first message after it, or when the clock
		// has passed it and nothing is pending.
		synctest.Wait()
		soon := time.Now().Add(90 * time.Second)
		time.AfterFunc(time.Minute, func() { r.publish("s.d", 1) })
		time.AfterFunc(2*time.Minute, func() { r.publish("s.d", 1) })
		start = time.Now()
		wantSequences(t, seq(OrderedConfig{UntilTime: &soon, DeliverPolicy: jetstream.DeliverNewPolicy}), sequences(21, 21))
		if d := time.Since(start); d < 90*time.Second || d > 90*time.Second+10*time.Millisecond {
			t.Errorf("after %v", d)
		}
		r.wantClean()
	})
}

// Times that are far away or zero, and a start ahead of the stream, mean what
// they say.
func TestFarEnds(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 3)
		for _, tc := range []struct {
			until time.Time
			want  []uint64
		}{
			{time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC), sequences(1, 3)},
			{time.Date(2400, 1, 1, 0, 0, 0, 0, time.UTC), sequences(1, 3)},
			{time.Time{}, nil},
			{time.Date(1600, 1, 1, 0, 0, 0, 0, time.UTC), nil},
		} {
			wantSequences(t, collect(t, Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", UntilTime: &tc.until, UntilCaughtUp: true})), tc.want)
		}
		ahead := OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 6}
		time.AfterFunc(time.Minute, func() { r.publish("s.a", 4) })
		for m, err := range Ordered(t.Context(), r.js, ahead) {
			if err != nil || m.Sequence() != 6 {
				t.Errorf("%d, %v", m.Sequence(), err)
			}
			break
		}
		r.wantClean()
	})
}

func TestHeadersOnly(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		m := nats.NewMsg("s.a")
		m.Data = []byte("hello")
		m.Header.Set("K", "v")
		if _, err := r.js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		for m, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", HeadersOnly: true, UntilCaughtUp: true}) {
			if err != nil || len(m.Data()) != 0 || m.Headers().Get("Nats-Msg-Size") != "5" || m.Headers().Get("K") != "v" {
				t.Error(err, m.Data(), m.Headers())
			}
		}
	})
}

// Msg stands in for jetstream.Msg, with the same numbers as its metadata.
func TestMsg(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		s := r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 3)
		info := s.CachedInfo()
		for m, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", UntilCaughtUp: true}) {
			if err != nil {
				t.Fatal(err)
			}
			var j jetstream.Msg = m
			meta, err := j.Metadata()
			if err != nil {
				t.Fatal(err)
			}
			if meta.Sequence.Stream != m.Sequence() || meta.Sequence.Consumer != m.ConsumerSequence() ||
				meta.NumPending != m.NumPending() || meta.NumPending != 3-m.Sequence() ||
				meta.NumDelivered != 1 || m.NumDelivered() != 1 ||
				!meta.Timestamp.Equal(m.Timestamp()) || !m.Timestamp().Equal(time.Now()) ||
				meta.Stream != "S" || !strings.HasPrefix(meta.Consumer, "paced_") || meta.Domain != "" {
				t.Errorf("%+v", meta)
			}
			if p := m.Position(); p.Sequence != m.Sequence() || !p.StreamCreated.Equal(info.Created) {
				t.Errorf("position %+v", p)
			}
			if err := errors.Join(j.Ack(), j.Nak(), j.NakWithDelay(1), j.Term(), j.TermWithReason("x"), j.InProgress(), j.DoubleAck(t.Context())); err != nil {
				t.Error(err)
			}
			if string(j.Data()) != "x" || j.Subject() != "s.a" || !strings.HasPrefix(j.Reply(), "$JS.ACK.S.") {
				t.Error(j.Data(), j.Subject(), j.Reply())
			}
		}
		defer func() {
			if recover() == nil {
				t.Error("a zero Msg did not panic")
			}
		}()
		_ = Msg{}.Ack()
	})
}

// The original pace is kept, through silences longer than heartbeats and
// windows.
func TestReplayOriginal(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		pauses := []time.Duration{0, time.Second, 90 * time.Second, 10 * time.Millisecond, 15 * time.Second, 5 * time.Minute}
		for _, p := range pauses {
			time.Sleep(p)
			r.publish("s.a", 1)
		}
		last := time.Now()
		n := 0
		for m, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", ReplayPolicy: jetstream.ReplayOriginalPolicy, UntilCaughtUp: true,
			Listener: &Listener{Resubscribing: func(err error, _ int, _ time.Duration) { t.Error(err) }}}) {
			if err != nil {
				t.Fatal(err)
			}
			if n > 0 {
				if got, want := time.Since(last), pauses[n]; math.Abs(float64(got-want)) > 0.1*float64(want) {
					t.Errorf("message %d after %v, want %v", m.Sequence(), got, want)
				}
			}
			last = time.Now()
			n++
		}
		if n != len(pauses) {
			t.Errorf("%d messages", n)
		}
		r.wantClean()
	})
}

func TestDomainPrefixAndInbox(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		srv := testserver.New(t, testserver.Options{Configure: func(o *server.Options) { o.JetStreamDomain = "HUB" }})
		nc := srv.Connect(t, nats.CustomInboxPrefix("_MINE.x"))
		for name, mk := range map[string]func() (jetstream.JetStream, error){
			"plain":  func() (jetstream.JetStream, error) { return jetstream.New(nc) },
			"domain": func() (jetstream.JetStream, error) { return jetstream.NewWithDomain(nc, "HUB") },
			"prefix": func() (jetstream.JetStream, error) { return jetstream.NewWithAPIPrefix(nc, "$JS.HUB.API") },
		} {
			js, err := mk()
			if err != nil {
				t.Fatal(err)
			}
			r := &rig{T: t, srv: srv, nc: nc, js: js}
			r.stream(jetstream.StreamConfig{Storage: jetstream.MemoryStorage})
			r.publish("s.a", 5)
			n := 0
			for m, err := range Ordered(t.Context(), js, OrderedConfig{Stream: "S", UntilCaughtUp: true}) {
				if err != nil {
					t.Fatal(name, err)
				}
				n++
				_ = m
			}
			if n != 5 {
				t.Errorf("%s: %d messages", name, n)
			}
			r.wantClean()
			if err := js.DeleteStream(t.Context(), "S"); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Bad input is one pair, and nothing is sent.
func TestBadInput(t *testing.T) {
	now := time.Now()
	for _, tc := range []struct {
		field string
		cfg   OrderedConfig
	}{
		{"Stream", OrderedConfig{}},
		{"Stream", OrderedConfig{Stream: "a.b"}},
		{"Stream", OrderedConfig{Stream: "a b"}},
		{"Stream", OrderedConfig{Stream: "a*"}},
		{"Stream", OrderedConfig{Stream: "a>"}},
		{"Stream", OrderedConfig{Stream: "a/b"}},
		{"Stream", OrderedConfig{Stream: "a\\b"}},
		{"Stream", OrderedConfig{Stream: "a\tb"}},
		{"NamePrefix", OrderedConfig{Stream: "S", NamePrefix: "a.b"}},
		{"FilterSubjects", OrderedConfig{Stream: "S", FilterSubjects: []string{""}}},
		{"FilterSubjects", OrderedConfig{Stream: "S", FilterSubjects: []string{"a..b"}}},
		{"FilterSubjects", OrderedConfig{Stream: "S", FilterSubjects: []string{"a.>.b"}}},
		{"FilterSubjects", OrderedConfig{Stream: "S", FilterSubjects: []string{"a.*", "a.b"}}},
		{"FilterSubjects", OrderedConfig{Stream: "S", FilterSubjects: []string{"a.b.c", "a.>"}}},
		{"FilterSubjects", OrderedConfig{Stream: "S", FilterSubjects: []string{"a", "a"}}},
		{"DeliverPolicy", OrderedConfig{Stream: "S", DeliverPolicy: 17}},
		{"OptStartSeq", OrderedConfig{Stream: "S", OptStartSeq: 1}},
		{"OptStartSeq", OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverByStartSequencePolicy}},
		{"OptStartSeq", OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &now, OptStartSeq: 4}},
		{"OptStartTime", OrderedConfig{Stream: "S", OptStartTime: &now}},
		{"OptStartTime", OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverByStartTimePolicy}},
		{"OptStartTime", OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartTime: &now, OptStartSeq: 4}},
		{"ReplayPolicy", OrderedConfig{Stream: "S", ReplayPolicy: 5}},
		{"InactiveThreshold", OrderedConfig{Stream: "S", InactiveThreshold: -1}},
		{"MaxMessages", OrderedConfig{Stream: "S", MaxMessages: -1}},
		{"MaxBytes", OrderedConfig{Stream: "S", MaxBytes: -1}},
		{"Tuning.LookAhead", OrderedConfig{Stream: "S", Tuning: Tuning{LookAhead: -1}}},
		{"Tuning.Expires", OrderedConfig{Stream: "S", Tuning: Tuning{Expires: -1}}},
		{"Tuning.Heartbeat", OrderedConfig{Stream: "S", Tuning: Tuning{Heartbeat: -1}}},
		{"Tuning.Heartbeat", OrderedConfig{Stream: "S", Tuning: Tuning{Heartbeat: 16 * time.Second}}},
		{"Tuning.Heartbeat", OrderedConfig{Stream: "S", Tuning: Tuning{Heartbeat: 6 * time.Second, Expires: 10 * time.Second}}},
		{"Tuning.MaxAttempts", OrderedConfig{Stream: "S", Tuning: Tuning{MaxAttempts: -1}}},
	} {
		js, _ := jetstream.New(&nats.Conn{})
		check := func(err error) {
			t.Helper()
			ce, ok := errors.AsType[*ConfigError](err)
			if !ok || !errors.Is(err, ErrInvalidConfig) || ce.Field != "OrderedConfig."+tc.field || ce.Bound == "" {
				t.Errorf("%+v: got %v", tc.cfg, err)
			}
		}
		if _, err := NewOrderedConsumer(js, tc.cfg); err == nil {
			t.Errorf("%+v: no error", tc.cfg)
		} else {
			check(err)
		}
		pairs := 0
		for m, err := range Ordered(context.Background(), js, tc.cfg) {
			pairs++
			check(err)
			if m != (Msg{}) {
				t.Error("a message beside the error")
			}
		}
		if pairs != 1 {
			t.Errorf("%+v: %d pairs", tc.cfg, pairs)
		}
	}
	for _, err := range Ordered(context.Background(), nil, OrderedConfig{Stream: "S"}) {
		if !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("js nil: got %v", err)
		}
	}
}

// What only the server can know is one pair as well, and nothing is created.
func TestBadInputOnTheServer(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{Name: "WQ", Subjects: []string{"wq"}, Retention: jetstream.WorkQueuePolicy})
		r.stream(jetstream.StreamConfig{Name: "INT", Subjects: []string{"int"}, Retention: jetstream.InterestPolicy})
		r.stream(jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}})
		for _, tc := range []struct {
			cfg  OrderedConfig
			want error
		}{
			{OrderedConfig{Stream: "WQ"}, ErrInvalidConfig},
			{OrderedConfig{Stream: "INT"}, ErrInvalidConfig},
			{OrderedConfig{Stream: "NONE"}, jetstream.ErrStreamNotFound},
		} {
			start, pairs := time.Now(), 0
			for _, err := range Ordered(t.Context(), r.js, tc.cfg) {
				pairs++
				if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.cfg.Stream) {
					t.Errorf("got %v, want %v", err, tc.want)
				}
			}
			if d := time.Since(start); pairs != 1 || d != 0 {
				t.Errorf("%s: %d pairs after %v", tc.cfg.Stream, pairs, d)
			}
		}
		acc, err := r.js.AccountInfo(t.Context())
		if err != nil || acc.Consumers != 0 {
			t.Errorf("%d consumers, %v", acc.Consumers, err)
		}
	})
}

// A permission that is missing is one terminal error that names the subject,
// after a round trip.
func TestPermissions(t *testing.T) {
	for _, tc := range []struct{ deny, name string }{
		{"$JS.API.STREAM.INFO.>", "$JS.API.STREAM.INFO.S"},
		{"$JS.API.CONSUMER.CREATE.>", "$JS.API.CONSUMER.CREATE.S.paced_"},
		{"$JS.API.CONSUMER.MSG.NEXT.>", "$JS.API.CONSUMER.MSG.NEXT.S.paced_"},
	} {
		t.Run(tc.deny, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				srv := testserver.New(t, testserver.Options{Configure: func(o *server.Options) {
					o.Users = []*server.User{
						{Username: "admin", Password: "x"},
						{Username: "u", Password: "x", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: []string{tc.deny}}}},
					}
				}})
				admin := srv.Connect(t, nats.UserInfo("admin", "x"))
				ajs, _ := jetstream.New(admin)
				r := &rig{T: t, srv: srv, nc: admin, js: ajs}
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 3)
				nc := srv.Connect(t, nats.UserInfo("u", "x"), quietly())
				js, _ := jetstream.New(nc)
				start, pairs := time.Now(), 0
				for _, err := range Ordered(t.Context(), js, OrderedConfig{Stream: "S"}) {
					pairs++
					if !errors.Is(err, nats.ErrPermissionViolation) || !strings.Contains(err.Error(), tc.name) {
						t.Errorf("got %v", err)
					}
				}
				if d := time.Since(start); pairs != 1 || d > 0 {
					t.Errorf("%d pairs after %v", pairs, d)
				}
				r.wantClean()
			})
		})
	}
}

// Messages larger than MaxBytes come alone, without a stall and without a
// storm of pulls.
func TestOversize(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		sizes := []int{10, 200_000, 10, 10, 900_000, 900_000, 5, 0}
		for _, n := range sizes {
			if _, err := r.js.Publish(t.Context(), "s.a", bytes.Repeat([]byte("x"), n)); err != nil {
				t.Fatal(err)
			}
		}
		for _, maxBytes := range []int{0, 1 << 20, 100_000, 1024, 1} {
			start := time.Now()
			c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S", MaxBytes: maxBytes})
			if err != nil {
				t.Fatal(err)
			}
			i := 0
			for m, err := range c.Backlog(t.Context()) {
				if err != nil {
					t.Fatal(err)
				}
				if len(m.Data()) != sizes[i] {
					t.Errorf("message %d: %d bytes", i+1, len(m.Data()))
				}
				i++
			}
			if i != len(sizes) {
				t.Errorf("%d messages", i)
			}
			if d, s := time.Since(start), c.Stats(); d > 10*time.Millisecond || s.Pulls > 20 || s.Rebuilds > 0 {
				t.Errorf("MaxBytes %d: %v, %d pulls, %d rebuilds", maxBytes, d, s.Pulls, s.Rebuilds)
			}
		}
		r.wantClean()
	})
}

// The first subscribe has five attempts, then the last error comes.
func TestFirstSubscribeGivesUp(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		srv := testserver.New(t, testserver.Options{Configure: func(o *server.Options) { o.JetStream = false }})
		nc := srv.Connect(t, quietly())
		js, _ := jetstream.New(nc)
		start, pairs, attempts := time.Now(), 0, 0
		cfg := OrderedConfig{Stream: "S", Listener: &Listener{Resubscribing: func(error, int, time.Duration) { attempts++ }}}
		for _, err := range Ordered(t.Context(), js, cfg) {
			pairs++
			if !errors.Is(err, nats.ErrNoResponders) {
				t.Errorf("got %v", err)
			}
		}
		if d := time.Since(start); pairs != 1 || attempts != 4 || d != 1500*time.Millisecond {
			t.Errorf("%d pairs, %d more attempts, after %v", pairs, attempts, d)
		}
	})
}
