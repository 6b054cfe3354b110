package apiserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func status(t testing.TB, body []byte) *metav1.Status {
	t.Helper()
	var s metav1.Status
	if err := json.Unmarshal(body, &s); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return &s
}

// TestMistakesGetClearAnswers: each is something that a user typed, and what they must be able to read out of the answer.
func TestMistakesGetClearAnswers(t *testing.T) {
	t.Parallel()
	ask := inProcess(t)
	const plain = "application/json"

	t.Run("missing namespace", func(t *testing.T) {
		w := ask(http.MethodPost, "/api/v1/namespaces/nope/services", plain, []byte(`{"metadata":{"name":"a"},"spec":{"ports":[{"port":80}]}}`))
		s := status(t, w.Body.Bytes())
		if w.Code != 404 || s.Details == nil || s.Details.Kind != "namespaces" || s.Details.Name != "nope" || s.Message != `namespaces "nope" not found` {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})

	t.Run("balancer address", func(t *testing.T) {
		body := `{"apiVersion":"v1","kind":"Service","metadata":{"name":"lb"},"spec":{"type":"LoadBalancer","ports":[{"port":80}]}}`
		if w := ask(http.MethodPost, servicesPath, plain, []byte(body)); w.Code != 201 {
			t.Fatal(w.Body)
		}
		for ip, want := range map[string]int{
			"127.0.0.1": 422, "0.0.0.0": 422, "169.254.1.1": 422, "224.0.0.1": 422, "239.1.1.1": 422,
			"::1": 422, "::": 422, "fe80::1": 422, "ff02::1": 422, "203.0.113.7": 200, "2001:db8::7": 200,
		} {
			patch := fmt.Sprintf(`{"status":{"loadBalancer":{"ingress":[{"ip":%q}]}}}`, ip)
			w := ask(http.MethodPatch, servicesPath+"/lb/status", "application/merge-patch+json", []byte(patch))
			if w.Code != want || want == 422 && status(t, w.Body.Bytes()).Details.Causes[0].Field != "status.loadBalancer.ingress[0].ip" {
				t.Errorf("%s: %d %s", ip, w.Code, w.Body)
			}
		}
	})

	t.Run("balancer address in unusual writing", func(t *testing.T) {
		w := ask(http.MethodPatch, servicesPath+"/lb/status", "application/merge-patch+json", []byte(`{"status":{"loadBalancer":{"ingress":[{"ip":"2001:DB8::7"}]}}}`))
		if warning := w.Header().Get("Warning"); w.Code != 200 || !strings.Contains(warning, "status.loadBalancer.ingress[0]") {
			t.Errorf("%d, warning %q", w.Code, warning)
		}
	})

	t.Run("a Service that exists", func(t *testing.T) {
		for name, held := range map[string]func(*corev1.Service) string{
			"held-address": func(svc *corev1.Service) string {
				return fmt.Sprintf(`"clusterIP":%q,"ports":[{"port":80}]`, svc.Spec.ClusterIP)
			},
			"held-port": func(svc *corev1.Service) string {
				return fmt.Sprintf(`"type":"NodePort","ports":[{"port":80,"nodePort":%d}]`, svc.Spec.Ports[0].NodePort)
			},
		} {
			w := ask(http.MethodPost, servicesPath, plain, fmt.Appendf(nil, `{"metadata":{"name":%q},"spec":{"type":"NodePort","ports":[{"port":80}]}}`, name))
			var svc corev1.Service
			if err := json.Unmarshal(w.Body.Bytes(), &svc); err != nil || w.Code != 201 {
				t.Fatalf("%d %v", w.Code, err)
			}
			body := func(name string) []byte {
				return fmt.Appendf(nil, `{"metadata":{"name":%q},"spec":{%s}}`, name, held(&svc))
			}
			for _, query := range []string{"", "?dryRun=All"} {
				if w := ask(http.MethodPost, servicesPath+query, plain, body(name)); w.Code != 409 || status(t, w.Body.Bytes()).Reason != metav1.StatusReasonAlreadyExists {
					t.Errorf("%s%s again: %d %s", name, query, w.Code, w.Body)
				}
				if w := ask(http.MethodPost, servicesPath+query, plain, body("another")); w.Code != 422 {
					t.Errorf("%s%s by another: %d %s", name, query, w.Code, w.Body)
				}
			}
		}
	})

	t.Run("a version that is no number", func(t *testing.T) {
		w := ask(http.MethodPut, servicesPath+"/lb", plain, []byte(`{"metadata":{"name":"lb","resourceVersion":"abc"},"spec":{"ports":[{"port":80}]}}`))
		if message := status(t, w.Body.Bytes()).Message; w.Code != 400 || !strings.Contains(message, "metadata.resourceVersion must be a number") {
			t.Errorf("%d %s", w.Code, message)
		}
	})

	t.Run("selected by namespace", func(t *testing.T) {
		for path, want := range map[string]int{
			"/apis/networking.k8s.io/v1/ipaddresses": 200, "/apis/networking.k8s.io/v1/servicecidrs": 200,
			"/apis/networking.k8s.io/v1/ingressclasses": 200, "/api/v1/nodes": 400, "/api/v1/namespaces": 400,
		} {
			if w := ask(http.MethodGet, path+"?fieldSelector=metadata.namespace%3Dx", "", nil); w.Code != want {
				t.Errorf("%s: %d %s", path, w.Code, w.Body)
			}
		}
	})

	t.Run("pools of others' addresses", func(t *testing.T) {
		if w := ask(http.MethodPost, "/api/v1/nodes", plain, []byte(`{"metadata":{"name":"pooled"},"spec":{"podCIDR":"10.1.2.0/24","podCIDRs":["10.1.2.0/24"]}}`)); w.Code != 201 {
			t.Fatal(w.Body)
		}
		const path = "/api/v1/namespaces/kube-system/configmaps"
		send := func(method, path, pools string) (int, string) {
			body, err := json.Marshal(map[string]any{"metadata": map[string]any{"name": "portal-lb"}, "data": map[string]any{"pools": pools}})
			if err != nil {
				t.Fatal(err)
			}
			w := ask(method, path, plain, body)
			if w.Code < 400 {
				return w.Code, ""
			}
			return w.Code, status(t, w.Body.Bytes()).Message
		}
		for pools, want := range map[string]string{
			"- {name: a, addresses: [192.0.2.1, 10.96.1.0/24]}":                                "data[pools]: Forbidden: pools[0].addresses[1]: 10.96.1.0-10.96.1.255 overlaps the Service range 10.96.0.0/16",
			"- {name: a, addresses: [192.0.2.1]}\n- {name: b, addresses: [10.1.1.0-10.1.2.0]}": "pools[1].addresses[0]: 10.1.1.0-10.1.2.0 overlaps the Pod range of Node pooled 10.1.2.0/24",
		} {
			if code, message := send(http.MethodPost, path, pools); code != 422 || !strings.Contains(message, want) {
				t.Errorf("%s: %d %s", pools, code, message)
			}
		}
		if code, message := send(http.MethodPost, path, "- {name: a, addresses: [10.1.1.0/24]}"); code != 201 {
			t.Errorf("beside them: %d %s", code, message)
		}
		if code, message := send(http.MethodPut, path+"/portal-lb", "- {name: a, addresses: [10.1.0.0/16]}"); code != 422 {
			t.Errorf("a change: %d %s", code, message)
		}
		if code, message := send(http.MethodPut, path+"/portal-lb", "- {adresses: []}"); code != 200 {
			t.Errorf("other mistakes are the balancers' matter: %d %s", code, message)
		}
		if code, message := send(http.MethodPost, strings.Replace(path, "kube-system", "default", 1), "- {name: a, addresses: [10.96.1.0/24]}"); code != 201 {
			t.Errorf("in another namespace: %d %s", code, message)
		}
	})

	t.Run("endpoint that is a cluster IP", func(t *testing.T) {
		slice := `{"metadata":{"name":"s"},"addressType":"IPv4","endpoints":[{"addresses":["10.96.0.77"]}],"ports":[{"port":70000}]}`
		w := ask(http.MethodPost, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", plain, []byte(slice))
		warnings := strings.Join(w.Header().Values("Warning"), "\n")
		if w.Code != 201 || !strings.Contains(warnings, "10.96.0.77 is in a range of cluster IPs") || !strings.Contains(warnings, "70000 is not a port") {
			t.Errorf("%d, warnings %s", w.Code, warnings)
		}
		endpoints := `{"metadata":{"name":"e"},"subsets":[{"addresses":[{"ip":"10.96.0.77"}],"ports":[{"port":%d}]}]}`
		w = ask(http.MethodPost, "/api/v1/namespaces/default/endpoints", plain, fmt.Appendf(nil, endpoints, 80))
		if warnings := strings.Join(w.Header().Values("Warning"), "\n"); w.Code != 201 || !strings.Contains(warnings, "10.96.0.77 is in a range of cluster IPs") {
			t.Errorf("%d, warnings %s", w.Code, warnings)
		}
		if w = ask(http.MethodPost, "/api/v1/namespaces/default/endpoints", plain, fmt.Appendf(nil, endpoints, 70000)); w.Code != 422 {
			t.Errorf("port 70000: %d %s", w.Code, w.Body)
		}
	})

	t.Run("resourceVersion that is no number", func(t *testing.T) {
		for _, c := range []struct{ method, path, kind, body string }{
			{http.MethodGet, servicesPath + "?watch=1&timeoutSeconds=1&resourceVersion=abc", plain, ""},
			{http.MethodGet, servicesPath + "?resourceVersion=abc", plain, ""},
			{http.MethodPut, servicesPath + "/new", plain, `{"metadata":{"name":"new","resourceVersion":"abc"},"spec":{"ports":[{"port":80}]}}`},
			{http.MethodPatch, servicesPath + "/lb", "application/merge-patch+json", `{"metadata":{"resourceVersion":"abc"}}`},
		} {
			if w := ask(c.method, c.path, c.kind, []byte(c.body)); w.Code < 400 || w.Code >= 500 {
				t.Errorf("%s %s: %d %s", c.method, c.path, w.Code, w.Body)
			}
		}
	})

	t.Run("patch that is nested deep", func(t *testing.T) {
		deep := strings.Repeat(`{"a":`, 5000) + "1" + strings.Repeat("}", 5000)
		w := ask(http.MethodPatch, servicesPath+"/lb", "application/merge-patch+json", []byte(deep))
		if w.Code != 400 || !strings.Contains(w.Body.String(), "nested") {
			t.Errorf("%d %.300s", w.Code, w.Body)
		}
	})

	t.Run("nothing is at a group that nobody defined", func(t *testing.T) {
		if w := ask(http.MethodGet, "/apis/example.com/v1/gadgets", plain, nil); w.Code != 404 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})
}

// TestVeryManyKeysAreRefusedQuickly: in whichever format and by whichever request they come.
func TestVeryManyKeysAreRefusedQuickly(t *testing.T) {
	t.Parallel()
	ask := inProcess(t)
	const path = "/api/v1/namespaces/default/configmaps"
	keys := map[string]string{}
	for i := range 150_000 {
		keys[fmt.Sprintf("k%06d", i)] = ""
	}
	object := func(place string) []byte {
		m := &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Name: "big"}}
		switch place {
		case "data":
			m.Data = keys
		case "labels":
			m.Labels = keys
		case "annotations":
			m.Annotations = keys
		}
		data, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	var lines bytes.Buffer
	lines.WriteString("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: big\ndata:\n")
	for key := range keys {
		fmt.Fprintf(&lines, "  %s: ''\n", key)
	}
	wire := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "big"}, Data: keys}
	raw, err := wire.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if got := protobufMembers(envelope(raw)); got < 150_000 {
		t.Errorf("in protobuf %d members were counted", got)
	}
	for _, c := range []struct {
		name, method, path, kind string
		body                     []byte
	}{
		{"data", http.MethodPost, path, "application/json", object("data")},
		{"labels", http.MethodPost, path, "application/json", object("labels")},
		{"annotations", http.MethodPut, path + "/big", "application/json", object("annotations")},
		{"apply", http.MethodPatch, path + "/big?fieldManager=x", "application/apply-patch+yaml", object("data")},
		{"yaml", http.MethodPost, path, "application/yaml", lines.Bytes()},
		{"protobuf", http.MethodPost, path, "application/vnd.kubernetes.protobuf", envelope(raw)},
	} {
		began := time.Now()
		w := ask(c.method, c.path, c.kind, c.body)
		if w.Code != http.StatusRequestEntityTooLarge || !strings.Contains(w.Body.String(), "members") {
			t.Errorf("%s: %d %.300s", c.name, w.Code, w.Body)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("%s took %s", c.name, took)
		}
	}
	// Nor do they come in steps.
	if w := ask(http.MethodPost, path, "application/json", []byte(`{"metadata":{"name":"steps"}}`)); w.Code != 201 {
		t.Fatal(w.Body)
	}
	code := 0
	for step := range 4 {
		part := map[string]string{}
		for i := range 4000 {
			part[fmt.Sprintf("k%d-%d", step, i)] = ""
		}
		patch, err := json.Marshal(map[string]any{"data": part})
		if err != nil {
			t.Fatal(err)
		}
		w := ask(http.MethodPatch, path+"/steps", "application/merge-patch+json", patch)
		if code = w.Code; code != 200 {
			break
		}
	}
	if code != 422 {
		t.Errorf("in steps of 4,000 keys: %d", code)
	}
}

// envelope wraps an encoded object as clients that speak protobuf do.
func envelope(raw []byte) []byte {
	out := append([]byte("k8s\x00"), 0x0a, 15) // typeMeta: v1 ConfigMap
	out = append(out, "\x0a\x02v1\x12\x09ConfigMap"...)
	out = append(out, 0x12)
	for n := uint64(len(raw)); ; n >>= 7 {
		if n < 0x80 {
			out = append(out, byte(n))
			break
		}
		out = append(out, byte(n)|0x80)
	}
	return append(out, raw...)
}

// TestAServiceWithAllNodePorts: Kubernetes stores and deletes it, so nobody expects a limit.
func TestAServiceWithAllNodePorts(t *testing.T) {
	t.Parallel()
	ask := inProcess(t)
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "all"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort}}
	for i := range int32(2700) {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p-", i), Port: i + 1})
	}
	body, err := json.Marshal(svc)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time with the ports that the first has freed
		if w := ask(http.MethodPost, servicesPath, "application/json", body); w.Code != http.StatusCreated {
			t.Fatalf("%d %.500s", w.Code, w.Body)
		}
		if w := ask(http.MethodDelete, servicesPath+"/all", "application/json", nil); w.Code != http.StatusOK {
			t.Fatalf("%d %.500s", w.Code, w.Body)
		}
	}
}
