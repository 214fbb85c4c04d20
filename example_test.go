package paced_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/pacedgo/paced"
	"github.com/pacedgo/paced/internal/testserver"
)

// orders starts a server with a stream ORDERS that holds the orders 1 to n,
// alternately from the subjects orders.eu and orders.us. Your own program
// connects to its server instead:
//
//	nc, err := nats.Connect(url)
//	js, err := jetstream.New(nc)
func orders(n int) (js jetstream.JetStream, stop func()) {
	must := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	dir, err := os.MkdirTemp("", "paced-example-")
	must(err)
	srv, err := testserver.Run(testserver.Options{Dir: dir})
	must(err)
	// By default nats.go prints what the loop repairs.
	nc, err := srv.Dial(nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	must(err)
	js, err = jetstream.New(nc)
	must(err)
	_, err = js.CreateStream(context.Background(), jetstream.StreamConfig{
		Name:     "ORDERS",
		Subjects: []string{"orders.>"},
	})
	must(err)
	publish(js, 1, n)
	return js, func() {
		nc.Close()
		srv.Close()
		os.RemoveAll(dir)
	}
}

// publish stores the orders from to to.
func publish(js jetstream.JetStream, from, to int) {
	for i := from; i <= to; i++ {
		subject := "orders.us"
		if i%2 == 1 {
			subject = "orders.eu"
		}
		if _, err := js.Publish(context.Background(), subject, fmt.Appendf(nil, "order %d", i)); err != nil {
			log.Fatal(err)
		}
	}
}

// Read everything that is there, then stop.
func ExampleOrdered() {
	js, stop := orders(3)
	defer stop()
	ctx := context.Background()

	for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{
		Stream:        "ORDERS",
		UntilCaughtUp: true,
	}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%d %s %s\n", msg.Sequence(), msg.Subject(), msg.Data())
	}
	// Output:
	// 1 orders.eu order 1
	// 2 orders.us order 2
	// 3 orders.eu order 3
}

// Follow a stream: first what is there, then what is published later. Without
// an end the sequence goes on until the body leaves it.
func ExampleOrdered_live() {
	js, stop := orders(2)
	defer stop()
	ctx := context.Background()

	for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{Stream: "ORDERS"}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s, was there: %v\n", msg.Data(), msg.Replay())
		if msg.Sequence() == 2 {
			publish(js, 3, 4)
		}
		if msg.Sequence() == 4 {
			break
		}
	}
	// Output:
	// order 1, was there: true
	// order 2, was there: true
	// order 3, was there: false
	// order 4, was there: false
}

// Start at a stream sequence.
func ExampleOrdered_startSequence() {
	js, stop := orders(5)
	defer stop()
	ctx := context.Background()

	for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{
		Stream:        "ORDERS",
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:   4,
		UntilCaughtUp: true,
	}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s\n", msg.Data())
	}
	// Output:
	// order 4
	// order 5
}

// Read only some subjects.
func ExampleOrdered_filter() {
	js, stop := orders(5)
	defer stop()
	ctx := context.Background()

	for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{
		Stream:         "ORDERS",
		FilterSubjects: []string{"orders.eu"},
		UntilCaughtUp:  true,
	}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%d %s\n", msg.Sequence(), msg.Subject())
	}
	// Output:
	// 1 orders.eu
	// 3 orders.eu
	// 5 orders.eu
}

// Read a range of sequences. UntilSeq ends the loop also where nothing has
// that sequence, once the server has looked past it.
func ExampleOrdered_untilSequence() {
	js, stop := orders(5)
	defer stop()
	ctx := context.Background()

	for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{
		Stream:         "ORDERS",
		FilterSubjects: []string{"orders.eu"},
		DeliverPolicy:  jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:    2,
		UntilSeq:       4, // an order from orders.us
	}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s\n", msg.Data())
	}
	fmt.Println("done")
	// Output:
	// order 3
	// done
}

// Stop from outside. The last pair of the loop is an error that holds the
// cause, so that a stopped loop is not mistaken for a finished one.
func ExampleOrdered_cancel() {
	js, stop := orders(3)
	defer stop()

	errMaintenance := errors.New("maintenance")
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)

	for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{Stream: "ORDERS"}) {
		if err != nil {
			fmt.Println("canceled:", errors.Is(err, context.Canceled))
			fmt.Println("for maintenance:", errors.Is(err, errMaintenance))
			return
		}
		fmt.Printf("%s\n", msg.Data())
		if msg.Sequence() == 2 {
			cancel(errMaintenance) // from any goroutine
		}
	}
	// Output:
	// order 1
	// order 2
	// canceled: true
	// for maintenance: true
}

// Pull one message at a time, where a loop does not fit.
func ExampleOrdered_pull() {
	js, stop := orders(3)
	defer stop()
	ctx := context.Background()

	next, end := iter.Pull2(paced.Ordered(ctx, js, paced.OrderedConfig{Stream: "ORDERS"}))
	defer end()
	for range 2 {
		msg, err, ok := next()
		if err != nil || !ok {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s\n", msg.Data())
	}
	// Output:
	// order 1
	// order 2
}

// A wrong configuration is the only pair, and nothing is created.
func ExampleOrdered_badConfig() {
	js, stop := orders(0)
	defer stop()
	ctx := context.Background()

	for _, err := range paced.Ordered(ctx, js, paced.OrderedConfig{Stream: "ORDERS", MaxBytes: -1}) {
		var bad *paced.ConfigError
		if errors.As(err, &bad) {
			fmt.Println(bad.Field, bad.Value)
		}
	}
	// Output:
	// OrderedConfig.MaxBytes -1
}

// Read the backlog, do something, and go on where it ended.
func ExampleOrderedConsumer() {
	js, stop := orders(2)
	defer stop()
	ctx := context.Background()

	c, err := paced.NewOrderedConsumer(js, paced.OrderedConfig{Stream: "ORDERS"})
	if err != nil {
		fmt.Println(err)
		return
	}
	for msg, err := range c.Backlog(ctx) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("backlog: %s\n", msg.Data())
	}
	fmt.Println("ready to serve")

	publish(js, 3, 4)
	for msg, err := range c.Messages(ctx) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("live: %s\n", msg.Data())
		if msg.Sequence() == 3 {
			break // the handle keeps the position
		}
	}
	for msg, err := range c.Messages(ctx) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("after the break: %s\n", msg.Data())
		break
	}
	// Output:
	// backlog: order 1
	// backlog: order 2
	// ready to serve
	// live: order 3
	// after the break: order 4
}

// See how a loop is doing. Stats may be called from any goroutine.
func ExampleOrderedConsumer_Stats() {
	js, stop := orders(100)
	defer stop()
	ctx := context.Background()

	c, err := paced.NewOrderedConsumer(js, paced.OrderedConfig{Stream: "ORDERS"})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, err := range c.Backlog(ctx) {
		if err != nil {
			fmt.Println(err)
			return
		}
	}
	s := c.Stats()
	fmt.Println("messages:", s.Messages)
	fmt.Println("last sequence:", s.Sequence)
	fmt.Println("caught up:", s.CaughtUp)
	fmt.Println("rebuilds:", s.Rebuilds)
	fmt.Println("still asked for:", s.Outstanding)
	// Output:
	// messages: 100
	// last sequence: 100
	// caught up: true
	// rebuilds: 0
	// still asked for: 0
}

// See what the loop repairs. Here somebody deletes its consumer on the server;
// the body does not notice.
func ExampleListener() {
	js, stop := orders(3)
	defer stop()
	ctx := context.Background()

	var consumer string
	listener := &paced.Listener{
		Subscribed: func(name string, generation int) {
			consumer = name
			fmt.Println("consumer number", generation)
		},
		Resubscribing: func(reason error, attempt int, delay time.Duration) {
			// reason is what the server said.
			fmt.Println("making a new one, attempt", attempt)
		},
	}
	for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{Stream: "ORDERS", Listener: listener}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s\n", msg.Data())
		if msg.Sequence() == 3 {
			if err := js.DeleteConsumer(ctx, "ORDERS", consumer); err != nil {
				fmt.Println(err)
				return
			}
			publish(js, 4, 4)
		}
		if msg.Sequence() == 4 {
			break
		}
	}
	// Output:
	// consumer number 1
	// order 1
	// order 2
	// order 3
	// making a new one, attempt 1
	// consumer number 2
	// order 4
}

// Keep the position in the transaction that holds the effect: whatever fails,
// an order counts exactly once. Here the database is a struct in memory.
func ExampleOrderedConfig_after() {
	js, stop := orders(6)
	defer stop()
	ctx := context.Background()

	var db struct {
		total    int
		position paced.Position
	}
	process := func(until int) error {
		for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{
			Stream:        "ORDERS",
			After:         db.position, // zero the first time
			UntilCaughtUp: true,
		}) {
			if err != nil {
				return err
			}
			// One transaction in a real database.
			db.total += len(msg.Data())
			db.position = msg.Position()
			if db.position.Sequence == uint64(until) {
				return errors.New("the process dies here")
			}
		}
		return nil
	}
	fmt.Println(process(4))
	fmt.Println(process(0))
	fmt.Println(db.total, "bytes of orders up to", db.position.Sequence)
	// Output:
	// the process dies here
	// <nil>
	// 42 bytes of orders up to 6
}

// The last message of every subject, then every update.
func ExampleOrdered_lastPerSubject() {
	js, stop := orders(5)
	defer stop()

	for msg, err := range paced.Ordered(context.Background(), js, paced.OrderedConfig{
		Stream:        "ORDERS",
		DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy,
		UntilCaughtUp: true,
	}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s: %s\n", msg.Subject(), msg.Data())
	}
	// Output:
	// orders.us: order 4
	// orders.eu: order 5
}

// prices starts a server with a bucket.
func prices(js jetstream.JetStream) jetstream.KeyValue {
	kv, err := js.CreateKeyValue(context.Background(), jetstream.KeyValueConfig{Bucket: "PRICES", History: 5})
	if err != nil {
		log.Fatal(err)
	}
	for _, p := range []string{"apple=1", "pear=2", "apple=3", "plum=4"} {
		key, value, _ := strings.Cut(p, "=")
		if _, err := kv.PutString(context.Background(), key, value); err != nil {
			log.Fatal(err)
		}
	}
	if err := kv.Delete(context.Background(), "plum"); err != nil {
		log.Fatal(err)
	}
	return kv
}

// Warm a cache, say ready, follow: two plain loops.
func ExampleWatcher() {
	js, stop := orders(0)
	defer stop()
	kv := prices(js)
	ctx := context.Background()

	w, err := paced.NewWatcher(js, paced.WatchConfig{Bucket: "PRICES", IgnoreDeletes: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	cache := map[string]string{}
	for e, err := range w.Snapshot(ctx) {
		if err != nil {
			fmt.Println(err)
			return
		}
		cache[e.Key()] = string(e.Value())
	}
	fmt.Println("ready:", cache)

	_, _ = kv.PutString(ctx, "pear", "7")
	for e, err := range w.Updates(ctx) {
		if err != nil {
			fmt.Println(err)
			return
		}
		cache[e.Key()] = string(e.Value())
		break
	}
	fmt.Println("then: ", cache)
	// Output:
	// ready: map[apple:3 pear:2]
	// then:  map[apple:3 pear:7]
}

// The keys of a bucket: all of them, or an error.
func ExampleKeys() {
	js, stop := orders(0)
	defer stop()
	prices(js)

	for key, err := range paced.Keys(context.Background(), js, "PRICES") {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(key)
	}
	// Output:
	// pear
	// apple
}

// Every revision that is kept, markers too.
func ExampleHistory() {
	js, stop := orders(0)
	defer stop()
	prices(js)

	for e, err := range paced.History(context.Background(), js, "PRICES", "apple", "plum") {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(e.Revision(), e.Key(), e.Operation(), string(e.Value()))
	}
	// Output:
	// 1 apple KeyValuePutOp 1
	// 3 apple KeyValuePutOp 3
	// 4 plum KeyValuePutOp 4
	// 5 plum KeyValueDeleteOp
}

// Work on a queue: settle each message.
func ExampleConsume() {
	js, stop := orders(4)
	defer stop()
	ctx := context.Background()

	for msg, err := range paced.Consume(ctx, js, paced.ConsumeConfig{
		Stream:     "ORDERS",
		Consumer:   jetstream.ConsumerConfig{Durable: "billing"},
		UntilEmpty: true, // without it the loop waits for more
	}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		if msg.Sequence() == 2 && msg.NumDelivered() == 1 {
			fmt.Printf("%s: not now\n", msg.Data())
			_ = msg.Nak()
			continue
		}
		fmt.Printf("%s, attempt %d\n", msg.Data(), msg.NumDelivered())
		if err := msg.Ack(); err != nil {
			fmt.Println(err)
		}
	}
	// Unordered output:
	// order 1, attempt 1
	// order 2: not now
	// order 3, attempt 1
	// order 4, attempt 1
	// order 2, attempt 2
}

// Hand the messages to goroutines: MaxMessages bounds what they have, and what
// waits for them, together.
func ExampleConsume_workers() {
	js, stop := orders(100)
	defer stop()
	ctx := context.Background()

	var pool errgroup.Group
	pool.SetLimit(8)
	var done atomic.Int64
	for msg, err := range paced.Consume(ctx, js, paced.ConsumeConfig{
		Stream:      "ORDERS",
		Consumer:    jetstream.ConsumerConfig{Durable: "billing"},
		MaxMessages: 20,
		UntilEmpty:  true,
	}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		pool.Go(func() error { // waits while all are busy
			done.Add(1)
			return msg.Ack()
		})
	}
	fmt.Println(pool.Wait(), done.Load())
	// Output: <nil> 100
}

// Stop gracefully: what has arrived is handled, nothing more is asked for, and
// no message loses an attempt.
func ExampleConsumer_Drain() {
	js, stop := orders(100)
	defer stop()
	ctx := context.Background()
	signalled, signal := context.WithCancel(ctx) // or signal.NotifyContext
	defer signal()

	c, err := paced.NewConsumer(js, paced.ConsumeConfig{
		Stream:   "ORDERS",
		Consumer: jetstream.ConsumerConfig{Durable: "billing", MaxDeliver: 1},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	context.AfterFunc(signalled, c.Drain)

	n := 0
	for msg, err := range c.Messages(ctx) { // not the context of the signal
		if err != nil {
			fmt.Println(err)
			return
		}
		if n++; n == 10 {
			signal()
		}
		if err := msg.DoubleAck(ctx); err != nil {
			fmt.Println(err)
		}
	}
	info, err := js.Consumer(ctx, "ORDERS", "billing")
	if err != nil {
		fmt.Println(err)
		return
	}
	left := info.CachedInfo()
	fmt.Printf("all handled or still there: %v, in doubt: %d\n", n+int(left.NumPending) == 100, left.NumAckPending)
	// Output: all handled or still there: true, in doubt: 0
}

// Write rows in batches, and look at the clock when there are none.
func ExampleConsumer_Batches() {
	js, stop := orders(25)
	defer stop()
	ctx := context.Background()

	c, err := paced.NewConsumer(js, paced.ConsumeConfig{
		Stream:   "ORDERS",
		Consumer: jetstream.ConsumerConfig{Durable: "archive"},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for batch, err := range c.Batches(ctx, 10, 200*time.Millisecond) {
		if err != nil {
			fmt.Println(err)
			return
		}
		if len(batch) == 0 {
			fmt.Println("nothing for a while")
			break
		}
		fmt.Println(len(batch), "rows")
		for _, msg := range batch {
			_ = msg.Ack()
		}
	}
	// Output:
	// 10 rows
	// 10 rows
	// 5 rows
	// nothing for a while
}
