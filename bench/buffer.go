package main

import (
	"bytes"
	"net"
	"sync/atomic"
	"time"
)

// sample says how many messages had come and not yet been handed to the body.
type sample struct {
	At      time.Duration
	Handed  int
	Waiting int
}

// bufferWatch samples the buffers of all loops together.
type bufferWatch struct {
	quit, over chan struct{}
	samples    []sample
}

func watchBuffer(k *client) *bufferWatch {
	w := &bufferWatch{quit: make(chan struct{}), over: make(chan struct{})}
	if !k.watchesBuffer() {
		close(w.over)
		return w
	}
	go func() {
		defer close(w.over)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				handed := 0
				for _, l := range k.loops {
					handed += int(l.handed.Load())
				}
				// In this order, so that it cannot be less than nothing.
				waiting := int(k.arrived.n.Load()) - handed
				w.samples = append(w.samples, sample{time.Since(k.begin.at), handed, waiting})
			case <-w.quit:
				return
			}
		}
	}()
	return w
}

func (w *bufferWatch) stop() []sample {
	close(w.quit)
	<-w.over
	return w.samples
}

// arrivals makes connections that count messages as they come off the wire:
// nobody else can tell what waits in a reader of package jetstream.
type arrivals struct{ n atomic.Int64 }

// mark is in the reply subject of each message that comes from a consumer, and
// in nothing else that the server sends to a benchmark.
var mark = []byte("$JS.ACK.")

func (a *arrivals) Dial(network, address string) (net.Conn, error) {
	nc, err := net.DialTimeout(network, address, 2*time.Second)
	if err != nil {
		return nil, err
	}
	return &countingConn{Conn: nc, arrivals: a}, nil
}

type countingConn struct {
	net.Conn
	*arrivals
	tail []byte // the end of what was read last; a mark may lie across
}

func (c *countingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	most := len(mark) - 1 // of a mark in one of two reads
	seam := append(c.tail, p[:min(n, most)]...)
	c.n.Add(int64(bytes.Count(seam, mark) + bytes.Count(p[:n], mark)))
	if n >= most {
		seam = p[:n]
	}
	c.tail = append(c.tail[:0], seam[max(0, len(seam)-most):]...)
	return n, err
}
