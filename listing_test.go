package paced

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// A main pull that ended unfilled has lost nothing only if the rescue was sent
// before it and has not been used.
func TestListEnded(t *testing.T) {
	for _, tc := range []struct {
		name        string
		main        slot
		rescue      slot
		certain     bool
		description string
		want        kind
	}{
		{"protected", slot{role: first, serial: 2}, slot{open: true, role: rescue, serial: 1}, false, statusMessageSize, skip},
		{"protected, expired", slot{role: first, serial: 2}, slot{open: true, role: rescue, serial: 1}, false, statusRequestTimeout, skip},
		{"filled", slot{role: first, serial: 2}, slot{}, false, statusBatchCompleted, skip},
		{"rescue used", slot{role: first, serial: 2}, slot{open: true, role: rescue, serial: 1, got: 1}, false, statusMessageSize, restart},
		{"rescue sent behind", slot{role: first, serial: 2}, slot{open: true, role: rescue, serial: 3}, false, statusMessageSize, restart},
		{"rescue over", slot{role: first, serial: 2}, slot{role: rescue, serial: 1}, false, statusMessageSize, restart},
		{"no rescue", slot{role: first, serial: 2}, slot{}, false, statusMessageSize, restart},
		{"the rescue itself", slot{role: rescue, serial: 1}, slot{open: true, role: rescue, serial: 1}, false, statusMessageSize, restart},
		{"certain", slot{role: filler, serial: 2}, slot{}, true, statusRequestTimeout, restart},
		{"a pull of another kind", slot{role: plain, serial: 2}, slot{open: true, role: rescue, serial: 1}, false, statusRequestTimeout, restart},
	} {
		g := listing{active: true, certain: tc.certain}
		in := inbox{slots: [4]slot{tc.main, tc.rescue}}
		if k, _ := g.ended(&tc.main, &in, tc.description); k != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, k, tc.want)
		}
		// What the rescue was too small for, and a second list without
		// progress, ask for certain pulls.
		if tooLarge := tc.main.role == rescue; g.certain != (tooLarge || tc.certain) {
			t.Errorf("%s: certain %v", tc.name, g.certain)
		}
		if tc.want == restart && tc.main.role == first {
			g.ended(&tc.main, &in, tc.description)
			if !g.certain {
				t.Errorf("%s: not certain after the second", tc.name)
			}
		}
	}
}

// After the list was complete a lost consumer goes on behind the list's
// boundary: in front of it are only messages that the list left out.
func TestListGoesOnBehindItsBoundary(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		s := r.stream(jetstream.StreamConfig{MaxMsgsPerSubject: 5})
		r.publish("s.a", 1) // 1
		r.publish("s.b", 2) // 2, 3
		if err := s.DeleteMsg(t.Context(), 3); err != nil {
			t.Fatal(err)
		}
		r.publish("s.c", 2) // 4, 5
		for _, q := range []uint64{5} {
			if err := s.DeleteMsg(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
		// The list is 1, 2, 4, and ends at 5.
		var starts []string
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			if f.Direction == faultproxy.ToServer && strings.Contains(f.Subject, "CONSUMER.CREATE") {
				_, after, _ := strings.Cut(string(f.Payload), `"opt_start_seq":`)
				start, _, _ := strings.Cut(after, ",")
				starts = append(starts, start)
			}
			return faultproxy.Pass
		})
		var got []uint64
		done := make(chan struct{})
		for m, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy}) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, m.Sequence())
			if len(got) == 3 {
				time.AfterFunc(time.Second, func() { deleteConsumers(r); r.publish("s.a", 1); close(done) })
			}
			if m.Sequence() == 6 {
				break
			}
		}
		<-done
		wantSequences(t, got, []uint64{1, 2, 4, 6})
		if len(starts) != 2 || starts[1] != "6" {
			t.Errorf("starts %q", starts)
		}
	})
}

// Many loops on one connection ask a millisecond apart after a reconnect.
func TestManyLoopsSpreadAfterReconnect(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		const loops = 40
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range loops {
			wg.Go(func() {
				for range Ordered(ctx, r.js, OrderedConfig{Stream: "S"}) {
				}
			})
		}
		time.Sleep(time.Minute)
		var mu sync.Mutex
		at := map[time.Duration]int{}
		start := time.Now()
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			if f.Direction == faultproxy.ToServer && strings.Contains(f.Subject, "MSG.NEXT") {
				mu.Lock()
				at[time.Since(start)]++
				mu.Unlock()
			}
			return faultproxy.Pass
		})
		r.srv.Disconnect()
		time.Sleep(3 * time.Second)
		mu.Lock()
		if len(at) != loops {
			t.Errorf("%d loops asked at %d moments: %v", loops, len(at), at)
		}
		mu.Unlock()
		cancel()
		wg.Wait()
		r.srv.SetFilter(nil)
		r.wantClean()
	})
}

// The path of a message from the channel to the body allocates nothing.
func TestNoAllocationPerMessage(t *testing.T) {
	k := &link{
		stats:  func() nats.Statistics { return nats.Statistics{} },
		status: func() nats.Status { return nats.CONNECTED },
		events: make(chan nats.Status, 10),
	}
	for name, wants := range map[string]func(Msg) bool{"ordered": nil, "watch": (&bucketReader{ignoreDeletes: true}).wants} {
		const n = 2000
		s := joinBudget(new(nats.Conn))
		l := newLoop(t.Context(), k, s)
		l.lis = &Listener{}
		l.gen = &generation{stream: "S", consumer: "c"}
		l.recipe.wants = wants
		l.caught, l.target = true, 0
		l.pace = newPacer(n, n, 0)
		l.low = -1 // nothing is asked for
		sub := &nats.Subscription{}
		l.in.ch = make(chan *nats.Msg, n+1)
		l.in.slots[0] = slot{sub: sub, open: true, owed: n + 10, bytes: 1 << 30, bounded: true}
		l.in.owed, l.in.bytes = n+10, 1<<30
		for i := 1; i <= n; i++ {
			l.in.ch <- &nats.Msg{Sub: sub, Subject: "$KV.B.k", Data: []byte("x"), Reply: fmt.Sprintf("$JS.ACK.S.c.1.%d.%d.1.9", i, i)}
		}
		ctx, cancel := context.WithCancel(t.Context())
		l.ctx, l.done = ctx, ctx.Done()
		var before, after runtime.MemStats
		got := 0
		err := l.drain(func(m Msg, err error) bool {
			switch got++; got {
			case 10:
				runtime.ReadMemStats(&before)
			case n - 10:
				runtime.ReadMemStats(&after)
				cancel()
			}
			return true
		})
		if got != n-10 || !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %d messages, %v", name, got, err)
		}
		if allocs := after.Mallocs - before.Mallocs; allocs > 20 {
			t.Errorf("%s: %d allocations over %d messages", name, allocs, n-20)
		}
		s.leave()
	}
}

// A list that is made anew takes a new boundary: with every subject rewritten
// and the consumer lost in the middle of it, none is missing.
func TestListTakesItsBoundaryAnew(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{MaxMsgsPerSubject: 5})
		const subjects = 20
		write := func() {
			for i := range subjects {
				r.publish(fmt.Sprintf("s.%d", i), 1)
			}
		}
		write()
		seen := map[string]bool{}
		for m, err := range Ordered(t.Context(), r.js, OrderedConfig{
			Stream: "S", DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, UntilCaughtUp: true, MaxMessages: 2,
		}) {
			if err != nil {
				t.Fatal(err)
			}
			if len(seen) == 0 {
				write()
				deleteConsumers(r)
			}
			seen[m.Subject()] = true
		}
		if len(seen) != subjects {
			t.Errorf("%d subjects of %d", len(seen), subjects)
		}
		r.wantClean()
	})
}

// The rescue is for the entry that is larger than the others: it has room for
// that also where little of anything is of use, so that no list is made anew.
func TestListRescueHasRoomForALargerEntry(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newKVRig(t, "", jetstream.KeyValueConfig{History: 5})
		const keys = 300
		for k := range keys {
			size := 10
			if k%20 == 0 {
				size = 20<<10 + 100*k
			}
			r.put(fmt.Sprintf("k%d", k), strings.Repeat("v", size))
		}
		w, err := NewWatcher(r.js, WatchConfig{Bucket: "B", MaxMessages: 10})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, err := range w.Snapshot(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			n++
			time.Sleep(time.Millisecond)
		}
		if s := w.Stats(); n != keys || s.Rebuilds != 0 {
			t.Errorf("%d entries, %d rebuilds, %v", n, s.Rebuilds, s.LastError)
		}
		r.wantClean()
	})
}
