package paced

import (
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"
	"unsafe"

	"github.com/nats-io/nats.go"

	"github.com/pacedgo/paced/internal/faultproxy"
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
	conn := reflect.ValueOf(nc).Elem()
	mu := (*sync.RWMutex)(unsafe.Pointer(conn.FieldByName("mu").UnsafeAddr()))
	mu.RLock()
	defer mu.RUnlock()
	m := conn.FieldByName("statListeners")
	for _, k := range m.MapKeys() {
		n += m.MapIndex(k).Len()
	}
	return n
}

func dropStatus(code int) faultproxy.Filter {
	return func(f faultproxy.Frame) faultproxy.Action {
		if f.Status() == code {
			return faultproxy.Drop
		}
		return faultproxy.Pass
	}
}

// copyDir replaces to by a copy of from.
func copyDir(t testing.TB, from, to string) {
	t.Helper()
	entries, err := os.ReadDir(to)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(to, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}
