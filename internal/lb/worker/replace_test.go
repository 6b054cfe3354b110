package worker

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// TestAgentKilled: the agent is killed again and again under load, and nobody notices.
func TestAgentKilled(t *testing.T) {
	dir, at, endpoint := folderFor(t), unused(t), echo(t)
	file := filepath.Join(t.TempDir(), "config.json")
	data, err := json.Marshal(configOf(at, endpoint))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	startAgent := func() *exec.Cmd {
		agent := exec.Command("/proc/self/exe")
		agent.Env = append(os.Environ(), asVariable+"=agent", dirVariable+"="+dir, identityVariable+"=one", configVariable+"="+file)
		agent.Stderr = t.Output()
		out, err := agent.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := agent.Start(); err != nil {
			t.Fatal(err)
		}
		line := make([]byte, len("configured"))
		if _, err := io.ReadFull(out, line); err != nil {
			t.Fatalf("the agent said %q: %v", line, err)
		}
		return agent
	}
	agent := startAgent()
	l := newLoad(at)
	pid := 0
	for range 5 {
		l.more(t, 50)
		_ = agent.Process.Kill()
		_ = agent.Wait()
		l.more(t, 50)
		agent = startAgent()
		c := ensure(t, dir, "one")
		s := stateOf(t, c)
		if pid != 0 && s.PID != pid {
			t.Errorf("another worker: %d, was %d", s.PID, pid)
		}
		pid = s.PID
		c.Close()
	}
	_ = agent.Process.Kill()
	_ = agent.Wait()
	l.more(t, 50)
	l.stop(t)
}

// TestReplace: workers are replaced under load, and nobody notices.
func TestReplace(t *testing.T) {
	dir, at, endpoint := folderFor(t), unused(t), echo(t)
	c := ensure(t, dir, "0")
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Fatal(err)
	}
	l := newLoad(at)
	pids := map[int]bool{stateOf(t, c).PID: true}
	for i := range 10 {
		l.more(t, 100)
		next := ensure(t, dir, fmt.Sprint(i+1))
		<-c.Gone()
		s := stateOf(t, next)
		if pids[s.PID] || s.Identity != fmt.Sprint(i+1) || len(s.Listeners) != 1 {
			t.Errorf("the new worker: %+v", s)
		}
		pids[s.PID] = true
		c.Close()
		c = next
		// It takes configurations: the same one changes nothing.
		if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
			t.Error(err)
		}
	}
	l.more(t, 50)
	l.stop(t)
	current := stateOf(t, c).PID
	for pid := range pids {
		if pid != current {
			eventually(t, "the old worker ends with its last connection", func() bool { return !alive(pid) })
		}
	}
}

// TestReplaceFails: if the new worker can't start, the old one goes on.
func TestReplaceFails(t *testing.T) {
	dir, at, endpoint := folderFor(t), unused(t), echo(t)
	c := ensure(t, dir, "0")
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Fatal(err)
	}
	// It takes everything, and does not come to say that it accepts.
	d, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	took, err := d.takeOver(t.Context())
	if err != nil || len(took.sockets) != 1 {
		t.Fatalf("%d sockets, %v", len(took.sockets), err)
	}
	if !stateOf(t, c).Handing {
		t.Error("the worker does not know that another one takes over")
	}
	if err := c.Apply(t.Context(), config.Config{}); err == nil {
		t.Error("a configuration was taken while another worker takes over")
	}
	took.giveUp()
	eventually(t, "the worker goes on", func() bool { return !stateOf(t, c).Handing })
	if err := c.Apply(t.Context(), configOf(at, endpoint)); err != nil {
		t.Error(err)
	}
	l := newLoad(at)
	l.more(t, 10)
	l.stop(t)

	o := optionsOf(dir, "1", slog.New(slog.DiscardHandler))
	o.Env = append(o.Env, dirVariable+"=/proc/nowhere")
	if _, err := Ensure(t.Context(), o); err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Errorf("error %v, want what the worker logged", err)
	}
	if s := stateOf(t, c); s.Identity != "0" {
		t.Errorf("state %+v", s)
	}
}

// TestKnowledgeIsHandedOver: a new worker knows who leads and who is unhealthy.
func TestKnowledgeIsHandedOver(t *testing.T) {
	dir, at, good, bad := folderFor(t), unused(t), echo(t), unused(t)
	c := ensure(t, dir, "0")
	cfg := configOf(at, good)
	p := cfg.Pools["p"]
	p.Policy.Kind = config.Leader
	p.Endpoints = []config.Endpoint{{Address: bad, Name: "a"}, {Address: good, Name: "b"}}
	p.HealthCheck = &config.HealthCheck{Protocol: config.TCP, Healthy: 2, Unhealthy: 2, Interval: 20 * time.Millisecond, Timeout: patience}
	if err := c.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first is found unhealthy", func() bool { return stateOf(t, c).Pools[0].Leader == good })
	// In the new one the first could be healthy until its own checks failed.
	p.HealthCheck.Interval = time.Hour
	if err := c.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	s := stateOf(t, ensure(t, dir, "1")).Pools[0]
	if s.Leader != good || s.Endpoints[0].Healthy || !s.Endpoints[1].Healthy {
		t.Errorf("the new worker's pool: %+v", s)
	}
}
