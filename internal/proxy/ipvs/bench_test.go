package ipvs

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"portal/internal/plan"
)

// TestScale times a kernel of its own: everything at once, again at once, and one endpoint.
func TestScale(t *testing.T) {
	if err := hasIPVS(); err != nil && os.Getenv("PORTAL_VM") == "" {
		t.Skipf("%v; test/vm runs this in a kernel that has it", err)
	}
	inNamespace(t, func() {
		const services = 1000
		opened, err := New(Options{}).Open(context.Background())
		if err != nil {
			t.Error(err)
			return
		}
		defer opened.Close()
		s := plan.NewSnapshot(facts())
		put := func(i int, endpoints ...string) {
			e := service(fmt.Sprint("s", i), fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250), nil, endpoints...)
			s.Set(e.Service.Key, plan.For(e, s.Facts))
		}
		apply := func(what string) {
			start := time.Now()
			if err := opened.Apply(context.Background(), s, s.Delta()); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			s.Acknowledge()
			t.Logf("%s: %v", what, time.Since(start))
		}
		for i := range services {
			put(i, "10.244.1.1", "10.244.1.2")
		}
		apply(fmt.Sprintf("%d Services", services))
		put(7, "10.244.1.1", "10.244.1.3")
		apply("an endpoint exchanged")
		start := time.Now()
		if err := opened.Check(context.Background()); err != nil {
			t.Error(err)
		}
		t.Logf("a check: %v", time.Since(start))
		s.Forget()
		apply("all again")
	})
}
