package paced

import "time"

// The defaults of pacing. Everything here is told in the comments of the
// configuration's fields.
const (
	defaultMaxMessages = 5000
	defaultMaxBytes    = 8 << 20
	defaultLookAhead   = 20 * time.Millisecond
	startCredit        = 64
	// startSize is the message size assumed before one was seen.
	startSize = 1 << 10
)

// pacer decides how much a loop asks for: LookAhead worth of the body's work,
// as measured. It is plain data; time comes in as arguments.
//
// Measured is the body's time per message over the stretch between two pulls,
// not each message on its own: reading the clock twice per message would cost
// more than the rest of the loop. A stretch counts at most twice the look-ahead
// per message, so that a body that blocked for an hour once is forgotten within
// a few dozen quick messages instead of days.
type pacer struct {
	limit  int           // MaxMessages
	fixed  time.Duration // Tuning.LookAhead; 0: measured from the round trip
	most   time.Duration // the look-ahead is at most this; 0: no bound
	start  int           // the credit to begin with
	used   bool          // a pull was sent with this credit
	target int           // the credit that the body could use
	credit int           // messages that may be asked for and not yet handed to the body
	body   average       // nanoseconds per message
	size   average       // bytes per message
	large  int           // the largest message seen lately
	trip   time.Duration // round trip; 0: not measured
}

// average is a moving average that weighs each stretch by its length, up to
// half: a single message moves it by an eighth.
type average struct {
	value float64
	known bool
}

func (a *average) add(v float64, n int) {
	if !a.known {
		a.value, a.known = v, true
		return
	}
	w := min(0.5, float64(n)/8)
	a.value += (v - a.value) * w
}

func newPacer(limit, start int, lookAhead time.Duration) pacer {
	return pacer{limit: limit, fixed: lookAhead, start: start, credit: min(start, limit)}
}

// lookAhead is how much of the body's work is kept waiting.
func (p *pacer) lookAhead() time.Duration {
	d := p.fixed
	if d == 0 {
		d = defaultLookAhead + 2*p.trip
	}
	if p.most > 0 {
		d = min(d, p.most)
	}
	return d
}

// handled notes that the body spent work on n messages of bytes in all.
func (p *pacer) handled(n int, work time.Duration, bytes int) {
	if n == 0 {
		return
	}
	per := min(work/time.Duration(n), 2*p.lookAhead())
	p.body.add(float64(per), n)
	p.size.add(float64(bytes)/float64(n), n)
}

// saw notes the size of one message.
func (p *pacer) saw(size int) {
	if size > p.large {
		p.large = size
	}
}

// adjust moves the credit towards what the body needs: down at once, up by
// doubling and only while more is pending on the server than that: a reader
// that follows a quiet stream needs no room for thousands.
func (p *pacer) adjust(pending uint64) int {
	p.target = p.limit
	if p.body.known && p.body.value > 0 {
		p.target = min(p.target, max(1, int(float64(p.lookAhead())/p.body.value)))
	}
	most := p.credit
	if pending > uint64(most) && p.used {
		most *= 2
		p.used = false
	}
	p.credit = max(1, min(p.target, max(most, min(p.start, p.limit))))
	// The largest message counts for a while, not for ever.
	p.large -= (p.large - p.meanSize()) / 16
	return p.credit
}

func (p *pacer) meanSize() int {
	if !p.size.known {
		return startSize
	}
	return int(p.size.value)
}

// askAt is with how many messages owed more is asked for: when what is owed
// lasts for an eighth of the look-ahead and a round trip, and in front of a
// quick body when half is used up. Always at half would be nearly twice as many
// pulls, and the answer to each wakes the process in the middle of a body that
// sleeps: the runtime rounds what is left of the sleep up to a millisecond.
func (p *pacer) askAt(owed int) int {
	half := min(p.credit, owed) / 2
	if !p.body.known || p.body.value <= 0 {
		return half
	}
	return int(min(float64(half), float64(p.lookAhead()/8+p.trip)/p.body.value))
}

// bytesFor is the byte bound that a pull of n messages is likely to fit in: the
// mean with half as much again, and no more than if all were like the largest,
// and one of the largest.
func (p *pacer) bytesFor(n int) int {
	mean := p.meanSize()
	each := mean + mean/2
	if p.size.known {
		each = min(each, max(p.large, mean))
	}
	return n*each + max(p.large, mean)
}

// leap moves the credit to what the body can use, and at most to n.
func (p *pacer) leap(n int) { p.credit = max(p.credit, min(p.target, n)) }

// granted notes that byte bounds allow n messages, where more were wanted: the
// credit grows from there. Left as it was it would only make the channel large.
func (p *pacer) granted(n int) { p.credit = min(p.credit, n) }
