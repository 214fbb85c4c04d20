// Quickstart reads a stream through package paced and shows what happens.
//
// Without arguments it starts a NATS server of its own in a temporary
// directory, fills a stream, and reads it back: first with a slow loop body,
// then with a fast one. In the middle the server is restarted. It takes about
// six seconds.
//
// With -url and -stream it reads a stream of yours:
//
//	go run ./examples/quickstart -url nats://localhost:4222 -stream ORDERS
//
// It only reads: all it makes on the server is a consumer, which it deletes.
// The exit code is 1 when the order was violated or the loop ended with an error.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced"
)

func main() {
	url := flag.String("url", "", "read from this server instead of one of our own")
	stream := flag.String("stream", "", "the stream to read, together with -url")
	live := flag.Bool("live", false, "go on after catching up, until interrupted, together with -url")
	flag.Parse()
	if flag.NArg() > 0 || (*url == "") != (*stream == "") || (*live && *url == "") {
		fmt.Fprintln(os.Stderr, "quickstart: give -url and -stream together, or nothing")
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	context.AfterFunc(ctx, stop) // a second interrupt ends the process at once

	var err error
	if *url != "" {
		err = readYours(ctx, os.Stdout, *url, *stream, *live)
	} else {
		err = demo(ctx, os.Stdout, 200_000, 500)
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		fmt.Println("interrupted")
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// readYours reads a stream of the user's: what is there now, or without end.
func readYours(ctx context.Context, out io.Writer, url, stream string, live bool) error {
	nc, err := nats.Connect(url, nats.Name("paced quickstart"), nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	return read(ctx, js, &reading{
		out:    out,
		stream: stream,
		live:   live,
		work:   func(paced.Msg) error { return nil },
	})
}

// reading is one run of the loop and what is told about it.
type reading struct {
	out    io.Writer
	stream string
	live   bool
	total  int                   // messages expected; 0: not known
	work   func(paced.Msg) error // the loop body's work
	phases []phase
	order  order
}

// phase is a part of the run, and what the loop had come to at its end.
type phase struct {
	name string
	last uint64 // stream sequence of its last message
	at   paced.Stats
}

// read is the loop. Everything but the range is there to show what happens.
func read(ctx context.Context, js jetstream.JetStream, r *reading) error {
	c, err := paced.NewOrderedConsumer(js, paced.OrderedConfig{
		Stream:        r.stream,
		UntilCaughtUp: !r.live,
		Listener: &paced.Listener{
			Subscribed: func(consumer string, generation int) {
				fmt.Fprintf(r.out, "  * reading through consumer %s, number %d\n", consumer, generation)
			},
			Resubscribing: func(reason error, attempt int, delay time.Duration) {
				fmt.Fprintf(r.out, "  * new consumer, attempt %d: %v\n", attempt, reason)
			},
			CaughtUp: func(sequence uint64) {
				fmt.Fprintf(r.out, "  * caught up with sequence %d\n", sequence)
			},
		},
	})
	if err != nil {
		return err
	}

	start := time.Now()
	shown := start
	var ended error
	for msg, err := range c.Messages(ctx) {
		if err != nil {
			ended = err
			break
		}
		if ended = r.order.check(msg.Sequence()); ended != nil {
			break
		}
		if ended = r.work(msg); ended != nil {
			break
		}

		// The rest of the body is only for show.
		for i := range r.phases {
			if p := &r.phases[i]; p.last == msg.Sequence() {
				p.at = c.Stats()
			}
		}
		if now := time.Now(); now.Sub(shown) >= 200*time.Millisecond {
			shown = now
			r.progress(now.Sub(start), c.Stats())
		}
	}
	r.summary(time.Since(start), c.Stats())
	if ended == nil && r.total > 0 && r.order.count != r.total {
		return fmt.Errorf("read %d messages, want %d", r.order.count, r.total)
	}
	return ended
}

func (r *reading) progress(since time.Duration, s paced.Stats) {
	of := ""
	if r.total > 0 {
		of = fmt.Sprintf(" of %d (%d%%)", r.total, 100*r.order.count/r.total)
	}
	fmt.Fprintf(r.out, "%5.1fs  %d%s, sequence %d, asking for %d at a time\n",
		since.Seconds(), r.order.count, of, r.order.last, s.Credit)
}

func (r *reading) summary(took time.Duration, s paced.Stats) {
	fmt.Fprintf(r.out, "\nmessages    %d in %.1fs\n", r.order.count, took.Seconds())
	fmt.Fprintf(r.out, "order       %s\n", &r.order)
	fmt.Fprintf(r.out, "rebuilds    %d\n", s.Rebuilds)
	fmt.Fprintf(r.out, "buffer      at most %d messages waited in this process\n", s.MaxWaiting)
	if len(r.phases) == 0 {
		r.phases = []phase{{name: "at the end", at: s}}
	}
	label := "look-ahead"
	for _, p := range r.phases {
		if p.at.Messages > 0 {
			fmt.Fprintf(r.out, "%-10s  %s: asked for %d at a time, with a body of %v\n",
				label, p.name, p.at.Credit, p.at.BodyTime.Round(100*time.Nanosecond))
			label = ""
		}
	}
}

// order checks that stream sequences strictly increase.
type order struct {
	count     int
	last      uint64
	absent    uint64 // sequences in between that did not come
	violation error
}

func (o *order) check(seq uint64) error {
	if seq <= o.last {
		o.violation = fmt.Errorf("order violated: sequence %d came after %d", seq, o.last)
		return o.violation
	}
	if o.count > 0 {
		o.absent += seq - o.last - 1
	}
	o.count++
	o.last = seq
	return nil
}

func (o *order) String() string {
	switch {
	case o.violation != nil:
		return o.violation.Error()
	case o.absent > 0:
		return fmt.Sprintf("ok: strictly increasing; %d sequences in between were not in the stream", o.absent)
	default:
		return "ok: strictly increasing, none missing"
	}
}
