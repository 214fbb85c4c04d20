package paced

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// work is what a loop with explicit acknowledgements knows beside what all
// loops know: the consumer as it is on the server, and what it handed out.
type work struct {
	cfg    *ConsumeConfig
	handle *Consumer // nil: none
	board  *board
	books  *ledger
	keeper *keeper

	met     bool      // the consumer was there once
	stream  time.Time // when the stream was created
	created time.Time // when the consumer was
	shrunk  bool      // the stream's last sequence was once below what was seen
	told    bool      // that the consumer was deleted
	missing time.Time // since when it is not found; zero: it is there

	waits    []time.Duration // how long each delivery may take
	least    time.Duration   // the shortest of them
	attempts uint64          // MaxDeliver; 0: no limit

	body    time.Duration // what the body took per message when last measured
	hand    []Msg         // received, and not with the body yet
	claims  []*claim      // in the order they were made
	slab    []claim       // to make the next ones of
	crowd   int           // how many of them are to be looked through
	oldest  time.Time     // since when the oldest open one is out
	leaving bool          // the loop has ended: nothing is asked any more
	expired uint64
	lapsed  int    // handed out, and AckWait passed
	forgot  bool   // that was said
	settled uint64 // how many were settled then

	elsewhere   uint64    // the last consumer sequence sent, where that did not come here
	elsewhereAt time.Time // since when it is that one

	// For DeletedRecreate: what is to be delivered again.
	floor   uint64              // everything up to here was acknowledged, as the server said
	seen    uint64              // the last stream sequence received
	cseq    uint64              // the last consumer sequence received
	high    uint64              // the last stream sequence received from the consumer as it is now
	shared  bool                // other loops received messages as well
	unacked map[uint64]struct{} // received, and neither acknowledged nor in claims
	asked   time.Time           // when the server last said
}

func (w *work) run(ctx context.Context, js jetstream.JetStream, g *gather, yield func(Msg, error) bool) {
	where := "stream " + w.cfg.Stream + ", consumer " + w.cfg.name()
	if ctx.Err() != nil {
		yield(Msg{}, newDoneError(ctx, where))
		return
	}
	if w.handle != nil && w.handle.drained.Load() {
		return
	}
	nc, err := usable(js)
	if err != nil {
		yield(Msg{}, err)
		return
	}
	if nc.IsClosed() {
		yield(Msg{}, fmt.Errorf("paced: %s: %w", where, nats.ErrConnectionClosed))
		return
	}
	l := newLoop(ctx, newLink(nc), joinBudget(nc))
	l.apiPrefix = apiPrefix(js)
	w.prepare(l, g)
	l.run(yield)
}

// prepare sets a loop up for this consumer.
func (w *work) prepare(l *loop, g *gather) {
	c := w.cfg
	l.work, l.gather = w, g
	l.where, l.stream = "stream "+c.Stream+", consumer "+c.name(), c.Stream
	l.tuning, l.lis, l.board = c.Tuning, c.Listener, w.board
	l.maxMessages, l.maxBytes = c.MaxMessages, c.MaxBytes
	l.pace = newPacer(c.MaxMessages, 1, c.Tuning.LookAhead)
	l.recipe = recipe{create: w.create}
	l.exact = true
	l.caught = !c.UntilEmpty // until then only what is pending is asked for
	l.target = 1<<64 - 1     // a queue has no end to catch up with
	l.empty = time.Now()
	w.books = &ledger{
		link:    l.link,
		where:   l.where,
		start:   l.empty,
		confirm: c.ConfirmTimeout,
		bell:    make(chan struct{}, 1),
	}
	l.bell = w.books.bell
	if w.handle != nil {
		w.handle.current.Store(w.books)
		l.onLeave = func() { w.handle.current.Store(nil) }
	}
	if c.Progress > 0 {
		w.keeper = newKeeper(l)
	}
}

// draining reports whether Drain was called.
func (l *loop) draining() bool {
	return l.work != nil && l.work.handle != nil && l.work.handle.drained.Load()
}

// create finds the consumer, or makes it.
func (w *work) create(l *loop) error {
	c := w.cfg
	if w.told && c.OnDeleted == DeletedFail {
		return jetstream.ErrConsumerDeleted
	}
	info, err := l.streamInfo(l.api("STREAM.INFO." + c.Stream))
	if err != nil {
		return err
	}
	if err := w.meet(l, info); err != nil {
		return err
	}
	ci, err := l.consumerInfo(c.name())
	replaced := err == nil && w.met && !ci.Created.Equal(w.created)
	switch {
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		if ci, err = w.makeAgain(l); err != nil {
			return err
		}
		replaced = w.met
	case err != nil:
		return err
	case replaced && c.OnDeleted == DeletedFail:
		return jetstream.ErrConsumerDeleted
	}
	if replaced {
		// What waits here is of a consumer that is no more.
		w.forget(l)
	}
	return w.adopt(l, ci)
}

// meet compares the stream with what it was.
func (w *work) meet(l *loop, info *jetstream.StreamInfo) error {
	if !w.met {
		w.stream = info.Created
	}
	if !info.Created.Equal(w.stream) {
		return fmt.Errorf("%w: created %v, was %v", ErrStreamRecreated, info.Created, w.stream)
	}
	if info.State.LastSeq < w.seen {
		if w.shrunk {
			return fmt.Errorf("%w: its last sequence is %d", ErrStreamRecreated, info.State.LastSeq)
		}
		w.shrunk = true
		return errBehind
	}
	w.shrunk = false
	l.maxMessage = largest(l, info)
	return nil
}

// makeAgain makes the consumer that was not found.
func (w *work) makeAgain(l *loop) (*jetstream.ConsumerInfo, error) {
	cc := w.cfg.Consumer
	if w.met {
		switch {
		case w.cfg.OnDeleted == DeletedRecreate:
			// The start is known by now, whatever the configuration said.
			cc.DeliverPolicy = jetstream.DeliverByStartSequencePolicy
			cc.OptStartSeq, cc.OptStartTime = w.acknowledged()+1, nil
		case w.missing.IsZero():
			w.missing = time.Now() // a server that starts up may not know it yet
			return nil, errMissing
		case time.Since(w.missing) < missingFor:
			return nil, errMissing
		default:
			return nil, jetstream.ErrConsumerDeleted
		}
	}
	subject := "CONSUMER.CREATE." + w.cfg.Stream + "." + w.cfg.name()
	if cc.FilterSubject != "" {
		subject += "." + cc.FilterSubject
	}
	cc.Name = w.cfg.name()
	return l.consumerCreate(l.api(subject), consumerCreate{Stream: w.cfg.Stream, Config: cc, Action: "create"})
}

// adopt takes over the consumer as it is on the server.
func (w *work) adopt(l *loop, ci *jetstream.ConsumerInfo) error {
	c, cc := w.cfg, &ci.Config
	unfit := func(what, bound string) error {
		return &ConfigError{Field: "ConsumeConfig.Consumer", Value: quoted(c.name()) + " of stream " + quoted(c.Stream) + " (" + what + ")", Bound: bound}
	}
	switch {
	case cc.DeliverSubject != "":
		return unfit("a push consumer", "a pull consumer")
	case cc.AckPolicy != jetstream.AckExplicitPolicy:
		return unfit("ack policy "+cc.AckPolicy.String(), "a consumer with explicit acknowledgements")
	}
	if err := c.progressFits(waits(cc)); err != nil {
		return err
	}
	w.waits, w.attempts = waits(cc), uint64(max(cc.MaxDeliver, 0))
	w.least = slices.Min(w.waits)
	l.pace.most = w.least / 2
	l.maxMessages = c.MaxMessages
	if n := cc.MaxAckPending; n > 0 {
		l.maxMessages = min(l.maxMessages, n)
	}
	l.pace.limit = l.maxMessages
	l.limits = pullLimits{batch: cc.MaxRequestBatch, bytes: cc.MaxRequestMaxBytes, expires: cc.MaxRequestExpires}
	l.in.use = 2
	if cc.MaxWaiting == 1 {
		l.in.use = 1
	}
	l.serial++
	l.gen = &generation{stream: c.Stream, consumer: c.name(), created: w.stream, number: l.serial}
	l.ack = ""
	l.pullTo = l.api("CONSUMER.MSG.NEXT." + c.Stream + "." + c.name())
	l.pos.pending = ci.NumPending + uint64(ci.NumRedelivered)
	if w.cseq == 0 {
		w.cseq = ci.Delivered.Consumer
	}
	w.met, w.told, w.missing, w.created = true, false, time.Time{}, ci.Created
	w.refresh(ci)
	return nil
}

// refresh takes over the ack floor as the server has it.
func (w *work) refresh(ci *jetstream.ConsumerInfo) {
	w.asked = time.Now()
	w.floor = ci.AckFloor.Stream
	if int64(ci.NumAckPending) > w.books.open.Load() {
		w.shared = true // there are claims that are not ours
	}
}

// stale reports whether the floor should be asked for again: only where a new
// consumer would start there, and the messages of others are not known here.
func (w *work) stale(now time.Time) bool {
	return w.shared && w.cfg.OnDeleted == DeletedRecreate && now.Sub(w.asked) >= refreshEvery
}

// forget drops what waits and what is out: its consumer is no more.
func (w *work) forget(l *loop) {
	l.in.close()
	_ = l.in.start(capacity(l.pace.credit, l.maxMessages), statusRoom(defaultExpires, catchUpHeartbeat))
	for _, c := range w.claims {
		c.free()
	}
	w.given()
	l.gather.forget()
	// The new one begins behind what is acknowledged and delivers the rest
	// again; until it has, what its predecessor delivered counts for nothing.
	w.cseq, w.high, w.shared, w.unacked = 0, 0, false, nil
	clear(w.claims)
	w.claims = w.claims[:0]
}

// wait returns how long a delivery may take.
func (w *work) wait(delivered uint64) time.Duration {
	return w.waits[min(max(delivered, 1), uint64(len(w.waits)))-1]
}

// ahead reports whether messages may be asked for while the body works: not
// where an attempt would be lost if they are handed back, nor where they would
// wait for more than half of AckWait behind one body.
func (w *work) ahead() bool {
	if w.attempts > 0 && w.cfg.Tuning.LookAhead == 0 {
		return false
	}
	return w.body <= w.least/2
}

// receive makes a claim of a message and judges whether there is still time for
// it. base is the earliest moment at which it can have been sent.
func (w *work) receive(msg *Msg, base time.Time) directive {
	now := time.Now()
	if len(w.slab) == 0 {
		w.slab = make([]claim, 32) // one allocation for 32 messages
	}
	c := &w.slab[0]
	w.slab = w.slab[1:]
	c.ledger, c.reply, c.seq, c.wait, c.since = w.books, msg.m.Reply, msg.seq, w.wait(msg.NumDelivered()), now
	if w.keeper != nil {
		base = w.keeper.kept(msg.m, base)
	}
	c.extend(base.Add(c.wait))
	c.counted.Store(true)
	w.books.open.Add(1)
	if len(w.claims) >= w.crowd {
		w.sweep(now) // a loop that is never parked
		w.crowd = 2*len(w.claims) + 1024
	}
	w.claims = append(w.claims, c)
	w.note(msg)
	last := w.attempts > 0 && msg.NumDelivered() >= w.attempts
	if left := base.Add(c.wait).Sub(now); !last && left < min(max(w.body, c.wait/4), c.wait/2) {
		// The server is about to take it back. The claim stays until then.
		c.state.Store(claimReturned)
		w.expired++
		return directive{kind: skip}
	}
	msg.claim = c
	w.hand = append(w.hand, *msg)
	return directive{kind: deliver}
}

// note keeps account of what a new consumer would have to deliver again.
func (w *work) note(m *Msg) {
	if m.cseq != w.cseq+1 {
		w.shared = true // or reset: what we know is not enough either way
	}
	w.cseq, w.seen, w.high = m.cseq, max(w.seen, m.seq), max(w.high, m.seq)
}

// acknowledged returns the sequence up to which everything is acknowledged.
func (w *work) acknowledged() uint64 {
	w.sweep(time.Now())
	if w.shared {
		return w.floor
	}
	floor := max(w.floor, w.high)
	for _, c := range w.claims {
		if c.state.Load() != claimAcked {
			floor = min(floor, c.seq-1)
		}
	}
	for seq := range w.unacked {
		floor = min(floor, seq-1)
	}
	return max(floor, w.floor)
}

// sweep drops claims that are settled, takes back the credit of those whose
// AckWait has passed and returns when that next happens; zero: nothing is out.
func (w *work) sweep(now time.Time) (next time.Time) {
	w.oldest = time.Time{}
	kept := w.claims[:0]
	for _, c := range w.claims {
		state := c.state.Load()
		if deadline := c.deadline(); c.counted.Load() {
			if now.Before(deadline) {
				kept = append(kept, c)
				if next.IsZero() || deadline.Before(next) {
					next = deadline
				}
				if state <= claimSettling && (w.oldest.IsZero() || c.since.Before(w.oldest)) {
					w.oldest = c.since
				}
				continue
			}
			if c.free() && state == claimOpen {
				w.expired++
				w.lapsed++
			}
		}
		w.settle(c)
	}
	clear(w.claims[len(kept):])
	w.claims = kept
	return next
}

// settle takes note of a claim that is over.
func (w *work) settle(c *claim) {
	if w.cfg.OnDeleted != DeletedRecreate {
		return
	}
	if c.state.Load() == claimAcked {
		delete(w.unacked, c.seq)
		return
	}
	if w.unacked == nil {
		w.unacked = map[uint64]struct{}{}
	}
	w.unacked[c.seq] = struct{}{}
}

// given takes note that what was received is with the body.
func (w *work) given() {
	clear(w.hand)
	w.hand = w.hand[:0]
}

// tend does what is due about the claims of a loop that found nothing to read,
// and returns when something is due next; zero: nothing.
func (w *work) tend(l *loop, now time.Time) time.Time {
	next := w.sweep(now)
	open := int(w.books.open.Load())
	full := l.in.owed+open >= l.maxMessages
	w.books.parked.Store(full)
	if !full {
		next = time.Time{} // their credit is not missed
	}
	if settled := w.books.settled.Load(); open == 0 && settled > w.settled {
		w.settled, w.forgot = settled, false
	}
	late := w.oldest.Add(w.least / 2)
	switch {
	case w.forgot:
		w.lapsed = 0
	case w.lapsed > 0:
		l.failed(fmt.Errorf("%d messages were not settled within AckWait", w.lapsed))
		w.forgot, w.lapsed, w.settled = true, 0, w.books.settled.Load()
	case full && open > 0 && !w.oldest.IsZero():
		if now.Before(late) {
			if late.Before(next) {
				next = late
			}
			return next // what was not handed out may be due before
		}
		l.failed(fmt.Errorf("%d messages are not settled, the oldest since %v: nothing more is asked for", open, w.oldest.Format(time.RFC3339)))
		w.forgot, w.settled = true, w.books.settled.Load()
	}
	return next
}

// unheard judges silence of a consumer that is there. The server drops pulls
// beyond MaxWaiting without a word where they ask for heartbeats
// (consumer.go:4795).
func (l *loop) unheard(ci *jetstream.ConsumerInfo) directive {
	if !ci.Created.Equal(l.work.created) {
		return directive{kind: restart, reason: jetstream.ErrConsumerDeleted} // and made anew
	}
	reason := errSilent
	if n := ci.Config.MaxWaiting; n > 0 && ci.NumWaiting >= n {
		reason = errOverflow
		l.in.use = 1
	}
	l.failed(reason)
	if err := l.giveUp(0, 1); err != nil {
		return directive{kind: restart, reason: err}
	}
	return directive{kind: pullOver}
}

// emptied asks whether the consumer has nothing for anybody. It is called when
// a pull has shown that nothing can be delivered right now: what is pending
// then is held back by a pause or by MaxAckPending. A pause holds back what is
// due for redelivery as well (consumer.go:5455), which is not pending.
func (l *loop) emptied() directive {
	if l.work.leaving {
		return directive{kind: skip}
	}
	ci, err := l.consumerInfo(l.gen.consumer)
	if err != nil || l.in.waiting() > 0 || l.moved || !l.up {
		return directive{kind: skip} // asked again with the next pull
	}
	l.pos.pending = ci.NumPending
	if ci.NumPending > 0 || (ci.Paused && int64(ci.NumAckPending) > l.work.books.open.Load()) {
		return directive{kind: skip}
	}
	if w := l.work; ci.Delivered.Consumer > w.cseq {
		// To others, or to us: on replicated consumers data comes behind
		// heartbeats and answers (consumer.go:5834).
		if now := time.Now(); ci.Delivered.Consumer != w.elsewhere {
			w.elsewhere, w.elsewhereAt = ci.Delivered.Consumer, now
			return directive{kind: skip}
		} else if now.Sub(w.elsewhereAt) < onItsWay {
			return directive{kind: skip}
		}
	}
	l.over = true
	return directive{kind: skip}
}

// drainPulls goes towards the end that Drain asked for, with nothing left to read:
// the interest is ended, what comes all the same is yielded.
func (l *loop) drainPulls(now time.Time) (due time.Time) {
	if !l.up {
		l.over = true // nothing comes any more
		return now
	}
	var old []int
	for i := range l.in.slots {
		s := &l.in.slots[i]
		if t := s.binds(); t.After(now) {
			if due.IsZero() || t.Before(due) {
				due = t
			}
		} else if s.open {
			old = append(old, i)
		}
	}
	if len(old) > 0 {
		if err := l.giveUp(old...); err != nil {
			l.over = true
		}
		return now
	}
	l.over = due.IsZero()
	return due
}

// handBack returns what has arrived and was not handed out, at the end of a
// loop. All of it is held until the loop's pulls are over: given back while one
// is open it would come straight back, an attempt each time. Only then is the
// interest ended, see youth.
func (l *loop) handBack() {
	w := l.work
	w.leaving = true
	end := time.Now().Add(handBackTime)
	barrier := func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), barrierTime)
		defer cancel()
		return l.link.barrier(ctx) == nil
	}
	var unseen Msg
	read := func() {
		for m := l.in.take(); m != nil; m = l.in.take() {
			l.interpret(m, &unseen)
		}
	}
	if !barrier() {
		return // a mute server; AckWait is the backstop
	}
	read()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := time.Now()
		var until time.Time
		for i := range l.in.slots {
			if t := l.in.slots[i].binds(); t.After(until) {
				until = t
			}
		}
		if until.After(end) {
			until = end
		}
		if !until.After(now) {
			break
		}
		timer.Reset(until.Sub(now))
		select {
		case m := <-l.in.ch:
			l.interpret(m, &unseen)
		case s := <-l.link.events:
			if s != nats.CONNECTED {
				return
			}
		case <-timer.C:
		}
	}
	for i := range l.in.slots {
		if s := &l.in.slots[i]; s.sub != nil {
			l.link.drain(s.sub)
		}
	}
	if !barrier() {
		return
	}
	read()
	n := 0
	for _, m := range w.hand {
		if m.Nak() == nil {
			n++
		}
	}
	if n > 0 && l.lis.HandedBack != nil {
		l.lis.HandedBack(n)
	}
}
