package test

import (
	"flag"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"portal/internal/intent"
)

var (
	faultKills = flag.Int("faults.kills", 25, "how often the proxy is killed in mode nftables; a tenth of it in mode iptables")
	faultAway  = flag.Duration("faults.away", 10*time.Second, "for how long the API server is gone")
	faultSeed  = flag.Uint64("faults.seed", 0, "makes the changes and moments of an earlier run again (0: new ones)")
)

func faultsSeed(t *testing.T) uint64 {
	seed := *faultSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-faults.seed=%d", seed)
	return seed
}

// TestFaultsKill kills the proxy at any point, again and again, while Services change. Those that don't are served all the
// while, and in the end the kernel has what the API has, and nothing else.
func TestFaultsKill(t *testing.T) {
	rootOnly(t)
	for mode, kills := range map[string]int{"nftables": *faultKills, "iptables": max(3, *faultKills/10)} {
		t.Run(mode, func(t *testing.T) {
			seed := faultsSeed(t)
			dice := rand.New(rand.NewPCG(seed, 1))
			l := newProxyLab(t, mode)
			targets := l.steady(t)
			pods := slices.Concat(l.LocalPods(intent.IPv4), l.MorePods(t, 20))
			c := l.churn(t, pods, 120, seed, 4*time.Millisecond)
			begin := time.Now()
			l.start(t)
			l.synced(t)
			first := time.Since(begin)
			v := l.vigil(t, targets)
			killed := 0
			for ; killed < kills && !v.failed(); killed++ {
				l.kill(t)
				l.start(t)
				// Half of them until about the first sync, half at work.
				wait := time.Duration(dice.Int64N(int64(first)))
				if dice.IntN(2) == 0 {
					wait = first + time.Duration(dice.Int64N(int64(300*time.Millisecond)))
				}
				time.Sleep(wait)
			}
			c.end(t)
			snap, _ := l.settled(t, 30*time.Second)
			v.end(t)
			t.Logf("%d probes of %d Services as the oracle says", l.Judge(t, snap), len(snap.Services))
			log, _ := os.ReadFile(l.proxy.Log)
			t.Logf("%d kills; %d starts got as far as a first sync (the first in %s)", killed, strings.Count(string(log), "first sync done"), first)
			if mode != "nftables" {
				return
			}
			before := l.tables(t)
			l.stop(t)
			l.run(t, "nft", "delete", "table", "ip", "portal")
			l.run(t, "nft", "delete", "table", "ip6", "portal")
			l.start(t)
			l.settled(t, 30*time.Second)
			if fresh := l.tables(t); before != fresh || strings.Contains(fresh, "left over") || strings.Contains(fresh, "missing") {
				t.Errorf("the kernel has\n%s\na fresh proxy writes\n%s", before, fresh)
			}
		})
	}
}

// kill ends the proxy, which must not have ended by itself.
func (l *proxyLab) kill(t *testing.T) {
	t.Helper()
	select {
	case <-l.proxy.Done():
		t.Fatalf("the proxy has ended by itself:\n%s", l.proxy.Tail())
	default:
		l.proxy.Kill()
	}
}
