package main

import (
	"io"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	opts, err := parse([]string{"-n", "1000", "-clients", "8,32", "-servers", "portal", "-o", "f.json"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if opts.services != 1000 || len(opts.clients) != 2 || opts.clients[1] != 32 || opts.servers[0] != portal || opts.output != "f.json" {
		t.Errorf("parsed: %+v", opts)
	}
}

func TestParseNamesTheMistake(t *testing.T) {
	for args, want := range map[string]string{
		"-n 100":         "-n 100",
		"-clients 0":     "-clients",
		"-clients a":     "-clients",
		"-servers nginx": "-servers",
		"-fan-out -1":    "-fan-out",
		"-updates 0":     "-updates",
		"-reviews -1":    "-reviews",
		"more":           "unexpected argument",
	} {
		if _, err := parse(strings.Fields(args), io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want it to name %s", args, err, want)
		}
	}
}

func TestMissingBinariesAreOneLineWithTheRemedy(t *testing.T) {
	t.Setenv("PORTAL_BINARY", "/nowhere/portal")
	err := checkBinaries([]string{portalEmbedded})
	if err == nil || !strings.Contains(err.Error(), "run make build") || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v", err)
	}
}
