// Warmup warms caches from a KV bucket: many watchers on one connection, each
// of which reads the whole bucket, and a loop body that takes its time.
//
// Without arguments it starts a NATS server of its own in a temporary
// directory and fills a bucket of 1500 keys of 12 KiB, which eight watchers
// read; it takes about two seconds. With -compare, the stock watcher of package
// jetstream reads the same bucket afterwards. Server, package paced and the
// stock watcher then have a process each, so that their heaps do not mix:
//
//	go run ./examples/warmup -compare -watchers 20 -keys 18000 -cost 0
//
// With -url it works on a server of yours. The bucket, -bucket, is made and
// filled, and deleted at the end. If it exists it is only read, whatever -keys
// and -size say, and stays; nobody should delete keys meanwhile.
//
// The exit code is 1 unless each watcher of package paced saw every key, in
// strict revision order.
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

	"github.com/pacedgo/paced/internal/testserver"
)

func main() {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(child(role))
	}
	var l load
	flag.StringVar(&l.URL, "url", "", "use this server instead of one of our own")
	flag.StringVar(&l.Bucket, "bucket", "PACED_WARMUP", "the bucket; it is deleted at the end unless it existed")
	flag.IntVar(&l.Watchers, "watchers", 8, "watchers, all on one connection")
	flag.IntVar(&l.Keys, "keys", 1500, "keys in the bucket")
	flag.IntVar(&l.Size, "size", 12<<10, "bytes in a value")
	flag.DurationVar(&l.Cost, "cost", 200*time.Microsecond, "what the loop body sleeps over each entry")
	flag.DurationVar(&l.Timeout, "timeout", 3*time.Minute, "when a side is given up")
	compare := flag.Bool("compare", false, "let the stock WatchAll read the same bucket, in a process of its own")
	flag.Parse()
	if flag.NArg() > 0 || l.Watchers < 1 || l.Keys < 1 || l.Size < 0 || l.Cost < 0 || l.Timeout <= 0 {
		fmt.Fprintln(os.Stderr, "warmup: flags that make no sense")
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	context.AfterFunc(ctx, stop) // a second interrupt ends the process at once

	var err error
	if *compare {
		err = runBoth(ctx, os.Stdout, l)
	} else {
		err = runPaced(ctx, os.Stdout, l)
	}
	if ctx.Err() != nil {
		fmt.Println("interrupted")
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "warmup:", err)
		os.Exit(1)
	}
}

// load is what there is to do. It travels to the child processes.
type load struct {
	URL, Bucket          string
	Watchers, Keys, Size int
	Cost, Timeout        time.Duration
	Foreign              bool // the bucket is somebody else's: its keys and values are not known
}

// runPaced runs the load in this process.
func runPaced(ctx context.Context, out io.Writer, l load) error {
	slow := func() (int, error) { return unknown, nil }
	own := l.URL == ""
	if own {
		srv, err := testserver.Run(testserver.Options{Listen: true})
		if err != nil {
			return err
		}
		defer srv.Close()
		l.URL = srv.ClientURL()
		slow = func() (int, error) { return int(srv.Server().NumSlowConsumers()), nil }
	}
	remove, err := l.prepare(ctx, out)
	if err != nil {
		return err
	}
	defer remove()
	r, err := l.run(ctx, out, "paced")
	if err != nil {
		return err
	}
	if r.ServerSlow, err = slow(); err != nil {
		return err
	}
	table(out, r)
	if own {
		fmt.Fprintln(out, "\nThe heap is that of client and server together; -compare separates them.")
	}
	return r.err()
}

// prepare makes and fills the bucket if it does not exist. remove deletes what
// was made.
func (l *load) prepare(ctx context.Context, out io.Writer) (remove func(), err error) {
	nc, err := nats.Connect(l.URL, nats.Name("paced warmup"))
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(512))
	if err != nil {
		return nil, err
	}
	start := time.Now()
	kv, err := js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: l.Bucket})
	if errors.Is(err, jetstream.ErrBucketExists) {
		l.Foreign = true
		fmt.Fprintf(out, "bucket %s exists and is only read\n", l.Bucket)
		return func() {}, nil
	}
	if err != nil {
		return nil, err
	}
	remove = func() {
		// Also when interrupted, and whatever happened to the connection.
		nc, err := nats.Connect(l.URL, nats.Name("paced warmup"))
		if err == nil {
			defer nc.Close()
			if js, err = jetstream.New(nc); err == nil {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				defer cancel()
				err = js.DeleteKeyValue(ctx, l.Bucket)
			}
		}
		if err != nil {
			fmt.Fprintf(out, "bucket %s is left: %v\n", l.Bucket, err)
		}
	}
	if err := l.fill(ctx, js); err != nil {
		remove()
		return nil, err
	}
	status, err := kv.Status(ctx)
	if err != nil {
		remove()
		return nil, err
	}
	fmt.Fprintf(out, "bucket %s: %d keys of %d bytes, %d MB, filled in %.1fs\n",
		l.Bucket, l.Keys, l.Size, status.Bytes()/1e6, time.Since(start).Seconds())
	return remove, nil
}

// fill puts every key once.
func (l *load) fill(ctx context.Context, js jetstream.JetStream) error {
	value := make([]byte, l.Size)
	acks := make([]jetstream.PubAckFuture, 0, l.Keys)
	for i := range l.Keys {
		k := key(i)
		fillValue(value, k)
		ack, err := js.PublishAsync("$KV."+l.Bucket+"."+k, value, jetstream.WithStallWait(10*time.Second))
		if err != nil {
			return err
		}
		acks = append(acks, ack)
	}
	for _, ack := range acks {
		select {
		case <-ack.Ok():
		case err := <-ack.Err():
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func key(i int) string { return fmt.Sprintf("shelf.%d.item.%d", i%97, i) }

// fillValue writes the key over and over.
func fillValue(value []byte, key string) {
	for n := 0; n < len(value); {
		n += copy(value[n:], key)
	}
}

// table prints the results side by side, and with two of them how many times
// the second is the first.
func table(out io.Writer, results ...result) {
	line := func(name string, cell func(result) string, value func(result) float64) {
		fmt.Fprintf(out, "%-14s", name)
		for _, r := range results {
			fmt.Fprintf(out, "%16s", cell(r))
		}
		if len(results) == 2 && value != nil && value(results[0]) > 0 {
			more := ""
			if !results[1].Finished {
				more = "over "
			}
			fmt.Fprintf(out, "%16s", fmt.Sprintf("%s%.1fx", more, value(results[1])/value(results[0])))
		}
		fmt.Fprintln(out)
	}
	number := func(f func(result) int) func(result) string {
		return func(r result) string {
			if n := f(r); n != unknown {
				return fmt.Sprint(n)
			}
			return "-"
		}
	}
	fmt.Fprintln(out)
	line("", func(r result) string { return r.Side }, nil)
	line("time", func(r result) string {
		if !r.Finished {
			return "did not finish"
		}
		return fmt.Sprintf("%.2f s", r.Took.Seconds())
	}, func(r result) float64 { return r.Took.Seconds() })
	line("peak heap", func(r result) string { return fmt.Sprintf("%.1f MB", float64(r.Heap)/1e6) },
		func(r result) float64 { return float64(r.Heap) })
	line("entries", number(func(r result) int { return r.Entries }), nil)
	line("rebuilds", number(func(r result) int { return r.Rebuilds }), nil)
	line("drops", number(func(r result) int { return r.Drops }), nil)
	line("slow consumers", number(func(r result) int { return r.ServerSlow }), nil)
	line("reconnects", number(func(r result) int { return r.Reconnects }), nil)
	line("complete", func(r result) string {
		if r.complete() {
			return "yes"
		}
		return fmt.Sprintf("%d of %d", r.Complete, r.Watchers)
	}, nil)
	fmt.Fprintln(out, "\nDrops are the client's slow-consumer errors, slow consumers those that the server counts.")
	for _, r := range results {
		for _, text := range r.Trouble {
			fmt.Fprintf(out, "%s: %s\n", r.Side, text)
		}
	}
}
