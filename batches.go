package paced

import (
	"fmt"
	"iter"
	"time"
)

// gather collects what a loop yields until there is enough of it for the body.
// It is part of the loop, not an adapter around it: what is gathered counts
// against the bounds, the loop wakes up when the time is over, and a position
// does not move past what the body has not seen. All methods do nothing on nil.
type gather struct {
	n     int
	wait  time.Duration
	yield func([]Msg) bool
	held  []Msg
	size  int       // their bytes
	end   time.Time // when it comes, full or not; zero: not begun
	seen  uint64    // the position that the body has seen
}

// begin sets the clock for the next batch.
func (g *gather) begin(l *loop) {
	g.held, g.size = nil, 0
	g.end = time.Now().Add(g.wait)
	g.seen = l.pos.at
}

// add takes one message and hands the batch over when it is full. Room for one
// more as large as the largest has to be left: nothing more could be asked for,
// nor beyond the consumer's MaxAckPending.
func (g *gather) add(l *loop, m Msg) bool {
	if l.work != nil {
		if half := m.AckDeadline().Add(-m.claim.wait / 2); half.Before(g.end) {
			g.end = half
		}
	}
	g.held = append(g.held, m)
	g.size += m.m.Size()
	if len(g.held) < min(g.n, l.maxMessages) && g.size+l.pace.large <= l.maxBytes {
		return true
	}
	return g.hand(l)
}

// tick hands the batch over when its time has come.
func (g *gather) tick(l *loop) bool {
	switch {
	case g == nil:
		return true
	case g.end.IsZero():
		g.begin(l)
		return true
	case time.Now().Before(g.end) && !(l.oversize && len(g.held) > 0):
		return true
	}
	return g.hand(l)
}

// due brings a deadline forward to when the batch has to be handed over.
func (g *gather) due(t *time.Time) bool {
	if g != nil && g.end.Before(*t) {
		*t = g.end
	}
	return g != nil
}

// forget drops what was gathered: its consumer is no more, and the next one
// delivers it again.
func (g *gather) forget() {
	if g != nil {
		g.held, g.size = nil, 0
	}
}

// flush hands over what is left at the end.
func (g *gather) flush(l *loop) bool {
	return g == nil || len(g.held) == 0 || g.hand(l)
}

func (g *gather) hand(l *loop) bool {
	batch := g.held
	g.begin(l)
	if l.work != nil {
		l.work.given()
		l.work.keeper.body(true)
	}
	if !g.yield(batch) {
		return false
	}
	if l.work != nil {
		l.work.keeper.body(false)
	}
	g.end = time.Now().Add(g.wait)
	l.quiet = time.Time{}
	return true
}

// seenUpTo returns the position that the body has seen.
func (l *loop) seenUpTo() uint64 {
	if l.gather != nil && len(l.gather.held) > 0 {
		return l.gather.seen
	}
	return l.pos.at
}

// batches makes a sequence of batches of what run yields one by one.
func batches[T any](n int, wait time.Duration, most int, run func(*gather, func(Msg, error) bool), convert func(Msg) T) iter.Seq2[[]T, error] {
	return func(yield func([]T, error) bool) {
		switch {
		case n < 1 || n > most:
			yield(nil, &ConfigError{Field: "Batches.n", Value: n, Bound: fmt.Sprintf("from 1 to MaxMessages, %d", most)})
			return
		case wait <= 0:
			yield(nil, &ConfigError{Field: "Batches.wait", Value: wait, Bound: "more than 0"})
			return
		}
		g := &gather{n: n, wait: wait}
		g.yield = func(held []Msg) bool {
			batch := make([]T, len(held))
			for i, m := range held {
				batch[i] = convert(m)
			}
			return yield(batch, nil)
		}
		run(g, func(_ Msg, err error) bool { return yield(nil, err) })
	}
}
