package paced

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

// In a cluster the stream's leader steps down, the server that has the loop's
// consumer goes down and comes back, and another goes into lame duck mode, all
// under a reader that parks in between: it goes on without a hole or a repeat.
func TestCluster(t *testing.T) {
	c := testserver.NewCluster(t, nil)
	nc := testserver.Connect(t, c.URL(), quietly())
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 90*time.Second, errors.New("the cluster did not come back"))
	defer cancel()
	create := func() (err error) {
		_, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Replicas: 3})
		return err
	}
	for err = create(); err != nil && ctx.Err() == nil; err = create() {
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
	publish := func(n int) {
		for i := 0; i < n; {
			// The stream has no leader for a moment. A message that was
			// stored without an answer is one more.
			one, cancel := context.WithTimeout(ctx, time.Second)
			_, err := js.Publish(one, "s.a", nil)
			cancel()
			if err == nil {
				i++
			} else if ctx.Err() != nil {
				return // the range has ended, or says why it has not
			}
		}
	}
	l := &log{}
	publish(100)
	var consumer string
	lis := Listeners(l.listener(), &Listener{Subscribed: func(name string, _ int) { consumer = name }})
	harms := []func(){
		func() {
			if err := testserver.StepDownStream(nc, "S"); err != nil {
				t.Error(err)
			}
		},
		func() {
			// The one that has the consumer, which is in memory there alone.
			n := c.ConsumerLeader(t, "S", consumer)
			n.Stop()
			if err := n.Start(); err != nil {
				t.Error(err)
			}
		},
		func() { c.Nodes[0].LameDuck() },
	}
	step := 0
	want, next := uint64(0), uint64(100)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for m, err := range Ordered(ctx, js, OrderedConfig{Stream: "S", Listener: lis}) {
		if err != nil {
			t.Fatalf("%v\n%v", err, l)
		}
		if m.Sequence() <= want {
			t.Fatalf("%d after %d", m.Sequence(), want)
		}
		if m.Sequence() != want+1 {
			t.Fatalf("%d after %d\n%v", m.Sequence(), want, l)
		}
		want = m.Sequence()
		if want >= next {
			if step == len(harms) {
				break
			}
			harm := harms[step]
			step++
			next += 100
			wg.Go(func() {
				harm()
				publish(100)
			})
		}
	}
	if step != len(harms) {
		t.Errorf("step %d", step)
	}
	t.Logf("%v", l)
}
