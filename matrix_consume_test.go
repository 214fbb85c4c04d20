package paced

import (
	"context"
	"iter"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

func init() { kinds = append(kinds, consuming) }

var consuming = &sequence{
	name: "Consume", stream: "S", prefix: "s.",
	again: true, keeps: 1, exit: exitHandBack, linger: handBackTime + barrierTime, pulls: 30,
	make: (*cell).makeStream,
	open: func(ctx context.Context, c *cell) iter.Seq2[item, error] {
		var last Msg
		cfg := ConsumeConfig{Stream: "S", OnDeleted: DeletedRecreate, MaxMessages: c.maxMessages(), MaxBytes: c.bounds.bytes, Listener: c.log.listener(), Tuning: c.tuning()}
		cfg.Consumer = jetstream.ConsumerConfig{Durable: "W", AckPolicy: jetstream.AckExplicitPolicy}
		if c.cause.reaps {
			cfg.Consumer.InactiveThreshold = defaultInactive
		}
		if c.real() {
			cfg.Consumer.AckWait = 5 * time.Second
		}
		if c.moment == beforeAny {
			cfg.Consumer.DeliverPolicy = jetstream.DeliverNewPolicy
		}
		seq := items(c, Consume(ctx, c.js, cfg), func(m Msg) Msg { last = m; return m })
		return func(yield func(item, error) bool) {
			for i, err := range seq {
				if !yield(i, err) {
					return
				}
				if err == nil {
					_ = last.Ack() // of no effect where the trouble took too long
				}
			}
		}
	},
}
