package watch

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/intent"
	"portal/internal/intent/watch/watchtest"
)

// follower is something that follows Services: this package's Watcher, or client-go's Reflector.
type follower interface {
	has(name string) bool
}

type watcherFollower struct{ *intent.Cluster }

func (f watcherFollower) has(name string) bool {
	return f.Entry(intent.Key{Namespace: "default", Name: name}) != nil
}

type reflectorFollower struct{ cache.Store }

func (f reflectorFollower) has(name string) bool {
	_, there, _ := f.GetByKey("default/" + name)
	return there
}

func reflected(t *testing.T, api *watchtest.Server) follower {
	t.Helper()
	config, err := api.Start("")
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	store := cache.NewStore(cache.MetaNamespaceKeyFunc)
	reflector := cache.NewReflector(cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "services", "", fields.Everything()), &corev1.Service{}, store, 0)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); reflector.RunWithContext(ctx) }()
	t.Cleanup(func() { cancel(); <-done; api.Kill() })
	return reflectorFollower{store}
}

// TestWhyNotTheReflector is the measurement of ADR 0016: how often everything is transferred again after a restart of the API,
// by client-go's Reflector and by this package, and whether an API that was restored from a backup is noticed. If the
// Reflector's part fails, client-go has become better, and the ADR should be read again.
func TestWhyNotTheReflector(t *testing.T) {
	// A watch of less than a second is never resumed by the Reflector.
	const long = 1200 * time.Millisecond
	followers := map[string]func(*testing.T, *watchtest.Server) follower{
		"reflector": reflected,
		"watcher": func(t *testing.T, api *watchtest.Server) follower {
			cluster, _ := watched(t, api, intent.Services)
			return watcherFollower{cluster}
		},
	}
	for name, follow := range followers {
		for _, status := range []int{0, http.StatusUnauthorized, http.StatusForbidden, http.StatusInternalServerError, http.StatusServiceUnavailable} {
			t.Run(fmt.Sprintf("%s/%d", name, status), func(t *testing.T) {
				t.Parallel()
				api := watchtest.New(100, "u1")
				api.Old = true // no watches that begin with all objects: what is transferred is a list
				api.Put(service("kept", "10.96.0.1"))
				f := follow(t, api)
				eventually(t, 5*time.Second, "listed", func() bool { return f.has("kept") })
				api.Lists()
				time.Sleep(long)
				api.Kill()
				time.Sleep(300 * time.Millisecond)
				if status != 0 {
					api.Refuse(3, status)
				}
				api.Put(service("new", "10.96.0.2"))
				if _, err := api.Start(api.Addr()); err != nil {
					t.Fatal(err)
				}
				eventually(t, 60*time.Second, "up to date", func() bool { return f.has("new") })
				transfers := 0
				for _, list := range api.Lists() {
					if !strings.Contains(list, "labelSelector=portal.invalid") {
						transfers++
					}
				}
				t.Logf("%d full lists", transfers)
				if name == "watcher" && transfers > 0 {
					t.Errorf("%d full lists, want none", transfers)
				}
				if name == "reflector" && status != 0 && transfers == 0 {
					t.Errorf("the Reflector resumes after status %d now", status)
				}
			})
		}
		t.Run(name+"/restored", func(t *testing.T) {
			t.Parallel()
			api := watchtest.New(100, "u1")
			for range 50 {
				api.Put(service("after-backup", "10.96.0.1"))
			}
			api.Old = true
			f := follow(t, api)
			eventually(t, 5*time.Second, "listed", func() bool { return f.has("after-backup") })
			time.Sleep(long)
			api.Kill()
			time.Sleep(300 * time.Millisecond)
			restored := watchtest.New(100, "u1")
			restored.Old = true
			restored.Put(service("before-backup", "10.96.0.2"))
			if _, err := restored.Start(api.Addr()); err != nil {
				t.Fatal(err)
			}
			defer restored.Kill()
			noticed := false
			for end := time.Now().Add(8 * time.Second); !noticed && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
				noticed = f.has("before-backup") && !f.has("after-backup")
			}
			if want := name == "watcher"; noticed != want {
				t.Errorf("noticed the restore: %v, want %v", noticed, want)
			}
		})
	}
}
