// Package faultproxy puts faults between a NATS client and a server: it cuts,
// mutes, delays and throttles connections, and drops, delays or holds back
// single protocol frames.
//
// [Proxy] does this for TCP on loopback. [Faults.Wrap] does it for any
// net.Conn, also for an in-process connection in a testing/synctest bubble.
package faultproxy

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// An Action is what a [Filter] decides about a frame. Positive values delay
// the frame; see [After].
type Action time.Duration

const (
	Pass Action = 0
	Drop Action = -1

	// Hold keeps the frame until [Faults.Release]. Later frames overtake it.
	Hold Action = -2

	// Last passes the frame and closes the connection right behind it.
	Last Action = -3
)

// After delays one frame by d. Later frames overtake it; [Faults.Delay] is the
// delay that keeps the order.
func After(d time.Duration) Action { return Action(max(d, 0)) }

// A Filter looks at every frame of both directions. Calls never overlap, so a
// filter may count in plain variables of its own. It must not block, nor call
// SetFilter.
type Filter func(Frame) Action

// First applies a to the first n frames for which match is true, and passes
// everything else.
func First(n int, match func(Frame) bool, a Action) Filter {
	return func(f Frame) Action {
		if n > 0 && match(f) {
			n--
			return a
		}
		return Pass
	}
}

// Stats counts the traffic of one direction as it arrives, before any fault.
type Stats struct {
	Frames  uint64 // complete frames; 0 in raw mode
	Bytes   uint64
	Dropped uint64 // frames dropped by the filter or by Discard

	// Opaque counts connections whose bytes stopped being the NATS client
	// protocol, for example after an upgrade to TLS. From there on their bytes
	// pass unfiltered.
	Opaque uint64
}

type counters struct {
	frames, bytes, dropped, opaque atomic.Uint64
}

// Faults is a set of connections and the faults they suffer. The zero value
// passes everything and is ready to use. All methods may be called at any
// time from any goroutine, and act on present and future connections.
type Faults struct {
	// Raw turns off frame parsing: the filter is not called, frames are not
	// counted, and [Faults.Discard] may tear a frame apart. For benchmarks, and
	// for connections that do not speak the client protocol, such as
	// leafnodes. Set it before the first connection.
	Raw bool

	filterMu sync.Mutex
	filter   Filter

	mu        sync.Mutex
	links     map[*link]struct{}
	refuse    bool
	blackhole bool
	closed    bool
	dirs      [2]settings

	count [2]counters
}

type settings struct {
	muted bool
	delay time.Duration
	rate  int // bytes per second; 0 for unlimited
}

// SetFilter replaces the filter; nil removes it. The new one starts at the
// next frame of each connection, and the old one has returned from its last
// call.
func (f *Faults) SetFilter(filter Filter) {
	f.filterMu.Lock()
	defer f.filterMu.Unlock()
	f.filter = filter
}

// Release delivers every frame that the filter held, in the order of arrival.
func (f *Faults) Release() {
	f.eachPump(ToServer, (*pump).release)
	f.eachPump(ToClient, (*pump).release)
}

// Mute stops delivery in one direction without any error: bytes are accepted
// and kept, and so is the end of the connection.
func (f *Faults) Mute(d Direction) { f.change(d, func(s *settings) { s.muted = true }) }

// Unmute ends Mute and delivers what was kept.
func (f *Faults) Unmute(d Direction) { f.change(d, func(s *settings) { s.muted = false }) }

// Discard throws away what Mute, Delay or Throttle keep at this moment. Frames
// that the filter held stay.
func (f *Faults) Discard(d Direction) { f.eachPump(d, (*pump).discard) }

// Delay sets the one-way latency of a direction, 0 by default. The order is
// kept and the bandwidth is not limited.
func (f *Faults) Delay(d Direction, latency time.Duration) {
	f.change(d, func(s *settings) { s.delay = max(latency, 0) })
}

// Throttle limits each connection to a number of bytes per second in one
// direction. 0, the default, is unlimited. A throttled connection keeps about
// 256 KiB, after which the sender blocks.
func (f *Faults) Throttle(d Direction, bytesPerSecond int) {
	f.change(d, func(s *settings) { s.rate = max(bytesPerSecond, 0) })
}

// Disconnect closes all connections. New ones are accepted at once.
func (f *Faults) Disconnect() {
	for _, l := range f.snapshot() {
		l.close()
	}
}

// Cut closes all connections and refuses new ones until Restore.
func (f *Faults) Cut() {
	f.set(func() { f.refuse = true })
	f.Disconnect()
}

// Restore ends Cut and Blackhole. A connection that was opened in a black hole
// stays there until its client gives up.
func (f *Faults) Restore() { f.set(func() { f.refuse, f.blackhole = false, false }) }

// Blackhole accepts new connections but never answers on them, until Restore.
// Open connections are not touched.
func (f *Faults) Blackhole() { f.set(func() { f.blackhole = true }) }

// Conns returns the number of open connections.
func (f *Faults) Conns() int { return len(f.snapshot()) }

// Stats returns the traffic of a direction over all connections so far.
func (f *Faults) Stats(d Direction) Stats {
	c := &f.count[d]
	return Stats{
		Frames:  c.frames.Load(),
		Bytes:   c.bytes.Load(),
		Dropped: c.dropped.Load(),
		Opaque:  c.opaque.Load(),
	}
}

// Wrap takes ownership of server, a client's connection to a server, and
// returns the connection to give to the client instead.
//
// It is made for nats.go in a bubble, where connecting must not take time:
// nats.go holds its lock meanwhile, and a goroutine that waits for a lock stops
// the clock of the bubble. So Wrap fails not only during Cut, but also during
// Mute and Blackhole, and neither Delay nor Throttle apply before the first
// PONG to the client. Also, writers never have to wait.
func (f *Faults) Wrap(server net.Conn) (net.Conn, error) {
	client, inner := net.Pipe()
	used := false
	err := f.join(inner, true, func() (net.Conn, error) {
		used = true
		return server, nil
	})
	if !used {
		server.Close()
	}
	if err != nil {
		inner.Close()
		return nil, err
	}
	return client, nil
}

func (f *Faults) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *Faults) change(d Direction, change func(*settings)) {
	f.set(func() { change(&f.dirs[d]) })
	f.eachPump(d, (*pump).nudge)
}

func (f *Faults) snapshot() []*link {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make([]*link, 0, len(f.links))
	for l := range f.links {
		all = append(all, l)
	}
	return all
}

func (f *Faults) eachPump(d Direction, do func(*pump)) {
	for _, l := range f.snapshot() {
		for _, p := range l.pumps {
			if p.dir == d {
				do(p)
			}
		}
	}
}

// decide asks the filter. The lock keeps calls from overlapping.
func (f *Faults) decide(frame Frame) Action {
	f.filterMu.Lock()
	defer f.filterMu.Unlock()
	if f.filter == nil {
		return Pass
	}
	return f.filter(frame)
}
