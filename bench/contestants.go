package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced"
)

// floor is the least that reading through nats.go can cost: a subscription of
// its own, one pull for everything, and nothing done with what comes. It keeps
// no bound, detects no loss and cannot go on after one.
func floor(ctx context.Context, l *loop) error {
	cons, err := l.js.CreateConsumer(ctx, l.stream, jetstream.ConsumerConfig{
		AckPolicy:     jetstream.AckNonePolicy,
		MemoryStorage: true,
	})
	if err != nil {
		return err
	}
	defer func() { _ = l.js.DeleteConsumer(ctx, l.stream, cons.CachedInfo().Name) }()
	inbox := l.nc.NewInbox()
	ch := make(chan *nats.Msg, l.n+1)
	sub, err := l.nc.ChanSubscribe(inbox, ch)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	pull := fmt.Sprintf(`{"batch":%d,"expires":%d}`, l.n, 60*time.Second)
	subject := "$JS.API.CONSUMER.MSG.NEXT." + l.stream + "." + cons.CachedInfo().Name
	if err := l.nc.PublishRequest(subject, inbox, []byte(pull)); err != nil {
		return err
	}
	for m := range ch {
		if m.Reply == "" {
			return fmt.Errorf("status %s", m.Header.Get("Status"))
		}
		if !l.hit(m.Data) {
			meta, err := m.Metadata()
			if err != nil {
				return err
			}
			return l.finish(meta.Sequence.Stream)
		}
	}
	return nil
}

// bodyAlone has its messages already. Nothing is faster.
func bodyAlone(_ context.Context, l *loop) error {
	for l.hit(nil) {
	}
	return l.finish(uint64(l.n))
}

func pacedOrdered(ctx context.Context, l *loop) error {
	cfg := paced.OrderedConfig{Stream: l.stream, Listener: tellRebuilds}
	for msg, err := range paced.Ordered(ctx, l.js, cfg) {
		if err != nil {
			return err
		}
		if !l.hit(msg.Data()) {
			return l.finish(msg.Sequence())
		}
	}
	return nil
}

func pacedConsume(ctx context.Context, l *loop) error {
	cfg := paced.ConsumeConfig{Stream: l.stream, Consumer: durableConfig(l), Listener: tellRebuilds}
	for msg, err := range paced.Consume(ctx, l.js, cfg) {
		if err != nil {
			return err
		}
		more := l.hit(msg.Data())
		if err := msg.Ack(); err != nil {
			return err
		}
		if !more {
			return l.finish(msg.Sequence())
		}
	}
	return nil
}

var tellRebuilds = &paced.Listener{
	Resubscribing: func(reason error, _ int, _ time.Duration) { fmt.Fprintln(os.Stderr, "rebuild:", reason) },
}

// create makes the consumer for a reader of package jetstream.
type create func(context.Context, *loop) (jetstream.Consumer, error)

func ordered(ctx context.Context, l *loop) (jetstream.Consumer, error) {
	return l.js.OrderedConsumer(ctx, l.stream, jetstream.OrderedConsumerConfig{})
}

func durableConfig(l *loop) jetstream.ConsumerConfig {
	return jetstream.ConsumerConfig{Durable: "bench", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: l.ackPending}
}

func durable(ctx context.Context, l *loop) (jetstream.Consumer, error) {
	return l.js.CreateOrUpdateConsumer(ctx, l.stream, durableConfig(l))
}

func messages(create create) runFunc {
	return func(ctx context.Context, l *loop) error {
		cons, err := create(ctx, l)
		if err != nil {
			return err
		}
		it, err := cons.Messages()
		if err != nil {
			return err
		}
		defer it.Stop()
		defer context.AfterFunc(ctx, it.Stop)()
		for {
			msg, err := it.Next()
			if err != nil {
				return err
			}
			if more, err := l.take(msg); !more {
				return err
			}
		}
	}
}

func consume(create create) runFunc {
	return func(ctx context.Context, l *loop) error {
		cons, err := create(ctx, l)
		if err != nil {
			return err
		}
		over := false
		result := make(chan error, 1)
		cc, err := cons.Consume(func(msg jetstream.Msg) {
			if over {
				return // it goes on calling until it is stopped
			}
			if more, err := l.take(msg); !more {
				over = true
				result <- err
			}
		})
		if err != nil {
			return err
		}
		defer cc.Stop()
		select {
		case err := <-result:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// fetchBatch is what Messages and Consume ask for by default.
const fetchBatch = jetstream.DefaultMaxMessages

func fetch(create create) runFunc {
	return func(ctx context.Context, l *loop) error {
		cons, err := create(ctx, l)
		if err != nil {
			return err
		}
		for {
			batch, err := cons.Fetch(fetchBatch)
			if err != nil {
				return err
			}
			for msg := range batch.Messages() {
				if more, err := l.take(msg); !more {
					return err
				}
			}
			if err := batch.Error(); err != nil {
				return err
			}
		}
	}
}

// take is what a reader of package jetstream does with a message.
func (l *loop) take(msg jetstream.Msg) (more bool, err error) {
	more = l.hit(msg.Data())
	if l.ack {
		if err := msg.Ack(); err != nil {
			return false, err
		}
	}
	if more {
		return true, nil
	}
	meta, err := msg.Metadata()
	if err != nil {
		return false, err
	}
	return false, l.finish(meta.Sequence.Stream)
}
