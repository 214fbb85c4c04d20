package paced

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// What others in the account publish to subjects that can be guessed, and to
// those that can be learnt with permission to subscribe to everything, neither
// appears as a message nor ends the loop, as long as the inbox is not known.
func TestHostilePublisher(t *testing.T) {
	for _, s := range kinds {
		t.Run(testName(s.name), func(t *testing.T) {
			testserver.InBubble(t, func(t *testing.T) {
				c := &cell{TB: t, cause: &cause{}, moment: isParked, seq: s}
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				c.ctx = ctx
				c.begin()
				c.storeN(backlog)
				done := make(chan struct{})
				hostile := func() {
					defer close(done)
					name := c.consumers()[0]
					ack := "$JS.ACK." + s.stream + "." + name + ".1.999.11.1700000000000000000.0"
					status := func(subject, code, text string) {
						m := nats.NewMsg(subject)
						m.Header["Status"], m.Header["Description"] = []string{code}, []string{text}
						_ = c.anc.PublishMsg(m)
					}
					for _, subject := range []string{
						"_INBOX.a.1", "_INBOX", "_INBOX." + name + ".1", "_INBOX." + name,
						// A reader's inboxes are made by nats.go: a prefix of the
						// connection's own, and a random part for each.
						c.nc.Opts.InboxPrefix + "." + name + ".1",
					} {
						_ = c.anc.PublishRequest(subject, ack, []byte("hostile"))
						for _, row := range statusRows {
							status(subject, row.code, row.description)
						}
						_ = c.anc.Publish(subject, []byte(`{"error":{"code":404,"err_code":10059,"description":"stream not found"}}`))
					}
					// The answers to what the loop asks, and acks of others.
					_ = c.anc.PublishRequest("$JS.API.CONSUMER.INFO."+s.stream+"."+name, "x", nil)
					_ = c.anc.Publish(ack, []byte("+TERM"))
					// In the stream itself: headers that look like the server's.
					m := nats.NewMsg(s.prefix + "status")
					m.Header["Status"], m.Header["Description"] = []string{"409"}, []string{"Consumer Deleted"}
					if _, err := c.ajs.PublishMsg(ctx, m); err != nil {
						t.Error(err)
					}
					c.store("end")
				}
				n := 0
				for i, err := range s.open(ctx, c) {
					if err != nil {
						t.Fatal(err)
					}
					if n++; n == backlog {
						time.AfterFunc(time.Minute, hostile)
					}
					if n == backlog+1 && i.subject != s.prefix+"status" {
						t.Errorf("got %v", i)
					}
					if i.subject == s.prefix+"end" {
						break
					}
				}
				<-done
				if n != backlog+2 || len(c.made) != 1 {
					t.Errorf("%d messages, %d creates", n, len(c.made))
				}
			})
		})
	}
}

// Whoever knows an inbox all the same (it takes permission to subscribe to
// everything, or to see the server's connections) cannot pass off a message: it
// has to name the consumer and the next sequence in its reply subject. What that
// can do is to cost a rebuild; the books stay right, and nothing is lost.
func TestHostilePublisherWithTheInbox(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "", quietly())
		anc := testserver.Connect(t, "", quietly(), nats.InProcessServer(around{r.srv}))
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 10)
		var mu sync.Mutex
		inbox := ""
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			if f.Direction == faultproxy.ToServer && strings.Contains(f.Subject, ".MSG.NEXT.") {
				mu.Lock()
				inbox = f.Reply[:strings.LastIndex(f.Reply, ".")]
				mu.Unlock()
			}
			return faultproxy.Pass
		})
		done := make(chan struct{})
		go func() {
			defer close(done)
			time.Sleep(time.Minute)
			mu.Lock()
			to := inbox
			mu.Unlock()
			_ = anc.Publish(to+".guess", []byte("no reply subject"))
			_ = anc.PublishRequest(to+".guess", "$JS.ACK.S.other.1.11.11.1.0", []byte("another consumer"))
			_ = anc.PublishRequest(to+".guess", "$JS.ACK.S", []byte("short"))
			_ = anc.PublishRequest(to+".guess", "elsewhere", []byte("a request"))
			for _, row := range statusRows {
				m := nats.NewMsg(to + ".9999")
				m.Header["Status"], m.Header["Description"] = []string{row.code}, []string{row.description}
				_ = anc.PublishMsg(m)
			}
			_ = anc.Flush()
			r.publish("s.a", 1)
		}()
		var got []uint64
		l := &log{}
		for m, err := range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S", Listener: l.listener()}) {
			if err != nil {
				t.Fatal(err)
			}
			if string(m.Data()) != "x" {
				t.Errorf("%q is not of the stream", m.Data())
			}
			if got = append(got, m.Sequence()); len(got) == 11 {
				break
			}
		}
		<-done
		wantSequences(t, got, sequences(1, 11))
		if l.resubs != 0 {
			t.Errorf("%d rebuilds\n%v", l.resubs, l)
		}
	})
}

// Names and inboxes have a random part, and no two are alike.
func TestNamesAreUnguessable(t *testing.T) {
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, "")
		r.stream(jetstream.StreamConfig{})
		r.publish("s.a", 1)
		var mu sync.Mutex
		seen := map[string]bool{}
		r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
			mu.Lock()
			defer mu.Unlock()
			var random string
			switch {
			case f.Verb == "SUB" && strings.HasSuffix(f.Subject, ".*"):
				random = strings.Split(f.Subject, ".")[1]
			case strings.Contains(f.Subject, ".CONSUMER.CREATE."):
				random = strings.Split(f.Subject[strings.LastIndex(f.Subject, ".")+1:], "_")[1]
			default:
				return faultproxy.Pass
			}
			if len(random) < 12 {
				t.Errorf("%s has only %d random characters", f.Subject, len(random))
			}
			if seen[random] {
				t.Errorf("%s was there before", random)
			}
			seen[random] = true
			return faultproxy.Pass
		})
		for range 50 {
			for range Ordered(t.Context(), r.js, OrderedConfig{Stream: "S"}) {
				break
			}
		}
		if len(seen) < 100 {
			t.Errorf("%d names and inboxes", len(seen))
		}
	})
}

// Neither errors nor what is told to listeners, handlers and Stats carries a
// payload, a header or a key's value, whatever goes wrong.
func TestErrorsCarryNoPayload(t *testing.T) {
	const secret = "hunter2"
	testserver.InBubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var said []string
		note := func(v ...any) {
			mu.Lock()
			defer mu.Unlock()
			said = append(said, fmt.Sprintf("%v %+v", v, v))
		}
		r := newRig(t, "", nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { note(err) }))
		s := r.stream(jetstream.StreamConfig{MaxMsgs: 30})
		store := func(n int) {
			for range n {
				m := nats.NewMsg("s.a")
				m.Data = []byte(secret)
				m.Header.Set("K", secret)
				if _, err := r.js.PublishMsg(t.Context(), m); err != nil {
					t.Fatal(err)
				}
			}
		}
		store(10)
		lis := &Listener{
			Failed:        func(err error) { note(err) },
			Resubscribing: func(err error, _ int, _ time.Duration) { note(err) },
			Gap:           func(from, to uint64, certain bool) { note(from, to, certain) },
			Handled:       func(q uint64, subject string, d time.Duration) { note(q, subject, d) },
		}
		c, err := NewOrderedConsumer(r.js, OrderedConfig{Stream: "S", Listener: lis, MaxMessages: 2})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, err := range c.Messages(t.Context()) {
			if err != nil {
				note(err)
				break
			}
			switch n++; n {
			case 4:
				deleteConsumers(r)
			case 6:
				r.srv.SetFilter(faultproxy.First(1, func(f faultproxy.Frame) bool { return strings.HasPrefix(f.Reply, "$JS.ACK.") }, faultproxy.Drop))
			case 8:
				store(100) // a gap
			}
		}
		note(c.Stats())
		ctx, cancel := context.WithCancelCause(t.Context())
		cfg := worker(jetstream.ConsumerConfig{})
		cfg.ConfirmAcks, cfg.Listener = true, lis
		n = 0
		if err := consume(t, r, ctx, cfg, func(m Msg) bool {
			note(m.Ack())
			note(m.Ack()) // settled before
			if n++; n == 3 {
				if err := s.DeleteConsumer(t.Context(), "w"); err != nil {
					t.Error(err)
				}
			}
			return true
		}); err == nil {
			t.Error("no error")
		} else {
			note(err)
		}
		cancel(errors.New("done"))
		mu.Lock()
		defer mu.Unlock()
		if len(said) < 20 {
			t.Errorf("only %d things were said", len(said))
		}
		for _, text := range said {
			if strings.Contains(text, secret) {
				t.Errorf("says %s", text)
			}
		}
	})
}
