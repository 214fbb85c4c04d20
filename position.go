package paced

import "github.com/pacedgo/paced/internal/wire"

// position is where an ordered reader is and what it may conclude from what it
// received and heard. It is plain data: no clock, no connection.
//
// The server's count of pending messages is only ever a hint here. It is taken
// when a message is gathered (nats-server consumer.go:5507), corrected when
// messages are deleted (7020), and can be 0 with messages still to come or
// stay above 0 for ever. What decides is the scan position.
type position struct {
	// at is the stream sequence behind which a rebuild goes on: the last
	// message yielded, before that the start boundary, which is fixed when the
	// first consumer is made so that nothing published later moves it.
	at uint64
	// cseq is the consumer sequence received last from this generation.
	cseq uint64
	// scanned: every message at or below it that matches has been received.
	scanned uint64
	// pending is the server's latest hint at what is still to come.
	pending uint64
}

// created takes over what the answer to a create says: delivered is the stream
// sequence in front of the first message that the consumer will deliver
// (consumer.go:6397), pending is exact at that moment. last is the stream's
// last sequence, read before the consumer was made.
func (p *position) created(delivered, pending, last uint64) {
	p.cseq = 0
	p.pending = pending
	p.at = max(p.at, delivered)
	p.scanned = max(p.scanned, p.at)
	if pending == 0 {
		p.scanned = max(p.scanned, last)
	}
}

// receive judges one message by its sequences. A consumer sequence that is not
// the next one means that a message was lost or that the consumer came back in
// its first state; either way this generation is of no more use. A stream
// sequence that is not past the position was yielded before.
func (p *position) receive(a wire.Ack) (kind, error) {
	if a.Consumer != p.cseq+1 {
		return restart, errGap
	}
	p.cseq = a.Consumer
	p.pending = a.Pending
	if a.Stream <= p.at {
		return skip, nil
	}
	return deliver, nil
}

// yielded moves the position: only ever when a message goes to the body.
func (p *position) yielded(seq uint64) {
	p.at = seq
	p.scanned = max(p.scanned, seq)
}

// heard judges a heartbeat. The server sends it behind the data, so that a
// last consumer sequence other than ours means messages that were sent and are
// not coming (consumer.go:5657). One that agrees proves the server's
// scan position ours.
func (p *position) heard(lastConsumer, lastStream uint64) (kind, error) {
	if lastConsumer != p.cseq {
		return restart, errLostTail
	}
	p.scanned = max(p.scanned, lastStream)
	return skip, nil
}

// reached reports whether everything up to seq that matches was received.
func (p *position) reached(seq uint64) bool { return p.scanned >= seq }
