package test

import (
	"maps"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// seedAnswer is what becomes of an example.
type seedAnswer struct {
	// fields by JSONPath, each a regular expression.
	fields map[string]string
	// refused is part of the answer to an example that no longer works as it was printed; mend makes it one that does.
	refused string
	mend    *strings.Replacer
}

// fields are pairs of a JSONPath and what must be there.
func fields(pairs ...string) seedAnswer {
	out := seedAnswer{fields: map[string]string{}}
	for i := 0; i < len(pairs); i += 2 {
		out.fields[pairs[i]] = pairs[i+1]
	}
	return out
}

// with is an answer with further fields.
func (a seedAnswer) with(pairs ...string) seedAnswer {
	out := seedAnswer{fields: maps.Clone(a.fields)}
	maps.Copy(out.fields, fields(pairs...).fields)
	return out
}

const chosenIP = `10\.0\.\d+\.\d+`

var (
	// web is the example of every document: port 80 to 9376 by TCP, at an address that the server chose.
	web = fields(".spec.clusterIP", chosenIP, ".spec.type", "ClusterIP", ".spec.ports[*].port", "80",
		".spec.ports[*].targetPort", "9376", ".spec.ports[*].protocol", "TCP", ".spec.sessionAffinity", "None")
	selecting = web.with(".spec.selector.app", "MyApp")
	bare      = web.with(".spec.selector", "")
	multiPort = fields(".spec.clusterIP", chosenIP, ".spec.ports[*].name", "http https", ".spec.ports[*].port", "80 443",
		".spec.ports[*].targetPort", "9376 9377")
	external = fields(".spec.type", "ExternalName", ".spec.externalName", `my\.database\.example\.com`, ".spec.clusterIP", "", ".spec.ports", "")
	outside  = selecting.with(".spec.externalIPs[*]", `80\.11\.12\.10`, ".spec.ports[*].name", "http")
	// balanced is published by whoever balances: what a user writes into status is not taken from him.
	balanced = fields(".spec.type", "LoadBalancer", ".spec.clusterIP", `10\.0\.171\.239`, ".spec.ports[*].nodePort", `3[0-2]\d{3}`,
		".spec.externalTrafficPolicy", "Cluster", ".spec.allocateLoadBalancerNodePorts", "true", ".status.loadBalancer.ingress", "")
	fragment = fields(".spec.type", "LoadBalancer", ".spec.clusterIP", chosenIP, ".spec.ports[*].nodePort", `3[0-2]\d{3}`)
)

func endpointsAt(ip, port string) seedAnswer {
	return fields(".subsets[*].addresses[*].ip", strings.ReplaceAll(ip, ".", `\.`), ".subsets[*].ports[*].port", port, ".subsets[*].ports[*].protocol", "TCP")
}

// annotated is a fragment that shows annotations; the names are below one domain unless they have one.
func annotated(pairs ...string) seedAnswer {
	out := fragment
	for i := 0; i < len(pairs); i += 2 {
		name := pairs[i]
		if !strings.Contains(name, "/") {
			name = "service.beta.kubernetes.io/" + name
		}
		out = out.with(".metadata.annotations."+strings.ReplaceAll(name, ".", `\.`), pairs[i+1])
	}
	return out
}

const certificate = "arn:aws:acm:us-east-1:123456789012:certificate/12345678-1234-1234-1234-123456789012"

// seedAnswers is what every example must answer, by document and line.
var seedAnswers = map[string]seedAnswer{
	"000:44": outside,

	"001:28": bare,
	// Field names have been case sensitive since Kubernetes 1.8: "IP" is not "ip", and to drop it in silence would leave
	// an endpoint without an address.
	"001:47": {refused: `unknown field "subsets[0].addresses[0].IP"`, mend: strings.NewReplacer(`"IP"`, `"ip"`), fields: endpointsAt("1.2.3.4", "80").fields},

	"002:13":  fields(".spec.type", "NodePort", ".spec.ports[0].nodePort", "30080", ".spec.ports[0].port", "80", ".spec.clusterIP", chosenIP, ".metadata.labels.name", "demo"),
	"002:59":  selecting,
	"002:94":  bare,
	"002:108": endpointsAt("192.0.2.42", "9376"),
	"002:203": multiPort,
	"002:312": balanced.with(".spec.loadBalancerIP", `78\.11\.24\.19`),
	"002:352": annotated("openstack-internal-load-balancer", "true"),
	"002:363": annotated("cce-load-balancer-internal-vpc", "true"),
	"002:374": annotated("azure-load-balancer-internal", "true"),
	"002:385": annotated("aws-load-balancer-internal", "true"),
	"002:395": annotated("cloud.google.com/load-balancer-type", "Internal"),
	"002:408": annotated("aws-load-balancer-ssl-cert", certificate),
	"002:418": annotated("aws-load-balancer-backend-protocol", `\(https\|http\|ssl\|tcp\)`),
	"002:433": annotated("aws-load-balancer-backend-protocol", "http", "aws-load-balancer-ssl-ports", "443,8443"),
	"002:449": annotated("aws-load-balancer-ssl-negotiation-policy", "ELBSecurityPolicy-TLS-1-2-2017-01"),
	"002:460": annotated("aws-load-balancer-proxy-protocol", `\*`),
	"002:481": annotated("aws-load-balancer-access-log-enabled", "true", "aws-load-balancer-access-log-emit-interval", "60",
		"aws-load-balancer-access-log-s3-bucket-name", "my-bucket", "aws-load-balancer-access-log-s3-bucket-prefix", "my-bucket-prefix/prod"),
	"002:499": annotated("aws-load-balancer-connection-draining-enabled", "true", "aws-load-balancer-connection-draining-timeout", "60"),
	"002:512": annotated("aws-load-balancer-connection-idle-timeout", "60", "aws-load-balancer-cross-zone-load-balancing-enabled", "true",
		"aws-load-balancer-additional-resource-tags", "environment=prod,owner=devops", "aws-load-balancer-healthcheck-healthy-threshold", "",
		"aws-load-balancer-healthcheck-unhealthy-threshold", "3", "aws-load-balancer-healthcheck-interval", "20",
		"aws-load-balancer-healthcheck-timeout", "5", "aws-load-balancer-extra-security-groups", "sg-53fae93f,sg-42efd82e"),
	"002:548": annotated("aws-load-balancer-type", "nlb"),
	"002:576": fragment.with(".spec.loadBalancerSourceRanges[*]", `143\.231\.0\.0/16`),
	"002:591": external,
	"002:613": outside,

	"003:50":  selecting,
	"003:97":  bare,
	"003:112": endpointsAt("1.2.3.4", "9376"),
	"003:137": external,
	"003:227": multiPort,
	"003:415": balanced.with(".spec.ports[*].nodePort", "30061", ".spec.loadBalancerIP", `78\.11\.24\.19`),
	"003:449": annotated("aws-load-balancer-internal", `0\.0\.0\.0/0`),
	"003:466": annotated("aws-load-balancer-ssl-cert", certificate),
	"003:477": annotated("aws-load-balancer-backend-protocol", `\(https\|http\|ssl\|tcp\)`),
	"003:505": outside,

	"004:53":  selecting,
	"004:91":  bare,
	"004:105": endpointsAt("192.0.2.42", "9376"),
	"004:208": multiPort,
	"004:322": fields(".spec.type", "NodePort", ".spec.ports[0].nodePort", "30007", ".spec.ports[0].targetPort", "80", ".spec.ports[0].protocol", "TCP"),
	"004:344": balanced,
	"004:384": annotated("alibaba-cloud-loadbalancer-address-type", "intranet"),
	"004:394": annotated("service.kubernetes.io/qcloud-loadbalancer-internal-subnetid", "subnet-xxxxx"),
	"004:404": annotated("cce-load-balancer-internal-vpc", "true"),
	"004:415": annotated("aws-load-balancer-internal", "true"),
	"004:432": external,
	"004:460": outside,
}

// machineKubectl is the kubectl of this machine, which Portal's makers have not touched.
func machineKubectl(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("kubectl")
	if err == nil {
		return path
	}
	if os.Getenv("CI") == "true" || os.Geteuid() == 0 {
		t.Fatal("kubectl is not installed: the API is to be tried with one that is not ours; see https://kubernetes.io/docs/tasks/tools/")
	}
	t.Log("kubectl is not installed; only `portal kubectl` is tried")
	return ""
}
