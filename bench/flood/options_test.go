package main

import (
	"io"
	"strings"
	"testing"
)

// TestOptions: what is wrong with a flag is said with its name. The process that floods does so for a part of the duration.
func TestOptions(t *testing.T) {
	for args, want := range map[string]string{
		"":                                  "",
		"-duration 4s -idle 4s":             "",
		"-duration 3s":                      "-duration",
		"-child https://x:1 -duration 1s":   "",
		"-modes fair,quick":                 "-modes",
		"-connections 0":                    "-connections",
		"-child https://x:1 -connections 0": "-connections",
		"more":                              "more",
	} {
		_, err := parse(strings.Fields(args), io.Discard)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
