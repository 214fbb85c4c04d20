package faultproxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// wrapped returns the two ends of a connection with faults between them.
func wrapped(t *testing.T, f *Faults) (client, server net.Conn) {
	t.Helper()
	server, inner := net.Pipe()
	client, err := f.Wrap(inner)
	if err != nil {
		t.Fatal(err)
	}
	// Faults of time start after the handshake.
	go io.WriteString(server, "PONG\r\n")
	if _, err := io.ReadFull(client, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		client.Close()
		server.Close()
	})
	return client, server
}

func write(t *testing.T, c net.Conn, data string) {
	t.Helper()
	if _, err := io.WriteString(c, data); err != nil {
		t.Fatal(err)
	}
}

// lines returns a func that reads one line, "" if none comes within a second.
func lines(t *testing.T, c net.Conn) func() string {
	r := bufio.NewReader(c)
	return func() string {
		t.Helper()
		c.SetReadDeadline(time.Now().Add(time.Second))
		line, _ := r.ReadString('\n')
		return strings.TrimSpace(line)
	}
}

func msg(subject string) string { return "MSG " + subject + " 1 0\r\n\r\n" }

func TestFilter(t *testing.T) {
	onB := func(a Action) Filter {
		return First(1, func(f Frame) bool { return f.Subject == "b" }, a)
	}
	all := msg("a") + msg("b") + msg("c") + msg("b")
	tests := []struct {
		name   string
		filter Filter
		want   string
	}{
		{"none", nil, "a b c b"},
		{"drop", onB(Drop), "a c b"},
		{"hold", onB(Hold), "a c b released b"},
		{"delay", onB(After(500 * time.Millisecond)), "a c b b"},
		{"last", onB(Last), "a b EOF"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var f Faults
				f.SetFilter(tt.filter)
				client, server := wrapped(t, &f)
				write(t, server, all)

				var got []string
				r := bufio.NewReader(client)
				read := func() error {
					client.SetReadDeadline(time.Now().Add(time.Second))
					for {
						line, err := r.ReadString('\n')
						if err != nil {
							return err
						}
						if args := strings.Fields(line); len(args) > 1 {
							got = append(got, args[1])
						}
					}
				}
				if read() == io.EOF {
					got = append(got, "EOF")
				}
				n := len(got)
				f.Release()
				if read(); len(got) > n {
					got = append(got[:n], append([]string{"released"}, got[n:]...)...)
				}
				if s := strings.Join(got, " "); s != tt.want {
					t.Errorf("got %q, want %q", s, tt.want)
				}
			})
		})
	}
}

func TestMute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f Faults
		client, server := wrapped(t, &f)
		line := lines(t, client)

		f.Mute(ToClient)
		write(t, server, "PING\r\n")
		if got := line(); got != "" {
			t.Errorf("got %q while muted", got)
		}
		f.Unmute(ToClient)
		if got := line(); got != "PING" {
			t.Errorf("got %q after unmute", got)
		}

		f.Mute(ToClient)
		write(t, server, "PING\r\n")
		synctest.Wait()
		f.Discard(ToClient)
		f.Unmute(ToClient)
		write(t, server, "PONG\r\n")
		if got := line(); got != "PONG" {
			t.Errorf("got %q after discard", got)
		}
		if s := f.Stats(ToClient); s.Frames != 4 || s.Bytes != 24 || s.Dropped != 1 {
			t.Errorf("stats %+v", s)
		}

		// Even the end of the connection is muted.
		f.Mute(ToClient)
		server.Close()
		client.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := client.Read(make([]byte, 1)); err == io.EOF {
			t.Error("saw the end of the connection while muted")
		}
		f.Unmute(ToClient)
		client.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := client.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("got %v after unmute, want EOF", err)
		}
	})
}

func TestDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f Faults
		client, server := wrapped(t, &f)
		line := lines(t, client)
		f.Delay(ToClient, 70*time.Millisecond)
		start := time.Now()
		write(t, server, "PING\r\n")
		synctest.Wait()
		f.Delay(ToClient, 0)
		write(t, server, "PONG\r\n")
		for _, want := range []string{"PING", "PONG"} {
			if got := line(); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			if d := time.Since(start); d != 70*time.Millisecond {
				t.Errorf("%s after %v", want, d)
			}
		}
	})
}

func TestThrottle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f Faults
		client, server := wrapped(t, &f)
		f.Throttle(ToServer, 1000)
		start := time.Now()
		go io.WriteString(client, "PUB a 9986\r\n"+strings.Repeat("x", 9986)+"\r\n")
		if _, err := io.ReadFull(server, make([]byte, 10000)); err != nil {
			t.Fatal(err)
		}
		// The last piece is not followed by a wait.
		if d := time.Since(start).Round(100 * time.Millisecond); d != 10*time.Second {
			t.Errorf("10000 bytes at 1000 bytes/s took %v", d)
		}
	})
}

func TestOpaque(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f Faults
		client, server := wrapped(t, &f)
		f.SetFilter(func(Frame) Action { return Drop })
		line := lines(t, client)
		write(t, server, "PING\r\nHTTP/1.1 400\r\nPING\r\n")
		if got := line() + "|" + line() + "|" + line(); got != "HTTP/1.1 400|PING|" {
			t.Errorf("got %q", got)
		}
		if s := f.Stats(ToClient); s.Frames != 2 || s.Opaque != 1 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestWrapCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f Faults
		client, server := wrapped(t, &f)
		f.Cut()
		for _, c := range []net.Conn{client, server} {
			if _, err := c.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("read after cut: %v, want EOF", err)
			}
		}
		a, b := net.Pipe()
		if _, err := f.Wrap(a); err == nil {
			t.Error("wrap succeeds while cut")
		}
		if _, err := b.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("refused server connection: %v, want EOF", err)
		}
		f.Restore()
		wrapped(t, &f)
	})
}

func TestProxy(t *testing.T) {
	target := listen(t, func(c net.Conn) { io.Copy(c, c) })
	p, err := New(target)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	// dial returns nil if the connection is already reset.
	dial := func() net.Conn {
		c, err := net.Dial("tcp", p.Addr())
		if err != nil {
			return nil
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	echo := func(c net.Conn, within time.Duration) bool {
		if c == nil {
			return false
		}
		io.WriteString(c, "PING\r\n")
		c.SetReadDeadline(time.Now().Add(within))
		_, err := io.ReadFull(c, make([]byte, 6))
		return err == nil
	}
	const long, short = 10 * time.Second, 50 * time.Millisecond

	c := dial()
	if !echo(c, long) {
		t.Error("no echo through the proxy")
	}
	p.Cut()
	if echo(c, long) || echo(dial(), long) || p.Conns() != 0 {
		t.Error("echo while cut")
	}
	p.Restore()
	c = dial()
	if !echo(c, long) {
		t.Error("no echo after restore")
	}
	p.Blackhole()
	lost := dial()
	if !echo(c, long) || echo(lost, short) {
		t.Error("a black hole must take new connections only")
	}
	p.Restore()
	if echo(lost, short) || !echo(dial(), long) {
		t.Error("restore must only help new connections")
	}
	p.Close()
	if echo(c, long) {
		t.Error("echo after close")
	}
}

func listen(tb testing.TB, serve func(net.Conn)) string {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
	return l.Addr().String()
}

func BenchmarkProxy(b *testing.B) {
	frame := "MSG subject.of.a.message 17 128\r\n" + strings.Repeat("x", 128) + "\r\n"
	block := []byte(strings.Repeat(frame, 200))
	pass := func(Frame) Action { return Pass }
	for _, bb := range []struct {
		name   string
		start  func(string) (*Proxy, error)
		delay  time.Duration
		filter Filter
	}{
		{"raw", NewRaw, 0, nil},
		{"raw+delay", NewRaw, 20 * time.Millisecond, nil},
		{"frames", New, 0, nil},
		{"frames+filter", New, 0, pass},
	} {
		b.Run(bb.name, func(b *testing.B) {
			p, err := bb.start(listen(b, func(c net.Conn) {
				for {
					if _, err := c.Write(block); err != nil {
						return
					}
				}
			}))
			if err != nil {
				b.Fatal(err)
			}
			defer p.Close()
			p.Delay(ToClient, bb.delay)
			p.SetFilter(bb.filter)
			c, err := net.Dial("tcp", p.Addr())
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			b.SetBytes(int64(len(block)))
			buf := make([]byte, len(block))
			for b.Loop() {
				if _, err := io.ReadFull(c, buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func ExampleFaults_SetFilter() {
	p, err := New("nats://127.0.0.1:4222")
	if err != nil {
		panic(err)
	}
	defer p.Close()
	// The first two "408 Request Timeout" never reach the client.
	p.SetFilter(First(2, func(f Frame) bool { return f.Status() == 408 }, Drop))
	fmt.Println(p.Conns())
	// Output: 0
}
