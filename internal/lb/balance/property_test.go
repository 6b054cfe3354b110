package balance

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"portal/internal/lb/config"
)

var kinds = []config.PolicyKind{"", config.RoundRobin, config.Random, config.LeastConnections, config.LeastRequest, config.ConsistentHash, config.Leader, config.Shard}

// TestAlways does anything in any order, and checks what must hold after each step.
func TestAlways(t *testing.T) { rapid.Check(t, always) }

// FuzzUpdates does the same with what the fuzzer thinks of.
func FuzzUpdates(f *testing.F) { f.Fuzz(rapid.MakeFuzz(always)) }

func always(t *rapid.T) {
	c := newClock()
	cfg := drawPool(t)
	zone := rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "zone")
	p := newPool(cfg, zone, c)
	health := map[int]bool{} // those that are not
	var uses []*Use
	member := func(e *Endpoint) bool {
		return slices.ContainsFunc(cfg.Endpoints, func(x config.Endpoint) bool { return x.Address == e.Address && x.Weight >= 0 })
	}
	t.Repeat(map[string]func(*rapid.T){
		"update": func(t *rapid.T) {
			was := p.Endpoints()
			cfg = drawPool(t)
			p.Update(cfg, zone)
			for _, e := range was {
				if stays := slices.Contains(p.Endpoints(), e); stays == !e.LeftAt().IsZero() {
					t.Fatalf("%v stays: %v, left at %v", e.Address, stays, e.LeftAt())
				} else if !stays {
					delete(health, int(e.Address.Addr().As4()[3]))
				}
			}
		},
		"health": func(t *rapid.T) {
			i, ok := rapid.IntRange(0, 7).Draw(t, "endpoint"), rapid.Bool().Draw(t, "healthy")
			p.SetHealth(address(i), ok)
			if p.find(address(i)) != nil {
				health[i] = !ok
			}
		},
		"time": func(t *rapid.T) { c.turn(time.Duration(rapid.IntRange(0, 30).Draw(t, "s")) * time.Second) },
		"done": func(t *rapid.T) {
			if len(uses) > 0 {
				i := rapid.IntRange(0, len(uses)-1).Draw(t, "use")
				uses[i].Done(Result(rapid.IntRange(0, 3).Draw(t, "result")))
				uses = slices.Delete(uses, i, i+1)
			}
		},
		"pick": func(t *rapid.T) {
			all := p.Endpoints()
			var not []*Endpoint
			if len(all) > 0 {
				not = rapid.SliceOfN(rapid.SampledFrom(all), 0, 2).Draw(t, "not")
			}
			u, err := p.Pick(Key{Client: client(rapid.IntRange(0, 9).Draw(t, "client"))}, not)
			fit := func(e *Endpoint) bool { return member(e) && !slices.Contains(not, e) }
			if err != nil {
				if errors.Is(err, ErrNoEndpoint) == errors.Is(err, ErrBusy) {
					t.Fatalf("error %v", err)
				}
				if errors.Is(err, ErrBusy) && cfg.EndpointConnections == 0 {
					t.Fatal("busy without a limit")
				}
				if cfg.EndpointConnections == 0 && slices.ContainsFunc(all, func(e *Endpoint) bool { return fit(e) && e.Usable() }) {
					t.Fatalf("%v, though one is usable", err)
				}
				return
			}
			uses = append(uses, u)
			e := u.Endpoint
			if !fit(e) {
				t.Fatalf("%v is no member or was tried", e.Address)
			}
			if cfg.EndpointConnections > 0 && e.Active() > int64(cfg.EndpointConnections) {
				t.Fatalf("%d at once, limit %d", e.Active(), cfg.EndpointConnections)
			}
			if good := func(e *Endpoint) bool { return member(e) && e.Healthy() && !e.Ejected() }; !good(e) && slices.ContainsFunc(all, good) {
				t.Fatalf("%v is not healthy or ejected, and another one is neither", e.Address)
			}
		},
		"": func(t *rapid.T) {
			ejected, active := 0, int64(0)
			for _, e := range p.Endpoints() {
				if e.Healthy() == health[int(e.Address.Addr().As4()[3])] {
					t.Fatalf("%v healthy: %v", e.Address, e.Healthy())
				}
				if c.now().Before(e.ejectedUntil) {
					ejected++
				}
			}
			if o := cfg.Outlier; o != nil && ejected > 0 && ejected*100 > o.MostEjected*len(p.Endpoints()) {
				t.Fatalf("%d of %d are ejected, at most %d%% may be", ejected, len(p.Endpoints()), o.MostEjected)
			}
			for _, u := range uses {
				active += u.Endpoint.Active()
				if u.Endpoint.Active() < 1 {
					t.Fatalf("%v has %d uses, and one is known", u.Endpoint.Address, u.Endpoint.Active())
				}
			}
			if len(uses) == 0 && active != 0 {
				t.Fatalf("%d uses, though all are done", active)
			}
		},
	})
}

func drawPool(t *rapid.T) *config.Pool {
	cfg := &config.Pool{Protocol: config.TCP, Policy: config.Policy{Kind: rapid.SampledFrom(kinds).Draw(t, "policy")}}
	for _, i := range rapid.SliceOfNDistinct(rapid.IntRange(0, 7), 0, 8, rapid.ID).Draw(t, "endpoints") {
		e := config.Endpoint{Address: address(i)}
		e.Weight = rapid.SampledFrom([]int{0, 0, 0, 1, 3, -1}).Draw(t, "weight")
		e.Zone = rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "zone")
		cfg.Endpoints = append(cfg.Endpoints, e)
	}
	cfg.PreferZone = rapid.Bool().Draw(t, "preferZone")
	cfg.EndpointConnections = rapid.SampledFrom([]int{0, 0, 1, 3}).Draw(t, "limit")
	cfg.SlowStart = rapid.SampledFrom([]time.Duration{0, 20 * time.Second}).Draw(t, "slowStart")
	cfg.Affinity = rapid.SampledFrom([]time.Duration{0, 20 * time.Second}).Draw(t, "affinity")
	if rapid.Bool().Draw(t, "outlier") {
		cfg.Outlier = &config.Outlier{Failures: 1, Ejection: 10 * time.Second, MostEjected: rapid.SampledFrom([]int{0, 30, 50, 100}).Draw(t, "most")}
	}
	return cfg
}

// TestManyAtOnce: picks, ends, checks and updates from many goroutines leave nothing counted.
func TestManyAtOnce(t *testing.T) {
	for _, kind := range kinds {
		cfg := poolOf(kind, 10)
		cfg.EndpointConnections = 5
		cfg.Affinity = time.Minute
		cfg.Outlier = &config.Outlier{Failures: 2, Ejection: time.Second, MostEjected: 50}
		cfg.Endpoints[3].Weight = 4
		fewer := *cfg
		fewer.Endpoints = cfg.Endpoints[2:]
		c := newClock()
		p := newPool(cfg, "", c)
		all := p.Endpoints()
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				for i := range 2000 {
					u, err := p.Pick(Key{Client: client(i*8 + g)}, nil)
					if err != nil {
						continue
					}
					if n := u.Endpoint.Active(); n > 5+8 {
						t.Errorf("%d uses at once", n)
					}
					u.Done(Result(i % 4))
					switch {
					case i%500 == 0:
						p.Update(&fewer, "")
						p.Update(cfg, "")
					case i%100 == 0:
						p.SetHealth(address(i/100%10), i%200 == 0)
						c.turn(100 * time.Millisecond)
					}
				}
			})
		}
		wg.Wait()
		for _, e := range append(all, p.Endpoints()...) {
			if e.Active() != 0 {
				t.Errorf("%q: %v has %d uses after all are done", kind, e.Address, e.Active())
			}
		}
	}
}

func BenchmarkPick(b *testing.B) {
	for _, kind := range kinds[1:] {
		for _, size := range []int{3, 100} {
			b.Run(string(kind)+"/"+time.Duration(size).String()[:len(time.Duration(size).String())-2], func(b *testing.B) {
				p := New(poolOf(kind, size), "", time.Now)
				b.ReportAllocs()
				b.RunParallel(func(pb *testing.PB) {
					i := 0
					for pb.Next() {
						i++
						u, err := p.Pick(Key{Client: client(i)}, nil)
						if err != nil {
							b.Error(err)
							return
						}
						u.Done(OK)
					}
				})
			})
		}
	}
}
