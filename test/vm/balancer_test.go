//go:build vm

package vm_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
	"portal/test/vm"
)

// TestBalancerBesideIPVS: in a lab whose proxy is in the mode ipvs, a Service that asks for the balancing process gets an Event that says why it has no effect,
// and one that does not ask for it gets none.
func TestBalancerBesideIPVS(t *testing.T) {
	if _, err := os.Stat(harness.Portal()); err != nil {
		t.Fatalf("%v: run `make build` first", err)
	}
	r := vm.RunUML(t, vm.Spec{Timeout: 20 * time.Minute, Memory: 4096, Command: fmt.Sprintf(`
cd /tmp
cp %s portal
mount -t cgroup2 none /sys/fs/cgroup
./portal lab --name vm --nodes 1 --proxy-mode ipvs --data-dir /tmp/lab --start-timeout 10m --load-balancer-pool 192.168.100.240-192.168.100.242 >lab.log 2>&1 &
lab=$!
kubectl() { ./portal kubectl --kubeconfig /tmp/lab/admin.kubeconfig "$@"; }
# until TEXT COMMAND...: repeats a command until its output has the text.
until_has() {
	text=$1; shift
	for i in $(seq 400); do
		"$@" >out 2>&1
		if grep -q "$text" out; then return 0; fi
		kill -0 $lab || break
		sleep 2
	done
	echo "never: $text"; cat out; tail -n 30 lab.log
	exit 1
}
until_has 'The lab is ready' cat lab.log
for name in asks plain; do
	kubectl apply -f - <<END || exit 1
apiVersion: v1
kind: Service
metadata: {name: $name}
spec: {type: LoadBalancer, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: $name, labels: {kubernetes.io/service-name: $name}}
addressType: IPv4
endpoints: [{addresses: [192.168.100.99], nodeName: node1}]
ports: [{port: 80}]
END
done
kubectl annotate service asks service.beta.kubernetes.io/aws-load-balancer-backend-protocol=http || exit 1
events() { kubectl get events --field-selector "reason=ProxyModeUnsupported" -o 'jsonpath={range .items[*]}{.type} {.involvedObject.name}: {.message}{"\n"}{end}'; }
until_has 'asks:' events
./portal lab exec --name vm node1 -- cat /proc/net/ip_vs
echo "events:"; events
`, vm.Host+harness.Portal())})
	_, events, _ := strings.Cut(r.Output, "events:\n")
	if lines := strings.Fields(events); r.Exit != 0 || len(lines) < 2 || !strings.HasPrefix(events, "Warning asks: the proxy is in the mode ipvs") || strings.Contains(events, "plain:") {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%.0f s\n%s", r.Took.Seconds(), events)
}
