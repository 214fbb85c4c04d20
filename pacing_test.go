package paced

import (
	"context"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
	"github.com/pacedgo/paced/internal/wire"
)

const plenty = 1 << 30 // messages pending on the server

// work lets a body that takes per for each message handle n of them, asking
// whenever half of the credit is used up, as the loop does.
func (p *pacer) work(n int, pending uint64, size int, per func(i int) time.Duration) {
	for i := 0; i < n; {
		credit := p.adjust(pending)
		p.used = true
		stretch := min(max(1, credit-credit/2), n-i)
		spent := time.Duration(0)
		for range stretch {
			spent += per(i)
			i++
		}
		p.saw(size)
		p.handled(stretch, spent, stretch*size)
	}
	p.adjust(pending)
}

func always(d time.Duration) func(int) time.Duration { return func(int) time.Duration { return d } }

// The credit is the look-ahead over the body's time, between 1 and MaxMessages.
func TestCreditFollowsTheBody(t *testing.T) {
	for _, tc := range []struct {
		body, rtt, lookAhead time.Duration
		limit, want          int
	}{
		{body: time.Microsecond, limit: 5000, want: 5000},
		{body: 4 * time.Microsecond, limit: 5000, want: 5000},
		{body: 8 * time.Microsecond, limit: 5000, want: 2500},
		{body: time.Millisecond, limit: 5000, want: 20},
		{body: 5 * time.Millisecond, limit: 5000, want: 4},
		{body: 20 * time.Millisecond, limit: 5000, want: 1},
		{body: time.Second, limit: 5000, want: 1},
		{body: time.Hour, limit: 5000, want: 1},
		// Two round trips more: the body does not wait for the network.
		{body: 5 * time.Millisecond, rtt: 50 * time.Millisecond, limit: 5000, want: 24},
		{body: 4 * time.Microsecond, rtt: 50 * time.Millisecond, limit: 5000, want: 5000},
		{body: time.Second, rtt: 50 * time.Millisecond, limit: 5000, want: 1},
		{body: time.Second, rtt: time.Second, limit: 5000, want: 2},
		// As the user says.
		{body: 5 * time.Millisecond, rtt: 50 * time.Millisecond, lookAhead: time.Second, limit: 5000, want: 200},
		{body: 5 * time.Millisecond, lookAhead: time.Nanosecond, limit: 5000, want: 1},
		// MaxMessages.
		{body: 4 * time.Microsecond, limit: 1, want: 1},
		{body: 4 * time.Microsecond, limit: 10, want: 10},
		{body: 0, limit: 5000, want: 5000},
	} {
		p := newPacer(tc.limit, startCredit, tc.lookAhead)
		p.trip = tc.rtt
		p.work(20_000, plenty, 128, always(tc.body))
		if p.credit != tc.want {
			t.Errorf("body %v, rtt %v, look-ahead %v, limit %d: credit %d, want %d", tc.body, tc.rtt, tc.lookAhead, tc.limit, p.credit, tc.want)
		}
	}
}

// A step in the body's time is followed within a few pulls, down faster than up.
func TestCreditStepResponse(t *testing.T) {
	const quick, slow = 4 * time.Microsecond, 5 * time.Millisecond
	p := newPacer(5000, startCredit, 0)
	p.work(50_000, plenty, 128, always(quick))
	if p.credit < 4900 {
		t.Fatalf("quick: credit %d", p.credit)
	}
	// One stretch, which is what was outstanding anyway, halves the way.
	p.work(1, plenty, 128, always(slow))
	if p.credit > 40 {
		t.Errorf("one slow message: credit %d, want at most 40", p.credit)
	}
	p.work(50, plenty, 128, always(slow))
	if p.credit < 4 || p.credit > 5 {
		t.Errorf("fifty slow messages: credit %d, want 4", p.credit)
	}
	p.work(100, plenty, 128, always(quick))
	if p.credit < 100 {
		t.Errorf("a hundred quick messages: credit %d, want at least 100", p.credit)
	}
	p.work(20_000, plenty, 128, always(quick))
	if p.credit < 4900 {
		t.Errorf("quick again: credit %d", p.credit)
	}
}

// It starts small, and doubles with each pull while more is pending than that.
func TestCreditStartsSmallAndDoubles(t *testing.T) {
	p := newPacer(5000, startCredit, 0)
	if p.credit != 64 {
		t.Errorf("starts with %d", p.credit)
	}
	var got []int
	for range 9 {
		got = append(got, p.adjust(plenty))
		p.used = true
		p.handled(10, 40*time.Microsecond, 1280)
	}
	if want := []int{64, 128, 256, 512, 1024, 2048, 4096, 5000, 5000}; !slices.Equal(got, want) {
		t.Errorf("credits %v, want %v", got, want)
	}

	// A quiet stream: room for thousands is not needed, however quick the body.
	p = newPacer(5000, startCredit, 0)
	for _, pending := range []uint64{0, 1, 64} {
		for range 1000 {
			if p.handled(1, time.Microsecond, 128); p.adjust(pending) != 64 {
				t.Fatalf("%d pending: credit %d, want 64", pending, p.credit)
			}
			p.used = true
		}
	}
	if p.adjust(65) != 128 {
		t.Errorf("65 pending: credit %d, want 128", p.credit)
	}
	// And it does not shrink only because less is pending.
	if p.adjust(0) != 128 {
		t.Errorf("nothing pending: credit %d, want 128", p.credit)
	}
}

// Only a pull that was sent makes the next one larger: trying again and again
// while there is no room for one does not.
func TestCreditGrowsWithPullsNotWithTries(t *testing.T) {
	p := newPacer(5000, startCredit, 0)
	p.handled(10, 40*time.Microsecond, 1280)
	for range 1000 {
		if p.adjust(plenty) != 64 {
			t.Fatalf("credit %d, and no pull was sent", p.credit)
		}
	}
	p.used = true
	for range 1000 {
		if p.adjust(plenty) != 128 {
			t.Fatalf("credit %d after one pull", p.credit)
		}
	}
}

// With a larger channel the credit goes at once to what the body can use; where
// byte bounds allow less it goes on from there.
func TestCreditLeapsAndIsCut(t *testing.T) {
	p := newPacer(5000, startCredit, 0)
	p.handled(10, 80*time.Microsecond, 1280)
	p.adjust(plenty)
	p.leap(100_000)
	if p.credit != 2500 {
		t.Errorf("leaps to %d, the body can use 2500", p.credit)
	}
	p.granted(150)
	if p.credit != 150 {
		t.Errorf("credit %d, bytes allow 150", p.credit)
	}
	p.leap(100)
	p.granted(1000)
	if p.credit != 150 {
		t.Errorf("credit %d, nothing changed it from 150", p.credit)
	}
	p.used = true
	if p.adjust(plenty) != 300 {
		t.Errorf("credit %d, want twice 150", p.credit)
	}
	p.granted(3)
	if p.adjust(plenty) != 64 {
		t.Errorf("credit %d, want what it started with", p.credit)
	}
}

// More is asked for in time for a round trip, and not more often than that
// takes: the answer finds the body at work, and the loop with something to do.
func TestAskAt(t *testing.T) {
	const us, ms = time.Microsecond, time.Millisecond
	for _, tc := range []struct {
		name            string
		body, trip, set time.Duration
		owed, want      int
	}{
		{"nothing measured", 0, 0, 0, 64, 32},
		{"half is less than a round trip", 1 * us, 0, 0, 5000, 2500},
		{"what is owed is less than the credit", 1 * us, 0, 0, 100, 50},
		{"an eighth of the look-ahead", 100 * us, 0, 0, 200, 25},
		{"with the body at work it may be nothing", 5 * ms, 0, 0, 4, 0},
		{"less than that is owed", 100 * us, 0, 0, 40, 20},
		{"and a round trip", 1 * ms, 2 * ms, 0, 24, 5},
		{"never more than half", 1 * ms, 50 * ms, 0, 120, 60},
		{"of the look-ahead that is set", 1 * ms, 0, 800 * ms, 800, 100},
	} {
		p := newPacer(5000, startCredit, tc.set)
		p.trip = tc.trip
		if tc.body > 0 {
			p.work(20_000, plenty, 128, always(tc.body))
		}
		if got := p.askAt(tc.owed); got != tc.want {
			t.Errorf("%s: asks with %d owed, want %d (credit %d)", tc.name, got, tc.want, p.credit)
		}
	}
}

// Bodies of two kinds: the credit stays around what their mean asks for, and
// within the bounds at every single pull.
func TestCreditWithBimodalBodies(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	one := func(in int, d time.Duration) func(int) time.Duration {
		return func(int) time.Duration {
			if r.IntN(in) == 0 {
				return d
			}
			return 4 * time.Microsecond
		}
	}
	for _, tc := range []struct {
		name string
		body func(int) time.Duration
		mean time.Duration
	}{
		{"one in a hundred takes 5 ms", one(100, 5*time.Millisecond), 54 * time.Microsecond},
		{"one in ten takes 5 ms", one(10, 5*time.Millisecond), 504 * time.Microsecond},
		{"every other takes 5 ms", one(2, 5*time.Millisecond), 2502 * time.Microsecond},
	} {
		p := newPacer(5000, startCredit, 0)
		sum, n := 0, 0
		for range 2000 {
			p.work(max(1, p.credit-p.credit/2), plenty, 128, tc.body) // one pull
			if p.credit < 1 || p.credit > 5000 {
				t.Fatalf("%s: credit %d", tc.name, p.credit)
			}
			sum += p.credit
			n++
		}
		ideal := int(defaultLookAhead / tc.mean)
		if mean := sum / n; mean < ideal/2 || mean > ideal*2 {
			t.Errorf("%s: credit %d on average, the mean body asks for %d", tc.name, mean, ideal)
		}
	}
}

// One message a minute: what counts is the body, not the pause.
func TestCreditOneMessageAMinute(t *testing.T) {
	p := newPacer(5000, startCredit, 0)
	for range 100 {
		p.adjust(0)
		p.handled(1, 2*time.Millisecond, 128) // the loop does not count the minute
	}
	if p.credit != 10 {
		t.Errorf("credit %d, want 10", p.credit)
	}
}

// A body that blocks for an hour once is forgotten within some dozens of quick
// messages, whether it was alone in its stretch or among thousands.
func TestCreditForgetsOneBlockedBody(t *testing.T) {
	for _, stretch := range []int{1, 10, 2500} {
		p := newPacer(5000, startCredit, 0)
		p.work(50_000, plenty, 128, always(4*time.Microsecond))
		p.handled(stretch, time.Hour, 128*stretch)
		if p.adjust(plenty) > 10 {
			t.Errorf("stretch of %d: credit %d after the hour", stretch, p.credit)
		}
		p.work(72, plenty, 128, always(4*time.Microsecond))
		if p.credit < 50 {
			t.Errorf("stretch of %d: credit %d after 72 quick messages, want at least 50", stretch, p.credit)
		}
		p.work(10_000, plenty, 128, always(4*time.Microsecond))
		if p.credit < 4000 {
			t.Errorf("stretch of %d: credit %d after 10,000 quick messages", stretch, p.credit)
		}
	}
}

// Two round trips are added to what is kept waiting.
func TestLookAhead(t *testing.T) {
	p := newPacer(5000, startCredit, 0)
	if p.lookAhead() != defaultLookAhead {
		t.Errorf("not measured: %v", p.lookAhead())
	}
	p.trip = 50 * time.Millisecond
	if p.lookAhead() != 120*time.Millisecond {
		t.Errorf("50 ms: %v", p.lookAhead())
	}
}

// The bytes asked for follow the sizes seen, with room for one large message as
// long as those are recent.
func TestBytesFollowTheSizes(t *testing.T) {
	p := newPacer(5000, startCredit, 0)
	if got, want := p.bytesFor(64), 64*1536+1024; got != want {
		t.Errorf("nothing seen: %d bytes for 64 messages, want %d", got, want)
	}
	p.work(1000, plenty, 100, always(time.Millisecond))
	if got, want := p.bytesFor(10), 10*100+100; got != want {
		t.Errorf("%d bytes for 10 messages of 100, want %d: none was larger", got, want)
	}
	p.saw(120)
	if got, want := p.bytesFor(10), 10*120+120; got != want {
		t.Errorf("with one of 120 among them: %d, want %d", got, want)
	}
	p.saw(50_000)
	if got, want := p.bytesFor(10), 10*150+50_000; got != want {
		t.Errorf("with a large one among them: %d, want %d", got, want)
	}
	p.adjust(plenty)
	if p.large < 40_000 {
		t.Errorf("forgotten after one pull: %d", p.large)
	}
	for range 200 {
		p.saw(100)
		p.adjust(plenty)
	}
	if p.large > 200 {
		t.Errorf("still counts after 200 pulls: %d", p.large)
	}

	// Large messages with a slow body: the mean follows within a few pulls.
	p.work(60, plenty, 64<<10, always(time.Millisecond))
	if m := p.meanSize(); m < 60_000 || m > 64<<10 {
		t.Errorf("mean %d after 60 messages of 64 KiB", m)
	}
	if got := p.bytesFor(1); got < 64<<10 {
		t.Errorf("%d bytes for one of 64 KiB", got)
	}
}

// Stretches without a message change nothing.
func TestPacerIgnoresEmptyStretches(t *testing.T) {
	p := newPacer(5000, startCredit, 0)
	p.handled(0, time.Hour, 0)
	if p.body.known || p.size.known {
		t.Error("a stretch without messages was counted")
	}
}

// What the loop waits for between two bodies is not the body's time.
func TestWaitingForAnAnswerIsNotBodyTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := frameLoop(t)
		defer l.timer.Stop()
		l.stretch = time.Now()
		l.handled, l.taken = 10, 1000
		time.Sleep(10 * time.Millisecond) // ten bodies
		go func() {
			time.Sleep(300 * time.Millisecond)
			l.in.ch <- &nats.Msg{Subject: "answer"}
		}()
		if _, err := l.await("answer", time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		l.link.barrier = func(context.Context) error { time.Sleep(200 * time.Millisecond); return nil }
		if err := l.barrier(nil); err != nil {
			t.Fatal(err)
		}
		l.fold(time.Now())
		if got := time.Duration(l.pace.body.value); got != time.Millisecond {
			t.Errorf("a body takes %v, want 1ms", got)
		}
	})
}

// In a crowd a loop asks when all it had asked for has come, and so needs one
// inbox.
func TestOnePullAtATimeInACrowd(t *testing.T) {
	l := frameLoop(t)
	defer l.timer.Stop()
	l.in.forget()
	b := l.share.b
	b.rate.best = 1 << 28 // a second; less comes in the look-ahead than would be asked for
	l.pos.pending = plenty
	ask := func() int {
		p := wire.Pull{Batch: 5000}
		got, ok := l.reserve(&p, time.Now(), plain)
		if !ok {
			t.Fatal("nothing granted")
		}
		l.share.giveBack(got)
		l.in.owed = p.Batch
		defer func() { l.in.owed = 0 }()
		return l.askAt()
	}
	if ask() == 0 {
		t.Error("alone: it waits until nothing is owed")
	}
	b.hungry += budgetCrowd
	if at := ask(); at != 0 {
		t.Errorf("in a crowd: it asks with %d owed", at)
	}
	l.caught, l.pos.pending = true, 0
	if ask() == 0 {
		t.Error("in a crowd, with nothing to read: it waits until nothing is owed")
	}
	l.caught, l.pos.pending = false, plenty
	b.hungry -= budgetCrowd
	if ask() == 0 {
		t.Error("alone again: it waits until nothing is owed")
	}
}

// Where bytes allow fewer messages than the body can use, the credit goes on from
// those, and the channel does not grow for the others.
func TestBytesBoundCreditAndChannel(t *testing.T) {
	l := frameLoop(t)
	defer l.timer.Stop()
	l.in.forget()
	l.share.giveBack(l.in.spare)
	l.in.spare = 0
	for i := range l.in.slots {
		l.in.slots[i].open = false
	}
	if err := l.in.start(64, 50); err != nil {
		t.Fatal(err)
	}
	const size = 16 << 10
	l.pace.handled(10, 10*time.Microsecond, 10*size)
	l.pos.pending = plenty
	l.pace.credit = 5000
	room, ok := l.room(5000, 50)
	if !ok || room < l.share.part()/size || cap(l.in.ch) > 1000 {
		t.Errorf("room for %d, %v, in a channel of %d; bytes allow %d", room, ok, cap(l.in.ch), l.share.part()/size)
	}
	p := wire.Pull{Batch: room}
	got, ok := l.reserve(&p, time.Now(), plain)
	if !ok || p.Batch >= room {
		t.Fatalf("%+v: bytes do not cut it, %v", p, ok)
	}
	l.share.giveBack(got)
	if l.pace.credit != p.Batch {
		t.Errorf("credit %d after bytes allowed %d", l.pace.credit, p.Batch)
	}

	// Small messages: the channel is what is too small.
	l.pace.size = average{100, true}
	l.pace.large = 100
	l.pace.credit = 512
	l.pace.adjust(plenty)
	if room, ok := l.room(512, 50); !ok || room != 512 || cap(l.in.ch) < 5000 {
		t.Errorf("room for %d, %v, in a channel of %d", room, ok, cap(l.in.ch))
	}
}

// A loop that has nothing to read does not keep what it read last.
func TestIdleLoopKeepsNoMessage(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 3)
		var last weak.Pointer[nats.Msg]
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			for m, err := range Ordered(ctx, r.js, OrderedConfig{Stream: "S"}) {
				if err == nil {
					last = weak.Make(m.m)
				}
			}
		}()
		time.Sleep(time.Second)
		synctest.Wait()
		runtime.GC()
		if m := last.Value(); m != nil {
			t.Errorf("the message with %d bytes of %s is still there", len(m.Data), m.Subject)
		}
		cancel()
		<-done
	})
}

// A parked loop that stands in the budget's line is woken when its turn comes.
func TestTurnInLineWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := frameLoop(t)
		defer l.timer.Stop()
		l.share.leave()
		nc := new(nats.Conn)
		other := joinBudget(nc)
		defer other.leave()
		l.share = joinBudget(nc)
		defer l.share.leave()
		l.in.forget()
		l.in.spare = 0
		for i := range l.in.slots {
			l.in.slots[i].open = false
		}
		if err := l.in.start(64, 50); err != nil {
			t.Fatal(err)
		}
		l.in.ch = make(chan *nats.Msg, 1000)
		other.claim(other.b.size, 1, false)
		l.line = place{need: other.b.size}
		l.share.enqueue(l.line.need)
		const later = 50 * time.Millisecond
		start := time.Now()
		go func() {
			time.Sleep(later)
			other.giveBack(other.held())
		}()
		for mine := false; !mine; _, mine = l.share.granted() {
			var m Msg
			if d := l.wait(&m); d.kind != skip {
				t.Fatal(d.kind, d.reason)
			}
		}
		if d := time.Since(start); d != later {
			t.Errorf("its turn is noticed after %v, it came after %v", d, later)
		}
	})
}

// A full channel has no room, also where bytes would not allow a single message.
func TestNoRoomForNothing(t *testing.T) {
	l := frameLoop(t)
	defer l.timer.Stop()
	l.pace.size = average{1 << 30, true}
	full := l.in.fits(1<<20, 4)
	l.in.slots[0].owed += full
	l.in.owed += full
	if n, ok := l.room(10, 4); ok {
		t.Errorf("room for %d", n)
	}
}

// A loop that waited in line for room for a message of any size asks for that
// message alone when its turn comes: the pull has no byte bound.
func TestOversizeMessageComesAloneAfterWaiting(t *testing.T) {
	l := frameLoop(t)
	l.in.forget()
	l.share.giveBack(l.in.spare)
	const need = 100_000
	for _, tc := range []struct {
		place place
		want  wire.Pull
	}{
		{place{need: need}, wire.Pull{Batch: 1}},
		{place{need: need, bounded: true}, wire.Pull{Batch: 20, MaxBytes: need}},
	} {
		l.share.enqueue(need)
		l.line = tc.place
		p := wire.Pull{Batch: 20}
		if got, ok := l.served(&p); !ok || got != need || p != tc.want {
			t.Errorf("%+v: %d bytes, %v, %+v, want %+v", tc.place, got, ok, p, tc.want)
		}
		l.share.giveBack(need)
	}
}
