package paced

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

// rig is a server in a bubble with a client and a stream "S" on "s.>".
type rig struct {
	*testing.T
	srv *testserver.Server
	nc  *nats.Conn
	js  jetstream.JetStream

	subs int // subscriptions of the test's own
}

func newRig(t *testing.T, dir string, opts ...nats.Option) *rig {
	t.Helper()
	srv := testserver.New(t, testserver.Options{Dir: dir})
	nc := srv.Connect(t, opts...)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{T: t, srv: srv, nc: nc, js: js}
}

func (r *rig) stream(cfg jetstream.StreamConfig) jetstream.Stream {
	r.Helper()
	if cfg.Name == "" {
		cfg.Name = "S"
	}
	if cfg.Subjects == nil {
		cfg.Subjects = []string{"s.>"}
	}
	s, err := r.js.CreateStream(r.Context(), cfg)
	if err != nil {
		r.Fatal(err)
	}
	return s
}

// publish stores n messages under subject; the payload is the number of the
// message in the stream.
func (r *rig) publish(subject string, n int) {
	r.Helper()
	for range n {
		if _, err := r.js.Publish(r.Context(), subject, []byte("x")); err != nil {
			r.Fatal(err)
		}
	}
}

// consumers returns the names of the consumers on S.
func (r *rig) consumers() []string {
	r.Helper()
	s, err := r.js.Stream(r.Context(), "S")
	if err != nil {
		r.Fatal(err)
	}
	var names []string
	l := s.ConsumerNames(r.Context())
	for n := range l.Name() {
		names = append(names, n)
	}
	if l.Err() != nil {
		r.Fatal(l.Err())
	}
	return names
}

// wantClean fails unless nothing is left of any loop: no consumer on the
// server, no subscription besides the request mux, no status listener, no
// member of the byte budget.
func (r *rig) wantClean() {
	r.Helper()
	synctest.Wait()
	if got := r.consumers(); len(got) != 0 {
		r.Errorf("consumers left: %v", got)
	}
	if n := r.nc.NumSubscriptions(); n > 1+r.subs {
		r.Errorf("%d subscriptions left", n)
	}
}

func sequences(from, to uint64) []uint64 {
	var s []uint64
	for ; from <= to; from++ {
		s = append(s, from)
	}
	return s
}

func wantSequences(t testing.TB, got, want []uint64) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("sequences %s, want %s", brief(got), brief(want))
	}
}

func brief(s []uint64) string {
	if len(s) > 24 {
		return fmt.Sprintf("%v ... %v (%d)", s[:12], s[len(s)-6:], len(s))
	}
	return fmt.Sprint(s)
}

func TestOrderedReadsWhatThereIsThenLive(t *testing.T) {
	for _, storage := range []jetstream.StorageType{jetstream.MemoryStorage, jetstream.FileStorage} {
		t.Run(storage.String(), func(t *testing.T) {
			dir := t.TempDir()
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, dir)
				r.stream(jetstream.StreamConfig{Storage: storage})
				r.publish("s.a", 1000)
				go func() {
					time.Sleep(time.Minute)
					r.publish("s.b", 10)
				}()
				var got []uint64
				start := time.Now()
				for msg, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S"}) {
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, msg.Sequence())
					if msg.Replay() != (msg.Sequence() <= 1000) {
						t.Errorf("message %d: Replay() = %v", msg.Sequence(), msg.Replay())
					}
					if len(got) == 1010 {
						break
					}
				}
				wantSequences(t, got, sequences(1, 1010))
				if d := time.Since(start); d != time.Minute {
					t.Errorf("took %v, want exactly a minute", d)
				}
				r.wantClean()
			})
		})
	}
}

func TestUntilCaughtUp(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 100)
		r.publish("s.b", 1)
		for range 2 {
			for _, tc := range []struct {
				cfg  OrderedConfig
				want []uint64
			}{
				{OrderedConfig{}, sequences(1, 101)},
				{OrderedConfig{FilterSubjects: []string{"s.a"}}, sequences(1, 100)},
				{OrderedConfig{FilterSubjects: []string{"s.a", "s.c"}}, sequences(1, 100)},
				{OrderedConfig{FilterSubjects: []string{"s.none"}}, nil},
				{OrderedConfig{DeliverPolicy: jetstream.DeliverNewPolicy}, nil},
				{OrderedConfig{DeliverPolicy: jetstream.DeliverLastPolicy}, sequences(101, 101)},
				{OrderedConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 90}, sequences(90, 101)},
			} {
				start := time.Now()
				var got []uint64
				cfg := tc.cfg
				cfg.Stream, cfg.UntilCaughtUp = "S", true
				for msg, err := range Ordered(context.Background(), r.js, cfg) {
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, msg.Sequence())
				}
				wantSequences(t, got, tc.want)
				if d := time.Since(start); d > 10*time.Millisecond {
					t.Errorf("%+v: took %v, want at most 10ms", tc.cfg, d)
				}
				r.wantClean()
			}
		}
	})
}
