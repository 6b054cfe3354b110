package backendtest

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"
)

// testRandom changes random Services in random ways, restarts now and then, and asks random questions. The seed of a
// failure is in its log; PORTAL_SEED repeats it.
func testRandom(t *testing.T, s *suite) {
	seed := uint64(time.Now().UnixNano())
	if v, err := strconv.ParseUint(os.Getenv("PORTAL_SEED"), 10, 64); err == nil {
		seed = v
	}
	t.Logf("PORTAL_SEED=%d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	steps := 20
	if s.Brief {
		steps = 6
	}
	for step := range steps {
		for range 1 + r.IntN(4) {
			x := randomSpec(r)
			if r.IntN(5) == 0 {
				s.plan.Delete(x.entry(s).Service.Key)
			} else {
				s.set(x)
			}
		}
		switch {
		case step%7 == 6:
			s.restart(t)
		default:
			s.apply(t)
		}
		var probes []probe
		for range 24 {
			all := spec{id: 1 + uint8(r.IntN(randomServices))}.probes(s, 3)
			probes = append(probes, all[r.IntN(len(all))])
		}
		s.askAll(t, probes)
		if t.Failed() {
			t.Fatalf("at step %d", step)
		}
	}
	if err := s.check(); err != nil {
		t.Errorf("the check at the end: %v", err)
	}
}

const randomServices = 6

func randomSpec(r *rand.Rand) spec {
	coin := func() bool { return r.IntN(2) == 0 }
	some := func() (out []int) {
		for i := range 3 {
			if coin() {
				out = append(out, i)
			}
		}
		return out
	}
	x := spec{
		id: 1 + uint8(r.IntN(randomServices)), remote: some(), external: coin(), balancer: coin(), nodePort: coin(),
		internalLocal: coin(), externalLocal: coin(),
	}
	switch r.IntN(4) {
	case 0:
		x.leaving = some()
	case 1:
	default:
		x.local = some()
	}
	if r.IntN(3) == 0 {
		x.affinity = time.Hour
	}
	if r.IntN(3) == 0 {
		x.ranges = [][]string{{"172.31.0.100/32", "fd00:31::100/128"}, {"10.244.0.0/16"}, {"0.0.0.0/0", "fd00::/16"}}[r.IntN(3)]
	}
	return x
}
