package paced

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// BenchmarkMessagePath is what the loop adds to each message: its channel is filled
// from memory when it asks.
func BenchmarkMessagePath(b *testing.B) {
	const most = 1 << 17
	msgs := make([]*nats.Msg, most)
	for i := range msgs {
		msgs[i] = &nats.Msg{Subject: "bench.data", Data: make([]byte, 128),
			Reply: fmt.Sprintf("$JS.ACK.S.c.1.%d.%d.1764590000000000000.%d", i+1, i+1, most)}
	}
	var ch chan *nats.Msg
	subs := map[string]*nats.Subscription{}
	at := 0
	k := &link{
		subscribe: func(subject string, c chan *nats.Msg) (*nats.Subscription, error) {
			s := &nats.Subscription{Subject: subject}
			ch, subs[strings.TrimSuffix(subject, "*")] = c, s
			return s, nil
		},
		unsubscribe: func(*nats.Subscription) {},
		publish: func(subject, reply string, data []byte) error {
			_, s, _ := strings.Cut(string(data), `"batch":`)
			s, _, _ = strings.Cut(s, ",")
			n, _ := strconv.Atoi(s)
			sub := subs[reply[:strings.LastIndexByte(reply, '.')+1]]
			for ; n > 0 && at < most; n-- {
				msgs[at].Sub = sub
				ch <- msgs[at]
				at++
			}
			return nil
		},
		barrier:    func(context.Context) error { return nil },
		lastError:  func() error { return nil },
		status:     func() nats.Status { return nats.CONNECTED },
		stats:      func() nats.Statistics { return nats.Statistics{} },
		newInbox:   nats.NewInbox,
		maxPayload: func() int { return 1 << 20 },
		events:     make(chan nats.Status, 10),
	}
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		b.StopTimer()
		at = 0
		ctx, cancel := context.WithCancel(context.Background())
		c := OrderedConfig{Stream: "S"}.withDefaults()
		l := newLoop(ctx, k, joinBudget(new(nats.Conn)))
		l.verifies = false
		r := reader{cfg: &c, api: jetstream.DefaultAPIPrefix}
		r.prepare(l)
		l.gen = &generation{stream: "S", consumer: "c", number: 1}
		l.name, l.serial, l.exact, l.target = "c", 1, true, most
		l.pullTo = "$JS.API.CONSUMER.MSG.NEXT.S.c"
		l.since, l.greeted = time.Now(), true
		l.pos.pending = most
		if err := l.in.start(defaultMaxMessages, 50); err != nil {
			b.Fatal(err)
		}
		n := 0
		b.StartTimer()
		err := l.drain(func(Msg, error) bool { n++; return n < most })
		b.StopTimer()
		if err != nil || n != most {
			b.Fatal(n, err)
		}
		cancel()
		l.share.leave()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/most, "ns/message")
}
