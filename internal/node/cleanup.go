package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"portal/internal/node/network"
	"portal/internal/node/network/cni"
	"portal/internal/node/network/nat"
	"portal/internal/node/network/peers"
	"portal/internal/node/runtime"
	"portal/internal/node/stream"
	"portal/internal/rmtree"
)

// Leftover is what CleanUp removes: what an agent has left on a machine.
type Leftover struct {
	DataDir, Bridge, CgroupRoot string
	CNIConfDir                  string
	CNIBinDirs                  []string
	// Beside are files and folders of other parts in DataDir that go with it.
	Beside []string
	// Before is called when no Pod runs any more, before files are removed.
	Before func() error
}

// files are what an agent keeps in its data directory. Anything else there is somebody else's.
var files = []string{"pods", "logs", "volumes", "addresses", "cni", imagesDir, stream.CertificateFile, nameFile, lockFile}

// ErrPodsOfOthers says that a data directory is not that of the Pods that are on this machine. Removing rules and interfaces would take the
// network from Pods that go on running.
var ErrPodsOfOthers = errors.New("there are Pods")

// OwnerOf is the Node that a data directory is of, or none if it is none's.
func OwnerOf(dir string) (string, error) {
	data, err := os.ReadFile(filepath.Join(dir, nameFile))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(data)), err
}

// CleanUp ends all Pods of a machine whose agent has ended, and removes what is left of them and of the agent: namespaces, interfaces, rules,
// routes, control groups, and its files. It needs no API. It returns how many Pods there were.
func CleanUp(ctx context.Context, l Leftover) (pods int, err error) {
	owner, err := OwnerOf(l.DataDir)
	if err != nil {
		return 0, err
	}
	if owner == "" {
		if n, err := network.Attached(l.Bridge); err != nil || n > 0 {
			return 0, errors.Join(err, fmt.Errorf("%w: %d are connected to the bridge %s, and %s does not know them", ErrPodsOfOthers, n, l.Bridge, l.DataDir))
		}
	}
	if owner != "" {
		unlock, err := lock(l.DataDir)
		if err != nil {
			return 0, err
		}
		defer unlock()
		if l.CgroupRoot == "" {
			l.CgroupRoot = DefaultCgroupRoot(owner)
		}
	}
	var errs []error
	note := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	if owner != "" {
		pods, err = l.endPods(ctx)
		note("end Pods", err)
	}
	if l.CNIConfDir != "" {
		note("detach Pods", cni.New(cni.Options{ConfDir: l.CNIConfDir, BinDirs: l.CNIBinDirs, Dir: filepath.Join(l.DataDir, "cni")}).Sweep(ctx, nil))
	}
	note("remove the rules of Pods and host ports", nat.New().Remove())
	note("remove routes and tunnels to other nodes", peers.Remove())
	bridge, err := network.NewBridge(network.BridgeOptions{Dir: filepath.Join(l.DataDir, "addresses"), Bridge: l.Bridge})
	if err == nil {
		err = bridge.Remove()
	}
	note("remove the bridge "+l.Bridge, err)
	if l.Before != nil {
		note("remove what other parts left", l.Before())
	}
	if owner == "" || len(errs) > 0 {
		// The files say what is left to do: they stay until all of it is done.
		return pods, errors.Join(errs...)
	}
	return pods, l.removeFiles()
}

func (l Leftover) endPods(ctx context.Context) (int, error) {
	r, err := runtime.New(runtime.Options{Dir: filepath.Join(l.DataDir, "pods"), Logs: filepath.Join(l.DataDir, "logs"), CgroupRoot: l.CgroupRoot})
	if err != nil {
		return 0, err
	}
	pods, err := r.Pods()
	if err != nil {
		return 0, err
	}
	var all sync.WaitGroup
	errs := make([]error, len(pods))
	for i, p := range pods {
		all.Go(func() {
			endContainers(ctx, p)
			errs[i] = p.Remove(ctx)
		})
	}
	all.Wait()
	return len(pods), errors.Join(append(errs, r.Cgroups.Remove(""))...)
}

// Registered says whether the Node has been in the API since Run.
func (a *Agent) Registered() bool {
	select {
	case <-a.registered:
		return true
	default:
		return false
	}
}

// Fresh returns what removes all that an agent makes on a machine until its Node is registered, if the data directory is not a node's yet:
// files, control groups, and the folders that they are in. What was there before stays, and so does a certificate.
func Fresh(l Leftover) (undo func() error) {
	none := func() error { return nil }
	if owner, err := OwnerOf(l.DataDir); owner != "" || err != nil {
		return none
	}
	missing := func(path string) bool {
		_, err := os.Lstat(path)
		return errors.Is(err, os.ErrNotExist)
	}
	var made, folders []string // the innermost first
	for _, name := range files {
		if path := filepath.Join(l.DataDir, name); missing(path) {
			made = append(made, path)
		}
	}
	for _, name := range l.Beside {
		if path := filepath.Join(l.DataDir, name); missing(path) {
			folders = append(folders, path)
		}
	}
	for dir := l.DataDir; missing(dir); dir = filepath.Dir(dir) {
		folders = append(folders, dir)
	}
	groups, err := runtime.FindCgroups(l.CgroupRoot)
	if err != nil || groups.Exist() {
		groups = nil
	}
	return func() error {
		var errs []error
		if groups != nil {
			errs = append(errs, groups.RemoveEmpty())
		}
		for _, path := range made {
			errs = append(errs, rmtree.Remove(path))
		}
		for _, dir := range folders {
			_ = os.Remove(dir) // unless something is in it
		}
		return errors.Join(errs...)
	}
}

// removeFiles removes what is the agent's, and the folder if nothing else is in it.
func (l Leftover) removeFiles() error {
	var errs []error
	for _, name := range slices.Concat(l.Beside, files) {
		errs = append(errs, rmtree.Remove(filepath.Join(l.DataDir, name)))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if rest, err := os.ReadDir(l.DataDir); err == nil && len(rest) > 0 {
		return nil // somebody else's
	}
	return os.Remove(l.DataDir)
}
