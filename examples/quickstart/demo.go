package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced"
	"github.com/pacedgo/paced/internal/testserver"
)

// demo runs against a server of its own. The stream gets total messages; the
// body sleeps over the first slow of them.
func demo(ctx context.Context, out io.Writer, total, slow int) error {
	out = &lockedWriter{w: out} // the restart tells of itself
	dir, err := os.MkdirTemp("", "paced-quickstart-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	srv, err := testserver.Run(testserver.Options{Listen: true, Dir: dir})
	if err != nil {
		return err
	}
	defer srv.Close()
	// The listener tells what went wrong; without a handler nats.go prints it
	// as well.
	nc, err := srv.Dial(nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "server at %s, files in %s\n", srv.ClientURL(), dir)
	if err := fill(ctx, out, js, total); err != nil {
		return err
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var restarted sync.WaitGroup
	defer restarted.Wait()
	restart := func() {
		fmt.Fprintln(out, "  * the server stops")
		srv.Stop()
		restarted.Go(func() {
			time.Sleep(300 * time.Millisecond)
			if err := srv.Start(); err != nil {
				cancel(err) // ends the loop
				return
			}
			fmt.Fprintln(out, "  * the server is back")
		})
	}
	return read(ctx, js, &reading{
		out:    out,
		stream: "DEMO",
		total:  total,
		phases: []phase{
			{name: "slow body", last: uint64(slow)},
			{name: "fast body", last: uint64(total / 2)},
			{name: "after the restart", last: uint64(total)},
		},
		work: func(msg paced.Msg) error {
			// The payload says which message it is: the order is checked twice.
			n := int(msg.Sequence())
			if want := payload(n); string(msg.Data()) != want {
				return fmt.Errorf("sequence %d holds %q, want %q", n, msg.Data(), want)
			}
			switch {
			case n <= slow:
				time.Sleep(4 * time.Millisecond)
				if n == slow {
					fmt.Fprintln(out, "  * from here on the body does not sleep")
				}
			case n == total/2:
				restart()
			}
			return nil
		},
	})
}

// fill makes the stream DEMO with n messages.
func fill(ctx context.Context, out io.Writer, js jetstream.JetStream, n int) error {
	_, err := js.CreateStream(ctx, jetstream.StreamConfig{
		Name:     "DEMO",
		Subjects: []string{"demo.>"},
		Storage:  jetstream.FileStorage,
	})
	if err != nil {
		return err
	}
	start := time.Now()
	for i := 1; i <= n; i++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		_, err := js.PublishAsync(fmt.Sprintf("demo.%d", i%10), []byte(payload(i)),
			jetstream.WithStallWait(10*time.Second))
		if err != nil {
			return err
		}
		if i%(n/5) == 0 {
			fmt.Fprintf(out, "%5.1fs  filling the stream: %d of %d\n", time.Since(start).Seconds(), i, n)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return ctx.Err()
	}
	s, err := js.Stream(ctx, "DEMO")
	if err != nil {
		return err
	}
	if stored := s.CachedInfo().State.Msgs; stored != uint64(n) {
		return fmt.Errorf("the stream holds %d messages, want %d", stored, n)
	}
	return nil
}

func payload(i int) string { return fmt.Sprintf("message %0120d", i) }

type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
