package paced

import (
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/pacedgo/paced/internal/wire"
)

// A data message does not say which pull it answers: its subject is the
// stream's (nats-server consumer.go:5517). A status does, its subject is the
// pull's reply subject. So each slot has an inbox of its own and at most one
// open pull, and both put their frames into one channel: the order on the wire
// is kept, the subscription names the slot, slot and token name the pull of a
// status, slot and count that of a message. One wildcard inbox for all pulls
// would match statuses only.
//
// A pull is over when what it still owes has been received: its batch less
// what a terminal status says was not sent. On replicated consumers that
// status overtakes the data (consumer.go:5834), so that it is no reason to
// stop reading. A pull whose max_bytes is used up exactly ends in silence
// (consumer.go:4491), so that a slot counts bytes too.
type slot struct {
	sub   *nats.Subscription
	inbox string // with its final dot

	open    bool
	bounded bool // the pull carries max_bytes
	ended   bool // a terminal status was seen and data is owed
	confirm bool // sent to hear where the server is
	stocked bool // sent with messages waiting on the server: measures the round trip
	touched bool // a frame came since heard was set
	role    role

	token     string // reply subject of the open pull
	serial    uint64 // of the token
	owed      int    // messages asked for and not yet taken
	bytes     int    // bytes reserved for them
	got       int    // messages taken
	room      int    // statuses this pull can cause while nobody reads
	heartbeat time.Duration
	sent      time.Time
	deadline  time.Time // the server's own end must have come by then
	heard     time.Time
	seen      uint64    // bytes the connection had received when this was last overdue
	grace     time.Time // not overdue before: see delayed
}

// fades is where slot i goes when its pull must still be read and another inbox
// is needed.
func fades(i int) int { return i + 2 }

// youth is how long a server with leafnodes or gateways trusts a pull's inbox
// although nobody listens to it any more (nats-server gateway.go:39). An
// explicit-ack consumer delivers into it again and again meanwhile, an attempt
// each time, so that such a pull is not left before.
const youth = 2 * time.Second

// young reports whether the pull must still be listened to.
func (s *slot) young(now time.Time) bool {
	return s.open && s.owed > 0 && now.Before(s.sent.Add(youth))
}

// binds returns until when the pull must be listened to; in the past or zero:
// it may be left. One that ended with data owed is waited for: on replicated
// consumers the data comes behind the status.
func (s *slot) binds() time.Time {
	switch {
	case !s.open || s.owed == 0:
		return time.Time{}
	case s.ended && s.deadline.After(s.sent.Add(youth)):
		return s.deadline
	}
	return s.sent.Add(youth)
}

// statusRoom is how many statuses one pull can put into the channel: its
// heartbeats, its terminal status, one stale status of the pull before it, and
// a request's answer.
func statusRoom(expires, heartbeat time.Duration) int {
	return int(expires/heartbeat) + 4
}

// inbox is the transport of one consumer generation: two slots into one
// channel that has room for everything that was asked for.
type inbox struct {
	link  *link
	ch    chan *nats.Msg
	back  []*nats.Msg // taken out of ch at a barrier, in order; read first
	head  int
	slots [4]slot // two to pull with, and where each of them fades
	use   int     // slots in use: 1 where the consumer's MaxWaiting is too small for 2

	serial uint64
	owed   int // messages asked for and not yet taken, over both slots and back
	bytes  int // bytes reserved for them
	stray  int // the part of owed whose slot was given up: it sits in back
	adrift int // bytes reserved for those
	spare  int // reserved bytes that are free again and not yet given back
}

// start subscribes the first slot. The second follows when it is needed.
func (in *inbox) start(credit, room int) error {
	if in.ch == nil {
		in.ch = make(chan *nats.Msg, credit+2*room+litterMost)
	}
	return in.connect(0)
}

func (in *inbox) connect(i int) error {
	s := &in.slots[i]
	if s.sub != nil {
		return nil
	}
	prefix := in.link.newInbox() + "."
	sub, err := in.link.subscribe(prefix+"*", in.ch)
	if err != nil {
		return err
	}
	s.sub, s.inbox = sub, prefix
	return nil
}

// token makes a reply subject that is matched by slot i.
func (in *inbox) token(i int) string {
	in.serial++
	return in.slots[i].inbox + strconv.FormatUint(in.serial, 10)
}

// take returns the next frame, or nil when none has arrived.
func (in *inbox) take() *nats.Msg {
	if in.head < len(in.back) {
		m := in.back[in.head]
		in.back[in.head] = nil
		if in.head++; in.head == len(in.back) {
			in.back, in.head = in.back[:0], 0
		}
		return m
	}
	select {
	case m := <-in.ch:
		return m
	default:
		return nil
	}
}

// waiting is how many frames have arrived and were not taken.
func (in *inbox) waiting() int { return len(in.ch) + len(in.back) - in.head }

// free returns a slot without an open pull, or -1.
func (in *inbox) free() int {
	for i := range in.use {
		if !in.slots[i].open {
			return i
		}
	}
	return -1
}

// oldest returns the slot whose pull was sent first.
func (in *inbox) oldest() int {
	if a, b := &in.slots[0], &in.slots[1]; b.open && (!a.open || b.serial < a.serial) {
		return 1
	}
	return 0
}

func (in *inbox) slotOf(m *nats.Msg) *slot {
	for i := range in.slots {
		if s := &in.slots[i]; s.sub == m.Sub && s.sub != nil {
			return s
		}
	}
	return nil
}

// fits returns how many messages of a batch the channel has room for beside
// what is owed, with all the statuses that the open pulls and this one can
// cause, and the answers that nobody waits for.
func (in *inbox) fits(batch, room int) int {
	used := in.owed - in.stray + room + litterMost
	for i := range in.slots {
		switch s := &in.slots[i]; {
		case s.open:
			used += s.room
		case i < fades(0) || s.sub != nil:
			used += 4
		}
	}
	return min(batch, cap(in.ch)-used)
}

// grow swaps the channel for a larger one. Only with nothing owed and nothing
// unread: what an old subscription still received would be lost or come after
// what the new one received.
func (in *inbox) grow(capacity int) error {
	for i := range in.slots {
		in.drop(i)
	}
	in.ch = make(chan *nats.Msg, capacity+litterMost)
	return in.connect(0)
}

// pull sends one pull through slot i. reserve is what it takes from the byte
// bounds: p.MaxBytes, or room for the largest message where p has no bound.
func (in *inbox) pull(i int, subject string, p wire.Pull, as role, reserve int, now time.Time, slack time.Duration) error {
	if err := in.connect(i); err != nil {
		return err
	}
	s := &in.slots[i]
	token := in.token(i)
	if err := in.link.publish(subject, token, p.Append(nil)); err != nil {
		return err
	}
	*s = slot{
		sub: s.sub, inbox: s.inbox,
		open: true, token: token, serial: in.serial, role: as,
		owed: p.Batch, bytes: reserve, bounded: p.MaxBytes > 0,
		room:      statusRoom(p.Expires, p.Heartbeat),
		heartbeat: p.Heartbeat,
		sent:      now, heard: now,
		deadline: now.Add(p.Expires + slack),
	}
	in.owed += p.Batch
	in.bytes += reserve
	return nil
}

// received accounts for one data message and returns the slot it came
// through, nil where that was given up.
func (in *inbox) received(m *nats.Msg) *slot {
	size := m.Size()
	s := in.slotOf(m)
	if s == nil || !s.open || s.owed == 0 {
		// A given-up slot's message. One beyond what was asked for cannot be
		// told from it and costs nothing.
		if s == nil && in.stray > 0 {
			in.stray--
			in.owed--
			n := min(size, in.adrift)
			if in.stray == 0 {
				n = in.adrift
			}
			in.adrift -= n
			in.release(n)
		}
		return s
	}
	s.touched = true
	s.got++
	s.owed--
	in.owed--
	exact := s.bounded && s.bytes == size
	n := min(size, s.bytes)
	s.bytes -= n
	in.release(n)
	if s.owed == 0 || exact {
		in.finish(s)
	}
	return s
}

// release frees reserved bytes; they go back to the connection's budget in
// bulk.
func (in *inbox) release(n int) {
	in.bytes -= n
	in.spare += n
}

// finish closes a slot's pull and frees what it did not use.
func (in *inbox) finish(s *slot) {
	in.owed -= s.owed
	in.release(s.bytes)
	s.open, s.ended, s.owed, s.bytes = false, false, 0, 0
}

// terminated applies a terminal status: undelivered is the part of the batch
// that the server says it did not send.
func (in *inbox) terminated(s *slot, undelivered int, now time.Time, wait time.Duration) {
	n := min(max(undelivered, 0), s.owed)
	s.owed -= n
	in.owed -= n
	if s.owed == 0 {
		in.finish(s)
		return
	}
	s.ended = true
	s.deadline = now.Add(wait)
}

// collect moves what has arrived out of the channel.
func (in *inbox) collect() {
	for {
		select {
		case m := <-in.ch:
			in.back = append(in.back, m)
		default:
			return
		}
	}
}

// giveUp abandons slot i's pull, whose state is unknown: its inbox is dropped,
// which is the only way to cancel a pull, and what had arrived stays owed until
// it is taken. Unsubscribe is a barrier: nothing is put into the channel after
// it.
func (in *inbox) giveUp(i int) {
	if s := &in.slots[i]; s.sub != nil {
		in.link.unsubscribe(s.sub)
		in.abandon(i)
	}
}

// fade makes room for a new inbox in slot i and goes on reading the old one.
func (in *inbox) fade(i int) {
	in.slots[fades(i)], in.slots[i] = in.slots[i], slot{}
}

// fading is what is owed there.
func (in *inbox) fading() int { return in.slots[2].owed + in.slots[3].owed }

// abandon forgets slot i, whose inbox receives nothing any more.
func (in *inbox) abandon(i int) {
	s := &in.slots[i]
	in.collect()
	n, size := 0, 0
	for _, m := range in.back[in.head:] {
		if m.Sub == s.sub && m.Reply != "" {
			n++
			size += m.Size()
		}
	}
	n = min(n, s.owed)
	size = min(size, s.bytes)
	s.owed -= n
	s.bytes -= size
	in.stray += n
	in.adrift += size
	in.finish(s)
	*s = slot{}
}

// drop gives a slot up with nothing owed.
func (in *inbox) drop(i int) {
	if s := &in.slots[i]; s.sub != nil {
		in.link.unsubscribe(s.sub)
		*s = slot{}
	}
}

// close drops both inboxes and whatever they held.
func (in *inbox) close() {
	for i := range in.slots {
		in.drop(i)
	}
	in.forget()
}

// forget frees all that is owed: nothing of it will be taken.
func (in *inbox) forget() {
	in.spare += in.bytes
	in.owed, in.bytes, in.stray, in.adrift = 0, 0, 0, 0
	in.back, in.head = nil, 0
	in.ch = nil
}

// verify is the proof obligation behind "no drop by construction". It runs in
// every test and not in production.
func (in *inbox) verify(maxMessages, maxBytes int) {
	owed, bytes, used := in.stray, in.adrift, litterMost
	for i := range in.slots {
		s := &in.slots[i]
		owed += s.owed
		bytes += s.bytes
		used += 4
		if s.open {
			used += s.owed + s.room - 4
		}
		if i >= fades(0) && s.sub == nil {
			used -= 4
		}
		if s.owed < 0 || s.bytes < 0 || (!s.open && s.owed+s.bytes != 0) {
			panic(fmt.Sprintf("paced: slot %d: owed %d, bytes %d, open %v", i, s.owed, s.bytes, s.open))
		}
	}
	switch {
	case owed != in.owed || in.owed < 0:
		panic(fmt.Sprintf("paced: slots owe %d messages, counted %d", owed, in.owed))
	case bytes != in.bytes || in.bytes < 0:
		panic(fmt.Sprintf("paced: slots reserve %d bytes, counted %d", bytes, in.bytes))
	case in.ch != nil && used > cap(in.ch):
		panic(fmt.Sprintf("paced: %d frames may come, the channel holds %d", used, cap(in.ch)))
	case in.owed > maxMessages:
		panic(fmt.Sprintf("paced: %d messages asked for, at most %d allowed", in.owed, maxMessages))
	case in.bytes > maxBytes && owed > 1:
		panic(fmt.Sprintf("paced: %d bytes asked for, at most %d allowed", in.bytes, maxBytes))
	}
}
