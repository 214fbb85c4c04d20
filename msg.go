package paced

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/wire"
)

// Position says where a reader is: behind which message, and in which
// incarnation of the stream. A stream that is deleted and made anew begins to
// count from 1 again; its creation time tells the two apart. Store both in the
// same transaction as the effect of the message.
type Position struct {
	Sequence      uint64    `json:"sequence"`
	StreamCreated time.Time `json:"stream_created"`
}

// Msg is one message. It is a small value: handing it on allocates nothing
// (converting it to an interface does). It satisfies jetstream.Msg, so that
// existing handlers take it as it is. The zero Msg holds no message: its
// methods panic.
type Msg struct {
	m         *nats.Msg
	gen       *generation
	claim     *claim // explicit ack only
	seq       uint64
	cseq      uint64
	pending   uint64
	stored    int64
	delivered uint32
	replay    bool
}

var _ jetstream.Msg = Msg{}

// generation is what the messages of one consumer share.
type generation struct {
	stream   string
	consumer string
	created  time.Time // of the stream
	number   int
	bucket   string // KV only
	prefix   int    // KV only: the part of a subject in front of the key
}

// Data returns the payload.
func (m Msg) Data() []byte { return m.m.Data }

// Headers returns the headers, nil where there are none.
func (m Msg) Headers() nats.Header { return m.m.Header }

// Subject returns the subject the message was stored under.
func (m Msg) Subject() string { return m.m.Subject }

// Reply returns the subject that acknowledgements would go to.
func (m Msg) Reply() string { return m.m.Reply }

// Sequence returns the stream sequence.
func (m Msg) Sequence() uint64 { return m.seq }

// ConsumerSequence returns the consumer sequence. It starts at 1 again with
// every rebuild.
func (m Msg) ConsumerSequence() uint64 { return m.cseq }

// Position returns what to store in order to go on after this message.
func (m Msg) Position() Position {
	return Position{Sequence: m.seq, StreamCreated: m.gen.created}
}

// Timestamp returns when the server stored the message.
func (m Msg) Timestamp() time.Time { return time.Unix(0, m.stored) }

// NumPending returns how many messages matched and were not yet delivered when
// the server sent this one. It is a hint: it can be 0 too early and, with
// writers or deletions at work, never become 0 (nats-server consumer.go:5507,
// 7020). To know what is caught up use [Msg.Replay], UntilCaughtUp or
// [Listener].CaughtUp.
func (m Msg) NumPending() uint64 { return m.pending }

// NumDelivered returns how often the message was delivered on this consumer.
func (m Msg) NumDelivered() uint64 { return uint64(m.delivered) }

// Replay reports whether the message was present when the range began.
func (m Msg) Replay() bool { return m.replay }

// Metadata returns the same numbers in the form of package jetstream. It never
// fails.
func (m Msg) Metadata() (*jetstream.MsgMetadata, error) {
	meta := &jetstream.MsgMetadata{
		NumDelivered: uint64(m.delivered),
		NumPending:   m.pending,
		Timestamp:    m.Timestamp(),
		Stream:       m.gen.stream,
		Consumer:     m.gen.consumer,
		Domain:       wire.Domain(m.m.Reply),
	}
	meta.Sequence.Stream = m.seq
	meta.Sequence.Consumer = m.cseq
	return meta, nil
}

// Ack acknowledges the message: it is done and will not be delivered again. It
// returns when the acknowledgement is sent, or, with
// [ConsumeConfig].ConfirmAcks, when the server has it.
//
// On a message of an ack-none reader ([Ordered], [Watch]) this and the other
// settling methods do nothing and return nil. Otherwise a message is settled
// once: later tries, on any copy of it, return an [*AckError] that is
// jetstream.ErrMsgAlreadyAckd. One that could not be sent may be tried again.
// Settling works from any goroutine and after the loop has ended.
func (m Msg) Ack() error {
	if c := m.settles(); c != nil {
		return c.ack()
	}
	return nil
}

// DoubleAck acknowledges the message and waits until the server has it or ctx
// is done, by default for 5 seconds.
func (m Msg) DoubleAck(ctx context.Context) error {
	if c := m.settles(); c != nil {
		return c.doubleAck(ctx)
	}
	return nil
}

// Nak gives the message back: it is delivered again at once. After
// [Msg.AckDeadline] the server has taken it back already, and the error is
// [ErrAckDeadline].
func (m Msg) Nak() error { return m.NakWithDelay(0) }

// NakWithDelay gives the message back: it is delivered again after delay.
func (m Msg) NakWithDelay(delay time.Duration) error {
	if c := m.settles(); c != nil {
		return c.nak(delay)
	}
	return nil
}

// InProgress asks the server to count AckWait anew. It does not settle the
// message and may be called often.
func (m Msg) InProgress() error {
	if c := m.settles(); c != nil {
		return c.progress()
	}
	return nil
}

// Term says that the message cannot be handled: it will not be delivered again.
func (m Msg) Term() error { return m.TermWithReason("") }

// TermWithReason is Term with a reason that the server puts into its advisory.
func (m Msg) TermWithReason(reason string) error {
	if c := m.settles(); c != nil {
		return c.term(reason)
	}
	return nil
}

// AckDeadline returns when the server will take the message back and deliver it
// again unless it is settled: AckWait, or the backoff of this delivery, after
// the earliest moment at which it can have been sent. It moves with
// [Msg.InProgress]. It is zero for an ack-none reader.
func (m Msg) AckDeadline() time.Time {
	if c := m.settles(); c != nil {
		return c.deadline()
	}
	return time.Time{}
}

func (m Msg) settles() *claim {
	_ = m.m.Reply // a zero Msg panics here as everywhere
	return m.claim
}
