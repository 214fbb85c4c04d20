package paced

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
)

// link is what a loop needs of a connection, as plain functions, so that it
// runs against a scripted source as well. All of them may block while nats.go
// dials, because it holds its lock through dial and handshake (nats.go:3565);
// the loop therefore calls none of them unless the last event said CONNECTED.
type link struct {
	subscribe   func(subject string, ch chan *nats.Msg) (*nats.Subscription, error)
	unsubscribe func(*nats.Subscription)
	publish     func(subject, reply string, data []byte) error
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
		publish:     nc.PublishRequest,
		barrier:     nc.FlushWithContext,
		lastError:   nc.LastError,
		status:      nc.Status,
		stats:       nc.Stats,
		newInbox:    nc.NewInbox,
		maxPayload:  func() int { return int(nc.MaxPayload()) },
		reconnect:   nc.ForceReconnect,
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
