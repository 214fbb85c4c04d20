package paced

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// kvRig is a rig with a bucket "B".
type kvRig struct {
	*rig
	kv jetstream.KeyValue
}

func newKVRig(t *testing.T, dir string, cfg jetstream.KeyValueConfig, opts ...nats.Option) *kvRig {
	t.Helper()
	r := newRig(t, dir, append([]nats.Option{quietly()}, opts...)...)
	return &kvRig{rig: r, kv: r.bucket(cfg)}
}

func (r *rig) bucket(cfg jetstream.KeyValueConfig) jetstream.KeyValue {
	r.Helper()
	if cfg.Bucket == "" {
		cfg.Bucket = "B"
	}
	kv, err := r.js.CreateKeyValue(r.Context(), cfg)
	if err != nil {
		r.Fatal(err)
	}
	return kv
}

func (r *kvRig) put(key, value string) uint64 {
	r.Helper()
	rev, err := r.kv.Put(context.Background(), key, []byte(value))
	if err != nil {
		r.Fatal(err)
	}
	return rev
}

func (r *kvRig) loseConsumers() {
	s, err := r.js.Stream(context.Background(), "KV_B")
	if err != nil {
		r.Error(err)
		return
	}
	l := s.ConsumerNames(context.Background())
	var names []string
	for n := range l.Name() {
		names = append(names, n)
	}
	for _, n := range names {
		_ = s.DeleteConsumer(context.Background(), n)
	}
}

func (r *kvRig) wantClean() {
	r.Helper()
	synctest.Wait()
	s, err := r.js.Stream(r.Context(), "KV_B")
	if err != nil {
		r.Fatal(err)
	}
	info, err := s.Info(r.Context())
	if err != nil || info.State.Consumers != 0 {
		r.Errorf("%d consumers left, %v", info.State.Consumers, err)
	}
	if n := r.nc.NumSubscriptions(); n > 1+r.subs {
		r.Errorf("%d subscriptions left", n)
	}
}

// entryText is one entry as text: "key@revision=value", or "key@revision DEL".
func entryText(e Entry) string {
	if op := e.Operation(); op != jetstream.KeyValuePut {
		return fmt.Sprintf("%s@%d %v", e.Key(), e.Revision(), op)
	}
	return fmt.Sprintf("%s@%d=%s", e.Key(), e.Revision(), e.Value())
}

func lines(t testing.TB, seq iter.Seq2[Entry, error]) string {
	t.Helper()
	var all []string
	for e, err := range seq {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, entryText(e))
	}
	return strings.Join(all, " ")
}

func TestWatchModes(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newKVRig(t, "", jetstream.KeyValueConfig{History: 5})
		r.put("a", "1")
		r.put("b.x", "2")
		r.put("a", "3")
		r.put("c", "4")
		_ = r.kv.Delete(t.Context(), "c")
		r.put("b.y", "6")
		r.put("d", "7")
		_ = r.kv.Purge(t.Context(), "d")
		keys := []string{"a", "b.*"}
		for _, tc := range []struct {
			cfg  WatchConfig
			want string
		}{
			{WatchConfig{}, "b.x@2=2 a@3=3 c@5 KeyValueDeleteOp b.y@6=6 d@8 KeyValuePurgeOp"},
			{WatchConfig{IgnoreDeletes: true}, "b.x@2=2 a@3=3 b.y@6=6"},
			{WatchConfig{Keys: []string{"a"}}, "a@3=3"},
			{WatchConfig{Keys: keys}, "b.x@2=2 a@3=3 b.y@6=6"},
			{WatchConfig{Keys: []string{"b.>"}}, "b.x@2=2 b.y@6=6"},
			{WatchConfig{Keys: []string{"none"}}, ""},
			{WatchConfig{IncludeHistory: true}, "a@1=1 b.x@2=2 a@3=3 c@4=4 c@5 KeyValueDeleteOp b.y@6=6 d@8 KeyValuePurgeOp"},
			{WatchConfig{MetaOnly: true}, "b.x@2= a@3= c@5 KeyValueDeleteOp b.y@6= d@8 KeyValuePurgeOp"},
			{WatchConfig{ResumeFromRevision: 4}, "c@4=4 c@5 KeyValueDeleteOp b.y@6=6 d@8 KeyValuePurgeOp"},
			{WatchConfig{ResumeFromRevision: 8}, "d@8 KeyValuePurgeOp"},
			{WatchConfig{ResumeFromRevision: 9}, ""},
			{WatchConfig{UpdatesOnly: true}, ""},
		} {
			tc.cfg.Bucket, tc.cfg.UntilCaughtUp = "B", true
			start := time.Now()
			for range 2 {
				if got := strings.ReplaceAll(lines(t, Watch(t.Context(), r.js, tc.cfg)), "KeyValue", "KeyValue"); got != tc.want {
					t.Errorf("%+v:\n got %s\nwant %s", tc.cfg, got, tc.want)
				}
			}
			if d := time.Since(start); d > 20*time.Millisecond {
				t.Errorf("%+v: took %v", tc.cfg, d)
			}
		}
		if fmt.Sprint(keys) != "[a b.*]" {
			t.Errorf("the caller's keys are %v now", keys)
		}
		var got []string
		for k, err := range Keys(t.Context(), r.js, "B") {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, k)
		}
		if fmt.Sprint(got) != "[b.x a b.y]" {
			t.Errorf("keys %v", got)
		}
		if got := lines(t, History(t.Context(), r.js, "B", "a", "c")); got != "a@1=1 a@3=3 c@4=4 c@5 KeyValueDeleteOp" {
			t.Errorf("history %s", got)
		}
		for e := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B"}) {
			var j jetstream.KeyValueEntry = e
			if j.Bucket() != "B" || j.Key() != "b.x" || string(j.Value()) != "2" || j.Revision() != 2 || !j.Created().Equal(time.Now().Add(-time.Since(j.Created()))) || !e.Replay() {
				t.Errorf("%+v", j)
			}
			break
		}
		r.wantClean()
	})
}

// Warm a cache, say ready, follow: nothing between the two loops is lost or
// repeated.
func TestWatcherSnapshotThenUpdates(t *testing.T) {
	for _, history := range []uint8{1, 5} {
		t.Run(fmt.Sprint(history), func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newKVRig(t, "", jetstream.KeyValueConfig{History: history})
				for i := range 50 {
					r.put(fmt.Sprintf("k%d", i), "0")
				}
				w, err := NewWatcher(r.js, WatchConfig{Bucket: "B"})
				if err != nil {
					t.Fatal(err)
				}
				seen := map[string]uint64{}
				var last uint64
				take := func(e Entry, err error) {
					if err != nil {
						t.Fatal(err)
					}
					if e.Revision() <= last {
						t.Errorf("%d after %d", e.Revision(), last)
					}
					last = e.Revision()
					seen[e.Key()] = e.Revision()
				}
				for e, err := range w.Snapshot(t.Context()) {
					take(e, err)
					if !e.Replay() {
						t.Error("not replay")
					}
				}
				if len(seen) != 50 {
					t.Errorf("%d keys", len(seen))
				}
				// Between the loops: more than the list's end is known by now.
				for i := range 20 {
					r.put(fmt.Sprintf("k%d", i), "1")
				}
				n := 0
				for e, err := range w.Updates(t.Context()) {
					take(e, err)
					if n++; n == 10 {
						break // and on again
					}
				}
				for e, err := range w.Updates(t.Context()) {
					take(e, err)
					if n++; n == 20 {
						break
					}
				}
				for i := range 20 {
					if seen[fmt.Sprintf("k%d", i)] != uint64(51+i) {
						t.Errorf("k%d@%d", i, seen[fmt.Sprintf("k%d", i)])
					}
				}
				if got := lines(t, w.Snapshot(t.Context())); got != "" {
					t.Errorf("snapshot after all: %s", got)
				}
				r.wantClean()
			})
		})
	}
}

// Caught up, whatever there is or is not, within a round trip plus 10 ms.
func TestWatchCatchesUp(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  WatchConfig
		fill func(*kvRig)
		want int
	}{
		{"empty", WatchConfig{}, func(*kvRig) {}, 0},
		{"only markers", WatchConfig{}, func(r *kvRig) { r.put("a", ""); _ = r.kv.Delete(r.Context(), "a") }, 1},
		{"only markers, ignored", WatchConfig{IgnoreDeletes: true}, func(r *kvRig) { r.put("a", ""); _ = r.kv.Delete(r.Context(), "a") }, 0},
		{"no match", WatchConfig{Keys: []string{"x"}}, func(r *kvRig) { r.put("a", ""); r.put("b", "") }, 0},
		{"match below the end", WatchConfig{Keys: []string{"a"}}, func(r *kvRig) { r.put("a", ""); r.put("b", "") }, 1},
		{"tail deleted", WatchConfig{}, func(r *kvRig) {
			r.put("a", "")
			r.put("b", "")
			s, _ := r.js.Stream(r.Context(), "KV_B")
			_ = s.Purge(r.Context(), jetstream.WithPurgeSubject("$KV.B.b"))
		}, 1},
		{"purged", WatchConfig{}, func(r *kvRig) {
			r.put("a", "")
			s, _ := r.js.Stream(r.Context(), "KV_B")
			_ = s.Purge(r.Context())
		}, 0},
	} {
		for _, history := range []uint8{1, 64} {
			t.Run(fmt.Sprint(tc.name, " ", history), func(t *testing.T) {
				testserver.InBubble(t, func(t *testing.T) {
					r := newKVRig(t, "", jetstream.KeyValueConfig{History: history})
					tc.fill(r)
					cfg := tc.cfg
					cfg.Bucket = "B"
					var caught time.Duration
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					start := time.Now()
					cfg.Listener = &Listener{CaughtUp: func(uint64) { caught = time.Since(start); cancel() }}
					n := 0
					for _, err := range Watch(ctx, r.js, cfg) {
						if err == nil {
							n++
						}
					}
					if n != tc.want || caught > 10*time.Millisecond || ctx.Err() == nil {
						t.Errorf("%d entries, caught up after %v", n, caught)
					}
					r.wantClean()
				})
			})
		}
	}
}

// The last key goes while the bucket is listed, at whatever moment: nothing more
// comes, and that is known within 10 ms, with any number of messages asked for.
func TestWatchCatchesUpBehindATailDeletedMeanwhile(t *testing.T) {
	const keys = 12
	for _, history := range []uint8{1, 5} {
		for _, most := range []int{0, 1, 2, 3, 10} {
			t.Run(fmt.Sprintf("history %d, %d messages", history, most), func(t *testing.T) {
				testserver.InBubble(t, func(t *testing.T) {
					r := newKVRig(t, "", jetstream.KeyValueConfig{History: history})
					s, err := r.js.Stream(t.Context(), "KV_B")
					if err != nil {
						t.Fatal(err)
					}
					for at := 1; at < keys; at++ {
						_ = s.Purge(t.Context())
						for k := range keys {
							r.put(fmt.Sprintf("k%d", k), "v")
						}
						n := 0
						var last time.Time
						for _, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B", UntilCaughtUp: true, MaxMessages: most}) {
							if err != nil {
								t.Fatal(err)
							}
							if n++; n == at {
								if err := s.Purge(t.Context(), jetstream.WithPurgeSubject(fmt.Sprintf("$KV.B.k%d", keys-1))); err != nil {
									t.Fatal(err)
								}
							}
							last = time.Now()
						}
						if d := time.Since(last); n < keys-1 || d > 10*time.Millisecond {
							t.Errorf("deleted after %d entries: %d entries, caught up %v later", at, n, d)
						}
					}
					r.wantClean()
				})
			})
		}
	}
}

// Under writers the server's count of pending messages is 0 too early at times.
// A message behind the boundary that comes with it proves nothing: a key may
// have been written again behind that message.
func TestWatchIsNotCaughtUpByAPendingCount(t *testing.T) {
	l := frameLoop(t)
	l.recipe.rereads, l.born = true, 20
	l.pos.yielded(22) // behind the target, 20
	l.pos.pending = 0
	last := 25
	l.link.publish = func(_, reply string, _ []byte) error {
		l.in.ch <- &nats.Msg{Subject: reply, Data: fmt.Appendf(nil, `{"state":{"last_seq":%d}}`, last)}
		return nil
	}
	step := func(want bool, target uint64) {
		t.Helper()
		if ok, err := l.settled(); ok != want || err != nil || l.target != target {
			t.Errorf("settled %v, %v, target %d; want %v, target %d", ok, err, l.target, want, target)
		}
	}
	step(false, 25)
	l.pos.yielded(27)
	last = 27
	step(true, 27)
}

// What was there before the start never appears as an update, what comes after
// it always does.
func TestUpdatesOnlyKeepsItsBoundary(t *testing.T) {
	for _, how := range []string{"deleted", "cut", "restart"} {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			testserver.InBubble(t, func(t *testing.T) {
				r := newKVRig(t, dir, jetstream.KeyValueConfig{History: 5})
				for range 3 {
					r.put("k", "old")
				}
				done := make(chan struct{})
				go func() {
					defer close(done)
					time.Sleep(time.Minute)
					switch how {
					case "deleted":
						r.srv.SetFilter(dropStatus(409)) // nobody is told
						r.loseConsumers()
					case "cut":
						r.srv.Disconnect()
						waitConnected(r.nc, 1)
					case "restart":
						r.srv.Stop()
						_ = r.srv.Start()
						waitConnected(r.nc, 1)
					}
					r.put("k", "new")
					r.put("k", "newer")
				}()
				var got []string
				for e, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B", UpdatesOnly: true}) {
					if err != nil {
						t.Fatal(err)
					}
					if e.Replay() {
						t.Error("replay")
					}
					got = append(got, entryText(e))
					if len(got) == 2 {
						break
					}
				}
				<-done
				if fmt.Sprint(got) != "[k@4=new k@5=newer]" {
					t.Errorf("got %v", got)
				}
			})
		})
	}
}

// A key that expires is told by the server's own marker. In real time: the
// server's expiry does not run on the clock of a bubble.
func TestMarkers(t *testing.T) {
	for _, history := range []uint8{1, 5} {
		srv := testserver.New(t, testserver.Options{Listen: true})
		nc := srv.Connect(t)
		js, _ := jetstream.New(nc)
		r := &rig{T: t, srv: srv, nc: nc, js: js}
		kr := &kvRig{rig: r, kv: r.bucket(jetstream.KeyValueConfig{History: history, LimitMarkerTTL: time.Second})}
		kr.put("a", "1")
		if _, err := kr.kv.Create(t.Context(), "ttl", []byte("v"), jetstream.KeyTTL(time.Second)); err != nil {
			t.Fatal(err)
		}
		var got []string
		for e, err := range Watch(t.Context(), js, WatchConfig{Bucket: "B"}) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, entryText(e))
			if len(got) == 3 {
				break
			}
		}
		if fmt.Sprint(got) != "[a@1=1 ttl@2=v ttl@3 KeyValuePurgeOp]" {
			t.Errorf("got %v", got)
		}
		// The marker expires as well: a tail that is gone. Nothing is left to
		// wait for.
		s, err := js.Stream(t.Context(), "KV_B")
		if err != nil {
			t.Fatal(err)
		}
		for info := s.CachedInfo(); info.State.Msgs > 1; time.Sleep(20 * time.Millisecond) {
			if info, err = s.Info(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		start := time.Now()
		if got := lines(t, Watch(t.Context(), js, WatchConfig{Bucket: "B", UntilCaughtUp: true})); got != "a@1=1" {
			t.Errorf("got %s", got)
		}
		t.Logf("history %d: caught up behind an expired tail after %v", history, time.Since(start))
	}
}

func TestOperation(t *testing.T) {
	for _, tc := range []struct {
		header nats.Header
		want   jetstream.KeyValueOp
	}{
		{nil, jetstream.KeyValuePut},
		{nats.Header{"X": {"y"}}, jetstream.KeyValuePut},
		{nats.Header{"KV-Operation": {"DEL"}}, jetstream.KeyValueDelete},
		{nats.Header{"KV-Operation": {"PURGE"}}, jetstream.KeyValuePurge},
		{nats.Header{"Nats-Marker-Reason": {"MaxAge"}}, jetstream.KeyValuePurge},
		{nats.Header{"Nats-Marker-Reason": {"Purge"}}, jetstream.KeyValuePurge},
		{nats.Header{"Nats-Marker-Reason": {"Remove"}}, jetstream.KeyValueDelete},
		{nats.Header{"KV-Operation": {"DEL"}, "Nats-Marker-Reason": {"MaxAge"}}, jetstream.KeyValueDelete},
		{nats.Header{"KV-Operation": {"?"}}, jetstream.KeyValuePut},
	} {
		if got := (Entry{Msg{m: &nats.Msg{Header: tc.header}}}).Operation(); got != tc.want {
			t.Errorf("%v: %v, want %v", tc.header, got, tc.want)
		}
	}
}

func TestKeysAndValuesOfEveryKind(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newKVRig(t, "", jetstream.KeyValueConfig{History: 1})
		const chars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-/_="
		values := map[string]int{"a": 0, chars: 1, "a.b/c=d_e-f": 100, strings.Repeat("k.", 50) + "k": 1000, "max": int(r.nc.MaxPayload())}
		for k, n := range values {
			r.put(k, strings.Repeat("v", n))
		}
		got := map[string]int{}
		for e, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B", UntilCaughtUp: true, MaxBytes: 1 << 16}) {
			if err != nil {
				t.Fatal(err)
			}
			got[e.Key()] = len(e.Value())
		}
		if !maps.Equal(got, values) {
			t.Errorf("got %d of %d", len(got), len(values))
		}
	})
}

// Keys leaves the values on the server where they are larger than what would
// come in their place, and finds the keys either way. MetaOnly always does.
func TestKeysOfSmallAndLargeValues(t *testing.T) {
	for _, tc := range []struct {
		name  string
		sizes []int
		leave bool
	}{
		{"small", []int{0, 16, 60}, false},
		{"large", []int{200, 200, 200}, true},
		{"one is large", []int{0, 0, 1000}, true},
		{"one of many is large", append(make([]int, 30), 1000), false},
	} {
		for _, history := range []uint8{1, 5} {
			testserver.InBubble(t, func(t *testing.T) {
				r := newKVRig(t, "", jetstream.KeyValueConfig{History: history})
				bare := false
				r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
					if strings.Contains(f.Subject, ".CONSUMER.CREATE.") {
						var c consumerCreate
						if err := json.Unmarshal(f.Payload, &c); err != nil {
							t.Error(err)
						}
						bare = c.Config.HeadersOnly
					}
					return faultproxy.Pass
				})
				var want []string
				for i, n := range tc.sizes {
					r.put(fmt.Sprint("gone", i), strings.Repeat("v", n))
					want = append(want, fmt.Sprint("k", i))
					r.put(want[i], strings.Repeat("v", n))
				}
				for i := range tc.sizes {
					if err := r.kv.Delete(t.Context(), fmt.Sprint("gone", i)); err != nil {
						t.Fatal(err)
					}
				}
				var got []string
				for k, err := range Keys(t.Context(), r.js, "B") {
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, k)
				}
				if !slices.Equal(got, want) || bare != tc.leave {
					t.Errorf("%s, history %d: %v, values left %v", tc.name, history, got, bare)
				}
				for e, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B", MetaOnly: true, UntilCaughtUp: true}) {
					if err != nil || len(e.Value()) > 0 || !bare {
						t.Fatalf("%s, history %d: %d bytes, %v, values left %v", tc.name, history, len(e.Value()), err, bare)
					}
				}
			})
		}
	}
}

// A mirror keeps the subjects of its origin; a domain is another API prefix.
func TestBucketElsewhere(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		srv := testserver.New(t, testserver.Options{Configure: func(o *server.Options) { o.JetStreamDomain = "HUB" }})
		nc := srv.Connect(t)
		js, _ := jetstream.NewWithDomain(nc, "HUB")
		r := &rig{T: t, srv: srv, nc: nc, js: js}
		kr := &kvRig{rig: r, kv: r.bucket(jetstream.KeyValueConfig{})}
		kr.put("a", "1")
		r.bucket(jetstream.KeyValueConfig{Bucket: "M", Mirror: &jetstream.StreamSource{Name: "KV_B"}})
		time.Sleep(5 * time.Second)
		for _, b := range []string{"B", "M"} {
			for e, err := range Watch(t.Context(), js, WatchConfig{Bucket: b, Keys: []string{"a"}}) {
				if err != nil || entryText(e) != "a@1=1" || e.Bucket() != b {
					t.Errorf("%s: %v", b, err)
				}
				break
			}
		}
	})
}

func TestWatchBadInput(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newKVRig(t, "", jetstream.KeyValueConfig{})
		var w wireCount
		r.srv.SetFilter(w.filter(nil))
		for _, tc := range []struct {
			field string
			cfg   WatchConfig
		}{
			{"Bucket", WatchConfig{}},
			{"Bucket", WatchConfig{Bucket: "a.b"}},
			{"Bucket", WatchConfig{Bucket: "a b"}},
			{"Keys", WatchConfig{Bucket: "B", Keys: []string{""}}},
			{"Keys", WatchConfig{Bucket: "B", Keys: []string{".a"}}},
			{"Keys", WatchConfig{Bucket: "B", Keys: []string{"a."}}},
			{"Keys", WatchConfig{Bucket: "B", Keys: []string{"a..b"}}},
			{"Keys", WatchConfig{Bucket: "B", Keys: []string{"a b"}}},
			{"Keys", WatchConfig{Bucket: "B", Keys: []string{"ä"}}},
			{"Keys", WatchConfig{Bucket: "B", Keys: []string{">.a"}}},
			{"Keys", WatchConfig{Bucket: "B", Keys: []string{"a", "*"}}},
			{"UpdatesOnly", WatchConfig{Bucket: "B", UpdatesOnly: true, IncludeHistory: true}},
			{"UpdatesOnly", WatchConfig{Bucket: "B", UpdatesOnly: true, ResumeFromRevision: 3}},
			{"MaxMessages", WatchConfig{Bucket: "B", MaxMessages: -1}},
			{"Tuning.Heartbeat", WatchConfig{Bucket: "B", Tuning: Tuning{Heartbeat: time.Hour}}},
		} {
			if _, err := NewWatcher(r.js, tc.cfg); err == nil {
				t.Errorf("%+v: no error", tc.cfg)
			}
			n := 0
			for _, err := range Watch(t.Context(), r.js, tc.cfg) {
				n++
				ce, ok := errors.AsType[*ConfigError](err)
				if !ok || ce.Field != "WatchConfig."+tc.field {
					t.Errorf("%+v: %v", tc.cfg, err)
				}
			}
			if n != 1 {
				t.Errorf("%d pairs", n)
			}
		}
		if n := w.total(); n != 0 {
			t.Errorf("%d frames sent", n)
		}
		for _, err := range Keys(t.Context(), r.js, "NONE") {
			if !errors.Is(err, jetstream.ErrBucketNotFound) || !errors.Is(err, jetstream.ErrStreamNotFound) {
				t.Errorf("got %v", err)
			}
		}
		r.srv.SetFilter(nil)
		r.wantClean()
	})
}

// Consumer lost or server restarted while parked: the next update comes at
// once. (The stock watcher needs 20 s.)
func TestWatchResumesAtOnce(t *testing.T) {
	for _, how := range []string{"deleted", "restart"} {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			testserver.InBubble(t, func(t *testing.T) {
				r := newKVRig(t, dir, jetstream.KeyValueConfig{})
				r.put("k", "0")
				var later time.Time
				done := make(chan struct{})
				go func() {
					defer close(done)
					time.Sleep(time.Minute)
					if how == "deleted" {
						r.loseConsumers()
					} else {
						r.srv.Stop()
						_ = r.srv.Start()
						waitConnected(r.nc, 1)
					}
					later = time.Now()
					r.put("k", "1")
				}()
				n := 0
				for _, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B"}) {
					if err != nil {
						t.Fatal(err)
					}
					if n++; n == 2 {
						break
					}
				}
				<-done
				if d := time.Since(later); d > 20*time.Millisecond {
					t.Errorf("after %v", d)
				}
			})
		})
	}
}

// Random writes, deletes, purges, expiries, lost consumers and cuts during the
// snapshot. At caught-up no key is missing that was there at the start and
// still is; once the writers stop, the map built from the watch equals the
// bucket.
func TestWatchProperty(t *testing.T) {
	if *propertySeed != 0 {
		watchRound(t, *propertySeed)
		return
	}
	for i := range *propertyRounds {
		seed := uint64(i + 1)
		if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { watchRound(t, seed) }) {
			t.Logf("replay with: go test -run TestWatchProperty -seed %d", seed)
		}
	}
}

func watchRound(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	dir := t.TempDir()
	testserver.InBubble(t, func(t *testing.T) {
		history := []uint8{1, 5, 64}[rnd.IntN(3)]
		r := newKVRig(t, dir, jetstream.KeyValueConfig{History: history, Storage: jetstream.StorageType(rnd.IntN(2))})
		keys := 20 + rnd.IntN(150)
		key := func() string { return fmt.Sprintf("k%d", rnd.IntN(keys)) }
		value := func() string { return strings.Repeat("v", rnd.IntN(300)) }
		for k := range keys {
			for range 1 + rnd.IntN(3) {
				r.put(fmt.Sprintf("k%d", k), value())
			}
		}
		present := map[string]bool{}
		for k := range keys {
			present[fmt.Sprintf("k%d", k)] = true
		}
		cfg := WatchConfig{Bucket: "B", MaxMessages: 1 + rnd.IntN(60), MaxBytes: 1 << (10 + rnd.IntN(12))}
		body := []time.Duration{0, 0, time.Millisecond, 30 * time.Millisecond}[rnd.IntN(4)]

		var mu sync.Mutex          // guards present and writes
		writes := map[string]int{} // rewrites of a key during the snapshot
		var drop atomic.Int64
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			if drop.Load() > 0 && f.Direction == faultproxy.ToClient && (f.Status() != 0 || strings.HasPrefix(f.Reply, "$JS.ACK.")) {
				drop.Add(-1)
				return faultproxy.Drop
			}
			return faultproxy.Pass
		})
		rewrite := func() {
			k := key()
			mu.Lock()
			writes[k]++
			mu.Unlock()
			r.put(k, value())
		}
		gone := func() string {
			k := key()
			mu.Lock()
			defer mu.Unlock()
			delete(present, k)
			return k
		}
		harms := []func(){
			rewrite, rewrite, rewrite,
			func() { _ = r.kv.Delete(context.Background(), gone()) },
			func() { _ = r.kv.Purge(context.Background(), gone()) },
			func() { // as an expiry does it
				m := nats.NewMsg("$KV.B." + gone())
				m.Header.Set("Nats-Rollup", "sub")
				m.Header.Set("Nats-Marker-Reason", "MaxAge")
				_, _ = r.js.PublishMsg(context.Background(), m)
			},
			func() { r.loseConsumers() },
			func() { n := r.nc.Stats().Reconnects; r.srv.Disconnect(); waitConnected(r.nc, n+1) },
			func() { drop.Store(1 + rnd.Int64N(3)) },
		}
		done := make(chan struct{})
		// The writers begin with the first entry, so that they meet the
		// snapshot, and go on for a while.
		begun := make(chan struct{})
		go func() {
			defer close(done)
			<-begun
			for i := range 60 {
				if i < 40 {
					time.Sleep(time.Duration(rnd.IntN(5000)) * time.Microsecond)
				} else {
					time.Sleep(time.Duration(rnd.IntN(2000)) * time.Millisecond)
				}
				harms[rnd.IntN(len(harms))]()
			}
			time.Sleep(30 * time.Second)
			drop.Store(0)
			waitConnected(r.nc, 0)
			r.put("end", "")
		}()

		seen := map[string]bool{}
		state := map[string]uint64{}
		var last uint64
		atStart := maps.Clone(present)
		cfg.Listener = &Listener{CaughtUp: func(uint64) {
			mu.Lock()
			defer mu.Unlock()
			for k := range atStart {
				if present[k] && !seen[k] && writes[k] < 3 {
					t.Errorf("seed %d: %s is missing at caught-up (history %d, %+v, %d rewrites)", seed, k, history, cfg, writes[k])
				}
			}
		}}
		ctx, cancel := context.WithTimeoutCause(t.Context(), 3*time.Hour, errors.New("the end did not come"))
		defer cancel()
		n := 0
		for e, err := range Watch(ctx, r.js, cfg) {
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if n++; n == 1 {
				close(begun)
			}
			if e.Revision() <= last {
				t.Errorf("seed %d: revision %d after %d", seed, e.Revision(), last)
			}
			last = e.Revision()
			seen[e.Key()] = true
			if e.Operation() == jetstream.KeyValuePut {
				state[e.Key()] = e.Revision()
			} else {
				delete(state, e.Key())
			}
			if e.Key() == "end" {
				break
			}
			time.Sleep(body)
		}
		<-done
		want := map[string]uint64{}
		names, err := r.kv.ListKeys(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for k := range names.Keys() {
			e, err := r.kv.Get(context.Background(), k)
			if err != nil {
				t.Fatal(err)
			}
			want[k] = e.Revision()
		}
		if !maps.Equal(state, want) {
			for _, k := range slices.Sorted(maps.Keys(want)) {
				if state[k] != want[k] {
					t.Errorf("seed %d: %s is %d, want %d", seed, k, state[k], want[k])
				}
			}
			for k := range state {
				if _, ok := want[k]; !ok {
					t.Errorf("seed %d: %s is there and should not be", seed, k)
				}
			}
		}
	})
}

// What may be gone is told as possible, where the bucket may have lost it and
// revisions are wanted; what was superseded is not told.
func TestWatchGaps(t *testing.T) {
	for _, tc := range []struct {
		name  string
		cfg   jetstream.KeyValueConfig
		loses bool
	}{
		{"history only", jetstream.KeyValueConfig{}, false},
		{"markers", jetstream.KeyValueConfig{LimitMarkerTTL: time.Second}, false},
		{"TTL", jetstream.KeyValueConfig{TTL: time.Hour}, true},
		{"size", jetstream.KeyValueConfig{MaxBytes: 100_000}, true},
	} {
		for _, watch := range []struct {
			cfg  WatchConfig
			want string
		}{
			{WatchConfig{ResumeFromRevision: 3}, "[3-14 false 21-34 false]"},
			{WatchConfig{ResumeFromRevision: 15}, "[21-34 false]"},
			{WatchConfig{ResumeFromRevision: 20}, "[21-34 false]"},
			{WatchConfig{IncludeHistory: true}, "[21-34 false]"},
			{WatchConfig{}, "[]"},
			{WatchConfig{UpdatesOnly: true}, "[]"},
		} {
			t.Run(fmt.Sprintf("%s, %+v", tc.name, watch.cfg), func(t *testing.T) {
				testserver.InBubble(t, func(t *testing.T) {
					tc.cfg.History = 3
					r := newKVRig(t, "", tc.cfg)
					write := func() {
						for i := range 20 {
							r.put(fmt.Sprintf("k%d", i%2), "v")
						}
					}
					write() // keeps 15 to 20
					cfg, told := watch.cfg, []string{}
					cfg.Bucket = "B"
					cfg.Listener = &Listener{Gap: func(from, to uint64, certain bool) {
						told = append(told, fmt.Sprintf("%d-%d %v", from, to, certain))
					}}
					w, err := NewWatcher(r.js, cfg)
					if err != nil {
						t.Fatal(err)
					}
					lines(t, w.Snapshot(t.Context()))
					write() // keeps 35 to 40
					lines(t, w.Snapshot(t.Context()))
					want := watch.want
					if !tc.loses {
						want = "[]"
					}
					if fmt.Sprint(told) != want {
						t.Errorf("told %v, want %s", told, want)
					}
				})
			})
		}
	}
}

// With writers that never rest the end would be read again for ever.
func TestWatchCatchesUpUnderWriters(t *testing.T) {
	for _, history := range []uint8{1, 5} {
		testserver.InBubble(t, func(t *testing.T) {
			r := newKVRig(t, "", jetstream.KeyValueConfig{History: history})
			r.put("k", "0")
			js, err := jetstream.New(r.srv.Connect(t))
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for _, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B", UntilCaughtUp: true}) {
				if err != nil {
					t.Fatal(err)
				}
				if n++; n > 20 {
					t.Fatal("no end")
				}
				if _, err := js.Publish(t.Context(), "$KV.B.k", nil); err != nil {
					t.Fatal(err)
				}
			}
			if n < 1+rereads {
				t.Errorf("history %d: caught up after %d entries", history, n)
			}
		})
	}
}

// A handle says how it is doing, and cannot be had without a connection.
func TestWatcherStats(t *testing.T) {
	if _, err := NewWatcher(nil, WatchConfig{Bucket: "B"}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("got %v", err)
	}
	testserver.InBubble(t, func(t *testing.T) {
		r := newKVRig(t, "", jetstream.KeyValueConfig{})
		r.put("a", "1")
		r.put("b", "2")
		w, err := NewWatcher(r.js, WatchConfig{Bucket: "B", NamePrefix: "mine", InactiveThreshold: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		for range w.Snapshot(t.Context()) {
			s, err := r.js.Stream(t.Context(), "KV_B")
			if err != nil {
				t.Fatal(err)
			}
			names := s.ListConsumers(t.Context())
			for c := range names.Info() {
				if !strings.HasPrefix(c.Name, "mine_") || c.Config.InactiveThreshold != time.Hour {
					t.Errorf("consumer %s, %v", c.Name, c.Config.InactiveThreshold)
				}
			}
		}
		if s := w.Stats(); s.Messages != 2 || s.Sequence != 2 || !s.CaughtUp || s.Stream != "KV_B" {
			t.Errorf("stats %+v", s)
		}
		// Of the wrong kind of stream: named as the caller names it.
		if _, err := r.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "KV_Q", Subjects: []string{"$KV.Q.>"}, Retention: jetstream.WorkQueuePolicy}); err != nil {
			t.Fatal(err)
		}
		for _, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "Q"}) {
			if ce, ok := errors.AsType[*ConfigError](err); !ok || ce.Field != "WatchConfig.Bucket" {
				t.Errorf("got %v", err)
			}
		}
	})
}
