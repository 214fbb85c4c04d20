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

// Ack, like the other settling methods, does nothing and returns nil on a
// message of an ack-none reader: there is nothing to settle.
func (m Msg) Ack() error { return m.settle() }

// DoubleAck does nothing on an ack-none reader.
func (m Msg) DoubleAck(context.Context) error { return m.settle() }

// Nak does nothing on an ack-none reader.
func (m Msg) Nak() error { return m.settle() }

// NakWithDelay does nothing on an ack-none reader.
func (m Msg) NakWithDelay(time.Duration) error { return m.settle() }

// InProgress does nothing on an ack-none reader.
func (m Msg) InProgress() error { return m.settle() }

// Term does nothing on an ack-none reader.
func (m Msg) Term() error { return m.settle() }

// TermWithReason does nothing on an ack-none reader.
func (m Msg) TermWithReason(string) error { return m.settle() }

func (m Msg) settle() error {
	_ = m.m.Reply // a zero Msg panics here as everywhere
	return nil
}
