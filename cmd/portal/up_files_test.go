package main

import "testing"

// TestShareFiles: what parts of portal up may take of the process' files is kept from the API, whichever of them run.
func TestShareFiles(t *testing.T) {
	for _, tc := range []struct {
		dns, proxy string
		share      int
		beside     float64
	}{
		{"none", "none", 0, 0}, {"auto", "none", 0, 1. / 8}, {"auto", "nftables", 0, 1. / 8}, {"auto", "auto", 8, 1. / 4}, {"auto", "userspace", 4, 3. / 8}, {"none", "userspace", 4, 1. / 4},
	} {
		var o upOptions
		o.parts.dns, o.parts.proxy = tc.dns, tc.proxy
		o.shareFiles()
		if o.parts.proxyShare != tc.share || o.server.FilesBeside != tc.beside {
			t.Errorf("DNS %s, proxy %s: one file of %d for connections to Services, %v of all beside the API; want %d, %v", tc.dns, tc.proxy, o.parts.proxyShare, o.server.FilesBeside, tc.share, tc.beside)
		}
	}
}
