package node

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// TestBounded: what is quoted of others fits an Event, and is text.
func TestBounded(t *testing.T) {
	for text, want := range map[string]string{"plain": "plain", "\xff\xfe": "?", "ü": "ü"} {
		if got := bounded(text, 100); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	for _, text := range []string{strings.Repeat("x", 5000), strings.Repeat("ü", 5000), strings.Repeat("\xff", 5000)} {
		if got := bounded(text, maxMessage); len(got) > maxMessage || !utf8.ValidString(got) || !strings.HasSuffix(got, "…") {
			t.Errorf("%d bytes: %q", len(got), got)
		}
	}
}
