package main

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"portal/bench/report"
)

const (
	connections = 50
	bulkBytes   = 16 << 20
)

// The names of the figures.
const (
	requests  = "requests for each CPU second"
	latency   = "p99 under full load"
	conns     = "connections for each CPU second"
	bandwidth = "MB for each CPU second"
	memory    = "PSS for each connection"
	routing   = "Routes"
	flatness  = "CPU time of a request, 1,000 hosts of 10 paths compared with 1"
)

// situation is one kind of load.
type situation struct {
	name, figure string
	port         int
	load         func(b *bench, address string) (done float64, p99 time.Duration, err error)
	unit         string
	without      []string // subjects that can't do it
}

var situations = []situation{
	{name: "HTTP/1.1, kept connections", figure: requests, port: plainPort, load: wrk("http", "/"), without: []string{goTLS}},
	{name: "HTTP/1.1, a connection for each request", figure: requests, port: plainPort, load: wrk("http", "/", "-H", "Connection: close"), without: []string{goTLS}},
	{name: "HTTP/1.1 over TLS, kept connections", figure: requests, port: securePort, load: wrk("https", "/"), without: []string{goTLS}},
	{name: "HTTP/1.1 over TLS, a connection for each request", figure: requests, port: securePort, load: wrk("https", "/", "-H", "Connection: close")},
	{name: "HTTP/2 over TLS, 10 connections of 10 streams", figure: requests, port: securePort, load: h2load, without: []string{goTLS}},
	{name: "TCP, short connections", figure: conns, port: tcpPort, load: wrk("http", "/", "-H", "Connection: close"), without: []string{caddy, reverseProxy, goTLS}},
	{name: "TCP, 16 MB answers", figure: bandwidth, port: tcpPort, load: bulk, unit: "MB", without: []string{caddy, reverseProxy, goTLS}},
}

var (
	wrkRequests = regexp.MustCompile(`(\d+) requests in`)
	wrkP99      = regexp.MustCompile(`99%\s+([\d.]+(?:us|ms|s))`)
	h2Requests  = regexp.MustCompile(`(\d+) succeeded`)
)

// wrk loads with as many requests as get through.
func wrk(scheme, path string, more ...string) func(*bench, string) (float64, time.Duration, error) {
	return func(b *bench, address string) (float64, time.Duration, error) {
		args := append([]string{"-t1", "-c" + strconv.Itoa(connections), "-d" + strconv.Itoa(b.seconds) + "s", "--timeout", "30s", "--latency"}, more...)
		out, err := exec.CommandContext(b.ctx, "wrk", append(args, scheme+"://"+address+path)...).CombinedOutput()
		if err != nil {
			return 0, 0, fmt.Errorf("wrk: %w: %s", err, out)
		}
		done, p99 := wrkRequests.FindSubmatch(out), wrkP99.FindSubmatch(out)
		if done == nil || p99 == nil || strings.Contains(string(out), "Non-2xx") {
			return 0, 0, fmt.Errorf("wrk: %s", out)
		}
		n, _ := strconv.ParseFloat(string(done[1]), 64)
		tail, err := time.ParseDuration(string(p99[1]))
		return n, tail, err
	}
}

func h2load(b *bench, address string) (float64, time.Duration, error) {
	out, err := exec.CommandContext(b.ctx, "h2load", "-t1", "-c10", "-m10", "-D"+strconv.Itoa(b.seconds), "https://"+address+"/").CombinedOutput()
	done := h2Requests.FindSubmatch(out)
	if err != nil || done == nil || string(done[1]) == "0" {
		return 0, 0, fmt.Errorf("h2load: %w: %s", err, out)
	}
	n, err := strconv.ParseFloat(string(done[1]), 64)
	return n, 0, err
}

func bulk(b *bench, address string) (float64, time.Duration, error) {
	n, _, err := wrk("http", "/bulk", "-c4")(b, address)
	return n * bulkBytes / 1e6, 0, err
}

// measure takes all figures.
func (b *bench) measure() error {
	for _, s := range situations {
		if !b.wants(s.name) {
			continue
		}
		report.Logf("%s", s.name)
		if err := b.compare(s); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	if err := b.routes(); err != nil {
		return err
	}
	for _, s := range idleSituations {
		if b.idle > 0 && b.wants(s.name) {
			if err := b.idleMemory(s); err != nil {
				return err
			}
		}
	}
	return nil
}

// wants says whether a situation is to be measured.
func (b *bench) wants(name string) bool {
	return strings.Contains(strings.ToLower(name), strings.ToLower(b.only))
}

// compare measures all subjects in one situation, in turns.
func (b *bench) compare(s situation) error {
	rates, tails := map[string][]float64{}, map[string][]float64{}
	order := slices.Clone(b.subjects)
	for range b.rounds {
		for _, one := range order {
			if slices.Contains(s.without, one.name) {
				continue
			}
			rate, p99, err := b.once(one, s)
			if err != nil {
				return fmt.Errorf("%s: %w", one.name, err)
			}
			rates[one.name] = append(rates[one.name], rate)
			tails[one.name] = append(tails[one.name], report.Milliseconds(p99))
		}
		slices.Reverse(order)
	}
	at := b.report.At(s.name, 0, "")
	for _, one := range b.subjects {
		if len(rates[one.name]) == 0 {
			continue
		}
		at.Higher(one.name, s.figure, report.Median(rates[one.name]), s.unit)
		if p99 := report.Median(tails[one.name]); p99 > 0 {
			at.Lower(one.name, latency, p99, "ms")
		}
	}
	return nil
}

func (b *bench) once(one *subject, s situation) (float64, time.Duration, error) {
	before, err := report.Read(one.cmd.Process.Pid)
	if err != nil {
		return 0, 0, err
	}
	done, p99, err := s.load(b, one.address(s.port))
	if err != nil {
		return 0, 0, err
	}
	after, err := report.Read(one.cmd.Process.Pid)
	if err != nil {
		return 0, 0, err
	}
	cpu := (after.CPU - before.CPU).Seconds()
	if cpu <= 0 {
		return 0, 0, fmt.Errorf("no CPU time was counted")
	}
	return done / cpu, p99, nil
}

// routes compares one host with a thousand, in turns.
func (b *bench) routes() error {
	if !b.wants(routing) || !slices.ContainsFunc(b.subjects, func(s *subject) bool { return s.name == portal }) {
		return nil
	}
	report.Logf("routes of 1 and of 1,000 hosts")
	var few, many []float64
	pair := map[int]*subject{}
	for i, hosts := range []int{1, 1000} {
		s := &subject{name: portal, host: fmt.Sprintf("127.0.91.%d", 100+i)}
		cmd, err := b.self(s, hosts)
		if err != nil {
			return err
		}
		if err := b.begin(cmd, s.address(plainPort)); err != nil {
			return err
		}
		s.cmd = cmd
		b.others = append(b.others, cmd)
		pair[hosts] = s
	}
	for range max(b.rounds, 5) {
		for hosts, s := range pair {
			rate, _, err := b.once(s, situation{port: plainPort, load: wrk("http", "/app/7/x", "-H", fmt.Sprintf("Host: host-%d.example.com", hosts-1))})
			if err != nil {
				return err
			}
			if hosts == 1 {
				few = append(few, 1/rate)
			} else {
				many = append(many, 1/rate)
			}
		}
	}
	b.report.At(routing, 0, "").Lower(portal, flatness, report.Median(many)/report.Median(few), "×")
	return nil
}

// judge says what is promised: TCP no worse than the best, HTTP at least half of the best and twice Go's own, latencies no worse than
// twice the best.
func (b *bench) judge() {
	for _, s := range situations {
		if !b.wants(s.name) {
			continue
		}
		at := b.report.At(s.name, 0, "")
		for _, peer := range []string{nginx, haproxy} {
			if s.port == tcpPort {
				at.WantTimes(portal, s.figure, peer, 1)
				continue
			}
			at.WantTimes(portal, s.figure, peer, 0.5)
			at.WantTimes(portal, latency, peer, 0.5)
		}
		if s.port != tcpPort {
			at.WantTimes(portal, s.figure, reverseProxy, 2)
		}
	}
	if b.wants(routing) {
		b.report.At(routing, 0, "").WantWithin(portal, flatness, 1.1)
	}
	for _, s := range idleSituations {
		if b.idle > 0 && b.wants(s.name) {
			b.report.At(s.name, b.idle, "connections").WantWithin(portal, memory, 12)
		}
	}
}
