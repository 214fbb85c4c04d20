package paced

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Requests of the loop do not go through jetstream's own calls: their answers
// come through the loop's inbox, so that the loop can be left at any moment,
// nothing waits behind nats.go's request table, an answer is a barrier behind
// the data that was on the wire, and a refused request is known after one
// round trip instead of a timeout.

// apiError is the part of an answer that says what went wrong.
type apiError struct {
	Error *jetstream.APIError `json:"error"`
}

type consumerCreate struct {
	Stream string                   `json:"stream_name"`
	Config jetstream.ConsumerConfig `json:"config"`
	Action string                   `json:"action,omitempty"`
}

type consumerAnswer struct {
	apiError
	*jetstream.ConsumerInfo
}

type streamAnswer struct {
	apiError
	*jetstream.StreamInfo
}

// answered returns the API error of an answer. It is the sentinel of package
// jetstream under errors.Is where there is one, by its code.
func (a *apiError) answered() error {
	if a.Error == nil {
		return nil
	}
	return a.Error
}

// transient reports whether the same request may succeed later. The server's
// codes are those of HTTP: 4xx is about the request, 5xx about the moment. Two
// of the former pass as well: too many consumers, and a name taken by one of
// our own that is being deleted.
func transient(err error) bool {
	for _, final := range []error{nats.ErrPermissionViolation, nats.ErrConnectionClosed, ErrInvalidConfig, ErrStreamRecreated, jetstream.ErrConsumerDeleted} {
		if errors.Is(err, final) {
			return false
		}
	}
	if _, ok := errors.AsType[*GapError](err); ok {
		return false
	}
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.Code >= 500 || api.Code == 408 || api.Code == 429 ||
			api.ErrorCode == jetstream.JSErrCodeMaximumConsumersLimit ||
			// A consumer of that name that is being deleted is there still,
			// and cannot be updated any more (consumer.go:1126, 2612).
			api.ErrorCode == jetstream.JSErrCodeConsumerDoesNotExist || errors.Is(err, errNotMissing)
	}
	return true
}

// request sends a request and waits for its answer. Frames that arrive
// meanwhile are kept in order. It takes at most the loop's patience, which
// doubles with every time-out.
func (l *loop) request(subject string, body []byte) (*nats.Msg, error) {
	if !l.up {
		return nil, errNotYet
	}
	reply := l.in.token(0)
	l.asked = reply
	before := l.link.lastError()
	start := time.Now()
	if err := l.link.publish(subject, reply, body); err != nil {
		return nil, err
	}
	if err := l.barrier(before, subject, l.in.slots[0].inbox+"*"); err != nil {
		return nil, fmt.Errorf("%s: %w", subject, err)
	}
	m, err := l.await(reply, time.Now().Add(l.patience))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", subject, err)
	}
	now := time.Now()
	l.pace.trip = l.share.roundTrip(now.Sub(start), now)
	if m.Header.Get("Status") == "503" && len(m.Data) == 0 {
		return nil, fmt.Errorf("%s: %w", subject, nats.ErrNoResponders)
	}
	return m, nil
}

// barrier waits until the server has read everything sent so far and all that
// it had sent before has arrived, and returns an error if it refused one of the
// subjects. On a link that is busy with our own data that may take as long as
// the server lets a write take; the loop's patience counts while nothing
// arrives.
func (l *loop) barrier(before error, subjects ...string) error {
	start, seen := time.Now(), l.link.stats().InBytes
	defer l.aside(start)
	for {
		ctx, cancel := context.WithTimeout(l.ctx, l.patience)
		l.park(true)
		err := l.link.barrier(ctx)
		l.park(false)
		cancel()
		switch {
		case err == nil:
			l.deaf = 0
			l.read()
			return l.link.refused(before, subjects...)
		case l.ctx.Err() != nil:
			return l.ctx.Err()
		case !errors.Is(err, context.DeadlineExceeded):
			return errNotYet // an event tells more
		}
		now := l.link.stats().InBytes
		if now == seen || time.Since(start) >= writeDeadline {
			l.patience = min(2*l.patience, maxRequestTimeout)
			l.deaf++
			return errDeaf
		}
		seen = now
	}
}

// writeDeadline is how long the server lets a write to a client take before it
// cuts the connection (const.go:132): what was sent arrives within that time,
// or not at all.
const writeDeadline = 10 * time.Second

// await reads until the frame with this subject comes, and puts the others
// aside.
func (l *loop) await(reply string, deadline time.Time) (*nats.Msg, error) {
	defer l.aside(time.Now())
	for i := l.in.head; i < len(l.in.back); i++ {
		if m := l.in.back[i]; m.Subject == reply && m.Reply == "" {
			l.in.back = append(l.in.back[:i], l.in.back[i+1:]...)
			return m, nil
		}
	}
	for {
		l.arm(deadline)
		var m *nats.Msg
		event := nats.Status(-1)
		fired := false
		l.park(true)
		select {
		case m = <-l.in.ch:
		case event = <-l.link.events:
		case <-l.timer.C:
			fired = true
		case <-l.done:
		}
		l.park(false)
		switch {
		case m != nil:
			if m.Subject == reply && m.Reply == "" {
				return m, nil
			}
			if !l.swept(m) {
				l.in.back = append(l.in.back, m)
			}
		case event >= 0:
			l.event(event)
			if l.closed {
				return nil, nats.ErrConnectionClosed
			}
			if !l.up || l.moved {
				return nil, errNotYet
			}
		case fired:
			l.armed = time.Time{}
			if !time.Now().Before(deadline) {
				l.patience = min(2*l.patience, maxRequestTimeout)
				return nil, errNoAnswer
			}
		default:
			return nil, l.ctx.Err()
		}
	}
}

func (l *loop) call(subject string, body, answer any) error {
	var data []byte
	if body != nil {
		var err error
		if data, err = json.Marshal(body); err != nil {
			return err
		}
	}
	m, err := l.request(subject, data)
	if err != nil {
		return err
	}
	return json.Unmarshal(m.Data, answer)
}

func (l *loop) streamInfo(subject string) (*jetstream.StreamInfo, error) {
	var a streamAnswer
	if err := l.call(subject, nil, &a); err != nil {
		return nil, err
	}
	return a.check()
}

func (a *streamAnswer) check() (*jetstream.StreamInfo, error) {
	if err := a.answered(); err != nil {
		return nil, err
	}
	if a.StreamInfo == nil {
		return nil, errors.New("empty answer to a stream info request")
	}
	return a.StreamInfo, nil
}

func (l *loop) consumerCreate(subject string, req consumerCreate) (*jetstream.ConsumerInfo, error) {
	var a consumerAnswer
	l.making = true
	if err := l.call(subject, req, &a); err != nil {
		l.making = !errors.Is(err, nats.ErrPermissionViolation)
		return nil, err
	}
	l.making = false
	return a.check()
}

func (a *consumerAnswer) check() (*jetstream.ConsumerInfo, error) {
	if err := a.answered(); err != nil {
		if a.Error.ErrorCode == jetstream.JSErrCodeConsumerExists {
			err = fmt.Errorf("%w: %w", errNotMissing, err)
		}
		return nil, err
	}
	if a.ConsumerInfo == nil {
		return nil, errors.New("empty answer to a consumer request")
	}
	return a.ConsumerInfo, nil
}

// consumerInfo asks for the consumer. The answer does not come through the
// queue of data and statuses (stream.go:8580) and may overtake them.
func (l *loop) consumerInfo(name string) (*jetstream.ConsumerInfo, error) {
	var a consumerAnswer
	if err := l.call(l.api("CONSUMER.INFO."+l.stream+"."+name), nil, &a); err != nil {
		return nil, err
	}
	return a.check()
}

// probe asks whether the consumer is there. The answer is a barrier: what was
// on the wire has arrived before it, so that only the silence behind it counts.
func (l *loop) probe() directive {
	arrived := l.in.waiting()
	again := !l.recheck.at.IsZero()
	l.recheck = recheck{}
	if l.recipe.replay {
		l.doubt = len(l.in.slots)
	}
	info, err := l.consumerInfo(l.gen.consumer)
	l.quiet = time.Time{} // the time this took was not spent listening
	switch {
	case l.ctx.Err() != nil || l.moved || l.closed || !l.up:
		return directive{kind: skip} // drain looks at these first
	case errors.Is(err, errDeaf):
		// Connected, and nothing arrives. Tell, and let a rebuild go on
		// trying: it will not succeed before something changes.
		l.failed(fmt.Errorf("%w, and no answer to a request: the connection may be half open", errSilent))
		l.forceReconnect()
		return directive{kind: restart, reason: errSilent}
	case err != nil:
		// Not found, offline, not permitted to ask: a rebuild finds out.
		return directive{kind: restart, reason: fmt.Errorf("%w: %w", errSilent, err)}
	case l.in.waiting() > arrived:
		return directive{kind: skip} // it was only late
	case l.work != nil:
		return l.unheard(info)
	case info.Delivered.Consumer > l.pos.cseq && !again:
		// Sent, and not here: the answer may have overtaken it. Asked again a
		// second after the connection fell silent, it is the truth.
		now := time.Now()
		l.recheck = recheck{at: now.Add(time.Second), until: now.Add(writeDeadline), seen: l.link.stats().InBytes}
		return directive{kind: skip}
	case info.Delivered.Consumer != l.pos.cseq:
		return directive{kind: restart, reason: errLostTail}
	case l.recipe.replay:
		// Keeping the original pace the server sleeps with a message in hand
		// and says nothing (consumer.go:5552). It lives; that is enough.
		// Asked less and less often, up to every half minute.
		l.asleep = min(l.asleep+1, 5)
		for i := range l.in.slots {
			l.in.slots[i].heard = time.Now().Add(time.Second << l.asleep)
		}
		return directive{kind: skip}
	}
	// The consumer lives and has nothing for us, but our pull is not heard
	// of: its end was lost, or the server dropped it in silence.
	if l.list.active {
		return directive{kind: restart, reason: errUnfilled}
	}
	if l.pos.cseq == 0 && !l.exact {
		return directive{kind: restart, reason: errReset}
	}
	l.failed(errSilent)
	if err := l.giveUp(0, 1); err != nil {
		return directive{kind: restart, reason: err}
	}
	return directive{kind: pullOver}
}

// forceReconnect gives up a connection that is up and carries nothing, if told
// to.
func (l *loop) forceReconnect() {
	if !l.tuning.ReconnectHalfOpen {
		return
	}
	if err := l.link.reconnect(); err != nil {
		l.failed(err)
		return
	}
	l.up = false // until an event says otherwise
	l.deaf = 0
}

// locate asks where the consumer is when there is no room for a confirming
// pull. The answer says what a heartbeat would (consumer.go:3594). If it says
// that nothing is pending either, what our pulls wait for was removed, and the
// scan position is only old: one of them makes room for a confirming pull,
// which wakes the server up. Giving it up unasked would lose what a slow server
// is about to send.
func (l *loop) locate() directive {
	info, err := l.consumerInfo(l.gen.consumer)
	if err != nil || l.in.waiting() > 0 || l.moved || !l.up {
		return directive{kind: skip} // silence tells the rest
	}
	if info.Delivered.Consumer != l.pos.cseq {
		return directive{kind: skip} // sent and not here yet
	}
	k, reason := l.pos.heard(info.Delivered.Consumer, info.Delivered.Stream)
	if k == skip && info.NumPending == 0 && !l.pos.reached(l.target) {
		l.pos.pending = 0
		l.nextConfirm = time.Time{}
		if err := l.giveUp(l.in.oldest()); err != nil {
			return directive{kind: restart, reason: err}
		}
		return directive{kind: pullOver}
	}
	return directive{kind: k, reason: reason}
}

// giveUp drops the slots' inboxes and with them the pulls whose state is
// unknown. Requests are answered through the first slot, so that what is out is
// asked for again.
//
// Under explicit ack what is dropped on the way costs an attempt and AckWait.
// So the interest is ended first and a barrier brings what was sent before; a
// young pull is read until it is old enough.
func (l *loop) giveUp(slots ...int) error {
	now := time.Now()
	var drained []int
	first := false
	for _, i := range slots {
		s := &l.in.slots[i]
		switch {
		case s.sub == nil:
			continue
		case l.work == nil:
			l.in.giveUp(i)
		case i < fades(0) && s.young(now) && l.in.slots[fades(i)].sub == nil:
			l.in.fade(i)
		default:
			l.link.drain(s.sub)
			drained = append(drained, i)
		}
		first = first || i == 0
	}
	if len(drained) > 0 {
		if err := l.barrier(l.link.lastError()); err != nil {
			return err
		}
		for _, i := range drained {
			l.in.abandon(i)
		}
	}
	if !first {
		return nil
	}
	l.beside = beside{}
	if err := l.in.connect(0); err != nil {
		return err
	}
	if l.vet.open && l.vet.answer == nil {
		return l.askVet()
	}
	return nil
}

// orRebuild sorts an error of a request made in the middle of reading: the end
// of the context ends the sequence, anything else a new generation deals with.
func (l *loop) orRebuild(err error) error {
	if l.ctx.Err() != nil {
		return newDoneError(l.ctx, l.where)
	}
	return &rebuild{err}
}

// greet puts a barrier behind the first pull of a generation. A pull that the
// account may not send is answered by nothing but an error on the connection.
func (l *loop) greet(before error) directive {
	l.greeted, l.greetedAt = true, time.Now()
	subjects := []string{l.pullTo, l.in.slots[0].inbox + "*"}
	if l.vet.open {
		subjects = append(subjects, l.vet.subject)
		before = l.vet.before
	}
	if err := l.barrier(before, subjects...); errors.Is(err, nats.ErrPermissionViolation) {
		return directive{kind: fail, reason: err}
	}
	return directive{kind: skip} // any other trouble shows by itself
}

// leftover is a consumer to delete.
type leftover struct {
	name  string
	asked string // where the answer comes
	sent  bool
	on    uint64 // the connection that the request went out on, by its reconnects
	read  int    // how often the server has read of it
}

const (
	litterMost = 8 // leftovers remembered, and room for their answers
	litterRead = 3 // unanswered requests that the server has read
)

// sweep asks for the consumers left behind to be deleted. Nobody waits for the
// answers, but until one came the next rebuild or reconnect, and the exit, ask
// again: a link that flaps swallows deletes with everything else, a cluster
// without a meta leader reads them and does nothing, and each would leave a
// consumer every time. InactiveThreshold is the backstop behind that. Who may
// not delete is never answered, so that three times is enough.
func (l *loop) sweep() {
	l.litter = l.litter[max(0, len(l.litter)-litterMost):]
	for i := range l.litter {
		o := &l.litter[i]
		o.sent, o.on = true, l.link.stats().Reconnects
		o.asked = l.link.newInbox() // the server ignores a request without
		if l.in.ch != nil {
			o.asked = l.in.token(0)
		}
		_ = l.link.publish(l.api("CONSUMER.DELETE."+l.stream+"."+o.name), o.asked, nil)
	}
}

// read counts the requests that the server has read: a barrier came back.
func (l *loop) read() {
	if len(l.litter) == 0 {
		return
	}
	now := l.link.stats().Reconnects
	l.litter = slices.DeleteFunc(l.litter, func(o leftover) bool { return o.sent && o.on == now && o.read+1 >= litterRead })
	for i := range l.litter {
		if o := &l.litter[i]; o.sent && o.on == now {
			o.sent = false
			o.read++
		}
	}
}

// swept reports whether m answers one of sweep's requests, and forgets that
// consumer if it is gone.
func (l *loop) swept(m *nats.Msg) bool {
	i := slices.IndexFunc(l.litter, func(o leftover) bool { return o.asked == m.Subject })
	if i < 0 {
		return false
	}
	var a struct {
		apiError
		Success bool `json:"success"`
	}
	if json.Unmarshal(m.Data, &a) == nil && (a.Success || (a.Error != nil && a.Error.Code == 404)) {
		l.litter = slices.Delete(l.litter, i, i+1)
	}
	return true
}

// subscribe makes the next generation of the consumer and starts reading from
// it. reason is nil for the first one. It returns nil, or the error that ends
// the sequence.
func (l *loop) subscribe(reason error) error {
	first := reason == nil
	if l.serial > 0 && !l.progress && time.Since(l.since) < maxBackoff {
		// The generation that was lost brought nothing: go on counting.
	} else if !first {
		l.attempt = 0
	}
	shutdown := false
	if s, ok := errors.AsType[*StatusError](reason); ok && s.Description == statusServerShutdown {
		// A consumer made at once would be made by the server that goes. If
		// the connection goes with it, the next one is the moment.
		shutdown, l.attempt = true, max(l.attempt, 2)
	}
	// The server tells of a deletion before the files are gone. A consumer of that
	// name that is made at once takes over what was delivered and not acknowledged,
	// and delivers it only after AckWait.
	told := l.work != nil && l.work.cfg.OnDeleted == DeletedRecreate && errors.Is(reason, jetstream.ErrConsumerDeleted)
	missing := time.Time{} // when the stream was first found missing
	for {
		l.attempt++
		delay := l.backoff(first)
		if told {
			delay, told = max(delay, l.jitter(100*time.Millisecond)), false
		}
		if !first || l.attempt > 1 {
			err := l.errorf(reason)
			l.failed(reason)
			if l.lis.Resubscribing != nil {
				l.lis.Resubscribing(err, l.attempt, delay)
			}
		}
		if err := l.sleep(delay, first, shutdown); err == errFinished && l.gen != nil {
			return nil // what has arrived, or is on its way, is yielded first
		} else if err != nil {
			return err
		}
		err := l.open()
		if err == nil {
			return nil
		}
		switch {
		case l.ctx.Err() != nil:
			return newDoneError(l.ctx, l.where)
		case l.closed:
			return l.errorf(nats.ErrConnectionClosed)
		case !first && errors.Is(err, jetstream.ErrStreamNotFound):
			// A stream is often deleted in order to be made anew; and a server
			// that starts up may not know it yet.
			if missing.IsZero() {
				missing = time.Now()
			} else if time.Since(missing) >= time.Second {
				return l.errorf(err)
			}
		case !transient(err):
			return l.errorf(err)
		case first && l.attempt >= firstAttempts:
			return l.errorf(err)
		case !first && l.tuning.MaxAttempts > 0 && l.attempt >= l.tuning.MaxAttempts && !errors.Is(err, errMissing): // which ends by itself
			return l.errorf(err)
		}
		if l.deaf > 1 {
			// Once may be a stall. A rebuild is in nobody's body and hears no
			// heartbeats, so that nothing else would notice.
			l.forceReconnect()
		}
		reason = err
	}
}

// backoff returns the delay in front of this attempt: 100 ms doubling to 5 s,
// none for the first attempt after progress. With many loops on the connection
// even that one is spread, a millisecond each, because one cause hits them all.
func (l *loop) backoff(first bool) time.Duration {
	if l.attempt > 1 {
		d := min(100*time.Millisecond<<min(l.attempt-2, 10), maxBackoff)
		if first {
			return d
		}
		return l.jitter(d)
	}
	if first {
		return 0
	}
	return l.spread()
}

// spread is how much later than others this loop does what all loops on a
// connection do at once.
func (l *loop) spread() time.Duration {
	if l.share.loops() <= 32 {
		return 0
	}
	return time.Duration(l.share.ordinal()) * time.Millisecond
}

// sleep waits for delay, and then until the connection is up: for as long as
// it takes, or on the first subscribe for as long as a request may take. hasty
// cuts the delay short when the connection is a new one.
func (l *loop) sleep(delay time.Duration, first, hasty bool) error {
	until := time.Now().Add(delay)
	giveUp := until.Add(l.patience)
	for {
		if err := l.ctx.Err(); err != nil {
			return newDoneError(l.ctx, l.where)
		}
		if l.closed {
			return l.errorf(nats.ErrConnectionClosed)
		}
		if l.work != nil {
			if err := l.work.books.failed.Load(); err != nil {
				return err
			}
		}
		if l.draining() {
			return errFinished
		}
		if !l.gather.tick(l) {
			return errLeft
		}
		now := time.Now()
		if l.up && l.moved {
			l.moved = false // nothing is left of the old connection
			if at := now.Add(l.spread()); hasty || at.After(until) {
				until = at
			}
		}
		if !now.Before(until) && (l.up || (first && !now.Before(giveUp))) {
			return nil
		}
		due := now.Add(time.Hour)
		switch {
		case now.Before(until):
			due = until
		case first:
			due = giveUp
		}
		l.gather.due(&due)
		l.arm(due)
		event := nats.Status(-1)
		l.park(true)
		select {
		case event = <-l.link.events:
		case <-l.bell:
		case <-l.timer.C:
			l.armed = time.Time{}
		case <-l.done:
		}
		l.park(false)
		if event >= 0 {
			l.event(event)
		}
	}
}

// open makes inboxes and consumer.
func (l *loop) open() error {
	if !l.up {
		l.patience = min(2*l.patience, maxRequestTimeout)
		return errNotYet
	}
	if l.work == nil {
		l.in.close()
	}
	l.share.giveBack(l.in.spare)
	l.in.spare = 0
	beat, life := l.tuning.heartbeat(l.caught), l.tuning.expires(l.caught)
	if err := l.in.start(capacity(l.pace.credit, l.maxMessages), statusRoom(life, beat)); err != nil {
		return err
	}
	l.sweep()
	if err := l.recipe.create(l); err != nil {
		return err
	}
	l.patience = defaultRequestTimeout
	now := time.Now()
	l.since, l.quiet = now, time.Time{}
	l.notBefore = time.Time{}
	l.greeted, l.progress, l.oversize = false, false, false
	l.early, l.confirms, l.unsure, l.recheck = 0, 0, false, recheck{}
	l.low, l.list.beats = 0, 0
	if l.work != nil {
		l.low = -1 // whether to ask ahead is decided with the first pull
	}
	l.board.update(func(s *Stats) {
		s.Stream, s.Consumer, s.Generation = l.gen.stream, l.gen.consumer, l.gen.number
		if l.gen.number > 1 {
			s.Rebuilds++
		}
	})
	if l.lis.Subscribed != nil {
		l.lis.Subscribed(l.gen.consumer, l.gen.number)
	}
	l.stretch = time.Now()
	if l.recipe.vet == nil {
		return nil
	}
	return l.askVet()
}
