package paced

import (
	"runtime"
	"slices"
	"sync"
	"time"
	"weak"

	"github.com/nats-io/nats.go"
)

const (
	// Half of the server's max_pending (nats-server v2.15.2 server/const.go:102).
	// The other half is for what the budget does not see: core subscriptions,
	// replies and protocol lines on the same connection.
	budgetCeiling = 32 << 20

	// The budget of a connection nothing is known about. A link that needs more
	// than 10 s for this much is cut by the server whoever asks for it.
	budgetFloor = 1 << 20

	// The server cuts a client whose write takes 10 s (server/const.go:132,
	// server/client.go:2060). Less than half of that, because the rate is
	// known only afterwards.
	budgetHorizon = 4 * time.Second

	// What a loop may hold whatever the others hold: enough for an idle loop to
	// receive typical messages without a round of claiming first.
	budgetShare = 16 << 10

	// What it always makes sense to hold.
	budgetUseful = 256 << 10

	// With more loops than this that would hold more than their part, the pause
	// that one makes is filled by the others.
	budgetCrowd = 64

	rateWindow = 20 * time.Millisecond
	rateBytes  = 256 << 10
	rateQuiet  = time.Second // a window closes then, whatever has arrived
	rateMemory = 10 * time.Second
	tripMemory = 30 * time.Second
)

// budgets holds the only mutable state of the package. The key is weak so that an
// entry does not keep its connection alive, and nothing inside a budget refers
// to the connection. (A strong map with an entry removed on CLOSED would do for
// loops, but a SetByteBudget without a loop has nobody to watch for CLOSED.)
//
// Lock order: budgets.mu, then budget.mu.
var budgets = struct {
	mu sync.Mutex
	of map[weak.Pointer[nats.Conn]]*budget
}{of: map[weak.Pointer[nats.Conn]]*budget{}}

// budget is the number of bytes that all loops of one connection may have asked
// for and not yet handed to a body. The server buffers what the client does not
// take, and cuts the connection when that is too much or takes too long; loops that
// know only their own bound cannot prevent this, hence one budget for all of them.
//
// The sum of what the loops hold never exceeds size, with these exceptions:
//
//   - A loop that joins may take its minimum share (least) at once, on top.
//   - What is held already when size shrinks stays held: asked for is asked for.
//   - Dividing least in whole bytes may add one byte for each loop.
//   - A message larger than what the line can grant counts as the grant only.
//
// The proof is in reserved, the sum of max(held, least) over all loops, which what
// they hold cannot exceed: a grant within the minimum does not change it, and one
// beyond the minimum is made only where it stays within size. Where one of the
// exceptions put it above size, only minimum shares are granted until it is back.
type budget struct {
	key weak.Pointer[nats.Conn]

	// Held for a few additions, or for a walk along the line or (join, leave,
	// change of size) along the loops; no call in it blocks.
	mu sync.Mutex

	ceiling int
	pinned  bool            // a SetByteBudget needs the entry
	cleanup runtime.Cleanup // of that SetByteBudget

	rate     linkRate
	trips    leastTrip
	size     int
	least    int // the minimum share of each loop
	reserved int

	loops  []*share // by ordinal; nil is free
	joined int
	active int      // loops whose last claim was not idle, or that stand in line
	hungry int      // the active ones that would hold more than their equal part
	line   []*share // first come, first served
}

// share is one loop's membership in its connection's budget. Its methods are
// called by that loop's goroutine only; other loops reach it through the line.
type share struct {
	b     *budget
	index int
	bell  chan struct{}

	// All guarded by b.mu.
	bytes  int
	active bool
	hungry bool
	place  linePlace
	need   int
	left   bool
}

type linePlace int

const (
	placeNone linePlace = iota
	placeWaiting
	placeServed // and not yet told so by granted
)

// SetByteBudget sets the ceiling of the byte budget that all loops on nc share: the
// most they may have asked for and not yet handed to their bodies, all together. The
// default is 32 MiB; n <= 0 restores it. The budget in force follows the
// measured arrival rate (4 seconds' worth, 1 MiB to start with and at least) and
// never exceeds n, however small n is. A message larger than the budget is
// still delivered, alone.
//
// The server disconnects a client for which more than its max_pending (64 MiB by
// default) is waiting, and everything else the connection subscribes to counts
// there too, so choose n well below it.
//
// It may be called at any time, also while loops run: they follow as they give
// back what they hold. It does not keep nc alive.
func SetByteBudget(nc *nats.Conn, n int) {
	budgets.mu.Lock()
	defer budgets.mu.Unlock()
	b := budgetOf(nc)
	b.mu.Lock()
	defer b.mu.Unlock()

	if n > 0 {
		b.ceiling = n
	} else {
		b.ceiling = budgetCeiling
	}
	if pin := n > 0; pin != b.pinned {
		b.pinned = pin
		if pin {
			b.cleanup = runtime.AddCleanup(nc, forgetBudget, b.key)
		} else {
			b.cleanup.Stop() // else one more piles up on nc each time
		}
	}
	b.refit()
	b.forgetIfUnneeded()
}

// budgetOf is called with budgets.mu held.
func budgetOf(nc *nats.Conn) *budget {
	key := weak.Make(nc)
	b := budgets.of[key]
	if b == nil {
		b = &budget{key: key, ceiling: budgetCeiling}
		budgets.of[key] = b
	}
	return b
}

func forgetBudget(key weak.Pointer[nats.Conn]) {
	budgets.mu.Lock()
	defer budgets.mu.Unlock()
	delete(budgets.of, key)
}

// forgetIfUnneeded is called with both locks held.
func (b *budget) forgetIfUnneeded() {
	if b.joined == 0 && !b.pinned {
		delete(budgets.of, b.key)
	}
}

// joinBudget adds a loop to nc's budget. leave must be called however the loop ends.
func joinBudget(nc *nats.Conn) *share {
	budgets.mu.Lock()
	defer budgets.mu.Unlock()
	b := budgetOf(nc)
	b.mu.Lock()
	defer b.mu.Unlock()

	// The channel is made here, by the loop's own goroutine, and only shares of the
	// same budget ring it: a synctest bubble allows no other goroutine to touch it.
	s := &share{b: b, bell: make(chan struct{}, 1)}
	s.index = slices.Index(b.loops, nil)
	if s.index < 0 {
		s.index = len(b.loops)
		b.loops = append(b.loops, nil)
	}
	b.loops[s.index] = s
	b.joined++
	b.refit()
	return s
}

// leave gives back everything, the place in line too. Calling it again does nothing.
func (s *share) leave() {
	budgets.mu.Lock() // the entry may go, and nobody may join it meanwhile
	defer budgets.mu.Unlock()
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.left {
		return
	}
	s.left = true
	s.bytes = 0 // refit counts anew
	s.setActive(false)
	b.unqueue(s)

	b.loops[s.index] = nil
	for n := len(b.loops); n > 0 && b.loops[n-1] == nil; n-- {
		b.loops = b.loops[:n-1]
	}
	b.joined--
	if b.joined == 0 {
		// A pinned entry outlives its loops, but what they learned is old when
		// the next one comes, and learned again in two windows.
		b.rate, b.trips = linkRate{}, leastTrip{}
	}
	b.refit()
	b.forgetIfUnneeded()
}

// claim takes up to want bytes, without waiting, and returns how many; they add to
// what the loop holds. idle says that the loop parks and expects nothing, so that the
// minimum is enough. floor is the least that is useful (the largest recent message):
// where less is free, a loop that holds something gets 0, because pulls for crumbs
// cost as much as others, and one that holds nothing gets its minimum share, so
// that it is never without a pull.
//
// Beyond the minimum a loop may hold its part of the pool among the active loops.
// A plain "whatever is free" would let those already running keep everything:
// each gives back and claims again before a newcomer's turn.
//
// While somebody stands in line nothing beyond the minimum is granted: all that
// is given back piles up for the head of the line. Letting small claims pass
// would use the bytes better and starve large messages.
func (s *share) claim(want, floor int, idle bool) int {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.left || s.place != placeNone {
		panic("paced: bug: claim by a loop that waits in line or has left")
	}
	s.setActive(!idle)

	want = max(want, 0)
	floor = min(floor, want)
	n := min(want, max(b.least-s.bytes, 0))
	if !idle && len(b.line) == 0 {
		fair := b.least + b.pool()/b.active - s.bytes
		free := max(b.least-s.bytes, 0) + max(b.size-b.reserved, 0)
		if more := min(want, fair, free); more >= floor {
			n = max(n, more)
		}
	}
	if n < floor && s.bytes > 0 {
		return 0
	}
	b.hold(s, s.bytes+n)
	return n
}

// giveBack returns n of the bytes held.
func (s *share) giveBack(n int) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if n < 0 || n > s.bytes {
		// Clamping would hide that the engine counts wrongly, and bytes given
		// back twice are bytes the server is asked for on top of the budget.
		panic("paced: bug: gives back more bytes than it holds")
	}
	b.hold(s, s.bytes-n)
	b.serve()
}

func (s *share) held() int {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.bytes
}

// loops is the number of loops on the connection.
func (s *share) loops() int {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.b.joined
}

// ordinal is the lowest number no other loop of the connection had when this one
// joined; it stays.
func (s *share) ordinal() int { return s.index }

// enqueue waits in line for need bytes in full, for a message larger than what claim
// grants. The loop must hold nothing: two loops that each hold half of the budget and
// wait for the rest would wait forever.
//
// need is cut to what is there when all others are down to their minimum, at the
// time of the grant. granted then returns less than need, and the message may be
// asked for all the same: it comes alone.
func (s *share) enqueue(need int) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.left || s.place != placeNone || s.bytes != 0 {
		panic("paced: bug: waits in line while it holds bytes, waits already or has left")
	}
	s.setActive(true)
	s.place, s.need = placeWaiting, max(need, 1)
	b.line = append(b.line, s)
	b.serve()
}

// granted reports, once, that the place in line was served, and the bytes now held.
func (s *share) granted() (int, bool) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.place != placeServed {
		return 0, false
	}
	s.place = placeNone
	s.hush()
	return s.bytes, true
}

// doorbell rings when the place in line was served. It is empty again after granted
// and leaveLine, so a ring is never about an earlier place.
func (s *share) doorbell() <-chan struct{} { return s.bell }

// leaveLine gives up the place in line, and what it was served unless granted has
// said so already: from then on the bytes are the loop's own to give back.
func (s *share) leaveLine() {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.place == placeServed {
		b.hold(s, 0)
	}
	b.unqueue(s)
	b.serve()
}

// arrived adds a sample of the connection's arrival rate: total is
// nc.Stats().InBytes. Whatever else the connection receives counts too, rightly:
// it shows what the link can carry.
func (s *share) arrived(total uint64, now time.Time) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rate.sample(total, now)
	if b.rate.worth(budgetHorizon, budgetFloor, b.ceiling) != b.size {
		b.refit()
	}
}

// useful is how many bytes it makes sense for the loop to hold when it would hold
// want: what arrives on the connection within its look-ahead, divided among the
// loops that would hold more than their equal part. What is asked for beyond that
// waits, on the server and here, and makes nothing faster. Equal parts, not what
// each loop is seen to get through: readers of the same stream stay side by side,
// and the server reads each of its blocks once for all of them.
func (s *share) useful(want int, lookAhead time.Duration) int {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rate.known() == 0 {
		return want
	}
	n := b.rate.worth(lookAhead, budgetFloor, b.ceiling)
	s.setHungry(want > n/max(b.active, 1))
	return max(n/max(b.hungry, 1), budgetUseful)
}

// crowded reports whether so many loops would hold more than their part that one
// pull at a time is enough for each.
func (s *share) crowded() bool {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.b.hungry > budgetCrowd
}

// part is the most that claim may grant: the minimum share and what the loop
// gets of the pool among the active ones.
func (s *share) part() int {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.b.least + s.b.pool()/max(s.b.active, 1)
}

// roundTrip adds a measured round trip and returns the one to go by, which is
// that of the connection: what one loop measures is mostly the data of the
// others.
func (s *share) roundTrip(d time.Duration, now time.Time) time.Duration {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.b.trips.add(d, now)
}

// All below are called with b.mu held.

// refit follows a change of the size or the number of loops.
func (b *budget) refit() {
	b.size = b.rate.worth(budgetHorizon, budgetFloor, b.ceiling)
	// Half of the budget at most is set aside for minimum shares. All of it
	// would leave no pool once there are enough idle loops (64 on 1 MiB), and
	// the line could not move while they are parked.
	b.least = max(1, min(budgetShare, b.size/(2*max(1, b.joined))))
	b.reserved = 0
	for _, s := range b.loops {
		if s != nil {
			b.reserved += max(s.bytes, b.least)
		}
	}
	b.serve()
}

// pool is what there is to divide beyond the minimum shares.
func (b *budget) pool() int { return max(0, b.size-b.joined*b.least) }

func (b *budget) hold(s *share, n int) {
	b.reserved += max(n, b.least) - max(s.bytes, b.least)
	s.bytes = n
}

// serve grants the head of the line as long as it fits. Only the head: passing it
// over for a smaller one behind it is how large messages starve.
func (b *budget) serve() {
	for len(b.line) > 0 {
		s := b.line[0]
		n := min(s.need, b.least+b.pool())
		if n > b.least && n-b.least > b.size-b.reserved {
			return
		}
		b.line = slices.Delete(b.line, 0, 1)
		b.hold(s, n)
		s.place = placeServed
		select {
		case s.bell <- struct{}{}:
		default: // cannot be full, but must not block in any case
		}
	}
}

func (b *budget) unqueue(s *share) {
	if s.place == placeWaiting {
		b.line = slices.DeleteFunc(b.line, func(o *share) bool { return o == s })
	}
	s.place = placeNone
	s.hush()
}

func (s *share) setActive(active bool) {
	if active == s.active {
		return
	}
	s.active = active
	if active {
		s.b.active++
	} else {
		s.b.active--
		s.setHungry(false)
	}
}

func (s *share) setHungry(hungry bool) {
	if hungry == s.hungry {
		return
	}
	s.hungry = hungry
	if hungry {
		s.b.hungry++
	} else {
		s.b.hungry--
	}
}

func (s *share) hush() {
	select {
	case <-s.bell:
	default:
	}
}

// linkRate measures how fast bytes arrive, from samples (bytes so far, time). It
// keeps the best rate of the last 5 to 10 s (two halves of rateMemory, the older
// one dropped as a whole): low rates are mostly the application's pauses or a quiet
// stream and must not count, but a link that has become slow must be believed before
// the server's 10 s are over many times. For the same reason nothing older counts, not
// even across a pause: finding out again takes two windows.
//
// A window is open until enough has arrived to tell a rate: over the shortest one a
// slow link that delivers in lumps would look several times as fast.
//
// A rate counts when two windows in a row show it. After a pause of the process (CPU
// quota, suspend) the kernel's receive buffer is read at memory speed, which looks
// like a fast link for one window.
type linkRate struct {
	start time.Time // of the open window
	total uint64

	last float64 // the window before, bytes per second

	best, bestBefore float64
	half             time.Time // start of the half that best is of
}

func (r *linkRate) sample(total uint64, now time.Time) {
	if r.start.IsZero() {
		r.start, r.total, r.half = now, total, now
		return
	}
	// Loops read the counter and the clock before they get here, so a sample can be
	// older than the one before it.
	took := now.Sub(r.start)
	if took < rateWindow || total < r.total || (total-r.total < rateBytes && took < rateQuiet) {
		return
	}
	rate := float64(total-r.total) / took.Seconds()
	r.start, r.total = now, total

	switch age := now.Sub(r.half); {
	case age >= rateMemory:
		r.best, r.bestBefore, r.half = 0, 0, now
	case age >= rateMemory/2:
		r.best, r.bestBefore, r.half = 0, r.best, now
	}
	r.best = max(r.best, min(rate, r.last))
	r.last = rate
}

func (r *linkRate) known() float64 { return max(r.best, r.bestBefore) }

// worth is how many bytes arrive in a time at this rate, between floor and
// ceiling.
func (r *linkRate) worth(d time.Duration, floor, ceiling int) int {
	n := r.known() * d.Seconds()
	if n >= float64(ceiling) { // also: n may not fit an int
		return ceiling
	}
	return min(max(int(n), floor), ceiling)
}

// leastTrip keeps the least of the last 15 to 30 s (two halves of tripMemory, the
// older one dropped as a whole). Any other value includes the time that an
// answer stood behind data that was asked for: the look-ahead would feed itself.
type leastTrip struct {
	least, leastBefore time.Duration
	half               time.Time // start of the half that least is of
}

func (t *leastTrip) add(d time.Duration, now time.Time) time.Duration {
	d = max(d, 1) // 0: a clock too coarse
	if now.Sub(t.half) >= tripMemory/2 {
		t.leastBefore, t.least, t.half = t.least, d, now
	}
	t.least = min(t.least, d)
	if t.leastBefore > 0 {
		return min(t.least, t.leastBefore)
	}
	return t.least
}
