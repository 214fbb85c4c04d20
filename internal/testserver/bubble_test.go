package testserver_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

func TestBubble(t *testing.T) {
	for _, storage := range []jetstream.StorageType{jetstream.MemoryStorage, jetstream.FileStorage} {
		t.Run(storage.String(), func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) { smoke(t, storage) })
		})
	}
}

// smoke shows that fake time moves while a pull consumer is open, and that the
// consumer goes on after an outage.
func smoke(t *testing.T, storage jetstream.StorageType) {
	s := testserver.New(t, testserver.Options{})
	nc := s.Connect(t)
	js := must(jetstream.New(nc))(t)
	setUp := func() jetstream.Consumer {
		stream := must(js.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{
			Name: "S", Subjects: []string{"s.>"}, Storage: storage,
		}))(t)
		return must(stream.CreateOrUpdateConsumer(t.Context(), jetstream.ConsumerConfig{
			Durable: "C", AckPolicy: jetstream.AckExplicitPolicy,
		}))(t)
	}
	got := make(chan string, 10)
	cc := must(setUp().Consume(func(m jetstream.Msg) {
		got <- string(m.Data())
		m.Ack()
	}, jetstream.ConsumeErrHandler(func(jetstream.ConsumeContext, error) {})))(t)
	t.Cleanup(func() {
		cc.Stop()
		<-cc.Closed()
	})

	publish(t, js, "one")
	want(t, got, "one")

	start := time.Now()
	time.Sleep(time.Hour)
	if d := time.Since(start); d != time.Hour {
		t.Errorf("slept %v of fake time", d)
	}
	publish(t, js, "two")
	want(t, got, "two")

	reconnected := nc.StatusChanged(nats.CONNECTED)
	s.Stop()
	time.Sleep(90 * time.Second)
	if nc.IsConnected() {
		t.Error("connected to a stopped server")
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	<-reconnected
	if storage == jetstream.MemoryStorage {
		setUp()
	}
	publish(t, js, "three")
	want(t, got, "three")
}

func TestBubbleFaults(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		s := testserver.New(t, testserver.Options{})
		nc := s.Connect(t)
		sub := must(nc.SubscribeSync("s.>"))(t)
		flush(t, nc)
		next := func() string {
			t.Helper()
			m, err := sub.NextMsg(time.Second)
			if errors.Is(err, nats.ErrTimeout) {
				return ""
			}
			if err != nil {
				t.Fatal(err)
			}
			return string(m.Data)
		}
		send := func(data string) {
			t.Helper()
			if err := nc.Publish("s.x", []byte(data)); err != nil {
				t.Fatal(err)
			}
			nc.Flush()
		}

		// One frame swallowed.
		s.SetFilter(faultproxy.First(1, func(f faultproxy.Frame) bool {
			return f.Verb == "MSG" && string(f.Payload) == "b"
		}, faultproxy.Drop))
		for _, data := range []string{"a", "b", "b", "c"} {
			send(data)
		}
		if got := next() + next() + next(); got != "abc" {
			t.Errorf("got %q with the first b dropped", got)
		}
		s.SetFilter(nil)

		// Muted: nothing arrives and nothing fails.
		s.Mute(faultproxy.ToClient)
		if err := nc.Publish("s.x", []byte("late")); err != nil {
			t.Fatal(err)
		}
		if got := next(); got != "" || !nc.IsConnected() {
			t.Errorf("got %q while muted, connected %v", got, nc.IsConnected())
		}
		s.Unmute(faultproxy.ToClient)
		if got := next(); got != "late" {
			t.Errorf("got %q after unmute", got)
		}

		// Latency, to the exact instant.
		s.Delay(faultproxy.ToClient, 30*time.Millisecond)
		start := time.Now()
		send("x")
		if d := time.Since(start); d != 30*time.Millisecond {
			t.Errorf("a flush took %v with 30ms of latency", d)
		}
		if got := next(); got != "x" {
			t.Errorf("got %q", got)
		}
		s.Delay(faultproxy.ToClient, 0)

		// Only the connection goes; the server stays.
		srv := s.Server()
		reconnected := nc.StatusChanged(nats.CONNECTED)
		s.Disconnect()
		<-reconnected
		flush(t, nc)
		send("again")
		if got := next(); got != "again" || s.Server() != srv {
			t.Errorf("got %q after disconnect, same server %v", got, s.Server() == srv)
		}

		s.Cut()
		time.Sleep(time.Minute)
		if nc.IsConnected() {
			t.Error("connected while cut")
		}
		reconnected = nc.StatusChanged(nats.CONNECTED)
		s.Restore()
		<-reconnected
		send("restored")
		if got := next(); got != "restored" {
			t.Errorf("got %q after restore", got)
		}
	})
}

// A long silence: nats.go takes the connection for stale, and asks for a new
// one again and again while others wait for its lock to publish. The clock must
// go on.
func TestBubbleSilence(t *testing.T) {
	for _, dirs := range [][]faultproxy.Direction{
		{faultproxy.ToClient},
		{faultproxy.ToServer},
		{faultproxy.ToClient, faultproxy.ToServer},
	} {
		testserver.InBubble(t, func(t *testing.T) {
			s := testserver.New(t, testserver.Options{})
			nc := s.Connect(t, nats.ReconnectWait(time.Second), nats.PingInterval(10*time.Second))
			js := must(jetstream.New(nc))(t)
			stream := must(js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}))(t)
			cons := must(stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "C"}))(t)
			got := make(chan string, 10)
			cc := must(cons.Consume(func(m jetstream.Msg) {
				got <- string(m.Data())
				m.Ack()
			}, jetstream.ConsumeErrHandler(func(jetstream.ConsumeContext, error) {})))(t)
			t.Cleanup(func() {
				cc.Stop()
				<-cc.Closed()
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				for ctx.Err() == nil {
					nc.Publish("other", nil)
					time.Sleep(25 * time.Millisecond)
				}
			}()

			for _, d := range dirs {
				s.Mute(d)
			}
			time.Sleep(2 * time.Minute)
			if nc.IsConnected() {
				t.Errorf("still connected after two minutes muted %v", dirs)
			}
			reconnected := nc.StatusChanged(nats.CONNECTED)
			for _, d := range dirs {
				s.Delay(d, 20*time.Millisecond)
				s.Unmute(d)
			}
			<-reconnected
			publish(t, js, "one")
			want(t, got, "one")

			// End the test in silence, too.
			for _, d := range dirs {
				s.Mute(d)
			}
		})
	}
}

// A cleanup of the test in the bubble runs in the bubble: its timers are fake.
func TestBubbleCleanup(t *testing.T) {
	start := time.Now()
	testserver.InBubble(t, func(t *testing.T) {
		t.Cleanup(func() {
			time.Sleep(time.Hour)
			synctest.Wait()
		})
	})
	if time.Since(start) > time.Minute {
		t.Error("cleanup ran on real time")
	}
}

// What nats.go keeps of a bubble is not found outside of it.
func TestAfterBubble(t *testing.T) {
	s := testserver.New(t, testserver.Options{})
	for range 20 { // the pool is one per processor
		testserver.InBubble(t, func(t *testing.T) {
			nc := testserver.New(t, testserver.Options{}).Connect(t)
			for range 50 {
				if err := nc.Flush(); err != nil {
					t.Error(err)
				}
			}
		})
		nc := s.Connect(t)
		for range 50 {
			if err := nc.Flush(); err != nil {
				t.Error(err)
			}
		}
	}
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func publish(t testing.TB, js jetstream.JetStream, data string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := js.Publish(ctx, "s.x", []byte(data)); err != nil {
		t.Fatal(err)
	}
}

func want(t testing.TB, got <-chan string, data string) {
	t.Helper()
	select {
	case g := <-got:
		if g != data {
			t.Fatalf("got %q, want %q", g, data)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%q did not arrive", data)
	}
}

func flush(t testing.TB, nc *nats.Conn) {
	t.Helper()
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
}
