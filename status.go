package paced

import "fmt"

// Descriptions that the table below tells apart, as the server writes them.
const (
	statusConsumerDeleted  = "Consumer Deleted"
	statusMessageSize      = "Message Size Exceeds MaxBytes"
	statusRequestTimeout   = "Request Timeout"
	statusBatchCompleted   = "Batch Completed"
	statusLeadershipChange = "Leadership Change"
	statusServerShutdown   = "Server Shutdown"
	statusPushBased        = "Consumer is push based"
	statusMaxWaiting       = "Exceeded MaxWaiting"
)

// judge is the one place that knows what a status means. It is pure and total:
// any pair of strings gives a directive. It does not look at the message
// counts in the headers; those are the slot's (slots.go). Line numbers are
// nats-server v2.15.2.
//
// restart is the answer wherever a fresh consumer heals the matter or shows
// what is wrong in the server's own words: for an ack-none reader making one
// is always safe, and the backoff bounds it.
func judge(code, description string) directive {
	why := func() error { return &StatusError{Code: code, Description: description} }
	switch code {
	case "100":
		// consumer.go:5657. The heartbeat's sequences are read by the caller.
		return directive{kind: skip}

	case "400":
		// A request that the server cannot read or that contradicts the
		// consumer: heartbeat above half of expires (4042), malformed JSON
		// (4036), priority groups (4719-4743). Asking again cannot help.
		return directive{kind: fail, reason: why()}

	case "404":
		// No Messages, 4767 and 5131: only to a no_wait pull, which is never
		// sent here. It ends the pull.
		return directive{kind: pullOver, reason: why()}

	case "408":
		switch description {
		case statusRequestTimeout:
			// 5122, 4526: the pull's own end.
			return directive{kind: pullOver}
		default:
			// Requests Pending (4773), Interest Expired (4554): ended, or
			// never queued.
			return directive{kind: pullOver, reason: why()}
		}

	case "409":
		switch description {
		case statusBatchCompleted:
			// 5590: the batch is full and bytes are left. Routine.
			return directive{kind: pullOver}
		case statusMessageSize:
			// 4495: the next message is larger than what is left of
			// max_bytes. Routine, unless nothing was delivered (pacing.go).
			return directive{kind: pullOver}
		case statusLeadershipChange, statusServerShutdown:
			// 3215 and jetstream.go:1009: this pull is gone, the consumer
			// lives on under a new leader or comes back with its server; if it
			// does not, the next pull is answered by 503.
			return directive{kind: pullOver, reason: why()}
		case statusMaxWaiting:
			// 4795: the queue of pulls is full. Sent only to pulls without a
			// heartbeat; the others are dropped in silence.
			return directive{kind: pullOver, reason: why()}
		case statusConsumerDeleted:
			// 3231, 6762: the consumer or its stream was deleted.
			return directive{kind: restart, reason: why()}
		case statusPushBased:
			// 4610, 4692: somebody made a push consumer under this name.
			return directive{kind: fail, reason: why()}
		default:
			// Exceeded MaxRequestBatch, MaxRequestExpires, MaxRequestMaxBytes
			// (4705-4718): the limits were lowered since they were read; a
			// new consumer comes with its limits. An unknown conflict is
			// treated alike.
			return directive{kind: restart, reason: why()}
		}

	case "412":
		// Required Api Level, 4616: never asked for here.
		return directive{kind: fail, reason: why()}

	case "423":
		// Pin id mismatch, 4745, 4436, 4461: ended; the next pull asks
		// without the id.
		return directive{kind: pullOver, reason: why()}

	case "503":
		// No responders, client.go:4592: nobody listens for pulls on this
		// consumer. It is gone, has no leader, or JetStream is off.
		return directive{kind: restart, reason: why()}

	default:
		// A status that this table does not know. Whether the pull lives on
		// cannot be told, and to guess either way loses messages or stalls; a
		// new consumer does neither.
		return directive{kind: restart, reason: fmt.Errorf("unknown %w", why())}
	}
}
