package testserver_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

func TestRestartOnSamePort(t *testing.T) {
	s := testserver.New(t, testserver.Options{Listen: true})
	url := s.ClientURL()
	nc := s.Connect(t)
	js := must(jetstream.New(nc))(t)
	stream := must(js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}))(t)
	publish(t, js, "one")

	disconnected, reconnected := nc.StatusChanged(nats.RECONNECTING), nc.StatusChanged(nats.CONNECTED)
	s.Stop()
	receive(t, disconnected)
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	receive(t, reconnected)
	if s.ClientURL() != url {
		t.Errorf("url changed from %s to %s", url, s.ClientURL())
	}
	publish(t, js, "two")
	if info := must(stream.Info(t.Context()))(t); info.State.Msgs != 2 {
		t.Errorf("stream has %d messages after restart, want 2", info.State.Msgs)
	}
}

func TestConfigure(t *testing.T) {
	s := testserver.New(t, testserver.Options{
		Listen:    true,
		Configure: func(o *server.Options) { o.MaxPayload = 1000 },
	})
	if got := s.Connect(t).MaxPayload(); got != 1000 {
		t.Errorf("max payload %d, want 1000", got)
	}
}

func TestThroughProxy(t *testing.T) {
	s := testserver.New(t, testserver.Options{Listen: true})
	p := must(faultproxy.New(s.ClientURL()))(t)
	t.Cleanup(p.Close)
	nc := testserver.Connect(t, p.URL())
	js := must(jetstream.New(nc))(t)
	stream := must(js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}))(t)
	must(stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "C"}))(t)

	// The statuses of two pulls on an empty stream, of which the first is
	// swallowed.
	p.SetFilter(faultproxy.First(1, func(f faultproxy.Frame) bool { return f.Status() == 404 }, faultproxy.Drop))
	sub := must(nc.SubscribeSync(nc.NewInbox()))(t)
	for i := range 2 {
		request := fmt.Sprintf(`{"batch":%d,"no_wait":true}`, i+1)
		if err := nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.S.C", sub.Subject, []byte(request)); err != nil {
			t.Fatal(err)
		}
	}
	m := must(sub.NextMsg(10 * time.Second))(t)
	if got := m.Header.Get("Status"); got != "404" {
		t.Errorf("got status %q, want 404", got)
	}
	flush(t, nc)
	if n, _, err := sub.Pending(); n != 0 || err != nil {
		t.Errorf("%d statuses more than expected, %v", n, err)
	}

	publish(t, js, "one")
	for _, d := range []faultproxy.Direction{faultproxy.ToServer, faultproxy.ToClient} {
		if st := p.Stats(d); st.Frames == 0 || st.Opaque != 0 {
			t.Errorf("%v: %+v", d, st)
		}
	}

	disconnected, reconnected := nc.StatusChanged(nats.RECONNECTING), nc.StatusChanged(nats.CONNECTED)
	p.Cut()
	receive(t, disconnected)
	p.Restore()
	receive(t, reconnected)
	publish(t, js, "two")
}

func TestLeafnode(t *testing.T) {
	var hubOptions *server.Options
	testserver.New(t, testserver.Options{Listen: true, Configure: func(o *server.Options) {
		o.JetStreamDomain = "hub"
		o.LeafNode.Host, o.LeafNode.Port = "127.0.0.1", server.RANDOM_PORT
		hubOptions = o // the server writes the port it got into its options
	}})
	leaf := testserver.New(t, testserver.Options{Listen: true, Configure: func(o *server.Options) {
		o.JetStreamDomain = "leaf"
		remote := fmt.Sprintf("nats://127.0.0.1:%d", hubOptions.LeafNode.Port)
		o.LeafNode.Remotes = []*server.RemoteLeafOpts{{URLs: server.RoutesFromStr(remote)}}
	}})
	nc := leaf.Connect(t)
	js := must(jetstream.NewWithDomain(nc, "hub"))(t)
	// The leaf learns what the hub listens to a moment after it connected, and
	// tells nobody.
	for start := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		_, err := js.AccountInfo(t.Context())
		if err == nil {
			break
		}
		if time.Since(start) > 10*time.Second {
			t.Fatal(err)
		}
	}
	must(js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}))(t)
	publish(t, js, "one")
}

func TestCluster(t *testing.T) {
	c := testserver.NewCluster(t, nil)
	nc := testserver.Connect(t, c.URL())
	js := must(jetstream.New(nc))(t)
	stream := must(js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: "S", Subjects: []string{"s.>"}, Replicas: 3,
	}))(t)
	must(stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "C"}))(t)
	publish(t, js, "one")

	c.StreamLeader(t, "S")
	if err := testserver.StepDownStream(nc, "S"); err != nil {
		t.Fatal(err)
	}
	c.StreamLeader(t, "S")
	c.ConsumerLeader(t, "S", "C")
	if err := testserver.StepDownConsumer(nc, "S", "C"); err != nil {
		t.Fatal(err)
	}
	c.ConsumerLeader(t, "S", "C")

	for name, stop := range map[string]func(*testserver.Server){
		"stop":      (*testserver.Server).Stop,
		"lame duck": (*testserver.Server).LameDuck,
	} {
		node := c.StreamLeader(t, "S")
		stop(node)
		if next := c.StreamLeader(t, "S"); next == node {
			t.Errorf("%s: the stopped node leads", name)
		}
		if err := node.Start(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := c.WaitReady("S"); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if _, err := stream.Info(t.Context()); err != nil {
		t.Errorf("after two restarts: %v", err)
	}
}

func receive[T any](t testing.TB, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(30 * time.Second):
		t.Fatal("nothing came within 30 seconds")
		panic("unreachable")
	}
}
