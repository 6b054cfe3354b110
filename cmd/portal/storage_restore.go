package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"portal/internal/apiserver"
	"portal/internal/audit"
	"portal/internal/store"
)

func (o *storageOptions) restoreCommand() *cobra.Command {
	var member store.Target
	nodePorts := apiserver.DefaultOptions().NodePorts
	cmd := o.command("restore FILE", "Make a fresh storage from a snapshot", oneFile, func(ctx context.Context, out io.Writer, args []string) error {
		if o.kubeconfig != "" || len(o.etcd.Servers) > 0 {
			return usageError{errors.New("restore writes a data directory: give --data-dir, or --etcd-data-dir for a member of an etcd cluster")}
		}
		if member.Dir == "" && member.Name+member.Cluster != "" || member.Dir != "" && (member.Name == "" || member.Cluster == "" || len(member.PeerURLs) == 0) {
			return usageError{errors.New("--etcd-data-dir, --etcd-name, --etcd-initial-cluster and --etcd-peer-urls: one needs the others")}
		}
		return o.restore(ctx, out, args[0], member, nodePorts)
	})
	cmd.Long = `Make a fresh storage from a snapshot, and check the claims on addresses and ports in it. The server must not run, and
the data directory must hold no storage: rename an old one (DATA-DIR/etcd) first, and keep DATA-DIR/pki, which is in no snapshot.
A member/snap/db from another data directory is accepted too.

The revision is raised far beyond that of the snapshot, so that clients which remember a later one list again.

For an external etcd, run it on each member's machine with --etcd-data-dir and the member's own flags; start etcd on that
directory afterwards.`
	f := cmd.Flags()
	f.StringVar(&nodePorts, "service-node-port-range", nodePorts, "ports of NodePort Services, as given to the server; for the check of claims")
	f.StringVar(&member.Dir, "etcd-data-dir", "", "data directory to make for a member of an etcd cluster, instead of the embedded etcd's")
	f.StringVar(&member.Name, "etcd-name", "", "that member's --name")
	f.StringVar(&member.Cluster, "etcd-initial-cluster", "", "that member's --initial-cluster, e.g. a=https://10.0.0.1:2380,b=https://10.0.0.2:2380")
	f.StringSliceVar(&member.PeerURLs, "etcd-peer-urls", nil, "that member's --initial-advertise-peer-urls")
	return cmd
}

func (o *storageOptions) restore(ctx context.Context, out io.Writer, file string, target store.Target, nodePorts string) error {
	embedded := target.Dir == ""
	if embedded {
		target.Dir = etcdDir(o.localDataDir())
	}
	info, err := store.Restore(file, target)
	if err != nil {
		return err
	}
	result := restored{SnapshotInfo: info, Dir: target.Dir}
	if embedded {
		report, err := o.auditRestored(ctx, target.Dir, nodePorts)
		if err != nil {
			return fmt.Errorf("%s is restored, but its claims could not be checked: %w", target.Dir, err)
		}
		result.Audit = &report
	}
	if o.output == "json" {
		err = printJSON(out, result)
	} else {
		err = printRestored(out, result)
	}
	if err == nil && result.Audit != nil {
		err = remaining(*result.Audit)
	}
	return err
}

// auditRestored checks the claims of a restored storage: a snapshot may be of a storage that somebody had edited.
func (o *storageOptions) auditRestored(ctx context.Context, dir, nodePorts string) (audit.Report, error) {
	opts := o.etcd
	opts.Dir = dir
	attached, err := apiserver.OpenStorage(ctx, opts, o.encryption)
	if err != nil {
		return audit.Report{}, err
	}
	defer attached.Close()
	return attached.Audit(ctx, nodePorts)
}

func printRestored(out io.Writer, r restored) error {
	fmt.Fprintf(out, "%s: restored %d keys of revision %d from %s\n", r.Dir, r.Keys, r.Revision, r.File)
	if !r.Checksum {
		fmt.Fprintln(out, "The file has no checksum: it is a database from a data directory. What its server wrote last may be missing.")
	}
	if r.Audit == nil {
		_, err := fmt.Fprintln(out, "When the cluster is up and a server runs, check the claims with: portal audit")
		return err
	}
	return printAudit(out, *r.Audit)
}
