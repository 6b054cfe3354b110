//go:build console

package test

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
	manyPages(t, api, client)
}

// manyPages has 20 pages of Services open, and measures what they cost the server beside what it does without them: until all have their
// findings, while nothing happens, while endpoints of their Services change, and while those of others do.
func manyPages(t *testing.T, api *harness.API, client kubernetes.Interface) {
	t.Helper()
	const pages, look = 20, 30 * time.Second
	share := func(change func(int)) float64 {
		used, began := processorTime(t, api.Pid()), time.Now()
		for n := 0; time.Since(began) < look; n++ {
			change(n)
			time.Sleep(time.Second)
		}
		return 100 * (processorTime(t, api.Pid()) - used).Seconds() / time.Since(began).Seconds()
	}
	nothing := func(int) {}
	// Every hundredth Service has a page; first is that of the first Service that changes.
	changing := func(first int) func(int) {
		return func(n int) {
			patch := fmt.Sprintf(`{"metadata":{"annotations":{"turn":"%d"}},"endpoints":[{"addresses":["10.128.0.%d"],"nodeName":"node-1","conditions":{"ready":%v}}]}`, n, 1+n%200, n%2 == 0)
			if _, err := client.DiscoveryV1().EndpointSlices("default").Patch(t.Context(), fmt.Sprintf("s-%05d", first+100*(n%pages)), types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
				t.Error(err)
			}
		}
	}
	share(nothing) // what the browser began ends
	withoutStill, withoutBusy := share(nothing), share(changing(0))
	page, who := api.URL+"/console/api/", browse(t)
	if code, answer := sendJSON(t, who, page+"signin", `{"token":"alice-token"}`); code != http.StatusOK {
		t.Fatalf("sign-in: %d %s", code, answer)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	found := make(chan struct{}, pages)
	used, began := processorTime(t, api.Pid()), time.Now()
	for i := range pages {
		group.Go(func() {
			// Every hundredth has no endpoint that is ready.
			if !followPage(ctx, who, page+fmt.Sprintf("stream/services/default/s-%05d", 100*i), func(line string) bool { return strings.Contains(line, `"findings":[`) }, found) && ctx.Err() == nil {
				t.Errorf("the page of s-%05d ended", 100*i)
			}
		})
	}
	for range pages {
		select {
		case <-found:
		case <-time.After(2 * time.Minute):
			t.Fatal("pages have no findings after 2 minutes")
		}
	}
	t.Logf("%d pages had their findings after %.1f s; the server used %.1f s of a processor, and has %d MB",
		pages, time.Since(began).Seconds(), (processorTime(t, api.Pid()) - used).Seconds(), residentMemory(t, api.Pid())>>20)
	share(nothing) // what began with the pages ends
	still, own, others := share(nothing), share(changing(0)), share(changing(50))
	// Without pages it is not nothing: the server has etcd and the controllers in it.
	t.Logf("with %d open pages of %d Services the server takes %.1f %% of a processor while nothing happens, %.1f %% while one of theirs changes every second, %.1f %% while another does; without pages %.1f %%, and %.1f %% while one changes",
		pages, 10000, still, own, others, withoutStill, withoutBusy)
	if still > withoutStill+5 || own > withoutBusy+25 || others > withoutBusy+10 {
		t.Error("at most 5, 25 and 10 % more than without pages are right")
	}
}

// followPage reads a stream to its end, and reports when a line is as it should be for the first time.
func followPage(ctx context.Context, who *http.Client, url string, right func(string) bool, found chan<- struct{}) bool {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	response, err := who.Do(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	lines, told := bufio.NewReader(response.Body), false
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return false
		}
		if !told && right(line) {
			told = true
			found <- struct{}{}
		}
	}
}

// processorTime is what a process has used.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(data), ") ")
	var user, system int64
	if _, err := fmt.Sscan(strings.Join(strings.Fields(after)[11:13], " "), &user, &system); err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+system) * 10 * time.Millisecond // the kernel's ticks, a hundred a second
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
