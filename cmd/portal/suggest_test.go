package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestUnknownFlag(t *testing.T) {
	for args, want := range map[string]string{
		"proxy --proxymode nftables":       "unknown flag --proxymode: did you mean --proxy-mode?",
		"up --service-cluster-ip-ranges x": "did you mean --service-cluster-ip-range?",
		"lb --pol 192.0.2.1":               "did you mean --pool?",
		"up --xyzzy":                       "unknown flag --xyzzy: portal up --help lists the flags",
		"lab --nodes three":                `--nodes "three": must be a whole number`,
		"server --event-ttl hour":          `--event-ttl "hour": must be a duration such as 30s or 5m`,
		"up -z":                            "unknown shorthand flag: 'z'",
	} {
		var stderr bytes.Buffer
		if code := run(t.Context(), strings.Fields(args), &stderr); code != 2 || !strings.Contains(stderr.String(), want) {
			t.Errorf("portal %s: status %d, %q; want status 2 and %q", args, code, stderr.String(), want)
		}
	}
}
