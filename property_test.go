package paced

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

var (
	propertySeed   = flag.Uint64("seed", 0, "replay the property test with this seed")
	propertyRounds = flag.Int("rounds", 60, "how many random schedules the property test runs")
)

// What is yielded equals what the stream held, whatever the policy, the filter,
// the history, the writers, deletions, cuts and lost consumers, and the speed of
// the body.
func TestProperty(t *testing.T) {
	if *propertySeed != 0 {
		propertyRound(t, *propertySeed)
		return
	}
	for i := range *propertyRounds {
		seed := uint64(i + 1)
		if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { propertyRound(t, seed) }) {
			t.Logf("replay with: go test -run TestProperty -seed %d", seed)
		}
	}
}

// record is one message as it was stored.
type record struct {
	seq     uint64
	subject string
	gone    bool // deleted or purged by the schedule
}

func propertyRound(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 0))
	dir := t.TempDir()
	testserver.InBubble(t, func(t *testing.T) {
		r := newRig(t, dir, quietly())
		sc := jetstream.StreamConfig{Storage: jetstream.StorageType(rnd.IntN(2))}
		history := []int64{-1, -1, 1, 5, 64}[rnd.IntN(5)]
		sc.MaxMsgsPerSubject = history
		retention := history < 0 && rnd.IntN(3) == 0
		if retention {
			sc.MaxMsgs = 150
		}
		s := r.stream(sc)
		keys := 1 + rnd.IntN(60)
		var stored []record
		publish := func(n int) {
			for range n {
				subject := fmt.Sprintf("s.%c.%d", 'a'+rnd.IntN(3), rnd.IntN(keys))
				ack, err := r.js.Publish(context.Background(), subject, make([]byte, rnd.IntN(400)))
				if err != nil {
					t.Fatal(err)
				}
				stored = append(stored, record{seq: ack.Sequence, subject: subject})
			}
		}
		publish(50 + rnd.IntN(300))

		start := uint64(len(stored))
		cfg := OrderedConfig{Stream: "S", OnGap: GapContinue,
			MaxMessages: 1 + rnd.IntN(100), MaxBytes: 1 << (10 + rnd.IntN(12))}
		match := func(string) bool { return true }
		switch rnd.IntN(3) {
		case 1:
			cfg.FilterSubjects = []string{"s.a.>"}
			match = func(s string) bool { return strings.HasPrefix(s, "s.a.") }
		case 2:
			cfg.FilterSubjects = []string{"s.a.*", "s.b.>"}
			match = func(s string) bool { return !strings.HasPrefix(s, "s.c.") }
		}
		var from uint64
		lists := false
		switch rnd.IntN(6) {
		case 0, 1:
		case 2:
			cfg.DeliverPolicy = jetstream.DeliverNewPolicy
			from = uint64(len(stored)) + 1
		case 3:
			cfg.DeliverPolicy = jetstream.DeliverByStartSequencePolicy
			cfg.OptStartSeq = 1 + rnd.Uint64N(uint64(len(stored)))
			from = cfg.OptStartSeq
		case 4, 5:
			cfg.DeliverPolicy = jetstream.DeliverLastPerSubjectPolicy
			lists = true
		}
		if rnd.IntN(4) == 0 {
			cfg.Tuning.Expires = time.Duration(10+rnd.IntN(3000)) * time.Millisecond
		}
		body := []time.Duration{0, 0, time.Millisecond, 20 * time.Millisecond, 700 * time.Millisecond}[rnd.IntN(5)]

		gone := map[uint64]bool{} // reported as a gap, or removed by the limits
		l := &log{}
		cfg.Listener = Listeners(l.listener(), &Listener{Gap: func(from, to uint64, _ bool) {
			for q := from; q <= to; q++ {
				gone[q] = true
			}
		}})
		// remove deletes one message on purpose.
		remove := func() {
			i := rnd.IntN(len(stored))
			if s.DeleteMsg(context.Background(), stored[i].seq) == nil {
				stored[i].gone = true
			}
		}
		var drop atomic.Int64
		filter := func(f faultproxy.Frame) faultproxy.Action {
			if drop.Load() > 0 && f.Direction == faultproxy.ToClient && (f.Status() != 0 || strings.HasPrefix(f.Reply, "$JS.ACK.")) {
				drop.Add(-1)
				return faultproxy.Drop
			}
			return faultproxy.Pass
		}
		r.srv.SetFilter(filter)
		type harm func()
		harms := []harm{
			func() { publish(1 + rnd.IntN(30)) },
			func() { publish(1 + rnd.IntN(30)) },
			func() { publish(1 + rnd.IntN(30)) },
			func() { deleteConsumers(r) },
			func() { n := r.nc.Stats().Reconnects; r.srv.Disconnect(); waitConnected(r.nc, n+1) },
			func() { remove(); remove(); remove() },
			func() { drop.Store(1 + rnd.Int64N(3)) },
			func() { time.Sleep(time.Duration(rnd.IntN(40)) * time.Second) },
		}
		// The schedule runs beside the loop, and now and then in the body.
		steps := 10 + rnd.IntN(30)
		done := make(chan struct{})
		var end uint64
		go func() {
			defer close(done)
			for range steps {
				time.Sleep(time.Duration(rnd.IntN(2000)) * time.Millisecond)
				harms[rnd.IntN(len(harms))]()
			}
			time.Sleep(time.Second)
			drop.Store(0)
			waitConnected(r.nc, 0)
			ack, err := r.js.Publish(context.Background(), "s.a.end", nil)
			if err != nil {
				t.Error(err)
				return
			}
			end = ack.Sequence
			stored = append(stored, record{seq: end, subject: "s.a.end"})
		}()

		ctx, cancel := context.WithTimeoutCause(t.Context(), 6*time.Hour, errors.New("the end did not come"))
		defer cancel()
		var got []uint64
		var replayed []bool
		for m, err := range Ordered(ctx, r.js, cfg) {
			if err != nil {
				t.Fatalf("seed %d: %v\n%+v\n%s", seed, err, cfg, strings.Join(l.lines[max(0, len(l.lines)-20):], "\n"))
			}
			got = append(got, m.Sequence())
			replayed = append(replayed, m.Replay())
			time.Sleep(body)
			if m.Subject() == "s.a.end" {
				break
			}
		}
		<-done
		r.srv.SetFilter(nil)

		yielded := map[uint64]int{}
		bySeq := map[uint64]record{}
		for _, rec := range stored {
			bySeq[rec.seq] = rec
		}
		for i, q := range got {
			yielded[q] = i
			if i > 0 && q <= got[i-1] {
				t.Errorf("seed %d: %d after %d", seed, q, got[i-1])
			}
			if rec, ok := bySeq[q]; !ok || !match(rec.subject) || q < from {
				t.Errorf("seed %d: %d (%s) should not be here", seed, q, rec.subject)
			}
		}
		info, err := s.Info(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		last, deleted := map[string]uint64{}, map[string]uint64{}
		for _, rec := range stored {
			if rec.gone {
				deleted[rec.subject] = rec.seq
			} else {
				last[rec.subject] = rec.seq
			}
		}
		newer := map[string]uint64{} // the newest revision that was yielded
		for _, q := range got {
			newer[bySeq[q].subject] = q
		}
		for _, rec := range stored {
			_, ok := yielded[rec.seq]
			switch {
			case ok || rec.gone || rec.seq < from || !match(rec.subject):
			case lists && (last[rec.subject] != rec.seq || newer[rec.subject] > rec.seq):
			case lists && deleted[rec.subject] > rec.seq:
				// Its successor was deleted while the list was read, so that
				// it became the last one in front of the position.
			case history > 0 && (last[rec.subject] != rec.seq || deleted[rec.subject] > rec.seq):
				// The limit may have taken it.
			case gone[rec.seq]:
			case retention && (lists || len(cfg.FilterSubjects) > 0) && rec.seq < info.State.FirstSeq:
				// With a filter nobody can tell, and the last message of a
				// subject that was removed is no last message any more.
			case retention && rec.seq < got[0]:
				// Gone before the start.
			default:
				t.Errorf("seed %d: %d (%s) is missing", seed, rec.seq, rec.subject)
			}
		}
		if lists {
			// One value per subject in the list: a second one is an update
			// from before the list was made anew.
			in := map[string]bool{}
			for i, q := range got {
				subject := bySeq[q].subject
				if replayed[i] && in[subject] && q <= start {
					t.Errorf("seed %d: %s twice in the list", seed, subject)
				}
				in[subject] = in[subject] || replayed[i]
			}
		}
		r.wantClean()
		if t.Failed() {
			t.Logf("config %+v, history %d, retention %v, body %v", cfg, history, retention, body)
		}
	})
}
