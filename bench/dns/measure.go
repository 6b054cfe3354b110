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

	"portal/bench/report"
	"portal/test/harness"
)

const (
	peer = "CoreDNS"
	own  = "Portal"
)

// The names of the figures.
const (
	perCPU     = "queries a CPU second at saturation"
	perSecond  = "queries a second at saturation"
	lowCPU     = "CPU a query at 20 % load"
	lowP99     = "latency at 20 % load, p99"
	outsideCPU = "cached names from outside, queries a CPU second"
	startTime  = "start until the last Service is answered"
)

type bench struct {
	options
	dir        string
	kubeconfig string
	upstream   string
	report     *report.Report
}

// private gives each subject a copy of its binary, so that it shares its pages with nothing else.
func (b *bench) private() (err error) {
	dir := filepath.Join(b.dir, "bin")
	if err = os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if b.portal, err = report.Private(b.portal, dir); err != nil {
		return err
	}
	b.coredns, err = report.Private(b.coredns, dir)
	return err
}

// figures are what one server reached in one round.
type figures struct {
	qps, perCPU float64
	lowCPU      float64 // microseconds a query
	lowP99      time.Duration
	outside     float64 // queries a CPU second
	start       time.Duration
	steady      report.Usage
	peak        report.Usage
}

func (b *bench) write(name string, lines []string) string {
	rand.Shuffle(len(lines), func(i, j int) { lines[i], lines[j] = lines[j], lines[i] })
	path := filepath.Join(b.dir, name)
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		panic(err)
	}
	return path
}

// clusterNames are queries as Pods send them: for Services that exist, and for names of a search path that do not.
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

// contender is a subject: how to start it on a port.
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
		{peer, func(port int) (string, []string, error) {
			conf := filepath.Join(b.dir, "Corefile")
			text := fmt.Sprintf(corefile, port, b.kubeconfig, harness.FreePort(), b.upstream)
			return b.coredns, []string{"-conf", conf}, os.WriteFile(conf, []byte(text), 0o644)
		}},
		{own, func(port int) (string, []string, error) {
			return b.portal, []string{"dns", "--kubeconfig", b.kubeconfig, "--listen", fmt.Sprintf("127.0.0.1:%d", port), "--upstream", b.upstream, "--metrics-bind-address", fmt.Sprintf("127.0.0.1:%d", harness.FreePort())}, nil
		}},
	}
}

// compare measures both subjects in several rounds and reports the means.
func (b *bench) compare(ctx context.Context, at report.At, inside, outside string) error {
	rate, err := b.lowRate(ctx, inside)
	if err != nil {
		return err
	}
	all := map[string][]figures{}
	for round := range b.rounds {
		order := b.contenders()
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, c := range order {
			f, err := b.measure(ctx, c, inside, outside, rate)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			fmt.Printf("  %-8s %7.0f q/s, %7.0f a CPU second; at %d q/s %.1f µs a query, p99 %v; anonymous %.0f MB\n", c.name, f.qps, f.perCPU, rate, f.lowCPU, f.lowP99, f.steady.Anonymous)
			all[c.name] = append(all[c.name], f)
		}
	}
	for _, name := range []string{peer, own} {
		mean := func(get func(figures) float64) float64 {
			sum := 0.0
			for _, f := range all[name] {
				sum += get(f)
			}
			return sum / float64(len(all[name]))
		}
		at.Higher(name, perCPU, mean(func(f figures) float64 { return f.perCPU }), "")
		at.Higher(name, perSecond, mean(func(f figures) float64 { return f.qps }), "")
		at.Lower(name, lowCPU, mean(func(f figures) float64 { return f.lowCPU }), "µs")
		at.Lower(name, lowP99, mean(func(f figures) float64 { return report.Milliseconds(f.lowP99) }), "ms")
		if outside != "" {
			at.Higher(name, outsideCPU, mean(func(f figures) float64 { return f.outside }), "")
		}
		at.Lower(name, startTime, mean(func(f figures) float64 { return f.start.Seconds() }), "s")
		at.Memory(name, usage(mean, func(f figures) report.Usage { return f.steady }), usage(mean, func(f figures) report.Usage { return f.peak }))
	}
	at.WantTimes(own, perCPU, peer, 5)
	at.WantTimes(own, lowCPU, peer, 1)
	at.WantTimes(own, lowP99, peer, 1)
	at.WantTimes(own, report.AnonymousSteady, peer, 3)
	if outside != "" {
		at.WantTimes(own, outsideCPU, peer, 3)
	}
	return nil
}

// usage is the mean of some rounds' memory.
func usage(mean func(func(figures) float64) float64, get func(figures) report.Usage) report.Usage {
	return report.Usage{PSS: mean(func(f figures) float64 { return get(f).PSS }), Anonymous: mean(func(f figures) float64 { return get(f).Anonymous })}
}

// lowRate is 20 % of what CoreDNS serves at most.
func (b *bench) lowRate(ctx context.Context, inside string) (int, error) {
	p, addr, _, err := b.launch(ctx, b.contenders()[0])
	if err != nil {
		return 0, err
	}
	defer p.Stop()
	l, err := dnsperf(ctx, addr, inside, b.seconds, 0)
	b.report.Note("20 %% load is 20 %% of the queries a second that %s reached at saturation.", peer)
	return max(1, int(l.qps/5)), err
}

// launch starts a server and waits until it answers for the last Service; it returns its address, and how long that took.
func (b *bench) launch(ctx context.Context, c contender) (*report.Subject, string, time.Duration, error) {
	port := harness.FreePort()
	program, args, err := c.args(port)
	if err != nil {
		return nil, "", 0, err
	}
	began := time.Now()
	p, err := report.Start(b.dir, c.name, program, args...)
	if err != nil {
		return nil, "", 0, err
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	if err := answers(ctx, addr, fmt.Sprintf("svc-%05d.%s.svc.cluster.local.", b.services-1, namespace), time.Minute, 100*time.Millisecond); err != nil {
		p.Stop()
		return nil, "", 0, fmt.Errorf("%w\n%s", err, p.Tail())
	}
	took := time.Since(began)
	time.Sleep(3 * time.Second) // let it finish its lists
	return p, addr, took, nil
}

// measure takes all figures of one subject.
func (b *bench) measure(ctx context.Context, c contender, inside, outside string, rate int) (f figures, err error) {
	p, addr, took, err := b.launch(ctx, c)
	if err != nil {
		return f, err
	}
	defer p.Stop()
	f.start = took
	pid := p.Pid()
	// cost is how much CPU time a load takes.
	cost := func(file string, rate int) (load, float64, error) {
		before, err := report.Read(pid)
		if err != nil {
			return load{}, 0, err
		}
		l, err := dnsperf(ctx, addr, file, b.seconds, rate)
		if err != nil {
			return load{}, 0, err
		}
		after, err := report.Read(pid)
		return l, (after.CPU - before.CPU).Seconds(), err
	}
	warm := func(file string) error { _, err := dnsperf(ctx, addr, file, 2, 0); return err }
	if err := warm(inside); err != nil {
		return f, err
	}
	l, cpu, err := cost(inside, 0)
	if err != nil {
		return f, err
	}
	f.qps, f.perCPU = l.qps, l.completed/cpu
	if l, cpu, err = cost(inside, rate); err != nil {
		return f, err
	}
	f.lowP99, f.lowCPU = l.p99, cpu*1e6/l.completed
	if outside != "" {
		if err := warm(outside); err != nil {
			return f, err
		}
		if l, cpu, err = cost(outside, 0); err != nil {
			return f, err
		}
		f.outside = l.completed / cpu
	}
	f.steady, err = report.Read(pid)
	f.peak = p.Peak()
	return f, err
}
