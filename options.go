package paced

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// OrderedConfig says what [Ordered] reads. Only Stream is needed; the zero
// value of every other field is a good default.
type OrderedConfig struct {
	// Stream is the name of the stream. It must keep its messages by limits:
	// reading a work-queue or interest stream without acknowledgements would
	// remove the messages.
	Stream string

	// FilterSubjects limits the reader to these subjects; they may have
	// wildcards and must not overlap. Default: all of the stream.
	FilterSubjects []string

	// After goes on behind a stored position, see [Msg.Position]. The stream
	// must be the one the position is from, else [ErrStreamRecreated]; what
	// retention removed behind it is a gap, see OnGap. Default: DeliverPolicy
	// decides; the two exclude each other.
	After Position

	// DeliverPolicy says where to start: all (default), last, new, by start
	// sequence, by start time or last per subject. The start is fixed when the
	// first consumer is made: whatever happens to that consumer, nothing
	// published later is missed and nothing earlier appears.
	//
	// Last per subject yields the last message of every subject, in stream
	// order, and then every later one. If the consumer is lost before that
	// list is complete it is made anew, so that the rest of it may be newer
	// than the first part; a superseded message is never yielded as one of it.
	DeliverPolicy jetstream.DeliverPolicy

	// OptStartSeq is the first stream sequence wanted. Only with, and needed
	// by, jetstream.DeliverByStartSequencePolicy.
	OptStartSeq uint64

	// OptStartTime is the time from which on messages are wanted. Only with,
	// and needed by, jetstream.DeliverByStartTimePolicy. A time in the future
	// is what it is on the server: the same as new.
	OptStartTime *time.Time

	// UntilCaughtUp ends the sequence, without an error, once what was present
	// at its start has been yielded.
	UntilCaughtUp bool

	// UntilSeq ends the sequence, without an error, after this stream
	// sequence, or once the server has scanned past it. Default 0: no end.
	UntilSeq uint64

	// UntilTime ends the sequence, without an error, before the first message
	// that was stored after this time. If the time has passed when the range
	// begins, being caught up ends it as well; if not, the first heartbeat
	// after it that shows that nothing is pending does, by this process's
	// clock.
	UntilTime *time.Time

	// ReplayPolicy is instant (default) or original, which keeps the pace at
	// which the messages were stored.
	ReplayPolicy jetstream.ReplayPolicy

	// HeadersOnly leaves the payloads on the server; the header Nats-Msg-Size
	// tells their size.
	HeadersOnly bool

	// NamePrefix begins the names of the server-side consumers. Default
	// "paced". It must be a legal consumer name.
	NamePrefix string

	// InactiveThreshold is how long the server keeps the consumer when nobody
	// asks: the backstop where it could not be deleted. A body that takes
	// longer costs one rebuild, not a message. Default 5 minutes.
	InactiveThreshold time.Duration

	// Metadata is attached to the server-side consumer.
	Metadata map[string]string

	// OnGap says what happens when retention removed messages before they were
	// read: GapFail (default) ends the sequence with a [*GapError], GapContinue
	// tells Listener.Gap and goes on. With FilterSubjects, or on a stream with
	// a limit per subject, nobody can tell whether a removed message was
	// wanted: the listener is told of a possible gap, whatever OnGap says.
	// Messages deleted one by one cannot be seen and are no gap.
	OnGap GapPolicy

	// MaxMessages bounds the messages asked for and not yet handed to the
	// body. Default 5000, at least 1.
	MaxMessages int

	// MaxBytes bounds their bytes (nats.Msg.Size) and is itself bounded by
	// the loop's share of the connection's budget, see [SetByteBudget]. A
	// message larger than it comes alone. Default 8 MiB.
	MaxBytes int

	// Listener is told what the loop does. Default: nobody.
	Listener *Listener

	// Tuning is for what nobody should need to change.
	Tuning Tuning
}

// GapPolicy says what happens when messages were removed before they were read.
type GapPolicy int

const (
	GapFail     GapPolicy = iota // end with a *GapError
	GapContinue                  // tell the listener and go on
)

// Tuning holds what nobody should need to change.
type Tuning struct {
	// LookAhead is how much of the loop body's work is kept waiting on the
	// client, so that the body does not wait for the network. Default 20 ms
	// plus two measured round trips.
	LookAhead time.Duration

	// Expires is the life of one pull on the server. Default 30 s. Shorter
	// costs a request each time it passes; nothing waits for it.
	Expires time.Duration

	// Heartbeat is how often an idle server says that it is there. Two missed
	// ones lead to a question and, if need be, a new consumer. Default 250 ms
	// until caught up and 5 s after, and never more than half of Expires. If
	// set, it holds in both phases and must be at most half of Expires.
	Heartbeat time.Duration

	// MaxAttempts is how many rebuilds in a row may fail before the sequence
	// ends with the last error. Default 0: no limit. The first subscribe
	// always has five attempts.
	MaxAttempts int

	// ReconnectHalfOpen forces the connection to reconnect when it is silent
	// although heartbeats are due and a request stays unanswered: nats.go
	// itself notices that after PingInterval x (MaxPingsOutstanding + 1), up
	// to 6 minutes by default. It affects everything on the connection.
	// Default false: the listener is told.
	ReconnectHalfOpen bool
}

// Timing defaults. The heartbeat and expiry mirror what package jetstream uses
// (pull.go), shorter where catching up is waited for.
const (
	defaultExpires        = 30 * time.Second
	catchUpExpires        = 10 * time.Second // bounds the statuses a busy body leaves unread
	defaultHeartbeat      = 5 * time.Second
	catchUpHeartbeat      = 250 * time.Millisecond
	confirmHeartbeat      = 5 * time.Millisecond
	confirmPause          = 3 * time.Millisecond  // without a message, before the hint is doubted
	confirmFar            = 50 * time.Millisecond // the same with so much to come that the server is rather slow
	confirmLife           = 10 * time.Millisecond
	defaultInactive       = 5 * time.Minute
	defaultNamePrefix     = "paced"
	defaultRequestTimeout = 2 * time.Second
	maxRequestTimeout     = 10 * time.Second
	maxBackoff            = 5 * time.Second
	firstAttempts         = 5
)

// withDefaults returns a copy that shares nothing with c and has every default
// filled in.
func (c OrderedConfig) withDefaults() OrderedConfig {
	c.FilterSubjects = slices.Clone(c.FilterSubjects)
	c.Metadata = maps.Clone(c.Metadata)
	if c.OptStartTime != nil {
		t := *c.OptStartTime
		c.OptStartTime = &t
	}
	if c.UntilTime != nil {
		t := *c.UntilTime
		c.UntilTime = &t
	}
	c.NamePrefix = orDefault(c.NamePrefix, defaultNamePrefix)
	c.InactiveThreshold = orDefault(c.InactiveThreshold, defaultInactive)
	c.MaxMessages = orDefault(c.MaxMessages, defaultMaxMessages)
	c.MaxBytes = orDefault(c.MaxBytes, defaultMaxBytes)
	if c.Listener == nil {
		c.Listener = &Listener{}
	}
	return c
}

func orDefault[T comparable](v, d T) T {
	var zero T
	if v == zero {
		return d
	}
	return v
}

// validate holds every rule that can be checked before anything is sent.
func (c *OrderedConfig) validate() error {
	bad := func(field string, value any, bound string) error {
		return &ConfigError{Field: "OrderedConfig." + field, Value: value, Bound: bound}
	}
	if !legalName(c.Stream) {
		return bad("Stream", quoted(c.Stream), "the name of a stream: not empty, without dots, spaces, wildcards and slashes")
	}
	if c.NamePrefix != "" && (!legalName(c.NamePrefix) || len(c.NamePrefix) > 200) {
		return bad("NamePrefix", quoted(c.NamePrefix), "a consumer name of at most 200 bytes, without dots, spaces, wildcards and slashes")
	}
	for i, s := range c.FilterSubjects {
		if !legalSubject(s) {
			return bad("FilterSubjects", quoted(s), "legal subjects")
		}
		for _, o := range c.FilterSubjects[:i] {
			if overlap(s, o) {
				return bad("FilterSubjects", quoted(o)+" and "+quoted(s), "subjects that do not overlap")
			}
		}
	}
	switch c.DeliverPolicy {
	case jetstream.DeliverAllPolicy, jetstream.DeliverNewPolicy, jetstream.DeliverLastPolicy, jetstream.DeliverLastPerSubjectPolicy:
	case jetstream.DeliverByStartSequencePolicy:
		if c.OptStartSeq == 0 {
			return bad("OptStartSeq", 0, "set when DeliverPolicy is by start sequence")
		}
	case jetstream.DeliverByStartTimePolicy:
		if c.OptStartTime == nil {
			return bad("OptStartTime", nil, "set when DeliverPolicy is by start time")
		}
	default:
		return bad("DeliverPolicy", int(c.DeliverPolicy), "one of package jetstream's")
	}
	if c.OptStartSeq != 0 && c.DeliverPolicy != jetstream.DeliverByStartSequencePolicy {
		return bad("OptStartSeq", c.OptStartSeq, "0 unless DeliverPolicy is by start sequence")
	}
	if c.OptStartTime != nil && c.DeliverPolicy != jetstream.DeliverByStartTimePolicy {
		return bad("OptStartTime", *c.OptStartTime, "nil unless DeliverPolicy is by start time")
	}
	if c.After != (Position{}) {
		if c.DeliverPolicy != jetstream.DeliverAllPolicy {
			return bad("After", c.After, "zero unless DeliverPolicy is")
		}
		if c.After.StreamCreated.IsZero() {
			return bad("After", c.After, "a position with the stream's creation time")
		}
	}
	if c.OnGap != GapFail && c.OnGap != GapContinue {
		return bad("OnGap", int(c.OnGap), "GapFail or GapContinue")
	}
	if p := c.ReplayPolicy; p != jetstream.ReplayInstantPolicy && p != jetstream.ReplayOriginalPolicy {
		return bad("ReplayPolicy", int(p), "instant or original")
	}
	if c.InactiveThreshold < 0 {
		return bad("InactiveThreshold", c.InactiveThreshold, "0 or more")
	}
	if c.MaxMessages < 0 || c.MaxMessages > 1<<20 {
		return bad("MaxMessages", c.MaxMessages, "from 0 (default) to 1048576")
	}
	if c.MaxBytes < 0 || c.MaxBytes > 1<<30 {
		return bad("MaxBytes", c.MaxBytes, "from 0 (default) to 1 GiB")
	}
	return c.Tuning.validate("OrderedConfig.Tuning.")
}

func (t *Tuning) validate(prefix string) error {
	bad := func(field string, value any, bound string) error {
		return &ConfigError{Field: prefix + field, Value: value, Bound: bound}
	}
	switch expires := orDefault(t.Expires, defaultExpires); {
	case t.LookAhead < 0:
		return bad("LookAhead", t.LookAhead, "0 (default) or more")
	case t.Expires < 0 || (t.Expires > 0 && t.Expires < 10*time.Millisecond):
		return bad("Expires", t.Expires, "0 (default) or at least 10ms")
	case t.Heartbeat < 0 || (t.Heartbeat > 0 && t.Heartbeat < time.Millisecond):
		return bad("Heartbeat", t.Heartbeat, "0 (default) or at least 1ms")
	case t.Heartbeat*2 > expires:
		return bad("Heartbeat", t.Heartbeat, fmt.Sprintf("at most half of Expires, %v", expires/2))
	case t.Heartbeat > 0 && expires/t.Heartbeat > 10_000:
		return bad("Heartbeat", t.Heartbeat, fmt.Sprintf("at least %v, a ten-thousandth of Expires", expires/10_000))
	case t.MaxAttempts < 0:
		return bad("MaxAttempts", t.MaxAttempts, "0 (no limit) or more")
	}
	return nil
}

// heartbeat and expires return the values of a routine pull.
func (t *Tuning) heartbeat(caughtUp bool) time.Duration {
	if t.Heartbeat > 0 {
		return t.Heartbeat
	}
	h := defaultHeartbeat
	if !caughtUp {
		h = catchUpHeartbeat
	}
	return min(h, t.expires(caughtUp)/2)
}

func (t *Tuning) expires(caughtUp bool) time.Duration {
	if t.Expires > 0 {
		return t.Expires
	}
	if !caughtUp && t.Heartbeat == 0 {
		return catchUpExpires
	}
	return defaultExpires
}

func quoted(s string) string { return fmt.Sprintf("%q", s) }

// legalName mirrors what the server takes as a stream or consumer name
// (nats-server jetstream.go:2886).
func legalName(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r == 0x7f || strings.ContainsRune(".*>/\\", r)
	})
}

// legalSubject mirrors nats-server sublist.go:1258.
func legalSubject(s string) bool {
	tokens := strings.Split(s, ".")
	for i, t := range tokens {
		if t == "" || strings.ContainsAny(t, " \t\r\n\f") || (t == ">" && i != len(tokens)-1) {
			return false
		}
	}
	return true
}

// overlap reports whether some subject matches both patterns.
func overlap(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; i < len(x) && i < len(y); i++ {
		switch {
		case x[i] == ">" || y[i] == ">":
			return true
		case x[i] == "*" || y[i] == "*" || x[i] == y[i]:
		default:
			return false
		}
	}
	return len(x) == len(y)
}

// usable checks the connection that a sequence is to run on.
func usable(js jetstream.JetStream) (*nats.Conn, error) {
	if js == nil {
		return nil, &ConfigError{Field: "js", Value: nil, Bound: "a jetstream.JetStream"}
	}
	nc := js.Conn()
	if nc == nil {
		return nil, &ConfigError{Field: "js", Value: "without a connection", Bound: "made from a connection"}
	}
	return nc, nil
}

// apiPrefix returns what API subjects begin with.
func apiPrefix(js jetstream.JetStream) string {
	switch o := js.Options(); {
	case o.Domain != "":
		return "$JS." + o.Domain + ".API."
	case o.APIPrefix != "":
		return strings.TrimSuffix(o.APIPrefix, ".") + "."
	default:
		return jetstream.DefaultAPIPrefix
	}
}
