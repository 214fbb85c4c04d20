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
	// held: the stream is known to have reached this sequence. A start sequence
	// that lies ahead of the stream is not.
	held uint64
	// cseq is the consumer sequence received last from this generation.
	cseq uint64
	// scanned: every message at or below it that matches has been received.
	scanned uint64
	// pending is the server's latest hint at what is still to come.
	pending uint64
	// whole: the reader has no filter, so that every sequence passed over is a
	// message that is gone. unseen are those ranges, until the stream was
	// asked whether retention took them or somebody deleted them in the
	// middle.
	whole  bool
	unseen []seqRange
}

// seqRange is a range of stream sequences, both ends included.
type seqRange struct{ from, to uint64 }

// pass notes that the scan position moves to seq without the messages between.
func (p *position) pass(seq uint64) {
	if !p.whole || seq <= p.scanned+1 {
		return
	}
	s := seqRange{p.scanned + 1, seq - 1}
	if n := len(p.unseen); n > 0 && p.unseen[n-1].to+1 == s.from {
		p.unseen[n-1].to = s.to
		return
	}
	p.unseen = append(p.unseen, s)
}

// gaps empties unseen and returns what of it retention took: the parts in front
// of the stream's first sequence. A message deleted in the middle is behind it.
// Should retention have passed such a message before the stream was asked, it
// counts as taken; nothing on the server tells the two apart any more.
func (p *position) gaps(first uint64) []seqRange {
	var gone []seqRange
	for _, s := range p.unseen {
		if s.from < first {
			gone = append(gone, seqRange{s.from, min(s.to, first-1)})
		}
	}
	p.unseen = nil
	return gone
}

// created takes over what the answer to a create says: delivered is the stream
// sequence in front of the first message that the consumer will deliver
// (consumer.go:3594), pending is exact at that moment. last is the stream's
// last sequence, read before the consumer was made. known says that the reader
// was somewhere before: what the server moved the start over is then gone, and
// returned.
func (p *position) created(delivered, pending, last uint64, known bool) (gone seqRange) {
	p.cseq = 0
	p.pending = pending
	// What was passed over behind the position is passed over again.
	for len(p.unseen) > 0 && p.unseen[len(p.unseen)-1].from > p.at {
		p.scanned = min(p.scanned, p.unseen[len(p.unseen)-1].from-1)
		p.unseen = p.unseen[:len(p.unseen)-1]
	}
	if known && delivered > max(p.at, p.scanned) {
		gone = seqRange{max(p.at, p.scanned) + 1, delivered}
	}
	if !known {
		p.at = max(p.at, delivered)
	}
	p.scanned = max(p.scanned, p.at, delivered)
	if pending == 0 && last > p.scanned {
		p.pass(last + 1)
		p.scanned = last
	}
	return gone
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
	p.pass(a.Stream)
	return deliver, nil
}

// yielded moves the position: only ever when a message goes to the body.
func (p *position) yielded(seq uint64) {
	p.at = seq
	p.held = max(p.held, seq)
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
	p.pass(lastStream + 1)
	p.scanned = max(p.scanned, lastStream)
	return skip, nil
}

// reached reports whether everything up to seq that matches was received.
func (p *position) reached(seq uint64) bool { return p.scanned >= seq }
