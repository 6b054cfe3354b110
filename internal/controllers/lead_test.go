package controllers_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
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
	Host, Token string
	TLS         rest.TLSClientConfig
	Election    controllers.Election
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
	return controllers.Lead(context.Background(), controllers.Config{REST: config}, selection, c.Election)
}

// startCandidate starts one of several controllers that may lead.
func (w *world) startCandidate(name string) *exec.Cmd {
	w.Helper()
	c := candidacy{Host: w.config.Host, Token: w.config.BearerToken, TLS: w.config.TLSClientConfig, Election: controllers.DefaultElection()}
	c.Election.Namespace, c.Election.Name, c.Election.Identity = w.namespace, "lead", name
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

func TestAStandbyTakesOver(t *testing.T) {
	w := newWorld(t)
	w.addNode(w.namespace, nil)
	w.addService("s", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "a"} })
	const pods = 40
	name := func(i int) string { return fmt.Sprintf("p%d", i) }
	for i := range pods {
		w.addPod(name(i), w.namespace, map[string]string{"app": "a"}, fmt.Sprintf("10.9.0.%d", i+1), fmt.Sprintf("fd00:9::%d", i+1))
	}
	first := w.startCandidate("first")
	w.eventually(10*time.Second, func() string {
		if got := w.leader(); got != "first" {
			return fmt.Sprintf("%q leads", got)
		}
		return ""
	})
	w.startCandidate("second")
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
	list, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).List(w.ctx(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=s"})
	w.must(err)
	var got, want []string
	for _, s := range list.Items {
		for _, e := range s.Endpoints {
			got = append(got, e.TargetRef.Name)
		}
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
