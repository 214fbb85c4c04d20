package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

// noise measures how much of the machine was used by others while a run took
// place. Only Linux says; elsewhere it is always 0.
type noise struct {
	srv         *serverProcess
	start       time.Time
	total, mine time.Duration
	server      time.Duration
}

// tick is the unit of CPU time in /proc.
const tick = 10 * time.Millisecond

func listen(srv *serverProcess) noise {
	n := noise{srv: srv, start: time.Now()}
	n.server = srv.cpuTime()
	n.total, n.mine = machineTime(), n.ours()
	return n
}

// share returns the others' part of the machine since then, at most 1.
func (n *noise) share() float64 {
	others := (machineTime() - n.total) - (n.ours() - n.mine)
	return max(0, others.Seconds()/time.Since(n.start).Seconds()/float64(runtime.NumCPU()))
}

// ours is what this benchmark has used: this process, clients that have ended,
// and the server.
func (n *noise) ours() time.Duration { return cpuTime() + childTime() + n.srv.cpuTime() }

// cpuTime is what the server has used so far.
func (s *serverProcess) cpuTime() time.Duration {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	// proc(5): utime and stime are fields 14 and 15. The name in front of them
	// may have spaces in it, but it ends with a parenthesis.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	return ticks(fields[11:13])
}

// machineTime is what all processes have used: user, nice, system, and the
// interrupts.
func machineTime() time.Duration {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(stat))
	return ticks(fields[1:4]) + ticks(fields[6:8])
}

func ticks(fields []string) (d time.Duration) {
	for _, f := range fields {
		var n int64
		fmt.Sscan(f, &n)
		d += time.Duration(n) * tick
	}
	return d
}
