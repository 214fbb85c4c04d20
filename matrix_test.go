package paced

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"iter"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

var full = flag.Bool("full", false, "run every cell of the fault matrix and the long soaks")

// TestMatrix is every cause (causes_test.go) at every moment under every
// sequence. A cell is one reader with one trouble. It checks what was yielded
// (order, nothing lost, nothing twice), the error or that there is none, how
// long after the trouble the reader goes on, how many consumers and pulls that
// took and how close together, how long the exit took, and that nothing is left
// behind. A cell that does not apply is skipped with the reason.
func TestMatrix(t *testing.T) {
	var cluster *testserver.Cluster
	for i := range causes {
		k := &causes[i]
		t.Run(testName(k.name), func(t *testing.T) {
			for _, m := range moments {
				t.Run(testName(string(m)), func(t *testing.T) {
					for _, s := range kinds {
						if !*full && (s.rare || (k.world != bubble && m != isParked && m != midBatch)) {
							continue
						}
						t.Run(testName(s.name), func(t *testing.T) {
							if why := k.applies(m, s); why != "" {
								t.Skip(why)
							}
							c := &cell{TB: t, cause: k, moment: m, seq: s}
							switch k.world {
							case bubble:
								c.dir, c.copied = t.TempDir(), t.TempDir()
								testserver.InBubble(t, func(t *testing.T) { c.TB = t; c.play() })
							case threeServers:
								if cluster == nil {
									var err error
									if cluster, err = testserver.RunCluster(nil); err != nil {
										t.Fatal(err)
									}
								}
								c.cluster = cluster
								c.play()
							case process:
								c.playStopped()
							}
						})
					}
				})
			}
		})
	}
	if cluster != nil {
		cluster.Close()
	}
}

func testName(s string) string { return strings.ReplaceAll(s, " ", "_") }

// moment is what the loop is doing when the trouble begins.
type moment string

const (
	isParked   moment = "parked"      // everything was read, a pull waits on the server
	inBody     moment = "in the body" // everything was read; the body outlasts the trouble
	midBatch   moment = "mid-batch"   // messages wait, others are still on the server; the body is back at once
	rebuilding moment = "rebuilding"  // the consumer was lost, the answer to the next create is on its way
	beforeAny  moment = "before the first message"
	atExit     moment = "at exit" // the body leaves as the trouble begins
)

var moments = []moment{isParked, inBody, midBatch, rebuilding, beforeAny, atExit}

// item is what a sequence yields, as far as a cell looks at it.
type item struct {
	seq     uint64
	subject string
}

// sequence is one kind of range, reduced to what a cell needs.
type sequence struct {
	name   string
	stream string
	prefix string // of its subjects
	keyed  bool   // every message has a subject of its own
	make   func(*cell)
	open   func(context.Context, *cell) iter.Seq2[item, error]
	again  bool          // a message may come more than once, and not in order
	gaps   bool          // ends with an error where messages were removed unread
	keeps  int           // consumers it leaves on purpose
	exit   time.Duration // that an exit takes at most
	linger time.Duration // that the clean-up behind it takes at most
	pulls  int           // more of them than an ordered reader sends
	rare   bool          // only with -full
}

var kinds = []*sequence{
	{
		name: "Ordered", stream: "S", prefix: "s.", gaps: true, exit: exitTime,
		make: (*cell).makeStream,
		open: func(ctx context.Context, c *cell) iter.Seq2[item, error] {
			cfg := OrderedConfig{Stream: "S", OnGap: c.bounds.gap, MaxMessages: c.maxMessages(), MaxBytes: c.bounds.bytes, Listener: c.log.listener(), Tuning: c.tuning()}
			if c.moment == beforeAny {
				cfg.DeliverPolicy = jetstream.DeliverNewPolicy
			}
			return items(c, Ordered(ctx, c.js, cfg), func(m Msg) Msg { return m })
		},
	},
	watching("Watch", 1, false),
	watching("Watch of 5 revisions", 5, true),
}

func (c *cell) makeStream() {
	sc := jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Storage: c.storage(), MaxMsgs: int64(c.cause.keeps), Replicas: c.replicas()}
	c.eventually(func(ctx context.Context) error {
		_, err := c.ajs.CreateStream(ctx, sc)
		return err
	})
}

// items reduces a sequence to what a cell looks at, and checks each pair: a
// value or an error, never both, never neither.
func items[T comparable](c *cell, seq iter.Seq2[T, error], msg func(T) Msg) iter.Seq2[item, error] {
	return func(yield func(item, error) bool) {
		for v, err := range seq {
			var zero T
			if (v == zero) != (err != nil) {
				c.Errorf("yields %v and %v", v, err)
			}
			var i item
			if err == nil {
				i = item{msg(v).Sequence(), msg(v).Subject()}
			}
			if !yield(i, err) {
				return
			}
		}
	}
}

func watching(name string, history uint8, rare bool) *sequence {
	return &sequence{
		name: name, stream: "KV_B", prefix: "$KV.B.", keyed: true, exit: exitTime, rare: rare,
		make: func(c *cell) {
			c.eventually(func(ctx context.Context) error {
				_, err := c.ajs.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "B", History: history, Storage: c.storage(), Replicas: c.replicas()})
				return err
			})
			if c.cause.keeps > 0 {
				sc := c.stream().CachedInfo().Config
				sc.MaxMsgs, sc.Discard = int64(c.cause.keeps), jetstream.DiscardOld
				if _, err := c.ajs.UpdateStream(c.ctx, sc); err != nil {
					c.Fatal(err)
				}
			}
		},
		open: func(ctx context.Context, c *cell) iter.Seq2[item, error] {
			cfg := WatchConfig{Bucket: "B", MaxMessages: c.maxMessages(), MaxBytes: c.bounds.bytes, UpdatesOnly: c.moment == beforeAny, Listener: c.log.listener(), Tuning: c.tuning()}
			return items(c, Watch(ctx, c.js, cfg), func(e Entry) Msg { return e.msg })
		},
	}
}

// world is where a cause can be played.
type world int

const (
	bubble       world = iota // one server, fake time
	threeServers              // a cluster and a proxy, real time
	process                   // the reader in a process of its own
)

// cause is one row of the matrix.
type cause struct {
	name  string
	world world
	harm  func(*cell)        // the trouble begins
	heal  func(*cell)        // and is over; nil: by itself
	lasts time.Duration      // in between
	want  func(*cell) string // how the sequence ends, a key of endings; "": it goes on
	// na says why a moment, a sequence or a "moment/sequence" does not apply.
	na map[string]string
	// idle: nothing came of the harm there, which is a fault of the test.
	idle func(*cell) string

	dark       bool          // nothing can be stored while it lasts
	file       bool          // the stream survives a restart
	copies     bool          // a copy of the store is taken after three messages
	keeps      int           // the stream's limit of messages
	loses      bool          // messages that are not in the stream any more need not come
	users      bool          // the server has users, and the loop's may be denied subjects
	reconnects bool          // Tuning.ReconnectHalfOpen
	pings      time.Duration // nats.go's interval, if it is to notice anything
	reaps      bool          // what is not used is reaped, also what is kept on purpose
	untidy     bool          // a consumer may be left to InactiveThreshold

	resume         time.Duration // from the end of the trouble to the message behind it, at most
	rebuild        time.Duration // the same for the moment rebuilding, where it is more
	work           time.Duration // the same with explicit acks, where it is more
	creates, pulls int           // in all, at most
}

func (k *cause) applies(m moment, s *sequence) string {
	for _, key := range []string{string(m), s.name, string(m) + "/" + s.name} {
		if why := k.na[key]; why != "" {
			return why
		}
	}
	return ""
}

// endings are the errors a sequence may end with.
var endings = map[string]func(error) bool{
	"gap":           func(err error) bool { _, ok := errors.AsType[*GapError](err); return ok },
	"no stream":     func(err error) bool { return errors.Is(err, jetstream.ErrStreamNotFound) },
	"recreated":     func(err error) bool { return errors.Is(err, ErrStreamRecreated) },
	"no permission": func(err error) bool { return errors.Is(err, nats.ErrPermissionViolation) },
}

// cell is one run.
type cell struct {
	testing.TB
	cause  *cause
	moment moment
	seq    *sequence

	ctx         context.Context
	dir, copied string // the store and an older copy of it
	srv         *testserver.Server
	cluster     *testserver.Cluster
	faults      *faultproxy.Faults
	nc, anc     *nats.Conn // the loop's, and one around all faults
	js, ajs     jetstream.JetStream
	deny        []string // subjects that the loop may not publish to
	off         bool     // the server has no JetStream
	bounds      bounds   // of the reader's configuration
	log         log
	reports     atomic.Int64
	node        *testserver.Server // that goes and comes back

	mu       sync.Mutex
	fault    faultproxy.Filter // of the trouble
	hits     int               // frames that it did something to
	onCreate func()            // called once with the next create
	slow     map[string]bool   // reply subjects whose answers take their time
	made     []time.Time       // creates
	pulled   []time.Time       // pulls that are not confirming ones
	confirms []time.Time
	data     []time.Time // messages on their way to the loop
	healed   time.Time

	stored []uint64
	n      int // published

	got  []uint64
	err  error
	last bool          // the message behind the trouble came
	took time.Duration // until then
	left time.Duration // that the exit took
}

// bounds are what a reader may ask for; zero: defaults.
type bounds struct {
	messages, bytes int
	expires         time.Duration
	gap             GapPolicy
}

// backlog is how many messages are stored before the range begins.
const backlog = 10

func (c *cell) real() bool { return c.cause.world != bubble }

func (c *cell) storage() jetstream.StorageType {
	if c.cause.file {
		return jetstream.FileStorage
	}
	return jetstream.MemoryStorage
}

func (c *cell) replicas() int {
	if c.cluster != nil {
		return 3
	}
	return 1
}

func (c *cell) maxMessages() int {
	if c.moment == midBatch {
		return 4
	}
	return c.bounds.messages
}

func (c *cell) tuning() Tuning {
	t := Tuning{ReconnectHalfOpen: c.cause.reconnects, Expires: c.bounds.expires}
	if c.cause.world == process {
		t.Heartbeat = 250 * time.Millisecond // so that a short stop is a long silence
	}
	return t
}

// eventually tries until it works: a cluster between two leaders answers
// nothing.
func (c *cell) eventually(try func(context.Context) error) {
	for {
		ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
		err := try(ctx)
		cancel()
		if err == nil {
			return
		}
		if !c.real() || c.ctx.Err() != nil {
			c.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// pause is how long the loop is left alone before the trouble begins: it is
// parked then.
func (c *cell) pause() {
	if c.real() {
		time.Sleep(500 * time.Millisecond)
	} else {
		time.Sleep(45 * time.Second)
	}
}

// store publishes a message, once.
func (c *cell) store(tail string) {
	c.n++
	id := fmt.Sprint(c.n)
	if tail == "" {
		tail = "a"
		if c.seq.keyed {
			tail = "k" + id
		}
	}
	for {
		ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
		ack, err := c.ajs.Publish(ctx, c.seq.prefix+tail, []byte("x"), jetstream.WithMsgID(id))
		cancel()
		if err == nil {
			c.mu.Lock()
			c.stored = append(c.stored, ack.Sequence)
			c.mu.Unlock()
			return
		}
		if c.ctx.Err() != nil {
			c.Errorf("publish: %v", err)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (c *cell) storeN(n int) {
	for range n {
		c.store("")
	}
}

// stream looks the stream up. A request that falls between two servers is never
// answered.
func (c *cell) stream() jetstream.Stream {
	c.Helper()
	for {
		ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
		s, err := c.ajs.Stream(ctx, c.seq.stream)
		cancel()
		if err == nil {
			return s
		}
		if c.ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			c.Errorf("stream: %v", err)
			runtime.Goexit()
		}
	}
}

func (c *cell) consumers() []string {
	var names []string
	l := c.stream().ConsumerNames(c.ctx)
	for n := range l.Name() {
		names = append(names, n)
	}
	if l.Err() != nil {
		c.Error(l.Err())
	}
	return names
}

func (c *cell) loseConsumers() {
	for _, n := range c.consumers() {
		if n == "foreign" {
			continue
		}
		// The loop may have been faster.
		if err := c.ajs.DeleteConsumer(c.ctx, c.seq.stream, n); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			c.Error(err)
		}
	}
}

// setFault puts the trouble's own filter in place.
func (c *cell) setFault(f faultproxy.Filter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fault = f
}

// filter sees every frame of the loop's connection.
func (c *cell) filter(f faultproxy.Frame) faultproxy.Action {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	switch {
	case f.Direction == faultproxy.ToClient:
		if strings.HasPrefix(f.Reply, "$JS.ACK.") {
			c.data = append(c.data, now)
		}
	case strings.Contains(f.Subject, ".CONSUMER.CREATE."):
		c.made = append(c.made, now)
		if c.onCreate != nil {
			c.slow[f.Reply] = true
			c.onCreate()
			c.onCreate = nil
		}
	case strings.Contains(f.Subject, ".CONSUMER.MSG.NEXT."):
		var p struct {
			Heartbeat time.Duration `json:"idle_heartbeat"`
			Expires   time.Duration `json:"expires"`
		}
		if err := json.Unmarshal(f.Payload, &p); err != nil || p.Heartbeat <= 0 || p.Expires < 2*p.Heartbeat {
			c.Errorf("a pull without end or heartbeat: %s", f.Payload)
		}
		// Confirming pulls, and the main ones of a list, have short ones.
		if p.Heartbeat < catchUpHeartbeat {
			c.confirms = append(c.confirms, now)
		} else {
			c.pulled = append(c.pulled, now)
		}
	}
	if c.fault != nil {
		if a := c.fault(f); a != faultproxy.Pass {
			c.hits++
			return a
		}
	}
	if f.Direction == faultproxy.ToClient && c.slow[f.Subject] {
		return faultproxy.After(50 * time.Millisecond)
	}
	return faultproxy.Pass
}

// around connects to whatever server runs at that moment, around the faults.
type around struct{ *testserver.Server }

func (a around) InProcessConn() (net.Conn, error) {
	if s := a.Server.Server(); s != nil {
		return s.InProcessConn()
	}
	return nil, errors.New("the server is stopped")
}

// begin makes the world.
func (c *cell) begin() {
	c.slow = map[string]bool{}
	opts := []nats.Option{
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) { c.reports.Add(1) }),
		nats.PingInterval(orDefault(c.cause.pings, time.Hour)), // nats.go itself notices nothing
		nats.ReconnectWait(200 * time.Millisecond),
	}
	aopts := []nats.Option{quietly()}
	if c.cause.users {
		opts = append(opts, nats.UserInfo("u", "x"))
		aopts = append(aopts, nats.UserInfo("admin", "x"))
	}
	if c.real() {
		c.srv = c.cluster.Nodes[0]
		if err := c.cluster.WaitReady(); err != nil {
			c.Fatal(err)
		}
		proxy, err := faultproxy.New(c.srv.ClientURL())
		if err != nil {
			c.Fatal(err)
		}
		c.Cleanup(proxy.Close)
		c.faults = &proxy.Faults
		c.nc = testserver.Connect(c, proxy.URL(), opts...)
		c.anc = testserver.Connect(c, c.cluster.URL(), aopts...)
	} else {
		c.srv = testserver.New(c, testserver.Options{Dir: c.dir, Configure: c.configure})
		c.faults = &c.srv.Faults
		c.nc = c.srv.Connect(c, opts...)
		c.anc = testserver.Connect(c, "", append(aopts, nats.InProcessServer(around{c.srv}))...)
	}
	c.faults.SetFilter(c.filter)
	c.js, _ = jetstream.New(c.nc)
	c.ajs, _ = jetstream.New(c.anc)
	c.seq.make(c)
}

func (c *cell) configure(o *server.Options) {
	o.JetStream = !c.off
	if c.cause.users {
		o.Users = []*server.User{
			{Username: "admin", Password: "x"},
			{Username: "u", Password: "x", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: c.deny}}},
		}
	}
}

// halt stops the server when no request of the loop is on its way: while it
// sleeps in its shutdown it holds a lock (nats-server jetstream.go:1009), and a
// request that waits for a lock stops the clock of the bubble.
func (c *cell) halt() {
	c.faults.Mute(faultproxy.ToServer)
	time.Sleep(time.Millisecond)
	c.srv.Stop()
	c.faults.Unmute(faultproxy.ToServer)
}

// restart starts the server again and waits for both clients.
func (c *cell) restart() {
	if err := c.srv.Start(); err != nil {
		c.Error(err)
	}
	c.wantConnected()
}

func (c *cell) wantConnected() {
	for !c.nc.IsConnected() || !c.anc.IsConnected() {
		time.Sleep(time.Millisecond)
	}
}

func (c *cell) ends() string {
	if c.cause.want == nil || c.moment == atExit {
		return ""
	}
	return c.cause.want(c)
}

// strike begins the trouble.
func (c *cell) strike() {
	c.cause.harm(c)
	if !c.cause.dark && c.ends() == "" {
		c.storeN(5)
	}
}

// rest is what follows.
func (c *cell) rest() {
	time.Sleep(c.cause.lasts)
	if c.cause.heal != nil {
		c.cause.heal(c)
	}
	c.mu.Lock()
	c.healed = time.Now()
	c.mu.Unlock()
	if c.ends() == "" && c.moment != atExit {
		c.store("end")
	}
}

// play runs the cell.
func (c *cell) play() {
	limit := time.Hour
	if c.real() {
		limit = 90 * time.Second
	}
	ctx, cancel := context.WithTimeoutCause(c.Context(), limit, errors.New("the message behind the trouble did not come"))
	defer cancel()
	c.ctx = ctx
	c.begin()
	c.storeN(3)
	if c.cause.copies {
		c.halt()
		copyDir(c, c.dir, c.copied)
		c.restart()
	}
	c.storeN(backlog - 3)
	var done sync.WaitGroup
	behind := func(fs ...func()) {
		done.Go(func() {
			for _, f := range fs {
				f()
			}
		})
	}
	rebuild := func() {
		made := make(chan struct{})
		c.mu.Lock()
		c.onCreate = func() { close(made) }
		c.mu.Unlock()
		c.loseConsumers()
		<-made
		time.Sleep(10 * time.Millisecond) // the consumer exists, the loop does not know
	}
	if c.moment == beforeAny {
		behind(c.pause, c.strike, c.rest)
	}
	var exit time.Time
	for i, err := range c.seq.open(ctx, c) {
		if !exit.IsZero() {
			c.Errorf("yields %d, %v behind the last pair", i.seq, err)
		}
		if err != nil {
			c.err = err
			exit = time.Now()
			continue
		}
		c.got = append(c.got, i.seq)
		if i.subject == c.seq.prefix+"end" && !c.last {
			c.last = true
			c.mu.Lock()
			c.took = time.Since(c.healed)
			c.mu.Unlock()
		}
		if c.last && (!c.seq.again || c.whole()) {
			exit = time.Now()
			break
		}
		switch n := len(c.got); {
		case n == backlog && c.moment == isParked:
			behind(c.pause, c.strike, c.rest)
		case n == backlog && c.moment == rebuilding:
			behind(c.pause, rebuild, c.strike, c.rest)
		case n == backlog && c.moment == inBody:
			c.strike()
			c.rest()
		case n == backlog/2 && c.moment == midBatch:
			c.strike()
			behind(c.rest)
		case n == backlog && c.moment == atExit:
			c.cause.harm(c)
			exit = time.Now()
		}
		if c.moment == atExit && !exit.IsZero() {
			break
		}
	}
	c.left = time.Since(exit)
	done.Wait()
	if c.moment == atExit {
		c.rest()
	}
	c.setFault(nil)
	c.checkYielded()
	c.checkTraffic()
	c.checkLeft()
	if c.Failed() {
		c.Logf("got %v, stored %v, error %v\n%v", c.got, brief(c.stored), c.err, strings.Join(c.log.lines[max(0, len(c.log.lines)-15):], "\n"))
	}
	c.mu.Lock()
	c.Logf("resumed after %v, %d creates, %d+%d pulls, %d reports", c.took, len(c.made), len(c.pulled), len(c.confirms), c.reports.Load())
	c.mu.Unlock()
	if c.real() {
		c.wantConnected()
		if err := c.ajs.DeleteStream(c.Context(), c.seq.stream); err != nil {
			c.Error(err)
		}
	}
}

// whole reports whether everything has come: what may come again may also come
// late.
func (c *cell) whole() bool {
	if c.cause.loses {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, q := range c.expected() {
		if !slices.Contains(c.got, q) {
			return false
		}
	}
	return true
}

// expected is what was stored for the reader.
func (c *cell) expected() []uint64 {
	if c.moment == beforeAny {
		return c.stored[backlog:]
	}
	return c.stored
}

// checkYielded compares what was yielded with what was stored.
func (c *cell) checkYielded() {
	for i, q := range c.got {
		if i > 0 && q <= c.got[i-1] && !c.seq.again {
			c.Errorf("%d behind %d", q, c.got[i-1])
		}
	}
	want := c.expected()
	for _, q := range c.got {
		if !slices.Contains(want, q) && c.ends() == "" {
			c.Errorf("%d should not be here", q)
		}
	}
	switch ends := c.ends(); {
	case ends != "":
		if c.err == nil || !endings[ends](c.err) || !strings.HasPrefix(c.err.Error(), "paced: ") {
			c.Errorf("ended with %v, want %s", c.err, ends)
		}
		if n := len(c.got); c.moment != beforeAny && !c.seq.again && !slices.Equal(c.got, want[:min(n, len(want))]) {
			c.Errorf("got %v", c.got)
		}
		if c.last {
			c.Error("yields what is behind the trouble")
		}
	case c.err != nil:
		c.Errorf("ended with %v", c.err)
	case c.moment == atExit:
		if !slices.Equal(c.got, want[:backlog]) {
			c.Errorf("got %v", c.got)
		}
	default:
		if !c.last {
			c.Error("the message behind the trouble did not come")
		}
		for _, q := range want {
			if slices.Contains(c.got, q) {
				continue
			}
			if c.cause.loses {
				if _, err := c.stream().GetMsg(c.Context(), q); errors.Is(err, jetstream.ErrMsgNotFound) {
					continue
				}
			}
			c.Errorf("%d is missing", q)
		}
		most := c.cause.resume
		if c.seq.again {
			// A consumer that is made again under its name may meet the one
			// that is being deleted (nats-server consumer.go:1126, 2612): then
			// the first backoff passes.
			most = max(most, c.cause.work, 100*time.Millisecond)
		}
		if c.moment == rebuilding {
			// The answer that takes its time, and the backoff where that
			// consumer is lost as well.
			most = max(most, c.cause.rebuild) + 150*time.Millisecond
		}
		if c.took > most {
			c.Errorf("resumed after %v, want at most %v", c.took, most)
		}
	}
	if c.cause.idle != nil {
		if why := c.cause.idle(c); why != "" {
			c.Error(why)
		}
	}
}

// checkTraffic counts what went to the server.
func (c *cell) checkTraffic() {
	c.mu.Lock()
	defer c.mu.Unlock()
	creates := c.cause.creates
	if c.moment == rebuilding {
		creates++
	}
	if c.seq.again {
		creates++ // see above
	}
	if n := len(c.made); n > creates {
		c.Errorf("%d creates, want at most %d", n, creates)
	}
	if n := len(c.pulled) + len(c.confirms); n > c.cause.pulls+c.seq.pulls {
		c.Errorf("%d pulls, want at most %d", n, c.cause.pulls+c.seq.pulls)
	}
	if n := busiest(c.pulled, c.data); n > 10 {
		c.Errorf("%d pulls in a second without a message", n)
	}
	// Five in a row, then their life doubles, for each consumer.
	if n := busiest(c.confirms, c.data); n > 12*(1+busiest(c.made, c.data)) {
		c.Errorf("%d confirming pulls in a second without a message", n)
	}
}

// busiest is the most events that fall into one second in which no message
// came.
func busiest(events, messages []time.Time) int {
	most := 0
	for i, from := range events {
		n := 0
		for _, at := range events[i:] {
			if at.Sub(from) < time.Second {
				n++
			}
		}
		came := slices.ContainsFunc(messages, func(at time.Time) bool {
			d := at.Sub(from)
			return d >= 0 && d < time.Second
		})
		if !came {
			most = max(most, n)
		}
	}
	return most
}

// checkLeft: nothing is left behind.
func (c *cell) checkLeft() {
	// Under real time a busy machine delays everything; there exits are
	// measured by TestExitOnMuteAndDeadServer.
	if !c.real() && c.left > c.seq.exit {
		c.Errorf("the exit took %v", c.left)
	}
	keeps := c.seq.keeps
	if !c.real() {
		time.Sleep(c.seq.linger)
		if c.cause.reaps && (c.moment == atExit || c.cause.untidy) {
			keeps = 0
		}
		if c.moment == atExit || c.cause.untidy {
			time.Sleep(defaultInactive + 2*time.Second)
		}
		synctest.Wait()
	}
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute) // elections on a busy machine are slow
	defer cancel()
	left := func() string {
		if n := c.nc.NumSubscriptions(); n > 0 {
			return fmt.Sprintf("%d subscriptions left", n)
		}
		if n := listeners(c.nc); n > 0 {
			return fmt.Sprintf("%d status listeners left", n)
		}
		if n := budgetHeld(c.nc); n > 0 {
			return fmt.Sprintf("%d loops in the budget", n)
		}
		if n := loopGoroutines(); n > 0 {
			return fmt.Sprintf("%d goroutines left", n)
		}
		// Between two leaders a request is never answered.
		one, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if s, err := c.ajs.Stream(one, c.seq.stream); err == nil {
			// Where the loop did not go on there may be none to keep.
			least := keeps
			if c.err != nil || c.moment == atExit {
				least = 0
			}
			if n := s.CachedInfo().State.Consumers; (n > keeps || n < least) && !(c.real() && c.moment == atExit) {
				return fmt.Sprintf("%d consumers left", n)
			}
		} else if !errors.Is(err, jetstream.ErrStreamNotFound) {
			return "is the stream there: " + err.Error()
		}
		return ""
	}
	for {
		why := left()
		if why == "" {
			return
		}
		if !c.real() || ctx.Err() != nil {
			c.Error(why)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// loopGoroutines counts the goroutines that run a loop or clean up behind one.
func loopGoroutines() int {
	buf := make([]byte, 4<<20)
	return strings.Count(string(buf[:runtime.Stack(buf, true)]), "paced.(*loop).leave.func")
}
