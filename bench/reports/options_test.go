package main

import (
	"io"
	"strings"
	"testing"
)

// TestOptions: what is wrong with a flag is said with its name.
func TestOptions(t *testing.T) {
	const rest = "-parts=reports,explain,findings "
	for args, want := range map[string]string{
		rest:                        "",
		rest + "-nodes 100":         "",
		rest + "-nodes 10":          "-nodes",
		rest + "-services 0":        "-services",
		rest + "-duration 1s":       "-duration",
		rest + "-churn 0":           "-churn",
		rest + "more":               "more",
		"-parts reports,everything": "-parts",
	} {
		_, err := parse(strings.Fields(args), io.Discard)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
