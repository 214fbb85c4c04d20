package paced

import (
	"reflect"

	"github.com/nats-io/nats.go"
)

// budgetHeld tells how many loops have joined the budget of nc.
func budgetHeld(nc *nats.Conn) int {
	s := joinBudget(nc)
	defer s.leave()
	return s.loops() - 1
}

// listeners counts the status listeners of nc. nats.go has no way to ask.
func listeners(nc *nats.Conn) int {
	n := 0
	m := reflect.ValueOf(nc).Elem().FieldByName("statListeners")
	for _, k := range m.MapKeys() {
		n += m.MapIndex(k).Len()
	}
	return n
}
