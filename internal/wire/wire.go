// Package wire holds the pure pieces of the JetStream pull protocol: the reply
// subject that carries a message's metadata, the numbers in status headers and
// the pull request itself.
package wire

import (
	"strconv"
	"strings"
	"time"
)

// AckPrefix begins the reply subject of every message that a consumer
// delivers, and of nothing else (nats-server jetstream_api.go:258).
const AckPrefix = "$JS.ACK."

// Ack is the metadata that a delivered message carries in its reply subject.
type Ack struct {
	Delivered uint64 // how often this message was delivered, this time included
	Stream    uint64 // stream sequence
	Consumer  uint64 // consumer sequence
	Time      int64  // when it was stored, nanoseconds since 1970
	Pending   uint64 // messages that still match; a hint, see position.go
}

// SplitAck divides an ack reply subject into the stream, the consumer and the
// tail that ParseAck reads. Subjects of 9 tokens and of 11 or more are known
// (nats-server consumer.go:1441, feature flag js_ack_fc_v2); the longer form
// has domain and account in front and may grow at its end, so that tokens are
// counted from the left.
func SplitAck(reply string) (stream, consumer, tail string, ok bool) {
	rest, found := strings.CutPrefix(reply, AckPrefix)
	if !found {
		return "", "", "", false
	}
	switch tokens := strings.Count(reply, ".") + 1; {
	case tokens == 9:
	case tokens >= 11:
		_, rest, _ = strings.Cut(rest, ".")
		_, rest, _ = strings.Cut(rest, ".")
	default:
		return "", "", "", false
	}
	stream, rest, _ = strings.Cut(rest, ".")
	consumer, tail, _ = strings.Cut(rest, ".")
	return stream, consumer, tail, stream != "" && consumer != ""
}

// Domain returns the JetStream domain that an ack reply subject names, empty
// where it names none.
func Domain(reply string) string {
	rest, found := strings.CutPrefix(reply, AckPrefix)
	if !found || strings.Count(reply, ".")+1 < 11 {
		return ""
	}
	domain, _, _ := strings.Cut(rest, ".")
	if domain == "_" {
		return ""
	}
	return domain
}

// ParseAck reads the five numbers at the head of a tail that SplitAck returned,
// and reports whether more tokens follow them. It allocates nothing. A number that does not fit 64 bits (the time: 63) is
// refused rather than wrapped.
func ParseAck(tail string) (a Ack, more, ok bool) {
	var n [5]uint64
	i := 0
	for f := range n {
		start := i
		var v uint64
		for ; i < len(tail); i++ {
			d := tail[i] - '0'
			if d > 9 {
				break
			}
			v = v*10 + uint64(d)
		}
		switch {
		case i == start:
			return Ack{}, false, false
		case i == len(tail):
			if f < len(n)-1 {
				return Ack{}, false, false
			}
		case tail[i] != '.':
			return Ack{}, false, false
		}
		if i-start > 19 { // may not fit; 19 digits always do
			var err error
			if v, err = strconv.ParseUint(tail[start:i], 10, 64); err != nil {
				return Ack{}, false, false
			}
		}
		n[f] = v
		i++
	}
	if n[3] > 1<<63-1 {
		return Ack{}, false, false
	}
	return Ack{Delivered: n[0], Stream: n[1], Consumer: n[2], Time: int64(n[3]), Pending: n[4]}, i <= len(tail), true
}

// Number reads a status header that holds a decimal number, and reports false
// for anything else, a missing header included.
func Number(s string) (uint64, bool) {
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil
}

// Pull is one pull request (nats-server jetstream_api.go:915).
type Pull struct {
	Batch     int
	MaxBytes  int           // 0: no bound
	Expires   time.Duration // always set: the server keeps a pull without it for ever
	Heartbeat time.Duration // at most half of Expires, else the server answers 400
	Group     string        // priority group; empty: none
	Priority  int           // 0 (first) to 9, within the group
}

// Append encodes the request in the form the server's decoder expects.
func (p Pull) Append(b []byte) []byte {
	b = append(b, `{"batch":`...)
	b = strconv.AppendInt(b, int64(p.Batch), 10)
	if p.MaxBytes > 0 {
		b = append(b, `,"max_bytes":`...)
		b = strconv.AppendInt(b, int64(p.MaxBytes), 10)
	}
	b = append(b, `,"expires":`...)
	b = strconv.AppendInt(b, int64(p.Expires), 10)
	b = append(b, `,"idle_heartbeat":`...)
	b = strconv.AppendInt(b, int64(p.Heartbeat), 10)
	if p.Group != "" {
		b = append(b, `,"group":`...)
		b = strconv.AppendQuote(b, p.Group)
		b = append(b, `,"priority":`...)
		b = strconv.AppendInt(b, int64(p.Priority), 10)
	}
	return append(b, '}')
}
