package paced

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/nats-io/nats.go"
)

const (
	kiB = 1 << 10
	miB = 1 << 20
)

// invariants that hold whenever b is unlocked.
func checkBudget(b *budget) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	joined, active, sum, reserved := 0, 0, 0, 0
	inLine := map[*share]bool{}
	for _, s := range b.line {
		inLine[s] = true
	}
	for i, s := range b.loops {
		if s == nil {
			continue
		}
		if s.index != i || s.left || s.bytes < 0 {
			return fmt.Errorf("loop %d: index %d, left %v, bytes %d", i, s.index, s.left, s.bytes)
		}
		joined++
		if s.active {
			active++
		}
		sum += s.bytes
		reserved += max(s.bytes, b.least)
		if inLine[s] != (s.place == placeWaiting) || inLine[s] && s.bytes != 0 || s.place != placeServed && len(s.bell) != 0 {
			return fmt.Errorf("loop %d: in line %v, place %d, bytes %d, bell %d", i, inLine[s], s.place, s.bytes, len(s.bell))
		}
	}
	switch {
	case joined != b.joined || active != b.active:
		return fmt.Errorf("joined %d (counted %d), active %d (counted %d)", b.joined, joined, b.active, active)
	case reserved != b.reserved || sum > reserved:
		return fmt.Errorf("reserved %d (counted %d), sum %d", b.reserved, reserved, sum)
	case b.least < 1 || b.least > budgetShare || b.joined > 0 && b.least > max(1, b.size/2/b.joined):
		return fmt.Errorf("least %d, size %d, %d loops", b.least, b.size, b.joined)
	case b.size < 1 || b.size > b.ceiling:
		return fmt.Errorf("size %d, ceiling %d", b.size, b.ceiling)
	}
	for _, s := range b.line {
		if s.left {
			return fmt.Errorf("one that left is in line")
		}
	}
	// Nobody at the head waits for what is there.
	if len(b.line) > 0 {
		need := min(b.line[0].need, b.least+b.pool())
		if need <= b.least || need-b.least <= b.size-b.reserved {
			return fmt.Errorf("head of the line waits for %d, free %d", need, b.size-b.reserved)
		}
	}
	return nil
}

func budgetHolds(t *testing.T, b *budget) {
	t.Helper()
	if err := checkBudget(b); err != nil {
		t.Fatal(err)
	}
}

func hasBudget(key weak.Pointer[nats.Conn]) bool {
	budgets.mu.Lock()
	defer budgets.mu.Unlock()
	return budgets.of[key] != nil
}

// joinFast joins n loops that leave with the test, and shows them a link so fast that
// the ceiling alone is the size.
func joinFast(t *testing.T, nc *nats.Conn, ceiling, n int) []*share {
	t.Helper()
	SetByteBudget(nc, ceiling)
	var all []*share
	for range n {
		s := joinBudget(nc)
		t.Cleanup(s.leave)
		all = append(all, s)
	}
	at := time.Unix(1000, 0)
	for i := range uint64(3) {
		all[0].arrived(i<<30, at.Add(time.Duration(i)*time.Second))
	}
	budgetWant(t, "size", all[0].b.size, ceiling)
	budgetHolds(t, all[0].b)
	return all
}

func budgetWant(t *testing.T, what string, got, want int) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: got %d, want %d", what, got, want)
	}
}

func budgetPanics(t *testing.T, what string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Fatalf("%s: no panic", what)
		}
	}()
	f()
}

func TestLinkRate(t *testing.T) {
	type sample struct {
		at    time.Duration
		bytes uint64 // since the sample before
	}
	// steady returns samples of the rate (bytes per second) from..to.
	steady := func(from, to, every time.Duration, rate float64) (out []sample) {
		for at := from + every; at <= to; at += every {
			out = append(out, sample{at, uint64(rate * every.Seconds())})
		}
		return out
	}
	const ms, s = time.Millisecond, time.Second
	for _, tc := range []struct {
		name    string
		samples []sample
		ceiling int
		want    int
	}{
		{"nothing known", nil, 32 * miB, 1 * miB},
		{"one sample", []sample{{0, 500 * miB}}, 32 * miB, 1 * miB},
		{"ceiling below the floor", nil, 10 * kiB, 10 * kiB},
		{"fast link, 1 MiB each 5 ms, is known after two windows", steady(0, 45*ms, 5*ms, 200*miB), 32 * miB, 32 * miB},
		{"but not after one", steady(0, 40*ms, 5*ms, 200*miB), 32 * miB, 1 * miB},
		{"and no faster than the ceiling", steady(0, 100*ms, 5*ms, 200*miB), 5 * miB, 5 * miB},
		{"four seconds' worth", steady(0, 2*s, 100*ms, 2*miB), 32 * miB, 8 * miB},
		{"slow link", steady(0, 9*s, 500*ms, 100*kiB), 32 * miB, 1 * miB},
		{"samples closer than a window are summed", steady(0, 1*s, 1*ms, 2*miB), 32 * miB, 8 * miB},
		{"burst of one window after a suspend",
			append(append(steady(0, 1*s, 100*ms, 1*miB), sample{20 * s, 1000}, sample{20*s + 20*ms, 4 * miB}),
				steady(20*s+20*ms, 21*s, 100*ms, 1*miB)...), 32 * miB, 4 * miB},
		{"pause of the application",
			append(steady(0, 1*s, 100*ms, 4*miB), sample{5 * s, 0}, sample{5*s + 50*ms, 0}), 32 * miB, 16 * miB},
		{"quiet stream for 4 s, sampled",
			append(steady(0, 1*s, 100*ms, 4*miB), steady(1*s, 5*s, 100*ms, 0)...), 32 * miB, 16 * miB},
		{"remembered for 5 s",
			slices.Concat(steady(0, 4*s, 100*ms, 1*miB), steady(4*s, 4900*ms, 100*ms, 8*miB), steady(4900*ms, 9900*ms, 100*ms, 1*miB)), 32 * miB, 32 * miB},
		{"in the next half too",
			slices.Concat(steady(0, 9*s, 100*ms, 1*miB), steady(9*s, 9900*ms, 100*ms, 8*miB), steady(9900*ms, 14900*ms, 100*ms, 1*miB)), 32 * miB, 32 * miB},
		{"slower link is believed after 10 s",
			append(steady(0, 1*s, 100*ms, 8*miB), steady(1*s, 11*s, 100*ms, 1*miB)...), 32 * miB, 4 * miB},
		{"sampled rarely too",
			append(steady(0, 1*s, 100*ms, 8*miB), steady(1*s, 13*s, 3*s, 1*miB)...), 32 * miB, 4 * miB},
		{"nothing is kept over a long pause",
			append(steady(0, 1*s, 100*ms, 8*miB), sample{60 * s, 0}), 32 * miB, 1 * miB},
		{"the clock stands still", []sample{{0, 0}, {0, miB}, {0, miB}}, 32 * miB, 1 * miB},
		{"a late sample with an earlier time is ignored",
			append(steady(0, 1*s, 100*ms, 2*miB), sample{500 * ms, 0}, sample{-5 * s, 9 * miB}), 32 * miB, 8 * miB},
		{"does not overflow", []sample{{0, 0}, {20 * ms, 1 << 60}, {40 * ms, 1 << 60}}, 32 * miB, 32 * miB},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var r linkRate
			total := uint64(12345)
			epoch := time.Unix(1000, 0)
			for _, sm := range tc.samples {
				total += sm.bytes
				r.sample(total, epoch.Add(sm.at))
			}
			// Samples are whole bytes, so a rate is not exact.
			if got := r.worth(budgetHorizon, budgetFloor, tc.ceiling); max(got-tc.want, tc.want-got) > kiB {
				t.Fatalf("worth %d, want %d", got, tc.want)
			}
		})
	}
	t.Run("a counter that was read earlier is ignored", func(t *testing.T) {
		var r linkRate
		epoch := time.Unix(1000, 0)
		for i := range uint64(11) {
			r.sample(i*2*miB, epoch.Add(time.Duration(i)*time.Second))
		}
		was := r
		r.sample(19*miB, epoch.Add(11*time.Second))
		if r != was {
			t.Fatalf("got %+v, want %+v", r, was)
		}
	})
}

// Parts of what arrives in the look-ahead go to those that would hold more than
// their equal one.
func TestUseful(t *testing.T) {
	all := joinFast(t, new(nats.Conn), 32*miB, 5)
	rate := all[0].b.rate.known() // 1 GiB/s
	const ahead = 10 * time.Millisecond
	total := int(rate * ahead.Seconds())
	for _, s := range all[:4] {
		s.claim(1, 1, false)
	}
	budgetWant(t, "alone", all[0].useful(64*miB, ahead), total)
	all[1].useful(64*miB, ahead)
	budgetWant(t, "one of two", all[0].useful(64*miB, ahead), total/2)
	all[2].useful(64*miB, ahead)
	all[3].useful(64*miB, ahead)
	budgetWant(t, "one of four", all[0].useful(64*miB, ahead), total/4)
	all[4].claim(1, 1, false)
	all[4].useful(64*miB, ahead)
	budgetWant(t, "each at least", all[0].useful(64*miB, time.Nanosecond), budgetUseful)
	all[4].leave()
	all[1].useful(100*kiB, ahead)
	budgetWant(t, "one of three, and one that wants little", all[0].useful(64*miB, ahead), total/3)
	all[2].claim(1, 1, true)
	budgetWant(t, "one of two, and one that is idle", all[0].useful(64*miB, ahead), total/2)
	all[3].leave()
	budgetWant(t, "the last one", all[0].useful(64*miB, ahead), total)
	budgetWant(t, "in more time", all[0].useful(64*miB, 2*ahead), 2*total)
	budgetWant(t, "at least", all[0].useful(64*miB, time.Nanosecond), budgetFloor)
	budgetHolds(t, all[0].b)

	s := joinBudget(new(nats.Conn))
	defer s.leave()
	budgetWant(t, "nothing known", s.useful(64*miB, ahead), 64*miB)
}

// It is a crowd when many want more than their part, not when many are there.
func TestCrowd(t *testing.T) {
	all := joinFast(t, new(nats.Conn), 32*miB, budgetCrowd+10)
	const ahead = 10 * time.Millisecond
	for _, s := range all {
		s.claim(1, 1, false)
	}
	for i, s := range all[:budgetCrowd] {
		if s.useful(64*miB, ahead); s.crowded() {
			t.Fatalf("%d want much, %d are there: no crowd", i+1, len(all))
		}
	}
	all[budgetCrowd].useful(64*miB, ahead)
	if !all[0].crowded() {
		t.Errorf("%d want much: a crowd", budgetCrowd+1)
	}
	all[3].useful(kiB, ahead)
	if all[0].crowded() {
		t.Error("one of them wants little now: no crowd")
	}
}

// What part says is what claim gives.
func TestPart(t *testing.T) {
	all := joinFast(t, new(nats.Conn), 32*miB, 1000)
	for _, s := range all {
		s.claim(1, 1, false)
	}
	s := all[7]
	s.giveBack(s.held())
	part := s.part()
	if want := budgetShare + (32*miB-1000*budgetShare)/1000; part != want {
		t.Errorf("part %d, want %d", part, want)
	}
	if got := s.claim(miB, 1, false); got != part {
		t.Errorf("claim gives %d, part says %d", got, part)
	}
}

// The least round trip of the last 15 to 30 s counts, of whichever loop.
func TestLeastTrip(t *testing.T) {
	const ms = time.Millisecond
	all := joinFast(t, new(nats.Conn), 32*miB, 2)
	at := time.Unix(2000, 0)
	want := func(loop int, after, d, want time.Duration) {
		t.Helper()
		at = at.Add(after)
		if got := all[loop].roundTrip(d, at); got != want {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	want(0, 0, 50*ms, 50*ms)
	for range 29 { // behind the data of the other
		want(1, time.Second/2, 3000*ms, 50*ms)
	}
	want(1, 15*time.Second, 2000*ms, 50*ms)
	want(1, 15*time.Second, 3000*ms, 2000*ms) // the link has become slow
	want(0, 0, 40*ms, 40*ms)
	want(0, time.Second, 0, 1) // a clock too coarse is still a measurement
}

func TestBudgetFollowsArrivals(t *testing.T) {
	nc := new(nats.Conn)
	a, b := joinBudget(nc), joinBudget(nc)
	defer a.leave()
	defer b.leave()
	budgetWant(t, "a starts with", a.claim(64*miB, 1, false), 1*miB-a.b.least)
	at, total := time.Unix(1000, 0), uint64(0)
	sample := func(s *share, n uint64) {
		at, total = at.Add(time.Second), total+n
		s.arrived(total, at)
		budgetHolds(t, a.b)
	}
	for range 3 { // by any loop: the link is one
		sample(a, 4*miB)
		sample(b, 4*miB)
	}
	budgetWant(t, "a and then", a.claim(64*miB, 1, false), 15*miB)
	for range 15 {
		sample(b, 1*miB)
	}
	// What is held stays held, and nothing beyond the minimum is granted.
	budgetWant(t, "size", a.b.size, 4*miB)
	budgetWant(t, "a holds", a.held(), 16*miB-a.b.least)
	budgetWant(t, "a more", a.claim(miB, 1, false), 0)
	budgetWant(t, "b", b.claim(miB, 1, false), budgetShare)
	a.giveBack(a.held() - 3*miB)
	budgetWant(t, "b more", b.claim(2*miB, 1, false), 1*miB-budgetShare)
	budgetHolds(t, a.b)
}

func TestSetByteBudget(t *testing.T) {
	nc := new(nats.Conn)
	s := joinFast(t, nc, 100*kiB, 1)[0] // before; and less than the 1 MiB a budget starts with
	budgetWant(t, "before", s.claim(64*miB, 1, false), 100*kiB)
	SetByteBudget(nc, 50*kiB)
	budgetWant(t, "smaller", s.claim(64*miB, 1, false), 0)
	budgetHolds(t, s.b)
	SetByteBudget(nc, 200*kiB)
	budgetWant(t, "larger", s.claim(64*miB, 1, false), 100*kiB)
	SetByteBudget(nc, 0)
	budgetWant(t, "default", s.claim(64*miB, 1, false), 32*miB-200*kiB)
	SetByteBudget(nc, 1)
	s.giveBack(s.held())
	budgetWant(t, "1 byte", s.claim(64*miB, 64*kiB, false), 1)
	budgetHolds(t, s.b)
	SetByteBudget(nc, -1)
	budgetWant(t, "restored", s.b.ceiling, budgetCeiling)
	s.leave()
	if hasBudget(weak.Make(nc)) {
		t.Fatal("nobody needs the entry, but it is there")
	}
	SetByteBudget(nc, 7*miB) // after
	s2 := joinBudget(nc)
	budgetWant(t, "ceiling", s2.b.ceiling, 7*miB)
	s2.leave()
	SetByteBudget(nc, 0)
}

func TestMinimumShare(t *testing.T) {
	nc := new(nats.Conn)
	all := joinFast(t, nc, 1*miB, 1)
	hog, b := all[0], all[0].b
	budgetWant(t, "alone", hog.claim(64*miB, 1, false), 1*miB)
	sum := hog.held()
	for i := range 200 {
		s := joinBudget(nc)
		defer s.leave()
		before := b.reserved
		budgetHolds(t, b)
		n := s.claim(64*miB, 64*kiB, i%2 == 0) // floor above the minimum: the minimum all the same
		budgetWant(t, "newcomer", n, min(16*kiB, 1*miB/2/(i+2)))
		budgetWant(t, "newcomer again", s.claim(64*miB, 1, false), 0)
		sum += n
		// The stated bound: one minimum share for each loop that joins.
		if b.reserved != before || b.reserved > 1*miB+(i+1)*16*kiB || sum > b.reserved {
			t.Fatalf("reserved %d, before the claim %d, sum %d", b.reserved, before, sum)
		}
	}
	// Above the size nothing beyond the minimum is granted; back under it the pool is.
	hog.giveBack(hog.held() - b.least)
	budgetHolds(t, b)
	budgetWant(t, "hog", hog.claim(64*miB, 1, false), 0)
	for _, s := range b.loops[1:] {
		s.giveBack(max(0, s.held()-b.least))
	}
	budgetHolds(t, b)
	budgetWant(t, "all at the minimum", b.reserved, 201*b.least)
	for _, s := range b.loops {
		s.claim(64*miB, 1, true)
	}
	budgetWant(t, "hog again, now that the others are idle", hog.claim(64*miB, 1, false), 1*miB-201*b.least)
	budgetWant(t, "all of it", b.reserved, 1*miB)
	budgetHolds(t, b)
}

func TestIdleTakesTheMinimum(t *testing.T) {
	all := joinFast(t, new(nats.Conn), 32*miB, 1000)
	sum := 0
	for _, s := range all {
		sum += s.claim(8*miB, 1*kiB, true)
	}
	budgetWant(t, "1000 idle loops", sum, 1000*16*kiB)
	budgetWant(t, "an active one", all[7].claim(64*miB, 1, false), 16*miB+384*kiB) // all but the others' minimum
	budgetHolds(t, all[0].b)
}

func TestFairShare(t *testing.T) {
	all := joinFast(t, new(nats.Conn), 1*miB, 4)
	b := all[0].b
	fair := func(active int) int { return b.least + (1*miB-4*b.least)/active }
	budgetWant(t, "alone", all[0].claim(64*miB, 1, false), fair(1))
	budgetWant(t, "second, nothing free", all[1].claim(64*miB, 1, false), 16*kiB)
	budgetWant(t, "first, above its part", all[0].claim(64*miB, 1, false), 0)
	all[0].giveBack(100 * kiB)
	budgetWant(t, "first, still above", all[0].claim(64*miB, 1, false), 0)
	budgetWant(t, "second", all[1].claim(64*miB, 1, false), 100*kiB)
	all[0].giveBack(all[0].held() - 30*kiB)
	budgetWant(t, "second, up to its part", all[1].claim(64*miB, 1, false), fair(2)-116*kiB)
	budgetWant(t, "first, up to its part", all[0].claim(64*miB, 1, false), fair(2)-30*kiB)
	budgetHolds(t, b)

	all[0].giveBack(all[0].held())
	budgetWant(t, "first parks", all[0].claim(64*miB, 1, true), 16*kiB)
	budgetWant(t, "second, alone again", all[1].claim(64*miB, 1, false), fair(1)-fair(2))
	all[1].leave()
	budgetWant(t, "third, after the second left", all[2].claim(64*miB, 1, false), 1*miB-2*b.least)
	budgetHolds(t, b)
}

func TestFloor(t *testing.T) {
	all := joinFast(t, new(nats.Conn), 1*miB, 2)
	a, c := all[0], all[1]
	budgetWant(t, "want below floor", a.claim(100, 64*kiB, false), 100)
	budgetWant(t, "more, and want below floor", a.claim(50, 64*kiB, false), 50)
	a.giveBack(50)
	budgetWant(t, "nothing wanted", a.claim(0, 64*kiB, false), 0)
	budgetWant(t, "less than nothing", a.claim(-1, 64*kiB, false), 0)
	a.claim(1*miB-16*kiB-32*kiB-100, 1, false)
	budgetWant(t, "a holds", a.held(), 1*miB-48*kiB)
	// 32 KiB are free, and the 16 KiB of c.
	budgetWant(t, "crumbs for one that holds nothing", c.claim(64*miB, 64*kiB, false), 16*kiB)
	budgetWant(t, "crumbs for one that holds something", c.claim(64*miB, 64*kiB, false), 0)
	budgetWant(t, "not less than floor", c.claim(64*miB, 32*kiB, false), 32*kiB)
	c.giveBack(40 * kiB)
	a.claim(64*miB, 1, false)
	budgetWant(t, "rest of the minimum below floor", c.claim(64*miB, 64*kiB, true), 0)
	budgetWant(t, "rest of the minimum", c.claim(64*miB, 8*kiB, true), 8*kiB)
	budgetHolds(t, a.b)
}

func TestLine(t *testing.T) {
	rings := func(s *share) bool {
		select {
		case <-s.doorbell():
			return true
		default:
			return false
		}
	}
	wantGrant := func(t *testing.T, s *share, n int) {
		t.Helper()
		if !rings(s) {
			t.Fatal("no ring")
		}
		budgetWant(t, "held", s.held(), n)
		if got, ok := s.granted(); got != n || !ok {
			t.Fatalf("granted: %d, %v, want %d", got, ok, n)
		}
		if got, ok := s.granted(); got != 0 || ok {
			t.Fatalf("granted twice: %d, %v", got, ok)
		}
		budgetHolds(t, s.b)
	}
	wantWait := func(t *testing.T, s *share) {
		t.Helper()
		if _, ok := s.granted(); ok || rings(s) || s.held() != 0 {
			t.Fatal("served")
		}
		budgetHolds(t, s.b)
	}
	setup := func(t *testing.T, n int) (*share, []*share) {
		all := joinFast(t, new(nats.Conn), 1*miB, n)
		all[0].claim(64*miB, 1, false)
		return all[0], all[1:]
	}

	t.Run("at once", func(t *testing.T) {
		_, q := setup(t, 4)
		q[0].b.loops[0].giveBack(500 * kiB)
		q[0].enqueue(300 * kiB)
		wantGrant(t, q[0], 300*kiB)
		q[0].giveBack(300 * kiB)
		q[0].enqueue(0) // one byte
		wantGrant(t, q[0], 1)
	})
	t.Run("first come, first served", func(t *testing.T) {
		hog, q := setup(t, 4)
		q[2].enqueue(300 * kiB)
		q[0].enqueue(100 * kiB)
		q[1].enqueue(500 * kiB)
		hog.giveBack(100 * kiB)
		wantWait(t, q[2])
		wantWait(t, q[0]) // it would fit, but is not the first
		hog.giveBack(300 * kiB)
		wantGrant(t, q[2], 300*kiB)
		wantGrant(t, q[0], 100*kiB)
		wantWait(t, q[1])
		q[2].giveBack(300 * kiB)
		wantWait(t, q[1])
		hog.giveBack(hog.held())
		wantGrant(t, q[1], 500*kiB)
	})
	t.Run("no claim passes it", func(t *testing.T) {
		hog, q := setup(t, 4)
		q[0].enqueue(500 * kiB)
		hog.giveBack(400 * kiB)
		budgetWant(t, "beyond the minimum", q[1].claim(100*kiB, 1, false), 16*kiB)
		budgetWant(t, "hog", hog.claim(100*kiB, 1, false), 0)
		wantWait(t, q[0])
		hog.giveBack(100 * kiB)
		wantGrant(t, q[0], 500*kiB)
		hog.giveBack(100 * kiB)
		budgetWant(t, "afterwards", q[1].claim(10*kiB, 1, false), 10*kiB)
	})
	t.Run("larger than the budget", func(t *testing.T) {
		hog, q := setup(t, 4)
		q[0].enqueue(5 * miB)
		budgetWant(t, "minimum", q[1].claim(64*miB, 1, true), 16*kiB)
		hog.giveBack(hog.held() - 16*kiB - 1)
		wantWait(t, q[0])
		hog.giveBack(1)
		wantGrant(t, q[0], 1*miB-3*16*kiB)
		q[2].enqueue(5 * miB)
		wantWait(t, q[2])
		q[0].leave()
		wantGrant(t, q[2], 1*miB-2*16*kiB)
	})
	t.Run("idle loops with old minimums", func(t *testing.T) {
		nc := new(nats.Conn)
		all := joinFast(t, nc, 1*miB, 32)
		for _, s := range all {
			s.claim(1*miB, 1, true)
		}
		for range 32 {
			s := joinBudget(nc)
			defer s.leave()
			all = append(all, s)
			s.claim(1*miB, 1, true)
		}
		last := all[63]
		last.giveBack(last.held())
		last.enqueue(5 * miB)
		for _, s := range all[:63] {
			wantWait(t, last)
			s.giveBack(s.held())
			s.claim(1*miB, 1, true)
		}
		wantGrant(t, last, 1*miB-63*8*kiB)
	})
	t.Run("counts as active", func(t *testing.T) {
		all := joinFast(t, new(nats.Conn), 1*miB, 2)
		all[0].enqueue(1) // never claimed before
		all[0].granted()
		budgetWant(t, "half", all[1].claim(64*miB, 1, false), 512*kiB)
	})
	t.Run("served when the budget grows", func(t *testing.T) {
		nc := new(nats.Conn)
		all := joinFast(t, nc, 1*miB, 2)
		all[0].claim(64*miB, 1, false)
		all[1].enqueue(500 * kiB)
		wantWait(t, all[1])
		SetByteBudget(nc, 2*miB)
		wantGrant(t, all[1], 500*kiB)
	})
	t.Run("leaveLine while waiting", func(t *testing.T) {
		hog, q := setup(t, 4)
		q[0].enqueue(700 * kiB)
		q[1].enqueue(100 * kiB)
		hog.giveBack(200 * kiB)
		wantWait(t, q[1])
		q[0].leaveLine()
		wantGrant(t, q[1], 100*kiB)
		q[1].leaveLine() // told already: the bytes stay
		budgetWant(t, "held", q[1].held(), 100*kiB)
		q[0].leaveLine()
		budgetWant(t, "claim", q[0].claim(1*miB, 1, false), 132*kiB) // the minimum and the rest
	})
	t.Run("leaveLine when served, unseen", func(t *testing.T) {
		hog, q := setup(t, 4)
		q[0].enqueue(700 * kiB)
		q[1].enqueue(700 * kiB)
		hog.giveBack(800 * kiB)
		wantWait(t, q[1])
		q[0].leaveLine()
		if rings(q[0]) || q[0].held() != 0 {
			t.Fatal("holds or rings")
		}
		wantGrant(t, q[1], 700*kiB)
	})
	t.Run("leave", func(t *testing.T) {
		hog, q := setup(t, 4)
		q[0].enqueue(700 * kiB)
		q[1].enqueue(700 * kiB)
		q[2].enqueue(700 * kiB)
		q[1].leave() // waiting
		hog.leave()  // holding
		budgetHolds(t, q[0].b)
		wantWait(t, q[2])
		q[0].leave() // served, unseen
		wantGrant(t, q[2], 700*kiB)
	})
	t.Run("misuse", func(t *testing.T) {
		hog, q := setup(t, 2)
		q[0].enqueue(700 * kiB)
		budgetPanics(t, "enqueue while holding", func() { hog.enqueue(1) })
		budgetPanics(t, "enqueue twice", func() { q[0].enqueue(1) })
		budgetPanics(t, "claim in line", func() { q[0].claim(1, 1, true) })
		budgetPanics(t, "too much back", func() { hog.giveBack(hog.held() + 1) })
		budgetPanics(t, "negative", func() { hog.giveBack(-1) })
		budgetHolds(t, hog.b)
		hog.leave()
		budgetPanics(t, "enqueue after leave", func() { hog.enqueue(1) })
		budgetPanics(t, "claim after leave", func() { hog.claim(1, 1, true) })
		hog.giveBack(0)
		budgetWant(t, "held after leave", hog.held(), 0)
		budgetHolds(t, hog.b)
	})
}

func TestLeaveRestoresEverything(t *testing.T) {
	all := joinFast(t, new(nats.Conn), 1*miB, 3)
	b := all[0].b
	all[0].claim(200*kiB, 1, false)
	all[1].claim(200*kiB, 1, true)
	snapshot := func() string {
		return fmt.Sprint(b.size, b.least, b.reserved, b.joined, b.active, len(b.loops), len(b.line), b.rate)
	}
	was := snapshot()
	key := b.key
	func() {
		defer func() { _ = recover() }()
		s := joinBudget(key.Value())
		defer s.leave()
		s.claim(300*kiB, 1, false)
		panic("body")
	}()
	func() {
		s := joinBudget(key.Value())
		defer s.leave()
		s.enqueue(5 * miB)
	}()
	if now := snapshot(); now != was {
		t.Fatalf("got %s, want %s", now, was)
	}
	budgetHolds(t, b)
}

func TestLoopsAndOrdinals(t *testing.T) {
	nc := new(nats.Conn)
	a, b, c := joinBudget(nc), joinBudget(nc), joinBudget(nc)
	budgetWant(t, "loops", a.loops(), 3)
	budgetWant(t, "c", c.ordinal(), 2)
	a.leave()
	a.leave()
	budgetWant(t, "loops", b.loops(), 2)
	d, e := joinBudget(nc), joinBudget(nc)
	budgetWant(t, "d, in the place of a", d.ordinal(), 0)
	budgetWant(t, "e", e.ordinal(), 3)
	budgetWant(t, "b", b.ordinal(), 1)
	budgetHolds(t, b.b)
	other := joinBudget(new(nats.Conn))
	budgetWant(t, "another connection", other.ordinal(), 0)
	for _, s := range []*share{b, c, d, e, other} {
		s.leave()
	}
	budgetWant(t, "loops", b.loops(), 0)
}

// budgetCollected runs the collector until done. The rounds are a bound, not a wait: a
// cleanup runs on the runtime's own goroutine some time after the cycle.
func budgetCollected(done func() bool) bool {
	for range 1000 {
		runtime.GC()
		if done() {
			return true
		}
	}
	return false
}

func TestRegistry(t *testing.T) {
	t.Run("with the last loop", func(t *testing.T) {
		nc := new(nats.Conn)
		key := weak.Make(nc)
		a, b := joinBudget(nc), joinBudget(nc)
		if a.b != b.b {
			t.Fatal("two budgets")
		}
		a.leave()
		if !hasBudget(key) {
			t.Fatal("gone too early")
		}
		b.leave()
		if hasBudget(key) {
			t.Fatal("still there")
		}
		c := joinBudget(nc)
		a.leave() // long gone: must not take the new entry along
		if c.b == a.b || !hasBudget(key) {
			t.Fatal("not a new entry")
		}
		c.leave()
	})
	t.Run("pinned", func(t *testing.T) {
		nc := new(nats.Conn)
		key := weak.Make(nc)
		SetByteBudget(nc, 3*miB)
		SetByteBudget(nc, 2*miB)
		s := joinBudget(nc)
		s.leave()
		if !hasBudget(key) || budgets.of[key].ceiling != 2*miB || budgets.of[key] != s.b {
			t.Fatal("forgot SetByteBudget")
		}
		SetByteBudget(nc, 0)
		if hasBudget(key) {
			t.Fatal("still there")
		}
		SetByteBudget(nc, 2*miB) // with a cleanup of its own
		if !hasBudget(key) {
			t.Fatal("not there")
		}
		nc = nil
		if !budgetCollected(func() bool { return !hasBudget(key) }) {
			t.Fatal("the entry outlives its connection")
		}
	})
	t.Run("learns anew", func(t *testing.T) {
		s := joinFast(t, new(nats.Conn), 2*miB, 1)[0]
		s.leave()
		budgetWant(t, "size", s.b.size, 1*miB)
	})
	t.Run("restoring the default stops the cleanup", func(t *testing.T) {
		nc := new(nats.Conn)
		key := weak.Make(nc)
		SetByteBudget(nc, 2*miB)
		SetByteBudget(nc, 0)
		s := joinBudget(nc)
		nc = nil
		if !budgetCollected(func() bool { return key.Value() == nil }) {
			t.Fatal("a loop's membership keeps the connection alive")
		}
		runtime.GC()
		if !hasBudget(key) {
			t.Fatal("the cleanup ran")
		}
		s.leave()
		if hasBudget(key) {
			t.Fatal("still there")
		}
	})
}

// 20 equal loops and one that comes later. A round is a round trip: every loop hands
// to its body what it holds, in an order that differs, and claims again.
func TestFairnessOverTime(t *testing.T) {
	nc := new(nats.Conn)
	all := joinFast(t, nc, 8*miB, 20)
	b := all[0].b
	rnd := rand.New(rand.NewPCG(1, 2))
	var handed [21]int
	round := func() {
		for _, i := range rnd.Perm(len(all)) {
			s := all[i]
			n := s.held() * 3 / 4
			s.giveBack(n)
			handed[i] += n
			s.claim(8*miB, 1*kiB, false)
			budgetHolds(t, b)
		}
	}
	spread := func(of []int) float64 { return float64(slices.Max(of)) / float64(slices.Min(of)) }
	for range 500 {
		round()
	}
	if s := spread(handed[:20]); s > 1.05 {
		t.Errorf("20 equal loops: %.3f between most and least: %v", s, handed)
	}
	newcomer := joinBudget(nc)
	defer newcomer.leave()
	all = append(all, newcomer)
	newcomer.claim(8*miB, 1*kiB, false)
	for range 3 {
		round()
	}
	if fair := b.least + b.pool()/21; newcomer.held() < fair {
		t.Errorf("newcomer holds %d after 3 rounds, fair is %d", newcomer.held(), fair)
	}
	handed = [21]int{}
	for range 500 {
		round()
	}
	if s := spread(handed[:]); s > 1.05 {
		t.Errorf("with a newcomer: %.3f between most and least: %v", s, handed)
	}
	// Work-conserving: nothing of the pool is left unused.
	if b.size-b.reserved > 21 {
		t.Errorf("%d unused", b.size-b.reserved)
	}
}

// 1000 loops on 1 MiB with messages of 64 KiB, which no fair share holds.
func TestThousandLoopsThroughTheLine(t *testing.T) {
	const loops, each, size = 1000, 3, 64 * kiB
	all := joinFast(t, new(nats.Conn), 1*miB, loops)
	b := all[0].b
	rnd := rand.New(rand.NewPCG(3, 4))
	done := make([]int, loops)
	atOnce := 0
	left := loops * each
	for steps := 0; left > 0; steps++ {
		if steps > 1000*loops*each {
			t.Fatalf("%d messages left after %d steps; %d in line", left, steps, len(b.line))
		}
		i := rnd.IntN(loops)
		s := all[i]
		switch {
		case s.place == placeWaiting:
		case s.place == placeServed:
			s.granted()
		case s.held() >= size: // the body has handled it
			s.giveBack(s.held())
			done[i]++
			left--
		case done[i] == each:
			s.giveBack(s.held())
			s.claim(64*kiB, size, true) // parks
		case s.claim(size, size, false) < size:
			s.giveBack(s.held())
			s.enqueue(size)
		}
		if steps%1000 == 0 {
			budgetHolds(t, b)
		}
		atOnce = max(atOnce, b.reserved-loops*b.least)
		if b.reserved > b.size {
			t.Fatalf("reserved %d", b.reserved)
		}
	}
	budgetHolds(t, b)
	if atOnce < b.pool()-size { // the line keeps the pool busy
		t.Errorf("at most %d of the pool of %d were in use", atOnce, b.pool())
	}
}

// Random interleavings, invariants after each step.
func TestBudgetProperty(t *testing.T) {
	seeds := 400
	if testing.Short() {
		seeds = 40
	}
	for seed := range uint64(seeds) {
		if err := budgetProperty(seed); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func budgetProperty(seed uint64) error {
	rnd := rand.New(rand.NewPCG(seed, 99))
	nc := new(nats.Conn)
	key := weak.Make(nc)
	defer runtime.KeepAlive(nc)

	var (
		all    []*share
		held   = map[*share]int{} // what each loop believes, from what the calls returned
		line   []*share           // the order of enqueue
		now    = time.Unix(1000, 0)
		total  uint64
		pinned bool
		most   = 1 + rnd.IntN(80)
		// Now and then a ceiling so small that there is less than a byte for each.
		amount = func() int { return 1 << rnd.IntN(24) }
	)
	join := func() { all = append(all, joinBudget(nc)) }
	join()
	for step := range 400 {
		b := all[0].b
		before, size, least, n := b.reserved, b.size, b.least, b.joined
		s := all[rnd.IntN(len(all))]
		waits := slices.Contains(line, s)
		var what string
		allowed := before // besides size
		switch op := rnd.IntN(100); {
		case op < 8 && len(all) < most:
			what = "join"
			join()
			allowed += b.least
		case op < 12 && len(all) > 1:
			what = "leave"
			s.leave()
			if rnd.IntN(4) == 0 {
				s.leave()
			}
			all = slices.DeleteFunc(all, func(o *share) bool { return o == s })
			line = slices.DeleteFunc(line, func(o *share) bool { return o == s })
			delete(held, s)
			allowed += n
		case op < 20:
			what = "arrived"
			d := time.Duration(rnd.IntN(1<<rnd.IntN(14))) * time.Millisecond
			now, total = now.Add(d), total+uint64(float64(amount())*d.Seconds())
			s.arrived(total, now)
			allowed += max(0, b.size-size)/2 + n
		case op < 23:
			what = "SetByteBudget"
			if c := rnd.IntN(3); c == 0 {
				SetByteBudget(nc, 0)
				pinned = false
			} else {
				SetByteBudget(nc, amount())
				pinned = true
			}
			allowed += max(0, b.size-size)/2 + n
		case waits && op < 30:
			what = "leaveLine"
			s.leaveLine()
			line = slices.DeleteFunc(line, func(o *share) bool { return o == s })
			if s.held() != 0 {
				return fmt.Errorf("step %d: holds %d after leaveLine", step, s.held())
			}
		case waits:
			what = "granted"
			isServed := s.place == placeServed
			need := s.need
			got, ok := s.granted()
			if ok != isServed || ok && (got != s.held() || got < 1 || got > need) || !ok && got != 0 {
				return fmt.Errorf("step %d: granted %d, %v of %d, served %v", step, got, ok, need, isServed)
			}
			if ok {
				held[s] = got
				line = slices.DeleteFunc(line, func(o *share) bool { return o == s })
			}
		case op < 60:
			what = "claim"
			want, floor, idle := amount(), amount(), rnd.IntN(3) == 0
			got := s.claim(want, floor, idle)
			switch {
			case got < 0 || got > want,
				got == 0 && held[s] == 0,
				got < min(floor, want) && got > 0 && held[s] > 0,
				got > max(0, least-held[s]) && (idle || len(b.line) > 0 || held[s]+got > least+b.pool()/b.active):
				return fmt.Errorf("step %d: claim(%d, %d, %v) with %d held gives %d", step, want, floor, idle, held[s], got)
			}
			held[s] += got
		case op < 85:
			what = "giveBack"
			n := rnd.IntN(held[s] + 1)
			if rnd.IntN(2) == 0 {
				n = held[s]
			}
			s.giveBack(n)
			held[s] -= n
		case held[s] == 0:
			what = "enqueue"
			s.enqueue(amount())
			line = append(line, s)
		}
		if err := checkBudget(b); err != nil {
			return fmt.Errorf("step %d, %s: %w", step, what, err)
		}
		if b.reserved > max(b.size, allowed, b.joined) {
			return fmt.Errorf("step %d, %s: reserved %d, before %d, size %d, before %d", step, what, b.reserved, before, b.size, size)
		}
		seenWaiting := false
		for _, o := range line { // served is a prefix of the line
			if o.place == placeServed && seenWaiting {
				return fmt.Errorf("step %d, %s: served out of turn", step, what)
			}
			seenWaiting = seenWaiting || o.place == placeWaiting
		}
		for _, o := range all {
			if (o.place == placeServed) != (len(o.bell) == 1) { // nobody listens here
				return fmt.Errorf("step %d, %s: place %d, bell %d", step, what, o.place, len(o.bell))
			}
			if !slices.Contains(line, o) && o.held() != held[o] {
				return fmt.Errorf("step %d, %s: holds %d, believes %d", step, what, o.held(), held[o])
			}
		}
	}

	// When everybody gives back, the line is served, a place or more each time.
	b := all[0].b
	for len(line) > 0 {
		was := len(line)
		for _, s := range all {
			if !slices.Contains(line, s) {
				s.giveBack(s.held())
			}
		}
		for _, s := range slices.Clone(line) {
			if _, ok := s.granted(); ok {
				line = slices.DeleteFunc(line, func(o *share) bool { return o == s })
			}
		}
		if len(line) == was {
			return fmt.Errorf("the line of %d is stuck", was)
		}
	}
	rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, s := range all {
		s.leave()
		if err := checkBudget(b); err != nil {
			return fmt.Errorf("leave: %w", err)
		}
	}
	if b.reserved != 0 || b.joined != 0 || b.active != 0 || len(b.loops) != 0 || len(b.line) != 0 {
		return fmt.Errorf("after all left: %+v", b)
	}
	if hasBudget(key) != pinned {
		return fmt.Errorf("entry there: %v, pinned: %v", !pinned, pinned)
	}
	SetByteBudget(nc, 0)
	return nil
}

func TestBudgetConcurrently(t *testing.T) {
	nc := new(nats.Conn)
	SetByteBudget(nc, 2*miB)
	pin := joinBudget(nc) // keeps the budget the same
	const loops, rounds, size = 40, 200, 100 * kiB
	var wg sync.WaitGroup
	stop := make(chan struct{})
	errs := make(chan error, loops+1)
	for i := range uint64(loops) {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(i, 5))
			s := joinBudget(nc)
			defer func() { s.leave() }()
			for round := range uint64(rounds) {
				s.arrived(round<<20, time.Unix(1000, int64(round)*1e7))
				if s.ordinal() > s.loops()+loops {
					errs <- fmt.Errorf("ordinal %d", s.ordinal())
					return
				}
				if s.claim(rnd.IntN(8*size), size, rnd.IntN(4) == 0) == 0 && s.held() == 0 {
					continue
				}
				if s.held() < size {
					s.giveBack(s.held())
					s.enqueue(size)
					if rnd.IntN(5) == 0 {
						s.leaveLine()
						continue
					}
					select {
					case <-s.doorbell():
					case <-time.After(time.Minute):
						errs <- fmt.Errorf("loop %d: not served within a minute", i)
						return
					}
					if n, ok := s.granted(); !ok || n != size {
						errs <- fmt.Errorf("granted %d, %v", n, ok)
						return
					}
				}
				s.giveBack(rnd.IntN(s.held() + 1))
				switch rnd.IntN(10) {
				case 0:
					s.leave()
					s = joinBudget(nc)
				case 1:
					SetByteBudget(nc, 2*miB+rnd.IntN(miB))
				default:
					s.giveBack(s.held())
				}
			}
		})
	}
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for {
			if err := checkBudget(pin.b); err != nil {
				errs <- err
				return
			}
			select {
			case <-stop:
				return
			default:
				runtime.Gosched()
			}
		}
	}()
	wg.Wait()
	close(stop)
	<-watched
	select {
	case err := <-errs:
		t.Fatal(err)
	default:
	}
	budgetHolds(t, pin.b)
	budgetWant(t, "reserved", pin.b.reserved, pin.b.least)
	pin.leave()
	SetByteBudget(nc, 0)
	if hasBudget(weak.Make(nc)) {
		t.Fatal("still there")
	}
}

// In bubbles one after the other, and while a budget outside exists: no channel is
// shared between them, and a loop that waits at the doorbell is durably blocked.
func TestBudgetInBubbles(t *testing.T) {
	outside := joinFast(t, new(nats.Conn), 1*miB, 2)
	outside[0].claim(64*miB, 1, false)
	outside[1].enqueue(500 * kiB)
	for range 2 {
		synctest.Test(t, func(t *testing.T) {
			nc := new(nats.Conn)
			holder := joinBudget(nc)
			holder.claim(64*miB, 1, false)
			start := time.Now()
			var order []string
			var mu sync.Mutex
			var wg sync.WaitGroup
			for i, need := range []int{700 * kiB, 600 * kiB} {
				time.Sleep(time.Second) // the bubble's clock: the order of the line
				wg.Go(func() {
					s := joinBudget(nc)
					defer s.leave()
					s.enqueue(need)
					<-s.doorbell()
					n, ok := s.granted()
					mu.Lock()
					order = append(order, fmt.Sprintf("%d at %v: %d %v", i, time.Since(start), n/kiB, ok))
					mu.Unlock()
					time.Sleep(5 * time.Second)
				})
			}
			time.Sleep(8 * time.Second)
			holder.leave()
			wg.Wait()
			want := []string{"0 at 10s: 700 true", "1 at 15s: 600 true"}
			if !slices.Equal(order, want) {
				t.Errorf("got %q, want %q", order, want)
			}
		})
	}
	outside[0].giveBack(500 * kiB)
	if n, ok := outside[1].granted(); !ok || n != 500*kiB {
		t.Fatal("outside", n, ok)
	}
}
