package paced

import (
	"container/heap"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

var update = flag.Bool("update", false, "rewrite the traces under testdata")

// TestScenarios runs the loop against a scripted server, in a bubble, and
// compares what it does, at which instant, with the trace in the file. There is
// no server, no connection and no tolerance.
//
// A scenario is prose, a script and a trace. The lines of the script:
//
//	config until_caught_up max_messages=10 ...   how the loop is set up
//	stream last=10 first=1 size=100              what is stored at the start
//	body 100ms                                   time spent in the body
//	body 5 1h                                    time spent with message 5
//	rtt 50ms                                     default 0
//	show max_bytes                               in the trace
//	others                                       another loop uses the connection
//	manual                                       the server sends only what the script says
//	@2s ...                                      at this instant, when all has come to rest
//	on pull 3 ...                                in place of the server's reaction to the third one
//
// What can happen after an @ or an on is listed at (*scripted).act. Unless the
// script says otherwise a model of the server answers: it delivers what is
// stored, counts max_bytes, sends heartbeats, ends pulls.
//
// In the trace inboxes are letters in the order of their subscription, pulls
// and requests are numbered, consumers are c1, c2 and so on.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatal("no scenarios", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			sc := readScenario(t, file)
			got := strings.Join(sc.play(t, disturbance{}).lines, "\n") + "\n"
			if *update && !t.Failed() {
				text := sc.prose + "-- script --\n" + sc.script + "-- trace --\n" + got
				if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != sc.trace {
				t.Errorf("trace, -want +got:\n%s", diffLines(sc.trace, got))
			}
		})
	}
}

// diffLines shows the part in which two texts differ, with two lines in front.
func diffLines(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	head, tail := 0, 0
	for head < len(w) && head < len(g) && w[head] == g[head] {
		head++
	}
	for tail < len(w)-head && tail < len(g)-head && w[len(w)-1-tail] == g[len(g)-1-tail] {
		tail++
	}
	var b strings.Builder
	part := func(mark string, lines []string) {
		for i, s := range lines {
			if i == 20 {
				fmt.Fprintf(&b, "%s ... %d more\n", mark, len(lines)-i)
				break
			}
			fmt.Fprintf(&b, "%s %s\n", mark, s)
		}
	}
	part(" ", w[max(0, head-2):head])
	part("-", w[head:len(w)-tail])
	part("+", g[head:len(g)-tail])
	return b.String()
}

// Whatever the loop is doing when its context is cancelled, the next pair is
// the error, it is the last one, and nothing is left behind; while connected
// that takes at most 50 ms. The point of time is each call that the loop makes
// of its connection, in each scenario.
func TestCancelAnywhere(t *testing.T) {
	everyScenario(t, func(t *testing.T, sc *scenario) {
		for i := 1; ; i++ {
			r := sc.play(t, disturbance{cancelAtCall: i})
			if t.Failed() {
				t.Fatalf("cancelled at call %d:\n%s", i, strings.Join(r.lines, "\n"))
			}
			if r.calls < i {
				return
			}
		}
	})
}

// Whichever message the body leaves with, nothing is left behind.
func TestBreakAnywhere(t *testing.T) {
	everyScenario(t, func(t *testing.T, sc *scenario) {
		for i := 1; i <= 70; i++ {
			r := sc.play(t, disturbance{breakAtYield: i})
			if t.Failed() {
				t.Fatalf("left with message %d:\n%s", i, strings.Join(r.lines, "\n"))
			}
			if r.yields < i {
				return
			}
		}
	})
}

func everyScenario(t *testing.T, f func(*testing.T, *scenario)) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatal("no scenarios", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			sc := readScenario(t, file)
			if strings.HasPrefix(sc.script, "long\n") {
				return // thousands of steps, and nothing that shorter ones have not
			}
			f(t, sc)
		})
	}
}

type scenario struct{ prose, script, trace string }

func readScenario(t *testing.T, file string) *scenario {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	prose, rest, ok := strings.Cut(string(text), "-- script --\n")
	script, trace, _ := strings.Cut(rest, "-- trace --\n")
	if !ok || strings.TrimSpace(prose) == "" {
		t.Fatalf("%s: want prose, a script section and a trace section", file)
	}
	return &scenario{prose, script, trace}
}

// disturbance is what is done to a scenario on top of its script.
type disturbance struct {
	cancelAtCall int
	breakAtYield int
}

// result is what a run of a scenario left.
type result struct {
	lines     []string
	calls     int
	yields    int
	cancelled time.Time
}

// play runs the scenario in a bubble.
func (sc *scenario) play(t *testing.T, d disturbance) (r result) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newScripted(t, d)
		for n, line := range strings.Split(sc.script, "\n") {
			if err := f.read(strings.TrimSpace(line)); err != nil {
				t.Fatalf("script line %d, %q: %v", n+1, line, err)
			}
		}
		f.run()
		r = f.result()
	})
	return r
}

// scripted is the source: a link, a driver and a model of a server.
//
// Everything that comes from outside (script lines, frames, the server's
// timers) is done by the driver, one thing at a time, each when all other
// goroutines of the bubble have come to rest. So a trace has one possible order.
type scripted struct {
	t   *testing.T
	d   disturbance
	l   *loop
	cfg OrderedConfig

	start  time.Time
	ctx    context.Context
	cancel context.CancelCauseFunc
	cause  error

	mu         sync.Mutex
	lines      []line
	queue      events
	order      int
	wake       chan struct{}
	reacts     map[string]map[int][]string // "pull" → 3 → what happens
	seen       map[string]int              // how many of each the loop made
	body       time.Duration
	bodies     map[uint64]time.Duration
	rtt        time.Duration
	manual     bool
	showBytes  bool
	resume     uint64
	oneSlot    bool
	late       bool // data may come behind the status that ends its pull
	calls      int
	yields     int
	lastSeq    uint64
	ended      bool // the error was yielded, or the body left
	endedAt    time.Duration
	err        error
	canceled   time.Time
	leaving    bool // what the reaction to a yield wants
	panicks    bool
	ahead      time.Duration
	surplus    uint64 // how many messages too many the server counts as pending
	loseAnswer bool   // the server's next answer is lost
	justDown   bool   // the connection broke under the loop's hands: it cannot know yet
	raw        bool   // the script sends data of its own making

	// The connection.
	state      nats.Status
	reconnects uint64
	inBytes    uint64
	others     bool // another loop uses the connection
	last       error
	muted      bool
	held       bool
	pongs      chan struct{} // closed when barriers may return
	broken     chan struct{} // closed when the connection breaks
	wire       []frame
	subs       map[string]*subscribed // by inbox
	letters    int
	inboxes    int
	detached   int
	refused    []string
	link       *link

	// The server.
	first, lastStored uint64
	stored            map[uint64]storedMsg
	created           time.Time
	lost              int // data frames to lose
	lostStatus        map[string]int
	consumers         map[string]*fakeConsumer
	names             []string // in the order of their creation
	deletes           map[string]bool
	made              map[string]bool
	pulls             []*fakePull
	limits            pullLimits
	maxPayload        int
	maxMsgSize        int
	gone              bool // the stream does not exist
	replicated        bool
	replicas          int    // of the stream
	lag               uint64 // how many messages the consumer's server has not got yet
}

type line struct {
	at       time.Duration
	text     string
	yielded  bool
	from, to uint64 // then: these sequences
}

type storedMsg struct {
	at     time.Time
	size   int
	header nats.Header
}

type subscribed struct {
	sub    *nats.Subscription
	ch     chan *nats.Msg
	letter string
	inbox  string
}

type frame struct {
	at    time.Time
	inbox string // of the subscription it comes in on
	msg   *nats.Msg
}

type fakeConsumer struct {
	name    string
	start   string // the part of the configuration that the model compares
	next    uint64 // stream sequence
	cseq    uint64
	pulls   []*fakePull // first come, first served; one message each in turn
	deleted bool
}

type fakePull struct {
	number   int
	reply    string
	inbox    string
	consumer *fakeConsumer
	batch    int
	n        int // messages not yet sent
	bounded  bool
	b        int // bytes left
	beat     time.Time
	every    time.Duration
	expires  time.Time
	over     bool
}

type event struct {
	at    time.Time
	order int
	do    func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at.Before(e[j].at) || (e[i].at.Equal(e[j].at) && e[i].order < e[j].order)
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	x := old[len(old)-1]
	*e = old[:len(old)-1]
	return x
}

func newScripted(t *testing.T, d disturbance) *scripted {
	f := &scripted{
		t: t, d: d, start: time.Now(),
		cause:  errors.New("the script says so"),
		wake:   make(chan struct{}, 1),
		reacts: map[string]map[int][]string{},
		seen:   map[string]int{},
		bodies: map[uint64]time.Duration{},
		state:  nats.CONNECTED, pongs: closed(), broken: make(chan struct{}),
		subs:       map[string]*subscribed{},
		stored:     map[uint64]storedMsg{},
		lostStatus: map[string]int{},
		consumers:  map[string]*fakeConsumer{},
		deletes:    map[string]bool{},
		made:       map[string]bool{},
		first:      1,
		maxPayload: 1 << 20,
		maxMsgSize: -1,
	}
	f.created = f.start.Add(-time.Hour)
	f.cfg = OrderedConfig{Stream: "S"}
	f.ctx, f.cancel = context.WithCancelCause(context.Background())
	f.link = &link{
		subscribe:   f.subscribe,
		unsubscribe: f.unsubscribe,
		publish:     f.publish,
		barrier:     f.barrier,
		lastError:   func() error { defer f.lock()(); return f.last },
		status:      func() nats.Status { defer f.lock()(); return f.state },
		stats: func() nats.Statistics {
			defer f.lock()()
			return nats.Statistics{InBytes: f.inBytes, Reconnects: f.reconnects}
		},
		newInbox:   f.newInbox,
		maxPayload: func() int { return f.maxPayload },
		reconnect: func() error {
			defer f.lock()()
			f.call("force reconnect")
			f.note("force a reconnect")
			f.disconnect()
			f.connect()
			return nil
		},
		report: func(err error) {
			defer f.lock()()
			f.note("reported: %v", err)
		},
		events: make(chan nats.Status, 10),
		detach: func() {
			defer f.lock()()
			f.detached++
		},
	}
	return f
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func (f *scripted) lock() func() {
	f.mu.Lock()
	return f.mu.Unlock
}

// note adds a line to the trace.
func (f *scripted) note(format string, args ...any) {
	f.lines = append(f.lines, line{at: time.Since(f.start), text: fmt.Sprintf(format, args...)})
}

// result gives the trace its final form. Yields at one instant are one line, and
// so are three or more that follow each other at equal intervals.
func (f *scripted) result() result {
	r := result{calls: f.calls, yields: f.yields, cancelled: f.canceled}
	for i := 0; i < len(f.lines); i++ {
		l := f.lines[i]
		text := l.text
		if l.yielded {
			n := 1
			for ; i+n < len(f.lines) && f.lines[i+n].yielded && l.from == l.to; n++ {
				if next := f.lines[i+n]; next.from != next.to || next.from != l.from+uint64(n) || next.at-f.lines[i+n-1].at != f.lines[i+1].at-l.at {
					break
				}
			}
			switch {
			case n > 2:
				text = fmt.Sprintf("yield %d-%d, one every %v", l.from, l.from+uint64(n)-1, f.lines[i+1].at-l.at)
				i += n - 1
			case l.to > l.from:
				text = fmt.Sprintf("yield %d-%d", l.from, l.to)
			default:
				text = fmt.Sprintf("yield %d", l.from)
			}
		}
		for i, name := range f.names {
			text = strings.ReplaceAll(text, name, fmt.Sprintf("c%d", i+1))
		}
		r.lines = append(r.lines, fmt.Sprintf("%v %s", l.at, text))
	}
	return r
}

// run is the whole life of one range.
func (f *scripted) run() {
	t := f.t
	nc := new(nats.Conn)
	if f.others {
		defer joinBudget(nc).leave()
	}
	l := newLoop(f.ctx, f.link, joinBudget(nc))
	f.l = l
	l.jitter = func(d time.Duration) time.Duration { return d }
	if err := f.cfg.validate(); err != nil {
		t.Fatal(err)
	}
	c := f.cfg.withDefaults()
	c.Listener = &Listener{
		Resubscribing: func(err error, n int, d time.Duration) {
			defer f.lock()()
			f.note("resubscribing, attempt %d after %v: %v", n, d, err)
		},
		Failed: func(err error) {
			defer f.lock()()
			f.note("failed: %v", err)
		},
		Gap: func(from, to uint64, certain bool) {
			defer f.lock()()
			f.note("gap %d-%d, certain: %v", from, to, certain)
		},
		CaughtUp: func(seq uint64) {
			defer f.lock()()
			f.note("caught up at %d", seq)
		},
	}
	r := reader{cfg: &c, api: jetstream.DefaultAPIPrefix}
	if f.resume > 0 {
		r.where = &bookmark{set: true, at: f.resume, created: f.created}
		f.lastSeq = f.resume
	}
	r.prepare(l)
	if f.late {
		l.recipe.inOrder = false
	}
	if f.oneSlot {
		l.in.use = 1
	}
	leave := l.onLeave
	l.onLeave = func() {
		func() {
			defer f.lock()()
			f.ended = true // what is cancelled from here on makes no difference
			f.endedAt = time.Since(f.start)
		}()
		if leave != nil {
			leave()
		}
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		f.drive(stop)
	}()
	func() {
		defer func() {
			if v := recover(); v != nil {
				if v != any(f) {
					panic(v)
				}
				defer f.lock()()
				f.note("end: panic in the body")
			}
		}()
		l.run(f.yield)
	}()
	f.mu.Lock()
	if took := time.Since(f.canceled); !f.canceled.IsZero() && f.err != nil && f.state == nats.CONNECTED && f.body == 0 && len(f.bodies) == 0 && took > exitTime {
		t.Errorf("left %v after the context was done", took)
	}
	left := time.Since(f.start)
	f.mu.Unlock()
	time.Sleep(10 * time.Second) // for the clean-up behind the loop
	close(stop)
	<-stopped
	synctest.Wait()
	f.mu.Lock()
	if left > f.endedAt {
		f.lines = append(f.lines, line{at: left, text: "the range is left"})
	}
	f.mu.Unlock()
	f.checkLeft()
}

// checkLeft fails the test if the range left anything behind.
func (f *scripted) checkLeft() {
	defer f.lock()()
	t := f.t
	for _, s := range f.subs {
		t.Errorf("subscription %s is left", s.letter)
	}
	if f.detached != 1 {
		t.Errorf("status listener removed %d times", f.detached)
	}
	if !f.l.share.left || f.l.share.bytes != 0 {
		t.Errorf("the byte budget was not given back: %+v", f.l.share)
	}
	for name := range f.made {
		if !f.deletes[name] {
			t.Errorf("consumer %s was never deleted", name)
		}
	}
	var gap *GapError
	if at := f.l.pos.at; f.yields > 0 && at > f.lastSeq && !f.raw && !errors.As(f.err, &gap) {
		t.Errorf("the position is %d, but %d was the last message yielded: a range that goes on misses one", at, f.lastSeq)
	}
	if f.d.cancelAtCall > 0 && !f.canceled.IsZero() && (!errors.Is(f.err, context.Canceled) || !errors.Is(f.err, f.cause)) {
		t.Errorf("the last pair was %v, want one that is context.Canceled and the cause", f.err)
	}
}

// yield is the body.
func (f *scripted) yield(m Msg, err error) bool {
	f.l.in.verify(f.l.maxMessages, f.l.maxBytes)
	f.mu.Lock()
	t := f.t
	if f.ended {
		t.Errorf("a pair after the last: %v, %v", m, err)
	}
	if err != nil {
		if m != (Msg{}) {
			t.Errorf("a message beside the error %v", err)
		}
		f.note("end: %v", err)
		f.ended, f.err = true, err
		f.mu.Unlock()
		return true
	}
	if !f.canceled.IsZero() {
		t.Errorf("message %d after the context was done", m.seq)
	}
	if !f.raw {
		if m.seq <= f.lastSeq {
			t.Errorf("message %d after %d", m.seq, f.lastSeq)
		}
		for seq := max(f.lastSeq+1, f.firstWanted()); seq < m.seq; seq++ {
			if _, ok := f.stored[seq]; ok {
				t.Errorf("message %d is missing in front of %d", seq, m.seq)
			}
		}
		if m.gen.consumer != f.l.name {
			t.Errorf("message %d came from consumer %s, reading %s", m.seq, m.gen.consumer, f.l.name)
		}
	}
	f.lastSeq = m.seq
	now := time.Since(f.start)
	if n := len(f.lines) - 1; n >= 0 && f.lines[n].yielded && f.lines[n].at == now && f.lines[n].to+1 == m.seq {
		f.lines[n].to++
	} else {
		f.lines = append(f.lines, line{at: now, yielded: true, from: m.seq, to: m.seq})
	}
	f.yields++
	f.leaving = f.yields == f.d.breakAtYield
	f.react("yield")
	took, ok := f.bodies[m.seq]
	if !ok {
		took = f.body
	}
	leaving, panicks := f.leaving, f.panicks
	f.mu.Unlock()
	if panicks {
		panic(f)
	}
	if took > 0 {
		time.Sleep(took)
	}
	if leaving {
		defer f.lock()()
		f.note("end: the body left")
		f.ended = true
		return false
	}
	return true
}

// firstWanted is the first sequence that the configuration asks for.
func (f *scripted) firstWanted() uint64 {
	switch f.cfg.DeliverPolicy {
	case jetstream.DeliverByStartSequencePolicy:
		return f.cfg.OptStartSeq
	case jetstream.DeliverAllPolicy:
		return 0
	}
	if f.lastSeq == 0 {
		return ^uint64(0)
	}
	return 0
}

// drive does what comes from outside, each at its instant.
func (f *scripted) drive(stop <-chan struct{}) {
	limit := f.start.Add(24 * time.Hour)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		f.mu.Lock()
		next := limit
		if len(f.queue) > 0 {
			next = f.queue[0].at
		}
		if !f.held && len(f.wire) > 0 && f.wire[0].at.Before(next) {
			next = f.wire[0].at
		}
		f.mu.Unlock()
		timer.Reset(time.Until(next))
		select {
		case <-stop:
			return
		case <-f.wake:
			continue
		case <-timer.C:
		}
		synctest.Wait()
		select {
		case <-stop:
			return
		default:
		}
		f.mu.Lock()
		f.justDown = false
		now := time.Now()
		switch {
		case !now.Before(limit):
			f.t.Error("the scenario does not end")
			f.stop()
		case f.arrive(now):
		case len(f.queue) > 0 && !f.queue[0].at.After(now):
			heap.Pop(&f.queue).(event).do()
		}
		f.mu.Unlock()
	}
}

func (f *scripted) at(t time.Time, do func()) {
	f.order++
	heap.Push(&f.queue, event{t, f.order, do})
	f.ring()
}

func (f *scripted) ring() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

func (f *scripted) stop() {
	if f.canceled.IsZero() {
		f.canceled = time.Now()
	}
	f.cancel(f.cause)
}

// arrive puts the frames that are due into their channels.
func (f *scripted) arrive(now time.Time) bool {
	if f.held || len(f.wire) == 0 || f.wire[0].at.After(now) {
		return false
	}
	for len(f.wire) > 0 && !f.wire[0].at.After(now) {
		x := f.wire[0]
		f.wire = f.wire[1:]
		s := f.subs[x.inbox]
		if s == nil {
			continue
		}
		x.msg.Sub = s.sub
		f.inBytes += uint64(x.msg.Size())
		select {
		case s.ch <- x.msg:
		default:
			f.t.Errorf("%v: inbox %s is full (%d): %s %v is dropped", time.Since(f.start), s.letter, cap(s.ch), x.msg.Subject, x.msg.Header)
		}
	}
	return true
}

// send puts a frame on the wire to the client.
func (f *scripted) send(inbox string, m *nats.Msg) {
	if f.muted || f.state != nats.CONNECTED {
		return
	}
	f.wire = append(f.wire, frame{time.Now().Add(f.rtt), inbox, m})
	f.ring()
}

// inboxOf is the part of a reply subject that a subscription matches.
func inboxOf(reply string) string { return reply[:strings.LastIndexByte(reply, '.')+1] }

// The link.

// call counts one call of the loop, and checks that it may be made.
func (f *scripted) call(what string) {
	if f.calls++; f.calls == 100_000 {
		f.t.Errorf("%v: 100,000 calls: a hot loop", time.Since(f.start))
		f.stop()
	}
	if f.calls == f.d.cancelAtCall && !f.ended {
		f.stop()
	}
	if f.state != nats.CONNECTED && !f.ended && !f.justDown {
		f.t.Errorf("%v: %s while %v: nats.go may block", time.Since(f.start), what, f.state)
	}
}

func (f *scripted) subscribe(subject string, ch chan *nats.Msg) (*nats.Subscription, error) {
	defer f.lock()()
	f.call("subscribe")
	f.seen["subscribe"]++
	f.letters++
	s := &subscribed{sub: &nats.Subscription{Subject: subject}, ch: ch, inbox: strings.TrimSuffix(subject, "*"), letter: letter(f.letters)}
	f.subs[s.inbox] = s
	f.note("subscribe %s, room for %d", s.letter, cap(ch))
	return s.sub, nil
}

func letter(n int) string {
	if n <= 26 {
		return string(rune('A' + n - 1))
	}
	return letter((n-1)/26) + letter((n-1)%26+1)
}

// dialing is how long nats.go holds its lock while it dials (nats.go:3565): so
// long a call takes that is made while the connection is down.
const dialing = 1700 * time.Millisecond

func (f *scripted) unsubscribe(sub *nats.Subscription) {
	defer f.lock()()
	if f.state == nats.RECONNECTING && f.ended {
		f.mu.Unlock()
		time.Sleep(dialing)
		f.mu.Lock()
	}
	f.call("unsubscribe")
	for inbox, s := range f.subs {
		if s.sub == sub {
			f.note("unsubscribe %s", s.letter)
			delete(f.subs, inbox)
			return
		}
	}
	f.t.Error("unsubscribe of what is not subscribed")
}

func (f *scripted) newInbox() string {
	defer f.lock()()
	f.inboxes++
	return fmt.Sprintf("_INBOX.%02d", f.inboxes)
}

func (f *scripted) barrier(ctx context.Context) error {
	f.mu.Lock()
	f.call("barrier")
	pongs, broken, rtt := f.pongs, f.broken, f.rtt
	f.mu.Unlock()
	select {
	case <-pongs:
	case <-broken:
		return nats.ErrConnectionClosed // nats.go:6181
	case <-ctx.Done():
		return ctx.Err()
	}
	if rtt > 0 {
		timer := time.NewTimer(rtt)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-broken:
			return nats.ErrConnectionClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return ctx.Err()
}

func (f *scripted) publish(subject, reply string, data []byte) error {
	defer f.lock()()
	f.call("publish")
	tail := strings.TrimPrefix(subject, jetstream.DefaultAPIPrefix)
	kind, what := "", ""
	name := tail[strings.LastIndexByte(tail, '.')+1:]
	var p struct {
		Batch     int           `json:"batch"`
		MaxBytes  int           `json:"max_bytes"`
		Expires   time.Duration `json:"expires"`
		Heartbeat time.Duration `json:"idle_heartbeat"`
	}
	var create consumerCreate
	switch {
	case strings.HasPrefix(tail, "STREAM.INFO."):
		kind, what = "stream", "stream info"
	case strings.HasPrefix(tail, "CONSUMER.CREATE."):
		kind = "create"
		if err := json.Unmarshal(data, &create); err != nil {
			f.t.Error(err)
		}
		name = create.Config.Name
		if !slices.Contains(f.names, name) {
			f.names = append(f.names, name)
		}
		what = "create " + name + " " + strings.ReplaceAll(create.Config.DeliverPolicy.String(), " ", "-")
		if s := create.Config.OptStartSeq; s > 0 {
			what += fmt.Sprintf(" start=%d", s)
		}
		if at := create.Config.OptStartTime; at != nil {
			what += fmt.Sprintf(" time=%v", at.Sub(f.start))
		}
	case strings.HasPrefix(tail, "CONSUMER.INFO."):
		kind, what = "probe", "consumer info "+name
	case strings.HasPrefix(tail, "CONSUMER.DELETE."):
		kind, what = "delete", "delete "+name
		f.deletes[name] = true
	case strings.HasPrefix(tail, "CONSUMER.MSG.NEXT."):
		kind = "pull"
		if err := json.Unmarshal(data, &p); err != nil {
			f.t.Error(err)
		}
		where := "?"
		if s := f.subs[inboxOf(reply)]; s != nil {
			where = s.letter
		}
		what = fmt.Sprintf("pull #%d via %s: batch %d", f.seen["pull"]+1, where, p.Batch)
		switch {
		case p.MaxBytes == 0:
			what += ", no max_bytes"
		case f.showBytes:
			what += fmt.Sprintf(", max_bytes %d", p.MaxBytes)
		}
		what += fmt.Sprintf(", expires %v, heartbeat %v", p.Expires, p.Heartbeat)
	default:
		f.t.Errorf("publish to %s", subject)
	}
	f.note("%s", what)
	if kind != "delete" && f.subs[inboxOf(reply)] == nil {
		f.t.Errorf("%v: %s: nobody listens to the reply subject %q", time.Since(f.start), what, reply)
	}
	refuse := slices.ContainsFunc(f.refused, func(s string) bool { return strings.Contains(subject, s) })
	if refuse {
		// As nats.go words it (nats.go:4472).
		f.last = fmt.Errorf("%w: Permissions Violation for Publish to %q", nats.ErrPermissionViolation, subject)
	}
	if kind == "pull" {
		// The script may refer to a pull that the server did not take.
		f.pulls = append(f.pulls, &fakePull{
			number: len(f.pulls) + 1, reply: reply, inbox: inboxOf(reply), consumer: f.consumers[name],
			batch: p.Batch, n: p.Batch, b: p.MaxBytes, bounded: p.MaxBytes > 0,
			every: p.Heartbeat, beat: time.Now().Add(p.Heartbeat), expires: time.Now().Add(p.Expires),
			over: true,
		})
	}
	answered, err := f.reactTo(kind, reply)
	if err != nil || answered || refuse || f.state != nats.CONNECTED {
		return err
	}
	f.serve(kind, name, reply, create.Config)
	return nil
}

// The model of the server.

func (f *scripted) serve(kind, name, reply string, cfg jetstream.ConsumerConfig) {
	switch kind {
	case "stream":
		if f.gone {
			f.refuse(reply, 404, 10059, "stream not found")
			return
		}
		f.answer(reply, jetstream.StreamInfo{
			Config:  jetstream.StreamConfig{Name: "S", Retention: jetstream.LimitsPolicy, MaxMsgSize: int32(f.maxMsgSize), Replicas: f.replicas},
			Created: f.created,
			State:   jetstream.StreamState{FirstSeq: f.first, LastSeq: f.lastStored, Msgs: uint64(len(f.stored))},
		})
	case "create":
		f.create(cfg, reply)
	case "probe":
		c := f.consumers[name]
		if c == nil {
			f.refuse(reply, 404, 10014, "consumer not found")
			return
		}
		f.answer(reply, f.info(c))
	case "delete":
		c := f.consumers[name]
		if c == nil {
			f.refuse(reply, 404, 10014, "consumer not found")
			return
		}
		f.remove(c, true)
		f.answer(reply, map[string]bool{"success": true})
	case "pull":
		p := f.pulls[len(f.pulls)-1]
		p.consumer = f.consumers[name]
		if p.consumer == nil {
			f.send(p.inbox, &nats.Msg{Subject: reply, Header: nats.Header{"Status": {"503"}, "Nats-Subject": {"MSG.NEXT"}}})
			return
		}
		p.over = false
		p.consumer.pulls = append(p.consumer.pulls, p)
		if !f.manual {
			f.beats(p)
			f.expiry(p)
			f.deliver(p.consumer)
		}
	}
}

func (f *scripted) create(cfg jetstream.ConsumerConfig, reply string) {
	if f.gone {
		f.refuse(reply, 404, 10059, "stream not found")
		return
	}
	start := fmt.Sprint(cfg.DeliverPolicy, cfg.OptStartSeq, cfg.OptStartTime)
	if c := f.consumers[cfg.Name]; c != nil && c.start != start {
		f.refuse(reply, 400, 10148, "consumer already exists")
		return
	}
	if c := f.consumers[cfg.Name]; c == nil {
		c = &fakeConsumer{name: cfg.Name, start: start}
		switch cfg.DeliverPolicy {
		case jetstream.DeliverByStartSequencePolicy:
			c.next = cfg.OptStartSeq
		case jetstream.DeliverLastPolicy:
			c.next = f.local()
		case jetstream.DeliverNewPolicy:
			c.next = f.local() + 1
		case jetstream.DeliverByStartTimePolicy:
			c.next = f.local() + 1
			for seq := f.local(); seq >= f.first && !f.stored[seq].at.Before(*cfg.OptStartTime); seq-- {
				c.next = seq
			}
		}
		c.next = max(c.next, f.first)
		f.consumers[cfg.Name] = c
		f.made[cfg.Name] = true
		delete(f.deletes, cfg.Name)
	}
	f.answer(reply, f.info(f.consumers[cfg.Name]))
}

// local is the last message that the consumer's server has.
func (f *scripted) local() uint64 { return f.lastStored - f.lag }

func (f *scripted) info(c *fakeConsumer) jetstream.ConsumerInfo {
	return jetstream.ConsumerInfo{
		Stream: "S", Name: c.name,
		Delivered:  jetstream.SequenceInfo{Consumer: c.cseq, Stream: c.next - 1},
		NumPending: f.pending(c),
		Config: jetstream.ConsumerConfig{
			MaxRequestBatch: f.limits.batch, MaxRequestMaxBytes: f.limits.bytes, MaxRequestExpires: f.limits.expires,
		},
	}
}

func (f *scripted) pending(c *fakeConsumer) (n uint64) {
	n = f.surplus
	if uint64(len(f.stored)) == f.lastStored+1-f.first { // nothing was erased
		return n + f.local() + 1 - min(max(c.next, f.first), f.local()+1)
	}
	for seq := max(c.next, f.first); seq <= f.local(); seq++ {
		if _, ok := f.stored[seq]; ok {
			n++
		}
	}
	return n
}

func (f *scripted) answer(reply string, v any) {
	if f.loseAnswer {
		f.loseAnswer = false
		return
	}
	data, err := json.Marshal(v)
	if err != nil {
		f.t.Fatal(err)
	}
	f.send(inboxOf(reply), &nats.Msg{Subject: reply, Data: data})
}

func (f *scripted) refuse(reply string, code, errCode int, text string) {
	f.answer(reply, map[string]any{"error": jetstream.APIError{Code: code, ErrorCode: jetstream.ErrorCode(errCode), Description: text}})
}

// remove deletes a consumer; told: its open pulls hear of it.
func (f *scripted) remove(c *fakeConsumer, told bool) {
	delete(f.consumers, c.name)
	for _, p := range slices.Clone(c.pulls) {
		if told {
			f.status(p, "409", "Consumer Deleted", "", "")
		}
		f.endPull(p)
	}
}

func (f *scripted) endPull(p *fakePull) {
	p.over = true
	if p.consumer != nil {
		p.consumer.pulls = slices.DeleteFunc(p.consumer.pulls, func(o *fakePull) bool { return o == p })
	}
}

func (f *scripted) status(p *fakePull, code, description, messages, bytes string) {
	if f.lostStatus[code] > 0 {
		f.lostStatus[code]--
		return
	}
	h := nats.Header{"Status": {code}}
	if description != "" {
		h["Description"] = []string{description}
	}
	if messages != "" {
		h["Nats-Pending-Messages"] = []string{messages}
		h["Nats-Pending-Bytes"] = []string{bytes}
	}
	f.send(p.inbox, &nats.Msg{Subject: p.reply, Header: h})
}

func (f *scripted) heartbeat(p *fakePull, consumer, stream uint64) {
	if f.lostStatus["100"] > 0 {
		f.lostStatus["100"]--
		return
	}
	f.send(p.inbox, &nats.Msg{Subject: p.reply, Header: nats.Header{
		"Status": {"100"}, "Description": {"Idle Heartbeat"},
		"Nats-Last-Consumer": {strconv.FormatUint(consumer, 10)}, "Nats-Last-Stream": {strconv.FormatUint(stream, 10)},
	}})
}

// beats sends a heartbeat whenever a pull got nothing for its interval.
func (f *scripted) beats(p *fakePull) {
	if p.every <= 0 {
		return
	}
	f.at(p.beat, func() {
		if p.over {
			return
		}
		if now := time.Now(); !now.Before(p.beat) {
			p.beat = now.Add(p.every)
			if f.subs[p.inbox] == nil {
				f.endPull(p)
				return
			}
			f.heartbeat(p, p.consumer.cseq, p.consumer.next-1)
		}
		f.beats(p)
	})
}

func (f *scripted) expiry(p *fakePull) {
	f.at(p.expires, func() {
		if !p.over {
			f.status(p, "408", "Request Timeout", strconv.Itoa(p.n), strconv.Itoa(p.b))
			f.endPull(p)
		}
	})
}

// deliver sends what is stored to the pulls that are open, one message to each
// in turn, as nats-server consumer.go:4246 does.
func (f *scripted) deliver(c *fakeConsumer) {
	for f.state == nats.CONNECTED && !c.deleted {
		for c.next <= f.local() {
			if _, ok := f.stored[c.next]; ok {
				break
			}
			c.next++
		}
		c.next = max(c.next, f.first)
		if c.next > f.local() || len(c.pulls) == 0 {
			return
		}
		p := c.pulls[0]
		if f.subs[p.inbox] == nil {
			f.endPull(p) // no interest: in silence
			continue
		}
		m := f.message(c, c.next, c.cseq+1)
		if p.bounded {
			if m.Size() > p.b {
				f.status(p, "409", "Message Size Exceeds MaxBytes", strconv.Itoa(p.n), strconv.Itoa(p.b))
				f.endPull(p)
				continue
			}
			if p.b -= m.Size(); p.b == 0 {
				p.n = 1 // consumer.go:4491: it ends in silence
			}
		}
		f.sendData(p, m)
	}
}

// sendData sends a message through a pull and counts.
func (f *scripted) sendData(p *fakePull, m *nats.Msg) {
	c := p.consumer
	c.cseq++
	c.next++
	p.n--
	p.beat = time.Now().Add(p.every)
	data := func() {
		if f.lost > 0 {
			f.lost--
			return
		}
		f.send(p.inbox, m)
	}
	if !f.replicated {
		data()
	}
	if p.n == 0 {
		f.endPull(p)
		if p.bounded && p.b > 0 {
			f.status(p, "409", "Batch Completed", "0", strconv.Itoa(p.b))
		}
	} else {
		c.pulls = append(slices.DeleteFunc(c.pulls, func(o *fakePull) bool { return o == p }), p)
	}
	if f.replicated {
		// consumer.go:5834: data waits for the quorum, the status does not.
		// Every message here, which is the worst.
		f.at(time.Now().Add(time.Millisecond), data)
	}
}

// message makes the frame of a stored message. Its size as nats.go counts it is
// what the script says.
func (f *scripted) message(c *fakeConsumer, seq, cseq uint64) *nats.Msg {
	s := f.stored[seq]
	next := fakeConsumer{next: seq + 1}
	m := &nats.Msg{Subject: "s.a", Header: s.header}
	m.Reply = fmt.Sprintf("$JS.ACK.S.%s.1.%d.%d.%d.%d", c.name, seq, cseq, s.at.UnixNano(), f.pending(&next))
	if n := s.size - m.Size(); n > 0 {
		m.Data = make([]byte, n)
	}
	return m
}

func (f *scripted) store(n int, size int, h nats.Header) {
	for range n {
		f.lastStored++
		f.stored[f.lastStored] = storedMsg{time.Now().Add(f.ahead), size, h}
	}
	if !f.manual {
		for _, name := range f.names {
			if c := f.consumers[name]; c != nil {
				f.deliver(c)
			}
		}
	}
}

// The script.

// read takes one line of the script.
func (f *scripted) read(text string) error {
	w, err := words(text)
	if err != nil || len(w) == 0 || strings.HasPrefix(w[0], "#") {
		return err
	}
	args, named := split(w[1:])
	switch {
	case strings.HasPrefix(w[0], "@"):
		d, err := time.ParseDuration(w[0][1:])
		if err != nil {
			return err
		}
		f.at(f.start.Add(d), func() {
			if err := f.act(w[1:], ""); err != nil && f.d == (disturbance{}) {
				f.t.Errorf("script line %q: %v", text, err)
			}
		})
		return nil
	case w[0] == "on":
		if len(w) < 4 {
			return errors.New("want: on WHAT NUMBER ACTION")
		}
		from, to, err := seqSpan(w[2])
		if err != nil {
			return err
		}
		if f.reacts[w[1]] == nil {
			f.reacts[w[1]] = map[int][]string{}
		}
		for i := from; i <= to; i++ {
			if _, twice := f.reacts[w[1]][int(i)]; twice {
				return errors.New("the second reaction to one thing")
			}
			f.reacts[w[1]][int(i)] = w[3:]
		}
		return nil
	case w[0] == "config":
		return f.configure(args, named)
	case w[0] == "stream":
		if v := named["created"]; v != "" {
			d, err := time.ParseDuration(v)
			if err != nil {
				return err
			}
			f.created = f.start.Add(d)
		}
		f.first = uint64(max(1, named.number("first")))
		f.lastStored = f.first - 1
		f.maxMsgSize = orDefault(named.number("max_msg_size"), -1)
		f.limits = pullLimits{batch: named.number("max_batch"), bytes: named.number("max_bytes"), expires: time.Duration(named.number("max_expires_ms")) * time.Millisecond}
		f.store(named.number("last")-int(f.lastStored), orDefault(named.number("size"), 128), nil)
		f.replicas, f.lag = orDefault(named.number("replicas"), 1), uint64(named.number("lag"))
		return nil
	case w[0] == "others":
		f.others = true
		return nil
	case w[0] == "rtt":
		f.rtt, err = time.ParseDuration(w[1])
		return err
	case w[0] == "body" && len(w) == 2:
		f.body, err = time.ParseDuration(w[1])
		return err
	case w[0] == "body":
		from, to, err := seqSpan(w[1])
		if err != nil {
			return err
		}
		d, err := time.ParseDuration(w[2])
		for i := from; i <= to; i++ {
			f.bodies[i] = d
		}
		return err
	case w[0] == "manual":
		f.manual = true
		return nil
	case w[0] == "long":
		return nil
	case w[0] == "show" && w[1] == "max_bytes":
		f.showBytes = true
		return nil
	}
	return f.act(w, "")
}

func (f *scripted) configure(args []string, named fields) error {
	c := &f.cfg
	for _, a := range args {
		switch a {
		case "until_caught_up":
			c.UntilCaughtUp = true
		case "half_open":
			c.Tuning.ReconnectHalfOpen = true
		case "replay_original":
			c.ReplayPolicy = jetstream.ReplayOriginalPolicy
		case "gap_continue":
			c.OnGap = GapContinue
		case "one_slot":
			f.oneSlot = true
		case "replicated":
			// An acked consumer with replicas, for the transport's sake.
			f.late, f.replicated = true, true
		case "new":
			c.DeliverPolicy = jetstream.DeliverNewPolicy
		case "last":
			c.DeliverPolicy = jetstream.DeliverLastPolicy
		default:
			return fmt.Errorf("unknown setting %s", a)
		}
	}
	for k, v := range named {
		d, _ := time.ParseDuration(v)
		n := named.number(k)
		switch k {
		case "max_messages":
			c.MaxMessages = n
		case "max_bytes":
			c.MaxBytes = n
		case "max_attempts":
			c.Tuning.MaxAttempts = n
		case "until_seq":
			c.UntilSeq = uint64(n)
		case "until_time":
			at := f.start.Add(d)
			c.UntilTime = &at
		case "heartbeat":
			c.Tuning.Heartbeat = d
		case "expires":
			c.Tuning.Expires = d
		case "look_ahead":
			c.Tuning.LookAhead = d
		case "start":
			c.DeliverPolicy, c.OptStartSeq = jetstream.DeliverByStartSequencePolicy, uint64(n)
		case "start_time":
			at := f.start.Add(d)
			c.DeliverPolicy, c.OptStartTime = jetstream.DeliverByStartTimePolicy, &at
		case "resume":
			f.resume = uint64(n)
		default:
			return fmt.Errorf("unknown setting %s", k)
		}
	}
	return nil
}

// react counts one thing that the loop did and does what the script says to it.
func (f *scripted) react(kind string) {
	if _, err := f.reactTo(kind, ""); err != nil {
		f.t.Error(err)
	}
}

// reactTo reports whether the script's reaction replaces the server's.
func (f *scripted) reactTo(kind, reply string) (answered bool, err error) {
	f.seen[kind]++
	w := f.reacts[kind][f.seen[kind]]
	if w == nil {
		return false, nil
	}
	was := f.state
	err = f.act(w, reply)
	f.justDown = f.justDown || (was == nats.CONNECTED && f.state != was)
	if err != nil {
		if errors.Is(err, nats.ErrConnectionReconnecting) {
			return true, err
		}
		f.t.Errorf("script, on %s %d %v: %v", kind, f.seen[kind], w, err)
	}
	switch w[0] {
	case "noanswer", "noresponders", "error", "status", "empty", "garbage":
		return true, nil
	}
	return false, nil
}

// act does one thing. reply is the reply subject of the request it reacts to.
func (f *scripted) act(w []string, reply string) error {
	args, named := split(w[1:])
	arg := func(i int) string {
		if i < len(args) {
			return args[i]
		}
		return ""
	}
	number := func(i int) int { n, _ := strconv.Atoi(arg(i)); return n }
	// The pull that a frame goes to: the one named, the one reacted to, or the
	// oldest that is open.
	target := func() (*fakePull, error) {
		if n := named.number("to"); n > 0 {
			if n > len(f.pulls) {
				return nil, fmt.Errorf("there is no pull %d", n)
			}
			return f.pulls[n-1], nil
		}
		if reply != "" {
			return f.pulls[len(f.pulls)-1], nil
		}
		for _, p := range f.pulls {
			if !p.over {
				return p, nil
			}
		}
		return nil, errors.New("no pull is open")
	}
	switch w[0] {
	case "noanswer": // the request is lost
	case "loseanswer": // the request is served and its answer is lost
		f.loseAnswer = true
	case "error": // error CODE ERROR_CODE "text": the API refuses
		f.refuse(reply, number(0), number(1), arg(2))
	case "noresponders": // nobody listens on the API
		f.send(inboxOf(reply), &nats.Msg{Subject: reply, Header: nats.Header{"Status": {"503"}}})
	case "empty": // an answer without anything in it
		f.answer(reply, map[string]any{})
	case "garbage": // an answer that is no JSON
		f.send(inboxOf(reply), &nats.Msg{Subject: reply, Data: []byte("{")})
	case "stalled": // nats.go refuses to take the request
		return nats.ErrConnectionReconnecting
	case "status": // status CODE "text" [pending=N] [to=PULL]: ends the pull, unless it is 100
		p, err := target()
		if err != nil {
			return err
		}
		bytes := ""
		if named["pending"] != "" {
			bytes = strconv.Itoa(p.b)
		}
		f.status(p, arg(0), arg(1), named["pending"], bytes)
		if arg(0) != "100" {
			f.endPull(p)
		}
	case "heartbeat": // heartbeat [consumer=N] [stream=N] [to=PULL]
		p, err := target()
		if err != nil {
			return err
		}
		consumer, stream := p.consumer.cseq, p.consumer.next-1
		if named["consumer"] != "" {
			consumer, stream = uint64(named.number("consumer")), uint64(named.number("stream"))
		}
		f.heartbeat(p, consumer, stream)
	case "data": // data FROM-TO [to=PULL] [consumer_sequence=N]: these stored messages, whatever the pull asked for
		p, err := target()
		if err != nil {
			return err
		}
		from, to, err := seqSpan(arg(0))
		if err != nil {
			return err
		}
		c := p.consumer
		c.next = from
		if n := named.number("consumer_sequence"); n > 0 {
			f.raw = true
			c.cseq = uint64(n) - 1
		}
		for seq := from; seq <= to; seq++ {
			over := p.over
			f.sendData(p, f.message(c, seq, c.cseq+1))
			if over {
				f.endPull(p)
			}
		}
	case "frame": // frame [subject=S] [reply=R] [header=H] [data=D] [to=PULL]: anything at all
		p, err := target()
		if err != nil {
			return err
		}
		fill := func(s string) string {
			s = strings.ReplaceAll(s, "CONSUMER", f.names[len(f.names)-1])
			return strings.ReplaceAll(s, "PULL", p.reply)
		}
		f.send(p.inbox, &nats.Msg{Subject: fill(named["subject"]), Reply: fill(named["reply"]), Header: header(named["header"]), Data: []byte(named["data"])})
	case "receive": // receive N: bytes for the connection's other loop arrive
		f.inBytes += uint64(number(0))
	case "publish": // publish N [size=BYTES] [header=H]
		f.store(number(0), orDefault(named.number("size"), 128), header(named["header"]))
	case "erase": // erase FROM-TO: deleted from the stream
		from, to, err := seqSpan(arg(0))
		if err != nil {
			return err
		}
		for seq := from; seq <= to; seq++ {
			delete(f.stored, seq)
		}
	case "ahead": // ahead 1m: so far is the server's clock
		d, err := time.ParseDuration(arg(0))
		f.ahead = d
		return err
	case "hint": // hint N: the server counts N messages too many as pending
		f.surplus = uint64(number(0))
	case "purge": // retention has passed everything below
		f.first = uint64(number(0))
		for seq := range f.stored {
			if seq < f.first {
				delete(f.stored, seq)
			}
		}
	case "lose": // lose data N: the next N messages; lose 408 N: the next N such statuses
		if arg(0) == "data" {
			f.lost = number(1)
		} else {
			f.lostStatus[arg(0)] = number(1)
		}
	case "delete", "forget", "reset": // consumer: deleted; deleted and nobody is told; back in its first state
		for _, name := range f.names {
			c := f.consumers[name]
			switch {
			case c == nil:
			case w[0] == "reset":
				c.cseq, c.next = 0, uint64(max(1, number(0)))
			default:
				f.remove(c, w[0] == "delete")
			}
		}
	case "drop": // the server forgets all pulls and says nothing
		for _, p := range f.pulls {
			f.endPull(p)
		}
	case "level": // the consumer's server gets what the stream's leader has
		f.lag = 0
		for _, name := range f.names {
			if c := f.consumers[name]; c != nil {
				f.deliver(c)
			}
		}
	case "truncate": // truncate N: the stream ends there
		for seq := uint64(number(0)) + 1; seq <= f.lastStored; seq++ {
			delete(f.stored, seq)
		}
		f.lastStored = uint64(number(0))
	case "remove_stream":
		f.gone = true
		for _, name := range f.names {
			if c := f.consumers[name]; c != nil {
				f.remove(c, true)
			}
		}
	case "make_stream": // make_stream last=N
		f.gone = false
		f.raw = true
		f.created = time.Now()
		f.first, f.lastStored, f.stored = 1, 0, map[uint64]storedMsg{}
		f.store(named.number("last"), 128, nil)
	case "refuse": // refuse SUBJECT: no permission to publish to what contains it
		f.refused = append(f.refused, arg(0))
	case "mute": // nothing arrives any more, and nothing is said about it
		f.muted = true
		f.block(true)
	case "unmute":
		f.muted = false
		f.block(false)
	case "hold": // everything is late
		f.held = true
		f.block(true)
	case "release":
		f.held = false
		f.block(false)
		f.ring()
	case "disconnect":
		f.disconnect()
	case "connect":
		f.connect()
	case "flap": // flap N: so often, all at once
		for range number(0) {
			f.disconnect()
			f.connect()
		}
	case "close":
		f.disconnect()
		f.state = nats.CLOSED
		f.event(nats.CLOSED)
	case "cancel":
		if !f.ended {
			f.note("(cancel)")
			f.stop()
		}
	case "break":
		f.leaving = true
	case "panic":
		f.panicks = true
	case "quiet": // the model stops serving
		f.manual = true
	case "serve": // the model serves again: what is open, too
		f.manual = false
		for _, p := range f.pulls {
			if !p.over {
				p.beat = time.Now().Add(p.every)
				f.beats(p)
				f.expiry(p)
			}
		}
		for _, name := range f.names {
			if c := f.consumers[name]; c != nil {
				f.deliver(c)
			}
		}
	default:
		return fmt.Errorf("unknown action %s", w[0])
	}
	return nil
}

// block holds barriers up, or lets them return.
func (f *scripted) block(on bool) {
	open := true
	select {
	case <-f.pongs:
	default:
		open = false
	}
	switch {
	case on && open:
		f.pongs = make(chan struct{})
	case !on && !open:
		close(f.pongs)
	}
}

func (f *scripted) disconnect() {
	f.wire, f.muted, f.held = nil, false, false
	f.state = nats.RECONNECTING
	f.block(true)
	close(f.broken)
	f.broken = make(chan struct{})
	f.event(nats.DISCONNECTED)
	f.event(nats.RECONNECTING)
}

// connect: nats.go subscribes the same inboxes again, and a server that has not
// noticed serves the old pulls.
func (f *scripted) connect() {
	f.state = nats.CONNECTED
	f.reconnects++
	f.block(false)
	f.event(nats.CONNECTED)
	if !f.manual {
		for _, name := range f.names {
			if c := f.consumers[name]; c != nil {
				f.deliver(c)
			}
		}
	}
}

// event rings the doorbell the way nats.go does: ten fit, the rest is dropped.
func (f *scripted) event(s nats.Status) {
	select {
	case f.link.events <- s:
	default:
	}
}

type fields map[string]string

func (f fields) number(k string) int {
	n, _ := strconv.Atoi(f[k])
	return n
}

// split divides words into plain and key=value ones.
func split(w []string) (args []string, named fields) {
	named = fields{}
	for _, s := range w {
		if k, v, ok := strings.Cut(s, "="); ok && !strings.ContainsAny(k, " .") {
			named[k] = v
		} else {
			args = append(args, s)
		}
	}
	return args, named
}

// words divides a line at its spaces, except in double quotes.
func words(s string) (w []string, err error) {
	var b strings.Builder
	quoted, open := false, false
	for _, r := range s + " " {
		switch {
		case r == '"':
			quoted, open = !quoted, true
		case r == ' ' && !quoted:
			if open {
				w = append(w, b.String())
			}
			b.Reset()
			open = false
		default:
			b.WriteRune(r)
			open = true
		}
	}
	if quoted {
		return nil, errors.New("a quote is open")
	}
	return w, nil
}

// seqSpan reads "3" or "3-7".
func seqSpan(s string) (from, to uint64, err error) {
	a, b, ok := strings.Cut(s, "-")
	if !ok {
		b = a
	}
	if from, err = strconv.ParseUint(a, 10, 64); err == nil {
		to, err = strconv.ParseUint(b, 10, 64)
	}
	return from, to, err
}

// header reads "Key: value; Key: value".
func header(s string) nats.Header {
	if s == "" {
		return nil
	}
	h := nats.Header{}
	for part := range strings.SplitSeq(s, ";") {
		k, v, _ := strings.Cut(part, ":")
		h[strings.TrimSpace(k)] = append(h[strings.TrimSpace(k)], strings.TrimSpace(v))
	}
	return h
}
