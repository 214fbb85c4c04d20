package paced

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/pacedgo/paced/internal/wire"
)

// transport is an inbox on a link that only keeps the books.
type transport struct {
	*testing.T
	in       inbox
	subs     map[*nats.Subscription]string
	channels map[*nats.Subscription]chan *nats.Msg
	inboxes  int
	refuse   error
	pulls    []string // reply subjects
	claimed  int      // bytes reserved so far
}

const mostMessages, mostBytes = 100, 10_000

func newTransport(t *testing.T, credit, room int) *transport {
	tr := &transport{T: t, subs: map[*nats.Subscription]string{}, channels: map[*nats.Subscription]chan *nats.Msg{}}
	tr.in.use = 2
	tr.in.link = &link{
		subscribe: func(subject string, ch chan *nats.Msg) (*nats.Subscription, error) {
			if tr.refuse != nil {
				return nil, tr.refuse
			}
			s := &nats.Subscription{Subject: subject}
			tr.subs[s], tr.channels[s] = subject, ch
			return s, nil
		},
		unsubscribe: func(s *nats.Subscription) {
			if tr.subs[s] == "" {
				t.Error("unsubscribed twice")
			}
			delete(tr.subs, s)
		},
		publish: func(subject, reply string, data []byte) error {
			if tr.refuse != nil {
				return tr.refuse
			}
			tr.pulls = append(tr.pulls, reply)
			return nil
		},
		newInbox: func() string { tr.inboxes++; return fmt.Sprintf("_INBOX.%d", tr.inboxes) },
	}
	if err := tr.in.start(credit, room); err != nil {
		t.Fatal(err)
	}
	return tr
}

var testNow = time.Unix(1_000_000, 0)

// pull sends a pull of 10 heartbeats' life through slot i.
func (tr *transport) pull(i, batch, maxBytes, reserve int) *slot {
	tr.Helper()
	p := wire.Pull{Batch: batch, MaxBytes: maxBytes, Expires: 10 * time.Second, Heartbeat: time.Second}
	if err := tr.in.pull(i, "next", p, plain, reserve, testNow, time.Second); err != nil {
		tr.Fatal(err)
	}
	tr.claimed += reserve
	tr.check()
	return &tr.in.slots[i]
}

func (tr *transport) check() {
	tr.Helper()
	tr.in.verify(mostMessages, mostBytes)
	if got := tr.in.bytes + tr.in.spare; got != tr.claimed {
		tr.Fatalf("%d bytes reserved and %d to give back, %d were claimed", tr.in.bytes, tr.in.spare, tr.claimed)
	}
}

// data puts a message of this size into the channel, through a subscription.
func (tr *transport) data(s *nats.Subscription, size int) {
	tr.Helper()
	m := &nats.Msg{Subject: "s", Reply: "$JS.ACK.S.c.1.1.1.1.1", Sub: s}
	m.Data = make([]byte, size-m.Size())
	tr.frame(m)
}

func (tr *transport) status(s *nats.Subscription, token, code string) {
	tr.Helper()
	tr.frame(&nats.Msg{Subject: token, Sub: s, Header: nats.Header{"Status": {code}}})
}

func (tr *transport) frame(m *nats.Msg) {
	tr.Helper()
	if tr.subs[m.Sub] == "" {
		return // unsubscribed
	}
	select {
	case tr.channels[m.Sub] <- m:
	default:
		tr.Fatalf("the channel is full (%d): %s is dropped", cap(tr.in.ch), m.Subject)
	}
}

// take reads one frame the way the loop does.
func (tr *transport) take() *slot {
	tr.Helper()
	m := tr.in.take()
	if m == nil {
		tr.Fatal("nothing has arrived")
	}
	defer tr.check()
	if m.Reply != "" {
		return tr.in.received(m)
	}
	return tr.in.slotOf(m)
}

func (tr *transport) want(owed, bytes int) {
	tr.Helper()
	if tr.in.owed != owed || tr.in.bytes != bytes {
		tr.Errorf("%d messages and %d bytes owed, want %d and %d", tr.in.owed, tr.in.bytes, owed, bytes)
	}
}

// A pull that is filled is over, in silence where it carries no max_bytes.
func TestSlotFilled(t *testing.T) {
	tr := newTransport(t, 100, 20)
	s := tr.pull(0, 3, 0, 600)
	sub := s.sub
	tr.want(3, 600)
	for i := range 3 {
		tr.data(sub, 100)
		if got := tr.take(); got != s || s.got != i+1 {
			t.Fatalf("message %d: slot %p, want %p, got %d", i, got, s, s.got)
		}
		if s.open != (i < 2) {
			t.Errorf("message %d: open %v", i, s.open)
		}
	}
	tr.want(0, 0)
	if tr.in.free() != 0 {
		t.Errorf("free slot %d", tr.in.free())
	}
}

// What a pull reserved and did not use is free when it is over; messages larger
// than what is reserved (one that came alone) do not make the count negative.
func TestSlotBytes(t *testing.T) {
	tr := newTransport(t, 100, 20)
	s := tr.pull(0, 2, 1000, 1000)
	sub := s.sub
	tr.data(sub, 300)
	tr.take()
	tr.want(1, 700)
	if tr.in.spare != 300 {
		t.Errorf("spare %d", tr.in.spare)
	}
	tr.data(sub, 100)
	tr.take()
	tr.want(0, 0)
	if tr.in.spare != 1000 {
		t.Errorf("spare %d, want all", tr.in.spare)
	}

	tr.pull(0, 1, 0, 200)
	tr.data(sub, 5000)
	tr.take()
	tr.want(0, 0)
}

// max_bytes used up to the byte ends a pull without a status (nats-server
// consumer.go:4491). A reservation that is no max_bytes does not.
func TestSlotExactBytes(t *testing.T) {
	tr := newTransport(t, 100, 20)
	s := tr.pull(0, 10, 500, 500)
	sub := s.sub
	tr.data(sub, 250)
	tr.data(sub, 250)
	tr.take()
	if !s.open {
		t.Error("over with bytes left")
	}
	tr.take()
	if s.open {
		t.Error("open with no bytes left: the server is done with it")
	}
	tr.want(0, 0)

	s = tr.pull(0, 10, 0, 500) // room reserved, no bound: the server goes on
	tr.data(sub, 500)
	tr.take()
	if !s.open {
		t.Error("over though the server has no byte bound")
	}
	tr.want(9, 0)
}

// A terminal status ends a pull where nothing is owed behind it, and otherwise
// when that has come.
func TestSlotTerminated(t *testing.T) {
	for _, tc := range []struct {
		got, undelivered int
		open             bool
		owed             int
	}{
		{got: 0, undelivered: 10, open: false},
		{got: 4, undelivered: 6, open: false},
		{got: 4, undelivered: 3, open: true, owed: 3},
		{got: 0, undelivered: 0, open: true, owed: 10},
		{got: 9, undelivered: 0, open: true, owed: 1},
		{got: 4, undelivered: 99, open: false},         // more than was asked for
		{got: 4, undelivered: -5, open: true, owed: 6}, // a batch of 0 can report that
	} {
		tr := newTransport(t, 100, 20)
		s := tr.pull(0, 10, 5000, 5000)
		sub := s.sub
		for range tc.got {
			tr.data(sub, 100)
			tr.take()
		}
		tr.in.terminated(s, tc.undelivered, testNow, 3*time.Second)
		tr.check()
		if s.open != tc.open || tr.in.owed != tc.owed {
			t.Errorf("%+v: open %v, owed %d", tc, s.open, tr.in.owed)
		}
		if tc.open && (!s.ended || !s.deadline.Equal(testNow.Add(3*time.Second))) {
			t.Errorf("%+v: ended %v, waits until %v", tc, s.ended, s.deadline)
		}
		for range tc.owed {
			tr.data(sub, 100)
			tr.take()
		}
		if s.open || tr.in.owed != 0 || tr.in.bytes != 0 {
			t.Errorf("%+v: still open when what was owed has come", tc)
		}
	}
}

// Two slots: one channel, one order, and each frame is its own slot's.
func TestTwoSlots(t *testing.T) {
	tr := newTransport(t, 100, 20)
	a := tr.pull(0, 2, 0, 200)
	b := tr.pull(1, 2, 0, 200)
	if tr.in.free() != -1 {
		t.Error("a third slot")
	}
	if a.sub == b.sub || a.inbox == b.inbox || a.token == b.token {
		t.Fatal("the slots share what tells them apart")
	}
	subs := [2]*nats.Subscription{a.sub, b.sub}
	for _, i := range []int{0, 1, 1, 0} {
		tr.data(subs[i], 100)
	}
	for _, i := range []int{0, 1, 1, 0} {
		if got := tr.take(); got != &tr.in.slots[i] {
			t.Errorf("slot %p, want %d", got, i)
		}
	}
	tr.want(0, 0)
	for _, reply := range tr.pulls {
		if !strings.HasPrefix(reply, a.inbox) && !strings.HasPrefix(reply, b.inbox) {
			t.Errorf("reply subject %s is in no slot's inbox", reply)
		}
	}
}

// With MaxWaiting too small for two pulls the second would be refused, in
// silence.
func TestOneSlot(t *testing.T) {
	tr := newTransport(t, 100, 20)
	tr.in.use = 1
	if i := tr.in.free(); i != 0 {
		t.Errorf("free slot %d", i)
	}
	s := tr.pull(0, 1, 0, 100)
	if i := tr.in.free(); i != -1 {
		t.Errorf("free slot %d while the only one is open", i)
	}
	tr.data(s.sub, 100)
	tr.take()
	if i := tr.in.free(); i != 0 {
		t.Errorf("free slot %d", i)
	}
}

// Every pull has a token of its own, so that a status of the one before it can
// be told.
func TestTokens(t *testing.T) {
	tr := newTransport(t, 100, 20)
	seen := map[string]bool{}
	for range 10 {
		s := tr.pull(0, 1, 0, 100)
		if seen[s.token] {
			t.Errorf("token %s twice", s.token)
		}
		seen[s.token] = true
		tr.data(s.sub, 100)
		tr.take()
	}
}

// Giving a slot up drops its inbox. What has arrived of its data stays owed until
// it is taken, what has not is free at once.
func TestGiveUpWithFramesInFlight(t *testing.T) {
	tr := newTransport(t, 100, 20)
	a := tr.pull(0, 5, 2000, 2000)
	b := tr.pull(1, 3, 900, 900)
	subA, subB := a.sub, b.sub
	tr.data(subA, 100)
	tr.data(subB, 300)
	tr.status(subA, a.token, "100")
	tr.data(subA, 100)
	tr.data(subB, 300)
	tr.take() // one of a's

	tr.in.giveUp(0)
	tr.check()
	if tr.subs[subA] != "" {
		t.Error("the inbox is still subscribed")
	}
	if a.open || a.sub != nil || tr.in.free() != 0 {
		t.Error("the slot is not free")
	}
	// Owed: one message of a's that has arrived, three of b's.
	tr.want(1+3, 100+900)
	if tr.in.stray != 1 {
		t.Errorf("%d strays, want 1", tr.in.stray)
	}
	tr.data(subA, 100) // too late: unsubscribed

	// The order is kept: b's first, a's status, a's second, b's second.
	if got := tr.take(); got != b {
		t.Errorf("slot %p, want b", got)
	}
	if got := tr.take(); got != nil {
		t.Errorf("a status of a slot that was given up is taken for slot %p's", got)
	}
	tr.want(1+2, 100+600)
	if got := tr.take(); got != nil {
		t.Errorf("a message of a slot that was given up is taken for slot %p's", got)
	}
	tr.want(2, 600)
	if got := tr.take(); got != b {
		t.Errorf("slot %p, want b", got)
	}
	tr.want(1, 300)

	// The slot is used again, with another inbox.
	a = tr.pull(0, 1, 0, 100)
	if a.sub == subA || a.sub == nil {
		t.Error("the inbox is the old one")
	}
}

// Both slots are given up while data of both waits: a reconnect.
func TestGiveUpBoth(t *testing.T) {
	tr := newTransport(t, 100, 20)
	a, b := tr.pull(0, 5, 2000, 2000), tr.pull(1, 5, 2000, 2000)
	subA, subB := a.sub, b.sub
	for range 3 {
		tr.data(subA, 100)
		tr.data(subB, 200)
	}
	tr.in.giveUp(0)
	tr.in.giveUp(1)
	tr.check()
	tr.want(6, 900)
	for range 6 {
		tr.take()
	}
	tr.want(0, 0)
	if tr.in.stray != 0 || tr.in.adrift != 0 {
		t.Errorf("strays %d, adrift %d", tr.in.stray, tr.in.adrift)
	}
	tr.in.giveUp(0) // of a slot that has no inbox
	tr.check()
}

// More data in the given-up inbox than was asked for (somebody published to it)
// is not counted as owed.
func TestGiveUpWithTooMany(t *testing.T) {
	tr := newTransport(t, 100, 20)
	s := tr.pull(0, 2, 1000, 1000)
	for range 4 {
		tr.data(s.sub, 400)
	}
	tr.in.giveUp(0)
	tr.check()
	tr.want(2, 1000)
	for range 4 {
		tr.take()
	}
	tr.want(0, 0)
}

// Messages beyond the batch, and such in a slot without a pull, count for nothing.
func TestMessagesNobodyAskedFor(t *testing.T) {
	tr := newTransport(t, 100, 20)
	s := tr.pull(0, 1, 0, 500)
	sub := s.sub
	for range 3 {
		tr.data(sub, 100)
	}
	for range 3 {
		tr.take()
	}
	tr.want(0, 0)
	m := &nats.Msg{Subject: "s", Reply: "$JS.ACK.S.c.1.1.1.1.1", Sub: &nats.Subscription{}}
	if got := tr.in.received(m); got != nil {
		t.Errorf("a message of a strange subscription is slot %p's", got)
	}
	m.Sub = nil
	if got := tr.in.received(m); got != nil {
		t.Errorf("a message without a subscription is slot %p's", got)
	}
	tr.check()
}

// A larger channel: new inboxes, and no frame of the old ones.
func TestGrow(t *testing.T) {
	tr := newTransport(t, 10, 20)
	s := tr.pull(0, 1, 0, 100)
	old := s.sub
	tr.data(old, 100)
	tr.take()
	if err := tr.in.grow(500); err != nil {
		t.Fatal(err)
	}
	tr.check()
	if cap(tr.in.ch) != 500+litterMost || tr.subs[old] != "" || len(tr.subs) != 1 {
		t.Errorf("capacity %d, %d subscriptions, old one %q", cap(tr.in.ch), len(tr.subs), tr.subs[old])
	}
	s = tr.pull(0, 2, 0, 200)
	if s.sub == old {
		t.Error("the old inbox is used")
	}
	tr.data(s.sub, 100)
	if got := tr.take(); got != s {
		t.Errorf("slot %p", got)
	}
}

func TestCloseFreesEverything(t *testing.T) {
	tr := newTransport(t, 100, 20)
	a, b := tr.pull(0, 5, 2000, 2000), tr.pull(1, 5, 2000, 2000)
	tr.data(a.sub, 100)
	tr.data(b.sub, 100)
	tr.in.giveUp(1)
	tr.take()
	tr.in.close()
	tr.check()
	tr.want(0, 0)
	if len(tr.subs) != 0 {
		t.Errorf("%d subscriptions left", len(tr.subs))
	}
	if tr.in.spare != 4000 {
		t.Errorf("%d bytes to give back, want all", tr.in.spare)
	}
	if tr.in.take() != nil || tr.in.waiting() != 0 {
		t.Error("a frame outlived its consumer")
	}
	tr.in.close() // again
}

// A pull that nats.go does not take leaves nothing behind.
func TestPullRefused(t *testing.T) {
	tr := newTransport(t, 100, 20)
	tr.refuse = nats.ErrConnectionReconnecting
	p := wire.Pull{Batch: 5, Expires: 10 * time.Second, Heartbeat: time.Second}
	for i := range 2 {
		if err := tr.in.pull(i, "next", p, plain, 100, testNow, 0); err != tr.refuse {
			t.Errorf("slot %d: %v", i, err)
		}
	}
	tr.check()
	tr.want(0, 0)
	if tr.in.free() != 0 {
		t.Errorf("free slot %d", tr.in.free())
	}
}

// The room a pull's statuses take: every heartbeat of its life, its end, one
// stale status and one answer.
func TestStatusRoom(t *testing.T) {
	for _, tc := range []struct {
		expires, heartbeat time.Duration
		least              int
	}{
		{30 * time.Second, 5 * time.Second, 6 + 3},
		{10 * time.Second, 250 * time.Millisecond, 40 + 3},
		{10 * time.Millisecond, 5 * time.Millisecond, 2 + 3},
		{time.Second, 300 * time.Millisecond, 3 + 3},
		{time.Second, time.Millisecond, 1000 + 3},
	} {
		if got := statusRoom(tc.expires, tc.heartbeat); got < tc.least {
			t.Errorf("expires %v, heartbeat %v: room for %d, want at least %d", tc.expires, tc.heartbeat, got, tc.least)
		}
	}
}

// fits never promises room that verify finds missing, and promises all there is
// where nothing is open.
func TestFits(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		tr := newTransport(t, r.IntN(60), 14)
		for i := range 2 {
			batch := tr.in.fits(1+r.IntN(60), statusRoom(10*time.Second, time.Second))
			if batch > 0 {
				tr.pull(i, batch, 0, 1) // check is in there
			}
		}
	}
	tr := newTransport(t, 100, 14)
	room := statusRoom(10*time.Second, time.Second)
	if got := tr.in.fits(1000, room); got < 100 {
		t.Errorf("room for %d messages in a channel made for 100", got)
	}
	if got := tr.in.fits(7, room); got != 7 {
		t.Errorf("fits(7) = %d", got)
	}
}

// verify finds each way in which the books can be wrong.
func TestVerify(t *testing.T) {
	for _, tc := range []struct {
		name   string
		spoil  func(*inbox)
		panics bool
	}{
		{"nothing", func(in *inbox) {}, false},
		{"too few owed", func(in *inbox) { in.owed-- }, true},
		{"too many owed", func(in *inbox) { in.owed++ }, true},
		{"bytes", func(in *inbox) { in.bytes++ }, true},
		{"a closed slot that owes", func(in *inbox) { in.slots[0].open = false }, true},
		{"a slot that owes less than nothing", func(in *inbox) { in.slots[0].owed, in.owed = -1, -1 }, true},
		{"reserved less than nothing", func(in *inbox) { in.slots[0].bytes, in.bytes = -1, -1 }, true},
		{"a channel too small for the messages", func(in *inbox) { in.ch = make(chan *nats.Msg, 20+litterMost) }, true},
		{"a channel too small for the statuses", func(in *inbox) { in.ch = make(chan *nats.Msg, 22+litterMost) }, true},
		{"a channel just large enough", func(in *inbox) { in.ch = make(chan *nats.Msg, 10+14+4+litterMost) }, false},
		{"above MaxMessages", func(in *inbox) { in.slots[0].owed, in.owed = mostMessages+1, mostMessages+1 }, true},
		{"above MaxBytes", func(in *inbox) { in.slots[0].bytes, in.bytes = mostBytes+1, mostBytes+1 }, true},
		{"above MaxBytes, one message alone", func(in *inbox) {
			in.slots[0].bytes, in.bytes = mostBytes+1, mostBytes+1
			in.slots[0].owed, in.owed = 1, 1
		}, false},
		{"strays", func(in *inbox) { in.stray++ }, true},
	} {
		tr := newTransport(t, 200, 20)
		tr.pull(0, 10, 1000, 1000)
		tc.spoil(&tr.in)
		func() {
			defer func() {
				if p := recover(); (p != nil) != tc.panics {
					t.Errorf("%s: panic %v, want one: %v", tc.name, p, tc.panics)
				}
			}()
			tr.in.verify(mostMessages, mostBytes)
		}()
	}
}

// Random pulls, messages, statuses, losses and abandoned slots: the books agree
// after each step, the channel is never full, and in the end nothing is owed and
// every byte was given back.
func TestSlotsProperty(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 99))
		tr := newTransport(t, 1+r.IntN(80), 14)
		tr.in.use = 1 + r.IntN(2)
		// What the server has of the open pulls, by reply subject.
		type pulled struct {
			sub         *nats.Subscription
			token       string
			n, b, beats int
			bounded     bool
		}
		var open []*pulled
		end := func(p *pulled, n int) {
			for i, o := range open {
				if o == p {
					open = append(open[:i], open[i+1:]...)
				}
			}
			if n >= 0 {
				tr.frame(&nats.Msg{Subject: p.token, Sub: p.sub, Header: nats.Header{"Status": {"408"}, "Nats-Pending-Messages": {strconv.Itoa(n)}}})
			}
		}
		read := func() {
			m := tr.in.take()
			switch {
			case m == nil:
			case m.Reply != "":
				tr.in.received(m)
			default:
				s := tr.in.slotOf(m)
				if s != nil && s.open && s.token == m.Subject && m.Header.Get("Status") != "100" {
					n, _ := strconv.Atoi(m.Header.Get("Nats-Pending-Messages"))
					tr.in.terminated(s, n, testNow, time.Second)
				}
			}
			tr.check()
		}
		for range 400 {
			switch r.IntN(12) {
			case 0, 1: // ask
				i := tr.in.free()
				if i < 0 {
					break
				}
				want := min(1+r.IntN(40), mostMessages-tr.in.owed)
				batch := tr.in.fits(want, 14)
				bytes := min(1+r.IntN(3000), mostBytes-tr.in.bytes)
				if batch <= 0 || bytes <= 0 {
					if tr.in.owed == 0 && tr.in.waiting() == 0 {
						if err := tr.in.grow(cap(tr.in.ch) + 20); err != nil {
							t.Fatal(err)
						}
						open = nil
					}
					break
				}
				p := &pulled{n: batch, b: bytes, beats: 10, bounded: r.IntN(4) > 0}
				maxBytes := 0
				if p.bounded {
					maxBytes = bytes
				}
				s := tr.pull(i, batch, maxBytes, bytes)
				p.sub, p.token = s.sub, s.token
				open = append(open, p)
			case 2, 3, 4, 5: // a message
				if len(open) == 0 {
					break
				}
				p := open[r.IntN(len(open))]
				size := 30 + r.IntN(300)
				if p.bounded && p.b >= 30 && r.IntN(3) == 0 {
					size = min(size, p.b) // an exact hit, now and then
				}
				if p.bounded && size > p.b {
					end(p, p.n)
					break
				}
				p.n--
				p.b -= size
				if r.IntN(10) > 0 { // else it is lost
					tr.data(p.sub, size)
				}
				switch {
				case p.bounded && p.b == 0:
					end(p, -1)
				case p.n == 0 && p.bounded:
					end(p, 0)
				case p.n == 0:
					end(p, -1)
				}
			case 6: // a heartbeat
				if len(open) > 0 {
					if p := open[r.IntN(len(open))]; p.beats > 0 {
						p.beats--
						tr.status(p.sub, p.token, "100")
					}
				}
			case 7: // the end of a pull
				if len(open) > 0 {
					p := open[r.IntN(len(open))]
					end(p, p.n)
				}
			case 8: // its end is lost, or what it owed
				if i := r.IntN(2); tr.in.slots[i].open && r.IntN(3) == 0 {
					sub := tr.in.slots[i].sub
					tr.in.giveUp(i)
					tr.check()
					for j := 0; j < len(open); {
						if open[j].sub == sub {
							open = append(open[:j], open[j+1:]...)
						} else {
							j++
						}
					}
				}
			default:
				read()
			}
			tr.check()
		}
		for i := range tr.in.slots {
			tr.in.giveUp(i)
			tr.check()
		}
		for tr.in.waiting() > 0 {
			read()
		}
		tr.want(0, 0)
		if tr.in.stray != 0 || tr.in.adrift != 0 || tr.in.spare != tr.claimed {
			t.Fatalf("seed %d: strays %d, adrift %d, %d of %d bytes to give back", seed, tr.in.stray, tr.in.adrift, tr.in.spare, tr.claimed)
		}
	}
}
