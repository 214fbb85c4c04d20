//go:build unix

package paced

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// A process that is stopped and goes on later finds its clock far ahead of what
// it heard: heartbeats, pulls and requests are overdue, and their answers wait
// in its socket. The reader runs in a process of its own, the test binary once
// more; everything else stays here, a proxy in between.

const childEnv = "PACED_TEST_CHILD" // url|sequence|moment

// playStopped runs a cell of the world process.
func (c *cell) playStopped() {
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	defer cancel()
	c.ctx, c.slow = ctx, map[string]bool{}
	c.srv = testserver.New(c, testserver.Options{Listen: true})
	proxy, err := faultproxy.New(c.srv.ClientURL())
	if err != nil {
		c.Fatal(err)
	}
	defer proxy.Close()
	proxy.SetFilter(c.filter)
	c.anc = c.srv.Connect(c, quietly())
	c.ajs, _ = jetstream.New(c.anc)
	c.seq.make(c)
	c.storeN(backlog)

	child := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestChild$")
	child.Env = append(os.Environ(), childEnv+"="+proxy.URL()+"|"+c.seq.name+"|"+string(c.moment))
	out, err := child.StdoutPipe()
	if err != nil {
		c.Fatal(err)
	}
	if err := child.Start(); err != nil {
		c.Fatal(err)
	}
	signal := func(s os.Signal) {
		if err := child.Process.Signal(s); err != nil {
			c.Error(err)
		}
	}
	done := make(chan struct{})
	stop := func(first time.Duration) {
		defer close(done)
		time.Sleep(first)
		signal(syscall.SIGSTOP)
		if c.moment == rebuilding {
			c.loseConsumers() // which the loop finds out afterwards
		}
		if c.moment != atExit {
			c.storeN(5)
		}
		time.Sleep(c.cause.lasts)
		signal(syscall.SIGCONT)
		c.mu.Lock()
		c.healed = time.Now()
		c.mu.Unlock()
		if c.moment != atExit {
			c.store("end")
		}
	}
	if c.moment == beforeAny {
		go func() {
			for len(c.consumers()) == 0 {
				time.Sleep(10 * time.Millisecond)
			}
			stop(500 * time.Millisecond)
		}()
	}
	var said []string
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		said = append(said, lines.Text())
		var i item
		if n, _ := fmt.Sscanf(lines.Text(), "yield %d %s", &i.seq, &i.subject); n != 2 {
			continue
		}
		c.got = append(c.got, i.seq)
		if c.last = i.subject == c.seq.prefix+"end"; c.last {
			c.mu.Lock()
			c.took = time.Since(c.healed)
			c.mu.Unlock()
		}
		switch n := len(c.got); {
		case n == backlog && (c.moment == isParked || c.moment == rebuilding || c.moment == inBody):
			go stop(500 * time.Millisecond)
		case n == backlog && c.moment == atExit, n == backlog/2 && c.moment == midBatch:
			go stop(0)
		}
	}
	<-done
	if err := child.Wait(); err != nil {
		c.Errorf("%v\n%s", err, strings.Join(said[max(0, len(said)-20):], "\n"))
	}
	c.checkYielded()
	c.checkTraffic()
	for n := c.stream().CachedInfo().State.Consumers; n != c.seq.keeps; n = c.stream().CachedInfo().State.Consumers {
		if ctx.Err() != nil {
			c.Errorf("%d consumers left", n)
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestChild is the reader of such a cell. That nothing is left in its process
// TestMain checks.
func TestChild(t *testing.T) {
	url, rest, ok := strings.Cut(os.Getenv(childEnv), "|")
	if !ok {
		t.Skip("only for the fault matrix")
	}
	kind, when, _ := strings.Cut(rest, "|")
	nc, err := nats.Connect(url, quietly(), nats.PingInterval(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	i := slices.IndexFunc(kinds, func(s *sequence) bool { return s.name == kind })
	c := &cell{TB: t, cause: &cause{world: process}, seq: kinds[i], moment: moment(when), nc: nc}
	c.js, _ = jetstream.New(nc)
	n := 0
	for i, err := range c.seq.open(t.Context(), c) {
		if err != nil {
			t.Errorf("%v\n%v", err, &c.log)
			break
		}
		n++
		fmt.Printf("yield %d %s\n", i.seq, i.subject)
		if i.subject == c.seq.prefix+"end" || (n == backlog && c.moment == atExit) {
			break
		}
		switch {
		case n == backlog && c.moment == inBody:
			time.Sleep(2 * time.Second)
		case n == backlog/2 && c.moment == midBatch:
			time.Sleep(200 * time.Millisecond)
		}
	}
	for limit := time.Now().Add(c.seq.linger + time.Second); nc.NumSubscriptions() > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("%d subscriptions left", nc.NumSubscriptions())
		}
	}
}
