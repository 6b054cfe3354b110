// Package harness runs Portal and its peers as processes, for tests and measurements of the whole binary. Everything
// listens on loopback, keeps its files in a folder of the caller and ends with the caller.
package harness

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Root is the repository's folder.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// Portal is the path of the binary under test: PORTAL_BINARY, or what `make build` made.
func Portal() string {
	if path := os.Getenv("PORTAL_BINARY"); path != "" {
		return path
	}
	return filepath.Join(Root(), ".cache", "bin", "portal")
}

// Peer is the path of a real component that `make peers` installed.
func Peer(name string) string { return filepath.Join(Root(), ".cache", "peers", name) }

// Recorded is a path below test/recorded, where the recorded answers of the real components are.
func Recorded(path ...string) string {
	return filepath.Join(append([]string{Root(), "test", "recorded"}, path...)...)
}

// Shared is a path of material that stands beside the repository, or "" where it is absent.
func Shared(path ...string) string {
	full := filepath.Join(append([]string{filepath.Dir(Root()), "shared"}, path...)...)
	if _, err := os.Stat(full); err != nil {
		return ""
	}
	return full
}

// Process is a running program. Its output is kept in the file Log.
type Process struct {
	Name string
	Log  string
	cmd  *exec.Cmd
	done chan struct{}
	err  error
}

// Start runs a program with its output in dir/name.log.
func Start(dir, name, path string, args ...string) (*Process, error) {
	return StartIn(-1, dir, name, path, args...)
}

// StartIn is Start in a network namespace, given by a descriptor; -1: the caller's own.
func StartIn(namespace int, dir, name, path string, args ...string) (*Process, error) {
	log := filepath.Join(dir, name+".log")
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	p := &Process{Name: name, Log: log, cmd: exec.Command(path, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Dir = dir
	// It must not outlive the caller, even if that is killed.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// Pdeathsig is sent when the thread that started the child ends, so that thread must live as long as the child.
		runtime.LockOSThread()
		var err error
		if namespace >= 0 {
			// Never unlocked: the thread, which is in another namespace now, ends with the goroutine.
			err = unix.Setns(namespace, unix.CLONE_NEWNET)
		} else {
			defer runtime.UnlockOSThread()
		}
		if err == nil {
			err = p.cmd.Start()
		}
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// Pid is the process ID.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Kill ends the process at once, as a crash would, and waits for it.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Stop asks the process to end and waits; it is killed, and an error returned, if it takes longer than the limit.
func (p *Process) Stop(limit time.Duration) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	return p.Wait(limit)
}

// Wait waits for the process to end by itself, or because it was asked to; it is killed, and an error returned, if it
// takes longer than the limit.
func (p *Process) Wait(limit time.Duration) error {
	select {
	case <-p.done:
		return p.err
	case <-time.After(limit):
		p.Kill()
		return fmt.Errorf("%s did not end within %s", p.Name, limit)
	}
}

// Tail is the end of what the process wrote.
func (p *Process) Tail() string {
	data, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	if len(data) > 4000 {
		data = data[len(data)-4000:]
	}
	return string(data)
}

// handedOut keeps FreePort from returning the same port twice before callers have bound it.
var handedOut sync.Map

// FreePort returns a port of loopback that is free. It is below those that the kernel gives to clients: a connection of anybody's
// could take one of these before the caller has bound it, or while a server restarts; a client that tries to reach a server
// that is away may even be connected to itself.
func FreePort() int {
	const first, ports = 20000, 10000 // the kernel begins at 32768, node ports at 30000
	for {
		port := first + rand.IntN(ports)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			panic(err)
		}
		_ = l.Close()
		if _, taken := handedOut.LoadOrStore(port, true); !taken {
			return port
		}
	}
}

// API is a running API server: Portal's, or Kubernetes' own.
type API struct {
	*Process
	URL        string
	Kubeconfig string
}

// StartPortal runs `portal server` in dir and waits until it is ready.
func StartPortal(dir string, args ...string) (*API, error) {
	return StartPortalAt(dir, FreePort(), args...)
}

// StartPortalAt is StartPortal on a given port, for a server that is restarted at its old address.
func StartPortalAt(dir string, port int, args ...string) (*API, error) {
	listen := fmt.Sprintf("127.0.0.1:%d", port)
	p, err := Start(dir, "portal", Portal(), append([]string{"server", "--data-dir", filepath.Join(dir, "data"), "--listen", listen}, args...)...)
	if err != nil {
		return nil, fmt.Errorf("%w (run `make build` first)", err)
	}
	api := &API{Process: p, URL: "https://" + listen, Kubeconfig: filepath.Join(dir, "data", "admin.kubeconfig")}
	return api, api.WaitReady(90 * time.Second)
}

// Config is that of a client without a rate limit, which speaks protobuf.
func Config(kubeconfig string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.WarningHandler = -1, rest.NoWarnings{}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = config.ContentType + ",application/json"
	return config, nil
}

// Connect is a client with such a Config.
func Connect(kubeconfig string) (*kubernetes.Clientset, error) {
	config, err := Config(kubeconfig)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}

var insecure = &http.Client{
	Timeout:   2 * time.Second,
	Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}, //nolint:gosec // a readiness probe on loopback
}

// WaitReady waits until the server answers /readyz with ok. On failure the process is killed.
func (a *API) WaitReady(limit time.Duration) error {
	err := poll(limit, func() error {
		select {
		case <-a.Done():
			return errStopped
		default:
		}
		resp, err := insecure.Get(a.URL + "/readyz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz: %s: %s", resp.Status, body)
		}
		return nil
	})
	if err != nil {
		a.Kill()
		return fmt.Errorf("%s is not ready: %w\n%s", a.Name, err, a.Tail())
	}
	return nil
}

var errStopped = errors.New("it has ended")

func poll(limit time.Duration, try func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := try()
		if err == nil || errors.Is(err, errStopped) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Run runs a program to its end and returns what it wrote; a failure's error holds it too.
func Run(ctx context.Context, env []string, path string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w\n%s", filepath.Base(path), strings.Join(args, " "), err, out.String())
	}
	return out.String(), nil
}

// WaitURL waits until a URL is answered with 200, whatever the certificate.
func WaitURL(url string, limit time.Duration) error {
	return poll(limit, func() error {
		resp, err := insecure.Get(url)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, resp.Status)
		}
		return nil
	})
}
