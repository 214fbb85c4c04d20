package main

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/pacedgo/paced/internal/testserver"
)

func TestDemo(t *testing.T) {
	var out strings.Builder
	if err := demo(t.Context(), &out, 20_000, 50); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{
		"messages    20000 in ",
		"order       ok: strictly increasing, none missing\n",
		"the server is back\n",
		"buffer      at most ",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "rebuilds    0\n") {
		t.Errorf("the restart went unnoticed:\n%s", &out)
	}
}

func TestReadYours(t *testing.T) {
	srv := testserver.New(t, testserver.Options{Listen: true})
	js, err := jetstream.New(srv.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders"}})
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if _, err := js.Publish(t.Context(), "orders", nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.DeleteMsg(t.Context(), 5); err != nil {
		t.Fatal(err)
	}

	var out strings.Builder
	if err := readYours(t.Context(), &out, srv.ClientURL(), "ORDERS", false); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{
		"messages    9 in ",
		"strictly increasing; 1 sequences in between were not in the stream\n",
		"look-ahead  at the end: ",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, &out)
		}
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := readYours(ctx, &out, srv.ClientURL(), "ORDERS", true); err == nil {
		t.Error("no error from a canceled reader")
	}
	if err := readYours(t.Context(), &out, srv.ClientURL(), "NONE", false); err == nil {
		t.Error("no error for a stream that does not exist")
	}
}

func TestOrder(t *testing.T) {
	for _, tc := range []struct {
		seqs []uint64
		want string
	}{
		{[]uint64{7, 8, 9}, "ok: strictly increasing, none missing"},
		{[]uint64{7, 9, 12}, "ok: strictly increasing; 3 sequences in between were not in the stream"},
		{[]uint64{7, 8, 8}, "order violated: sequence 8 came after 8"},
		{[]uint64{7, 8, 3}, "order violated: sequence 3 came after 8"},
	} {
		var o order
		var err error
		for _, seq := range tc.seqs {
			err = o.check(seq)
		}
		if o.String() != tc.want {
			t.Errorf("%v: %q, want %q", tc.seqs, &o, tc.want)
		}
		if violated := strings.HasPrefix(tc.want, "order"); (err != nil) != violated {
			t.Errorf("%v: error %v", tc.seqs, err)
		}
	}
	if got := fmt.Sprint(&order{}); got != "ok: strictly increasing, none missing" {
		t.Errorf("nothing read: %q", got)
	}
}
