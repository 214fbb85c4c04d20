package paced

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"
)

// The errors that end a sequence, in the order of what the caller should do:
//
//   - The caller ended it: an error that is both ctx.Err() and
//     context.Cause(ctx). Nothing to do.
//   - The program is wrong: [*ConfigError] (is [ErrInvalidConfig]) before
//     anything was sent, [ErrInUse], an error that is
//     nats.ErrPermissionViolation and names the subject, or the server's own
//     words for a request it refuses (a *jetstream.APIError or a
//     [*StatusError]). Mend the program or the account.
//   - The stream is gone or another one: jetstream.ErrStreamNotFound,
//     [ErrStreamRecreated]. Decide whether to make it again and where to start.
//   - Messages are gone that the reader has not seen: [*GapError]. A handle
//     goes on behind the gap with its next range.
//   - The consumer of [Consume] is gone: jetstream.ErrConsumerDeleted. What it
//     knew of acknowledgements went with it; decide where a new one starts, or
//     choose DeletedRecreate.
//   - An acknowledgement was not confirmed ([ConsumeConfig].ConfirmAcks):
//     [*AckError]. The message may be delivered again.
//   - The connection is closed for good: nats.ErrConnectionClosed. Connect anew.
//   - It did not work often enough: the last error of the first subscribe after
//     five attempts, or of a rebuild after [Tuning].MaxAttempts. Try later.
//
// Everything else is repaired inside the loop, told to the [Listener] and to
// the connection's error handler, and never yielded.
var (
	// ErrInvalidConfig is what every [*ConfigError] is under errors.Is.
	ErrInvalidConfig = errors.New("paced: invalid configuration")

	// ErrInUse ends a range over a handle that is already being ranged over.
	ErrInUse = errors.New("paced: the handle is already being ranged over")

	// ErrAckDeadline is the reason why a message can no longer be given back or
	// kept: AckWait has passed and the server has taken it back.
	ErrAckDeadline = errors.New("AckWait has passed")

	// ErrStreamRecreated ends a sequence whose stream is not the one it was
	// reading: it was deleted and made anew, or replaced by an older copy of
	// its store. Sequences do not mean what they meant; decide where to start.
	ErrStreamRecreated = errors.New("the stream is not the one it was")
)

// ConfigError says which field of a configuration cannot be used and why. It
// is [ErrInvalidConfig] under errors.Is.
type ConfigError struct {
	Field string // name of the field, such as "OrderedConfig.MaxBytes"
	Value any    // the value it had
	Bound string // what it must be
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("paced: invalid configuration: %s is %v, must be %s", e.Field, e.Value, e.Bound)
}

// Is reports whether target is [ErrInvalidConfig].
func (e *ConfigError) Is(target error) bool { return target == ErrInvalidConfig }

// GapError says that retention removed messages before the reader saw them.
type GapError struct {
	Stream   string
	From, To uint64 // the stream sequences that are gone, both included
}

func (e *GapError) Error() string {
	return fmt.Sprintf("paced: stream %s: sequences %d to %d were removed before they were read", e.Stream, e.From, e.To)
}

// AckError says that a message could not be settled. Under errors.Is it is its
// reason: jetstream.ErrMsgAlreadyAckd for a second settlement, [ErrAckDeadline]
// for one that comes too late, or the connection's error. It ends a sequence
// with ConfirmAcks whose outcome is unknown.
type AckError struct {
	Sequence uint64 // stream sequence of the message
	where    string
	reason   error
}

func (e *AckError) Error() string {
	return fmt.Sprintf("paced: %s: settling sequence %d: %v", e.where, e.Sequence, e.reason)
}

func (e *AckError) Unwrap() error { return e.reason }

// StatusError is a status that the server sent in answer to a pull, in its own
// words (nats-server consumer.go, the "NATS/1.0" headers).
type StatusError struct {
	Code        string // three digits, such as "409"
	Description string // such as "Consumer is push based"; may be empty
}

func (e *StatusError) Error() string {
	if e.Description == "" {
		return "server status " + e.Code
	}
	return "server status " + e.Code + " " + e.Description
}

// Is makes the statuses that mean the same as an error of package jetstream
// that error: a deleted consumer however it was learnt.
func (e *StatusError) Is(target error) bool {
	return target == jetstream.ErrConsumerDeleted && e.Code == "409" && e.Description == statusConsumerDeleted
}

// doneError is the last pair of a sequence whose context is done: both the
// context's error and its cause.
type doneError struct {
	where string
	err   error
	cause error
}

func newDoneError(ctx context.Context, where string) error {
	return &doneError{where: where, err: ctx.Err(), cause: context.Cause(ctx)}
}

func (e *doneError) Error() string {
	if e.cause == e.err {
		return "paced: " + e.where + ": " + e.err.Error()
	}
	return "paced: " + e.where + ": " + e.err.Error() + ": " + e.cause.Error()
}

func (e *doneError) Unwrap() []error { return []error{e.err, e.cause} }

// Reasons for a rebuild that are not a status of the server. They reach
// listeners and error handlers, wrapped, and are never yielded on their own.
var (
	errGap        = errors.New("gap in the consumer sequence")
	errLostTail   = errors.New("messages were sent and did not arrive")
	errUnfilled   = errors.New("a pull ended in the middle of the list of last messages")
	errHole       = errors.New("the list of last messages has holes")
	errSilent     = errors.New("no heartbeat")
	errReset      = errors.New("the consumer may have come back in its first state")
	errBehind     = errors.New("the stream ends in front of the position")
	errNotYet     = errors.New("the connection is not up")
	errNoAnswer   = errors.New("no answer in time")
	errOverflow   = errors.New("more pulls than the consumer's MaxWaiting")
	errMissing    = errors.New("the consumer is missing")
	errDeaf       = fmt.Errorf("%w, not even to a PING: the connection may be half open", errNoAnswer)
	errNotMissing = errors.New("consumer name in use with another configuration")
)
