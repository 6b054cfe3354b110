package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

type bench struct {
	options
	dir        string
	kubeconfig string
	upstream   string
	echoPerCPU float64
	missed     []string // goals
}

func (b *bench) judge(met bool, format string, args ...any) {
	if !met {
		b.missed = append(b.missed, fmt.Sprintf(format, args...))
	}
}

// figures are what one server reached.
type figures struct {
	name          string
	qps, perCPU   float64
	resident, own float64
	mean, p99     time.Duration
	outside       float64 // cached names from elsewhere, per second of processor time
	start         time.Duration
}

func (b *bench) write(name string, lines []string) string {
	rand.Shuffle(len(lines), func(i, j int) { lines[i], lines[j] = lines[j], lines[i] })
	path := filepath.Join(b.dir, name)
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		panic(err)
	}
	return path
}

// clusterNames are questions as Pods ask them: for Services that are there, and along a search path for some that are not.
func (b *bench) clusterNames() string {
	var lines []string
	for i := range b.services {
		base := fmt.Sprintf("svc-%05d.%s.svc.cluster.local", i, namespace)
		lines = append(lines, base+" A", base+" AAAA")
		if i%5 == 0 {
			lines = append(lines, "_http._tcp."+base+" SRV", fmt.Sprintf("www%d.example.com.%s.svc.cluster.local A", i, namespace))
		}
	}
	return b.write("inside", lines)
}

func (b *bench) outsideNames() string {
	var lines []string
	for i := range 2000 {
		lines = append(lines, fmt.Sprintf("www%d.example.com A", i))
	}
	return b.write("outside", lines)
}

func (b *bench) withEndpoints(headless int) string {
	var lines []string
	for i := range headless {
		for j := range 100 {
			lines = append(lines, fmt.Sprintf("pod-%d.set-%05d.%s.svc.cluster.local A", j, i, namespace))
		}
	}
	for i := range b.services {
		lines = append(lines, fmt.Sprintf("svc-%05d.%s.svc.cluster.local A", i, namespace))
	}
	return b.write("endpoints", lines)
}

// load is one run of dnsperf.
type load struct {
	qps       float64
	completed float64
	mean, p99 time.Duration
}

var (
	reQPS  = regexp.MustCompile(`Queries per second:\s+([\d.]+)`)
	reDone = regexp.MustCompile(`Queries completed:\s+(\d+)`)
	reMean = regexp.MustCompile(`Average Latency \(s\):\s+([\d.]+)`)
	reEach = regexp.MustCompile(`(?m)^> \S+ \S+ \S+ ([\d.]+)$`)
)

func dnsperf(ctx context.Context, addr, file string, seconds, rate int) (load, error) {
	host, port, _ := net.SplitHostPort(addr)
	args := []string{"-s", host, "-p", port, "-d", file, "-l", strconv.Itoa(seconds), "-c", "32", "-T", "1", "-q", "200"}
	if rate > 0 {
		args = append(args, "-Q", strconv.Itoa(rate), "-v") // a line for each answer, with its latency
	}
	raw, err := exec.CommandContext(ctx, "dnsperf", args...).CombinedOutput()
	if err != nil {
		return load{}, fmt.Errorf("dnsperf: %w\n%s", err, raw)
	}
	number := func(re *regexp.Regexp) float64 {
		m := re.FindStringSubmatch(string(raw))
		if m == nil {
			return 0
		}
		v, _ := strconv.ParseFloat(m[1], 64)
		return v
	}
	l := load{qps: number(reQPS), completed: number(reDone), mean: time.Duration(number(reMean) * 1e9)}
	var each []float64
	for _, m := range reEach.FindAllStringSubmatch(string(raw), -1) {
		v, _ := strconv.ParseFloat(m[1], 64)
		each = append(each, v)
	}
	if slices.Sort(each); len(each) > 0 {
		l.p99 = time.Duration(each[len(each)*99/100] * 1e9)
	}
	return l, nil
}

// echo measures what a bare UDP server in Go reaches with the same load.
func (b *bench) echo(ctx context.Context) error {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return err
	}
	defer c.Close()
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			buf[2] |= 0x80
			c.WriteToUDPAddrPort(buf[:n], from)
		}
	}()
	file := b.write("echo", []string{"svc-00000.bench.svc.cluster.local A"})
	before := threadTime(os.Getpid())
	l, err := dnsperf(ctx, c.LocalAddr().String(), file, b.seconds, 0)
	if err != nil {
		return err
	}
	b.echoPerCPU = l.completed / (threadTime(os.Getpid()) - before)
	fmt.Printf("bare UDP echo: %.0f queries/s, %.0f per second of processor time\n", l.qps, b.echoPerCPU)
	return nil
}

// contender is a server: how to start it on a port.
type contender struct {
	name string
	args func(port int) (string, []string, error)
}

// corefile is what kubeadm installs, but for the addresses, and for the lifetime of cached names: long enough for a run.
const corefile = `.:%d {
    bind 127.0.0.1
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig %s
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    prometheus 127.0.0.1:%d
    forward . %s {
        max_concurrent 1000
    }
    cache 3600 {
        disable success cluster.local
        disable denial cluster.local
    }
    loop
    reload
    loadbalance
}
`

func (b *bench) contenders() []contender {
	return []contender{
		{"CoreDNS", func(port int) (string, []string, error) {
			conf := filepath.Join(b.dir, "Corefile")
			metrics, err := freePort()
			if err != nil {
				return "", nil, err
			}
			text := fmt.Sprintf(corefile, port, b.kubeconfig, metrics, b.upstream)
			return b.coredns, []string{"-conf", conf}, os.WriteFile(conf, []byte(text), 0o644)
		}},
		{"Portal", func(port int) (string, []string, error) {
			metrics, err := freePort()
			if err != nil {
				return "", nil, err
			}
			return b.portal, []string{"dns", "--kubeconfig", b.kubeconfig, "--listen", fmt.Sprintf("127.0.0.1:%d", port), "--upstream", b.upstream, "--metrics-bind-address", fmt.Sprintf("127.0.0.1:%d", metrics)}, nil
		}},
	}
}

// round measures each server on the state that the API holds now.
func (b *bench) round(ctx context.Context, title, inside, outside string) error {
	fmt.Printf("\n%s\n", title)
	var all []figures
	for _, c := range b.contenders() {
		f, err := b.measure(ctx, c, inside, outside)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		all = append(all, f)
		fmt.Printf("  %-8s %7.0f q/s  %7.0f q per CPU s  %4.0f MB resident (%.0f MB its own)  at %d q/s: mean %v, p99 %v  start %v\n",
			f.name, f.qps, f.perCPU, f.resident, f.own, b.rate, f.mean, f.p99, f.start.Round(10*time.Millisecond))
		if outside != "" {
			fmt.Printf("           names from elsewhere, cached: %.0f q per CPU s\n", f.outside)
		}
	}
	core, portal := all[0], all[1]
	speed, memory, slowest := portal.perCPU/core.perCPU, portal.resident/core.resident, float64(portal.p99)/float64(core.p99)
	fmt.Printf("  Portal to CoreDNS: %.1f times the queries per CPU second, %.2f of the resident memory (%.2f of its own), %.2f of the p99\n",
		speed, memory, portal.own/core.own, slowest)
	b.judge(speed >= 8, "%s: %.1f times the queries per CPU second, want 8", title, speed)
	b.judge(memory <= 1.0/3, "%s: %.2f of the memory, want a third", title, memory)
	b.judge(slowest <= 0.5, "%s: %.2f of the p99, want half", title, slowest)
	if outside != "" {
		fmt.Printf("  on cached names: %.1f times\n", portal.outside/core.outside)
		b.judge(portal.outside >= 3*core.outside, "cached names: %.1f times the queries per CPU second, want 3", portal.outside/core.outside)
	}
	fmt.Printf("  Portal to the bare echo server: %.2f of its queries per CPU second\n", portal.perCPU/b.echoPerCPU)
	return nil
}

// launch starts a server and waits until it answers for the last Service; it returns its address, and how long that took.
func (b *bench) launch(ctx context.Context, c contender) (*process, string, time.Duration, error) {
	port, err := freePort()
	if err != nil {
		return nil, "", 0, err
	}
	name, args, err := c.args(port)
	if err != nil {
		return nil, "", 0, err
	}
	began := time.Now()
	p, err := start(ctx, name, args...)
	if err != nil {
		return nil, "", 0, err
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	if err := answers(addr, fmt.Sprintf("svc-%05d.%s.svc.cluster.local.", b.services-1, namespace), time.Minute); err != nil {
		p.stop()
		return nil, "", 0, fmt.Errorf("%w\n%s", err, p.log)
	}
	took := time.Since(began)
	time.Sleep(3 * time.Second) // let it finish its lists
	return p, addr, took, nil
}

func (b *bench) measure(ctx context.Context, c contender, inside, outside string) (f figures, err error) {
	f.name = c.name
	p, addr, took, err := b.launch(ctx, c)
	if err != nil {
		return f, err
	}
	defer p.stop()
	f.start = took
	if _, err := dnsperf(ctx, addr, inside, 2, 0); err != nil {
		return f, err
	}
	before := p.cpu()
	l, err := dnsperf(ctx, addr, inside, b.seconds, 0)
	if err != nil {
		return f, err
	}
	f.qps, f.perCPU = l.qps, l.completed/(p.cpu()-before)
	if l, err = dnsperf(ctx, addr, inside, b.seconds, b.rate); err != nil {
		return f, err
	}
	f.mean, f.p99 = l.mean, l.p99
	if outside != "" {
		if _, err := dnsperf(ctx, addr, outside, 2, 0); err != nil {
			return f, err
		}
		before = p.cpu()
		if l, err = dnsperf(ctx, addr, outside, b.seconds, 0); err != nil {
			return f, err
		}
		f.outside = l.completed / (p.cpu() - before)
	}
	f.resident, f.own = p.memory()
	return f, nil
}
