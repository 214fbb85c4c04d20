package paced

import (
	"sync"
	"time"
)

// Stats is a picture of one handle's loop. It is refreshed with every pull and
// every time the loop parks, not with every message.
type Stats struct {
	Stream     string
	Consumer   string // the server-side consumer read from now
	Generation int    // consumers made in this range; every rebuild makes one
	Sequence   uint64 // stream sequence of the last message yielded
	CaughtUp   bool   // what was present when the range began has been yielded
	Connected  bool

	Messages uint64 // yielded, over all ranges of the handle
	Bytes    uint64 // their size on the wire
	Pulls    uint64 // sent
	Rebuilds uint64 // consumers made in place of one that was lost

	Outstanding      int // messages asked for and not yet handed to the body
	OutstandingBytes int // bytes reserved for them
	Waiting          int // the part of them that has arrived
	MaxWaiting       int // the most that ever waited

	// Of a [Consumer] only.
	Unsettled      int       // messages handed out and neither settled nor expired
	UnsettledSince time.Time // when the oldest of them was handed out
	Expired        uint64    // whose AckWait passed unsettled, or that waited too long and were not handed out

	Credit    int           // messages the loop keeps asked for
	LookAhead time.Duration // loop-body work that is kept waiting
	BodyTime  time.Duration // measured, per message
	RoundTrip time.Duration // of the connection, the least measured lately
	LastError error         // what the loop last recovered from
}

// board is where a loop leaves its stats for other goroutines.
type board struct {
	mu sync.Mutex
	s  Stats
}

func (b *board) read() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.s
}

func (b *board) update(f func(*Stats)) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	f(&b.s)
}
