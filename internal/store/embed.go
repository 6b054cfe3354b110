package store

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
)

// Options say where etcd is and how it is kept.
type Options struct {
	// Servers are the URLs of an etcd cluster; none means one in this process, with its files in Dir.
	Servers                   []string
	CAFile, CertFile, KeyFile string
	Dir                       string

	// QuotaBytes limits the embedded etcd's file; CompactionInterval is how often old revisions are dropped.
	QuotaBytes         int64
	CompactionInterval time.Duration
	// DialTimeout is how long to wait for an etcd outside to answer at start.
	DialTimeout time.Duration
	// Tracer records what requests ask of etcd; nil: nothing is recorded.
	Tracer trace.TracerProvider

	// commitInterval is how often the embedded etcd commits; 0: as it comes. Tests make it longer.
	commitInterval time.Duration
}

// DefaultOptions keep an embedded etcd of up to 8 GiB and drop revisions older than five minutes.
func DefaultOptions() Options {
	return Options{QuotaBytes: 8 << 30, CompactionInterval: 5 * time.Minute, DialTimeout: 20 * time.Second}
}

const (
	// The embedded etcd is a cluster of one member, whose peer URL nobody listens at.
	memberName     = "portal"
	peerURL        = "http://localhost:2380"
	initialCluster = memberName + "=" + peerURL

	// lockName is the file by which one process holds etcd's directory.
	lockName = "portal.lock"
	// readyTimeout is how long the embedded etcd may take to elect itself and apply its log.
	readyTimeout = time.Minute
)

type embedded struct {
	etcd   *embed.Etcd
	client *clientv3.Client
	lock   *os.File
	disk   *disk
}

// startEmbedded runs an etcd of one member that opens no socket. It lives until stop, whatever becomes of ctx, because
// the API server must be able to write while it drains.
func startEmbedded(ctx context.Context, opts Options) (*embedded, error) {
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("etcd's folder: %w", err)
	}
	lock, err := lockDir(opts.Dir)
	if err != nil {
		return nil, err
	}
	if err := checkFiles(opts.Dir); err != nil {
		_ = lock.Close()
		return nil, err
	}
	disk := &disk{dir: opts.Dir}
	if err := disk.check(); err != nil {
		_ = lock.Close()
		return nil, err
	}
	cfg := embed.NewConfig()
	cfg.Name = memberName
	cfg.Dir = opts.Dir
	cfg.InitialCluster = initialCluster
	cfg.ListenClientUrls, cfg.ListenPeerUrls = nil, nil
	cfg.QuotaBackendBytes = opts.QuotaBytes + reserve(opts.QuotaBytes)
	cfg.BackendBatchInterval = opts.commitInterval
	cfg.MaxTxnOps = embeddedTxnOps
	cfg.MaxRequestBytes = 4 << 20
	// Fewer entries kept in memory for followers, of which there are none.
	cfg.SnapshotCount, cfg.SnapshotCatchUpEntries = snapshotEvery, 500
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(logger().WithOptions(zap.WithFatalHook(disk)))
	etcd, err := guarded(func() (*embed.Etcd, error) { return embed.StartEtcd(cfg) })
	if err != nil {
		_ = lock.Close()
		return nil, &DamagedError{Dir: opts.Dir, Cause: err}
	}
	e := &embedded{etcd: etcd, lock: lock, disk: disk}
	select {
	case <-etcd.Server.ReadyNotify():
	case err := <-etcd.Err():
		e.stop()
		return nil, fmt.Errorf("etcd in %s ended at start: %w", opts.Dir, err)
	case <-time.After(readyTimeout):
		e.stop()
		return nil, &DamagedError{Dir: opts.Dir, Cause: fmt.Errorf("etcd did not become ready within %s", readyTimeout)}
	case <-ctx.Done():
		e.stop()
		return nil, ctx.Err()
	}
	e.client = v3client.New(etcd.Server)
	return e, nil
}

func (e *embedded) stop() {
	e.etcd.Close()
	e.disk.keep(keepSome + walSegment)
	_ = e.lock.Close()
}

// ErrInUse says that another process has the data directory open.
var ErrInUse = errors.New("in use by another server")

// InUseError is ErrInUse with the folder, the file whose lock is held, and by whom if the caller knows.
type InUseError struct{ Dir, Lock, Holder string }

func (e *InUseError) Error() string {
	who := ""
	if e.Holder != "" {
		who = ", " + e.Holder
	}
	return fmt.Sprintf("%s is %v%s: stop it, or give this one a --data-dir of its own", e.Dir, ErrInUse, who)
}

// Unwrap makes it an ErrInUse.
func (e *InUseError) Unwrap() error { return ErrInUse }

// lockDir makes sure that no second server uses the same folder: etcd itself would wait for it in silence.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("etcd's folder: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, &InUseError{Dir: dir, Lock: f.Name()}
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return f, nil
}

// Free says whether a server could open the folder of an embedded etcd. It makes nothing.
func Free(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, lockName)); err != nil {
		return nil // Open says what is wrong with it, if anything is
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	return lock.Close()
}

// dial connects to an etcd cluster and waits until one of its members answers.
func dial(ctx context.Context, opts Options) (*clientv3.Client, error) {
	var config *tls.Config
	if opts.CAFile != "" || opts.CertFile != "" {
		info := transport.TLSInfo{TrustedCAFile: opts.CAFile, CertFile: opts.CertFile, KeyFile: opts.KeyFile}
		var err error
		if config, err = info.ClientConfig(); err != nil {
			return nil, fmt.Errorf("--etcd-cafile, --etcd-certfile, --etcd-keyfile: %w", err)
		}
	}
	dialing := []grpc.DialOption{grpc.WithReadBufferSize(64 << 10)}
	if opts.Tracer != nil {
		dialing = append(dialing, traceCalls(opts.Tracer))
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            opts.Servers,
		TLS:                  config,
		DialTimeout:          opts.DialTimeout,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 5 * time.Second,
		MaxCallSendMsgSize:   4 << 20,
		DialOptions:          dialing,
		Logger:               logger(),
	})
	if err != nil {
		return nil, fmt.Errorf("--etcd-servers: %w", err)
	}
	wait, cancel := context.WithTimeout(ctx, opts.DialTimeout)
	defer cancel()
	if _, err := client.Get(wait, Prefix); err != nil {
		_ = client.Close()
		return nil, fmt.Errorf("no etcd of --etcd-servers %v answers: %w", opts.Servers, err)
	}
	return client, nil
}

// logger logs etcd's errors with the process' logger.
func logger() *zap.Logger {
	return zap.L().Named("etcd").WithOptions(zap.IncreaseLevel(zapcore.ErrorLevel), zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return harmless{core}
	}))
}

// harmless leaves out what etcd calls an error and is none: while it starts, it may try to note the version of its format before
// there is anything to note it in, and does so again some seconds later.
type harmless struct{ zapcore.Core }

func (h harmless) With(fields []zapcore.Field) zapcore.Core { return harmless{h.Core.With(fields)} }

func (h harmless) Check(e zapcore.Entry, to *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if e.Message == "failed to update storage version" {
		return to
	}
	return h.Core.Check(e, to)
}
