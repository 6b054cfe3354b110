package test

import (
	"encoding/base64"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"

	"portal/test/harness"
)

// hookService is a Service without a selector, and away one that is a name elsewhere.
const hookService = `apiVersion: v1
kind: Service
metadata: {name: hook, namespace: hooks}
spec: {ports: [{name: https, port: 443, targetPort: 9443}, {name: other, port: 8443}]}
---
apiVersion: v1
kind: Service
metadata: {name: away, namespace: hooks}
spec: {type: ExternalName, externalName: localhost}
`

// hookSlice has an endpoint that is ready, and one that is not and where nobody listens.
const hookSlice = `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: hook-1, namespace: hooks, labels: {kubernetes.io/service-name: hook}}
addressType: IPv4
ports: [{name: https, port: %s}, {name: other, port: 1}]
endpoints:
- {addresses: ["192.0.2.11"], conditions: {ready: false}}
- {addresses: ["` + nodeAddress + `"], conditions: {ready: true}}
`

// byService replaces the URLs in a configuration of webhooks by a Service.
func byService(config, service string) string {
	for _, path := range []string{"/mutate", "/validate", "/convert"} {
		for _, verb := range []string{"%[1]s", "%s"} {
			config = strings.ReplaceAll(config, "url: "+verb+path, fmt.Sprintf("service: {namespace: hooks, %s, path: %s}", service, path))
		}
	}
	return config
}

// Webhooks that are given as a Service are found at its ready endpoints, without a proxy on the server's machine: those of admission and
// those that convert. The test is in a network namespace, for endpoints are never loopback addresses.
func TestWebhookOfService(t *testing.T) {
	t.Parallel()
	if !inNamespace(t) {
		return
	}
	network(t)
	k := newTerminal(t, startPortal(t), []string{harness.Portal(), "kubectl"})
	port := func(at string) string {
		t.Helper()
		u, err := url.Parse(at)
		if err != nil {
			t.Fatal(err)
		}
		_, port, err := net.SplitHostPort(u.Host)
		if err != nil {
			t.Fatal(err)
		}
		return port
	}
	at, authority := webhookServerAt(t, nodeAddress+":0", admissionHook{})
	bundle := base64.StdEncoding.EncodeToString(authority)
	k.run("create", "namespace", "hooks")
	k.run("create", "namespace", "shop")
	k.run("label", "namespace", "shop", "watched=yes")
	k.run("apply", "-f", k.file("service.yaml", hookService))
	configured := fmt.Sprintf(byService(hooks, "name: hook"), "", bundle)
	k.run("apply", "-f", k.file("hooks.yaml", configured))
	waitFor(t, "a Service without endpoints is no webhook, and what it should have judged is refused", func() bool {
		out, err := k.try("create", "configmap", "x", "-n", "shop", "--dry-run=server")
		return err != nil && strings.Contains(out, "failed calling webhook") && strings.Contains(out, "hooks/hook")
	})
	k.run("apply", "-f", k.file("slice.yaml", fmt.Sprintf(hookSlice, port(at))))
	waitFor(t, "the webhook labels, and the next sees it", func() bool {
		out, err := k.try("create", "configmap", "yes", "-n", "shop", "--dry-run=server")
		return err == nil && strings.Contains(out, "looked at yes with label yes")
	})
	for range 10 { // never at the endpoint that is not ready
		k.run("create", "configmap", "yes", "-n", "shop", "--dry-run=server")
	}
	k.refused("the webhook says no", "create", "configmap", "no", "-n", "shop", "--from-literal=say=no")

	// The next request finds an endpoint that has moved.
	moved, authority := webhookServerAt(t, nodeAddress+":0", admissionHook{})
	k.run("apply", "-f", k.file("slice.yaml", fmt.Sprintf(hookSlice, port(moved))))
	k.run("apply", "-f", k.file("hooks.yaml", strings.ReplaceAll(configured, bundle, base64.StdEncoding.EncodeToString(authority))))
	waitFor(t, "the webhook at its new place", func() bool {
		out, err := k.try("create", "configmap", "no", "-n", "shop", "--from-literal=say=no", "--dry-run=server")
		return err != nil && strings.Contains(out, "the webhook says no")
	})
	// Another port of the Service, and one that it does not have.
	for _, wrong := range []string{"name: hook, port: 8443", "name: hook, port: 444", "name: none"} {
		k.run("apply", "-f", k.file("wrong.yaml", fmt.Sprintf(byService(hooks, wrong), "", base64.StdEncoding.EncodeToString(authority))))
		waitFor(t, wrong+" is no webhook", func() bool {
			out, err := k.try("create", "configmap", "x", "-n", "shop", "--dry-run=server")
			return err != nil && strings.Contains(out, "failed calling webhook")
		})
	}
	// A Service that is a name elsewhere.
	away, authority := webhookServer(t, admissionHook{})
	k.run("apply", "-f", k.file("hooks.yaml", fmt.Sprintf(byService(hooks, "name: away, port: "+port(away)), "", base64.StdEncoding.EncodeToString(authority))))
	waitFor(t, "the webhook elsewhere", func() bool {
		out, err := k.try("create", "configmap", "no", "-n", "shop", "--from-literal=say=no", "--dry-run=server")
		return err != nil && strings.Contains(out, "the webhook says no")
	})

	// Conversion.
	hook := &converter{}
	converts, authority := webhookServerAt(t, nodeAddress+":0", hook)
	k.run("apply", "-f", k.file("slice.yaml", fmt.Sprintf(hookSlice, port(converts))))
	k.run("apply", "-f", k.file("rooms.yaml", fmt.Sprintf(byService(roomsDefinition, "name: hook"), base64.StdEncoding.EncodeToString(authority))))
	k.run("wait", "--for=condition=Established", "crd/rooms.house.example.com", "--timeout=60s")
	k.run("apply", "-f", k.file("kitchen.yaml", "apiVersion: house.example.com/v2\nkind: Room\nmetadata: {name: kitchen, namespace: hooks}\nspec: {temperature: 21}\n"))
	if got := k.run("get", "rooms.v1.house.example.com", "-n", "hooks", "-o", "jsonpath={.items[*].spec.temperature}"); got != "21C" || hook.asked.Load() == 0 {
		t.Errorf("in v1 the temperature is %q, after %d questions", got, hook.asked.Load())
	}
}
