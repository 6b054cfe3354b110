package main

import (
	"context"
	"strings"
	"testing"
)

// TestLabMistakes: ranges that overlap or are too small are mistakes that name the flag and the range, before anything is made.
func TestLabMistakes(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--load-balancer-pool", "10.96.1.0/24"}, `--load-balancer-pool "10.96.1.0/24": 10.96.1.0-10.96.1.255 overlaps the Service range 10.96.0.0/16`},
		{[]string{"--load-balancer-pool", "192.0.2.1", "--load-balancer-pool", "b=192.0.2.2,fd00:244::5"}, `--load-balancer-pool "b=192.0.2.2,fd00:244::5": fd00:244::5 overlaps the Pod range fd00:244::/56`},
		{[]string{"--cluster-cidr", "10.96.0.0/14"}, "--cluster-cidr 10.96.0.0/14: overlaps the Service range 10.96.0.0/16"},
		{[]string{"--cluster-cidr", "10.244.0.0/23"}, "--cluster-cidr 10.244.0.0/23: has no room for 3 nodes"},
		{[]string{"--image-map", "lab_test.go"}, "--image-map: "},
		{[]string{"--load-balancer-pool", "10.96.1.0/24", "--service-cluster-ip-range", "10.97.0.0/16", "--cluster-cidr", "10.96.0.0/22"}, `overlaps the Pod range 10.96.0.0/22`},
	} {
		ended, cancel := context.WithCancel(t.Context()) // so that no lab is started
		cancel()
		cmd := newLabCommand()
		cmd.SetArgs(c.args)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.ExecuteContext(ended); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.args, err, c.want)
		}
	}
}

func TestLabTitle(t *testing.T) {
	for nodes, want := range map[int]string{1: "Lab small: a server and 1 node", 3: "Lab small: a server and 3 nodes"} {
		if got := labTitle("small", nodes); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
