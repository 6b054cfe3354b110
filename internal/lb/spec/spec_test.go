package spec

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// service has the ports 80, 443 (https) and 8443.
func service(annotations map[string]string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", Annotations: annotations},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{
				{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}, {Name: "https", Protocol: corev1.ProtocolTCP, Port: 443}, {Name: "alt", Protocol: corev1.ProtocolTCP, Port: 8443},
			},
		},
	}
}

const arn = "arn:aws:acm:us-east-1:123456789012:certificate/12345678-1234-1234-1234-123456789012"

// TestAnnotations has every annotation of the documents, with what it means.
func TestAnnotations(t *testing.T) {
	yes := true
	seconds := func(n int) time.Duration { return time.Duration(n) * time.Second }
	for _, c := range []struct {
		name        string
		annotations map[string]string
		want        func(*Balancer)
	}{
		{"AWS internal", map[string]string{aws + "internal": "true"}, func(b *Balancer) { b.Internal = true }},
		{"AWS internal, older", map[string]string{aws + "internal": "0.0.0.0/0"}, func(b *Balancer) { b.Internal = true }},
		{"AWS internal nlb", map[string]string{aws + "internal": "true", aws + "type": "nlb"}, func(b *Balancer) { b.Internal, b.NLB = true, true }},
		{"not internal", map[string]string{aws + "internal": "false"}, func(*Balancer) {}},
		{"Azure", map[string]string{beta + "azure-load-balancer-internal": "true"}, func(b *Balancer) { b.Internal = true }},
		{"OpenStack", map[string]string{beta + "openstack-internal-load-balancer": "true"}, func(b *Balancer) { b.Internal = true }},
		{"Baidu", map[string]string{beta + "cce-load-balancer-internal-vpc": "true"}, func(b *Balancer) { b.Internal = true }},
		{"GCP", map[string]string{"cloud.google.com/load-balancer-type": "Internal"}, func(b *Balancer) { b.Internal = true }},
		{"GCP, newer", map[string]string{"networking.gke.io/load-balancer-type": "Internal"}, func(b *Balancer) { b.Internal = true }},
		{"Alibaba", map[string]string{beta + "alibaba-cloud-loadbalancer-address-type": "intranet"}, func(b *Balancer) { b.Internal = true }},
		{"Tencent", map[string]string{"service.kubernetes.io/qcloud-loadbalancer-internal-subnetid": "subnet-xxxxx"}, func(b *Balancer) {
			b.Internal, b.Pool, b.PoolFrom = true, "subnet-xxxxx", "service.kubernetes.io/qcloud-loadbalancer-internal-subnetid"
		}},
		{"a pool beside Tencent's subnet", map[string]string{"service.kubernetes.io/qcloud-loadbalancer-internal-subnetid": "a", PoolAnnotation: "b"}, func(b *Balancer) {
			b.Internal, b.Pool, b.PoolFrom = true, "b", PoolAnnotation
		}},
		{"addresses", map[string]string{AddressesAnnotation: "192.0.2.1, 2001:db8::1"}, func(b *Balancer) {
			b.Addresses, b.AddressesFrom = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, AddressesAnnotation
		}},
		{"share", map[string]string{ShareAnnotation: "dns"}, func(b *Balancer) { b.Share = "dns" }},
		{"access logs", map[string]string{
			aws + "access-log-enabled": "true", aws + "access-log-emit-interval": "60", aws + "access-log-s3-bucket-name": "my-bucket", aws + "access-log-s3-bucket-prefix": "my-bucket-prefix/prod",
		}, func(b *Balancer) {
			b.AccessLog = AccessLog{true, time.Hour, "my-bucket", "my-bucket-prefix/prod", "elb"}
		}},
		{"draining", map[string]string{aws + "connection-draining-enabled": "true", aws + "connection-draining-timeout": "60"}, func(b *Balancer) {
			b.Draining, b.DrainingSet = seconds(60), true
		}},
		{"draining without a time", map[string]string{aws + "connection-draining-enabled": "true"}, func(b *Balancer) { b.Draining, b.DrainingSet = seconds(300), true }},
		{"the rest of the documents' list", map[string]string{
			aws + "connection-idle-timeout": "60", aws + "cross-zone-load-balancing-enabled": "true", aws + "additional-resource-tags": "environment=prod,owner=devops",
			aws + "healthcheck-healthy-threshold": "", aws + "healthcheck-unhealthy-threshold": "3", aws + "healthcheck-interval": "20", aws + "healthcheck-timeout": "5",
			aws + "extra-security-groups": "sg-53fae93f,sg-42efd82e",
		}, func(b *Balancer) {
			b.IdleTimeout, b.CrossZone, b.Tags = seconds(60), &yes, map[string]string{"environment": "prod", "owner": "devops"}
			b.HealthCheck, b.HealthCheckSet = HealthCheck{Healthy: 2, Unhealthy: 3, Interval: seconds(20), Timeout: seconds(5)}, true
			b.ExtraSecurityGroups = []string{"sg-53fae93f", "sg-42efd82e"}
		}},
		{"health checks", map[string]string{aws + "healthcheck-path": "/healthz", aws + "healthcheck-protocol": "HTTP", aws + "healthcheck-port": "traffic-port", aws + "security-groups": "a"}, func(b *Balancer) {
			b.HealthCheck.Path, b.HealthCheck.Protocol, b.HealthCheck.Port, b.HealthCheckSet = "/healthz", "http", "traffic-port", true
			b.SecurityGroups = []string{"a"}
		}},
		{"PROXY protocol", map[string]string{aws + "proxy-protocol": "*"}, func(b *Balancer) { b.ProxyProtocol = 1 }},
		{"PROXY protocol, version 2", map[string]string{aws + "proxy-protocol": "*", ProxyProtocolVersionAnnotation: "2"}, func(b *Balancer) { b.ProxyProtocol = 2 }},
		{"target group", map[string]string{aws + "target-group-attributes": "proxy_protocol_v2.enabled=true,deregistration_delay.timeout_seconds=0,stickiness.enabled=true"}, func(b *Balancer) {
			b.TargetGroupAttributes = map[string]string{"proxy_protocol_v2.enabled": "true", "deregistration_delay.timeout_seconds": "0", "stickiness.enabled": "true"}
			b.ProxyProtocol, b.DrainingSet, b.Sticky, b.StickySet = 2, true, true, true
		}},
		{"source ranges", map[string]string{corev1.AnnotationLoadBalancerSourceRangesKey: "10.0.0.0/8, 192.0.2.7/24"}, func(b *Balancer) {
			b.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.0.2.0/24")}
			b.RangesFrom = corev1.AnnotationLoadBalancerSourceRangesKey
		}},
		{"least connections", map[string]string{PolicyAnnotation: "least-connections", WeightsAnnotation: "web-1=3, node2=0"}, func(b *Balancer) {
			b.Policy = Policy{Kind: "least-connections", Weights: map[string]int{"web-1": 3, "node2": 0}}
		}},
		{"a hash alone", map[string]string{HashAnnotation: "client"}, func(b *Balancer) { b.Policy = Policy{Kind: "consistent-hash", Hash: "client"} }},
		{"shards", map[string]string{PolicyAnnotation: "shard"}, func(b *Balancer) { b.Policy = Policy{Kind: "shard", Hash: "client"} }},
		{"limits", map[string]string{
			SlowStartAnnotation: "30", EndpointConnectionsAnnotation: "10", EndpointRequestsAnnotation: "20", BodyAnnotation: "1000", EndpointCAAnnotation: "ca", EndpointNameAnnotation: "web",
			TrustedProxiesAnnotation: "192.0.2.0/24", AccessLogFormatAnnotation: "json",
		}, func(b *Balancer) {
			b.SlowStart, b.EndpointConnections, b.EndpointRequests, b.BodyBytes, b.EndpointCA, b.EndpointName = seconds(30), 10, 20, 1000, "ca", "web"
			b.TrustedProxies, b.AccessLog.Format = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, "json"
		}},
		{"others", map[string]string{"example.com/anything": "x", "load-balancer": "no"}, func(*Balancer) {}},
	} {
		t.Run(c.name, func(t *testing.T) {
			want, problems := Read(service(nil))
			if len(problems) > 0 {
				t.Fatal(problems)
			}
			c.want(want)
			got, problems := Read(service(c.annotations))
			if len(problems) > 0 {
				t.Errorf("problems: %v", problems)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

// TestListeners is the matrix of certificate and protocol.
func TestListeners(t *testing.T) {
	for _, c := range []struct {
		name        string
		annotations map[string]string
		want        string // client/endpoint of 80, 443, 8443
		proxying    bool
	}{
		{"nothing", nil, "tcp/tcp tcp/tcp tcp/tcp", false},
		{"tcp", map[string]string{aws + "backend-protocol": "tcp"}, "tcp/tcp tcp/tcp tcp/tcp", false},
		{"http", map[string]string{aws + "backend-protocol": "http"}, "http/http http/http http/http", true},
		{"ssl", map[string]string{aws + "backend-protocol": "ssl"}, "tcp/ssl tcp/ssl tcp/ssl", true},
		{"https", map[string]string{aws + "backend-protocol": "HTTPS"}, "http/https http/https http/https", true},
		{"certificate", map[string]string{aws + "ssl-cert": arn}, "ssl/tcp ssl/tcp ssl/tcp", true},
		{"certificate, all", map[string]string{aws + "ssl-cert": arn, aws + "ssl-ports": "*"}, "ssl/tcp ssl/tcp ssl/tcp", true},
		{"certificate, tcp", map[string]string{aws + "ssl-cert": arn, aws + "backend-protocol": "tcp"}, "ssl/tcp ssl/tcp ssl/tcp", true},
		{"certificate, ssl", map[string]string{aws + "ssl-cert": arn, aws + "backend-protocol": "ssl"}, "ssl/ssl ssl/ssl ssl/ssl", true},
		{"certificate, https", map[string]string{aws + "ssl-cert": arn, aws + "backend-protocol": "https"}, "https/https https/https https/https", true},
		{"mixed", map[string]string{aws + "ssl-cert": arn, aws + "backend-protocol": "http", aws + "ssl-ports": "443,8443"}, "http/http https/http https/http", true},
		{"by name", map[string]string{aws + "ssl-cert": arn, aws + "ssl-ports": "https", aws + "ssl-negotiation-policy": "ELBSecurityPolicy-TLS-1-2-2017-01"}, "tcp/tcp ssl/tcp tcp/tcp", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, problems := Read(service(c.annotations))
			if len(problems) > 0 {
				t.Error(problems)
			}
			var got []string
			for _, l := range b.Listeners {
				got = append(got, string(l.Client)+"/"+string(l.Endpoint))
			}
			if s := strings.Join(got, " "); s != c.want {
				t.Errorf("got %s, want %s", s, c.want)
			}
			if (len(b.Proxying()) > 0) != c.proxying {
				t.Errorf("proxying because of %v", b.Proxying())
			}
		})
	}
}

// TestProblems: what is wrong is said with the annotation, its value and what is allowed, and has no effect.
func TestProblems(t *testing.T) {
	for _, c := range []struct {
		reason      string
		annotations map[string]string
		want        []string
	}{
		{InvalidAnnotation, map[string]string{aws + "backend-protocol": "(https|http|ssl|tcp)"}, []string{aws + "backend-protocol", "(https|http|ssl|tcp)", "https, http, ssl or tcp"}},
		{InvalidAnnotation, map[string]string{aws + "proxy-protocol": "80"}, []string{aws + "proxy-protocol", `"80"`, `"*"`}},
		{InvalidAnnotation, map[string]string{aws + "internal": "yes"}, []string{aws + "internal", `"yes"`, `"true", "0.0.0.0/0" or "false"`}},
		{InvalidAnnotation, map[string]string{"cloud.google.com/load-balancer-type": "Intern"}, []string{"Intern", `"Internal"`}},
		{InvalidAnnotation, map[string]string{beta + "alibaba-cloud-loadbalancer-address-type": "vpc"}, []string{"vpc", `"intranet"`}},
		{InvalidAnnotation, map[string]string{aws + "access-log-emit-interval": "15"}, []string{`"15"`, "5 or 60"}},
		// What is no bucket's name would choose the server that logs are written to, with the balancer's credentials.
		{InvalidAnnotation, map[string]string{aws + "access-log-s3-bucket-name": "b?endpoint=http://169.254.169.254&disable_https=true"}, []string{"access-log-s3-bucket-name", "letters, digits"}},
		{InvalidAnnotation, map[string]string{aws + "access-log-s3-bucket-name": "user@b"}, []string{"access-log-s3-bucket-name", "letters, digits"}},
		{InvalidAnnotation, map[string]string{aws + "access-log-s3-bucket-prefix": "a/../../b"}, []string{"access-log-s3-bucket-prefix", ".."}},
		{InvalidAnnotation, map[string]string{aws + "healthcheck-healthy-threshold": "11"}, []string{`"11"`, "from 2 to 10"}},
		{InvalidAnnotation, map[string]string{aws + "healthcheck-interval": "4"}, []string{`"4"`, "from 5 to 300, in seconds"}},
		{InvalidAnnotation, map[string]string{aws + "healthcheck-timeout": "30"}, []string{"healthcheck-timeout: 30", "less than the interval, 10"}},
		{InvalidAnnotation, map[string]string{aws + "type": "clb"}, []string{`"clb"`, "nlb"}},
		{InvalidAnnotation, map[string]string{aws + "additional-resource-tags": "prod"}, []string{`"prod"`, "environment=prod"}},
		{InvalidAnnotation, map[string]string{aws + "ssl-cert": arn, aws + "ssl-ports": "444"}, []string{"ssl-ports", `"444"`, "port of the Service"}},
		{InvalidAnnotation, map[string]string{AddressesAnnotation: "192.0.2.1,192.0.2.2"}, []string{"one of each family"}},
		{IgnoredAnnotation, map[string]string{aws + "ssl-ports": "443"}, []string{"ssl-ports has no effect without", "ssl-cert"}},
		{IgnoredAnnotation, map[string]string{aws + "connection-draining-timeout": "60"}, []string{"connection-draining-enabled"}},
		{IgnoredAnnotation, map[string]string{aws + "access-log-enabled": "true"}, []string{"access-log-s3-bucket-name"}},
		{IgnoredAnnotation, map[string]string{ProxyProtocolVersionAnnotation: "2"}, []string{"proxy-protocol"}},
		{IgnoredAnnotation, map[string]string{aws + "subnets": "subnet-1"}, []string{aws + "subnets", "subnet-1", PoolAnnotation}},
		{InvalidAnnotation, map[string]string{corev1.AnnotationLoadBalancerSourceRangesKey: "10.0.0.0"}, []string{`"10.0.0.0"`, "192.0.2.0/24"}},
		{InvalidAnnotation, map[string]string{PolicyAnnotation: "fastest"}, []string{`"fastest"`, `"least-request"`}},
		{InvalidAnnotation, map[string]string{HashAnnotation: "header"}, []string{"header:NAME"}},
		{InvalidAnnotation, map[string]string{HashAnnotation: "client:x"}, []string{"header:NAME"}},
		{InvalidAnnotation, map[string]string{WeightsAnnotation: "a"}, []string{"web-1=3"}},
		{InvalidAnnotation, map[string]string{TrustedProxiesAnnotation: "all"}, []string{"192.0.2.0/24"}},
		{IgnoredAnnotation, map[string]string{PolicyAnnotation: "leader", WeightsAnnotation: "a=1"}, []string{WeightsAnnotation, `"leader"`}},
		{IgnoredAnnotation, map[string]string{PolicyAnnotation: "random", HashAnnotation: "client"}, []string{HashAnnotation, "consistent-hash and shard"}},
		{IgnoredAnnotation, map[string]string{HashAnnotation: "cookie:id"}, []string{"read as HTTP"}},
		{IgnoredAnnotation, map[string]string{aws + "target-group-attributes": "preserve_client_ip.enabled=true"}, []string{"externalTrafficPolicy: Local"}},
		{IgnoredAnnotation, map[string]string{aws + "target-group-attributes": "slow=1"}, []string{"slow has no effect"}},
		{InvalidAnnotation, map[string]string{aws + "target-group-attributes": "stickiness.enabled=yes"}, []string{"stickiness.enabled=yes", `"true"`}},
		{UnknownAnnotation, map[string]string{aws + "conection-idle-timeout": "60", aws + "a": ""}, []string{aws + "a, " + aws + "conection-idle-timeout"}},
	} {
		t.Run(strings.Join(slices.Sorted(maps.Keys(c.annotations)), " "), func(t *testing.T) {
			_, problems := Read(service(c.annotations))
			if len(problems) != 1 || problems[0].Reason != c.reason {
				t.Fatalf("problems: %+v", problems)
			}
			for _, w := range c.want {
				if !strings.Contains(problems[0].Message, w) {
					t.Errorf("%q lacks %q", problems[0].Message, w)
				}
			}
		})
	}
	t.Run("no TCP port", func(t *testing.T) {
		for _, key := range []string{aws + "healthcheck-interval", aws + "connection-idle-timeout", EndpointConnectionsAnnotation} {
			svc := service(map[string]string{key: "20"})
			for i := range svc.Spec.Ports {
				svc.Spec.Ports[i].Protocol = corev1.ProtocolUDP
			}
			b, problems := Read(svc)
			if len(problems) != 1 || problems[0].Reason != IgnoredAnnotation || !strings.Contains(problems[0].Message, "no TCP port") || !strings.Contains(problems[0].Message, b.Proxying()[0]) {
				t.Errorf("%s: problems %+v", key, problems)
			}
		}
	})
	t.Run("spec", func(t *testing.T) {
		svc := service(map[string]string{AddressesAnnotation: "192.0.2.9", aws + "type": "nlb", aws + "backend-protocol": "http"})
		svc.Spec.LoadBalancerIP, svc.Spec.LoadBalancerSourceRanges = "78.11.24.19", []string{"143.231.0.0/16", "all"}
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Protocol: corev1.ProtocolSCTP, Port: 90})
		b, problems := Read(svc)
		var reasons []string
		for _, p := range problems {
			reasons = append(reasons, p.Reason)
		}
		if want := []string{InvalidSpec, IgnoredAnnotation, IgnoredAnnotation, IgnoredAnnotation, IgnoredAnnotation, IgnoredAnnotation}; !slices.Equal(reasons, want) {
			t.Errorf("problems: %+v", problems)
		}
		if len(b.SourceRanges) != 1 || b.Addresses[0] != netip.MustParseAddr("192.0.2.9") {
			t.Errorf("%+v", b)
		}
		if l := b.Listeners[3]; l.Proxied() || l.Client != SCTP {
			t.Errorf("SCTP: %+v", l)
		}
	})
}

// TestStickiness: an attribute asks for what the proxy does by spec.sessionAffinity alone.
func TestStickiness(t *testing.T) {
	svc := service(map[string]string{aws + "type": "nlb", aws + "target-group-attributes": "stickiness.enabled=true"})
	if b, problems := Read(svc); len(problems) > 0 || !b.Sticky || len(b.Proxying()) != 1 {
		t.Errorf("%v, sticky %v, proxying %q", problems, b.Sticky, b.Proxying())
	}
	svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	if b, _ := Read(svc); !b.Sticky || len(b.Proxying()) != 0 {
		t.Errorf("with session affinity: sticky %v, proxying %q", b.Sticky, b.Proxying())
	}
}

// FuzzRead: no annotation makes it panic, and what it says is bounded by what it got.
func FuzzRead(f *testing.F) {
	for key := range own {
		f.Add(key, "header:x")
	}
	for key := range annotations {
		f.Add(key, "true")
		f.Add(key, "5,x=,*")
	}
	f.Fuzz(func(t *testing.T, key, value string) {
		svc := service(map[string]string{key: value, aws + "ssl-cert": "a"})
		b, problems := Read(svc)
		if b.HealthCheck.Timeout >= b.HealthCheck.Interval {
			t.Error("a probe takes longer than the time between two")
		}
		if len(problems) > 3+len(svc.Spec.Ports)+strings.Count(value, ",") {
			t.Errorf("%d problems", len(problems))
		}
	})
}
