package paced

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
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
	ackGrows  bool   // they may have more tokens at their end
	exact     bool   // a consumer that came back in its first state would start right
	pullTo    string // subject of this generation's pulls
	limits    pullLimits
	greeted   bool // the first pull of this generation or connection was sent, with a barrier behind it
	greetedAt time.Time
	prefix    string // of the names of this loop's consumers
	name      string // of the consumer made or being made
	serial    int    // consumers made
	skipped   int    // names that were taken
	litter    []leftover
	asked     string // reply subject of the latest request
	making    bool   // that is a create, and it was not answered
	onLeave   func()
	apiPrefix string
	pos       position
	vet       vet
	list      listing
	work      *work         // explicit ack only
	gather    *gather       // Batches only
	bell      chan struct{} // rings when something was settled, or Drain was called
	empty     time.Time     // when the inbox was last found empty

	born      uint64 // messages pending when the consumer was made
	rounds    int    // times the end was read again
	beside    beside
	inspected time.Time // when the stream was last asked for what was not seen

	target  uint64 // the stream's last sequence at the start: reaching it is being caught up
	caught  bool
	until   uint64    // ends after this stream sequence; 0: never
	untilAt time.Time // ends behind messages stored after this, if timed
	timed   bool
	over    bool // a message past the end was seen

	pace        pacer
	low         int  // ask again when this few are outstanding
	crowd       bool // on this connection one pull at a time is enough
	oversize    bool
	line        place     // in the budget's line
	notBefore   time.Time // no pull before
	early       int       // pulls in a row that the server ended early and empty
	confirms    int       // confirming pulls in a row that brought nothing
	nextConfirm time.Time
	flow        flow
	doubt       int // heartbeats that do not prove a scan position (replay original)
	asleep      int // times in a row the server was found asleep with a message in hand
	recheck     recheck

	up         bool // the last event said CONNECTED
	deaf       int  // barriers in a row that did not come back
	closed     bool
	unsure     bool // a message may have been lost with the old connection
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
	alive    bool // a message or a heartbeat came since the loop last parked
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
	gap func(*loop, seqRange) error
	// wants passes a message over where it returns false; nil: all are wanted.
	wants   func(Msg) bool // by value: what a func may keep a pointer to is allocated
	rereads bool           // read the end of the stream again before being caught up
	finite  bool           // ends when caught up
	replay  bool           // the server keeps the original pace: silence means nothing
	inOrder bool           // data and statuses come in the order they were sent (ack none)
}

// pullLimits are the limits that the server-side consumer puts on a pull; 0:
// none.
type pullLimits struct {
	batch, bytes int
	expires      time.Duration
}

// Both never leave run.
var (
	errFinished = errors.New("finished")
	errLeft     = errors.New("the body left")
)

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
		case reason == errLeft:
			return
		case reason == errFinished:
			l.gather.flush(l)
			return
		default:
			// A done context is looked at first: what was gathered is not
			// yielded any more.
			if l.ctx.Err() != nil || l.gather.flush(l) {
				l.park(true) // the body may wait for its workers
				yield(Msg{}, reason)
			}
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
	var msg Msg // the one in hand
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
		if l.work != nil {
			if err := l.work.books.failed.Load(); err != nil {
				return err
			}
		}
		if !l.gather.tick(l) {
			return nil
		}
		if err := l.milestones(); err != nil {
			return err
		}
		var d directive
		if m := l.in.take(); m != nil {
			d = l.interpret(m, &msg)
		} else {
			msg = Msg{} // not kept while nothing comes
			d = l.wait(&msg)
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
			if l.past(&msg) {
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
			if l.in.owed <= l.low {
				// Before the position moves: this may end the generation.
				if d := l.ask(); d.kind >= restart {
					return l.refusal(d)
				}
			}
			// Whatever came before may have taken its time.
			select {
			case <-l.done:
				return newDoneError(l.ctx, l.where)
			default:
			}
			l.yielded(&msg)
			if l.recipe.wants != nil && !l.recipe.wants(msg) {
				l.handled++
				continue
			}
			if l.gather != nil {
				if !l.gather.add(l, msg) {
					return nil
				}
				l.handled++
				l.quiet = time.Time{}
				continue
			}
			if l.work != nil {
				l.work.given()
				l.work.keeper.body(true)
			}
			start := time.Time{}
			if l.lis.Handled != nil {
				start = time.Now()
			}
			if !yield(msg, nil) {
				return nil
			}
			if l.work != nil {
				l.work.keeper.body(false)
			}
			if l.lis.Handled != nil {
				l.lis.Handled(msg.seq, msg.Subject(), time.Since(start))
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
	if l.recipe.rereads {
		m.replay = !l.caught
	}
	if l.work != nil {
		m.replay = false
	}
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
		(l.recipe.finite && !l.recipe.rereads && m.seq > l.target) ||
		(l.timed && m.Timestamp().After(l.untilAt))
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
		ok, err := l.settled()
		if err != nil {
			return l.orRebuild(err)
		}
		if !ok {
			return nil
		}
		l.caught = true
		l.list.active, l.list.done, l.list.boundary = false, true, l.target
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

// loopError says where the loop was when reason came.
type loopError struct {
	where  string
	reason error
}

func (e *loopError) Error() string { return "paced: " + e.where + ": " + e.reason.Error() }
func (e *loopError) Unwrap() error { return e.reason }

// errorf adds to an error where the loop is, once.
func (l *loop) errorf(reason error) error {
	var said *loopError
	var gap *GapError
	var bad *ConfigError
	if errors.As(reason, &said) || errors.As(reason, &gap) || errors.As(reason, &bad) {
		return reason
	}
	where := l.where
	if l.gen != nil && l.work == nil {
		where += ", consumer " + l.gen.consumer
	}
	if l.pos.at > 0 {
		where += ", after sequence " + strconv.FormatUint(l.pos.at, 10)
	}
	return &loopError{where: where, reason: reason}
}

// wait is the loop with nothing to read: it judges silence, asks, and parks
// until something happens. Time spent in the body is not silence: the clock
// starts when the loop first finds the inbox empty.
func (l *loop) wait(into *Msg) directive {
	now := time.Now()
	if l.quiet.IsZero() {
		l.quiet = now
	}
	l.fold(now)
	for i := range l.in.slots {
		if s := &l.in.slots[i]; s.touched {
			s.heard, s.touched = now, false
		}
	}
	if l.alive {
		l.alive, l.trouble = false, ""
		if now.Sub(l.since) > maxBackoff {
			l.attempt = 0
		}
	}
	due := now.Add(time.Hour)
	if l.work != nil {
		l.empty = now
		if t := l.work.tend(l, now); !t.IsZero() {
			due = t
		}
	}
	if l.draining() {
		if t := l.drainPulls(now); l.over || !t.After(now) {
			return directive{kind: skip}
		} else if t.Before(due) {
			due = t
		}
	}
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
		if t := l.due(now); t.Before(due) {
			due = t
		}
	}
	if l.gather.due(&due) && !due.After(now) {
		return directive{kind: skip}
	}
	l.post()
	if l.in.head < len(l.in.back) {
		// A request above put frames aside that came before anything that the
		// channel still gives.
		l.stretch = time.Now()
		return directive{kind: skip}
	}
	l.arm(due)
	var d directive
	var m *nats.Msg
	var turn <-chan struct{}
	if l.line.need > 0 {
		turn = l.share.doorbell()
	}
	event := nats.Status(-1)
	l.park(true)
	select {
	case m = <-l.in.ch:
	case event = <-l.link.events:
	case <-turn:
	case <-l.bell:
	case <-l.timer.C:
		l.armed = time.Time{}
	case <-l.done:
	}
	l.park(false)
	switch {
	case m != nil:
		if l.work != nil {
			l.empty = time.Now() // up to this message
		}
		d = l.interpret(m, into)
	case event >= 0:
		l.event(event)
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
		if l.work != nil {
			l.work.body = now.Sub(l.stretch) / time.Duration(l.handled)
		}
		l.pace.handled(l.handled, now.Sub(l.stretch), l.taken)
		l.handled, l.taken = 0, 0
	}
	l.stretch = now
}

// aside leaves the time since start out of the body's: the loop waited for an
// answer in the middle of a stretch.
func (l *loop) aside(start time.Time) { l.stretch = l.stretch.Add(time.Since(start)) }

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
		s.RoundTrip = l.pace.trip
		if l.work != nil {
			s.Unsettled = int(l.work.books.open.Load())
			s.UnsettledSince = l.work.oldest
			s.Expired += l.work.expired
			l.work.expired = 0
		}
		l.n.messages, l.n.bytes, l.n.pulls = 0, 0, 0
	})
}

// leave is how a loop ends, whichever way: nothing stays behind. The yield of
// the last error came first; what touches the connection runs beside the
// caller, who waits for it only while the connection is up, because nats.go
// holds its lock while it dials.
func (l *loop) leave() {
	l.timer.Stop()
	if l.work != nil {
		l.work.keeper.halt()
	}
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
		l.clean(up)
	}()
	if !up {
		return
	}
	wait := exitTime
	if l.work != nil {
		wait = exitHandBack
	}
	limit := time.NewTimer(wait)
	defer limit.Stop()
	select {
	case <-done:
	case <-limit.C:
	}
}

// exitTime is how long an exit waits for its own clean-up while connected.
const exitTime = 50 * time.Millisecond

// clean removes subscriptions, listener and consumer.
func (l *loop) clean(up bool) {
	if l.work != nil {
		l.work.keeper.join()
		if up && l.in.ch != nil && l.gen != nil {
			l.handBack()
		}
	}
	if l.making && l.name != "" && l.in.ch != nil {
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
		l.litter = append(l.litter, leftover{name: l.name})
	}
	l.sweep()
	l.link.detach()
}

// drop closes the generation that was lost.
func (l *loop) drop() {
	if l.work == nil {
		l.in.close()
	} else if !l.up || l.giveUp(0, 1) != nil {
		// Still ours: what has arrived. The rest of what was owed is not
		// counted on.
		for i := range l.in.slots {
			l.in.giveUp(i)
		}
	}
	l.vet, l.beside = vet{}, beside{}
	l.leaveLine()
	l.post()
	if l.name != "" {
		l.litter = append(l.litter, leftover{name: l.name})
		l.name = ""
	}
	if l.work == nil {
		l.gen = nil // a durable consumer keeps its name, and what waits is its
	}
}
