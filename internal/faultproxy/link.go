package faultproxy

import (
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

var errRefused = errors.New("faultproxy: connection refused")

// A link is one client connection and its connection to the server.
type link struct {
	faults *Faults
	conns  []net.Conn
	pumps  []*pump // none in a black hole
	done   chan struct{}
	once   sync.Once

	// inProcess is set for [Faults.Wrap]. nats.go holds its lock while it
	// writes and while it connects, and a goroutine that waits for a lock stops
	// the clock of a bubble. So such a link never lets a writer wait, and does
	// not slow down the handshake.
	inProcess bool
	connected atomic.Bool // the handshake is over, or cannot be told
}

// join links client with the connection that dial returns. On error the
// caller closes client.
func (f *Faults) join(client net.Conn, inProcess bool, dial func() (net.Conn, error)) error {
	f.mu.Lock()
	refuse, blackhole := f.refuse || f.closed, f.blackhole
	if inProcess && (blackhole || f.dirs[ToServer].muted || f.dirs[ToClient].muted) {
		refuse = true
	}
	f.mu.Unlock()
	if refuse {
		return errRefused
	}
	l := &link{faults: f, conns: []net.Conn{client}, done: make(chan struct{}), inProcess: inProcess}
	l.connected.Store(!inProcess || f.Raw)
	if !blackhole {
		server, err := dial()
		if err != nil {
			return err
		}
		l.conns = append(l.conns, server)
		l.pumps = []*pump{
			newPump(l, ToServer, client, server),
			newPump(l, ToClient, server, client),
		}
	}

	f.mu.Lock()
	refuse = f.refuse || f.closed
	if !refuse {
		if f.links == nil {
			f.links = make(map[*link]struct{})
		}
		f.links[l] = struct{}{}
	}
	f.mu.Unlock()

	switch {
	case refuse:
		l.close()
		return errRefused
	case blackhole:
		go l.swallow(client)
	default:
		for _, p := range l.pumps {
			go p.read()
			go p.write()
		}
	}
	return nil
}

func (l *link) close() {
	l.once.Do(func() {
		close(l.done)
		for _, c := range l.conns {
			c.Close()
		}
		l.faults.set(func() { delete(l.faults.links, l) })
	})
}

// swallow reads a black-holed connection until the client closes it.
func (l *link) swallow(c net.Conn) {
	defer l.close()
	buf := make([]byte, 4096)
	for {
		if _, err := c.Read(buf); err != nil {
			return
		}
	}
}

// settings returns the faults of a direction that apply to l now.
func (l *link) settings(d Direction) settings {
	l.faults.mu.Lock()
	defer l.faults.mu.Unlock()
	s := l.faults.dirs[d]
	if !l.connected.Load() {
		s.delay, s.rate = 0, 0
	}
	return s
}

// A pump moves the bytes of one direction: a reader fills a queue, a writer
// empties it.
type pump struct {
	link     *link
	dir      Direction
	src, dst net.Conn
	wake     chan struct{} // to the writer: something changed
	room     chan struct{} // to the reader: the queue shrank

	mu     sync.Mutex
	queue  []chunk // by due time
	held   []chunk // by arrival
	queued int     // bytes in queue
	last   time.Time
	eof    bool
	broken bool // dst failed; whatever still arrives is discarded

	busyUntil time.Time // throttled: when the bytes sent so far have passed
}

type chunk struct {
	due    time.Time
	data   []byte
	frames int
	torn   bool // the writer has sent the first part of these bytes
	last   bool // close the link after these bytes
	opens  bool // these bytes complete the handshake
}

func newPump(l *link, d Direction, src, dst net.Conn) *pump {
	return &pump{
		link: l, dir: d, src: src, dst: dst,
		wake: make(chan struct{}, 1), room: make(chan struct{}, 1),
	}
}

const (
	bufferSize = 64 << 10
	minRead    = 16 << 10

	// Bytes that a TCP direction keeps before its sender has to wait. Without
	// faults this is about what sockets buffer by themselves, so that a slow
	// reader is felt by the sender.
	roomPlain     = 1 << 20
	roomThrottled = 256 << 10
	roomDelayed   = 64 << 20
)

// read fills the queue. Buffers are never reused, so chunks and the frames
// shown to a filter can share them without a copy.
func (p *pump) read() {
	count := &p.link.faults.count[p.dir]
	opaque := p.link.faults.Raw
	buf := make([]byte, bufferSize)
	start, end := 0, 0 // buf[start:end] is the beginning of an incomplete frame
	for {
		if len(buf)-end < minRead {
			grown := make([]byte, max(bufferSize, 2*(end-start)+minRead))
			end = copy(grown, buf[start:end])
			buf, start = grown, 0
		}
		n, err := p.src.Read(buf[end:])
		end += n
		count.bytes.Add(uint64(n))
		if !opaque {
			used, perr := p.split(buf[start:end:end])
			start += used
			if perr != nil {
				opaque = true
				count.opaque.Add(1)
				p.link.connected.Store(true)
			}
		}
		if (opaque || err != nil) && end > start {
			p.enqueue(chunk{data: buf[start:end:end]}, 0)
			start = end
		}
		if err != nil {
			p.finish()
			return
		}
		if !p.link.inProcess && !p.waitForRoom() {
			return
		}
	}
}

// split enqueues all complete frames of b and returns their length. Frames
// that pass are put in the queue together.
func (p *pump) split(b []byte) (used int, err error) {
	count := &p.link.faults.count[p.dir]
	run, frames := 0, 0 // b[run:used] are frames that pass
	opens := false
	flush := func() {
		if used > run {
			p.enqueue(chunk{data: b[run:used:used], frames: frames, opens: opens}, 0)
		}
		run, frames = used, 0
	}
	defer flush()
	for {
		f, n, err := parse(p.dir, b[used:])
		if n == 0 {
			return used, err
		}
		count.frames.Add(1)
		action := p.link.faults.decide(f)
		if action == Pass {
			used += n
			frames++
			if f.Verb == "PONG" && p.dir == ToClient && !p.link.connected.Load() {
				opens = true
				flush()
			}
			continue
		}
		flush()
		c := chunk{data: b[used : used+n : used+n], frames: 1}
		used += n
		run = used
		switch {
		case action > 0:
			p.enqueue(c, time.Duration(action))
		case action == Hold:
			p.mu.Lock()
			p.held = append(p.held, c)
			p.mu.Unlock()
		case action == Last:
			c.last = true
			p.enqueue(c, 0)
		default:
			count.dropped.Add(1)
		}
	}
}

// enqueue puts c in the queue, due after the latency of the direction and, if
// extra is positive, that much later than its neighbours.
func (p *pump) enqueue(c chunk, extra time.Duration) {
	s := p.link.settings(p.dir)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.broken {
		return
	}
	c.due = time.Now().Add(s.delay)
	if c.due.Before(p.last) {
		c.due = p.last // the latency was lowered: keep the order
	}
	p.last = c.due
	c.due = c.due.Add(extra)
	i := len(p.queue)
	for i > 0 && p.queue[i-1].due.After(c.due) {
		i--
	}
	p.queue = slices.Insert(p.queue, i, c)
	p.queued += len(c.data)
	if c.opens {
		// Before the writer can take c: what the client answers is slowed down.
		p.link.connected.Store(true)
	}
	p.nudge()
}

func (p *pump) nudge() {
	notify(p.wake)
	notify(p.room)
}

func notify(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (p *pump) release() {
	p.mu.Lock()
	held := p.held
	p.held = nil
	p.mu.Unlock()
	for _, c := range held {
		p.enqueue(c, 0)
	}
}

func (p *pump) discard() {
	p.mu.Lock()
	defer p.mu.Unlock()
	keep := 0
	if len(p.queue) > 0 && p.queue[0].torn {
		keep = 1
	}
	for _, c := range p.queue[keep:] {
		p.queued -= len(c.data)
		p.link.faults.count[p.dir].dropped.Add(uint64(c.frames))
	}
	p.queue = p.queue[:keep]
	p.nudge()
}

// finish marks the end of the source. When both sources have ended there is
// nobody left to deliver to.
func (p *pump) finish() {
	ended := true
	for _, q := range p.link.pumps {
		q.mu.Lock()
		if q == p {
			q.eof = true
		}
		ended = ended && q.eof
		q.mu.Unlock()
	}
	if ended {
		p.link.close()
		return
	}
	p.nudge()
}

// waitForRoom reports false when the link is closed.
func (p *pump) waitForRoom() bool {
	for {
		limit := roomPlain
		switch s := p.link.settings(p.dir); {
		case s.muted || s.delay > 0:
			limit = roomDelayed
		case s.rate > 0:
			limit = roomThrottled
		}
		p.mu.Lock()
		ok := p.queued < limit
		p.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-p.room:
		case <-p.link.done:
			return false
		}
	}
}

// write empties the queue.
func (p *pump) write() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		out, wait, last := p.take()
		wrote := len(out) > 0 // WriteTo empties out
		if wrote {
			if _, err := out.WriteTo(p.dst); err != nil {
				p.fail()
			}
		}
		if last {
			p.link.close()
			return
		}
		if wrote {
			continue
		}
		// No timer without need: one that is always pending would keep the
		// clock of a bubble running, and hide a leaked link from it.
		var alarm <-chan time.Time
		if wait > 0 {
			timer.Reset(wait)
			alarm = timer.C
		}
		select {
		case <-alarm:
		case <-p.wake:
		case <-p.link.done:
			return
		}
	}
}

// take removes what may be written now. If that is nothing yet it returns how
// long to wait, 0 for as long as it takes to be woken. After last nothing
// follows.
func (p *pump) take() (out net.Buffers, wait time.Duration, last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.link.settings(p.dir)
	if s.muted {
		return nil, 0, false
	}
	if len(p.queue) == 0 {
		return nil, 0, p.eof
	}
	now := time.Now()
	due := p.queue[0].due
	if s.rate > 0 && p.busyUntil.After(due) {
		due = p.busyUntil
	}
	if due.After(now) {
		return nil, due.Sub(now), false
	}
	if s.rate > 0 {
		// Small pieces, about 20 ms each, keep the flow even.
		c := &p.queue[0]
		n := min(len(c.data), max(s.rate/50, 1))
		out = net.Buffers{c.data[:n]}
		p.busyUntil = now.Add(time.Duration(n) * time.Second / time.Duration(s.rate))
		c.data, c.torn = c.data[n:], true
		if len(c.data) == 0 {
			last = c.last
			p.queue = p.queue[1:]
		}
		p.queued -= n
		notify(p.room)
		return out, 0, last
	}
	i := 0
	for i < len(p.queue) && !p.queue[i].due.After(now) && !last {
		c := p.queue[i]
		out = append(out, c.data)
		p.queued -= len(c.data)
		last = c.last
		i++
	}
	p.queue = slices.Delete(p.queue, 0, i)
	notify(p.room)
	return out, 0, last
}

// fail turns the pump into a sink. The link lives on until the other direction
// sees the end of the broken connection, which may be muted.
func (p *pump) fail() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = true
	p.queue, p.held, p.queued = nil, nil, 0
	notify(p.room)
}
