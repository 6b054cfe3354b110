package controllers_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"portal/internal/controllers"
	"portal/internal/controllers/controllerstest"
)

// candidate names the variable that makes this test binary one of several controllers: what can be killed is a
// process.
const candidate = "PORTAL_TEST_CANDIDATE"

type candidacy struct {
	Host, Token         string
	TLS                 rest.TLSClientConfig
	Namespace, Identity string
	Workers             int
}

func TestMain(m *testing.M) {
	if text := os.Getenv(candidate); text != "" {
		if err := lead(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	controllerstest.Main(m)
}

func lead(text string) error {
	var c candidacy
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	selection, err := controllers.ParseSelection([]string{"endpoints,endpointslice"})
	if err != nil {
		return err
	}
	config := &rest.Config{Host: c.Host, BearerToken: c.Token, TLSClientConfig: c.TLS}
	return controllers.Lead(context.Background(), controllers.Config{REST: config, SliceWorkers: c.Workers}, selection, c.election())
}

func (c candidacy) election() controllers.Election {
	e := controllers.DefaultElection()
	e.Namespace, e.Name, e.Identity = c.Namespace, "lead", c.Identity
	return e
}

// startCandidate starts one of several controllers that may lead.
func (w *world) startCandidate(name string, workers int) *exec.Cmd {
	w.Helper()
	c := candidacy{Host: w.config.Host, Token: w.config.BearerToken, TLS: w.config.TLSClientConfig, Namespace: w.namespace, Identity: name, Workers: workers}
	text, err := json.Marshal(c)
	w.must(err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), candidate+"="+string(text))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	w.must(cmd.Start())
	w.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

func (w *world) leader() string {
	lease, err := w.client.CoordinationV1().Leases(w.namespace).Get(w.ctx(), "lead", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// startTwo starts one that leads, which is returned, and one that stands by.
func (w *world) startTwo(workers int) *exec.Cmd {
	w.Helper()
	first := w.startCandidate("first", workers)
	w.eventually(10*time.Second, func() string {
		if got := w.leader(); got != "first" {
			return fmt.Sprintf("%q leads", got)
		}
		return ""
	})
	w.startCandidate("second", workers)
	return first
}

// TestAStandbyBeginsWithWhatWasLeft: the longer an endpoint is dead, the earlier it goes, whatever the leader did before.
func TestAStandbyBeginsWithWhatWasLeft(t *testing.T) {
	w := newWorld(t)
	w.addNode(w.namespace, nil)
	const services = 12
	name := func(i int) string { return fmt.Sprintf("s%d", i) }
	for i := range services {
		app := map[string]string{"app": name(i)}
		w.addService(name(i), func(s *corev1.Service) { s.Spec.Selector = app })
		for _, gone := range []string{"early-", "late-"} {
			w.addPod(gone+name(i), w.namespace, app, fmt.Sprintf("10.9.%d.%d", len(gone), i+1), fmt.Sprintf("fd00:9::%d:%d", len(gone), i+1))
		}
	}
	show := func(n int) string {
		found := w.slices("")
		for i := range services {
			if got := len(found[name(i)].Endpoints); got != n {
				return fmt.Sprintf("%s has %d endpoints", name(i), got)
			}
		}
		return ""
	}
	now := int64(0)
	die := func(pod string) {
		w.must(w.client.CoreV1().Pods(w.namespace).Delete(w.ctx(), pod, metav1.DeleteOptions{GracePeriodSeconds: &now}))
	}
	first := w.startTwo(1)
	w.eventually(10*time.Second, func() string { return show(2) })
	time.Sleep(2 * time.Second) // the standby, too, has seen everything
	for i := range services {
		die("early-" + name(i))
	}
	w.eventually(10*time.Second, func() string { return show(1) })
	time.Sleep(2 * time.Second) // the standby, too, has seen it
	w.must(first.Process.Kill())
	var order, got []string
	for _, i := range rand.Perm(services) {
		die("late-" + name(i))
		order = append(order, name(i))
	}
	w.eventually(20*time.Second, func() string { return show(0) })
	written := w.slices("")
	for service := range written {
		got = append(got, service)
	}
	version := func(service string) int {
		n, err := strconv.Atoi(written[service].ResourceVersion)
		w.must(err)
		return n
	}
	slices.SortFunc(got, func(a, b string) int { return version(a) - version(b) })
	if !slices.Equal(got, order) {
		t.Errorf("died in the order\n%v, written in the order\n%v", order, got)
	}
}

func TestAStandbyTakesOver(t *testing.T) {
	w := newWorld(t)
	w.addNode(w.namespace, nil)
	w.addService("s", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "a"} })
	const pods = 40
	name := func(i int) string { return fmt.Sprintf("p%d", i) }
	for i := range pods {
		w.addPod(name(i), w.namespace, map[string]string{"app": "a"}, fmt.Sprintf("10.9.0.%d", i+1), fmt.Sprintf("fd00:9::%d", i+1))
	}
	first := w.startTwo(0)
	w.eventually(10*time.Second, func() string { return w.serves(0, pods) })

	now := int64(0)
	roll := func(i int) {
		w.addPod(name(pods+i), w.namespace, map[string]string{"app": "a"}, fmt.Sprintf("10.9.1.%d", i+1), fmt.Sprintf("fd00:9::1:%d", i+1))
		w.must(w.client.CoreV1().Pods(w.namespace).Delete(w.ctx(), name(i), metav1.DeleteOptions{GracePeriodSeconds: &now}))
	}
	for i := range pods / 2 {
		roll(i)
	}
	w.must(first.Process.Kill())
	for i := range pods / 2 {
		roll(pods/2 + i)
	}
	w.within(15*time.Second, func() string { return w.serves(pods, pods) })
	if got := w.leader(); got != "second" {
		t.Errorf("%q leads", got)
	}
	w.eventually(5*time.Second, func() string { return w.wrong() })
}

// serves compares the Pods in the Service's slices with n of them from a number on.
func (w *world) serves(from, n int) string {
	var got, want []string
	for _, e := range w.slices(discoveryv1.LabelServiceName + "=s")["s"].Endpoints {
		got = append(got, e.TargetRef.Name)
	}
	for i := range n {
		want = append(want, fmt.Sprintf("p%d", from+i))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		return fmt.Sprintf("the slices have %v", got)
	}
	return ""
}

// slices are those that a selector finds, by Service, of which each has one.
func (w *world) slices(selector string) map[string]discoveryv1.EndpointSlice {
	w.Helper()
	list, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).List(w.ctx(), metav1.ListOptions{LabelSelector: selector})
	w.must(err)
	out := map[string]discoveryv1.EndpointSlice{}
	for _, s := range list.Items {
		out[s.Labels[discoveryv1.LabelServiceName]] = s
	}
	return out
}
