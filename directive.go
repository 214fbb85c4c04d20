package paced

// kind is what the loop is to do with what the inbox said. The set is closed:
// the loop never sees a status code or a raw frame.
type kind uint8

const (
	// skip: nothing to do, go on reading.
	skip kind = iota
	// deliver: yield the message.
	deliver
	// pullOver: a pull ended; ask again when there is room.
	pullOver
	// restart: this consumer is of no more use; make a new one that goes on
	// after the last message yielded.
	restart
	// fail: the loop ends with this error.
	fail
)

func (k kind) String() string {
	return [...]string{"Skip", "Deliver", "PullOver", "Restart", "Fail"}[k]
}

// directive is one step for the loop.
type directive struct {
	kind   kind
	reason error // restart and fail: why; pullOver: why, where it is not routine
}
