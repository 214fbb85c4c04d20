package paced

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// link is what a loop needs of a connection, as plain functions, so that it
// runs against a scripted source as well. All of them may block while nats.go
// dials, because it holds its lock through dial and handshake (nats.go:3565);
// the loop therefore calls none of them unless the last event said CONNECTED.
type link struct {
	subscribe   func(subject string, ch chan *nats.Msg) (*nats.Subscription, error)
	unsubscribe func(*nats.Subscription)
	// drain ends the interest and keeps what is still on the wire: it has
	// arrived when a barrier behind it returns.
	drain   func(*nats.Subscription)
	publish func(subject, reply string, data []byte) error
	request func(ctx context.Context, subject string, data []byte) (*nats.Msg, error)
	// barrier returns when the server has read everything published before.
	barrier    func(ctx context.Context) error
	lastError  func() error
	status     func() nats.Status
	stats      func() nats.Statistics
	newInbox   func() string
	maxPayload func() int
	reconnect  func() error
	// report hands an error to the connection's asynchronous error handler.
	report func(error)
	// events is a doorbell, not a log: it holds ten events and drops the rest
	// (nats.go:6838, 6895).
	events chan nats.Status
	detach func()
}

func newLink(nc *nats.Conn) *link {
	events := nc.StatusChanged(nats.CONNECTED, nats.RECONNECTING, nats.DISCONNECTED, nats.CLOSED)
	return &link{
		// ChanSubscribe has no pending limits of its own (nats.go:4004); what
		// bounds the channel is the credit.
		subscribe:   nc.ChanSubscribe,
		unsubscribe: func(s *nats.Subscription) { _ = s.Unsubscribe() },
		drain:       func(s *nats.Subscription) { drainSub(nc, s) },
		publish: func(subject, reply string, data []byte) error {
			if reply == "" {
				return nc.Publish(subject, data)
			}
			return nc.PublishRequest(subject, reply, data)
		},
		request:    nc.RequestWithContext,
		barrier:    nc.FlushWithContext,
		lastError:  nc.LastError,
		status:     nc.Status,
		stats:      nc.Stats,
		newInbox:   nc.NewInbox,
		maxPayload: func() int { return int(nc.MaxPayload()) },
		reconnect:  nc.ForceReconnect,
		report: func(err error) {
			if h := nc.ErrorHandler(); h != nil {
				h(nc, nil, err)
			}
		},
		events: events,
		detach: func() { nc.RemoveStatusListener(events) },
	}
}

// refused looks for a permission violation that the server reported since
// before was the last error and that names one of the subjects. A refused
// publish or subscription gets no answer, only such an error, which has arrived
// once a barrier sent behind it returned.
func (k *link) refused(before error, subjects ...string) error {
	err := k.lastError()
	if err == nil || err == before || !errors.Is(err, nats.ErrPermissionViolation) {
		return nil
	}
	text := err.Error()
	for _, s := range subjects {
		if strings.Contains(text, strconv.Quote(s)) {
			return &refusedError{subject: s}
		}
	}
	return nil
}

// refusedError is a subject that the account may not use.
type refusedError struct{ subject string }

func (e *refusedError) Error() string {
	return "no permission for subject " + e.subject + ": " + nats.ErrPermissionViolation.Error()
}

func (e *refusedError) Unwrap() error { return nats.ErrPermissionViolation }

// event takes one event of the connection and whatever came with it.
func (l *loop) event(last nats.Status) {
	n := 1
	for {
		select {
		case last = <-l.link.events:
			n++
			continue
		default:
		}
		break
	}
	if last == nats.CONNECTED || last == nats.CLOSED || n >= cap(l.link.events) {
		last = l.link.status()
	}
	l.look(last)
}

func (l *loop) events() {
	select {
	case s := <-l.link.events:
		l.event(s)
	default:
	}
}

// look takes over a status of the connection. CONNECTED is queued in front of
// the first frame of a new connection (nats.go:3310), so that looking before
// each frame is a barrier between the two.
func (l *loop) look(s nats.Status) {
	l.up = s == nats.CONNECTED
	l.closed = s == nats.CLOSED
	if l.up {
		if n := l.link.stats().Reconnects; n != l.reconnects {
			l.reconnects = n
			l.moved = true
		}
	}
}

// move acts on a connection that is another one now. nats.go subscribes the
// same inboxes again and the server still serves the old pulls (a fast
// reconnect finds them alive), so that asking again would ask twice: the
// inboxes are dropped, and new ones are used at once. The consumer itself is
// believed until something speaks against it.
func (l *loop) move() error {
	if l.closed {
		return l.errorf(nats.ErrConnectionClosed)
	}
	l.moved = false
	if l.gen == nil {
		return nil
	}
	l.leaveLine()
	if l.list.active {
		return &rebuild{errUnfilled}
	}
	if l.pos.cseq == 0 && !l.exact {
		return &rebuild{errReset}
	}
	if err := l.giveUp(0, 1); err != nil {
		return l.orRebuild(err)
	}
	l.sweep()
	l.quiet, l.greeted = time.Time{}, false
	l.unsure = l.recipe.inOrder && !l.recipe.replay
	// However fast the link flaps, ten pulls a second are enough.
	l.notBefore = l.greetedAt.Add(100 * time.Millisecond)
	if at := time.Now().Add(l.spread()); at.After(l.notBefore) {
		l.notBefore = at
	}
	return nil
}

// drainSub drains, or unsubscribes where the connection is not up. Drained while
// nats.go reconnects, a subscription is made again on the new connection and
// then forgotten without an UNSUB (nats.go:5628, 6186): the server would go on
// delivering to it.
func drainSub(nc *nats.Conn, s *nats.Subscription) {
	before := nc.Stats().Reconnects
	if nc.IsConnected() {
		_ = s.Drain()
	}
	if !nc.IsConnected() || nc.Stats().Reconnects != before {
		_ = s.Unsubscribe()
	}
}
