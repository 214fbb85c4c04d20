package paced

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// Several loops share a consumer. Their bodies acknowledge, give back, terminate
// and forget, at once or from other goroutines; loops are left and begun again,
// their connections are cut, some of them for good. In the end every message was
// settled: once, where no settlement could be lost on the way.
func TestConsumeProperty(t *testing.T) {
	if *propertySeed != 0 {
		consumeRound(t, *propertySeed)
		return
	}
	for i := range (*propertyRounds + 2) / 3 {
		seed := uint64(i + 1)
		if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { consumeRound(t, seed) }) {
			t.Logf("replay with: go test -run TestConsumeProperty -seed %d", seed)
		}
	}
}

func consumeRound(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	dir := t.TempDir()
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, dir, quietly())
		r.stream(jetstream.StreamConfig{
			Storage:   jetstream.StorageType(rnd.IntN(2)),
			Retention: []jetstream.RetentionPolicy{jetstream.LimitsPolicy, jetstream.WorkQueuePolicy}[rnd.IntN(2)],
		})
		n := 20 + rnd.IntN(100)
		r.publish("s.a", n)

		cfg := worker(jetstream.ConsumerConfig{AckWait: time.Duration(500+rnd.IntN(10_000)) * time.Millisecond})
		if rnd.IntN(3) == 0 {
			cfg.Consumer.MaxAckPending = 1 + rnd.IntN(50)
		}
		if rnd.IntN(3) == 0 {
			cfg.Consumer.AckWait = 0
			cfg.Consumer.BackOff = []time.Duration{time.Second, 2 * time.Second, 700 * time.Millisecond}
		}
		if rnd.IntN(3) == 0 {
			cfg.Consumer.MaxDeliver = 50 // finite, and never reached
		}
		if rnd.IntN(3) == 0 {
			cfg.Tuning.LookAhead = time.Duration(1+rnd.IntN(1000)) * time.Millisecond
		}
		if rnd.IntN(4) == 0 {
			cfg.Progress = 200 * time.Millisecond // nothing is forgotten then, or it would be kept for an hour
		}
		cfg.ConfirmAcks = rnd.IntN(3) == 0
		cfg.MaxMessages = 1 + rnd.IntN(60)
		cuts := rnd.IntN(2) == 0

		var mu sync.Mutex
		settled := map[uint64]int{}
		ctx, finish := context.WithCancel(t.Context())
		defer finish()
		done := func(seq uint64) {
			mu.Lock()
			defer mu.Unlock()
			settled[seq]++
			if len(settled) == n {
				finish()
			}
		}
		unknown := map[uint64]bool{} // sent, and the answer was lost: it may count
		confirmed := func(m Msg, err error) {
			if err == nil {
				done(m.Sequence())
			} else if cuts {
				mu.Lock()
				unknown[m.Sequence()] = true
				mu.Unlock()
			}
		}
		body := func(rnd *rand.Rand, m Msg) {
			choice := rnd.IntN(12)
			if !time.Now().Before(m.AckDeadline()) {
				// A late acknowledgement counts on the server, and so does that
				// of the next delivery.
				choice = 2
			}
			switch choice {
			case 0:
				_ = m.Nak()
			case 1:
				_ = m.NakWithDelay(time.Duration(rnd.IntN(3000)) * time.Millisecond)
			case 2:
				if cfg.Progress > 0 {
					_ = m.Nak()
				}
			case 3:
				if m.Term() == nil {
					done(m.Sequence())
				}
			case 4:
				confirmed(m, m.DoubleAck(ctx))
			default:
				confirmed(m, m.Ack())
			}
		}
		loop := func(seed uint64) {
			rnd := rand.New(rand.NewPCG(seed, 2))
			var workers sync.WaitGroup
			for ctx.Err() == nil {
				nc, err := r.srv.Dial(quietly())
				if rnd.IntN(2) == 0 && err == nil {
					nc.Close()
					nc, err = r.srv.Dial(quietly(), nats.NoReconnect()) // a cut is its end
				}
				if err != nil {
					time.Sleep(100 * time.Millisecond)
					continue
				}
				js, err := jetstream.New(nc)
				if err != nil {
					t.Error(err)
					return
				}
				c := cfg
				c.UntilEmpty = rnd.IntN(4) == 0
				var handle *Consumer
				c.Listener = &Listener{PullIssued: func(int, int) {
					if s := handle.Stats(); s.Outstanding+s.Unsettled > c.MaxMessages {
						t.Errorf("%d asked for and %d unsettled, at most %d", s.Outstanding, s.Unsettled, c.MaxMessages)
					}
				}}
				if handle, err = NewConsumer(js, c); err != nil {
					t.Error(err)
					return
				}
				pause := time.Duration(rnd.IntN(3)) * time.Duration(rnd.IntN(300)) * time.Millisecond
				ended := func(err error) {
					if _, unknown := errors.AsType[*AckError](err); ctx.Err() == nil && !unknown && !errors.Is(err, nats.ErrConnectionClosed) {
						t.Error(err)
					}
				}
				handleOne := func(m Msg) (more bool) {
					time.Sleep(pause)
					if rnd.IntN(4) == 0 {
						seed := rnd.Uint64()
						workers.Go(func() {
							rnd := rand.New(rand.NewPCG(seed, 3))
							time.Sleep(time.Duration(rnd.IntN(1500)) * time.Millisecond)
							body(rnd, m)
						})
					} else {
						body(rnd, m)
					}
					if rnd.IntN(60) == 0 {
						handle.Drain()
					}
					return rnd.IntN(40) > 0
				}
				if rnd.IntN(4) == 0 {
					for batch, err := range handle.Batches(ctx, 1+rnd.IntN(c.MaxMessages), time.Duration(1+rnd.IntN(3000))*time.Millisecond) {
						if err != nil {
							ended(err)
							break
						}
						more := true
						for _, m := range batch {
							more = handleOne(m) && more
						}
						if !more {
							break
						}
					}
				} else {
					for m, err := range handle.Messages(ctx) {
						if err != nil {
							ended(err)
							break
						}
						if !handleOne(m) {
							break
						}
					}
				}
				time.Sleep(3 * time.Second) // what is handed back is on its way
				workers.Wait()
				nc.Close()
			}
		}
		var drop atomic.Int64
		if cuts {
			r.srv.SetFilter(func(f faultproxy.Frame) faultproxy.Action {
				if drop.Load() > 0 && f.Direction == faultproxy.ToClient && (f.Status() != 0 || strings.HasPrefix(f.Reply, "$JS.ACK.")) {
					drop.Add(-1)
					return faultproxy.Drop
				}
				return faultproxy.Pass
			})
		}
		var loops sync.WaitGroup
		for range 1 + rnd.IntN(3) {
			seed := rnd.Uint64()
			loops.Go(func() { loop(seed) })
		}
		hours := time.AfterFunc(3*time.Hour, finish)
		for i := 0; cuts && i < 8 && ctx.Err() == nil; i++ {
			time.Sleep(time.Duration(rnd.IntN(4000)) * time.Millisecond)
			switch rnd.IntN(3) {
			case 0, 1:
				r.srv.Disconnect()
			case 2:
				drop.Store(1 + rnd.Int64N(3))
			}
		}
		loops.Wait()
		hours.Stop()
		for seq := range uint64(n) {
			if k := settled[seq+1]; (k == 0 && !unknown[seq+1]) || (!cuts && k != 1) {
				t.Errorf("sequence %d was settled %d times (cuts: %v, confirmed: %v)", seq+1, k, cuts, cfg.ConfirmAcks)
			}
		}
		synctest.Wait()
		waitConnected(r.nc, 0)
		if ci := r.info("w"); !cuts && (ci.NumAckPending != 0 || ci.NumPending != 0 || ci.NumWaiting != 0) {
			t.Errorf("%d pending, %d to be delivered, %d pulls", ci.NumAckPending, ci.NumPending, ci.NumWaiting)
		}
		if left := budgetHeld(r.nc); left != 0 {
			t.Errorf("%d loops left in the byte budget", left)
		}
	})
}
