package startup_test

import (
	"math"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"testing"
	"time"

	_ "k8s.io/apimachinery/pkg/apis/meta/v1" // what most packages of Kubernetes wait for

	"portal/internal/startup"
)

// child runs a test again in a process of its own, which has just started, with more in its environment; and says whether
// this is it.
func child(t *testing.T, env ...string) bool {
	t.Helper()
	if os.Getenv("STARTUP_CHILD") != "" {
		return true
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	for _, e := range os.Environ() {
		if !regexp.MustCompile("^(GOGC|GOMEMLIMIT)=").MatchString(e) {
			cmd.Env = append(cmd.Env, e)
		}
	}
	cmd.Env = append(append(cmd.Env, "STARTUP_CHILD=1"), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
	return false
}

// percent and limit are what is set.
func percent() int {
	s := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(s)
	return int(int64(s[0].Value.Uint64()))
}

func limit() int64 { return debug.SetMemoryLimit(-1) }

func collections() uint32 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.NumGC
}

func expect(t *testing.T, wantPercent int, wantLimit int64) {
	t.Helper()
	until := time.Now().Add(10 * time.Second) // finalizers run when they run
	for percent() != wantPercent || limit() != wantLimit {
		if time.Now().After(until) {
			t.Fatalf("garbage is collected at %d %%, the limit is %d; expected %d %% and %d", percent(), limit(), wantPercent, wantLimit)
		}
		time.Sleep(time.Millisecond)
	}
}

const (
	enough    = 64 << 20
	unlimited = math.MaxInt64
	never     = -1
)

func TestFirstCollection(t *testing.T) {
	if !child(t) {
		return
	}
	if n := collections(); n > 0 {
		t.Errorf("%d collections before anything began", n)
	}
	expect(t, never, enough)
	startup.Then(30)
	expect(t, never, enough)
	var held [][]byte
	for range 100 {
		held = append(held, make([]byte, 1<<20))
	}
	runtime.KeepAlive(held)
	expect(t, 30, unlimited)
	if n := collections(); n == 0 {
		t.Error("no collection where there is a lot")
	}
	startup.Then(20)
	expect(t, 20, unlimited)
}

func TestFromNowOn(t *testing.T) {
	if !child(t) {
		return
	}
	startup.Collect(70)
	expect(t, 70, unlimited)
	runtime.GC()
	startup.Collect(25)
	expect(t, 25, unlimited)
}

// TestLimit: a limit of memory that somebody has set is kept.
func TestLimit(t *testing.T) {
	for _, set := range []int64{32 << 20, 200 << 20} {
		if !child(t, "GOMEMLIMIT="+strconv.FormatInt(set, 10)) {
			continue
		}
		mine, _ := strconv.ParseInt(os.Getenv("GOMEMLIMIT"), 10, 64)
		expect(t, never, min(mine, enough))
		runtime.GC()
		expect(t, 100, mine)
		return
	}
}

// TestGOGC: who has set it knows better.
func TestGOGC(t *testing.T) {
	if !child(t, "GOGC=150") {
		return
	}
	expect(t, 150, unlimited)
	startup.Then(30)
	startup.Collect(30)
	expect(t, 150, unlimited)
}

// TestProfile: nothing is sampled before somebody wants it, unless the environment says so.
func TestProfile(t *testing.T) {
	if !child(t) {
		return
	}
	if runtime.MemProfileRate != 0 {
		t.Errorf("one of %d bytes is sampled from the beginning", runtime.MemProfileRate)
	}
	if startup.Profile(); runtime.MemProfileRate != 512<<10 {
		t.Errorf("one of %d bytes is sampled", runtime.MemProfileRate)
	}
}

func TestProfileAsWanted(t *testing.T) {
	if !child(t, "GODEBUG=memprofilerate=1000") {
		return
	}
	if startup.Profile(); runtime.MemProfileRate != 1000 {
		t.Errorf("one of %d bytes is sampled", runtime.MemProfileRate)
	}
}

// TestEarly: packages that take long are initialised later.
func TestEarly(t *testing.T) {
	cmd := exec.Command(os.Args[0], "-test.run", "^$")
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	at := func(pkg string) int {
		found := regexp.MustCompile(`(?m)^init ` + regexp.QuoteMeta(pkg) + ` @`).FindIndex(out)
		if found == nil {
			t.Fatalf("%s is not initialised:\n%s", pkg, out)
		}
		return found[0]
	}
	if at("portal/internal/startup") > at("k8s.io/apimachinery/pkg/apis/meta/v1") {
		t.Errorf("this package comes too late:\n%s", out)
	}
}
