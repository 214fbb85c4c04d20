package paced

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// proxied is a server on a real socket, a proxy in front of it and a client
// through the proxy; another client goes around it.
type proxied struct {
	*rig  // around
	proxy *faultproxy.Proxy
	nc    *nats.Conn
	js    jetstream.JetStream
}

func newProxied(t *testing.T, opts ...nats.Option) *proxied {
	t.Helper()
	srv := testserver.New(t, testserver.Options{Listen: true})
	around := srv.Connect(t)
	ajs, _ := jetstream.New(around)
	proxy, err := faultproxy.New(srv.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	nc := testserver.Connect(t, proxy.URL(), append([]nats.Option{quietly()}, opts...)...)
	js, _ := jetstream.New(nc)
	return &proxied{rig: &rig{T: t, srv: srv, nc: around, js: ajs}, proxy: proxy, nc: nc, js: js}
}

// A cancelled loop yields its error before it touches the connection, whatever
// the server does; with nats.go's lock held through a dial that is the
// difference between 10 ms and seconds.
func TestExitOnMuteAndDeadServer(t *testing.T) {
	for _, tc := range []struct {
		name  string
		harm  func(*proxied)
		total time.Duration // until the range is over
	}{
		{"healthy", func(*proxied) {}, exitTime + 10*time.Millisecond},
		{"mute", func(p *proxied) { p.proxy.Mute(faultproxy.ToClient); p.proxy.Mute(faultproxy.ToServer) }, exitTime + 10*time.Millisecond},
		{"dead", func(p *proxied) { p.proxy.Blackhole(); p.proxy.Disconnect() }, 10 * time.Millisecond},
	} {
		for _, where := range []string{"parked", "in the body"} {
			t.Run(tc.name+" "+where, func(t *testing.T) {
				// The best of five: a busy machine delays any of them, a call
				// that waits for the connection delays all.
				best, bestTotal := time.Hour, time.Hour
				for range 5 {
					p := newProxied(t, nats.Timeout(time.Second))
					p.stream(jetstream.StreamConfig{})
					p.publish("s.a", 3)
					ctx, cancel := context.WithCancel(t.Context())
					down := p.nc.StatusChanged(nats.RECONNECTING)
					var cancelled time.Time
					stop := func() {
						tc.harm(p)
						if tc.name == "dead" {
							<-down
							time.Sleep(20 * time.Millisecond) // nats.go is dialling
						}
						cancelled = time.Now()
						cancel()
					}
					n := 0
					var toError time.Duration
					for _, err := range Ordered(ctx, p.js, OrderedConfig{Stream: "S"}) {
						if err != nil {
							toError = time.Since(cancelled)
							if !errors.Is(err, context.Canceled) {
								t.Fatal(err)
							}
							continue
						}
						if n++; n == 3 {
							if where == "parked" {
								go stop()
							} else {
								stop()
							}
						}
					}
					best = min(best, toError)
					bestTotal = min(bestTotal, time.Since(cancelled))
					p.proxy.Restore()
					p.proxy.Unmute(faultproxy.ToClient)
					p.proxy.Unmute(faultproxy.ToServer)
					p.nc.Close()
				}
				if best > 10*time.Millisecond || bestTotal > tc.total {
					t.Errorf("error after %v, over after %v; want 10ms and %v", best, bestTotal, tc.total)
				}
			})
		}
	}
}

// A closed connection without reconnects ends the range, also one that is
// parked while nobody answers.
func TestConnectionGivenUp(t *testing.T) {
	srv := testserver.New(t, testserver.Options{Listen: true})
	nc := srv.Connect(t, nats.MaxReconnects(0), quietly())
	js, _ := jetstream.New(nc)
	r := &rig{T: t, srv: srv, nc: nc, js: js}
	r.stream(jetstream.StreamConfig{})
	r.publish("s.a", 1)
	var last error
	for _, err := range Ordered(t.Context(), js, OrderedConfig{Stream: "S"}) {
		if last = err; err == nil {
			go srv.Stop()
		}
	}
	if !errors.Is(last, nats.ErrConnectionClosed) {
		t.Errorf("got %v", last)
	}
}

// drain reads the stream with loops at once on one connection, until all have
// read it or ctx is done, and returns how many messages came.
func drainAll(t *testing.T, ctx context.Context, js jetstream.JetStream, loops, messages int) int {
	t.Helper()
	var wg sync.WaitGroup
	var mu sync.Mutex
	total := 0
	for range loops {
		wg.Go(func() {
			n := uint64(0)
			for m, err := range Ordered(ctx, js, OrderedConfig{Stream: "S", UntilCaughtUp: true}) {
				if err != nil {
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Error(err)
					}
					break
				}
				if n++; m.Sequence() != n {
					t.Errorf("sequence %d, want %d", m.Sequence(), n)
				}
			}
			if n != uint64(messages) && ctx.Err() == nil {
				t.Errorf("%d messages, want %d", n, messages)
			}
			mu.Lock()
			total += int(n)
			mu.Unlock()
		})
	}
	wg.Wait()
	return total
}

func (r *rig) store(n, size int) {
	r.Helper()
	payload := bytes.Repeat([]byte("x"), size)
	for range n {
		if _, err := r.js.Publish(r.Context(), "s.a", payload); err != nil {
			r.Fatal(err)
		}
	}
}

func wantUncut(t *testing.T, s *server.Server, nc *nats.Conn) {
	t.Helper()
	if n := s.NumSlowConsumers(); n != 0 {
		t.Errorf("%d slow consumers on the server", n)
	}
	if n := nc.Stats().Reconnects; n != 0 {
		t.Errorf("%d reconnects", n)
	}
}

// A thousand loops ask for 64 KiB messages on one connection: 64 MiB if each
// asked for one, and the server cuts at 64 MiB. The budget keeps them under it.
func TestThousandLoopsOfLargeMessages(t *testing.T) {
	srv := testserver.New(t, testserver.Options{Listen: true})
	nc := srv.Connect(t)
	js, _ := jetstream.New(nc)
	r := &rig{T: t, srv: srv, nc: nc, js: js}
	r.stream(jetstream.StreamConfig{Storage: jetstream.MemoryStorage})
	r.store(5, 64<<10)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if n := drainAll(t, ctx, js, 1000, 5); n != 5000 {
		t.Errorf("%d messages", n)
	}
	wantUncut(t, srv.Server(), nc)
}

// Twenty loops share a link of 1 MiB/s for longer than the server's write
// deadline of 10 s: what is asked for must fit what the link carries.
func TestSlowLink(t *testing.T) {
	p := newProxied(t)
	p.stream(jetstream.StreamConfig{Storage: jetstream.MemoryStorage})
	p.store(200, 16<<10)
	p.proxy.Throttle(faultproxy.ToClient, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	n := drainAll(t, ctx, p.js, 20, 200)
	if n == 0 {
		t.Error("nothing arrived")
	}
	wantUncut(t, p.srv.Server(), p.nc)
	t.Logf("%d messages of 16 KiB in 20 s; the link carries 1280", n)
}
