package paced

import (
	"time"

	"github.com/pacedgo/paced/internal/wire"
)

// Reading the last message of every subject needs care on streams that keep
// more than one per subject. The server freezes the list of last messages when
// the consumer is made (consumer.go:6417) and takes its head off before it
// looks for a pull to deliver it to (consumer.go:5025). If none can take it,
// because max_bytes is too small for it, the pull expired or nobody listens to
// its inbox any more, the entry is gone: the scan goes back by one
// (consumer.go:5543), the list does not. The consumer sequence shows no gap.
//
// So a second pull, the rescue, is parked in front of every main pull, with
// the priority that is served last, and takes the entry that the main one
// could not take. Frames come in the order they were sent, so that a main pull
// which ended unfilled with the rescue sent before it and not yet used has lost
// nothing. Whenever that cannot be said the list is made anew and what was
// yielded is passed over: the new list names the entry that was lost, unless
// it is no longer the last of its subject.
//
// Priorities need nats-server 2.12. Before, and where a message turned up that
// the rescue is too small for, only pulls are sent that are certain to be
// filled: no max_bytes, at most what is left of the list, room reserved for the
// largest message the stream can hold. That is slow where messages are much
// smaller than that, and as exact.
//
// An entry that is deleted before it was delivered stops the server until the
// next wake-up (consumer.go:5487), which every heartbeat is: main pulls have
// short ones, and two in a row without a message make a new list, which has no
// holes.
type listing struct {
	active   bool   // entries of the list are still to come
	group    bool   // the consumer knows priorities: pulls must name the group
	certain  bool   // only pulls that certainly fill
	listed   uint64 // how many entries the list has
	done     bool   // it was completed: from there on by sequence
	boundary uint64 // everything wanted up to here was received when it was
	broken   int    // lists in a row that had to be made anew without progress
	beats    int    // heartbeats on main pulls since the last message
}

const (
	listGroup     = "paced"
	listHeartbeat = 5 * time.Millisecond
	listExpires   = 2 * time.Second
	rescueBytes   = 64 << 10
)

// role is what a pull is for. Outside of a list all are plain.
type role uint8

const (
	plain  role = iota
	first       // main pull of a list
	rescue      // takes what the main pull could not
	filler      // certain to be filled
)

// slot is where a pull of this role goes.
func (r role) slot() int {
	if r == rescue {
		return 1
	}
	return 0
}

func (r role) priority() int {
	if r == rescue {
		return 9
	}
	return 0
}

// ended judges a pull that ended before it was filled.
func (g *listing) ended(s *slot, in *inbox, description string) (kind, error) {
	if description == statusBatchCompleted {
		return skip, nil
	}
	if s.role == rescue {
		if description == statusMessageSize {
			g.certain = true
		}
		return restart, errUnfilled
	}
	r := &in.slots[rescue.slot()]
	if s.role == first && r.open && r.role == rescue && r.got == 0 && r.serial < s.serial {
		return skip, nil
	}
	// Where that happens again before a list got past the position, with byte
	// bounds of a few messages, certain pulls make progress sure.
	if g.broken++; g.broken > 1 {
		g.certain = true
	}
	return restart, errUnfilled
}

// stalled counts a heartbeat and reports whether the list stands at a hole.
func (g *listing) stalled(s *slot, reached bool) bool {
	if !g.active || s.role == rescue || reached {
		return false
	}
	g.beats++
	return g.beats >= 2
}

// received ends the list with its last entry: from there the consumer is as any
// other.
func (g *listing) received(cseq uint64) {
	if cseq >= g.listed {
		g.active = false
	}
}

// askList sends what a list may be asked with, in place of w.
func (l *loop) askList(now time.Time, w pullSpec) directive {
	left := int(min(l.list.listed-l.pos.cseq, uint64(l.maxMessages)))
	if l.list.certain {
		w.role = filler
		w.batch = min(w.batch, left-l.in.owed)
		w.heartbeat, w.expires = listHeartbeat, 2*listExpires
		if w.batch <= 0 || l.in.slots[0].open {
			return directive{kind: skip}
		}
		return l.send(now, w)
	}
	if l.in.slots[first.slot()].open {
		return directive{kind: skip}
	}
	if r := &l.in.slots[rescue.slot()]; !r.open {
		// Both have to fit: with the rescue out the channel cannot grow.
		both := statusRoom(listExpires, listHeartbeat) + statusRoom(defaultExpires, defaultHeartbeat)
		if _, ok := l.room(w.batch+1, both); !ok {
			return directive{kind: skip}
		}
		p := pullSpec{batch: 1, heartbeat: defaultHeartbeat, expires: defaultExpires, role: rescue}
		if d := l.send(now, p); d.kind != skip || !r.open {
			return d
		}
	}
	if left--; left <= 0 && !w.confirm {
		return directive{kind: skip} // the rescue brings the last entry
	}
	// Unless that was deleted: the server comes past it when it is woken up, and
	// the rescue's heartbeats are far apart.
	left = max(left, 1)
	w.role = first
	fit := l.in.fits(w.batch, statusRoom(listExpires, listHeartbeat))
	w.batch = max(1, min(w.batch, left, l.pace.credit-l.in.owed, fit))
	w.heartbeat, w.expires = listHeartbeat, min(listExpires, l.tuning.expires(false))
	w.heartbeat = min(w.heartbeat, w.expires/2)
	w.confirm = false
	return l.send(now, w)
}

// certain reserves room for a pull that will be filled whatever the messages'
// sizes: that of the largest for each. If not even one fits, one comes alone.
func (l *loop) certain(p *wire.Pull) (int, bool) {
	n := min(p.Batch, (l.maxBytes-l.in.bytes)/l.maxMessage)
	if n <= 0 {
		return l.alone(p)
	}
	got := l.share.claim(n*l.maxMessage, l.maxMessage, false)
	if got < l.maxMessage {
		l.share.giveBack(got)
		return l.alone(p)
	}
	p.Batch = got / l.maxMessage
	l.share.giveBack(got - p.Batch*l.maxMessage)
	return p.Batch * l.maxMessage, true
}
