//go:build console

package test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// TestConsoleLong is `make test-console`: the tour with its times, the API server restarting under the page, and 10,000 Services.
func TestConsoleLong(t *testing.T) {
	buildConsole(t)
	api, dir := consoleServer(t)
	beside, err := harness.Start(t.TempDir(), "console", harness.Portal(), "console", "--kubeconfig", api.Kubeconfig, "--listen", fmt.Sprintf("127.0.0.1:%d", harness.FreePort()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(beside.Kill)
	browser(t, api, dir, map[string]any{"parts": []string{"tour", "limited", "restart"}, "strict": true, "beside": consoleURL(t, beside)})
}

// consoleURL is the address that `portal console` prints.
func consoleURL(t *testing.T, p *harness.Process) string {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		for _, word := range strings.Fields(p.Tail()) {
			if strings.Contains(word, "#code=") {
				return word
			}
		}
	}
	t.Fatalf("portal console printed no address:\n%s", p.Tail())
	return ""
}

// TestConsoleMany: 10,000 Services scroll as ten do.
func TestConsoleMany(t *testing.T) {
	const many = 10000
	buildConsole(t)
	api, dir := consoleServer(t)
	client := connect(t, api.Kubeconfig)
	var group sync.WaitGroup
	work := make(chan int)
	for range 16 {
		group.Go(func() {
			for i := range work {
				createService(t, client, i)
			}
		})
	}
	for i := range many {
		work <- i
	}
	close(work)
	group.Wait()
	before := residentMemory(t, api.Pid())
	browser(t, api, dir, map[string]any{"parts": []string{"many"}, "many": many})
	t.Logf("the server's memory: %d MB before somebody signed in, %d MB after", before>>20, residentMemory(t, api.Pid())>>20)
}

func residentMemory(t *testing.T, pid int) int64 {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(data), &size, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * int64(os.Getpagesize())
}

// createService makes a Service with two endpoints; every hundredth has none that is ready.
func createService(t *testing.T, client kubernetes.Interface, i int) {
	name, port, ready := fmt.Sprintf("s-%05d", i), int32(8080), i%100 != 0
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(port)}}},
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}}, AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Port: &port}},
	}
	for n := range 2 {
		node := fmt.Sprintf("node-%d", 1+(i+n)%3)
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 128+n, i/250, 1+i%250)}, NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		})
	}
	if _, err := client.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := client.DiscoveryV1().EndpointSlices("default").Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
}
