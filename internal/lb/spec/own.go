package spec

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Portal's own annotations about how connections and requests are balanced. They are for Services of every type.
const (
	PolicyAnnotation  = "portal.dev/load-balancing-policy"
	HashAnnotation    = "portal.dev/load-balancing-hash"
	WeightsAnnotation = "portal.dev/load-balancing-weights"
	// SlowStartAnnotation is how many seconds a new endpoint takes to its whole share.
	SlowStartAnnotation = "portal.dev/slow-start"
	// EndpointConnectionsAnnotation and EndpointRequestsAnnotation bound what one endpoint has at a time.
	EndpointConnectionsAnnotation = "portal.dev/endpoint-connections"
	EndpointRequestsAnnotation    = "portal.dev/endpoint-requests"
	// EndpointCAAnnotation names a Secret whose ca.crt endpoints' certificates are verified with, for EndpointNameAnnotation.
	EndpointCAAnnotation   = "portal.dev/endpoint-ca"
	EndpointNameAnnotation = "portal.dev/endpoint-server-name"
	// TrustedProxiesAnnotation are those whose PROXY headers are believed.
	TrustedProxiesAnnotation = "portal.dev/proxy-protocol-from"
	// AccessLogFormatAnnotation is elb or json.
	AccessLogFormatAnnotation = "portal.dev/access-log-format"
	// BodyAnnotation bounds a request's body, in bytes.
	BodyAnnotation = "portal.dev/max-body-bytes"
)

// Policy is how endpoints are chosen, in the words of the annotations.
type Policy struct {
	// Kind is empty if nothing was asked for.
	Kind string
	// Hash is client, header or cookie, and Name that of the header or cookie.
	Hash, Name string
	// Weights are by the name of a Pod, node or zone.
	Weights map[string]int
}

// The policies and what can be hashed.
var (
	policies = []string{"round-robin", "random", "least-connections", "least-request", "consistent-hash", "leader", "shard"}
	hashes   = []string{"client", "header", "cookie"}
)

// own are Portal's annotations about balancing.
var own = map[string]annotation{
	PolicyAnnotation: func(r *reader, key, value string) {
		if !slices.Contains(policies, value) {
			r.invalid(key, value, quoted(policies))
			return
		}
		r.out.Policy.Kind = value
	},
	HashAnnotation: func(r *reader, key, value string) {
		kind, name, named := strings.Cut(value, ":")
		if !slices.Contains(hashes, kind) || (kind != "client") != (named && validToken(name)) {
			r.invalid(key, value, "client, header:NAME or cookie:NAME")
			return
		}
		r.out.Policy.Hash, r.out.Policy.Name = kind, name
	},
	WeightsAnnotation: weights,
	SlowStartAnnotation: number(1, 3600, "seconds", func(r *reader, v int) {
		r.out.SlowStart = time.Duration(v) * time.Second
	}),
	EndpointConnectionsAnnotation: number(1, 1_000_000, "", func(r *reader, v int) { r.out.EndpointConnections = v }),
	EndpointRequestsAnnotation:    number(1, 1_000_000, "", func(r *reader, v int) { r.out.EndpointRequests = v }),
	EndpointCAAnnotation:          text(func(r *reader, v string) { r.out.EndpointCA = v }),
	EndpointNameAnnotation:        text(func(r *reader, v string) { r.out.EndpointName = v }),
	TrustedProxiesAnnotation:      trustedProxies,
	AccessLogFormatAnnotation: func(r *reader, key, value string) {
		if value != "elb" && value != "json" {
			r.invalid(key, value, `"elb" or "json"`)
			return
		}
		r.out.AccessLog.Format = value
	},
	BodyAnnotation: number(1, 1<<40, "bytes", func(r *reader, v int) { r.out.BodyBytes = int64(v) }),
}

// Own says whether a Service has one of them, whatever its type.
func Own(svc *corev1.Service) bool {
	for key, value := range svc.Annotations {
		if own[key] != nil && value != "" {
			return true
		}
	}
	return false
}

// validToken: it can be the name of a header field or a cookie.
func validToken(s string) bool {
	return s != "" && len(s) <= 100 && strings.IndexFunc(s, func(c rune) bool {
		return c <= ' ' || c >= 0x7f || strings.ContainsRune(`()<>@,;:\"/[]?={}`, c)
	}) < 0
}

func weights(r *reader, key, value string) {
	out := map[string]int{}
	for _, pair := range strings.Split(value, ",") {
		name, number, found := strings.Cut(strings.TrimSpace(pair), "=")
		n, err := strconv.Atoi(number)
		if !found || name == "" || err != nil || n < 0 || n > 1000 {
			r.invalid(key, value, "pairs like web-1=3,node2=0, with the name of a Pod, node or zone and a weight from 0 to 1000")
			return
		}
		out[name] = n
	}
	r.out.Policy.Weights = out
}

func trustedProxies(r *reader, key, value string) {
	list, ok := prefixes(value)
	if !ok {
		r.invalid(key, value, "prefixes like 192.0.2.0/24, with commas between them")
		return
	}
	r.out.TrustedProxies = list
}

// prefixes reads a list with commas between its elements.
func prefixes(value string) (out []netip.Prefix, ok bool) {
	for _, text := range strings.Split(value, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return nil, false
		}
		out = append(out, p.Masked())
	}
	return out, true
}

// targetGroup carries out the attributes of a network load balancer's target group that mean something here.
func (r *reader) targetGroup() {
	b := r.out
	const key = aws + "target-group-attributes"
	allowed := func(name, value string, values ...string) bool {
		if slices.Contains(values, value) {
			return true
		}
		r.problem(InvalidAnnotation, "%s: %s=%s is not allowed: it must be %s", key, name, value, quoted(values))
		return false
	}
	sticky := false
	for _, name := range sortedKeys(b.TargetGroupAttributes) {
		value := b.TargetGroupAttributes[name]
		switch name {
		case "proxy_protocol_v2.enabled":
			if allowed(name, value, "true", "false") && value == "true" {
				b.ProxyProtocol = 2
			}
		case "deregistration_delay.timeout_seconds":
			n, err := strconv.Atoi(value)
			if err != nil || n < 0 || n > 3600 {
				r.problem(InvalidAnnotation, "%s: %s=%s is not allowed: it must be a number of seconds from 0 to 3600", key, name, value)
				continue
			}
			b.DrainingSet, b.Draining = true, time.Duration(n)*time.Second
		case "stickiness.enabled":
			sticky = allowed(name, value, "true", "false") && value == "true"
		case "stickiness.type":
			allowed(name, value, "source_ip")
		case "preserve_client_ip.enabled":
			if allowed(name, value, "true", "false") && value == "true" && !b.Local {
				r.problem(IgnoredAnnotation, "%s: %s=true needs externalTrafficPolicy: Local, by which Pods see the client's address", key, name)
			}
		default:
			r.problem(IgnoredAnnotation, "%s: %s has no effect on machines of your own", key, name)
		}
	}
	if sticky && !b.Sticky {
		b.Sticky, b.StickySet = true, true
	}
}
