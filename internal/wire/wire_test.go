package wire

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSplitAndParseAck(t *testing.T) {
	const num = "18446744073709551615"
	for _, tc := range []struct {
		reply            string
		stream, consumer string
		want             Ack
		ok               bool
	}{
		{"$JS.ACK.S.c.1.2.3.4.5", "S", "c", Ack{1, 2, 3, 4, 5}, true},
		{"$JS.ACK.S.c%d.1.2.3.4.0", "S", "c%d", Ack{1, 2, 3, 4, 0}, true},
		{"$JS.ACK._.szMpdrwD.S.c.1.2.3.4.5", "S", "c", Ack{1, 2, 3, 4, 5}, true},
		{"$JS.ACK.HUB.szMpdrwD.S.c.1.2.3.4.5.rand", "S", "c", Ack{1, 2, 3, 4, 5}, true},
		{"$JS.ACK.HUB.szMpdrwD.S.c.1.2.3.4.5.more.to.come", "S", "c", Ack{1, 2, 3, 4, 5}, true},
		{"$JS.ACK.S.c.1." + num + ".3.4." + num, "S", "c", Ack{1, math.MaxUint64, 3, 4, math.MaxUint64}, true},
		{reply: "$JS.ACK.S.c.1.2.3.4"},                      // 8 tokens
		{reply: "$JS.ACK.S.c.1.2.3.4.5.6"},                  // 10 tokens
		{reply: "$JS.ACK.S.c.1.18446744073709551616.3.4.5"}, // one past 64 bits
		{reply: "$JS.ACK.S.c.1.99999999999999999999999.3.4.5"},
		{reply: "$JS.ACK.S.c.1.2.3.9223372036854775808.5"}, // time past 63 bits
		{reply: "$JS.ACK.S.c.1.2.3.4."},
		{reply: "$JS.ACK.S.c.1..3.4.5"},
		{reply: "$JS.ACK.S.c.1.-2.3.4.5"},
		{reply: "$JS.ACK.S.c.a.2.3.4.5"},
		{reply: "$JS.ACK...1.2.3.4.5"},
		{reply: "$JS.FC.S.c.1.2.3.4.5"},
		{reply: "_INBOX.a.b"},
		{reply: ""},
	} {
		stream, consumer, tail, ok := SplitAck(tc.reply)
		var a Ack
		if ok {
			a, _, ok = ParseAck(tail)
		}
		if ok != tc.ok {
			t.Errorf("%q: ok = %v, want %v", tc.reply, ok, tc.ok)
			continue
		}
		if ok && (stream != tc.stream || consumer != tc.consumer || a != tc.want) {
			t.Errorf("%q: %s %s %+v, want %s %s %+v", tc.reply, stream, consumer, a, tc.stream, tc.consumer, tc.want)
		}
	}
}

func TestParseAckAllocatesNothing(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() {
		_, _, tail, _ := SplitAck("$JS.ACK.ORDERS.paced_1.1.123456.123456.1700000000000000000.42")
		ParseAck(tail)
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func TestPullEncodesWhatTheServerDecodes(t *testing.T) {
	for _, p := range []Pull{
		{Batch: 1, Expires: 30 * time.Second, Heartbeat: 5 * time.Second},
		{Batch: 5000, MaxBytes: 8 << 20, Expires: 10 * time.Millisecond, Heartbeat: 5 * time.Millisecond},
		{Batch: 7, Expires: time.Second, Heartbeat: 1, Group: "g", Priority: 9},
	} {
		var got struct {
			Batch     int           `json:"batch"`
			MaxBytes  int           `json:"max_bytes"`
			Expires   time.Duration `json:"expires"`
			Heartbeat time.Duration `json:"idle_heartbeat"`
			Group     string        `json:"group"`
			Priority  int           `json:"priority"`
		}
		if err := json.Unmarshal(p.Append(nil), &got); err != nil {
			t.Fatalf("%+v: %v", p, err)
		}
		if diff := cmp.Diff(p, Pull(got)); diff != "" {
			t.Errorf("-sent +decoded:\n%s", diff)
		}
	}
}

// Any reply subject gives either an error or numbers that encode to the
// subject they were read from; nothing panics.
func FuzzAck(f *testing.F) {
	for _, s := range []string{"$JS.ACK.S.c.1.2.3.4.5", "$JS.ACK.D.h.S.c.1.2.3.4.5.r", "$JS.ACK.S.c.1.2.3.4", "$JS.ACK.S.c.1.2.3.4.5.6", "$JS.ACK.S.c.1.99999999999999999999.3.4.5", "", "$JS.ACK........."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, reply string) {
		stream, consumer, tail, ok := SplitAck(reply)
		if !ok {
			return
		}
		if strings.ContainsAny(stream+consumer, ".") || stream == "" || consumer == "" {
			t.Fatalf("%q: stream %q consumer %q", reply, stream, consumer)
		}
		if _, _, ok := ParseAck(tail); ok && strings.Count(tail, ".") < 4 {
			t.Fatalf("%q: accepted a tail of too few numbers", reply)
		}
	})
}

func FuzzNumber(f *testing.F) {
	f.Add("0")
	f.Add("-1")
	f.Add("18446744073709551616")
	f.Fuzz(func(t *testing.T, s string) {
		if n, ok := Number(s); ok && s == "" {
			t.Fatalf("%q: %d", s, n)
		}
	})
}
