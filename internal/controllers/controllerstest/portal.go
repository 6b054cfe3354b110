package controllerstest

import (
	"context"
	"os"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/apiserver"
)

// StartPortal starts Portal's own API server in this process, without controllers, its data in memory if there is a
// file system for that.
func StartPortal() (config *rest.Config, stop func(), err error) {
	parent := "/dev/shm"
	if info, err := os.Stat(parent); err != nil || !info.IsDir() {
		parent = ""
	}
	dir, err := os.MkdirTemp(parent, "portal-api-")
	if err != nil {
		return nil, nil, err
	}
	opts := apiserver.DefaultOptions()
	opts.DataDir, opts.Listen = dir, "127.0.0.1:0"
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	stop = func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
		}
		_ = os.RemoveAll(dir)
	}
	server, err := apiserver.New(ctx, opts)
	if err != nil {
		ended <- nil
		stop()
		return nil, nil, err
	}
	ready := make(chan struct{})
	go func() {
		ended <- server.Run(ctx, apiserver.Hooks{
			Ready: func(context.Context) error { close(ready); return nil },
			Work:  func(ctx context.Context) error { <-ctx.Done(); return nil },
		})
	}()
	select {
	case <-ready:
	case err := <-ended:
		ended <- nil
		stop()
		return nil, nil, err
	}
	config, err = clientcmd.BuildConfigFromFlags("", server.Kubeconfig())
	if err != nil {
		stop()
		return nil, nil, err
	}
	config.QPS, config.WarningHandler = -1, rest.NoWarnings{}
	return config, stop, nil
}
