// Command lb measures Portal's balancer beside nginx, HAProxy, Caddy and Go's ReverseProxy: requests, connections and bytes for each
// second of the balancer's own CPU time, the tail of latencies, the cost of many routes, and the memory of idle connections.
//
// Every subject has one thread and the same endpoint, an nginx that answers by itself. Load comes from wrk and h2load on the same
// machine, so what counts is the subject's CPU time. The order of the subjects alternates from round to round.
package main

import (
	"context"
	"flag"
	"log"
	"strings"

	"portal/bench/report"
	"portal/test/harness"
)

type options struct {
	subjects string
	caddy    string
	portal   string
	seconds  int
	rounds   int
	idle     int
	only     string
	output   string
}

func main() {
	log.SetFlags(0)
	var o options
	var s serving
	flag.StringVar(&o.subjects, "subjects", "nginx,HAProxy,Caddy,ReverseProxy,GoTLS,Portal", "whom to measure")
	flag.StringVar(&o.caddy, "caddy", harness.Peer("caddy"), "Caddy's binary; without it Caddy is left out")
	flag.StringVar(&o.portal, "portal", harness.Portal(), "Portal's binary, for a lab in which a balancer's address is compared with a node port; without it that is left out")
	flag.IntVar(&o.seconds, "seconds", 1, "length of each measurement")
	flag.IntVar(&o.rounds, "rounds", 11, "rounds, which alternate the order of the subjects; medians are reported. Many short ones, because the speed of a shared machine changes within seconds")
	flag.IntVar(&o.idle, "idle", 10_000, "idle connections whose memory is measured; 0: skip it")
	flag.StringVar(&o.only, "only", "", "measure only situations with this text in their name, in any case")
	flag.StringVar(&o.output, "o", "", "JSON file to write the figures to")
	flag.StringVar(&s.kind, "serve", "", "be a subject instead, or who asks one: portal, reverseproxy, gotls or asker")
	flag.StringVar(&s.listen, "listen", "", "a subject's first address")
	flag.StringVar(&s.endpoint, "endpoint", "", "a subject's endpoint")
	flag.StringVar(&s.cert, "cert", "", "a subject's certificate")
	flag.StringVar(&s.key, "key", "", "a subject's key")
	flag.IntVar(&s.hosts, "hosts", 0, "how many hosts with ten paths each a subject has routes for")
	flag.Parse()
	if s.kind != "" {
		if err := serve(s); err != nil {
			log.Fatal(err)
		}
		return
	}
	report.Main("bench-lb", func(ctx context.Context, _ []string) (bool, error) {
		return report.InFolder("lb", func(dir string) (bool, error) { return run(ctx, o, dir) })
	})
}

func run(ctx context.Context, o options, dir string) (bool, error) {
	b := &bench{options: o, dir: dir, ctx: ctx, report: report.New("lb", "Load balancer", []string{nginx, haproxy, caddy, reverseProxy, goTLS}, []string{portal})}
	b.report.Note("Every subject has one thread, or GOMAXPROCS=1. Load is from wrk (one thread, %d connections) and h2load on the same machine; figures are for each second of the subject's own CPU time, medians of %d rounds.", connections, o.rounds)
	b.report.Note("GoTLS is no balancer: it makes the handshake with Go's crypto/tls and answers by itself. With a connection for each request no balancer with that library does more.")
	defer b.stop()
	if err := b.start(strings.Split(o.subjects, ",")); err != nil {
		return false, err
	}
	if err := b.measure(); err != nil {
		return false, err
	}
	b.nodePort()
	b.judge()
	return b.report.Finish(o.output)
}
