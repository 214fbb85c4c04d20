package paced

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

var snapshots = flag.Int("snapshots", 40, "how many snapshots under forced ends TestListingLosesNothing takes")

// lastOf returns the sequences of the last message of every subject.
func lastOf(t testing.TB, js jetstream.JetStream) []uint64 {
	t.Helper()
	s, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	info, err := s.Info(t.Context(), jetstream.WithSubjectFilter(">"))
	if err != nil {
		t.Fatal(err)
	}
	var seqs []uint64
	for subject := range info.State.Subjects {
		m, err := s.GetLastMsgForSubject(t.Context(), subject)
		if err != nil {
			t.Fatal(err)
		}
		seqs = append(seqs, m.Sequence)
	}
	slices.Sort(seqs)
	return seqs
}

// fill writes rounds values under each of keys subjects. Values of one subject
// lie next to each other or a round apart.
func (r *rig) fill(keys, rounds, size int, adjacent bool) {
	r.Helper()
	payload := []byte(strings.Repeat("v", size))
	write := func(k int) {
		if _, err := r.js.PublishAsync(fmt.Sprintf("s.k%d", k), payload, jetstream.WithStallWait(10*time.Second)); err != nil {
			r.Fatal(err)
		}
	}
	if adjacent {
		for k := range keys {
			for range rounds {
				write(k)
			}
		}
	} else {
		for range rounds {
			for k := range keys {
				write(k)
			}
		}
	}
	<-r.js.PublishAsyncComplete()
	r.subs = 1 // for the acknowledgements
}

func TestLastPerSubject(t *testing.T) {
	for _, history := range []int64{1, 5, 64} {
		for _, storage := range []jetstream.StorageType{jetstream.MemoryStorage, jetstream.FileStorage} {
			t.Run(fmt.Sprintf("history %d %v", history, storage), func(t *testing.T) {
				dir := t.TempDir()
				testserver.InBubble(t, func(t *testing.T) {
					r := newRig(t, dir)
					r.stream(jetstream.StreamConfig{MaxMsgsPerSubject: history, Storage: storage})
					r.fill(300, 3, 100, true)
					want := lastOf(t, r.js)
					for _, cfg := range []OrderedConfig{{}, {MaxBytes: 1000}, {MaxMessages: 1}, {MaxMessages: 7}} {
						cfg.Stream, cfg.DeliverPolicy, cfg.UntilCaughtUp = "S", jetstream.DeliverLastPerSubjectPolicy, true
						l := &log{}
						cfg.Listener = l.listener()
						start := time.Now()
						wantSequences(t, collect(t, Ordered(t.Context(), r.js, cfg)), want)
						// With room for a handful of messages a pull ends every
						// handful, and now and then its rescue was used already.
						tight := cfg.MaxBytes > 0
						if d := time.Since(start); !tight && (d > 10*time.Millisecond || l.resubs > 0) {
							t.Errorf("%+v: took %v, %d rebuilds\n%v", cfg, d, l.resubs, l)
						}
					}
					// Then every update.
					go func() {
						time.Sleep(time.Minute)
						for _, k := range []string{"s.k7", "s.k8", "s.k9"} {
							r.publish(k, 1)
						}
					}()
					n := 0
					for m, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy}) {
						if err != nil {
							t.Fatal(err)
						}
						if n++; n > 300 && (m.Sequence() != uint64(900+n-300) || m.Replay()) {
							t.Errorf("update %d, replay %v", m.Sequence(), m.Replay())
						}
						if n == 303 {
							break
						}
					}
					r.wantClean()
				})
			})
		}
	}
}

// The server loses an entry of its list whenever a pull ends while it delivers.
// Snapshots under every kind of forced end are complete all the same.
func TestListingLosesNothing(t *testing.T) {
	for _, storage := range []jetstream.StorageType{jetstream.MemoryStorage, jetstream.FileStorage} {
		t.Run(storage.String(), func(t *testing.T) {
			dir := t.TempDir()
			srv := testserver.New(t, testserver.Options{Dir: dir, Listen: true})
			nc := srv.Connect(t, quietly())
			js, _ := jetstream.New(nc)
			r := &rig{T: t, srv: srv, nc: nc, js: js}
			r.stream(jetstream.StreamConfig{MaxMsgsPerSubject: 5, Storage: storage})
			r.fill(2000, 3, 200, true)
			want := lastOf(t, js)
			rebuilds, pulls := 0, uint64(0)
			for i := range *snapshots {
				seed := uint64(i)
				rnd := rand.New(rand.NewPCG(seed, 3))
				cfg := OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy,
					MaxBytes: 1 << (10 + rnd.IntN(8)), MaxMessages: 1 + rnd.IntN(400)}
				if rnd.IntN(2) == 0 {
					cfg.Tuning.Expires = 10 * time.Millisecond
				}
				cfg.Listener = &Listener{Resubscribing: func(error, int, time.Duration) { rebuilds++ }}
				c, err := NewOrderedConsumer(js, cfg)
				if err != nil {
					t.Fatal(err)
				}
				slow := rnd.IntN(4) == 0
				var got []uint64
				for m, err := range c.Backlog(t.Context()) {
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, m.Sequence())
					if slow && len(got)%50 == 0 {
						time.Sleep(time.Millisecond) // a body, so that pulls expire under it
					}
				}
				if !slices.Equal(got, want) {
					t.Errorf("snapshot %d (%d bytes, %d messages, expires %v): %d of %d", i, cfg.MaxBytes, cfg.MaxMessages, cfg.Tuning.Expires, len(got), len(want))
				}
				pulls += c.Stats().Pulls
			}
			t.Logf("%d snapshots, %d pulls, %d rebuilds", *snapshots, pulls, rebuilds)
		})
	}
}

// Entries that are deleted, purged or written again while the list is read:
// what is still the last of its subject is yielded, nothing superseded is, and
// the end is not waited for.
func TestListingWhileTheStreamChanges(t *testing.T) {
	for _, history := range []int64{1, 5} {
		t.Run(fmt.Sprint(history), func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "")
				s := r.stream(jetstream.StreamConfig{MaxMsgsPerSubject: history})
				r.fill(200, 2, 100, true) // last of key k: 2k+2
				l := &log{}
				cfg := OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, UntilCaughtUp: true, MaxMessages: 10, Listener: l.listener()}
				yielded := map[string]uint64{}
				var at time.Time
				n := 0
				for m, err := range Ordered(t.Context(), r.js, cfg) {
					if err != nil {
						t.Fatal(err)
					}
					if old, ok := yielded[m.Subject()]; ok && m.Replay() && old > 400 {
						t.Errorf("%s: %d after %d", m.Subject(), m.Sequence(), old)
					}
					yielded[m.Subject()] = m.Sequence()
					at = time.Now()
					if n++; n == 50 {
						for k := 100; k < 130; k++ { // a run of holes
							if err := s.DeleteMsg(t.Context(), uint64(2*k+2)); err != nil {
								t.Fatal(err)
							}
							if history > 1 {
								if err := s.DeleteMsg(t.Context(), uint64(2*k+1)); err != nil {
									t.Fatal(err)
								}
							}
						}
						for k := 140; k < 150; k += 2 { // single holes
							_ = s.Purge(t.Context(), jetstream.WithPurgeSubject(fmt.Sprintf("s.k%d", k)))
						}
						for k := 160; k < 170; k++ {
							r.publish(fmt.Sprintf("s.k%d", k), 2)
						}
						for k := 190; k < 200; k++ { // the tail
							_ = s.Purge(t.Context(), jetstream.WithPurgeSubject(fmt.Sprintf("s.k%d", k)))
						}
					}
				}
				for k := range 200 {
					gone := (k >= 100 && k < 130) || (k >= 140 && k < 150 && k%2 == 0) || k >= 190
					if _, ok := yielded[fmt.Sprintf("s.k%d", k)]; ok == gone && !(k >= 160 && k < 170) {
						t.Errorf("key %d: yielded %v, gone %v", k, ok, gone)
					}
				}
				if d := time.Since(at); d > 20*time.Millisecond {
					t.Errorf("ended %v after the last message\n%v", d, l)
				}
				r.wantClean()
			})
		})
	}
}

// The consumer lost, the connection cut, in the middle of the list.
func TestListingInterrupted(t *testing.T) {
	for _, how := range []string{"deleted", "cut", "frame lost", "restart"} {
		for _, history := range []int64{1, 5} {
			t.Run(fmt.Sprintf("%s, history %d", how, history), func(t *testing.T) {
				dir := t.TempDir()
				testserver.InBubble(t, func(t *testing.T) {
					r := newRig(t, dir, quietly())
					r.stream(jetstream.StreamConfig{MaxMsgsPerSubject: history})
					r.fill(500, 3, 100, true)
					want := lastOf(t, r.js)
					l := &log{}
					cfg := OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, MaxMessages: 40, UntilCaughtUp: true, Listener: l.listener()}
					if how == "frame lost" {
						n := 0
						r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
							if f.Direction == faultproxy.ToClient && strings.HasPrefix(f.Reply, "$JS.ACK.") {
								if n++; n == 123 || n == 331 || n == 500 {
									return faultproxy.Drop
								}
							}
							return faultproxy.Pass
						})
					}
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					var got []uint64
					for m, err := range Ordered(ctx, r.js, cfg) {
						if err != nil {
							t.Fatalf("%v\n%v", err, l)
						}
						got = append(got, m.Sequence())
						if n := len(got); n == 123 || n == 331 || n == 500 {
							switch how {
							case "deleted":
								deleteConsumers(r)
							case "cut":
								r.srv.Disconnect()
								time.Sleep(time.Second)
							case "restart":
								r.srv.Stop()
								_ = r.srv.Start()
								time.Sleep(time.Second)
							}
						}
					}
					wantSequences(t, got, want)
					r.srv.SetFilter(nil)
					if t.Failed() {
						t.Logf("%v", l)
					}
				})
			})
		}
	}
}

// A server before 2.12 refuses priorities; the list is read by pulls that are
// certain to be filled.
func TestListingWithoutPriorities(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{MaxMsgsPerSubject: 5})
		r.fill(500, 3, 100, true)
		want := lastOf(t, r.js)
		refused := 0
		answers := map[string]bool{}
		js := refusing(t, r, &refused, answers)
		for _, cfg := range []OrderedConfig{{}, {MaxBytes: 1000}, {MaxMessages: 3}} {
			cfg.Stream, cfg.DeliverPolicy, cfg.UntilCaughtUp = "S", jetstream.DeliverLastPerSubjectPolicy, true
			wantSequences(t, collect(t, Ordered(t.Context(), js, cfg)), want)
		}
		if refused != 3 {
			t.Errorf("%d creates refused", refused)
		}
	})
}

// refusing returns a JetStream behind an API prefix that answers creates with a
// priority policy as an old server does, and passes everything else on.
func refusing(t *testing.T, r *rig, refused *int, _ map[string]bool) jetstream.JetStream {
	t.Helper()
	_, err := r.nc.Subscribe("OLD.API.>", func(m *nats.Msg) {
		if strings.Contains(m.Subject, "CONSUMER.CREATE") && strings.Contains(string(m.Data), "priority_policy") {
			*refused++
			_ = m.Respond([]byte(`{"error":{"code":400,"err_code":10003,"description":"bad request"}}`))
			return
		}
		_ = r.nc.PublishRequest("$JS.API."+strings.TrimPrefix(m.Subject, "OLD.API."), m.Reply, m.Data)
	})
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.NewWithAPIPrefix(r.nc, "OLD.API")
	if err != nil {
		t.Fatal(err)
	}
	return js
}
