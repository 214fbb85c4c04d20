package paced

import "time"

// A Listener is told what a loop does, in the manner of
// httptrace.ClientTrace: every field is optional. The funcs are called on the
// loop's own goroutine, between bodies and with nothing locked, so that they
// may do anything but should be quick. Leaving the loop is not among the
// things they can do: cancel the context instead.
type Listener struct {
	// Subscribed: a consumer was made and the loop reads from it. generation
	// counts from 1; every rebuild makes a new one.
	Subscribed func(consumer string, generation int)
	// Resubscribing: the loop makes a new consumer, after delay, because of
	// reason. attempt counts the tries since a message was last yielded.
	Resubscribing func(reason error, attempt int, delay time.Duration)
	// Failed: something went wrong that the loop goes on after: a pull that
	// the server ended for a reason of its own, an attempt to subscribe that
	// did not succeed.
	Failed func(err error)
	// PullIssued: a pull was sent. maxBytes is 0 for a pull without a byte
	// bound.
	PullIssued func(batch, maxBytes int)
	// Handled: the body came back for the next message. took is the time it
	// spent on this one. Batches do not tell.
	Handled func(sequence uint64, subject string, took time.Duration)
	// Gap: the stream sequences from to to, both included, were removed before
	// they were read. certain is false where it cannot be known whether any of
	// them was wanted: with a filter, or on a stream with a limit per subject.
	Gap func(from, to uint64, certain bool)
	// CaughtUp: what was present when the range began has been yielded.
	// sequence is the stream's last sequence then. Once per range; never for
	// [Consume], whose end is UntilEmpty.
	CaughtUp func(sequence uint64)
	// HandedBack: a loop over [Consume] that was left gave n messages back
	// that had arrived and that the body has not seen. Called by the clean-up,
	// which may outlast the loop.
	HandedBack func(n int)
}

// Listeners makes one listener of several: each event goes to all of them in
// order. Nil entries are passed over.
func Listeners(ls ...*Listener) *Listener {
	return &Listener{
		Subscribed: func(consumer string, generation int) {
			for _, l := range ls {
				if l != nil && l.Subscribed != nil {
					l.Subscribed(consumer, generation)
				}
			}
		},
		Resubscribing: func(reason error, attempt int, delay time.Duration) {
			for _, l := range ls {
				if l != nil && l.Resubscribing != nil {
					l.Resubscribing(reason, attempt, delay)
				}
			}
		},
		Failed: func(err error) {
			for _, l := range ls {
				if l != nil && l.Failed != nil {
					l.Failed(err)
				}
			}
		},
		PullIssued: func(batch, maxBytes int) {
			for _, l := range ls {
				if l != nil && l.PullIssued != nil {
					l.PullIssued(batch, maxBytes)
				}
			}
		},
		Handled: func(sequence uint64, subject string, took time.Duration) {
			for _, l := range ls {
				if l != nil && l.Handled != nil {
					l.Handled(sequence, subject, took)
				}
			}
		},
		Gap: func(from, to uint64, certain bool) {
			for _, l := range ls {
				if l != nil && l.Gap != nil {
					l.Gap(from, to, certain)
				}
			}
		},
		CaughtUp: func(sequence uint64) {
			for _, l := range ls {
				if l != nil && l.CaughtUp != nil {
					l.CaughtUp(sequence)
				}
			}
		},
		HandedBack: func(n int) {
			for _, l := range ls {
				if l != nil && l.HandedBack != nil {
					l.HandedBack(n)
				}
			}
		},
	}
}
