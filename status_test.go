package paced

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// statusRows is every status that nats-server can send in answer to a pull, one
// row for each place that sends one, with the line of its source (v2.15.2) and
// what judge makes of it. TestStatusesOfTheServer reads that source: a server
// version that sends another status, or this one from another place, fails
// until somebody has read it again.
var statusRows = []struct {
	name              string
	code, description string
	source            string // file:line of the text in nats-server's server directory
	want              kind
	routine           bool // without a reason: nobody is told
}{
	{"heartbeat", "100", "Idle Heartbeat", "consumer.go:5658", skip, true},

	{"malformed, or heartbeat above half of expires", "400", "Bad Request - heartbeat value too large", "consumer.go:4700", fail, false},
	{"min_pending without overflow", "400", "Bad Request - Not a Overflow Priority consumer", "consumer.go:4722", fail, false},
	{"id without pinning", "400", "Bad Request - Not a Pinned Client Priority consumer", "consumer.go:4726", fail, false},
	{"priority above 9", "400", "Bad Request - Priority must be between 0 and 9", "consumer.go:4730", fail, false},
	{"no group", "400", "Bad Request - Priority Group missing", "consumer.go:4737", fail, false},
	{"unknown group", "400", "Bad Request - Invalid Priority Group", "consumer.go:4741", fail, false},

	{"no_wait, nothing pending", "404", "No Messages", "consumer.go:4771", pullOver, false},
	{"no_wait, end of the stream", "404", "No Messages", "consumer.go:5134", pullOver, false},

	{"expired", "408", "Request Timeout", "consumer.go:5124", pullOver, true},
	{"expired while delivering", "408", "Request Timeout", "consumer.go:4539", pullOver, true},
	{"expired behind replicated data", "408", "Request Timeout", "jetstream_cluster.go:8808", pullOver, true},
	{"no_wait, others wait for more than is pending", "408", "Requests Pending", "consumer.go:4778", pullOver, false},
	{"import lost its interest", "408", "Interest Expired", "consumer.go:4555", pullOver, false},

	{"batch full, bytes left", "409", "Batch Completed", "consumer.go:54", pullOver, true},
	{"next message larger than the bytes left", "409", "Message Size Exceeds MaxBytes", "consumer.go:4503", pullOver, true},
	{"batch above the consumer's limit", "409", "Exceeded MaxRequestBatch of 10", "consumer.go:4706", restart, false},
	{"expires above the consumer's limit", "409", "Exceeded MaxRequestExpires of 1s", "consumer.go:4711", restart, false},
	{"max_bytes above the consumer's limit", "409", "Exceeded MaxRequestMaxBytes of 1024", "consumer.go:4716", restart, false},
	{"queue full, prioritized", "409", "Exceeded MaxWaiting", "consumer.go:4798", pullOver, false},
	{"queue full", "409", "Exceeded MaxWaiting", "consumer.go:4809", pullOver, false},
	{"consumer or stream deleted", "409", "Consumer Deleted", "consumer.go:3238", restart, false},
	{"new leader", "409", "Leadership Change", "consumer.go:3221", pullOver, false},
	{"server shuts down", "409", "Server Shutdown", "jetstream.go:1019", pullOver, false},
	{"no pull consumer, by wire", "409", "Consumer is push based", "consumer.go:4611", fail, false},
	{"no pull consumer", "409", "Consumer is push based", "consumer.go:4693", fail, false},

	{"API level", "412", "Required Api Level", "consumer.go:4618", fail, false},

	{"other pin in the request", "423", "Nats-Pin-Id mismatch", "consumer.go:4749", pullOver, false},
	{"pin lost while parked", "423", "Nats-Wrong-Pin-Id", "consumer.go:4441", pullOver, false},
	{"pin lost while parked, second place", "423", "Nats-Wrong-Pin-Id", "consumer.go:4463", pullOver, false},

	{"nobody listens", "503", "", "client.go:4598", restart, false},
}

func TestJudge(t *testing.T) {
	for _, row := range statusRows {
		t.Run(row.name, func(t *testing.T) { checkJudge(t, row.code, row.description, row.want, row.routine) })
	}
	for _, row := range []struct {
		code, description string
		want              kind
	}{
		// Not known: no guess whether the pull lives.
		{"", "", restart},
		{"200", "", restart},
		{"409", "", restart},
		{"409", "Something New", restart},
		{"409", "batch completed", restart}, // not the server's spelling
		{"409", "Batch Completed ", restart},
		{"499", "Teapot", restart},
		{"500", "Internal", restart},
		{" 408", "Request Timeout", restart},
		// Known by their code alone.
		{"400", "", fail},
		{"400", "Bad Request - something new", fail},
		{"404", "Something New", pullOver},
		{"408", "", pullOver},
		{"408", "Something New", pullOver},
		{"412", "", fail},
		{"423", "", pullOver},
		{"503", "Service Unavailable", restart},
		{"100", "", skip},
		{"100", "FlowControl Request", skip},
	} {
		checkJudge(t, row.code, row.description, row.want, row.want == skip)
	}
}

func checkJudge(t *testing.T, code, description string, want kind, routine bool) {
	t.Helper()
	d := judge(code, description)
	if d.kind != want || (d.reason == nil) != routine {
		t.Errorf("%q %q: %v, %v, want %v, routine %v", code, description, d.kind, d.reason, want, routine)
	}
	if d.reason == nil {
		return
	}
	var status *StatusError
	if !errors.As(d.reason, &status) || status.Code != code || status.Description != description {
		t.Errorf("%q %q: reason %#v does not carry the server's words", code, description, d.reason)
	}
	if deleted := errors.Is(d.reason, jetstream.ErrConsumerDeleted); deleted != (code == "409" && description == "Consumer Deleted") {
		t.Errorf("%q %q: is ErrConsumerDeleted: %v", code, description, deleted)
	}
}

// The rows above are the server's own texts, at the lines they name, and there
// are no others.
func TestStatusesOfTheServer(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/nats-io/nats-server/v2").Output()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(strings.TrimSpace(string(out)), "server")
	lines := map[string][]string{}
	source := func(file string) []string {
		if lines[file] == nil {
			text, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				t.Fatal(err)
			}
			lines[file] = strings.Split(string(text), "\n")
		}
		return lines[file]
	}
	known := map[string]bool{}
	for _, row := range statusRows {
		file, n, _ := strings.Cut(row.source, ":")
		at, err := strconv.Atoi(n)
		if err != nil {
			t.Fatal(err)
		}
		known[row.source] = true
		text := source(file)[at-1]
		m := sentStatus.FindStringSubmatch(text)
		if m == nil || m[1]+m[3] != row.code || !strings.HasPrefix(row.description, strings.TrimSpace(m[2]+m[4])) {
			t.Errorf("%s: %s is\n\t%s\nnot a status %s %s; read what it became, then mend the row and judge", row.name, row.source, strings.TrimSpace(text), row.code, row.description)
		}
	}
	for _, file := range []string{"consumer.go", "jetstream.go", "jetstream_cluster.go"} {
		for i, text := range source(file) {
			at := fmt.Sprintf("%s:%d", file, i+1)
			if strings.Contains(text, "bytes.HasPrefix(") {
				continue // reads one
			}
			if m := sentStatus.FindStringSubmatch(text); m != nil && !known[at] && !strings.Contains(text, "FlowControl Request") {
				t.Errorf("%s sends a status that has no row:\n\t%s", at, strings.TrimSpace(text))
			}
		}
	}
}

// sentStatus matches the code and the constant part of the text where the server
// writes a status: as a header line, or through consumer.go's sendErr. Headers
// whose code is a variable (4688) are sendErr's own.
var sentStatus = regexp.MustCompile(`NATS/1\.0 (\d{3})((?: [A-Za-z0-9-]+)*)|sendErr\((\d{3}), (?:fmt\.Sprintf\()?"([^"%]*)`)
