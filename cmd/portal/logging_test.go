package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/zap"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

// logTo sets up logging into a buffer until the test ends.
func logTo(t *testing.T, ctx context.Context, o logOptions, level slog.Level) *bytes.Buffer {
	t.Helper()
	before, handler := slog.Default(), utilruntime.ErrorHandlers[0]
	t.Cleanup(func() {
		slog.SetDefault(before)
		klog.ClearLogger()
		zap.ReplaceGlobals(zap.NewNop())
		utilruntime.ErrorHandlers[0] = handler
	})
	var out bytes.Buffer
	if _, err := o.setup(ctx, &out, level); err != nil {
		t.Fatal(err)
	}
	return &out
}

// TestOneLogFormat logs with every library that Portal's parts log with, and reads all of it as JSON.
func TestOneLogFormat(t *testing.T) {
	out := logTo(t, t.Context(), logOptions{format: "json"}, slog.LevelInfo)
	slog.Info("from slog", "key", "value")
	klog.InfoS("from klog", "key", "value")
	klog.ErrorS(errors.New("reason"), "failed in klog", "key", "value")
	klog.Errorf("from klog's %s", "Errorf")
	klog.V(2).InfoS("not wanted")
	zap.L().Named("etcd").With(zap.String("key", "value")).Error("from zap", zap.Int("number", 1))
	zap.L().Debug("not wanted")
	log.Print("from log")
	var got []string
	for line := range strings.Lines(out.String()) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if entry["time"] == nil {
			t.Errorf("no time: %s", line)
		}
		got = append(got, fmt.Sprint(entry["level"], " ", entry["msg"], " ", entry["key"], " ", entry["err"], " ", entry["number"]))
	}
	want := []string{
		"INFO from slog value <nil> <nil>",
		"INFO from klog value <nil> <nil>",
		"ERROR failed in klog value reason <nil>",
		"ERROR from klog's Errorf <nil> <nil> <nil>",
		"ERROR from zap value <nil> 1",
		"INFO from log <nil> <nil> <nil>",
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestVerbosityReachesKlog(t *testing.T) {
	out := logTo(t, t.Context(), logOptions{verbosity: 2}, slog.LevelWarn)
	klog.V(2).InfoS("wanted")
	klog.V(3).InfoS("too much")
	if s := out.String(); !strings.Contains(s, "msg=wanted") || strings.Contains(s, "too much") {
		t.Errorf("logged: %s", s)
	}
}

// TestStoppedIsNoError: what a cancelled watch reports is no failure, but any other error is, and so is the same error of
// something that should still run.
func TestStoppedIsNoError(t *testing.T) {
	process, end := context.WithCancel(t.Context())
	out := logTo(t, process, logOptions{}, slog.LevelInfo)
	stopped, stop := context.WithCancel(t.Context())
	stop()
	canceled := fmt.Errorf("Get https://127.0.0.1: %w", context.Canceled)
	utilruntime.HandleErrorWithContext(stopped, canceled, "Failed to watch")
	if out.Len() > 0 {
		t.Errorf("logged: %s", out)
	}
	utilruntime.HandleErrorWithContext(t.Context(), canceled, "first")
	utilruntime.HandleErrorWithContext(stopped, errors.New("reason"), "second")
	klog.ErrorS(canceled, "third")
	if s := out.String(); !strings.Contains(s, "first") || !strings.Contains(s, "second") || !strings.Contains(s, "third") {
		t.Errorf("logged: %s", s)
	}
	out.Reset()
	end()
	klog.ErrorS(canceled, "Error retrieving lease lock")
	klog.Errorf("could not sync: %v", canceled)
	klog.ErrorS(fmt.Errorf("not a Status: %v", canceled), "Unhandled Error")
	klog.Error([]error{errors.New("dial tcp 127.0.0.1:6443: connect: connection refused")})
	klog.ErrorS(nil, "Timeout or abort while handling", "URI", "/api")
	utilruntime.HandleError(errors.New("http: Handler timeout"))
	if out.Len() > 0 {
		t.Errorf("logged while the process stops: %s", out)
	}
	klog.ErrorS(errors.New("reason"), "fourth")
	if !strings.Contains(out.String(), "fourth") {
		t.Error("an error while the process stops is not logged")
	}
}

// TestClientThatLeft: a request whose client has left is no error of the server, but one whose time was up is.
func TestClientThatLeft(t *testing.T) {
	out := logTo(t, t.Context(), logOptions{}, slog.LevelInfo)
	left, leave := context.WithCancel(t.Context())
	leave()
	utilruntime.HandleError(fmt.Errorf("apiserver was unable to write a application/json response: %w", http.ErrHandlerTimeout))
	utilruntime.HandleError(fmt.Errorf("apiserver received an error that is not an metav1.Status: %#+v: %v", context.Canceled, context.Canceled))
	utilruntime.HandleErrorWithContext(left, nil, "Post-timeout activity", "path", "/api")
	utilruntime.HandleErrorWithContext(left, nil, "Timeout or abort while handling", "URI", "/api")
	if out.Len() > 0 {
		t.Errorf("logged: %s", out)
	}
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	utilruntime.HandleErrorWithContext(late, nil, "Timeout or abort while handling", "URI", "/api")
	utilruntime.HandleError(errors.New("apiserver was unable to write a application/json response: disk is full"))
	if s := out.String(); !strings.Contains(s, "Timeout or abort") || !strings.Contains(s, "disk is full") {
		t.Errorf("logged: %s", s)
	}
}

func TestLogFlagsAreChecked(t *testing.T) {
	for flag, o := range map[string]logOptions{"--log-format": {format: "xml"}, "--v": {verbosity: 11}} {
		if _, err := o.setup(t.Context(), nil, slog.LevelInfo); err == nil || !strings.HasPrefix(err.Error(), flag) {
			t.Errorf("%+v: %v; want an error that begins with %s", o, err, flag)
		}
	}
}
