package paced

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/pacedgo/paced/internal/wire"
)

func diffPosition(want, got position) string {
	return cmp.Diff(want, got, cmp.AllowUnexported(position{}, seqRange{}))
}

// The answer to a create fixes the start boundary once, and never moves a
// position back or forth afterwards.
func TestPositionCreated(t *testing.T) {
	const known = true
	for _, tc := range []struct {
		name                     string
		before                   position
		delivered, pending, last uint64
		known                    bool
		want                     position
		gone                     seqRange
	}{
		{"all of a full stream",
			position{}, 0, 10, 10, !known,
			position{pending: 10}, seqRange{}},
		{"empty stream: caught up without a message",
			position{}, 0, 0, 0, !known,
			position{}, seqRange{}},
		{"by time or last: the answer says where it starts",
			position{}, 7, 3, 10, !known,
			position{at: 7, scanned: 7, pending: 3}, seqRange{}},
		{"nothing matches: everything up to the last sequence is behind",
			position{}, 0, 0, 10, !known,
			position{scanned: 10}, seqRange{}},
		{"by sequence past the end of the stream",
			position{at: 99}, 99, 0, 9, !known,
			position{at: 99, scanned: 99}, seqRange{}},
		{"first subscribe to a stream whose head was trimmed: no gap",
			position{}, 4, 6, 10, !known,
			position{at: 4, scanned: 4, pending: 6}, seqRange{}},
		{"rebuild: goes on behind the position, the consumer counts anew",
			position{at: 5, cseq: 5, scanned: 8, pending: 3}, 5, 5, 10, known,
			position{at: 5, scanned: 8, pending: 5}, seqRange{}},
		{"rebuild with nothing to come: the boundary of this range is reached",
			position{at: 5, cseq: 5, scanned: 5}, 5, 0, 10, known,
			position{at: 5, scanned: 10}, seqRange{}},
		{"rebuild, the boundary lies behind: it does not move back",
			position{at: 50, cseq: 5, scanned: 60}, 50, 0, 10, known,
			position{at: 50, scanned: 60}, seqRange{}},
		{"rebuild, retention has passed the position",
			position{at: 5, cseq: 5, scanned: 5}, 9, 1, 10, known,
			position{at: 5, scanned: 9, pending: 1}, seqRange{6, 9}},
		{"rebuild, retention passed what was scanned already: no gap",
			position{at: 5, cseq: 5, scanned: 9}, 9, 1, 10, known,
			position{at: 5, scanned: 9, pending: 1}, seqRange{}},
		{"rebuild, retention passed part of what was not scanned",
			position{at: 5, cseq: 5, scanned: 7}, 9, 1, 10, known,
			position{at: 5, scanned: 9, pending: 1}, seqRange{8, 9}},
		{"whole stream, nothing pending in front of the boundary: to be asked for",
			position{whole: true}, 4, 0, 10, !known,
			position{whole: true, at: 4, scanned: 10, unseen: []seqRange{{5, 10}}}, seqRange{}},
		{"rebuild: what was passed over behind the position is passed over again",
			position{whole: true, at: 5, cseq: 5, scanned: 20, unseen: []seqRange{{2, 3}, {11, 20}}}, 5, 5, 20, known,
			position{whole: true, at: 5, scanned: 10, pending: 5, unseen: []seqRange{{2, 3}}}, seqRange{}},
	} {
		p := tc.before
		gone := p.created(tc.delivered, tc.pending, tc.last, tc.known)
		if diff := diffPosition(tc.want, p); diff != "" || gone != tc.gone {
			t.Errorf("%s: gone %v, want %v; position, -want +got:\n%s", tc.name, gone, tc.gone, diff)
		}
	}
}

// A message is yielded once, in order, and only behind the one before it.
func TestPositionReceive(t *testing.T) {
	at := position{at: 10, cseq: 3, scanned: 10, pending: 7}
	for _, tc := range []struct {
		name   string
		before position
		ack    wire.Ack
		want   kind
		reason error
		after  position
	}{
		{"the next one",
			at, wire.Ack{Stream: 11, Consumer: 4, Pending: 6},
			deliver, nil, position{at: 10, cseq: 4, scanned: 10, pending: 6}},
		{"the next one of a filter, or behind a deletion",
			at, wire.Ack{Stream: 99, Consumer: 4, Pending: 0},
			deliver, nil, position{at: 10, cseq: 4, scanned: 10}},
		{"one was lost on the way",
			at, wire.Ack{Stream: 12, Consumer: 5, Pending: 5},
			restart, errGap, at},
		{"twice",
			at, wire.Ack{Stream: 10, Consumer: 3, Pending: 7},
			restart, errGap, at},
		{"the consumer came back in its first state",
			at, wire.Ack{Stream: 11, Consumer: 1, Pending: 6},
			restart, errGap, at},
		{"consumer sequence 0, which no server sends",
			position{}, wire.Ack{Stream: 1},
			restart, errGap, position{}},
		{"was yielded by the generation before",
			position{at: 10}, wire.Ack{Stream: 10, Consumer: 1, Pending: 7},
			skip, nil, position{at: 10, cseq: 1, pending: 7}},
		{"stream sequence 0, which no server sends",
			position{}, wire.Ack{Consumer: 1},
			skip, nil, position{cseq: 1}},
		{"the largest numbers",
			position{cseq: 1<<64 - 2}, wire.Ack{Stream: 1<<64 - 1, Consumer: 1<<64 - 1, Pending: 1<<64 - 1},
			deliver, nil, position{cseq: 1<<64 - 1, pending: 1<<64 - 1}},
		{"whole stream, a jump: to be asked for",
			position{whole: true, at: 10, cseq: 3, scanned: 10}, wire.Ack{Stream: 15, Consumer: 4},
			deliver, nil, position{whole: true, at: 10, cseq: 4, scanned: 10, unseen: []seqRange{{11, 14}}}},
		{"whole stream, a jump over what was scanned already",
			position{whole: true, at: 10, cseq: 3, scanned: 14}, wire.Ack{Stream: 15, Consumer: 4},
			deliver, nil, position{whole: true, at: 10, cseq: 4, scanned: 14}},
	} {
		p := tc.before
		k, reason := p.receive(tc.ack)
		if diff := diffPosition(tc.after, p); k != tc.want || !errors.Is(reason, tc.reason) || diff != "" {
			t.Errorf("%s: %v, %v, want %v, %v; position, -want +got:\n%s", tc.name, k, reason, tc.want, tc.reason, diff)
		}
	}
}

// A heartbeat proves the scan position only if it speaks of the message that
// was received last.
func TestPositionHeard(t *testing.T) {
	for _, tc := range []struct {
		name             string
		before           position
		consumer, stream uint64
		want             kind
		reason           error
		after            position
	}{
		{"agrees",
			position{at: 5, cseq: 3, scanned: 5}, 3, 9, skip, nil,
			position{at: 5, cseq: 3, scanned: 9}},
		{"lags: the scan position does not move back",
			position{at: 5, cseq: 3, scanned: 9}, 3, 4, skip, nil,
			position{at: 5, cseq: 3, scanned: 9}},
		{"speaks of messages that are not here",
			position{at: 5, cseq: 3, scanned: 5}, 4, 9, restart, errLostTail,
			position{at: 5, cseq: 3, scanned: 5}},
		{"knows less than was received: came back in its first state",
			position{at: 5, cseq: 3, scanned: 5}, 0, 9, restart, errLostTail,
			position{at: 5, cseq: 3, scanned: 5}},
		{"whole stream, scanned past nothing that came: to be asked for",
			position{whole: true, at: 5, cseq: 3, scanned: 5}, 3, 9, skip, nil,
			position{whole: true, at: 5, cseq: 3, scanned: 9, unseen: []seqRange{{6, 9}}}},
		{"whole stream, further: one range",
			position{whole: true, at: 5, cseq: 3, scanned: 9, unseen: []seqRange{{6, 9}}}, 3, 12, skip, nil,
			position{whole: true, at: 5, cseq: 3, scanned: 12, unseen: []seqRange{{6, 12}}}},
		{"the largest numbers",
			position{cseq: 1<<64 - 1}, 1<<64 - 1, 1<<64 - 1, skip, nil,
			position{cseq: 1<<64 - 1, scanned: 1<<64 - 1}},
	} {
		p := tc.before
		k, reason := p.heard(tc.consumer, tc.stream)
		if diff := diffPosition(tc.after, p); k != tc.want || !errors.Is(reason, tc.reason) || diff != "" {
			t.Errorf("%s: %v, %v, want %v, %v; position, -want +got:\n%s", tc.name, k, reason, tc.want, tc.reason, diff)
		}
	}
}

// Of what was passed over, that in front of the stream's first sequence is gone;
// the rest was deleted in the middle. It is told once.
func TestPositionGaps(t *testing.T) {
	for _, tc := range []struct {
		first uint64
		want  []seqRange
	}{
		{1, nil},
		{11, nil},
		{12, []seqRange{{11, 11}}},
		{20, []seqRange{{11, 14}}},
		{23, []seqRange{{11, 14}, {21, 22}}},
		{99, []seqRange{{11, 14}, {21, 30}}},
	} {
		p := position{whole: true, unseen: []seqRange{{11, 14}, {21, 30}}}
		if diff := cmp.Diff(tc.want, p.gaps(tc.first), cmp.AllowUnexported(seqRange{})); diff != "" {
			t.Errorf("first sequence %d, -want +got:\n%s", tc.first, diff)
		}
		if again := p.gaps(1 << 60); again != nil {
			t.Errorf("told twice: %v", again)
		}
	}
}

// What is caught up is decided by the scan position, never by the hint at what
// is pending.
func TestPositionReached(t *testing.T) {
	var p position
	step := func(what string, reached bool) {
		t.Helper()
		if p.reached(10) != reached {
			t.Errorf("%s: reached(10) = %v", what, !reached)
		}
	}
	p.created(0, 10, 10, false)
	step("nothing received", false)
	p.receive(wire.Ack{Stream: 8, Consumer: 1, Pending: 0}) // 0 too early
	step("the hint says 0", false)
	p.yielded(8)
	step("yielded 8, the hint says 0", false)
	p.heard(0, 12)
	step("a heartbeat that does not agree", false)
	p.heard(1, 9)
	step("scanned to 9", false)
	p.heard(1, 10)
	step("scanned to 10", true)

	p = position{}
	p.created(0, 10, 10, false)
	p.receive(wire.Ack{Stream: 11, Consumer: 1, Pending: 7}) // never reaches 0
	step("received 11, not yielded", false)
	p.yielded(11)
	step("yielded 11, the hint says 7", true)

	p = position{}
	p.created(0, 0, 10, false)
	step("the create says that nothing is pending", true)
	if p.at != 0 || p.scanned != 10 {
		t.Errorf("at %d, scanned %d", p.at, p.scanned)
	}
	p = position{}
	if !p.reached(0) {
		t.Error("an empty stream is not reached")
	}
}

// Whatever comes in whichever order, what is yielded strictly increases, and the
// scan position never moves back within a generation.
func FuzzPosition(f *testing.F) {
	f.Add([]byte{0, 1, 1, 1, 2, 2, 2, 9, 0, 5})
	f.Add([]byte{3, 0, 0, 0, 1, 1, 1, 2, 7})
	f.Fuzz(func(t *testing.T, ops []byte) {
		p := position{whole: len(ops)%2 == 0}
		last := uint64(0)
		for i := 0; i+2 < len(ops); i += 3 {
			a, b := uint64(ops[i+1]), uint64(ops[i+2])
			scanned := p.scanned
			switch ops[i] % 3 {
			case 0:
				if k, reason := p.receive(wire.Ack{Stream: a, Consumer: p.cseq + b%3, Pending: b}); k == deliver {
					if a <= last || reason != nil {
						t.Fatalf("%d after %d, %v", a, last, reason)
					}
					p.yielded(a)
					last = a
				}
			case 1:
				p.heard(p.cseq+b%2, a)
			case 2:
				at := p.at
				p.created(max(a, at), b, b, true)
				if p.at != at {
					t.Fatalf("a rebuild moved the position from %d to %d", at, p.at)
				}
				continue
			}
			if p.scanned < scanned || p.scanned < p.at {
				t.Fatalf("scanned %d, was %d, at %d", p.scanned, scanned, p.at)
			}
			for i, s := range p.unseen {
				if s.from > s.to || (i > 0 && s.from <= p.unseen[i-1].to) {
					t.Fatalf("unseen %v", p.unseen)
				}
			}
		}
	})
}
