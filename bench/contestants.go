package main

import (
	"context"
	"errors"
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
func floor(ctx context.Context, k *client) error {
	cons, err := k.js.CreateConsumer(ctx, streamName, jetstream.ConsumerConfig{
		AckPolicy:     jetstream.AckNonePolicy,
		MemoryStorage: true,
	})
	if err != nil {
		return err
	}
	defer func() { _ = k.js.DeleteConsumer(ctx, streamName, cons.CachedInfo().Name) }()
	inbox := k.nc.NewInbox()
	ch := make(chan *nats.Msg, k.n+1)
	sub, err := k.nc.ChanSubscribe(inbox, ch)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	pull := fmt.Sprintf(`{"batch":%d,"expires":%d}`, k.n, 60*time.Second)
	subject := "$JS.API.CONSUMER.MSG.NEXT." + streamName + "." + cons.CachedInfo().Name
	if err := k.nc.PublishRequest(subject, inbox, []byte(pull)); err != nil {
		return err
	}
	for m := range ch {
		if m.Reply == "" {
			return fmt.Errorf("status %s", m.Header.Get("Status"))
		}
		if !k.meter.hit() {
			k.dropped, _ = sub.Dropped()
			meta, err := m.Metadata()
			if err != nil {
				return err
			}
			return k.inOrder(meta.Sequence.Stream)
		}
	}
	return nil
}

func pacedOrdered(ctx context.Context, k *client) error {
	cfg := paced.OrderedConfig{
		Stream: streamName,
		Listener: &paced.Listener{
			Resubscribing: func(reason error, _ int, _ time.Duration) {
				k.rebuilds++
				fmt.Fprintln(os.Stderr, "rebuild:", reason)
			},
		},
	}
	for msg, err := range paced.Ordered(ctx, k.js, cfg) {
		if err != nil {
			return err
		}
		if !k.meter.hit() {
			return k.inOrder(msg.Sequence())
		}
	}
	return nil
}

func orderedMessages(ctx context.Context, k *client) error {
	cons, err := k.js.OrderedConsumer(ctx, streamName, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return err
	}
	it, err := cons.Messages()
	if err != nil {
		return err
	}
	defer it.Stop()
	for {
		msg, err := it.Next()
		if err != nil {
			return err
		}
		if !k.meter.hit() {
			return k.last(msg)
		}
	}
}

func orderedConsume(ctx context.Context, k *client) error {
	cons, err := k.js.OrderedConsumer(ctx, streamName, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	over := false
	cc, err := cons.Consume(func(msg jetstream.Msg) {
		if !over && !k.meter.hit() {
			over = true // it goes on calling until it is stopped
			done <- k.last(msg)
		}
	})
	if err != nil {
		return err
	}
	defer cc.Stop()
	return <-done
}

// last looks at the last message of a jetstream reader. The consumer's name
// ends in the number of times it was made anew.
func (k *client) last(msg jetstream.Msg) error {
	meta, err := msg.Metadata()
	if err != nil {
		return err
	}
	var serial int
	if _, err := fmt.Sscanf(meta.Consumer[lastUnderscore(meta.Consumer)+1:], "%d", &serial); err == nil {
		k.rebuilds = serial - 1
	}
	return k.inOrder(meta.Sequence.Stream)
}

func lastUnderscore(s string) int {
	for i := len(s) - 1; i >= 0; i-- {
		if s[i] == '_' {
			return i
		}
	}
	return -1
}

// inOrder checks what can be checked without a cost for each message: as many
// messages as the last one's sequence says.
func (k *client) inOrder(sequence uint64) error {
	if sequence != uint64(k.meter.seen) {
		return errors.New("messages are missing or came twice: " +
			fmt.Sprintf("%d came, the last has sequence %d", k.meter.seen, sequence))
	}
	return nil
}
