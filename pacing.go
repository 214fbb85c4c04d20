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
	asked  bool          // the start credit was used
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
	target := p.limit
	if p.body.known && p.body.value > 0 {
		target = min(target, max(1, int(float64(p.lookAhead())/p.body.value)))
	}
	most := p.credit
	if pending > uint64(most) && p.asked {
		most *= 2
	}
	p.asked = true
	p.credit = max(1, min(target, max(most, min(p.start, p.limit))))
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

// bytesFor is the byte bound that a pull of n messages is likely to fit in: the
// mean with half as much again, and one of the largest.
func (p *pacer) bytesFor(n int) int {
	mean := p.meanSize()
	return n*(mean+mean/2) + max(p.large, mean)
}
