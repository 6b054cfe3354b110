package test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"portal/internal/lab"
)

// dnsBackends are two DNS servers in Pods behind a Service of type LoadBalancer, with UDP and TCP on one port.
const dnsBackends = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: names}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: names-in-tests}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:portal:dns"}
subjects: [{kind: ServiceAccount, name: names, namespace: default}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: names}
spec:
  replicas: 2
  selector: {matchLabels: {app: names}}
  template:
    metadata: {labels: {app: names}}
    spec:
      serviceAccountName: names
%s
      containers:
      - name: dns
        image: portal
        args: [dns, --listen, ":53", --upstream, none]
        readinessProbe: {tcpSocket: {port: 53}, periodSeconds: 1, timeoutSeconds: 5}
---
apiVersion: v1
kind: Service
metadata: {name: names}
spec:
  type: LoadBalancer
  ipFamilyPolicy: PreferDualStack
  selector: {app: names}
  ports: [{name: udp, port: 53, protocol: UDP}, {name: tcp, port: 53, protocol: TCP}]
`

// digThroughBalancer: dig, outside of the cluster, asks DNS servers in Pods through a balancer whose UDP port is passed on as packets: each family, each
// protocol, many times from different ports.
func digThroughBalancer(t *testing.T, l *lab.Lab) {
	labKubectl(t, l, fmt.Sprintf(dnsBackends, indent(spread("names"), "      ")), "apply")
	addrs := ingressOf(t, l, "names", 2)
	deployed(t, l, "names", 2*time.Minute)
	want := serviceOf(t, l, "web").Spec.ClusterIP
	dig := func(a netip.Addr, more ...string) (string, error) {
		args := append([]string{"dig", "+short", "+tries=1", "+time=5", "@" + a.String()}, more...)
		out, err := l.Client.Exec(t.Context(), append(args, "web.default.svc.cluster.local")...)
		return strings.TrimSpace(out), err
	}
	for _, a := range addrs {
		for _, protocol := range []string{"+notcp", "+tcp"} {
			eventually(t, lbLimit, "an answer at "+a.String()+" with "+protocol, func() string {
				if got, err := dig(a, protocol); err != nil || got != want {
					return fmt.Sprintf("%q, %v; want %s", got, err, want)
				}
				return ""
			})
		}
		for range 20 { // from another port each time
			if got, err := dig(a, "+notcp"); err != nil || got != want {
				t.Errorf("%s: %q, %v; want %s", a, got, err, want)
			}
		}
	}
	out := on(t, l.Client, "dig", "+noall", "+comments", "+tries=1", "+time=5", "@"+addrs[0].String(), "nothing.default.svc.cluster.local")
	if !strings.Contains(out, "NXDOMAIN") {
		t.Errorf("a name that is none: %s", out)
	}
	labKubectl(t, l, "", "delete", "service/names", "deployment/names", "serviceaccount/names", "clusterrolebinding/names-in-tests", "--timeout=60s")
}
