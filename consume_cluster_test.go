package paced

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

// On a replicated consumer the status that ends a pull overtakes the data
// (nats-server consumer.go:5834). With byte bounds every pull ends in such a
// status; no message may be left behind it, to come again after AckWait. Nor may
// one be lost when the consumer's leader steps down in the middle.
func TestConsumeReplicated(t *testing.T) {
	c := testserver.NewCluster(t, nil)
	nc := testserver.Connect(t, c.URL(), quietly())
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 90*time.Second, errors.New("the cluster did not get there"))
	defer cancel()
	for {
		_, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Replicas: 3})
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) // there is no event for a cluster that is ready
	}
	const n = 600
	for i := range n {
		if _, err := js.Publish(ctx, "s.a", make([]byte, 100+i%7*300)); err != nil {
			t.Fatal(err)
		}
	}
	for _, stepDown := range []bool{false, true} {
		cfg := worker(jetstream.ConsumerConfig{Durable: fmt.Sprint("w", stepDown), AckWait: 60 * time.Second})
		cfg.MaxBytes, cfg.MaxMessages, cfg.UntilEmpty = 8_000, 50, !stepDown
		if stepDown {
			cfg.Consumer.AckWait = 2 * time.Second // what the old leader sent may be with nobody
		}
		cfg.Tuning.Heartbeat = 5 * time.Second // what is owed is waited for twice as long: the machine may be busy
		got := map[uint64]int{}
		start, stepped := time.Now(), false
		for m, err := range Consume(ctx, js, cfg) {
			if err != nil {
				t.Fatal(err)
			}
			got[m.Sequence()]++
			if err := m.Ack(); err != nil {
				t.Error(err)
			}
			if stepDown && len(got) == 200 && !stepped {
				stepped = true
				if err := testserver.StepDownConsumer(nc, "S", cfg.Consumer.Durable); err != nil {
					t.Error(err)
				}
			}
			if !stepDown && m.NumDelivered() > 1 {
				t.Errorf("sequence %d delivered %d times", m.Sequence(), m.NumDelivered())
			}
			if len(got) == n {
				break
			}
		}
		if len(got) != n {
			t.Errorf("step down %v: %d messages in %v", stepDown, len(got), time.Since(start))
		}
	}
}

// With a leafnode listener the server trusts an inbox for two seconds after its
// subscription has gone, and delivers to it over and over. Left with a young
// pull that owes, a loop keeps listening for so long: no message loses more
// than the one attempt of being handed back.
func TestConsumeBesideALeafnodeListener(t *testing.T) {
	srv := testserver.New(t, testserver.Options{Listen: true, Configure: func(o *server.Options) {
		o.LeafNode.Host, o.LeafNode.Port = "127.0.0.1", server.RANDOM_PORT
	}})
	nc := srv.Connect(t)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		t.Fatal(err)
	}
	publish := func(n int) {
		for range n {
			if _, err := js.Publish(ctx, "s.a", nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	publish(100)
	handed := make(chan int, 1)
	cfg := worker(jetstream.ConsumerConfig{})
	cfg.Listener = &Listener{HandedBack: func(n int) { handed <- n }}
	// All 100 are handled: the pull that is open then owes.
	n := 0
	for m, err := range Consume(ctx, js, cfg) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 100 {
			publish(20) // they are on the way to a loop that is left
			break
		}
		if err := m.Ack(); err != nil {
			t.Error(err)
		}
	}
	left := time.Now()
	publish(20)
	if got := <-handed; got == 0 || time.Since(left) < time.Second || time.Since(left) > 3*time.Second {
		t.Errorf("%d handed back after %v", got, time.Since(left))
	}
	cfg.Listener, cfg.UntilEmpty = nil, true
	got := map[uint64]bool{}
	for m, err := range Consume(ctx, js, cfg) {
		if err != nil {
			t.Fatal(err)
		}
		got[m.Sequence()] = true
		if m.NumDelivered() > 2 {
			t.Errorf("sequence %d delivered %d times", m.Sequence(), m.NumDelivered())
		}
		if err := m.Ack(); err != nil {
			t.Error(err)
		}
	}
	if len(got) != 40 {
		t.Errorf("%d messages, want 40 besides the one in hand", len(got))
	}
}

// Messages much larger than what fits into the buffer by count: none waits so
// long that it is delivered twice, and the connection is not cut.
func TestConsumeLargeMessages(t *testing.T) {
	r := newRig(t, "")
	r.stream(jetstream.StreamConfig{Storage: jetstream.FileStorage})
	r.store(1000, 256<<10)
	start, bodies, most := time.Now(), 0, uint64(0)
	for m, err := range Consume(t.Context(), r.js, worker(jetstream.ConsumerConfig{})) {
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Millisecond) // the body
		bodies++
		most = max(most, m.NumDelivered())
		ack(t, m)
		if bodies == 1000 {
			break
		}
	}
	if most != 1 || r.nc.Stats().Reconnects != 0 {
		t.Errorf("delivered up to %d times, %d reconnects", most, r.nc.Stats().Reconnects)
	}
	t.Logf("%d bodies in %v", bodies, time.Since(start))
}
