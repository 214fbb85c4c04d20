package paced

import (
	"time"

	"github.com/nats-io/nats.go"
)

// keeper keeps messages from expiring: those handed out and not settled, and
// while a body runs those that wait behind it. It is the one goroutine that
// looks into a loop's state, so that there is a lock: the loop holds it except
// while it is parked, waits for an answer or is in the body. (A channel: in a
// synctest bubble time stands still for whoever waits for a mutex.) Nothing is
// sent with the lock held, because nats.go may block. All methods do nothing on
// nil.
type keeper struct {
	l       *loop
	every   time.Duration
	lock    chan struct{}
	away    bool      // the lock is free
	began   time.Time // when the body began; zero: it does not run
	halted  bool
	stop    chan struct{}
	done    chan struct{}
	longer  map[*nats.Msg]time.Time // since when AckWait counts for what waits
	looked  time.Time               // when the channel was last emptied here
	started bool
}

func newKeeper(l *loop) *keeper {
	k := &keeper{l: l, lock: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	k.lock <- struct{}{}
	return k
}

// body marks the beginning and the end of a body.
func (k *keeper) body(begins bool) {
	if k == nil {
		return
	}
	if !begins {
		k.take()
		k.began = time.Time{}
		return
	}
	if !k.started {
		k.started = true
		k.every = min(k.l.work.cfg.Progress, k.l.work.least/2)
		go k.run()
	}
	k.began = time.Now()
	k.give()
}

func (k *keeper) give() {
	k.away = true
	<-k.lock
}

func (k *keeper) take() {
	k.lock <- struct{}{}
	k.away = false
}

// park gives the lock away while the loop waits for something to happen.
func (l *loop) park(parked bool) {
	switch {
	case l.work == nil || l.work.keeper == nil:
	case parked:
		l.work.keeper.give()
	default:
		l.work.keeper.take()
	}
}

// halt ends the keeper's interest in the loop. It does not wait for it.
func (k *keeper) halt() {
	if k == nil {
		return
	}
	if k.away { // a body that panicked, or got the last error
		k.take()
	}
	k.halted = true
	<-k.lock
	close(k.stop)
}

// join waits for its end.
func (k *keeper) join() {
	if k != nil && k.started {
		<-k.done
	}
}

func (k *keeper) run() {
	defer close(k.done)
	tick := time.NewTicker(k.every)
	defer tick.Stop()
	for {
		select {
		case <-k.stop:
			return
		case <-tick.C:
		}
		up := k.l.link.status() == nats.CONNECTED // else it would be sent when it is too late
		for _, reply := range k.round(time.Now(), up) {
			_ = k.l.link.publish(reply, "", ackProgress)
		}
	}
}

// round returns the reply subjects of what is to be kept, and moves the
// deadlines. What is past its deadline is not kept: the server may have given it
// to another loop, whose AckWait it would extend.
func (k *keeper) round(now time.Time, up bool) (replies []string) {
	k.lock <- struct{}{}
	defer func() { <-k.lock }()
	if k.halted {
		return nil
	}
	w, in := k.l.work, &k.l.in
	for _, c := range w.claims {
		state := c.state.Load()
		// One that is being settled waits for its confirmation. Without that a
		// Nak may be on its way, and progress behind it would undo its delay.
		kept := state == claimOpen || (state == claimSettling && w.books.confirm > 0)
		if up && kept && now.Before(c.deadline()) && now.Sub(c.since) < progressCap {
			replies = append(replies, c.reply)
			c.extend(now.Add(c.wait))
		}
	}
	if k.began.IsZero() || now.Sub(k.began) >= progressCap {
		return replies
	}
	in.collect()
	longer := make(map[*nats.Msg]time.Time, in.waiting())
	for _, m := range in.back[in.head:] {
		if m.Reply == "" {
			continue
		}
		since, ok := k.longer[m]
		if !ok {
			since = k.l.sentAfter(in.slotOf(m))
			if t := k.looked.Add(-k.l.pace.trip); t.After(since) {
				since = t
			}
		}
		if up && now.Sub(since) < w.least {
			replies = append(replies, m.Reply)
			since = now
		}
		longer[m] = since
	}
	k.longer, k.looked = longer, now
	return replies
}

// kept returns since when AckWait counts for a message that was received.
func (k *keeper) kept(m *nats.Msg, base time.Time) time.Time {
	if t, ok := k.longer[m]; ok {
		delete(k.longer, m)
		return t
	}
	return base
}
