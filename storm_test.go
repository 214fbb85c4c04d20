package paced

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// A link that goes down and comes up every second for a minute, also one that
// loses the consumer each time: no more creates than the backoff allows, and
// one consumer when it is over.
func TestStormFlappingLink(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprint("consumer lost ", lost), func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				r := newRig(t, "", quietly())
				anc := testserver.Connect(t, "", quietly(), nats.InProcessServer(around{r.srv}))
				ajs, _ := jetstream.New(anc)
				ar := &rig{T: t, srv: r.srv, nc: anc, js: ajs}
				r.stream(jetstream.StreamConfig{})
				ar.publish("s.a", 10)
				var w wireCount
				r.srv.SetFilter(w.filter(nil))
				const flaps = 60
				go func() {
					time.Sleep(time.Minute)
					for range flaps {
						r.srv.Cut()
						if lost {
							deleteConsumers(ar)
						}
						time.Sleep(500 * time.Millisecond)
						r.srv.Restore()
						time.Sleep(500 * time.Millisecond)
					}
					time.Sleep(maxBackoff)
					if n := ar.consumers(); len(n) != 1 {
						t.Errorf("consumers %v, want one", n)
					}
					ar.publish("s.a", 1)
				}()
				n := 0
				for _, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S"}) {
					if err != nil {
						t.Fatal(err)
					}
					if n++; n == 11 {
						break
					}
				}
				most := int64(1)
				if lost {
					most += int64(allowed(flaps * time.Second))
				}
				if n := w.creates.Load(); n > most {
					t.Errorf("%d creates, want at most %d", n, most)
				}
				t.Logf("%d creates, %d deletes, %d pulls", w.creates.Load(), w.deletes.Load(), w.pulls.Load())
				r.wantClean()
			})
		})
	}
}

// A server that answers every pull in the same way, whatever that is, for a
// minute: at most ten pulls a second, no more creates than the backoff allows,
// and one report as long as nothing changes.
func TestStormOfStatuses(t *testing.T) {
	pulls := regexp.MustCompile(`^(\S+) pull #`)
	for _, row := range statusRows {
		for _, pending := range []string{"", " pending=64", " pending=0"} {
			t.Run(row.name+pending, func(t *testing.T) {
				script := "stream last=5\n"
				for i := range 700 {
					script += fmt.Sprintf("on pull %d status %s %q%s\n", i+2, row.code, row.description, pending)
				}
				r := (&scenario{script: script + "@60s cancel\n"}).play(t, disturbance{})
				var at []time.Time
				creates, reports := 0, map[string]int{}
				for _, line := range r.lines {
					if m := pulls.FindStringSubmatch(line); m != nil && !strings.Contains(line, "#1 ") {
						d, err := time.ParseDuration(m[1])
						if err != nil {
							t.Fatal(err)
						}
						at = append(at, time.Time{}.Add(d))
					}
					if strings.Contains(line, " create c") {
						creates++
					}
					if _, text, ok := strings.Cut(line, " reported: "); ok {
						reports[lastPart(text)]++
					}
				}
				if n := busiest(at, nil); n > 10 {
					t.Errorf("%d pulls in a second\n%s", n, strings.Join(r.lines[:min(len(r.lines), 40)], "\n"))
				}
				if most := 1 + allowed(time.Minute); creates > most {
					t.Errorf("%d creates, want at most %d", creates, most)
				}
				for text, n := range reports {
					if n > 1 {
						t.Errorf("%d reports of %s", n, text)
					}
				}
			})
		}
	}
}

// lastPart is the reason without where it happened.
func lastPart(text string) string { return text[strings.LastIndex(text, ": ")+2:] }

// A server without JetStream for ten minutes, and a connection that is half
// open for as long: the listener hears of every attempt, the error handler of
// every change.
func TestStormOfReports(t *testing.T) {
	for _, how := range []string{"no JetStream", "half open"} {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			testserver.InBubble(t, func(t *testing.T) {
				var off atomic.Bool
				srv := testserver.New(t, testserver.Options{Dir: dir, Configure: func(o *server.Options) { o.JetStream = !off.Load() }})
				var reports atomic.Int64
				nc := srv.Connect(t, nats.PingInterval(time.Hour), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) { reports.Add(1) }))
				js, _ := jetstream.New(nc)
				r := &rig{T: t, srv: srv, nc: nc, js: js}
				r.stream(jetstream.StreamConfig{Storage: jetstream.FileStorage})
				r.publish("s.a", 10)
				var w wireCount
				srv.SetFilter(w.filter(nil))
				attempts, failed := int64(0), int64(0)
				lis := &Listener{
					Resubscribing: func(error, int, time.Duration) { attempts++ },
					Failed:        func(error) { failed++ },
				}
				restart := func(without bool) {
					off.Store(without)
					srv.Stop()
					if err := srv.Start(); err != nil {
						t.Error(err)
					}
					waitConnected(nc, nc.Stats().Reconnects)
				}
				go func() {
					time.Sleep(time.Minute)
					if how == "half open" {
						srv.Mute(faultproxy.ToClient)
					} else {
						restart(true)
					}
					time.Sleep(10 * time.Minute)
					if how == "half open" {
						srv.Unmute(faultproxy.ToClient)
					} else {
						restart(false)
					}
					time.Sleep(time.Minute)
					r.publish("s.a", 1)
				}()
				n := 0
				for _, err := range Ordered(t.Context(), js, OrderedConfig{Stream: "S", Listener: lis}) {
					if err != nil {
						t.Fatal(err)
					}
					if n++; n == 11 {
						break
					}
				}
				creates := w.creates.Load() - 1
				// One more attempt than creates where one fell into a moment
				// without a connection.
				if creates < 30 || attempts < creates || attempts > creates+1 {
					t.Errorf("%d attempts told, %d creates sent", attempts, creates)
				}
				// What an attempt failed of, and what began it all.
				if failed < attempts || failed > attempts+3 {
					t.Errorf("%d failures told of %d attempts", failed, attempts)
				}
				// Silent or shut down, no answer, and what changed with it.
				if n := reports.Load(); n > 4 {
					t.Errorf("%d reports", n)
				}
				t.Logf("%d attempts, %d failures, %d reports, %d creates", attempts, failed, reports.Load(), creates)
				srv.SetFilter(nil)
				r.wantClean()
			})
		})
	}
}

// A thousand loops on one connection, and a server that restarts without any of
// their consumers: at most 100 creates in any 100 ms.
func TestStormOfThousandLoops(t *testing.T) {
	dir := t.TempDir()
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, dir, quietly())
		r.stream(jetstream.StreamConfig{Storage: jetstream.FileStorage})
		r.publish("s.a", 1)
		const loops = 1000
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		var came atomic.Int64
		for range loops {
			wg.Go(func() {
				for m, err := range Ordered(ctx, r.js, OrderedConfig{Stream: "S"}) {
					if err == nil && m.Sequence() == 2 {
						came.Add(1)
						return
					}
				}
			})
		}
		time.Sleep(time.Minute)
		var mu sync.Mutex
		var creates, pulls []time.Time
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			mu.Lock()
			defer mu.Unlock()
			if strings.Contains(f.Subject, ".CONSUMER.CREATE.") {
				creates = append(creates, time.Now())
			}
			if strings.Contains(f.Subject, ".MSG.NEXT.") {
				pulls = append(pulls, time.Now())
			}
			return faultproxy.Pass
		})
		r.srv.Stop()
		if err := r.srv.Start(); err != nil {
			t.Fatal(err)
		}
		waitConnected(r.nc, 1)
		r.publish("s.a", 1)
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		if n := came.Load(); n != loops {
			t.Errorf("the message behind the restart came to %d of %d loops", n, loops)
		}
		if n := len(creates); n > loops+loops/10 {
			t.Errorf("%d creates", n)
		}
		for _, k := range []struct {
			what string
			at   []time.Time
		}{{"creates", creates}, {"pulls", pulls}} {
			most, from := 0, 0
			for i, at := range k.at {
				for at.Sub(k.at[from]) >= 100*time.Millisecond {
					from++
				}
				most = max(most, i-from+1)
			}
			if most > 100 {
				t.Errorf("%d %s in 100 ms", most, k.what)
			}
			t.Log(k.what, strconv.Itoa(len(k.at)), "at most", most, "in 100 ms")
		}
		cancel()
		wg.Wait()
	})
}
