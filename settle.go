package paced

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// What an acknowledgement says to the server (nats-server consumer.go:402).
var (
	ackAck      = []byte("+ACK")
	ackNak      = []byte("-NAK")
	ackProgress = []byte("+WPI")
	ackTerm     = []byte("+TERM")
)

const (
	confirmTry    = 250 * time.Millisecond // first wait for a confirmation; doubles
	maxConfirmTry = 2 * time.Second
)

// claim is one delivery that the server counts as ours. Copies of a message
// share it. It is settled once, from any goroutine; its credit comes back then,
// or when AckWait has passed and the server takes the message back.
type claim struct {
	ledger  *ledger
	reply   string
	seq     uint64
	wait    time.Duration // AckWait, or the backoff of this delivery
	since   time.Time
	until   atomic.Int64 // when AckWait has passed, in nanoseconds since ledger.start
	state   atomic.Uint32
	counted atomic.Bool // holds one credit
}

const (
	claimOpen     uint32 = iota
	claimSettling        // being sent
	claimAcked           // or terminated: never to be delivered again
	claimReturned        // with a Nak
)

// ledger is what the claims of one range share with its loop. The loop reads
// it; whoever settles a message writes to it. Nothing here is locked.
type ledger struct {
	link    *link
	where   string // what errors name
	start   time.Time
	confirm time.Duration // ConfirmTimeout; 0: Ack does not wait
	open    atomic.Int64  // claims that hold a credit
	settled atomic.Uint64
	parked  atomic.Bool // the loop waits for credit
	bell    chan struct{}
	failed  atomic.Pointer[AckError] // ends the loop
}

// ring wakes the loop up.
func (b *ledger) ring() {
	select {
	case b.bell <- struct{}{}:
	default:
	}
}

func (c *claim) deadline() time.Time {
	return c.ledger.start.Add(time.Duration(c.until.Load()))
}

// extend moves the deadline: the server counts AckWait anew.
func (c *claim) extend(to time.Time) { c.until.Store(int64(to.Sub(c.ledger.start))) }

// free gives the credit back, once.
func (c *claim) free() bool {
	if !c.counted.CompareAndSwap(true, false) {
		return false
	}
	c.ledger.open.Add(-1)
	if c.ledger.parked.Load() {
		c.ledger.ring()
	}
	return true
}

// settle sends what ends the claim. If it cannot be sent the message is still
// unsettled.
func (c *claim) settle(as uint32, send func() error) error {
	if !c.state.CompareAndSwap(claimOpen, claimSettling) {
		return c.fail(jetstream.ErrMsgAlreadyAckd)
	}
	if err := send(); err != nil {
		c.state.Store(claimOpen)
		if _, said := errors.AsType[*AckError](err); said {
			return err
		}
		return c.fail(err)
	}
	c.state.Store(as)
	c.ledger.settled.Add(1)
	c.free()
	return nil
}

func (c *claim) fail(reason error) error {
	return &AckError{Sequence: c.seq, where: c.ledger.where, reason: reason}
}

func (c *claim) publish(data []byte) error {
	return c.ledger.link.publish(c.reply, "", data)
}

// intime refuses what would act on the next delivery: the server looks for the
// message, not for the delivery that is negatively acknowledged
// (consumer.go:3259).
func (c *claim) intime() error {
	if time.Now().Before(c.deadline()) {
		return nil
	}
	return c.fail(ErrAckDeadline)
}

func (c *claim) ack() error {
	if c.ledger.confirm > 0 {
		return c.settle(claimAcked, c.confirmed)
	}
	return c.settle(claimAcked, func() error { return c.publish(ackAck) })
}

// confirmed sends the same acknowledgement until the server says that it has
// it. An outcome that stays unknown ends the loop: going on would hand out more
// with no way of knowing whether any of it counts.
func (c *claim) confirmed() error {
	ctx, cancel := context.WithTimeout(context.Background(), c.ledger.confirm)
	defer cancel()
	for wait := confirmTry; ; wait = min(2*wait, maxConfirmTry) {
		try, cancelTry := context.WithTimeout(ctx, wait)
		_, err := c.ledger.link.request(try, c.reply, ackAck)
		if err == nil {
			cancelTry()
			return nil
		}
		closed := errors.Is(err, nats.ErrConnectionClosed)
		if !closed {
			// Refused at once: the consumer has no leader for now or is gone, or
			// nats.go takes nothing while it reconnects.
			<-try.Done()
		}
		cancelTry()
		if ctx.Err() != nil || closed {
			unknown := &AckError{Sequence: c.seq, where: c.ledger.where, reason: fmt.Errorf("no confirmation: %w", err)}
			c.ledger.failed.CompareAndSwap(nil, unknown)
			c.ledger.ring()
			return unknown
		}
	}
}

func (c *claim) doubleAck(ctx context.Context) error {
	return c.settle(claimAcked, func() error {
		if _, ok := ctx.Deadline(); !ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, defaultConfirm)
			defer cancel()
		}
		_, err := c.ledger.link.request(ctx, c.reply, ackAck)
		return err
	})
}

func (c *claim) nak(delay time.Duration) error {
	if err := c.intime(); err != nil {
		return err
	}
	data := ackNak
	if delay > 0 {
		data = append([]byte(`-NAK {"delay": `), strconv.FormatInt(int64(delay), 10)...)
		data = append(data, '}')
	}
	return c.settle(claimReturned, func() error { return c.publish(data) })
}

func (c *claim) term(reason string) error {
	data := ackTerm
	if reason != "" {
		data = []byte("+TERM " + reason)
	}
	return c.settle(claimAcked, func() error { return c.publish(data) })
}

// progress asks for another AckWait. It is no settlement.
func (c *claim) progress() error {
	if c.state.Load() != claimOpen {
		return c.fail(jetstream.ErrMsgAlreadyAckd)
	}
	if err := c.intime(); err != nil {
		return err
	}
	now := time.Now() // before the server hears of it
	if err := c.publish(ackProgress); err != nil {
		return c.fail(err)
	}
	c.extend(now.Add(c.wait))
	return nil
}
