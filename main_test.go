package paced

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/pacedgo/paced/internal/testserver"
)

// TestMain fails the package when a goroutine is left. Tests in bubbles prove
// that on their own; this covers those over real sockets.
func TestMain(m *testing.M) {
	testserver.Register()
	code := m.Run()
	if code == 0 {
		if left := leftGoroutines(5 * time.Second); left != "" {
			fmt.Fprintf(os.Stderr, "goroutines are left:\n\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

// leftGoroutines waits until no goroutine of this package or of nats.go is
// left, for as long as timeout, and returns the stacks of those that are.
func leftGoroutines(timeout time.Duration) string {
	for deadline := time.Now().Add(timeout); ; time.Sleep(10 * time.Millisecond) {
		buf := make([]byte, 4<<20)
		buf = buf[:runtime.Stack(buf, true)]
		var left []string
		for i, g := range strings.Split(string(buf), "\n\n") {
			if i > 0 && (strings.Contains(g, "pacedgo/paced.") || strings.Contains(g, "nats-io/nats.go.")) {
				left = append(left, g)
			}
		}
		if len(left) == 0 {
			return ""
		}
		if time.Now().After(deadline) {
			return strings.Join(left, "\n\n")
		}
	}
}
