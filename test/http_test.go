package test

import (
	"context"
	"crypto/tls"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/test/harness"
)

// caller sends raw requests and returns raw answers.
type caller struct {
	url    string
	token  string
	client *http.Client
	header http.Header
}

// admin returns a caller with the administrator's certificate.
func admin(t testing.TB, api *harness.API) *caller {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	client, err := restclient.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	return &caller{url: api.URL, client: client}
}

// somebody returns a caller with a token, or without credentials.
func somebody(api *harness.API, token string) *caller {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // loopback
	return &caller{url: api.URL, token: token, client: &http.Client{Transport: transport}}
}

// with is the same caller with more headers.
func (c *caller) with(header http.Header) *caller {
	other := *c
	other.header = header
	return &other
}

// ask sends a request with a JSON body, if any.
func (c *caller) ask(t testing.TB, method, path, body string) (code int, answer string) {
	t.Helper()
	code, answer, err := c.try(method, path, "application/json", body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return code, answer
}

func (c *caller) try(method, path, kind, body string) (int, string, error) {
	// A watch that should have been refused would never end.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, c.url+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	maps.Copy(request.Header, c.header)
	request.Header.Set("Content-Type", kind)
	if c.token != "" {
		request.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data), err
}
