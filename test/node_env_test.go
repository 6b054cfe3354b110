package test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/store"
	"portal/test/harness"
)

// envCase is a recorded one: with a namespace, what a Pod there gets; without, all that the Services give, whose namespace the Pod is
// in then.
type envCase struct {
	Name      string
	Services  []corev1.Service
	Namespace *string
	Links     bool `json:"enableServiceLinks"`
	Want      [][2]string

	number int
}

// usual says whether the API's own Service is as every cluster has it, or not part of the question.
func (c *envCase) usual() bool { return c.Namespace == nil || c.apiService() == "10.96.0.1" }

// apiService is the address of default/kubernetes; empty: there is none.
func (c *envCase) apiService() string {
	for _, s := range c.Services {
		if s.Namespace == "default" && s.Name == "kubernetes" {
			return s.Spec.ClusterIP
		}
	}
	return ""
}

// home is the namespace of the Pod. Each case has namespaces of its own.
func (c *envCase) home() string { return c.place(ptr.Deref(c.Namespace, "ns1")) }

func (c *envCase) place(namespace string) string {
	if namespace == "default" {
		return namespace
	}
	return fmt.Sprintf("case%d-%s", c.number, namespace)
}

// addresses are those that the case takes from others.
func (c *envCase) addresses() (out []string) {
	for _, s := range c.Services {
		if s.Namespace+"/"+s.Name != "default/kubernetes" {
			out = append(out, s.Spec.ClusterIPs...)
		}
	}
	return slices.DeleteFunc(out, func(a string) bool { return a == corev1.ClusterIPNone })
}

// wanted is what the process must see of Services. A name that two of them make has one of their values.
func (c *envCase) wanted() map[string][]string {
	out := map[string][]string{}
	for _, v := range c.Want {
		out[v[0]] = append(out[v[0]], v[1])
	}
	if c.Namespace == nil {
		const at = "10.96.0.1"
		for name, value := range map[string]string{
			"SERVICE_HOST": at, "SERVICE_PORT": "443", "SERVICE_PORT_HTTPS": "443", "PORT": "tcp://" + at + ":443", "PORT_443_TCP": "tcp://" + at + ":443",
			"PORT_443_TCP_PROTO": "tcp", "PORT_443_TCP_PORT": "443", "PORT_443_TCP_ADDR": at,
		} {
			out["KUBERNETES_"+name] = []string{value}
		}
	}
	return out
}

// compare says what is wrong with an environment.
func (c *envCase) compare(environ string) string {
	got := map[string]string{}
	for _, line := range strings.Split(strings.TrimSuffix(environ, "\x00"), "\x00") {
		name, value, _ := strings.Cut(line, "=")
		if _, twice := got[name]; twice {
			return name + " is there twice"
		}
		got[name] = value
	}
	for _, own := range []string{"PATH", "HOSTNAME"} {
		if got[own] == "" {
			return "without " + own
		}
		delete(got, own)
	}
	var wrong []string
	for name, values := range c.wanted() {
		if !slices.Contains(values, got[name]) {
			wrong = append(wrong, fmt.Sprintf("%s=%q, want %q", name, got[name], values))
		}
		delete(got, name)
	}
	for name, value := range got {
		wrong = append(wrong, name+"="+value+" is unwanted")
	}
	slices.Sort(wrong)
	return strings.Join(wrong, "\n")
}

// envWorld is a node whose Pods the cases start.
type envWorld struct {
	*podMachine
	etcd string
}

// TestNodeServiceVariables: the recorded sets of Services give processes of real Pods the recorded variables.
func TestNodeServiceVariables(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	raw, err := os.ReadFile(harness.Recorded("env", "golden.json"))
	if err != nil {
		t.Fatal(err)
	}
	var cases []*envCase
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	etcd := startEtcd(t, 1)[0].ClientURL
	// The recorded addresses include that of kube-dns.
	w := &envWorld{newPodMachine(t, "env", "--etcd-servers", etcd, "--controllers=*,-cluster-dns"), etcd}
	var usual, special []*envCase
	for i, c := range cases {
		c.number = i
		if c.usual() {
			usual = append(usual, c)
		} else {
			special = append(special, c)
		}
	}
	if len(usual) < 20 || len(special) < 3 {
		t.Errorf("%d and %d cases", len(usual), len(special))
	}
	begin := time.Now()
	for len(usual) > 0 {
		var batch []*envCase
		batch, usual = together(usual)
		w.check(t, batch)
	}
	// No cluster is without default/kubernetes for long: the server must be kept from making it again.
	w.kubectl(t, withoutAPIService, "apply")
	for _, c := range special {
		w.replaceAPIService(t, c)
		w.check(t, []*envCase{c})
	}
	t.Logf("%d cases within %v", len(cases), time.Since(begin).Round(time.Millisecond))
}

// together takes cases that can be there at the same time: no two of them have Services with the same address.
func together(cases []*envCase) (batch, left []*envCase) {
	taken := map[string]bool{}
	for _, c := range cases {
		if slices.ContainsFunc(c.addresses(), func(a string) bool { return taken[a] }) {
			left = append(left, c)
			continue
		}
		for _, a := range c.addresses() {
			taken[a] = true
		}
		batch = append(batch, c)
	}
	return batch, left
}

const withoutAPIService = `apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-kubernetes}
spec:
  matchConstraints:
    resourceRules:
    - {apiGroups: [""], apiVersions: [v1], resources: [services], operations: [CREATE, UPDATE, DELETE], resourceNames: [kubernetes]}
  validations:
  - {expression: "request.userInfo.username != 'system:apiserver'"}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-kubernetes}
spec: {policyName: no-kubernetes, validationActions: [Deny]}
`

// replaceAPIService makes default/kubernetes what the case has.
func (w *envWorld) replaceAPIService(t *testing.T, c *envCase) {
	t.Helper()
	services := w.client.CoreV1().Services("default")
	for calm := time.Now(); time.Since(calm) < time.Second; time.Sleep(20 * time.Millisecond) { // the policy may take a moment
		switch err := services.Delete(t.Context(), "kubernetes", metav1.DeleteOptions{}); {
		case err == nil:
			calm = time.Now()
		case !apierrors.IsNotFound(err):
			t.Fatal(err)
		}
	}
}

// check starts a Pod for each case and compares what its process sees.
func (w *envWorld) check(t *testing.T, batch []*envCase) {
	t.Helper()
	for _, c := range batch {
		w.create(t, c)
	}
	for attempt, left := 0, batch; len(left) > 0; attempt++ {
		name := fmt.Sprintf("env%d", attempt)
		for _, c := range left {
			w.startPod(t, c, name)
		}
		var again []*envCase
		for _, c := range left {
			// Pods and Services come to the node in two streams: what was created first may come last, so a Pod can be too early.
			if why := c.compare(w.environ(t, c, name)); why != "" {
				again = append(again, c)
				if attempt == 4 {
					t.Errorf("%s:\n%s", c.Name, why)
				}
			}
		}
		if left = again; attempt == 4 {
			break
		}
	}
	for _, c := range batch {
		w.remove(t, c)
	}
}

// create makes the case's namespaces and Services.
func (w *envWorld) create(t *testing.T, c *envCase) {
	t.Helper()
	names := []string{c.home()}
	for _, s := range c.Services {
		names = append(names, c.place(s.Namespace))
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if name == "default" {
			continue
		}
		if _, err := w.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range c.Services {
		if c.usual() && s.Namespace+"/"+s.Name == "default/kubernetes" {
			continue
		}
		s.Namespace = c.place(s.Namespace)
		if s.Spec.Type == corev1.ServiceTypeExternalName && s.Spec.ClusterIP != "" {
			w.store(t, &s)
			continue
		}
		if _, err := w.client.CoreV1().Services(s.Namespace).Create(t.Context(), &s, metav1.CreateOptions{}); err != nil {
			t.Fatalf("%s: Service %s: %v", c.Name, s.Name, err)
		}
	}
}

// store writes a Service that the API would reject to etcd, where old clusters may have one.
func (w *envWorld) store(t *testing.T, s *corev1.Service) {
	t.Helper()
	s.UID, s.CreationTimestamp = "0b2cbf9a-8d5c-4c6e-9f5e-0e3a1f6d7a11", metav1.Now()
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dialEtcd(t, w.etcd).Put(t.Context(), store.Prefix+"/services/specs/"+s.Namespace+"/"+s.Name, string(data)); err != nil {
		t.Fatal(err)
	}
}

func (w *envWorld) startPod(t *testing.T, c *envCase, name string) {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		NodeName: w.name, RestartPolicy: corev1.RestartPolicyNever, EnableServiceLinks: ptr.To(c.Links || c.Namespace == nil),
		Containers: []corev1.Container{{Name: "c", Image: "host", Command: []string{"cp", "/proc/self/environ", corev1.TerminationMessagePathDefault}}},
	}}
	// Its service account may take a moment.
	eventually(t, 30*time.Second, "the Pod of "+c.Name, func() string {
		if _, err := w.client.CoreV1().Pods(c.home()).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
}

// environ is what the process saw.
func (w *envWorld) environ(t *testing.T, c *envCase, name string) (out string) {
	t.Helper()
	eventually(t, 60*time.Second, "the Pod of "+c.Name, func() string {
		pod, err := w.client.CoreV1().Pods(c.home()).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if pod.Status.Phase != corev1.PodSucceeded {
			return fmt.Sprintf("%+v\n%s", pod.Status, w.agent.Tail())
		}
		out = pod.Status.ContainerStatuses[0].State.Terminated.Message
		return ""
	})
	return out
}

// remove makes room for cases with the same addresses.
func (w *envWorld) remove(t *testing.T, c *envCase) {
	t.Helper()
	if err := w.client.CoreV1().Pods(c.home()).DeleteCollection(t.Context(), metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{}); err != nil {
		t.Error(err)
	}
	for _, s := range c.Services {
		if s.Namespace+"/"+s.Name == "default/kubernetes" {
			continue
		}
		if err := w.client.CoreV1().Services(c.place(s.Namespace)).Delete(t.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}
}
