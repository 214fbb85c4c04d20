package paced_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

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
