// Package paced reads NATS JetStream streams through range-over-func iterators
// at the pace of the loop body.
//
//	for msg, err := range paced.Ordered(ctx, js, paced.OrderedConfig{Stream: "ORDERS"}) {
//		if err != nil {
//			return err
//		}
//		handle(msg)
//	}
//
// The loop body is the handler. There is no callback, no channel and no goroutine
// to look after.
//
// # The contract
//
// Nothing is sent before the range begins. A range that has ended leaves no
// subscription and no goroutine behind, however it ended, and deletes its
// server-side consumer; where that fails the server does it after
// InactiveThreshold. Each pair is a message or an error, never both. An error is
// the last pair. A sequence that was given no end has one only if the body leaves
// it or an error comes.
//
// Messages come in stream order, none missing and none twice. A message counts
// as handled when the loop comes back for the next one.
//
// Ranging again starts again from the configuration. [OrderedConsumer] is the
// handle that keeps its position: [OrderedConsumer.Backlog] reads what is there
// and ends, [OrderedConsumer.Messages] goes on behind it and stays live.
//
// A function that wraps a sequence must not read ahead: asking for the next
// message says that the last one is done. iter.Pull2 works.
//
// # Pacing
//
// The loop asks the server for more only when the body has come back, and only
// for what the body can use in [Tuning].LookAhead: about 20 ms of its work. The
// faster the body, the more is asked for, up to MaxMessages and MaxBytes. A body
// that takes an hour is fine: its time is never held against the server. All
// loops of one connection share one byte budget, see [SetByteBudget].
//
// # Recovery
//
// A lost consumer, a lost connection, a restarted server, a missed heartbeat or
// a gap is repaired inside the loop, which goes on behind the last message it
// yielded. The body does not notice. A [Listener] is told; so is the
// connection's error handler, once for each change of state.
//
// # Errors
//
// What a sequence yields in the end is what the loop cannot repair. All errors
// are listed, by what the caller should do, at [ErrInvalidConfig]. A done context
// is one of them, an error that is both ctx.Err() and context.Cause(ctx), so that
// returning the error never mistakes half a stream for all of it.
//
// # Catching up
//
// UntilCaughtUp ends a sequence once what was present at its start has been
// yielded; [Msg.Replay] tells that part from what is live, and
// [Listener].CaughtUp says when it was over. UntilSeq and UntilTime end it
// elsewhere.
//
// # KV buckets
//
// [Watch], [Keys], [History] and the handle [NewWatcher] read KV buckets with the
// same loop and the same contract. A list of last values is exact on streams of
// any history, through every rebuild.
//
// # Work queues
//
// [Consume] and the handle [NewConsumer] read a consumer with explicit
// acknowledgements, one loop or many. The body settles each message, from any
// goroutine; until then, or until AckWait has passed, the message takes one of
// MaxMessages. What a loop did not hand out goes back when it ends, and
// [Consumer.Drain] ends it without costing a message an attempt.
//
// # Batches
//
// Every handle has Batches(ctx, n, wait): up to n messages at a time, handled as
// a whole, and an empty batch when wait has passed, so that the loop keeps time.
//
// # Limits
//
// For [Ordered] the stream must keep its messages by limits. What retention removed before it
// was read is a [*GapError], or an event with GapContinue. Behind a filter, or on
// a stream with a limit per subject, nobody can tell whether a removed message
// was wanted: [Listener].Gap then tells of a possible gap. Messages deleted one
// by one cannot be seen.
//
// # Testing
//
// [Msg] satisfies jetstream.Msg, so a handler that takes the interface is tested
// without a server. The loop itself runs against an embedded nats-server also in
// a bubble of testing/synctest, where waiting costs no time. The server must not
// listen (DontListen), the client connects with nats.InProcessServer, both are
// shut down inside the bubble, ats.Register of nats-server/v2/server/ats is called
// once outside of any bubble, and runtime.GC twice before each: nats.go keeps
// timers in a pool.
package paced
