package paced

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/wire"
)

// Whatever a server sends as a status, judge answers with a directive of the
// closed set, with a reason where one is needed, and the same one each time.
func FuzzJudge(f *testing.F) {
	for _, row := range statusRows {
		f.Add(row.code, row.description)
	}
	f.Add("", "")
	f.Add("499", "Teapot")
	f.Add("409", "Consumer Deleted\r\nNats-Pending-Messages: 1")
	f.Fuzz(func(t *testing.T, code, description string) {
		d := judge(code, description)
		switch d.kind {
		case skip:
			if d.reason != nil || code != "100" {
				t.Errorf("%q %q is passed over, %v", code, description, d.reason)
			}
		case pullOver:
		case restart, fail:
			if d.reason == nil {
				t.Errorf("%q %q: %v without a reason", code, description, d.kind)
			}
		default:
			t.Errorf("%q %q: %v", code, description, d.kind)
		}
		if d.reason != nil {
			var status *StatusError
			if !errors.As(d.reason, &status) || status.Code != code || status.Description != description {
				t.Errorf("%q %q: reason %#v", code, description, d.reason)
			}
		}
		if again := judge(code, description); again.kind != d.kind {
			t.Errorf("%q %q: %v, then %v", code, description, d.kind, again.kind)
		}
	})
}

// frameLoop is a loop in the middle of its work: two pulls are open, sequence 10
// was yielded as the fifth message of its consumer.
func frameLoop(t testing.TB) *loop {
	k := &link{
		subscribe: func(subject string, ch chan *nats.Msg) (*nats.Subscription, error) {
			return &nats.Subscription{Subject: subject}, nil
		},
		unsubscribe: func(*nats.Subscription) {},
		publish:     func(subject, reply string, data []byte) error { return nil },
		barrier:     func(context.Context) error { return nil },
		lastError:   func() error { return nil },
		status:      func() nats.Status { return nats.CONNECTED },
		stats:       func() nats.Statistics { return nats.Statistics{} },
		newInbox:    nats.NewInbox,
		maxPayload:  func() int { return 1 << 20 },
		reconnect:   func() error { return nil },
		report:      func(error) {},
		events:      make(chan nats.Status, 10),
		detach:      func() {},
	}
	c := OrderedConfig{Stream: "S"}.withDefaults()
	l := newLoop(context.Background(), k, joinBudget(new(nats.Conn)))
	t.Cleanup(l.share.leave)
	r := reader{cfg: &c, api: jetstream.DefaultAPIPrefix}
	r.prepare(l)
	l.gen = &generation{stream: "S", consumer: "c", number: 1}
	l.name, l.serial, l.exact, l.target = "c", 1, true, 20
	l.pullTo = "$JS.API.CONSUMER.MSG.NEXT.S.c"
	l.since = time.Now()
	l.pos.at, l.pos.cseq, l.pos.scanned, l.pos.pending = 10, 5, 10, 10
	if err := l.in.start(64, 50); err != nil {
		t.Fatal(err)
	}
	p := wire.Pull{Batch: 4, MaxBytes: 2000, Expires: 10 * time.Second, Heartbeat: time.Second}
	for i := range 2 {
		if l.share.claim(2000, 1, false) < 2000 {
			t.Fatal("no bytes")
		}
		if err := l.in.pull(i, l.pullTo, p, plain, 2000, time.Now(), time.Second); err != nil {
			t.Fatal(err)
		}
	}
	l.in.verify(l.maxMessages, l.maxBytes)
	return l
}

// Any frames in the loop's inboxes, whoever published them: no panic, nothing
// yielded that is not behind the position, nothing wrong with the books. In the
// strings PULL stands for the reply subject of an open pull and ACK for what the
// ack replies of this consumer begin with.
func FuzzInterpret(f *testing.F) {
	add := func(subject, reply, status, description, pending, consumer, stream string, data []byte) {
		f.Add(byte(0), byte(2), subject, reply, status, description, pending, consumer, stream, data)
		f.Add(byte(1), byte(9), subject, reply, status, description, pending, consumer, stream, data)
		f.Add(byte(4), byte(1), subject, reply, status, description, pending, consumer, stream, data)
		f.Add(byte(2), byte(1), subject, reply, status, description, pending, consumer, stream, data)
	}
	for _, row := range statusRows {
		add("PULL", "", row.code, row.description, "3", "5", "12", nil)
	}
	add("PULL", "", "409", "Consumer Deleted", "", "", "", []byte("a payload"))
	add("PULLx", "", "409", "Consumer Deleted", "", "", "", nil)
	add("PULL", "", "100", "Idle Heartbeat", "", "6", "12", nil)
	add("PULL", "", "100", "Idle Heartbeat", "", "x", "-1", nil)
	add("PULL", "", "100", "Idle Heartbeat", "", "5", "18446744073709551615", nil)
	add("PULL", "", "408", "Request Timeout", "18446744073709551615", "", "", nil)
	add("PULL", "", "408", "Request Timeout", "-3", "", "", nil)
	add("s.a", "ACK1.11.6.1.9", "", "", "", "", "", []byte("payload"))
	add("s.a", "ACK1.11.6.1.9", "409", "Consumer Deleted", "", "", "", nil)
	add("s.a", "ACK1.10.6.1.9", "", "", "", "", "", []byte("seen before"))
	add("s.a", "ACK1.12.7.1.9", "", "", "", "", "", []byte("a gap"))
	add("s.a", "ACK1.11.6.1", "", "", "", "", "", []byte("8 tokens"))
	add("s.a", "ACK1.11.6.1.9.x", "", "", "", "", "", []byte("10 tokens"))
	add("s.a", "$JS.ACK.HUB.hash.S.c.1.11.6.1.9.x", "", "", "", "", "", []byte("12 tokens"))
	add("s.a", "ACK1.18446744073709551615.6.1.18446744073709551615", "", "", "", "", "", nil)
	add("s.a", "ACK1.99999999999999999999.6.1.9", "", "", "", "", "", nil)
	add("s.a", "$JS.ACK.S.other.1.11.6.1.9", "", "", "", "", "", nil)
	add("s.a", "somewhere", "", "", "", "", "", make([]byte, 3000))
	add("", "", "", "", "", "", "", nil)

	f.Fuzz(func(t *testing.T, via, times byte, subject, reply, status, description, pending, consumer, stream string, data []byte) {
		l := frameLoop(t)
		defer l.timer.Stop()
		if via&4 != 0 {
			l.ack = "$JS.ACK.S.c." // a message was read before
		}
		fill := func(s string, i int) string {
			s = strings.ReplaceAll(s, "PULL", l.in.slots[i].token)
			return strings.ReplaceAll(s, "ACK", "$JS.ACK.S.c.")
		}
		for range times%16 + 1 {
			m := &nats.Msg{Data: data}
			i := int(via) % 4
			switch i {
			case 0, 1:
				m.Sub = l.in.slots[i].sub
			case 2:
				m.Sub, i = &nats.Subscription{}, 0 // of a slot that was given up
			default:
				i = 0
			}
			m.Subject, m.Reply = fill(subject, i), fill(reply, i)
			m.Header = nats.Header{}
			for k, v := range map[string]string{"Status": status, "Description": description, "Nats-Pending-Messages": pending, "Nats-Last-Consumer": consumer, "Nats-Last-Stream": stream} {
				if v != "" {
					m.Header[k] = []string{v}
				}
			}
			before := l.pos
			var msg Msg
			d := l.interpret(m, &msg)
			l.in.verify(l.maxMessages, l.maxBytes)
			switch d.kind {
			case deliver:
				if msg.seq <= before.at || msg.cseq != before.cseq+1 {
					t.Fatalf("yields sequence %d (consumer %d) at %+v", msg.seq, msg.cseq, before)
				}
				if m.Reply == "" || !strings.HasPrefix(m.Reply, wire.AckPrefix) {
					t.Fatalf("yields a message with the reply subject %q", m.Reply)
				}
				if n := strings.Count(m.Reply, ".") + 1; n != 9 && n < 11 {
					t.Fatalf("yields a message whose ack reply has %d tokens", n)
				}
				if msg.m != m {
					t.Fatal("yields another message")
				}
				l.yielded(&msg)
			case skip, pullOver:
				if d.kind == skip && d.reason != nil {
					t.Fatalf("skips with the reason %v", d.reason)
				}
			case restart, fail:
				if d.reason == nil {
					t.Fatalf("%v without a reason", d.kind)
				}
				return
			default:
				t.Fatalf("%v", d.kind)
			}
			if l.pos.at < before.at || l.pos.scanned < before.scanned {
				t.Fatalf("position %+v, was %+v", l.pos, before)
			}
		}
	})
}
