package main

import (
	"bufio"
	"os"
	"slices"
	"strings"
	"testing"
)

// What is given back of the binary is gone from memory, and comes back when it is needed: here at once, to tell of it.
func TestDropCleanPages(t *testing.T) {
	_ = newRootCommand() // touches a good deal of it
	_, before := resident()
	dropCleanPages()
	_, after := resident()
	if before == 0 || after >= before {
		t.Errorf("%d pages of files before, %d after", before, after)
	}
	root := newRootCommand()
	if cmd, _, err := root.Find([]string{"proxy"}); err != nil || cmd.Name() != "proxy" {
		t.Errorf("the commands are %v, %v", cmd, err)
	}
}

// A mapping with pages of its own (a debugger writes its breakpoints there) is left alone, and so are others' mappings and
// those that can be written.
func TestCleanMappings(t *testing.T) {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	smaps := strings.ReplaceAll(`00400000-00500000 r-xp 00000000 fe:00 1 SELF
Rss:                  64 kB
Anonymous:             0 kB
00500000-00700000 r--p 00100000 fe:00 1 SELF
Rss:                  64 kB
Anonymous:             4 kB
00700000-00710000 r--p 00100000 fe:00 1 /lib/other
Anonymous:             0 kB
00710000-00720000 rw-p 00100000 fe:00 1 SELF
Anonymous:             0 kB
00720000-00730000 r--p 00100000 fe:00 1 SELF
Anonymous:             0 kB
c000000000-c004000000 rw-p 00000000 00:00 0
Anonymous:             0 kB
`, "SELF", self)
	got := cleanMappings(bufio.NewScanner(strings.NewReader(smaps)))
	if want := []mapping{{0x400000, 0x100000}, {0x720000, 0x10000}}; !slices.Equal(got, want) {
		t.Errorf("%x instead of %x", got, want)
	}
}
