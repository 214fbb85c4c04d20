package main

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// benchCase is one load and everybody who takes it on. A new dimension is a
// field here, a new point in it a row below.
type benchCase struct {
	name  string
	about string

	n          int           // messages or keys that each loop reads
	size       int           // bytes of payload
	body       time.Duration // the body's work for each message: a sleep from 1 ms on, CPU below
	rtt        time.Duration // round trip time added between client and server
	loops      int           // on one connection; 0 is 1
	ack        bool          // messages are acknowledged
	ackPending int           // the durable consumer's MaxAckPending; 0: the server's default
	every      time.Duration // publish while the loops read, this far apart; the stream is empty before
	idle       time.Duration // stay for this time when everything is read
	lasts      time.Duration // a run ends after this time, wherever it is; 0: when n is reached
	limit      time.Duration // a run is given up after this time; default 2 minutes
	long       bool          // runs once unless -full is given

	phases []phase // for the picture: the body changes

	prepare     func(context.Context, jetstream.JetStream, *benchCase) error
	contestants []contestant
	metrics     []string
	wants       []want
}

// contestant is one way to do the task.
type contestant struct {
	name  string
	run   runFunc
	alone bool // one loop reads what all loops of the others read together
	bound bool // no peer: it shows what is possible
}

// runFunc is one loop. It calls hit for each message until that returns false,
// and then finish.
type runFunc func(context.Context, *loop) error

// want is a bound: for the ratio of paced to a peer; with above, for what paced
// has more than the peer; without a peer, for the value of paced itself.
type want struct {
	metric, peer string
	above        bool
	least        bool // otherwise it is the most
	bound        float64
}

func atLeast(times float64, peer, metric string) want {
	return want{metric: metric, peer: peer, least: true, bound: times}
}

func atMost(times float64, peer, metric string) want {
	return want{metric: metric, peer: peer, bound: times}
}

func above(peer string, bound float64, metric string) want {
	return want{metric: metric, peer: peer, above: true, bound: bound}
}

func value(bound float64, metric string) want { return want{metric: metric, bound: bound} }

// pacedName is the contestant that all the others are compared with.
const pacedName = "paced"

var (
	theFloor  = contestant{name: "floor", run: floor, bound: true}
	theBody   = contestant{name: "body alone", run: bodyAlone, bound: true}
	thePaced  = contestant{name: pacedName, run: pacedOrdered}
	theStock  = []contestant{{name: "Messages", run: messages(ordered)}, {name: "Consume", run: consume(ordered)}}
	aloneLoop = contestant{name: "one loop", run: pacedOrdered, alone: true, bound: true}
)

func with(some ...contestant) []contestant { return append(some, theStock...) }

var (
	throughput = []string{"msgs/s", "cpu/msg", "server cpu/msg", "allocs/msg", "peak heap"}
	buffering  = []string{"msgs/s", "in body", "waiting", "cpu/msg", "server cpu/msg", "peak heap"}
	queues     = []contestant{
		{name: pacedName, run: pacedConsume},
		{name: "Messages", run: messages(durable)},
		{name: "Consume", run: consume(durable)},
		{name: "Fetch", run: fetch(durable)},
	}
)

// cases vary one dimension at a time from the first one: 128 B, a body that
// does nothing, no round trip time, one loop.
var cases = []benchCase{
	{
		name: "ordered", about: "Ordered reader, defaults, body does nothing",
		n: 400_000, size: 128, prepare: fillStream,
		contestants: with(theFloor, thePaced), metrics: throughput,
		wants: []want{
			atLeast(0.95, "floor", "msgs/s"),
			atLeast(1.7, "Messages", "msgs/s"),
			atLeast(1.3, "Consume", "msgs/s"),
			atMost(1.10, "floor", "cpu/msg"),
			atMost(0.6, "Messages", "cpu/msg"),
			above("floor", 0.05, "allocs/msg"),
		},
	},
	{
		// Apart, because an ordered Fetch makes a consumer each time.
		name: "fetch", about: "Ordered reader beside Fetch, 500 at a time",
		n: 50_000, size: 128, prepare: fillStream,
		contestants: []contestant{thePaced, {name: "Fetch", run: fetch(ordered)}}, metrics: throughput,
	},
	{
		name: "size-16", about: "Messages of 16 B",
		n: 200_000, size: 16, prepare: fillStream,
		contestants: with(theFloor, thePaced), metrics: throughput,
	},
	// From here on the floor has no place: the server cuts a client for which it
	// has more than 64 MiB, and one huge pull brings it there (const.go:102).
	{
		name: "size-1k", about: "Messages of 1 KiB",
		n: 150_000, size: 1 << 10, prepare: fillStream,
		contestants: with(thePaced), metrics: throughput,
	},
	{
		name: "size-8k", about: "Messages of 8 KiB",
		n: 60_000, size: 8 << 10, prepare: fillStream,
		contestants: with(thePaced), metrics: throughput,
	},
	{
		name: "size-64k", about: "Messages of 64 KiB",
		n: 8000, size: 64 << 10, prepare: fillStream,
		contestants: with(thePaced), metrics: throughput,
	},
	{
		name: "body-2us", about: "Body of 2 µs",
		n: 150_000, size: 128, body: 2 * time.Microsecond, prepare: fillStream,
		contestants: with(theBody, thePaced), metrics: buffering,
	},
	{
		name: "body-100us", about: "Body of 100 µs",
		n: 15_000, size: 128, body: 100 * time.Microsecond, prepare: fillStream,
		contestants: with(theBody, thePaced), metrics: buffering,
	},
	{
		name: "body-1ms", about: "Body of 1 ms",
		n: 2000, size: 128, body: time.Millisecond, prepare: fillStream,
		contestants: with(theBody, thePaced), metrics: buffering,
		wants: []want{atLeast(0.97, "body alone", "msgs/s"), value(30, "waiting")},
	},
	{
		name: "body-10ms", about: "Body of 10 ms",
		n: 250, size: 128, body: 10 * time.Millisecond, prepare: fillStream,
		contestants: with(theBody, thePaced), metrics: buffering,
		wants: []want{atLeast(0.97, "body alone", "msgs/s"), value(30, "waiting")},
	},
	{
		name: "rtt-2ms", about: "Round trip of 2 ms",
		n: 100_000, size: 128, rtt: 2 * time.Millisecond, prepare: fillStream,
		contestants: with(thePaced), metrics: throughput,
	},
	{
		name: "rtt-50ms", about: "Round trip of 50 ms, for 4 s",
		n: 400_000, size: 128, rtt: 50 * time.Millisecond, lasts: 4 * time.Second, prepare: fillStream,
		contestants: with(thePaced), metrics: throughput,
		wants: []want{atLeast(8, "Consume", "msgs/s")},
	},
	{
		name: "loops-10", about: "10 loops",
		n: 40_000, size: 128, loops: 10, prepare: fillStream,
		contestants: with(thePaced, aloneLoop), metrics: throughput,
	},
	{
		name: "loops-100", about: "100 loops",
		n: 4000, size: 128, loops: 100, prepare: fillStream,
		contestants: with(thePaced, aloneLoop), metrics: throughput,
	},
	{
		name: "loops-1000", about: "1000 loops",
		n: 800, size: 128, loops: 1000, prepare: fillStream,
		contestants: with(theFloor, thePaced, aloneLoop), metrics: throughput,
		wants: []want{atLeast(0.85, "one loop", "msgs/s")},
	},
	{
		name: "ack", about: "Durable consumer, each message acknowledged, body does nothing",
		n: 150_000, size: 128, ack: true, prepare: fillStream,
		contestants: queues, metrics: throughput,
		wants: []want{atLeast(1, "Consume", "msgs/s"), atLeast(1.2, "Messages", "msgs/s")},
	},
	{
		// The server's default of 1000 (consumer.go:604) is less than a window of
		// any of them.
		name: "ack-5000", about: "The same with a MaxAckPending of 5000",
		n: 150_000, size: 128, ack: true, ackPending: 5000, prepare: fillStream,
		contestants: queues, metrics: throughput,
	},
	keysCase("keys-1k", 1000),
	keysCase("keys-10k", 10_000),
	keysCase("keys-100k", 100_000),
	keysCase("keys-1m", 1_000_000, atLeast(1, "ListKeys", "msgs/s"), value(16, "peak heap")),
	{
		name: "watch", about: "KV watcher, until all is read",
		n: 100_000, size: 128, prepare: fillBucket,
		contestants: snapshots, metrics: throughput,
	},
	{
		name: "watch-64k", about: "8 watchers on one connection, values of 64 KiB, body of 1 ms",
		n: 1500, size: 64 << 10, body: time.Millisecond, loops: 8, prepare: fillBucket,
		limit:       30 * time.Second,
		contestants: append([]contestant{theBody}, snapshots...), metrics: buffering,
		wants: []want{atLeast(0.9, "body alone", "msgs/s"), atMost(0.25, "WatchAll", "peak heap")},
	},
	{
		name: "idle", about: "1000 watchers on one connection that have read a small bucket and wait for updates",
		n: 10, size: 128, loops: 1000, idle: 2 * time.Second, prepare: fillBucket,
		contestants: []contestant{{name: pacedName, run: pacedWatch}, {name: "WatchAll", run: watchAll}},
		metrics:     []string{"goroutines", "heap/loop", "stack/loop", "cpu/loop"},
		wants:       []want{value(0, "goroutines"), atMost(0.75, "WatchAll", "heap/loop")},
	},
	{
		name: "latency", about: "From publish to body on an idle stream, a message each 4 ms",
		n: 500, size: 128, every: 4 * time.Millisecond, prepare: fillStream,
		contestants: with(thePaced), metrics: []string{"p50", "p99"},
		wants: []want{atMost(1.1, "Consume", "p50"), atMost(1.5, "Consume", "p99")},
	},
	{
		name: "seed", about: "20 watchers on one connection warm up from 18,000 keys of 12 KiB",
		n: 18_000, size: 12 << 10, loops: 20, prepare: fillBucket,
		limit: 3 * time.Minute, long: true,
		contestants: snapshots, metrics: append([]string{"seconds", "reconnects"}, throughput...),
		wants: []want{atLeast(9, "WatchAll", "msgs/s"), value(40, "peak heap"), value(0, "reconnects")},
	},
	{
		name: "picture", about: "Buffer occupancy; the body takes 0.1 ms, then 10 ms, then 0.1 ms",
		n: 100_000, size: 128, lasts: 6 * time.Second, prepare: fillStream,
		phases:      []phase{{2 * time.Second, 100 * time.Microsecond}, {2 * time.Second, 10 * time.Millisecond}, {2 * time.Second, 100 * time.Microsecond}},
		contestants: with(thePaced), metrics: []string{"msgs/s"},
	},
}

var snapshots = []contestant{{name: pacedName, run: snapshot}, {name: "WatchAll", run: watchAll}}

func keysCase(name string, n int, wants ...want) benchCase {
	return benchCase{
		name: name, about: "All keys of a bucket",
		n: n, size: 16, prepare: fillBucket,
		contestants: []contestant{{name: pacedName, run: pacedKeys}, {name: "ListKeys", run: listKeys}},
		metrics:     throughput,
		wants:       wants,
	}
}

func caseNamed(name string) *benchCase {
	for i := range cases {
		if cases[i].name == name {
			return &cases[i]
		}
	}
	return nil
}

func (c *benchCase) contestant(name string) contestant {
	for _, p := range c.contestants {
		if p.name == name {
			return p
		}
	}
	return contestant{}
}

func (c *benchCase) timeout() time.Duration { return cmp.Or(c.limit, 2*time.Minute) }

func (c *benchCase) loopCount() int { return max(c.loops, 1) }

func (p contestant) loopsIn(c *benchCase) int {
	if p.alone {
		return 1
	}
	return c.loopCount()
}

// watchesBuffer tells whether what waits for the body is to be counted.
func (c *benchCase) watchesBuffer() bool { return c.body > 0 || c.phases != nil }

const (
	streamName  = "BENCH"
	wholeName   = "BENCH-WHOLE" // for the one loop that reads as much as many
	dataSubject = "bench.data"
)

// fillStream makes a memory stream of n messages, and the one that is as long
// as n for all loops together.
func fillStream(ctx context.Context, js jetstream.JetStream, c *benchCase) error {
	fill := func(name, subject string, n int) error {
		_, err := js.CreateStream(ctx, jetstream.StreamConfig{
			Name:     name,
			Subjects: []string{subject},
			Storage:  jetstream.MemoryStorage,
		})
		if err != nil || c.every > 0 {
			return err
		}
		return publish(ctx, js, n, c.size, func(int) string { return subject })
	}
	if c.loops > 0 {
		if err := fill(wholeName, "bench.whole", c.n*c.loops); err != nil {
			return err
		}
	}
	return fill(streamName, dataSubject, c.n)
}

func publish(ctx context.Context, js jetstream.JetStream, n, size int, subject func(int) string) error {
	data := make([]byte, size)
	for i := range n {
		if _, err := js.PublishAsync(subject(i), data, jetstream.WithStallWait(time.Minute)); err != nil {
			return err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// clearStreams deletes what was prepared.
func clearStreams(ctx context.Context, js jetstream.JetStream) error {
	names := js.StreamNames(ctx)
	for name := range names.Name() {
		if err := js.DeleteStream(ctx, name); err != nil {
			return err
		}
	}
	return names.Err()
}

// clearConsumers deletes what a run has left: package jetstream leaves ordered
// consumers to their InactiveThreshold.
func clearConsumers(ctx context.Context, js jetstream.JetStream) error {
	streams := js.ListStreams(ctx)
	for info := range streams.Info() {
		s, err := js.Stream(ctx, info.Config.Name)
		if err != nil {
			return err
		}
		names := s.ConsumerNames(ctx)
		for name := range names.Name() {
			if err := s.DeleteConsumer(ctx, name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
				return err
			}
		}
		if err := names.Err(); err != nil {
			return err
		}
	}
	return streams.Err()
}
