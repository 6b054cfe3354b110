package test

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	roles "portal/internal/identity"
	"portal/internal/lb/controller"
	"portal/test/harness"
)

// TestLoadBalancerLeaders: while Services come and go, and the process that gives addresses is killed again and again, no address is given
// twice, none is lost, and who has one keeps it.
func TestLoadBalancerLeaders(t *testing.T) {
	t.Parallel()
	balancerLeaders(t, startPortal(t))
}

func balancerLeaders(t *testing.T, api *harness.API) {
	client := connect(t, api.Kubeconfig)
	dir := t.TempDir()
	var status []string // addresses of the processes' metrics
	start := func() *harness.Process {
		n := len(status)
		status = append(status, fmt.Sprint("127.0.0.1:", harness.FreePort()))
		p, err := harness.Start(dir, fmt.Sprint("lb", n), harness.Portal(), "lb", "--kubeconfig", api.Kubeconfig, "--hostname-override", fmt.Sprint("m", n),
			"--announce", "none", "--metrics-bind-address", status[n], "--pool", "198.51.100.1-198.51.100.20")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		return p
	}
	running := []*harness.Process{start(), start()}
	services := client.CoreV1().Services("default")
	create := func(name string) {
		if _, err := services.Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	had := map[string]string{}
	// settled waits until as many Services as can have an address have one, and checks that each has its own.
	settled := func(want int) {
		t.Helper()
		eventually(t, time.Minute, fmt.Sprint(want, " addresses"), func() string {
			list, err := services.List(t.Context(), metav1.ListOptions{})
			if err != nil {
				return err.Error()
			}
			owner, have := map[string]string{}, 0
			for _, svc := range list.Items {
				for _, in := range svc.Status.LoadBalancer.Ingress {
					if other := owner[in.IP]; other != "" {
						t.Fatalf("%s and %s both have %s", other, svc.Name, in.IP)
					}
					if before := had[string(svc.UID)]; before != "" && before != in.IP {
						t.Fatalf("%s had %s, and has %s", svc.Name, before, in.IP)
					}
					owner[in.IP], had[string(svc.UID)] = svc.Name, in.IP
					have++
				}
			}
			if have != want {
				return fmt.Sprint(have)
			}
			return ""
		})
	}
	for i := range 15 {
		create(fmt.Sprint("s", i))
	}
	settled(15)
	for round := range 2 {
		for i := range 10 { // five too many
			create(fmt.Sprint("more", round, "-", i))
		}
		leader := slices.IndexFunc(running, leads)
		if leader < 0 {
			t.Fatal("nobody leads")
		}
		running[leader].Kill()
		running[leader] = start()
		settled(20)
		for i := range 10 {
			if err := services.Delete(t.Context(), fmt.Sprint("more", round, "-", i), metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		settled(15)
	}
	eventually(t, time.Minute, "the leader's metrics", func() string {
		leaders := 0
		for _, address := range status { // also of those that were killed
			if strings.Contains(metricsAt(t, address), "portal_lb_leader 1\n") {
				leaders++
				if !strings.Contains(metricsAt(t, address), `portal_lb_pool_addresses_in_use{pool="default"} 15`) {
					return metricsAt(t, address)
				}
			}
		}
		if leaders != 1 {
			return fmt.Sprint(leaders, " processes lead")
		}
		return ""
	})
	m, err := client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), controller.ClaimsName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(m.Data[controller.ClaimsKey], `"address"`); n != 15 {
		t.Errorf("%d claims:\n%s", n, m.Data[controller.ClaimsKey])
	}
}

// metricsAt is what a process says at its address, or nothing if it has ended.
func metricsAt(t *testing.T, address string) string {
	t.Helper()
	answer, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		return ""
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// leads says whether a process has said that it leads.
func leads(p *harness.Process) bool { return strings.Contains(p.Tail(), "became leader") }

// TestLoadBalancerJoins: with a token of the role lb and what that role may do, a balancer gives addresses; but it can neither hold the Lease of
// others nor change a Service's spec.
func TestLoadBalancerJoins(t *testing.T) {
	t.Parallel()
	api := startPortal(t)
	client := connect(t, api.Kubeconfig)
	dir := t.TempDir()
	args := append(joinCommand(t, api, "lb"), "--data-dir", filepath.Join(dir, "identity"), "--hostname-override", "m1", "--announce", "none", "--metrics-bind-address", "", "--pool", "198.51.100.1")
	p, err := harness.Start(dir, "lb", harness.Portal(), args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	services := client.CoreV1().Services("default")
	if _, err := services.Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "an address", func() string {
		svc, err := services.Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if in := svc.Status.LoadBalancer.Ingress; len(in) != 1 || in[0].IP != "198.51.100.1" {
			return fmt.Sprint(in, p.Tail())
		}
		return ""
	})
	config, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.Impersonate = rest.ImpersonationConfig{UserName: roles.LB.User("m1"), Groups: []string{roles.LB.Group(), "system:authenticated"}}
	as, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	for what, do := range map[string]func() error{
		"take the controllers' Lease": func() error {
			lease, err := client.CoordinationV1().Leases("kube-system").Get(t.Context(), "portal-controllers", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			_, err = as.CoordinationV1().Leases("kube-system").Update(t.Context(), lease, metav1.UpdateOptions{})
			return err
		},
		"change a Service": func() error {
			_, err := as.CoreV1().Services("default").Patch(t.Context(), "web", types.MergePatchType, []byte(`{"spec":{"externalIPs":["192.0.2.9"]}}`), metav1.PatchOptions{})
			return err
		},
		"read Secrets": func() error {
			_, err := as.CoreV1().Secrets("kube-system").List(t.Context(), metav1.ListOptions{})
			return err
		},
		"read ConfigMaps": func() error {
			_, err := as.CoreV1().ConfigMaps("kube-system").List(t.Context(), metav1.ListOptions{})
			return err
		},
	} {
		if err := do(); !apierrors.IsForbidden(err) {
			t.Errorf("a balancer that wants to %s gets %v", what, err)
		}
	}
}
