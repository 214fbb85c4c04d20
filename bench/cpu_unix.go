//go:build unix

package main

import (
	"syscall"
	"time"
)

// cpuTime is what this process has used so far, user and system.
func cpuTime() time.Duration { return usage(syscall.RUSAGE_SELF) }

// childTime is what the children that have ended had used.
func childTime() time.Duration { return usage(syscall.RUSAGE_CHILDREN) }

func usage(who int) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(who, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
