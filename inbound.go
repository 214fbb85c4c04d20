package paced

import (
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/pacedgo/paced/internal/wire"
)

// interpret turns a frame into a directive. A message is told from a status by
// its reply subject, never by the Status header: a user's message may carry
// such a header, and the server strips it only from the first line
// (client.go:4657).
func (l *loop) interpret(m *nats.Msg, into *Msg) directive {
	if m.Reply != "" {
		return l.message(m, into)
	}
	return l.status(m)
}

func (l *loop) message(m *nats.Msg, into *Msg) directive {
	tail, ok := "", false
	if n := len(l.ack); n > 0 && len(m.Reply) > n && m.Reply[:n] == l.ack {
		tail, ok = m.Reply[n:], true
	} else {
		var stream, consumer string
		stream, consumer, tail, ok = wire.SplitAck(m.Reply)
		ok = ok && stream == l.gen.stream && consumer == l.gen.consumer
		if ok {
			l.ack = m.Reply[:len(m.Reply)-len(tail)]
			l.ackGrows = strings.Count(l.ack, ".") > 4 // the longer form may
		}
	}
	var a wire.Ack
	more := false
	if ok {
		a, more, ok = wire.ParseAck(tail)
	}
	if !ok || (more && !l.ackGrows) {
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
	l.early, l.confirms, l.doubt, l.asleep, l.list.beats = 0, 0, 0, 0, 0
	l.oversize, l.alive, l.unsure, l.recheck.at = false, true, false, time.Time{}
	if l.work == nil {
		k, reason := l.pos.receive(a)
		if l.list.active {
			l.list.received(l.pos.cseq)
		}
		if k != deliver {
			return directive{kind: k, reason: reason}
		}
	}
	*into = Msg{
		m: m, gen: l.gen,
		seq: a.Stream, cseq: a.Consumer,
		pending: a.Pending, stored: a.Time,
		delivered: uint32(min(a.Delivered, 1<<32-1)),
	}
	if l.work == nil {
		return directive{kind: deliver}
	}
	l.pos.pending = a.Pending
	return l.work.receive(into, l.sentAfter(s))
}

// sentAfter returns the earliest moment at which a message that came through
// slot s can have been sent: after its pull, and after the inbox was last found
// empty but for the way it took.
func (l *loop) sentAfter(s *slot) time.Time {
	base := l.empty.Add(-l.pace.trip)
	if s != nil && s.sent.After(base) {
		base = s.sent
	}
	return base
}

// first measures the round trip of a pull that was sent with messages known to
// be waiting on the server, and whose first message was waited for.
func (l *loop) first(s *slot) {
	if s.stocked && !l.quiet.IsZero() && !l.quiet.After(s.sent) {
		now := time.Now()
		l.pace.trip = l.share.roundTrip(now.Sub(s.sent), now)
	}
	s.stocked = false
}

func (l *loop) status(m *nats.Msg) directive {
	if l.vet.reply != "" && m.Subject == l.vet.reply {
		l.vet.answer = m
		return directive{kind: skip}
	}
	if l.beside.reply != "" && m.Subject == l.beside.reply {
		l.beside.answer = m
		return directive{kind: skip}
	}
	if l.swept(m) {
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
		if l.work != nil {
			l.alive = true
			if !l.caught && s.got == 0 {
				return l.emptied()
			}
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
			l.alive, l.unsure, l.recheck.at = true, false, time.Time{}
			l.idleUntil()
			if l.list.stalled(s, l.pos.reached(l.target)) {
				return directive{kind: restart, reason: errHole}
			}
		}
		return directive{kind: k, reason: reason}
	}
	d := judge(code, description)
	if l.work != nil && description == statusConsumerDeleted {
		l.work.told = true
	}
	if d.kind == pullOver && l.list.active {
		if k, reason := l.list.ended(s, &l.in, description); k == restart {
			return directive{kind: k, reason: reason}
		}
	}
	if d.kind == pullOver && description == statusServerShutdown && l.recipe.inOrder {
		// Our consumer lives in the memory of that one server.
		return directive{kind: restart, reason: d.reason}
	}
	if d.kind == pullOver && d.reason != nil && l.pos.cseq == 0 && !l.exact {
		// Nothing was received yet, so a consumer that came back in its first
		// state under the same name would look right.
		return directive{kind: restart, reason: d.reason}
	}
	if d.kind != pullOver {
		if l.work != nil {
			l.in.finish(s) // its inbox lives on, and it need not be listened to
		}
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
	if l.work != nil && !l.caught && empty && description == statusRequestTimeout {
		return l.emptied() // no other end shows anything
	}
	return d
}

// ending draws the conclusions from how a pull ended.
func (l *loop) ending(s *slot, description string, empty bool) {
	now := time.Now()
	switch {
	case l.list.active:
	case empty && description == statusMessageSize && s.bounded:
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
	if l.timed && l.caught && l.pos.pending == 0 && time.Now().After(l.untilAt) {
		l.over = true
	}
}
