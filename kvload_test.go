package paced

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"runtime"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

var manyKeys = flag.Int("keys", 200_000, "how many keys TestKeysInConstantMemory lists")

// loadRig is a bucket of many keys on a server with a real socket, and a client
// whose drops are counted.
type loadRig struct {
	*rig
	kv    jetstream.KeyValue
	keys  int
	drops atomic.Int64
}

func newLoadRig(t *testing.T, keys, size int) *loadRig {
	t.Helper()
	r := &loadRig{keys: keys}
	srv := testserver.New(t, testserver.Options{Listen: true})
	nc := srv.Connect(t, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		if errors.Is(err, nats.ErrSlowConsumer) {
			r.drops.Add(1)
		}
	}))
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	r.rig = &rig{T: t, srv: srv, nc: nc, js: js}
	r.kv = r.bucket(jetstream.KeyValueConfig{History: 1, Storage: jetstream.MemoryStorage})

	// On a connection of its own: the budget believes the rates it saw.
	fill, err := jetstream.New(srv.Connect(t), jetstream.WithPublishAsyncMaxPending(1024))
	if err != nil {
		t.Fatal(err)
	}
	value := bytes.Repeat([]byte("v"), size)
	for i := range keys {
		if _, err := fill.PublishAsync(fmt.Sprintf("$KV.B.key.%d", i), value, jetstream.WithStallWait(10*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	<-fill.PublishAsyncComplete()
	s, err := r.kv.Status(t.Context())
	if err != nil || s.Values() != uint64(keys) {
		t.Fatalf("%v keys of %d, %v", s.Values(), keys, err)
	}
	return r
}

// watch lets many watchers read the bucket at once. Each has to see every key
// in strict order, through one consumer; nothing may be dropped or cut, and
// what is asked for must never exceed budget.
func (r *loadRig) watch(watchers, budget int, body func()) {
	r.Helper()
	handles := make([]*Watcher, watchers)
	for i := range handles {
		var err error
		if handles[i], err = NewWatcher(r.js, WatchConfig{Bucket: "B"}); err != nil {
			r.Fatal(err)
		}
	}
	own := joinBudget(r.nc) // to look at the others
	defer own.leave()
	done := make(chan struct{})
	var watch, look sync.WaitGroup
	most := 0
	look.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(200 * time.Microsecond):
			}
			own.b.mu.Lock()
			held := 0
			for _, s := range own.b.loops {
				if s != nil {
					held += s.bytes
				}
			}
			own.b.mu.Unlock()
			most = max(most, held)
			for _, w := range handles {
				if n := w.Stats().OutstandingBytes; n > min(budget, defaultMaxBytes) {
					r.Errorf("one watcher has %d bytes outstanding", n)
					return
				}
			}
		}
	})
	start := time.Now()
	for _, w := range handles {
		watch.Go(func() {
			n := uint64(0)
			for e, err := range w.Snapshot(r.Context()) {
				if err != nil {
					r.Error(err)
					break
				}
				if n++; e.Revision() != n {
					r.Errorf("revision %d, want %d", e.Revision(), n)
					break
				}
				body()
			}
			if n != uint64(r.keys) {
				r.Errorf("%d of %d keys", n, r.keys)
			}
			if s := w.Stats(); s.Rebuilds != 0 || s.LastError != nil {
				r.Errorf("%d rebuilds, last error %v", s.Rebuilds, s.LastError)
			}
		})
	}
	watch.Wait()
	took := time.Since(start)
	close(done)
	look.Wait()
	if most > budget {
		r.Errorf("%d bytes asked for, the budget is %d", most, budget)
	}
	if n := r.drops.Load(); n != 0 {
		r.Errorf("%d drops", n)
	}
	wantUncut(r.T, r.srv.Server(), r.nc)
	r.Logf("%d watchers, %d keys: %v, at most %d bytes asked for", watchers, r.keys, took.Round(time.Millisecond), most)
}

// Eight watchers with a slow body on one connection, once with more to read
// than the budget allows at a time.
func TestWatchersWithSlowBodies(t *testing.T) {
	const work = 50 * time.Microsecond
	for name, body := range map[string]func(){
		"sleeping": func() { time.Sleep(work) },
		"busy": func() {
			for start := time.Now(); time.Since(start) < work; {
			}
		},
	} {
		for _, budget := range []int{budgetFloor, budgetCeiling} {
			t.Run(fmt.Sprintf("%s, %d MiB", name, budget>>20), func(t *testing.T) {
				r := newLoadRig(t, 1500, 4<<10)
				SetByteBudget(r.nc, budget)
				r.watch(8, budget, body)
			})
		}
	}
}

// Twenty watchers as fast as they can: half a gigabyte through one connection.
func TestWatchersAtFullSpeed(t *testing.T) {
	r := newLoadRig(t, 2000, 12<<10)
	r.watch(20, budgetCeiling, func() {})
}

// Keys holds no more of a large bucket in memory than of a small one.
func TestKeysInConstantMemory(t *testing.T) {
	r := newLoadRig(t, *manyKeys, 0)
	live := func() int64 {
		runtime.GC()
		s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
		metrics.Read(s)
		return int64(s[0].Value.Uint64())
	}

	// What is alive, ten times on the way.
	live() // sync.Pools empty
	before, most, n := live(), int64(0), 0
	for k, err := range Keys(t.Context(), r.js, "B") {
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("key.%d", n); k != want {
			t.Fatalf("%s, want %s", k, want)
		}
		if n++; n%(r.keys/10) == 0 {
			most = max(most, live()-before)
		}
	}
	if n != r.keys {
		t.Errorf("%d keys", n)
	}
	if most > 20<<20 {
		t.Errorf("the heap grew by %d bytes", most)
	}

	// The time, undisturbed and by turns.
	ours, theirs := time.Hour, time.Hour
	for range 3 {
		start := time.Now()
		n = 0
		for _, err := range Keys(t.Context(), r.js, "B") {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		ours = min(ours, time.Since(start))
		if n != r.keys {
			t.Errorf("%d keys", n)
		}

		start = time.Now()
		l, err := r.kv.ListKeys(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		n = 0
		for range l.Keys() {
			n++
		}
		theirs = min(theirs, time.Since(start))
		if n != r.keys {
			t.Logf("ListKeys: %d keys", n)
		}
	}
	t.Logf("%d keys: Keys %v, ListKeys %v; the heap grew by %d KiB at most", r.keys, ours.Round(time.Millisecond), theirs.Round(time.Millisecond), most>>10)
	if n := r.drops.Load(); n != 0 {
		t.Logf("%d drops, ListKeys's", n)
	}
}
