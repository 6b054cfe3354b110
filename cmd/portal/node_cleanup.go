package main

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/spf13/cobra"

	"portal/internal/identity"
	"portal/internal/instance"
	"portal/internal/join"
	"portal/internal/node"
	"portal/internal/proxy"
)

// balancingDir is where the balancing process has its sockets, in the data directory of a node.
const balancingDir = "balancing"

// besideAgent are the folders of other parts in a node's data directory.
var besideAgent = []string{balancingDir, string(identity.Proxy), string(identity.DNS), string(identity.LB)}

// cleanUp removes what an agent left on this machine: Pods and their network, the rules of its proxy, its balancing process and its files. It
// needs no API.
func (o *nodeOptions) cleanUp(cmd *cobra.Command, log *slog.Logger, options node.Options) error {
	if err := mayRunPods(); err != nil {
		return err
	}
	owner, err := node.OwnerOf(options.DataDir)
	if err != nil {
		return fmt.Errorf("--data-dir: %w", err)
	}
	if cmd.Flags().Changed("name") && owner != "" && owner != options.Name {
		return usageError{fmt.Errorf("--name %s: %s is the data directory of the Node %s", options.Name, options.DataDir, owner)}
	}
	lock, err := instance.Acquire(cmd.Context(), instance.Node+options.Bridge, 0, nil)
	if err != nil {
		return err
	}
	defer lock.Release()
	pods, err := node.CleanUp(cmd.Context(), node.Leftover{
		DataDir: options.DataDir, Bridge: options.Bridge, CgroupRoot: options.CgroupRoot, CNIConfDir: options.CNIConfDir, CNIBinDirs: options.CNIBinDirs,
		Beside: append(join.Files(), besideAgent...),
		Before: func() error { return o.cleanUpParts(cmd, log, options) },
	})
	if errors.Is(err, node.ErrPodsOfOthers) {
		return usageError{fmt.Errorf("--data-dir: %w: name the folder that the node ran with", err)}
	}
	out := cmd.OutOrStdout()
	if owner == "" {
		fmt.Fprintf(out, "%s is no node's data directory: only what is in the kernel was looked for.\n", options.DataDir)
	} else {
		fmt.Fprintf(out, "Ended %d Pods of the Node %s.\n", pods, owner)
	}
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "This machine has nothing left of a node. Settings of the kernel such as net.ipv4.ip_forward stay.")
	if owner != "" {
		fmt.Fprintf(out, "The API still has the Node: portal kubectl delete node %s\n", owner)
	}
	return nil
}

// cleanUpParts removes what the parts beside the agent left. A part that runs by itself in this network namespace keeps what is its own.
func (o *nodeOptions) cleanUpParts(cmd *cobra.Command, log *slog.Logger, options node.Options) error {
	own := func(part string, remove func() error) error {
		lock, err := instance.Acquire(cmd.Context(), part, 0, nil)
		var held *instance.HeldError
		if errors.As(err, &held) {
			fmt.Fprintf(cmd.OutOrStdout(), "Left alone what is %v's.\n", held.Holder)
			return nil
		}
		if err != nil {
			return err
		}
		defer lock.Release()
		return remove()
	}
	o.parts.balancers.dir = filepath.Join(options.DataDir, balancingDir)
	usual := defaultProxyOptions()
	return errors.Join(
		own(instance.LB, func() error { return o.parts.balancers.cleanUp(cmd.Context(), log) }),
		own(instance.Proxy, func() error { return proxy.Cleanup(cmd.Context(), proxyModes(&usual)) }),
	)
}
