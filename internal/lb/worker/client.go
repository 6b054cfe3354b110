package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	"portal/internal/lb/config"
	"portal/internal/lb/engine"
)

// Client is an agent's end of a worker.
type Client struct {
	dir      *folder
	http     *http.Client
	patience time.Duration // of Options

	attached io.Closer
	agent    string // what the worker calls this end
	gone     chan struct{}
	once     sync.Once
}

func newClient(dir *folder) *Client {
	c := &Client{dir: dir, patience: statePatience, gone: make(chan struct{})}
	c.http = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", dir.name(controlSocket))
		},
		MaxIdleConns: 2, IdleConnTimeout: time.Minute,
	}}
	return c
}

// attach lets the worker know that its agent is there.
func (c *Client) attach(ctx context.Context) error {
	// The request lasts longer than what was asked of Ensure, once it is answered.
	lasting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	request, err := http.NewRequestWithContext(lasting, http.MethodPost, "http://worker/attach", nil)
	if err != nil {
		cancel()
		return err
	}
	asking, done := context.WithTimeout(ctx, c.patience)
	defer done()
	waiting := context.AfterFunc(asking, cancel)
	answer, err := c.http.Do(request)
	if !waiting() {
		err = errors.Join(err, asking.Err())
	}
	if err != nil {
		cancel()
		if answer != nil {
			_ = answer.Body.Close()
		}
		return fmt.Errorf("attach to the balancing process: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		cancel()
		_ = answer.Body.Close()
		return fmt.Errorf("attach to the balancing process: answer %s", answer.Status)
	}
	c.attached, c.agent = answer.Body, answer.Header.Get(agentHeader)
	go func() {
		_, _ = io.Copy(io.Discard, answer.Body)
		cancel()
		close(c.gone)
	}()
	return nil
}

// Gone is closed when the worker has ended or been replaced: then Ensure finds or starts another one.
func (c *Client) Gone() <-chan struct{} { return c.gone }

// Close lets go of the worker, which goes on as if the agent had been killed.
func (c *Client) Close() {
	c.once.Do(func() {
		if c.attached != nil {
			_ = c.attached.Close()
			<-c.gone
		}
		c.http.CloseIdleConnections()
		_ = c.dir.Close()
	})
}

// Apply makes a configuration the one in force. An *engine.ApplyError says which parts can't be carried out; the others are.
func (c *Client) Apply(ctx context.Context, cfg config.Config) error {
	data, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	var p problem
	if err := c.do(ctx, http.MethodPut, "/config", data, &p); err != nil {
		return err
	}
	if len(p.Parts) == 0 {
		return nil
	}
	out := &engine.ApplyError{Parts: map[string]error{}}
	for name, text := range p.Parts {
		out.Parts[name] = errors.New(text)
	}
	return out
}

// State is what the worker does.
func (c *Client) State(ctx context.Context) (State, error) {
	var s State
	err := c.do(ctx, http.MethodGet, "/state", nil, &s)
	return s, err
}

// Metrics are the worker's, in Prometheus' text format.
func (c *Client) Metrics(ctx context.Context) ([]byte, error) {
	var out []byte
	err := c.do(ctx, http.MethodGet, "/metrics", nil, &out)
	return out, err
}

// Detach says that the agent stops: unless one attaches within the time, the worker drains and ends. Close follows.
func (c *Client) Detach(ctx context.Context, after time.Duration) error {
	query := url.Values{"after": {after.String()}, "agent": {c.agent}}
	return c.do(ctx, http.MethodPost, "/detach?"+query.Encode(), nil, nil)
}

// Drain ends the worker once its connections have ended, at the latest after the time. It does not wait for that.
func (c *Client) Drain(ctx context.Context, timeout time.Duration) error {
	return c.do(ctx, http.MethodPost, "/drain?timeout="+url.QueryEscape(timeout.String()), nil, nil)
}

// Stop ends the worker now, and waits until it has. One that does not answer before the context's deadline is killed.
func (c *Client) Stop(ctx context.Context) error {
	err := c.do(ctx, http.MethodPost, "/stop", nil, nil)
	if unanswered(err) {
		_, err = c.dir.kill()
		return err
	}
	if err != nil {
		return err
	}
	select {
	case <-c.gone:
	case <-ctx.Done():
		return ctx.Err()
	}
	// It removes its sockets last; those that another worker has made since stay.
	for end := time.Now().Add(removalPatience); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(c.dir.name(controlSocket)); errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	return ctx.Err()
}

// removalPatience is how long a worker that ends may take to remove its sockets.
const removalPatience = 2 * time.Second

// answerPatience is how long the worker may take to answer: a configuration may be of thousands of listeners.
const answerPatience = time.Minute

// do sends a request, and reads the answer into a value in JSON, or as it is into bytes.
func (c *Client) do(ctx context.Context, method, path string, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, "http://worker"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	answer, err := c.http.Do(request)
	if err != nil {
		return fmt.Errorf("ask the balancing process: %w", err)
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	if err != nil {
		return fmt.Errorf("read the balancing process's answer: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		var p problem
		if json.Unmarshal(data, &p) != nil || p.Error == "" {
			p.Error = answer.Status
		}
		return fmt.Errorf("the balancing process refuses: %s", p.Error)
	}
	switch into := into.(type) {
	case nil:
		return nil
	case *[]byte:
		*into = data
		return nil
	default:
		return json.Unmarshal(data, into)
	}
}
