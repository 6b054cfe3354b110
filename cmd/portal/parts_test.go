package main

import (
	"bytes"
	"strings"
	"testing"
)

// Wrong addresses of metrics are refused before anything starts, and the flag is named.
func TestPartAddresses(t *testing.T) {
	for _, flag := range []string{"--proxy-metrics-bind-address", "--dns-metrics-bind-address", "--load-balancer-metrics-bind-address"} {
		for _, command := range []string{"node", "up"} {
			var stderr bytes.Buffer
			if code := run(t.Context(), []string{command, flag, "here"}, &stderr); code != 2 || !strings.Contains(stderr.String(), flag+`: "here" is not ADDRESS:PORT`) {
				t.Errorf("%s %s: status %d, %s", command, flag, code, &stderr)
			}
		}
	}
}
