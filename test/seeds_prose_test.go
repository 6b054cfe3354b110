package test

import (
	"fmt"
	"strings"
	"testing"
)

// promises are what the documents say in words about Services: a spec, and what must become of it. A code of 201 is
// followed by what the stored Service must show, another by the field that the answer must name.
var promises = []struct {
	says string
	spec string
	code int
	show string
}{
	{"targetPort is port where it is not given", `{"ports":[{"port":80}]}`, 201, `"targetPort":80`},
	{"the protocol is TCP where it is not given", `{"ports":[{"port":80}]}`, 201, `"protocol":"TCP"`},
	{"UDP can be had", `{"ports":[{"port":53,"protocol":"UDP"}]}`, 201, `"protocol":"UDP"`},
	{"SCTP can be had", `{"ports":[{"port":53,"protocol":"SCTP"}]}`, 201, `"protocol":"SCTP"`},
	{"targetPort can be the name of a Pod's port", `{"ports":[{"port":80,"targetPort":"http-web"}]}`, 201, `"targetPort":"http-web"`},
	{"the type is ClusterIP where it is not given", `{"ports":[{"port":80}]}`, 201, `"type":"ClusterIP"`},
	{"an address of one's own", `{"clusterIP":"10.0.0.11","ports":[{"port":6379}]}`, 201, `"clusterIP":"10.0.0.11"`},
	{"an address outside the range is 422", `{"clusterIP":"10.1.0.1","ports":[{"port":80}]}`, 422, `"field":"spec.clusterIPs"`},
	{"an address that is taken is 422", `{"clusterIP":"10.0.0.1","ports":[{"port":80}]}`, 422, `"field":"spec.clusterIPs"`},
	{"an address that is none is 422", `{"clusterIP":"10.0.0.256","ports":[{"port":80}]}`, 422, `"field":"spec.clusterIPs[0]"`},
	{"several ports must all have names", `{"ports":[{"port":80},{"port":443}]}`, 422, `"field":"spec.ports[0].name"`},
	{"a port's name may be 123-abc", `{"ports":[{"name":"123-abc","port":80}]}`, 201, `"name":"123-abc"`},
	{"a port's name may be web", `{"ports":[{"name":"web","port":80}]}`, 201, `"name":"web"`},
	{"a port's name may not be 123_abc", `{"ports":[{"name":"123_abc","port":80}]}`, 422, `"field":"spec.ports[0].name"`},
	{"a port's name may not be -web", `{"ports":[{"name":"-web","port":80}]}`, 422, `"field":"spec.ports[0].name"`},
	{"no address with None", `{"clusterIP":"None","selector":{"app":"MyApp"},"ports":[{"port":80}]}`, 201, `"clusterIP":"None"`},
	{"affinity lasts three hours unless one says otherwise", `{"sessionAffinity":"ClientIP","ports":[{"port":80}]}`, 201, `"timeoutSeconds":10800`},
	{"a node port must be in the range", `{"type":"NodePort","ports":[{"port":80,"nodePort":29999}]}`, 422, `"field":"spec.ports[0].nodePort"`},
	{"a node port of one's own", `{"type":"NodePort","ports":[{"port":80,"nodePort":30123}]}`, 201, `"nodePort":30123`},
	{"a node port is chosen", `{"type":"NodePort","ports":[{"port":80}]}`, 201, `"nodePort":3`},
	{"externalIPs go with any type", `{"type":"NodePort","externalIPs":["80.11.12.10"],"ports":[{"port":80}]}`, 201, `"externalIPs":["80.11.12.10"]`},
	{"an ExternalName needs a name", `{"type":"ExternalName"}`, 422, `"field":"spec.externalName"`},
	{"an ExternalName may look like an address", `{"type":"ExternalName","externalName":"192.0.2.1"}`, 201, `"externalName":"192.0.2.1"`},
	{"a health-check port comes with Local", `{"type":"LoadBalancer","externalTrafficPolicy":"Local","ports":[{"port":80}]}`, 201, `"healthCheckNodePort":3`},
	{"source ranges", `{"type":"LoadBalancer","loadBalancerSourceRanges":["143.231.0.0/16"],"ports":[{"port":80}]}`, 201, `"loadBalancerSourceRanges":["143.231.0.0/16"]`},
	{"appProtocol", `{"ports":[{"port":80,"appProtocol":"https"}]}`, 201, `"appProtocol":"https"`},
}

// noEndpoint are addresses that no endpoint may have.
var noEndpoint = []string{"127.0.0.1", "127.8.9.10", "::1", "169.254.1.1", "224.0.0.5", "fe80::1", "ff02::1", "0.0.0.0"}

// TestSeedPromises holds the API to what the documents say beside their examples.
func TestSeedPromises(t *testing.T) {
	t.Parallel()
	server := admin(t, seedServer(t))
	for i, p := range promises {
		t.Run(p.says, func(t *testing.T) {
			body := fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":"s%d"},"spec":%s}`, i, p.spec)
			code, answer := server.ask(t, "POST", "/api/v1/namespaces/default/services", body)
			if code != p.code || !strings.Contains(answer, p.show) {
				t.Errorf("want %d with %s, got %d: %s", p.code, p.show, code, answer)
			}
		})
	}
	for i, ip := range noEndpoint {
		t.Run("no endpoint at "+ip, func(t *testing.T) {
			body := fmt.Sprintf(`{"apiVersion":"v1","kind":"Endpoints","metadata":{"name":"e%d"},"subsets":[{"addresses":[{"ip":%q}],"ports":[{"port":80}]}]}`, i, ip)
			if code, answer := server.ask(t, "POST", "/api/v1/namespaces/default/endpoints", body); code != 422 || !strings.Contains(answer, `"field":"subsets[0].addresses[0].ip"`) {
				t.Errorf("want 422 with the field, got %d: %s", code, answer)
			}
		})
	}
}
