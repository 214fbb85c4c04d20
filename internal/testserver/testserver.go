// Package testserver runs nats-server inside the process of a test, example or
// benchmark: one server without sockets, also in a testing/synctest bubble, one
// server on loopback, or a cluster of three.
package testserver

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats-server/v2/server/ats"
	"github.com/nats-io/nats.go"

	"github.com/pacedgo/paced/internal/faultproxy"
)

var registerOnce sync.Once

// Register starts the server's access-time goroutine outside of any bubble,
// once per process. Started by a server within a bubble, it would wait on a
// package-level channel (nats-server server/ats/ats.go:33, 52), and fake time
// would stand still. [InBubble] calls it; so may TestMain.
func Register() { registerOnce.Do(ats.Register) }

// emptyTimers empties the timer pool of nats.go (timer.go:22), a sync.Pool that
// survives one collection: a timer made in one bubble is fatal in the next, and
// outside of any.
func emptyTimers() {
	runtime.GC()
	runtime.GC()
}

// InBubble runs f in a bubble that is fit for servers and clients. A test that
// uses it must not run in parallel with other users of nats.go, because their
// timers fill the pool again.
func InBubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	Register()
	emptyTimers()
	defer emptyTimers()
	synctest.Test(t, f)
}

// Options configure a [Server]. The zero value is a server with JetStream that
// has no socket.
type Options struct {
	// Listen makes the server accept TCP connections on a free port of
	// 127.0.0.1, the same one after each Start.
	Listen bool

	// Dir is where streams are kept from Stop to Start. By default it is a new
	// temporary directory, removed by Close.
	Dir string

	// Configure changes the server options, for example accounts, permissions,
	// MaxPayload or a leafnode listener. It is called at every Start with new
	// options, and should not reuse accounts from the call before.
	Configure func(*server.Options)
}

// A Server is a nats-server that can be stopped and started again.
//
// It is also the nats.InProcessConnProvider of its clients. The embedded Faults
// act on connections made that way, also across Start and Stop. For TCP
// connections put a [faultproxy.Proxy] in front of ClientURL.
type Server struct {
	faultproxy.Faults

	opts    Options
	tempDir bool
	port    int
	srv     atomic.Pointer[server.Server] // nil while stopped
}

// Run starts a server. The caller has to close it.
func Run(o Options) (*Server, error) {
	s := &Server{opts: o, port: server.RANDOM_PORT}
	if o.Dir == "" {
		dir, err := os.MkdirTemp("", "paced-testserver-")
		if err != nil {
			return nil, err
		}
		s.opts.Dir, s.tempDir = dir, true
	}
	if err := s.Start(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// New is [Run] for tests: it fails the test on error, and closes the server
// when the test ends. In a bubble that happens inside the bubble.
func New(t testing.TB, o Options) *Server {
	t.Helper()
	s, err := Run(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// Start starts a stopped server on the same directory and port.
func (s *Server) Start() error {
	if s.srv.Load() != nil {
		return errors.New("testserver: already started")
	}
	o := &server.Options{
		Host:       "127.0.0.1",
		Port:       s.port,
		DontListen: !s.opts.Listen,
		JetStream:  true,
		StoreDir:   s.opts.Dir,
		NoSigs:     true,
		NoLog:      true,

		LameDuckGracePeriod: 200 * time.Millisecond,
		LameDuckDuration:    time.Second,
	}
	if s.opts.Configure != nil {
		s.opts.Configure(o)
	}
	if s.port > 0 {
		o.Port = s.port
	}
	srv, err := server.NewServer(o)
	if err != nil {
		return err
	}
	srv.Start()
	if !srv.ReadyForConnections(30 * time.Second) {
		srv.Shutdown()
		srv.WaitForShutdown()
		return errors.New("testserver: server does not become ready")
	}
	if a, ok := srv.Addr().(*net.TCPAddr); ok {
		s.port = a.Port
	}
	s.srv.Store(srv)
	return nil
}

// Stop shuts the server down and returns when it is gone. Its clients see the
// end of their connection, and every attempt to connect fails until Start.
func (s *Server) Stop() { s.stop((*server.Server).Shutdown) }

// LameDuck announces the shutdown to all clients, hands over leaderships, closes
// the clients one by one, and returns when the server is gone: after 0.2 to 3
// seconds. A server that does not listen knows no lame duck mode (nats-server
// server/server.go:4480); it just stops.
func (s *Server) LameDuck() {
	if s.opts.Listen {
		s.stop((*server.Server).LameDuckShutdown)
	} else {
		s.Stop()
	}
}

func (s *Server) stop(shutdown func(*server.Server)) {
	if srv := s.srv.Swap(nil); srv != nil {
		shutdown(srv)
		srv.WaitForShutdown()
	}
}

// Close stops the server, cuts its in-process connections, and removes the
// directory if Run made it.
func (s *Server) Close() {
	s.Stop()
	s.Cut()
	if s.tempDir {
		os.RemoveAll(s.opts.Dir)
	}
}

// Server returns the nats-server, nil while stopped.
func (s *Server) Server() *server.Server { return s.srv.Load() }

// InProcessConn connects to the server of this moment, through the faults.
func (s *Server) InProcessConn() (net.Conn, error) {
	srv := s.srv.Load()
	if srv == nil {
		return nil, errors.New("testserver: server is stopped")
	}
	c, err := srv.InProcessConn()
	if err != nil {
		return nil, err
	}
	return s.Wrap(c)
}

// ClientURL returns the address for TCP clients, also while stopped. It is ""
// without Options.Listen.
func (s *Server) ClientURL() string {
	if !s.opts.Listen {
		return ""
	}
	return fmt.Sprintf("nats://127.0.0.1:%d", s.port)
}

// Dial connects a client, over TCP if the server listens and in process if
// not. It reconnects every 10 ms, without jitter and without end; later
// options override that.
func (s *Server) Dial(opts ...nats.Option) (*nats.Conn, error) {
	if !s.opts.Listen {
		opts = append([]nats.Option{nats.InProcessServer(s)}, opts...)
	}
	return Dial(s.ClientURL(), opts...)
}

// Connect is [Server.Dial] for tests: it fails the test on error, and closes
// the client when the test ends.
func (s *Server) Connect(t testing.TB, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := s.Dial(opts...)
	return connected(t, nc, err)
}

// Dial connects a client to url with the reconnect options of [Server.Dial],
// for example through a proxy.
func Dial(url string, opts ...nats.Option) (*nats.Conn, error) {
	all := []nats.Option{
		nats.MaxReconnects(-1),
		nats.ReconnectWait(10 * time.Millisecond),
		nats.ReconnectJitter(0, 0),
	}
	return nats.Connect(cmp.Or(url, nats.DefaultURL), append(all, opts...)...)
}

// Connect is [Dial] for tests: it fails the test on error, and closes the
// client when the test ends.
func Connect(t testing.TB, url string, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := Dial(url, opts...)
	return connected(t, nc, err)
}

func connected(t testing.TB, nc *nats.Conn, err error) *nats.Conn {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}
