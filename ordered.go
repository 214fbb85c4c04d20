package paced

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Ordered returns a sequence of the messages of a stream in stream order, none
// missing and none twice, that goes on live when it has caught up.
//
// Nothing happens before it is ranged over, and cfg is copied. Each range makes
// a server-side consumer of its own that starts where cfg says, and removes it
// when the loop ends, however it ends: break, return, panic, a done context or
// an error. Ranging again starts again from cfg; to go on where a range
// stopped use [NewOrderedConsumer].
//
// Each pair is a message or an error, never both and never neither. An error is
// the last pair. Whatever can be repaired (a lost consumer or connection, a
// restarted server, a missed heartbeat, a gap) is repaired inside the loop
// behind the last message yielded and told to cfg.Listener; it is not yielded.
// The errors that end a sequence are listed at [ErrInvalidConfig]. When ctx is
// done the next pair is an error that is both ctx.Err() and context.Cause(ctx).
// Without an error the sequence ends only when the body leaves it, or behind
// UntilCaughtUp, UntilSeq or UntilTime.
//
// The loop body is the handler. It may take any time: the server is asked for
// more only when the loop comes back, for at most what the bounds leave room
// for, and time spent in the body never counts against the server. A message
// is handled when the loop comes back for the next one.
//
// All of it runs on the caller's goroutine, so that it works with iter.Pull2
// and inside other iterators, as long as those do not read ahead. The
// exception is the clean-up behind a loop that has ended: one goroutine that
// lives no longer than the connection's own timeout.
func Ordered(ctx context.Context, js jetstream.JetStream, cfg OrderedConfig) iter.Seq2[Msg, error] {
	err := cfg.validate()
	c := cfg.withDefaults()
	return func(yield func(Msg, error) bool) {
		if err != nil {
			yield(Msg{}, err)
			return
		}
		r := reader{cfg: &c}
		r.run(ctx, js, yield)
	}
}

// OrderedConsumer is a handle on an ordered reader that keeps its position
// between ranges. One range at a time; Stats may be called from any goroutine.
type OrderedConsumer struct {
	js    jetstream.JetStream
	cfg   OrderedConfig
	inUse atomic.Bool
	board board
	where bookmark // touched by the range that holds inUse
}

// bookmark is what a handle keeps between ranges.
type bookmark struct {
	set     bool
	at      uint64
	held    uint64
	listed  bool // a list of last messages was completed up to at
	created time.Time
}

// NewOrderedConsumer returns a handle that reads what cfg says. Nothing is sent
// before it is ranged over. The error is a [*ConfigError].
func NewOrderedConsumer(js jetstream.JetStream, cfg OrderedConfig) (*OrderedConsumer, error) {
	if _, err := usable(js); err != nil {
		return nil, err
	}
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &OrderedConsumer{js: js, cfg: cfg.withDefaults()}, nil
}

// Backlog returns a finite sequence: what is present when the range begins and
// was not yielded by an earlier range. What is stored later is left for the
// next one. The contract is that of [Ordered]; the position is kept, so that a
// range goes on behind the last message yielded.
func (c *OrderedConsumer) Backlog(ctx context.Context) iter.Seq2[Msg, error] {
	return c.sequence(ctx, true)
}

// Messages returns a sequence that goes on behind the last message yielded, or
// starts where the configuration says, and stays live. The contract is that of
// [Ordered]. A message in hand when the body left counts as yielded: the next
// range goes on after it.
func (c *OrderedConsumer) Messages(ctx context.Context) iter.Seq2[Msg, error] {
	return c.sequence(ctx, false)
}

// Batches returns what Messages does, up to n messages at a time. A batch ends
// when it has n messages or MaxBytes, or when wait has passed since the body was
// last back; then it comes even if it is empty, so that the loop can keep time.
// It is handled as a whole and its slice is the caller's: a range goes on behind
// the last batch yielded. n is from 1 to MaxMessages. While a consumer is being
// made a batch can be late by as long as a request takes.
func (c *OrderedConsumer) Batches(ctx context.Context, n int, wait time.Duration) iter.Seq2[[]Msg, error] {
	return batches(n, wait, c.cfg.MaxMessages, func(g *gather, yield func(Msg, error) bool) { c.run(ctx, false, g, yield) },
		func(m Msg) Msg { return m })
}

// Stats returns a picture of the loop. It may be called from any goroutine,
// also while no range runs.
func (c *OrderedConsumer) Stats() Stats { return c.board.read() }

func (c *OrderedConsumer) sequence(ctx context.Context, finite bool) iter.Seq2[Msg, error] {
	return func(yield func(Msg, error) bool) { c.run(ctx, finite, nil, yield) }
}

func (c *OrderedConsumer) run(ctx context.Context, finite bool, g *gather, yield func(Msg, error) bool) {
	if !c.inUse.CompareAndSwap(false, true) {
		yield(Msg{}, ErrInUse)
		return
	}
	defer c.inUse.Store(false)
	r := reader{cfg: &c.cfg, finite: finite, gather: g, board: &c.board, where: &c.where}
	r.run(ctx, c.js, yield)
}

// reader is one range over an ordered sequence: the recipe that the loop runs
// with.
type reader struct {
	cfg        *OrderedConfig
	kv         *bucketReader // nil: no bucket
	filters    []string      // subjects wanted, once the stream is known
	finite     bool
	gather     *gather
	board      *board
	where      *bookmark
	api        string
	created    time.Time // of the stream, once known
	perSubject int64     // the stream's limit of messages per subject
	replicas   int       // of the stream
	met        bool      // the stream was looked at
	shrunk     bool      // the stream's last sequence was once below the position
}

func (r *reader) run(ctx context.Context, js jetstream.JetStream, yield func(Msg, error) bool) {
	where := "stream " + r.cfg.Stream
	if ctx.Err() != nil {
		yield(Msg{}, newDoneError(ctx, where))
		return
	}
	nc, err := usable(js)
	if err != nil {
		yield(Msg{}, err)
		return
	}
	if nc.IsClosed() {
		yield(Msg{}, fmt.Errorf("paced: %s: %w", where, nats.ErrConnectionClosed))
		return
	}
	r.api = apiPrefix(js)
	l := newLoop(ctx, newLink(nc), joinBudget(nc))
	r.prepare(l)
	l.run(yield)
}

// prepare sets a loop up for this reader.
func (r *reader) prepare(l *loop) {
	c := r.cfg
	l.where = "stream " + c.Stream
	l.stream = c.Stream
	l.apiPrefix = r.api
	l.tuning, l.lis, l.board = c.Tuning, c.Listener, r.board
	l.maxMessages, l.maxBytes, l.gather = c.MaxMessages, c.MaxBytes, r.gather
	l.pace = newPacer(c.MaxMessages, startCredit, c.Tuning.LookAhead)
	l.until = c.UntilSeq
	if c.UntilTime != nil {
		l.untilAt, l.timed = *c.UntilTime, true
	}
	l.recipe = recipe{
		create:  r.create,
		vet:     r.same,
		gap:     r.gap,
		inOrder: true,
		rereads: r.kv != nil && c.DeliverPolicy != jetstream.DeliverNewPolicy,
		finite:  r.finite || c.UntilCaughtUp || (c.UntilTime != nil && c.UntilTime.Before(time.Now())),
		replay:  c.ReplayPolicy == jetstream.ReplayOriginalPolicy,
	}
	if r.kv != nil {
		l.recipe.wants = r.kv.wants
	}
	if r.where != nil {
		w := r.where
		l.pos.at, r.created, l.list.done = w.at, w.created, w.listed
		l.pos.held = w.held
		l.onLeave = func() {
			if l.serial > 0 {
				*w = bookmark{set: true, at: l.seenUpTo(), held: l.pos.held, created: r.created}
				if c.DeliverPolicy == jetstream.DeliverLastPerSubjectPolicy && l.list.done && w.at == l.pos.at {
					w.listed, w.at = true, max(w.at, l.list.boundary)
				}
			}
		}
	}
}

// create makes the consumer of the next generation. Before the first one it
// learns what the stream is and where it ends now; afterwards the stream is
// compared beside the first pull (vetNow). A list of last messages takes a new
// boundary with every generation.
func (r *reader) create(l *loop) error {
	c := r.cfg
	lists := c.DeliverPolicy == jetstream.DeliverLastPerSubjectPolicy && !l.list.done
	if !r.met || lists {
		info, err := l.streamInfo(l.api("STREAM.INFO." + c.Stream))
		if err != nil {
			return r.kv.missing(err)
		}
		if err := r.meet(l, info); err != nil {
			return err
		}
	}
	cc, exact := r.consumerConfig(l, lists)
	info, err := r.make(l, cc)
	if err != nil {
		return err
	}
	known := l.serial > 0 || r.resumes() || c.After != (Position{}) || (r.kv != nil && c.OptStartSeq > 0)
	l.serial++
	l.exact = exact
	l.limits = pullLimits{
		batch:   info.Config.MaxRequestBatch,
		bytes:   info.Config.MaxRequestMaxBytes,
		expires: info.Config.MaxRequestExpires,
	}
	l.gen = &generation{stream: c.Stream, consumer: cc.Name, created: r.created, number: l.serial}
	if r.kv != nil {
		l.gen.bucket, l.gen.prefix = r.kv.bucket, len(r.kv.prefix)
	}
	l.born = info.NumPending
	last := l.target
	if r.replicas > 1 {
		// The consumer lives on one replica, which may be behind the leader: that
		// nothing is pending there proves nothing about the stream.
		l.born, last = max(l.born, 1), 0
	}
	l.ack = ""
	l.pullTo = l.api("CONSUMER.MSG.NEXT." + c.Stream + "." + cc.Name)
	if cc.DeliverPolicy == jetstream.DeliverLastPerSubjectPolicy {
		l.pos.scanned = l.pos.at // an entry lost from the old list may lie in front of it
		known = false
	}
	gone := l.pos.created(info.Delivered.Stream, info.NumPending, last, known)
	if gone.to > 0 {
		return r.gap(l, gone)
	}
	return nil
}

// make sends the create. A server that does not know priorities refuses them.
func (r *reader) make(l *loop, cc jetstream.ConsumerConfig) (*jetstream.ConsumerInfo, error) {
	listed := cc.DeliverPolicy == jetstream.DeliverLastPerSubjectPolicy && r.perSubject != 1
	group := listed && !l.list.certain && l.maxMessages > 1
	cc.PriorityPolicy, cc.PriorityGroups = jetstream.PriorityPolicyNone, nil
	if group {
		cc.PriorityPolicy = jetstream.PriorityPolicyPrioritized
		cc.PriorityGroups = []string{listGroup}
	}
	subject := "CONSUMER.CREATE." + r.cfg.Stream + "." + cc.Name
	if cc.FilterSubject != "" {
		subject += "." + cc.FilterSubject
	}
	info, err := l.consumerCreate(l.api(subject), consumerCreate{Stream: r.cfg.Stream, Config: cc, Action: "create"})
	if err != nil {
		if errors.Is(err, errNotMissing) {
			l.litter, l.name = append(l.litter, leftover{name: l.name}), ""
			l.skipped++ // a delete could overtake a create of that name
		}
		if api, ok := errors.AsType[*jetstream.APIError](err); ok && group && api.Code == 400 && !transient(err) {
			l.list.certain = true
			return r.make(l, cc)
		}
		return nil, err
	}
	l.list.group = group
	l.list.certain = listed && !group
	l.list.listed = info.NumPending
	l.list.active = listed && info.NumPending > 0
	return info, nil
}

// resumes reports whether an earlier range of the handle left a position.
func (r *reader) resumes() bool { return r.where != nil && r.where.set }

// meet takes over what the stream is.
func (r *reader) meet(l *loop, info *jetstream.StreamInfo) error {
	if p := info.Config.Retention; p != jetstream.LimitsPolicy {
		field := "OrderedConfig.Stream"
		if r.kv != nil {
			field = "WatchConfig.Bucket"
		}
		return &ConfigError{Field: field, Value: quoted(r.cfg.Stream) + " (" + p.String() + " retention)",
			Bound: "a stream with limits retention: an ack-none reader removes the messages of the others"}
	}
	switch {
	case r.met || r.resumes():
		if err := r.same(l, info); err != nil {
			return err
		}
	case r.cfg.After != (Position{}):
		l.pos.at, r.created = r.cfg.After.Sequence, r.cfg.After.StreamCreated
		l.pos.held = l.pos.at
		if err := r.same(l, info); err != nil {
			return err
		}
	case r.cfg.DeliverPolicy == jetstream.DeliverByStartSequencePolicy:
		l.pos.at = r.cfg.OptStartSeq - 1
	case r.cfg.DeliverPolicy == jetstream.DeliverNewPolicy:
		// Fixed here: a consumer made with "new" that is lost before its
		// first message would begin anew, behind what was published meanwhile.
		l.pos.at = info.State.LastSeq
	}
	// Once: a retry of the first create begins where the first try did.
	r.met = true
	if r.cfg.DeliverPolicy != jetstream.DeliverByStartSequencePolicy && !r.resumes() {
		l.pos.held = l.pos.at // a start sequence may lie ahead of the stream
	}
	r.created = info.Created
	r.perSubject = info.Config.MaxMsgsPerSubject
	r.replicas = info.Config.Replicas
	r.filters = r.cfg.FilterSubjects
	if r.kv != nil {
		r.kv.meet(info)
		r.filters = r.kv.filters()
	}
	l.pos.whole = len(r.filters) == 0 && r.cfg.DeliverPolicy != jetstream.DeliverLastPerSubjectPolicy
	l.target = info.State.LastSeq
	l.maxMessage = largest(l, info)
	return nil
}

// largest returns the size of the largest message that the stream can hold.
func largest(l *loop, info *jetstream.StreamInfo) int {
	n := l.link.maxPayload()
	if limit := int(info.Config.MaxMsgSize); limit > 0 {
		n = min(n, limit)
	}
	return n + 4<<10 // subject and reply count too
}

// consumerConfig makes the configuration of the next generation from scratch:
// by start sequence wherever the start is known, never a start time together
// with a sequence and never sequence 0. exact reports that a consumer which
// loses its state and comes back under its name starts at the right place.
func (r *reader) consumerConfig(l *loop, lists bool) (cc jetstream.ConsumerConfig, exact bool) {
	c := r.cfg
	if l.name == "" {
		if l.prefix == "" {
			l.prefix = c.NamePrefix + "_" + rand.Text()[:12] + "_"
		}
		l.name = l.prefix + strconv.Itoa(l.serial+l.skipped+1)
	}
	cc = jetstream.ConsumerConfig{
		Name:              l.name,
		AckPolicy:         jetstream.AckNonePolicy,
		ReplayPolicy:      c.ReplayPolicy,
		HeadersOnly:       c.HeadersOnly && (r.kv == nil || !r.kv.whole),
		InactiveThreshold: c.InactiveThreshold,
		Metadata:          c.Metadata,
		Replicas:          1,
		MemoryStorage:     true,
	}
	switch len(r.filters) {
	case 0:
	case 1:
		cc.FilterSubject = r.filters[0]
	default:
		cc.FilterSubjects = r.filters
	}
	policy := c.DeliverPolicy
	switch {
	case lists:
		if len(r.filters) == 0 {
			cc.FilterSubject = ">" // the server wants one (consumer.go:947)
		}
	case l.serial > 0 || r.resumes() || c.After != (Position{}) || policy == jetstream.DeliverNewPolicy:
		policy = jetstream.DeliverByStartSequencePolicy
	}
	cc.DeliverPolicy = policy
	switch policy {
	case jetstream.DeliverByStartSequencePolicy:
		cc.OptStartSeq = l.pos.at + 1
		if c.DeliverPolicy == jetstream.DeliverLastPerSubjectPolicy {
			// The list reached up to the boundary. In front of that there are
			// only messages that it left out, as superseded.
			cc.OptStartSeq = max(l.pos.at, l.list.boundary) + 1
		}
		return cc, true
	case jetstream.DeliverByStartTimePolicy:
		cc.OptStartTime = c.OptStartTime
	}
	return cc, policy == jetstream.DeliverAllPolicy
}

// gap tells of messages that were removed before they were read.
func (r *reader) gap(l *loop, gone seqRange) error {
	if r.kv != nil && (!r.kv.revisions || !r.kv.mayLose) {
		return nil // superseded revisions are no gap
	}
	certain := l.pos.whole && r.perSubject <= 0
	if certain && r.cfg.OnGap == GapFail {
		// The next range of a handle goes on behind the gap.
		l.pos.at = max(l.pos.at, gone.to)
		return &GapError{Stream: r.cfg.Stream, From: gone.from, To: gone.to}
	}
	if l.lis.Gap != nil {
		l.lis.Gap(gone.from, gone.to, certain)
	}
	return nil
}

// inspectEvery is how often the stream is asked at most, unless there are more
// than unseenMost ranges to ask about.
const (
	inspectEvery = time.Second
	unseenMost   = 4096
)

// inspect asks the stream whether what was passed over without a message was
// removed by retention.
func (l *loop) inspect(now bool) error {
	if !now && len(l.pos.unseen) < unseenMost && time.Since(l.inspected) < inspectEvery {
		return nil
	}
	info, err := l.streamInfo(l.api("STREAM.INFO." + l.stream))
	if err != nil {
		return l.orRebuild(err)
	}
	l.inspected = time.Now()
	for _, gone := range l.pos.gaps(info.State.FirstSeq) {
		if err := l.recipe.gap(l, gone); err != nil {
			return err
		}
	}
	return nil
}

// vet is the look at the stream that goes out with the first pull of every
// generation: it must be the stream that the position belongs to.
type vet struct {
	open    bool
	subject string
	reply   string
	at      time.Time
	before  error // the connection's last error in front of it
	answer  *nats.Msg
}

func (l *loop) askVet() error {
	l.vet = vet{open: true, subject: l.api("STREAM.INFO." + l.stream), reply: l.in.token(0), at: time.Now(), before: l.link.lastError()}
	return l.link.publish(l.vet.subject, l.vet.reply, nil)
}

// vetNow waits for the answer if it is not here yet, and judges it. Nothing is
// yielded and nothing is concluded before.
func (l *loop) vetNow() error {
	m := l.vet.answer
	if m == nil {
		var err error
		if m, err = l.await(l.vet.reply, time.Now().Add(l.patience)); err != nil {
			if l.ctx.Err() != nil {
				return newDoneError(l.ctx, l.where)
			}
			return &rebuild{fmt.Errorf("%s: %w", l.vet.subject, err)}
		}
	}
	subject := l.vet.subject
	l.vet = vet{}
	if m.Header.Get("Status") == "503" && len(m.Data) == 0 {
		return &rebuild{fmt.Errorf("%s: %w", subject, nats.ErrNoResponders)}
	}
	var a streamAnswer
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return &rebuild{fmt.Errorf("stream info: %w", err)}
	}
	info, err := a.check()
	if err != nil {
		return &rebuild{err}
	}
	return l.recipe.vet(l, info)
}

func (r *reader) same(l *loop, info *jetstream.StreamInfo) error {
	if !info.Created.Equal(r.created) {
		return l.errorf(fmt.Errorf("%w: created %v, was %v", ErrStreamRecreated, info.Created, r.created))
	}
	if info.State.LastSeq < l.pos.held {
		if !r.shrunk {
			r.shrunk = true
			return &rebuild{errBehind}
		}
		return l.errorf(fmt.Errorf("%w: its last sequence is %d", ErrStreamRecreated, info.State.LastSeq))
	}
	r.shrunk = false
	return nil
}
