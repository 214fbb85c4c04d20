package faultproxy

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
)

// A Direction says which way traffic flows.
type Direction int

const (
	ToServer Direction = iota // written by the client
	ToClient                  // written by the server
)

func (d Direction) String() string {
	if d == ToServer {
		return "to server"
	}
	return "to client"
}

// A Frame is one protocol unit as it was read from the wire. Its byte slices
// are never reused: a filter may keep them, but must not modify them.
type Frame struct {
	Direction Direction

	// Verb is in upper case: INFO, CONNECT, PING, PONG, +OK, -ERR, SUB, UNSUB,
	// PUB, HPUB, MSG or HMSG.
	Verb string

	Subject string // PUB, HPUB, MSG, HMSG, SUB
	Reply   string // PUB, HPUB, MSG, HMSG; "" for none
	Queue   string // SUB; "" for none
	SID     string // MSG, HMSG, SUB, UNSUB

	// Header is the header block of HPUB and HMSG, from "NATS/1.0" to the
	// empty line included.
	Header []byte

	// Payload is the message body without header. For INFO, CONNECT and -ERR
	// it is the rest of the line, for UNSUB the optional message limit.
	Payload []byte
}

// Status returns the three-digit status of a message that the server made up
// itself, such as 100, 404, 408, 409 or 503. It is 0 for all other frames.
func (f Frame) Status() int {
	line, _, _ := bytes.Cut(f.Header, []byte("\r\n"))
	_, rest, _ := bytes.Cut(line, []byte(" "))
	code, _, _ := bytes.Cut(rest, []byte(" "))
	n, err := strconv.Atoi(string(code))
	if err != nil {
		return 0
	}
	return n
}

const (
	maxLine    = 1 << 20   // INFO lines of large clusters exceed the 4 KiB control line
	maxMessage = 256 << 20 // far above any max_payload; a larger size is not NATS
)

var errNotNATS = errors.New("faultproxy: not a NATS client protocol frame")

// parse reads the frame at the start of b and returns its length on the wire.
// The length is 0 as long as b holds only part of a frame.
func parse(dir Direction, b []byte) (Frame, int, error) {
	end := bytes.IndexByte(b, '\n')
	if end < 0 {
		if len(b) > maxLine || !plausible(b) {
			return Frame{}, 0, errNotNATS
		}
		return Frame{}, 0, nil
	}
	if end > maxLine {
		return Frame{}, 0, errNotNATS
	}
	line := bytes.TrimSuffix(b[:end], []byte("\r"))
	n := end + 1

	verb, rest := line, []byte(nil)
	if i := bytes.IndexAny(line, " \t"); i >= 0 {
		verb, rest = line[:i], bytes.Trim(line[i:], " \t")
	}
	f := Frame{Direction: dir, Verb: upperVerb(verb)}

	switch f.Verb {
	case "PING", "PONG", "+OK":
		return f, n, nil
	case "INFO", "CONNECT", "-ERR":
		f.Payload = rest
		return f, n, nil
	case "":
		return Frame{}, 0, errNotNATS
	}

	var array [5][]byte
	args := fields(array[:0], rest)
	switch f.Verb {
	case "SUB":
		switch len(args) {
		case 2:
		case 3:
			f.Queue = string(args[1])
		default:
			return Frame{}, 0, errNotNATS
		}
		f.Subject, f.SID = string(args[0]), string(args[len(args)-1])
		return f, n, nil
	case "UNSUB":
		switch len(args) {
		case 1:
		case 2:
			f.Payload = args[1]
		default:
			return Frame{}, 0, errNotNATS
		}
		f.SID = string(args[0])
		return f, n, nil
	}

	// What remains are messages: subject, [sid], [reply], [header size], size.
	withSID := strings.HasSuffix(f.Verb, "MSG")
	withHeader := f.Verb[0] == 'H'
	fixed := 2
	if withSID {
		fixed++
	}
	if withHeader {
		fixed++
	}
	if len(args) != fixed && len(args) != fixed+1 {
		return Frame{}, 0, errNotNATS
	}
	size, ok := parseSize(args[len(args)-1])
	header := 0
	if ok && withHeader {
		header, ok = parseSize(args[len(args)-2])
	}
	if !ok || header > size {
		return Frame{}, 0, errNotNATS
	}
	if len(b) < n+size+2 {
		return Frame{}, 0, nil
	}
	body := b[n : n+size : n+size]
	if b[n+size] != '\r' || b[n+size+1] != '\n' {
		return Frame{}, 0, errNotNATS
	}
	f.Subject = string(args[0])
	if withSID {
		f.SID = string(args[1])
	}
	if len(args) > fixed {
		i := 1
		if withSID {
			i = 2
		}
		f.Reply = string(args[i])
	}
	if withHeader {
		f.Header = body[:header:header]
	}
	f.Payload = body[header:]
	return f, n + size + 2, nil
}

var verbs = []string{"MSG", "HMSG", "PUB", "HPUB", "PING", "PONG", "+OK", "SUB", "UNSUB", "INFO", "CONNECT", "-ERR"}

func upperVerb(b []byte) string {
	for _, v := range verbs {
		if len(b) == len(v) && bytes.EqualFold(b, []byte(v)) {
			return v
		}
	}
	return ""
}

// plausible reports whether b, which has no line end yet, may still become a
// frame. It lets a stream of another protocol pass at once instead of waiting
// for a line end that may never come.
func plausible(b []byte) bool {
	for _, v := range verbs {
		n := min(len(b), len(v))
		if bytes.EqualFold(b[:n], []byte(v[:n])) {
			return true
		}
	}
	return false
}

// fields appends the words of b to args, and stops after one more than any
// frame has.
func fields(args [][]byte, b []byte) [][]byte {
	for len(b) > 0 && len(args) < 6 {
		i := bytes.IndexAny(b, " \t")
		if i < 0 {
			return append(args, b)
		}
		if i > 0 {
			args = append(args, b[:i])
		}
		b = b[i+1:]
	}
	return args
}

func parseSize(b []byte) (int, bool) {
	n, err := strconv.ParseUint(string(b), 10, 32)
	return int(n), err == nil && n <= maxMessage
}
