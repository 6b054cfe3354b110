package spec

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// annotations are all that are known, by their keys. Providers are tables: a row is all that it takes to know another one.
var annotations = map[string]annotation{
	PoolAnnotation:      pool,
	AddressesAnnotation: addresses,
	ShareAnnotation:     share,
	ProxyProtocolVersionAnnotation: func(r *reader, key, value string) {
		if value != "1" && value != "2" {
			r.invalid(key, value, `"1" or "2"`)
		}
	},

	aws + "internal":                                              internalIf("true", "0.0.0.0/0"),
	beta + "azure-load-balancer-internal":                         internalIf("true"),
	beta + "openstack-internal-load-balancer":                     internalIf("true"),
	beta + "cce-load-balancer-internal-vpc":                       internalIf("true"),
	"cloud.google.com/load-balancer-type":                         googleType,
	"networking.gke.io/load-balancer-type":                        googleType,
	beta + "alibaba-cloud-loadbalancer-address-type":              alibabaType,
	"service.kubernetes.io/qcloud-loadbalancer-internal-subnetid": subnet,
	corev1.AnnotationLoadBalancerSourceRangesKey:                  sourceRanges,

	aws + "backend-protocol": func(r *reader, key, value string) {
		p := Protocol(strings.ToLower(value))
		if !slices.Contains([]Protocol{HTTPS, HTTP, SSL, TCP}, p) {
			r.invalid(key, value, "https, http, ssl or tcp")
			return
		}
		r.backend = p
	},
	aws + "ssl-cert":               text(func(r *reader, v string) { r.out.Certificate = v }),
	aws + "ssl-ports":              text(func(r *reader, v string) { r.sslPorts = v }),
	aws + "ssl-negotiation-policy": text(func(r *reader, v string) { r.out.NegotiationPolicy = v }),
	aws + "proxy-protocol": func(r *reader, key, value string) {
		if value != "*" {
			r.invalid(key, value, `"*": the PROXY protocol is spoken on all ports or on none`)
			return
		}
		r.out.ProxyProtocol = 1
	},

	aws + "access-log-enabled": boolean(func(r *reader, v bool) { r.out.AccessLog.Enabled = v }),
	aws + "access-log-emit-interval": func(r *reader, key, value string) {
		switch value {
		case "5":
			r.out.AccessLog.Interval = 5 * time.Minute
		case "60":
			r.out.AccessLog.Interval = time.Hour
		default:
			r.invalid(key, value, "5 or 60, in minutes")
		}
	},
	aws + "access-log-s3-bucket-name":   bucket,
	aws + "access-log-s3-bucket-prefix": bucketPrefix,

	aws + "connection-draining-enabled":       boolean(func(r *reader, v bool) { r.drainingOn = v }),
	aws + "connection-draining-timeout":       number(1, 3600, "seconds", func(r *reader, v int) { r.drainingTimeout = time.Duration(v) * time.Second }),
	aws + "connection-idle-timeout":           number(1, 4000, "seconds", func(r *reader, v int) { r.out.IdleTimeout = time.Duration(v) * time.Second }),
	aws + "cross-zone-load-balancing-enabled": boolean(func(r *reader, v bool) { r.out.CrossZone = &v }),
	aws + "additional-resource-tags":          pairs("environment=prod,owner=devops", func(r *reader, v map[string]string) { r.out.Tags = v }),

	aws + "healthcheck-healthy-threshold":   number(2, 10, "", func(r *reader, v int) { r.out.HealthCheck.Healthy, r.out.HealthCheckSet = v, true }),
	aws + "healthcheck-unhealthy-threshold": number(2, 10, "", func(r *reader, v int) { r.out.HealthCheck.Unhealthy, r.out.HealthCheckSet = v, true }),
	aws + "healthcheck-interval": number(5, 300, "seconds", func(r *reader, v int) {
		r.out.HealthCheck.Interval, r.out.HealthCheckSet = time.Duration(v)*time.Second, true
	}),
	aws + "healthcheck-timeout": number(2, 60, "seconds", func(r *reader, v int) {
		r.out.HealthCheck.Timeout, r.out.HealthCheckSet = time.Duration(v)*time.Second, true
	}),
	aws + "healthcheck-path": func(r *reader, key, value string) {
		if !strings.HasPrefix(value, "/") {
			r.invalid(key, value, "a path that begins with /")
			return
		}
		r.out.HealthCheck.Path, r.out.HealthCheckSet = value, true
	},
	aws + "healthcheck-protocol": func(r *reader, key, value string) {
		p := Protocol(strings.ToLower(value))
		if !slices.Contains([]Protocol{HTTPS, HTTP, SSL, TCP}, p) {
			r.invalid(key, value, "http, https, tcp or ssl")
			return
		}
		r.out.HealthCheck.Protocol, r.out.HealthCheckSet = string(p), true
	},
	aws + "healthcheck-port": func(r *reader, key, value string) {
		if n, err := strconv.Atoi(value); value != "traffic-port" && (err != nil || n < 1 || n > 65535) {
			r.invalid(key, value, "traffic-port or a number from 1 to 65535")
			return
		}
		r.out.HealthCheck.Port, r.out.HealthCheckSet = value, true
	},

	aws + "security-groups":       names(func(r *reader, v []string) { r.out.SecurityGroups = v }),
	aws + "extra-security-groups": names(func(r *reader, v []string) { r.out.ExtraSecurityGroups = v }),
	aws + "type": func(r *reader, key, value string) {
		if value != "nlb" {
			r.invalid(key, value, "nlb, or the annotation must be left out")
			return
		}
		r.out.NLB = true
	},
	aws + "target-group-attributes": pairs("preserve_client_ip.enabled=true", func(r *reader, v map[string]string) { r.out.TargetGroupAttributes = v }),

	// What only exists in a provider's network.
	aws + "eip-allocations":                                        nowhere("addresses come from pools: see " + PoolAnnotation),
	aws + "subnets":                                                nowhere("there are no subnets to choose from: see " + PoolAnnotation),
	aws + "target-node-labels":                                     nowhere("the node label " + corev1.LabelNodeExcludeBalancers + " excludes nodes"),
	beta + "azure-load-balancer-internal-subnet":                   nowhere("there are no subnets to choose from: see " + PoolAnnotation),
	"networking.gke.io/internal-load-balancer-allow-global-access": nowhere("there are no regions"),
}

func pool(r *reader, key, value string) {
	if value == "" {
		r.invalid(key, value, "the name of a pool")
		return
	}
	r.out.Pool, r.out.PoolFrom = value, key
}

// subnet is Tencent's: the internal pool with the subnet's name. Portal's own annotation comes before it.
func subnet(r *reader, key, value string) {
	if value == "" {
		r.invalid(key, value, "the name of a subnet: that of an internal pool")
		return
	}
	r.out.Internal = true
	if r.svc.Annotations[PoolAnnotation] == "" {
		r.out.Pool, r.out.PoolFrom = value, key
	}
}

func addresses(r *reader, key, value string) {
	var out []netip.Addr
	for _, text := range strings.Split(value, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(text))
		a = a.Unmap()
		if err != nil || a.Zone() != "" || slices.ContainsFunc(out, func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
			r.invalid(key, value, "one IP address, or one of each family with a comma between them")
			return
		}
		out = append(out, a)
	}
	if r.out.AddressesFrom != "" && !slices.Contains(out, r.out.Addresses[0]) {
		r.problem(IgnoredAnnotation, "spec.loadBalancerIP: %s has no effect, because %s asks for %s", r.out.Addresses[0], key, value)
	}
	r.out.Addresses, r.out.AddressesFrom = out, key
}

func share(r *reader, key, value string) {
	if value == "" || len(value) > 63 {
		r.invalid(key, value, "a key of 1 to 63 characters, the same on all Services that share an address")
		return
	}
	r.out.Share = value
}

// internalIf is a provider's annotation for an internal balancer.
func internalIf(yes ...string) annotation {
	return func(r *reader, key, value string) {
		switch {
		case slices.Contains(yes, value):
			r.out.Internal = true
		case value == "false" || value == "":
		default:
			r.invalid(key, value, quoted(append(slices.Clone(yes), "false")))
		}
	}
}

func googleType(r *reader, key, value string) {
	switch strings.ToLower(value) {
	case "internal":
		r.out.Internal = true
	case "external":
	default:
		r.invalid(key, value, `"Internal" or "External"`)
	}
}

func alibabaType(r *reader, key, value string) {
	switch value {
	case "intranet":
		r.out.Internal = true
	case "internet":
	default:
		r.invalid(key, value, `"intranet" or "internet"`)
	}
}

// sourceRanges is the annotation that came before spec.loadBalancerSourceRanges, which comes before it.
func sourceRanges(r *reader, key, value string) {
	if len(r.svc.Spec.LoadBalancerSourceRanges) > 0 {
		r.problem(IgnoredAnnotation, "%s has no effect beside spec.loadBalancerSourceRanges", key)
		return
	}
	list, ok := prefixes(value)
	if !ok {
		r.invalid(key, value, "prefixes like 192.0.2.0/24, with commas between them")
		return
	}
	r.out.SourceRanges, r.out.RangesFrom = list, key
}

func text(set func(*reader, string)) annotation {
	return func(r *reader, key, value string) {
		if value = strings.TrimSpace(value); value == "" {
			r.invalid(key, value, "not empty")
			return
		}
		set(r, value)
	}
}

// bucket takes a bucket's name and nothing else: it becomes the host of a URL, and what would be a query there says which server is written to.
func bucket(r *reader, key, value string) {
	value = strings.TrimSpace(value)
	if value == "" || len(value) > 255 || strings.ContainsFunc(value, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-._", c)
	}) {
		r.invalid(key, value, "a bucket's name, of letters, digits, hyphens, dots and underscores")
		return
	}
	r.out.AccessLog.Bucket = value
}

func bucketPrefix(r *reader, key, value string) {
	value = strings.Trim(value, "/")
	if slices.Contains(strings.Split(value, "/"), "..") {
		r.invalid(key, value, "a path without the element ..")
		return
	}
	r.out.AccessLog.Prefix = value
}

func boolean(set func(*reader, bool)) annotation {
	return func(r *reader, key, value string) {
		if value != "true" && value != "false" {
			r.invalid(key, value, `"true" or "false"`)
			return
		}
		set(r, value == "true")
	}
}

// number reads a whole number in a range; an empty value stands for the default.
func number(least, most int, unit string, set func(*reader, int)) annotation {
	return func(r *reader, key, value string) {
		if value == "" {
			return
		}
		n, err := strconv.Atoi(value)
		if err != nil || n < least || n > most {
			allowed := fmt.Sprintf("a whole number from %d to %d", least, most)
			if unit != "" {
				allowed += ", in " + unit
			}
			r.invalid(key, value, allowed)
			return
		}
		set(r, n)
	}
}

func names(set func(*reader, []string)) annotation {
	return func(r *reader, key, value string) {
		var out []string
		for _, name := range strings.Split(value, ",") {
			if name = strings.TrimSpace(name); name == "" {
				r.invalid(key, value, "names with commas between them")
				return
			}
			out = append(out, name)
		}
		set(r, out)
	}
}

// pairs reads key=value, with commas between them.
func pairs(example string, set func(*reader, map[string]string)) annotation {
	return func(r *reader, key, value string) {
		out := map[string]string{}
		for _, pair := range strings.Split(value, ",") {
			k, v, found := strings.Cut(strings.TrimSpace(pair), "=")
			if !found || k == "" {
				r.invalid(key, value, "pairs like "+example)
				return
			}
			out[k] = v
		}
		set(r, out)
	}
}

// nowhere is an annotation about something that only a provider has.
func nowhere(instead string) annotation {
	return func(r *reader, key, value string) {
		r.problem(IgnoredAnnotation, "%s: %q has no effect on machines of your own: %s", key, value, instead)
	}
}

func quoted(list []string) string {
	var out []string
	for _, s := range list {
		out = append(out, strconv.Quote(s))
	}
	if len(out) == 1 {
		return out[0]
	}
	return strings.Join(out[:len(out)-1], ", ") + " or " + out[len(out)-1]
}
