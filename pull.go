package paced

import (
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/pacedgo/paced/internal/wire"
)

// place is a loop's place in the line of the byte budget.
type place struct {
	need    int  // bytes waited for; 0: not in line
	bounded bool // the pull will carry them as max_bytes
}

// flow is how much the connection had received when the loop, waiting for a
// message, last saw that it receives something.
type flow struct {
	bytes uint64
	at    time.Time
}

// recheck is when the consumer is asked again for what it counts as sent.
type recheck struct {
	at    time.Time // zero: not
	until time.Time // bytes that arrive put it off until then
	seen  uint64
}

// due reports whether it is time. While bytes arrive on the connection, what was
// sent may stand behind them: with a thousand loops on it that takes more than a
// second.
func (r *recheck) due(now time.Time, k *link) bool {
	if r.at.IsZero() || now.Before(r.at) {
		return false
	}
	seen := k.stats().InBytes
	if seen == r.seen || !now.Before(r.until) {
		return true
	}
	r.seen, r.at = seen, now.Add(time.Second)
	return false
}

// pullSlack is how much longer than its life a pull is waited for: the
// server's own 408 has to win, since it says what is still owed.
const pullSlack = 500 * time.Millisecond

// silence is how long a slot may be silent.
func (l *loop) silence(s *slot) time.Duration {
	return max(2*s.heartbeat, 500*time.Millisecond) + l.pace.trip
}

// base is since when a slot has been silent while the loop was listening.
func (l *loop) base(s *slot) time.Time {
	if l.quiet.After(s.heard) {
		return l.quiet
	}
	return s.heard
}

// overdue deals with pulls that should have ended or said something.
func (l *loop) overdue(now time.Time) directive {
	if l.stranded() && !now.Before(l.vet.at.Add(writeDeadline)) {
		return directive{kind: restart, reason: fmt.Errorf("%s: %w", l.vet.subject, errNoAnswer)}
	}
	if l.recheck.due(now, l.link) {
		return l.probe()
	}
	for i := range l.in.slots {
		s := &l.in.slots[i]
		if i >= fades(0) && s.sub != nil && !s.young(now) {
			if err := l.giveUp(i); err != nil {
				return directive{kind: restart, reason: err}
			}
			continue
		}
		if !s.open || i >= fades(0) {
			continue
		}
		late := !now.Before(s.deadline)
		silent := !s.ended && !s.confirm && !now.Before(l.base(s).Add(l.silence(s)))
		switch {
		case !late && !silent:
		case l.delayed(s, now):
		case late && l.recipe.replay:
			// See status: the server, asleep with a message in hand, does not
			// even tell of the end of a pull.
			l.in.finish(s)
			return directive{kind: pullOver}
		case s.ended:
			// What it owed was lost; the consumer sequence will show it.
			if err := l.giveUp(i); err != nil {
				return directive{kind: restart, reason: err}
			}
			return directive{kind: pullOver}
		case l.work != nil && !late && l.in.slots[1-i].open && now.Before(l.in.slots[1-i].heard.Add(l.silence(s))):
			// The other one is served: there was no room for this one.
			l.in.use = 1
			l.failed(errOverflow)
			if err := l.giveUp(i); err != nil {
				return directive{kind: restart, reason: err}
			}
			return directive{kind: pullOver}
		default:
			if s.confirm {
				l.confirms++
			}
			return l.probe()
		}
	}
	return directive{kind: skip}
}

// stranded: no pull is open, because the channel is to be swapped for a larger
// one first, and that waits for an answer.
func (l *loop) stranded() bool {
	if !l.vet.open || l.vet.answer != nil {
		return false
	}
	for i := range l.in.slots {
		if l.in.slots[i].open {
			return false
		}
	}
	return true
}

// delayed reports whether a frame that is due may still be on the wire: bytes
// arrive on the connection, for other loops or for this one, and it stands
// behind them. Within the server's write deadline that is no silence.
func (l *loop) delayed(s *slot, now time.Time) bool {
	if now.Before(s.grace) {
		return true
	}
	seen := l.link.stats().InBytes
	if seen == s.seen || now.Sub(l.base(s)) >= l.silence(s)+writeDeadline {
		return false
	}
	s.seen = seen
	s.grace = now.Add(min(max(s.heartbeat/8, 20*time.Millisecond), 500*time.Millisecond))
	return true
}

// due returns when something has to be looked at if nothing arrives.
func (l *loop) due(now time.Time) time.Time {
	due := now.Add(time.Hour)
	sooner := func(t time.Time) {
		if t.Before(due) {
			due = t
		}
	}
	for i := range l.in.slots {
		s := &l.in.slots[i]
		if !s.open {
			continue
		}
		if i >= fades(0) {
			// Its silence means nothing, and is not waited for: overdue does not
			// look at it, and a time in the past would make the loop spin.
			sooner(s.sent.Add(youth))
			continue
		}
		at := s.deadline
		if silent := l.base(s).Add(l.silence(s)); !s.ended && !s.confirm && silent.Before(at) {
			at = silent
		}
		if at.Before(s.grace) {
			at = s.grace
		}
		sooner(at)
	}
	if l.stranded() {
		sooner(l.vet.at.Add(writeDeadline))
	}
	if now.Before(l.notBefore) {
		sooner(l.notBefore)
	}
	if !l.recheck.at.IsZero() {
		sooner(l.recheck.at)
	}
	if t := l.confirmAt(); !t.IsZero() {
		if t.Before(l.nextConfirm) {
			t = l.nextConfirm
		}
		if t.After(now) {
			sooner(t)
		}
	}
	if len(l.pos.unseen) > 0 {
		sooner(l.inspected.Add(inspectEvery))
	}
	return due
}

// confirmAt returns when the loop, with nothing arriving, asks the server
// where it is; zero: not. At once when the server's hint says that nothing is
// pending; after a round trip without a message when it says otherwise,
// because the hint counts messages that were deleted meanwhile; on a connection
// that receives something, nobody's message for that long.
func (l *loop) confirmAt() time.Time {
	switch {
	case !l.caught && l.pos.pending == 0:
		return l.quiet
	case !l.caught && !l.recipe.replay:
		since := l.quiet
		if l.flow.at.After(since) {
			since = l.flow.at
		}
		pause := confirmPause
		if l.pos.pending > startCredit {
			pause = confirmFar
		}
		return since.Add(l.pace.trip + pause)
	case l.unsure:
		return l.quiet
	case l.caught && l.timed:
		if l.quiet.After(l.untilAt) {
			return l.quiet
		}
		return l.untilAt
	}
	return time.Time{}
}

// confirm sends a confirming pull when one is due: short-lived, with a
// heartbeat of 5 ms, whose first heartbeat proves the server's scan position.
// After five in a row that brought nothing their life doubles.
func (l *loop) confirm(now time.Time) directive {
	at := l.confirmAt()
	if at.IsZero() || now.Before(at) || now.Before(l.nextConfirm) || now.Before(l.notBefore) || l.line.need > 0 || l.oversize || l.draining() {
		return directive{kind: skip}
	}
	for i := range l.in.slots {
		if s := &l.in.slots[i]; s.open && (s.confirm || (l.list.active && s.role != rescue)) {
			return directive{kind: skip}
		}
	}
	if !l.caught && l.pos.pending > 0 && l.share.loops() > 1 {
		// Behind the data of other loops the next message is only late.
		if seen := l.link.stats().InBytes; seen != l.flow.bytes {
			l.flow = flow{seen, now}
			return directive{kind: skip}
		}
	}
	life := max(confirmLife, l.pace.trip+confirmLife)
	if l.confirms > 4 {
		life <<= min(l.confirms-4, 12)
	}
	life = min(life, l.tuning.expires(true))
	full := l.in.free() < 0 || l.credit() <= 0
	if full && l.work != nil {
		return directive{kind: skip} // nothing can be shown before something is settled
	}
	if full {
		// Every message that may be asked for is asked for, and not coming.
		l.confirms++
		l.nextConfirm = now.Add(life)
		return l.locate()
	}
	batch := max(1, min(l.pace.credit-l.in.owed, l.credit()))
	if l.work != nil && !l.work.ahead() {
		if l.in.owed > l.in.fading() {
			return directive{kind: skip} // the heartbeats of what is out will do
		}
		batch = 1
	}
	l.askBeside()
	w := pullSpec{batch: batch, heartbeat: max(confirmHeartbeat, life/16), expires: life, confirm: true}
	if l.list.active {
		return l.askList(now, w)
	}
	return l.send(now, w)
}

// ask sends a pull when there is room for one and something to ask for. It is
// called with the body back: in front of the next body, so that the answer
// travels while it runs, and when the loop is about to park.
func (l *loop) ask() directive {
	owed := l.in.owed - l.in.fading()
	if l.list.active {
		owed-- // the rescue's one does not count
	}
	if !l.up || l.in.free() < 0 || (owed > l.low && owed > 0) {
		return directive{kind: skip}
	}
	now := time.Now()
	if now.Before(l.notBefore) {
		return directive{kind: skip}
	}
	l.fold(now)
	credit := l.pace.adjust(l.pos.pending)
	l.low = l.askAt() // unless something is sent
	if l.gather != nil {
		credit = max(credit, l.gather.n-len(l.gather.held))
	}
	if l.work != nil {
		if l.draining() {
			return directive{kind: skip}
		}
		if !l.work.ahead() {
			credit = 1
		}
		if l.work.stale(now) {
			if ci, err := l.consumerInfo(l.gen.consumer); err == nil {
				l.work.refresh(ci)
			}
		}
	}
	batch := credit - l.in.owed
	if l.work != nil || l.gather != nil {
		if batch = min(credit-owed, l.credit()); batch <= 0 {
			return directive{kind: skip}
		}
	}
	if l.line.need > 0 {
		// What the line gives is to be used at once, also if the reason to
		// stand in it has gone.
		if l.list.active {
			return l.askList(now, l.routine(max(batch, 1)))
		}
		return l.send(now, l.routine(max(batch, 1)))
	}
	expected := int(min(l.pos.pending, uint64(l.maxMessages)))
	if !l.caught {
		// Ask for what is known to be there, so that every pull is filled and
		// both slots are free for the confirming pull at the end.
		if batch = min(batch, expected-l.in.owed); l.list.active || l.oversize {
			batch = max(batch, 1) // askList knows better; a redelivery is not pending
		}
	} else if l.work != nil && expected > 0 {
		// A pull that is filled is over: nothing has to be waited for on
		// leaving.
		batch = min(batch, expected-owed)
	} else if expected == 0 && owed > credit/4 {
		return directive{kind: skip} // idle: one slot, unless it is nearly used up
	}
	if batch <= 0 {
		return directive{kind: skip}
	}
	if l.list.active {
		return l.askList(now, l.routine(batch))
	}
	return l.send(now, l.routine(batch))
}

// credit is how many messages may be asked for within the bounds.
func (l *loop) credit() int {
	n := l.maxMessages - l.in.owed
	switch {
	case l.work != nil:
		n -= int(l.work.books.open.Load())
	case l.gather != nil:
		n -= len(l.gather.held)
	}
	return n
}

// askAt returns how many messages are still owed when more is asked for. Where
// the consumer's own limits keep pulls small, that is when a slot is free.
func (l *loop) askAt() int {
	if l.work != nil && !l.work.ahead() {
		return -1 // when the body is back
	}
	if l.limits.batch > 0 || l.limits.bytes > 0 {
		return l.pace.credit / 2
	}
	if l.crowd {
		// Half as many pulls, and no second inbox: for a wildcard subscription
		// that comes or goes the server walks its whole cache of subjects
		// (sublist.go:513, 533).
		return 0
	}
	return l.pace.askAt(l.in.owed)
}

// routine is a pull with the usual life.
func (l *loop) routine(batch int) pullSpec {
	return pullSpec{batch: batch, heartbeat: l.tuning.heartbeat(l.caught), expires: l.tuning.expires(l.caught)}
}

// pullSpec is one pull as it is wanted; send makes of it what bounds and limits
// allow.
type pullSpec struct {
	batch              int
	heartbeat, expires time.Duration
	confirm            bool
	role               role
}

// send sends one pull of at most the batch wanted, as far as channel, byte
// bounds and the consumer's own limits allow.
func (l *loop) send(now time.Time, w pullSpec) directive {
	i := l.in.free()
	if w.role != plain && w.role != filler {
		i = w.role.slot()
	}
	if i < 0 {
		return directive{kind: skip}
	}
	if l.limits.expires > 0 && w.expires > l.limits.expires {
		w.expires = l.limits.expires
		w.heartbeat = min(w.heartbeat, w.expires/2)
	}
	if l.limits.batch > 0 {
		w.batch = min(w.batch, l.limits.batch)
	}
	batch, ok := l.room(w.batch, statusRoom(w.expires, w.heartbeat))
	if !ok {
		return directive{kind: skip}
	}
	p := wire.Pull{Batch: batch, Expires: w.expires, Heartbeat: w.heartbeat}
	if l.list.group {
		p.Group, p.Priority = listGroup, w.role.priority()
	}
	reserve, ok := l.reserve(&p, now, w.role)
	if !ok {
		return directive{kind: skip}
	}
	before := l.link.lastError()
	if err := l.in.pull(i, l.pullTo, p, w.role, reserve, now, pullSlack+2*l.pace.trip); err != nil {
		l.share.giveBack(reserve)
		return l.publishFailed(err)
	}
	l.pace.used = true
	l.low = l.askAt()
	s := &l.in.slots[i]
	s.confirm = w.confirm
	s.stocked = l.pos.pending > 0 && l.work == nil // a queue may hold back what is pending
	l.n.pulls++
	l.post()
	if l.lis.PullIssued != nil {
		l.lis.PullIssued(p.Batch, p.MaxBytes)
	}
	if l.verifies {
		l.in.verify(l.in.owed+l.credit(), l.maxBytes)
	}
	if !l.greeted && w.role != rescue {
		return l.greet(before)
	}
	return directive{kind: skip}
}

// room returns how much of batch the channel can take, and grows the channel
// when nothing is owed and it is too small for the credit.
func (l *loop) room(batch, statuses int) (int, bool) {
	fit := l.in.fits(batch, statuses)
	if fit >= batch {
		return batch, true
	}
	most := max(1, l.share.part()/l.pace.meanSize()) // bytes will not allow more
	if l.pace.size.known && fit >= most {
		return fit, true
	}
	if l.in.owed > 0 || l.vet.reply != "" || l.in.waiting() > 0 {
		// Growing waits until nothing is owed. If it is worth it, nothing more
		// is asked for until then: a few pauses of one round trip in a loop's
		// life.
		if l.pace.credit > cap(l.in.ch) || fit <= 0 {
			return 0, false
		}
		return fit, true
	}
	if l.beside.answer == nil {
		l.beside = beside{} // its answer will find nobody; it is asked for again when it is needed
	}
	// Once, for all that can be used: doubling on from here would be as many
	// pauses.
	l.pace.leap(int(min(l.pos.pending, uint64(most))))
	if err := l.in.grow(capacity(l.pace.credit, l.maxMessages) + 2*statuses + 8); err != nil {
		return 0, false
	}
	return max(1, l.in.fits(batch, statuses)), true
}

// capacity is how many messages a channel is made for: few sizes, so that a
// growing credit swaps it rarely.
func capacity(credit, limit int) int {
	n := startCredit
	for n < credit {
		n *= 8
	}
	return min(n, limit)
}

// reserve claims the bytes of a pull and sets its max_bytes.
func (l *loop) reserve(p *wire.Pull, now time.Time, as role) (int, bool) {
	idle := l.caught && l.pos.pending == 0
	l.share.giveBack(l.in.spare)
	l.in.spare = 0
	l.share.arrived(l.link.stats().InBytes, now)
	if l.line.need > 0 {
		return l.served(p)
	}
	if as == filler {
		return l.certain(p)
	}
	if l.oversize || l.pace.meanSize() > l.maxBytes {
		return l.alone(p)
	}
	room := l.maxBytes - l.in.bytes
	if l.gather != nil {
		room -= l.gather.size
	}
	if l.limits.bytes > 0 {
		room = min(room, l.limits.bytes)
	}
	want := l.pace.bytesFor(p.Batch)
	l.crowd = false
	switch {
	case as == rescue:
		want = min(max(l.pace.bytesFor(1), min(rescueBytes, room/4)), l.maxMessage, max(room/2, 1))
	case as == first:
		// A list's pull that ends for want of bytes, with its rescue used before
		// it came, costs a list. So these two are as large as the bounds allow.
		want = max(want, rescueBytes)
	case !idle:
		// Half of the look-ahead and a round trip more: two pulls in turn
		// leave no pause.
		useful := l.share.useful(l.in.bytes+want, l.pace.lookAhead()/2+l.pace.trip)
		l.crowd = l.share.crowded()
		room = min(room, max(useful, 2*l.pace.large)-l.in.bytes)
	}
	want = min(want, room)
	// A pull that has no room for a message like the largest would end at once
	// and empty, and look as if the next message were too large for any.
	floor := min(max(l.pace.large, 1), l.maxBytes)
	if l.limits.bytes > 0 {
		floor = min(floor, l.limits.bytes)
	}
	if as == rescue {
		floor = min(floor, room)
	}
	if want <= 0 || (want < floor && l.in.owed > 0) {
		return 0, false
	}
	got := l.share.claim(want, floor, idle)
	if got == 0 {
		return 0, false
	}
	if got < floor && !idle {
		if l.in.owed > 0 {
			l.share.giveBack(got)
			return 0, false
		}
		if l.pos.pending > 0 && l.pace.size.known {
			l.share.giveBack(got)
			return l.queue(p, floor, true)
		}
	}
	p.MaxBytes = got
	if !idle && l.pace.size.known {
		// No more than is likely to come, so that what is owed tells when to
		// ask again: a pull that is over only with a status costs a pause.
		if n := max(1, got/l.pace.meanSize()); n < p.Batch {
			p.Batch = n
			l.pace.granted(l.in.owed + n)
		}
	}
	return got, true
}

// alone asks for one message of any size, with room reserved for the largest:
// max_bytes would hold it back for ever, and a larger max_bytes each time is a
// storm. Own credit is free first, so that nobody waits in line holding
// something.
func (l *loop) alone(p *wire.Pull) (int, bool) {
	if l.in.owed > 0 {
		return 0, false
	}
	p.Batch = 1
	return l.queue(p, l.maxMessage, false)
}

// queue waits in the budget's line for need bytes.
func (l *loop) queue(p *wire.Pull, need int, bounded bool) (int, bool) {
	if l.share.held() > 0 {
		return 0, false
	}
	l.share.enqueue(need)
	l.line = place{need: need, bounded: bounded}
	return l.served(p)
}

// served takes what the line gave, once it is this loop's turn.
func (l *loop) served(p *wire.Pull) (int, bool) {
	got, ok := l.share.granted()
	if !ok {
		return 0, false
	}
	if l.line.bounded && got >= l.line.need {
		p.MaxBytes = got
	} else {
		// It comes alone: so it was meant when the loop got in line, or the
		// whole budget is smaller than one message.
		p.Batch, p.MaxBytes = 1, 0
	}
	l.line = place{}
	return got, true
}

// leaveLine gives up the place in line.
func (l *loop) leaveLine() {
	if l.line.need > 0 {
		l.share.leaveLine()
		l.line = place{}
	}
}

// publishFailed: nats.go refused to take a request. Only the connection can be
// the reason, and it says so by an event.
func (l *loop) publishFailed(err error) directive {
	if errors.Is(err, nats.ErrConnectionClosed) {
		return directive{kind: fail, reason: err}
	}
	l.failed(err)
	l.notBefore = time.Now().Add(100 * time.Millisecond)
	return directive{kind: skip}
}
