package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"time"

	"github.com/pacedgo/paced/internal/testserver"
)

// roleVariable makes this program the child process that it names: "server",
// "paced" or "WatchAll". The load comes in on the standard input as JSON, a
// line; what is to be known goes out on the standard output, as JSON too, and
// progress on the standard error. A child ends when its standard input does, so
// that none is left whatever becomes of the parent.
const roleVariable = "PACED_WARMUP_ROLE"

// runBoth runs the load in child processes, package paced first.
func runBoth(ctx context.Context, out io.Writer, l load) error {
	slow := func() (int, error) { return unknown, nil }
	if l.URL == "" {
		srv, err := spawn(ctx, out, "server", l)
		if err != nil {
			return err
		}
		defer srv.end()
		if err := srv.read(&l.URL); err != nil {
			return fmt.Errorf("server: %w", err)
		}
		slow = func() (n int, err error) {
			if _, err = io.WriteString(srv.in, "\n"); err == nil {
				err = srv.read(&n)
			}
			return n, err
		}
	}
	remove, err := l.prepare(ctx, out)
	if err != nil {
		return err
	}
	defer remove()

	var results []result
	before := 0
	for _, side := range []string{"paced", "WatchAll"} {
		p, err := spawn(ctx, out, side, l)
		if err != nil {
			return err
		}
		var r result
		err = p.read(&r)
		if ended := p.end(); ctx.Err() != nil {
			return ctx.Err()
		} else if err != nil {
			return fmt.Errorf("%s: %w", side, errors.Join(err, ended))
		}
		if r.ServerSlow, err = slow(); err != nil {
			return fmt.Errorf("server: %w", err)
		}
		if r.ServerSlow != unknown {
			r.ServerSlow, before = r.ServerSlow-before, r.ServerSlow
		}
		results = append(results, r)
	}
	table(out, results...)
	return results[0].err()
}

// process is a child process.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

func spawn(ctx context.Context, out io.Writer, role string, l load) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if role == "server" {
		ctx = context.Background() // it goes last, by its end
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = out
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	answers, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, in: in, out: json.NewDecoder(answers)}
	cmd.Cancel = in.Close
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if err := json.NewEncoder(in).Encode(l); err != nil {
		return nil, errors.Join(err, p.end())
	}
	return p, nil
}

func (p *process) read(v any) error { return p.out.Decode(v) }

func (p *process) end() error {
	_ = p.in.Close()
	return p.cmd.Wait()
}

// child is a child process, from its start to its exit code.
func child(role string) int {
	signal.Ignore(os.Interrupt) // it reaches the parent as well, who sees to us
	in := bufio.NewReader(os.Stdin)
	var l load
	line, err := in.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &l)
	}
	if err == nil && role == "server" {
		err = serve(in, json.NewEncoder(os.Stdout))
	} else if err == nil {
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			_, _ = io.Copy(io.Discard, in)
			cancel()
		}()
		var r result
		if r, err = l.run(ctx, os.Stderr, role); err == nil && ctx.Err() == nil {
			err = json.NewEncoder(os.Stdout).Encode(r)
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", role, err)
		return 1
	}
	return 0
}

// serve runs a server until in ends, and answers each line with how many slow
// consumers it has seen.
func serve(in *bufio.Reader, out *json.Encoder) error {
	srv, err := testserver.Run(testserver.Options{Listen: true})
	if err != nil {
		return err
	}
	defer srv.Close()
	if err := out.Encode(srv.ClientURL()); err != nil {
		return err
	}
	for {
		if _, err := in.ReadBytes('\n'); err != nil {
			return nil
		}
		if err := out.Encode(srv.Server().NumSlowConsumers()); err != nil {
			return err
		}
	}
}
