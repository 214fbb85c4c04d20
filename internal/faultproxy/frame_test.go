package faultproxy

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	tests := []struct {
		wire string
		want Frame
	}{
		{"INFO {\"a\":1}\r\n", Frame{Verb: "INFO", Payload: []byte(`{"a":1}`)}},
		{"connect {} \r\n", Frame{Verb: "CONNECT", Payload: []byte("{}")}},
		{"PING\r\n", Frame{Verb: "PING"}},
		{"pong\n", Frame{Verb: "PONG"}},
		{"+ok\r\n", Frame{Verb: "+OK"}},
		{"-ERR 'Stale Connection'\r\n", Frame{Verb: "-ERR", Payload: []byte("'Stale Connection'")}},
		{"SUB a.* 7\r\n", Frame{Verb: "SUB", Subject: "a.*", SID: "7"}},
		{"Sub a.* \t q  7\r\n", Frame{Verb: "SUB", Subject: "a.*", Queue: "q", SID: "7"}},
		{"UNSUB 7\r\n", Frame{Verb: "UNSUB", SID: "7"}},
		{"UNSUB 7 5\r\n", Frame{Verb: "UNSUB", SID: "7", Payload: []byte("5")}},
		{"PUB a 0\r\n\r\n", Frame{Verb: "PUB", Subject: "a"}},
		{"PUB a b 3\r\n\r\nx\r\n", Frame{Verb: "PUB", Subject: "a", Reply: "b", Payload: []byte("\r\nx")}},
		{"MSG a 1 2\r\nhi\r\n", Frame{Verb: "MSG", Subject: "a", SID: "1", Payload: []byte("hi")}},
		{"msg a 1 b 2\r\nhi\r\n", Frame{Verb: "MSG", Subject: "a", SID: "1", Reply: "b", Payload: []byte("hi")}},
		{"HPUB a b 12 14\r\nNATS/1.0\r\n\r\nhi\r\n", Frame{
			Verb: "HPUB", Subject: "a", Reply: "b", Header: []byte("NATS/1.0\r\n\r\n"), Payload: []byte("hi"),
		}},
		{"HMSG a 1 16 16\r\nNATS/1.0 408\r\n\r\n\r\n", Frame{
			Verb: "HMSG", Subject: "a", SID: "1", Header: []byte("NATS/1.0 408\r\n\r\n"),
		}},
	}
	for _, tt := range tests {
		got, n, err := parse(ToServer, []byte(tt.wire))
		if err != nil || n != len(tt.wire) {
			t.Errorf("parse(%q) = %d, %v", tt.wire, n, err)
		}
		if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", tt.want) {
			t.Errorf("parse(%q) = %q, want %q", tt.wire, got, tt.want)
		}
		for i := range len(tt.wire) {
			if _, n, err := parse(ToServer, []byte(tt.wire[:i])); n != 0 || err != nil {
				t.Errorf("parse(%q) = %d, %v, want it to wait for more", tt.wire[:i], n, err)
			}
		}
	}
}

func TestParseRejects(t *testing.T) {
	for _, wire := range []string{
		"\r\n", " PING\r\n", "GET / HTTP/1.1\r\n", "\x16\x03\x01", "PINGS\r\n",
		"SUB\r\n", "SUB a\r\n", "SUB a b c d\r\n", "UNSUB\r\n", "UNSUB 1 2 3\r\n",
		"PUB a\r\n", "PUB a -1\r\n", "PUB a x\r\n", "PUB a 99999999999\r\n", "PUB a b c 1\r\n",
		"PUB a 1\r\nxyz", "MSG a 1\r\n", "HPUB a 5 4\r\nabcd\r\n", "HMSG a 1 2\r\n",
		"INFO " + strings.Repeat("x", maxLine) + "\r\n",
	} {
		if _, n, err := parse(ToServer, []byte(wire)); err == nil {
			t.Errorf("parse(%.20q) = %d, want an error", wire, n)
		}
	}
}

func TestStatus(t *testing.T) {
	for header, want := range map[string]int{
		"":                             0,
		"NATS/1.0\r\n\r\n":             0,
		"NATS/1.0\r\nA: 1 404\r\n\r\n": 0,
		"NATS/1.0 503\r\n\r\n":         503,
		"NATS/1.0 100 Idle Heartbeat\r\nA: b\r\n": 100,
	} {
		if got := (Frame{Header: []byte(header)}).Status(); got != want {
			t.Errorf("status of %q = %d, want %d", header, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("INFO {}\r\nMSG a 1 2\r\nhi\r\nHMSG a 1 r 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPING\r\n"), uint8(3))
	f.Add([]byte("CONNECT {}\r\nSUB a q 1\r\nUNSUB 1\r\nPUB a 1\r\nx\r\nhpub a 12 12\r\nNATS/1.0\r\n\r\n\r\n"), uint8(1))
	f.Add([]byte("+OK\r\n-ERR 'x'\r\ngarbage\r\nPING\r\n"), uint8(2))
	f.Fuzz(func(t *testing.T, wire []byte, size uint8) {
		whole, got := pumped(wire, len(wire)+1)
		if !bytes.Equal(got, wire) {
			t.Fatalf("in one piece, %q came out as %q", wire, got)
		}
		pieces, got := pumped(wire, int(size)+1)
		if !bytes.Equal(got, wire) {
			t.Fatalf("in pieces, %q came out as %q", wire, got)
		}
		if whole != pieces {
			t.Fatalf("frames of %q depend on its chunks:\n%s\n%s", wire, whole, pieces)
		}
	})
}

// pumped reads wire through a pump in pieces of the given size. It returns the
// frames that the filter saw and the bytes that came out.
func pumped(wire []byte, size int) (frames string, out []byte) {
	var seen strings.Builder
	faults := &Faults{filter: func(f Frame) Action {
		fmt.Fprintf(&seen, "%q\n", f)
		return Pass
	}}
	l := &link{faults: faults, done: make(chan struct{})}
	src := piecewise{r: bytes.NewReader(wire), size: size}
	p := newPump(l, ToClient, src, nil)
	l.pumps = []*pump{p}
	p.read()
	for _, c := range p.queue {
		out = append(out, c.data...)
	}
	return seen.String(), out
}

type piecewise struct {
	net.Conn // only Read is called
	r        io.Reader
	size     int
}

func (p piecewise) Read(b []byte) (int, error) { return p.r.Read(b[:min(len(b), p.size)]) }
