package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

// logOptions choose how much a long-running command logs, and in which format.
type logOptions struct {
	verbosity int
	format    string
}

func (l *logOptions) addFlags(f *pflag.FlagSet) {
	f.IntVarP(&l.verbosity, "v", "v", 0, "how much to log: 0 what an administrator must know, up to 10 for every detail")
	f.StringVar(&l.format, "log-format", "text", "format of log lines: text (key=value) or json")
}

// setup sends everything that this process logs to out in one format: Portal's own lines (slog), Kubernetes' libraries'
// (klog), etcd's (zap) and the standard library's. Lines below the level are dropped unless -v asks for more; so are errors
// that follow only from the end of ctx, which stops the process.
func (l *logOptions) setup(ctx context.Context, out io.Writer, level slog.Level) (*slog.Logger, error) {
	if l.verbosity < 0 || l.verbosity > 10 {
		return nil, fmt.Errorf("--v %d: must be from 0 to 10", l.verbosity)
	}
	if l.verbosity > 0 {
		level = slog.Level(-l.verbosity) // what klog makes of its own verbosity
	}
	options := &slog.HandlerOptions{Level: level}
	var handler slog.Handler
	switch l.format {
	case "", "text":
		handler = slog.NewTextHandler(out, options)
	case "json":
		handler = slog.NewJSONHandler(out, options)
	default:
		return nil, fmt.Errorf("--log-format %q: must be text or json", l.format)
	}
	var verbosity klog.Level
	if err := verbosity.Set(fmt.Sprint(l.verbosity)); err != nil {
		return nil, err
	}
	handler = stopAware{handler, ctx}
	log := slog.New(handler)
	slog.SetDefault(log)
	klog.SetSlogLogger(log)
	zap.ReplaceGlobals(zap.New(zapCore{handler}))
	utilruntime.ErrorHandlers[0] = func(part context.Context, err error, msg string, keysAndValues ...any) {
		log := klog.FromContext(part)
		if ctx.Err() != nil || part.Err() != nil && errors.Is(err, context.Canceled) || unread(part, err, msg) {
			// These are errors after which a part tries again. A part that stops does not, and nothing is wrong. Nor is
			// it when a client leaves before it has its answer.
			log.V(1).Info(msg, append(keysAndValues, "err", err)...)
			return
		}
		log.Error(err, msg, keysAndValues...)
	}
	return log, nil
}

// unread says whether an error is the API server's that a request ended before its answer was written, and no more than that. When time
// was up the answer was another, and is logged as such.
func unread(part context.Context, err error, msg string) bool {
	if err == nil {
		return abandoned[msg] && errors.Is(part.Err(), context.Canceled)
	}
	text := err.Error()
	return strings.HasPrefix(text, "apiserver ") && (strings.HasSuffix(text, ": "+http.ErrHandlerTimeout.Error()) || endsCanceled(text))
}

// unhelpful are errors of libraries that name neither the object nor the key. Whoever hit them gets an error that does.
var unhelpful = map[string]bool{
	"failed to decrypt data": true, "failed to encrypt data": true,
	// The client gets a 401, and the audit log has it: whoever reaches the port could fill the log.
	"Unable to authenticate the request": true,
}

// stopAware drops errors of requests that were cut off because the process stops, and, unless details were asked for, unhelpful
// ones.
type stopAware struct {
	slog.Handler
	stop context.Context
}

func (h stopAware) Handle(ctx context.Context, r slog.Record) error {
	if unhelpful[r.Message] && !h.Enabled(ctx, slog.Level(-1)) {
		return nil
	}
	if h.stop.Err() != nil {
		canceled := r.Level >= slog.LevelError && (abandoned[r.Message] || cutOff(r.Message))
		r.Attrs(func(a slog.Attr) bool {
			err, _ := a.Value.Any().(error)
			canceled = canceled || err != nil && cutOff(err.Error())
			return !canceled
		})
		if canceled {
			return nil
		}
	}
	return h.Handler.Handle(ctx, r)
}

// abandoned are what the API server logs about requests whose client has left: of its own process, when that stops.
var abandoned = map[string]bool{"Timeout or abort while handling": true, "Post-timeout activity": true}

// endsCanceled says whether a text ends with a cancelled request's error: some libraries write it into theirs.
func endsCanceled(text string) bool { return strings.HasSuffix(text, ": "+context.Canceled.Error()) }

// cutOff says whether a text has the error of a request that can't end well any more while the process stops: it was cancelled, or the
// server that it asks, which may be this process', is gone.
func cutOff(text string) bool {
	for _, part := range []string{context.Canceled.Error(), unix.ECONNREFUSED.Error(), net.ErrClosed.Error(), io.ErrUnexpectedEOF.Error()} {
		if strings.Contains(text, part) {
			return true
		}
	}
	return false
}

func (h stopAware) WithAttrs(attrs []slog.Attr) slog.Handler {
	return stopAware{h.Handler.WithAttrs(attrs), h.stop}
}

func (h stopAware) WithGroup(name string) slog.Handler {
	return stopAware{h.Handler.WithGroup(name), h.stop}
}

// zapCore hands zap's entries to a slog handler.
type zapCore struct{ slog.Handler }

func (c zapCore) Enabled(level zapcore.Level) bool {
	return c.Handler.Enabled(context.Background(), slogLevel(level))
}

func (c zapCore) With(fields []zapcore.Field) zapcore.Core {
	return zapCore{c.WithAttrs(slogAttrs(fields))}
}

func (c zapCore) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(entry.Level) {
		return checked.AddCore(entry, c)
	}
	return checked
}

func (c zapCore) Write(entry zapcore.Entry, fields []zapcore.Field) error {
	record := slog.NewRecord(entry.Time, slogLevel(entry.Level), entry.Message, 0)
	if entry.LoggerName != "" {
		record.AddAttrs(slog.String("logger", entry.LoggerName))
	}
	record.AddAttrs(slogAttrs(fields)...)
	return c.Handle(context.Background(), record)
}

func (c zapCore) Sync() error { return nil }

func slogLevel(level zapcore.Level) slog.Level {
	switch {
	case level >= zapcore.ErrorLevel:
		return slog.LevelError
	case level == zapcore.WarnLevel:
		return slog.LevelWarn
	case level == zapcore.InfoLevel:
		return slog.LevelInfo
	}
	return slog.LevelDebug
}

func slogAttrs(fields []zapcore.Field) []slog.Attr {
	var out []slog.Attr
	for _, f := range fields {
		encoder := zapcore.NewMapObjectEncoder()
		f.AddTo(encoder)
		for key, value := range encoder.Fields {
			out = append(out, slog.Any(key, value))
		}
	}
	return out
}
