package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/pacedgo/paced/internal/faultproxy"
	"github.com/pacedgo/paced/internal/testserver"
)

// serverProcess is the server's side of the benchmark: nats-server, and in
// front of it one proxy for each round trip time that a case wants.
type serverProcess struct {
	address
	dir   string
	cmd   *exec.Cmd
	stdin io.Closer
}

// address is what the server's process says about itself.
type address struct {
	Direct  string
	Proxies map[time.Duration]string // by round trip time
}

// serverOptions are its instructions.
type serverOptions struct {
	Dir  string
	RTTs []time.Duration
}

// url returns the address for clients that are rtt away.
func (a *address) url(rtt time.Duration) string {
	if rtt == 0 {
		return a.Direct
	}
	return a.Proxies[rtt]
}

func startServer(ctx context.Context, chosen []benchCase) (s *serverProcess, err error) {
	dir, err := os.MkdirTemp("", "paced-bench-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(dir)
		}
	}()
	o := serverOptions{Dir: dir}
	for _, c := range chosen {
		if c.rtt > 0 {
			o.RTTs = append(o.RTTs, c.rtt)
		}
	}
	// Not killed with ctx: it ends by itself, and its directory with it, when
	// its standard input ends, even if this process is killed.
	cmd, err := child(context.WithoutCancel(ctx), "server", o)
	if err != nil {
		return nil, err
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s = &serverProcess{dir: dir, cmd: cmd, stdin: stdin}
	if err := json.NewDecoder(stdout).Decode(&s.address); err != nil {
		return nil, errors.Join(fmt.Errorf("server does not start: %w", err), s.stop())
	}
	return s, nil
}

func (s *serverProcess) stop() error {
	s.stdin.Close()
	// There is nothing to keep, so do not wait long for an orderly end.
	kill := time.AfterFunc(5*time.Second, func() { _ = s.cmd.Process.Kill() })
	defer kill.Stop()
	err := s.cmd.Wait()
	os.RemoveAll(s.dir)
	return err
}

// serve is the server's process.
func serve(instructions string) error {
	signal.Ignore(os.Interrupt, syscall.SIGTERM) // the parent decides
	var o serverOptions
	if err := json.Unmarshal([]byte(instructions), &o); err != nil {
		return err
	}
	defer os.RemoveAll(o.Dir)
	srv, err := testserver.Run(testserver.Options{Listen: true, Dir: o.Dir, Configure: func(so *server.Options) {
		so.JetStreamLimits.DefaultMaxConsumers = -1 // it is 1000 on a stream
	}})
	if err != nil {
		return err
	}
	defer srv.Close()
	a := address{Direct: srv.ClientURL(), Proxies: map[time.Duration]string{}}
	for _, rtt := range o.RTTs {
		p, err := faultproxy.NewRaw(a.Direct)
		if err != nil {
			return err
		}
		defer p.Close()
		p.Delay(faultproxy.ToServer, rtt/2)
		p.Delay(faultproxy.ToClient, rtt/2)
		a.Proxies[rtt] = p.URL()
	}
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}
