//go:build !unix

package main

import "time"

// Not measured here.
func cpuTime() time.Duration   { return 0 }
func childTime() time.Duration { return 0 }
