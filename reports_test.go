package paced

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// docs/FAULTS.md has a row for each public report. Every test that it names
// exists, every row names one or says why it cannot apply, and no report is
// there twice.
func TestFaultsNamesTests(t *testing.T) {
	text, err := os.ReadFile("docs/FAULTS.md")
	if err != nil {
		t.Fatal(err)
	}
	tests := testNames(t)
	name := regexp.MustCompile("`((?:Test|Fuzz|Example)[^`]*)`")
	report := regexp.MustCompile(`^\| ([A-Za-z0-9-]+/[A-Za-z0-9._-]+#\d+)`)
	seen := map[string]bool{}
	for n, line := range strings.Split(string(text), "\n") {
		m := report.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		if seen[m[1]] {
			t.Errorf("line %d: %s is there twice", n+1, m[1])
		}
		seen[m[1]] = true
		columns := strings.Split(strings.Trim(line, "| "), " | ")
		if len(columns) != 3 || columns[1] == "" {
			t.Errorf("line %d: %d columns", n+1, len(columns))
			continue
		}
		names := name.FindAllStringSubmatch(columns[2], -1)
		if len(names) == 0 && !strings.HasPrefix(columns[2], "cannot apply: ") {
			t.Errorf("line %d: neither a test nor a reason", n+1)
		}
		for _, m := range names {
			if !tests(m[1]) {
				t.Errorf("line %d: there is no test %s", n+1, m[1])
			}
		}
	}
	security, err := os.ReadFile("SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range name.FindAllStringSubmatch(string(security), -1) {
		if !tests(m[1]) {
			t.Errorf("SECURITY.md: there is no test %s", m[1])
		}
	}
	if len(seen) != 99 {
		t.Errorf("%d reports, want 99", len(seen))
	}
}

// testNames knows the tests of this package, of its internal ones, the rows of
// the matrix and the scenarios.
func testNames(t *testing.T) func(string) bool {
	known := map[string]bool{}
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	inside, _ := filepath.Glob("internal/*/*_test.go")
	for _, file := range append(files, inside...) {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				known[fn.Name.Name] = true
			}
		}
	}
	for _, k := range causes {
		known["TestMatrix/"+testName(k.name)] = true
		for _, s := range kinds {
			known["TestMatrix/"+testName(k.name)+"/"+s.name] = true
		}
	}
	scenarios, _ := filepath.Glob("testdata/*.txtar")
	for _, file := range scenarios {
		known["TestScenarios/"+strings.TrimSuffix(filepath.Base(file), ".txtar")] = true
	}
	return func(name string) bool { return known[name] }
}

// A large stream of small messages, read with buffers of every size, is read to
// its end.
func TestFirehose(t *testing.T) {
	n := 20_000
	if *full {
		n = 1_000_000
	}
	srv := testserver.New(t, testserver.Options{Listen: true})
	nc := srv.Connect(t, quietly())
	js, _ := jetstream.New(nc)
	r := &rig{T: t, srv: srv, nc: nc, js: js}
	r.stream(jetstream.StreamConfig{Storage: jetstream.MemoryStorage})
	for range n {
		if err := nc.Publish("s.a", []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	r.publish("s.a", 1)
	for _, most := range []int{1, 7, 64, 512, 0} {
		if most == 1 && *full {
			continue // a round trip for each message
		}
		at := uint64(0)
		for m, err := range Ordered(t.Context(), js, OrderedConfig{Stream: "S", MaxMessages: most, UntilCaughtUp: true}) {
			if err != nil {
				t.Fatal(err)
			}
			if at++; m.Sequence() != at {
				t.Fatalf("%d, want %d", m.Sequence(), at)
			}
		}
		if at != uint64(n)+1 {
			t.Errorf("MaxMessages %d: ended after %d", most, at)
		}
	}
}

// Two readers on one connection, and the frames of one inbox alone are lost for
// a while: that reader goes on, the other one does not notice.
func TestOneInboxSwallowed(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newKVRig(t, "", jetstream.KeyValueConfig{})
		r.put("k0", "")
		var mu sync.Mutex
		sids := map[string]string{} // inbox → sid
		first, victim, lost := "", "", 0
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			mu.Lock()
			defer mu.Unlock()
			if f.Verb == "SUB" {
				sids[f.Subject] = f.SID
			}
			if strings.Contains(f.Subject, ".MSG.NEXT.") && victim == "" {
				first = f.Reply[:strings.LastIndex(f.Reply, ".")] + ".*"
			}
			if f.Direction == faultproxy.ToClient && victim != "" && f.SID == victim {
				lost++
				return faultproxy.Drop
			}
			return faultproxy.Pass
		})
		var wg sync.WaitGroup
		var rebuilds [2]int
		for i := range 2 {
			wg.Go(func() {
				n := 0
				cfg := WatchConfig{Bucket: "B", Listener: &Listener{Resubscribing: func(error, int, time.Duration) { rebuilds[i]++ }}}
				for _, err := range Watch(t.Context(), r.js, cfg) {
					if err != nil {
						t.Error(err)
						return
					}
					if n++; n == 4 {
						return
					}
				}
			})
			if i == 0 {
				synctest.Wait()
				mu.Lock()
				victim = sids[first] // where the first reader's latest pull is answered
				mu.Unlock()
			}
		}
		time.Sleep(time.Minute)
		r.put("k1", "")
		r.put("k2", "")
		time.Sleep(time.Minute)
		r.put("k3", "")
		wg.Wait()
		if lost == 0 || rebuilds[0] == 0 || rebuilds[1] != 0 {
			t.Errorf("%d frames lost, rebuilds %v", lost, rebuilds)
		}
		r.srv.SetFilter(nil)
		r.wantClean()
	})
}

// An empty bucket, an empty stream, and a server that restarts: the first entry
// ever comes.
func TestRestartWhileEmpty(t *testing.T) {
	dir := t.TempDir()
	testserver.InBubble(t, func(t *testing.T) {
		r := newKVRig(t, dir, jetstream.KeyValueConfig{Storage: jetstream.FileStorage})
		go func() {
			for range 2 {
				time.Sleep(time.Minute)
				n := r.nc.Stats().Reconnects
				r.srv.Stop()
				_ = r.srv.Start()
				waitConnected(r.nc, n+1)
			}
			time.Sleep(time.Minute)
			r.put("k", "v")
		}()
		start := time.Now()
		for e, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B"}) {
			if err != nil || entryText(e) != "k@1=v" {
				t.Error(err)
			}
			break
		}
		if d := time.Since(start); d > 3*time.Minute+time.Second {
			t.Errorf("after %v", d)
		}
		r.wantClean()
	})
}

// The consumer is lost before its first message, whatever the start policy: the
// reader starts where it would have, and with the same settings.
func TestRebuildBeforeTheFirstMessage(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  OrderedConfig
		want []uint64 // of 16 to 20, stored after the loss, and what was there
	}{
		{"all", OrderedConfig{FilterSubjects: []string{"s.b"}}, sequences(16, 20)},
		{"new", OrderedConfig{DeliverPolicy: jetstream.DeliverNewPolicy}, sequences(16, 20)},
		{"sequence", OrderedConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 16}, sequences(16, 20)},
		{"sequence ahead", OrderedConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 18}, sequences(18, 20)},
		{"time", OrderedConfig{DeliverPolicy: jetstream.DeliverByStartTimePolicy}, sequences(16, 20)},
		{"last", OrderedConfig{DeliverPolicy: jetstream.DeliverLastPolicy, FilterSubjects: []string{"s.b"}}, sequences(16, 20)},
		{"last per subject", OrderedConfig{DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, FilterSubjects: []string{"s.b"}}, sequences(16, 20)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", quietly())
				s := r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 15)
				cfg := tc.cfg
				cfg.Stream, cfg.InactiveThreshold = "S", 17*time.Minute
				if cfg.DeliverPolicy == jetstream.DeliverByStartTimePolicy {
					at := time.Now().Add(time.Second)
					cfg.OptStartTime = &at
				}
				go func() {
					time.Sleep(time.Minute)
					deleteConsumers(r)
					time.Sleep(time.Second)
					l := s.ListConsumers(context.Background())
					for info := range l.Info() {
						if info.Config.InactiveThreshold != 17*time.Minute || info.Config.AckPolicy != jetstream.AckNonePolicy {
							t.Errorf("made again as %+v", info.Config)
						}
					}
					r.publish("s.b", 5)
				}()
				var got []uint64
				for m, err := range Ordered(t.Context(), r.js, cfg) {
					if err != nil {
						t.Fatal(err)
					}
					if got = append(got, m.Sequence()); m.Sequence() == 20 {
						break
					}
				}
				wantSequences(t, got, tc.want)
				r.wantClean()
			})
		})
	}
}

// A reader that is idle for long, with a message now and then, piles nothing up
// and makes nothing anew.
func TestIdleForLong(t *testing.T) {
	span := 6 * time.Hour
	if *full {
		span = 14 * 24 * time.Hour
	}
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S", Tuning: Tuning{Heartbeat: time.Second}, Listener: &Listener{
			Failed: func(err error) { t.Error(err) },
		}})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		for m, err := range c.Messages(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if time.Since(start) > span {
				break
			}
			at := time.Now().Add(10*time.Minute + time.Duration(m.Sequence()%7)*time.Second)
			time.AfterFunc(time.Until(at), func() { _ = r.nc.Publish("s.a", nil) })
		}
		if s := c.Stats(); s.Rebuilds != 0 || s.Generation != 1 {
			t.Errorf("%+v", s)
		}
		r.wantClean()
	})
}

// Many keys are one consumer.
func TestManyKeysOneConsumer(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newKVRig(t, "", jetstream.KeyValueConfig{})
		var keys []string
		for i := range 200 {
			keys = append(keys, fmt.Sprintf("k%d", i))
			r.put(keys[i], "")
			r.put("other"+keys[i], "")
		}
		n := 0
		for _, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B", Keys: keys, UntilCaughtUp: true}) {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n == 100 {
				s, err := r.js.Stream(t.Context(), "KV_B")
				if err != nil || s.CachedInfo().State.Consumers != 1 {
					t.Errorf("%d consumers, %v", s.CachedInfo().State.Consumers, err)
				}
			}
		}
		if n != 200 {
			t.Errorf("%d entries", n)
		}
		r.wantClean()
	})
}

// Many short ranges in a row leave neither consumers nor pulls, subscriptions or
// status listeners, and use few names at a time.
func TestShortRanges(t *testing.T) {
	n := 300
	if *full {
		n = 10_000
	}
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 50)
		for i := range n {
			ctx, cancel := context.WithCancel(t.Context())
			seen := 0
			for range Ordered(ctx, r.js, OrderedConfig{Stream: "S", MaxMessages: 8}) {
				if seen++; seen > i%40 {
					if i%2 == 0 {
						break
					}
					cancel()
				}
			}
			cancel()
		}
		r.wantClean()
		if n := listeners(r.nc); n != 0 {
			t.Errorf("%d status listeners left", n)
		}
		if n := budgetHeld(r.nc); n != 0 {
			t.Errorf("%d loops in the byte budget", n)
		}
	})
}

// User code that the loop calls may do what it likes: cancel the loop, use the
// connection, start another loop. Nothing is locked.
func TestCancelInsideHandlers(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var r *rig
		inner := 0
		called := func() {
			for _, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", UntilCaughtUp: true}) {
				if err != nil {
					t.Error(err)
				}
				inner++
			}
			cancel()
		}
		r = newRig(t, "", nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) { called() }))
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 3)
		time.AfterFunc(time.Minute, func() { deleteConsumers(r) })
		lis := &Listener{Resubscribing: func(error, int, time.Duration) { called() }}
		n := 0
		for _, err := range Ordered(ctx, r.js, OrderedConfig{Stream: "S", Listener: lis}) {
			if err == nil {
				n++
			} else if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		if n != 3 || inner < 6 {
			t.Errorf("%d messages, %d inside", n, inner)
		}
		r.wantClean()
	})
}

// Writers that are faster than the loop: the latest value of every key is seen,
// and nothing is dropped on the way.
func TestWritersFasterThanTheLoop(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		var reports []error
		var mu sync.Mutex
		r := newKVRig(t, "", jetstream.KeyValueConfig{}, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			mu.Lock()
			defer mu.Unlock()
			reports = append(reports, err)
		}))
		const keys, rounds = 20, 50
		go func() {
			for i := range rounds {
				for k := range keys {
					r.put(fmt.Sprintf("k%d", k), fmt.Sprint(i))
				}
				time.Sleep(time.Millisecond)
			}
		}()
		latest := map[string]string{}
		done := fmt.Sprint(rounds - 1)
		for e, err := range Watch(t.Context(), r.js, WatchConfig{Bucket: "B", MaxMessages: 16}) {
			if err != nil {
				t.Fatal(err)
			}
			latest[e.Key()] = string(e.Value())
			time.Sleep(5 * time.Millisecond)
			n := 0
			for _, v := range latest {
				n += boolInt(v == done)
			}
			if n == keys {
				break
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if len(reports) > 0 {
			t.Errorf("reported: %v", reports)
		}
		r.wantClean()
	})
}

// Whether the consumer is deleted while a pull waits, while the body runs or
// while the client is cut off: the loop ends with the same error, in the range,
// with no handler set. A pull on a consumer that is missing never waits.
func TestConsumeDeletionIsSaid(t *testing.T) {
	for _, when := range []string{"parked", "in the body", "cut off"} {
		t.Run(when, func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "")
				anc := testserver.Connect(t, "", nats.InProcessServer(around{r.srv}))
				ajs, _ := jetstream.New(anc)
				r.stream(jetstream.StreamConfig{})
				r.publish("s.a", 1)
				var deleted time.Time
				remove := func() {
					deleted = time.Now()
					if err := ajs.DeleteConsumer(context.Background(), "S", "w"); err != nil {
						t.Error(err)
					}
				}
				n := 0
				err := consume(t, r, t.Context(), worker(jetstream.ConsumerConfig{}), func(m Msg) bool {
					n++
					ack(t, m)
					switch when {
					case "parked":
						time.AfterFunc(time.Minute, remove)
					case "in the body":
						time.Sleep(time.Minute) // no pull is open
						remove()
					case "cut off":
						time.AfterFunc(time.Minute, func() {
							r.srv.Cut()
							time.Sleep(time.Second)
							remove()
							r.srv.Restore()
						})
					}
					return true
				})
				if !errors.Is(err, jetstream.ErrConsumerDeleted) || n != 1 {
					t.Errorf("%d messages, ended with %v", n, err)
				}
				if d := time.Since(deleted); d > maxBackoff {
					t.Errorf("after %v", d)
				}
				time.Sleep(handBackTime + barrierTime)
				r.wantClean()
			})
		})
	}
}

// An acknowledgement that the server does not take is an error where acks are
// confirmed.
func TestConsumeConfirmsOrSaysSo(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 3)
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.ConfirmAcks = true
		var acked []uint64
		var said *AckError
		err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			if m.Sequence() == 2 {
				if err := r.js.DeleteConsumer(t.Context(), "S", "w"); err != nil {
					t.Error(err)
				}
			}
			if err := m.Ack(); err == nil {
				acked = append(acked, m.Sequence())
			} else if !errors.As(err, &said) || said.Sequence != 2 {
				t.Errorf("message %d: %v", m.Sequence(), err)
			}
			return true
		})
		if err == nil || said == nil || len(acked) != 1 {
			t.Errorf("acknowledged %v, said %v, ended with %v", acked, said, err)
		}
		r.wantClean()
	})
}

// MaxMessages 1 is one message at a time on the server's books, and none comes
// twice, however close its body gets to AckWait.
func TestConsumeOneAtATime(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 30)
		cfg := worker(jetstream.ConsumerConfig{AckWait: 2 * time.Second})
		cfg.MaxMessages, cfg.UntilEmpty = 1, true
		n := 0
		err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			n++
			time.Sleep(1800 * time.Millisecond)
			if out := r.info("w").NumAckPending; out != 1 {
				t.Errorf("%d messages out", out)
			}
			if m.NumDelivered() != 1 {
				t.Errorf("%d comes a second time", m.Sequence())
			}
			return ack(t, m)
		})
		if n != 30 || err != nil {
			t.Errorf("%d messages, %v", n, err)
		}
	})
}

// A pull that is only watched any more does not keep the loop busy, however
// short its heartbeat was. (In a bubble a loop that spins stops the clock.)
func TestConsumeFadingPullIsQuiet(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.Tuning.Expires = time.Second
		cfg.MaxMessages = 2
		n := 0
		err := consume(t, r, t.Context(), cfg, func(m Msg) bool {
			if n++; n == 1 {
				time.AfterFunc(10*time.Millisecond, func() {
					r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
						if f.Status() != 0 {
							return faultproxy.Drop
						}
						return faultproxy.Pass
					})
					r.srv.Disconnect()
				})
				time.AfterFunc(3*time.Second, func() { r.srv.SetFilter(nil) })
				time.AfterFunc(10*time.Second, func() { _ = r.nc.Publish("s.a", nil) })
			}
			return ack(t, m) && n < 2
		})
		if err != nil || n != 2 {
			t.Errorf("%d messages, %v", n, err)
		}
	})
}

// A consumer that is lost again before it has delivered everything again: what
// was never acknowledged is not forgotten.
func TestConsumeLostTwice(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 20)
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.OnDeleted, cfg.MaxMessages = DeletedRecreate, 4
		lost := 0
		lose := func() {
			lost++
			if err := r.js.DeleteConsumer(t.Context(), "S", "w"); err != nil {
				t.Error(err)
			}
		}
		acked := map[uint64]bool{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		err := consume(t, r, ctx, cfg, func(m Msg) bool {
			if q := m.Sequence(); lost > 0 || (q != 5 && q != 10) {
				ack(t, m)
				acked[q] = true
				if (lost == 0 && q == 20) || (lost == 1 && q == 5) {
					lose()
				}
			}
			return len(acked) < 20
		})
		if err != nil || lost != 2 || len(acked) != 20 {
			t.Errorf("lost %d times, %d acknowledged, %v", lost, len(acked), err)
		}
	})
}
