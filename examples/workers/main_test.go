package main

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

// firstLine calls then when something is printed.
type firstLine struct {
	strings.Builder
	then func()
}

func (f *firstLine) Write(b []byte) (int, error) {
	f.then()
	return f.Builder.Write(b)
}

func TestEmptiesTheQueue(t *testing.T) {
	var out strings.Builder
	if err := run(context.Background(), &out, config{stream: "JOBS", consumer: "workers", jobs: 500, workers: 10, work: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^the queue is empty after .*: 500 done, 0 left to others, 0 of them in doubt$`).MatchString(out.String()) {
		t.Errorf("got:\n%s", out.String())
	}
}

// Interrupted, it finishes what it has and leaves the rest, none of it in
// doubt.
func TestStops(t *testing.T) {
	stopping, stop := context.WithCancel(context.Background())
	defer stop()
	out := firstLine{then: stop}
	if err := run(stopping, &out, config{stream: "JOBS", consumer: "workers", jobs: 2000, workers: 4, work: 20 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	var how string
	var took float64
	var done, left, doubt int
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	last := lines[len(lines)-1]
	if _, err := fmt.Sscanf(last, "%s after %fs: %d done, %d left to others, %d of them in doubt", &how, &took, &done, &left, &doubt); err != nil {
		t.Fatalf("%v in:\n%s", err, out.String())
	}
	if how != "stopped" || done == 0 || left == 0 || done+left != 2000 || doubt != 0 {
		t.Errorf("got:\n%s", out.String())
	}
}
