package paced

import (
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// The rows of the matrix. Bounds are of what the design promises, not of what a
// run happened to take: resume 0 is a round trip, 200 ms is nats.go's wait
// between two attempts to connect here, 5 s the longest backoff.
var causes = []cause{
	{
		name:    "consumer deleted",
		harm:    (*cell).loseConsumers,
		creates: 2, pulls: 15,
	},
	{
		name:    "consumer deleted while no pull is open",
		harm:    func(c *cell) { time.Sleep(40 * time.Second); c.loseConsumers() },
		creates: 2, pulls: 15,
		na: map[string]string{
			string(isParked):   "a parked loop has a pull open",
			string(rebuilding): "no pull is ever open then: consumer deleted",
			string(beforeAny):  "the loop is parked, with a pull open",
		},
	},
	{
		name: "consumer deleted untold",
		harm: func(c *cell) {
			c.swallow(1, func(f faultproxy.Frame) bool { return f.Status() == 409 })
			c.loseConsumers()
		},
		creates: 2, pulls: 15,
		resume: 2*defaultHeartbeat + time.Second, // silence, and a question
	},
	{
		name:    "connection cut",
		harm:    func(c *cell) { c.faults.Disconnect() },
		resume:  200 * time.Millisecond,
		work:    youth, // a pull that young may still be served
		creates: 2, pulls: 15,
	},
	{
		name:  "connection cut for a minute",
		harm:  func(c *cell) { c.faults.Cut() },
		lasts: time.Minute, heal: func(c *cell) { c.faults.Restore() },
		resume:  200 * time.Millisecond,
		work:    youth,
		creates: 2, pulls: 15,
	},
	{
		name: "connection cut and restored 500 times",
		harm: func(c *cell) {
			n := 500
			if !*full && c.moment != isParked {
				n = 50
			}
			for i := range n {
				if i%(n/5) == 0 && c.moment != atExit {
					c.store("")
				}
				reconnects := c.nc.Stats().Reconnects
				c.faults.Disconnect()
				waitConnected(c.nc, reconnects+1)
			}
		},
		resume:  200 * time.Millisecond,
		rebuild: maxBackoff, // each attempt was cut
		work:    maxBackoff,
		creates: 12, pulls: 1100, // two for each connection
	},
	{
		name:  "half-open connection",
		harm:  func(c *cell) { c.faults.Mute(faultproxy.ToClient) },
		lasts: 3 * time.Minute, heal: func(c *cell) { c.faults.Unmute(faultproxy.ToClient) },
		resume:  maxBackoff,
		work:    defaultAckWait, // it was sent into the dead connection
		creates: 20, pulls: 20,
	},
	{
		name: "half-open connection, reconnect forced",
		harm: func(c *cell) {
			// The connection is dead from now on, the next one is not.
			dead := true
			c.setFault(func(f faultproxy.Frame) faultproxy.Action {
				dead = dead && f.Verb != "INFO"
				if dead && f.Direction == faultproxy.ToClient {
					return faultproxy.Drop
				}
				return faultproxy.Pass
			})
		},
		lasts:      20 * time.Second,
		reconnects: true,
		resume:     2*defaultHeartbeat + 3*time.Second,
		work:       defaultAckWait,
		creates:    4, pulls: 15,
	},
	{
		name: "server restarted, file store",
		harm: func(c *cell) { c.halt() }, dark: true, file: true,
		lasts: 30 * time.Second, heal: (*cell).restart,
		resume:  500 * time.Millisecond,
		creates: 3, pulls: 15,
	},
	{
		name: "server restarted, memory store",
		harm: func(c *cell) { c.halt() }, dark: true,
		lasts: time.Second, heal: (*cell).restart,
		want:    func(*cell) string { return "no stream" },
		creates: 10, pulls: 15,
	},
	{
		name: "server replaced by an older copy of its store",
		harm: func(c *cell) {
			c.halt()
			copyDir(c, c.copied, c.dir)
			c.restart()
		},
		file: true, dark: true, copies: true,
		na: map[string]string{
			string(beforeAny) + "/Consume": "nothing was received that the older copy could contradict",
		},
		want:    func(*cell) string { return "recreated" },
		creates: 4, pulls: 15,
	},
	{
		name:  "leader step-down",
		world: threeServers, file: true,
		harm: func(c *cell) {
			if err := testserver.StepDownStream(c.anc, c.seq.stream); err != nil {
				c.Error(err)
			}
			if c.seq.keeps > 0 { // with replicas, and a leader of its own
				if err := testserver.StepDownConsumer(c.anc, c.seq.stream, "W"); err != nil {
					c.Log(err)
				}
			}
		},
		heal:    (*cell).current,
		resume:  maxBackoff,
		creates: 5, pulls: 30,
	},
	{
		name:  "server shut down",
		world: threeServers, file: true,
		harm:    func(c *cell) { c.node = c.reader(); c.node.Stop() },
		heal:    func(c *cell) { c.backUp() },
		resume:  maxBackoff,
		creates: 12, pulls: 40,
	},
	{
		name:  "lame duck",
		world: threeServers, file: true,
		harm:    func(c *cell) { c.node = c.reader(); c.node.LameDuck() },
		heal:    func(c *cell) { c.backUp() },
		resume:  2*defaultHeartbeat + time.Second, // nobody is told
		creates: 12, pulls: 40,
	},
	{
		name:    "answers to creates swallowed",
		harm:    func(c *cell) { c.swallowAnswers(3, ".CONSUMER.CREATE."); c.loseConsumers() },
		resume:  20 * time.Second, // three time-outs of 2, 4 and 8 s, three backoffs
		creates: 5, pulls: 15, untidy: true,
	},
	{
		name: "answers to infos swallowed",
		harm: func(c *cell) {
			lost := answersTo(".INFO.", 2)
			told := faultproxy.First(1, func(f faultproxy.Frame) bool { return f.Status() == 409 }, faultproxy.Drop)
			c.setFault(func(f faultproxy.Frame) faultproxy.Action {
				if a := told(f); a != faultproxy.Pass {
					return a
				}
				return lost(f)
			})
			c.loseConsumers()
		},
		resume:  20 * time.Second, // two heartbeats, two time-outs
		creates: 4, pulls: 15,
	},
	{
		name:    "answers to deletes swallowed",
		harm:    func(c *cell) { c.swallowAnswers(100, ".CONSUMER.DELETE."); c.loseConsumers() },
		creates: 2, pulls: 15,
	},
	{
		name: "data frame swallowed",
		harm: func(c *cell) {
			c.swallow(1, func(f faultproxy.Frame) bool { return strings.HasPrefix(f.Reply, "$JS.ACK.") })
		},
		work:    2*defaultHeartbeat + time.Second, // nothing shows it but silence
		creates: 2, pulls: 15,
	},
	{
		name:    "expiry swallowed",
		harm:    func(c *cell) { c.swallow(1, func(f faultproxy.Frame) bool { return f.Status() == 408 }) },
		lasts:   40 * time.Second,
		work:    pullSlack,
		creates: 1, pulls: 15,
	},
	{
		name:    "heartbeat swallowed",
		harm:    func(c *cell) { c.swallow(1, func(f faultproxy.Frame) bool { return f.Status() == 100 }) },
		lasts:   20 * time.Second,
		creates: 1, pulls: 15,
	},
	{
		name: "frames delayed",
		harm: func(c *cell) {
			c.faults.Delay(faultproxy.ToClient, 3*time.Second)
			c.faults.Delay(faultproxy.ToServer, 3*time.Second)
		},
		lasts: time.Minute,
		heal: func(c *cell) {
			c.faults.Delay(faultproxy.ToClient, 0)
			c.faults.Delay(faultproxy.ToServer, 0)
		},
		resume:  6 * time.Second,
		creates: 10, pulls: 40,
	},
	{
		name: "stream purged",
		harm: func(c *cell) {
			if err := c.stream().Purge(c.ctx); err != nil {
				c.Error(err)
			}
		},
		loses: true,
		want: func(c *cell) string {
			if c.moment == midBatch && c.seq.gaps {
				return "gap" // what was not read is gone
			}
			return ""
		},
		resume:  2 * listHeartbeat, // a list has holes
		creates: 2, pulls: 15,
	},
	{
		name: "stream deleted",
		harm: func(c *cell) {
			if err := c.ajs.DeleteStream(c.ctx, c.seq.stream); err != nil {
				c.Error(err)
			}
		},
		want:    func(*cell) string { return "no stream" },
		creates: 8, pulls: 15,
	},
	{
		name: "stream made anew",
		harm: func(c *cell) {
			if err := c.ajs.DeleteStream(c.ctx, c.seq.stream); err != nil {
				c.Error(err)
			}
			time.Sleep(100 * time.Millisecond)
			c.seq.make(c)
			for range 20 {
				if _, err := c.ajs.Publish(c.ctx, c.seq.prefix+"new", nil); err != nil {
					c.Error(err)
				}
			}
		},
		want:    func(*cell) string { return "recreated" },
		creates: 5, pulls: 15,
	},
	{
		name: "messages deleted in the middle",
		harm: func(c *cell) {
			for _, q := range []uint64{3, 8, 9} {
				var err error
				if c.seq.keyed { // a bucket takes no deletes
					err = c.stream().Purge(c.ctx, jetstream.WithPurgeSubject(fmt.Sprintf("%sk%d", c.seq.prefix, q)))
				} else {
					err = c.stream().DeleteMsg(c.ctx, q)
				}
				if err != nil {
					c.Error(err)
				}
			}
		},
		loses:   true,
		creates: 1, pulls: 15,
	},
	{
		name:  "retention overtakes the reader",
		harm:  func(c *cell) { c.storeN(100) },
		keeps: 15, dark: true, loses: true,
		want: func(c *cell) string {
			if c.seq.gaps {
				return "gap"
			}
			return ""
		},
		na: map[string]string{
			string(isParked):  "a parked reader takes what comes as it comes",
			string(beforeAny): "the reader is parked and takes what comes as it comes",
		},
		resume:  2 * listHeartbeat, // a list has holes
		creates: 2, pulls: 30,
	},
	{
		name: "consumer reaped by its inactive threshold",
		harm: func(c *cell) {
			if c.moment == inBody || c.moment == midBatch {
				time.Sleep(defaultInactive + time.Minute) // no pull is open
			} else {
				c.faults.Cut()
			}
		},
		lasts: defaultInactive + 2*time.Minute,
		heal: func(c *cell) {
			if c.moment == isParked || c.moment == beforeAny {
				if n := c.consumers(); len(n) > 0 {
					c.Errorf("not reaped: %v", n)
				}
			}
			c.faults.Restore()
		},
		resume:  200 * time.Millisecond,
		creates: 2, pulls: 40, reaps: true,
	},
	{
		name:    "MaxWaiting reached",
		harm:    (*cell).crowd,
		lasts:   time.Minute,
		resume:  2*defaultHeartbeat + time.Second,
		creates: 5, pulls: 30,
	},
	permission("create", "$JS.API.CONSUMER.CREATE.>", "no permission"),
	permission("pull", "$JS.API.CONSUMER.MSG.NEXT.>", "no permission"),
	permission("stream info", "$JS.API.STREAM.INFO.>", "no permission"),
	permission("consumer info", "$JS.API.CONSUMER.INFO.>", ""),
	permission("delete", "$JS.API.CONSUMER.DELETE.>", ""),
	{
		name:  "JetStream disabled for a while",
		harm:  func(c *cell) { c.off = true; c.halt(); c.restart() },
		lasts: 30 * time.Second,
		heal:  func(c *cell) { c.off = false; c.halt(); c.restart() },
		file:  true, dark: true,
		resume:  maxBackoff,
		creates: 1 + allowed(30*time.Second), pulls: 15,
	},
	{
		name: "insufficient resources",
		harm: func(c *cell) {
			c.refuse(".CONSUMER.CREATE.", `{"error":{"code":503,"err_code":10023,"description":"insufficient resources"}}`)
			c.loseConsumers()
		},
		lasts: 30 * time.Second, heal: func(c *cell) { c.setFault(nil) },
		resume:  maxBackoff,
		creates: 1 + allowed(30*time.Second), pulls: 15,
	},
	{
		name: "maximum consumers",
		harm: func(c *cell) {
			_, err := c.stream().CreateConsumer(c.ctx, jetstream.ConsumerConfig{Durable: "foreign", AckPolicy: jetstream.AckExplicitPolicy})
			if err != nil {
				c.Error(err)
			}
			c.limitConsumers(1)
			c.loseConsumers()
		},
		lasts: 30 * time.Second,
		heal: func(c *cell) {
			c.limitConsumers(-1)
			if err := c.stream().DeleteConsumer(c.ctx, "foreign"); err != nil {
				c.Error(err)
			}
		},
		idle: func(c *cell) string {
			if c.moment != atExit && c.moment != inBody && len(c.made) < 4 {
				return "no create was refused"
			}
			return ""
		},
		resume:  maxBackoff,
		creates: 1 + allowed(30*time.Second), pulls: 15,
	},
	{
		name:    "clock jump of the process",
		world:   process,
		lasts:   3 * time.Second, // twelve heartbeats
		resume:  time.Second,
		creates: 2, pulls: 40,
	},
}

// allowed is how many creates the backoff allows within d, if none succeeds.
func allowed(d time.Duration) int {
	l := &loop{jitter: func(d time.Duration) time.Duration { return d / 2 }} // the least of it
	n := 1
	for d >= 0 {
		n++
		l.attempt = n
		d -= l.backoff(false)
	}
	return n
}

// permission: the server comes back with other permissions, which is how they
// change under a connection.
func permission(what, subject, ends string) cause {
	return cause{
		name: "no permission to " + what,
		harm: func(c *cell) {
			c.deny = []string{subject}
			c.halt()
			c.restart()
			if what == "consumer info" && (c.moment == isParked || c.moment == beforeAny) {
				// A reason to ask: heartbeats stop without a word.
				time.Sleep(10 * time.Second)
				c.swallow(1, func(f faultproxy.Frame) bool { return f.Status() == 409 })
				c.loseConsumers()
			} else if c.seq.keeps > 0 && what != "pull" && what != "delete" {
				c.loseConsumers() // it would outlive the restart, and nothing be asked for
			}
		},
		want: func(c *cell) string {
			if what == "consumer info" && c.seq.keeps > 0 {
				return "no permission" // it cannot look whether it is there
			}
			return ends
		},
		users: true, file: true, untidy: what == "delete",
		resume:  2*defaultHeartbeat + time.Second,
		creates: 4, pulls: 20,
	}
}

func (c *cell) swallow(n int, match func(faultproxy.Frame) bool) {
	c.setFault(faultproxy.First(n, func(f faultproxy.Frame) bool {
		return f.Direction == faultproxy.ToClient && match(f)
	}, faultproxy.Drop))
}

// answersTo drops the first n answers to requests of one kind.
func answersTo(api string, n int) faultproxy.Filter {
	replies := map[string]bool{}
	return func(f faultproxy.Frame) faultproxy.Action {
		switch {
		case f.Direction == faultproxy.ToServer && strings.Contains(f.Subject, api):
			replies[f.Reply] = true
		case f.Direction == faultproxy.ToClient && replies[f.Subject] && n > 0:
			n--
			return faultproxy.Drop
		}
		return faultproxy.Pass
	}
}

func (c *cell) swallowAnswers(n int, api string) { c.setFault(answersTo(api, n)) }

// refuse answers requests of one kind in place of the server.
func (c *cell) refuse(api, answer string) {
	c.setFault(func(f faultproxy.Frame) faultproxy.Action {
		if f.Direction != faultproxy.ToServer || !strings.Contains(f.Subject, api) {
			return faultproxy.Pass
		}
		// Behind the subscription that is still on its way to the server.
		time.AfterFunc(time.Millisecond, func() {
			if err := c.anc.Publish(f.Reply, []byte(answer)); err != nil {
				c.Error(err)
			}
		})
		return faultproxy.Drop
	})
}

func (c *cell) limitConsumers(n int) {
	limits := server.JetStreamAccountLimits{MaxMemory: -1, MaxStore: -1, MaxStreams: -1, MaxConsumers: n, MaxAckPending: -1}
	err := c.srv.Server().GlobalAccount().UpdateJetStreamLimits(map[string]server.JetStreamAccountLimits{"": limits})
	if err != nil {
		c.Error(err)
	}
}

// crowd parks as many foreign pulls on the loop's consumer as its queue takes,
// for as long as the trouble lasts.
func (c *cell) crowd() {
	inbox := c.anc.NewInbox()
	sub, err := c.anc.SubscribeSync(inbox)
	if err != nil {
		c.Error(err)
		return
	}
	time.AfterFunc(c.cause.lasts, func() { _ = sub.Unsubscribe() })
	for _, consumer := range c.consumers() {
		for range 512 {
			body := fmt.Sprintf(`{"batch":1,"expires":%d}`, c.cause.lasts)
			if err := c.anc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT."+c.seq.stream+"."+consumer, inbox, []byte(body)); err != nil {
				c.Error(err)
			}
		}
	}
	if err := c.anc.Flush(); err != nil {
		c.Error(err)
	}
}

// reader is the server that has the loop's consumer, which is in memory there
// alone.
func (c *cell) reader() *testserver.Server {
	for {
		for _, name := range c.consumers() {
			return c.cluster.ConsumerLeader(c, c.seq.stream, name)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// backUp starts the server that went.
func (c *cell) backUp() {
	if err := c.node.Start(); err != nil {
		c.Error(err)
	}
	c.current()
}

// current waits until every replica has what the leader has: how long that
// takes is the cluster's business, and the loop's consumer may live on any.
func (c *cell) current() {
	if err := c.cluster.WaitReady(c.seq.stream); err != nil {
		c.Error(err)
	}
}
