package paced

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// stock is the ordered consumer of package jetstream, with its defaults. What
// its Next returns as an error is passed over, as its documentation says to.
var stock = &sequence{
	name: "jetstream.OrderedConsumer", stream: "S", prefix: "s.",
	make: (*cell).makeStream,
	open: func(ctx context.Context, c *cell) iter.Seq2[item, error] {
		return func(yield func(item, error) bool) {
			cons, err := c.js.OrderedConsumer(ctx, "S", jetstream.OrderedConsumerConfig{})
			if err != nil {
				yield(item{}, err)
				return
			}
			it, err := cons.Messages()
			if err != nil {
				yield(item{}, err)
				return
			}
			defer it.Stop()
			for {
				m, err := it.Next(jetstream.NextContext(ctx))
				switch {
				case ctx.Err() != nil || errors.Is(err, jetstream.ErrMsgIteratorClosed):
					yield(item{}, errors.Join(err, ctx.Err()))
					return
				case err != nil:
					continue
				}
				meta, err := m.Metadata()
				if err != nil {
					continue
				}
				if !yield(item{meta.Sequence.Stream, m.Subject()}, nil) {
					return
				}
			}
		}
	},
}

// The time from a trouble being over (half-open: from its beginning) to the
// message stored right behind it, measured under fake time where that is
// possible, with package jetstream beside it. go test -v -run TestTimeToResume
// prints the table; -full adds the step-down of a leader.
func TestTimeToResume(t *testing.T) {
	const limit = 15 * time.Minute
	dead := cause{
		name: "half-open connection, at nats.go's own ping interval",
		harm: func(c *cell) {
			lost := true
			c.setFault(func(f faultproxy.Frame) faultproxy.Action {
				lost = lost && f.Verb != "INFO"
				if lost && f.Direction == faultproxy.ToClient {
					return faultproxy.Drop
				}
				return faultproxy.Pass
			})
		},
		reconnects: true, pings: 2 * time.Minute,
		resume: 2*defaultHeartbeat + 3*time.Second,
	}
	rows := []cause{dead}
	for _, name := range []string{
		"consumer deleted", "connection cut", "server restarted, file store", "expiry swallowed",
		"answers to creates swallowed", "leader step-down",
	} {
		rows = append(rows, causes[slices.IndexFunc(causes, func(k cause) bool { return k.name == name })])
	}
	var table strings.Builder
	fmt.Fprintf(&table, "\n%-56s %14s %26s\n", "", "paced.Ordered", stock.name)
	for i := range rows {
		k := &rows[i]
		if k.world != bubble && !*full {
			continue
		}
		fmt.Fprintf(&table, "%-56s", k.name)
		for _, s := range []*sequence{kinds[0], stock} {
			c := &cell{TB: t, cause: k, moment: isParked, seq: s}
			var took time.Duration
			var came bool
			if k.world == bubble {
				c.dir = t.TempDir()
				testserver.InBubble(t, func(t *testing.T) { c.TB = t; took, came = c.timeToResume(limit) })
			} else {
				c.cluster = testserver.NewCluster(t, nil)
				took, came = c.timeToResume(limit / 15)
			}
			text := took.Round(time.Millisecond).String()
			if !came {
				text = "not in " + limit.String()
			}
			if s == stock {
				fmt.Fprintf(&table, " %26s", text)
			} else {
				fmt.Fprintf(&table, " %14s", text)
				if !came || took > k.resume {
					t.Errorf("%s: %s, want at most %v", k.name, text, k.resume)
				}
			}
		}
		table.WriteString("\n")
	}
	t.Log(table.String())
}

func (c *cell) timeToResume(limit time.Duration) (time.Duration, bool) {
	ctx, cancel := context.WithTimeout(c.Context(), limit)
	defer cancel()
	c.ctx = c.Context() // what is stored may come too late for the reader
	c.begin()
	c.storeN(backlog)
	n := 0
	var done sync.WaitGroup
	defer done.Wait()
	for i, err := range c.seq.open(ctx, c) {
		if err != nil {
			return 0, false
		}
		if i.subject == c.seq.prefix+"end" {
			c.mu.Lock()
			defer c.mu.Unlock()
			return time.Since(c.healed), true
		}
		if n++; n == backlog {
			done.Go(func() { c.pause(); c.strike(); c.rest() })
		}
	}
	return 0, false
}
