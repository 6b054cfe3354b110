package userspace

import (
	"os"
	"testing"

	"portal/internal/intent"
)

// TestReturnWithoutIPv6: where IPv6 is turned off, removing the way back of answers finds nothing, and that is no error.
func TestReturnWithoutIPv6(t *testing.T) {
	alone(t)
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	if err := openReturn(intent.IPv4); err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if err := closeReturn(f); err != nil {
			t.Errorf("IPv%d: %v", f, err)
		}
	}
}
