package paced

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// ConsumeConfig says what [Consume] reads. Stream and Consumer are needed.
type ConsumeConfig struct {
	// Stream is the name of the stream.
	Stream string

	// Consumer is the server-side consumer: a pull consumer with explicit
	// acknowledgements and a Durable or Name. It is created if it is missing
	// and used as it is if it is there; then its own AckWait, BackOff,
	// MaxDeliver and limits hold, whatever stands here. Leaving a loop does not
	// delete it.
	//
	// Every delivery counts against MaxDeliver, also one that is handed back
	// unseen. So where MaxDeliver is finite nothing is asked for ahead: each
	// pull asks for one message, when the body is back, unless
	// Tuning.LookAhead is set. Then messages that wait on the client lose an
	// attempt when the loop is left.
	Consumer jetstream.ConsumerConfig

	// OnDeleted says what happens when the consumer was deleted: DeletedFail
	// (default) ends the sequence with jetstream.ErrConsumerDeleted,
	// DeletedRecreate makes it again.
	OnDeleted DeletedPolicy

	// ConfirmAcks makes [Msg.Ack] wait until the server has the
	// acknowledgement. It repeats it until ConfirmTimeout. An outcome that
	// stays unknown is returned, and ends the loop with an [*AckError] instead
	// of asking for more. Default false.
	ConfirmAcks bool

	// ConfirmTimeout bounds the wait of ConfirmAcks. Default 5 seconds.
	ConfirmTimeout time.Duration

	// Progress is how often the server is told that work goes on: for every
	// message handed out and not settled, and, while a body runs, for those
	// that wait behind it. At least twice per AckWait, whatever it says; at
	// most AckWait; and for an hour per message, so that a body which hangs is
	// not kept alive for ever. It takes a goroutine while the range runs.
	// Default 0: off.
	Progress time.Duration

	// UntilEmpty ends the sequence, without an error, when the server has
	// nothing to deliver: no message is pending and none is due for
	// redelivery. Messages that are handed out and not settled do not keep it
	// from ending. Default false.
	UntilEmpty bool

	// MaxMessages bounds the messages asked for and not yet handed to the body
	// together with those handed out and not settled. The consumer's
	// MaxAckPending bounds them as well, and one that is made without it has 1000
	// (nats-server consumer.go:604): where bodies take microseconds, more makes it
	// faster. Default 5000, at least 1.
	MaxMessages int

	// MaxBytes bounds the bytes asked for and not yet handed to the body, see
	// [OrderedConfig]. Default 8 MiB.
	MaxBytes int

	// Listener is told what the loop does. Default: nobody.
	Listener *Listener

	// Tuning is for what nobody should need to change.
	Tuning Tuning
}

// DeletedPolicy says what happens when the consumer of [Consume] is gone.
type DeletedPolicy int

const (
	DeletedFail DeletedPolicy = iota // end with jetstream.ErrConsumerDeleted
	// DeletedRecreate makes the consumer again, behind the last message up to
	// which everything is acknowledged: as far as this loop knows if it is the
	// only one, else as far as the server said when it was last asked. What was
	// acknowledged behind that is delivered again.
	DeletedRecreate
)

const (
	defaultConfirm = 5 * time.Second
	defaultAckWait = 30 * time.Second // nats-server consumer.go:597
	progressCap    = time.Hour
	exitHandBack   = 100 * time.Millisecond
	handBackTime   = youth + 500*time.Millisecond
	barrierTime    = time.Second
	missingFor     = time.Second // an answer that the consumer is gone is asked for twice
	refreshEvery   = 5 * time.Second
	onItsWay       = 100 * time.Millisecond // what was sent to us has come by then
)

func (c ConsumeConfig) withDefaults() ConsumeConfig {
	c.Consumer.BackOff = slices.Clone(c.Consumer.BackOff)
	c.Consumer.FilterSubjects = slices.Clone(c.Consumer.FilterSubjects)
	c.Consumer.PriorityGroups = slices.Clone(c.Consumer.PriorityGroups)
	c.Consumer.Metadata = maps.Clone(c.Consumer.Metadata)
	for _, t := range []**time.Time{&c.Consumer.OptStartTime, &c.Consumer.PauseUntil} {
		if *t != nil {
			v := **t
			*t = &v
		}
	}
	if c.ConfirmAcks {
		c.ConfirmTimeout = orDefault(c.ConfirmTimeout, defaultConfirm)
	}
	c.MaxMessages = orDefault(c.MaxMessages, defaultMaxMessages)
	c.MaxBytes = orDefault(c.MaxBytes, defaultMaxBytes)
	if c.Listener == nil {
		c.Listener = &Listener{}
	}
	return c
}

// name is the consumer's.
func (c *ConsumeConfig) name() string { return orDefault(c.Consumer.Durable, c.Consumer.Name) }

func (c *ConsumeConfig) validate() error {
	bad := func(field string, value any, bound string) error {
		return &ConfigError{Field: "ConsumeConfig." + field, Value: value, Bound: bound}
	}
	cc := &c.Consumer
	if !legalName(c.Stream) {
		return bad("Stream", quoted(c.Stream), "the name of a stream: not empty, without dots, spaces, wildcards and slashes")
	}
	if !legalName(c.name()) {
		return bad("Consumer.Durable", quoted(c.name()), "the name of a consumer, here or in Name: not empty, without dots, spaces, wildcards and slashes")
	}
	if cc.Durable != "" && cc.Name != "" && cc.Durable != cc.Name {
		return bad("Consumer.Name", quoted(cc.Name), "empty or the same as Durable, "+quoted(cc.Durable))
	}
	if cc.AckPolicy != jetstream.AckExplicitPolicy {
		return bad("Consumer.AckPolicy", cc.AckPolicy, "explicit")
	}
	if cc.DeliverSubject != "" || cc.DeliverGroup != "" || cc.FlowControl || cc.IdleHeartbeat != 0 {
		return bad("Consumer.DeliverSubject", quoted(cc.DeliverSubject), "empty, with all other fields of a push consumer")
	}
	if cc.AckWait < 0 {
		return bad("Consumer.AckWait", cc.AckWait, "0 (default) or more")
	}
	if n := len(cc.BackOff); n > 0 {
		if cc.MaxDeliver > 0 && n > cc.MaxDeliver {
			return bad("Consumer.BackOff", cc.BackOff, fmt.Sprintf("at most MaxDeliver long, %d", cc.MaxDeliver))
		}
		if cc.AckWait != 0 && cc.AckWait != cc.BackOff[0] {
			return bad("Consumer.AckWait", cc.AckWait, fmt.Sprintf("0 or the first BackOff, %v", cc.BackOff[0]))
		}
		if slices.Min(cc.BackOff) <= 0 {
			return bad("Consumer.BackOff", cc.BackOff, "more than 0 each")
		}
	}
	if c.OnDeleted != DeletedFail && c.OnDeleted != DeletedRecreate {
		return bad("OnDeleted", int(c.OnDeleted), "DeletedFail or DeletedRecreate")
	}
	if c.ConfirmTimeout < 0 || (c.ConfirmTimeout > 0 && !c.ConfirmAcks) {
		return bad("ConfirmTimeout", c.ConfirmTimeout, "0 unless ConfirmAcks is set, and never less")
	}
	if c.Progress < 0 {
		return bad("Progress", c.Progress, "0 (off) or more")
	}
	if c.MaxMessages < 0 || c.MaxMessages > 1<<20 {
		return bad("MaxMessages", c.MaxMessages, "from 0 (default) to 1048576")
	}
	if c.MaxBytes < 0 || c.MaxBytes > 1<<30 {
		return bad("MaxBytes", c.MaxBytes, "from 0 (default) to 1 GiB")
	}
	if err := c.progressFits(waits(cc)); err != nil {
		return err
	}
	return c.Tuning.validate("ConsumeConfig.Tuning.")
}

func (c *ConsumeConfig) progressFits(waits []time.Duration) error {
	if wait := slices.Min(waits); c.Progress > wait {
		return &ConfigError{Field: "ConsumeConfig.Progress", Value: c.Progress, Bound: fmt.Sprintf("at most AckWait, %v", wait)}
	}
	return nil
}

// waits returns how long each delivery may take, the last one for all further.
func waits(cc *jetstream.ConsumerConfig) []time.Duration {
	if len(cc.BackOff) > 0 {
		return cc.BackOff // it overrides AckWait (nats-server consumer.go:677)
	}
	return []time.Duration{orDefault(cc.AckWait, defaultAckWait)}
}

// Consume returns a sequence of the messages that a server-side consumer gives
// to this loop. Any number of loops, in one process or several, may share one
// consumer. The body settles each message: Ack, Nak, Term or their variants on
// [Msg], from any goroutine. A message that is not settled within AckWait is
// delivered again, to whichever loop asks first.
//
// Of the contract of [Ordered] everything holds but the order: nothing happens
// before the range, a pair is a message or an error, an error is last, what can
// be repaired is repaired, and all of it runs on the caller's goroutine. There
// is no acknowledgement on return: a loop cannot know whether a body succeeded.
//
// A message takes one of MaxMessages until it is settled or its AckWait has
// passed, so that a body which hands messages to other goroutines is bounded as
// well. What waits on the client is kept so short that it is handled before
// half of AckWait has gone; what has waited too long all the same is not handed
// out, because the server delivers it again.
//
// However the loop ends, what arrived and was not handed out goes back at once.
// The message in hand is the body's to settle. If a pull of the last 2 seconds
// is still open, that happens when it is 2 seconds old, behind the loop: a
// server with leafnodes goes on delivering to it for that long. A cancelled
// context, or a connection that is cut, costs an attempt of each message that
// is on its way then; [Consumer.Drain] does not.
func Consume(ctx context.Context, js jetstream.JetStream, cfg ConsumeConfig) iter.Seq2[Msg, error] {
	err := cfg.validate()
	c := cfg.withDefaults()
	return func(yield func(Msg, error) bool) {
		if err != nil {
			yield(Msg{}, err)
			return
		}
		w := &work{cfg: &c}
		w.run(ctx, js, nil, yield)
	}
}

// Consumer is a handle on a server-side consumer with explicit
// acknowledgements. One range at a time; Drain and Stats may be called from any
// goroutine.
type Consumer struct {
	js      jetstream.JetStream
	cfg     ConsumeConfig
	inUse   atomic.Bool
	board   board
	drained atomic.Bool
	current atomic.Pointer[ledger] // of the range that runs
}

// NewConsumer returns a handle on the consumer that cfg names. Nothing is sent
// before it is ranged over. The error is a [*ConfigError].
func NewConsumer(js jetstream.JetStream, cfg ConsumeConfig) (*Consumer, error) {
	if _, err := usable(js); err != nil {
		return nil, err
	}
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Consumer{js: js, cfg: cfg.withDefaults()}, nil
}

// Messages returns the sequence that [Consume] describes.
func (c *Consumer) Messages(ctx context.Context) iter.Seq2[Msg, error] {
	return func(yield func(Msg, error) bool) { c.run(ctx, nil, yield) }
}

// Batches returns the same messages up to n at a time. A batch ends when it has
// n messages, or as many as the consumer's MaxAckPending, or MaxBytes, when wait
// has passed since the body was last back, or when one of its messages has used
// half of its AckWait; after wait it comes even if it is empty. It is handled as
// a whole and its slice is the caller's. n is from 1 to MaxMessages.
func (c *Consumer) Batches(ctx context.Context, n int, wait time.Duration) iter.Seq2[[]Msg, error] {
	return batches(n, wait, c.cfg.MaxMessages, func(g *gather, yield func(Msg, error) bool) { c.run(ctx, g, yield) },
		func(m Msg) Msg { return m })
}

func (c *Consumer) run(ctx context.Context, g *gather, yield func(Msg, error) bool) {
	if !c.inUse.CompareAndSwap(false, true) {
		yield(Msg{}, ErrInUse)
		return
	}
	defer c.inUse.Store(false)
	w := &work{cfg: &c.cfg, handle: c, board: &c.board}
	w.run(ctx, c.js, g, yield)
}

// Drain ends the sequence in the way that costs no message an attempt: nothing
// more is asked for, what has arrived or is on its way is yielded, and the
// sequence ends without an error, after at most 2 seconds and the bodies. It
// returns at once and may be called from any goroutine, as in
// context.AfterFunc(signalled, c.Drain); range with a context that the signal
// does not cancel. It stays in force: a later range ends at once.
func (c *Consumer) Drain() {
	c.drained.Store(true)
	if b := c.current.Load(); b != nil {
		b.ring()
	}
}

// Stats returns a picture of the loop. It may be called from any goroutine.
func (c *Consumer) Stats() Stats { return c.board.read() }
