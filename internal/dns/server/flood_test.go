package server

import (
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// Strangers send garbage as fast as they can, and hold connections open without saying much, while good clients ask:
// these must be answered, and memory must not grow. PORTAL_FLOOD sets how long (10m for the long version).
func TestFlood(t *testing.T) {
	length := 2 * time.Second
	if d, err := time.ParseDuration(os.Getenv("PORTAL_FLOOD")); err == nil {
		length = d
	}
	s, addr := started(t, small(), Options{MaxTCPConns: 400, Forward: upstream(t)})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	flood(t, addr)
	for range 100 {
		wg.Go(func() { dawdle(addr, stop) })
	}
	answered := 0
	for end := time.Now().Add(length); time.Now().Before(end); {
		for _, network := range []string{"udp", "tcp"} {
			if patient(t, addr, network) {
				answered++
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	close(stop)
	wg.Wait()
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapInuse) - int64(before.HeapInuse); grown > 64<<20 {
		t.Errorf("the heap grew by %d MB", grown>>20)
	}
	garbage := s.metrics.sums()[protoUDP].dropped
	if garbage < 1000 {
		t.Errorf("only %d messages of garbage have come", garbage)
	}
	t.Logf("%d good questions answered, %d messages of garbage dropped", answered, garbage)
}

// patient asks as a resolver does: again when nothing comes.
func patient(t *testing.T, addr, network string) bool {
	m := new(dns.Msg)
	m.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	c := dns.Client{Net: network, Timeout: 2 * time.Second}
	for range 5 {
		if r, _, err := c.Exchange(m, addr); err == nil && len(r.Answer) == 1 {
			return true
		}
	}
	t.Errorf("a good question over %s went unanswered", network)
	return false
}

// flood sends garbage until the test ends, from a process of its own, which does not take turns with the server's goroutines: this
// test binary, run again.
func flood(t *testing.T, addr string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run", "^TestFloodHelper$")
	cmd.Env = append(os.Environ(), "PORTAL_FLOOD_AT="+addr)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

// TestFloodHelper is what runs in flood's process. It sends random bytes, and good questions with random damage.
func TestFloodHelper(t *testing.T) {
	addr := os.Getenv("PORTAL_FLOOD_AT")
	if addr == "" {
		return
	}
	_, questions := hot(t)
	c, err := net.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() { // what comes back is not wanted
		buf := make([]byte, 4096)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
		}
	}()
	var good [][]byte
	for _, q := range questions {
		good = append(good, q)
	}
	r := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, 600)
	for {
		msg := buf[:r.IntN(len(buf))]
		if r.IntN(2) == 0 {
			msg = append(buf[:0], good[r.IntN(len(good))]...)
			for range r.IntN(4) {
				msg[r.IntN(len(msg))] = byte(r.Uint32())
			}
		} else {
			for i := range msg {
				msg[i] = byte(r.Uint32())
			}
		}
		c.Write(msg)
	}
}

// dawdle holds connections open, sending a byte now and then.
func dawdle(addr string, stop chan struct{}) {
	for {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			for range 20 {
				c.Write([]byte{0})
				select {
				case <-stop:
					c.Close()
					return
				case <-time.After(100 * time.Millisecond):
				}
			}
			c.Close()
		}
		select {
		case <-stop:
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
}
