package paced

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/wire"
)

// loop is the engine of every sequence: one goroutine, the caller's, that
// subscribes, pulls, reads, judges and yields in turn. All of its state is here
// and nobody else touches it.
//
//	run         one turn per consumer generation
//	drain       one turn per frame: interpret, yield, ask for more
//	wait        nothing has arrived: judge silence, ask, park
//
// Recovery is a return value: whatever goes wrong ends drain with Restart, and
// the next turn of run makes a consumer that goes on behind the position.
type loop struct {
	ctx    context.Context
	done   <-chan struct{}
	tuning Tuning
	lis    *Listener
	link   *link
	share  *share
	board  *board
	recipe recipe
	where  string // what errors name: "stream ORDERS"
	stream string
	jitter func(time.Duration) time.Duration // spreads backoffs; scripted sources have none

	maxMessages, maxBytes int
	maxMessage            int // the largest message the stream can hold, as it counts here

	in        inbox
	gen       *generation
	ack       string // what the ack replies of this generation begin with, once known
	exact     bool   // a consumer that came back in its first state would start right
	pullTo    string // subject of this generation's pulls
	limits    pullLimits
	greeted   bool     // the first pull of this generation was sent, with a barrier behind it
	prefix    string   // of the names of this loop's consumers
	name      string   // of the consumer made or being made
	serial    int      // consumers made
	litter    []string // consumers to delete
	asked     string   // reply subject of the latest request
	making    bool     // that is a create, and it was not answered
	onLeave   func()
	apiPrefix string
	pos       position
	vet       vet
	list      listing

	inspected time.Time // when the stream was last asked for what was not seen

	target  uint64 // the stream's last sequence at the start: reaching it is being caught up
	caught  bool
	until   uint64    // ends after this stream sequence; 0: never
	untilAt time.Time // ends behind messages stored after this; zero: never
	over    bool      // a message past the end was seen

	pace        pacer
	low         int // ask again when this few are outstanding
	oversize    bool
	line        place     // in the budget's line
	notBefore   time.Time // no pull before
	early       int       // pulls in a row that the server ended early and empty
	confirms    int       // confirming pulls in a row that brought nothing
	nextConfirm time.Time
	doubt       int // heartbeats that do not prove a scan position (replay original)

	up         bool // the last event said CONNECTED
	closed     bool
	moved      bool // the connection is another one since this was last looked at
	reconnects uint64

	timer    *time.Timer
	armed    time.Time // when the timer fires; zero: not set
	stretch  time.Time // since when the body's time counts
	handled  int       // bodies that came back in this stretch
	taken    int       // bytes of theirs
	quiet    time.Time // parked since; zero: the body ran
	progress bool      // something was yielded by this generation
	since    time.Time // when this generation was made
	attempt  int       // rebuilds since the last progress
	patience time.Duration
	trouble  string // the state that the error handler was told of
	verifies bool
	n        counts
}

// counts is what the loop adds up between two updates of the board.
type counts struct {
	messages, bytes, pulls uint64
	peak                   int
}

// recipe is what sets one kind of sequence apart from another.
type recipe struct {
	// create makes the server-side consumer of the next generation.
	create func(*loop) error
	// vet compares the stream with the one the position belongs to.
	vet func(*loop, *jetstream.StreamInfo) error
	// gap tells of messages that were removed unseen.
	gap     func(*loop, seqRange) error
	finite  bool // ends when caught up
	replay  bool // the server keeps the original pace: silence means nothing
	inOrder bool // data and statuses come in the order they were sent (ack none)
}

// pullLimits are the limits that the server-side consumer puts on a pull; 0:
// none.
type pullLimits struct {
	batch, bytes int
	expires      time.Duration
}

// place is a loop's place in the line of the byte budget.
type place struct {
	need    int  // bytes waited for; 0: not in line
	bounded bool // the pull will carry them as max_bytes
}

var errFinished = errors.New("finished") // never leaves run

func newLoop(ctx context.Context, k *link, s *share) *loop {
	l := &loop{
		ctx: ctx, done: ctx.Done(),
		link: k, share: s,
		jitter:   func(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) },
		timer:    time.NewTimer(time.Hour),
		patience: defaultRequestTimeout,
		// A test binary has this flag. Importing package testing to ask would
		// put its flags into every program.
		verifies: flag.Lookup("test.v") != nil,
	}
	l.timer.Stop()
	l.in.link = k
	l.in.use = 2
	l.reconnects = k.stats().Reconnects
	l.look(k.status())
	return l
}

// run yields until the sequence ends. There is one place that yields a message
// (drain) and one that yields an error (here).
func (l *loop) run(yield func(Msg, error) bool) {
	defer l.leave()
	var reason error
	for {
		if reason = l.subscribe(reason); reason == nil {
			reason = l.drain(yield)
		}
		var again *rebuild
		switch {
		case reason == nil:
			return // the body left
		case errors.As(reason, &again):
			reason = again.reason
			l.drop()
		case reason == errFinished:
			return
		default:
			yield(Msg{}, reason)
			return
		}
	}
}

// api returns the subject of an API request.
func (l *loop) api(tail string) string { return l.apiPrefix + tail }

// rebuild is how drain hands a Restart to run.
type rebuild struct{ reason error }

func (r *rebuild) Error() string { return r.reason.Error() }

// drain reads one generation of the consumer. It returns nil when the body
// left, a *rebuild for a new generation and anything else for the end.
func (l *loop) drain(yield func(Msg, error) bool) error {
	for {
		select {
		case <-l.done:
			return newDoneError(l.ctx, l.where)
		default:
		}
		if len(l.link.events) > 0 {
			l.events()
		}
		if l.moved || l.closed {
			if err := l.move(); err != nil {
				return err
			}
		}
		if l.vet.answer != nil {
			if err := l.vetNow(); err != nil {
				return err
			}
		}
		if err := l.milestones(); err != nil {
			return err
		}
		var d directive
		if m := l.in.take(); m != nil {
			d = l.interpret(m)
		} else {
			d = l.wait()
		}
		switch d.kind {
		case skip:
		case pullOver:
			if d.reason != nil {
				l.failed(d.reason)
			}
		case restart:
			return &rebuild{d.reason}
		case fail:
			return l.errorf(d.reason)
		case deliver:
			if l.past(&d.msg) {
				l.over = true
				continue
			}
			if l.vet.open {
				// The first message of this generation: the stream has to be
				// the one it was.
				if err := l.vetNow(); err != nil {
					return err
				}
			}
			if len(l.pos.unseen) > 0 {
				if err := l.inspect(false); err != nil {
					return err
				}
			}
			l.yielded(&d.msg)
			if l.in.owed <= l.low {
				if d := l.ask(); d.kind >= restart {
					return l.refusal(d)
				}
			}
			if l.lis.Handled == nil {
				if !yield(d.msg, nil) {
					return nil
				}
			} else {
				start := time.Now()
				more := yield(d.msg, nil)
				if !more {
					return nil
				}
				l.lis.Handled(d.msg.seq, d.msg.Subject(), time.Since(start))
			}
			l.handled++
			l.quiet = time.Time{}
		}
	}
}

func (l *loop) refusal(d directive) error {
	if d.kind == restart {
		return &rebuild{d.reason}
	}
	return l.errorf(d.reason)
}

// yielded takes note of the message that goes to the body next.
func (l *loop) yielded(m *Msg) {
	m.replay = m.seq <= l.target
	l.pos.yielded(m.seq)
	size := m.m.Size()
	l.taken += size
	l.n.messages++
	l.n.bytes += uint64(size)
	if n := min(l.in.waiting(), l.in.owed); n > l.n.peak {
		l.n.peak = n // frames beside the messages do not count
	}
	if !l.progress {
		l.healthy()
	}
}

// healthy notes progress: the backoff begins anew, and the next trouble is
// news.
func (l *loop) healthy() {
	l.progress = true
	l.attempt, l.list.broken = 0, 0
	l.trouble = ""
}

// past reports whether a message lies behind the end of a finite sequence.
func (l *loop) past(m *Msg) bool {
	return (l.until > 0 && m.seq > l.until) ||
		(l.recipe.finite && m.seq > l.target) ||
		(!l.untilAt.IsZero() && m.stored > l.untilAt.UnixNano())
}

// milestones looks, between two bodies, whether the sequence is caught up and
// whether it is complete.
func (l *loop) milestones() error {
	ends := l.over || (l.until > 0 && l.pos.reached(l.until))
	if l.vet.open && (ends || (!l.caught && l.pos.reached(l.target))) {
		if err := l.vetNow(); err != nil {
			return err
		}
	}
	if len(l.pos.unseen) > 0 {
		if err := l.inspect(ends || (l.recipe.finite && l.pos.reached(l.target))); err != nil {
			return err
		}
	}
	if !l.caught && l.pos.reached(l.target) {
		l.caught = true
		l.list.active, l.list.done = false, true
		l.confirms = 0
		l.board.update(func(s *Stats) { s.CaughtUp = true })
		if l.lis.CaughtUp != nil {
			l.lis.CaughtUp(l.target)
		}
	}
	if ends || (l.caught && l.recipe.finite) {
		return errFinished
	}
	return nil
}

// interpret turns a frame into a directive. A message is told from a status by
// its reply subject, never by the Status header: a user's message may carry
// such a header, and the server strips it only from the first line
// (client.go:4657).
func (l *loop) interpret(m *nats.Msg) directive {
	if m.Reply != "" {
		return l.message(m)
	}
	return l.status(m)
}

func (l *loop) message(m *nats.Msg) directive {
	tail, ok := "", false
	if n := len(l.ack); n > 0 && len(m.Reply) > n && m.Reply[:n] == l.ack {
		tail, ok = m.Reply[n:], true
	} else {
		var stream, consumer string
		stream, consumer, tail, ok = wire.SplitAck(m.Reply)
		ok = ok && stream == l.gen.stream && consumer == l.gen.consumer
		if ok {
			l.ack = m.Reply[:len(m.Reply)-len(tail)]
		}
	}
	var a wire.Ack
	if ok {
		a, ok = wire.ParseAck(tail)
	}
	if !ok {
		// Not from this consumer: published to the inbox by somebody else, or
		// in a form that no server sends.
		return directive{kind: skip}
	}
	size := m.Size()
	s := l.in.received(m)
	if s != nil && s.got == 1 {
		l.first(s)
	}
	l.pace.saw(size)
	l.early, l.confirms, l.doubt, l.list.beats = 0, 0, 0, 0
	l.oversize = false
	k, reason := l.pos.receive(a)
	if l.list.active {
		l.list.received(l.pos.cseq)
	}
	if k != deliver {
		return directive{kind: k, reason: reason}
	}
	return directive{kind: deliver, msg: Msg{
		m: m, gen: l.gen,
		seq: a.Stream, cseq: a.Consumer,
		pending: a.Pending, stored: a.Time,
		delivered: uint32(min(a.Delivered, 1<<32-1)),
	}}
}

// first measures the round trip of a pull that was sent with messages known to
// be waiting on the server, and whose first message was waited for.
func (l *loop) first(s *slot) {
	if s.stocked && !l.quiet.IsZero() && !l.quiet.After(s.sent) {
		l.pace.roundTrip(time.Since(s.sent))
	}
	s.stocked = false
}

func (l *loop) status(m *nats.Msg) directive {
	if l.vet.reply != "" && m.Subject == l.vet.reply {
		l.vet.answer = m
		return directive{kind: skip}
	}
	s := l.in.slotOf(m)
	if s == nil || !s.open || s.token != m.Subject || len(m.Data) > 0 {
		return directive{kind: skip} // of a pull that is over
	}
	s.touched = true
	code, description := m.Header.Get("Status"), m.Header.Get("Description")
	if code == "100" {
		consumer, ok1 := wire.Number(m.Header.Get("Nats-Last-Consumer"))
		stream, ok2 := wire.Number(m.Header.Get("Nats-Last-Stream"))
		if !ok1 || !ok2 {
			return directive{kind: skip}
		}
		if l.doubt > 0 {
			// Asleep with a message in hand the server has scanned past it
			// and heartbeats only because it was asked (consumer.go:3653).
			l.doubt--
			stream = 0
		}
		k, reason := l.pos.heard(consumer, stream)
		if k == skip {
			l.idleUntil()
			if l.list.stalled(s, l.pos.reached(l.target)) {
				return directive{kind: restart, reason: errHole}
			}
		}
		return directive{kind: k, reason: reason}
	}
	d := judge(code, description)
	if d.kind == pullOver && l.list.active {
		if k, reason := l.list.ended(s, &l.in, description); k == restart {
			return directive{kind: k, reason: reason}
		}
	}
	if d.kind == pullOver && d.reason != nil && l.pos.cseq == 0 && !l.exact {
		// Nothing was received yet, so a consumer that came back in its first
		// state under the same name would look right.
		return directive{kind: restart, reason: d.reason}
	}
	if d.kind != pullOver {
		return d
	}
	undelivered := 0
	switch n, ok := wire.Number(m.Header.Get("Nats-Pending-Messages")); {
	case ok:
		undelivered = int(min(n, uint64(s.owed)))
	case description != statusBatchCompleted:
		// No count: nothing more comes.
		undelivered = s.owed
	}
	empty := s.got == 0 && undelivered == s.owed
	l.ending(s, description, empty)
	if l.recipe.inOrder && !l.recipe.replay && s.owed > undelivered {
		// What the server says it sent would have come first.
		return directive{kind: restart, reason: errLostTail}
	}
	if l.recipe.replay {
		// The server may hold the next message until its time, already
		// counted as sent (consumer.go:5524, 5556). The inbox is kept, so that
		// it arrives, beside whatever is asked for next.
		l.in.finish(s)
		return d
	}
	l.in.terminated(s, undelivered, time.Now(), max(2*s.heartbeat, time.Second))
	return d
}

// ending draws the conclusions from how a pull ended.
func (l *loop) ending(s *slot, description string, empty bool) {
	now := time.Now()
	switch {
	case l.list.active:
	case empty && description == statusMessageSize:
		// Not even one message fitted: the next one comes alone.
		l.oversize = true
	case s.confirm:
		l.confirms++
	case empty && now.Before(s.sent.Add(s.deadline.Sub(s.sent)/2)):
		// Much too early. Once can be a leader change; a storm of them must
		// not pull in a hot loop. Sub-second windows pace themselves.
		if l.early++; l.early > 1 && s.deadline.Sub(s.sent) > time.Second+pullSlack {
			l.notBefore = now.Add(500 * time.Millisecond)
		}
	}
}

// idleUntil ends a sequence whose end is a time: the clock has passed it and a
// heartbeat says that nothing is pending.
func (l *loop) idleUntil() {
	if !l.untilAt.IsZero() && l.caught && l.pos.pending == 0 && time.Now().After(l.untilAt) {
		l.over = true
	}
}

// failed tells of trouble that the loop goes on after: the listener each time,
// the connection's error handler when it is news.
func (l *loop) failed(reason error) {
	err := l.errorf(reason)
	l.board.update(func(s *Stats) { s.LastError = err })
	if l.lis.Failed != nil {
		l.lis.Failed(err)
	}
	if text := reason.Error(); l.trouble != text {
		l.trouble = text
		if l.up {
			l.link.report(err)
		}
	}
}

func (l *loop) errorf(reason error) error {
	where := l.where
	if l.gen != nil {
		where += ", consumer " + l.gen.consumer
	}
	if l.pos.at > 0 {
		where += fmt.Sprintf(", after sequence %d", l.pos.at)
	}
	return fmt.Errorf("paced: %s: %w", where, reason)
}

// pullSlack is how much longer than its life a pull is waited for: the
// server's own 408 has to win, since it says what is still owed.
const pullSlack = 500 * time.Millisecond

// wait is the loop with nothing to read: it judges silence, asks, and parks
// until something happens. Time spent in the body is not silence: the clock
// starts when the loop first finds the inbox empty.
func (l *loop) wait() directive {
	now := time.Now()
	if l.quiet.IsZero() {
		l.quiet = now
	}
	l.fold(now)
	for i := range l.in.slots {
		if s := &l.in.slots[i]; s.touched {
			s.heard, s.touched = now, false
			if now.Sub(l.since) > maxBackoff {
				l.attempt, l.trouble = 0, "" // it lives
			}
		}
	}
	due := now.Add(time.Hour)
	if l.up {
		if d := l.overdue(now); d.kind != skip {
			return d
		}
		if d := l.ask(); d.kind != skip {
			return d
		}
		if d := l.confirm(now); d.kind != skip {
			return d
		}
		due = l.due(now)
	}
	l.post()
	l.arm(due)
	var d directive
	select {
	case m := <-l.in.ch:
		d = l.interpret(m)
	case s := <-l.link.events:
		l.event(s)
	case <-l.share.doorbell():
	case <-l.timer.C:
		l.armed = time.Time{}
	case <-l.done:
	}
	l.stretch = time.Now()
	return d
}

// arm sets the timer unless it fires early enough already: a timer that fires
// too early costs one turn, setting it anew with every message costs each
// message.
func (l *loop) arm(due time.Time) {
	if !l.armed.IsZero() && !l.armed.After(due) {
		return
	}
	l.timer.Reset(time.Until(due))
	l.armed = due
}

// fold adds the stretch of body work that ends now to the averages.
func (l *loop) fold(now time.Time) {
	if l.handled > 0 {
		l.pace.handled(l.handled, now.Sub(l.stretch), l.taken)
		l.handled, l.taken = 0, 0
	}
	l.stretch = now
}

// silence is how long a slot may be silent.
func (l *loop) silence(s *slot) time.Duration {
	return max(2*s.heartbeat, 500*time.Millisecond) + l.pace.rtt()
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
	for i := range l.in.slots {
		s := &l.in.slots[i]
		if !s.open {
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
			l.in.giveUp(i)
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
		at := s.deadline
		if silent := l.base(s).Add(l.silence(s)); !s.ended && !s.confirm && silent.Before(at) {
			at = silent
		}
		if at.Before(s.grace) {
			at = s.grace
		}
		sooner(at)
	}
	if now.Before(l.notBefore) {
		sooner(l.notBefore)
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
// because the hint counts messages that were deleted meanwhile.
func (l *loop) confirmAt() time.Time {
	switch {
	case !l.caught && l.pos.pending == 0:
		return l.quiet
	case !l.caught && !l.recipe.replay:
		return l.quiet.Add(l.pace.rtt() + confirmPause)
	case l.caught && !l.untilAt.IsZero():
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
	if at.IsZero() || now.Before(at) || now.Before(l.nextConfirm) || now.Before(l.notBefore) || l.line.need > 0 || l.oversize {
		return directive{kind: skip}
	}
	for i := range l.in.slots {
		if l.in.slots[i].open && (l.in.slots[i].confirm || l.list.active) {
			return directive{kind: skip}
		}
	}
	life := max(confirmLife, l.pace.rtt()+confirmLife)
	if l.confirms > 4 {
		life <<= min(l.confirms-4, 12)
	}
	life = min(life, l.tuning.expires(true))
	if l.in.free() < 0 || l.in.owed >= l.maxMessages {
		// Every message that may be asked for is asked for, and not coming.
		l.confirms++
		l.nextConfirm = now.Add(life)
		return l.locate()
	}
	w := pullSpec{batch: max(1, min(l.pace.credit, l.maxMessages)-l.in.owed), heartbeat: max(confirmHeartbeat, life/16), expires: life, confirm: true}
	if l.list.active {
		return l.askList(now, w)
	}
	return l.send(now, w)
}

// ask sends a pull when there is room for one and something to ask for. It is
// called with the body back: in front of the next body, so that the answer
// travels while it runs, and when the loop is about to park.
func (l *loop) ask() directive {
	owed := l.in.owed
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
	l.low = credit / 2
	batch := credit - l.in.owed
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
		if batch = min(batch, expected-l.in.owed); l.list.active {
			batch = max(batch, 1) // askList knows better
		}
	} else if expected == 0 && l.in.owed > credit/4 {
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
	if err := l.in.pull(i, l.pullTo, p, w.role, reserve, now, pullSlack+2*l.pace.rtt()); err != nil {
		l.share.giveBack(reserve)
		return l.publishFailed(err)
	}
	s := &l.in.slots[i]
	s.confirm = w.confirm
	s.stocked = l.pos.pending > 0
	l.n.pulls++
	l.post()
	if l.lis.PullIssued != nil {
		l.lis.PullIssued(p.Batch, p.MaxBytes)
	}
	if l.verifies {
		l.in.verify(l.maxMessages, l.maxBytes)
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
	if l.in.owed > 0 || l.vet.reply != "" || l.in.waiting() > 0 {
		// Growing waits until nothing is owed. If it is worth it, nothing more
		// is asked for until then: a few pauses of one round trip in a loop's
		// life.
		if l.pace.credit > cap(l.in.ch) || fit <= 0 {
			return 0, false
		}
		return fit, true
	}
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
	if l.limits.bytes > 0 {
		room = min(room, l.limits.bytes)
	}
	want := min(l.pace.bytesFor(p.Batch), room)
	if as == rescue {
		want = min(max(l.pace.bytesFor(1), rescueBytes), l.maxMessage, max(room/2, 1))
	}
	floor := min(max(l.pace.large, 1), room)
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
	if l.line.bounded {
		p.MaxBytes = got
	}
	if got < l.line.need {
		// The whole budget is smaller than one message: it comes alone.
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

// event takes one event of the connection and whatever came with it.
func (l *loop) event(last nats.Status) {
	n := 1
	for {
		select {
		case last = <-l.link.events:
			n++
			continue
		default:
		}
		break
	}
	if last == nats.CONNECTED || last == nats.CLOSED || n >= cap(l.link.events) {
		last = l.link.status()
	}
	l.look(last)
}

func (l *loop) events() {
	select {
	case s := <-l.link.events:
		l.event(s)
	default:
	}
}

// look takes over a status of the connection. CONNECTED is queued in front of
// the first frame of a new connection (nats.go:3310), so that looking before
// each frame is a barrier between the two.
func (l *loop) look(s nats.Status) {
	l.up = s == nats.CONNECTED
	l.closed = s == nats.CLOSED
	if l.up {
		if n := l.link.stats().Reconnects; n != l.reconnects {
			l.reconnects = n
			l.moved = true
		}
	}
}

// move acts on a connection that is another one now. nats.go subscribes the
// same inboxes again and the server still serves the old pulls (a fast
// reconnect finds them alive), so that asking again would ask twice: the
// inboxes are dropped, and new ones are used at once. The consumer itself is
// believed until something speaks against it.
func (l *loop) move() error {
	if l.closed {
		return l.errorf(nats.ErrConnectionClosed)
	}
	l.moved = false
	if l.gen == nil {
		return nil
	}
	for i := range l.in.slots {
		l.in.giveUp(i)
	}
	l.leaveLine()
	if l.list.active {
		return &rebuild{errUnfilled}
	}
	if l.pos.cseq == 0 && !l.exact {
		return &rebuild{errReset}
	}
	if err := l.in.connect(0); err != nil {
		return &rebuild{err}
	}
	if l.vet.open {
		if err := l.askVet(); err != nil {
			return &rebuild{err}
		}
	}
	l.quiet, l.greeted = time.Time{}, false
	l.notBefore = time.Time{}
	if l.share.loops() > 32 {
		l.notBefore = time.Now().Add(time.Duration(l.share.ordinal()) * time.Millisecond)
	}
	return nil
}

// post brings the board up to date.
func (l *loop) post() {
	l.share.giveBack(l.in.spare)
	l.in.spare = 0
	l.board.update(func(s *Stats) {
		s.Sequence = l.pos.at
		s.Connected = l.up
		s.Messages += l.n.messages
		s.Bytes += l.n.bytes
		s.Pulls += l.n.pulls
		s.Outstanding, s.OutstandingBytes = l.in.owed, l.in.bytes
		s.Waiting = min(l.in.waiting(), l.in.owed)
		s.MaxWaiting = max(s.MaxWaiting, l.n.peak)
		s.Credit = l.pace.credit
		s.LookAhead = l.pace.lookAhead()
		s.BodyTime = time.Duration(l.pace.body.value)
		s.RoundTrip = l.pace.rtt()
		l.n.messages, l.n.bytes, l.n.pulls = 0, 0, 0
	})
}

// leave is how a loop ends, whichever way: nothing stays behind. The yield of
// the last error came first; what touches the connection runs beside the
// caller, who waits for it only while the connection is up, because nats.go
// holds its lock while it dials.
func (l *loop) leave() {
	l.timer.Stop()
	if l.onLeave != nil {
		l.onLeave()
	}
	l.fold(time.Now())
	l.post()
	l.share.leave()
	up := l.up
	for len(l.link.events) > 0 {
		up = <-l.link.events == nats.CONNECTED // without asking the connection
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.clean()
	}()
	if !up {
		return
	}
	limit := time.NewTimer(exitTime)
	defer limit.Stop()
	select {
	case <-done:
	case <-limit.C:
	}
}

// exitTime is how long an exit waits for its own clean-up while connected.
const exitTime = 50 * time.Millisecond

// clean removes subscriptions, listener and consumer.
func (l *loop) clean() {
	if l.making && l.in.ch != nil {
		// The create is on its way, and a delete could overtake it: API
		// requests run in a pool with two queues (jetstream_api.go:1020).
		limit := time.NewTimer(exitTime)
		defer limit.Stop()
		for waiting := true; waiting; {
			select {
			case m := <-l.in.ch:
				waiting = m.Subject != l.asked
			case <-limit.C:
				waiting = false
			}
		}
	}
	l.in.close()
	if l.name != "" {
		l.litter = append(l.litter, l.name)
	}
	l.sweep()
	l.link.detach()
}

// drop closes the generation that was lost.
func (l *loop) drop() {
	l.in.close()
	l.vet = vet{}
	l.leaveLine()
	l.post()
	if l.name != "" {
		l.litter = append(l.litter, l.name)
		l.name = ""
	}
	l.gen = nil
}
