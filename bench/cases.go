package main

import (
	"context"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// benchCase is one load and everybody who takes it on. A new dimension is a
// field here, a new point in it a row below.
type benchCase struct {
	name  string
	about string

	n     int           // messages in the stream
	size  int           // bytes of payload
	rtt   time.Duration // round trip time added between client and server
	limit time.Duration // a run ends after this time if n has not been reached; 0: never

	prepare     func(context.Context, jetstream.JetStream, *benchCase) error
	contestants []contestant
	wants       []want
}

// contestant is one way to do the task. Its run calls meter.hit for each
// message until that returns false.
type contestant struct {
	name string
	run  func(context.Context, *client) error
}

// pacedName is the contestant that all the others are compared with.
const pacedName = "paced"

// want is a bound for the ratio of paced to a peer.
type want struct {
	metric, peer string
	atLeast      float64
	atMost       float64
}

var cases = []benchCase{
	{
		name:    "ordered",
		about:   "ordered reader, defaults, body does nothing",
		n:       500_000,
		size:    128,
		prepare: fillStream,
		contestants: []contestant{
			{"floor", floor},
			{pacedName, pacedOrdered},
			{"Messages", orderedMessages},
			{"Consume", orderedConsume},
		},
		wants: []want{
			{metric: "msgs/s", peer: "floor", atLeast: 0.95},
			{metric: "msgs/s", peer: "Messages", atLeast: 1.7},
			{metric: "msgs/s", peer: "Consume", atLeast: 1.3},
			{metric: "cpu/msg", peer: "floor", atMost: 1.10},
			{metric: "cpu/msg", peer: "Messages", atMost: 0.6},
			{metric: "allocs/msg", peer: "floor", atMost: 4.05 / 4},
		},
	},
	{
		name:    "ordered-rtt50",
		about:   "the same over 50 ms of round trip, for 5 s",
		n:       500_000,
		size:    128,
		rtt:     50 * time.Millisecond,
		limit:   5 * time.Second,
		prepare: fillStream,
		contestants: []contestant{
			{pacedName, pacedOrdered},
			{"Messages", orderedMessages},
			{"Consume", orderedConsume},
		},
		wants: []want{
			{metric: "msgs/s", peer: "Consume", atLeast: 8},
		},
	},
}

func caseNamed(name string) *benchCase {
	for i := range cases {
		if cases[i].name == name {
			return &cases[i]
		}
	}
	return nil
}

func (c *benchCase) contestant(name string) func(context.Context, *client) error {
	for _, p := range c.contestants {
		if p.name == name {
			return p.run
		}
	}
	return nil
}

const streamName = "BENCH"

// fillStream makes a memory stream of c.n messages of c.size bytes.
func fillStream(ctx context.Context, js jetstream.JetStream, c *benchCase) error {
	_, err := js.CreateStream(ctx, jetstream.StreamConfig{
		Name:     streamName,
		Subjects: []string{"bench.>"},
		Storage:  jetstream.MemoryStorage,
	})
	if err != nil {
		return err
	}
	data := make([]byte, c.size)
	for range c.n {
		if _, err := js.PublishAsync("bench.data", data, jetstream.WithStallWait(time.Minute)); err != nil {
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
