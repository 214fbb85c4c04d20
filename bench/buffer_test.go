package main

import (
	"bytes"
	"net"
	"testing"
	"testing/iotest"
)

type readerConn struct {
	net.Conn
	read func([]byte) (int, error)
}

func (c readerConn) Read(p []byte) (int, error) { return c.read(p) }

func TestArrivalsAreCountedAcrossReads(t *testing.T) {
	wire := bytes.Repeat([]byte("MSG bench.data 1 $JS.ACK.S.C.1.7.7.1.0 3\r\n$JS\r\nPING\r\n"), 50)
	for size := 1; size <= 120; size++ {
		var a arrivals
		in := bytes.NewReader(wire)
		c := &countingConn{Conn: readerConn{read: in.Read}, arrivals: &a}
		for buf := make([]byte, size); ; {
			if _, err := c.Read(buf); err != nil {
				break
			}
		}
		if n := a.n.Load(); n != 50 {
			t.Fatalf("reading %d bytes at a time: %d arrivals, want 50", size, n)
		}
	}
	// Reads of different lengths, one after the other.
	var a arrivals
	in := iotest.HalfReader(bytes.NewReader(wire))
	c := &countingConn{Conn: readerConn{read: in.Read}, arrivals: &a}
	for size := 1; ; size = size*5%23 + 1 {
		if _, err := c.Read(make([]byte, size)); err != nil {
			break
		}
	}
	if n := a.n.Load(); n != 50 {
		t.Fatalf("mixed reads: %d arrivals, want 50", n)
	}
}
