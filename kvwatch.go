package paced

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// WatchConfig says what [Watch] reads. Only Bucket is needed.
type WatchConfig struct {
	// Bucket is the name of the KV bucket.
	Bucket string

	// Keys are the keys wanted; they may have the wildcards * and > and must
	// not overlap. Default: all keys.
	Keys []string

	// IncludeHistory yields every revision that the bucket keeps, not only the
	// last one of each key.
	IncludeHistory bool

	// UpdatesOnly yields only what is written after the range began. The
	// boundary is fixed then: nothing written later is missed, whatever
	// happens to the consumer. It excludes IncludeHistory and
	// ResumeFromRevision.
	UpdatesOnly bool

	// IgnoreDeletes passes over delete and purge markers, those of expired
	// keys included.
	IgnoreDeletes bool

	// MetaOnly leaves the values on the server.
	MetaOnly bool

	// ResumeFromRevision yields every revision from this one on, this one
	// included, as package jetstream does. Keys that were not touched since do
	// not appear. Default 0: the last revision of every key, then updates.
	ResumeFromRevision uint64

	// UntilCaughtUp ends the sequence, without an error, once every key that
	// was present at its start was yielded.
	UntilCaughtUp bool

	// OnGap is there for symmetry with [OrderedConfig]: every bucket has a
	// limit per key, so that a revision that is gone may as well have been
	// superseded, and no gap is ever certain. With IncludeHistory or
	// ResumeFromRevision, and only where the bucket has a TTL or a size limit,
	// Listener.Gap is told of revisions that may have been removed unread.
	OnGap GapPolicy

	// NamePrefix, InactiveThreshold, MaxMessages, MaxBytes, Listener and Tuning
	// are those of [OrderedConfig].
	NamePrefix            string
	InactiveThreshold     time.Duration
	MaxMessages, MaxBytes int
	Listener              *Listener
	Tuning                Tuning
}

var (
	// What package jetstream takes (kv.go:504); a bucket or a key of other
	// characters cannot have been made with it.
	validBucket  = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)
	validPattern = regexp.MustCompile(`^[-/_=\.a-zA-Z0-9*]*[>]?$`)
)

func (c *WatchConfig) validate() error {
	bad := func(field string, value any, bound string) error {
		return &ConfigError{Field: "WatchConfig." + field, Value: value, Bound: bound}
	}
	if !validBucket.MatchString(c.Bucket) {
		return bad("Bucket", quoted(c.Bucket), "the name of a bucket: letters, digits, _ and -")
	}
	for i, k := range c.Keys {
		if !validPattern.MatchString(k) || !legalSubject(k) {
			return bad("Keys", quoted(k), "legal keys or patterns: letters, digits, -/_=. and the wildcards * and >")
		}
		for _, o := range c.Keys[:i] {
			if overlap(k, o) {
				return bad("Keys", quoted(o)+" and "+quoted(k), "keys that do not overlap")
			}
		}
	}
	if c.UpdatesOnly && c.IncludeHistory {
		return bad("UpdatesOnly", true, "false with IncludeHistory")
	}
	if c.UpdatesOnly && c.ResumeFromRevision > 0 {
		return bad("UpdatesOnly", true, "false with ResumeFromRevision")
	}
	oc := c.ordered()
	err := oc.validate()
	if ce, ok := errors.AsType[*ConfigError](err); ok {
		ce.Field = "WatchConfig." + strings.TrimPrefix(ce.Field, "OrderedConfig.")
	}
	return err
}

// ordered is the same as a reader of the bucket's stream. The filter is added
// when the stream is known: a mirror keeps the subjects of its origin.
func (c *WatchConfig) ordered() OrderedConfig {
	oc := OrderedConfig{
		Stream:            "KV_" + c.Bucket,
		DeliverPolicy:     jetstream.DeliverLastPerSubjectPolicy,
		UntilCaughtUp:     c.UntilCaughtUp,
		HeadersOnly:       c.MetaOnly,
		NamePrefix:        c.NamePrefix,
		InactiveThreshold: c.InactiveThreshold,
		OnGap:             c.OnGap,
		MaxMessages:       c.MaxMessages,
		MaxBytes:          c.MaxBytes,
		Listener:          c.Listener,
		Tuning:            c.Tuning,
	}
	switch {
	case c.UpdatesOnly:
		oc.DeliverPolicy = jetstream.DeliverNewPolicy
	case c.ResumeFromRevision > 0:
		oc.DeliverPolicy, oc.OptStartSeq = jetstream.DeliverByStartSequencePolicy, c.ResumeFromRevision
	case c.IncludeHistory:
		oc.DeliverPolicy = jetstream.DeliverAllPolicy
	}
	return oc
}

// Entry is one revision of a key, or the marker that it was deleted. It is a
// small value and satisfies jetstream.KeyValueEntry. The zero Entry panics on
// use.
type Entry struct{ msg Msg }

var _ jetstream.KeyValueEntry = Entry{}

// Bucket returns the name of the bucket.
func (e Entry) Bucket() string { return e.msg.gen.bucket }

// Key returns the key.
func (e Entry) Key() string { return e.msg.m.Subject[e.msg.gen.prefix:] }

// Value returns the value; empty for a marker and with MetaOnly.
func (e Entry) Value() []byte { return e.msg.m.Data }

// Revision returns the revision, which is the sequence in the bucket's stream.
func (e Entry) Revision() uint64 { return e.msg.seq }

// Created returns when the revision was stored.
func (e Entry) Created() time.Time { return e.msg.Timestamp() }

// Delta returns how many entries were to follow when the server sent this one.
// It is a hint, see [Msg.NumPending].
func (e Entry) Delta() uint64 { return e.msg.pending }

// Replay reports whether the entry is part of what was there at the start: it
// is true until the watcher has caught up.
func (e Entry) Replay() bool { return e.msg.replay }

// Headers returns the message's headers, nil where there are none.
func (e Entry) Headers() nats.Header { return e.msg.m.Header }

// Operation returns what the revision is: a put, a delete or a purge. A key
// that expired, or that the server purged or removed, is told by a marker of
// the server's own (Nats-Marker-Reason, nats-server stream.go:799), which
// counts as package jetstream counts it (kv.go:1298).
func (e Entry) Operation() jetstream.KeyValueOp {
	h := e.msg.m.Header
	if len(h) == 0 {
		return jetstream.KeyValuePut
	}
	switch h.Get("KV-Operation") {
	case "DEL":
		return jetstream.KeyValueDelete
	case "PURGE":
		return jetstream.KeyValuePurge
	case "":
		switch h.Get(jetstream.MarkerReasonHeader) {
		case "MaxAge", "Purge":
			return jetstream.KeyValuePurge
		case "Remove":
			return jetstream.KeyValueDelete
		}
	}
	return jetstream.KeyValuePut
}

// bucketReader is what a reader knows of the bucket.
type bucketReader struct {
	bucket        string
	keys          []string
	ignoreDeletes bool
	revisions     bool // every revision is wanted, not only the last ones
	prefix        string
	mayLose       bool // the bucket has a TTL or a size limit
	names         bool // only the keys are wanted
	whole         bool // and the values come along
}

// smallValues is the mean stored size of a revision (subject, value and 30 bytes,
// filestore.go:10204) up to which a value is not left on the server. The header
// that comes in its place is about as large and costs more: the server has to
// make it and the client to decode it, a fifth of the time that a list of keys
// takes.
const smallValues = 128

// meet finds out where the bucket's keys are: a mirror keeps the subjects of
// its origin (kv.go:1609).
func (b *bucketReader) meet(info *jetstream.StreamInfo) {
	origin := b.bucket
	if m := info.Config.Mirror; m != nil {
		origin = strings.TrimPrefix(m.Name, "KV_")
	}
	b.prefix = "$KV." + origin + "."
	b.mayLose = info.Config.MaxAge > 0 || info.Config.MaxBytes > 0
	b.whole = b.names && info.State.Bytes <= smallValues*info.State.Msgs
}

func (b *bucketReader) filters() []string {
	if len(b.keys) == 0 {
		return []string{b.prefix + ">"}
	}
	f := make([]string, len(b.keys))
	for i, k := range b.keys {
		f[i] = b.prefix + k
	}
	return f
}

// wants reports whether an entry goes to the body.
func (b *bucketReader) wants(m Msg) bool {
	return !b.ignoreDeletes || Entry{m}.Operation() == jetstream.KeyValuePut
}

// Watch returns a sequence of the entries of a KV bucket: the last revision of
// every key in the order of the revisions, then every update. It shares the
// contract of [Ordered]: lazy, one error at most and last, nothing missing and
// nothing twice whatever happens to consumer, connection or server, everything
// on the caller's goroutine.
//
// Until it has caught up no superseded revision is yielded as the last one of
// its key, and no key that was there at the start is missing when it has. A
// key that is written while the bucket is listed moves behind the boundary, so
// that the boundary is read again on passing it, up to three times: only a key
// that was rewritten in each round may come later. If the consumer is lost
// during the list, the list is made anew and goes on behind the last entry.
func Watch(ctx context.Context, js jetstream.JetStream, cfg WatchConfig) iter.Seq2[Entry, error] {
	return watch(ctx, js, cfg, false)
}

func watch(ctx context.Context, js jetstream.JetStream, cfg WatchConfig, names bool) iter.Seq2[Entry, error] {
	err := cfg.validate()
	r := cfg.reader()
	r.kv.names = names
	return func(yield func(Entry, error) bool) {
		if err != nil {
			yield(Entry{}, err)
			return
		}
		again, kv := r, *r.kv // each range begins anew
		again.kv = &kv
		again.run(ctx, js, func(m Msg, err error) bool { return yield(Entry{m}, err) })
	}
}

// reader makes the reader of a valid configuration.
func (c *WatchConfig) reader() reader {
	oc := c.ordered()
	oc = oc.withDefaults()
	return reader{cfg: &oc, kv: &bucketReader{
		bucket:        c.Bucket,
		keys:          slices.Clone(c.Keys),
		ignoreDeletes: c.IgnoreDeletes,
		revisions:     c.IncludeHistory || c.ResumeFromRevision > 0,
	}}
}

// Keys returns the keys of a bucket that match any of the patterns (default:
// all), in the order in which they were last written. The sequence is finite,
// and complete or ended by an error. It runs in constant memory, so that a key
// that is rewritten while the bucket is listed may come twice; none is missing.
func Keys(ctx context.Context, js jetstream.JetStream, bucket string, patterns ...string) iter.Seq2[string, error] {
	seq := watch(ctx, js, WatchConfig{Bucket: bucket, Keys: patterns, IgnoreDeletes: true, MetaOnly: true, UntilCaughtUp: true}, true)
	return func(yield func(string, error) bool) {
		for e, err := range seq {
			if err != nil {
				yield("", err)
				return
			}
			if !yield(e.Key(), nil) {
				return
			}
		}
	}
}

// History returns every revision that a bucket keeps of the keys that match
// any of the patterns (default: all), markers included, in the order of the
// revisions. The sequence is finite, and complete or ended by an error.
func History(ctx context.Context, js jetstream.JetStream, bucket string, patterns ...string) iter.Seq2[Entry, error] {
	return Watch(ctx, js, WatchConfig{Bucket: bucket, Keys: patterns, IncludeHistory: true, UntilCaughtUp: true})
}

// Watcher is a handle on a watched bucket that keeps its position between
// ranges. One range at a time; Stats may be called from any goroutine.
type Watcher struct {
	js     jetstream.JetStream
	reader reader
	inUse  atomic.Bool
	board  board
	where  bookmark
}

// NewWatcher returns a handle that watches what cfg says. Nothing is sent
// before it is ranged over. The error is a [*ConfigError].
//
// To warm a cache, say ready and follow is two loops: over Snapshot, then over
// Updates.
func NewWatcher(js jetstream.JetStream, cfg WatchConfig) (*Watcher, error) {
	if _, err := usable(js); err != nil {
		return nil, err
	}
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Watcher{js: js, reader: cfg.reader()}, nil
}

// Snapshot returns a finite sequence: what is present when the range begins and
// was not yielded by an earlier range.
func (w *Watcher) Snapshot(ctx context.Context) iter.Seq2[Entry, error] {
	return w.sequence(ctx, true)
}

// Updates returns a sequence that goes on behind the last entry yielded and
// stays live. Behind a Snapshot nothing between the two is lost or repeated.
func (w *Watcher) Updates(ctx context.Context) iter.Seq2[Entry, error] {
	return w.sequence(ctx, false)
}

// Batches returns what Updates does, up to n entries at a time, see
// [OrderedConsumer.Batches].
func (w *Watcher) Batches(ctx context.Context, n int, wait time.Duration) iter.Seq2[[]Entry, error] {
	return batches(n, wait, w.reader.cfg.MaxMessages, func(g *gather, yield func(Msg, error) bool) { w.run(ctx, false, g, yield) },
		func(m Msg) Entry { return Entry{m} })
}

// Stats returns a picture of the loop. It may be called from any goroutine.
func (w *Watcher) Stats() Stats { return w.board.read() }

func (w *Watcher) sequence(ctx context.Context, finite bool) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		w.run(ctx, finite, nil, func(m Msg, err error) bool { return yield(Entry{m}, err) })
	}
}

func (w *Watcher) run(ctx context.Context, finite bool, g *gather, yield func(Msg, error) bool) {
	if !w.inUse.CompareAndSwap(false, true) {
		yield(Msg{}, ErrInUse)
		return
	}
	defer w.inUse.Store(false)
	r := w.reader
	r.finite, r.gather, r.board, r.where = finite, g, &w.board, &w.where
	r.run(ctx, w.js, yield)
}

// settled decides, with everything up to the target received, whether a list of
// last messages is complete. A key that was rewritten meanwhile lies behind
// the target now (with one revision per key the old one is gone), so that the
// stream's end is read again. A message behind the target that says nothing is
// pending is no way around that: under writers the count is too low at times.
func (l *loop) settled() (bool, error) {
	if !l.recipe.rereads || l.born == 0 || l.rounds >= rereads {
		return true, nil
	}
	info, err := l.reread()
	if err != nil {
		return false, err
	}
	l.rounds++
	l.target = max(l.target, info.State.LastSeq)
	return l.pos.reached(l.target), nil
}

// rereads is how often the end of the stream is read again.
const rereads = 3

// beside is the question for the stream's end that goes out beside a confirming
// pull, so that both answers come within one round trip.
type beside struct {
	reply  string
	cseq   uint64 // what had been received then; the answer is too old otherwise
	answer *nats.Msg
}

func (l *loop) askBeside() {
	if !l.recipe.rereads || l.caught || (l.beside.reply != "" && l.beside.cseq == l.pos.cseq) {
		return
	}
	l.beside = beside{reply: l.in.token(0), cseq: l.pos.cseq}
	if err := l.link.publish(l.api("STREAM.INFO."+l.stream), l.beside.reply, nil); err != nil {
		l.beside = beside{}
	}
}

// reread returns the stream as it is now, where now is no earlier than the last
// message received.
func (l *loop) reread() (*jetstream.StreamInfo, error) {
	b := l.beside
	l.beside = beside{}
	if b.reply == "" || b.cseq != l.pos.cseq {
		return l.streamInfo(l.api("STREAM.INFO." + l.stream))
	}
	if b.answer == nil {
		var err error
		if b.answer, err = l.await(b.reply, time.Now().Add(l.patience)); err != nil {
			return nil, err
		}
	}
	var a streamAnswer
	if err := json.Unmarshal(b.answer.Data, &a); err != nil {
		return nil, err
	}
	return a.check()
}

// missing turns a missing stream into a missing bucket.
func (b *bucketReader) missing(err error) error {
	if b != nil && errors.Is(err, jetstream.ErrStreamNotFound) {
		return fmt.Errorf("%w: %w", jetstream.ErrBucketNotFound, err)
	}
	return err
}
