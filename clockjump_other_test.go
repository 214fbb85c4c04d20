//go:build !unix

package paced

func (c *cell) playStopped() { c.Skip("stopping a process needs its signals") }
