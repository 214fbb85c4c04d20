// Workers handles a work queue with a pool of goroutines behind one loop.
//
// Without arguments it starts a NATS server of its own in a temporary directory
// and fills a queue. Interrupt it (Ctrl-C) while it runs: it asks for nothing
// more, finishes what it has, and says what it leaves to others. Started again
// with -url it would go on there.
//
//	go run ./examples/workers -jobs 2000 -workers 16 -work 20ms
//	go run ./examples/workers -url nats://localhost:4222 -stream JOBS -consumer mailer
//
// With -url it waits for more jobs until it is interrupted; every message is
// acknowledged after -work, so point it at a stream that may be emptied.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/pacedgo/paced"
	"github.com/pacedgo/paced/internal/testserver"
)

type config struct {
	url, stream, consumer string
	jobs, workers         int
	work                  time.Duration
}

func main() {
	var c config
	flag.StringVar(&c.url, "url", "", "use this server instead of one of our own")
	flag.StringVar(&c.stream, "stream", "JOBS", "the stream to work on")
	flag.StringVar(&c.consumer, "consumer", "workers", "the durable consumer, made if it is missing")
	flag.IntVar(&c.jobs, "jobs", 1000, "jobs to store first, on a server of our own")
	flag.IntVar(&c.workers, "workers", 8, "goroutines that work at the same time")
	flag.DurationVar(&c.work, "work", 20*time.Millisecond, "how long a job takes")
	flag.Parse()

	stopping, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(stopping, stop) // a second interrupt ends the process at once
	if err := run(stopping, os.Stdout, c); err != nil {
		fmt.Fprintln(os.Stderr, "workers:", err)
		os.Exit(1)
	}
}

func run(stopping context.Context, out io.Writer, c config) error {
	ctx := context.Background() // a signal drains; it does not cancel
	own := c.url == ""
	if own {
		srv, err := testserver.Run(testserver.Options{Listen: true})
		if err != nil {
			return err
		}
		defer srv.Close()
		c.url = srv.ClientURL()
	}
	nc, err := nats.Connect(c.url, nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	if own {
		if err := fill(ctx, js, c); err != nil {
			return err
		}
	}

	queue, err := paced.NewConsumer(js, paced.ConsumeConfig{
		Stream:      c.stream,
		Consumer:    jetstream.ConsumerConfig{Durable: c.consumer, AckWait: 30 * time.Second},
		MaxMessages: 4 * c.workers, // waiting and in work together
		ConfirmAcks: true,          // so that what is counted as done is done
		UntilEmpty:  own,
	})
	if err != nil {
		return err
	}
	context.AfterFunc(stopping, queue.Drain)

	var done atomic.Int64
	start := time.Now()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var progress sync.WaitGroup
	working, finished := context.WithCancel(ctx)
	defer finished()
	progress.Go(func() {
		for {
			select {
			case <-tick.C:
				s := queue.Stats()
				fmt.Fprintf(out, "%5.1fs  done %d, unsettled %d, waiting %d\n", time.Since(start).Seconds(), done.Load(), s.Unsettled, s.Waiting)
			case <-working.Done():
				return
			}
		}
	})

	var pool errgroup.Group
	pool.SetLimit(c.workers) // Go blocks while all are busy: the loop is paced by the pool
	for msg, err := range queue.Messages(ctx) {
		if err != nil {
			_ = pool.Wait()
			return err
		}
		pool.Go(func() error {
			time.Sleep(c.work)
			if err := msg.Ack(); err != nil {
				return err
			}
			done.Add(1)
			return nil
		})
	}
	if err := pool.Wait(); err != nil {
		return err
	}
	finished()
	progress.Wait()
	info, err := js.Consumer(ctx, c.stream, c.consumer)
	if errors.Is(err, jetstream.ErrConsumerNotFound) && stopping.Err() != nil {
		fmt.Fprintln(out, "stopped before it began")
		return nil
	}
	if err != nil {
		return err
	}
	left := info.CachedInfo()
	how := "the queue is empty"
	if stopping.Err() != nil {
		how = "stopped"
	}
	fmt.Fprintf(out, "%s after %.1fs: %d done, %d left to others, %d of them in doubt\n",
		how, time.Since(start).Seconds(), done.Load(), left.NumPending+uint64(left.NumAckPending), left.NumAckPending)
	return nil
}

func fill(ctx context.Context, js jetstream.JetStream, c config) error {
	_, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: c.stream, Subjects: []string{c.stream + ".>"}, Retention: jetstream.WorkQueuePolicy})
	if err != nil {
		return err
	}
	for i := range c.jobs {
		if _, err := js.PublishAsync(c.stream+".job", fmt.Append(nil, i)); err != nil {
			return err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
		return nil
	case <-time.After(30 * time.Second):
		return fmt.Errorf("the server did not take %d jobs in 30s", c.jobs)
	}
}
